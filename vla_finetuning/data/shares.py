"""Repeat episodes by weight, and interleave the rows of several sources.

The arithmetic is exact for streams of any length.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Its multiples modulo 1 are spread more evenly than those of any other number.
GOLDEN = (5**0.5 - 1) / 2


class Repetitions:
    """Repetitions of E episodes in every epoch, by weights that need not be whole numbers.

    After n epochs, an episode of weight w has occurred floor(n w + phase) times, with a fixed phase in [0, 1). So every
    epoch has floor(w) or ceil(w) copies of it. Phases of episodes with equal weights are spread evenly, so that each
    epoch has about the same number of copies.

    Weights are float64 (E,), positive; `key` is the seed of the phases.
    """

    def __init__(self, weight: np.ndarray, key: tuple[int, ...]):
        self.weight = weight
        rng = np.random.default_rng(key)
        by_weight = np.lexsort((rng.permutation(len(weight)), weight))
        spread = (rng.random() + np.arange(len(weight)) * GOLDEN) % 1
        self._phase = np.empty(len(weight))
        self._phase[by_weight] = np.floor(spread * 2**32) / 2**32  # few bits, so that sums stay below 1

    def before(self, epoch: int) -> np.ndarray:
        """Return how often each episode occurs before an epoch, int64 (E,)."""
        return np.floor(epoch * self.weight + self._phase).astype(np.int64)


def fair_share(demands: Sequence[int], total: int) -> int:
    """Return the most that each of several consumers may have of `total` items, by max-min fairness.

    A consumer whose demand is at most the result gets its demand; the others get the result, at least one.
    """
    remaining = total
    for served, demand in enumerate(sorted(demands)):
        share = remaining // (len(demands) - served)
        if demand > share:
            return max(1, share)
        remaining -= demand
    return total


def mean_rows(length: np.ndarray, weight: np.ndarray) -> int:
    """Return the mean rows of an epoch of episodes with weights, at least one."""
    return max(1, round(float(weight @ length)))


class Interleaver:
    """Spreads the rows of several sources evenly over an epoch.

    Row i of a source with n rows is due at (2i + 1) / 2n of the epoch. Rows are ordered by due time, ties by source. So
    every stretch of the epoch holds each source's share, within a few rows.
    """

    def __init__(self, counts: Sequence[int]):
        self.counts = list(counts)

    def before(self, position: int) -> list[int]:
        """Return the rows of each source among the first `position` of the epoch, without iterating over them."""
        position, total, sources = int(position), sum(self.counts), len(self.counts)
        if position >= total:
            return list(self.counts)
        if sources == 1:
            return [position]
        # Rows due by (position - sources) / total of the epoch: at most `position`, and nearly as many.
        counts = [max(0, (2 * n * (position - sources) + total) // (2 * total)) for n in self.counts]
        # Two unequal due times a/n and b/m differ by at least 1/nm, so this many binary digits tell them apart.
        digits = 2 * max(self.counts).bit_length()
        due = [
            ((2 * d + 1 << digits) // n, source) for source, (d, n) in enumerate(zip(counts, self.counts, strict=True))
        ]
        heapq.heapify(due)
        for _ in range(position - sum(counts)):
            source = due[0][1]
            counts[source] += 1
            heapq.heapreplace(due, ((2 * counts[source] + 1 << digits) // self.counts[source], source))
        return counts


def apportion(rows: int, weights: Sequence[float], names: Sequence[str] = ()) -> list[int]:
    """Split `rows` into whole numbers in proportion to `weights`, by largest remainder.

    Raises ValueError for weights that are not positive numbers, or so small that one of `names` gets no row.
    """
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(
            f"mixture weights are {list(weights)}; expected positive numbers (leave a dataset out instead)"
        )
    shares = [rows * Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: rows - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        name = names[counts.index(0)] if names else f"dataset_index {counts.index(0)}"
        raise ValueError(
            f"mixture weights {list(weights)}: of the {rows} rows of an epoch, none would come from {name}; raise its "
            "weight or leave it out"
        )
    return counts
