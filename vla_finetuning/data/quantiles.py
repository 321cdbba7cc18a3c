"""Compute exact statistics of columns: quantiles over all chosen frames, at any size of a dataset.

LeRobot stores frame-weighted means of the episodes' quantiles (`data/statistics.py`), and half of a real dataset's
values can lie outside these. This module counts values instead. A float32 maps to an integer that keeps the order, and
counts of equal values are merged over files. The q-quantile is the smallest value that at least a share q of the frames
does not exceed (NumPy's `inverted_cdf`). With many values, a first pass counts them by their upper 16 bits, and a
second pass counts only values in the groups around quantiles.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata, Feature, Stats
from vla_finetuning.data.idle import Movement
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.relative_actions import ACTION, STATE, RelativeActions, relative_chunks
from vla_finetuning.data.statistics import cached_stats, digest, episode_arrays, files_of, in_threads

# Most values that are counted in one pass (256 MiB of counts at most).
ONE_PASS_VALUES = 2**23
COARSE_BITS = 16
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
# Files, and episodes of each file, that `sample_rows` reads, both evenly spaced.
SAMPLE_FILES, SAMPLE_FILE_EPISODES = 4, 16
# Largest share of values outside a range: 3 % more than expected.
LIMITS = {("min", "max"): 0.03, ("q01", "q99"): 0.05, ("q10", "q90"): 0.23}
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Source:
    """Episodes of a dataset whose frames are counted."""

    meta: DatasetMetadata
    episodes: np.ndarray  # int64, ascending
    weight: float = 1.0  # of each frame
    movement: Movement | None = None  # criterion of idle frames, which do not count, nor do chunks that begin with one
    step: int = 1  # frames between two actions of a chunk

    def relative(self, relative: RelativeActions | None) -> RelativeActions | None:
        """Return `relative` with the step of this source."""
        return None if relative is None else replace(relative, step=self.step)


def exact_stats(
    sources: Sequence[Source],
    keys: Sequence[str],
    *,
    cache_dir: str | Path | None,
    relative: RelativeActions | None = None,
    skip_unreadable: bool = False,
) -> tuple[Stats, list[Stats]]:
    """Return all statistics of the features `keys`: weighted over all sources, and of each source alone.

    Run on the driver, in one or two passes over the parquet files, with a thread per CPU. Dimensions are in the order
    of rows (`reorder_dimensions`), values are float32. Cache and errors are those of `statistics.complete_stats`.

    Args:
        keys: numeric features that all sources have.
        relative: compute the statistics of `action` from the relative actions of every chunk within an episode.
        skip_unreadable: warn about unreadable files instead of raising.
    """
    names = sorted(keys)
    relative = relative if ACTION in names else None
    columns = _columns(names, relative)
    digests = []
    for source in sources:
        actions = source.relative(relative)
        method = {
            "exact": 1,  # the version of this module
            "weights": [source.weight for source in sources],
            "skip": skip_unreadable,
            "order": [source.meta.features[key].order for key in columns],
            "relative": asdict(actions) if actions else None,
            "idle": source.movement.described() if source.movement else None,
        }
        digests.append(digest(source.meta, columns, source.episodes, method))
    name = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
    # The cache is flat: keys begin with the number of a source, or "joint".
    whose: list[Any] = ["joint", *range(len(sources))]
    keys = [f"{of} {key}" for of in whose for key in names]
    stats = cached_stats(keys, cache_dir, name, lambda: _compute(sources, names, relative, skip_unreadable))
    joint, *own = [{key: stats[f"{of} {key}"] for key in names} for of in whose]
    return joint, own


def sample_rows(
    meta: DatasetMetadata, episodes: np.ndarray, keys: Sequence[str], movement: Movement | None = None
) -> tuple[dict[str, np.ndarray], int]:
    """Sample the values of a few episodes: float64 (N, D) by feature, and the number of episodes read.

    Deterministic. Run on the driver; read at most SAMPLE_FILE_EPISODES episodes in each of SAMPLE_FILES files, without
    the frames that are idle by `movement`. Skip a damaged or missing file with a warning: training reports it.
    """
    features = {key: meta.features[key] for key in keys}
    by_key = features | {feature.key: feature for feature in (() if movement is None else movement.features)}
    samples: dict[str, list[np.ndarray]] = {key: [np.empty((0, _width(f)))] for key, f in features.items()}
    files, read = files_of(meta, episodes), 0
    for number in evenly_spaced(len(files), SAMPLE_FILES).tolist():
        file = files[number]
        chosen = evenly_spaced(len(file["episodes"]), SAMPLE_FILE_EPISODES)
        file |= {name: np.array(file[name])[chosen].tolist() for name in ("episodes", "first_rows", "lengths")}
        try:
            episode_values = [arrays for _, arrays in episode_arrays(meta.fs, features=list(by_key.values()), **file)]
        except (ValueError, FileNotFoundError) as error:
            _logger.warning("dataset %s: left out of the check of stored statistics: %s", meta.root, error)
            continue
        read += len(episode_values)
        for arrays in episode_values:
            moving = slice(None) if movement is None else ~movement.idle(arrays)
            for key, feature in features.items():
                samples[key].append(_vectors(arrays[feature.key], feature).astype(np.float64)[moving])
    return {key: np.concatenate(rows) for key, rows in samples.items()}, read


def outside(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the share of values (N, D) outside [low, high] (D,) by more than rounding, float64 (D,)."""
    low, high = np.ravel(low), np.ravel(high)
    # Tolerate a thousandth of the range: LeRobot's quantiles come from histograms.
    spare = 1e-3 * (high - low) + 1e-6 * np.maximum(abs(low), abs(high))
    return ((values < low - spare) | (values > high + spare)).mean(0)


