"""Data classes of a dataset's metadata: the features of a row, and the location of each episode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np

from vla_finetuning.buckets.store import StorageError

# LeRobot's writer adds these to every dataset; GR00T's datasets lack COUNTED_FEATURES, which are then counted.
FRAME_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
COUNTED_FEATURES = ("frame_index", "index")
CAMERA_DTYPES = ("video", "image")
NUMERIC_DTYPES = ("bool", "float16", "float32", "float64") + tuple(
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
)
DTYPES = CAMERA_DTYPES + NUMERIC_DTYPES + ("string", "language")

Stats = dict[str, dict[str, np.ndarray]]  # {feature: {"mean" | "std" | "min" | "max" | "count" | "q01" …: array}}


@dataclass(frozen=True)
class Feature:
    """One column of a frame row, as `meta/info.json` declares it."""

    key: str  # name in the dataset's files; rows may use another name (`rename_features`)
    dtype: str  # one of `DTYPES`
    shape: tuple[int, ...]  # of one frame's value; `(1,)` is a scalar. Cameras: in the order of `names`
    names: tuple[str, ...] | None  # of the dimensions
    is_depth: bool  # a depth map, not an RGB image
    info: dict[str, Any]  # LeRobot's `info` of a camera (`video.codec`, `video.fps`, …); else empty
    order: tuple[int, ...] | None = None  # index in the files of each dimension of a row; None for the files' order
    joined: tuple[Feature, ...] | None = None  # features that a vector concatenates (`join_features`, `absent_vector`)
    counted: bool = False  # one of `COUNTED_FEATURES` that the files lack
    texts: Mapping[int, str] = field(default_factory=dict)  # for features that store texts by number
    style: str = ""  # of annotations; a row has the text of this style that is active at its time
    # Of a depth video in a read task: millimetres by 12-bit code (`decode.depth_table`).
    depth_mm: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def columns(self) -> tuple[Feature, ...]:
        """Columns of the data files with the feature's values."""
        if self.joined is not None:
            return self.joined
        return () if self.counted else (self,)

    def values(self, arrays: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """Return the values (rows, *shape), in the files' order, from `arrays`: the values of `columns` by key."""
        if self.joined is None:
            return arrays[self.key]
        vectors = [arrays[c.key].reshape(rows, *c.shape).astype(self.dtype, copy=False) for c in self.joined]
        return np.concatenate([np.empty((rows, 0), self.dtype), *vectors], axis=1)


# The episode of a row: a column of all data files.
EPISODE = Feature("episode_index", "int64", (1,), None, False, {})


def absent_vector(key: str, dtype: str = "float32") -> Feature:
    """Return a vector of no dimensions, which a dataset lacks and others of its mixture have.

    Rows of the mixture pad it with zeros to the longest vector (`options.Features.padded`).
    """
    return Feature(key, dtype, (0,), None, False, {}, joined=())


@dataclass(frozen=True, eq=False)
class DatasetMetadata:
    """Metadata of a LeRobot dataset with E episodes, returned by `load_metadata`.

    Files are relative to `base`, unique, in order of first use. Entries of unreadable episodes are placeholders.
    """

    root: str  # as the caller gave it, without a trailing slash
    fs: fsspec.AbstractFileSystem
    base: str  # path of the root inside `fs`
    codebase_version: str
    fps: int
    robot_type: str | None
    features: dict[str, Feature]
    tasks: dict[int, str]  # instruction by the value of the `task_index` column (never by position in the file)
    stats: Stats
    episode_index: np.ndarray  # int64 (E,), 0..E-1
    episode_length: np.ndarray  # int64 (E,), frames
    # int64 (E,), first row of the episode in the dataset, from cumulative lengths: the stored `dataset_from_index` is
    # wrong in real datasets.
    episode_start: np.ndarray
    episode_tasks: list[tuple[str, ...]]  # instructions of each episode
    data_files: tuple[str, ...]
    episode_data_file: np.ndarray  # int32 (E,), index into `data_files`
    episode_data_row: np.ndarray  # int64 (E,), first row of the episode in its data file
    video_files: dict[str, tuple[str, ...]]  # by video key, like the following
    episode_video_file: dict[str, np.ndarray]  # int32 (E,), index into `video_files[key]`
    episode_video_start_s: dict[str, np.ndarray]  # float64 (E,), the episode's start inside that file, seconds
    first_episode: int = 0  # lowest episode number of the dataset; lower ones do not exist
    # {"data" | video key: {episode: reason}} of unreadable episodes.
    broken: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    not_read: tuple[str, ...] = ()  # a line for each part of the dataset that is not read

    @property
    def num_episodes(self) -> int:
        return len(self.episode_index)

    @property
    def total_episodes(self) -> int:
        """Return the number of episodes with rows; `num_episodes` counts missing numbers too."""
        return int(np.count_nonzero(self.episode_length))

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
    def cache_name(self) -> str:
        """Return an identifier of the dataset, unique among the datasets in this node's caches."""
        return f"{''.join(self.fs.protocol)}\0{self.base}"

    def path(self, relative: str) -> str:
        return f"{self.base}/{relative}"

    def camera_file(self, key: str, episode: int) -> tuple[str, float]:
        """Return the file of a camera, and the episode's start in it: seconds of a video, rows of a data file."""
        if key in self.video_files:
            file = self.video_files[key][self.episode_video_file[key][episode]]
            return file, float(self.episode_video_start_s[key][episode])
        return self.data_files[self.episode_data_file[episode]], float(self.episode_data_row[episode])

    @property
    def without_actions(self) -> bool:
        """Whether actions are an `absent_vector`, so that rows train only texts."""
        return "action" in self.features and self.features["action"].joined == ()


def select_episodes(
    meta: DatasetMetadata, episodes: Sequence[int] | np.ndarray | None, may_be_none: bool = False
) -> np.ndarray:
    """Check chosen episodes, and return them, int64, ascending; None chooses all. LeRobot sorts them, too.

    Raises ValueError for no integers, repeated or unknown ones, or for none unless `may_be_none`. `check_readable`
    checks whether they can be read.
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
    """Return all episodes with known rows; statistics of all episodes describe these."""
    episodes = select_episodes(meta, None)
    return episodes[~np.isin(episodes, list(meta.broken.get("data", {})))]


def parse_stats(raw: Mapping[str, Any]) -> Stats:
    """Convert JSON statistics to arrays of at least one dimension, as LeRobot's `load_stats`; skip other values."""
    stats: Stats = {}
    for key, values in raw.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            with contextlib.suppress(ValueError):  # lists of different lengths
                array = np.atleast_1d(np.array(value))
                if array.dtype.kind in "biuf" and array.size:
                    stats.setdefault(key, {})[name] = array
    return stats


def shorten(items: Sequence[Any], limit: int = 10) -> str:
    text = ", ".join(str(item) for item in items[:limit])
    return f"[{text}{f', … {len(items)} in all' if len(items) > limit else ''}]"


@contextlib.contextmanager
def naming_file(name: str) -> Iterator[None]:
    """Prefix a `StorageError` inside the block with the name of the file."""
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{name}: {error}") from error
