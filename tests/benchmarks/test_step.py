"""benchmarks/step.py: its updates equal LeRobot's, and only ours reads nothing from the device."""

import argparse
import itertools
from unittest import mock

import pytest
import torch

from benchmarks import step, updates
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training import model

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["heads", "full"])
def test_update_equals_lerobots(mode):
    """Over the same rows, noise and times, from the same weights."""
    losses = {}
    for name in ("lerobot", "ours"):
        config = updates.policy_config(CPU)
        contender = updates.CONTENDERS[name](config, mode, CPU, bf16=False)
        columns = [updates.prepared_rows(config, 4, seed) for seed in range(2)]
        batches = contender.feed(itertools.cycle([contender.stored(c) for c in columns]))
        losses[name] = []
        for number in range(4):
            noise, flow_time = family_of(config).draw(config, 4, 0, number, CPU)
            if name == "lerobot":
                core = contender.accelerator.unwrap_model(contender.policy).model
                core.sample_noise, core.sample_time = lambda *_: noise, lambda *_: flow_time  # noqa: B023
            losses[name].append(float(contender.step(batches, 1, number)))
    assert len(set(losses["ours"])) == 4
    assert losses["ours"] == pytest.approx(losses["lerobot"], rel=1e-5)


@pytest.mark.gate
def test_only_own_update_reads_nothing_from_the_device(monkeypatch):
    monkeypatch.setattr(step, "MAX_STEPS", 1)
    monkeypatch.setattr(step, "WARM_UP_STEPS", 1)
    reads = {}
    for name, make in updates.CONTENDERS.items():
        columns = [updates.prepared_rows(updates.policy_config(CPU), 2, seed) for seed in range(2)]
        sample = step.measure(make(updates.policy_config(CPU), "heads", CPU, bf16=False), columns, 1, 0.0, CPU)
        assert sample["rows_per_step"] == 2 and sample["steps"] == 1
        assert sample["samples_per_s"] == pytest.approx(2 / sample["step_s"])
        reads[name] = sample["host_reads_per_step"]
    assert reads["ours"] == 0 and reads["naive"] > 0 and reads["lerobot"] >= 2


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch._dynamo.reset()


def ours_compiled():
    """A contender, and batches for it."""
    config = updates.policy_config(CPU)
    with mock.patch.multiple(model, why_not=lambda device: None, Compiler=lambda: Compiler("eager")):
        ours = updates.Ours(config, "heads", CPU, bf16=False, compiled=True)
    return ours, [updates.prepared_rows(config, 2, 0)]


@pytest.mark.gate
def test_compiled_benchmark_fails_if_nothing_compiled_ran(fresh_dynamo, monkeypatch):
    monkeypatch.setattr(step, "MAX_STEPS", 2)
    ours, columns = ours_compiled()
    assert step.measure(ours, columns, 1, 0.0, CPU)["compiled_calls_per_step"] == 8

    ours, columns = ours_compiled()
    never_called = pytest.raises(updates.NotCompiledError, match="compiled layers were not called in 2 steps")
    with torch.compiler.set_stance("force_eager"), never_called:
        step.measure(ours, columns, 1, 0.0, CPU)


@pytest.mark.gate
def test_compiled_benchmark_fails_on_late_compilation(fresh_dynamo, monkeypatch):
    monkeypatch.setattr(step, "MAX_STEPS", 2)
    ours, columns = ours_compiled()
    longer = updates.prepared_rows(ours.config, 3, 0)  # its first turn comes after the warm-up
    with pytest.raises(updates.NotCompiledError, match="4 graphs were compiled in 2 steps"):
        step.measure(ours, [*columns * 3, longer, *columns], 1, 0.0, CPU)


@pytest.mark.parametrize("mode", ["heads", "full"])
def test_own_contender_has_the_planned_weights(mode):
    """The weights that the plan of such a run counts."""
    config = updates.policy_config(CPU)
    ours = updates.Ours(config, mode, CPU, bf16=True)
    needed = step.planned(config, mode, 2, 2, bf16=True)
    assert sum(t.nbytes for t in (*ours.loss.parameters(), *ours.loss.buffers())) == needed.weights


def test_out_of_memory_contender_does_not_stop_the_others(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "CONTENDERS", {"naive": full, "ours": lambda *_: "ours"})
    monkeypatch.setattr(step, "measure_at", lambda *_: {"ms_per_sample": 1.0})
    options = argparse.Namespace(modes="full", batch_sizes="1,8", rounds=2, global_batch=8, seconds=0.0)
    cells = step.compare(options, CPU)["full"]
    assert cells["naive"] == {} and {size: len(samples) for size, samples in cells["ours"].items()} == {1: 2, 8: 2}


def test_ratios_compare_equal_and_best_batches():
    def cell(ms, cpu_ms):
        return [
            {"ms_per_sample": ms, "cpu_ms_per_sample": cpu_ms, "samples_per_s": 1000 / ms, "host_reads_per_step": 0}
        ]

    cells = {
        "naive": {},
        "lerobot": {1: cell(9.0, 8.0), 8: cell(6.0, 4.0)},
        "ours": {1: cell(3.0, 2.0), 8: cell(1.0, 1.0)},
    }
    result = step.summary(cells, "expert", CPU)
    assert result["ours_is_faster_than"] == {
        "lerobot, each at its best": 6.0,
        "lerobot, both at 1": 3.0,
        "lerobot, both at 1, in CPU time": 4.0,
        "lerobot, both at 8": 6.0,
        "lerobot, both at 8, in CPU time": 4.0,
    }
    assert "ours is 6.00x as fast as lerobot, both at 8" in step.table("expert", {**result, "contenders": {}})
