"""Selection of episodes by number and by task."""

import json

import numpy as np
import pytest

from tests.datasets import make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.selection import choose_episodes, of_each, read_choice


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    """Six episodes of three tasks in turn."""
    tasks = ("Pick the cube", "place the cube", "pick the ball")
    return load_metadata(make_dataset(tmp_path_factory.mktemp("selection") / "dataset", tasks=tasks))


@pytest.mark.parametrize(
    ("episodes", "exclude", "tasks", "expected"),
    [
        (None, None, None, [0, 1, 2, 3, 4, 5]),
        ([5, 1, 2], [2], None, [1, 5]),
        (None, [0, 3], ["pick*"], [2, 5]),
        (None, None, ["*cube", "*ball"], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2], [4], ["PICK THE [bc]*"], [0, 2]),
    ],
)
def test_episode_selection(meta, episodes, exclude, tasks, expected):
    chosen, notes = choose_episodes(meta, episodes, exclude, tasks)
    assert chosen.tolist() == expected and chosen.dtype == "int64"
    assert len(notes) == bool(exclude or tasks)
    assert all(f"{len(expected)} of 6 episodes are used" in note for note in notes)
    assert tasks != ["*cube", "*ball"] or "(episodes by pattern: '*cube' 4, '*ball' 2)" in notes[0]


@pytest.mark.parametrize("text", ["put [A] in B", "what [now]?", "[!x] ["])
def test_exact_task_with_characters_of_patterns_is_chosen(meta, text):
    meta = load_metadata(meta.root)
    meta.episode_tasks[3] = (text,)
    assert choose_episodes(meta, tasks=[text.upper()])[0].tolist() == [3]


def test_episode_with_second_task_is_noted(meta):
    meta = load_metadata(meta.root)
    meta.episode_tasks[1] = ("place the cube", "Pick the cube")
    _, notes = choose_episodes(meta, tasks=["pick*"])
    assert "1 of the episodes" in notes[1] and "episode 1: ['place the cube', 'Pick the cube']" in notes[1]


@pytest.mark.parametrize(
    ("exclude", "tasks", "message"),
    [
        ([6], None, r"\[6\] not in the dataset, which has 0..5"),
        (None, ["pick*", "plase the cube"], "no task is like --dataset.tasks 'plase the cube'.*'place the cube'"),
        (list(range(6)), None, "no episode is left of 6: 6 are left out by --dataset.exclude_episodes"),
        ([0, 2, 3, 5], ["pick*"], "no episode is left"),
        ([1, 4], ["pick*", "PLACE*"], r"no episode is left with a task like .* 'PLACE\*'"),
        (None, [], "names no pattern"),
    ],
)
def test_invalid_selection_is_refused(meta, exclude, tasks, message):
    with pytest.raises(ValueError, match=message):
        choose_episodes(meta, None, exclude, tasks)


def test_selection_of_several_datasets():
    assert of_each(None, ["/a", "/b"], "--x") == [None, None]
    assert of_each({"/b": [1]}, ["/a", "/b"], "--x") == [None, [1]]
    assert of_each([1], ["/a"], "--x") == [[1]]
    for choice in (np.arange(3), {0, 1, 2}):
        with pytest.raises(ValueError, match="must name the dataset"):
            of_each(choice, ["/a", "/b"], "--x")
    with pytest.raises(ValueError, match=r"--x with several datasets must name the dataset: --x='{\"/a\": \[1\]}'"):
        of_each([1], ["/a", "/b"], "--x")
    with pytest.raises(ValueError, match=r"--x names \['/c'\], which are not among the datasets \['/a', '/b'\]"):
        of_each({"/c": [1]}, ["/a", "/b"], "--x")


def test_selection_is_read_from_file(tmp_path):
    path = tmp_path / "excluded.json"
    for choice in ([3, 17], {"/a": [3], "s3://b/c": []}):
        path.write_text(json.dumps(choice))
        assert read_choice(path) == choice
    for wrong in ("{", '"3"', "[true]", "[1.5]", '{"/a": 3}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="excluded.json: .*list of episodes"):
            read_choice(path)
    with pytest.raises(FileNotFoundError, match="nothing.json: no such file"):
        read_choice(tmp_path / "nothing.json")
