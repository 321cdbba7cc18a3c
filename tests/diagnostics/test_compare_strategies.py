"""Which strategies are compared; `tests/training/test_parallel.py` compares them."""

from dataclasses import replace

from diagnostics import compare_strategies
from diagnostics.compare_strategies import Spreading, StrategiesReport
from diagnostics.report import Environment
from tests import in_process
from vla_finetuning.training.memory import GIB, StepMemory


def test_a_strategy_that_does_not_fit_by_its_plan_is_left_out(run, monkeypatch):
    """Of a GPU that runs out of memory nothing would be left, nor of what was measured before."""
    run = replace(run, config=replace(run.config, scaling=replace(run.config.scaling, num_workers=2)))

    def planned_memory(policy, frames):
        gib = {"ddp": 80, "fsdp2": 40, "fsdp2_reshard": 30, "hsdp": 40}
        return lambda config: StepMemory(0, 0, 0, 0, gib[config.scaling.strategy] * GIB, 4 * GIB)

    def measure(run, strategy, *_):
        assert strategy != "ddp", "out of memory"
        steps = {"step_s": [0.5, 0.5], "losses": [1.0, 1.0]}
        return Spreading(strategy=strategy, state_bytes=GIB, peak_bytes=20 * GIB, **steps)

    monkeypatch.setattr(compare_strategies, "planned_memory", planned_memory)
    monkeypatch.setattr(compare_strategies, "_measure", measure)
    monkeypatch.setattr(compare_strategies, "_gpu_bytes", lambda device: 79 * GIB)
    found = compare_strategies.compare(run, ["ddp", "fsdp2", "fsdp2_reshard"], 2, in_process.Rank())
    assert [s.planned_bytes // GIB for s in found.spreadings] == [84, 44, 34]
    report = StrategiesReport(
        environment=Environment.here(),
        config=run.config.to_json(),
        world_size=1,
        global_batch_size=4,
        ranks=[found],
    )
    rows = {line.split()[0]: line.split() for line in compare_strategies.table(report).splitlines() if line}
    assert " ".join(rows["ddp"]) == "ddp - - - - 84.00 left out -"
    assert " ".join(rows["fsdp2"]) == "fsdp2 0.5000 8.0 1.00x 1.0000 44.00 20.00 0.0e+00"
    assert [title.split(":")[0] for title, _ in compare_strategies.charts(report)] == ["fsdp2", "fsdp2_reshard"]
