"""Decoded frames of videos and images on the node's own disk, so that epochs after the first do not decode.

Frames are stored as rows have them (uint8, at the requested size), and served only where the same would be decoded:
of the same content of a file, at the same time, by the same rules and libraries. The plan does not depend on it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import av
import cv2
import numpy as np
import PIL

from vla_finetuning.data.disk_cache import CacheFolder

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
        """The dataset, and how its frames are decoded: what `DiskCache.content` calls a dataset."""
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
