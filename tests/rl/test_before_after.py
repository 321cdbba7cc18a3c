"""`make grpo`, from the dataset to the report."""

import json
from contextlib import ExitStack

import pytest
from filelock import FileLock

import grpo
from vla_finetuning.run.lease import LOCK_NAME


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_grpo_demo_raises_success_rate_over_imitation(tmp_path, no_ray_cluster, monkeypatch):
    """About six minutes on two cores; the same fresh scenes before and after 60 iterations."""
    monkeypatch.setattr(grpo, "DEMO_CACHE", tmp_path / "cache")
    run = tmp_path / "run"
    assert grpo.main(["--preset", "demo", f"--output_dir={run}"]) == 0
    scores = json.loads((run / "evaluation.json").read_text())["closed_loop"]
    before, after = (scores[name]["successes"] / scores[name]["episodes"] for name in ("before", "after"))
    assert after >= 0.9 and after - before >= 0.2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(61))
    # Seconds add up to the iteration's, within what logging takes.
    spent = [sum(line[f"{name}_s"] for name in ("play", "score", "update", "held_out")) for line in lines[1:]]
    assert spent == pytest.approx([line["step_s"] for line in lines[1:]], rel=0.05, abs=0.1)
    assert (run / "pretrained_model" / "model.safetensors").is_file() and (run / "report.html").is_file()


def test_demo_leaves_locked_imitation_run_alone(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "disobedient-policy"
    (folder / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(grpo, "prepare_disobedient", lambda cache: tmp_path / "disobedient")
    monkeypatch.setattr(grpo.cluster, "connect", lambda: None)
    with FileLock(folder / LOCK_NAME), ExitStack() as stack, pytest.raises(ValueError, match="imitation failed"):
        grpo.imitated(stack, dry_run=False)
    assert "a run is going on there" in capsys.readouterr().err
    assert (folder / "checkpoints").is_dir()
