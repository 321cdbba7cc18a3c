"""Frames of cameras: out of the node's cache or the decoder, to where rows want them; or named, to be filled in later.

A camera's frames are in videos, each at a time, or images in data files, each in a row.

Rows that are used on the node they were read on need not carry their frames through the object store, which takes
most of a cached frame's time. They name them, the read task makes sure that they are cached, and where batches are
made each frame is copied once (`Frames`). Frames that cannot be cached are carried: decoding is for read tasks.

Two things look as if they could go, and cannot. Names have bytes that nobody reads (`_NAME_SHARE`), because Ray Data
reads ahead until so many bytes are waiting: of bare names that would be more frames than memory has pages for. And
`Frames` can decode, because between the read task and the batch somebody may empty the folder, or the disk may lose a
page: then only the training process has the row.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_finetuning.data.decode import VideoReader, decode_depth_image, decode_image, resize_with_pad
from vla_finetuning.data.frame_cache import CachedVideo, VideoFile
from vla_finetuning.data.limits import IMAGE_OVERHEAD_BYTES
from vla_finetuning.data.metadata import DatasetMetadata, Feature
from vla_finetuning.data.parquet_columns import DataFile, read_images
from vla_finetuning.data.paths import read_whole
from vla_finetuning.data.reader import DatasetFiles, Decoding, frame_of, height_width
from vla_finetuning.data.reused_memory import empty
from vla_finetuning.data.storage import RemoteFileSystem, file_identity, naming_file
from vla_finetuning.data.video_index import RemoteVideo

logger = logging.getLogger(__name__)

# What names a frame: a dataset, the number of a file among its camera's, and when it is shown in that file, or its row.
_NAME = np.dtype([("dataset", "<i8"), ("file", "<i8"), ("time_s", "<f8")])
# In place of a dataset, where a row's dataset lacks the camera.
NO_DATASET = -1
# A name takes as many bytes as this part of its frame: Ray Data reads ahead by bytes, and what is read ahead should
# still be in memory when it is wanted.
_NAME_SHARE = 1 / 16
# Of files that frames were copied from, so many stay open for the next batch: two descriptors each.
_OPEN_FILES = 128
_THREADS = 2


# ---- carried -----------------------------------------------------------------------------------------------------


@dataclass
class Wanted:
    """Frames of a file that are wanted.

    Attributes:
        times_s: when they are shown in the video, or the images' rows in the data file; float64 (n,), ascending.
        target: where each goes in `out`, maybe to several places. out: None where they are only cached.
        episode: whose they are, for errors; None where that is not known.
    """

    times_s: np.ndarray
    target: list[list[Any]] = field(default_factory=list)
    out: np.ndarray | None = None
    episode: int | None = None


# Puts the n-th wanted frame where it belongs.
_Sink = Callable[[int, np.ndarray], None]


@dataclass
class CameraFile:
    """A file with frames of a camera, and what is wanted of it.

    `stored`: whether all frames that are only to be cached are.
    """

    reader: DatasetFiles
    key: str
    file: str
    wanted: list[Wanted]
    cached: CachedVideo | None = None
    remote: RemoteVideo | None = None
    stored: bool = True

    @property
    def feature(self) -> Feature:
        return self.reader.features[self.key]

    @property
    def is_video(self) -> bool:
        return self.feature.dtype == "video"

    def name(self, *episodes: int | None) -> str:
        """Return the name that errors use."""
        known = [e for e in episodes if e is not None]
        whose = f", episode{'s' * (len(known) > 1)} {', '.join(map(str, known))}" if known else ""
        return f"{self.reader.root}: {self.file} (camera {self.key}{whose})"

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of a store name the file; those of data files do so by themselves."""
        name = self.name(*(w.episode for w in self.wanted))
        try:
            with naming_file(name) if self.is_video else contextlib.nullcontext():
                yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.reader.root}: {self.file} is missing; copy it again") from error

    def look(self) -> None:
        """Fill in the frames that are cached: from now on only those are wanted that are not."""
        self.wanted = [left for w in self.wanted if (left := self._left(w)) is not None]

    def _left(self, w: Wanted) -> Wanted | None:
        if self.cached is None:
            self.stored &= w.out is not None
            return w if w.out is not None else None
        if w.out is None:
            missing = self.cached.lacks(w.times_s)
        else:
            missing = _place_cached(self.cached, w.times_s, w.target, w.out)
        target = [w.target[i] for i in missing] if w.target else []
        return Wanted(w.times_s[missing], target, w.out, w.episode) if missing else None

    def open(self) -> Any:
        """For FFmpeg: a path, which it reads itself, or a file."""
        return self.reader.path(self.file) if self.remote is None else self.remote.file

    def decode(self, decoding: Decoding) -> None:
        """Fill in the frames that are wanted: the file is walked forward once."""
        with self.cached or contextlib.nullcontext():
            sinks = [(w, sink) for w in self.wanted if (sink := self._sink(w, decoding)) is not None]
            if sinks:
                (self._decode_video if self.is_video else self._decode_images)(sinks, decoding)
            for w in self.wanted:
                if w.out is None:
                    self.stored &= self.cached is not None and not self.cached.lacks(w.times_s)

    def _sink(self, w: Wanted, decoding: Decoding) -> _Sink | None:
        """None where frames would only be cached, and there is no space for them."""
        keep = self.cached if self.cached is not None and self.cached.reserve_capacity(len(w.times_s)) else None
        if w.out is not None:
            out, target = w.out, w.target
        elif keep is not None:
            # Each over the one before it: it is only cached.
            out, target = empty(*frame_of(self.feature, decoding.image_size)), [[()]] * len(w.times_s)
        else:
            return None

        def sink(n: int, pixels: np.ndarray) -> None:
            put_frame(pixels, target[n], out)
            if keep is not None:
                keep.write(w.times_s[n], out[target[n][0]])

        return sink

    def _decode_video(self, sinks: Sequence[tuple[Wanted, _Sink]], decoding: Decoding) -> None:
        height, width = height_width(self.feature)
        with VideoReader(
            self.open(),
            name=self.name(*(w.episode for w, _ in sinks)),
            height=height,
            width=width,
            fps=self.reader.fps,
            tolerance_s=decoding.tolerance_s,
            threads=decoding.threads,
            depth_mm=self.reader.depth_mm.get(self.key),
        ) as video:
            for w, sink in sinks:
                video.name = self.name(w.episode)
                video.read(w.times_s, sink)

    def _decode_images(self, sinks: Sequence[tuple[Wanted, _Sink]], decoding: Decoding) -> None:
        feature, path = self.feature, self.reader.path(self.file)
        height, width = height_width(feature)
        file = DataFile(self.reader.fs, path, f"{self.reader.root}: {self.file}", self.reader.dataset)
        # As 4 bytes for a number; an encoded image is rarely larger than its pixels.
        row_bytes = math.prod(feature.shape) * 4 + IMAGE_OVERHEAD_BYTES
        rows = np.concatenate([w.times_s for w, _ in sinks]).astype(np.int64)
        places = [(w, sink, n) for w, sink in sinks for n in range(len(w.times_s))]
        for i, data in read_images(file, feature.key, row_bytes, rows, file_identity(self.reader.fs, path)):
            w, sink, n = places[i]
            name = f"{self.name(w.episode)}, row {rows[i]}"
            if isinstance(data, str):
                data = self._read_image(data, row_bytes, name)
            if feature.is_depth:
                unit = feature.info.get("depth_unit")
                sink(n, decode_depth_image(data, unit, name=name, height=height, width=width))
            else:
                sink(n, decode_image(data, name=name, height=height, width=width))

    def _read_image(self, path: str, most_bytes: int, name: str) -> bytes:
        """Read an image that the data file names: below the dataset's folder, or beside the data file."""
        reader = self.reader
        inside = path.removeprefix(f"{reader.base}/")
        beside = self.file.rpartition("/")[0]
        steps = inside.split("/")
        if "://" in path or inside.startswith("/") or ".." in steps:
            raise ValueError(f"{name}: the image is in {path!r:.200}, outside of the dataset; copy it into its folder")
        places = [inside, f"{beside}/{inside}"]
        place = next((place for place in places if reader.fs.exists(reader.path(place))), None)
        if place is None:
            raise ValueError(
                f"{name}: the image is not embedded in the data file, and its file {path!r:.200} is not below the "
                "dataset's folder: copy the images too, or save the dataset with embedded images"
            )
        return read_whole(reader.fs, reader.base, place, most_bytes)


