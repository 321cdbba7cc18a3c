"""Opening parquet files that somebody else wrote. Runs on the driver and in read tasks."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import struct
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from vla_finetuning.data.storage import StorageError, naming_file

# What LeRobot writes: Hugging Face's fixed-shape arrays, and JSON text inside the language columns.
_ARROW_EXTENSIONS = re.compile(r"datasets\.features\.features\.Array[2-5]DExtensionType|arrow\.json")


@contextlib.contextmanager
def open_parquet(fs: fsspec.AbstractFileSystem, path: str, *, name: str | None = None) -> Iterator[pq.ParquetFile]:
    """Open a dataset's parquet file; the one way to do so.

    Before Arrow parses the schema, the names of its extension types are read from the raw bytes: Arrow
    deserialises registered types the moment it opens a file, and Ray's have run pickled code from there
    (CVE-2026-41486, closed in Ray 2.55; an environment variable opens it again).

    Args:
        path: inside `fs`.
        name: what errors call the file; None is `path`.
    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the object store or the disk refused or did not answer.
        ValueError: not a parquet file, corrupt (also when that is found while reading inside the `with`), or
            it holds an extension type that LeRobot does not write.
    """
    name = name or path
    try:
        with naming_file(name):
            file = fs.open(path, "rb")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} is missing; copy it again") from error
    try:
        with file, naming_file(name):
            for extension in _extension_names_in_footer(_read_footer(file)):
                if not _ARROW_EXTENSIONS.fullmatch(extension):
                    raise ValueError(
                        f"{name} holds the Arrow extension type {extension!r:.100}, which LeRobot does not "
                        "write and which could run code when read; write the column as plain lists"
                    )
            file.seek(0)
            yield pq.ParquetFile(file)
    except StorageError:
        raise
    except (pa.ArrowException, OSError) as error:
        # With a number it is the disk's (a network drive that is gone), and says nothing of what is on it.
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageError(f"{name}: {error}") from error
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be read as a parquet file ({reason}); copy it again") from error


def _read_footer(file: Any) -> bytes:
    size = file.seek(0, os.SEEK_END)
    if size < 12:
        raise OSError(f"{size} bytes long")
    file.seek(size - 8)
    footer_size, magic = struct.unpack("<I4s", file.read(8))
    if magic != b"PAR1" or footer_size > size - 12:
        raise OSError("no parquet footer at its end: truncated, encrypted or another format")
    file.seek(size - 8 - footer_size)
    return file.read(footer_size)


def _extension_names_in_footer(footer: bytes) -> Iterator[str]:
    """Read the extension types in the Arrow schemas of a parquet footer, without letting Arrow do it.

    Raises OSError where they cannot be followed: nobody knows then what Arrow would make of them.

    The footer is Thrift (compact protocol): a string is its length as a varint, then its bytes; the value of
    a key follows after one byte 0x18 (next field, binary). The schema is base64 of an Arrow IPC message.
    """
    key = b"ARROW:schema"
    at = footer.find(key)
    while at >= 0:
        at += len(key)
        try:
            if footer[at] != 0x18:
                raise ValueError("unknown encoding")
            at, length, shift = at + 1, 0, 0
            while True:
                length |= (footer[at] & 0x7F) << shift
                at, shift = at + 1, shift + 7
                if footer[at - 1] < 0x80:
                    break
            names = _extension_names(base64.b64decode(footer[at : at + length], validate=True))
        except (ValueError, IndexError, struct.error) as error:
            raise OSError(f"its Arrow schema is damaged: {error}") from error
        yield from names
        at = footer.find(key, at + length)


def _extension_names(message: bytes) -> list[str]:
    """Names of the extension types in an Arrow IPC schema message, nested fields included.

    A flatbuffer table starts with the distance back to its vtable, which holds the offset of each field
    (format/Message.fbs, format/Schema.fbs of Apache Arrow: Message.header is field 2, Schema.fields 1,
    Field.children 5, Field.custom_metadata 6, KeyValue.key 0 and value 1).
    """

    def number(code: str, at: int) -> int:
        if at < 0:
            raise ValueError("an offset leads outside")
        return struct.unpack_from(code, message, at)[0]

    def follow(table: int, field: int) -> int | None:
        vtable = table - number("<i", table)
        if 4 + 2 * field >= number("<H", vtable):
            return None
        offset = number("<H", vtable + 4 + 2 * field)
        return table + offset + number("<I", table + offset) if offset else None

    def vector(at: int | None) -> list[int]:
        slots = [] if at is None else range(at + 4, at + 4 + 4 * number("<I", at), 4)
        return [slot + number("<I", slot) for slot in slots]

    def text(at: int | None) -> bytes:
        return b"" if at is None else message[at + 4 : at + 4 + number("<I", at)]

    # Messages start with a marker and their length; before Arrow 0.15 with the length alone.
    start = 8 if number("<I", 0) == 0xFFFFFFFF else 4
    schema = follow(start + number("<I", start), 2)
    pending = [] if schema is None else vector(follow(schema, 1))
    names = []
    seen = 0
    while pending:
        field = pending.pop()
        seen += 1
        if seen > 100_000:
            raise ValueError("its fields refer to each other")
        for pair in vector(follow(field, 6)):
            if text(follow(pair, 0)) == b"ARROW:extension:name":
                names.append(text(follow(pair, 1)).decode("utf-8", "backslashreplace"))
        pending += vector(follow(field, 5))
    return names
