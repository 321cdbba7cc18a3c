"""Resolve the columns of rows of one or several datasets, and their windows in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_finetuning.data.dataset import CAMERA_DTYPES, FRAME_FEATURES, DatasetMetadata, Feature
from vla_finetuning.data.reader import frame_spec
from vla_finetuning.data.rows import row_kind


def resolve_delta_indices(
    delta_timestamps: Mapping[str, Sequence[float]],
    features: Mapping[str, Feature],
    meta: DatasetMetadata,
    tolerance_s: float,
) -> dict[str, tuple[int, ...]]:
    """Convert offsets in seconds to frames. Raises ValueError for times between frames, as LeRobot does."""
    indices = {}
    for key, seconds in delta_timestamps.items():
        if key not in features:
            raise ValueError(f"{meta.root}: delta_timestamps names {key!r}; the columns are {sorted(features)}")
        if features[key].dtype in ("string", "language"):
            raise ValueError(f"{meta.root}: delta_timestamps cannot window {key!r}, a {features[key].dtype} column")
        frames = np.asarray(seconds, np.float64) * meta.fps
        if not len(frames) or not (np.abs(frames - np.rint(frames)) / meta.fps <= tolerance_s).all():  # or NaN
            raise ValueError(
                f"{meta.root}: delta_timestamps[{key!r}] = {list(seconds)} must be multiples of 1/{meta.fps} s "
                f"(the dataset's frame rate), at least one"
            )
        indices[key] = tuple(np.rint(frames).astype(int).tolist())
    return indices


def check_image_size(image_size: Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    if len(image_size) != 2 or any(int(n) != n or n < 1 for n in image_size):
        raise ValueError(f"image_size is {list(image_size)}, expected (height, width) in pixels")
    return int(image_size[0]), int(image_size[1])


def _layout(feature: Feature | None, image_size: tuple[int, int] | None) -> tuple[Any, Any] | None:
    """Return the properties of a column that several datasets must have in common."""
    if feature is None:
        return None
    return frame_spec(feature, image_size) if feature.dtype in CAMERA_DTYPES else (feature.shape, row_kind(feature))


def _padded_alike(
    chosen: Mapping[str, Feature], other: Mapping[str, Feature]
) -> tuple[dict[str, Feature], dict[str, Feature]]:
    """Return both feature sets with the cameras of either, and vectors as long as the longer one."""
    chosen, other = dict(chosen), dict(other)
    for key, feature in (chosen | other).items():
        a, b = chosen.get(key, feature), other.get(key, feature)
        if feature.dtype in CAMERA_DTYPES:
            chosen[key], other[key] = a, b
        elif key in chosen and key in other and row_kind(a) == row_kind(b) and len(a.shape) == len(b.shape) == 1:
            chosen[key] = other[key] = max(a, b, key=lambda feature: feature.shape)
    return chosen, other


def common_features(
    metas: Sequence[DatasetMetadata],
    camera_keys: Sequence[str] | None,
    columns: Sequence[str] | None,
    image_size: tuple[int, int] | None,
    padded: bool = False,
) -> dict[str, Feature]:
    """Return the features of a row: cameras, columns and `FRAME_FEATURES`, in which all datasets must agree.

    With `padded` (`options.Features`), datasets may lack cameras, and a vector is as long as the longest. Raises
    ValueError for unknown cameras, or features that differ between datasets.
    """
    for meta in () if padded else metas:
        if unknown := sorted(set(camera_keys or ()) - set(meta.camera_keys)):
            raise ValueError(f"{meta.root}: no cameras {unknown}; it has {list(meta.camera_keys)}")
    chosen: dict[str, Feature] = {}
    for meta in metas:
        features = {}
        for key, feature in meta.features.items():
            selected = camera_keys if key in meta.camera_keys else columns
            if selected is None or key in selected or key in FRAME_FEATURES:
                features[key] = feature
        if padded and chosen:
            chosen, features = _padded_alike(chosen, features)
        chosen = chosen or features
        keys = sorted(chosen.keys() | features.keys())
        if differing := [k for k in keys if len({_layout(f.get(k), image_size) for f in (chosen, features)}) > 1]:
            raise ValueError(
                f"{meta.root} and {metas[0].root} cannot be read together: they differ in {differing}; "
                "choose the cameras they share with camera_keys, bring cameras to one size with image_size, or convert "
                "one of them"
            )
    return chosen
