"""What all read tasks share of a dataset, how they turn rows into columns, and what a camera's frame is in a row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.data.dataset import CAMERA_DTYPES, DatasetMetadata, Feature
from vla_finetuning.data.decode import depth_table
from vla_finetuning.data.disk_cache import FrameCache


@dataclass(frozen=True)
class DatasetFiles:
    """What all read tasks share: one per dataset, shipped once through the object store. Holds no episodes."""

    root: str
    fs: Any
    base: str
    fps: int
    features: dict[str, Feature]
    tasks: dict[int, str]
    data_files: tuple[str, ...]
    video_files: dict[str, tuple[str, ...]]
    depth_mm: dict[str, np.ndarray]  # of depth videos: millimetres by code

    @classmethod
    def from_metadata(cls, meta: DatasetMetadata, columns: Collection[str] | None = None) -> DatasetFiles:
        """`columns`: those that will be read; None for all."""
        depth_mm = {
            key: depth_table(feature.info, name=f"{meta.root}: camera {key}")
            for key, feature in meta.features.items()
            if feature.is_depth and feature.dtype == "video" and (columns is None or key in columns)
        }
        shared = ("root", "fs", "base", "fps", "features", "tasks", "data_files", "video_files")
        return cls(**{name: getattr(meta, name) for name in shared}, depth_mm=depth_mm)

    @property
    def dataset(self) -> str:
        """Tells the dataset from others that this node keeps something of."""
        return f"{''.join(self.fs.protocol)}\0{self.base}"

    @property
    def camera_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype in CAMERA_DTYPES]

    def path(self, relative: str) -> str:
        return f"{self.base}/{relative}"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How frames are decoded, and where they are cached; `threads` of a video's decoder.

    `image_size`: (height, width) that they are fitted into; None: as stored. `frame_cache`: None for nowhere.
    """

    tolerance_s: float
    threads: int
    image_size: tuple[int, int] | None = None
    frame_cache: FrameCache | None = None


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Decoding):
    """How rows are turned into columns."""

    columns: tuple[str, ...]
    delta_indices: dict[str, tuple[int, ...]]
    block_rows: int
    # Per dataset, the frames between two neighbours of `delta_indices`; none: one.
    window_steps: tuple[int, ...] = ()
    # The row's features, where datasets may lack cameras or have shorter vectors (`options.Features.padded`).
    padded: dict[str, Feature] = field(default_factory=dict)
    # One made-up row, batched, for the rows of episodes that cannot be read; None: an error ends the task.
    blank: dict[str, np.ndarray] | None = None
    skip_log: Path | None = None  # gets a JSON line for each episode that could not be read

    def deltas(self, key: str, dataset_index: int) -> tuple[int, ...]:
        """Offsets of a window in frames of a dataset."""
        step = self.window_steps[dataset_index] if self.window_steps else 1
        return tuple(step * delta for delta in self.delta_indices[key])


def frame_spec(feature: Feature, image_size: tuple[int, int] | None) -> tuple[tuple[int, int, int], np.dtype]:
    """A camera's frame in a row: uint8 (H, W, 3), fitted into `image_size` if given; a depth map float32 (H, W, 1)."""
    if feature.is_depth:
        return (*height_width(feature), 1), np.dtype(np.float32)
    return (*(image_size or height_width(feature)), 3), np.dtype(np.uint8)


def height_width(feature: Feature) -> tuple[int, int]:
    """LeRobot states (H, W, C), or (C, H, W) with names saying so. C is 3, of a depth map 1; of what a video is decoded
    to RGB from, it may be 1 or 4."""
    channels = (1, 3, 4)
    if feature.shape[0] in channels and feature.shape[-1] not in channels:
        return feature.shape[1], feature.shape[2]
    return feature.shape[0], feature.shape[1]
