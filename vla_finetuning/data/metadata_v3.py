"""Read the tables of LeRobot's format v3.0: `meta/tasks.parquet`, `meta/subtasks.parquet`, `meta/episodes/`.

Layout: LeRobot 0.6.1, `lerobot/datasets/dataset_metadata.py`. Every value is checked.
"""

from __future__ import annotations

import re

import fsspec
import numpy as np
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.columns import SUBTASK
from vla_finetuning.data.dataset import shorten
from vla_finetuning.data.episode_table import EpisodeTable, task_texts, texts_by_index
from vla_finetuning.data.limits import MAX_EPISODES_BYTES, MAX_TASKS_BYTES
from vla_finetuning.data.paths import MAX_INDEX, check_inside
from vla_finetuning.data.safe_parquet import Budget, freeing_footers, open_parquet, read_columns

TASKS_PATH = "meta/tasks.parquet"
SUBTASKS_PATH = "meta/subtasks.parquet"  # LeRobot until 0.5
EPISODES_PATH = "meta/episodes"


def read_tasks(fs: fsspec.AbstractFileSystem, base: str) -> dict[int, str]:
    """Read the instructions, by `task_index`. Raises ValueError, FileNotFoundError."""
    return _read_texts(fs, base, TASKS_PATH, "task")


def read_subtasks(fs: fsspec.AbstractFileSystem, base: str) -> dict[int, str]:
    """Read the subtasks, by `subtask_index`. Raises ValueError, FileNotFoundError."""
    texts = _read_texts(fs, base, SUBTASKS_PATH, SUBTASK)
    if not texts:
        raise ValueError(f"{SUBTASKS_PATH} has no text")
    return texts


def _read_texts(fs: fsspec.AbstractFileSystem, base: str, path: str, kind: str) -> dict[int, str]:
    """Read a table with the columns `kind` (texts) and `kind`_index, by index."""
    check_inside(fs, base, [path])
    number = f"{kind}_index"
    with open_parquet(fs, f"{base}/{path}", name=path) as file:
        names = file.schema_arrow.names
        # pandas writes the texts as an index with or without a name, other writers as a plain column.
        text_column = next((name for name in (kind, "__index_level_0__") if name in names), None)
        if text_column is None or number not in names:
            raise ValueError(
                f"{path}: expected the columns {number} and {kind} (or an index of texts), found {names!s:.200}"
            )
        table = read_columns(file, [number, text_column], Budget(f"{kind}s", MAX_TASKS_BYTES))
    indices = _int_column(table, number, path, low=0).tolist()
    texts = table[text_column]
    if not pa.types.is_string(texts.type) and not pa.types.is_large_string(texts.type):
        raise ValueError(f"{path}: {text_column} has type {texts.type}, expected texts")
    rows = zip(indices, texts.to_pylist(), strict=True)
    # Reading a row of a task without text raises.
    return texts_by_index((f"{path}: {number}", index, text) for index, text in rows if text is not None)


def episode_files(fs: fsspec.AbstractFileSystem, base: str) -> list[str]:
    """List the parquet files of `meta/episodes`, relative to `base`, sorted."""
    pattern = re.compile(re.escape(f"{base}/{EPISODES_PATH}/") + r"[^/]+/[^/]+\.parquet")
    # Links in local folders may be cyclic, so search two levels only; stores have no folders.
    depth = {"maxdepth": 2} if isinstance(fs, LocalFileSystem) else {}
    full_paths = sorted(path for path in fs.find(f"{base}/{EPISODES_PATH}", **depth) if pattern.fullmatch(path))
    paths = [path[len(base) + 1 :] for path in full_paths]
    if not paths:
        raise FileNotFoundError(
            f"{EPISODES_PATH}/chunk-*/file-*.parquet is missing: the copy, or the recording before it was finalized "
            "(LeRobotDataset.finalize), was cut off; copy the dataset again, or record its episodes again"
        )
    check_inside(fs, base, paths)
    return paths


