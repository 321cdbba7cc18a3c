"""Which rows, in which order: decided before any I/O, from metadata and a seed alone.

The rows of a run form one endless *stream*: epoch 0's rows, then epoch 1's, and so on, each epoch a
permutation of the same rows. Position ``p`` of the stream belongs to epoch ``p // rows_per_epoch``. The stream is a
pure function of (episodes, seed, segment_rows, window_rows), so a run that has trained ``p`` rows is resumed by
reading on from ``p``, with any number of workers, and no row of an epoch is missed or repeated.

Order within an epoch::

    episodes  ──cut──►  segments (contiguous rows one decoder walks through)
              ──permute──►  laid end to end, filling positions eN .. (e+1)N
              ──window──►  positions [k·W, (k+1)·W) form a window; its rows are permuted among themselves

so a window mixes about ``window_rows / segment_rows`` places of the dataset while every video is still read forward.
Nothing here knows Ray, files or frames; it is tested without any of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Episodes:
    """The episodes a plan draws from, possibly of several datasets. All arrays have shape (E,).

    dataset_index: int32, which dataset; episode_index: int64, its number there; start: int64, the `index` of its
    first frame in its dataset; length: int64, frames (> 0).
    """

    dataset_index: np.ndarray
    episode_index: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class WindowSlice:
    """Rows ``[lo, hi)`` of one shuffled window: what a read task is told to produce, in output order.

    The parts are contiguous runs of rows, in stored order: part ``i`` is rows ``[start[i], end[i])`` of its dataset,
    all inside episode ``episode[i]`` (a position in `Episodes`). ``shuffle_key`` seeds the permutation; None keeps
    stored order.
    """

    epoch: int
    episode: np.ndarray  # int64 (P,)
    start: np.ndarray  # int64 (P,)
    end: np.ndarray  # int64 (P,)
    shuffle_key: tuple[int, ...] | None
    lo: int
    hi: int

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows in output order: (part number, `index` in the dataset), both int64 (hi - lo,)."""
        length = self.end - self.start
        part = np.repeat(np.arange(len(length)), length)
        offset = np.arange(len(part)) - np.repeat(np.cumsum(length) - length, length)
        index = self.start[part] + offset
        if self.shuffle_key is not None:
            order = np.random.default_rng(self.shuffle_key).permutation(len(part))[self.lo : self.hi]
        else:
            order = np.arange(self.lo, self.hi, dtype=np.int64)
        return part[order], index[order]


# Episode, start and end of each segment (S,), and its position in the epoch (S + 1,); all int64.
Segments = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class StreamPlan:
    """The run's stream of rows.

    Args:
        episodes: what to draw from; at least one.
        seed: None for stored order (every epoch alike); otherwise every epoch differs.
        segment_rows: longest run of consecutive rows kept together for the decoder's sake.
        window_rows: rows shuffled among themselves.
    """

    def __init__(self, episodes: Episodes, *, seed: int | None, segment_rows: int, window_rows: int):
        if not len(episodes):
            raise ValueError("no episodes to read: the selection is empty")
        if segment_rows < 1 or window_rows < 1:
            raise ValueError(f"segment_rows ({segment_rows}) and window_rows ({window_rows}) must be positive")
        self.episodes = episodes
        self.seed = seed
        self.segment_rows = segment_rows
        self.window_rows = window_rows
        self.rows_per_epoch = int(episodes.length.sum())
        self._cached: tuple[int, Segments] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}

    def identity(self) -> dict[str, int | str | None]:
        """What must not change for a position in this stream to keep its meaning."""
        episodes = self.episodes
        columns = (episodes.dataset_index, episodes.episode_index, episodes.start, episodes.length)
        digest = hashlib.sha256(b"".join(column.astype(np.int64).tobytes() for column in columns))
        return {
            "seed": self.seed,
            "segment_rows": self.segment_rows,
            "window_rows": self.window_rows,
            "rows_per_epoch": self.rows_per_epoch,
            "episodes": digest.hexdigest(),
        }

    def slices(self, first: int, last: int) -> Iterator[WindowSlice]:
        """The window slices that make up stream positions ``[first, last)``, in order."""
        position = first
        while position < last:
            epoch, epoch_first = divmod(position, self.rows_per_epoch)
            epoch_first = position - epoch_first
            window = position // self.window_rows
            # A window that straddles two epochs is two windows: no row of an epoch overtakes the one before it.
            window_first = max(window * self.window_rows, epoch_first)
            window_last = min((window + 1) * self.window_rows, epoch_first + self.rows_per_epoch)
            hi = min(last, window_last)
            episode, start, end = self._parts(epoch, window_first - epoch_first, window_last - epoch_first)
            key = None if self.seed is None else (self.seed, 1, epoch, window)
            yield WindowSlice(epoch, episode, start, end, key, position - window_first, hi - window_first)
            position = hi

    def _parts(self, epoch: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The segments at epoch positions [first, last), the outer two clipped."""
        episode, start, end, position = self._segments(epoch if self.seed is not None else 0)
        a = int(np.searchsorted(position, first, side="right")) - 1
        b = int(np.searchsorted(position, last, side="left"))
        start, end = start[a:b].copy(), end[a:b].copy()
        start[0] += first - position[a]
        end[-1] -= position[b] - last
        return episode[a:b], start, end

    def _segments(self, epoch: int) -> Segments:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._cut_and_permute(epoch))
        return self._cached[1]

    def _cut_and_permute(self, epoch: int) -> Segments:
        """Segments in stream order: episode, start, end (S,), and the epoch position of each, (S + 1,)."""
        start, length = self.episodes.start, self.episodes.length
        rng = None if self.seed is None else np.random.default_rng((self.seed, 0, epoch))
        # Where an episode is first cut differs from epoch to epoch, so that the same rows are not always together.
        first_cut = self.segment_rows if rng is None else rng.integers(1, self.segment_rows + 1, len(start))
        first_cut = np.minimum(first_cut, length)
        count = 1 + -(-(length - first_cut) // self.segment_rows)
        episode = np.repeat(np.arange(len(start)), count)
        nth = np.arange(len(episode)) - np.repeat(np.cumsum(count) - count, count)
        cut = np.where(nth == 0, 0, first_cut[episode] + (nth - 1) * self.segment_rows)
        segment_start = start[episode] + cut
        segment_end = np.where(nth == 0, start[episode] + first_cut[episode], segment_start + self.segment_rows)
        segment_end = np.minimum(segment_end, start[episode] + length[episode])
        if rng is not None:
            order = rng.permutation(len(episode))
            episode, segment_start, segment_end = episode[order], segment_start[order], segment_end[order]
        position = np.concatenate([[0], np.cumsum(segment_end - segment_start)])
        return episode, segment_start, segment_end, position


def task_bounds(first: int, last: int, task_rows: int, block_rows: int) -> np.ndarray:
    """Cut stream positions [first, last) into read tasks.

    Cuts fall near multiples of `task_rows` (windows, so that few are shared by two tasks) and at whole blocks counted
    from `first`, so that every block but the very last has `block_rows` rows whatever task it comes from.

    Returns int64 (tasks + 1,).
    """
    if last <= first:
        return np.array([first], dtype=np.int64)
    cuts = np.arange((first // task_rows + 1) * task_rows, last, task_rows, dtype=np.int64)
    aligned = first + np.rint((cuts - first) / block_rows).astype(np.int64) * block_rows
    return np.unique(np.concatenate([[first], aligned[(aligned > first) & (aligned < last)], [last]]))
