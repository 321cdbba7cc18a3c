"""Where in an mp4 of an object store the frames lie that are wanted, so that all of them are asked for at once.

The index at an mp4's start or end (ISO/IEC 14496-12, `moov`) says which bytes each frame has. A node reads it once and
keeps it on its own disk. What is found here only saves requests: FFmpeg reads the file, and fetches what is not there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_finetuning.data.decode import SEEK_AFTER_FRAMES
from vla_finetuning.data.disk_cache import numbers_cache
from vla_finetuning.data.storage import BLOCK_BYTES, RemoteFile, RemoteFileSystem, file_identity

# An index beyond this is no dataset's: of a day at 60 Hz it has 60 MB.
MAX_INDEX_BYTES = 64 * 2**20
# FFmpeg reads so much at a time, and so looks beyond what it wants.
READ_BYTES = 32 * 2**10
# Decoders give a frame when they have seen some later ones.
LATER_FRAMES = 4
# Of the first frames FFmpeg looks at some when it opens a file.
FIRST_BYTES = 2 * READ_BYTES
# All that is fetched beforehand of one file, for one window.
MAX_ASKED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class VideoIndex:
    """Frames of a video in the order of decoding, N of them.

    offset, size: int64 (N,), bytes in the file. shown_s: float64 (N,), when. key: int64 (K,), those that decoding may
    start at.
    """

    offset: np.ndarray
    size: np.ndarray
    shown_s: np.ndarray
    key: np.ndarray

    def ranges(self, times_s: np.ndarray, fps: float) -> list[tuple[int, int]]:
        """The bytes [start, end) that `VideoReader.read` will want for the frames at `times_s` (float64, ascending)."""
        display_order = np.argsort(self.shown_s, kind="stable")
        place = np.searchsorted(self.shown_s[display_order], times_s - 0.5 / fps)
        frames = display_order[np.minimum(place, len(display_order) - 1)]
        first = self.key[np.maximum(np.searchsorted(self.key, frames, "right") - 1, 0)]
        walked = np.diff(times_s, prepend=-np.inf) <= SEEK_AFTER_FRAMES / fps
        last = np.minimum(frames + 1 + LATER_FRAMES, len(display_order))
        runs: list[list[int]] = []
        for a, b, on in zip(first.tolist(), last.tolist(), walked.tolist(), strict=True):
            if on and runs:
                runs[-1] = [min(a, runs[-1][0]), max(b, runs[-1][1])]
            else:
                runs.append([a, b])
        ranges, budget = [], MAX_ASKED_BYTES
        for a, b in runs:
            start = int(self.offset[a:b].min())
            end = int((self.offset[a:b] + self.size[a:b]).max()) + READ_BYTES
            budget -= end - start
            if budget < 0:
                break
            ranges.append((start, end))
        return ranges


class RemoteVideo:
    """A video in a store. `file` is for FFmpeg; what opening it reads is asked for at once, or is on this node's disk.

    Runs in a read task. `dataset` tells the dataset from others that this node keeps something of. Raises
    FileNotFoundError and StorageError.
    """

    def __init__(self, fs: RemoteFileSystem, path: str, dataset: str):
        self.file: RemoteFile = fs.open(path)
        self._copy = _copy_of(fs, path, dataset)
        self._blocks = None if self._copy is None else _read_blocks(self._copy)
        if self._blocks is not None:
            self.file.know(self._blocks)
        else:
            # One of the two has the index, or all there is to know about where it is.
            self.file.ask([(0, BLOCK_BYTES), (self.file.size - 2 * BLOCK_BYTES, self.file.size)])

    def ask(self, times_s: np.ndarray, fps: float) -> None:
        """Have the frames at `times_s` (float64, ascending) fetched, while other things are done."""
        index, ranges = _index_of(self.file)
        if index is None:
            return
        if self._copy is not None and self._blocks is None:
            _write_blocks(self._copy, self.file.blocks(ranges))
        self.file.ask(index.ranges(times_s, fps))


def _copy_of(fs: RemoteFileSystem, path: str, dataset: str) -> Path | None:
    """Return where the blocks of a file that opening it takes are on this node's disk; None if nowhere."""
    identity = file_identity(fs, path)
    folder = None if identity is None else numbers_cache().content(dataset, path, f"{identity}\0{BLOCK_BYTES}")
    return None if folder is None else folder / "index"


