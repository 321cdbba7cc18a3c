"""Describe how the rows of a run are shuffled."""

from __future__ import annotations

import numpy as np

from lerobot_datasource import SEGMENT_ROWS
from vla_finetuning.data.shards import Plan
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.rows import Rows

# Number of batches over which episodes are counted.
BATCHES = 32


def describe_shuffling(config: Config, rows: Rows) -> list[str]:
    """Return the plan's lines about shuffling: windows, segments, and the episodes of a global batch."""
    source, options = rows.source(), config.dataset
    plan = source.plan
    episodes = episodes_in_a_batch(plan, config.global_batch_size)
    is_limited = plan.window_rows <= options.shuffle_window - SEGMENT_ROWS
    lines = [
        f"Shuffling    windows of {plan.window_rows} rows"
        + (f" ({options.shuffle_window} requested; limited by memory)" if is_limited else "")
        + f", {plan.window_rows * source.row_bytes() / 2**20:.0f} MiB; segments of at most {plan.segment_rows}",
        f"             a global batch has rows of about {episodes:.1f} episodes",
    ]
    if options.shards > 1:
        lines.append(
            f"             {options.shards} shards, equally many rows of each in a batch: each node reads one, "
            "for its own workers"
        )
    if options.global_shuffle:
        lines.append("             from the second epoch on, all rows are shuffled (--dataset.global_shuffle)")
    return lines


def episodes_in_a_batch(plan: Plan, batch_rows: int) -> float:
    """Return the mean number of episodes in a batch of consecutive rows, over the first batches of an epoch."""
    batches = max(1, min(BATCHES, plan.rows_per_epoch // batch_rows))
    episodes = plan.episodes
    numbers = episodes.dataset_index * (episodes.episode_index.max() + 1) + episodes.episode_index
    row_episode = [numbers[s.episode[s.rows()[0]]] for s in plan.slices(0, batches * batch_rows)]
    return float(np.mean([len(np.unique(batch)) for batch in np.concatenate(row_episode).reshape(batches, -1)]))
