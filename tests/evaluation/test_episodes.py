"""Episode lists, noise, and the evaluation folder that a killed evaluation leaves, without Ray."""

import itertools
import json

import numpy as np
import pytest

from vla_finetuning.evaluation.episodes import (
    ACTIONS_NAME,
    EPISODES_NAME,
    EvaluationFolder,
    read_actions,
    read_evaluation,
)
from vla_finetuning.rollouts.episodes import episode_list, line_of, noise

ABOUT = {"policy": "a"}


@pytest.fixture
def episodes():
    return episode_list(("plain", "other"), ["two_bins"], 3, seed=1000)


def ended(episode, success=True):
    outcome = {"instruction": "go", "success_once": success, "success_at_end": success, "success_at_reset": False}
    outcome |= {"steps": 7, "total_reward": 1.0, "initial_state": f"state {episode.seed - 1000}"}
    return line_of(episode, 3, info={"reached": "red"}, **outcome)


def test_every_condition_has_the_seeds_of_lerobot_eval(episodes):
    assert len(episodes) == len(set(episodes)) == 6
    for condition in ("plain", "other"):
        assert [e.seed for e in episodes if e.condition == condition] == [1000, 1001, 1002]
    several = episode_list(["plain"], ["a", "b"], 2, seed=7)
    assert [(e.task, e.episode, e.seed) for e in several] == [("a", 0, 7), ("a", 1, 8), ("b", 0, 7), ("b", 1, 8)]


def test_noise_depends_only_on_its_key():
    names = [(1000, 1001), ("a", "b"), (0, 1), (0, 1)]
    drawn = [noise(*key, (10, 3)) for key in itertools.product(*names)]
    np.random.seed(0)
    redrawn = [noise(*key, (10, 3)) for key in itertools.product(*names)]
    assert [a.tobytes() for a in drawn] == [b.tobytes() for b in redrawn]
    assert len({a.tobytes() for a in drawn}) == 16 and drawn[0].dtype == np.float32
    # Fixed values keep evaluations of different versions comparable.
    assert noise(1000, "two_bins", 3, 2, (2,)).tolist() == pytest.approx([-0.41397834, 0.74539107])


def test_lines_are_read_in_list_order(tmp_path, episodes):
    book = EvaluationFolder(tmp_path, ABOUT, episodes)
    for number in (4, 0, 5, 2, 1):
        book.write(ended(episodes[number], number != 5))
    with pytest.raises(ValueError, match="1 of 6 episodes are not done.*same flags"):
        read_evaluation(tmp_path)
    book.write(line_of(episodes[3], 2, error="its process died"))
    about, lines = read_evaluation(tmp_path)
    assert about["policy"] == "a"
    assert [(line["condition"], line["seed"]) for line in lines] == [(e.condition, e.seed) for e in episodes]
    assert [line["success_once"] for line in lines] == [True, True, True, None, True, False]
    assert lines[3]["error"] == "its process died" and lines[3]["success_at_end"] is None
    expected = {"steps": 7, "total_reward": 1.0, "initial_state": "state 0", "info": {"reached": "red"}, "decisions": 3}
    assert {key: lines[0][key] for key in expected} == expected


def test_killed_evaluation_resumes_with_missing_episodes(tmp_path, episodes):
    """Truncated lines and errors do not count, and are removed from the files."""
    book = EvaluationFolder(tmp_path, ABOUT, episodes)
    book.write(ended(episodes[0]))
    book.write(line_of(episodes[1], 0, error="its process died"))
    with (tmp_path / EPISODES_NAME).open("a") as file:
        file.write('{"condition": "pl')
    with (tmp_path / ACTIONS_NAME).open("a") as file:
        file.write('{"condition": "pl')
    book = EvaluationFolder(tmp_path, ABOUT, episodes)
    assert book.pending == episodes[1:]
    for number in range(1, 6):
        book.write(ended(episodes[number]), np.full((7, 2), number, np.float32))
    assert [actions[0, 0] for actions in read_actions(tmp_path).values()] == [1, 2, 3, 4, 5]
    assert len((tmp_path / EPISODES_NAME).read_text().splitlines()) == 6
    assert all(line["error"] is None for line in read_evaluation(tmp_path)[1])


def test_folder_of_another_evaluation_is_refused(tmp_path, episodes):
    EvaluationFolder(tmp_path, ABOUT, episodes).write(ended(episodes[0]))
    before = (tmp_path / EPISODES_NAME).read_text()
    with pytest.raises(ValueError, match="differs in policy.*--output_dir"):
        EvaluationFolder(tmp_path, {"policy": "b"}, episodes)
    with pytest.raises(ValueError, match="differs in episodes"):
        EvaluationFolder(tmp_path, ABOUT, episodes[:4])
    assert (tmp_path / EPISODES_NAME).read_text() == before
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / EPISODES_NAME).write_text(json.dumps({}) + "\n")
    with pytest.raises(ValueError, match="is there without evaluated.json"):
        EvaluationFolder(tmp_path / "strange", ABOUT, episodes)
    with pytest.raises(FileNotFoundError, match="holds no evaluation"):
        read_evaluation(tmp_path / "nowhere")
