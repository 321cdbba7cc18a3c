"""Decoded frames of videos and images on the node's own disk, so that epochs after the first do not decode.

Frames are stored as rows have them (uint8, at the requested size), and served only where the same would be decoded:
of the same content of a file, at the same time, by the same rules and libraries. The plan does not depend on it.
"""

from __future__ import annotations

from vla_finetuning.data.disk_cache import CacheFolder


class FrameCache(CacheFolder):
    """Where a node keeps decoded frames."""

    remedy = (
        "other frames are decoded in every epoch; free some there, raise VLA_CACHE_GB, or choose another "
        "folder for --dataset.frame_cache"
    )
