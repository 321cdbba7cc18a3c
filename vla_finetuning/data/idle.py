"""Find the frames in which nothing moves, for scores, `--dataset.skip_idle`, its tables and statistics.

openpi drops from DROID runs of 7 or more frames (at 15 Hz) whose actions, joint velocities, differ by less than 1e-3
between frames (`examples/droid/compute_droid_nonidle_ranges.py`). This module uses state and action in any unit: a
dimension is scaled by its range over the dataset, and compared over the whole run instead of between frames, so that
slow movement counts at any frame rate. openpi keeps the first frame of a run; this module keeps the last one, before
the next movement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_finetuning.data.dataset import NUMERIC_DTYPES, DatasetMetadata, Feature
from vla_finetuning.data.statistics import episode_arrays, in_threads, stats_problems

# Share of its range within which a dimension counts as still.
STILL = 1e-3


def idle_frames(values: Sequence[np.ndarray], spans: Sequence[np.ndarray], moves: int) -> np.ndarray:
    """Return the mask of an episode's idle frames: the starts of runs of at least `moves` frames without movement.

    All but the last of `moves` + 1 consecutive frames are idle if every dimension stays within STILL of its span over
    them. The episode's last frame is idle if it is the last of such a run.

    Args:
        values: features of the episode, (L, D) each.
        spans: their ranges, (D,) each, as from `value_span`.
    """
    frames, windows = len(values[0]), len(values[0]) - moves
    idle = np.zeros(frames, bool)
    if windows < 1:
        return idle
    still = np.ones(windows, bool)
    for array, span in zip(values, spans, strict=True):
        low = high = array.reshape(frames, -1) / span
        width = 1  # of the windows whose extremes they are; log2(moves) passes, as `moves` may be thousands
        while step := min(width, moves + 1 - width):
            low, high, width = np.minimum(low[:-step], low[step:]), np.maximum(high[:-step], high[step:]), width + step
        still &= (high - low < STILL).all(axis=1)
    # Number of still windows that begin at most `moves` frames before each frame.
    cumulative = np.cumsum(np.concatenate([still, np.zeros(moves, bool)]))
    idle = cumulative > np.concatenate([np.zeros(moves, cumulative.dtype), cumulative[:windows]])
    idle[-1] = still[-1]
    return idle


def value_span(meta: DatasetMetadata, key: str) -> np.ndarray:
    """Return the range of each dimension of a feature in the dataset, float64 (D,); infinity if it never moves."""
    low, high = value_range(meta, key)
    return np.where(high > low, high - low, np.inf)


def value_range(meta: DatasetMetadata, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum and maximum of a feature in the dataset, float64 (D,) each, in the order of its files.

    Raises ValueError if the statistics lack them, or they are not finite or not of the feature's shape.
    """
    stats, names = meta.stats.get(key, {}), {"min", "max"}
    absent = [] if names <= stats.keys() else [f"its statistics have no min and max of {key!r}"]
    for problem in absent or stats_problems(meta, key, names):
        raise ValueError(
            f"{meta.root}: {problem}; movement is measured by them. `lerobot-edit-dataset --operation.type "
            "recompute_stats` writes those of v3.0; delete episodes with NaN first (delete_episodes)"
        )
    return np.ravel(stats["min"]).astype(np.float64), np.ravel(stats["max"]).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Movement:
    """Parameters of idle frames in a dataset."""

    features: tuple[Feature, ...]  # state and action vectors
    spans: tuple[np.ndarray, ...]  # their ranges, as from `value_span`
    moves: int  # least number of frames of an idle run

    @classmethod
    def from_metadata(cls, meta: DatasetMetadata, keys: Sequence[str], seconds: float) -> Movement:
        """Return the parameters for runs longer than `seconds` in which the vectors `keys` do not move.

        Raises ValueError without `keys`, and for those that are no vectors or have no range in the statistics.
        """
        if not keys:
            raise ValueError(f"{meta.root}: no vector observation.state or action shows movement; give --rename_map")
        if wrong := [key for key in keys if meta.features[key].dtype not in NUMERIC_DTYPES]:
            raise ValueError(f"{meta.root}: {wrong} are no numbers, so when they do not move is unknown")
        features, spans = (meta.features[key] for key in keys), (value_span(meta, key) for key in keys)
        return cls(tuple(features), tuple(spans), math.floor(seconds * meta.fps + 1e-6) + 1)

    def idle(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the mask of an episode's idle frames, bool (L,), from its features, (L, ...) each."""
        return idle_frames([arrays[f.key].astype(np.float64) for f in self.features], self.spans, self.moves)

    def described(self) -> dict[str, Any]:
        spans = {f.key: span.tolist() for f, span in zip(self.features, self.spans, strict=True)}
        return {"spans": spans, "moves": self.moves}


def moving_runs(
    meta: DatasetMetadata, episodes: np.ndarray, keys: Sequence[str], seconds: float, skip_unreadable: bool = False
) -> np.ndarray:
    """Return the runs of frames of some episodes that remain without idle frames.

    Reads only the columns `keys`, each file once, in one thread per CPU. Errors are those of `Movement.from_metadata`
    and of `statistics.episode_arrays`.

    Args:
        episodes: episode numbers, int64, ascending.
        seconds: longest time without movement that is not idle.
        skip_unreadable: warn about unreadable files instead of raising; all their frames remain.
    Returns:
        Episode, first frame_index and number of frames of each run, int64 (S, 3), in order.
    """
    movement = Movement.from_metadata(meta, keys, seconds)

    def runs_in_file(file: dict[str, Any]) -> np.ndarray:
        runs = [np.empty((0, 3), np.int64)]
        for episode, arrays in episode_arrays(meta.fs, features=movement.features, **file):
            change = np.flatnonzero(np.diff(movement.idle(arrays), prepend=True, append=True)).reshape(-1, 2)
            columns = np.full(len(change), episode), change[:, 0], change[:, 1] - change[:, 0]
            runs.append(np.stack(columns, axis=1))
        return np.concatenate(runs)

    def all_of_file(file: dict[str, Any]) -> np.ndarray:
        return np.stack([file["episodes"], np.zeros_like(file["episodes"]), file["lengths"]], axis=1)

    unreadable = ("no idle frame is looked for in", all_of_file) if skip_unreadable else None
    runs = np.concatenate(in_threads(meta, episodes, runs_in_file, unreadable))
    return runs[np.lexsort((runs[:, 1], runs[:, 0]))]
