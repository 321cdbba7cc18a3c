"""Read the requested frames of cameras from the node's cache or a decoder into output arrays.

A camera's frames are in video files, found by time, or are images in data files, found by row.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import PIL

from vla_finetuning.data.dataset import DatasetMetadata, Feature, naming_file
from vla_finetuning.data.decode import VideoReader, decode_depth_image, decode_image, resize_with_pad
from vla_finetuning.data.disk_cache import DiskCache, Key
from vla_finetuning.data.limits import IMAGE_OVERHEAD_BYTES
from vla_finetuning.data.parquet_columns import DataFile, read_images
from vla_finetuning.data.paths import read_whole
from vla_finetuning.data.reader import ReadOptions, frame_spec, height_width
from vla_finetuning.data.storage import RemoteFileSystem, file_identity
from vla_finetuning.data.video_index import RemoteVideo

# Raise with every change of decoded pixels or of the cache's format.
DECODING_VERSION = 5


@dataclass
class FrameRequest:
    """Frames of one episode that are requested from a file.

    `times_s` are times in the video, in seconds, or rows of the images in the data file: float64 (n,), ascending.
    `frame` holds each one's frame_index, int64 (n,), and `target` the indices in `out` of its destinations.
    """

    times_s: np.ndarray
    frame: np.ndarray
    target: list[list[Any]]
    out: np.ndarray
    episode: int

    def records(self, folder: Path) -> tuple[Path, list[Key], list[np.ndarray]]:
        """Return the arguments by which `DiskCache` reads and writes the frames: file, keys, views of `out`."""
        # Keys have exact times: the frame nearest to another time may be another one.
        keys = list(zip(self.frame.tolist(), self.times_s.tolist(), strict=True))
        return folder / str(self.episode), keys, [self.out[target[0]] for target in self.target]

    def put(self, n: int, pixels: np.ndarray) -> None:
        """Write the n-th decoded frame to its destinations, at the output's size."""
        height, width = self.out.shape[-3:-1]
        if pixels.shape[:2] != (height, width):
            pixels = resize_with_pad(pixels, height, width)
        for at in self.target[n]:
            self.out[at] = pixels

    def remaining(self, is_cached: Sequence[bool]) -> FrameRequest | None:
        """Copy the cached frames to their other destinations; return the request for the rest, or None."""
        for (first, *copies), cached in zip(self.target, is_cached, strict=True):
            for at in copies if cached else ():
                self.out[at] = self.out[first]
        missing = np.flatnonzero(~np.array(is_cached))
        target = [self.target[i] for i in missing]
        if not target:
            return None
        return replace(self, times_s=self.times_s[missing], frame=self.frame[missing], target=target)


