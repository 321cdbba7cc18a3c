"""benchmarks/gpu.py on a CPU with tiny sizes: sections, their limits, and the table of results."""

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, step
from benchmarks.sections import Results, Section, run_sections
from tests.benchmarks import planted
from vla_finetuning.training.memory import GIB, StepMemory

CPU = torch.device("cpu")
ORDER = ("machine", "run", "step", "checkpoint", "prediction", "live data", "attention", "audit_syncs", "tests")


@pytest.mark.ray
@pytest.mark.slow  # 20 processes, two worker groups and a data engine
@pytest.mark.timeout(3600)
def test_gpu_benchmark_runs_on_a_cpu(no_ray_cluster, tmp_path, capfd, monkeypatch):
    path = tmp_path / "found.json"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # where nothing answers: any request fails
    assert gpu.main(["--tiny", "--minutes=50", f"--json={path}"]) == 0, path.read_text()
    found = json.loads(path.read_text())
    kinds = list(dict.fromkeys(name.split(",")[0] for name in found))
    assert kinds == list(ORDER)
    modes = list(dict.fromkeys(name.split(", ")[1] for name in found if name.startswith("step")))
    assert modes == ["full", "expert", "heads"]
    assert found["attention"]["result"]["chosen"] == "sdpa"
    assert found["audit_syncs"]["result"]["waits"] == []
    for mode in modes:
        for variant in ("ours, 1 rows", "ours, 2 rows", "ours, compiled, 1 rows", "lerobot, 2 rows", "naive, 2 rows"):
            assert found[f"step, {mode}, {variant}"]["result"]["samples_per_s"] > 0
        assert found[f"step, {mode}, ours, compiled, 2 rows"]["result"]["compiled_calls_per_step"] > 0
    assert found["prediction, 2 rows"]["result"]["chunk"][0] == 2
    assert found["checkpoint"]["result"]["same_bits"] is True
    assert found["run"]["result"]["steps"] == [2, 4]
    assert "model.safetensors" in found["run"]["result"]["exported"]
    text = capfd.readouterr().out
    assert "host waits between log steps: 0, predicted 0" in text and "failed: nothing" in text


def test_own_ray_ignores_ray_address(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with gpu.own_ray():
        assert "RAY_ADDRESS" not in os.environ and os.listdir(os.environ["RAY_TMPDIR"]) == []
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1"


# ---- sections -------------------------------------------------------------------------------------------------------


def section(name, about_s=0.0, limit_s=120.0):
    return Section(name, partial(getattr(planted, name)), about_s, limit_s)


@pytest.mark.gate
def test_crash_of_a_section_is_recorded_and_others_complete(tmp_path, capfd):
    path = tmp_path / "found.json"
    names = ("out_of_memory", "crash", "hang", "fine")
    found = run_sections([section(name, limit_s=8.0 if name == "hang" else 120.0) for name in names], path, 10.0)
    assert found == json.loads(path.read_text())
    assert found["a small one"]["result"] == 1
    assert found["a large one"]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert "in out_of_memory" in found["out_of_memory"]["traceback"]  # the sticky error after it ends the process
    assert found["out_of_memory"]["error"] == "ChildProcessError: ended with status 1"
    assert found["crash"]["error"] == "ChildProcessError: ended by SIGSEGV"
    assert "in crash" in found["crash"]["traceback"]
    assert found["before the hang"]["result"] == 2
    assert found["hang"]["error"] == "TimeoutError: not done after 8 s" and "in hang" in found["hang"]["traceback"]
    assert found["fine"]["result"] == 3
    stat = Path(f"/proc/{found['child of the hang']['result']}/stat")
    # What it had started is gone with it, or waits for its parent to ask how it ended.
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.gate
def test_sections_end_within_the_time_limit(tmp_path):
    started = time.monotonic()
    found = run_sections([section("hang", limit_s=600.0), section("fine")], tmp_path / "found.json", 6 / 60)
    assert time.monotonic() - started < 60  # not 600
    assert found["hang"]["error"].startswith("TimeoutError: not done after 6 s")
    assert found["fine"]["left_out"] == "takes about 0 s, and 0 s are left"


def results(path, seconds=60.0):
    return Results(path, time.monotonic() + seconds)


def test_measurement_longer_than_the_remaining_time_is_skipped(tmp_path):
    measured = results(tmp_path / "found.json")
    assert measured.take("long", 100.0, lambda: pytest.fail("it was begun")) is None
    assert measured.entries["long"] == {"left_out": "takes about 100 s, and 60 s are left"}
    assert measured.take("short", 1.0, lambda: 2) == 2


@pytest.mark.gate
def test_contender_skips_batches_beyond_planned_memory(tmp_path, monkeypatch):
    measured, made = results(tmp_path / "found.json"), []
    monkeypatch.setattr(gpu, "make_contender", lambda *_: made.append(1))
    monkeypatch.setattr(gpu, "planned_bytes", lambda mode, size, device: {1: 10, 2: 20}.get(size))
    monkeypatch.setattr(step, "flops_per_sample", lambda *_, **__: None)
    monkeypatch.setattr(step, "measure", lambda _, columns, *rest: {"samples_per_s": len(columns[0]["action"])})
    gpu.steps(measured, mode="full", name="ours", sizes=replace(gpu.TINY, batch_sizes=(1, 2, 4)), device=CPU)
    assert list(measured.entries) == ["step, full, ours, 1 rows", "step, full, ours, 2 rows"] and made == [1]
    assert measured.entries["step, full, ours, 1 rows"]["result"] == {
        "samples_per_s": 1,
        "mfu": None,
        "planned_bytes": 10,
    }
    monkeypatch.setattr(step, "measure", lambda *_: 1 / 0)
    gpu.steps(measured, mode="full", name="naive", sizes=replace(gpu.TINY, peers_at=(1, 2)), device=CPU)
    assert [name for name in measured.entries if "naive" in name] == ["step, full, naive, 1 rows"]


def test_out_of_memory_of_a_peer_is_no_failure(tmp_path, monkeypatch):
    """The plan of ours has; a peer grows until then."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    measured = results(tmp_path / "found.json")
    monkeypatch.setattr(gpu, "make_contender", full)
    monkeypatch.setattr(gpu, "planned_bytes", lambda *_: 10)
    for name in ("naive", "ours"):
        gpu.steps(measured, mode="full", name=name, sizes=gpu.TINY, device=CPU)
    assert gpu.table(measured.entries).splitlines()[1:] == [
        "step, full, naive, 2 rows  does not fit in the memory",
        "step, full, ours, 1 rows  OutOfMemoryError: CUDA out of memory",
        "host waits between log steps: not known, predicted 0",
        "failed: step, full, ours, 1 rows",
    ]


def test_only_flag_selects_sections(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(gpu, "run_sections", lambda sections, path, minutes: ran.extend(sections) or {})
    argv = ["--tiny", f"--json={tmp_path / 'new' / 'found.json'}", "--only"]
    assert gpu.main([*argv, "steps, full", "tests"]) == 0 and (tmp_path / "new").is_dir()
    contenders = ("ours", "ours, compiled", "lerobot", "naive")
    assert [section.name for section in ran] == [*(f"steps, full, {name}" for name in contenders), "tests"]
    chosen = ran[-1].measure.keywords["cells"][0][1].keywords["chosen"]
    assert chosen == [str(gpu.ROOT / "tests" / "test_util.py"), "-m", "gpu"]
    with pytest.raises(SystemExit):
        gpu.main([*argv, "full"])
    assert "--only full: no section begins so; they are machine; run; steps, full, ours; " in capsys.readouterr().err
    (tmp_path / "new" / "found.json").write_text("{}")
    with pytest.raises(SystemExit):
        gpu.main([*argv, "tests"])
    assert "has the results of an earlier call; name another file" in capsys.readouterr().err


def test_failed_benchmark_run_is_not_resumed(monkeypatch):
    commands = []

    def run(command, check, **_):
        commands.append(command)
        raise gpu.subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    with pytest.raises(gpu.subprocess.CalledProcessError):
        gpu.whole_run(CPU, 4)
    assert len(commands) == 1


def test_batch_sizes_are_limited_by_planned_memory(monkeypatch):
    """With what a GPU holds beside the step, as a run of the program is refused or not."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=20 * GIB))
    monkeypatch.setattr(step, "planned", lambda config, mode, size, *_: StepMemory(0, 0, 0, 0, size * GIB, 4 * GIB))
    assert gpu.planned_bytes("full", 16, torch.device("cuda")) == 16 * GIB
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=19 * GIB))
    assert gpu.planned_bytes("full", 16, torch.device("cuda")) is None


