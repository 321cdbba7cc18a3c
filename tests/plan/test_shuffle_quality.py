"""Episodes per batch against the expectation for rows drawn at random."""

import numpy as np
import pytest

from vla_finetuning.data.plan import Episodes, StreamPlan
from vla_finetuning.plan.describe import episodes_in_a_batch


@pytest.mark.parametrize("weights", [None, [3, 1]], ids=["together", "mixture"])
def test_episodes_in_batch_match_random_draw_and_grow_with_window(weights):
    """Plan two datasets of 40 episodes, each in two stretches."""
    rng = np.random.default_rng(0)
    dataset, number = np.repeat([0, 1], 80), np.tile(np.repeat(np.arange(40), 2), 2)
    length = rng.integers(5, 60, 160)

    def plan(segment, window):
        episodes = Episodes(dataset.astype(np.int32), number, np.cumsum(length) - length, length)
        return StreamPlan(episodes, seed=0, segment_rows=segment, window_rows=window, weights=weights)

    rows = np.bincount(dataset * 40 + number, length).reshape(2, 40)
    share = rows / rows.sum() if weights is None else rows / rows.sum(1, keepdims=True) * [[3 / 4], [1 / 4]]
    at_random = np.sum(1 - (1 - share) ** 32)
    assert episodes_in_a_batch(plan(1, 10**6), 32) == pytest.approx(at_random, rel=0.05)
    by_window = [episodes_in_a_batch(plan(8, window), 32) for window in (16, 64, 256)]
    assert 1 <= by_window[0] < by_window[1] < by_window[2] < at_random
