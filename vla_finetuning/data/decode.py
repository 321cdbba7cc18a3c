"""Decode video frames and encoded images into arrays owned by the caller.

Pixels equal those of LeRobot's pyav backend and of its images. The module uses FFmpeg, Pillow and OpenCV.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
from av.video.reformatter import VideoReformatter
from kornia_rs.io import decode_image_png_u8
from PIL import ExifTags, Image, ImageOps

from vla_finetuning.data.mp4 import inner_boxes
from vla_finetuning.files import refuse_pointer

# Formats of datasets. Pillow's others are a risk: EPS starts another program, some unpack without limit.
IMAGE_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP")
# Start of a PNG. Width, height, bits of a value (8) and kind of pixels (2: RGB) follow.
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
# Chunks of a PNG that may hold an orientation: EXIF, also as text, and XMP.
_ORIENTATION_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
# FFmpeg's name of the demuxer of mp4 and mov.
VIDEO_FORMAT = "mp4"
# Number of frames up to which decoding on is cheaper than seeking to a key frame.
SEEK_AFTER_FRAMES = 8

# Least limit of pixels that a decoder may allocate for a frame: codecs pad their buffers, small frames more than a
# hundredfold. The size of each frame is checked by itself.
MAX_BUFFER_PIXELS = 2**20

_TimedFrame = tuple[float, av.VideoFrame]  # presentation time in seconds


def check_samples(source: Any, name: str) -> None:
    """Refuse an mp4 that claims more samples of one constant size than it has bytes for: FFmpeg would list them.

    Layout: ISO/IEC 14496-12, 8.7.3. Other tables have an entry per sample, so their size is bounded by the file's.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:  # reported when the file is decoded
        file = opened.enter_context(open(source, "rb")) if isinstance(source, (str, Path)) else source
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        refuse_pointer(name, file.read(64))
        for _, first, last in inner_boxes(file, 0, size, b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsz"):
            file.seek(first)
            _, sample_bytes, count = struct.unpack(">III", file.read(min(12, last - first)).ljust(12, b"\0"))
            if sample_bytes * count > size:
                raise ValueError(
                    f"{name}: claims {count:,} frames of {sample_bytes:,} bytes in a file of {size:,}: it is "
                    "damaged; copy it again"
                )
        file.seek(0)


class VideoReader:
    """Decoder of one mp4, read forward. Use as a context manager.

    Args:
        source: path, or seekable binary file object.
        height, width: size of the frames in the dataset's metadata, in pixels, checked before decoding and for each
            frame. FFmpeg refuses far larger frames before it allocates them.
        tolerance_s: largest distance of a frame from its row's timestamp, in seconds, as in LeRobot; the rounding of
            float32 timestamps is added.
        threads: codec threads, one per CPU of the task.
        depth_mm: table from `depth_table` for a depth map; None for RGB.
    """

    def __init__(
        self,
        source: Any,
        *,
        name: str,
        height: int,
        width: int,
        fps: float,
        tolerance_s: float,
        threads: int,
        depth_mm: np.ndarray | None = None,
    ):
        self.name = name
        self.shape = (height, width)
        self._fps = fps
        self._tolerance_s = tolerance_s
        self._depth_mm = depth_mm
        # FFmpeg decodes some frames when it opens a file, so the limit is set before.
        options = {"max_pixels": str(max(MAX_BUFFER_PIXELS, 4 * height * width))}
        check_samples(source, name)
        try:
            # Only the format of datasets: FFmpeg would follow playlists to other files or addresses, and has hundreds
            # of hardly maintained formats.
            self._container = av.open(source, format=VIDEO_FORMAT, options=options, metadata_errors="replace")
            self._stream = self._container.streams.video[0]
        except (av.FFmpegError, IndexError) as error:
            _raise_disk_error(error, name)
            raise ValueError(
                f"{name}: not a readable video, mp4 or mov ({error}); it may be truncated: copy it again"
            ) from error
        try:
            if self._stream.codec_context is None:
                raise ValueError(f"{name}: FFmpeg has no decoder of its codec: copy it again, or encode it as H.264")
            self._check_size(self._stream.codec_context.height, self._stream.codec_context.width)
        except ValueError:
            self._container.close()
            raise
        self._stream.codec_context.options = options
        self._stream.codec_context.thread_count = threads
        self._reformatter = VideoReformatter()
        self._half_tick_s = float(self._stream.time_base) / 2
        self._frames: Any = None
        self._current: _TimedFrame | None = None
        self._requested_s = 0.0  # timestamp for which `_current` was decoded
        self._lookahead: _TimedFrame | None = None  # a decoded frame after `_current`
        self.frames_decoded = 0

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def read(self, timestamps_s: np.ndarray, sink: Callable[[int, np.ndarray], None]) -> None:
        """Decode the frames at `timestamps_s` (float64, ascending, (n,)) and call `sink(i, pixels)` for each.

        `pixels` are uint8 (H, W, 3), or float32 (H, W, 1) for a depth map, and valid only during the call.

        Raises:
            ValueError: a frame is missing or farther than the tolerance from its timestamp; names the file and time.
            OSError: the disk or the object store does not return the file.
        """
        try:
            for i, requested_s in enumerate(timestamps_s):
                sink(i, self._pixels(self._frame_at(float(requested_s))))
        except av.FFmpegError as error:
            _raise_disk_error(error, self.name)
            raise ValueError(
                f"{self.name}: decoding failed near {requested_s:.3f} s ({error}); the file is damaged, truncated or "
                f"holds frames larger than {self.shape[0]}x{self.shape[1]}: copy it again, or leave its episodes out "
                "with --dataset.episodes"
            ) from error

    def _frame_at(self, requested_s: float) -> av.VideoFrame:
        # Data files store float32 timestamps. Hours into a video, their spacing exceeds the tolerance.
        rounded_s = float(np.spacing(np.float32(requested_s))) / 2
        # A frame within this distance counts as the nearest.
        tie_s = rounded_s + self._half_tick_s
        nearest = self._current
        # A frame that was the nearest to an earlier timestamp stays the nearest until its own time.
        is_ahead = nearest is not None and nearest[0] > requested_s + tie_s and requested_s < self._requested_s
        if nearest is None or is_ahead or requested_s - nearest[0] > SEEK_AFTER_FRAMES / self._fps:
            nearest = self._seek(requested_s, tie_s)
        end = False
        while nearest[0] < requested_s - tie_s:
            later = self._next()
            if later is None:
                end = True
                break
            if later[0] - requested_s >= requested_s - nearest[0]:
                self._lookahead = later
                break
            nearest = later
        self._current, self._requested_s = nearest, requested_s
        if abs(requested_s - nearest[0]) <= self._tolerance_s + rounded_s:
            return nearest[1]
        if end:
            raise ValueError(
                f"{self.name}: no frame at {requested_s:.4f} s; the video ends at {nearest[0]:.4f} s, before the "
                "metadata says: it is truncated or the metadata is wrong; copy the file again or repair the dataset"
            )
        raise ValueError(
            f"{self.name}: no frame at {requested_s:.4f} s; the nearest is at {nearest[0]:.4f} s, farther than the "
            f"tolerance of {self._tolerance_s} s: the timestamps in the data and in the video disagree; repair the "
            "dataset, or raise --tolerance_s if a nearby frame will do"
        )

    def _seek(self, requested_s: float, tie_s: float) -> _TimedFrame:
        """Return the frame at a key frame that is not after `requested_s`, or else the video's first."""
        # FFmpeg seeks by decoding time. With B-frames, the key frame may be shown after the requested frame.
        for back_s in (0.0, 1.0, 10.0, np.inf):
            target_s = max(0.0, requested_s + tie_s - back_s)
            offset = int(target_s / self._stream.time_base)
            self._container.seek(offset, backward=True, any_frame=False, stream=self._stream)
            self._frames, self._lookahead = self._container.decode(self._stream), None
            frame = self._next()
            if target_s == 0 or (frame is not None and frame[0] <= requested_s + tie_s):
                break
        if frame is None:
            raise ValueError(f"{self.name}: holds no frames; it is truncated: copy it again")
        return frame

    def _next(self) -> _TimedFrame | None:
        if self._lookahead is not None:
            frame, self._lookahead = self._lookahead, None
            return frame
        for frame in self._frames:
            self.frames_decoded += 1
            if frame.pts is not None:
                return float(frame.pts * self._stream.time_base), frame
        return None

    def _pixels(self, frame: av.VideoFrame) -> np.ndarray:
        self._check_size(frame.height, frame.width)
        if self._depth_mm is not None:
            plane = self._reformatter.reformat(frame, format="gray12le").planes[0]
            codes = np.frombuffer(plane, "<u2").reshape(frame.height, plane.line_size // 2)[:, : frame.width, None]
            return self._depth_mm.take(codes, mode="clip")
        plane = self._reformatter.reformat(frame, format="rgb24").planes[0]
        rows = np.frombuffer(plane, np.uint8).reshape(frame.height, plane.line_size)
        return rows[:, : frame.width * 3].reshape(frame.height, frame.width, 3)

    def _check_size(self, height: int, width: int) -> None:
        if (height, width) != self.shape:
            raise ValueError(
                f"{self.name}: frames are {height}x{width}, the metadata (meta/info.json) says "
                f"{self.shape[0]}x{self.shape[1]}: the file does not belong to this dataset"
            )


def _raise_disk_error(error: Exception, name: str) -> None:
    """Raise an error of the disk (such as a lost network drive), which is no damage of the file."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        raise OSError(error.errno, f"{name}: {error.strerror}") from error


def depth_table(info: Mapping[str, Any], *, name: str) -> np.ndarray:
    """Return the depths of the 12-bit codes of a depth video: float32 (4096,), in millimetres, by LeRobot's function.

    Runs on the driver (it imports LeRobot). `info` is the feature's entry in meta/info.json.
    """
    try:
        import torch
        from lerobot.configs.video import DepthEncoderConfig
        from lerobot.datasets.depth_utils import dequantize_depth

        codes = torch.arange(4096).reshape(1, 64, 64)
        config = DepthEncoderConfig.from_video_info(dict(info))
        scale = {key: getattr(config, key) for key in ("depth_min", "depth_max", "shift", "use_log")}
        table = np.asarray(dequantize_depth(codes, **scale)).ravel()
    except ImportError as error:
        raise ImportError(f"{name}: depth needs pip install '.[train]'; else leave it out by camera_keys") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"{name}: the depths that info states make no sense ({error}); repair meta/info.json"
        ) from error
    if not np.isfinite(table).all():
        raise ValueError(f"{name}: the depths that info states are not finite: {scale}; repair meta/info.json")
    return table


def decode_depth_image(data: bytes | None, unit: str | None, *, name: str, height: int, width: int) -> np.ndarray:
    """Decode a depth map (TIFF, 16-bit PNG) to float32 (H, W, 1), in millimetres as LeRobot's.

    `unit` is the dataset's unit, "m" or "mm"; None keeps the values.
    """
    depth = _open_image(data, ("I;16", "I;16B", "F"), "a depth map of uint16 or float32", name, height, width)
    depth = depth.astype(np.float32)[..., None]
    return depth * np.float32(1000) if unit == "m" else depth


def decode_image(data: bytes | None, *, name: str, height: int, width: int) -> np.ndarray:
    """Decode an image (PNG, JPEG, ...) to uint8 (H, W, 3), turned by its EXIF orientation: LeRobot's pixels x 255."""
    plain = data is not None and data[:26] == _PNG + struct.pack(">IIBB", width, height, 8, 2)
    if data is not None and plain and not any(chunk_type in _ORIENTATION_CHUNKS for chunk_type in _png_chunks(data)):
        # Takes a third of Pillow's time. Pillow reads what kornia refuses (a wrong checksum), or raises the error.
        with contextlib.suppress(Exception):
            return decode_image_png_u8(data, (height, width), "rgb")
    return _open_image(data, ("RGB",), "8-bit RGB", name, height, width)


def _png_chunks(data: bytes) -> Iterator[bytes]:
    at = 8
    while at + 8 <= len(data):
        size, chunk_type = struct.unpack_from(">I4s", data, at)
        yield chunk_type
        at += size + 12


def _open_image(
    data: bytes | None, modes: Sequence[str], expected: str, name: str, height: int, width: int
) -> np.ndarray:
    """Return the pixels of an image whose header has one of PIL's `modes` and the expected size.

    The image is turned as `datasets.Image.decode_example` does, which LeRobot reads images by.
    """
    if data is None:
        raise ValueError(
            f"{name}: the image is not embedded in the parquet file; save the dataset with embedded images"
        )

    def check(size: Sequence[int], allowed: Sequence[tuple[int, int]]) -> None:
        if size not in allowed:
            raise ValueError(f"{name}: image is {size[1]}x{size[0]}, the metadata says {height}x{width}")

    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        check(image.size, [(width, height), (height, width)])  # as it is stored
        if image.mode not in modes:
            raise ValueError(
                f"{name}: expected {expected}, found an image of mode {image.mode}: convert the images, or leave the "
                "camera out with --dataset.camera_keys"
            )
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            image = ImageOps.exif_transpose(image)
        check(image.size, [(width, height)])
        return np.asarray(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{name}: image is far larger than the {height}x{width} of the metadata ({error})") from error
    except (OSError, SyntaxError, struct.error) as error:
        raise ValueError(f"{name}: damaged image ({error}), or none of {', '.join(IMAGE_FORMATS)}") from error


def resize_with_pad(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8 (H, W, 3) to fit (height, width, 3), centred and padded with black, as PI0.5 does.

    Bilinear without antialiasing, as LeRobot's `resize_with_pad_torch` on float images. Values differ from it by at
    most one level (1/255), a fifth of a level on average, mostly by the rounding to uint8.
    """
    ratio = max(rgb.shape[1] / width, rgb.shape[0] / height)
    inner = int(rgb.shape[0] / ratio), int(rgb.shape[1] / ratio)
    if not all(inner):
        raise ValueError(f"a frame of {rgb.shape[0]}x{rgb.shape[1]} pixels vanishes in {height}x{width}")
    pad_top, pad_left = (height - inner[0]) // 2, (width - inner[1]) // 2
    canvas = np.zeros((height, width, 3), np.uint8)
    canvas[pad_top : pad_top + inner[0], pad_left : pad_left + inner[1]] = cv2.resize(
        rgb, (inner[1], inner[0]), interpolation=cv2.INTER_LINEAR
    )
    return canvas
