"""benchmarks/serving.py compares equal devices; the folder of its result exists before it measures."""

import sys

import pytest

from benchmarks import plan, serving
from vla_finetuning.options import command_line


def test_serving_benchmark_uses_one_device(monkeypatch, tmp_path):
    commands = []

    def stop(command, **_):
        commands.append(command)
        raise InterruptedError

    monkeypatch.setattr(command_line, "parse_serve", stop)
    monkeypatch.setattr(serving.subprocess, "Popen", stop)
    for measure in (lambda: serving.measure(tmp_path, 1, 1.0), serving.server(tmp_path, 1, 1).__enter__):
        with pytest.raises(InterruptedError):
            measure()
    assert len(commands) == 2 and all("--use_gpu=false" in command for command in commands)


@pytest.mark.parametrize(("benchmark", "measures"), [(serving, "measure"), (plan, "make")])
def test_benchmark_creates_result_folder_before_measuring(monkeypatch, tmp_path, benchmark, measures):
    def measure(*_):
        assert (tmp_path / "new").is_dir()
        raise InterruptedError

    monkeypatch.setattr(benchmark, measures, measure)
    monkeypatch.setattr(sys, "argv", ["benchmark", f"--json={tmp_path / 'new' / 'found.json'}"])
    with pytest.raises(InterruptedError):
        benchmark.main()
