"""Opening parquet files that are not trusted. Runs on the driver and in read tasks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vla_finetuning.buckets.store import StorageError
from vla_finetuning.data.dataset import naming_file
from vla_finetuning.data.limits import KEPT_FOOTER_BYTES, MAX_FOOTER_BYTES, ROW_GROUP_OVERHEAD_BYTES
from vla_finetuning.files import refuse_pointer

# The entry of a footer that Arrow makes a schema of, with its extension types; one as long, that it ignores.
_ARROW_SCHEMA, _NO_SCHEMA = b"ARROW:schema", b"no-one:reads"
# Bytes of a value in memory. Texts and bytes are read as numbers of the distinct ones.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}


# Row groups of numbers are read together up to so many bytes.
READ_TOGETHER_BYTES = 4 * 2**20


@dataclass
class Budget:
    """What may be read of a table, in one file or several: `read_columns` takes from it, and refuses what exceeds it.

    Attributes:
        noun: what it is of, for errors ("episodes").
        rows, bytes: the most that there may be of it in all; rows None: any number.
    """

    noun: str
    rows: int | None
    bytes: int
    rows_taken: int = 0
    bytes_taken: int = 0

    def check(self, name: str, rows: int, size: int) -> None:
        """Refuse a file `name` that has, or claims, so many rows and bytes beyond what was taken before."""
        rows, size = rows + self.rows_taken, size + self.bytes_taken
        if self.rows is not None and rows > self.rows:
            raise ValueError(
                f"{name}: {rows:,} {self.noun}, more than the {self.rows:,} that a dataset may have: it is damaged or "
                "made to exhaust the memory; copy it again, or split the dataset"
            )
        if size > self.bytes:
            raise ValueError(
                f"{name}: {self.noun} that unpack to {size / 2**20:,.0f} MiB, more than the "
                f"{self.bytes / 2**20:,.0f} MiB that are read at once: it is damaged or made to exhaust the memory; "
                "copy it again, or write it in smaller row groups and files"
            )


class OpenedParquet(pq.ParquetFile):
    """A parquet file that is safe to read; of one in a store, what will be read can be asked for beforehand."""

    def __init__(self, file: Any, **options: Any):
        super().__init__(file, **options)
        self._file = file

    def unpack(self, groups: Sequence[int], leaves: Sequence[tuple[int, str, int]]) -> pa.Table:
        """Some columns of some row groups, in the file's order. `read_row_groups` also takes what begins alike."""
        return self.reader.read_row_groups(list(groups), column_indices=[leaf for leaf, *_ in leaves])

    def expect(self, groups: Sequence[int], leaves: Sequence[tuple[int, str, int]]) -> None:
        """Have the chunks of some columns in some row groups fetched side by side, while other things are done."""
        if hasattr(self._file, "ask"):
            chunks = [self.metadata.row_group(group).column(leaf) for group in groups for leaf, *_ in leaves]
            starts = [min(filter(None, (c.dictionary_page_offset, c.data_page_offset))) for c in chunks]
            self._file.ask([(at, at + c.total_compressed_size) for at, c in zip(starts, chunks, strict=True)])


@contextlib.contextmanager
def open_parquet(
    fs: fsspec.AbstractFileSystem, path: str, *, name: str | None = None, identity: str | None = None
) -> Iterator[OpenedParquet]:
    """Open a dataset's parquet file; the one way to do so.

    Arrow deserialises registered extension types the moment it opens a file, and Ray's have run pickled code from there
    (CVE-2026-41486, closed in Ray 2.55; an environment variable opens it again). So Arrow never gets to see the schema
    that names them: columns have the types that parquet itself gives them, extension arrays those they are stored as.

    Read it with `read_columns`, which unpacks no more than its budget: texts come out of Arrow as dictionaries.

    Args:
        path: inside `fs`.
        name: what errors call the file; None is `path`.
        identity: of its content (`storage.file_identity`). This process then checks and parses its footer once, and
            remembers it: some are as large as what is read of the file.
    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the object store or the disk refused or did not answer.
        ValueError: not a parquet file, or corrupt (also when that is found while reading inside the `with`).
    """
    name = name or path
    try:
        with naming_file(name):
            file = fs.open(path, "rb")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} is missing; copy it again") from error
    except StorageError:
        raise
    except OSError as error:  # links in a circle, no permission
        raise StorageError(f"{name}: {error}") from error
    try:
        with file, naming_file(name):
            metadata = _footer_of(file, identity)
            leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            file.seek(0)
            # With its extension types Arrow would read LeRobot's JSON texts as plain ones.
            yield OpenedParquet(file, metadata=metadata, read_dictionary=texts, arrow_extensions_enabled=False)
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} is missing; copy it again") from error
    except (pa.ArrowException, OSError) as error:
        # With a number it is the disk's (a network drive that is gone), and says nothing of what is on it.
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageError(f"{name}: {error}") from error
        with contextlib.suppress(OSError), fs.open(path, "rb") as begin:
            refuse_pointer(name, begin.read(64))
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name} cannot be read as a parquet file ({reason}): the copy, or the recording before it was finalized, "
            "was cut off; copy it again, or record its episodes again"
        ) from error


