"""Rows of a dataset's data files: the row groups that hold them, and the numbers among their columns.

A row group is unpacked as a whole, be it the whole file of 100 MB, and a shuffled window wants a few rows of many. So
numbers that were unpacked once are records of the store on the node's own disk, one for each row.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike

from vla_finetuning.data.limits import MAX_DATA_BYTES
from vla_finetuning.data.node_cache import NodeCache, Records, is_in_memory, node_cache
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.environment import DEFAULT_NUMBERS_DIR, NUMBERS_DIR, NUMBERS_GB

# Rows that are written at once, in bytes.
_WRITTEN_BYTES = 4 * 2**20
# Row groups that are unpacked beside those that are wanted: where there is one for each episode, to find a few rows
# takes longer (a footer of 7 MB is 0.07 s) than to unpack them. More would keep the first batch waiting.
AHEAD_BYTES = 8 * 2**20


@dataclass(frozen=True)
class DataFile:
    """A parquet file of a dataset. `dataset` tells the dataset from others, `name` is what errors call the file."""

    fs: fsspec.AbstractFileSystem
    path: str
    name: str
    dataset: str


@dataclass(frozen=True)
class Span:
    """Rows [first, last) of a data file; `of` says whose they are, for errors."""

    of: str
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Column:
    """A column of numbers: its name in the file, and what it is in a row. `row_bytes`: the most it takes there."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True)
class Groups:
    """Row groups as one table: row `at(row)` of it is row `row` of the file.

    file_row, table_row: where each group begins, int64 (G,), ascending.
    """

    table: pa.Table
    file_row: np.ndarray
    table_row: np.ndarray

    def at(self, row: int) -> int:
        group = int(np.searchsorted(self.file_row, row, "right")) - 1
        return int(self.table_row[group]) + row - int(self.file_row[group])


def read_groups(
    file: DataFile, row_bytes: Mapping[str, int | None], spans: Sequence[Span], identity: str | None
) -> Groups:
    """The row groups that hold the spans.

    Args:
        row_bytes: the columns, with the most that a row of each may take; None: anything.
        identity: of the file's content, whose footer is then parsed once.
    Raises:
        ValueError: columns or rows that are not there, or more bytes than are read at once; as `open_parquet`.
    """
    with open_parquet(file.fs, file.path, name=file.name, identity=identity) as parquet:
        missing = [k for k in row_bytes if k not in parquet.schema_arrow.names]
        if missing:
            raise ValueError(f"{file.name}: columns {missing} are missing; meta/info.json promises them")
        sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.metadata.num_row_groups)]
        group_first = np.concatenate([[0], np.cumsum(sizes)])
        wanted = np.zeros(len(sizes), bool)
        for span in spans:
            if span.last > group_first[-1]:
                raise ValueError(
                    f"{file.name}: {span.of} should end at row {span.last}, the file has {group_first[-1]} rows: the "
                    "file is incomplete or meta/episodes is wrong"
                )
            first = np.searchsorted(group_first, span.first, "right") - 1
            wanted[first : np.searchsorted(group_first, span.last, "left")] = True
        groups = np.flatnonzero(wanted)
        table = read_columns(
            parquet,
            list(row_bytes),
            Budget("rows of the row groups that hold what is wanted", None, MAX_DATA_BYTES),
            name=file.name,
            groups=groups.tolist(),
            row_bytes={key: size for key, size in row_bytes.items() if size is not None},
        )
        skipped = np.concatenate([[0], np.cumsum(np.where(wanted, 0, sizes))])
        return Groups(table, group_first[groups], group_first[groups] - skipped[groups])


def read_values(
    file: DataFile, key: str, row_bytes: int | None, rows: np.ndarray, identity: str | None
) -> Iterator[tuple[np.ndarray, pa.ChunkedArray]]:
    """Values of one column in some rows of the file, a row group at a time: no more than one is in memory.

    Args:
        rows: int64 (N,), in any order. row_bytes, identity: as of `read_groups`.
    Returns:
        For each row group with wanted rows, their positions in `rows`, int64 (n,), and their values.
    Raises:
        ValueError: as `read_groups`.
    """
    for group in groups_with(file, rows, identity):
        inside = np.flatnonzero((rows >= group.first) & (rows < group.last))
        found = read_groups(file, {key: row_bytes}, [group], identity)
        yield inside, found.table.column(key).take(pa.array(rows[inside] - group.first))


