"""Read rows of numbers, texts and encoded images from a dataset's data files.

Parquet unpacks whole row groups, up to 100 MB, and a shuffled window needs a few rows of many groups. So unpacked
columns are cached on the node's disk, uncompressed in Arrow's memory layout, and memory-mapped. A cached copy holds the
numbers of a file, or the images of a row group.
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
from vla_finetuning.data.safe_parquet import Budget, OpenedParquet, open_parquet, read_columns
from vla_finetuning.data.storage import RemoteFileSystem

# Most copies that a process maps. Linux allows 65,530 mappings.
_MAPPED = 2**14


@dataclass(frozen=True)
class DataFile:
    """A parquet file of a dataset.

    `name` names the file in errors, `dataset` the dataset in caches. `identity` identifies the file's content
    (`storage.file_identity`); None for no cache.
    """

    fs: fsspec.AbstractFileSystem
    path: str
    name: str
    dataset: str
    identity: str | None = None

    def open(self) -> contextlib.AbstractContextManager[OpenedParquet]:
        return open_parquet(self.fs, self.path, name=self.name, identity=self.identity)


@dataclass(frozen=True)
class Span:
    """Rows [first, last) of a data file; `name` names them in errors."""

    name: str
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Column:
    """A column of numbers: its name in the file, and dtype (None for the stored one) and shape of a row."""

    key: str
    dtype: np.dtype | None
    shape: tuple[int, ...]


def read_groups(file: DataFile, columns: Collection[str], spans: Sequence[Span] | None) -> tuple[pa.Table, np.ndarray]:
    """Read columns of the row groups that hold the spans, or of all row groups if `spans` is None.

    Return the row groups joined to one table, and the row in it at which each span begins, int64 (S,). Raises
    ValueError for missing columns or rows, or more bytes than MAX_DATA_BYTES, and as `open_parquet`.
    """
    with file.open() as parquet:
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
        budget = Budget("row groups", MAX_DATA_BYTES)
        table = read_columns(parquet, columns, budget, groups=groups.tolist())
        first_rows = np.array([span.first for span in spans or ()], np.int64)
        skipped = np.concatenate([[0], np.cumsum(np.where(selected, 0, sizes))])
        return table, first_rows - skipped[np.searchsorted(group_first, first_rows, "right") - 1]


def read_values(file: DataFile, key: str, rows: np.ndarray) -> Iterator[tuple[np.ndarray, pa.ChunkedArray]]:
    """Yield values of one column in `rows` (int64 (N,), in any order), with at most one row group in memory.

    Each is a tuple of positions in `rows`, int64 (n,), and the values there. Raises ValueError as `read_groups`.
    """
    for group, inside in groups_with(file, rows):
        table, _ = read_groups(file, [key], [group])
        yield inside, table.column(key).take(pa.array(rows[inside] - group.first))


def groups_with(file: DataFile, rows: np.ndarray) -> Iterator[tuple[Span, np.ndarray]]:
    """Yield each row group that holds some of `rows`, and their positions in `rows`. Raises ValueError without them."""
    first = _group_starts.get(file.identity or "")
    if first is None:
        with file.open() as parquet:
            groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
            first = np.cumsum([0, *(group.num_rows for group in groups)])
        if file.identity is not None:
            _remember(_group_starts, file.identity, first)
    if len(rows) and rows.max() >= first[-1]:
        raise ValueError(
            f"{file.name}: row {rows.max()} is wanted, the file has {first[-1]} rows: the file is incomplete or "
            "meta/episodes is wrong"
        )
    number = np.searchsorted(first, rows, "right") - 1
    for g in np.unique(number).tolist():
        yield Span(f"row group {g}", int(first[g]), int(first[g + 1])), np.flatnonzero(number == g)


# ---- copies on the node's disk ------------------------------------------------------------------------------------

# Caches of this process: first rows of row groups by file identity, and mapped copies by path.
_group_starts: dict[str, np.ndarray] = {}
_mapped: dict[Path, pa.RecordBatch | None] = {}


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    cache[key] = value
    while len(cache) > _MAPPED:
        cache.pop(next(iter(cache)), None)


def _copied(
    cache: DiskCache, file: DataFile, key: str, name: str, unpack: Callable[[], pa.RecordBatch] | None
) -> pa.RecordBatch | None:
    """Return the cached copy `name` of the columns `key`, or call `unpack` and cache its result; None if there is none.

    Raises the errors of `unpack`.
    """
    if file.identity is None:
        return None
    folder = cache.content(file.dataset, f"{file.path}\0{key}", file.identity)
    if folder is None:
        return None
    path = folder / name
    if path not in _mapped:
        copy = cache.map(path)
        if copy is None:
            if unpack is None or not cache.is_writable:
                return None
            # Other readers of the file wait instead of unpacking it too.
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


def read_numbers(file: DataFile, columns: Sequence[Column], spans: Sequence[Span]) -> list[np.ndarray]:
    """Read the rows of the spans, concatenated: one array (N, *shape) per column, or (N,) for shape (1,).

    Columns of a file with an identity state their dtype. Raises ValueError as `read_groups` and `numbers`, when the
    rows are unpacked for the first time.
    """
    keys = list(dict.fromkeys(column.key for column in columns))

    def whole() -> pa.RecordBatch:
        table, _ = read_groups(file, keys, None)
        return _to_arrow([numbers(table.column(c.key), c.dtype, c.shape, c.key) for c in columns])

    # The error may concern rows outside the spans: read only their row groups then.
    with contextlib.suppress(ValueError):
        copy = _copied(numbers_cache(), file, repr(list(columns)), "numbers", whole)
        if copy is not None and all(span.last <= len(copy) for span in spans):
            arrays = [_from_arrow(copy.column(i), c) for i, c in enumerate(columns)]
            return [np.concatenate([array[span.first : span.last] for span in spans]) for array in arrays]
    table, begins = read_groups(file, keys, spans)
    return [_numbers_of_spans(table.column(c.key), c, spans, begins.tolist(), file.name) for c in columns]


def _numbers_of_spans(
    column: pa.ChunkedArray, c: Column, spans: Sequence[Span], begins: Sequence[int], file: str
) -> np.ndarray:
    """Return the rows of spans that begin at rows `begins` of `column` as `numbers`; errors name the span."""
    parts = [column.slice(begin, len(span)) for begin, span in zip(begins, spans, strict=True)]
    chunks = [chunk for part in parts for chunk in part.chunks]
    try:
        return numbers(pa.chunked_array(chunks, column.type), c.dtype, c.shape, file)
    except ValueError:
        for part, span in zip(parts, spans, strict=True):
            numbers(part, c.dtype, c.shape, f"{file}: {span.name}: column {c.key}")
        raise


def _to_arrow(arrays: Sequence[np.ndarray]) -> pa.RecordBatch:
    """Convert each array to a column with the bytes of its rows."""
    columns = []
    for array in arrays:
        rows = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
        columns.append(pa.Array.from_buffers(pa.binary(rows.shape[1]), len(rows), [None, pa.py_buffer(rows)]))
    return pa.record_batch(columns, names=[str(i) for i in range(len(columns))])


def _from_arrow(rows: pa.Array, column: Column) -> np.ndarray:
    shape = () if column.shape == (1,) else column.shape
    return np.frombuffer(rows.buffers()[1], column.dtype, len(rows) * math.prod(shape)).reshape(len(rows), *shape)


def numbers(column: pa.ChunkedArray, dtype: DTypeLike | None, shape: tuple[int, ...], label: str) -> np.ndarray:
    """Convert a column of scalars, lists or nested lists to an array (N, *shape), or (N,) for shape (1,).

    `dtype` represents the numbers exactly; None for the stored one. Raises ValueError if a value is missing or has
    another shape or type.
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
    """Check that `dtype` represents the numbers exactly; float32 may round, as in LeRobot."""
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


