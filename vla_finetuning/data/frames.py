"""Select the frames of episodes that are rows, without idle frames and by episode weight, and tabulate them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_finetuning.data.dataset import NUMERIC_DTYPES, DatasetMetadata
from vla_finetuning.data.idle import moving_runs
from vla_finetuning.data.options import FrameRanges
from vla_finetuning.data.relative_actions import ACTION, STATE

# Maximum number of tasks in a table.
MAX_TASKS = 8


def movement_keys(meta: DatasetMetadata, rename_map: Mapping[str, str] | None = None) -> list[str]:
    """Return the dataset's names of state and action, the features that show movement."""
    names = {key: (rename_map or {}).get(key, key) for key in meta.features}
    return [k for k, f in meta.features.items() if names[k] in (STATE, ACTION) and f.dtype in NUMERIC_DTYPES]


def frame_ranges_of(
    meta: DatasetMetadata,
    episodes: np.ndarray,
    *,
    dropped: int = 0,
    keys: Sequence[str] = (),
    skip_idle: float | None = None,
    weight: np.ndarray | None = None,
) -> FrameRanges:
    """Return the frames of some episodes (int64, ascending) that are rows, without the episodes that have none.

    Args:
        dropped: number of last frames of each episode that are no rows.
        keys: state and action vectors, for `skip_idle`.
        skip_idle: frames in which nothing moves for longer than this, in seconds, are no rows (see `data.idle`).
        weight: weights of all episodes of the dataset, float64, at least 0; None for 1.
    """
    if skip_idle is None:
        stretches = np.stack([episodes, np.zeros_like(episodes), meta.episode_length[episodes]], axis=1)
    else:
        stretches = moving_runs(meta, episodes, keys, skip_idle)
    episode, first, frames = stretches.T
    moving, frames = frames, np.minimum(frames, meta.episode_length[episode] - dropped - first)
    used = frames > 0 if weight is None else (frames > 0) & (weight[episode] > 0)
    moving = int(moving[np.isin(episode, episode[used])].sum())
    episode, first, frames = (np.ascontiguousarray(column[used]) for column in (episode, first, frames))
    return FrameRanges(episode, first, frames, None if weight is None else weight[episode], moving)


@dataclass(frozen=True)
class EpochShare:
    """The share of the episodes of a task (`name`), or of "all", in an epoch.

    `episodes` and `frames` count those of weight 0 too. `used` counts the frames that are rows, and `rows` the rows of
    an epoch: the mean if episodes have weights.
    """

    name: str
    episodes: int
    frames: int
    used: int
    rows: float

    @property
    def left_out(self) -> int:
        return self.frames - self.used


def shares(meta: DatasetMetadata, episodes: np.ndarray, ranges: FrameRanges) -> list[EpochShare]:
    """Return the share of all `episodes` (int64, ascending), then of each first task, if there are several.

    Tasks are ordered by how much their rows differ from their frames.
    """
    names = [(meta.episode_tasks[episode] or ("",))[0] for episode in episodes.tolist()]
    tasks, task = np.unique(np.array(names, object), return_inverse=True)
    stretch_task = task[np.searchsorted(episodes, ranges.episode)]
    count = len(tasks)
    columns = np.stack(
        [
            np.bincount(task, minlength=count),
            np.bincount(task, meta.episode_length[episodes], count),
            np.bincount(stretch_task, ranges.frames, count),
            np.bincount(stretch_task, ranges.frames * (1.0 if ranges.weight is None else ranges.weight), count),
        ]
    )
    by_task = [EpochShare(repr(t), int(e), int(f), int(k), r) for t, (e, f, k, r) in zip(tasks, columns.T, strict=True)]
    by_task.sort(key=lambda share: -abs(share.rows - share.frames))
    e, f, k, r = columns.sum(axis=1)
    total = EpochShare("all", int(e), int(f), int(k), float(r))
    return [total, *by_task] if count > 1 else [total]


def table(meta: DatasetMetadata, episodes: np.ndarray, ranges: FrameRanges) -> list[str]:
    """Return `shares` as lines of text: a heading, all, and at most MAX_TASKS tasks."""
    epoch_shares = shares(meta, episodes, ranges)
    lines = [f"{'episodes':>9} {'frames':>12} {'left out':>20} {'in an epoch':>20}  task"]
    for s in epoch_shares[: 1 + MAX_TASKS]:
        left_out = f"{s.left_out:,} ({s.left_out / s.frames:6.1%})"
        rows = f"{s.rows:,.0f} ({s.rows / s.frames:6.2f}x)"
        lines.append(f"{s.episodes:9,} {s.frames:12,} {left_out:>20} {rows:>20}  {s.name}")
    if len(epoch_shares) > 1 + MAX_TASKS:
        lines.append(f"{'':53} and {len(epoch_shares) - 1 - MAX_TASKS} tasks that differ less")
    return lines


def describe_weights(weight: np.ndarray) -> str:
    """Return a line about the weights of episodes, float64 (E,)."""
    values, counts = np.unique(weight, return_counts=True)
    if len(values) > 6:
        return f"{len(weight)} weights from {values[0]:g} to {values[-1]:g}, {weight.mean():.3g} on average"
    return ", ".join(f"{count} of weight {value:g}" for value, count in zip(values, counts, strict=True))
