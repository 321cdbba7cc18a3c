"""The rows of a read task: parquet columns and video frames into arrays, arrays into Arrow blocks.

Every frame that is named is decoded once, each file is walked forward, and pixels go straight to their place in the
output. Knows nothing of Ray's plans, shuffling or training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data.extensions import ArrowTensorArray

from vla_finetuning.buckets.mirror import file_of_process, push
from vla_finetuning.buckets.store import StorageError
from vla_finetuning.columns import IS_SKIPPED
from vla_finetuning.data.dataset import CAMERA_DTYPES, NUMERIC_DTYPES, Feature, naming_file
from vla_finetuning.data.parquet_columns import Column, DataFile, Span, numbers, read_numbers, read_values
from vla_finetuning.data.plan import WindowSlice
from vla_finetuning.data.reader import DatasetFiles, ReadOptions, frame_of
from vla_finetuning.data.reused_memory import copied, empty
from vla_finetuning.data.storage import check_still_there, file_identity
from vla_finetuning.data.videos import CameraFile, Wanted, read_frames
from vla_finetuning.files import append_line

logger = logging.getLogger(__name__)

IS_PAD = "_is_pad"
# Columns that data files have (`metadata.COUNTED_FEATURES`: most), and their dtypes in a row.
BOOKKEEPING = {name: np.int64 for name in ("index", "episode_index", "frame_index", "task_index")} | {
    "timestamp": np.float32
}


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

    def frames_in(self, camera_key: str) -> tuple[str, float]:
        """The file with a camera's frames, and where the episode starts in it: seconds of a video, rows of images."""
        return self.videos.get(camera_key) or (self.data_file, float(self.data_row))

    @property
    def files(self) -> list[str]:
        return [self.data_file, *(file for file, _ in self.videos.values())]


@dataclass(frozen=True)
class EpisodeLocations:
    """Where n episodes lie: arrays (n,). Files are numbers in the lists of their dataset's `DatasetFiles`.

    dataset_index, episode_index, start (`index` of the first row), length (rows), data_file, data_row (the first row in
    that file): integers. By camera: video_file, and video_start_s, where the episode starts in it, seconds.
    """

    dataset_index: np.ndarray
    episode_index: np.ndarray
    start: np.ndarray
    length: np.ndarray
    data_file: np.ndarray
    data_row: np.ndarray
    video_file: dict[str, np.ndarray]
    video_start_s: dict[str, np.ndarray]

    def take(self, at: Any) -> EpisodeLocations:
        """Return the rows at some positions (anything that indexes an array)."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        selected: dict[str, Any] = {
            k: {key: a[at] for key, a in v.items()} if isinstance(v, dict) else v[at] for k, v in columns.items()
        }
        return EpisodeLocations(**selected)

    def part(self, number: int, readers: Sequence[DatasetFiles]) -> Part:
        reader = readers[self.dataset_index[number]]
        return Part(
            dataset_index=int(self.dataset_index[number]),
            episode_index=int(self.episode_index[number]),
            episode_start=int(self.start[number]),
            episode_length=int(self.length[number]),
            data_file=reader.data_files[self.data_file[number]],
            data_row=int(self.data_row[number]),
            videos={
                key: (files[self.video_file[key][number]], float(self.video_start_s[key][number]))
                for key, files in reader.video_files.items()
                if key in self.video_file
            },
        )


@dataclass(frozen=True)
class WindowRead:
    """Window slices that are decoded in one go, and where the episodes of their parts lie, in the same order.

    `runs`: where their rows are in the stream, [start, end) in order, int64 (N, 2); None where one follows the other.
    """

    windows: list[WindowSlice]
    places: EpisodeLocations
    runs: np.ndarray | None = None

    def __len__(self) -> int:
        return sum(window.hi - window.lo for window in self.windows)

    def positions(self, first: int) -> np.ndarray:
        """The rows' places in the stream, int64 (rows,). `first`: of the first one, where there are no `runs`."""
        if self.runs is None:
            return np.arange(first, first + len(self))
        return np.concatenate([np.arange(*run) for run in self.runs.tolist()])


@dataclass
class _Episode:
    """The rows of a read task that come from one episode."""

    part: Part
    position: np.ndarray  # int64 (n,), where each row goes in the task's output
    frame: np.ndarray  # int64 (n,), its frame_index
    first: int = 0  # frames [first, last) are read from parquet
    last: int = 0
    number_row: int = 0  # where frame 0 lies in the numbers read (negative when it was not read)
    timestamps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 (last - first,), of those frames


