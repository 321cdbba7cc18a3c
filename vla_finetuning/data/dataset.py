"""What a dataset is, once its metadata are read: the features of a row, and where each episode lies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np

from vla_finetuning.buckets.store import StorageError

# LeRobot's writer adds these to every dataset; GR00T's datasets lack some, which are then counted.
FRAME_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
COUNTED_FEATURES = ("frame_index", "index")
CAMERA_DTYPES = ("video", "image")
NUMERIC_DTYPES = ("bool", "float16", "float32", "float64") + tuple(
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
)
DTYPES = CAMERA_DTYPES + NUMERIC_DTYPES + ("string", "language")


@dataclass(frozen=True)
class Feature:
    """One column of a frame row, as `meta/info.json` declares it.

    Attributes:
        key: what the dataset's files call it; a row may call it otherwise (`rename_features`).
        dtype: one of `DTYPES`.
        shape: of one frame's value; `(1,)` is a scalar. Cameras: in the order of `names`.
        names: of the dimensions (vectors: of the entries), or None.
        is_depth: a depth map, not an RGB image.
        info: LeRobot's `info` of a camera (`video.codec`, `video.fps`, …); else empty.
        order: of a vector, where the files have the entries of a row's (`reorder_dimensions`); None: as they have them.
        joined: of a vector made of several columns (`join_features`), those in order; else empty.
        counted: one of `COUNTED_FEATURES` that the files lack.
        texts: of numbers that stand for texts, these; empty otherwise.
        style: of annotations, the style whose text a row has: the one that is active at its time; empty otherwise.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    is_depth: bool
    info: dict[str, Any]
    order: tuple[int, ...] | None = None
    joined: tuple[Feature, ...] = ()
    counted: bool = False
    texts: Mapping[int, str] = field(default_factory=dict)
    style: str = ""

    @property
    def columns(self) -> tuple[Feature, ...]:
        """The columns of the data files that hold it."""
        return () if self.counted else self.joined or (self,)

    def values(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Its values in N rows, (N, *shape) in the files' order, from those of its columns by `key`."""
        if not self.joined:
            return arrays[self.key]
        return np.concatenate(
            [arrays[c.key].reshape(-1, *c.shape).astype(self.dtype, copy=False) for c in self.joined], axis=1
        )


# Which episode a row is of: a column of all data files.
EPISODE = Feature("episode_index", "int64", (1,), None, False, {})


@dataclass(frozen=True)
class AbsentFeature(Feature):
    """A vector that a dataset's files lack and others of its mixture have: it has no entries.

    In rows that are read together it is as many zeros as the longest one has entries (`options.Features.padded`).
    """

    @property
    def columns(self) -> tuple[Feature, ...]:
        return (EPISODE,)  # says how many rows there are

    def values(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.zeros((len(arrays[EPISODE.key]), *self.shape), self.dtype)


def absent_vector(key: str, dtype: str = "float32") -> AbsentFeature:
    """Return a vector of no entries."""
    return AbsentFeature(key, dtype, (0,), None, False, {})


@dataclass(frozen=True, eq=False)
class DatasetMetadata:
    """A LeRobot dataset's metadata, E episodes. Made by `load_metadata`.

    Attributes:
        root: as the caller gave it, without a trailing slash; `base` is the same place inside `fs`.
        fps: frames per second.
        tasks: instruction by the value of the `task_index` column (never by position in the file).
        stats: `{feature: {"mean" | "std" | "min" | "max" | "count" | "q01" …: array}}`; `{}` when there is no
            stats.json.
        episode_index: int64 (E,), 0..E-1.
        episode_length: int64 (E,), frames.
        episode_start: int64 (E,), first row of the episode in the dataset: cumulative lengths, and not the
            stored `dataset_from_index`, which real datasets get wrong.
        episode_tasks: instructions of each episode.
        data_files: parquet files relative to `base`, unique, in order of first use.
        episode_data_file: int32 (E,), index into `data_files`.
        episode_data_row: int64 (E,), first row of the episode in its data file.
        video_files: per video key, mp4 files relative to `base`, unique, in order of first use.
        episode_video_file: per video key, int32 (E,), index into `video_files[key]`.
        episode_video_start_s: per video key, float64 (E,), the episode's start inside that file, seconds.
        first_episode: episodes before it are no part of the dataset, whose numbering begins there.
        broken: episodes that cannot be read, by "data" or the video key: what is wrong with each, by its number. The
            arrays above have something in their places.
        not_read: what the dataset has beside, a line for each.
    """

    root: str
    fs: fsspec.AbstractFileSystem
    base: str
    codebase_version: str
    fps: int
    robot_type: str | None
    features: dict[str, Feature]
    tasks: dict[int, str]
    stats: dict[str, dict[str, np.ndarray]]
    episode_index: np.ndarray
    episode_length: np.ndarray
    episode_start: np.ndarray
    episode_tasks: list[tuple[str, ...]]
    data_files: tuple[str, ...]
    episode_data_file: np.ndarray
    episode_data_row: np.ndarray
    video_files: dict[str, tuple[str, ...]]
    episode_video_file: dict[str, np.ndarray]
    episode_video_start_s: dict[str, np.ndarray]
    first_episode: int = 0
    broken: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()

    @property
    def num_episodes(self) -> int:
        return len(self.episode_index)

    @property
    def total_frames(self) -> int:
        return int(self.episode_length.sum())

    @property
    def video_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype == "video"]

    @property
    def camera_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype in CAMERA_DTYPES]

    @property
    def text_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype == "string"]

    @property
    def without_actions(self) -> bool:
        """Return whether it was given an `AbsentFeature` for its actions: its rows train texts alone."""
        return isinstance(self.features.get("action"), AbsentFeature)


