"""Encoded images of data files, each a record of the store on the node's own disk.

A row group is unpacked as a whole, and a shuffled segment wants a few rows of it. So the first one stores the others'
images as well, as they are encoded: later segments, epochs and runs read theirs alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from vla_finetuning.data import number_cache
from vla_finetuning.data.node_cache import BLOCK_BYTES, NodeCache, Records, node_cache
from vla_finetuning.data.number_cache import DataFile, Span, groups_with, read_groups


def read_images(
    file: DataFile, key: str, row_bytes: int, rows: np.ndarray, identity: str | None
) -> Iterator[tuple[int, bytes | None]]:
    """The encoded images of a column in some rows of the file; at most one row group is in memory.

    Args:
        row_bytes: the most that an image takes. rows: int64 (N,), in any order.
        identity: of the file's content, the key of the store; None: nothing is stored.
    Returns:
        Positions in `rows`, each once, in any order, with the image there; None where the file has none.
    Raises:
        ValueError: as `number_cache.read_groups`, when a row group is unpacked.
    """
    stored = None if identity is None else _Stored.of(file, key, row_bytes, identity)
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
        store = stored if stored is not None and stored.takes and not _is_an_end(rows[wanted], group) else None
        yield from zip(inside, _unpack(file, key, row_bytes, group, rows[inside], identity, store), strict=True)


def _unpack(
    file: DataFile,
    key: str,
    row_bytes: int,
    group: Span,
    rows: np.ndarray,
    identity: str | None,
    store: _Stored | None,
) -> list[bytes | None]:
    """The images of some rows of a row group; the first to come stores all of them."""
    found: list[bytes | None] = [None] * len(rows)
    # Other readers of this file wait: they would unpack the same group.
    with contextlib.nullcontext() if store is None else store.alone():
        if store is not None:
            found = [store.get(row) for row in rows.tolist()]
        if None in found:
            table = read_groups(file, {key: row_bytes}, [group], identity).table
            images = table.column(key).combine_chunks().field("bytes").cast(pa.binary())
            found = images.take(pa.array(rows - group.first)).to_pylist()
            if store is not None:
                store.write(group.first, images)
    return found


def _is_an_end(rows: np.ndarray, group: Span) -> bool:
    """Whether the rows are the first of a group, its last, or all: what reads in stored order want of it, and once."""
    first, last = rows.min(), rows.max() + 1
    return bool(last - first == len(rows) and (first == group.first or last == group.last))


class _Stored:
    """The images of a column in a file: that of row n is record n, tagged with how long it is."""

    def __init__(self, records: Records):
        self._records, self._cache = records, records.cache

    @classmethod
    def of(cls, file: DataFile, key: str, row_bytes: int, identity: str) -> _Stored | None:
        """None where there is no place for them."""
        cache, found = images_cache(), None
        with cache.doing_without():
            if cache.works and cache.limit_bytes:
                content = cache.content(file.dataset, f"{file.path}\0{key}", identity)
                found = cls(Records(cache, content, -(-row_bytes // BLOCK_BYTES) * BLOCK_BYTES))
        return found

    @property
    def takes(self) -> bool:
        """Whether writes are stored, as far as is known."""
        return self._cache.takes

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self._records.alone()

    def get(self, row: int) -> bytes | None:
        """None if it is not there."""
        with self._cache.doing_without():
            return self._records.get(row) if self._cache.works else None
        return None

    def write(self, first: int, images: pa.BinaryArray) -> None:
        """Store the images of rows `first` and following, if there is space for all."""
        ends = np.frombuffer(images.buffers()[1], np.int32)[images.offset :][: len(images) + 1].tolist()
        data = memoryview(images.buffers()[2] or b"")
        with self._cache.doing_without():
            self._records.put([(first + i, data[a:b]) for i, (a, b) in enumerate(itertools.pairwise(ends))])


def images_cache() -> NodeCache:
    """Beside the numbers, which are a thousandth, and would find no space among them."""
    return node_cache(
        Path(number_cache.NUMBERS_DIR) / "images",
        int(number_cache.numbers_gb() * 1e9),
        "row groups of the other images are unpacked for every segment; raise VLA_NUMBERS_GB, or set VLA_NUMBERS_DIR, "
        "on every node, to a folder on another disk",
    )
