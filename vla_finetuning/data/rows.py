"""Read the rows of a read task: parquet columns and video frames into arrays, arrays into Arrow blocks.

The plan names the rows at the task's stream positions. Each of their frames is decoded once, each file is read forward,
and pixels are written straight to their place in the output.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data.extensions import ArrowTensorArray

from vla_finetuning.buckets.mirror import file_of_process, push
from vla_finetuning.buckets.store import StorageError
from vla_finetuning.columns import IS_SKIPPED
from vla_finetuning.data.dataset import (
    CAMERA_DTYPES,
    FRAME_FEATURES,
    NUMERIC_DTYPES,
    DatasetMetadata,
    Feature,
    naming_file,
)
from vla_finetuning.data.parquet_columns import Column, DataFile, Span, numbers, read_numbers, read_values
from vla_finetuning.data.reader import ReadOptions, frame_spec
from vla_finetuning.data.reused_memory import copy_reusing, empty
from vla_finetuning.data.shards import Plan
from vla_finetuning.data.storage import check_still_there, file_identity
from vla_finetuning.data.videos import CameraFile, FrameRequest, read_frames
from vla_finetuning.files import append_line

logger = logging.getLogger(__name__)

IS_PAD = "_is_pad"


@dataclass(frozen=True)
class ReadContext:
    """Context shared by all read tasks of a source. Each node holds one copy."""

    plan: Plan
    metas: Sequence[DatasetMetadata]  # by `dataset_index`, from `reader.for_read_tasks`
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None  # applied to each block


@dataclass
class _Episode:
    """An episode, and the n rows that a read takes from it."""

    meta: DatasetMetadata
    dataset_index: int
    episode_index: int
    position: np.ndarray  # int64 (n,), place of each row in the output
    frame: np.ndarray  # int64 (n,), frame_index of each row
    first: int = 0  # frames [first, last) are read from parquet
    last: int = 0
    numbers_offset: int = 0  # place of frame 0 in the numbers read; negative if it was not read
    timestamps: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 (last - first,)

    @property
    def start(self) -> int:
        """Return the `index` of frame 0."""
        return int(self.meta.episode_start[self.episode_index])

    @property
    def length(self) -> int:
        return int(self.meta.episode_length[self.episode_index])

    @property
    def data_file(self) -> str:
        return self.meta.data_files[self.meta.episode_data_file[self.episode_index]]

    @property
    def data_row(self) -> int:
        """Return the row of frame 0 in the data file."""
        return int(self.meta.episode_data_row[self.episode_index])

    def camera_file(self, camera_key: str) -> tuple[str, float]:
        return self.meta.camera_file(camera_key, self.episode_index)

    def window_frames(self, key: str, options: ReadOptions) -> tuple[np.ndarray, np.ndarray]:
        """Return the frames of a column's window, clamped to the episode, and the mask of clamped ones: (n, T) each.

        Same rule as LeRobot's `DatasetReader._get_query_indices`.
        """
        target = self.frame[:, None] + np.asarray(options.deltas(key, self.dataset_index), np.int64)
        return np.clip(target, 0, self.length - 1), (target < 0) | (target >= self.length)

    def row_frames(self, key: str, options: ReadOptions) -> np.ndarray:
        """Return the frames that a column holds for each row: int64 (n,), or (n, T) in windows."""
        return self.window_frames(key, options)[0] if key in options.delta_indices else self.frame


class _Output:
    """The columns of a read: arrays of `total` rows, allocated at the first write."""

    def __init__(self, total: int, options: ReadOptions):
        self.total, self.options = total, options
        self.columns: dict[str, np.ndarray] = {}

    def column(self, key: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if key not in self.columns:
            self.columns[key] = empty((self.total, *shape), np.dtype(dtype))
        return self.columns[key]


def read_rows(context: ReadContext, runs: np.ndarray, options: ReadOptions) -> Iterator[pa.Table]:
    """Decode the rows at stream positions `runs`, int64 (N, 2), and yield them in order, as blocks of `block_rows`.

    Runs in a Ray Data read task. Memory holds all rows once, plus a block, a frame and the touched row groups.
    """
    episodes = _group_by_episode(context, runs)
    positions = np.concatenate([np.arange(*run) for run in runs.tolist()])
    total = len(positions)
    if options.blank is None:
        columns = _decode(episodes, total, options)
    else:
        columns = _decode_or_skip(episodes, positions, options, options.blank)
    if "position" in options.columns:
        columns["position"] = positions
    for first in range(0, total, options.block_rows):
        last = min(first + options.block_rows, total)
        if last == total and first:
            # The consumer keeps this block until it asks for the next one: copy it, to free the memory of the others.
            columns = {key: copy_reusing(values[first:last]) for key, values in columns.items()}
            first, last = 0, last - first
        block = {key: columns[key][first:last] for key in options.columns}
        yield to_table(block if context.prepare is None else context.prepare(block))


def _decode(episodes: Sequence[_Episode], total: int, options: ReadOptions) -> dict[str, np.ndarray]:
    """Decode all columns except `position`, `total` rows each."""
    out = _Output(total, options)
    _read_tabular(episodes, out)
    read_frames([file for key in options.columns for file in _camera_files(key, episodes, out)], options)
    if IS_SKIPPED in options.columns:
        out.columns[IS_SKIPPED] = np.zeros(total, bool)
    return out.columns


def _decode_or_skip(
    episodes: Sequence[_Episode], positions: np.ndarray, options: ReadOptions, blank: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Decode as `_decode` does, with blank rows marked `is_skipped` for damaged episodes.

    Errors of an object store, and a dataset that has gone, still end the task.
    """
    total = len(positions)
    with contextlib.suppress(ValueError, FileNotFoundError):
        return _decode(episodes, total, options)
    columns = {key: np.repeat(value, total, axis=0) for key, value in blank.items()}
    for e in episodes:
        alone = replace(e, position=np.arange(len(e.frame)))
        decoded: dict[str, Any]
        try:
            decoded = _decode([alone], len(e.frame), options)
        except (ValueError, FileNotFoundError) as error:
            cameras = [key for key in e.meta.camera_keys if key in options.columns]
            files = [e.data_file, *(e.camera_file(key)[0] for key in cameras)]
            check_still_there(e.meta.fs, e.meta.root, [e.meta.path(file) for file in files])
            index = e.start + e.row_frames("index", options)
            decoded = {"index": index, "dataset_index": e.dataset_index, IS_SKIPPED: True}
            _log_skipped(e, positions[e.position], error, options.skip_log)
        for key in columns.keys() & decoded.keys():
            columns[key][e.position] = decoded[key]
    return columns