def select_episodes(
    meta: DatasetMetadata, episodes: Sequence[int] | np.ndarray | None, may_be_none: bool = False
) -> np.ndarray:
    """Check a choice of episodes; None chooses all, from the first one that the dataset has.

    Whether they can be read is for `check_readable`.

    Args:
        may_be_none: an empty choice is one, as of a dataset of several whose episodes are all trained on.
    Returns:
        int64, ascending: LeRobot, too, reads chosen episodes in stored order.
    Raises:
        ValueError: not integers, none chosen, chosen twice, negative, or not in the dataset.
    """
    if episodes is None:
        return meta.episode_index[meta.first_episode :].copy()
    label, last = f"dataset {meta.root}: episodes", meta.num_episodes - 1
    chosen = np.asarray(episodes if isinstance(episodes, np.ndarray) else list(episodes))
    if chosen.size == 0:
        if may_be_none:
            return np.empty(0, np.int64)
        raise ValueError(f"{label}: none chosen; give some of 0..{last}, or None for all")
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise ValueError(f"{label}: expected a list of whole numbers, got {episodes!r:.200}")
    unknown = chosen[(chosen < 0) | (chosen > last)]
    if unknown.size:
        raise ValueError(f"{label}: {shorten(unknown.tolist())} not in the dataset, which has 0..{last}")
    values, counts = np.unique(chosen, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{label}: {shorten(values[counts > 1].tolist())} chosen more than once")
    return values.astype(np.int64)


def known_episodes(meta: DatasetMetadata) -> np.ndarray:
    """Return all episodes but those whose rows the metadata does not know: those that statistics of all describe."""
    episodes = select_episodes(meta, None)
    return episodes[~np.isin(episodes, list(meta.broken.get("data", {})))]


def shorten(items: Sequence[Any], limit: int = 10) -> str:
    text = ", ".join(str(item) for item in items[:limit])
    return f"[{text}{f', … {len(items)} in all' if len(items) > limit else ''}]"


@contextlib.contextmanager
def naming_file(name: str) -> Iterator[None]:
    """Put the file's name before a `StorageError` from inside the block."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{name}: {error}") from error
