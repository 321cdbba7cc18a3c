"""Columns of a dataset's data files: rows of numbers, texts and encoded images.

A row group is unpacked as a whole, be it the whole file of 100 MB, and a shuffled window wants a few rows of many. So
what was unpacked once is copied to the node's own disk, uncompressed and as Arrow has it in memory, and mapped: the
numbers of a file together, the images of a row group.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike

from vla_finetuning.data.disk_cache import DiskCache, images_cache, numbers_cache
from vla_finetuning.data.limits import MAX_DATA_BYTES
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.data.storage import RemoteFileSystem

# Copies that a process has mapped, at most: those used last. Linux allows 65,530 mappings.
_MAPPED = 2**14


@dataclass(frozen=True)
class DataFile:
    """A parquet file of a dataset. `dataset` tells the dataset from others, `name` is what errors call the file."""

    fs: fsspec.AbstractFileSystem
    path: str
    name: str
    dataset: str


@dataclass(frozen=True)
class Span:
    """Rows [first, last) of a data file; `name` says whose they are, for errors."""

    name: str
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Column:
    """A column of numbers: its name in the file, and what it is in a row."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]


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


def read_groups(file: DataFile, columns: Collection[str], spans: Sequence[Span] | None, identity: str | None) -> Groups:
    """Read columns of the row groups that hold the spans; of all of them for None.

    Args:
        identity: of the file's content, whose footer is then parsed once.
    Raises:
        ValueError: columns or rows that are not there, or more bytes than are read at once; as `open_parquet`.
    """
    with open_parquet(file.fs, file.path, name=file.name, identity=identity) as parquet:
        missing = [column for column in columns if column not in parquet.schema_arrow.names]
        if missing:
            raise ValueError(f"{file.name}: columns {missing} are missing; meta/info.json promises them")
        sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.metadata.num_row_groups)]
        group_first = np.concatenate([[0], np.cumsum(sizes)])
        selected = np.full(len(sizes), spans is None)
        for span in spans or ():
            if span.last > group_first[-1]:
                raise ValueError(
                    f"{file.name}: {span.name} should end at row {span.last}, the file has {group_first[-1]} rows: the "
                    "file is incomplete or meta/episodes is wrong"
                )
            first = np.searchsorted(group_first, span.first, "right") - 1
            selected[first : np.searchsorted(group_first, span.last, "left")] = True
        groups = np.flatnonzero(selected)
        budget = Budget("rows of the row groups that hold what is wanted", MAX_DATA_BYTES)
        table = read_columns(parquet, columns, budget, name=file.name, groups=groups.tolist())
        skipped = np.concatenate([[0], np.cumsum(np.where(selected, 0, sizes))])
        return Groups(table, group_first[groups], group_first[groups] - skipped[groups])


def read_values(
    file: DataFile, key: str, rows: np.ndarray, identity: str | None
) -> Iterator[tuple[np.ndarray, pa.ChunkedArray]]:
    """Read values of one column in some rows of the file, a row group at a time: no more than one is in memory.

    Args:
        rows: int64 (N,), in any order. identity: as of `read_groups`.
    Returns:
        For each row group with wanted rows, their positions in `rows`, int64 (n,), and their values.
    Raises:
        ValueError: as `read_groups`.
    """
    for group in groups_with(file, rows, identity):
        inside = np.flatnonzero((rows >= group.first) & (rows < group.last))
        contents = read_groups(file, [key], [group], identity)
        yield inside, contents.table.column(key).take(pa.array(rows[inside] - group.first))


def groups_with(file: DataFile, rows: np.ndarray, identity: str | None) -> list[Span]:
    """The row groups that hold some rows of the file. Raises ValueError: it has fewer rows."""
    first = _group_starts.get(identity or "")
    if first is None:
        with open_parquet(file.fs, file.path, name=file.name, identity=identity) as parquet:
            groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
            first = np.cumsum([0, *(group.num_rows for group in groups)])
        if identity is not None:
            _remember(_group_starts, identity, first)
    group_numbers = np.unique(np.searchsorted(first, rows, "right") - 1).tolist()
    if group_numbers and group_numbers[-1] >= len(first) - 1:
        raise ValueError(
            f"{file.name}: row {rows.max()} is wanted, the file has {first[-1]} rows: the file is incomplete or "
            "meta/episodes is wrong"
        )
    return [Span(f"row group {g}", int(first[g]), int(first[g + 1])) for g in group_numbers]


# ---- copies on the node's disk ------------------------------------------------------------------------------------

