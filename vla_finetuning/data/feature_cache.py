"""Cache the features that a frozen vision tower computes of frames on the node's disk.

A feature is reused only for the same file content, decoding and computation. Rows of a batch do not depend on each
other except by rounding (see `FeatureStore`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata
from vla_finetuning.data.disk_cache import CacheFolder, Key, short_hash
from vla_finetuning.data.reader import Decoding, for_read_tasks
from vla_finetuning.data.storage import file_identity
from vla_finetuning.data.videos import frame_cache_key


class FeatureCache(CacheFolder):
    """The folder of a node's cached features."""

    remedy = (
        "the vision tower runs for other frames in every epoch; free some there, raise VLA_CACHE_GB, or "
        "choose another folder for --train.feature_cache"
    )


class FeatureStore:
    """The features of the frames of some datasets, by row. Safe to share between processes and threads.

    In float32, the last bits of a frame's features depend on its batch, so cached features equal recomputed ones only
    up to rounding.

    Args:
        shapes: by camera, the shape of a frame's features.
        made_by: identifier of the computation: weights, precision, libraries.
    """

    def __init__(
        self,
        cache: FeatureCache,
        metas: Sequence[DatasetMetadata],
        decoding: Decoding,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype,
        made_by: str,
    ):
        self._cache = cache.open()
        self._metas = [for_read_tasks(meta, set(shapes)) for meta in metas]
        self._decoding, self._made_by = decoding, made_by
        self.shapes, self.dtype = dict(shapes), dtype
        self._contents: dict[tuple[str, int, int], tuple[str, str, str] | None] = {}

    def read(self, camera: str, dataset_index: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the features of some rows' frames, (N, *shape), and a mask of those found, bool (N,).

        Features that are not found are undefined. Rows whose dataset lacks the camera have zeros and are found.
        """
        features = np.empty((len(index), *self.shapes[camera]), self.dtype)
        present = np.zeros(len(index), bool)
        for dataset in np.unique(dataset_index).tolist():
            if camera not in self._metas[dataset].features:
                features[dataset_index == dataset], present[dataset_index == dataset] = 0, True
        for path, rows, keys in self._records(camera, dataset_index, index):
            present[rows] = self._cache.read_records(path, keys, [features[row] for row in rows])
        return features, present

    def write(self, camera: str, dataset_index: np.ndarray, index: np.ndarray, features: np.ndarray) -> None:
        """Store the features of some rows' frames, (N, *shape), if there is capacity."""
        features = np.ascontiguousarray(features)
        for path, rows, keys in self._records(camera, dataset_index, index):
            self._cache.write_records(path, keys, [features[row] for row in rows])

    def _records(
        self, camera: str, dataset_index: np.ndarray, index: np.ndarray
    ) -> Iterator[tuple[Path, list[int], list[Key]]]:
        """Yield the records of each episode: file, positions of its rows in `index`, keys."""
        for dataset in np.unique(dataset_index).tolist():
            if camera not in self._metas[dataset].features:
                continue
            rows = np.flatnonzero(dataset_index == dataset)
            start = self._metas[dataset].episode_start
            episodes = np.searchsorted(start, index[rows], side="right") - 1
            for episode in np.unique(episodes).tolist():
                content = self._content(camera, dataset, episode)
                folder = None if content is None else self._cache.content(*content)
                if folder is not None:
                    members = rows[episodes == episode]
                    frames = index[members] - start[episode]
                    yield folder / "features", members.tolist(), [(frame, 0.0) for frame in frames.tolist()]

    def _content(self, camera: str, dataset: int, episode: int) -> tuple[str, str, str] | None:
        """Return the arguments of `DiskCache.content` for an episode; None if a file's content has no identity."""
        place = camera, dataset, episode
        if place not in self._contents:
            meta = self._metas[dataset]
            files = [meta.data_files[meta.episode_data_file[episode]]]
            numbers = [meta.episode_start[episode], meta.episode_length[episode], meta.episode_data_row[episode]]
            if camera in meta.episode_video_file:
                files.append(meta.video_files[camera][meta.episode_video_file[camera][episode]])
                numbers.append(meta.episode_video_start_s[camera][episode])
            paths = [meta.path(file) for file in files]
            identities = [file_identity(meta.fs, path) for path in paths]
            frames, file = frame_cache_key(meta, camera, "\0".join(paths), self._decoding)
            computation = f"{frames}\0{self._made_by}\0{self.shapes[camera]}\0{self.dtype}"
            identity = "\0".join(map(str, [*identities, *(number.item() for number in numbers)]))
            # Hashes save memory: there is one entry per episode and camera.
            names = sys.intern(computation), short_hash(f"{file}\0{episode}"), short_hash(identity)
            self._contents[place] = None if None in identities else names
        return self._contents[place]