def groups_with(file: DataFile, rows: np.ndarray, identity: str | None) -> list[Span]:
    """The row groups that hold some rows of the file. Raises ValueError: it has fewer rows."""
    with open_parquet(file.fs, file.path, name=file.name, identity=identity) as parquet:
        sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.metadata.num_row_groups)]
    first = np.concatenate([[0], np.cumsum(sizes)])
    groups = np.unique(np.searchsorted(first, rows, "right") - 1).tolist()
    if groups and groups[-1] >= len(sizes):
        raise ValueError(
            f"{file.name}: row {rows.max()} is wanted, the file has {first[-1]} rows: the file is incomplete or "
            "meta/episodes is wrong"
        )
    return [Span(f"row group {g}", int(first[g]), int(first[g + 1])) for g in groups]


def read_numbers(
    file: DataFile, columns: Sequence[Column], spans: Sequence[Span], identity: str | None
) -> list[np.ndarray]:
    """The spans' rows of some columns, one span after the other: arrays (N, *shape), (N,) for shape (1,).

    Args:
        identity: of the file's content, the key of the cache on this node's disk; None: no cache.
    Raises:
        ValueError: as `read_groups` and `numbers`, when the rows are unpacked for the first time.
    """
    bounds = np.cumsum([0, *map(len, spans)])
    rows = np.empty(bounds[-1], _row_type(columns))
    places = [rows[a:b] for a, b in itertools.pairwise(bounds)]
    stored = None if identity is None else _stored(file, columns, identity)
    missing = list(range(len(spans)))
    if stored is not None:
        missing = _not_stored(stored, spans, places, missing)
    if missing:
        # Other readers of this file wait: they would unpack the same group.
        with contextlib.nullcontext() if stored is None else stored.alone():
            if stored is not None:
                missing = _not_stored(stored, spans, places, missing)
            if missing:
                _unpack(file, columns, [spans[i] for i in missing], [places[i] for i in missing], identity, stored)
                if stored is not None and stored.cache.takes and (ahead := _next_groups(file, identity, stored)):
                    # Errors there are raised when those rows are read.
                    with contextlib.suppress(ValueError):
                        _unpack(file, columns, ahead, [], identity, stored)
    return [np.ascontiguousarray(rows[str(i)]) for i in range(len(columns))]


