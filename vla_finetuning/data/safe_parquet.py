"""Open and read untrusted parquet files safely. Runs on the driver and in read tasks."""

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

# The footer's key of Arrow's schema, with extension types, and a key of the same length that Arrow ignores.
_ARROW_SCHEMA, _NO_SCHEMA = b"ARROW:schema", b"no-one:reads"
# Bytes of a value in memory; of a text, those of its offset.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
# Most rows that are unpacked in one batch; fewer with long texts.
BATCH_ROWS = 2**16


@dataclass
class Budget:
    """Limit of the bytes unpacked from one or several files; `noun` names the content in errors ("episodes")."""

    noun: str
    bytes: int
    taken: int = 0

    def check(self, name: str, size: int) -> None:
        """Refuse `size` more bytes of the file `name` if they exceed the budget."""
        if self.taken + size > self.bytes:
            raise ValueError(
                f"{name}: its {self.noun} need {(self.taken + size) / 2**20:,.0f} MiB or more in memory, above the "
                f"limit of {self.bytes / 2**20:,.0f} MiB: it is damaged or made to exhaust the memory; copy it "
                "again, or write it in smaller row groups and files"
            )

    def take(self, name: str, size: int) -> None:
        self.check(name, size)
        self.taken += size


class OpenedParquet(pq.ParquetFile):
    """A parquet file opened by `open_parquet`; `name` names it in errors."""

    def __init__(self, file: Any, name: str, metadata: pq.FileMetaData):
        super().__init__(file, metadata=metadata, arrow_extensions_enabled=False)
        self._file, self.name = file, name

    def with_dictionaries(self, leaves: Sequence[str]) -> pq.ParquetFile:
        """Return the same file with the texts of `leaves` as dictionaries."""
        options = {"read_dictionary": leaves, "arrow_extensions_enabled": False}
        return pq.ParquetFile(self._file, metadata=self.metadata, **options)

    def prefetch(self, groups: Sequence[int], leaves: Sequence[int]) -> None:
        """Fetch the chunks of columns in row groups from an object store in parallel, in the background."""
        if hasattr(self._file, "ask"):
            chunks = [self.metadata.row_group(group).column(leaf) for group in groups for leaf in leaves]
            starts = [min(filter(None, (c.dictionary_page_offset, c.data_page_offset))) for c in chunks]
            self._file.ask([(at, at + c.total_compressed_size) for at, c in zip(starts, chunks, strict=True)])


@contextlib.contextmanager
def open_parquet(
    fs: fsspec.AbstractFileSystem, path: str, *, name: str | None = None, identity: str | None = None
) -> Iterator[OpenedParquet]:
    """Open a parquet file of a dataset; all parquet files of datasets are opened here.

    Arrow deserialises registered extension types when it opens a file, and Ray's types have run pickled code there
    (CVE-2026-41486, closed in Ray 2.55; an environment variable reopens it). So Arrow's schema is hidden from Arrow:
    columns have their parquet types, and extension arrays have their storage types.

    Read the file with `read_columns`, which unpacks no more than its budget. `name` names the file in errors.
    `identity` is that of the content (`storage.file_identity`), to cache the parsed footer in this process: some are as
    large as the data that is read.

    Raises:
        FileNotFoundError: the file does not exist.
        StorageError: the object store or the disk refused or did not answer.
        ValueError: the file is not parquet or is corrupt (also raised while reading inside the `with`).
    """
    name = name or path
    try:
        with naming_file(name), fs.open(path, "rb") as file:
            metadata = _footer_of(file, identity)
            file.seek(0)
            yield OpenedParquet(file, name, metadata)
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} is missing; copy it again") from error
    except (pa.ArrowException, OSError) as error:
        # An errno comes from the disk (e.g. a lost network drive), not from the file's content.
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
    """Parse the footer without its Arrow schema, as an otherwise empty parquet file."""
    footer = _read_footer(file).replace(_ARROW_SCHEMA, _NO_SCHEMA)
    alone = b"PAR1" + footer + struct.pack("<I4s", len(footer), b"PAR1")
    return pq.ParquetFile(pa.BufferReader(alone), arrow_extensions_enabled=False).metadata


@contextlib.contextmanager
def freeing_footers() -> Iterator[Callable[[], object]]:
    """Yield a function that frees the footers of files opened and closed inside the block.

    In pyarrow 26, a footer and its `schema` form a cycle, so a footer of 200 MB (LeRobot's `meta/episodes`) stays in
    memory until the garbage collector runs. Older objects are frozen, so a collection takes milliseconds.
    """
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()


# Footers of this process by file identity, least recently used first.
_footers: dict[str, pq.FileMetaData] = {}


def _footer_of(file: Any, identity: str | None) -> pq.FileMetaData:
    """Return a file's footer; cache the most recently used footers, up to KEPT_FOOTER_BYTES."""
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
    file: OpenedParquet, columns: Collection[str], budget: Budget, groups: Sequence[int] | None = None
) -> pa.Table:
    """Read columns of a file inside the block of `open_parquet`.

    A page can repeat one value millions of times in a few bytes. So check the footer's counts first, and unpack texts
    a few rows at a time until they exceed the budget. Read lists of texts that may exceed it as dictionaries, and
    unpack them when their total length is known. `groups` are the row groups to read; None for all.

    Raises ValueError if a column is missing or repeated, or the budget is exceeded.
    """
    names, name = file.schema_arrow.names, file.name
    if doubled := [column for column in columns if names.count(column) != 1]:
        raise ValueError(f"{name}: columns {doubled} must be there once; {len(names)} columns found")
    groups = range(file.metadata.num_row_groups) if groups is None else groups
    # Compare whole names: DROID has `action` beside `action.joint_position`.
    leaves = [i for i, (column, *_) in enumerate(file.reader.column_paths) if column in columns]
    budget.check(name, sum(_declared_bytes(file.metadata, group, leaves) for group in groups))
    file.prefetch(groups, leaves)
    texts = [i for i in leaves if file.metadata.schema.column(i).physical_type == "BYTE_ARRAY"]
    listed = [i for i in texts if file.metadata.schema.column(i).max_repetition_level > 0]
    rows = _batch_rows(file.metadata, groups, texts, budget)
    schema = pa.schema([field for field in file.schema_arrow if field.name in columns])
    tables = [schema.empty_table()]
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
    """Return an upper bound of the bytes of listed texts in `rows` rows, from the sizes of the pages."""
    group = metadata.row_group(number)
    chunks = [group.column(i) for i in leaves]
    longest = sum(chunk.num_values * chunk.total_uncompressed_size for chunk in chunks)
    return longest * max(1, rows // max(1, group.num_rows))


def _repeated_bytes(array: pa.Array) -> int:
    """Return the bytes of the dictionary-encoded texts in an array when unpacked."""
    dtype = array.type
    if pa.types.is_dictionary(dtype):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(dtype):
        return sum(map(_repeated_bytes, array.flatten()))
    return _repeated_bytes(array.flatten()) if pa.types.is_list(dtype) else 0


def _declared_bytes(metadata: pq.FileMetaData, number: int, leaves: Sequence[int]) -> int:
    """Return the bytes of a row group's columns in memory, with texts packed, as the footer declares."""
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


def _batch_rows(metadata: pq.FileMetaData, groups: Sequence[int], texts: Sequence[int], budget: Budget) -> int:
    """Return the rows per batch, so that the columns `texts` fill at most a quarter of the budget in the worst case."""
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
