"""What read tasks of an execution are given: their windows of the plan, and where the episodes in those lie."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from vla_finetuning.data.dataset import DatasetMetadata
from vla_finetuning.data.options import Selection
from vla_finetuning.data.plan import Episodes, Plan, WindowSlice, task_bounds
from vla_finetuning.data.reader import ReadOptions
from vla_finetuning.data.rows import EpisodeLocations, WindowRead, read_rows
from vla_finetuning.data.shards import divide

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


def episode_locations(
    metas: Sequence[DatasetMetadata], selected: Sequence[np.ndarray], features: Collection[str]
) -> EpisodeLocations:
    """Return where the selected episodes of all datasets lie. Of a camera that is no video in one of them: file -1."""
    videos = [key for key in features if any(key in meta.video_files for meta in metas)]

    def together(columns: Iterable[np.ndarray | None]) -> np.ndarray:
        pairs = zip(columns, selected, strict=True)
        return np.concatenate([np.full(len(c), -1) if column is None else column[c] for column, c in pairs])

    return EpisodeLocations(
        dataset_index=np.repeat(np.arange(len(metas), dtype=np.int32), [len(chosen) for chosen in selected]),
        episode_index=np.concatenate(selected),
        start=together(m.episode_start for m in metas),
        length=together(m.episode_length for m in metas),
        data_file=together(m.episode_data_file for m in metas),
        data_row=together(m.episode_data_row for m in metas),
        video_file={key: together(m.episode_video_file.get(key) for m in metas) for key in videos},
        video_start_s={key: together(m.episode_video_start_s.get(key) for m in metas) for key in videos},
    )


@dataclass(frozen=True)
class Drawn:
    """What rows are drawn from: P episodes, or pieces of them.

    Attributes:
        places: where the episode of each piece lies.
        episodes: the frames of each that are rows.
        weight: float64 (P,), how often those come per epoch; None for once.
    """

    places: EpisodeLocations
    episodes: Episodes
    weight: np.ndarray | None = None

    def divided(self, shards: int, cut_at: int, roots: Sequence[str]) -> tuple[Drawn, np.ndarray]:
        """Shard by shard, and the shard of each piece, int64 (P,); see `shards.divide`."""
        uncut = self.episodes
        piece, first, length, shard = divide(uncut.dataset_index, uncut.length, self.weight, shards, cut_at, roots)
        pieces = uncut.take(piece)
        episodes = Episodes(pieces.dataset_index, pieces.episode_index, pieces.start + first, length)
        weight = None if self.weight is None else self.weight[piece]
        return Drawn(self.places.take(piece), episodes, weight), shard


def drawn_episodes(
    metas: Sequence[DatasetMetadata],
    selected: Sequence[np.ndarray],
    features: Collection[str],
    selection: Selection,
) -> Drawn:
    """Return what rows of the selected episodes of all datasets are drawn from."""
    places = episode_locations(metas, selected, features)
    if selection.frame_ranges is None:
        length = places.length - selection.drop_n_last_frames
        return Drawn(places, Episodes(places.dataset_index, places.episode_index, places.start, length))
    frame_ranges = selection.frame_ranges
    before = np.cumsum([0, *map(len, selected)])
    episode = [b + np.searchsorted(s, r.episode) for b, s, r in zip(before, selected, frame_ranges, strict=False)]
    places = places.take(np.concatenate(episode))
    first, length = (
        np.concatenate([r.first for r in frame_ranges]),
        np.concatenate([r.frames for r in frame_ranges]),
    )
    weight = None
    if any(r.weight is not None for r in frame_ranges):
        weight = np.concatenate([np.ones(len(r.episode)) if r.weight is None else r.weight for r in frame_ranges])
    return Drawn(places, Episodes(places.dataset_index, places.episode_index, places.start + first, length), weight)


def read_of(windows: list[WindowSlice], places: EpisodeLocations) -> WindowRead:
    return WindowRead(windows, places.take(np.concatenate([window.episode for window in windows])))


@dataclass
class Planned:
    """The reads that make up stream positions [first, last), a window each, looked up when they are wanted."""

    plan: Any  # (Plan, EpisodeLocations), or an ObjectRef of them
    first: int
    last: int
    read_rows: int
    block_rows: int

    def __iter__(self) -> Iterator[WindowRead]:
        plan, places = _opened(self.plan)
        for windows in plan.slices_in(self.runs()):
            yield read_of(windows, places)

    def runs(self) -> np.ndarray:
        """The stream positions of each of R reads: int64 (R, 1, 2), begin and end."""
        cuts = task_bounds(self.first, self.last, self.read_rows, self.block_rows)
        return np.stack([cuts[:-1], cuts[1:]], axis=-1)[:, None]


def reads_of_tasks(tasks: Sequence[Planned], plan: Plan, places: EpisodeLocations) -> Iterator[list[WindowRead]]:
    """Return what each of several tasks reads, looked up here and together."""
    runs = [task.runs() for task in tasks]
    slices = plan.slices_in(itertools.chain(*runs))
    for task_runs in runs:
        yield [read_of(windows, places) for windows in itertools.islice(slices, len(task_runs))]


_newest: dict[str, Any] = {}


def _opened(plan: Any) -> tuple[Plan, EpisodeLocations]:
    """A plan, opened once in a process: it remembers which part of an epoch it has cut, for the next task."""
    if not isinstance(plan, ray.ObjectRef):
        return plan
    if plan.hex() not in _newest:
        _newest.clear()
        _newest[plan.hex()] = ray.get(plan)
    return _newest[plan.hex()]


@dataclass
class ReadFunction:
    """The function of a read task. Its pickle holds only its own parts."""

    shared: Any  # ObjectRef of (list[DatasetFiles], what is made of blocks or None), or the pair itself
    reads: Iterable[WindowRead]  # decoded one after the other, which bounds the memory
    first_position: int
    options: ReadOptions
    __name__: str = field(default="read_slices", repr=False)

    def __call__(self) -> Iterator[pa.Table]:
        readers, prepare = ray.get(self.shared) if isinstance(self.shared, ray.ObjectRef) else self.shared
        position = self.first_position
        for read in self.reads:
            yield from read_rows(readers, read, position, self.options, prepare)
            position += len(read)


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