def _log_skipped(e: _Episode, positions: np.ndarray, error: Exception, log: Path | None) -> None:
    logger.warning("%s: episode %d is skipped: %s", e.meta.root, e.episode_index, error)
    if log is not None:
        line: dict[str, Any] = {"root": e.meta.root, "episode_index": e.episode_index, "rows": len(e.frame)}
        line |= {"positions": sorted(positions.tolist()), "error": str(error)}
        log = file_of_process(log)
        append_line(log, json.dumps(line))
        with contextlib.suppress(StorageError):  # the next push sends this line too
            push(log)


def _group_by_episode(context: ReadContext, runs: np.ndarray) -> list[_Episode]:
    """Return the rows by episode, ordered by location in the data files, so that files are read forward."""
    planned = context.plan.episodes
    rows: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    offset = 0
    for window in context.plan.slices_of(runs):
        run, index = window.rows()
        order = np.argsort(run, kind="stable")
        bounds = np.searchsorted(run[order], np.arange(len(window.episode) + 1))
        for number, (first, last) in zip(window.episode.tolist(), itertools.pairwise(bounds), strict=True):
            if first < last:
                chosen = order[first:last]
                episode = int(planned.dataset_index[number]), int(planned.episode_index[number])
                rows.setdefault(episode, []).append((chosen + offset, index[chosen]))
        offset += len(index)
    episodes = []
    for (dataset, number), pieces in rows.items():
        position, index = (np.concatenate(column) for column in zip(*pieces, strict=True))
        meta = context.metas[dataset]
        episodes.append(_Episode(meta, dataset, number, position, index - meta.episode_start[number]))
    return sorted(episodes, key=lambda e: (e.dataset_index, e.data_file, e.data_row))


def _read_tabular(episodes: Sequence[_Episode], out: _Output) -> None:
    """Fill every column that is stored in parquet or derived from it."""
    options = out.options
    for e in episodes:
        reach = [d for key in options.delta_indices for d in options.deltas(key, e.dataset_index)] + [0]
        e.first = max(0, int(e.frame.min()) + min(reach))
        e.last = min(e.length, int(e.frame.max()) + max(reach) + 1)
    for _, members in itertools.groupby(episodes, key=lambda e: (e.dataset_index, e.data_file)):
        _read_data_file(list(members), out)