@dataclass
class CameraFile:
    """A file with frames of a camera, and the frames that are requested of it.

    `folder` is where this node's `cache` holds the file's frames, a file of records for each episode; None for nowhere.
    """

    meta: DatasetMetadata
    key: str
    file: str
    requests: list[FrameRequest]
    cache: DiskCache | None = None
    folder: Path | None = None
    remote: RemoteVideo | None = None

    @property
    def feature(self) -> Feature:
        return self.meta.features[self.key]

    @property
    def is_video(self) -> bool:
        return self.feature.dtype == "video"

    def name(self, *episodes: int) -> str:
        whose = f"episode{'s' * (len(episodes) > 1)} {', '.join(map(str, episodes))}"
        return f"{self.meta.root}: {self.file} (camera {self.key}, {whose})"

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Name the file in errors of a store; data files name themselves in theirs."""
        name = self.name(*(request.episode for request in self.requests))
        try:
            with naming_file(name) if self.is_video else contextlib.nullcontext():
                yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.meta.root}: {self.file} is missing; copy it again") from error

    def read_cached(self, options: ReadOptions) -> None:
        """Fill in the frames that this node caches, and drop them from `requests`."""
        path = self.meta.path(self.file)
        identity = None if options.frame_cache is None else file_identity(self.meta.fs, path)
        if options.frame_cache is None or identity is None:
            return
        self.cache = options.frame_cache.open()
        self.folder = self.cache.content(*frame_cache_key(self.meta, self.key, path, options), identity)
        if self.folder is not None:
            rests = [r.remaining(self.cache.read_records(*r.records(self.folder))) for r in self.requests]
            self.requests = [rest for rest in rests if rest is not None]

    def decode(self, options: ReadOptions) -> None:
        """Decode the requested frames in one forward pass over the file."""
        (self._decode_video if self.is_video else self._decode_images)(options)
        if self.cache is not None and self.folder is not None:
            for request in self.requests:
                self.cache.write_records(*request.records(self.folder))

    def _decode_video(self, options: ReadOptions) -> None:
        height, width = height_width(self.feature)
        with VideoReader(
            self.meta.path(self.file) if self.remote is None else self.remote.file,
            name=self.name(*(request.episode for request in self.requests)),
            height=height,
            width=width,
            fps=self.meta.fps,
            tolerance_s=options.tolerance_s,
            threads=options.threads,
            depth_mm=self.feature.depth_mm,
        ) as video:
            for request in self.requests:
                video.name = self.name(request.episode)
                video.read(request.times_s, request.put)

    def _decode_images(self, options: ReadOptions) -> None:
        feature, path = self.feature, self.meta.path(self.file)
        height, width = height_width(feature)
        identity = file_identity(self.meta.fs, path)
        file = DataFile(self.meta.fs, path, f"{self.meta.root}: {self.file}", self.meta.cache_name, identity)
        # An encoded image is rarely larger than its pixels.
        most_bytes = math.prod(feature.shape) * 4 + IMAGE_OVERHEAD_BYTES
        rows = np.concatenate([request.times_s for request in self.requests]).astype(np.int64)
        places = [(request, n) for request in self.requests for n in range(len(request.times_s))]
        for i, data in read_images(file, feature.key, rows):
            request, n = places[i]
            name = f"{self.name(request.episode)}, row {rows[i]}"
            if isinstance(data, str):
                data = self._read_image(data, most_bytes, name)
                self.folder = None  # the data file's identity says nothing about this file: cache none of its frames
            if feature.is_depth:
                unit = feature.info.get("depth_unit")
                request.put(n, decode_depth_image(data, unit, name=name, height=height, width=width))
            else:
                request.put(n, decode_image(data, name=name, height=height, width=width))

    def _read_image(self, path: str, most_bytes: int, name: str) -> bytes:
        """Read an image file that a data file names, below the dataset's folder or beside the data file."""
        meta = self.meta
        inside = path.removeprefix(f"{meta.base}/")
        folder = self.file.rpartition("/")[0]
        steps = inside.split("/")
        if "://" in path or inside.startswith("/") or ".." in steps:
            raise ValueError(f"{name}: the image is in {path!r:.200}, outside of the dataset; copy it into the dataset")
        places = [inside, f"{folder}/{inside}"]
        place = next((place for place in places if meta.fs.exists(meta.path(place))), None)
        if place is None:
            raise ValueError(
                f"{name}: the image is not embedded in the data file, and its file {path!r:.200} is not below the "
                "dataset's folder: copy the images too, or save the dataset with embedded images"
            )
        return read_whole(meta.fs, meta.base, place, most_bytes)


def read_frames(files: Sequence[CameraFile], options: ReadOptions) -> None:
    """Fill all requests, one decoder at a time, after starting the fetches of all videos in object stores."""
    with contextlib.ExitStack() as opened:
        for file in files:
            with file.naming():
                file.read_cached(options)
                fs = file.meta.fs
                if file.requests and file.is_video and isinstance(fs, RemoteFileSystem):
                    file.remote = RemoteVideo(fs, file.meta.path(file.file), file.meta.cache_name)
                    opened.callback(file.remote.file.close)
        for file in files:
            if file.remote is not None:
                with file.naming():
                    file.remote.ask(np.concatenate([request.times_s for request in file.requests]), file.meta.fps)
        for file in files:
            if file.requests:
                with file.naming():
                    file.decode(options)
                if file.remote is not None:
                    file.remote.file.close()


def frame_cache_key(meta: DatasetMetadata, key: str, path: str, options: ReadOptions) -> tuple[str, str]:
    """Return the `dataset` and `file` arguments of `DiskCache.content` for a camera's frames in a file.

    The first holds all that may change a pixel. The second holds the camera, as a data file has images of several.
    """
    feature = meta.features[key]
    shape, dtype = frame_spec(feature, options.image_size)
    resizing = cv2.__version__ if shape[:2] != height_width(feature) else None
    decoder: tuple[Any, ...]
    if feature.dtype == "video":
        depth = feature.depth_mm
        depth_digest = None if depth is None else hashlib.sha256(depth.tobytes()).hexdigest()
        libraries = sorted(av.library_versions.items())
        decoder = DECODING_VERSION, av.__version__, libraries, resizing, meta.fps, options.tolerance_s, depth_digest
    else:
        path = f"{path}\0{feature.key}"
        decoder = DECODING_VERSION, PIL.__version__, resizing, feature.info.get("depth_unit")
    return f"{meta.cache_name}\0{shape}\0{dtype}\0{decoder!r}", path
