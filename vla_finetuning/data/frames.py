"""Select the frames of episodes that are rows, without idle frames and by episode weight, and tabulate them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_finetuning.data.dataset import NUMERIC_DTYPES, DatasetMetadata
from vla_finetuning.data.idle import moving_runs
from vla_finetuning.data.options import FrameRanges
from vla_finetuning.data.relative_actions import ACTION, STATE

# Maximum number of tasks in a table.
MAX_TASKS = 8


def movement_keys(meta: DatasetMetadata) -> list[str]:
    """Return the names of those of state and action that the dataset has: the features that show movement."""
    return [key for key, f in meta.features.items() if key in (STATE, ACTION) and f.dtype in NUMERIC_DTYPES]


def frame_ranges_of(
    meta: DatasetMetadata,
    episodes: np.ndarray,
    *,
    dropped: int = 0,
    keys: Sequence[str] = (),
    skip_idle: float | None = None,
    weight: np.ndarray | None = None,
    skip_unreadable: bool = False,
) -> FrameRanges:
    """Return the frames of some episodes (int64, ascending) that are rows, without the episodes that have none.

    Args:
        dropped: number of last frames of each episode that are no rows.
        keys: state and action vectors, for `skip_idle`.
        skip_idle: frames in which nothing moves for longer than this, in seconds, are no rows (see `data.idle`).
        weight: weights of all episodes of the dataset, float64, at least 0; None for 1.
        skip_unreadable: as of `moving_runs`.
    """
    if skip_idle is None:
        runs = np.stack([episodes, np.zeros_like(episodes), meta.episode_length[episodes]], axis=1)
    else:
        runs = moving_runs(meta, episodes, keys, skip_idle, skip_unreadable)
    episode, first, length = runs.T
    frames = np.minimum(length, meta.episode_length[episode] - dropped - first)
    used = frames > 0 if weight is None else (frames > 0) & (weight[episode] > 0)
    moving = int(length[np.isin(episode, episode[used])].sum())
    episode, first, frames = (np.ascontiguousarray(column[used]) for column in (episode, first, frames))
    return FrameRanges(episode, first, frames, None if weight is None else weight[episode], moving)


def table(meta: DatasetMetadata, episodes: np.ndarray, ranges: FrameRanges) -> list[str]:
    """Return lines of text about the share of `episodes` (int64, ascending) in an epoch.

    They are a heading, all episodes, and by first task the episodes of at most MAX_TASKS tasks, if there are several:
    those whose rows differ most from their frames. Episodes of weight 0 count as left out.
    """
    names = [(meta.episode_tasks[episode] or ("",))[0] for episode in episodes.tolist()]
    tasks, task = np.unique(np.array(names, object), return_inverse=True)
    range_task, count = task[np.searchsorted(episodes, ranges.episode)], len(tasks)
    weight = 1.0 if ranges.weight is None else ranges.weight
    columns = np.stack(
        [
            np.bincount(task, minlength=count),
            np.bincount(task, meta.episode_length[episodes], count),
            np.bincount(range_task, ranges.frames, count),
            np.bincount(range_task, ranges.frames * weight, count),
        ]
    )
    order = np.argsort(-abs(columns[3] - columns[1]), kind="stable")[: MAX_TASKS if count > 1 else 0]
    lines = [f"{'episodes':>9} {'frames':>12} {'left out':>20} {'in an epoch':>20}  task"]
    for name, share in [("all", columns.sum(axis=1)), *((repr(tasks[i]), columns[:, i]) for i in order)]:
        of_task, frames, used, rows = share.tolist()
        left_out = f"{frames - used:,.0f} ({(frames - used) / frames:6.1%})"
        in_epoch = f"{rows:,.0f} ({rows / frames:6.2f}x)"
        lines.append(f"{of_task:9,.0f} {frames:12,.0f} {left_out:>20} {in_epoch:>20}  {name}")
    if count > MAX_TASKS:
        lines.append(f"{'':53} and {count - MAX_TASKS} more tasks, whose share changes less")
    return lines


def describe_weights(weight: np.ndarray) -> str:
    """Return a line about the weights of episodes, float64 (E,)."""
    values, counts = np.unique(weight, return_counts=True)
    if len(values) > 6:
        return f"{len(weight)} weights from {values[0]:g} to {values[-1]:g}, {weight.mean():.3g} on average"
    return ", ".join(f"{count} of weight {value:g}" for value, count in zip(values, counts, strict=True))
