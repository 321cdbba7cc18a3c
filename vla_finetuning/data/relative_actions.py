"""Compute normalisation statistics of relative actions: action chunks minus the state at their first frame.

LeRobot's `compute_relative_action_stats` computes them, of every chunk within one episode.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata, Stats
from vla_finetuning.data.statistics import cached_stats, digest, episode_arrays, in_threads, stored_as

ACTION, STATE = "action", "observation.state"


@dataclass(frozen=True)
class RelativeActions:
    """How a policy makes actions relative to the state at the start of a chunk."""

    chunk_size: int
    dimensions: tuple[bool, ...]  # from which the state is subtracted
    step: int = 1  # frames of the dataset between two actions of a chunk

    @property
    def reach(self) -> int:
        """Number of frames that a chunk spans, its first and last included."""
        return (self.chunk_size - 1) * self.step + 1


def relative_action_stats(
    meta: DatasetMetadata,
    relative: RelativeActions,
    *,
    cache_dir: str | Path | None,
    episodes: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return all statistics of a dataset's relative actions, with dimensions in the order of rows.

    Parameters and errors are those of `complete_stats`.
    """
    orders = [meta.features[key].order for key in (ACTION, STATE)]
    name = digest(
        meta, [ACTION], episodes, {**asdict(relative), "state": stored_as(meta.features[STATE]), "orders": orders}
    )
    return cached_stats([ACTION], cache_dir, name, partial(_compute, meta, relative, episodes))[ACTION]


def check_relative(meta: DatasetMetadata, relative: RelativeActions, episodes: np.ndarray) -> None:
    """Raise ValueError if the state has fewer dimensions than are relative, or no episode is as long as a chunk."""
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
    from lerobot.datasets.compute_stats import compute_relative_action_stats

    features = {key: meta.features[key] for key in (ACTION, STATE)}
    columns: dict[str, list[np.ndarray]] = {ACTION: [], STATE: [], "episode_index": []}
    read = in_threads(meta, episodes, lambda file: list(episode_arrays(meta.fs, features=[*features.values()], **file)))
    for episode, arrays in itertools.chain(*read):
        for feature in features.values():
            if feature.order is not None:
                arrays[feature.key] = arrays[feature.key][:, list(feature.order)]
        for phase in range(relative.step):  # every `step`-th frame of an episode is like an episode
            rows = {key: arrays[feature.key][phase :: relative.step] for key, feature in features.items()}
            rows["episode_index"] = np.full(len(rows[ACTION]), episode * relative.step + phase)
            for key, values in rows.items():
                columns[key].append(values)
    # LeRobot finds dimensions by name.
    names = [f"dimension {number:04}" for number in range(len(relative.dimensions))]
    absolute = [name for name, is_relative in zip(names, relative.dimensions, strict=True) if not is_relative]
    rows = {key: np.concatenate(values) for key, values in columns.items()}
    declared = {ACTION: {"shape": features[ACTION].shape, "names": names}}
    return {ACTION: compute_relative_action_stats(rows, declared, relative.chunk_size, absolute)}
