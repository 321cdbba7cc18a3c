"""Encoded images of data files, each a record of the store on the node's own disk.

A row group is unpacked as a whole, and a shuffled segment wants a few rows of it. So the first one stores the others'
images as well, as they are encoded: later segments, epochs and runs read theirs alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vla_finetuning.data import number_cache
from vla_finetuning.data.node_cache import BLOCK_BYTES, NodeCache, Records, node_cache
from vla_finetuning.data.number_cache import DataFile, Span, groups_with, read_groups
from vla_finetuning.data.storage import RemoteFileSystem


def read_images(
    file: DataFile, key: str, row_bytes: int, rows: np.ndarray, identity: str | None
) -> Iterator[tuple[int, bytes | str | None]]:
    """The encoded images of a column in some rows of the file; at most one row group is in memory.

    Args:
        row_bytes: the most that an image takes. rows: int64 (N,), in any order.
        identity: of the file's content, the key of the store; None: nothing is stored.
    Returns:
        Positions in `rows`, each once, in any order, with the image there, or with the path of its file; None where the
            file has neither.
    Raises:
        ValueError: as `number_cache.read_groups`, when a row group is unpacked; the column holds no images.
    """
    stored = None if identity is None else _stored(file, key, row_bytes, identity)
    missing = []
    for i, row in enumerate(rows.tolist()):
        image = None if stored is None else stored.get(row)
        if image is None:
            missing.append(i)
        else:
            yield i, image
    for group in groups_with(file, rows[missing], identity) if missing else ():
        wanted = (rows >= group.first) & (rows < group.last)
        inside = [i for i in missing if wanted[i]]
        store = stored if stored is not None and stored.cache.takes and not _is_an_end(rows[wanted], group) else None
        yield from zip(inside, _unpack(file, key, row_bytes, group, rows[inside], identity, store), strict=True)


def _unpack(
    file: DataFile,
    key: str,
    row_bytes: int,
    group: Span,
    rows: np.ndarray,
    identity: str | None,
    store: Records | None,
) -> list[bytes | str | None]:
    """The images of some rows of a row group; the first to come stores all of them."""
    found: list[bytes | str | None] = [None] * len(rows)
    # Other readers of this file wait: they would unpack the same group.
    with contextlib.nullcontext() if store is None else store.alone():
        if store is not None:
            found = [store.get(row) for row in rows.tolist()]
        if None in found:
            if store is not None and isinstance(file.fs, RemoteFileSystem):
                file = replace(file, fs=file.fs.uncached())  # once on the disk, not its blocks as well
            table = read_groups(file, {key: row_bytes}, [group], identity).table
            images, paths = _stored_forms(table.column(key).combine_chunks(), f"{file.name}: {key}")
            at = pa.array(rows - group.first)
            found = images.take(at).to_pylist()
            if images.null_count:
                named = paths.take(at).to_pylist()
                found = [path if image is None else image for image, path in zip(found, named, strict=True)]
            elif store is not None:
                _put(store, group.first, images)
    return found


def _stored_forms(column: pa.Array, name: str) -> tuple[pa.Array, pa.Array]:
    """Return the encoded images and the paths of a column, null where it has none.

    The forms are those that `datasets.Image` reads: bytes, paths, or structures of both.
    """
    kind, nulls = column.type, pa.nulls(len(column), pa.string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.binary()), nulls
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return nulls.cast(pa.binary()), column.cast(pa.string())
    fields = {kind.field(i).name for i in range(kind.num_fields)} if pa.types.is_struct(kind) else set()
    if not fields & {"bytes", "path"}:
        raise ValueError(
            f"{name} has type {kind}, and images are stored as bytes, as paths, or as structures of both: save the "
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


def _stored(file: DataFile, key: str, row_bytes: int, identity: str) -> Records | None:
    """The images of a column in a file: that of row n is record n. None where there is no place for them."""
    record_bytes = -(-row_bytes // BLOCK_BYTES) * BLOCK_BYTES
    return Records.of(images_cache(), file.dataset, f"{file.path}\0{key}", identity, record_bytes)


def _put(store: Records, first: int, images: pa.BinaryArray) -> None:
    """Store the images of rows `first` and following."""
    ends = np.frombuffer(images.buffers()[1], np.int32)[images.offset :][: len(images) + 1].tolist()
    data = memoryview(images.buffers()[2] or b"")
    store.put([(first + i, data[a:b]) for i, (a, b) in enumerate(itertools.pairwise(ends))])


def images_cache() -> NodeCache:
    """Beside the numbers, which are a thousandth, and would find no space among them."""
    return node_cache(
        Path(number_cache.NUMBERS_DIR) / "images",
        int(number_cache.numbers_gb() * 1e9),
        "row groups of the other images are unpacked for every segment; raise VLA_NUMBERS_GB, or set VLA_NUMBERS_DIR, "
        "on every node, to a folder on another disk",
    )
