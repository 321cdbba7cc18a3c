"""What a frame is worth by how its episode ended: returns, their distribution, advantages, labels (RECAP, 2511.14759).

A reward is -1 for every frame but the last of an episode, which ends with 0 after a success and with a penalty after a
failure. All are divided by the frames of the longest episode of the task, so that a value is the share of such an
episode that is still to come, negative. Functions of numpy arrays; a reference for each is in its test.

Legend: F frames, E episodes, K bins.
"""

from __future__ import annotations

import numpy as np


def episode_returns(length: np.ndarray, success: np.ndarray, longest: np.ndarray, penalty: float) -> np.ndarray:
    """The return of every frame, episode after episode: float32 (F,).

    Args:
        length: int (E,), frames. success: bool (E,). longest: int (E,), of the episode's task.
        penalty: of a failure, in units of `longest`.
    """
    end = np.repeat(np.cumsum(length), length)
    to_come = end - 1 - np.arange(length.sum())
    returns = -to_come / np.repeat(longest, length) - np.repeat(np.where(success, 0.0, penalty), length)
    return returns.astype(np.float32)


def advantages(returns: np.ndarray, value: np.ndarray, length: np.ndarray, horizon: int) -> np.ndarray:
    """Return what the next `horizon` frames bring, and the value after them, above the value now: float32 (F,).

    The rewards up to a frame are the difference of two returns. Where the episode ends sooner, nothing follows.

    Args:
        returns, value: float32 (F,), episode after episode. length: int (E,).
    """
    ahead = np.arange(len(returns)) + horizon
    within = ahead < np.repeat(np.cumsum(length), length)
    later = np.where(within, ahead, 0)
    rewards = returns.astype(np.float64) - np.where(within, returns[later], 0.0)
    return (rewards + np.where(within, value[later], 0.0) - value).astype(np.float32)


def label_positive(advantage: np.ndarray, task: np.ndarray, corrected: np.ndarray, positive: float) -> np.ndarray:
    """Return which frames are positive: bool (F,).

    Those whose advantage is above the (1 - positive) quantile of their task, and all corrections.

    Args:
        advantage: float32 (F,). task: int (F,). corrected: bool (F,); corrections do not count in the quantile.
    """
    is_positive = corrected.copy()
    for number in np.unique(task):
        judged = (task == number) & ~corrected
        if judged.any():
            least = np.quantile(advantage[judged], 1 - positive) if positive < 1 else -np.inf
            is_positive |= judged & (advantage > least)
    return is_positive
