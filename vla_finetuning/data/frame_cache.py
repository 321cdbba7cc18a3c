"""Decoded frames on the node's own disk, so that epochs after the first do not decode.

Frames are stored as rows have them (uint8, at the requested size), and served only where the same would be decoded:
of the same content of a file, at the same time, by the same rules and libraries. The plan does not depend on it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import cv2
import numpy as np
import xxhash

from vla_finetuning.data.node_cache import NodeCache, node_cache
from vla_finetuning.data.private import open_own

# To be raised with every change of what `decode` makes of a file.
RULES = 1
# What there is of a frame: a checksum, 0 in a hole, and the time it was asked for.
_MARK = struct.Struct("<Qd")
_MOST_FRAMES = 2**32  # of a file; beyond, something is wrong with its times


@dataclass(frozen=True)
class FrameCache:
    """Where a node keeps decoded frames, and how many of them: `gb` is in 10^9 bytes."""

    folder: str
    gb: float

    def opened(self) -> NodeCache:
        return node_cache(
            Path(self.folder),
            int(self.gb * 1e9),
            "other frames are decoded in every epoch; free some there, raise --dataset.frame_cache_gb, or choose "
            "another folder for --dataset.frame_cache",
        )


@dataclass(frozen=True)
class VideoFile:
    """A file of one camera, and how it is decoded: all that a frame depends on but its time.

    Attributes:
        dataset: tells the dataset from others. path: in it. identity: of the content (`storage.file_identity`).
        shape, dtype: of a frame in a row. stored: (height, width) in the file.
        depth_mm: of a depth map, `decode.depth_table`; None for RGB.
    """

    dataset: str
    path: str
    identity: str
    fps: int
    tolerance_s: float
    shape: tuple[int, int, int]
    dtype: np.dtype
    stored: tuple[int, int]
    depth_mm: np.ndarray | None

    def decoder(self) -> str:
        """Whatever else may change a pixel."""
        resizing = cv2.__version__ if self.shape[:2] != self.stored else None
        depth = None if self.depth_mm is None else hashlib.sha256(self.depth_mm.tobytes()).hexdigest()
        libraries = sorted(av.library_versions.items())
        return repr((RULES, av.__version__, libraries, resizing, self.fps, self.tolerance_s, depth))


class CachedVideo:
    """The frames of one file. Use as a context manager.

    Frame n is at place n of a file with holes, n being its time in frames; a second file says which there are. The mark
    is written after the frame, and is what makes it one: it holds a checksum, so that a frame whose writer was killed,
    that two write at once, or that the disk lost is decoded again. It holds the exact time too: what lies at another
    time in the same place is another frame. Files are read and written, not mapped: a full disk or one that is gone
    would otherwise kill the process.
    """

    FRAMES, MARKS = ".frames", ".marks"

    def __init__(self, cache: NodeCache, path: Path, video: VideoFile):
        self._cache, self._path, self._fps = cache, path, video.fps
        self._frame_bytes = int(np.prod(video.shape)) * video.dtype.itemsize
        self._files: tuple[int, int] | None = None

    @classmethod
    def of(cls, where: FrameCache, video: VideoFile) -> CachedVideo | None:
        """None where there is no place for it."""
        cache, found = where.opened(), None
        with cache.doing_without():
            if cache.works:
                decoder = video.decoder()
                place = cache.place(f"{video.dataset}\0{video.shape}\0{video.dtype}\0{decoder}")
                file, content = (
                    hashlib.sha256(text.encode()).hexdigest()[:32] for text in (video.path, video.identity)
                )
                found = cls(cache, place / f"{file}-{content}", video)
        return found

    def __enter__(self) -> CachedVideo:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files, until they are wanted again."""
        for descriptor in self._files or ():
            os.close(descriptor)
        self._files = None

    def read(self, times_s: np.ndarray, places: Sequence[np.ndarray]) -> list[int]:
        """Copy the frames at `times_s` (float64, (n,)) to `places`; returns which of them are not here."""
        with self._cache.doing_without():
            if self._cache.works and self._open():
                pairs = zip(times_s.tolist(), places, strict=True)
                return [i for i, (time_s, place) in enumerate(pairs) if not self._read_frame(time_s, place)]
        return list(range(len(times_s)))

    def lacks(self, times_s: np.ndarray) -> list[int]:
        """Which of the frames at `times_s` (float64, ascending, (n,)) are not here, by their marks.

        If all are, what lies between the first and the last is read ahead, where the system supports it (Linux).
        """
        with self._cache.doing_without():
            if self._cache.works and self._open():
                assert self._files is not None
                marks = [self._mark(time_s) for time_s in times_s.tolist()]
                missing = [i for i, (_, checksum) in enumerate(marks) if not checksum]
                if not missing and hasattr(os, "posix_fadvise"):
                    first, last = marks[0][0] * self._frame_bytes, (marks[-1][0] + 1) * self._frame_bytes
                    os.posix_fadvise(self._files[0], first, last - first, os.POSIX_FADV_WILLNEED)
                return missing
        return list(range(len(times_s)))

    def reserve_capacity(self, frames: int) -> bool:
        """Whether so many frames more may be written."""
        with self._cache.doing_without():
            if self._cache.reserve_capacity(frames * (self._frame_bytes + _MARK.size)):
                return self._open(create=True)
        return False

    def write(self, time_s: float, frame: np.ndarray) -> None:
        """Store a frame, if it got space."""
        number = self._number(time_s)
        with self._cache.doing_without():
            if self._cache.takes and self._files is not None and number < _MOST_FRAMES:
                frames, marks = self._files
                content = frame.reshape(-1).view(np.uint8).data
                written = os.pwrite(frames, content, number * self._frame_bytes)
                if written == self._frame_bytes:
                    mark = _MARK.pack(xxhash.xxh3_64_intdigest(content) or 1, time_s)
                    os.pwrite(marks, mark, number * _MARK.size)

    def _number(self, time_s: float) -> int:
        return round(time_s * self._fps)

    def _open(self, create: bool = False) -> bool:
        """Whether the files are there, and open. When they are made, those of an earlier content of the file go."""
        if self._files is None:
            names = [self._path.with_name(self._path.name + suffix) for suffix in (self.FRAMES, self.MARKS)]
            if create and not names[1].exists():
                for old in self._path.parent.glob(f"{self._path.name.partition('-')[0]}-*"):
                    if old not in names:
                        old.unlink(missing_ok=True)
            if create or names[1].exists():
                frames = open_own(names[0], os.O_RDWR | os.O_CREAT)
                try:
                    self._files = frames, open_own(names[1], os.O_RDWR | os.O_CREAT)
                except OSError:
                    os.close(frames)
                    raise
        return self._files is not None

    def _mark(self, time_s: float) -> tuple[int, int]:
        """The number of the frame at a time, and its checksum; 0 where there is none."""
        assert self._files is not None
        number = self._number(time_s)
        mark = os.pread(self._files[1], _MARK.size, number * _MARK.size) if number < _MOST_FRAMES else b""
        checksum, marked_s = _MARK.unpack(mark) if len(mark) == _MARK.size else (0, 0.0)
        return number, checksum if marked_s == time_s else 0

    def _read_frame(self, time_s: float, place: np.ndarray) -> bool:
        assert self._files is not None
        number, checksum = self._mark(time_s)
        content = place.reshape(-1).view(np.uint8).data
        if not checksum or os.preadv(self._files[0], [content], number * self._frame_bytes) != self._frame_bytes:
            return False
        return (xxhash.xxh3_64_intdigest(content) or 1) == checksum
