"""How well a run's batches are mixed: printed before it starts, with what would improve it."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot_datasource import SEGMENT_ROWS, LeRobotDatasource
from vla_finetuning.options.programs import Config

# A batch is poorly mixed that has rows of fewer episodes than this share of what a shuffle of all rows would give.
POORLY_MIXED = 0.25


@dataclass(frozen=True)
class Mixing:
    """How well the run's batches are mixed.

    window_rows, window_bytes: what is shuffled among itself. segment_rows: consecutive rows in it, at most.
    episodes: in a global batch, on average (`StreamPlan.expected_episodes`). episodes_at_random: the
    same if all rows were shuffled. advice: what would make it better, where it is poor.
    """

    window_rows: int
    window_bytes: int
    segment_rows: int
    episodes: float
    episodes_at_random: float
    advice: str | None


def mixing_of(config: Config, source: LeRobotDatasource) -> Mixing:
    """Return how well the batches of a run are mixed that reads `source`, the training rows."""
    plan, batch = source.plan, config.global_batch_size
    actual, at_random = plan.expected_episodes(batch), plan.expected_episodes(batch, window_rows=10**18, segment_rows=1)
    advice = None
    if actual < POORLY_MIXED * at_random:
        advice = "frames that are fitted into the policy's size, or fewer --dataset.camera_keys, leave memory for more"
        if plan.window_rows > config.dataset.shuffle_window - SEGMENT_ROWS:
            advice = "a larger --dataset.shuffle_window mixes more"
    return Mixing(plan.window_rows, plan.window_rows * source.row_bytes(), plan.segment_rows, actual, at_random, advice)
