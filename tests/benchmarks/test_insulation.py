"""`benchmarks.insulation`: each run once, with flags that `vla.py` accepts, and its figures."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import insulation, stages
from vla_finetuning.options.command_line import RECORD, VLA
from vla_finetuning.run.folder import FINISHED_NAME


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that only parse their flags, and leave their last file unless they are to fail."""
    monkeypatch.setattr(stages.cluster, "connect", lambda: None)
    monkeypatch.setattr(insulation, "prepare_dataset", lambda cache: tmp_path / "demonstrations")
    monkeypatch.setattr(insulation, "load_metadata", lambda root: SimpleNamespace(features={}, tasks={}, fps=10))
    monkeypatch.setattr(insulation, "prepare_base", lambda *_, **__: tmp_path / "base")
    calls, failing = [], set()

    def train(argv):
        config = VLA.parse(argv)
        folder = Path(config.output_dir)
        insulated = config.train.knowledge_insulation
        calls.append((folder.parent.name, folder.name, config.train.mode, insulated, tuple(config.env_options)))
        if folder.name in failing:
            return 4
        folder.mkdir(parents=True)
        (folder / FINISHED_NAME).write_text("done")
        return 0

    def record(argv):
        config = RECORD.parse(argv)
        calls.append(("demonstrations", config.episodes))
        Path(config.root).mkdir(parents=True)
        return 0

    def played(folder):
        """Of three episodes one goes to the named bin, one to the other, and one to none; in the last step two do."""
        reached = ["red", "blue", "red" if folder.name.endswith("5") else ""]
        line = {"task": "t", "error": None}
        success = [bin_reached == "red" for bin_reached in reached]
        pairs = enumerate(zip(reached, success, strict=True))
        key = folder.parts[-4]
        return {}, [
            line | {"initial_state": f"{key} {n}", "info": {"reached": r}, "success_once": s, "success_at_end": s}
            for n, (r, s) in pairs
        ]

    monkeypatch.setattr(insulation.vla, "main", train)
    monkeypatch.setattr(insulation.record, "main", record)
    monkeypatch.setattr(insulation, "read_evaluation", played)
    return calls, failing


def test_each_policy_is_trained_once_and_its_checkpoints_are_counted(programs, tmp_path, capsys):
    (calls, failing), folder = programs, tmp_path / "runs"
    argv = [f"--folder={folder}", "--seeds=2", "--steps=5", "--every=2"]
    failing.add("expert")
    assert insulation.main(argv) == 4 and [arm for _, arm, *_ in calls] == ["full", "expert"]
    failing.clear()
    for _ in range(2):
        assert insulation.main(argv) == 0
    arms = [("full", "full", False), ("expert", "expert", False), ("insulated", "full", True)]
    wanted = [
        (f"seed{seed}", *arm, ("--episode_length=30", "--many_instructions=false"))
        for seed in (1000, 2000)
        for arm in arms
    ]
    assert calls == wanted[:2] + wanted[1:]
    text = capsys.readouterr().out
    assert text.count("2 of 6, 33.3 %") == 2 * 2 * 3 and "obeyed in 2 of 4" in text and "obeyed in 4 of 6" in text
    success = json.loads((folder / "insulation.json").read_text())["success"]
    assert list(success) == [f"{arm} {step}" for arm, *_ in arms for step in (2, 4, 5)]
    assert success["insulated 5"]["obeyed"] == 4 and success["insulated 5"]["reached"] == 6


def test_demonstrations_of_many_instructions_are_recorded_first(programs, tmp_path):
    calls, _ = programs
    argv = [f"--folder={tmp_path / 'runs'}", "--seeds=2", "--steps=2", "--every=2", "--many_instructions"]
    assert insulation.main(argv) == 0
    first, *rest = calls
    assert first == ("demonstrations", 400) and len(rest) == 6
    assert all("--many_instructions=true" in options for *_, options in rest)
