"""What read tasks of an execution are given: what rows are drawn from, and which positions of the stream are theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from vla_finetuning.data.dataset import DatasetMetadata
from vla_finetuning.data.options import Selection
from vla_finetuning.data.reader import ReadOptions
from vla_finetuning.data.rows import LocatedEpisodes, ReadContext, read_rows

# Windows that a read task decodes, one after the other, at most.
MAX_READS_PER_TASK = 4


@dataclass(frozen=True)
class BlockShare:
    """Of every `total` blocks of a stream, those from `first` to `last`: what one of several executions at once reads.

    Ranks `first` to `last` of `total` get the same blocks from it that they would get from an execution of all: blocks
    are dealt to the ranks in turn.
    """

    first: int
    last: int
    total: int

    def runs(self, first: int, last: int, block_rows: int) -> np.ndarray:
        """Return where it has rows among stream positions [first, last): runs [start, end), int64 (N, 2), in order.

        An incomplete turn of `total` blocks is dealt to no rank.
        """
        turn = self.total * block_rows
        starts = first + np.arange((last - first) // turn, dtype=np.int64) * turn
        return starts[:, None] + np.array([self.first, self.last]) * block_rows


def locate_episodes(
    metas: Sequence[DatasetMetadata],
    selected: Sequence[np.ndarray],
    features: Collection[str],
    selection: Selection,
) -> tuple[LocatedEpisodes, np.ndarray | None]:
    """Return what rows of the selected episodes of all datasets are drawn from, and how often each entry's come.

    Of a camera that is no video in a dataset, its episodes are in file -1. Of P entries, the weights are float64 (P,);
    None for once per epoch.
    """
    videos = [key for key in features if any(key in meta.video_files for meta in metas)]

    def concatenate(columns: Iterable[np.ndarray | None]) -> np.ndarray:
        pairs = zip(columns, selected, strict=True)
        return np.concatenate([np.full(len(c), -1) if column is None else column[c] for column, c in pairs])

    start, frames = concatenate(m.episode_start for m in metas), concatenate(m.episode_length for m in metas)
    episodes = LocatedEpisodes(
        dataset_index=np.repeat(np.arange(len(metas), dtype=np.int32), [len(chosen) for chosen in selected]),
        episode_index=np.concatenate(selected),
        start=start,
        length=frames - selection.drop_n_last_frames,
        first_index=start,
        frames=frames,
        data_file=concatenate(m.episode_data_file for m in metas),
        data_row=concatenate(m.episode_data_row for m in metas),
        video_file={key: concatenate(m.episode_video_file.get(key) for m in metas) for key in videos},
        video_start_s={key: concatenate(m.episode_video_start_s.get(key) for m in metas) for key in videos},
    )
    frame_ranges = selection.frame_ranges
    if frame_ranges is None:
        return episodes, None
    before = np.cumsum([0, *map(len, selected)])
    entry = [b + np.searchsorted(s, r.episode) for b, s, r in zip(before, selected, frame_ranges, strict=False)]
    first = np.concatenate([r.first for r in frame_ranges])
    stretches = episodes.take(np.concatenate(entry)).cut(first, np.concatenate([r.frames for r in frame_ranges]))
    if all(r.weight is None for r in frame_ranges):
        return stretches, None
    return stretches, np.concatenate([np.ones(len(r.episode)) if r.weight is None else r.weight for r in frame_ranges])


_context_by_id: dict[str, ReadContext] = {}


def _get_context(context: Any) -> ReadContext:
    """A context, opened once in a process: its plan remembers which part of an epoch it has cut, for the next task."""
    if not isinstance(context, ray.ObjectRef):
        return context
    if context.hex() not in _context_by_id:
        _context_by_id.clear()
        _context_by_id[context.hex()] = ray.get(context)
    return _context_by_id[context.hex()]


class ReadFunction:
    """The function of a read task. Its pickle holds the stream positions that it reads, and no rows.

    Args:
        context: an ObjectRef of a `ReadContext`, or that itself.
        reads: runs of stream positions, int64 (N, 2) each, which are decoded one after the other, to bound the memory.
    """

    __name__ = "read_slices"

    def __init__(self, context: Any, reads: Sequence[np.ndarray], options: ReadOptions):
        self.context, self.options = context, options
        self._runs, self._ends = np.concatenate(reads), np.cumsum([len(runs) for runs in reads])

    @property
    def reads(self) -> list[np.ndarray]:
        return np.split(self._runs, self._ends[:-1])

    @property
    def rows(self) -> int:
        return int(np.diff(self._runs).sum())

    def __call__(self) -> Iterator[pa.Table]:
        context = _get_context(self.context)
        for runs in self.reads:
            yield from read_rows(context, runs, self.options)


def reads_per_task(reads: int, read_bytes: int, cluster: Mapping[str, float]) -> int:
    """Return how many windows a read task decodes, one after the other, where `reads` are to be read. Pure.

    Ray Data 2.60 notices up to 0.3 s later that a task has ended; the next one then finds its CPU idle. Long tasks make
    that matter less; but the CPUs must end about together, and when blocks are wanted in order, those of all tasks but
    the first wait in the object store.
    """
    cpus = max(1.0, cluster.get("CPU", 1))
    by_turns = reads / cpus / 4
    by_store = cluster.get("object_store_memory", 0) / cpus / 3 / read_bytes
    return int(max(1, min(by_turns, by_store, MAX_READS_PER_TASK)))
