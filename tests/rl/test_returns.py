"""Returns, advantages and labels, against plain loops over episodes."""

import numpy as np
import pytest
from scipy.stats import norm

from vla_finetuning.rl.returns import advantages, episode_returns, label_positive
from vla_finetuning.rl.values import auroc, auroc_interval

LENGTH = np.array([5, 1, 9, 3])
SUCCESS = np.array([True, False, False, True])
LONGEST = np.array([9, 9, 9, 4])


def test_returns_equal_sum_of_future_rewards():
    expected = []
    for length, success, longest in zip(LENGTH, SUCCESS, LONGEST, strict=True):
        rewards = [-1 / longest] * (length - 1) + [0.0 if success else -0.25]
        expected += [sum(rewards[frame:]) for frame in range(length)]
    np.testing.assert_allclose(episode_returns(LENGTH, SUCCESS, LONGEST, 0.25), expected, atol=1e-6)


@pytest.mark.parametrize("horizon", [1, 3, 50])
def test_advantages_equal_n_step_returns_minus_value(horizon):
    returns = episode_returns(LENGTH, SUCCESS, LONGEST, 1.0)
    value = np.random.default_rng(0).uniform(-1, 0, len(returns)).astype(np.float32)
    expected, first = [], 0
    for length, success, longest in zip(LENGTH, SUCCESS, LONGEST, strict=True):
        rewards = [-1 / longest] * (length - 1) + [0.0 if success else -1.0]
        for frame in range(length):
            after = value[first + frame + horizon] if frame + horizon < length else 0.0
            expected.append(sum(rewards[frame : frame + horizon]) + after - value[first + frame])
        first += length
    np.testing.assert_allclose(advantages(returns, value, LENGTH, horizon), expected, atol=1e-6)


def test_positive_labels_are_above_quantile_of_their_task():
    rng = np.random.default_rng(0)
    advantage, task = rng.normal(size=400).astype(np.float32), np.repeat([0, 1], 200)
    advantage[200:] += 10.0  # another task
    corrected = rng.random(400) < 0.1
    positive = label_positive(advantage, task, corrected, 0.3)
    for number in (0, 1):
        rows = (task == number) & ~corrected
        threshold = np.sort(advantage[rows])[-round(0.3 * rows.sum())]
        assert abs(positive[rows].mean() - 0.3) < 0.01
        assert not positive[rows & (advantage < threshold)].any()
    assert positive[corrected].all()
    assert label_positive(advantage, task, corrected, 1.0).all()


def test_auroc_equals_share_of_ordered_pairs():
    rng = np.random.default_rng(0)
    score, truth = rng.integers(0, 5, 60).astype(float), rng.random(60) < 0.4
    pairs = [(t > f) + 0.5 * (t == f) for t in score[truth] for f in score[~truth]]
    assert auroc(score, truth) == pytest.approx(np.mean(pairs))
    assert auroc(score, np.ones(60, bool)) is None


@pytest.mark.parametrize(("positives", "negatives", "apart"), [(3, 3, 0.0), (3, 3, 3.0), (4, 16, 1.0), (30, 30, 0.0)])
def test_auroc_interval_covers_true_auroc(positives, negatives, apart):
    """Of normal scores, whose AUROC is known: Phi(apart / sqrt(2)). Few rows too, where all pairs are in order."""
    rng, truth = np.random.default_rng(0), np.repeat([True, False], [positives, negatives])
    samples = rng.normal(size=(300, len(truth))) + apart * truth
    expected = norm.cdf(apart / np.sqrt(2))
    intervals = np.array([auroc_interval(auroc(score, truth), positives, negatives) for score in samples])
    assert ((intervals[:, 0] <= expected) & (expected <= intervals[:, 1])).mean() >= 0.94
    assert auroc_interval(1.0, positives, negatives)[1] == 1.0 > auroc_interval(1.0, positives, negatives)[0]
