"""Parse the box structure of mp4 files (ISO/IEC 14496-12). Errors in a file are left to FFmpeg to report."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

# Maximum number of boxes of one level: usually a handful, or two per fragment.
MAX_BOXES = 100_000

# Type, start and end of the content.
Box = tuple[bytes, int, int]


def boxes(file: Any, first: int, last: int) -> Iterator[Box]:
    """Yield the boxes in bytes [first, last) of a file.

    The end of the last box is beyond `last` if the file was cut short, and before it if the file is no mp4.
    """
    for _ in range(MAX_BOXES):
        if last - first < 8:
            return
        file.seek(first)
        header = file.read(16).ljust(16, b"\0")
        size, box_type = struct.unpack_from(">I4s", header)
        begin = first + 8
        if size == 1:
            size, begin = struct.unpack_from(">Q", header, 8)[0], first + 16
        first = first + size if size else last
        if first < begin:
            return
        yield box_type, begin, first


def inner_boxes(file: Any, first: int, last: int, *kinds: bytes) -> Iterator[Box]:
    """Yield the boxes at a path of types in bytes [first, last) of a file, clipped to `last`."""
    for box_type, begin, end in boxes(file, first, last):
        if box_type == kinds[0]:
            inner = (box_type, begin, min(end, last))
            yield from inner_boxes(file, *inner[1:], *kinds[1:]) if kinds[1:] else [inner]
