"""What `benchmarks/step.py` measures is what it says: the same training, and only ours reads nothing."""

import pytest
import torch

from benchmarks import step

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["heads", "full"])
def test_lerobots_update_and_ours_train_alike(mode, monkeypatch):
    monkeypatch.setattr(step, "LOSS_STEPS", 4)
    found = step.losses(mode, CPU, bf16=False, rows=4)
    assert len(set(found["ours"])) == 4
    assert found["largest_relative_difference"] < 1e-5


def test_only_ours_reads_nothing_from_the_device(monkeypatch):
    monkeypatch.setattr(step, "MAX_STEPS", 1)
    monkeypatch.setattr(step, "WARM_UP_STEPS", 1)
    reads = {}
    for name, make in step.CONTENDERS.items():
        columns = [step.prepared_rows(step.policy_config(CPU), 2, seed) for seed in range(2)]
        sample = step.measure(make(step.policy_config(CPU), "heads", CPU, bf16=False), columns, 1, 0.0, CPU)
        assert sample["rows_per_step"] == 2 and sample["steps"] == 1
        assert sample["samples_per_s"] == pytest.approx(2 / sample["step_s"])
        reads[name] = sample["host_reads_per_step"]
    assert reads["ours"] == 0 and reads["naive"] > 0 and reads["lerobot"] >= 2
