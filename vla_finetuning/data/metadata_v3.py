"""The tables of LeRobot's format v3.0: `meta/tasks.parquet`, and the episodes in `meta/episodes/`.

Layout: LeRobot 0.6.1, `lerobot/datasets/dataset_metadata.py`. Every value is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.data.limits import MAX_EPISODES, MAX_EPISODES_BYTES, MAX_INSTRUCTION, MAX_TASKS, MAX_TASKS_BYTES
from vla_finetuning.data.paths import MAX_INDEX, check_inside, shorten
from vla_finetuning.data.safe_parquet import Budget, freeing_footers, open_parquet, read_columns

TASKS_PATH = "meta/tasks.parquet"
EPISODES_DIR = "meta/episodes"


def read_tasks(fs: fsspec.AbstractFileSystem, base: str) -> dict[int, str]:
    """Instructions by their numbers. Raises ValueError, FileNotFoundError."""
    check_inside(fs, base, [TASKS_PATH])
    with open_parquet(fs, f"{base}/{TASKS_PATH}", name=TASKS_PATH) as file:
        names = file.schema_arrow.names
        # pandas writes the texts as an index with or without a name, other writers as a plain column.
        text_column = next((name for name in ("task", "__index_level_0__") if name in names), None)
        if text_column is None or "task_index" not in names:
            raise ValueError(
                f"{TASKS_PATH}: expected the columns task_index and task (or an index of texts), found {names!s:.200}"
            )
        budget = Budget("tasks", MAX_TASKS, MAX_TASKS_BYTES)
        table = read_columns(file, ["task_index", text_column], budget, name=TASKS_PATH)
    indices = _int_column(table, "task_index", TASKS_PATH, low=0).tolist()
    texts = table[text_column]
    if not pa.types.is_string(texts.type) or texts.null_count:
        raise ValueError(f"{TASKS_PATH}: {text_column} has type {texts.type}, expected texts without nulls")
    tasks = dict(zip(indices, texts.to_pylist(), strict=True))
    if len(tasks) != len(indices):
        raise ValueError(f"{TASKS_PATH}: a task_index appears twice in {shorten(sorted(indices))}")
    for index, text in tasks.items():
        _check_instruction(TASKS_PATH, index, text)
    return tasks


def _check_instruction(where: str, index: int, text: str) -> None:
    """Raises ValueError for a text that no one would tell a robot: every row of it is tokenised."""
    if "\0" in text:
        raise ValueError(f"{where}: task {index} holds a NUL character: {text!r:.100}")
    if len(text) > MAX_INSTRUCTION:
        raise ValueError(
            f"{where}: task {index} has {len(text):,} characters, more than the {MAX_INSTRUCTION:,} of an instruction: "
            f"{text!r:.100}"
        )


def episode_files(fs: fsspec.AbstractFileSystem, base: str) -> list[str]:
    """The parquet files of `meta/episodes`, relative to `base`, in order."""
    pattern = re.compile(re.escape(f"{base}/{EPISODES_DIR}/") + r"[^/]+/[^/]+\.parquet")
    # Of local folders no more than the two levels there are: links may lead round and round. Stores have no folders.
    depth = {"maxdepth": 2} if isinstance(fs, LocalFileSystem) else {}
    found = sorted(path for path in fs.find(f"{base}/{EPISODES_DIR}", **depth) if pattern.fullmatch(path))
    paths = [path[len(base) + 1 :] for path in found]
    if not paths:
        raise FileNotFoundError(f"{EPISODES_DIR}/chunk-*/file-*.parquet is missing; copy the dataset again")
    check_inside(fs, base, paths)
    return paths


def read_episodes(
    fs: fsspec.AbstractFileSystem, base: str, video_keys: list[str], known: set[str]
) -> tuple[dict[str, np.ndarray], list[tuple[str, ...]]]:
    """Read what is needed of `meta/episodes`, and check it.

    Returns the columns, numbers of files and their chunks as int32, and the instructions of each episode. There may be
    millions: columns take shape file by file, and equal instructions are one object.
    """
    file_columns = []
    for prefix in ["data", *(f"videos/{key}" for key in video_keys)]:
        file_columns += [f"{prefix}/chunk_index", f"{prefix}/file_index"]
    start_columns = [f"videos/{key}/from_timestamp" for key in video_keys]
    wanted = ["episode_index", "length", *file_columns, *start_columns, "tasks"]

    paths = episode_files(fs, base)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted[:-1]}
    tasks: list[tuple[str, ...]] = []
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    budget, texts_budget = (Budget("episodes", MAX_EPISODES, MAX_EPISODES_BYTES) for _ in range(2))
    with freeing_footers() as free:
        for path in paths:
            part, texts = _read_file(fs, base, path, wanted, budget, texts_budget)
            free()
            for name in ("episode_index", "length"):
                parts[name].append(_int_column(part, name, path, low=0, high=MAX_INDEX))
            for name in file_columns:
                parts[name].append(_int_column(part, name, path, low=0, high=MAX_INDEX).astype(np.int32))
            for name in start_columns:
                parts[name].append(_start_column(part, name, path))
            index, length = parts["episode_index"][-1], parts["length"][-1]
            if (length < 1).any():
                raise ValueError(f"{path}: episode {index[length < 1][0]} has length 0, expected one frame or more")
            tasks += (same.setdefault(t, t) for t in _episode_tasks(texts, index, known, path))

    # A column at a time, so that there are never two of all.
    return {name: np.concatenate(parts.pop(name)) for name in wanted[:-1]}, tasks


def _read_file(
    fs: fsspec.AbstractFileSystem, base: str, path: str, wanted: list[str], budget: Budget, texts_budget: Budget
) -> tuple[pa.Table, pa.ChunkedArray]:
    """The columns of a file of `meta/episodes` that are `wanted`: numbers, and the last one, which has texts."""
    with open_parquet(fs, f"{base}/{path}", name=path) as file:
        missing = sorted(set(wanted) - set(file.schema_arrow.names))
        if missing:
            raise ValueError(f"{path}: lacks the columns {shorten(missing)}")
        part = read_columns(file, wanted[:-1], budget, name=path)
        return part, read_columns(file, wanted[-1:], texts_budget, name=path)[wanted[-1]]


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


def _start_column(table: pa.Table, name: str, path: str) -> np.ndarray:
    column = table[name]
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)) or column.null_count:
        raise ValueError(f"{path}: {name} has type {column.type} or empty values, expected seconds")
    values = column.cast(pa.float64(), safe=False).to_numpy()
    outside = values[~((values >= 0) & (values < MAX_INDEX))]
    if outside.size:
        raise ValueError(f"{path}: {name} is {outside[0]}, expected seconds from the start of a video")
    return values


def _episode_tasks(column: pa.ChunkedArray, index: np.ndarray, known: set[str], path: str) -> Iterator[tuple[str, ...]]:
    """The instructions of the episodes in a file, whose numbers are `index`."""
    if not pa.types.is_list(column.type):
        raise ValueError(f"{path}: tasks has type {column.type}, expected lists of texts")
    lists = column.cast(pa.large_list(pa.large_string())).combine_chunks()
    if lists.null_count:
        raise ValueError(f"{path}: tasks of episode {index[lists.is_null().index(True).as_py()]} is empty (null)")
    texts = pc.dictionary_encode(lists.flatten())
    values = texts.dictionary.to_pylist()
    ends = np.cumsum(pc.list_value_length(lists).to_numpy())
    unknown = {position for position, text in enumerate(values) if text not in known}
    if unknown or texts.null_count:
        positions = texts.indices.to_numpy(zero_copy_only=False)
        bad = next(i for i, position in enumerate(positions) if position in unknown or position != position)
        episode, text = index[np.searchsorted(ends, bad, side="right")], texts[bad].as_py()
        raise ValueError(
            f"{path}: episode {episode} has the task {text!r:.200}, which {TASKS_PATH} lacks; "
            "the two files do not belong together"
        )
    flat = [values[position] for position in texts.indices.to_pylist()]
    begin = 0
    for end in ends.tolist():
        yield tuple(flat[begin:end])
        begin = end
