"""What is asked of a datasource, as values: which rows, what a row holds, in which order, how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np

from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.shards import Sharding
from vla_finetuning.options.dataset import DatasetOptions, OnError

# Places in the dataset that a shuffle window takes its rows from, at least. More mix better and cost decoding.
WINDOW_SEGMENTS = 32


@dataclass(frozen=True, eq=False)
class FrameRanges:
    """The frames of a dataset that are rows, as S runs of consecutive ones of an episode each. All arrays are (S,).

    Attributes:
        episode: int64, ascending. first: int64, the frame_index of the run's first frame, ascending in an episode.
        frames: int64, how many, > 0.
        weight: float64, how often each of them comes in an epoch, on average; None: once.
        moving: frames of `episodes` that are not idle, an int: those that are rows, and those that are dropped at
            their ends.
    """

    episode: np.ndarray
    first: np.ndarray
    frames: np.ndarray
    weight: np.ndarray | None
    moving: int

    @property
    def episodes(self) -> np.ndarray:
        """Return the episodes that have any, int64, ascending."""
        return np.unique(self.episode)

    @property
    def rows(self) -> float:
        """Return how many frames an epoch has of them, on average."""
        return float(self.frames.sum() if self.weight is None else self.weight @ self.frames)


@dataclass(frozen=True)
class Selection:
    """Which frames are rows, and how often.

    Attributes:
        episodes: per dataset, which episodes; None for all.
        drop_n_last_frames: number of last frames of each episode that are no rows; windows of others still hold them.
            Every episode must have more frames.
        frame_ranges: per dataset, the frames of each episode that are rows, and how often. Replaces `episodes` and
            `drop_n_last_frames`. Windows reach beyond a stretch, to the ends of its episode.
        weights: of the datasets in a mixture, see `data.plan`; None reads every row once per epoch.
    """

    episodes: Sequence[Sequence[int] | np.ndarray | None] | None = None
    drop_n_last_frames: int = 0
    frame_ranges: Sequence[FrameRanges] | None = None
    weights: Sequence[float] | None = None


@dataclass(frozen=True)
class Features:
    """What a row holds.

    Attributes:
        camera_keys: cameras to decode; None for all.
        columns: other features of the datasets, the only ones in which datasets must agree; None for all.
        delta_timestamps: key -> offsets in seconds, as LeRobot.
        image_size: (height, width) that cameras are fitted into; None for as stored.
        tolerance_s: the largest distance of a video frame from its row's timestamp, in seconds.
        padded: datasets may lack cameras, whose frames are then black, and have shorter vectors, which zeros follow.
        window_steps: per dataset, how many of its frames lie between two of a window that are one frame apart in the
            first dataset, whatever its rate; None: all datasets have one rate.
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
    """In which order rows come.

    Attributes:
        shuffle_seed: None for stored order.
        shuffle_window: rows shuffled among themselves, at most: fewer when a window would exceed READ_BYTES.
        window_segments: the least number of segments of a shuffled window, for which it may exceed READ_BYTES.
        global_shuffle: draw rows one by one from the whole dataset (or shard) in epochs after the first; for cached
            frames.
        sharding: how the rows are divided among nodes; None: not divided.
        stream: (first, last) positions of the run's stream (see `data.plan`); None for one epoch. Rows then also
            have `position`, their place in it. A long stream is read in several executions: the n-th execution of the
            dataset reads the n-th piece, and a consumer iterates until the stream ends.
        rows_multiple: executions end at multiples of this many rows after `first`.
        block_rows: rows per block; None: chosen by BLOCK_BYTES.
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
    """How rows are read.

    Attributes:
        num_cpus: CPUs of a read task; it decodes with as many threads.
        num_tasks: read tasks per execution; None: `reads_per_task` windows each.
        on_error: "stop": an episode that cannot be read (damaged, missing, not what the metadata says) ends the task
            with an error. "skip": its rows are blank, and true in one more column, `is_skipped`.
        skip_log: a file that gets a JSON line for each skipped episode; all nodes must see it.
        check_files: check that all files exist, which lists the datasets' folders.
        frame_cache: where each node caches the frames that it decoded; None: nowhere.
        prepare: applied to each block, in the read task. prepared_bytes: of a row afterwards.
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
