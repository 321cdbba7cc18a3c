"""Normalisation statistics of relative actions: what is left of a chunk when the state at its start is taken off.

The numbers are those of LeRobot's `compute_relative_action_stats`: of every chunk that lies within one episode,
mean, deviation and extremes, and quantiles from histograms of 5000 bins. LeRobot reads a dataset in one process, and
where it meets a value beyond those before, it moves its counts into new bins; here the range is found first, in a pass
of its own. So up to 50 000 chunks the quantiles are LeRobot's to the bit, and beyond as near as its bins are wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata, select_episodes
from vla_finetuning.data.statistics import Stats, cached_stats, digest, episode_arrays, over_files, stored_as

ACTION, STATE = "action", "observation.state"


@dataclass(frozen=True)
class RelativeActions:
    """What a policy predicts: actions relative to the state they start from.

    Attributes:
        chunk_size: actions of a prediction.
        dimensions: of an action, true for those that the state is taken off.
        step: frames of the dataset from an action of a prediction to the next.
    """

    chunk_size: int
    dimensions: tuple[bool, ...]
    step: int = 1

    @property
    def reach(self) -> int:
        """Frames from a prediction's first action to its last, both of them counted."""
        return (self.chunk_size - 1) * self.step + 1

    def described(self) -> dict[str, Any]:
        """Return what a digest says of them: of consecutive frames, what it said before there were others."""
        description = asdict(self)
        if self.step == 1:
            del description["step"]
        return description


def relative_action_stats(
    meta: DatasetMetadata, relative: RelativeActions, *, cache_dir: str | Path | None
) -> dict[str, np.ndarray]:
    """Return all statistics of a dataset's relative actions, by two Ray Data passes, one task per parquet file in each.

    Runs on the driver; Ray is started if it is not running. `cache_dir` as for `statistics.complete_stats`.

    Raises:
        ValueError: the state has fewer dimensions than are relative; no episode is as long as a chunk; data that
            contradicts the metadata or holds NaN.
        FileNotFoundError: a parquet file is missing.
    """
    episodes = select_episodes(meta, None)
    check_relative(meta, relative, episodes)
    state = meta.features[STATE]
    described = {**relative.described(), "state": stored_as(state)}
    name = digest(meta, [ACTION], episodes, described)
    return cached_stats([ACTION], cache_dir, name, partial(_compute, meta, relative, episodes))[ACTION]


def check_relative(meta: DatasetMetadata, relative: RelativeActions, episodes: np.ndarray) -> None:
    """Refuse episodes whose actions cannot be made relative.

    Raises:
        ValueError: the state has fewer dimensions than are relative; no episode is as long as a chunk.
    """
    action, state = meta.features[ACTION], meta.features.get(STATE)
    if state is None or state.shape < action.shape:
        raise ValueError(
            f"dataset {meta.root}: relative actions need an '{STATE}' with as many dimensions as '{ACTION}' has, "
            f"{action.shape[0]}; found {None if state is None else state.shape[0]}. Train with absolute actions, "
            "--policy.use_relative_actions=false"
        )
    if meta.episode_length[episodes].max() < relative.reach:
        raise ValueError(
            f"dataset {meta.root}: relative actions are normalised by chunks of {relative.reach} frames, and the "
            f"longest episode has {meta.episode_length[episodes].max()}; lower --policy.chunk_size"
        )


def relative_chunks(actions: np.ndarray, states: np.ndarray, spec: RelativeActions) -> np.ndarray:
    """An episode's whole chunks, relative: float32 actions (L, A) and states (L, S >= A) to (chunks * T, A)."""
    if len(actions) < spec.reach:
        return np.empty((0, actions.shape[1]), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(actions, spec.reach, axis=0)[..., :: spec.step].swapaxes(1, 2)
    start = states[: len(windows), None, : actions.shape[1]] * np.array(spec.dimensions, np.float32)
    return (windows - start).reshape(-1, actions.shape[1])


def _compute(meta: DatasetMetadata, relative: RelativeActions, episodes: np.ndarray) -> Stats:
    from lerobot.datasets.compute_stats import RunningQuantileStats

    features = [meta.features[ACTION], meta.features[STATE]]

    def chunks(fs: fsspec.AbstractFileSystem, file: dict[str, Any]) -> Iterator[np.ndarray]:
        for _, arrays in episode_arrays(fs, features=features, **file):
            actions, states = (arrays[feature.key].astype(np.float32, copy=False) for feature in features)
            chunk = relative_chunks(actions, states, relative)
            if len(chunk):
                yield chunk

    def extents(fs: fsspec.AbstractFileSystem, file: dict[str, Any]) -> dict[str, np.ndarray]:
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("count", "sum", "squares", "min", "max")}
        for chunk in chunks(fs, file):
            columns["count"].append(np.array(len(chunk)))
            columns["sum"].append(chunk.sum(0, dtype=np.float64))
            columns["squares"].append(np.square(chunk, dtype=np.float64).sum(0))
            columns["min"].append(chunk.min(0))
            columns["max"].append(chunk.max(0))
        return {name: np.array(rows) for name, rows in columns.items()}

    parts = [part for part in over_files(meta, episodes, extents) if len(part["count"])]
    totals = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    running: Any = RunningQuantileStats()
    running._count = int(totals["count"].sum())
    running._mean, running._mean_of_squares = (totals[name].sum(0) / running._count for name in ("sum", "squares"))
    running._min, running._max = totals["min"].min(0), totals["max"].max(0)
    edges = [
        np.linspace(low - 1e-10, high + 1e-10, running._num_quantile_bins + 1)
        for low, high in zip(running._min, running._max, strict=True)
    ]

    def histograms(fs: fsspec.AbstractFileSystem, file: dict[str, Any]) -> dict[str, np.ndarray]:
        counts = np.zeros((1, len(edges), running._num_quantile_bins), np.int64)
        for chunk in chunks(fs, file):
            for dimension, bins in enumerate(edges):
                counts[0, dimension] += np.histogram(chunk[:, dimension], bins=bins)[0]
        return {"counts": counts}

    counts = sum(part["counts"].sum(0) for part in over_files(meta, episodes, histograms))
    running._bin_edges, running._histograms = edges, list(counts)
    return {ACTION: running.get_statistics()}