def _parsed_footer(file: Any) -> pq.FileMetaData:
    """The footer without its Arrow schema, parsed by itself: as of a parquet file that holds nothing else."""
    footer = _read_footer(file).replace(_ARROW_SCHEMA, _NO_SCHEMA)
    alone = b"PAR1" + footer + struct.pack("<I4s", len(footer), b"PAR1")
    return pq.ParquetFile(pa.BufferReader(alone), arrow_extensions_enabled=False).metadata


@contextlib.contextmanager
def freeing_footers() -> Iterator[Callable[[], object]]:
    """A function that frees the footers of files that were opened inside, and are closed.

    In pyarrow 26, a footer and its `schema` refer to each other, so a footer stays in memory until the garbage
    collector runs: 200 MB for one of LeRobot's files in `meta/episodes`. The collector looks only at objects that
    were made inside, which takes milliseconds.
    """
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()


# Footers of this process, by the identity of the file, the one used last at the end.
_footers: dict[str, pq.FileMetaData] = {}


def _footer_of(file: Any, identity: str | None) -> pq.FileMetaData:
    """Return a file's footer, parsed once in a process: of those used last, as many as KEPT_FOOTER_BYTES hold."""
    if identity is None:
        return _parsed_footer(file)
    metadata = _footers.pop(identity, None) or _parsed_footer(file)
    _footers[identity] = metadata
    excess = sum(footer.serialized_size for footer in list(_footers.values())) - KEPT_FOOTER_BYTES
    for oldest in list(_footers)[:-1]:
        if excess > 0 and (footer := _footers.pop(oldest, None)) is not None:
            excess -= footer.serialized_size
    return metadata


def read_columns(
    file: OpenedParquet,
    columns: Collection[str],
    budget: Budget,
    *,
    name: str,
    groups: Sequence[int] | None = None,
    row_bytes: Mapping[str, int] | None = None,
) -> pa.Table:
    """Read columns of a file that `open_parquet` opened, if the footer says that they fit the budget. Call it inside.

    A page can repeat one value millions of times in a few bytes. So values count, and not only packed bytes; and texts
    are unpacked when it is known how long they are together.

    Args:
        columns: their names in the schema. budget: is taken from.
        name: what errors call the file.
        groups: numbers of the row groups to read; None for all.
        row_bytes: the most that a row of a column takes by what the dataset says of it; columns left out: anything.
    Raises:
        ValueError: more than the budget or than `row_bytes`, or texts in a form whose length cannot be known.
    """
    if doubled := [column for column in columns if file.schema_arrow.names.count(column) != 1]:
        raise ValueError(f"{name}: columns {doubled} must be there once; {len(file.schema_arrow.names)} columns found")
    groups = range(file.metadata.num_row_groups) if groups is None else groups
    leaves = _leaves(file, columns)
    total_rows = total_bytes = 0
    for group in groups:
        rows, sizes = _declared(file.metadata, group, leaves)
        for column, most in (row_bytes or {}).items():
            if sizes[column] > rows * most + ROW_GROUP_OVERHEAD_BYTES:
                raise ValueError(
                    f"{name}: column {column} claims {sizes[column]:,} bytes in row group {group} of {rows:,} rows, "
                    f"more than the {most:,} a row that its shape in meta/info.json allows: the file is damaged or "
                    "belongs to another dataset; copy it again"
                )
        total_rows, total_bytes = total_rows + rows, total_bytes + sum(sizes.values())
    budget.check(name, total_rows, total_bytes)
    parts = [file.unpack([], leaves).select(columns)]
    batches = _batches(file.metadata, groups, leaves)
    for number, batch in enumerate(batches):
        # While one is unpacked the next is fetched.
        file.expect(list(itertools.chain(*batches[number : number + 2])), leaves)
        part = file.unpack(batch, leaves).select(columns)
        size = part.nbytes + sum(_text_bytes(chunk, name) for column in part.columns for chunk in column.chunks)
        budget.check(name, part.num_rows, size)
        budget.rows_taken += part.num_rows
        budget.bytes_taken += size
        parts.append(part)
    schema = pa.schema([field.with_type(_plain(field.type)) for field in parts[0].schema])
    # A cast copies texts that are what they should be, too.
    return pa.concat_tables([part if part.schema.equals(schema) else part.cast(schema) for part in parts])


