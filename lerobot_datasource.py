"""LeRobot v3 datasets as a Ray Data source: metadata -> plan -> read tasks -> decoded Arrow blocks.

Rows are those of ``LeRobotDataset.__getitem__`` (pyav backend, ``return_uint8=True``), except that camera columns are
uint8 (H, W, 3), `index` is absolute, and there is one more column, `dataset_index`. A read task is given a few window
slices of the plan (`lerobot_plan.py`), decodes exactly the frames they name, each video forward, straight into the
arrays that become Arrow blocks, and emits them as fixed-shape tensors that come out of Ray zero-copy.

Knows nothing of torch, policies or training.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Dataset
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask
from ray.data.extensions import ArrowTensorArray

from lerobot_decode import VideoReader, decode_image
from lerobot_metadata import DatasetMetadata, Feature, check_files, load_metadata, open_parquet, select_episodes
from lerobot_plan import Episodes, StreamPlan, WindowSlice, task_bounds

logger = logging.getLogger(__name__)

# Rows walked through in one go. LeRobot encodes a key frame every other frame, so a jump costs little, but opening a
# place in a video and its parquet row group is worth some frames.
SEGMENT_ROWS = 32
# Rows shuffled among themselves: window / segment = places of the dataset that a window mixes.
WINDOW_ROWS = 512
# A read task holds its decoded rows in memory: bound them.
TASK_BYTES = 192 * 2**20
BLOCK_BYTES = 32 * 2**20
# One execution of Ray Data lists its read tasks up front; longer streams run as several executions.
TASKS_PER_EXECUTION = 4096

IS_PAD = "_is_pad"
BOOKKEEPING = ("index", "episode_index", "frame_index", "timestamp", "task_index")


@dataclass(frozen=True)
class Part:
    """A run of consecutive rows of one episode, with all a read task needs to find them."""

    dataset_index: int
    episode_index: int
    episode_start: int  # `index` of the episode's first row
    episode_length: int
    data_file: str
    data_row: int  # the episode's first row in its data file
    videos: dict[str, tuple[str, float]]  # camera_key -> (file, where the episode starts in it, seconds)


@dataclass(frozen=True)
class Reader:
    """What all read tasks of a read share: one per dataset, shipped once through the object store."""

    root: str
    fs: Any
    base: str
    fps: int
    features: dict[str, Feature]
    tasks: dict[int, str]

    @classmethod
    def of(cls, meta: DatasetMetadata) -> Reader:
        return cls(meta.root, meta.fs, meta.base, meta.fps, meta.features, meta.tasks)

    def path(self, relative: str) -> str:
        return f"{self.base}/{relative}"

    def open_video(self, relative: str) -> Any:
        """A path for local files (PyAV reads them itself), else a seekable file with read-ahead."""
        path = self.path(relative)
        if "file" in self.fs.protocol:
            return path
        try:
            return self.fs.open(path, "rb", block_size=4 * 2**20)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.root}: {relative} is missing; copy it again") from error


@dataclass(frozen=True)
class ReadOptions:
    """How rows are turned into columns."""

    columns: tuple[str, ...]
    delta_indices: dict[str, tuple[int, ...]]
    tolerance_s: float
    block_rows: int
    threads: int


@dataclass
class _Episode:
    """The rows of a read task that come from one episode."""

    part: Part
    position: np.ndarray  # int64 (n,), where each row goes in the task's output
    frame: np.ndarray  # int64 (n,), its frame_index
    first: int = 0  # frames [first, last) are read from parquet
    last: int = 0
    table_row: int = 0  # where frame 0 lies in the columns read (negative when it was not read)
    timestamps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 (last - first,), of those frames


class LeRobotDatasource(Datasource):
    """Ray Data source over one or several LeRobot v3 datasets. Most callers want `read_lerobot`.

    Args:
        metas: the datasets; their position is `dataset_index`.
        episodes: per dataset, which episodes; None for all.
        camera_keys: cameras to decode; None for all.
        delta_timestamps: key -> offsets in seconds, as LeRobot.
        shuffle_seed: None for stored order.
        shuffle_window: rows shuffled among themselves, at most; fewer when a window would exceed TASK_BYTES.
        stream: (first, last) positions of the run's stream (see `lerobot_plan`); None for one epoch. Rows then also
            carry `position`, their place in it. A long stream is read in several executions: the n-th execution of the
            dataset reads the n-th part, so that a consumer iterates until the stream is done.
        rows_multiple: executions end at multiples of this many rows after `first`.
        block_rows: rows per block; None to choose by BLOCK_BYTES.
        num_tasks: read tasks per execution; None to choose by TASK_BYTES.
        num_cpus: CPUs that a read task holds; it decodes with as many threads.
    """

    def __init__(
        self,
        metas: Sequence[DatasetMetadata],
        *,
        episodes: Sequence[Sequence[int] | None] | None = None,
        camera_keys: Sequence[str] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        shuffle_seed: int | None = None,
        shuffle_window: int = WINDOW_ROWS,
        stream: tuple[int, int] | None = None,
        rows_multiple: int = 1,
        block_rows: int | None = None,
        num_tasks: int | None = None,
        tolerance_s: float = 1e-4,
        num_cpus: float = 1,
    ):
        super().__init__()
        self.num_cpus = num_cpus
        self._projection_map: dict[str, str] | None = None
        self.metas = tuple(metas)
        selected = [
            select_episodes(meta, None if episodes is None else episodes[i]) for i, meta in enumerate(self.metas)
        ]
        features = _common_features(self.metas, camera_keys)
        if delta_timestamps and len({meta.fps for meta in self.metas}) > 1:
            raise ValueError(
                f"datasets of different frame rates cannot be read together in windows: "
                f"{', '.join(f'{meta.root} has {meta.fps} fps' for meta in self.metas)}; an action chunk would span "
                "other times in each. Convert them to one rate"
            )
        self._delta_indices = resolve_delta_indices(delta_timestamps or {}, features, self.metas[0], tolerance_s)
        self._tolerance_s = tolerance_s
        self._features = features
        self._with_position = stream is not None
        for meta, chosen in zip(self.metas, selected, strict=True):
            check_files(meta, episodes=chosen, camera_keys=[k for k in meta.video_keys if k in features])

        row_bytes = self.row_bytes()
        window = max(1, min(shuffle_window, TASK_BYTES // row_bytes))
        self.plan = StreamPlan(
            Episodes(
                dataset_index=np.concatenate([np.full(len(c), i, np.int32) for i, c in enumerate(selected)]),
                episode_index=np.concatenate(selected),
                start=np.concatenate([m.episode_start[c] for m, c in zip(self.metas, selected, strict=True)]),
                length=np.concatenate([m.episode_length[c] for m, c in zip(self.metas, selected, strict=True)]),
            ),
            seed=shuffle_seed,
            segment_rows=SEGMENT_ROWS if shuffle_seed is not None else max(window, SEGMENT_ROWS),
            window_rows=window,
        )
        self._stream = (0, self.plan.rows_per_epoch) if stream is None else stream
        self.block_rows = block_rows or max(1, min(window, BLOCK_BYTES // row_bytes))
        self._num_tasks = num_tasks
        self._task_rows = max(window, self.block_rows)
        if stream is None:
            self._rows_per_execution = self._stream[1] - self._stream[0]
        else:
            self._rows_per_execution = max(1, TASKS_PER_EXECUTION * self._task_rows // rows_multiple) * rows_multiple

    # ---- what Ray Data asks -------------------------------------------------------------------------------------

    def get_name(self) -> str:
        return "LeRobot"

    def supports_projection_pushdown(self) -> bool:
        return True

    def columns(self) -> tuple[str, ...]:
        """Columns of a row, in order, after projection."""
        names = list(self._features)
        names += [key + IS_PAD for key in self._delta_indices]
        names += ["task", "dataset_index"] + (["position"] if self._with_position else [])
        wanted = self._projection_map
        if wanted is None:
            return tuple(names)
        # Ray asks for no columns at all when it only counts: a row must still be a row.
        return tuple(name for name in names if name in wanted) or ("dataset_index",)

    def row_bytes(self) -> int:
        """Bytes of one row in the object store, cameras at full size."""
        total = 0
        for key in self.columns():
            feature = self._features.get(key)
            if feature is None:
                total += 16
                continue
            count = int(np.prod(feature.shape)) * len(self._delta_indices.get(key, (0,)))
            total += count * (1 if feature.dtype in ("video", "image") else 4)
        return max(total, 1)

    def estimate_inmemory_data_size(self) -> int:
        return self.row_bytes() * (self._stream[1] - self._stream[0])

    def example(self) -> dict[str, np.ndarray]:
        """One made-up row, batched: the columns, shapes and dtypes that a numpy batch will have."""
        row: dict[str, np.ndarray] = {}
        for key in self.columns():
            feature = self._features.get(key)
            window = (len(self._delta_indices[key]),) if key in self._delta_indices else ()
            if key.endswith(IS_PAD) and key.removesuffix(IS_PAD) in self._delta_indices:
                row[key] = np.zeros((1, len(self._delta_indices[key.removesuffix(IS_PAD)])), bool)
            elif feature is None or feature.dtype in ("string", "language"):
                row[key] = (
                    np.array(["a"], object) if key not in ("dataset_index", "position") else np.zeros(1, np.int64)
                )
            elif feature.dtype in ("video", "image"):
                row[key] = np.zeros((1, *window, *_height_width(feature), 3), np.uint8)
            else:
                kind = np.dtype(feature.dtype)
                kind = np.dtype(np.float32 if kind.kind == "f" else bool if kind.kind == "b" else np.int64)
                row[key] = np.zeros((1, *window, *(() if feature.shape == (1,) else feature.shape)), kind)
        return row

    def execution(self, number: int) -> tuple[int, int]:
        """Stream positions that the `number`-th execution reads."""
        if not self._with_position:
            return self._stream
        first = min(self._stream[0] + number * self._rows_per_execution, self._stream[1])
        return first, min(first + self._rows_per_execution, self._stream[1])

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        """Read tasks of one execution. Pure but for putting what they share into the object store once.

        `parallelism` is Ray's guess and is not followed: the plan knows better (memory, windows); `num_tasks` is.
        """
        first, last = self.execution(getattr(data_context, "_execution_idx", 0))
        if self._num_tasks is not None:
            bounds = np.unique(np.linspace(first, last, self._num_tasks + 1).astype(np.int64))
        else:
            bounds = task_bounds(first, last, self._task_rows, self.block_rows)
        options = self._options(self.block_rows)
        shared = ray.put([Reader.of(meta) for meta in self.metas])
        row_bytes, limit = self.row_bytes(), per_task_row_limit
        tasks = []
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            rows = b - a if limit is None else min(b - a, limit)
            slices = [(s, self._parts(s)) for s in self.plan.slices(a, a + rows)]
            metadata = BlockMetadata(num_rows=rows, size_bytes=rows * row_bytes, input_files=None, exec_stats=None)
            tasks.append(ReadTask(_ReadSlices(shared, slices, a, options), metadata, per_task_row_limit=limit))
        return tasks

    def read_rows(self, positions: Sequence[int], batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """Rows at chosen stream positions, decoded in this process, as numpy batches. Ray is not needed."""
        readers = [Reader.of(meta) for meta in self.metas]
        for first in range(0, len(positions), batch_size):
            slices = [s for p in positions[first : first + batch_size] for s in self.plan.slices(int(p), int(p) + 1)]
            options = self._options(block_rows=batch_size)
            (table,) = read_slices(readers, [(s, self._parts(s)) for s in slices], first, options)
            yield {name: _column_to_numpy(table.column(name)) for name in table.column_names}

    def _options(self, block_rows: int) -> ReadOptions:
        return ReadOptions(
            columns=self.columns(),
            delta_indices=self._delta_indices,
            tolerance_s=self._tolerance_s,
            block_rows=block_rows,
            threads=max(1, round(self.num_cpus)),
        )

    def _parts(self, window: WindowSlice) -> list[Part]:
        episodes = self.plan.episodes
        parts = []
        for e in window.episode:
            d, number = int(episodes.dataset_index[e]), int(episodes.episode_index[e])
            meta = self.metas[d]
            parts.append(
                Part(
                    dataset_index=d,
                    episode_index=number,
                    episode_start=int(episodes.start[e]),
                    episode_length=int(episodes.length[e]),
                    data_file=meta.data_files[meta.episode_data_file[number]],
                    data_row=int(meta.episode_data_row[number]),
                    videos={
                        key: (
                            meta.video_files[key][meta.episode_video_file[key][number]],
                            float(meta.episode_video_start_s[key][number]),
                        )
                        for key in meta.video_keys
                        if key in self._features
                    },
                )
            )
        return parts


@dataclass
class _ReadSlices:
    """The function of a read task. Its pickle holds only its own parts."""

    shared: Any  # ObjectRef of list[Reader], or the list itself
    slices: list[tuple[WindowSlice, list[Part]]]
    first_position: int
    options: ReadOptions
    __name__: str = field(default="read_slices", repr=False)

    def __call__(self) -> Iterator[pa.Table]:
        readers = ray.get(self.shared) if isinstance(self.shared, ray.ObjectRef) else self.shared
        yield from read_slices(readers, self.slices, self.first_position, self.options)


# ---- in the read task -------------------------------------------------------------------------------------------


def read_slices(
    readers: Sequence[Reader],
    slices: Sequence[tuple[WindowSlice, list[Part]]],
    first_position: int,
    options: ReadOptions,
) -> Iterator[pa.Table]:
    """Decode the rows of some window slices, in their order, and yield them as blocks of `block_rows`.

    Runs in a Ray Data read task. Memory: the task's rows, once, plus one frame and the parquet row groups touched.
    """
    episodes, total = _group_by_episode(slices)
    columns: dict[str, Any] = {}
    _read_tabular(readers, episodes, total, options, columns)
    for key in options.columns:
        for dataset_index, reader in enumerate(readers):
            feature = reader.features.get(key)
            if feature is not None and feature.dtype == "video":
                mine = [e for e in episodes if e.part.dataset_index == dataset_index]
                _read_video(reader, key, mine, total, options, columns)
    if "position" in options.columns:
        columns["position"] = np.arange(first_position, first_position + total)
    for first in range(0, total, options.block_rows):
        yield _to_table(columns, options.columns, first, min(first + options.block_rows, total))


def _group_by_episode(
    slices: Sequence[tuple[WindowSlice, list[Part]]],
) -> tuple[list[_Episode], int]:
    """Rows by episode, ordered by where they lie in the data files, so that every file is read forward."""
    found: dict[tuple[int, int], tuple[Part, list[np.ndarray], list[np.ndarray]]] = {}
    offset = 0
    for window, parts in slices:
        number, index = window.rows()
        order = np.argsort(number, kind="stable")
        bounds = np.searchsorted(number[order], np.arange(len(parts) + 1))
        for i, part in enumerate(parts):
            chosen = order[bounds[i] : bounds[i + 1]]
            if len(chosen):
                entry = found.setdefault((part.dataset_index, part.episode_index), (part, [], []))
                entry[1].append(chosen + offset)
                entry[2].append(index[chosen] - part.episode_start)
        offset += len(index)
    episodes = [_Episode(part, np.concatenate(p), np.concatenate(f)) for part, p, f in found.values()]
    episodes.sort(key=lambda e: (e.part.dataset_index, e.part.data_file, e.part.data_row))
    return episodes, offset


def _windowed(frame: np.ndarray, deltas: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames at each offset, clamped to the episode, and which were clamped: int64 and bool (n, T).

    Same rule as LeRobot's `DatasetReader._get_query_indices`.
    """
    target = frame[:, None] + np.asarray(deltas, np.int64)
    return np.clip(target, 0, length - 1), (target < 0) | (target >= length)


