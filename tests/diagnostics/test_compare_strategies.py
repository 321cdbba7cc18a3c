"""Which strategies are compared; `tests/training/test_parallel.py` compares them."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from diagnostics import compare_strategies
from diagnostics.compare_strategies import RankStrategies, Spreading, StrategiesReport
from diagnostics.report import Environment
from tests import in_process
from vla_finetuning.training.memory import GIB, StepMemory


def test_strategy_beyond_planned_memory_is_left_out(run, monkeypatch):
    """Running out of memory would also lose what was measured before."""
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
    measured = compare_strategies.compare(run, ["ddp", "fsdp2", "fsdp2_reshard"], 2, in_process.Rank())
    assert [s.planned_bytes // GIB for s in measured.spreadings] == [84, 44, 34]
    report = StrategiesReport(
        environment=Environment.here(),
        config=run.config.to_json(),
        world_size=1,
        global_batch_size=4,
        ranks=[measured],
    )
    rows = {line.split()[0]: line.split() for line in compare_strategies.table(report).splitlines() if line}
    assert " ".join(rows["ddp"]) == "ddp - - - - 84.00 left out -"
    assert " ".join(rows["fsdp2"]) == "fsdp2 0.5000 8.0 1.00x 1.0000 44.00 20.00 0.0e+00"
    assert [title.split(":")[0] for title, _ in compare_strategies.charts(report)] == ["fsdp2", "fsdp2_reshard"]


def test_measured_step_uses_attention_kernel_of_run(run, monkeypatch):
    monkeypatch.setattr(compare_strategies, "build_model", lambda *_: ("loss", torch.bfloat16))
    monkeypatch.setattr(compare_strategies, "spread", lambda *_, **__: "model")
    monkeypatch.setattr(compare_strategies, "build_optimizer", lambda *_: "optimizer")
    check = mock.Mock()
    monkeypatch.setattr(compare_strategies, "check_attention", check)
    monkeypatch.setattr(compare_strategies, "train_step", mock.Mock(side_effect=InterruptedError))
    worker, schedule = in_process.Rank(), in_process.schedule(run, 0, 1)
    for strategy in ("ddp", "fsdp2"):
        with pytest.raises(InterruptedError):
            compare_strategies._measure(run, strategy, 1, [], schedule, worker, None)
    assert [call.args[1:] for call in check.call_args_list] == 2 * [("loss", worker.device, torch.bfloat16)]


def test_nonfinite_losses_survive_serialisation():
    spreading = Spreading(strategy="ddp", step_s=[0.5], losses=[math.nan, math.inf], state_bytes=0, peak_bytes=None)
    rank = RankStrategies(rank=0, environment=Environment.here(), spreadings=[spreading])
    losses = RankStrategies.model_validate_json(rank.model_dump_json()).spreadings[0].losses
    assert math.isnan(losses[0]) and losses[1] == math.inf
