"""Opening parquet files that are not trusted. Runs on the driver and in read tasks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vla_finetuning.buckets.store import StorageError
from vla_finetuning.data.dataset import naming_file
from vla_finetuning.data.limits import KEPT_FOOTER_BYTES, MAX_FOOTER_BYTES
from vla_finetuning.files import refuse_pointer

# The entry of a footer that Arrow makes a schema of, with its extension types; one as long, that it ignores.
_ARROW_SCHEMA, _NO_SCHEMA = b"ARROW:schema", b"no-one:reads"
# Bytes of a value in memory; of a text, where it ends.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}


# Rows that are unpacked at once, of numbers; of texts fewer, where one may be long.
BATCH_ROWS = 2**16


@dataclass
class Budget:
    """The bytes that may be unpacked of a table, in one file or several; `noun` is what errors call it ("episodes")."""

    noun: str
    bytes: int
    taken: int = 0

    def check(self, name: str, size: int) -> None:
        """Refuse a file `name` that has, or claims, so many bytes beyond what was taken before."""
        if self.taken + size > self.bytes:
            raise ValueError(
                f"{name}: {self.noun} that unpack to {(self.taken + size) / 2**20:,.0f} MiB or more, and "
                f"{self.bytes / 2**20:,.0f} MiB are read at once: it is damaged or made to exhaust the memory; copy it "
                "again, or write it in smaller row groups and files"
            )

    def take(self, name: str, size: int) -> None:
        self.check(name, size)
        self.taken += size


class OpenedParquet(pq.ParquetFile):
    """A parquet file that is safe to read; of one in a store, what will be read can be requested beforehand."""

    def __init__(self, file: Any, **options: Any):
        super().__init__(file, **options)
        self._file = file

    def with_dictionaries(self, leaves: Sequence[str]) -> pq.ParquetFile:
        """Return the same file, texts of some columns as dictionaries."""
        options = {"read_dictionary": leaves, "arrow_extensions_enabled": False}
        return pq.ParquetFile(self._file, metadata=self.metadata, **options)

    def prefetch(self, groups: Sequence[int], leaves: Sequence[int]) -> None:
        """Fetch the chunks of some columns in some row groups side by side, in the background."""
        if hasattr(self._file, "ask"):
            chunks = [self.metadata.row_group(group).column(leaf) for group in groups for leaf in leaves]
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

    Read it with `read_columns`, which unpacks no more than its budget.

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
        with naming_file(name), fs.open(path, "rb") as file:
            metadata = _footer_of(file, identity)
            file.seek(0)
            # With its extension types Arrow would read LeRobot's JSON texts as plain ones.
            yield OpenedParquet(file, metadata=metadata, arrow_extensions_enabled=False)
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
    file: OpenedParquet, columns: Collection[str], budget: Budget, *, name: str, groups: Sequence[int] | None = None
) -> pa.Table:
    """Read columns of a file that `open_parquet` opened. Call it inside.

    A page can repeat one value millions of times in a few bytes. So the footer's numbers of values count, and texts are
    unpacked a few rows at a time, until they exceed the budget. Where a row may list texts beyond it, they come as
    dictionaries, and are unpacked when it is known how long they are together.

    Args:
        columns: their names in the schema. budget: is taken from.
        name: what errors call the file.
        groups: numbers of the row groups to read; None for all.
    Raises:
        ValueError: a column is missing or there twice; more than the budget.
    """
    names = file.schema_arrow.names
    if doubled := [column for column in columns if names.count(column) != 1]:
        raise ValueError(f"{name}: columns {doubled} must be there once; {len(names)} columns found")
    groups = range(file.metadata.num_row_groups) if groups is None else groups
    # A path's first part is the column's name, dots and all: DROID has `action` beside `action.joint_position`.
    leaves = [i for i, (column, *_) in enumerate(file.reader.column_paths) if column in columns]
    budget.check(name, sum(_declared_bytes(file.metadata, group, leaves) for group in groups))
    file.prefetch(groups, leaves)
    rows = _batch_rows(file.metadata, groups, leaves, budget)
    schema = pa.schema([field for field in file.schema_arrow if field.name in columns])
    tables = [schema.empty_table()]
    listed = [i for i in leaves if _is_nested_text(file.metadata.schema.column(i))]
    most_bytes = budget.bytes // 4
    for may_exceed, members in itertools.groupby(
        groups, lambda group: bool(listed) and _listed_bytes(file.metadata, group, listed, rows) > most_bytes
    ):
        if not may_exceed:
            for batch in file.reader.iter_batches(rows, list(members), leaves):
                budget.take(name, batch.nbytes)
                tables.append(pa.Table.from_batches([batch]))
            continue
        packed = file.with_dictionaries([file.metadata.schema.column(i).path for i in listed])
        for group in members:  # Arrow 26 cannot read nested dictionaries of several row groups at once
            for batch in packed.reader.iter_batches(rows, [group], leaves):
                budget.take(name, batch.nbytes + sum(map(_repeated_bytes, batch.columns)))
                tables.append(pa.Table.from_batches([batch]).cast(schema))
    return pa.concat_tables(tables).select(list(columns))


def _listed_bytes(metadata: pq.FileMetaData, number: int, leaves: Sequence[int], rows: int) -> int:
    """Return the most bytes of texts that `rows` rows list, were each as long as the pages of a row group."""
    group = metadata.row_group(number)
    chunks = [group.column(i) for i in leaves]
    longest = sum(chunk.num_values * chunk.total_uncompressed_size for chunk in chunks)
    return longest * max(1, rows // max(1, group.num_rows))


def _is_nested_text(leaf: Any) -> bool:
    return leaf.physical_type == "BYTE_ARRAY" and leaf.max_repetition_level > 0


def _repeated_bytes(array: pa.Array) -> int:
    """Return the bytes of the texts that dictionaries in an array refer to, as often as they do."""
    dtype = array.type
    if pa.types.is_dictionary(dtype):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(dtype):
        return sum(map(_repeated_bytes, array.flatten()))
    return _repeated_bytes(array.flatten()) if pa.types.is_list(dtype) else 0


def _declared_bytes(metadata: pq.FileMetaData, number: int, leaves: Sequence[int]) -> int:
    """Return the bytes of a row group's columns in memory, texts packed, by what the footer says."""
    group, size = metadata.row_group(number), 0
    if group.num_columns != metadata.num_columns:
        raise OSError(f"its row group {number} has {group.num_columns} columns, its schema {metadata.num_columns}")
    for i in leaves:
        chunk, leaf = group.column(i), metadata.schema.column(i)
        if min(chunk.num_values, group.num_rows, chunk.total_uncompressed_size) < 0:
            raise OSError(f"its row group {number} has a negative size")
        width = _WIDTHS.get(leaf.physical_type, leaf.length)
        size += max(chunk.total_uncompressed_size, max(chunk.num_values, group.num_rows) * width)
    return size


def _batch_rows(metadata: pq.FileMetaData, groups: Sequence[int], leaves: Sequence[int], budget: Budget) -> int:
    """Return how many rows are unpacked at once: of texts a quarter of the budget, were each as long as its pages."""
    texts = [i for i in leaves if metadata.schema.column(i).physical_type == "BYTE_ARRAY"]
    longest = max(
        (sum(metadata.row_group(group).column(i).total_uncompressed_size for i in texts) for group in groups),
        default=0,
    )
    return max(1, min(BATCH_ROWS, budget.bytes // (4 * max(1, longest))))


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
