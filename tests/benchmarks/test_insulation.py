"""`benchmarks.insulation`: each run once, with flags that `vla.py` accepts, and its figures."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import insulation, stages
from vla_finetuning.options.command_line import EVALUATE, RECORD, VLA
from vla_finetuning.run.folder import FINISHED_NAME


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that only parse their flags, and leave their last file unless they are to fail."""
    monkeypatch.setattr(stages.cluster, "connect", lambda: None)
    tasks = {0: "go to the red bin", 1: "go to the bin left of the blue one"}
    monkeypatch.setattr(insulation, "load_metadata", lambda root: SimpleNamespace(features={}, tasks=tasks, fps=10))
    monkeypatch.setattr(insulation, "prepare_base", lambda *_, tasks, **__: tmp_path / f"base{len(tasks)}")
    calls, failing = [], set()

    def train(argv):
        config = VLA.parse(argv)
        folder = Path(config.output_dir)
        insulated, text = config.train.knowledge_insulation, config.train.text_targets
        assert "--many_instructions=true" in config.env_options and config.policy_path == str(tmp_path / "base10")
        calls.append((folder.parent.name, folder.name, config.train.mode, insulated, text))
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

    def play(argv):
        config = EVALUATE.parse(argv)
        folder = Path(config.output_dir)
        calls.append((folder.parent.name, folder.name, config.subtask, config.policy_path))
        folder.mkdir()
        (folder / "report.html").write_text("done")
        return 0

    def played(folder):
        """Of three episodes one goes to the named bin, one to the other, and one to none; in the last step two do."""
        reached = ["red", "blue", "" if folder.name[-1] in "24" else "red"]
        line = {"task": "t", "error": None}
        success = [bin_reached == "red" for bin_reached in reached]
        pairs = enumerate(zip(reached, success, strict=True))
        key = next(name for name in folder.parts if name.startswith("seed"))
        return {}, [
            line | {"initial_state": f"{key} {n}", "info": {"reached": r}, "success_once": s, "success_at_end": s}
            for n, (r, s) in pairs
        ]

    monkeypatch.setattr(insulation.vla, "main", train)
    monkeypatch.setattr(insulation.record, "main", record)
    monkeypatch.setattr(insulation.evaluate, "main", play)
    monkeypatch.setattr(insulation, "read_evaluation", played)
    return calls, failing


def test_each_program_runs_once_and_checkpoints_are_counted(programs, tmp_path, capsys):
    (calls, failing), folder = programs, tmp_path / "runs"
    argv = [f"--folder={folder}", "--seeds=2", "--steps=5", "--every=2"]
    failing.add("expert")
    assert insulation.main(argv) == 4 and [name for _, name, *_ in calls[1:]] == ["full", "expert"]
    failing.clear()
    for _ in range(2):
        assert insulation.main(argv) == 0
    arms = [("full", "full", False, None), ("expert", "expert", False, None)]
    arms += [("insulated", "full", True, None), ("subtask", "full", True, "subtask")]
    wanted = [("demonstrations", 400)]
    for seed in ("seed1000", "seed2000"):
        wanted += [(seed, *arm) for arm in arms]
        wanted.append((seed, "writing", True, str(folder / seed / "subtask" / "pretrained_model")))
    assert calls == wanted[:3] + wanted[2:]
    text = capsys.readouterr().out
    assert text.count("2 of 6, 33.3 %") == 2 * 2 * 4 and "obeyed in 2 of 4" in text and "obeyed in 4 of 6" in text
    success = json.loads((folder / "insulation.json").read_text())["success"]
    assert list(success) == [f"{arm} {step}" for arm, *_ in arms for step in (2, 4, 5)] + ["writing 5"]
    assert success["writing 5"]["obeyed"] == 4 and success["writing 5"]["reached"] == 6
