"""Features of frames on the node's own disk: what a frozen vision tower makes of each, so that it runs once for each.

A frame's features are served only where the same would be computed: of the same content of the files that its row is
in, read and decoded by the same rules, by the same computation. Which computation that is, its caller says. Rows that
share a batch do not depend on each other, but for rounding (`FeatureStore`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata
from vla_finetuning.data.disk_cache import CacheFolder
from vla_finetuning.data.reader import DatasetFiles, Decoding
from vla_finetuning.data.storage import file_identity
from vla_finetuning.data.videos import frames_place


class FeatureCache(CacheFolder):
    """Where a node keeps features."""

    remedy = (
        "the vision tower runs for other frames in every epoch; free some there, raise VLA_CACHE_GB, or "
        "choose another folder for --train.feature_cache"
    )


@dataclass(frozen=True)
class _Files:
    """The files with a camera's frames in a dataset, and with the rows that the frames are of.

    Attributes:
        paths: of each file, or pair of files. file: of each episode, its number. places: of each file, a digest of
            where in it its episodes are.
    """

    paths: list[tuple[str, ...]]
    file: np.ndarray
    places: list[str]

    @classmethod
    def of(cls, meta: DatasetMetadata, reader: DatasetFiles, key: str) -> _Files:
        file_numbers = [meta.episode_data_file]
        starts = [meta.episode_start, meta.episode_length, meta.episode_data_row]
        names = [reader.data_files]
        if key in meta.episode_video_file:
            file_numbers.append(meta.episode_video_file[key])
            starts.append(meta.episode_video_start_s[key])
            names.append(reader.video_files[key])
        different, file = np.unique(np.stack(file_numbers, axis=1), axis=0, return_inverse=True)
        file = file.reshape(-1)  # numpy 2.0 alone gives it another dimension
        members = [np.flatnonzero(file == number) for number in range(len(different))]
        return cls(
            paths=[
                tuple(reader.path(files[number]) for files, number in zip(names, numbers, strict=True))
                for numbers in different.tolist()
            ],
            file=file,
            places=[
                hashlib.sha256(b"".join(np.ascontiguousarray(start[indices]).tobytes() for start in starts)).hexdigest()
                for indices in members
            ],
        )


class FeatureStore:
    """The features of the frames of some datasets, by row. Processes and threads may share it.

    What is written for a frame first stays. It was computed in some batch, and in float32 its last bits depend on the
    frame's place there and on how many there were: what is read equals what another batch would give up to that.

    Args:
        metas: the datasets. cameras: for each camera, what it is called in the datasets, those that have it.
        decoding: as in the read tasks.
        shapes: of a frame's features, by camera. dtype: of the numbers.
        made_by: tells the computation from all others: its weights, precision, libraries.
    """

    def __init__(
        self,
        cache: FeatureCache,
        metas: Sequence[DatasetMetadata],
        cameras: Mapping[str, str],
        decoding: Decoding,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype,
        made_by: str,
    ):
        self._cache = cache.opened()
        self._metas = tuple(metas)
        self._readers = [DatasetFiles.of(meta, set(cameras.values())) for meta in metas]
        self._cameras, self._decoding, self._made_by = dict(cameras), decoding, made_by
        self.shapes, self.dtype = dict(shapes), dtype
        self._files: dict[tuple[str, int], _Files] = {}
        self._contents: dict[tuple[str, int, int], tuple[str, str, str] | None] = {}

    def read(self, camera: str, dataset_index: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The features of some rows' frames, (N, *shape), and which of them are here, bool (N,); others are anything.

        Of rows whose dataset lacks the camera zeros are here.
        """
        features = np.empty((len(index), *self.shapes[camera]), self.dtype)
        present = np.zeros(len(index), bool)
        for dataset in np.unique(dataset_index).tolist():
            if self._cameras[camera] not in self._readers[dataset].features:
                features[dataset_index == dataset], present[dataset_index == dataset] = 0, True
        for row, path in self._paths(camera, dataset_index, index):
            present[row] = self._cache.read(path, features[row])
        return features, present

    def write(self, camera: str, dataset_index: np.ndarray, index: np.ndarray, features: np.ndarray) -> None:
        """Store the features of some rows' frames, (N, *shape), where there is space for them."""
        for row, path in self._paths(camera, dataset_index, index):
            if not os.path.exists(path):
                self._cache.write(path, np.ascontiguousarray(features[row]))

    def _paths(self, camera: str, dataset_index: np.ndarray, index: np.ndarray) -> Iterator[tuple[int, Path]]:
        """Yield rows whose dataset has the camera, with where the features of their frames are."""
        for dataset in np.unique(dataset_index).tolist():
            if self._cameras[camera] not in self._readers[dataset].features:
                continue
            rows = np.flatnonzero(dataset_index == dataset)
            episode = np.searchsorted(self._metas[dataset].episode_start, index[rows], side="right") - 1
            file = self._files_of(camera, dataset).file[episode]
            for number in np.unique(file).tolist():
                content = self._content(camera, dataset, number)
                folder = None if content is None else self._cache.content(*content)
                if folder is not None:
                    yield from ((row, folder / str(index[row])) for row in rows[file == number].tolist())

    def _files_of(self, camera: str, dataset: int) -> _Files:
        file_key = camera, dataset
        if file_key not in self._files:
            self._files[file_key] = _Files.of(self._metas[dataset], self._readers[dataset], self._cameras[camera])
        return self._files[file_key]

    def _content(self, camera: str, dataset: int, number: int) -> tuple[str, str, str] | None:
        """Return what `DiskCache.content` takes for a file; None where its content cannot be told from others."""
        file_key = camera, dataset, number
        if file_key not in self._contents:
            files, reader, key = self._files_of(camera, dataset), self._readers[dataset], self._cameras[camera]
            identities = [file_identity(reader.fs, path) for path in files.paths[number]]
            identity = "\0".join([*map(str, identities), files.places[number]])
            frames, path = frames_place(reader, key, "\0".join(files.paths[number]), self._decoding)
            place = f"{frames}\0{self._made_by}\0{self.shapes[camera]}\0{self.dtype}"
            self._contents[file_key] = None if None in identities else (place, path, identity)
        return self._contents[file_key]
