"""Build the functions of read tasks: the episodes they read from, and the stream positions that they decode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from vla_finetuning.data.dataset import DatasetMetadata
from vla_finetuning.data.options import FrameRanges
from vla_finetuning.data.plan import Episodes
from vla_finetuning.data.reader import ReadOptions
from vla_finetuning.data.rows import ReadContext, read_rows

# Maximum number of windows that a read task decodes.
MAX_READS_PER_TASK = 4


@dataclass(frozen=True)
class BlockShare:
    """The share of one of several concurrent executions of a stream: blocks `first` to `last` of every `total` blocks.

    An execution of all ranks gives blocks to its ranks in turn. A share gives ranks `first` to `last` of `total` the
    same blocks.
    """

    first: int
    last: int
    total: int

    def runs(self, first: int, last: int, block_rows: int) -> np.ndarray:
        """Return the share's runs [start, end) in [first, last), int64 (N, 2), without an incomplete turn."""
        turn = self.total * block_rows
        starts = first + np.arange((last - first) // turn, dtype=np.int64) * turn
        return starts[:, None] + np.array([self.first, self.last]) * block_rows


def planned_episodes(
    metas: Sequence[DatasetMetadata], frame_ranges: Sequence[FrameRanges]
) -> tuple[Episodes, np.ndarray | None]:
    """Return the P frame ranges of all datasets as entries of a plan, and how often each occurs per epoch.

    The weights are float64 (P,), or None for once per epoch.
    """
    both = list(zip(metas, frame_ranges, strict=True))
    episodes = Episodes(
        dataset_index=np.repeat(np.arange(len(metas), dtype=np.int32), [len(r.episode) for r in frame_ranges]),
        episode_index=np.concatenate([r.episode for r in frame_ranges]),
        start=np.concatenate([meta.episode_start[r.episode] + r.first for meta, r in both]),
        length=np.concatenate([r.frames for r in frame_ranges]),
    )
    if all(r.weight is None for r in frame_ranges):
        return episodes, None
    return episodes, np.concatenate([np.ones(len(r.episode)) if r.weight is None else r.weight for r in frame_ranges])


_context_by_id: dict[str, ReadContext] = {}


def _get_context(context: Any) -> ReadContext:
    """Return a context, fetched once in a process, whose plan caches the part of an epoch that it cuts."""
    if not isinstance(context, ray.ObjectRef):
        return context
    if context.hex() not in _context_by_id:
        _context_by_id.clear()
        _context_by_id[context.hex()] = ray.get(context)
    return _context_by_id[context.hex()]


class ReadFunction:
    """The function of a read task. It is pickled with its stream positions, not with its rows.

    The `reads` are runs of stream positions, int64 (N, 2) each, decoded one after the other to bound memory; `context`
    is a `ReadContext`, or its ObjectRef.
    """

    __name__ = "read_slices"

    def __init__(self, context: Any, reads: Sequence[np.ndarray], options: ReadOptions):
        self.context, self.options = context, options
        # An epoch may have a quarter of a million reads.
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
    """Return how many windows a read task decodes in a row, if an execution has `reads` windows of `read_bytes` bytes.

    Ray Data 2.60 notices up to 0.3 s late that a task has ended, while its CPU idles, which favours long tasks. Tasks
    must be short enough for all CPUs to end together, and for the object store to hold blocks that wait for their turn.
    """
    cpus = max(1.0, cluster.get("CPU", 1))
    by_turns = reads / cpus / 4
    by_store = cluster.get("object_store_memory", 0) / cpus / 3 / read_bytes
    return int(max(1, min(by_turns, by_store, MAX_READS_PER_TASK)))
