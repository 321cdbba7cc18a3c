"""`make recap`: flags that its programs accept, and each program once."""

from argparse import Namespace
from types import SimpleNamespace

import evaluate
import value
import vla
from benchmarks import recap
from benchmarks.recap import Stage, run_stages
from vla_finetuning.files import read_json
from vla_finetuning.options.command_line import EVALUATE, VALUE, VLA

PROGRAMS = {vla.main: VLA, value.main: VALUE, evaluate.main: EVALUATE}


def test_it_learns_from_the_labels_of_its_value_function(tmp_path, monkeypatch):
    monkeypatch.setattr(recap.demo, "prepare_disobedient", lambda cache: tmp_path / "demonstrations")
    monkeypatch.setattr(recap.demo, "prepare_base", lambda *_, **__: tmp_path / "base")
    monkeypatch.setattr(recap, "load_metadata", lambda root: SimpleNamespace(features={}, tasks={}, fps=10))
    options = Namespace(folder=tmp_path, seed=7, steps=5, value_steps=4, eval_episodes=3)
    made = {
        done.parent.name: PROGRAMS[program].parse([f"--{flag}={value}" for flag, value in flags.items()])
        for program, flags, done in recap.stages(options)
    }
    assert list(made) == ["imitation", "value", "recap", "play-imitation", "play-recap"]
    assert made["recap"].recap.labels == str(tmp_path / "value" / "labels.parquet")
    assert made["play-recap"].advantage == "positive" and made["play-imitation"].advantage is None
    outcomes = read_json(tmp_path / "outcomes.json")
    assert len(outcomes) == 240 and list(outcomes.values()).count(False) == 72


def test_stages_run_once_and_go_on_after_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(recap.cluster, "connect", lambda: None)
    calls, statuses = [], iter([0, 4, 0, 0])

    def program(argv):
        calls.append(argv)
        if status := next(statuses):
            return status
        (tmp_path / argv[0].removeprefix("--name=")).write_text("done")
        return 0

    made = [Stage(program, {"name": name}, tmp_path / name) for name in "abc"]
    assert [run_stages(made) for _ in range(3)] == [4, 0, 0]
    assert calls == [["--name=a"], ["--name=b"], ["--name=b"], ["--name=c"]]