def _width(feature: Feature) -> int:
    return int(np.prod(feature.shape))


def _vectors(values: np.ndarray, feature: Feature) -> np.ndarray:
    """Reshape values (N, *shape) to (N, D), in the order of rows."""
    values = values.reshape(len(values), _width(feature))
    return values if feature.order is None else values[:, list(feature.order)]


def _columns(keys: Sequence[str], relative: RelativeActions | None) -> list[str]:
    """Return the features to read: `keys`, and the state for relative actions."""
    return sorted({*keys, STATE}) if relative else list(keys)


# ---- counting -----------------------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """Counts of K groups of equal or nearly equal values, ascending."""

    code: np.ndarray  # column and lowest value of each group (`_encode`), uint64 (K,)
    number: np.ndarray  # number of values, float64 (K,)
    sum: np.ndarray  # float64 (K,)
    squares: np.ndarray  # sum of the squared values, float64 (K,)

    @classmethod
    def merge(cls, tallies: Iterable[Tally]) -> Tally:
        nothing = count_values(np.empty((0, 1), np.float32))
        columns = [np.concatenate(parts) for parts in zip(nothing, *tallies, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        code = columns[0][order]
        first = _firsts(code)
        return cls(code[first], *(np.add.reduceat(c[order], first) if len(first) else c for c in columns[1:]))

    def times(self, weight: float) -> Tally:
        return Tally(self.code, *(weight * column for column in self[1:]))


def _encode(values: np.ndarray, column: int) -> np.ndarray:
    """Encode float32 (N, D) as uint64 (N * D,): the column in the upper 32 bits, the ordered value in the lower."""
    bits = (values + np.float32(0)).view(np.uint32)  # -0.0 becomes 0.0
    ordered = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    return (ordered | np.arange(column, column + values.shape[1], dtype=np.uint64) << np.uint64(32)).ravel()


def _decode(code: np.ndarray) -> np.ndarray:
    ordered = code.astype(np.uint32)  # the lower half
    bits = np.where(ordered >> 31 == 1, ordered ^ np.uint32(1 << 31), ~ordered)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def _coarse(code: np.ndarray) -> np.ndarray:
    return code >> np.uint64(COARSE_BITS) << np.uint64(COARSE_BITS)


def _firsts(code: np.ndarray) -> np.ndarray:
    """Return where groups of equal codes begin."""
    return np.flatnonzero(np.concatenate([[True], code[1:] != code[:-1]])) if len(code) else np.empty(0, np.int64)


def count_values(
    values: np.ndarray, column: int = 0, *, coarse: bool = False, within: np.ndarray | None = None
) -> Tally:
    """Count float32 values (N, D) of columns `column` to `column + D`.

    Args:
        coarse: group values by their upper bits.
        within: coarse codes of groups; count only values in one of these groups.
    """
    code = _encode(values, column)
    if within is not None:
        code = code[np.isin(_coarse(code), within)]
    code.sort()
    value = _decode(code)
    groups = _coarse(code) if coarse else code
    first = _firsts(groups)
    if not len(first):
        return Tally(code, value, value, value)
    sums = (np.add.reduceat(column, first) for column in (np.ones_like(value), value, value * value))
    return Tally(groups[first], *sums)


def _ranks(tally: Tally) -> list[np.ndarray]:
    """Return, for each column, the indices of the groups of the minimum, the quantiles and the maximum: int64 (7,)."""
    columns = (tally.code >> np.uint64(32)).astype(np.int64)
    bounds = np.searchsorted(columns, np.arange(columns.max(initial=-1) + 2))
    positions = []
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        cumulative = tally.number[first:last].cumsum()
        ranks = np.searchsorted(cumulative / cumulative[-1], list(QUANTILES.values()))
        positions.append(first + np.concatenate([[0], ranks, [last - first - 1]]))
    return positions


def summary(tally: Tally) -> dict[str, np.ndarray]:
    """Return the statistics of D columns, float64 (D,) each; `count` is int64."""
    first = _firsts(tally.code >> np.uint64(32))
    count, total, squares = (np.add.reduceat(column, first) for column in tally[1:])
    values = _decode(tally.code)[np.array(_ranks(tally))]
    order_stats = dict(zip(("min", *QUANTILES, "max"), values.T, strict=True))
    mean = total / count
    variance = np.where(order_stats["min"] == order_stats["max"], 0.0, np.maximum(squares / count - mean * mean, 0.0))
    return {**order_stats, "mean": mean, "std": np.sqrt(variance), "count": count.round().astype(np.int64)}


# ---- passes -------------------------------------------------------------------------------------------------------


def _compute(
    sources: Sequence[Source], names: list[str], relative: RelativeActions | None, skip_unreadable: bool
) -> Stats:
    shapes = {key: sources[0].meta.features[key].shape for key in names}
    widths = [_width(sources[0].meta.features[key]) for key in names]
    per_frame = sum(
        width * (relative.chunk_size if relative and key == ACTION else 1)
        for key, width in zip(names, widths, strict=True)
    )
    values = sum(int(source.meta.episode_length[source.episodes].sum()) for source in sources) * per_frame
    read = partial(_pass, names=names, relative=relative, skip_unreadable=skip_unreadable)
    tallies = [read(source, coarse=values > ONE_PASS_VALUES) for source in sources]
    for source, tally in zip(sources, tallies, strict=True):
        if len(_firsts(tally.code >> np.uint64(32))) < sum(widths):
            raise ValueError(
                f"dataset {source.meta.root}: no value is left to compute statistics of {names}: no file could be "
                "read, or no whole action chunk begins at a frame that --dataset.skip_idle keeps"
            )
    if values > ONE_PASS_VALUES:
        codes = _around_quantiles([*tallies, _joint(tallies, sources)])
        for number, (source, tally) in enumerate(zip(sources, tallies, strict=True)):
            rest = ~np.isin(tally.code, codes)
            tallies[number] = Tally.merge([Tally(*(c[rest] for c in tally)), read(source, within=codes)])
    all_stats: Stats = {}
    whose: list[Any] = ["joint", *range(len(sources))]
    for of, tally in zip(whose, [_joint(tallies, sources), *tallies], strict=True):
        stats, end = summary(tally), 0
        for key, width in zip(names, widths, strict=True):
            first, end = end, end + width
            all_stats[f"{of} {key}"] = {name: value[first:end].reshape(shapes[key]) for name, value in stats.items()}
            all_stats[f"{of} {key}"]["count"] = stats["count"][first : first + 1]
    return all_stats


def _around_quantiles(tallies: Sequence[Tally]) -> np.ndarray:
    """Return the codes of the groups of quantiles and of their neighbours, ascending: sums of weights are rounded."""
    codes = []
    for tally in tallies:
        ranks = np.concatenate([np.empty(0, np.int64), *_ranks(tally)])
        codes += [tally.code[np.clip(ranks + shift, 0, len(tally.code) - 1)] for shift in (-1, 0, 1)]
    return np.unique(np.concatenate(codes))


def _joint(tallies: Sequence[Tally], sources: Sequence[Source]) -> Tally:
    if len(tallies) == 1:
        return tallies[0]
    return Tally.merge(tally.times(source.weight) for tally, source in zip(tallies, sources, strict=True))


def _pass(
    source: Source,
    *,
    names: list[str],
    relative: RelativeActions | None,
    skip_unreadable: bool,
    coarse: bool = False,
    within: np.ndarray | None = None,
) -> Tally:
    """Count the values of a source in a pass over its files."""
    relative = source.relative(relative)
    features = {key: source.meta.features[key] for key in _columns(names, relative)}
    movement, read = source.movement, dict(features)
    read |= {feature.key: feature for feature in (() if movement is None else movement.features)}
    starts = np.cumsum([0, *(_width(features[key]) for key in names)]).tolist()

    def count_file(file: dict[str, Any]) -> Tally:
        tallies: list[Tally] = []
        for _, arrays in episode_arrays(source.meta.fs, features=list(read.values()), **file):
            rows = {key: _vectors(arrays[f.key], f).astype(np.float32) for key, f in features.items()}
            per_frame = dict.fromkeys(rows, 1)
            if relative is not None:
                rows[ACTION] = relative_chunks(rows[ACTION], rows[STATE], relative)
                per_frame[ACTION] = relative.chunk_size
            if movement is not None:
                moving = ~movement.idle(arrays)
                # Chunks begin at an episode's first frames.
                rows = {k: v[np.repeat(moving, per_frame[k])[: len(v)]] for k, v in rows.items()}
            tallies += [
                count_values(rows[key], start, coarse=coarse, within=within)
                for key, start in zip(names, starts, strict=False)
            ]
        return Tally.merge(tallies)

    unreadable = ("statistics are computed without", lambda _: Tally.merge([])) if skip_unreadable else None
    return Tally.merge(in_threads(source.meta, source.episodes, count_file, unreadable))
