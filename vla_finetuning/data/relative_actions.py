"""Compute normalisation statistics of relative actions: action chunks minus the state at their first frame.

The results equal LeRobot's `compute_relative_action_stats` bit for bit. They cover every chunk within one episode;
quantiles come from histograms of 5000 bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata, known_episodes
from vla_finetuning.data.statistics import Stats, cached_stats, digest, episode_arrays, files_of, stored_as

ACTION, STATE = "action", "observation.state"
# LeRobot's batch size; results depend on it, as a batch with new extremes rebins the histograms.
BATCH_CHUNKS = 50_000


@dataclass(frozen=True)
class RelativeActions:
    """How a policy makes actions relative to the state at the start of a chunk.

    Attributes:
        chunk_size: number of actions in a chunk.
        dimensions: mask of the action dimensions from which the state is subtracted.
        step: frames of the dataset between two actions of a chunk.
    """

    chunk_size: int
    dimensions: tuple[bool, ...]
    step: int = 1

    @property
    def reach(self) -> int:
        """Number of frames that a chunk spans, its first and last included."""
        return (self.chunk_size - 1) * self.step + 1

    def described(self) -> dict[str, Any]:
        """Return the description in cache digests."""
        description = asdict(self)  # without the default step, so that caches of earlier versions stay valid
        if self.step == 1:
            del description["step"]
        return description


def relative_action_stats(
    meta: DatasetMetadata,
    relative: RelativeActions,
    *,
    cache_dir: str | Path | None,
    episodes: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Return all statistics of a dataset's relative actions.

    Run on the driver, without Ray. `cache_dir` and `episodes` are as for `statistics.complete_stats`.

    Raises:
        ValueError: the state has fewer dimensions than are relative; no episode is as long as a chunk; data that
            contradicts the metadata or holds NaN.
        FileNotFoundError: a parquet file is missing.
    """
    episodes = known_episodes(meta) if episodes is None else episodes
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
    """Return the relative actions of an episode's chunks, (chunks * T, A), for float32 actions (L, A), states (L, S).

    S must be at least A.
    """
    if len(actions) < spec.reach:
        return np.empty((0, actions.shape[1]), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(actions, spec.reach, axis=0)[..., :: spec.step].swapaxes(1, 2)
    start = states[: len(windows), None, : actions.shape[1]] * np.array(spec.dimensions, np.float32)
    return (windows - start).reshape(-1, actions.shape[1])


def _compute(meta: DatasetMetadata, relative: RelativeActions, episodes: np.ndarray) -> Stats:
    from lerobot.datasets.compute_stats import RunningQuantileStats

    features = [meta.features[ACTION], meta.features[STATE]]

    def chunks() -> Iterator[np.ndarray]:
        for file in files_of(meta, episodes):
            for _, arrays in episode_arrays(meta.fs, features=features, **file):
                actions, states = (arrays[feature.key].astype(np.float32, copy=False) for feature in features)
                yield relative_chunks(actions, states, relative)

    running, batch_rows = RunningQuantileStats(), BATCH_CHUNKS * relative.chunk_size
    pending: list[np.ndarray] = []
    try:
        for chunk in chunks():
            pending.append(chunk)
            if sum(map(len, pending)) >= batch_rows:
                rows = np.concatenate(pending)
                for first in range(0, len(rows) - batch_rows + 1, batch_rows):
                    running.update(rows[first : first + batch_rows])
                pending = [rows[len(rows) // batch_rows * batch_rows :]]
    except (ValueError, OSError) as error:
        raise type(error)(f"dataset {meta.root}: {error}") from error
    if len(rows := np.concatenate(pending)):
        running.update(rows)
    return {ACTION: running.get_statistics()}