@pytest.mark.gate
def test_failing_gpu_tests_are_a_benchmark_error(tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert 1 == 2\n")
    measured = results(tmp_path / "found.json")
    measured.take("tests", 0.0, partial(gpu.gpu_tests, CPU, chosen=[str(tmp_path / "test_it.py"), "-c", os.devnull]))
    error = measured.entries["tests"]["error"]
    assert error.startswith("RuntimeError: pytest ended with status 1\n") and "assert 1 == 2" in error
    assert gpu.table(measured.entries).endswith("failed: tests")


def test_checkpoint_with_changed_bits_is_a_benchmark_error(tmp_path, monkeypatch):
    read = gpu.checkpoints.load_checkpoint

    def damaged(folder, named, state):
        read(folder, named, state)
        next(iter(named.values())).view(-1)[0] += 1

    monkeypatch.setattr(gpu.checkpoints, "load_checkpoint", damaged)
    with pytest.raises(RuntimeError, match="1 tensors were read back with other bits, e.g. trainable "):
        gpu.checkpoint(CPU)


def test_benchmark_table_shows_planned_and_measured_values():
    row = {"samples_per_s": 27.04, "mfu": 0.412, "peak_memory_bytes": 51 * 2**30, "planned_bytes": 50 * 2**30}
    found = {
        "step, full, ours, 8 rows": {"result": row},
        "step, full, naive, 8 rows": {"error": "OutOfMemoryError: no\nmore", "traceback": ""},
        "audit_syncs": {"result": {"waits": ["a value is read at vla.py:1, 2 times"]}},
    }
    text = gpu.table(found).splitlines()
    assert " ".join(text[1].split()) == "step, full, ours, 8 rows 27.0 30 41.2% 45% 51.00 50.00 1.020"
    assert " ".join(text[2].split()) == "step, full, naive, 8 rows OutOfMemoryError: no"
    assert text[3:] == ["host waits between log steps: 1, predicted 0", "failed: step, full, naive, 8 rows"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_gpu_is_reported_with_the_tiny_flag(tmp_path, capsys):
    assert gpu.main([f"--json={tmp_path / 'found.json'}"]) == 2
    assert "--tiny runs it on a CPU" in capsys.readouterr().err and not list(tmp_path.iterdir())