def read_frames(files: Sequence[CameraFile], decoding: Decoding) -> None:
    """Do what is wanted: one decoder at a time. What is wanted of a store's videos is asked for before the first."""
    with contextlib.ExitStack() as opened:
        for file in files:
            with file.naming():
                file.cached = cached_video(file.reader, file.key, file.file, decoding)
                with file.cached or contextlib.nullcontext():
                    file.look()
                fs = file.reader.fs
                if file.wanted and file.is_video and isinstance(fs, RemoteFileSystem):
                    file.remote = RemoteVideo(fs, file.reader.path(file.file), file.reader.dataset)
                    opened.callback(file.remote.file.close)
        for file in files:
            if file.remote is not None:
                with file.naming():
                    file.remote.ask(np.concatenate([w.times_s for w in file.wanted]), file.reader.fps)
        for file in files:
            if file.wanted:
                with file.naming():
                    file.decode(decoding)
                if file.remote is not None:
                    file.remote.file.close()


def cached_video(reader: DatasetFiles, key: str, file: str, decoding: Decoding) -> CachedVideo | None:
    """The frames of a file that this node has decoded before; None without a cache."""
    if decoding.frame_cache is None:
        return None
    path = reader.path(file)
    identity = file_identity(reader.fs, path)
    if identity is None:
        return None
    return CachedVideo.of(decoding.frame_cache, video_file(reader, key, path, identity, decoding))