def _read_tabular(
    readers: Sequence[Reader], episodes: list[_Episode], total: int, options: ReadOptions, columns: dict[str, Any]
) -> None:
    """Fill every column that lives in parquet, or is derived from it."""
    reach = [d for deltas in options.delta_indices.values() for d in deltas] + [0]
    for e in episodes:
        e.first = max(0, int(e.frame.min()) + min(reach))
        e.last = min(e.part.episode_length, int(e.frame.max()) + max(reach) + 1)
    by_file: dict[tuple[int, str], list[_Episode]] = {}
    for e in episodes:
        by_file.setdefault((e.part.dataset_index, e.part.data_file), []).append(e)

    for (dataset_index, file), members in by_file.items():
        reader = readers[dataset_index]
        stored = [k for k in options.columns if k in reader.features and reader.features[k].dtype != "video"]
        read_keys = list(dict.fromkeys([*BOOKKEEPING, *stored]))
        table = _read_rows(reader, file, members, read_keys)
        bookkeeping = {k: _numeric(table.column(k), (1,), f"{reader.root}: {file}: column {k}") for k in BOOKKEEPING}
        rows = [np.arange(e.table_row + e.first, e.table_row + e.last) for e in members]
        for e, row in zip(members, rows, strict=True):
            _check_rows(reader, file, e, bookkeeping, row)
            # LeRobot compares video times with the timestamp column, not with frame_index / fps.
            e.timestamps = bookkeeping["timestamp"][row].astype(np.float64)
        for key in stored:
            feature = reader.features[key]
            where = f"{reader.root}: {file}: column {key}"
            if feature.dtype == "image":
                _fill_images(table.column(key), feature, members, total, options, columns, where)
                continue
            values = _values(table.column(key), feature, where)
            for e in members:
                _fill(columns, key, values, e, total, options)
        names = reader.tasks
        for e in members:
            at = e.table_row + e.frame
            if "task" in options.columns:
                _out(columns, "task", total, (), np.dtype(object))[e.position] = _task_names(
                    names, bookkeeping["task_index"][at], f"{reader.root}: {file}: episode {e.part.episode_index}"
                )
            if "index" in columns:
                columns["index"][e.position] = e.part.episode_start + e.frame
            if "dataset_index" in options.columns:
                _out(columns, "dataset_index", total, (), np.dtype(np.int32))[e.position] = dataset_index
            for key, deltas in options.delta_indices.items():
                if key + IS_PAD in options.columns:
                    pad = _windowed(e.frame, deltas, e.part.episode_length)[1]
                    _out(columns, key + IS_PAD, total, (len(deltas),), np.dtype(bool))[e.position] = pad


