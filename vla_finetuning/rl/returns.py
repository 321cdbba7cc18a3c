"""Compute returns, advantages and labels of frames from the outcomes of their episodes (RECAP, arXiv 2511.14759).

The reward is -1 for every frame but an episode's last one, which has 0 after a success and a penalty after a failure.
Rewards are divided by the number of frames of the task's longest episode. A value is then minus the share of such an
episode that is still to come.

Legend: F frames, in the order of episodes; E episodes. `length`: number of frames of each episode, int (E,).
"""

from __future__ import annotations

import numpy as np


def episode_returns(length: np.ndarray, success: np.ndarray, longest: np.ndarray, penalty: float) -> np.ndarray:
    """Return the return of every frame, float32 (F,).

    Args:
        success: outcome of each episode, bool (E,).
        longest: frames of the longest episode of each episode's task, int (E,).
        penalty: cost of a failure, in units of `longest`.
    """
    end = np.repeat(np.cumsum(length), length)
    to_come = end - 1 - np.arange(length.sum())
    returns = -to_come / np.repeat(longest, length) - np.repeat(np.where(success, 0.0, penalty), length)
    return returns.astype(np.float32)


def advantages(returns: np.ndarray, value: np.ndarray, length: np.ndarray, horizon: int) -> np.ndarray:
    """Return the rewards of the next `horizon` frames plus the value after them minus the value now, float32 (F,).

    The rewards between two frames are the difference of their returns. After an episode's end the value is 0.
    """
    ahead = np.arange(len(returns)) + horizon
    within = ahead < np.repeat(np.cumsum(length), length)
    later = np.where(within, ahead, 0)
    rewards = returns.astype(np.float64) - np.where(within, returns[later], 0.0)
    return (rewards + np.where(within, value[later], 0.0) - value).astype(np.float32)


def label_positive(advantage: np.ndarray, task: np.ndarray, corrected: np.ndarray, positive: float) -> np.ndarray:
    """Return a mask of the positive frames, bool (F,), from the advantage and task number of each, and of corrections.

    A frame is positive if its advantage is above the (1 - positive) quantile of its task, or if it is a correction.
    Corrections do not count in the quantile.
    """
    is_positive = corrected.copy()
    for number in np.unique(task):
        judged = (task == number) & ~corrected
        if judged.any():
            least = np.quantile(advantage[judged], 1 - positive) if positive < 1 else -np.inf
            is_positive |= judged & (advantage > least)
    return is_positive