def video_file(reader: DatasetFiles, key: str, path: str, identity: str, decoding: Decoding) -> VideoFile:
    """Return what tells the frames of a camera's file from others. A data file holds images of several cameras."""
    feature = reader.features[key]
    shape, dtype = frame_of(feature, decoding.image_size)
    is_video = feature.dtype == "video"
    return VideoFile(
        dataset=reader.dataset,
        path=path if is_video else f"{path}\0{feature.key}",
        identity=identity,
        fps=reader.fps if is_video else 1,
        tolerance_s=decoding.tolerance_s if is_video else None,
        shape=shape,
        dtype=dtype,
        stored=height_width(feature),
        depth=reader.depth_mm.get(key) if is_video else feature.info.get("depth_unit"),
    )


def _place_cached(cached: CachedVideo, times_s: np.ndarray, target: list[list[Any]], out: np.ndarray) -> list[int]:
    """Put the frames that the cache has where they belong; returns which are still to be decoded."""
    missing = cached.read(times_s, [out[places[0]] for places in target])
    decoded = set(missing)
    for i, places in enumerate(target):
        for at in places[1:] if i not in decoded else ():
            out[at] = out[places[0]]
    return missing


def put_frame(pixels: np.ndarray, places: Sequence[Any], out: np.ndarray) -> None:
    """Put a decoded frame where it belongs in the output, at the output's size."""
    height, width = out.shape[-3:-1]
    if pixels.shape[:2] != (height, width):
        pixels = resize_with_pad(pixels, height, width)
    for at in places:
        out[at] = pixels


# ---- named -------------------------------------------------------------------------------------------------------


def name_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, int, int]:
    """Return the shape of the array that names a frame of this shape: a picture of one column, so that it passes for
    one.
    """
    size = max(_NAME.itemsize, math.prod(shape) * dtype.itemsize * _NAME_SHARE)
    return math.ceil(size / shape[-1] / dtype.itemsize), 1, shape[-1]


def names(dataset: int, file: int, times_s: np.ndarray, feature: Feature, decoding: Decoding) -> np.ndarray:
    """Return the names of frames that are shown at `times_s`, float64 (...): arrays of `name_shape`, (..., N, 1, C)."""
    shape, dtype = frame_of(feature, decoding.image_size)
    named = name_shape(shape, dtype)
    found = np.zeros((times_s.size, math.prod(named) * dtype.itemsize), np.uint8)
    name = np.empty(times_s.size, _NAME)
    name["dataset"], name["file"], name["time_s"] = dataset, file, times_s.ravel()
    found[:, : _NAME.itemsize] = name.view(np.uint8).reshape(len(name), -1)
    return found.view(dtype).reshape(*times_s.shape, *named)


def is_frame(values: np.ndarray) -> bool:
    """Return whether a camera's column has frames, and not names, which are one column wide."""
    return values.shape[-2] > 1


