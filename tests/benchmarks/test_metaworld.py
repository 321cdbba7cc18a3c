"""Meta-World from recording to its table: all conditions on the same states, none of them a demonstration's."""

import importlib.util
import json

import pytest

from benchmarks import metaworld
from vla_finetuning.envs.protocol import choose_gl

choose_gl()
needs_metaworld = pytest.mark.skipif(
    importlib.util.find_spec("metaworld") is None, reason="Meta-World is installed by make metaworld"
)

SMALL = {
    **{"tasks": "reach-v3,drawer-open-v3", "episodes": 2, "image_size": 28, "chunk_size": 4, "n_action_steps": 4},
    **{"steps": 2, "batch_size": 4, "eval_episodes": 2, "episode_length": 8},
}


@needs_metaworld
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:Constant")
def test_the_whole_goes_on_where_it_was_broken_off(ray_cluster, tmp_path, capsys):
    def run(**changes):
        options = {"folder": tmp_path / "work", "json": tmp_path / "found.json", **SMALL, **changes}
        return metaworld.main([f"--{name}={value}" for name, value in options.items()])

    assert run() == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    assert "Success on initial states" in printed
    assert found["dataset"]["episodes"] == 4 and found["open_loop_mse"]["policy"] > 0
    assert [row["label"] for row in found["success"]["trained"]["rows"]] == [
        "all episodes",
        "reach-v3",
        "drawer-open-v3",
    ]
    assert all(of_one["rows"][0]["episodes"] == 4 for of_one in found["success"].values())

    path = tmp_path / "work" / "evaluation" / "episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_condition = {
        name: {(line["task"], line["seed"]): line for line in lines if line["condition"] == name}
        for name in metaworld.LABELS
    }
    states = {name: {key: line["initial_state"] for key, line in own.items()} for name, own in by_condition.items()}
    assert states["untrained"] == states["trained"] == states["other_instruction"]
    assert len(set(states["trained"].values())) == 4
    returns = {name: [own[key]["total_reward"] for key in sorted(own)] for name, own in by_condition.items()}
    assert returns["untrained"] != returns["trained"] != returns["other_instruction"]

    # Broken off: what is lost of the evaluation is played again, and nothing is recorded or trained a second time.
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-3]))
    assert run() == 0
    printed = capsys.readouterr().out
    assert "Playing      3 episodes" in printed and "Recorded" not in printed and "Policy  " not in printed
    again = json.loads((tmp_path / "found.json").read_text())
    assert again["success"] == found["success"]
    with pytest.raises(SystemExit):
        run(steps=3)
    assert "--steps=2" in capsys.readouterr().err


def test_degrees_of_difficulty_count_alike():
    def played(task, *steps, error=None):
        """Episodes that succeeded after so many steps; 200: they did not."""
        episode = {"condition": "trained", "task": task, "error": error, "info": {"obj_to_target": 0.1}}
        return [
            {**episode, "success_once": n < 200, "steps": n, "success_at_end": n < 200}
            | {"seed": i, "episode": i, "initial_state": i}
            for i, n in enumerate(steps)
        ]

    easy = played("reach-v3", 30, 100, 101, 200) + played("door-open-v3", 200, 200)
    hard = played("push-v3", 150) + played("push-v3", 20, error="died")
    found = metaworld.success(easy + hard)["trained"]
    of_easy, of_hard = found["degrees"]
    assert (of_easy["label"], of_easy["tasks"], of_easy["successes"], of_easy["episodes"]) == ("easy", 2, 3, 6)
    assert (of_hard["label"], of_hard["tasks"], of_hard["successes"], of_hard["episodes"]) == ("hard", 1, 1, 1)
    assert (of_easy["within_100_steps"], of_hard["within_100_steps"]) == (2, 0)
    assert found["mean_of_degrees"] == {"successes": 0.75, "within_100_steps": pytest.approx(1 / 6)}
    printed = metaworld.table({"trained": found})
    assert "hard, 1 tasks" in printed and "75.0 %, within 100 steps 16.7 %" in printed
    assert "degrees" not in metaworld.success(easy)["trained"]
