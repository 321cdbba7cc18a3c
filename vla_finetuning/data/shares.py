"""How often things come: episodes in an epoch by weights, and the rows of several sources among each other.

Pure arithmetic on whole numbers, exact however long a stream is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

# Its multiples divide an interval of 1 more evenly than any other number's.
GOLDEN = (5**0.5 - 1) / 2


class Repetitions:
    """How often each of E episodes comes in every epoch, by weights that need not be whole numbers.

    By the end of its n-th epoch an episode of weight w has come floor(n w + phase) times, with a phase of its own in
    [0, 1): never one off n w, and in each epoch as often as the whole number below w or above it. Among episodes of the
    same weight phases are spread evenly, so that in every epoch about as many of them come.

    Args:
        weight: float64 (E,), positive. key: seeds the phases.
    """

    def __init__(self, weight: np.ndarray, key: tuple[int, ...]):
        self.weight = weight
        rng = np.random.default_rng(key)
        by_weight = np.lexsort((rng.permutation(len(weight)), weight))
        spread = (rng.random() + np.arange(len(weight)) * GOLDEN) % 1
        self._phase = np.empty(len(weight))
        self._phase[by_weight] = np.floor(spread * 2**32) / 2**32  # short enough for sums with them to stay below 1

    def before(self, epoch: int) -> np.ndarray:
        """Return how often each has come before an epoch, int64 (E,)."""
        return np.floor(epoch * self.weight + self._phase).astype(np.int64)


def fair_share(demands: Sequence[int], total: int) -> int:
    """Return what each may have where several want a number of things, and there are at most `most` of them in all.

    Those that want no more than this have what they want; the others this much, so that together they have `most`. At
    least one.
    """
    remaining = total
    for served, demand in enumerate(sorted(demands)):
        share = remaining // (len(demands) - served)
        if demand > share:
            return max(1, share)
        remaining -= demand
    return total


def mean_rows(length: np.ndarray, weight: np.ndarray) -> int:
    """Rows of an epoch of episodes with weights, on average; at least one."""
    return max(1, round(float(weight @ length)))


class Interleaver:
    """Spreads the rows of several sources evenly over an epoch.

    The i-th of a source's n rows is due at (2i + 1) / 2n of the epoch; rows come in the order in which they are due,
    the earlier source first when two are due at once. So no stretch of the epoch has many rows more, or less, of a
    source than its share.
    """

    def __init__(self, counts: Sequence[int]):
        self.counts = list(counts)

    def before(self, position: int) -> list[int]:
        """Rows of each source among the first `position` of the epoch, found without walking there."""
        position, total, sources = int(position), sum(self.counts), len(self.counts)
        if position >= total:
            return list(self.counts)
        if sources == 1:
            return [position]
        # All that is due by (position - sources) / total of the epoch: at most `position` rows, and nearly as many.
        counts = [max(0, (2 * n * (position - sources) + total) // (2 * total)) for n in self.counts]
        # Two unequal times a/n and b/m differ by 1/nm or more: so many binary digits tell them apart.
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


def apportion(rows: int, weights: Sequence[float]) -> list[int]:
    """Split `rows` in proportion to `weights`, whole rows, by largest remainder.

    Raises:
        ValueError: weights that are not positive numbers, or so small that no row falls to one.
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
        raise ValueError(
            f"mixture weights {list(weights)}: of the {rows} rows of an epoch, none would come from dataset_index "
            f"{counts.index(0)}; raise its weight or leave it out"
        )
    return counts