def read_episodes(fs: fsspec.AbstractFileSystem, base: str, video_keys: list[str]) -> EpisodeTable:
    """Read and check the needed columns of `meta/episodes`.

    Millions of episodes must fit: columns are converted file by file, and equal instructions share one object.

    Raises ValueError for an invalid `episode_index` or `length`.
    """
    dtypes: dict[str, type] = {}
    for prefix in ["data", *(f"videos/{key}" for key in video_keys)]:
        dtypes |= {f"{prefix}/chunk_index": np.int32, f"{prefix}/file_index": np.int32}
    dtypes |= {f"videos/{key}/from_timestamp": np.float64 for key in video_keys}
    names = ["episode_index", "length", *dtypes]

    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    tasks: list[tuple[str, ...]] = []
    broken: dict[str, dict[int, str]] = {}
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    budget = Budget("episodes", MAX_EPISODES_BYTES)
    with freeing_footers() as free:
        for path in episode_files(fs, base):
            part = _read_file(fs, base, path, names, budget)
            free()
            for name in ("episode_index", "length"):
                parts[name].append(_int_column(part, name, path, low=0, high=MAX_INDEX))
            index, length = parts["episode_index"][-1], parts["length"][-1]
            for name, dtype in dtypes.items():
                parts[name].append(_place_column(part, name, path, index, broken).astype(dtype, copy=False))
            for episode in index[length < 1].tolist():
                broken.setdefault("data", {})[episode] = f"has length 0 in {path}"
            chunks = part["tasks"].chunks if "tasks" in part.column_names else [pa.nulls(len(part))]
            tasks += (task_texts(value, same) for chunk in chunks for value in chunk.to_pylist())

    # Pop each column, so that two copies of all columns never exist at the same time.
    return EpisodeTable({name: np.concatenate(parts.pop(name)) for name in names}, tasks, broken)


def read_column(fs: fsspec.AbstractFileSystem, base: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the episode numbers, int64 (N,), and a column of numbers, float64 (N,), of `meta/episodes`."""
    parts, budget = [], Budget("episodes", MAX_EPISODES_BYTES)
    for path in episode_files(fs, base):
        with open_parquet(fs, f"{base}/{path}", name=path) as file:
            kinds = {field.name: field.type for field in file.schema_arrow}
            if name not in kinds or not is_number(kinds[name]):
                state = f"is of type {kinds[name]}" if name in kinds else "is not there"
                usable = sorted(key for key, kind in kinds.items() if is_number(kind) and "/" not in key)
                raise ValueError(f"{path}: {name} {state}, expected a column of numbers; those are {usable!s:.300}")
            parts.append(read_columns(file, list({"episode_index", name}), budget))
    index, values = (np.concatenate([as_float64(part[key]) for part in parts]) for key in ("episode_index", name))
    return index.astype(np.int64), values


def is_number(column_type: pa.DataType) -> bool:
    return pa.types.is_integer(column_type) or pa.types.is_floating(column_type) or pa.types.is_boolean(column_type)


def as_float64(column: pa.ChunkedArray) -> np.ndarray:
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return column.cast(pa.float64(), safe=False).to_numpy()


def _read_file(fs: fsspec.AbstractFileSystem, base: str, path: str, names: list[str], budget: Budget) -> pa.Table:
    """Read the columns `names` of a file of `meta/episodes`, and `tasks` if present."""
    with open_parquet(fs, f"{base}/{path}", name=path) as file:
        stored = file.schema_arrow.names
        if missing := sorted(set(names) - set(stored)):
            raise ValueError(f"{path}: lacks the columns {shorten(missing)}")
        return read_columns(file, [*names, *(["tasks"] if "tasks" in stored else [])], budget)


def _int_column(table: pa.Table, name: str, path: str, *, low: int, high: int = 2**62) -> np.ndarray:
    column = table[name]
    # Merged tables may hold whole numbers as floats.
    if not pa.types.is_integer(column.type) and not pa.types.is_floating(column.type):
        raise ValueError(f"{path}: {name} has type {column.type}, expected whole numbers")
    if column.null_count:
        raise ValueError(f"{path}: {name} has {column.null_count} empty values, expected whole numbers")
    try:
        values = column.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {name} must hold whole numbers: {error}") from error
    outside = values[(values < low) | (values >= high)]
    if outside.size:
        raise ValueError(f"{path}: {name} is {outside[0]}, expected a number from {low} to {high - 1}")
    return values


def _place_column(
    table: pa.Table, name: str, path: str, index: np.ndarray, broken: dict[str, dict[int, str]]
) -> np.ndarray:
    """Read the file numbers, or the starts in a video in seconds, of the episodes `index`: float64 (E,).

    Note invalid values in `broken`, and replace each by the value of the episode before.
    """
    column = table[name]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_null(column.type)):
        raise ValueError(f"{path}: {name} has type {column.type}, expected numbers")
    values = column.cast(pa.float64(), safe=False).to_numpy()
    place, _, number = name.removeprefix("videos/").rpartition("/")
    is_integer = number != "from_timestamp"
    with np.errstate(invalid="ignore"):
        good = (values >= 0) & (values < MAX_INDEX) & ((values == np.floor(values)) | (not is_integer))
    for at in np.flatnonzero(~good).tolist():
        value = "empty" if column[at].as_py() is None else column[at].as_py()
        broken.setdefault(place, {})[int(index[at])] = f"has {value} as {name} in {path}"
    before = np.maximum.accumulate(np.where(good, np.arange(len(values)), 0))
    return np.where(good[before], values[before], 0.0)
