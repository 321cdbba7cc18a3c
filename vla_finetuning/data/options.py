"""Define the parameters of a datasource: which rows, their features, their order, how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np

from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.shards import Sharding
from vla_finetuning.options.dataset import DatasetOptions, OnError

# Least number of places in the dataset from which a shuffle window takes rows. More mix better and cost decoding.
WINDOW_SEGMENTS = 32


@dataclass(frozen=True, eq=False)
class FrameRanges:
    """The frames of a dataset that are rows, as S runs of consecutive frames of an episode."""

    episode: np.ndarray  # episode number, int64 (S,), ascending
    first: np.ndarray  # frame_index of the run's first frame, int64 (S,), ascending in an episode
    frames: np.ndarray  # number of frames, int64 (S,), positive
    weight: np.ndarray | None  # mean repetitions per epoch, float64 (S,); None for 1
    moving: int  # number of frames of `episodes` that are not idle, with those dropped at their ends

    @property
    def episodes(self) -> np.ndarray:
        """Return the episodes that have rows, int64, ascending."""
        return np.unique(self.episode)

    @property
    def rows(self) -> float:
        """Return the mean number of rows of an epoch."""
        return float(self.frames.sum() if self.weight is None else self.weight @ self.frames)


@dataclass(frozen=True)
class Selection:
    """The frames that are rows, and how often."""

    episodes: Sequence[Sequence[int] | np.ndarray | None] | None = None  # per dataset; None for all
    # Per dataset, instead of `episodes`. Windows may reach beyond a range, to the ends of its episode.
    frame_ranges: Sequence[FrameRanges] | None = None
    weights: Sequence[float] | None = None  # of datasets in a mixture (`data.plan`); None reads a row once per epoch


@dataclass(frozen=True)
class Features:
    """The features of a row."""

    camera_keys: Sequence[str] | None = None  # cameras to decode; None for all
    columns: Sequence[str] | None = None  # other features to read, in which datasets must agree; None for all
    delta_timestamps: Mapping[str, Sequence[float]] = field(default_factory=dict)  # in seconds, as in LeRobot
    image_size: Sequence[int] | None = None  # (height, width) that frames are resized to; None for their stored size
    tolerance_s: float = 1e-4
    padded: bool = False  # datasets may lack cameras, which are then black, or have shorter vectors, padded with zeros
    # Per dataset, frames between two steps of a window that are one frame apart in the first dataset; None if all
    # datasets have one frame rate.
    window_steps: Sequence[int] | None = None


@dataclass(frozen=True)
class Order:
    """The order of rows.

    A `stream`, (first, last) positions in the run's stream of rows (see `data.plan`), adds a column `position`. If it
    is long, it is read in several executions: the n-th execution of the dataset reads the n-th piece, and the consumer
    iterates until the stream ends.
    """

    shuffle_seed: int | None = None  # None for stored order
    shuffle_window: int = DatasetOptions.shuffle_window  # rows that are shuffled together, fewer if READ_BYTES says so
    window_segments: int = WINDOW_SEGMENTS  # least number of segments in a window, even if it exceeds READ_BYTES
    global_shuffle: bool = False  # later epochs permute single rows of the dataset or shard, for cached frames
    sharding: Sharding | None = None
    stream: tuple[int, int] | None = None  # None for one epoch
    rows_multiple: int = 1  # number of rows, from `first`, that divides the ends of executions
    block_rows: int | None = None  # rows per block; None to derive it from BLOCK_BYTES


@dataclass(frozen=True)
class Reading:
    """Parameters of reading rows."""

    num_cpus: float = 1  # of a read task, which decodes with as many threads
    num_tasks: int | None = None  # read tasks per execution, about; None for `reads_per_task` windows each
    # "stop" raises an error at an episode that cannot be read (damaged, missing, in contradiction to the metadata).
    # "skip" replaces its rows with blank ones, marked in the column `is_skipped`.
    on_error: OnError = "stop"
    skip_log: Path | None = None  # file that gets a JSON line for each skipped episode; all nodes must see it
    check_files: bool = True  # check that all files exist, by listing the datasets' folders
    frame_cache: FrameCache | None = None  # of decoded frames, on each node
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None  # applied to each block
    prepared_bytes: int | None = None  # bytes of a row after `prepare`

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error={self.on_error!r}: expected one of {', '.join(get_args(OnError))}")
        if self.num_tasks is not None and self.num_tasks < 1:
            raise ValueError(f"override_num_blocks={self.num_tasks}: expected at least 1 read task, or None")
