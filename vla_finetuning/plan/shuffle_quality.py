"""How well a run's batches are mixed: printed before it starts, with what would improve it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lerobot_datasource import SEGMENT_ROWS, LeRobotDatasource
from vla_finetuning.data.shards import Plan
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.programs import Config

# A batch is poorly mixed that has rows of fewer episodes than this share of what a shuffle of all rows would give.
POORLY_MIXED = 0.25
# Batches that are looked at.
BATCHES = 32


@dataclass(frozen=True)
class Mixing:
    """How well the run's batches are mixed.

    window_rows, window_bytes: what is shuffled among itself. segment_rows: consecutive rows in it, at most.
    episodes: in a global batch, on average of the first ones. episodes_at_random: the same if all rows were shuffled.
    advice: what would make it better, where it is poor.
    """

    window_rows: int
    window_bytes: int
    segment_rows: int
    episodes: float
    episodes_at_random: float
    advice: str | None

    def describe(self, options: DatasetOptions) -> list[str]:
        """Return the plan's lines about shuffling."""
        bounded = self.window_rows <= options.shuffle_window - SEGMENT_ROWS
        lines = [
            f"Shuffling    windows of {self.window_rows} rows"
            + (f" (of {options.shuffle_window} asked for, as many as memory is meant for)" if bounded else "")
            + f", {self.window_bytes / 2**20:.0f} MiB; segments of at most {self.segment_rows}",
            f"             a global batch has rows of about {self.episodes:.1f} episodes; of "
            f"{self.episodes_at_random:.1f} if all rows were shuffled",
        ]
        if options.shards > 1:
            lines.append(
                f"             {options.shards} shards, equally many rows of each in a batch: each node reads one, "
                "for its own workers"
            )
        if options.global_shuffle:
            lines.append("             from the second epoch on, all rows are shuffled (--dataset.global_shuffle)")
        if self.advice:
            lines.append(f"             POORLY MIXED: {self.advice}")
        return lines


def mixing_of(config: Config, source: LeRobotDatasource) -> Mixing:
    """Return how well the batches of a run are mixed that reads `source`, the training rows."""
    plan, batch = source.plan, config.global_batch_size
    actual, at_random = episodes_in_a_batch(plan, batch), episodes_at_random(plan, batch)
    advice = None
    if actual < POORLY_MIXED * at_random:
        advice = "frames that are fitted into the policy's size, or fewer --dataset.camera_keys, leave memory for more"
        if plan.window_rows > config.dataset.shuffle_window - SEGMENT_ROWS:
            advice = "a larger --dataset.shuffle_window mixes more"
    return Mixing(plan.window_rows, plan.window_rows * source.row_bytes(), plan.segment_rows, actual, at_random, advice)


def episodes_in_a_batch(plan: Plan, batch_rows: int) -> float:
    """Return how many episodes a batch of consecutive rows has, on average over the first ones of an epoch."""
    batches = max(1, min(BATCHES, plan.rows_per_epoch // batch_rows))
    number, _ = _numbered(plan)
    row_episode = [number[s.episode[s.rows()[0]]] for s in plan.slices(0, batches * batch_rows)]
    return float(np.mean([len(np.unique(batch)) for batch in np.concatenate(row_episode).reshape(batches, -1)]))


def episodes_at_random(plan: Plan, batch_rows: int) -> float:
    """Return how many episodes a batch of rows would have, on average, that are drawn one by one from an epoch."""
    number, share = _numbered(plan)
    return float((1 - (1 - np.bincount(number, share).clip(max=1)) ** batch_rows).sum())


def _numbered(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the episode that each entry of `plan.episodes` is of, and its share of an epoch."""
    episodes = plan.episodes
    rows = episodes.length * (1.0 if plan.episode_weights is None else plan.episode_weights)
    is_mixture = len(plan.rows_per_source) > 1
    source = episodes.dataset_index if is_mixture else np.zeros_like(episodes.dataset_index)
    share = rows / np.bincount(source, rows)[source] * np.array(plan.rows_per_source)[source] / plan.rows_per_epoch
    numbers = episodes.dataset_index * (episodes.episode_index.max() + 1) + episodes.episode_index
    return np.unique(numbers, return_inverse=True)[1], share