# Of this process: where row groups begin, by the identity of a file; the tables that are mapped, by their place.
_group_starts: dict[str, np.ndarray] = {}
_mapped: dict[Path, pa.RecordBatch | None] = {}


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    cache[key] = value
    while len(cache) > _MAPPED:
        cache.pop(next(iter(cache)), None)


def _copied(
    cache: DiskCache, file: DataFile, key: str, identity: str, name: str, unpack: Callable[[], pa.RecordBatch] | None
) -> pa.RecordBatch | None:
    """Return the copy of what `unpack` returns, which is called if there is none yet; None if there is no copy.

    Args:
        key: of what is copied. identity: of its content. name: of the copy.
    Raises:
        Errors of `unpack`.
    """
    folder = cache.content(file.dataset, f"{file.path}\0{key}", identity)
    if folder is None:
        return None
    path = folder / name
    if path not in _mapped:
        copy = cache.map(path)
        if copy is None:
            if unpack is None or not cache.is_writable:
                return None
            # Other readers of this file wait: they would unpack the same.
            with cache.locked(path):
                copy = cache.map(path)
                if copy is None:
                    try:
                        batch, sink = unpack(), pa.BufferOutputStream()
                    except ValueError:
                        _remember(_mapped, path, None)
                        raise
                    with pa.ipc.new_file(sink, batch.schema) as writer:
                        writer.write_batch(batch)
                    cache.write(path, sink.getvalue())
                    return batch
        _remember(_mapped, path, pa.ipc.open_file(copy).get_batch(0))
    return _mapped[path]


# ---- numbers ------------------------------------------------------------------------------------------------------


def read_numbers(
    file: DataFile, columns: Sequence[Column], spans: Sequence[Span], identity: str | None
) -> list[np.ndarray]:
    """The spans' rows of some columns, one span after the other: arrays (N, *shape), (N,) for shape (1,).

    Args:
        identity: of the file's content, the key of the cache on this node's disk; None: no cache.
    Raises:
        ValueError: as `read_groups` and `numbers`, when the rows are unpacked for the first time.
    """
    keys = list(dict.fromkeys(column.key for column in columns))

    def unpacked(groups: Groups) -> list[np.ndarray]:
        table = groups.table
        return [numbers(table.column(c.key), c.dtype, c.shape, f"{file.name}: column {c.key}") for c in columns]

    def whole() -> pa.RecordBatch:
        return _to_arrow(unpacked(read_groups(file, keys, None, identity)))

    kinds = [(c.key, c.dtype.str, c.shape) for c in columns]
    # An error may be of other rows, which nobody wants.
    with contextlib.nullcontext() if identity is None else contextlib.suppress(ValueError):
        copy = None if identity is None else _copied(numbers_cache(), file, repr(kinds), identity, "numbers", whole)
        if copy is not None and all(span.last <= len(copy) for span in spans):
            arrays = [_from_arrow(copy.column(i), c) for i, c in enumerate(columns)]
            return [np.concatenate([array[span.first : span.last] for span in spans]) for array in arrays]
    groups = read_groups(file, keys, spans, identity)
    places = [(groups.at(span.first), len(span)) for span in spans]
    return [np.concatenate([array[at : at + rows] for at, rows in places]) for array in unpacked(groups)]


def _to_arrow(arrays: Sequence[np.ndarray]) -> pa.RecordBatch:
    """Return the bytes of rows, a column for each array."""
    columns = []
    for array in arrays:
        rows = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
        columns.append(pa.Array.from_buffers(pa.binary(rows.shape[1]), len(rows), [None, pa.py_buffer(rows)]))
    return pa.record_batch(columns, names=[str(i) for i in range(len(columns))])


def _from_arrow(rows: pa.Array, column: Column) -> np.ndarray:
    shape = () if column.shape == (1,) else column.shape
    return np.frombuffer(rows.buffers()[1], column.dtype, len(rows) * math.prod(shape)).reshape(len(rows), *shape)


