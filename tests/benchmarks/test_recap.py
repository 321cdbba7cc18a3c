"""`make recap`: its programs in their order, each once, with flags that they accept."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import recap, stages
from vla_finetuning.options.command_line import EVALUATE, VALUE, VLA
from vla_finetuning.run.folder import FINISHED_NAME


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that only parse their flags, and leave their last file unless they are to fail."""
    monkeypatch.setattr(stages.cluster, "connect", lambda: None)
    monkeypatch.setattr(recap.demo, "prepare_disobedient", lambda cache: tmp_path / "demonstrations")
    monkeypatch.setattr(recap, "load_metadata", lambda root: SimpleNamespace(features={}, tasks={}, fps=10))
    monkeypatch.setattr(recap.demo, "prepare_base", lambda *_, **__: tmp_path / "base")
    line = {"task": "t", "success_once": True, "success_at_end": True, "error": None}
    monkeypatch.setattr(recap, "read_evaluation", lambda folder: ({}, [line | {"initial_state": n} for n in range(3)]))
    calls, failing = [], set()

    def program(definition, done):
        def run(argv):
            config = definition.parse(argv)
            calls.append(Path(config.output_dir).name)
            if calls[-1] in failing:
                return 4
            Path(config.output_dir).mkdir()
            (Path(config.output_dir) / done).write_text("done")
            return 0

        return run

    monkeypatch.setattr(recap.vla, "main", program(VLA, FINISHED_NAME))
    monkeypatch.setattr(recap.value, "main", program(VALUE, FINISHED_NAME))
    monkeypatch.setattr(stages.evaluate, "main", program(EVALUATE, "report.html"))
    return calls, failing


def test_stages_run_once_and_go_on_after_one_that_failed(programs, tmp_path, capsys):
    (calls, failing), folder = programs, tmp_path / "recap"
    failing.add("value")
    assert recap.main([f"--folder={folder}"]) == 4 and calls == ["imitation", "value"]
    failing.clear()
    for _ in range(2):
        assert recap.main([f"--folder={folder}"]) == 0
    assert calls == ["imitation", "value", "value", "recap", "play-imitation", "play-recap"]
    outcomes = json.loads((folder / "outcomes.json").read_text())
    assert len(outcomes) == 240 and list(outcomes.values()).count(False) == 72
    assert "RECAP, prompted positive          3 of 3" in capsys.readouterr().out