def _read_rows(reader: Reader, file: str, members: list[_Episode], keys: list[str]) -> pa.Table:
    """The row groups that hold the members' rows, as one table; sets each member's `table_row`."""
    name = f"{reader.root}: {file}"
    with _naming_store_errors(name), open_parquet(reader.fs, reader.path(file), name=name) as parquet:
        missing = [k for k in keys if k not in parquet.schema_arrow.names]
        if missing:
            raise ValueError(f"{reader.root}: {file}: columns {missing} are missing; meta/info.json promises them")
        sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.metadata.num_row_groups)]
        group_first = np.concatenate([[0], np.cumsum(sizes)])
        wanted = np.zeros(len(sizes), bool)
        for e in members:
            a, b = e.part.data_row + e.first, e.part.data_row + e.last
            if b > group_first[-1]:
                raise ValueError(
                    f"{reader.root}: {file}: episode {e.part.episode_index} should end at row {b}, the file has "
                    f"{group_first[-1]} rows: the file is incomplete or meta/episodes is wrong"
                )
            wanted[np.searchsorted(group_first, a, "right") - 1 : np.searchsorted(group_first, b, "left")] = True
        groups = np.flatnonzero(wanted)
        skipped = np.concatenate([[0], np.cumsum(np.where(wanted, 0, sizes))])
        for e in members:
            # Where the episode's frame 0 is, or would be, in what is read.
            group = int(np.searchsorted(group_first, e.part.data_row + e.first, "right")) - 1
            e.table_row = e.part.data_row - int(skipped[group])
        return parquet.read_row_groups(groups.tolist(), columns=keys)


