"""Decide which rows a run reads and in which order, from metadata and a seed alone.

The rows of a run form one endless *stream* of epochs, a pure function of the arguments of `StreamPlan`. A run that has
trained ``p`` rows resumes at position ``p``, with any number of workers, and no row of an epoch is missed or repeated.

Order within an epoch::

    episodes  ──cut──►  segments: contiguous rows that one decoder reads forward
              ──permute──►  laid end to end at positions eN .. (e+1)N
              ──window──►  positions [k·W, (k+1)·W) form a window, whose rows are permuted

A window mixes at least ``window_rows / segment_rows`` places of the dataset, while every video is still read forward.
An epoch of more than `PART_SEGMENTS` segments is cut and permuted in parts, to bound memory; each part has about the
same number of segments of every episode. Without a seed, an episode is one segment. `later_segment_rows` sets the
segment length of later epochs: 1 permutes single rows, for frames that are cached and need no decoder.

A *mixture* gives datasets weights. Each dataset is then a *source* with endless epochs of its own. An epoch of the
mixture has as many rows as the datasets hold together, apportioned to the sources by weight. A source supplies the next
rows of its own stream, spread evenly by `Interleaver`, so each of its own epochs still has every row exactly once.

*Episode weights* are mean numbers of repetitions per epoch, which `Repetitions` rounds to whole numbers. Epochs then
differ slightly in length, and ``rows_per_epoch`` is their mean. Each copy of an episode is cut and permuted separately.

The module does not import Ray and does not read files.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_finetuning.data.shares import Interleaver, Repetitions, apportion, fair_share, mean_rows

# Maximum number of segments in memory, over all sources: 32 bytes each, 96 while they are cut, in 0.3 s.
PART_SEGMENTS = 2**21


@dataclass(frozen=True)
class Episodes:
    """The episodes of a plan, possibly of several datasets, by the `index` of their first frame and their frames.

    All arrays have shape (E,): int32 for `dataset_index`, int64 for the others. An episode of which only some ranges
    are rows has one entry per range, in order.
    """

    dataset_index: np.ndarray
    episode_index: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, at: Any) -> Episodes:
        """Return the entries at `at`, anything that indexes an array."""
        return Episodes(self.dataset_index[at], self.episode_index[at], self.start[at], self.length[at])


@dataclass(frozen=True)
class WindowSlice:
    """Rows ``[lo, hi)`` of one window, in output order: the rows that a read task produces.

    A window consists of P runs: rows [start, end) of a dataset, and their episode's position in `Episodes`.
    """

    epoch: int
    episode: np.ndarray  # int64 (P,)
    start: np.ndarray  # int64 (P,)
    end: np.ndarray  # int64 (P,)
    shuffle_key: tuple[int, ...] | None  # seed of the window's permutation; None for stored order
    lo: int
    hi: int

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the run number and the `index` in the dataset of each row, in output order: int64 (hi - lo,) each."""
        length = self.end - self.start
        run = np.repeat(np.arange(len(length)), length)
        offset = np.arange(len(run)) - np.repeat(np.cumsum(length) - length, length)
        index = self.start[run] + offset
        if self.shuffle_key is not None:
            order = np.random.default_rng(self.shuffle_key).permutation(len(run))[self.lo : self.hi]
        else:
            order = np.arange(self.lo, self.hi, dtype=np.int64)
        return run[order], index[order]