def _read_data_file(members: Sequence[_Episode], out: _Output) -> None:
    options, meta, file = out.options, members[0].meta, members[0].data_file
    features = {key: feature for key, feature in meta.features.items() if key in options.columns}
    numeric = [key for key, feature in features.items() if feature.dtype in NUMERIC_DTYPES]
    label = f"{meta.root}: {file}"
    with naming_file(label):
        identity = file_identity(meta.fs, meta.path(file))
    data_file = DataFile(meta.fs, meta.path(file), label, meta.cache_name, identity)
    spans = [Span(f"episode {e.episode_index}", e.data_row + e.first, e.data_row + e.last) for e in members]

    stored = {c.key: c for key in (*FRAME_FEATURES, *numeric) for c in meta.features[key].columns}
    columns = [Column(c.key, row_dtype(c), c.shape) for c in stored.values()]
    arrays = dict(zip(stored, read_numbers(data_file, columns, spans), strict=True))
    begin = np.cumsum([0, *map(len, spans)])
    for e, at in zip(members, begin.tolist(), strict=False):
        e.numbers_offset = at - e.first
    for e in members:
        row = np.arange(e.numbers_offset + e.first, e.numbers_offset + e.last)
        _check_rows(e, arrays, row)
        e.timestamps = arrays["timestamp"][row].astype(np.float64)
    frame = np.concatenate([np.arange(e.first, e.last) for e in members])
    # `index` is the place in the dataset, whatever the file's own numbering.
    arrays["index"] = np.repeat([e.start for e in members], list(map(len, spans))) + frame
    arrays.setdefault("frame_index", frame)
    for key in numeric:
        values = features[key].values(arrays, len(frame))
        if (order := features[key].order) is not None:
            values = values[:, list(order)]
        for e in members:
            _fill_numbers(key, values, e, out)

    for key, feature in features.items():
        if key not in numeric and feature.dtype not in CAMERA_DTYPES:
            _fill_texts(data_file, key, feature, members, out)
    for e in members:
        if "task" in options.columns:
            task_index = arrays["task_index"][e.numbers_offset + e.frame]
            out.column("task", (), object)[e.position] = _task_names(e, task_index)
        if "dataset_index" in options.columns:
            out.column("dataset_index", (), np.int32)[e.position] = e.dataset_index
        for key in options.delta_indices:
            if key + IS_PAD in options.columns:
                pad = e.window_frames(key, options)[1]
                out.column(key + IS_PAD, pad.shape[1:], bool)[e.position] = pad


def _check_rows(e: _Episode, arrays: dict[str, np.ndarray], row: np.ndarray) -> None:
    """Raise ValueError unless the rows read are those of the episode: a wrong file index must not pass unnoticed.

    Without `frame_index`, the rows' `index` must be consecutive, if the file has it.
    """
    episode, frame = arrays["episode_index"][row], np.arange(e.first, e.last)
    stored = frame
    if "frame_index" in arrays:
        stored = arrays["frame_index"][row]
    elif "index" in arrays:
        index = arrays["index"][row]
        stored = index - index[0] + e.first
    wrong = (episode != e.episode_index) | (stored != frame)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{e.meta.root}: {e.data_file}: expected episode {e.episode_index} frame {frame[at]} at row "
            f"{e.data_row + frame[at]}, found episode {episode[at]} frame {stored[at]}: meta/episodes and data "
            "disagree (a faulty merge or split?); rebuild the dataset"
        )


def _task_names(e: _Episode, task_index: np.ndarray) -> np.ndarray:
    names = e.meta.tasks
    numbers_found, row_number = np.unique(task_index, return_inverse=True)
    for number in numbers_found.tolist():
        if number not in names:
            raise ValueError(
                f"{e.meta.root}: {e.data_file}: episode {e.episode_index}: task_index {number} has no entry in "
                f"meta/tasks (it has {len(names)} tasks); add the task or correct the rows"
            )
    return np.array([names[number] for number in numbers_found.tolist()], object)[row_number]


def row_dtype(feature: Feature) -> np.dtype:
    """Return the dtype of a numeric feature in a row, as in LeRobot's rows: float32, int64 or bool."""
    code = np.dtype(feature.dtype).kind
    return np.dtype(np.float32 if code == "f" else bool if code == "b" else np.int64)


