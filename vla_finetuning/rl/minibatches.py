"""Which decisions each update is made of: a function of the episodes and the seed, whatever the number of workers.

All ranks know how every episode went, and so the whole table of decisions; each holds the columns of its own groups. A
minibatch is a piece of one permutation of the table. A rank computes its own rows of it, in as many micro-batches as
the rank that has most: where one has fewer, rows of weight zero fill up, and every sum is divided by the rows of all
ranks.

Legend: E episodes of an iteration, R rows (decisions) to learn from, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def group_seed(seed: int, iteration: int, group: int) -> int:
    """Of the initial state of a group's episodes. Never one of the small numbers that held-out episodes have."""
    state = np.random.SeedSequence([seed, iteration, group]).generate_state(1)
    return int(2**31 + state[0] % 2**31)


def rank_of[T: (int, np.ndarray)](group: T, ranks: int) -> T:
    """Who plays a group; or groups."""
    return group % ranks


@dataclass(frozen=True)
class Table:
    """The decisions to learn from, those of an episode one after the other: int64 (R,) each."""

    episode: np.ndarray
    decision: np.ndarray

    @classmethod
    def of(cls, decisions: np.ndarray, used: np.ndarray) -> Table:
        """decisions: int (E,), how many each episode had; used: bool (E,)."""
        counts = np.where(used, decisions, 0)
        episode = np.repeat(np.arange(len(counts)), counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        return cls(episode, np.arange(len(episode)) - starts)


@dataclass(frozen=True)
class Minibatch:
    """What one rank does for an update.

    Attributes:
        rows: of all ranks together. micros: rows of the table that this rank computes, one micro-batch after the other;
            an empty one is filled up.
    """

    rows: int
    micros: list[np.ndarray]


def minibatches(
    table: Table, owner: np.ndarray, *, rank: int, ranks: int, size: int, micro_rows: int, key: tuple[int, ...]
) -> Iterator[Minibatch]:
    """A pass over the table.

    Args:
        owner: int (R,), whose rank holds a row. size: rows of a minibatch at most; they are cut evenly.
        micro_rows: at most so many of them at once on a rank. key: of the permutation.
    """
    rows = len(table.episode)
    order = np.random.default_rng(list(key)).permutation(rows)
    for piece in np.array_split(order, -(-rows // size)) if rows else ():
        most = np.bincount(owner[piece], minlength=ranks).max()
        own = piece[owner[piece] == rank]
        yield Minibatch(len(piece), np.array_split(own, -(-int(most) // micro_rows)))