def no_frame(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return what stands for a black frame of this shape where frames are named."""
    named = name_shape(shape, dtype)
    found = np.zeros(math.prod(named) * dtype.itemsize, np.uint8)
    found[: _NAME.itemsize] = np.array([(NO_DATASET, 0, 0.0)], _NAME).view(np.uint8)
    return found.view(dtype).reshape(named)


# A camera, a dataset, and the number of a file among the camera's.
_File = tuple[str, int, int]


@dataclass
class _Asked:
    """Frames that a batch wants of a file: by when they are shown, their places in `out`."""

    out: np.ndarray
    times: dict[float, list[Any]] = field(default_factory=dict)

    def wanted(self) -> Wanted:
        times = sorted(self.times)
        return Wanted(np.array(times), [self.times[time_s] for time_s in times], self.out)


class Frames:
    """Fills in the frames that batches name, on the node that keeps them. Threads may share it.

    Args:
        metas: the datasets.
        cameras: the columns that may hold names, and what each camera is called in the datasets.
        decoding: as in the read tasks.
    """

    def __init__(self, metas: Sequence[DatasetMetadata], cameras: Mapping[str, str], decoding: Decoding):
        self._readers = [DatasetFiles.of(meta, set(cameras.values())) for meta in metas]
        self._cameras, self._decoding = dict(cameras), decoding
        self._open: dict[_File, CachedVideo] = {}
        self._lock = threading.Lock()
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "frames")
        self._told = False

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch with all its frames; as it is where it carries them.

        Raises:
            ValueError, FileNotFoundError: one is not cached any more, and cannot be decoded.
        """
        with self._lock:
            asked: dict[_File, _Asked] = {}
            columns = {name: key for name, key in self._cameras.items() if name in batch}
            filled = {name: self._ask(batch[name], key, asked) for name, key in columns.items()}
            if asked:
                self._copy(asked)
            return batch | filled

    def _ask(self, values: np.ndarray, key: str, asked: dict[_File, _Asked]) -> np.ndarray:
        """Return where the frames will be that `values` name; the values, where they name none.

        Rows of several blocks, of which some carry their frames, are an array of objects.
        """
        feature = next(reader.features[key] for reader in self._readers if key in reader.features)
        shape, dtype = frame_of(feature, self._decoding.image_size)
        named = name_shape(shape, dtype)
        naming = np.array([named != shape and row.shape[-3:] == named for row in values], bool)
        if not naming.any() and values.dtype != object:
            return values
        window = values[0].shape[:-3]
        out = empty((len(values), *window, *shape), dtype)
        for row in np.flatnonzero(~naming):
            out[row] = values[row]
        if not naming.any():
            return out
        rows, frames = np.flatnonzero(naming), out.reshape(-1, *shape)
        as_bytes = np.stack([values[row] for row in rows]).reshape(len(rows) * math.prod(window), -1).view(np.uint8)
        name = np.ascontiguousarray(as_bytes[:, : _NAME.itemsize]).view(_NAME).ravel()
        place = (rows[:, None] * math.prod(window) + np.arange(math.prod(window))).ravel()
        frames[place[name["dataset"] == NO_DATASET]] = 0
        for at, (dataset, file, time_s) in zip(place.tolist(), name.tolist(), strict=True):
            if dataset != NO_DATASET:
                asked.setdefault((key, dataset, file), _Asked(frames)).times.setdefault(time_s, []).append(at)
        return out

    def _copy(self, asked: dict[_File, _Asked]) -> None:
        files = []
        for (key, dataset, number), a in asked.items():
            reader = self._readers[dataset]
            file = CameraFile(reader, key, reader.camera_files(key)[number], [a.wanted()])
            file.cached = self._opened((key, dataset, number), file)
            files.append(file)
        list(self._threads.map(CameraFile.look, files))
        if left := [file for file in files if file.wanted]:
            self._tell(sum(len(w.times_s) for file in left for w in file.wanted))
            read_frames(left, self._decoding)
        while len(self._open) > _OPEN_FILES:
            self._open.pop(next(iter(self._open))).close()

    def _opened(self, which: _File, file: CameraFile) -> CachedVideo | None:
        """Return the open files; those used last are last."""
        video = self._open.pop(which, None) or cached_video(file.reader, file.key, file.file, self._decoding)
        if video is not None:
            self._open[which] = video
        return video

    def _tell(self, frames: int) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "%d frames are not in the frame cache %s, and are decoded where batches are made, which may keep "
                "training waiting, until they are stored again: it was emptied, another run filled it, or it fails",
                frames,
                self._decoding.frame_cache and self._decoding.frame_cache.folder,
            )