def evenly_spaced(count: int, limit: int) -> np.ndarray:
    """Return at most `limit` of `count` indices, int64, evenly spaced over the whole range and without repeats."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))


# Episode, start and end of runs of consecutive rows, int64 (P,) each.
Runs = tuple[np.ndarray, np.ndarray, np.ndarray]


class StreamPlan:
    """A stream of rows of one dataset or of a mixture.

    Args:
        seed: seed of every permutation; None for stored order, in which all epochs are equal.
        segment_rows: maximum number of consecutive rows that stay together for the decoder.
        window_rows: number of rows that are shuffled together.
        cut_at: number of frames between key frames. Segments begin at key frames if it divides `segment_rows`; frames
            before a segment then need not be decoded.
        weights: positive shares of the datasets in every epoch, in the order of `dataset_index`; None reads every row
            once per epoch, with all datasets as one source.
        episode_weights: mean number of repetitions of each entry of `episodes` per epoch, float64 (E,), positive; None
            for 1.
        later_segment_rows: `segment_rows` of the epochs of a source after its first; None for `segment_rows`.
        roots: names of the datasets, for errors.
    """

    def __init__(
        self,
        episodes: Episodes,
        *,
        seed: int | None,
        segment_rows: int,
        window_rows: int,
        cut_at: int = 1,
        weights: Sequence[float] | None = None,
        episode_weights: np.ndarray | None = None,
        later_segment_rows: int | None = None,
        roots: Sequence[str] = (),
    ):
        if not len(episodes):
            raise ValueError("no episodes to read: the selection is empty")
        if segment_rows < 1 or window_rows < 1:
            raise ValueError(f"segment_rows ({segment_rows}) and window_rows ({window_rows}) must be positive")
        if seed is None and not (weights is None and episode_weights is None and later_segment_rows is None):
            raise ValueError("a mixture, weighted episodes and single rows have no stored order; give a shuffle seed")
        self.episodes = episodes
        self.episode_weights = episode_weights
        self.later_segment_rows = later_segment_rows
        self.seed = seed
        self.segment_rows = segment_rows
        self.cut_at = math.gcd(segment_rows, cut_at) if seed is not None else 1
        self.window_rows = window_rows
        self.rows_per_epoch = int(episodes.length.sum())
        if episode_weights is not None:
            self.rows_per_epoch = mean_rows(episodes.length, episode_weights)
        if weights is None:
            source_of, self._interleaver = np.zeros(len(episodes), np.int32), Interleaver([self.rows_per_epoch])
        else:
            if len(weights) != episodes.dataset_index.max() + 1:
                raise ValueError(f"{len(weights)} weights for {episodes.dataset_index.max() + 1} datasets")
            counts = apportion(self.rows_per_epoch, weights, roots)
            source_of, self._interleaver = episodes.dataset_index, Interleaver(counts)
        members = [np.flatnonzero(source_of == number) for number in range(len(self._interleaver.counts))]

        def sources(rows: int, cut_at: int) -> list[_Source]:
            built = [_Source(episodes, ids, seed, n, rows, cut_at, episode_weights) for n, ids in enumerate(members)]
            max_segments = fair_share([source.segments for source in built], PART_SEGMENTS)
            for source in built if seed is not None else ():  # stored order stays whole
                source.parts_of_epoch = -(-source.segments // max_segments)
            return built

        self._sources = sources(segment_rows, self.cut_at)
        if later_segment_rows is not None:
            for source, later_source in zip(self._sources, sources(later_segment_rows, 1), strict=True):
                source.later_source = later_source

    @property
    def rows_per_source(self) -> list[int]:
        """Return the rows of an epoch from each dataset of a mixture; without weights, of the only source."""
        return self._interleaver.counts

    def identity(self) -> dict[str, Any]:
        """Return what must stay equal for a position in the stream to keep its meaning."""
        episodes = self.episodes
        columns = (episodes.dataset_index, episodes.episode_index, episodes.start, episodes.length)
        digest = hashlib.sha256()
        for column in columns:
            digest.update(column.astype(np.int64))
        identity: dict[str, Any] = {
            "seed": self.seed,
            "segment_rows": self.segment_rows,
            "window_rows": self.window_rows,
            "rows_per_epoch": self.rows_per_epoch,
            "rows_per_source": self.rows_per_source,
            "episodes": digest.hexdigest(),
            "cut_at": self.cut_at,
            "parts_of_epoch": [source.parts_of_epoch for source in self._sources],
        }
        if self.episode_weights is not None:
            identity["episode_weights"] = hashlib.sha256(self.episode_weights.astype(np.float64)).hexdigest()
        if self.later_segment_rows is not None:
            parts = [source.cutter(1).parts_of_epoch for source in self._sources]
            identity["later_epochs"] = {"segment_rows": self.later_segment_rows, "parts_of_epoch": parts}
        return identity

    def begin(self, epoch: int) -> int:
        """Return the stream position at which an epoch begins."""
        return self._sources[0].begin(epoch) if len(self._sources) == 1 else epoch * self.rows_per_epoch

    def epoch_at(self, position: int) -> tuple[int, int, int]:
        """Return the epoch of a stream position, and the positions at which it begins and ends."""
        if len(self._sources) == 1:
            return self._sources[0].epoch_at(position)
        epoch = position // self.rows_per_epoch
        return epoch, self.begin(epoch), self.begin(epoch + 1)

    def occurrences(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how often the rows of each entry of `episodes` occur among the first `position` of the stream.

        The least and the most, int64 (E,) each; they are equal at the end of a source's epoch.
        """
        least, most = np.empty((2, len(self.episodes)), np.int64)
        # Rows of a window that was begun may or may not have occurred, even rows of two epochs of a source.
        _, first, last = self._window(position)
        last = first if first == position else last
        for source, certain, possible in zip(self._sources, self._split(first), self._split(last), strict=True):
            least[source.members] = source.occurrences(certain)[0]
            most[source.members] = source.occurrences(possible)[1]
        return least, most

    def _window(self, position: int) -> tuple[int, int, int]:
        """Return the epoch of a stream position, and the start and end of its window."""
        epoch, first, last = self.epoch_at(position)
        begin = position - position % self.window_rows
        # A window that straddles two epochs is two windows: no row of an epoch overtakes the one before it.
        return epoch, max(begin, first), min(begin + self.window_rows, last)

    def _split(self, position: int) -> list[int]:
        """Return the number of rows of each source before a stream position."""
        if len(self._sources) == 1:
            return [position]
        epoch, offset = divmod(position, self.rows_per_epoch)
        before = self._interleaver.before(offset)
        return [epoch * n + rows for n, rows in zip(self._interleaver.counts, before, strict=True)]

    def window_starts(self, first: int, last: int) -> np.ndarray:
        """Return approximate starts of windows after `first` and before `last`, int64 (N,), for read boundaries."""
        return np.arange((first // self.window_rows + 1) * self.window_rows, last, self.window_rows, dtype=np.int64)

    def slices(self, first: int, last: int) -> Iterator[WindowSlice]:
        """Yield the window slices that make up stream positions [first, last), in order."""
        while first < last:
            epoch, begin, end = self._window(first)
            until = min(last, end)
            key = None if self.seed is None else (self.seed, 1, epoch, first // self.window_rows)
            yield WindowSlice(epoch, *self._runs(begin, end), key, first - begin, until - begin)
            first = until

    def slices_of(self, runs: np.ndarray) -> Iterator[WindowSlice]:
        """Yield the window slices of runs of stream positions [start, end), int64 (N, 2), in order."""
        for first, last in runs.tolist():
            yield from self.slices(first, last)

    def _runs(self, first: int, last: int) -> Runs:
        rows = zip(self._sources, self._split(first), self._split(last), strict=True)
        runs = [run for source, *span in rows for run in source.runs(*span)]
        episode, start, end = (np.concatenate(column) for column in zip(*runs, strict=True))
        return episode, start, end


# The segments of a part in stream order, and where each begins in the part, int64 (S + 1,).
Segments = tuple[Runs, np.ndarray]


class _Source:
    """Endless epochs of some episodes, `members` of a plan's, each another permutation of their segments.

    Attributes:
        rows: rows of an epoch; the mean if episodes have weights.
        segments: approximate number of segments in an epoch.
        parts_of_epoch: number of parts in which an epoch is cut and permuted.
        later_source: source that cuts the epochs after the first; None for the source itself.
    """

    def __init__(
        self,
        episodes: Episodes,
        members: np.ndarray,
        seed: int | None,
        number: int,
        segment_rows: int,
        cut_at: int,
        weight: np.ndarray | None = None,
    ):
        self.members = members
        self._starts, self.length = episodes.start[members], episodes.length[members]
        self._key = None if seed is None else (seed, 0, number)
        self._segment_rows, self._cut_at = segment_rows, cut_at
        self.rows, copies = int(self.length.sum()), float(len(members))
        self._repetitions: Repetitions | None = None
        if weight is not None and seed is not None:
            self._repetitions = Repetitions(weight[members], (seed, 2, number))
            self.rows, copies = mean_rows(self.length, weight[members]), float(weight[members].sum())
        # An estimate: the exact number depends on where episodes are cut.
        self.segments = len(members) if seed is None else self.rows // segment_rows + math.ceil(copies)
        self.parts_of_epoch = 1
        self.later_source: _Source | None = None
        self._cached: tuple[tuple[int, int], Segments] | None = None
        self._bounds: tuple[int, np.ndarray] | None = None
        self._last_epoch = (0, 0, 0)  # the last result of epoch_at: number, begin, end

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}

    def cutter(self, epoch: int) -> _Source:
        """Return the source that cuts and permutes an epoch: this one, or `later_source`."""
        return self if self.later_source is None or epoch == 0 else self.later_source

    def begin(self, epoch: int) -> int:
        """Return the position in the source's stream at which its epoch begins."""
        return epoch * self.rows if self._repetitions is None else int(self._repetitions.before(epoch) @ self.length)

    def epoch_at(self, position: int) -> tuple[int, int, int]:
        """Return the source's epoch at a position of its stream, and the positions at which it begins and ends."""
        if self._repetitions is None:
            epoch = position // self.rows
            return epoch, epoch * self.rows, (epoch + 1) * self.rows
        if not self._last_epoch[1] <= position < self._last_epoch[2]:
            # Each episode occurs less than once more or less than its weight says, which bounds the epoch.
            mean, spread = float(self._repetitions.weight @ self.length), int(self.length.sum())
            near = range(max(0, int((position - spread) / mean) - 1), int((position + spread) / mean) + 2)
            epoch = near[bisect.bisect_right(near, position, key=self.begin) - 1]
            self._last_epoch = epoch, self.begin(epoch), self.begin(epoch + 1)
        return self._last_epoch

    def occurrences(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds of `StreamPlan.occurrences` in the source's stream: int64 (E,), or () if all are equal."""
        epoch, begin, _ = self.epoch_at(position)
        epochs_begun = epoch + (position > begin)
        if self._repetitions is None:
            return np.array(epoch), np.array(epochs_begun)
        return self._repetitions.before(epoch), self._repetitions.before(epochs_begun)

    def _epoch_episodes(self, epoch: int) -> tuple[np.ndarray, ...]:
        """Return the episodes of an epoch, repeated by weight: positions in `episodes`, starts and lengths."""
        columns = self.members, self._starts, self.length
        if self._repetitions is None:
            return columns
        times = self._repetitions.before(epoch + 1) - self._repetitions.before(epoch)
        return tuple(np.repeat(column, times) for column in columns)

    def _part_at(self, position: int) -> tuple[int, int, int, int]:
        """Return the part at a position of the source's stream: epoch (0 in stored order), part, begin, end."""
        epoch, begin, end = self.epoch_at(position)
        if self._key is None:
            return 0, 0, begin, end
        source = self.cutter(epoch)
        bounds = begin + source._part_bounds(epoch) if source.parts_of_epoch > 1 else np.array([begin, end])
        part = int(np.searchsorted(bounds, position, side="right")) - 1
        return epoch, part, int(bounds[part]), int(bounds[part + 1])

    def runs(self, first: int, last: int) -> Iterator[Runs]:
        """Yield the segments at positions [first, last) of the source's stream, the outer two clipped."""
        while first < last:
            epoch, part, begin, end_of_part = self._part_at(first)
            offset, until = first - begin, min(last, end_of_part) - begin
            (episode, start, end), position = self._segments_of(epoch, part)
            a = int(np.searchsorted(position, offset, side="right")) - 1
            b = int(np.searchsorted(position, until, side="left"))
            start, end = start[a:b].copy(), end[a:b].copy()
            start[0] += offset - position[a]
            end[-1] -= position[b] - until
            yield episode[a:b], start, end
            first += until - offset

    def _segments_of(self, epoch: int, part: int) -> Segments:
        if self._cached is None or self._cached[0] != (epoch, part):
            self._cached = None  # free memory first
            self._cached = ((epoch, part), self.cutter(epoch)._cut_and_permute(epoch, part))
        return self._cached[1]

    def _cuts(self, epoch: int, length: np.ndarray) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
        """Draw where the E episodes of an epoch, of `length` rows each, are cut.

        Segment i of an episode belongs to part (first part + i) modulo the number of parts.

        Returns:
            The epoch's generator after these draws, and int64 (E,) each: rows of the first segment (later ones but the
            last have `segment_rows`), number of segments, and part of the first segment.
        """
        rng, episodes = np.random.default_rng((*(self._key or ()), epoch)), len(length)
        # The first cut differs from epoch to epoch, so that segments do not always hold the same rows.
        first_cut = rng.integers(1, self._segment_rows // self._cut_at + 1, episodes) * self._cut_at
        first_cut = np.minimum(first_cut, length)
        count = 1 + -(-(length - first_cut) // self._segment_rows)
        if self.parts_of_epoch == 1:
            return rng, first_cut, count, np.zeros_like(count)
        return rng, first_cut, count, rng.integers(0, self.parts_of_epoch, episodes)

    def _part_bounds(self, epoch: int) -> np.ndarray:
        """Return the bounds of the P parts of an epoch, in rows from its start: int64 (P + 1,)."""
        parts, full = self.parts_of_epoch, self._segment_rows
        if self._bounds is None or self._bounds[0] != epoch:
            _, _, length = self._epoch_episodes(epoch)
            _, first_cut, count, first_part = self._cuts(epoch, length)
            # Each episode has count // parts segments in every part, and one more in the next count % parts parts.
            begins = np.bincount(first_part, minlength=2 * parts)
            ends = np.bincount(first_part + count % parts, minlength=2 * parts)
            segments = (count // parts).sum() + np.cumsum(begins - ends).reshape(2, parts).sum(axis=0)
            # The first and the last segment of an episode may be short.
            last_rows = length - first_cut - (count - 2) * full
            missing = np.bincount(first_part, full - first_cut, parts)
            missing += np.bincount((first_part + count - 1) % parts, np.where(count > 1, full - last_rows, 0), parts)
            self._bounds = epoch, np.concatenate([[0], np.cumsum(segments * full - missing.astype(np.int64))])
        return self._bounds[1]

    def _cut_and_permute(self, epoch: int, part: int) -> Segments:
        members, start_of, length = self._epoch_episodes(epoch)
        if self._key is None:
            position = np.concatenate([[0], np.cumsum(length)])
            return (members, start_of, start_of + length), position
        rng, first_cut, count, first_part = self._cuts(epoch, length)
        parts = self.parts_of_epoch
        if parts > 1:
            rng = np.random.default_rng((*self._key, epoch, part))
        # The part holds every `parts`-th segment of an episode, starting at `first`.
        first = (part - first_part) % parts
        count = np.maximum(0, -(-(count - first) // parts))
        order = rng.permutation(int(count.sum()))
        episode: np.ndarray = np.repeat(np.arange(len(count)), count)
        # In place: the number of each segment in its episode, less one, then the row at which it begins.
        begin: np.ndarray = np.arange(len(episode))
        begin -= np.repeat(np.cumsum(count) - count, count)
        begin *= parts
        begin += np.repeat(first - 1, count)
        begin *= self._segment_rows
        begin += np.repeat(first_cut, count)
        episode, begin = episode[order], begin[order]
        del order
        end = np.minimum(begin + self._segment_rows, length[episode])
        np.maximum(begin, 0, out=begin)
        position = np.concatenate([[0], np.cumsum(end - begin)])
        start = start_of[episode]
        begin += start
        end += start
        return (members[episode], begin, end), position


def window_and_segment(
    requested_rows: int, fitting_rows: int, max_segment_rows: int, segments: int | None, cut_at: int = 1
) -> tuple[int, int]:
    """Return the rows of a shuffle window, and the most consecutive rows in it: (window, segment).

    Args:
        fitting_rows: rows that fit the memory budget, exceeded only to hold `segments` rows.
        max_segment_rows: maximum rows of a segment. Larger windows are a multiple of it, to be filled by whole blocks.
        segments: least number of segments in a window that has the rows; None for segments of `max_segment_rows`.
        cut_at: number that divides segments that are longer.
    """
    window = max(1, min(requested_rows, max(fitting_rows, segments or 1)))
    if window > max_segment_rows:
        window -= window % max_segment_rows
    segment = max_segment_rows if segments is None else max(1, min(max_segment_rows, window // segments))
    return window, segment - segment % cut_at if segment > cut_at else segment


def at_blocks(first: int, cuts: np.ndarray, last: int, block_rows: int) -> np.ndarray:
    """Return `first`, `last` and the block boundaries nearest to `cuts` between them: int64, sorted, distinct."""
    aligned = first + np.rint((cuts - first) / block_rows).astype(np.int64) * block_rows
    return np.unique(np.concatenate([[first], aligned[(aligned > first) & (aligned < last)], [last]]))
