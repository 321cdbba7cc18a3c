"""Find the bytes of requested frames in an mp4 of an object store, so that all can be fetched at once.

The index at an mp4's start or end (ISO/IEC 14496-12, `moov`) lists the bytes of each frame. A node reads it once and
caches it on its disk. The result only saves requests: FFmpeg reads the file, and fetches what is missing.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_finetuning.data.decode import SEEK_AFTER_FRAMES
from vla_finetuning.data.disk_cache import numbers_cache
from vla_finetuning.data.mp4 import Box, boxes, inner_boxes
from vla_finetuning.data.storage import BLOCK_BYTES, RemoteFile, RemoteFileSystem, file_identity

# Largest index that is read: a day at 60 Hz has 60 MB.
MAX_INDEX_BYTES = 64 * 2**20
# Bytes that FFmpeg reads at a time, and hence reads ahead.
READ_BYTES = 32 * 2**10
# Later frames to fetch: those that a decoder needs before it returns a frame, and by which an edit list shifts frames.
LATER_FRAMES = 6
# Bytes of the first frames that FFmpeg reads when it opens a file.
FIRST_BYTES = 2 * READ_BYTES
# Maximum bytes that are fetched beforehand of one file for one window.
MAX_ASKED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class VideoIndex:
    """The N frames of a video in decoding order.

    Attributes:
        offset, size: bytes of each frame in the file, int64 (N,).
        shown_s: presentation time in seconds, without the file's edit list, float64 (N,).
        key: indices of the key frames, int64 (K,).
    """

    offset: np.ndarray
    size: np.ndarray
    shown_s: np.ndarray
    key: np.ndarray

    def ranges(self, times_s: np.ndarray, fps: float) -> list[tuple[int, int]]:
        """Return the byte ranges [start, end) that `VideoReader.read` needs for `times_s` (float64, ascending)."""
        display_order = np.argsort(self.shown_s, kind="stable")
        nearest = np.searchsorted(self.shown_s[display_order], times_s - 0.5 / fps)
        frames = display_order[np.minimum(nearest, len(display_order) - 1)]
        first = self.key[np.maximum(np.searchsorted(self.key, frames, "right") - 1, 0)]
        is_near = np.diff(times_s, prepend=-np.inf) <= SEEK_AFTER_FRAMES / fps
        last = np.minimum(frames + 1 + LATER_FRAMES, len(display_order))
        runs: list[list[int]] = []
        for a, b, continues in zip(first.tolist(), last.tolist(), is_near.tolist(), strict=True):
            if continues and runs:
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
    """A video in an object store. FFmpeg reads `file`, whose index is fetched at once or cached on this node's disk.

    Runs in a read task. `dataset` identifies the dataset in this node's caches.

    Raises:
        FileNotFoundError, StorageError: the store does not return the file.
    """

    def __init__(self, fs: RemoteFileSystem, path: str, dataset: str):
        self.file: RemoteFile = fs.open(path)
        self._blocks = self.file.cached_blocks
        identity = file_identity(fs, path)
        if self._blocks is None and identity is not None:
            # If the dataset's blocks are not cached, those of the index are, in the cache of numbers.
            cache = numbers_cache()
            folder = cache.content(dataset, path, f"{identity}\0{BLOCK_BYTES}")
            self.file.cached_blocks = None if folder is None else (cache, folder)
        # The index, or the box that tells its place, is at the start or at the end.
        self.file.ask([(0, BLOCK_BYTES), (self.file.size - 2 * BLOCK_BYTES, self.file.size)])

    def ask(self, times_s: np.ndarray, fps: float) -> None:
        """Start to fetch the frames at `times_s` (float64, ascending) in the background."""
        index, ranges = _read_index(self.file)
        self.file.ask(ranges)
        self.file.cached_blocks = self._blocks
        if index is not None:
            self.file.ask(index.ranges(times_s, fps))


def _read_index(file: Any) -> tuple[VideoIndex | None, list[tuple[int, int]]]:
    """Return the index, if there is a usable one, and the byte ranges that opening the file reads."""
    moov = next((box for box in boxes(file, 0, file.size) if box[0] == b"moov"), None)
    if moov is None or moov[2] - moov[1] > min(MAX_INDEX_BYTES, file.size - moov[1]):
        return None, []
    _, start, end = moov
    file.seek(start)
    try:
        index = _parse_moov(file.read(end - start))
    except (struct.error, ValueError, IndexError, OverflowError):
        return None, []  # FFmpeg reports the error
    head = int(index.offset[0])
    return index, [(0, 1), (start - 16, end), (head, head + FIRST_BYTES)]


def _find_box(data: bytes, box: Box | None, *kinds: bytes) -> Box | None:
    """Return the first box at a path of types inside another; None if there is none."""
    return None if box is None else next(inner_boxes(io.BytesIO(data), *box[1:], *kinds), None)


def _table(data: bytes, box: Box | None, columns: int, dtype: str = ">i4", skip: int = 4) -> np.ndarray:
    """Return a table of `columns` columns, preceded by `skip` bytes and its length: int64 (entries, columns)."""
    if box is None:
        raise ValueError("a table is missing")
    count = struct.unpack_from(">I", data, box[1] + skip)[0]
    return (
        np.frombuffer(data[: box[2]], dtype, count * columns, box[1] + skip + 4).reshape(-1, columns).astype(np.int64)
    )


def _expand_runs(runs: np.ndarray, total: int) -> np.ndarray:
    """Expand runs (count, value) to values, (total,)."""
    if (runs[:, 0] < 0).any() or runs[:, 0].sum() != total:
        raise ValueError("tables of different lengths")
    return np.repeat(runs[:, 1], runs[:, 0])


def _parse_moov(data: bytes) -> VideoIndex:
    """Return the index in a moov box. Raises ValueError, IndexError, struct.error for invalid content."""
    tracks = inner_boxes(io.BytesIO(data), 0, len(data), b"trak")
    handlers = ((track, _find_box(data, track, b"mdia", b"hdlr")) for track in tracks)
    track = next((t for t, h in handlers if h and data[h[1] + 8 : h[1] + 12] == b"vide"), None)
    stbl = _find_box(data, track, b"mdia", b"minf", b"stbl")
    if track is None or stbl is None:
        raise ValueError("no table of frames")

    sizes = _find_box(data, stbl, b"stsz")
    if sizes is None:
        raise ValueError("no sizes of frames")
    uniform_size, count = struct.unpack_from(">II", data, sizes[1] + 4)
    if uniform_size:
        raise ValueError("frames of one size")  # no compressed video has them
    size = _table(data, sizes, 1, skip=8)[:, 0]

    chunks = _find_box(data, stbl, b"stco")
    chunk_offset = _table(data, chunks, 1, ">u4") if chunks else _table(data, _find_box(data, stbl, b"co64"), 1, ">i8")
    per_chunk = _table(data, _find_box(data, stbl, b"stsc"), 3)
    until = np.append(per_chunk[1:, 0], len(chunk_offset) + 1)
    in_chunk = _expand_runs(np.stack([until - per_chunk[:, 0], per_chunk[:, 1]], 1), len(chunk_offset))
    chunk = _expand_runs(np.stack([in_chunk, np.arange(len(in_chunk))], 1), count)
    before = np.cumsum(size) - size
    offset = chunk_offset[chunk, 0] + before - before[(np.cumsum(in_chunk) - in_chunk)[chunk]]

    durations = _expand_runs(_table(data, _find_box(data, stbl, b"stts"), 2), count)
    ticks = np.cumsum(durations) - durations
    if later := _find_box(data, stbl, b"ctts"):
        ticks = ticks + _expand_runs(_table(data, later, 2), count)
    header = _find_box(data, track, b"mdia", b"mdhd")
    scale = 0 if header is None else struct.unpack_from(">I", data, header[1] + (20 if data[header[1]] else 12))[0]
    if not scale:
        raise ValueError("no unit of time")
    keys = _find_box(data, stbl, b"stss")
    key = _table(data, keys, 1)[:, 0] - 1 if keys else np.arange(count)
    if not count or not len(key) or (offset < 0).any() or (size < 0).any():
        raise ValueError("no frames, or none that decoding may start at")
    if key[0] < 0 or key[-1] >= count or (np.diff(key) <= 0).any():
        raise ValueError("key frames that are not there")
    return VideoIndex(offset, size, ticks / scale, key)
