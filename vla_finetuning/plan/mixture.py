"""Combine the datasets of one robot: equal feature names, dimensions in one order, joint statistics.

Equal numbers in a batch must have equal meaning. Datasets whose metadata contradicts this (names of dimensions, ranges
that differ by RANGE_FACTOR) are refused, and the error says how to correct them. No data file is opened.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from lerobot.datasets.compute_stats import aggregate_stats

from vla_finetuning.data.metadata import (
    CAMERA_DTYPES,
    NUMERIC_DTYPES,
    DatasetMetadata,
    Feature,
    dimension_names,
    reorder_dimensions,
)
from vla_finetuning.data.rows import row_kind
from vla_finetuning.options.fields import did_you_mean
from vla_finetuning.plan.names import own_names

Stats = dict[str, dict[str, np.ndarray]]
# Statistics that LeRobot's `aggregate_stats` needs of each dataset, besides quantiles.
AGGREGATED = {"min", "max", "mean", "std", "count"}
# Datasets whose ranges differ by this factor probably have different units: a radian is 57 degrees, a metre 1000
# millimetres.
RANGE_FACTOR = 10


def check_same_features(metas: Sequence[DatasetMetadata], keys: Sequence[str]) -> None:
    """Refuse datasets that lack features `keys` of the first, and propose a renaming."""
    first = metas[0]
    for meta in metas[1:]:
        missing = [key for key in keys if key not in meta.features]
        if not missing:
            continue
        names: dict[str, str] = {}
        spare = [key for key, feature in meta.features.items() if key not in first.features and feature.key == key]
        for key in missing:
            candidates = [k for k in spare if k not in names and _same_kind(first.features[key], meta.features[k])]
            names |= dict.fromkeys(candidates[:1], key)
        hint = "give equal ones equal names in each member's rename_map, convert it, or leave it out"
        if len(names) == len(missing):
            renamed = {key: name for other in reversed(metas) for name, key in own_names(other).items()}
            hint = f"if these are the same, --rename_map='{json.dumps({**renamed, **names})}'"
        raise ValueError(
            f"datasets {first.root} and {meta.root} cannot be trained on together: the second lacks {missing} of the "
            f"first; its features are {sorted(meta.features)}; {hint}"
        )


def _same_kind(a: Feature, b: Feature) -> bool:
    if a.dtype in CAMERA_DTYPES and b.dtype in CAMERA_DTYPES:
        return a.is_depth == b.is_depth
    return (row_kind(a), a.shape) == (row_kind(b), b.shape)


def unify_order(
    metas: Sequence[DatasetMetadata], keys: Sequence[str], names: Mapping[str, Mapping[str, str]]
) -> tuple[DatasetMetadata, ...]:
    """Reorder the dimensions of features `keys` by name, as in the first dataset.

    `names` is --dataset.dimension_map, `{feature: {name of a dimension: name in the first dataset}}`. Dimensions
    without names are called by their numbers. Raises ValueError with a map where names differ or are not unique.
    """
    first = metas[0]
    if unknown := sorted(names.keys() - set(keys)):
        raise ValueError(f"--dataset.dimension_map names {unknown}; the policy gets {sorted(keys)}")
    ordered = [first]
    for meta in metas[1:]:
        orders = {}
        for key in keys:
            reference, feature = first.features[key], meta.features[key]
            if reference.dtype not in NUMERIC_DTYPES or len(reference.shape) != 1 or reference.shape != feature.shape:
                continue  # a camera, or another width, which the datasource refuses
            if reference.names is None and feature.names is None and key not in names:
                continue
            expected, stored = _dimensions(reference), _dimensions(feature)
            mapped = [names.get(key, {}).get(name, name) for name in stored]
            if mapped != expected:
                if sorted(mapped) != sorted(expected) or len(set(expected)) < len(expected):
                    guess = json.dumps({**names, key: dict(zip(stored, expected, strict=True))})
                    raise ValueError(
                        f"datasets {first.root} and {meta.root} name the dimensions of {key!r} differently: {expected} "
                        f"and {mapped}; if they are the same in this order, --dataset.dimension_map='{guess}', "
                        "else map each name to the first dataset's"
                    )
                orders[key] = tuple(mapped.index(name) for name in expected)
        ordered.append(reorder_dimensions(meta, orders, first))
    return tuple(ordered)


def check_dimension_map(robots: Sequence[Sequence[DatasetMetadata]], names: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse unknown names of dimensions in --dataset.dimension_map; `robots` has the datasets of each robot."""
    metas = [meta for group in robots if len(group) > 1 for meta in group]
    if not metas:
        raise ValueError("--dataset.dimension_map: it is of a robot's second dataset and those after it: leave it out")
    for key, renamed in names.items():
        features = [meta.features[key] for meta in metas if key in meta.features]
        valid = {name for feature in features if len(feature.shape) == 1 for name in _dimensions(feature)}
        if valid and (unknown := sorted({*renamed, *renamed.values()} - valid)):
            raise ValueError(
                f"--dataset.dimension_map has {unknown[0]!r} for {key!r}: the dimensions of the datasets are "
                f"{', '.join(sorted(valid))}{did_you_mean(unknown[0], sorted(valid))}"
            )


