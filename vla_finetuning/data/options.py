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
    """The frames that are rows, and how often.

    Attributes:
        episodes: per dataset, the selected episodes; None for all.
        frame_ranges: per dataset, the frames that are rows. Replaces `episodes`. Windows may reach beyond a range, to
            the ends of its episode.
        weights: weights of the datasets in a mixture (see `data.plan`); None reads every row once per epoch.
    """

    episodes: Sequence[Sequence[int] | np.ndarray | None] | None = None
    frame_ranges: Sequence[FrameRanges] | None = None
    weights: Sequence[float] | None = None


@dataclass(frozen=True)
class Features:
    """The features of a row.

    Attributes:
        camera_keys: cameras to decode; None for all.
        columns: other features to read, in which datasets must agree; None for all.
        delta_timestamps: by feature, the offsets of its window in seconds, as in LeRobot.
        image_size: (height, width) that frames are resized to; None for their stored size.
        padded: whether datasets may lack cameras, which are then black, or have shorter vectors, padded with zeros.
        window_steps: per dataset, frames between two steps of a window that are one frame apart in the first dataset;
            None if all datasets have one frame rate.
    """

    camera_keys: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    delta_timestamps: Mapping[str, Sequence[float]] = field(default_factory=dict)
    image_size: Sequence[int] | None = None
    tolerance_s: float = 1e-4
    padded: bool = False
    window_steps: Sequence[int] | None = None


@dataclass(frozen=True)
class Order:
    """The order of rows.

    Attributes:
        shuffle_seed: None for stored order.
        shuffle_window: maximum number of rows that are shuffled together, reduced if they exceed READ_BYTES.
        window_segments: least number of segments in a shuffled window, even if it exceeds READ_BYTES.
        global_shuffle: whether epochs after the first permute single rows of the dataset (or shard), for cached frames.
        stream: (first, last) positions in the run's stream (see `data.plan`); None for one epoch. Rows then have a
            column `position`. A long stream is read in several executions: the n-th execution of the dataset reads the
            n-th piece, and the consumer iterates until the stream ends.
        rows_multiple: number of rows, from `first`, that divides the ends of executions.
        block_rows: rows per block; None to derive it from BLOCK_BYTES.
    """

    shuffle_seed: int | None = None
    shuffle_window: int = DatasetOptions.shuffle_window
    window_segments: int = WINDOW_SEGMENTS
    global_shuffle: bool = False
    sharding: Sharding | None = None
    stream: tuple[int, int] | None = None
    rows_multiple: int = 1
    block_rows: int | None = None


@dataclass(frozen=True)
class Reading:
    """Parameters of reading rows.

    Attributes:
        num_cpus: CPUs of a read task, which decodes with as many threads.
        num_tasks: read tasks per execution; None for `reads_per_task` windows each.
        on_error: "stop" raises an error at an episode that cannot be read (damaged, missing, in contradiction to the
            metadata). "skip" replaces its rows with blank ones, marked in the column `is_skipped`.
        skip_log: file that gets a JSON line for each skipped episode; all nodes must see it.
        check_files: whether to check that all files exist, by listing the datasets' folders.
        frame_cache: cache of decoded frames on each node.
        prepare: function applied to each block in the read task.
        prepared_bytes: bytes of a row after `prepare`.
    """

    num_cpus: float = 1
    num_tasks: int | None = None
    on_error: OnError = "stop"
    skip_log: Path | None = None
    check_files: bool = True
    frame_cache: FrameCache | None = None
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    prepared_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error={self.on_error!r}: expected one of {', '.join(get_args(OnError))}")
        if self.num_tasks is not None and self.num_tasks < 1:
            raise ValueError(f"override_num_blocks={self.num_tasks}: expected at least 1 read task, or None")
