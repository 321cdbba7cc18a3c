"""Define what read tasks share of a dataset, how they decode rows, and the layout of a camera frame in a row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata, Feature
from vla_finetuning.data.decode import depth_table
from vla_finetuning.data.disk_cache import FrameCache


def for_read_tasks(meta: DatasetMetadata, columns: Collection[str]) -> DatasetMetadata:
    """Return the metadata that read tasks share, with the depths of the depth videos among `columns`."""
    features = {
        key: replace(feature, depth_mm=depth_table(feature.info, name=f"{meta.root}: camera {key}"))
        if feature.is_depth and feature.dtype == "video" and key in columns
        else feature
        for key, feature in meta.features.items()
    }
    return replace(meta, features=features, stats={}, episode_tasks=[], broken={}, not_read=())


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Parameters of reading rows, and of decoding and caching their frames.

    Attributes:
        tolerance_s: largest distance of a frame from its row's timestamp, in seconds.
        threads: threads of a video decoder.
        image_size: (height, width) that frames are resized to; None for their stored size.
        frame_cache: cache of decoded frames; None for no cache.
        columns: names of the columns of a row, in order.
        delta_indices: by column, the offsets of its window in frames.
        block_rows: rows of a block.
        window_steps: per dataset, frames between neighbours of `delta_indices`; empty for 1.
        padded: features of a row, if datasets may lack cameras or have shorter vectors (`options.Features.padded`).
        blank: a placeholder row, batched, for rows of unreadable episodes; None to raise an error.
        skip_log: file that gets a JSON line for each unreadable episode.
    """

    tolerance_s: float
    threads: int
    image_size: tuple[int, int] | None = None
    frame_cache: FrameCache | None = None
    columns: tuple[str, ...]
    delta_indices: dict[str, tuple[int, ...]]
    block_rows: int
    window_steps: tuple[int, ...] = ()
    padded: dict[str, Feature] = field(default_factory=dict)
    blank: dict[str, np.ndarray] | None = None
    skip_log: Path | None = None

    def deltas(self, key: str, dataset_index: int) -> tuple[int, ...]:
        """Return the offsets of a window in frames of a dataset."""
        step = self.window_steps[dataset_index] if self.window_steps else 1
        return tuple(step * delta for delta in self.delta_indices[key])


def frame_spec(feature: Feature, image_size: tuple[int, int] | None) -> tuple[tuple[int, int, int], np.dtype]:
    """Return shape and dtype of a camera frame in a row: uint8 (H, W, 3), or float32 (H, W, 1) for a depth map."""
    if feature.is_depth:
        return (*height_width(feature), 1), np.dtype(np.float32)
    return (*(image_size or height_width(feature)), 3), np.dtype(np.uint8)


def height_width(feature: Feature) -> tuple[int, int]:
    """Return height and width of a feature of shape (H, W, C) or (C, H, W).

    C is 3, or 1 for a depth map; for a video that is decoded to RGB, it may be 1 or 4.
    """
    channels = (1, 3, 4)
    if feature.shape[0] in channels and feature.shape[-1] not in channels:
        return feature.shape[1], feature.shape[2]
    return feature.shape[0], feature.shape[1]