def reorder_by_names(meta: DatasetMetadata, names: Mapping[str, Sequence[str]]) -> DatasetMetadata:
    """Reorder the dimensions of features as `names` lists them, `{feature: names of all its dimensions}`."""
    for key, order in names.items():
        stored = _dimensions(meta.features[key]) if key in meta.features else []
        if sorted(stored) != sorted(order) or len(set(order)) < len(order):
            short = key.rpartition(".")[2]
            raise ValueError(
                f"dataset {meta.root}: {short} of the mixture lists {list(order)}, and the dimensions of {key!r} are "
                f"{stored}: list each of them once"
            )
    orders = {key: tuple(_dimensions(meta.features[key]).index(name) for name in order) for key, order in names.items()}
    features = {key: replace(meta.features[key], names=tuple(order)) for key, order in names.items()}
    return reorder_dimensions(meta, orders, replace(meta, features={**meta.features, **features}))


def _dimensions(feature: Feature) -> list[str]:
    return list(feature.names or map(str, range(feature.shape[0])))


def check_ranges(metas: Sequence[DatasetMetadata], keys: Sequence[str]) -> None:
    """Refuse datasets if the values of one reach RANGE_FACTOR times as far as another's, in any dimension.

    Compares the largest absolute values between the 1st and 99th percentile, or between minimum and maximum if these
    are missing. A joint that stood still, or was always 0, in one dataset is no mismatch.
    """
    for a, b in itertools.combinations(metas, 2):
        for key in keys:
            stats = [stats_in_row_order(meta, key) for meta in (a, b)]
            names = ("q01", "q99") if all({"q01", "q99"} <= s.keys() for s in stats) else ("min", "max")
            feature = a.features[key]
            if (
                feature.dtype in CAMERA_DTYPES
                or len(feature.shape) != 1
                or not all(set(names) <= s.keys() for s in stats)
            ):
                continue
            low, high = (np.array([np.ravel(s[name]) for s in stats]) for name in names)
            extent = np.maximum(abs(low), abs(high))
            mismatch = (extent.max(0) > RANGE_FACTOR * extent.min(0)) & (extent.min(0) > 0)
            if mismatch.any():
                i = int(np.argmax(mismatch * extent.max(0) / np.where(mismatch, extent.min(0), 1)))
                raise ValueError(
                    f"datasets {a.root} and {b.root} seem to be in different units: {dimension_names(a, key)[i]!r} of "
                    f"{key!r} ranges from {low[0, i]:.4g} to {high[0, i]:.4g} in the first and from {low[1, i]:.4g} to "
                    f"{high[1, i]:.4g} in the second ({names[0]} to {names[1]}; so do {int(mismatch.sum())} of "
                    f"{len(mismatch)} dimensions), and with joint statistics the smaller values would all be close "
                    "to 0; convert one of them, or give --dataset.mixed_ranges=true if both are right"
                )


def join_stats(metas: Sequence[DatasetMetadata], rows: Sequence[int] | None, keys: Iterable[str]) -> Stats:
    """Join the statistics of those features `keys` for which all datasets have them, by LeRobot's `aggregate_stats`.

    `rows` is the weight of each dataset, its rows in an epoch; None to weigh by frames.
    """
    if len(metas) == 1:
        return {key: stats_in_row_order(metas[0], key) for key in metas[0].stats}
    shared = [key for key in keys if all(m.stats.get(key, {}).keys() >= AGGREGATED for m in metas)]
    joined = [{key: stats_in_row_order(meta, key) for key in shared} for meta in metas]
    for stats, (key, feature) in itertools.product(joined, metas[0].features.items()):
        if key in stats and feature.dtype in CAMERA_DTYPES:  # `aggregate_stats` takes no (3,)
            stats[key] = {n: value if n == "count" else value.reshape(-1, 1, 1) for n, value in stats[key].items()}
    if rows is not None:
        joined = [
            {key: {**values, "count": np.array([n])} for key, values in stats.items()}
            for stats, n in zip(joined, rows, strict=True)
        ]
    return aggregate_stats(joined)


def stats_in_row_order(meta: DatasetMetadata, key: str) -> dict[str, np.ndarray]:
    """Return a feature's statistics with its dimensions in the order of a row."""
    feature, stats = meta.features.get(key), meta.stats.get(key, {})
    if feature is None or feature.order is None:
        return stats
    return {name: value if name == "count" else value[list(feature.order)] for name, value in stats.items()}
