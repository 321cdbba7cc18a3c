"""Divide the rows of a plan into shards, so that each node can read and cache one of them.

A shard is an equal part of every dataset, consecutive in stored order, and has a stream of its own (`StreamPlan`).
The run's stream takes ``turn_rows`` rows of each shard in turn::

    shard 0 │ shard 1 │ … │ shard N-1 │ shard 0 │ shard 1 │ …
    0       G        2G                NG                       stream positions, G = turn_rows

Every batch has as many rows of one shard as of another, and every N-th turn belongs to one shard. An epoch consists of
one epoch of every shard. Epochs may begin and end within a turn, and shards differ by a few rows, so the last two
rounds of an epoch are filled from the shards that have rows left.

Like `data.plan`, the module does not import Ray and does not read files.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_finetuning.data.plan import Episodes, StreamPlan, WindowSlice


@dataclass(frozen=True)
class Sharding:
    """The number of shards, and the rows of a turn."""

    count: int
    turn_rows: int

    def before(self, position: int) -> np.ndarray:
        """Return the rows of each shard among the first `position` rows of endless turns, int64 (count,)."""
        rounds, rest = divmod(position, self.count * self.turn_rows)
        partial_rows = np.clip(rest - np.arange(self.count) * self.turn_rows, 0, self.turn_rows)
        return rounds * self.turn_rows + partial_rows

    def turn(self, position: int) -> tuple[int, int]:
        """Return the shard at a stream position, and the position at which the next turn begins."""
        number = position // self.turn_rows
        return number % self.count, (number + 1) * self.turn_rows

    def position(self, shard: int, nth: np.ndarray) -> np.ndarray:
        """Return the positions of the `nth` rows of a shard in endless turns, int64 (N,)."""
        rounds, rest = np.divmod(nth, self.turn_rows)
        return (rounds * self.count + shard) * self.turn_rows + rest


def divide(
    dataset_index: np.ndarray,
    length: np.ndarray,
    weight: np.ndarray | None,
    shards: int,
    cut_at: int,
    roots: Sequence[str],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Divide the rows of E episodes in stored order into shards of equal size, each dataset separately.

    An episode is cut at multiples of `cut_at` rows. Raises ValueError if a shard would have no rows of a dataset.

    Args:
        weight: mean repetitions of each episode per epoch, float64 (E,); None for 1.
        roots: names of the datasets, for errors.

    Returns:
        For each piece, ordered by shard, int64 (P,) each: episode, first row in the episode, number of rows, shard.
    """
    bounds = np.concatenate([[0], np.cumsum(length)])
    cumulative = np.concatenate([[0.0], np.cumsum(length if weight is None else length * weight)])
    starts, shard_of = [], []
    for dataset in np.unique(dataset_index):
        members = np.flatnonzero(dataset_index == dataset)
        first, last = members[0], members[-1] + 1
        targets = cumulative[first] + (cumulative[last] - cumulative[first]) * np.arange(1, shards) / shards
        episode = np.searchsorted(cumulative, targets, side="right") - 1
        offset = (targets - cumulative[episode]) / (cumulative[episode + 1] - cumulative[episode]) * length[episode]
        offset = np.minimum(np.rint(offset / cut_at).astype(np.int64) * cut_at, length[episode])
        cuts = np.concatenate([[bounds[first]], bounds[episode] + offset])
        if not (np.diff(np.append(cuts, bounds[last])) > 0).all():
            raise ValueError(
                f"--dataset.shards={shards}: {roots[dataset]} has {bounds[last] - bounds[first]} training rows in "
                f"{last - first} episodes, too few: each shard needs at least {cut_at} (a key frame interval); "
                "give fewer shards, or leave the dataset out"
            )
        begins = np.unique(np.concatenate([bounds[first:last], cuts]))
        starts.append(begins)
        shard_of.append(np.searchsorted(cuts, begins, side="right") - 1)
    start, shard = np.concatenate(starts), np.concatenate(shard_of)
    rows = np.diff(np.append(start, bounds[-1]))
    episode = np.searchsorted(bounds, start, side="right") - 1
    order = np.argsort(shard, kind="stable")
    return episode[order], (start - bounds[episode])[order], rows[order], shard[order]


