"""Compute the normalisation statistics that `meta/stats.json` lacks, from the parquet files.

The results equal those of LeRobot's writer: `compute_episode_stats` for each episode, then `aggregate_stats` episode
by episode (`lerobot/datasets/compute_stats.py`). So quantiles are frame-weighted means of the episodes' quantiles.
Video is never decoded.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from vla_finetuning.data.dataset import EPISODE, DatasetMetadata, Feature, Stats, parse_stats
from vla_finetuning.data.parquet_columns import Column, DataFile, Span, read_numbers
from vla_finetuning.data.storage import check_still_there
from vla_finetuning.files import write_json

STATISTICS = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")
# Lower and upper statistic of each normalisation range.
RANGES = (("min", "max"), ("q01", "q99"), ("q10", "q90"))
_logger = logging.getLogger(__name__)


def complete_stats(
    meta: DatasetMetadata,
    required: Mapping[str, set[str]],
    *,
    cache_dir: str | Path | None,
    episodes: np.ndarray,
) -> Stats:
    """Return the statistics of stats.json, with the missing ones of `required` computed from the columns.

    Run on the driver.

    Args:
        required: `{"action": {"q01", "q99"}, ...}`, with names in `STATISTICS`. Missing ones must be of numeric
            features.
        cache_dir: folder of JSON files with computed statistics, or None. A file is valid while the metadata and the
            sizes and dates of the parquet files are the same.
        episodes: episodes that the computed statistics describe, int64, ascending.
    Raises:
        ValueError: a statistic that is not finite or of another shape than its feature; data that contradicts the
            metadata or holds NaN.
        FileNotFoundError: a parquet file is missing.
    """
    absent = {key: sorted(names - meta.stats.get(key, {}).keys()) for key, names in required.items()}
    missing = {key: names for key, names in absent.items() if names}
    stats: Stats = {key: dict(values) for key, values in meta.stats.items()}
    if missing:
        keys = sorted(missing)
        computed = cached_stats(
            keys, cache_dir, digest(meta, keys, episodes), lambda: compute_as_lerobot(meta, keys, episodes)
        )
        for key, names in missing.items():
            stats.setdefault(key, {}).update({name: computed[key][name] for name in names})
    check_stats(replace(meta, stats=stats), required)
    return stats


def check_stats(meta: DatasetMetadata, required: Mapping[str, set[str]]) -> None:
    """Check the required statistics that the dataset has; LeRobot would normalise with them unchecked.

    Raises ValueError for one that is not finite or of another shape than its feature, or a range upside down.
    """
    for key, required_names in required.items():
        for problem in stats_problems(meta, key, required_names & meta.stats.get(key, {}).keys()):
            raise ValueError(f"dataset {meta.root}: {problem}; --dataset.statistics=exact computes all anew")


def stats_problems(meta: DatasetMetadata, key: str, names: set[str]) -> Iterator[str]:
    """Yield what makes the statistics `names` of a feature unusable."""
    stats, feature = meta.stats.get(key, {}), meta.features.get(key)
    for name in sorted(names):
        value = stats[name]
        expected = (1,) if name == "count" else feature.shape if feature and len(feature.shape) == 1 else value.shape
        if not np.isfinite(value).all():
            yield f"statistic {name!r} of {key!r} is not finite: {value.tolist()!s:.200}"
        if value.shape != expected:
            yield f"statistic {name!r} of {key!r} has shape {value.shape}, expected {expected}"
    for low, high in RANGES:
        if {low, high} <= names and (stats[low] > stats[high]).any():
            yield (f"{low} of {key!r} is above {high}: {stats[low].tolist()!s:.200} and {stats[high].tolist()!s:.200}")


def episode_arrays(
    fs: fsspec.AbstractFileSystem,
    path: str,
    features: Sequence[Feature],
    episodes: Sequence[int],
    first_rows: Sequence[int],
    lengths: Sequence[int],
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the number and the values by feature of each of some `episodes` of one parquet file.

    Read only the row groups that hold the episodes, `lengths` rows from `first_rows` in the file. Raises ValueError for
    rows of another episode, or a value that is missing or not finite.
    """
    columns = {column.key: column for feature in features for column in feature.columns} | {EPISODE.key: EPISODE}
    spans = [Span(f"episode {e}", a, a + n) for e, a, n in zip(episodes, first_rows, lengths, strict=True)]
    arrays = read_numbers(
        DataFile(fs, path, path, path), [Column(key, None, column.shape) for key, column in columns.items()], spans
    )
    begins = np.cumsum([0, *lengths]).tolist()
    for episode, span, (begin, end) in zip(episodes, spans, itertools.pairwise(begins), strict=True):
        stored = {key: array[begin:end] for key, array in zip(columns, arrays, strict=True)}
        index = stored[EPISODE.key]
        if (index != episode).any():
            raise ValueError(
                f"{path}: rows {span.first}..{span.last - 1} should be episode {episode}, found "
                f"{np.unique(index)[:5].tolist()}: the file and meta/episodes do not belong together; rebuild the "
                "dataset"
            )
        data = {feature.key: feature.values(stored, len(span)) for feature in features}
        for key, array in data.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                frame = int(np.flatnonzero(~np.isfinite(array).reshape(len(span), -1).all(axis=1))[0])
                raise ValueError(
                    f"{path}: {key} of episode {episode}, frame {frame} holds NaN or infinity; leave the "
                    "episode out (--dataset.episodes) or repair it"
                )
        yield episode, data


