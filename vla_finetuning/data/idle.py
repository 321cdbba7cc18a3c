"""When nothing moves: the one definition that scores, `--dataset.skip_idle`, its tables and statistics share.

openpi leaves out of DROID what lies in runs of 7 frames or more (at 15 Hz) whose actions, velocities of joints, differ
by less than 1e-3 from one frame to the next (`examples/droid/compute_droid_nonidle_ranges.py`). Here state and action
count, whatever they are in: each dimension by its own range over the whole dataset, and over the whole run instead of
from frame to frame, so that a slow movement is one at any frame rate. Of a run, openpi keeps the first frame; here
it is the last one, after which something moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_finetuning.data.dataset import NUMERIC_DTYPES, DatasetMetadata, Feature
from vla_finetuning.data.statistics import episode_arrays, in_threads

# A dimension stands still while it stays within this share of its range.
STILL = 1e-3


def idle_frames(values: Sequence[np.ndarray], spans: Sequence[np.ndarray], moves: int) -> np.ndarray:
    """The frames of an episode from which on nothing moves, in runs of at least `moves` frames.

    That is, all but the last of any `moves` + 1 consecutive frames over which every dimension stays within STILL of its
    span; and the episode's last frame, where it is the last of those.

    Args:
        values: features of the episode, (L, D) each. spans: their ranges, (D,) each, as of `value_span`.
    Returns:
        bool (L,).
    """
    frames, windows = len(values[0]), len(values[0]) - moves
    idle = np.zeros(frames, bool)
    if windows < 1:
        return idle
    still = np.ones(windows, bool)
    for array, span in zip(values, spans, strict=True):
        scaled = array.reshape(frames, -1) / span
        extent = _sliding(scaled, moves + 1, np.maximum) - _sliding(scaled, moves + 1, np.minimum)
        still &= (extent < STILL).all(axis=1)
    # How many of those windows begin at most `moves` frames before.
    cumulative = np.cumsum(np.concatenate([still, np.zeros(moves, bool)]))
    idle = cumulative > np.concatenate([np.zeros(moves, cumulative.dtype), cumulative[:windows]])
    idle[-1] = still[-1]
    return idle


def _sliding(values: np.ndarray, width: int, extreme: Callable[..., np.ndarray]) -> np.ndarray:
    """The extreme of every `width` consecutive rows: (L, D) to (L - width + 1, D), in log2(width) passes."""
    reach = 1
    while reach < width:
        step = min(reach, width - reach)
        values = extreme(values[:-step], values[step:])
        reach += step
    return values


def value_span(meta: DatasetMetadata, key: str) -> np.ndarray:
    """Return how far each dimension of a feature reaches in the dataset, float64 (D,); of one that never moves,
    infinity.
    """
    low, high = value_range(meta, key)
    return np.where(high > low, high - low, np.inf)


def value_range(meta: DatasetMetadata, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return where a feature's values begin and end in the whole dataset, float64 (D,) each, in the
    order of its files.
    """
    stats = meta.stats.get(key, {})
    if not {"min", "max"} <= stats.keys():
        raise ValueError(
            f"{meta.root}: meta/stats.json has no min and max of {key!r}, which movement is measured by; LeRobot's "
            "`lerobot-edit-dataset` writes them anew"
        )
    return np.ravel(stats["min"]).astype(np.float64), np.ravel(stats["max"]).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Movement:
    """What movement in a dataset is measured by, and for how many frames it may be absent.

    Attributes:
        features: vectors, of state and action. spans: their ranges, as of `value_span`. moves: as of `idle_frames`.
    """

    features: tuple[Feature, ...]
    spans: tuple[np.ndarray, ...]
    moves: int

    @classmethod
    def from_metadata(cls, meta: DatasetMetadata, keys: Sequence[str], seconds: float) -> Movement:
        """Frames in which the vectors `keys` stay the same for longer than so many seconds are idle.

        Raises:
            ValueError: `keys` that are no vectors or have no range in meta/stats.json.
        """
        if wrong := [key for key in keys if meta.features[key].dtype not in NUMERIC_DTYPES]:
            raise ValueError(f"{meta.root}: {wrong} are no numbers, so when they do not move is unknown")
        features, spans = (meta.features[key] for key in keys), (value_span(meta, key) for key in keys)
        return cls(tuple(features), tuple(spans), math.floor(seconds * meta.fps + 1e-6) + 1)

    def idle(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The idle frames of an episode, bool (L,), by the values of its features, (L, ...) each."""
        return idle_frames([arrays[f.key].astype(np.float64) for f in self.features], self.spans, self.moves)

    def described(self) -> dict[str, Any]:
        """Return what a digest says of it."""
        spans = {f.key: span.tolist() for f, span in zip(self.features, self.spans, strict=True)}
        return {"spans": spans, "moves": self.moves}


def moving_runs(meta: DatasetMetadata, episodes: np.ndarray, keys: Sequence[str], seconds: float) -> np.ndarray:
    """The runs of frames of some episodes that are left without those where nothing moves for longer than so long.

    Runs on the driver, without Ray: reads the columns of `keys` alone, each file once, as many at a time as there are
    CPUs.

    Args:
        episodes: int64, ascending. keys: vectors, of state and action.
    Returns:
        int64 (S, 3), in order: the episode, the frame_index of the run's first frame, how many frames it has.
    Raises:
        ValueError: `keys` that are no vectors or have no range in meta/stats.json; data that contradicts the metadata
            or holds NaN. FileNotFoundError: a data file is missing.
    """
    movement = Movement.from_metadata(meta, keys, seconds)

    def of_file(file: dict[str, Any]) -> np.ndarray:
        runs = [np.empty((0, 3), np.int64)]
        for episode, arrays in episode_arrays(meta.fs, features=movement.features, **file):
            idle = movement.idle(arrays)
            change = np.flatnonzero(np.diff(idle, prepend=True, append=True)).reshape(-1, 2)
            runs.append(np.stack([np.full(len(change), episode), change[:, 0], change[:, 1] - change[:, 0]], axis=1))
        return np.concatenate(runs)

    runs = np.concatenate(in_threads(meta, episodes, of_file))
    return runs[np.lexsort((runs[:, 1], runs[:, 0]))]