@dataclass(frozen=True)
class _Epoch:
    """An epoch of the stream: positions [begin, end), of which [begin, tail) are whole turns."""

    number: int
    begin: int
    tail: int
    end: int
    shard_begins: np.ndarray  # position in each shard's stream at which the shard's epoch begins, int64 (shards,)
    # Runs of rows after `tail`, in order: position in the stream, shard, position in the shard's stream.
    tail_runs: list[tuple[int, int, int]]


class ShardedPlan:
    """The run's stream of rows, taken from shards in turn. Methods are those of `StreamPlan`.

    `plan` makes a shard's plan: `StreamPlan` but for episodes, seed and episode_weights. Its `episodes` are pieces of
    episodes, ordered by shard, and `window_rows` the size of a shard's windows. Other parameters are as for `divide`.
    """

    def __init__(
        self,
        episodes: Episodes,
        weight: np.ndarray | None,
        sharding: Sharding,
        cut_at: int,
        roots: Sequence[str],
        *,
        seed: int | None,
        plan: Callable[..., StreamPlan],
    ):
        if seed is None:
            raise ValueError("shards have no stored order: their rows are shuffled; give a shuffle seed")
        count = sharding.count
        piece, first, length, shard = divide(episodes.dataset_index, episodes.length, weight, count, cut_at, roots)
        pieces = episodes.take(piece)
        self.episodes = replace(pieces, start=pieces.start + first, length=length)
        self.seed, self.sharding = seed, sharding
        self._bounds = np.searchsorted(shard, np.arange(count + 1)).tolist()
        self._shards = []
        for number in range(count):
            members = slice(self._bounds[number], self._bounds[number + 1])
            shard_seed = np.random.SeedSequence((seed, 3, number)).generate_state(1).item()
            weights = None if weight is None else weight[piece][members]
            self._shards.append(plan(self.episodes.take(members), seed=shard_seed, episode_weights=weights))
        self.segment_rows, self.window_rows = self._shards[0].segment_rows, self._shards[0].window_rows
        self.rows_per_epoch = sum(shard.rows_per_epoch for shard in self._shards)
        self._last_epoch: _Epoch | None = None

    @property
    def rows_per_source(self) -> list[int]:
        return [sum(counts) for counts in zip(*(shard.rows_per_source for shard in self._shards), strict=True)]

    def identity(self) -> dict[str, Any]:
        identities = [shard.identity() for shard in self._shards]
        shards = hashlib.sha256(json.dumps(identities, sort_keys=True).encode()).hexdigest()
        return {
            "seed": self.seed,
            "segment_rows": self.segment_rows,
            "window_rows": self.window_rows,
            "rows_per_epoch": self.rows_per_epoch,
            "rows_per_source": self.rows_per_source,
            "shards": {"count": self.sharding.count, "turn_rows": self.sharding.turn_rows, "episodes": shards},
        }

    def begin(self, epoch: int) -> int:
        return sum(shard.begin(epoch) for shard in self._shards)

    def epoch_at(self, position: int) -> tuple[int, int, int]:
        epoch = self._epoch_at(position)
        return epoch.number, epoch.begin, epoch.end

    def _epoch_at(self, position: int) -> _Epoch:
        if self._last_epoch is None or not self._last_epoch.begin <= position < self._last_epoch.end:
            number = position // self.rows_per_epoch
            while self.begin(number) > position:
                number -= 1
            while self.begin(number + 1) <= position:
                number += 1
            self._last_epoch = self._lay_out(number)
        return self._last_epoch

    def _lay_out(self, number: int) -> _Epoch:
        turns, shards = self.sharding, self._shards
        first, last = (np.array([shard.begin(n) for shard in shards]) for n in (number, number + 1))
        begin, end = int(first.sum()), int(last.sum())
        before = turns.before(begin)
        # Whole rounds for which every shard has rows.
        tail = max(begin, int(((last - first + before) // turns.turn_rows).min()) * turns.turn_rows * turns.count)
        next_row, tail_runs, position = first + turns.before(tail) - before, [], tail
        while position < end:
            shard, until = turns.turn(position)
            if next_row[shard] == last[shard]:
                shard = int(np.argmax(last - next_row))
            rows = min(until - position, int(last[shard] - next_row[shard]))
            tail_runs.append((position, shard, int(next_row[shard])))
            next_row[shard] += rows
            position += rows
        return _Epoch(number, begin, tail, end, first, tail_runs)

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of stream positions [first, last): shard, and start and end in the shard's stream."""
        while first < last:
            epoch = self._epoch_at(first)
            if first < epoch.tail:
                shard, end = self.sharding.turn(first)
                end = min(end, epoch.tail)
                row = int(self._split_turns(epoch, first)[shard])
            else:
                at = bisect.bisect_right(epoch.tail_runs, first, key=lambda run: run[0]) - 1
                begin, shard, row = epoch.tail_runs[at]
                row += first - begin
                end = epoch.tail_runs[at + 1][0] if at + 1 < len(epoch.tail_runs) else epoch.end
            end = min(end, last)
            yield shard, row, row + end - first
            first = end

    def _split_turns(self, epoch: _Epoch, position: int) -> np.ndarray:
        """Return the rows of each shard before a position, if the epoch were nothing but turns until there."""
        return epoch.shard_begins + self.sharding.before(position) - self.sharding.before(epoch.begin)

    def _split(self, position: int) -> list[int]:
        """Return the number of rows of each shard before a stream position."""
        epoch = self._epoch_at(position)
        rows = self._split_turns(epoch, min(position, epoch.tail))
        for shard, _, end in self._runs(epoch.tail, position):
            rows[shard] = end
        return rows.tolist()

    def occurrences(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = (shard.occurrences(rows) for shard, rows in zip(self._shards, self._split(position), strict=True))
        least, most = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return least, most

    def slices(self, first: int, last: int) -> Iterator[WindowSlice]:
        for run in self._runs(first, last):
            yield from self._shard_slices(*run)

    def _shard_slices(self, shard: int, first: int, last: int) -> Iterator[WindowSlice]:
        for window in self._shards[shard].slices(first, last):
            yield replace(window, episode=window.episode + self._bounds[shard])

    def slices_of(self, runs: np.ndarray) -> Iterator[WindowSlice]:
        first, last = int(runs[0, 0]), int(runs[-1, 1])
        epoch, shard = self._epoch_at(first), self.sharding.turn(first)[0]
        bounds = [int(self._split_turns(epoch, position)[shard]) for position in (first, last)]
        turn, end = runs[:, 0] // self.sharding.turn_rows, (runs[:, 1] - 1) // self.sharding.turn_rows
        contiguous = last <= epoch.tail and bool(((turn % self.sharding.count == shard) & (turn == end)).all())
        if contiguous and bounds[1] - bounds[0] == int((runs[:, 1] - runs[:, 0]).sum()):
            yield from self._shard_slices(shard, *bounds)  # consecutive in the shard's stream
        else:
            for first, last in runs.tolist():
                yield from self.slices(first, last)

    def window_starts(self, first: int, last: int) -> np.ndarray:
        """Return the window starts of the shard whose turn is at `first`, and the ends of epochs and of whole turns.

        Other shards' windows begin at about the same places. Reads between starts are consecutive in the shard's
        stream.
        """
        shard, begin = self.sharding.turn(first)[0], first
        candidates: list[Any] = [np.empty(0, np.int64)]
        while first < last:
            epoch = self._epoch_at(first)
            end = min(epoch.end, last)
            a, b = (int(self._split_turns(epoch, position)[shard]) // self.window_rows for position in (first, end))
            # Row numbers in a stream of endless turns.
            offsets = np.arange(a + 1, b + 1) * self.window_rows - self._split_turns(epoch, 0)[shard]
            candidates += [self.sharding.position(shard, offsets), np.array([epoch.tail, epoch.end])]
            first = end
        starts = np.unique(np.concatenate(candidates))
        return starts[(begin < starts) & (starts < last)]


Plan = StreamPlan | ShardedPlan


def epoch_ends(plan: Plan, last: int) -> list[int]:
    """Return the positions at which the epochs of the first `last` stream positions end, in order."""
    ends: list[int] = []
    while not ends or ends[-1] < last:
        epoch, begin, end = plan.epoch_at(ends[-1] if ends else 0)
        ends += [begin] * (epoch - len(ends)) + [end]  # some may have no rows
    return ends