def read_rows(
    readers: Sequence[DatasetFiles],
    read: WindowRead,
    first_position: int,
    options: ReadOptions,
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
) -> Iterator[pa.Table]:
    """Decode the rows of some window slices, in their order, and yield them as blocks of `block_rows`, prepared.

    Runs in a Ray Data read task. Memory: those rows, once, plus a block, a frame and the parquet row groups touched.
    """
    episodes, total = _group_by_episode(readers, read)
    positions = read.positions(first_position)
    if options.blank is None:
        columns = _decode(readers, episodes, total, options)
    else:
        columns = _decode_what_can_be_read(readers, episodes, positions, options, options.blank)
    if "position" in options.columns:
        columns["position"] = positions
    for first in range(0, total, options.block_rows):
        last = min(first + options.block_rows, total)
        if last == total:
            # Whoever gets this block keeps it until the next is asked for: let go of the memory of all the others.
            columns = {key: copied(values[first:last]) for key, values in columns.items()}
            first, last = 0, last - first
        block = {key: columns[key][first:last] for key in options.columns}
        yield to_table(block if prepare is None else prepare(block))


def _decode(
    readers: Sequence[DatasetFiles], episodes: list[_Episode], total: int, options: ReadOptions
) -> dict[str, Any]:
    """Decode all columns but `position`, `total` rows each."""
    columns: dict[str, Any] = {}
    _read_tabular(readers, episodes, total, options, columns)
    read_frames(_camera_files(readers, episodes, total, options, columns), options)
    _fill_absent(readers, episodes, total, options, columns)
    if IS_SKIPPED in options.columns:
        columns[IS_SKIPPED] = np.zeros(total, bool)
    return columns


def _decode_what_can_be_read(
    readers: Sequence[DatasetFiles],
    episodes: list[_Episode],
    positions: np.ndarray,
    options: ReadOptions,
    blank: dict[str, np.ndarray],
) -> dict[str, Any]:
    """Decode as `_decode`, with blank rows of a damaged episode, which are `is_skipped`.

    Only what is wrong with the data is skipped: an object store that does not answer ends the task, as ever, and so
    does a dataset that is no longer there.
    """
    total = len(positions)
    with contextlib.suppress(ValueError, FileNotFoundError):
        return _decode(readers, episodes, total, options)
    columns: dict[str, Any] = {key: np.repeat(value, total, axis=0) for key, value in blank.items()}
    for e in episodes:
        alone = replace(e, position=np.arange(len(e.frame)))
        try:
            decoded = _decode(readers, [alone], len(e.frame), options)
        except (ValueError, FileNotFoundError) as error:
            reader = readers[e.part.dataset_index]
            check_still_there(reader.fs, reader.root, [reader.path(file) for file in e.part.files])
            decoded = {
                "index": e.part.episode_start + _frames("index", e, options),
                "dataset_index": e.part.dataset_index,
                IS_SKIPPED: True,
            }
            _tell_skipped(reader, e, positions[e.position], error, options.skip_log)
        for key in columns.keys() & decoded.keys():
            columns[key][e.position] = decoded[key]
    return columns


def _tell_skipped(reader: DatasetFiles, e: _Episode, positions: np.ndarray, error: Exception, log: Path | None) -> None:
    logger.warning("%s: episode %d is skipped: %s", reader.root, e.part.episode_index, error)
    if log is not None:
        line: dict[str, Any] = {"root": reader.root, "episode_index": e.part.episode_index, "rows": len(e.frame)}
        line |= {"positions": sorted(positions.tolist()), "error": str(error)}
        log = file_of_process(log)
        append_line(log, json.dumps(line))
        with contextlib.suppress(StorageError):  # the bucket of the run's folder is away: the next line goes with it
            push(log)


def _group_by_episode(readers: Sequence[DatasetFiles], read: WindowRead) -> tuple[list[_Episode], int]:
    """Rows by episode, ordered by where they lie in the data files, so that every file is read forward."""
    by_episode: dict[tuple[int, int], tuple[Part, list[np.ndarray], list[np.ndarray]]] = {}
    offset = first_part = 0
    for window in read.windows:
        number, index = window.rows()
        order = np.argsort(number, kind="stable")
        bounds = np.searchsorted(number[order], np.arange(len(window.episode) + 1))
        for i in range(len(window.episode)):
            chosen = order[bounds[i] : bounds[i + 1]]
            if len(chosen):
                part = read.places.part(first_part + i, readers)
                entry = by_episode.setdefault((part.dataset_index, part.episode_index), (part, [], []))
                entry[1].append(chosen + offset)
                entry[2].append(index[chosen] - part.episode_start)
        offset += len(index)
        first_part += len(window.episode)
    episodes = [_Episode(part, np.concatenate(p), np.concatenate(f)) for part, p, f in by_episode.values()]
    episodes.sort(key=lambda e: (e.part.dataset_index, e.part.data_file, e.part.data_row))
    return episodes, offset


