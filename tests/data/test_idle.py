"""Idle frames against a literal implementation of their definition, and openpi's filter of DROID."""

import numpy as np
import pytest

from tests.datasets import edit_rows, make_dataset
from vla_finetuning.data.frames import frame_ranges_of, movement_keys, table
from vla_finetuning.data.idle import STILL, idle_frames, moving_runs
from vla_finetuning.data.metadata import load_metadata

FPS = 10


def by_definition(values, moves):
    """Mark all frames but the last of every window that stays within STILL, and the episode's last frame."""
    idle = np.zeros(len(values), bool)
    for first in range(len(values) - moves):
        window = values[first : first + moves + 1]
        if np.ptp(window, axis=0).max() < STILL:
            idle[first : first + moves] = True
            idle[-1] |= first + moves + 1 == len(values)
    return idle


@pytest.mark.parametrize("moves", [1, 2, 3, 7, 8, 40])
@pytest.mark.parametrize("noise", [0, 4e-4])
def test_idle_frames_equal_reference_implementation(moves, noise):
    rng = np.random.default_rng(moves)
    values_of_idle = set()
    for _ in range(200):
        frames = rng.integers(1, 40)
        values = np.repeat(rng.normal(size=(frames, 3)), rng.integers(1, 12, frames), axis=0)[:frames]
        values += noise * rng.normal(size=values.shape)
        idle = idle_frames([values[:, :2] * 5, values[:, 2:]], [np.array([5.0, 5.0]), np.array([1.0])], moves)
        assert idle.tolist() == by_definition(values, moves).tolist()
        values_of_idle |= set(idle.tolist())
    assert values_of_idle == ({True, False} if moves < 40 else {False})


def test_slow_drift_is_movement_and_constant_dimension_is_ignored():
    creeping = np.arange(100)[:, None] * 4e-4  # a band of STILL is left after three frames
    assert idle_frames([creeping], [np.ones(1)], 2).all() and not idle_frames([creeping], [np.ones(1)], 3).any()
    stuck = np.random.default_rng(0).normal(size=(100, 1)) * 1e-9
    assert not idle_frames([creeping, stuck], [np.ones(1), np.ones(1)], 3).any()
    assert idle_frames([stuck], [np.array([np.inf])], 3).all()


def test_idle_frames_equal_openpis_droid_filter():
    """For bitwise equal values: its runs of at least 7 frames, shifted by one frame."""
    rng = np.random.default_rng(0)
    velocity = np.repeat(rng.normal(size=(60, 8)), rng.integers(1, 14, 60), axis=0)
    same = np.concatenate([[False] * 2, (np.abs(np.diff(velocity, axis=0)) < 1e-3).all(axis=1), [False]])
    edges = np.flatnonzero(np.diff(same.astype(int)))
    theirs = np.zeros(len(velocity), bool)
    for first, last in edges.reshape(-1, 2):
        if last - first >= 7:
            theirs[first:last] = True
    ours = idle_frames([velocity], [np.ptp(velocity, axis=0)], moves=int(0.4 * 15) + 1)
    assert 100 < theirs.sum() < 0.8 * len(velocity)
    assert ours.tolist() == [*theirs[1:], theirs[-1]]


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    """In the first episode frames 5 to 15 are equal; the second ends in 8 equal frames; the last never moves."""
    root = make_dataset(tmp_path_factory.mktemp("idle") / "dataset", episodes=(30, 20, 25, 12), cameras={}, fps=FPS)

    def hold(values, episode, frame):
        for number, first, last in ((0, 5, 15), (1, 12, 19), (3, 0, 11)):
            still = (episode == number) & (frame >= first) & (frame <= last)
            values[still] = values[(episode == number) & (frame == first)]

    for column in ("observation.state", "action"):
        edit_rows(root, column, hold)
    return load_metadata(root)


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [
        (0.6, [[0, 0, 5], [0, 15, 15], [1, 0, 12], [2, 0, 25]]),
        (0.7, [[0, 0, 5], [0, 15, 15], [1, 0, 20], [2, 0, 25]]),  # 8 alike are 0.7 s, and no longer
        (0.99, [[0, 0, 5], [0, 15, 15], [1, 0, 20], [2, 0, 25]]),
        (1.0, [[0, 0, 30], [1, 0, 20], [2, 0, 25]]),
        (1.1, [[0, 0, 30], [1, 0, 20], [2, 0, 25], [3, 0, 12]]),
    ],
)
def test_moving_runs_by_idle_seconds(meta, seconds, runs):
    assert movement_keys(meta) == ["observation.state", "action"]
    assert moving_runs(meta, np.arange(4), movement_keys(meta), seconds).tolist() == runs
    expected = [run for run in runs if run[0] in (1, 3)]
    assert moving_runs(meta, np.array([1, 3]), movement_keys(meta), seconds).tolist() == expected


