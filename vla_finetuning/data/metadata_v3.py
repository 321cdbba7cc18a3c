"""The tables of LeRobot's format v3.0: `meta/tasks.parquet`, `meta/subtasks.parquet`, the episodes in `meta/episodes/`.

Layout: LeRobot 0.6.1, `lerobot/datasets/dataset_metadata.py`. Every value is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.columns import SUBTASK
from vla_finetuning.data.dataset import shorten
from vla_finetuning.data.episode_table import EpisodeTable
from vla_finetuning.data.limits import MAX_EPISODES, MAX_EPISODES_BYTES, MAX_INSTRUCTION, MAX_TASKS, MAX_TASKS_BYTES
from vla_finetuning.data.paths import MAX_INDEX, check_inside
from vla_finetuning.data.safe_parquet import Budget, freeing_footers, open_parquet, read_columns

TASKS_PATH = "meta/tasks.parquet"
SUBTASKS_PATH = "meta/subtasks.parquet"  # LeRobot until 0.5
EPISODES_PATH = "meta/episodes"


def read_tasks(fs: fsspec.AbstractFileSystem, base: str) -> dict[int, str]:
    """Instructions by their numbers. Raises ValueError, FileNotFoundError."""
    return _read_texts(fs, base, TASKS_PATH, "task")


def read_subtasks(fs: fsspec.AbstractFileSystem, base: str) -> dict[int, str]:
    """Read the texts of `subtask_index` by their numbers. Raises ValueError, FileNotFoundError."""
    texts = _read_texts(fs, base, SUBTASKS_PATH, SUBTASK)
    if not texts:
        raise ValueError(f"{SUBTASKS_PATH} has no text")
    return texts


def _read_texts(fs: fsspec.AbstractFileSystem, base: str, path: str, kind: str) -> dict[int, str]:
    """Read a table of texts and their numbers, `kind` and `kind`_index."""
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
        budget = Budget(f"{kind}s", MAX_TASKS, MAX_TASKS_BYTES)
        table = read_columns(file, [number, text_column], budget, name=path)
    indices = _int_column(table, number, path, low=0).tolist()
    texts = table[text_column]
    if not pa.types.is_string(texts.type) and not pa.types.is_large_string(texts.type):
        raise ValueError(f"{path}: {text_column} has type {texts.type}, expected texts")
    by_number: dict[int, str] = {}
    for index, text in zip(indices, texts.to_pylist(), strict=True):
        if text is None:
            continue  # a row of this task is refused where it is read
        if by_number.setdefault(index, text) != text:
            raise ValueError(f"{path}: {number} {index} is both {by_number[index]!r:.100} and {text!r:.100}")
        _check_instruction(path, index, text)
    return by_number


def _check_instruction(path: str, index: int, text: str) -> None:
    """Raises ValueError for a text that no one would tell a robot: every row of it is tokenised."""
    if "\0" in text:
        raise ValueError(f"{path}: task {index} holds a NUL character: {text!r:.100}")
    if len(text) > MAX_INSTRUCTION:
        raise ValueError(
            f"{path}: task {index} has {len(text):,} characters, more than the {MAX_INSTRUCTION:,} of an instruction: "
            f"{text!r:.100}"
        )


def episode_files(fs: fsspec.AbstractFileSystem, base: str) -> list[str]:
    """The parquet files of `meta/episodes`, relative to `base`, in order."""
    pattern = re.compile(re.escape(f"{base}/{EPISODES_PATH}/") + r"[^/]+/[^/]+\.parquet")
    # Of local folders no more than the two levels there are: links may lead round and round. Stores have no folders.
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
    """Read what is needed of `meta/episodes`, and check it.

    There may be millions: columns take shape file by file, and equal instructions are one object.

    Raises:
        ValueError: names the file and the column, where no row could be placed: of the numbers of episodes and their
            lengths. FileNotFoundError: there is no such file.
    """
    file_columns = []
    for prefix in ["data", *(f"videos/{key}" for key in video_keys)]:
        file_columns += [f"{prefix}/chunk_index", f"{prefix}/file_index"]
    start_columns = [f"videos/{key}/from_timestamp" for key in video_keys]
    names = ["episode_index", "length", *file_columns, *start_columns]

    paths = episode_files(fs, base)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    tasks: list[tuple[str, ...]] = []
    broken: dict[str, dict[int, str]] = {}
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    budget, texts_budget = (Budget("episodes", MAX_EPISODES, MAX_EPISODES_BYTES) for _ in range(2))
    with freeing_footers() as free:
        for path in paths:
            part, texts = _read_file(fs, base, path, names, budget, texts_budget)
            free()
            for name in ("episode_index", "length"):
                parts[name].append(_int_column(part, name, path, low=0, high=MAX_INDEX))
            index, length = parts["episode_index"][-1], parts["length"][-1]
            for name in file_columns:
                parts[name].append(_place_column(part, name, path, index, broken).astype(np.int32))
            for name in start_columns:
                parts[name].append(_place_column(part, name, path, index, broken))
            for episode in index[length < 1].tolist():
                broken.setdefault("data", {})[episode] = f"has length 0 in {path}"
            tasks += (same.setdefault(t, t) for t in _episode_tasks(texts, len(index)))

    # A column at a time, so that there are never two of all.
    return EpisodeTable({name: np.concatenate(parts.pop(name)) for name in names}, tasks, broken)


def _read_file(
    fs: fsspec.AbstractFileSystem, base: str, path: str, names: list[str], budget: Budget, texts_budget: Budget
) -> tuple[pa.Table, pa.ChunkedArray | None]:
    """Return columns of numbers of a file of `meta/episodes`, and that of its tasks, if it has one."""
    with open_parquet(fs, f"{base}/{path}", name=path) as file:
        missing = sorted(set(names) - set(file.schema_arrow.names))
        if missing:
            raise ValueError(f"{path}: lacks the columns {shorten(missing)}")
        part = read_columns(file, names, budget, name=path)
        if "tasks" not in file.schema_arrow.names:
            return part, None
        return part, read_columns(file, ["tasks"], texts_budget, name=path)["tasks"]


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
    """Return where the episodes `index` are, by a number of a file or seconds in a video: float64.

    Episodes without one are noted in `broken`, and have that of the episode before, among whose rows theirs may be.
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


def _episode_tasks(column: pa.ChunkedArray | None, count: int) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each episode of a file: of a list of texts, or of one; none of anything else."""
    column_type: Any = pa.null() if column is None else column.type
    if column is not None and (pa.types.is_string(column_type) or pa.types.is_large_string(column_type)):
        for text in column.to_pylist():
            yield () if text is None else (text,)
        return
    if column is None or not pa.types.is_list(column_type) or not pa.types.is_string(column_type.value_type):
        yield from [()] * count
        return
    lists = column.cast(pa.large_list(pa.large_string())).combine_chunks()
    texts = pc.dictionary_encode(lists.flatten())
    values = texts.dictionary.to_pylist()
    flat = [None if position is None else values[position] for position in texts.indices.to_pylist()]
    begin = 0
    for length in pc.fill_null(pc.list_value_length(lists), 0).to_pylist():
        yield tuple(text for text in flat[begin : begin + length] if text is not None)
        begin += length