def _check_rows(reader: Reader, file: str, e: _Episode, bookkeeping: dict[str, np.ndarray], row: np.ndarray) -> None:
    """The rows found are the rows looked for: a wrong file index must not give somebody else's frames."""
    wrong = (bookkeeping["episode_index"][row] != e.part.episode_index) | (
        bookkeeping["frame_index"][row] != np.arange(e.first, e.last)
    )
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{reader.root}: {file}: expected episode {e.part.episode_index} frame {e.first + at} at row "
            f"{e.part.data_row + e.first + at}, found episode {bookkeeping['episode_index'][row][at]} frame "
            f"{bookkeeping['frame_index'][row][at]}: meta/episodes and data disagree (a faulty merge or split?); "
            "rebuild the dataset"
        )


def _task_names(names: dict[int, str], task_index: np.ndarray, where: str) -> np.ndarray:
    found = np.empty(len(task_index), object)
    for number in np.unique(task_index):
        if int(number) not in names:
            raise ValueError(
                f"{where}: task_index {number} has no entry in meta/tasks.parquet (it has {len(names)} tasks); "
                "add the task or correct the rows"
            )
        found[task_index == number] = names[int(number)]
    return found


def _values(column: pa.ChunkedArray, feature: Feature, where: str) -> np.ndarray | pa.ChunkedArray:
    """A parquet column as an array (N, *shape) in LeRobot's dtypes; strings and structs stay Arrow."""
    if feature.dtype in ("string", "language"):
        return column
    return _numeric(column, feature.shape, where)