def read_images(file: DataFile, key: str, rows: np.ndarray) -> Iterator[tuple[int, bytes | str | None]]:
    """Yield the encoded images of a column in `rows` (int64 (N,)), with at most one row group in memory.

    Each position in `rows` comes once, in any order, with the image, the path of an image file, or None. Raises
    ValueError as `read_groups`, when a row group is unpacked, and for a column without images.
    """
    for group, inside in groups_with(file, rows):

        def unpack(fs: fsspec.AbstractFileSystem, group: Span = group) -> pa.RecordBatch:
            table, _ = read_groups(replace(file, fs=fs), [key], [group])
            forms = _stored_forms(table.column(key).combine_chunks(), f"{file.name}: {key}")
            return pa.record_batch(list(forms), names=["bytes", "path"])

        # Do not cache blocks of the remote file in addition to the copy.
        alone = file.fs.uncached() if isinstance(file.fs, RemoteFileSystem) else file.fs
        make = None if _is_group_end(rows[inside], group) else partial(unpack, alone)
        copy = _copied(images_cache(), file, key, str(group.first), make)
        batch = unpack(file.fs) if copy is None else copy
        at = pa.array(rows[inside] - group.first)
        images, paths = (batch.column(name).take(at).to_pylist() for name in ("bytes", "path"))
        yield from (
            (i, path if image is None else image) for i, image, path in zip(inside.tolist(), images, paths, strict=True)
        )


def _stored_forms(column: pa.Array, name: str) -> tuple[pa.Array, pa.Array]:
    """Return the encoded images and the paths of a column, with nulls for missing ones.

    Accept the types that `datasets.Image` reads: bytes, paths, or structs of both.
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


def _is_group_end(rows: np.ndarray, group: Span) -> bool:
    """Return whether the rows are a contiguous start or end of the group, as reads in stored order request once."""
    first, last = rows.min(), rows.max() + 1
    return bool(last - first == len(rows) and (first == group.first or last == group.last))
