"""Describe how well a run's batches are mixed, and what would improve it."""

from __future__ import annotations

import numpy as np

from lerobot_datasource import SEGMENT_ROWS
from vla_finetuning.data.shards import Plan
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.rows import Rows

# A batch is poorly mixed if it has rows of fewer episodes than this share of what a shuffle of all rows would give.
POORLY_MIXED = 0.25
# Number of batches that are looked at.
BATCHES = 32


def describe_shuffling(config: Config, rows: Rows) -> list[str]:
    """Return the plan's lines about shuffling: windows, segments, and the episodes of a global batch."""
    source, options, batch = rows.source(), config.dataset, config.global_batch_size
    plan = source.plan
    episodes, at_random = episodes_in_a_batch(plan, batch), episodes_at_random(plan, batch)
    is_limited = plan.window_rows <= options.shuffle_window - SEGMENT_ROWS
    lines = [
        f"Shuffling    windows of {plan.window_rows} rows"
        + (f" (of {options.shuffle_window} asked for, as many as memory is meant for)" if is_limited else "")
        + f", {plan.window_rows * source.row_bytes() / 2**20:.0f} MiB; segments of at most {plan.segment_rows}",
        f"             a global batch has rows of about {episodes:.1f} episodes; of "
        f"{at_random:.1f} if all rows were shuffled",
    ]
    if options.shards > 1:
        lines.append(
            f"             {options.shards} shards, equally many rows of each in a batch: each node reads one, "
            "for its own workers"
        )
    if options.global_shuffle:
        lines.append("             from the second epoch on, all rows are shuffled (--dataset.global_shuffle)")
    if episodes < POORLY_MIXED * at_random:
        advice = "a larger --dataset.shuffle_window mixes more"
        if is_limited:
            advice = (
                "frames that are fitted into the policy's size, or fewer --dataset.camera_keys, leave memory for more"
            )
        lines.append(f"             POORLY MIXED: {advice}")
    return lines


def episodes_in_a_batch(plan: Plan, batch_rows: int) -> float:
    """Return the mean number of episodes in a batch of consecutive rows, over the first batches of an epoch."""
    batches = max(1, min(BATCHES, plan.rows_per_epoch // batch_rows))
    number, _ = _numbered(plan)
    row_episode = [number[s.episode[s.rows()[0]]] for s in plan.slices(0, batches * batch_rows)]
    return float(np.mean([len(np.unique(batch)) for batch in np.concatenate(row_episode).reshape(batches, -1)]))


def episodes_at_random(plan: Plan, batch_rows: int) -> float:
    """Return the expected number of episodes in a batch of rows that are drawn one by one from an epoch."""
    number, share = _numbered(plan)
    return float((1 - (1 - np.bincount(number, share).clip(max=1)) ** batch_rows).sum())


def _numbered(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return the episode number of each entry of `plan.episodes`, and the entry's share of an epoch's rows."""
    episodes = plan.episodes
    rows = episodes.length * (1.0 if plan.episode_weights is None else plan.episode_weights)
    is_mixture = len(plan.rows_per_source) > 1
    source = episodes.dataset_index if is_mixture else np.zeros_like(episodes.dataset_index)
    share = rows / np.bincount(source, rows)[source] * np.array(plan.rows_per_source)[source] / plan.rows_per_epoch
    numbers = episodes.dataset_index * (episodes.episode_index.max() + 1) + episodes.episode_index
    return np.unique(numbers, return_inverse=True)[1], share
