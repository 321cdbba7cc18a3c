"""Benchmarks of several programs: their flags parse, each program runs once, and rates are counted."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

import evaluate
import record
import value
import vla
from benchmarks import insulation, recap, stages
from benchmarks.stages import Stage, run_stages
from vla_finetuning.files import read_json
from vla_finetuning.options.command_line import EVALUATE, RECORD, VALUE, VLA

PROGRAMS = {vla.main: VLA, value.main: VALUE, evaluate.main: EVALUATE, record.main: RECORD}
TASKS = {0: "go to the red bin", 1: "go to the bin left of the blue one"}


def parsed(stages):
    """Return each stage's name and configuration."""
    return [
        (done.parent.name, PROGRAMS[program].parse([f"--{flag}={value}" for flag, value in flags.items()]))
        for program, flags, done in stages
    ]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    meta = SimpleNamespace(features={}, tasks=TASKS, fps=10)
    monkeypatch.setattr(recap.demo, "prepare_disobedient", lambda cache: tmp_path / "demonstrations")
    monkeypatch.setattr(recap.demo, "prepare_base", lambda *_, **__: tmp_path / "base")
    monkeypatch.setattr(insulation, "prepare_base", lambda *_, tasks, **__: tmp_path / f"base{len(tasks)}")
    for module in (recap, insulation):
        monkeypatch.setattr(module, "load_metadata", lambda root: meta)


def test_recap_stages_use_labels_of_their_value_function(datasets, tmp_path):
    options = Namespace(folder=tmp_path, seed=7, steps=5, value_steps=4, eval_episodes=3)
    planned = dict(parsed(recap.stages(options)))
    assert list(planned) == ["imitation", "value", "recap", "play-imitation", "play-recap"]
    assert planned["recap"].recap.labels == str(tmp_path / "value" / "labels.parquet")
    assert planned["play-recap"].advantage == "positive" and planned["play-imitation"].advantage is None
    outcomes = read_json(tmp_path / "outcomes.json")
    assert len(outcomes) == 240 and list(outcomes.values()).count(False) == 72


def test_insulation_stages_share_the_base_policy(datasets, tmp_path):
    options = Namespace(folder=tmp_path, demonstrations=9, steps=5, every=2, eval_episodes=3)
    (_, recorded), *trained, (name, writing) = parsed(insulation.stages(options, 1000))
    assert recorded.episodes == 9 and {config.policy_path for _, config in trained} == {str(tmp_path / "base10")}
    assert [(arm, c.train.mode, c.train.knowledge_insulation, c.train.text_targets) for arm, c in trained] == [
        ("full", "full", False, None),
        ("expert", "expert", False, None),
        ("insulated", "full", True, None),
        ("subtask", "full", True, "subtask"),
    ]
    assert (name, writing.subtask) == ("writing", True)
    assert writing.policy_path == str(tmp_path / "seed1000" / "subtask" / "pretrained_model")


def test_obeyed_episodes_reached_the_instructed_bin(tmp_path, monkeypatch):
    lines = [
        {"task": "t", "initial_state": n, "error": None, "info": {"reached": reached}, "success_once": reached == "red"}
        for n, reached in enumerate(("red", "blue", ""))
    ]
    lines = [{**line, "instruction": "go", "success_at_end": line["success_once"]} for line in lines]
    folders = []
    monkeypatch.setattr(insulation, "read_evaluation", lambda folder: (folders.append(folder), lines))
    monkeypatch.setattr(insulation, "run_stages", lambda stages: 0)
    assert insulation.main([f"--folder={tmp_path}", "--seeds=2", "--steps=5", "--every=2"]) == 0
    success = read_json(tmp_path / "insulation.json")["success"]
    assert list(success) == [f"{arm} {step}" for arm in insulation.ARMS for step in (2, 4, 5)] + ["writing 5"]
    assert folders[0] == tmp_path / "seed1000" / "full" / "evaluations" / "step_00000002"
    assert folders[-1] == tmp_path / "seed2000" / "writing"
    assert {(s["episodes"], s["obeyed"], s["reached"]) for s in success.values()} == {(6, 2, 4)}


def test_stages_run_once_and_resume_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.cluster, "connect", lambda: None)
    calls, statuses = [], iter([0, 4, 0, 0])

    def program(argv):
        calls.append(argv)
        if status := next(statuses):
            return status
        (tmp_path / argv[0].removeprefix("--name=")).write_text("done")
        return 0

    planned = [Stage(program, {"name": name}, tmp_path / name) for name in "abc"]
    assert [run_stages(planned) for _ in range(3)] == [4, 0, 0]
    assert calls == [["--name=a"], ["--name=b"], ["--name=b"], ["--name=c"]]