def _windowed(frame: np.ndarray, deltas: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames at each offset, clamped to the episode, and which were clamped: int64 and bool (n, T).

    Same rule as LeRobot's `DatasetReader._get_query_indices`.
    """
    target = frame[:, None] + np.asarray(deltas, np.int64)
    return np.clip(target, 0, length - 1), (target < 0) | (target >= length)


def _frames(key: str, e: _Episode, options: ReadOptions) -> np.ndarray:
    """The frames that an episode's rows have of a column: int64 (n,), or (n, T) in windows."""
    if key not in options.delta_indices:
        return e.frame
    return _windowed(e.frame, options.deltas(key, e.part.dataset_index), e.part.episode_length)[0]


def _read_tabular(
    readers: Sequence[DatasetFiles], episodes: list[_Episode], total: int, options: ReadOptions, columns: dict[str, Any]
) -> None:
    """Fill every column that lives in parquet, or is derived from it."""
    for e in episodes:
        reach = [d for key in options.delta_indices for d in options.deltas(key, e.part.dataset_index)] + [0]
        e.first = max(0, int(e.frame.min()) + min(reach))
        e.last = min(e.part.episode_length, int(e.frame.max()) + max(reach) + 1)
    by_file: dict[tuple[int, str], list[_Episode]] = {}
    for e in episodes:
        by_file.setdefault((e.part.dataset_index, e.part.data_file), []).append(e)

    for (dataset_index, file), members in by_file.items():
        reader = readers[dataset_index]
        stored = [k for k in options.columns if k in reader.features and reader.features[k].dtype not in CAMERA_DTYPES]
        label = f"{reader.root}: {file}"
        data_file = DataFile(reader.fs, reader.path(file), label, reader.dataset)
        spans = [
            Span(f"episode {e.part.episode_index}", e.part.data_row + e.first, e.part.data_row + e.last)
            for e in members
        ]
        with naming_file(label):
            identity = file_identity(reader.fs, data_file.path)

        numeric = [k for k in stored if reader.features[k].dtype in NUMERIC_DTYPES]
        needed = {
            ("", key): Column(key, np.dtype(dtype), (1,), _row_bytes((1,)))
            for key, dtype in BOOKKEEPING.items()
            if not reader.features[key].counted
        }
        row_columns = {key: [_column(feature) for feature in reader.features[key].columns] for key in numeric}
        needed |= {("row", column.key): column for group in row_columns.values() for column in group}
        distinct = list(dict.fromkeys(needed.values()))
        arrays = dict(zip(distinct, read_numbers(data_file, distinct, spans, identity), strict=True))
        begin = np.cumsum([0, *map(len, spans)])
        for e, at in zip(members, begin.tolist(), strict=False):
            e.number_row = at - e.first
        bookkeeping = {key: arrays[needed["", key]] for key in BOOKKEEPING if ("", key) in needed}
        for e in members:
            row = np.arange(e.number_row + e.first, e.number_row + e.last)
            _check_rows(reader, file, e, bookkeeping, row)
            e.timestamps = bookkeeping["timestamp"][row].astype(np.float64)
        frame = np.concatenate([np.arange(e.first, e.last) for e in members])
        start = np.repeat([e.part.episode_start for e in members], list(map(len, spans)))
        counted = {"frame_index": frame, "index": start + frame}
        for key in numeric:
            # `index` says where a row is in the dataset, also where files count otherwise.
            if key == "index" or reader.features[key].counted:
                values = counted[key]
            else:
                values = reader.features[key].values({column.key: arrays[column] for column in row_columns[key]})
            if (order := reader.features[key].order) is not None:
                values = values[:, list(order)]
            for e in members:
                _fill_numbers(columns, key, values, e, total, options)

        for key in [k for k in stored if k not in numeric]:
            feature = reader.features[key]
            _fill_texts(data_file, key, feature, members, total, columns, identity)
        names = reader.tasks
        for e in members:
            at = e.number_row + e.frame
            if "task" in options.columns:
                _out(columns, "task", total, (), np.dtype(object))[e.position] = _task_names(
                    names, bookkeeping["task_index"][at], f"{reader.root}: {file}: episode {e.part.episode_index}"
                )
            if "dataset_index" in options.columns:
                _out(columns, "dataset_index", total, (), np.dtype(np.int32))[e.position] = dataset_index
            for key in options.delta_indices:
                if key + IS_PAD in options.columns:
                    deltas = options.deltas(key, dataset_index)
                    pad = _windowed(e.frame, deltas, e.part.episode_length)[1]
                    _out(columns, key + IS_PAD, total, (len(deltas),), np.dtype(bool))[e.position] = pad


def _column(feature: Feature) -> Column:
    return Column(feature.key, row_dtype(feature), feature.shape, _row_bytes(feature.shape))


def _row_bytes(shape: tuple[int, ...]) -> int:
    # 8 bytes a number, and as many where a dictionary says the same again or lists say where they begin.
    return math.prod(shape) * 16


def _check_rows(
    reader: DatasetFiles, file: str, e: _Episode, bookkeeping: dict[str, np.ndarray], row: np.ndarray
) -> None:
    """The rows found are the rows looked for: a wrong file index must not give another episode's frames.

    Without `frame_index`, rows of the episode must follow each other by `index`, where that is there.
    """
    episode, frame = bookkeeping["episode_index"][row], np.arange(e.first, e.last)
    stored = frame
    if "frame_index" in bookkeeping:
        stored = bookkeeping["frame_index"][row]
    elif "index" in bookkeeping:
        index = bookkeeping["index"][row]
        stored = index - index[0] + e.first
    wrong = (episode != e.part.episode_index) | (stored != frame)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{reader.root}: {file}: expected episode {e.part.episode_index} frame {frame[at]} at row "
            f"{e.part.data_row + frame[at]}, found episode {episode[at]} frame {stored[at]}: meta/episodes and data "
            "disagree (a faulty merge or split?); rebuild the dataset"
        )