def _unpack(
    file: DataFile,
    columns: Sequence[Column],
    spans: Sequence[Span],
    places: Sequence[np.ndarray],
    identity: str | None,
    stored: Records | None,
) -> None:
    """Fill `places` with the rows of the first spans, and store all the rows that were unpacked for any of them."""
    row_bytes: dict[str, int | None] = {}
    for column in columns:
        row_bytes[column.key] = max(column.row_bytes, row_bytes.get(column.key) or 0)
    groups = read_groups(file, row_bytes, spans, identity)
    arrays = [numbers(groups.table.column(c.key), c.dtype, c.shape, f"{file.name}: column {c.key}") for c in columns]

    def put(place: np.ndarray, first: int) -> None:
        for i, array in enumerate(arrays):
            place[str(i)] = array[first : first + len(place)]

    for span, place in zip(spans, places, strict=False):
        put(place, groups.at(span.first))
    if stored is None:
        return
    kind = _row_type(columns)
    ends = [*groups.table_row[1:].tolist(), len(groups.table)]
    for file_row, first, end in zip(groups.file_row.tolist(), groups.table_row.tolist(), ends, strict=True):
        at_once = max(1, _WRITTEN_BYTES // stored.record_bytes)
        for start in range(first, end, at_once):
            part = np.empty(min(at_once, end - start), kind)
            put(part, start)
            stored.put_range(file_row + start - first, part)


def _next_groups(file: DataFile, identity: str | None, stored: Records) -> list[Span]:
    """The file's first row groups that are not stored, together about `AHEAD_BYTES`."""
    found: list[Span] = []
    with open_parquet(file.fs, file.path, name=file.name, identity=identity) as parquet:
        sizes = [
            (group.num_rows, group.total_byte_size)
            for group in map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
        ]
    first = taken = 0
    for number, (rows, size) in enumerate(sizes):
        if taken >= AHEAD_BYTES:
            break
        if rows and not stored.has(first):
            found.append(Span(f"row group {number}", first, first + rows))
            taken += size
        first += rows
    return found


def _row_type(columns: Sequence[Column]) -> np.dtype:
    """The columns of a row, by number."""
    return np.dtype([(str(i), c.dtype, () if c.shape == (1,) else c.shape) for i, c in enumerate(columns)])


def _stored(file: DataFile, columns: Sequence[Column], identity: str) -> Records | None:
    """Columns of a file: row n is record n, nothing but numbers. None where there is no place for them."""
    kind = _row_type(columns)
    key = f"{[column.key for column in columns]}\0{kind.descr}"
    return Records.of(numbers_cache(), file.dataset, f"{file.path}\0{key}", identity, kind.itemsize)


def _not_stored(stored: Records, spans: Sequence[Span], places: Sequence[np.ndarray], wanted: list[int]) -> list[int]:
    """Fill the places of those spans whose rows are all stored, of the `wanted` ones; returns the others."""
    with stored.cache.doing_without():
        return [i for i in wanted if not stored.read_range(spans[i].first, places[i])]
    return wanted


def describe_numbers() -> str:
    """The plan's line about the cache of numbers."""
    if size := numbers_gb():
        return (
            f"Numbers      at most {size:g} GB on each node, unpacked once, in {NUMBERS_DIR}, and as much of encoded "
            "images of data files (VLA_NUMBERS_GB=0: none)"
        )
    why = f"{NUMBERS_DIR} is memory (tmpfs); VLA_NUMBERS_DIR names another folder" if NUMBERS_GB else "VLA_NUMBERS_GB=0"
    return f"Numbers      unpacked whenever rows of them are wanted, as images of data files are, on this node: {why}"


def numbers_gb() -> float:
    """10^9 bytes of numbers that this node caches, at most; 0 where the default folder is memory (tmpfs)."""
    return 0.0 if NUMBERS_DIR == DEFAULT_NUMBERS_DIR and is_in_memory(Path(NUMBERS_DIR)) else NUMBERS_GB


def numbers_cache() -> NodeCache:
    return node_cache(
        Path(NUMBERS_DIR),
        int(numbers_gb() * 1e9),
        "row groups are unpacked whenever rows of them are wanted, which is slow where they are large; free some, or "
        "set VLA_NUMBERS_DIR, on every node, to a folder on another disk",
    )


def numbers(column: pa.ChunkedArray, dtype: DTypeLike | None, shape: tuple[int, ...], where: str) -> np.ndarray:
    """Scalars, lists and nested lists of `dtype`, or of numbers that are exactly such, to (N,) or (N, *shape).

    Args:
        dtype: None for what is stored.
        shape: of a row; (1,) is a scalar.
        where: how errors begin.
    Raises:
        ValueError: something is missing, or of another shape or type.
    """
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
    count = len(array)
    lengths: list[int] = []  # of the lists in each dimension
    while True:
        if array.null_count:
            raise ValueError(f"{where}: {array.null_count} empty values; every row must have one")
        if not pa.types.is_list(array.type):
            break
        found = pc.unique(pc.list_value_length(array)).to_pylist()
        if len(found) > 1:
            raise ValueError(f"{where}: lists of {sorted(found)[:5]} values, expected shape {shape} in every row")
        lengths += found
        array = array.flatten()
    # A scalar may be stored as a list of one.
    if count and tuple(lengths) != shape and not (shape == (1,) and not lengths):
        raise ValueError(f"{where}: values of shape {tuple(lengths)}, expected {shape} in every row")
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"{where}: holds {kind}, expected numbers")
    if dtype is not None:
        array = _as_declared(array, np.dtype(dtype), where)
    values = array.to_numpy(zero_copy_only=False)
    return values.astype(dtype or values.dtype, copy=False).reshape(count, *(() if shape == (1,) else shape))


def _as_declared(array: pa.Array, dtype: np.dtype, where: str) -> pa.Array:
    """Numbers that `dtype` can hold as they are; floats become float32 as in LeRobot, whatever that rounds."""
    if dtype == np.float32:
        return array
    try:
        whole = array.cast(pa.int64())
        if dtype == np.bool_ and not pc.all(pc.is_in(whole, pa.array([0, 1]))).as_py():
            raise pa.ArrowInvalid("values that are neither 0 nor 1")
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{where}: holds {array.type} that cannot be {dtype}, as meta/info.json says ({error}); correct the one or "
            "the other"
        ) from error
    return whole