def cached_stats(keys: Sequence[str], cache_dir: str | Path | None, digest: str, compute: Callable[[], Stats]) -> Stats:
    """Return all statistics of `keys` from the cache file of `digest`, or compute and cache them."""
    if cache_dir is None:
        return parse_stats(_to_json(compute()))
    path = Path(cache_dir) / f"stats-{digest}.json"
    try:
        cached = parse_stats(json.loads(path.read_bytes()))
        return {key: {name: cached[key][name] for name in STATISTICS} for key in keys}
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, AttributeError) as error:
        _logger.warning("%s is damaged (%s); computing the statistics again", path, error)
    values = _to_json(compute())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, values)
    return parse_stats(values)


def compute_as_lerobot(meta: DatasetMetadata, keys: Sequence[str], episodes: np.ndarray) -> Stats:
    """Compute the statistics of numeric features in `episodes` (int64, ascending) by LeRobot's own code."""
    from lerobot.datasets.compute_stats import aggregate_stats, compute_episode_stats

    features = {key: meta.features[key] for key in keys}
    declared = {f.key: {"dtype": f.dtype, "shape": f.shape, "info": f.info} for f in features.values()}

    def of_file(file: dict[str, Any]) -> dict[int, Stats]:
        arrays = episode_arrays(meta.fs, features=list(features.values()), **file)
        return {episode: compute_episode_stats(values, declared) for episode, values in arrays}

    by_episode: dict[int, Stats] = {}
    for part in in_threads(meta, episodes, of_file):
        by_episode |= part
    in_order = (by_episode[episode] for episode in episodes.tolist())
    try:
        stats = functools.reduce(lambda total, more: aggregate_stats([total, more]), in_order)
    except ValueError as error:
        matrices = [key for key in keys if len(features[key].shape) > 1]
        raise ValueError(
            f"dataset {meta.root}: LeRobot 0.6.1 gives statistics of {matrices} another shape in an episode of one "
            f"frame, as {episodes[meta.episode_length[episodes] == 1][:5].tolist()}, and fails ({error}); leave "
            "--dataset.statistics=lerobot out"
        ) from error
    return {key: stats[feature.key] for key, feature in features.items()}


def in_threads[T](
    meta: DatasetMetadata,
    episodes: np.ndarray,
    describe: Callable[[dict[str, Any]], T],
    unreadable: tuple[str, Callable[[dict[str, Any]], T]] | None = None,
) -> list[T]:
    """Call `describe` on each file of `files_of`, in threads. Its ValueError and OSError get the dataset's name.

    With `unreadable`, a consequence and a function, warn of the consequence for a file that cannot be read, and call
    the function on it instead.
    """

    def describe_or_skip(file: dict[str, Any]) -> T:
        try:
            return describe(file)
        except (ValueError, FileNotFoundError) as error:  # StorageError passes: the file may be intact
            if unreadable is None:
                raise
            check_still_there(meta.fs, meta.root, [file["path"]])
            _logger.warning("dataset %s: %s %s: %s", meta.root, unreadable[0], file["path"], error)
            return unreadable[1](file)

    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        try:
            return list(pool.map(describe_or_skip, files_of(meta, episodes)))
        except (ValueError, OSError) as error:
            raise type(error)(f"dataset {meta.root}: {error}") from error


def files_of(meta: DatasetMetadata, episodes: np.ndarray) -> list[dict[str, Any]]:
    """List the parquet files that hold some of `episodes` (int64, ascending), each as arguments of `episode_arrays`."""
    # No loop over episodes: there may be millions.
    order = np.argsort(meta.episode_data_file[episodes], kind="stable")
    files, first = np.unique(meta.episode_data_file[episodes][order], return_index=True)
    return [
        {
            "path": f"{meta.base}/{meta.data_files[file]}",
            "episodes": members.tolist(),
            "first_rows": meta.episode_data_row[members].tolist(),
            "lengths": meta.episode_length[members].tolist(),
        }
        for file, members in zip(files.tolist(), np.split(episodes[order], first[1:]), strict=True)
    ]


def digest(meta: DatasetMetadata, keys: Sequence[str], episodes: np.ndarray, method: Any = None) -> str:
    """Hash the metadata and the file listing that identify the dataset's content, without reading the files.

    `method` describes, as JSON, a computation that differs from LeRobot's.
    """
    import lerobot

    sha = hashlib.sha256()
    description = {
        "lerobot": lerobot.__version__,
        "root": meta.base,
        "features": {key: stored_as(f) for key, f in meta.features.items() if key in keys},
        "data_files": meta.data_files,
        "listing": _listing(meta),
        "method": method,
    }
    sha.update(json.dumps(description, sort_keys=True).encode())
    for array in (meta.episode_length, meta.episode_data_file, meta.episode_data_row, episodes):
        sha.update(np.ascontiguousarray(array).tobytes() + b"|")
    return sha.hexdigest()[:32]


def stored_as(feature: Feature) -> list[Any]:
    """Return the columns of a feature, as described in digests."""
    columns = [[column.key, column.dtype, column.shape] for column in feature.columns]
    return columns[0] if feature.joined is None else columns


def _listing(meta: DatasetMetadata) -> list[list[str]]:
    """Return the size, and date or hash, of each parquet file, to detect a dataset rewritten in place."""
    listing = []
    for folder in sorted({path.rpartition("/")[0] for path in meta.data_files}):
        entries = meta.fs.find(f"{meta.base}/{folder}".rstrip("/"), maxdepth=1, detail=True)
        for name, entry in sorted(entries.items()):
            marks = [entry.get(mark) for mark in ("size", "mtime", "ETag", "LastModified", "md5Hash", "created")]
            listing.append([name, *map(str, marks)])
    return listing


def _to_json(stats: Stats) -> dict[str, dict[str, list]]:
    return {key: {name: value.tolist() for name, value in values.items()} for key, values in stats.items()}