def _leaves(file: OpenedParquet, columns: Collection[str]) -> list[tuple[int, str, int]]:
    """The parquet columns that some columns of the schema consist of: number, whose it is, bytes of a value."""
    leaves = []
    # A path's first part is the column's name, dots and all: DROID has `action` beside `action.joint_position`.
    for i, (name, *_) in enumerate(file.reader.column_paths):
        if name in columns:
            leaf = file.metadata.schema.column(i)
            leaves.append((i, name, _WIDTHS.get(leaf.physical_type, leaf.length)))
    return leaves


def _batches(
    metadata: pq.FileMetaData, groups: Sequence[int], leaves: Sequence[tuple[int, str, int]]
) -> list[Sequence[int]]:
    """Row groups that are read together: of numbers as many as are small, LeRobot writes one for ten episodes.

    Texts one by one: Arrow 26 cannot read nested dictionaries of several row groups at once.
    """
    if any(metadata.schema.column(i).physical_type == "BYTE_ARRAY" for i, *_ in leaves):
        return [[group] for group in groups]
    ends = np.cumsum([sum(_declared(metadata, group, leaves)[1].values()) for group in groups]) // READ_TOGETHER_BYTES
    return [list(batch) for batch in np.split(np.asarray(groups), np.flatnonzero(np.diff(ends)) + 1) if len(batch)]


def _declared(
    metadata: pq.FileMetaData, number: int, leaves: Sequence[tuple[int, str, int]]
) -> tuple[int, dict[str, int]]:
    """Rows of a row group, and bytes of each column in memory before its texts are unpacked, as the footer has it."""
    group = metadata.row_group(number)
    if group.num_columns != metadata.num_columns:
        raise OSError(f"its row group {number} has {group.num_columns} columns, its schema {metadata.num_columns}")
    sizes: dict[str, int] = {}
    for i, column, width in leaves:
        chunk = group.column(i)
        if min(chunk.num_values, group.num_rows, chunk.total_uncompressed_size) < 0:
            raise OSError(f"its row group {number} has a negative size")
        size = max(chunk.total_uncompressed_size, max(chunk.num_values, group.num_rows) * width)
        sizes[column] = sizes.get(column, 0) + size
    return group.num_rows, sizes


def _text_bytes(array: pa.Array, name: str) -> int:
    """Bytes of the texts in an array, nested ones included, when they are no longer dictionaries."""
    dtype = array.type
    if pa.types.is_dictionary(dtype):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(dtype):
        return sum(_text_bytes(field, name) for field in array.flatten())
    if pa.types.is_list(dtype):
        return _text_bytes(array.flatten(), name)
    if pa.types.is_primitive(dtype) or pa.types.is_null(dtype):
        return 0
    raise ValueError(f"{name}: holds {dtype}, which LeRobot does not write; write numbers, texts, lists and structs")


def _plain(dtype: pa.DataType) -> pa.DataType:
    """A type without dictionaries in it."""
    if pa.types.is_dictionary(dtype):
        return dtype.value_type
    if pa.types.is_struct(dtype):
        return pa.struct([field.with_type(_plain(field.type)) for field in dtype])
    if pa.types.is_list(dtype):
        return pa.list_(dtype.value_field.with_type(_plain(dtype.value_type)))
    return dtype


def _read_footer(file: Any) -> bytes:
    size = file.seek(0, os.SEEK_END)
    if size < 12:
        raise OSError(f"{size} bytes long")
    file.seek(size - 8)
    footer_size, magic = struct.unpack("<I4s", file.read(8))
    if magic != b"PAR1" or footer_size > size - 12:
        raise OSError("no parquet footer at its end: truncated, encrypted or another format")
    if footer_size > MAX_FOOTER_BYTES:
        raise OSError(
            f"its footer of {footer_size / 2**20:,.0f} MiB is larger than {MAX_FOOTER_BYTES / 2**20:,.0f} MiB; such a "
            "file needs fewer, larger row groups"
        )
    file.seek(size - 8 - footer_size)
    return file.read(footer_size)