def _task_names(names: dict[int, str], task_index: np.ndarray, label: str) -> np.ndarray:
    texts = np.empty(len(task_index), object)
    for number in np.unique(task_index):
        if int(number) not in names:
            raise ValueError(
                f"{label}: task_index {number} has no entry in meta/tasks.parquet (it has {len(names)} tasks); "
                "add the task or correct the rows"
            )
        texts[task_index == number] = names[int(number)]
    return texts


def _texts(column: pa.ChunkedArray, feature: Feature, label: str) -> pa.ChunkedArray:
    """Texts, and language columns as they are."""
    if feature.dtype == "language":
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowException as error:
        raise ValueError(f"{label}: holds {column.type}, expected text ({error})") from error


def row_dtype(feature: Feature) -> np.dtype:
    """Return what numbers of a feature are in a row, as in LeRobot's: float32, int64 or bool."""
    code = np.dtype(feature.dtype).kind
    return np.dtype(np.float32 if code == "f" else bool if code == "b" else np.int64)


def row_kind(feature: Feature) -> np.dtype | str:
    """`row_dtype` of numbers; what a feature that holds none is declared as. Equal where rows have the same."""
    return row_dtype(feature) if feature.dtype in NUMERIC_DTYPES else feature.dtype


def _out(columns: dict[str, Any], key: str, total: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if key not in columns:
        columns[key] = empty((total, *shape), dtype)
    return columns[key]


def _fill_numbers(
    columns: dict[str, Any], key: str, values: np.ndarray, e: _Episode, total: int, options: ReadOptions
) -> None:
    """Scatter an episode's rows of one column to their places in the output."""
    frames = _frames(key, e, options)
    row = options.padded[key].shape if key in options.padded and values.ndim > 1 else values.shape[1:]
    out = _out(columns, key, total, frames.shape[1:] + row, values.dtype)
    if row != values.shape[1:]:
        out[e.position] = 0
        out = out[..., : values.shape[1]]
    out[e.position] = values[e.number_row + frames]


def _fill_texts(
    file: DataFile,
    key: str,
    feature: Feature,
    members: list[_Episode],
    total: int,
    columns: dict[str, Any],
    identity: str | None,
) -> None:
    position = np.concatenate([e.position for e in members])
    rows = np.concatenate([e.part.data_row + e.frame for e in members])
    seconds = np.concatenate([e.timestamps[e.frame - e.first] for e in members])
    for inside, column in read_values(file, feature.key, None, rows, identity):
        label = f"{file.name}: column {feature.key}"
        if feature.texts:
            picked = [feature.texts.get(n, "") for n in numbers(column, np.int64, (1,), label).ravel().tolist()]
        elif feature.style:
            picked = [_active(*row, feature.style) for row in zip(column.to_pylist(), seconds[inside], strict=True)]
        else:
            values = _texts(column, feature, label)
            picked = values.to_pylist()
            # Language columns: the types of LeRobot's lists of structs differ from file to file, as their content does.
            if not pa.types.is_string(values.type):
                picked = [json.dumps(value) for value in picked]
        _out(columns, key, total, (), np.dtype(object))[position[inside]] = picked


def _active(annotations: Sequence[dict[str, Any]] | None, at_s: float, style: str) -> str:
    """Return the newest text of a style that is not after a time, as LeRobot's `active_at`; empty: there is none."""
    begun = [line for line in annotations or () if line["style"] == style and line["timestamp"] <= at_s]
    return (max(begun, key=lambda line: line["timestamp"])["content"] or "") if begun else ""


def _camera_files(
    readers: Sequence[DatasetFiles], episodes: list[_Episode], total: int, options: ReadOptions, columns: dict[str, Any]
) -> list[CameraFile]:
    """The files with frames of the cameras, with what is wanted of each."""
    files = []
    for key in options.columns:
        for dataset_index, reader in enumerate(readers):
            feature = reader.features.get(key)
            if feature is not None and feature.dtype in CAMERA_DTYPES:
                mine = [e for e in episodes if e.part.dataset_index == dataset_index]
                by_file: dict[str, list[_Episode]] = {}
                for e in sorted(mine, key=lambda e: e.part.frames_in(key)):
                    by_file.setdefault(e.part.frames_in(key)[0], []).append(e)
                for file, members in by_file.items():
                    requests = [_wanted(key, feature, e, total, options, columns) for e in members]
                    files.append(CameraFile(reader, key, file, requests))
    return files


def _fill_absent(
    readers: Sequence[DatasetFiles], episodes: list[_Episode], total: int, options: ReadOptions, columns: dict[str, Any]
) -> None:
    """Fill in black frames for rows of datasets that lack a camera."""
    for key, feature in options.padded.items():
        if feature.dtype not in CAMERA_DTYPES or key not in options.columns:
            continue
        lacking = [e for e in episodes if key not in readers[e.part.dataset_index].features]
        if lacking:
            shape, dtype = frame_of(feature, options.image_size)
            window = (len(options.delta_indices[key]),) if key in options.delta_indices else ()
            out = _out(columns, key, total, (*window, *shape), dtype)
            out[np.concatenate([e.position for e in lacking])] = 0


def _wanted(
    key: str,
    feature: Feature,
    e: _Episode,
    total: int,
    options: ReadOptions,
    columns: dict[str, Any],
) -> Wanted:
    """Return what an episode's rows want of a file."""
    # LeRobot compares video times with the timestamp column, not with frame_index / fps.
    positions = e.timestamps if feature.dtype == "video" else np.arange(e.first, e.last, dtype=np.float64)
    frames = _frames(key, e, options)
    times_s = e.part.frames_in(key)[1] + positions[frames - e.first]
    shape, dtype = frame_of(feature, options.image_size)
    out = _out(columns, key, total, (*frames.shape[1:], *shape), dtype)
    # Each once, to all its places.
    distinct, at_first, inverse = np.unique(times_s.ravel(), return_index=True, return_inverse=True)
    target: list[list[Any]] = [[] for _ in distinct]
    window = list(np.ndindex(*frames.shape[1:]))
    places = ((row, *inside) for row in e.position.tolist() for inside in window)
    for at, i in zip(places, inverse.tolist(), strict=True):
        target[i].append(at)
    return Wanted(distinct, frames.ravel()[at_first], target, out, e.part.episode_index)


def to_table(columns: dict[str, np.ndarray]) -> pa.Table:
    arrays = []
    for values in columns.values():
        if values.dtype == object:
            arrays.append(pa.array(values.tolist()))
        elif values.ndim == 1:
            arrays.append(pa.array(values))
        else:
            arrays.append(ArrowTensorArray.from_numpy(values))
    return pa.table(arrays, names=list(columns))


def column_to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    array = column.chunk(0)
    return array.to_numpy() if isinstance(array, ArrowTensorArray) else array.to_numpy(zero_copy_only=False)