def numbers(column: pa.ChunkedArray, dtype: DTypeLike | None, shape: tuple[int, ...], label: str) -> np.ndarray:
    """Scalars, lists and nested lists of `dtype`, or of numbers that are exactly such, to (N,) or (N, *shape).

    Args:
        dtype: None for what is stored.
        shape: of a row; (1,) is a scalar.
        label: how errors begin.
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
            raise ValueError(f"{label}: {array.null_count} empty values; every row must have one")
        if not pa.types.is_list(array.type):
            break
        sizes = pc.unique(pc.list_value_length(array)).to_pylist()
        if len(sizes) > 1:
            raise ValueError(f"{label}: lists of {sorted(sizes)[:5]} values, expected shape {shape} in every row")
        lengths += sizes
        array = array.flatten()
    # A scalar may be stored as a list of one.
    if count and tuple(lengths) != shape and not (shape == (1,) and not lengths):
        raise ValueError(f"{label}: values of shape {tuple(lengths)}, expected {shape} in every row")
    value_type = array.type
    if not (pa.types.is_integer(value_type) or pa.types.is_floating(value_type) or pa.types.is_boolean(value_type)):
        raise ValueError(f"{label}: holds {value_type}, expected numbers")
    if dtype is not None:
        array = _as_declared(array, np.dtype(dtype), label)
    values = array.to_numpy(zero_copy_only=False)
    return values.astype(dtype or values.dtype, copy=False).reshape(count, *(() if shape == (1,) else shape))


def _as_declared(array: pa.Array, dtype: np.dtype, label: str) -> pa.Array:
    """Numbers that `dtype` can hold as they are; floats become float32 as in LeRobot, whatever that rounds."""
    if dtype == np.float32:
        return array
    try:
        integers = array.cast(pa.int64())
        if dtype == np.bool_ and not pc.all(pc.is_in(integers, pa.array([0, 1]))).as_py():
            raise pa.ArrowInvalid("values that are neither 0 nor 1")
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{label}: holds {array.type} that cannot be {dtype}, as meta/info.json says ({error}); correct the one or "
            "the other"
        ) from error
    return integers


# ---- encoded images -----------------------------------------------------------------------------------------------


def read_images(
    file: DataFile, key: str, rows: np.ndarray, identity: str | None
) -> Iterator[tuple[int, bytes | str | None]]:
    """Read the encoded images of a column in some rows of the file; at most one row group is in memory.

    Args:
        rows: int64 (N,), in any order.
        identity: of the file's content, the key of the cache on this node's disk; None: no cache.
    Returns:
        Positions in `rows`, each once, in any order, with the image there, or with the path of its file; None where the
            file has neither.
    Raises:
        ValueError: as `read_groups`, when a row group is unpacked; the column holds no images.
    """
    for group in groups_with(file, rows, identity):
        inside = np.flatnonzero((rows >= group.first) & (rows < group.last))

        def unpack(fs: fsspec.AbstractFileSystem, group: Span = group) -> pa.RecordBatch:
            table = read_groups(replace(file, fs=fs), [key], [group], identity).table
            forms = _stored_forms(table.column(key).combine_chunks(), f"{file.name}: {key}")
            return pa.record_batch(list(forms), names=["bytes", "path"])

        # What is copied is not cached as blocks of a remote file as well.
        alone = file.fs.uncached() if isinstance(file.fs, RemoteFileSystem) else file.fs
        copy = None
        if identity is not None:
            make = None if _is_an_end(rows[inside], group) else partial(unpack, alone)
            copy = _copied(images_cache(), file, key, identity, str(group.first), make)
        batch = unpack(file.fs) if copy is None else copy
        at = pa.array(rows[inside] - group.first)
        images, paths = (batch.column(name).take(at).to_pylist() for name in ("bytes", "path"))
        yield from (
            (i, path if image is None else image) for i, image, path in zip(inside.tolist(), images, paths, strict=True)
        )


def _stored_forms(column: pa.Array, name: str) -> tuple[pa.Array, pa.Array]:
    """Return the encoded images and the paths of a column, null where it has none.

    The forms are those that `datasets.Image` reads: bytes, paths, or structures of both.
    """
    dtype, nulls = column.type, pa.nulls(len(column), pa.string())
    if pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype):
        return column.cast(pa.binary()), nulls
    if pa.types.is_string(dtype) or pa.types.is_large_string(dtype):
        return nulls.cast(pa.binary()), column.cast(pa.string())
    fields = {dtype.field(i).name for i in range(dtype.num_fields)} if pa.types.is_struct(dtype) else set()
    if not fields & {"bytes", "path"}:
        raise ValueError(
            f"{name} has type {dtype}, and images are stored as bytes, as paths, or as structures of both: save the "
            "dataset with LeRobot or with datasets.Image"
        )
    images = pc.struct_field(column, "bytes") if "bytes" in fields else nulls
    paths = pc.struct_field(column, "path") if "path" in fields else nulls
    return images.cast(pa.binary()), paths.cast(pa.string())


def _is_an_end(rows: np.ndarray, group: Span) -> bool:
    """Return whether the rows are the first of a group, its last, or all: what reads in stored order want of it, and
    once.
    """
    first, last = rows.min(), rows.max() + 1
    return bool(last - first == len(rows) and (first == group.first or last == group.last))
