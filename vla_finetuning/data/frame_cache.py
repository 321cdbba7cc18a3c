"""Decoded frames of videos and images on the node's own disk, so that epochs after the first do not decode.

Frames are stored as rows have them (uint8, at the requested size), and served only where the same would be decoded:
of the same content of a file, at the same time, by the same rules and libraries. The plan does not depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import av
import cv2
import numpy as np
import PIL

from vla_finetuning.data.node_cache import CacheFolder, Records

# To be raised with every change of what `decode` makes of a file.
RULES = 3


class FrameCache(CacheFolder):
    """Where a node keeps decoded frames."""

    remedy = (
        "other frames are decoded in every epoch; free some there, raise VLA_CACHE_GB, or choose another "
        "folder for --dataset.frame_cache"
    )


@dataclass(frozen=True)
class VideoFile:
    """A file of one camera, and how it is decoded: all that a frame depends on but its time, or row.

    Attributes:
        dataset: tells the dataset from others. path: in it. identity: of the content (`storage.file_identity`).
        fps: frames in a unit of time. tolerance_s: None of images.
        shape, dtype: of a frame in a row. stored: (height, width) in the file.
        depth: of a depth map, `decode.depth_table`, or the unit of images; None for RGB.
    """

    dataset: str
    path: str
    identity: str
    fps: int
    tolerance_s: float | None
    shape: tuple[int, int, int]
    dtype: np.dtype
    stored: tuple[int, int]
    depth: np.ndarray | str | None

    @property
    def place(self) -> str:
        """The dataset, and how its frames are decoded: what `NodeCache` calls a dataset."""
        return f"{self.dataset}\0{self.shape}\0{self.dtype}\0{self.decoder()}"

    def decoder(self) -> str:
        """Whatever else may change a pixel."""
        resizing = cv2.__version__ if self.shape[:2] != self.stored else None
        depth = self.depth
        if isinstance(depth, np.ndarray):
            depth = hashlib.sha256(depth.tobytes()).hexdigest()
        if self.tolerance_s is None:
            return repr((RULES, PIL.__version__, resizing, depth))
        libraries = sorted(av.library_versions.items())
        return repr((RULES, av.__version__, libraries, resizing, self.fps, self.tolerance_s, depth))


def what_prevents(where: FrameCache, videos: Sequence[VideoFile], size: int) -> str | None:
    """Why this node cannot cache all frames of some cameras, `size` bytes; None if it can. `videos`: one of each."""
    try:
        if where.opened().promise(list(dict.fromkeys(video.place for video in videos)), size):
            return None
    except OSError as error:
        return f"cache folder {where.folder}: {error}"
    return (
        f"cache folder {where.folder}: {size / 1e9:.1f} GB of frames do not fit beside what other runs cache there, or "
        "on its disk; raise VLA_CACHE_GB, or choose another --dataset.frame_cache"
    )


class CachedVideo:
    """The frames of one file. Use as a context manager.

    A frame is the record of its time in frames; its tag is its exact time: what lies at another time in the same place
    is another frame.
    """

    def __init__(self, frames: Records, fps: int):
        self._frames, self._cache, self._fps = frames, frames.cache, fps

    @classmethod
    def of(cls, where: FrameCache, video: VideoFile) -> CachedVideo | None:
        """None where there is no place for it."""
        frame_bytes = int(np.prod(video.shape)) * video.dtype.itemsize
        records = Records.of(where.opened(), video.place, video.path, video.identity, frame_bytes)
        return None if records is None else cls(records, video.fps)

    def __enter__(self) -> CachedVideo:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, until the next access."""
        self._frames.close()

    def read(self, times_s: np.ndarray, places: Sequence[np.ndarray]) -> list[int]:
        """Copy the frames at `times_s` (float64, (n,)) to `places`; returns which of them are not here."""
        with self._cache.doing_without():
            if self._cache.works:
                pairs = zip(times_s.tolist(), places, strict=True)
                return [i for i, (time_s, place) in enumerate(pairs) if not self._read_frame(time_s, place)]
        return list(range(len(times_s)))

    def lacks(self, times_s: np.ndarray) -> list[int]:
        """Return which of the frames at `times_s` (float64, ascending, (n,)) are not here, by their marks.

        If all are, what lies between the first and the last is read ahead.
        """
        with self._cache.doing_without():
            if self._cache.works:
                times = times_s.tolist()
                missing = [i for i, time_s in enumerate(times) if not self._frames.mark(self._number(time_s), time_s)]
                if not missing:
                    self._frames.read_ahead(self._number(times[0]), self._number(times[-1]) + 1)
                return missing
        return list(range(len(times_s)))

    def reserve_capacity(self, frames: int) -> bool:
        """Return whether so many frames more may be written."""
        with self._cache.doing_without():
            return self._frames.reserve_capacity(frames)
        return False

    def write(self, time_s: float, frame: np.ndarray) -> None:
        """Store a frame that capacity was reserved for."""
        with self._cache.doing_without():
            self._frames.write(self._number(time_s), _bytes(frame), time_s)

    def _number(self, time_s: float) -> int:
        return round(time_s * self._fps)

    def _read_frame(self, time_s: float, place: np.ndarray) -> bool:
        return self._frames.read(self._number(time_s), _bytes(place), time_s)


def _bytes(frame: np.ndarray) -> memoryview:
    return frame.reshape(-1).view(np.uint8).data