def _read_blocks(copy: Path) -> dict[int, bytes] | None:
    """Return blocks by number, as `_write_blocks` wrote them."""
    stored = numbers_cache().load(copy)
    if stored is None:
        return None
    count = struct.unpack_from("<q", stored)[0]
    first = 8 + 8 * count
    return {
        n: stored[first + i * BLOCK_BYTES :][:BLOCK_BYTES]
        for i, n in enumerate(struct.unpack_from(f"<{count}q", stored, 8))
    }


def _write_blocks(copy: Path, blocks: dict[int, bytes]) -> None:
    """Write how many blocks there are, their numbers, they."""
    numbers_cache().write(copy, struct.pack(f"<{1 + len(blocks)}q", len(blocks), *blocks) + b"".join(blocks.values()))


_Box = tuple[bytes, int, int]  # kind; its content's first byte and the one after


def _index_of(file: RemoteFile) -> tuple[VideoIndex | None, list[tuple[int, int]]]:
    """The index, and the bytes that opening the file reads. None of what is no mp4 with frames, as far as is known."""
    try:
        moov = _moov(file)
        if moov is None:
            return None, []
        start, data = moov
        index = _parsed(data)
        head = int(index.offset[0])
    except (struct.error, ValueError, IndexError, OverflowError):
        return None, []  # FFmpeg opens it, and says what is wrong
    return index, [(0, 1), (start, start + len(data)), (head, head + FIRST_BYTES)]


def _moov(file: RemoteFile) -> tuple[int, bytes] | None:
    at = 0
    while at + 8 <= file.size:
        file.seek(at)
        head = file.read(16)
        size, box_type = struct.unpack_from(">I4s", head)
        size = struct.unpack_from(">Q", head, 8)[0] if size == 1 else size or file.size - at
        if size < 8:
            break
        if box_type == b"moov":
            if size > min(MAX_INDEX_BYTES, file.size - at):
                break
            file.seek(at)
            return at, file.read(size)
        at += size
    return None


def _boxes(data: bytes, start: int, end: int) -> Iterator[_Box]:
    while start + 8 <= end:
        size, box_type = struct.unpack_from(">I4s", data, start)
        head = 8
        if size == 1:
            size, head = struct.unpack_from(">Q", data, start + 8)[0], 16
        size = size or end - start
        if size < head or start + size > end:
            raise ValueError("a box that is longer than the one it is in")
        yield box_type, start + head, start + size
        start += size


def _inner(data: bytes, box: _Box, *kinds: bytes) -> _Box | None:
    """The first box of a kind inside another, and so on inwards."""
    inner: _Box | None = box
    for box_type in kinds:
        inner = None if inner is None else next((b for b in _boxes(data, *inner[1:]) if b[0] == box_type), None)
    return inner


def _table(data: bytes, box: _Box | None, columns: int, dtype: str = ">i4", skip: int = 4) -> np.ndarray:
    """A table of some columns behind the number of its entries: int64 (entries, columns); `skip` bytes before that."""
    if box is None:
        raise ValueError("a table is missing")
    count = struct.unpack_from(">I", data, box[1] + skip)[0]
    return (
        np.frombuffer(data[: box[2]], dtype, count * columns, box[1] + skip + 4).reshape(-1, columns).astype(np.int64)
    )


def _spread(runs: np.ndarray, total: int) -> np.ndarray:
    """Runs (how many, value) as values, (total,)."""
    if (runs[:, 0] < 0).any() or runs[:, 0].sum() != total:
        raise ValueError("tables of different lengths")
    return np.repeat(runs[:, 1], runs[:, 0])