def test_frame_ranges_apply_dropped_frames_and_weights(meta):
    keys, weight = movement_keys(meta), np.array([0.5, 1, 2, 1])
    ranges = frame_ranges_of(meta, np.arange(4), dropped=15, keys=keys, skip_idle=0.6, weight=weight)
    assert np.stack([ranges.episode, ranges.first, ranges.frames]).tolist() == [[0, 1, 2], [0, 0, 0], [5, 5, 10]]
    assert ranges.weight.tolist() == [0.5, 1, 2] and ranges.rows == 27.5 and ranges.episodes.tolist() == [0, 1, 2]
    ranges = frame_ranges_of(meta, np.arange(4), weight=np.array([0, 1, 0, 3.0]))
    assert ranges.episode.tolist() == [1, 3] and ranges.frames.tolist() == [20, 12]


def test_frame_table_totals(meta):
    everything = np.arange(4)
    ranges = frame_ranges_of(
        meta, everything, keys=movement_keys(meta), skip_idle=0.6, weight=np.array([1, 0.5, 2, 1.0])
    )
    heading, *lines = table(meta, everything, ranges)
    assert heading.split() == ["episodes", "frames", "left", "out", "in", "an", "epoch", "task"]
    assert [line.split(maxsplit=7) for line in lines] == [
        ["4", "87", "30", "(", "34.5%)", "76", "(", "0.87x)  all"],
        ["2", "32", "20", "(", "62.5%)", "6", "(", "0.19x)  'go to the blue bin'"],
        ["2", "55", "10", "(", "18.2%)", "70", "(", "1.27x)  'go to the red bin'"],
    ]


def test_movement_needs_statistics_and_finite_values(meta, tmp_path):
    root = make_dataset(tmp_path / "dataset", episodes=(9, 9), cameras={})
    known = load_metadata(root)
    del known.stats["action"]["max"]
    with pytest.raises(ValueError, match="its statistics have no min and max of 'action'"):
        moving_runs(known, np.arange(2), ["action"], 1.0)
    for low, problem in ([np.nan, 0, 0], "'min' of 'action' is not finite"), ([0], r"shape \(1,\), expected"):
        known.stats["action"] |= {"min": np.array(low), "max": np.ones(3)}
        with pytest.raises(ValueError, match=f"{root}: .*{problem}.*; movement is measured by them"):
            moving_runs(known, np.arange(2), ["action"], 1.0)
    with pytest.raises(ValueError, match=f"{root}: no vector observation.state or action shows movement"):
        moving_runs(known, np.arange(2), [], 1.0)
    edit_rows(root, "action", lambda values, episode, frame: values.__setitem__((episode == 1) & (frame == 3), np.nan))
    with pytest.raises(ValueError, match=f"dataset {root}: .*action of episode 1, frame 3 holds NaN"):
        moving_runs(load_metadata(root), np.arange(2), ["action"], 1.0)
    # With --dataset.on_error=skip, its rows keep their places.
    runs = moving_runs(load_metadata(root), np.arange(2), ["action"], 1.0, skip_unreadable=True)
    assert runs[-1].tolist() == [1, 0, 9]