def row_kind(feature: Feature) -> np.dtype | str:
    """Return `row_dtype` of a numeric feature, or the declared dtype of any other."""
    return row_dtype(feature) if feature.dtype in NUMERIC_DTYPES else feature.dtype


def _fill_numbers(key: str, values: np.ndarray, e: _Episode, out: _Output) -> None:
    frames = e.row_frames(key, out.options)
    padded = out.options.padded
    row = padded[key].shape if key in padded and values.ndim > 1 else values.shape[1:]
    column = out.column(key, frames.shape[1:] + row, values.dtype)
    if row != values.shape[1:]:
        column[e.position] = 0
        column = column[..., : values.shape[1]]
    column[e.position] = values[e.numbers_offset + frames]


def _fill_texts(file: DataFile, key: str, feature: Feature, members: Sequence[_Episode], out: _Output) -> None:
    position = np.concatenate([e.position for e in members])
    rows = np.concatenate([e.data_row + e.frame for e in members])
    seconds = np.concatenate([e.timestamps[e.frame - e.first] for e in members])
    for inside, column in read_values(file, feature.key, rows):
        label = f"{file.name}: column {feature.key}"
        if feature.texts:
            picked = [feature.texts.get(n, "") for n in numbers(column, np.int64, (1,), label).ravel().tolist()]
        elif feature.style:
            picked = [_text_at(*row, feature.style) for row in zip(column.to_pylist(), seconds[inside], strict=True)]
        elif feature.dtype == "language" and not pa.types.is_string(column.type):
            # As JSON: the Arrow types of their lists of structs differ from file to file.
            picked = [json.dumps(value) for value in column.to_pylist()]
        else:
            try:
                picked = column.cast(pa.string()).to_pylist()
            except pa.ArrowException as error:
                raise ValueError(f"{label}: holds {column.type}, expected text ({error})") from error
        out.column(key, (), object)[position[inside]] = picked


def _text_at(annotations: Sequence[dict[str, Any]] | None, at_s: float, style: str) -> str:
    """Return the newest text of a style at or before `at_s`, as LeRobot's `active_at`; empty if there is none."""
    candidates = [line for line in annotations or () if line["style"] == style and line["timestamp"] <= at_s]
    return (max(candidates, key=lambda line: line["timestamp"])["content"] or "") if candidates else ""


def _camera_files(key: str, episodes: Sequence[_Episode], out: _Output) -> list[CameraFile]:
    """Return the files with the frames of a camera, and make the frames of datasets without it black."""
    if (padded := out.options.padded.get(key)) is not None and padded.dtype in CAMERA_DTYPES:
        shape, dtype = frame_spec(padded, out.options.image_size)
        for e in episodes:
            if key not in e.meta.features:
                out.column(key, (*e.row_frames(key, out.options).shape[1:], *shape), dtype)[e.position] = 0
    members = [e for e in episodes if key in e.meta.camera_keys]
    members.sort(key=lambda e: (e.dataset_index, *e.camera_file(key)))
    files = []
    for (_, file), group in itertools.groupby(members, key=lambda e: (e.dataset_index, e.camera_file(key)[0])):
        in_file = list(group)
        files.append(CameraFile(in_file[0].meta, key, file, [_frame_request(key, e, out) for e in in_file]))
    return files


def _frame_request(key: str, e: _Episode, out: _Output) -> FrameRequest:
    feature = e.meta.features[key]
    # LeRobot compares video times with the timestamp column, not with frame_index / fps.
    positions = e.timestamps if feature.dtype == "video" else np.arange(e.first, e.last, dtype=np.float64)
    frames = e.row_frames(key, out.options)
    times_s = e.camera_file(key)[1] + positions[frames - e.first]
    shape, dtype = frame_spec(feature, out.options.image_size)
    column = out.column(key, (*frames.shape[1:], *shape), dtype)
    # Decode each frame once, for all its places.
    distinct, at_first, inverse = np.unique(times_s.ravel(), return_index=True, return_inverse=True)
    target: list[list[Any]] = [[] for _ in distinct]
    window = list(np.ndindex(*frames.shape[1:]))
    places = ((row, *inside) for row in e.position.tolist() for inside in window)
    for at, i in zip(places, inverse.tolist(), strict=True):
        target[i].append(at)
    return FrameRequest(distinct, frames.ravel()[at_first], target, column, e.episode_index)


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