def _numeric(column: pa.ChunkedArray, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Scalars, lists and nested lists to (N,) or (N, *shape); floats become float32, integers int64 (as LeRobot)."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
    count = len(array)
    while True:
        if array.null_count:
            raise ValueError(f"{where}: {array.null_count} empty values; every row must have one")
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        elif (
            pa.types.is_list(array.type)
            or pa.types.is_large_list(array.type)
            or pa.types.is_fixed_size_list(array.type)
        ):
            array = array.flatten()
        else:
            break
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"{where}: holds {kind}, expected numbers")
    values = array.to_numpy(zero_copy_only=False)
    row_shape = () if shape == (1,) else shape
    expected = count * int(np.prod(row_shape, dtype=np.int64))
    if len(values) != expected:
        raise ValueError(f"{where}: {len(values)} values in {count} rows, expected shape {shape} per row")
    if pa.types.is_floating(kind):
        values = values.astype(np.float32, copy=False)
    elif pa.types.is_integer(kind):
        values = values.astype(np.int64, copy=False)
    return values.reshape(count, *row_shape)


def _out(columns: dict[str, Any], key: str, total: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if key not in columns:
        columns[key] = np.empty((total, *shape), dtype)
    return columns[key]


def _fill(
    columns: dict[str, Any],
    key: str,
    values: np.ndarray | pa.ChunkedArray,
    e: _Episode,
    total: int,
    options: ReadOptions,
) -> None:
    """Scatter an episode's rows of one column to their places in the output."""
    if isinstance(values, pa.ChunkedArray):
        picked = np.empty(len(e.frame), object)
        picked[:] = values.take(pa.array(e.table_row + e.frame)).to_pylist()
        _out(columns, key, total, (), np.dtype(object))[e.position] = picked
        return
    if key in options.delta_indices:
        frames = _windowed(e.frame, options.delta_indices[key], e.part.episode_length)[0]
    else:
        frames = e.frame
    shape = frames.shape[1:] + values.shape[1:]
    _out(columns, key, total, shape, values.dtype)[e.position] = values[e.table_row + frames]


def _fill_images(
    column: pa.ChunkedArray,
    feature: Feature,
    members: list[_Episode],
    total: int,
    options: ReadOptions,
    columns: dict[str, Any],
    where: str,
) -> None:
    height, width = _height_width(feature)
    for e in members:
        frames, target, out = _camera_targets(feature, e, total, options, columns)
        bytes_ = column.take(pa.array(e.table_row + frames)).combine_chunks().field("bytes")
        for i, frame in enumerate(frames):
            name = f"{where}: episode {e.part.episode_index} frame {frame}"
            pixels = decode_image(bytes_[i].as_py(), name=name, height=height, width=width)
            for at in target[i]:
                out[at] = pixels


def _read_video(
    reader: Reader, key: str, episodes: list[_Episode], total: int, options: ReadOptions, columns: dict[str, Any]
) -> None:
    """Fill a camera's column: one decoder at a time, every file walked forward once."""
    feature = reader.features[key]
    height, width = _height_width(feature)
    by_file: dict[str, list[_Episode]] = {}
    for e in sorted(episodes, key=lambda e: e.part.videos[key]):
        by_file.setdefault(e.part.videos[key][0], []).append(e)
    for file, members in by_file.items():
        name = f"{reader.root}: {file} (camera {key}, episodes {[e.part.episode_index for e in members]})"
        with (
            _naming_store_errors(name),
            VideoReader(
                reader.open_video(file),
                name=name,
                height=height,
                width=width,
                fps=reader.fps,
                tolerance_s=options.tolerance_s,
                threads=options.threads,
            ) as video,
        ):
            for e in members:
                video.name = f"{reader.root}: {file} (camera {key}, episode {e.part.episode_index})"
                frames, target, out = _camera_targets(feature, e, total, options, columns)

                def sink(i: int, rgb: np.ndarray, target: list[list[Any]] = target, out: np.ndarray = out) -> None:
                    for at in target[i]:
                        out[at] = rgb

                stamps = e.timestamps[frames - e.first]
                video.read(e.part.videos[key][1] + stamps, sink)


@contextlib.contextmanager
def _naming_store_errors(name: str) -> Iterator[None]:
    """Say what was being read when the network, or the object store, refused."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        # Each store has its own exceptions for credentials and connections.
        if type(error).__module__ == "builtins" and not isinstance(error, OSError):
            raise
        raise OSError(
            f"{name}: cannot be read: {type(error).__name__}: {error}; check the network, and this node's credentials, "
            "permissions and endpoint (environment variables of the object store)"
        ) from error


def _camera_targets(
    feature: Feature, e: _Episode, total: int, options: ReadOptions, columns: dict[str, Any]
) -> tuple[np.ndarray, list[list[Any]], np.ndarray]:
    """Distinct frames to decode, ascending; where in the output each goes (maybe several places); the output."""
    height, width = _height_width(feature)
    if feature.key in options.delta_indices:
        deltas = options.delta_indices[feature.key]
        wanted = _windowed(e.frame, deltas, e.part.episode_length)[0]
        out = _out(columns, feature.key, total, (len(deltas), height, width, 3), np.dtype(np.uint8))
        places: list[tuple[int, ...]] = [(int(p), t) for p in e.position for t in range(len(deltas))]
    else:
        wanted = e.frame
        out = _out(columns, feature.key, total, (height, width, 3), np.dtype(np.uint8))
        places = [(int(p),) for p in e.position]
    frames, inverse = np.unique(wanted.ravel(), return_inverse=True)
    target: list[list[Any]] = [[] for _ in frames]
    for place, i in zip(places, inverse.tolist(), strict=True):
        target[i].append(place)
    return frames, target, out


def _height_width(feature: Feature) -> tuple[int, int]:
    """LeRobot states (H, W, 3), or (3, H, W) with names saying so."""
    if feature.shape[0] == 3 and feature.shape[-1] != 3:
        return feature.shape[1], feature.shape[2]
    return feature.shape[0], feature.shape[1]


def _to_table(columns: dict[str, Any], keys: Sequence[str], first: int, last: int) -> pa.Table:
    arrays = []
    for key in keys:
        values = columns[key][first:last]
        if values.dtype == object:
            arrays.append(pa.array(values.tolist()))
        elif values.ndim == 1:
            arrays.append(pa.array(values))
        else:
            arrays.append(ArrowTensorArray.from_numpy(values))
    return pa.table(arrays, names=list(keys))


def _column_to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    array = column.chunk(0)
    return array.to_numpy() if isinstance(array, ArrowTensorArray) else array.to_numpy(zero_copy_only=False)


# ---- on the driver ----------------------------------------------------------------------------------------------


def resolve_delta_indices(
    delta_timestamps: Mapping[str, Sequence[float]],
    features: Mapping[str, Feature],
    meta: DatasetMetadata,
    tolerance_s: float,
) -> dict[str, tuple[int, ...]]:
    """Offsets in seconds to offsets in frames, refusing what lies between frames (as LeRobot does)."""
    indices = {}
    for key, seconds in delta_timestamps.items():
        if key not in features:
            raise ValueError(f"{meta.root}: delta_timestamps names {key!r}; the columns are {sorted(features)}")
        if features[key].dtype in ("string", "language"):
            raise ValueError(f"{meta.root}: delta_timestamps cannot window {key!r}, a {features[key].dtype} column")
        frames = np.asarray(seconds, np.float64) * meta.fps
        off = np.abs(frames - np.rint(frames)) / meta.fps
        if len(frames) == 0 or off.max() > tolerance_s:
            raise ValueError(
                f"{meta.root}: delta_timestamps[{key!r}] = {list(seconds)} must be multiples of 1/{meta.fps} s "
                f"(the dataset's frame rate), at least one"
            )
        indices[key] = tuple(np.rint(frames).astype(int).tolist())
    return indices


def _common_features(metas: Sequence[DatasetMetadata], camera_keys: Sequence[str] | None) -> dict[str, Feature]:
    """Features of a row: the chosen cameras and everything else; all datasets must agree on them."""
    if camera_keys is not None:
        for meta in metas:
            unknown = sorted(set(camera_keys) - set(meta.camera_keys))
            if unknown:
                raise ValueError(f"{meta.root}: no cameras {unknown}; it has {list(meta.camera_keys)}")
    chosen: dict[str, Feature] = {}
    for meta in metas:
        kept = {}
        for key, feature in meta.features.items():
            is_camera = key in meta.camera_keys
            if is_camera and camera_keys is not None and key not in camera_keys:
                continue
            if is_camera and feature.is_depth:
                if camera_keys is not None:
                    raise ValueError(f"{meta.root}: camera {key!r} is a depth map, which is not supported yet")
                logger.warning("%s: leaving out %r: depth maps are not supported yet", meta.root, key)
                continue
            kept[key] = feature
        if not chosen:
            chosen = kept
        differing = sorted(
            k
            for k in chosen.keys() | kept.keys()
            if k not in chosen or k not in kept or (chosen[k].dtype, chosen[k].shape) != (kept[k].dtype, kept[k].shape)
        )
        if differing:
            raise ValueError(
                f"{meta.root} and {metas[0].root} cannot be read together: they differ in {differing}; "
                "choose the cameras they share with camera_keys, or convert one of them"
            )
    return chosen


def read_lerobot(
    root: str | Path | Sequence[str | Path],
    *,
    episodes: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    camera_keys: Sequence[str] | None = None,
    delta_timestamps: Mapping[str, Sequence[float]] | None = None,
    shuffle_seed: int | None = None,
    shuffle_window: int = WINDOW_ROWS,
    tolerance_s: float = 1e-4,
    storage_options: dict[str, Any] | None = None,
    override_num_blocks: int | None = None,
    num_cpus: float = 1,
) -> Dataset:
    """Read LeRobot v3 datasets as a Ray Dataset of frames.

    Args:
        root: a path or URI (`s3://`, `gs://`, anything fsspec opens), or a list of them.
        episodes: which episodes; with several roots, `{root: episodes}`. None for all.
        camera_keys: decode only these cameras; None for all.
        delta_timestamps: offsets in seconds per key, e.g. ``{"action": [0.0, 1 / 30, 2 / 30]}``; the key's column then
            has a leading time axis, and `<key>_is_pad` marks offsets outside the episode, where the edge repeats.
        shuffle_seed: None for stored order; otherwise rows are shuffled (see `lerobot_plan`), the same way for the
            same seed.
        shuffle_window: rows shuffled among themselves.
        tolerance_s: how far a video frame may lie from its row's timestamp, in seconds.
        storage_options: for fsspec (endpoint, credentials); the environment is used when None.
        override_num_blocks: number of read tasks; chosen by memory when None.
        num_cpus: CPUs that a read task holds; it decodes with as many threads.

    Returns:
        One row per frame. Cameras: uint8 (H, W, 3), or (T, H, W, 3) when windowed. Numbers: float32 or int64, shaped as
        in `meta/info.json` (shape (1,) is a scalar). `task`: the instruction. `index`: the row's place in its dataset;
        `(dataset_index, index)` is unique. Depth maps are left out, with a warning.

    Raises:
        ValueError, FileNotFoundError: here, for what the metadata and a listing of the files can tell; in the read
            task, naming file, episode and time, for damaged files or videos that disagree with the metadata.
    """
    roots = [root] if isinstance(root, str | Path) else list(root)
    metas = [load_metadata(r, storage_options=storage_options) for r in roots]
    per_root: list[Sequence[int] | None]
    if isinstance(episodes, Mapping):
        unknown = sorted(set(map(str, episodes)) - set(map(str, roots)))
        if unknown:
            raise ValueError(f"episodes names {unknown}, which are not among the roots {list(map(str, roots))}")
        chosen = {str(k): v for k, v in episodes.items()}
        per_root = [chosen.get(str(r)) for r in roots]
    elif episodes is not None and len(roots) > 1:
        raise ValueError("several roots: say which episodes of which root, episodes={root: [...]}")
    else:
        per_root = [episodes]
    source = LeRobotDatasource(
        metas,
        episodes=per_root if episodes is not None else None,
        camera_keys=camera_keys,
        delta_timestamps=delta_timestamps,
        shuffle_seed=shuffle_seed,
        shuffle_window=shuffle_window,
        num_tasks=override_num_blocks,
        tolerance_s=tolerance_s,
        num_cpus=num_cpus,
    )
    return read_source(source)


def read_source(source: LeRobotDatasource) -> Dataset:
    """A Ray Dataset over `source`, whose blocks stay as the source made them."""
    # One is never more than the source's own number of tasks: Ray then does not split their output...
    dataset = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=source.num_cpus)
    # ... and a target a little under a block's size makes Ray pass each on at once, neither merged nor cut.
    dataset.context.target_max_block_size = max(1, int(0.8 * source.row_bytes() * source.block_rows))
    return dataset
