"""Each method and seed is run once, with the imitation's pictures, and told of."""

import json

import pytest

from benchmarks import grpo_metaworld
from vla_finetuning.files import write_json
from vla_finetuning.flags import parse_grpo


@pytest.fixture
def started(monkeypatch):
    """The configurations of the runs that were started; each leaves what a run of `grpo.py` leaves."""
    configs = []

    def main(argv):
        config = parse_grpo(argv)
        configs.append(config)
        if len(configs) == 3:
            return 3  # stopped
        folder, scores = config.folder, {"successes": 100, "episodes": 200, "label": "", "interval": [0.4, 0.6]}
        folder.mkdir(parents=True)
        write_json(folder / "config.json", config.to_json())
        line = {"step": 1, "episodes": 8, "step_s": 2.0, "held_out_successes": 3, "held_out_episodes": 50}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        after = scores | {"successes": 150 if config.grpo.method == "grpo" else 90}
        write_json(folder / "evaluation.json", {"closed_loop": {"before": scores, "after": after}})
        return 0

    monkeypatch.setattr(grpo_metaworld.grpo, "main", main)
    return configs


def test_it_goes_on_where_it_was_stopped(started, tmp_path, capsys):
    settings = {"image_size": 84, "n_action_steps": 10, "episode_length": 200}
    write_json(tmp_path / "settings.json", settings)
    argv = [f"--imitation={tmp_path}", "--seeds=1,2", "--methods=grpo,rloo", f"--json={tmp_path / 'found.json'}"]
    assert grpo_metaworld.main(argv) == 3
    assert grpo_metaworld.main(argv) == 0
    assert [(c.seed, c.grpo.method) for c in started] == [
        (1, "grpo"),
        (1, "rloo"),
        (2, "grpo"),
        (2, "grpo"),
        (2, "rloo"),
    ]
    assert all(c.policy_path == str(tmp_path / "run" / "pretrained_model") for c in started)
    assert {tuple(c.env_options) for c in started} == {
        ("--task=drawer-open-v3", "--image_size=[84,84]", "--render_quality=fast", "--episode_length=200")
    }
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["imitation"] == settings and list(found["runs"]) == ["grpo 1", "rloo 1", "grpo 2", "rloo 2"]
    told = capsys.readouterr().out
    assert (
        "  grpo 2        100 of 200, 50.0 %" in told and "->  150 of 200, 75.0 %" in told and "8 episodes, 2 s" in told
    )