def _scale(data: bytes, box: _Box | None) -> int:
    """Units per second, which mvhd and mdhd have in the same place."""
    if box is None:
        raise ValueError("a header is missing")
    scale = struct.unpack_from(">I", data, box[1] + (20 if data[box[1]] else 12))[0]
    if not scale:
        raise ValueError("no unit of time")
    return scale


def _parsed(data: bytes) -> VideoIndex:
    """Raises ValueError, IndexError and struct.error for what makes no sense."""
    moov = next(_boxes(data, 0, len(data)))
    tracks = [box for box in _boxes(data, *moov[1:]) if box[0] == b"trak"]
    handlers = ((track, _inner(data, track, b"mdia", b"hdlr")) for track in tracks)
    track = next((t for t, h in handlers if h and data[h[1] + 8 : h[1] + 12] == b"vide"), None)
    stbl = None if track is None else _inner(data, track, b"mdia", b"minf", b"stbl")
    if track is None or stbl is None:
        raise ValueError("no table of frames")

    sizes = _inner(data, stbl, b"stsz")
    if sizes is None:
        raise ValueError("no sizes of frames")
    uniform_size, count = struct.unpack_from(">II", data, sizes[1] + 4)
    if uniform_size:
        raise ValueError("frames of one size")  # no compressed video has them
    size = _table(data, sizes, 1, skip=8)[:, 0]

    chunks = _inner(data, stbl, b"stco")
    chunk_offset = _table(data, chunks, 1, ">u4") if chunks else _table(data, _inner(data, stbl, b"co64"), 1, ">i8")
    per_chunk = _table(data, _inner(data, stbl, b"stsc"), 3)
    until = np.append(per_chunk[1:, 0], len(chunk_offset) + 1)
    in_chunk = _spread(np.stack([until - per_chunk[:, 0], per_chunk[:, 1]], 1), len(chunk_offset))
    chunk = _spread(np.stack([in_chunk, np.arange(len(in_chunk))], 1), count)
    before = np.cumsum(size) - size
    offset = chunk_offset[chunk, 0] + before - before[(np.cumsum(in_chunk) - in_chunk)[chunk]]

    lasting = _spread(_table(data, _inner(data, stbl, b"stts"), 2), count)
    ticks = np.cumsum(lasting) - lasting
    if later := _inner(data, stbl, b"ctts"):
        ticks = ticks + _spread(_table(data, later, 2), count)
    shown_s = ticks / _scale(data, _inner(data, track, b"mdia", b"mdhd"))
    keys = _inner(data, stbl, b"stss")
    key = _table(data, keys, 1)[:, 0] - 1 if keys else np.arange(count)
    if not count or not len(key) or (offset < 0).any() or (size < 0).any():
        raise ValueError("no frames, or none that decoding may start at")
    if key[0] < 0 or key[-1] >= count or (np.diff(key) <= 0).any():
        raise ValueError("no frames, or none that decoding may start at")
    return VideoIndex(offset, size, shown_s - _edited_s(data, moov, track), key)


def _edited_s(data: bytes, moov: _Box, track: _Box) -> float:
    """Return how much earlier frames are shown than the tables say."""
    edits = _inner(data, track, b"edts", b"elst")
    if edits is None:
        return 0.0
    if data[edits[1]]:
        entries = _table(data, edits, 5)  # version 1: two of 8 bytes, which are small, and a rate
        entries = entries[:, [1, 3]]
    else:
        entries = _table(data, edits, 3)[:, :2]
    begin = next((i for i, (_, at) in enumerate(entries.tolist()) if at >= 0), None)
    if begin is None:
        return 0.0
    scale, movie_scale = _scale(data, _inner(data, track, b"mdia", b"mdhd")), _scale(data, _inner(data, moov, b"mvhd"))
    return float(entries[begin, 1] / scale - entries[:begin, 0].sum() / movie_scale)
