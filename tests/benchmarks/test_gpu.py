"""The command for the day that there is a GPU, on a day that there is none: all of it, tiny."""

import json
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from benchmarks import gpu
from vla_finetuning.config import TrainMode
from vla_finetuning.training.memory import GIB, StepMemory

ORDER = ("machine", "attention", "audit_syncs", "tests", "plan", "step", "checkpoint", "prediction", "live data", "run")


@pytest.mark.ray
@pytest.mark.slow  # two worker groups and a data engine
def test_all_of_it_runs_on_a_cpu(no_ray_cluster, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert gpu.main(["--tiny", "--minutes=30", f"--json={path}"]) == 0, path.read_text()
    found = json.loads(path.read_text())
    kinds = list(dict.fromkeys(name.split(",")[0] for name in found))
    assert kinds == list(ORDER)
    assert found["attention"]["result"]["chosen"] == "sdpa"
    assert found["audit_syncs"]["result"]["waits"] == []
    for mode in get_args(TrainMode):
        for who in ("ours, 1 rows", "ours, 2 rows", "lerobot, 2 rows", "naive, 2 rows"):
            assert found[f"step, {mode}, {who}"]["result"]["samples_per_s"] > 0
        assert "only GPUs gain" in found[f"step, {mode}, ours, compiled"]["left_out"]
    assert found["checkpoint"]["result"]["same_bits"] is True
    assert found["run"]["result"]["statuses"] == [0, 0] and found["run"]["result"]["steps"] == [2, 4]
    told = capsys.readouterr().out
    assert "host waits between log steps: 0, predicted 0" in told and "failed: nothing" in told


def results(path, minutes=1.0):
    return gpu.Results(path, minutes, {"step": 1.0, "run": 100.0})


def test_what_fails_is_recorded_and_the_rest_is_measured(tmp_path):
    path = tmp_path / "found.json"
    taking = results(path)

    def fails():
        # What came before is there already, whatever happens now.
        assert json.loads(path.read_text())["first"]["result"] == 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert taking.take("first", "step", lambda: 1) == 1
    assert taking.take("second", "step", fails) is None
    assert taking.take("third", "step", lambda: 3) == 3
    found = json.loads(path.read_text())
    assert (
        found["second"]["error"] == "OutOfMemoryError: CUDA out of memory" and "fails" in found["second"]["traceback"]
    )
    assert found["third"]["result"] == 3


def test_what_does_not_fit_into_the_minutes_is_left_out(tmp_path):
    taking = results(tmp_path / "found.json")
    assert taking.take("long", "run", lambda: pytest.fail("it was begun")) is None
    assert taking.found["long"] == {"left_out": "takes about 100 s, and 60 s are left"}
    assert taking.take("short", "step", lambda: 2) == 2


def test_a_contender_goes_no_further_than_its_memory(tmp_path):
    taking, made = results(tmp_path / "found.json"), []

    def make():
        made.append(1)
        return object()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "measure_step", lambda _, device, mode, size, seconds: {"rows": size} if size < 4 else 1 / 0)
        gpu._at_sizes(
            taking, "step, full, ours", "step", make, "full", {1: 10, 4: 40, 8: 80}, torch.device("cpu"), gpu.TINY
        )
    assert list(taking.found) == ["step, full, ours, 1 rows", "step, full, ours, 4 rows"] and made == [1]
    assert taking.found["step, full, ours, 1 rows"]["result"] == {"rows": 1, "planned_bytes": 10}


def test_sizes_are_those_that_the_plan_has_room_for(monkeypatch):
    """With what a GPU holds beside the step, as a run of the program is refused or not."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=20 * GIB))
    monkeypatch.setattr(gpu.step, "policy_config", lambda device: None)
    monkeypatch.setattr(gpu.step, "planned", lambda config, mode, size, *_: StepMemory(0, 0, 0, 0, size * GIB, 4 * GIB))
    assert gpu.fitting("full", (1, 8, 16, 32), torch.device("cuda"), True) == {n: n * GIB for n in (1, 8, 16)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=19 * GIB))
    assert list(gpu.fitting("full", (1, 8, 16, 32), torch.device("cuda"), True)) == [1, 8]


def test_predictions_stand_beside_measurements():
    row = {"samples_per_s": 27.04, "mfu": 0.412, "peak_memory_bytes": 51 * 2**30, "planned_bytes": 50 * 2**30}
    found = {
        "step, full, ours, 8 rows": {"result": row},
        "step, full, naive, 8 rows": {"error": "OutOfMemoryError: no\nmore", "traceback": ""},
        "audit_syncs": {"result": {"waits": ["a value is read at vla.py:1, 2 times"]}},
    }
    told = gpu.table(found).splitlines()
    assert " ".join(told[1].split()) == "step, full, ours, 8 rows 27.0 30 41.2% 45% 51.00 GiB 50.00 GiB 1.020"
    assert " ".join(told[2].split()) == "step, full, naive, 8 rows OutOfMemoryError: no"
    assert told[3:] == ["host waits between log steps: 1, predicted 0", "failed: step, full, naive, 8 rows"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_how_to_do_without(tmp_path, capsys):
    assert gpu.main([f"--json={tmp_path / 'found.json'}"]) == 2
    assert "--tiny runs it on a CPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
