"""Look at a LeRobot v3 dataset before training: a few images, curves, and findings of what seems wrong.

`look_at` reads a sample of episodes and decodes a few frames, so its cost is bounded for datasets of any size. Ray is
not started. Findings of a sample are hints, not proofs; `Look.sample` says how much was read.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.dataset import known_episodes
from vla_finetuning.data.dataset_files import check_files, find_missing_files
from vla_finetuning.data.metadata import NUMERIC_DTYPES, DatasetMetadata, Feature, dimension_names, episode_ranges
from vla_finetuning.data.options import Features, Reading, Selection
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.quantiles import LIMITS, outside
from vla_finetuning.data.reader import height_width
from vla_finetuning.data.relative_actions import ACTION, STATE

# Returns, by episode, the error that would end a run which reads these features.
Problems = Callable[[DatasetMetadata, np.ndarray, Features], Mapping[int, str]]

# Rows to read without images, in whole episodes, at least one.
SAMPLE_ROWS = 50_000
# Minimum number of episodes to read, regardless of their length.
LEAST_EPISODES = 10
MOMENTS, CAMERA_EPISODES, MAX_CAMERAS = 5, 3, 8
# Bytes of the sampled rows, and pixels of the longer side of a decoded image. 120 images are at most 110 MB; pages
# show them half as wide.
SAMPLE_BYTES, IMAGE_SIDE = 256 * 2**20, 640

# A jump is a move of more than JUMP_MEDIANS times the dimension's median move (zeros left out), and of more than
# JUMP_RANGES of the range q01..q99.
JUMP_MEDIANS, JUMP_RANGES = 20.0, 0.5
# Distance of two timestamps, in frames, above which a frame is missing between them.
GAP_FRAMES = 1.5
# An image is dark if its 99th percentile is below DARK_LEVEL. A camera is frozen if no block of 8 x 8 pixels changes by
# more than FROZEN_CHANGE between two moments of an episode; compression alone changes a block's mean by less.
DARK_LEVEL, FROZEN_CHANGE, BLOCK = 16, 2.0, 8
# An extreme beyond this normalised value is an outlier; q01 and q99 are at -1 and 1.
OUTLIER = 5.0


class Finding(NamedTuple):
    """Something that seems wrong."""

    kind: str  # damaged, dark, frozen, gaps, duplicates, quantiles, statistics, constant, outliers or jumps
    text: str


class Range(NamedTuple):
    """One dimension's normalisation range. q01 and q99 are NaN if stats.json lacks them."""

    name: str
    minimum: float
    q01: float
    mean: float
    q99: float
    maximum: float

    def scaled[V: (float, np.ndarray)](self, value: V) -> V:
        """Normalise a value by quantiles: q01 to -1, q99 to 1. NaN if the range is empty or unknown."""
        half = (self.q99 - self.q01) / 2
        return (value - self.q01) / (half if half > 0 else float("nan")) - 1

    @property
    def outliers(self) -> bool:
        return abs(self.scaled(self.minimum)) > OUTLIER or abs(self.scaled(self.maximum)) > OUTLIER


@dataclass(frozen=True, eq=False)
class Moment:
    """Frames of all cameras at one time of an episode, `{camera_key: uint8 (H, W, 3)}`, at most IMAGE_SIDE long.

    With `is_augmented`, each frame has augmented copies below it (`augmented_frames`).
    """

    episode: int
    time_s: float
    images: dict[str, np.ndarray]
    is_augmented: bool = False


@dataclass(frozen=True, eq=False)
class Look:
    """The result of looking at a dataset.

    Attributes:
        episodes: the episodes that were read, int64.
        rows: number of rows that were read.
        shown: the episode of `time_s`, float64 (N,), `curves`, `{feature: float (N, D)}`, and `sheet`.
        ranges: range of each dimension, for features in stats.json. Where its quantiles do not describe the rows that
            were read, q01 and q99 are those of the rows.
        findings: warnings, worst first.
        outside: per feature, the share of the values outside of q01..q99 of stats.json, float64 (D,).
    """

    meta: DatasetMetadata
    episodes: np.ndarray
    rows: int
    shown: int
    time_s: np.ndarray
    curves: dict[str, np.ndarray]
    sheet: list[Moment]
    ranges: dict[str, list[Range]]
    findings: list[Finding]
    outside: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def shares(self) -> list[str]:
        """Return a line for each feature with quantiles in stats.json: the share of values outside of them."""
        return [
            f"{key}: of the values, {format_share(self.meta, key, share)} lie outside q01..q99 of meta/stats.json "
            "(2 % should)"
            for key, share in self.outside.items()
        ]

    @property
    def sample(self) -> str:
        """Describe the sample that the findings are based on."""
        meta = self.meta
        some, all_of_them = len(self.episodes), meta.total_episodes
        is_complete = some == all_of_them and self.rows == meta.total_frames
        read = "every row" if is_complete else f"{self.rows:,} of {meta.total_frames:,} rows"
        scope = "" if is_complete else f", from {some:,} of {all_of_them:,} episodes spread evenly"
        cameras = f"; images at {MOMENTS} moments of up to {CAMERA_EPISODES} episodes" if meta.camera_keys else ""
        return f"{read} without images{scope}{cameras}"

    @property
    def task_counts(self) -> list[tuple[str, int]]:
        """Return instructions with their number of episodes, most frequent first."""
        return Counter(task for tasks in self.meta.episode_tasks for task in tasks).most_common()


def look_at(meta: DatasetMetadata, problems_of: Problems | None = None) -> Look:
    """Read a sample of the dataset, and return what is in it. Runs on the driver, without Ray.

    Damaged rows and videos become findings; the rest is still read. `problems_of` reads a sample as a run would
    (`plan.look`); it is called if nothing is damaged.
    """
    known, reader = known_episodes(meta), EpisodeReader(meta, [])
    check_files(meta, camera_keys=[], skip=True)
    missing = find_missing_files(meta, episodes=known)
    columns = _Columns(vector_keys(meta))
    most_rows = max(1, SAMPLE_BYTES // reader.source.row_bytes())
    episodes = known[sample_episodes(meta.episode_length[known], min(SAMPLE_ROWS, most_rows))]
    damaged: dict[str, list[int]] = {}
    for episode, reason in meta.broken.get("data", {}).items():
        if episode >= meta.first_episode:
            damaged.setdefault(reason, []).append(episode)
    read = []
    for episode in episodes.tolist():
        try:
            rows = min(int(meta.episode_length[episode]), max(1, most_rows // len(episodes)))
            columns.add(episode, reader.read(episode, np.arange(rows)))
        except (ValueError, OSError) as error:
            if episode not in missing.episodes:
                damaged.setdefault(_reason(meta, error), []).append(episode)
            continue
        read.append(episode)
    # An example from the middle of the sample, with enough frames to show motion.
    intact = [episode for episode in read if episode not in missing.episodes] or read
    example = max(intact[len(intact) // 4 :] or [0], key=lambda e: min(int(meta.episode_length[e]), 100))
    cameras = [key for key in meta.camera_keys if not meta.features[key].is_depth]
    if len(missing.episodes) == len(known):
        cameras = [key for key in cameras if key not in missing.cameras]
    sheet, camera_findings = _sample_cameras(meta, cameras[:MAX_CAMERAS], example, intact)

    findings = [
        Finding("damaged", f"{_episodes(members)}: cannot be read: {why}") for why, members in list(damaged.items())[:5]
    ]
    if missing:
        findings.append(
            Finding(
                "damaged",
                f"{missing}: training goes on without the {len(missing.episodes)} episodes that need these files by "
                f"--dataset.exclude_episodes={episode_ranges(missing.episodes.tolist())}",
            )
        )
    findings += columns.not_finite()
    findings += camera_findings
    if problems_of is not None and not any(finding.kind == "damaged" for finding in findings):
        features = Features(camera_keys=cameras[:MAX_CAMERAS], columns=vector_keys(meta))
        problems = problems_of(meta, known, features)
        findings += [
            Finding("damaged", f"episode {episode} would end a run: {problem}")
            for episode, problem in list(problems.items())[:5]
        ]
    findings += columns.gaps(meta.fps)
    findings += columns.duplicates()
    is_whole = columns.rows == meta.episode_length[read].sum()
    shares = columns.outside(meta) if is_whole else {}  # the beginnings of episodes are no fair sample
    ranges = columns.ranges(meta, shares)
    findings += missing_quantiles(meta)
    findings += wrong_quantiles(meta, shares)
    findings += columns.constants(meta, ranges)
    findings += columns.outliers(ranges)
    findings += columns.jumps(meta)
    time_s, curves = columns.episode(example) if read else (np.zeros(0), {})
    return Look(
        meta=meta,
        episodes=np.asarray(read, np.int64),
        rows=columns.rows,
        shown=example,
        time_s=time_s,
        curves=curves,
        sheet=sheet,
        ranges=ranges,
        findings=findings,
        outside=shares,
    )


def vector_keys(meta: DatasetMetadata) -> list[str]:
    """Return the keys of state, action, and other numeric vectors that a policy could use."""
    return [
        key
        for key, feature in meta.features.items()
        if feature.dtype in NUMERIC_DTYPES
        and len(feature.shape) == 1
        and (key == ACTION or key.startswith((f"{ACTION}.", "observation.")))
    ]


def ranges_of(meta: DatasetMetadata, key: str) -> list[Range]:
    """Return the ranges of a feature's dimensions; empty if stats.json does not describe the feature."""
    stats, size = meta.stats.get(key, {}), meta.features[key].shape[0]
    if any(name not in stats or stats[name].shape != (size,) for name in ("min", "max", "mean")):
        return []
    absent = np.full(size, np.nan)
    columns = [stats.get(name, absent) for name in ("min", "q01", "mean", "q99", "max")]
    columns = [column if column.shape == (size,) else absent for column in columns]
    return [Range(n, *map(float, v)) for n, v in zip(dimension_names(meta, key), np.stack(columns, 1), strict=True)]


def scaled_ranges(ranges: Sequence[Range]) -> np.ndarray:
    """Return minimum, mean and maximum of D dimensions, normalised by `Range.scaled`, float (D, 3)."""
    return np.array([[r.scaled(r.minimum), r.scaled(r.mean), r.scaled(r.maximum)] for r in ranges]).reshape(-1, 3)


def sample_episodes(lengths: np.ndarray, rows: int) -> np.ndarray:
    """Choose evenly spread episodes with about `rows` rows, at least LEAST_EPISODES; int64 ascending."""
    total = int(lengths.sum())
    count = len(lengths) if total <= rows else max(LEAST_EPISODES, int(len(lengths) * rows / total))
    return evenly_spaced(len(lengths), count)


def format_share(meta: DatasetMetadata, key: str, share: np.ndarray) -> str:
    """Format the mean share of a feature's dimensions, float (D,), and the largest one."""
    return f"{share.mean():.1%} ({share.max():.1%} of {dimension_names(meta, key)[int(share.argmax())]})"


def wrong_quantiles(meta: DatasetMetadata, outside: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    """Find features with more values outside of the stored q01..q99 than correct quantiles allow."""
    for key, share in outside.items():
        if share.max() > LIMITS["q01", "q99"]:
            yield Finding(
                "statistics",
                f"{key}: {format_share(meta, key, share)} of the values lie outside q01..q99 of meta/stats.json: the "
                "statistics are wrong, not the data, as where the quantiles of episodes were averaged (LeRobot does); "
                "training computes true ones by default (--dataset.statistics)",
            )


def missing_quantiles(meta: DatasetMetadata) -> Iterator[Finding]:
    missing = [k for k in (STATE, ACTION) if k in meta.features and not {"q01", "q99"} <= meta.stats.get(k, {}).keys()]
    if missing:
        yield Finding(
            "quantiles",
            f"meta/stats.json has no quantiles (q01, q99) of {' and '.join(missing)}, which PI0.5 normalises by: "
            "training computes them first, which reads every parquet file",
        )


@dataclass
class _Columns:
    """The numeric columns of the sampled episodes, and the findings in them."""

    keys: list[str]
    rows: int = 0
    times: dict[int, np.ndarray] = field(default_factory=dict)
    values: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)

    def add(self, episode: int, batch: dict[str, np.ndarray]) -> None:
        self.times[episode] = batch["timestamp"].astype(np.float64)
        self.rows += len(self.times[episode])
        for key in self.keys:
            values = batch[key].astype(np.float64)
            self.values.setdefault(key, {})[episode] = values.reshape(len(values), -1)

    def all_rows(self, key: str) -> np.ndarray:
        """Return the values of all episodes, float64 (N, D)."""
        return np.concatenate(list(self.values[key].values()))

    def episode(self, episode: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return self.times[episode], {key: self.values[key][episode] for key in self.keys}

    def not_finite(self) -> Iterator[Finding]:
        for key in self.keys:
            if bad := [e for e, v in self.values.get(key, {}).items() if not np.isfinite(v).all()]:
                yield Finding("damaged", f"{key} holds NaN or infinity in {_episodes(bad)}: leave them out")

    def gaps(self, fps: int) -> Iterator[Finding]:
        """Find missing frames, and frames out of order, by their timestamps."""
        steps = {episode: np.diff(time_s) * fps for episode, time_s in self.times.items()}
        dropped = {episode: int(((step > GAP_FRAMES) | (step <= 0)).sum()) for episode, step in steps.items()}
        if any(dropped.values()):
            yield Finding(
                "gaps",
                f"dropped frames: {sum(dropped.values())} timestamps in {_episodes(e for e in dropped if dropped[e])} "
                f"do not follow the one before at 1/{fps} s; action chunks there span more time than the policy thinks",
            )

    def duplicates(self) -> Iterator[Finding]:
        """Find episodes of more than one frame whose states and actions are equal bit for bit."""
        groups: dict[bytes, list[int]] = {}
        for episode in [episode for episode, time_s in self.times.items() if len(time_s) > 1 and self.keys]:
            values = b"".join(self.values[key][episode].tobytes() for key in self.keys)
            groups.setdefault(hashlib.sha256(values).digest(), []).append(episode)
        if same := [members for members in groups.values() if len(members) > 1]:
            text = "; ".join(_episodes(members) for members in same[:5])
            yield Finding(
                "duplicates",
                f"duplicated episodes: {text}{' and more' if len(same) > 5 else ''} hold the same states and actions: "
                "they count twice in training, and held-out copies make the held-out error look better than it is",
            )

    def outside(self, meta: DatasetMetadata) -> dict[str, np.ndarray]:
        """Return for each feature the share of values outside of the stored q01..q99, float64 (D,)."""
        shares = {}
        for key in self.keys:
            stored = ranges_of(meta, key)
            if self.rows and not all(np.isnan(r.q01) for r in stored):  # dimensions with NaN have no value outside
                values = self.all_rows(key)
                shares[key] = outside(values, np.array([r.q01 for r in stored]), np.array([r.q99 for r in stored]))
        return shares

    def ranges(self, meta: DatasetMetadata, outside: Mapping[str, np.ndarray]) -> dict[str, list[Range]]:
        """Return `ranges_of`, with quantiles of the read rows for features whose stored quantiles are wrong."""
        wrong = {key for key, share in outside.items() if share.max() > LIMITS["q01", "q99"]}
        by_key = {key: ranges for key in self.keys if (ranges := ranges_of(meta, key))}
        for key in wrong:
            low, high = np.quantile(self.all_rows(key), [0.01, 0.99], axis=0)
            by_key[key] = [r._replace(q01=float(low[i]), q99=float(high[i])) for i, r in enumerate(by_key[key])]
        return by_key

    def outliers(self, ranges: Mapping[str, Sequence[Range]]) -> Iterator[Finding]:
        """Find dimensions whose extremes lie far outside of their normalisation range."""
        for key, dims in ranges.items():
            if far := [i for i, r in enumerate(dims) if r.outliers]:
                values = self.all_rows(key) if self.rows else np.zeros((0, len(dims)))
                beyond = sum(int((np.abs(dims[i].scaled(values[:, i])) > OUTLIER).sum()) for i in far)
                yield Finding(
                    "outliers",
                    f"{key}: {_list([dims[i].name for i in far])} reach beyond {OUTLIER:g} times the range that 98 % "
                    f"of the values lie in ({beyond} of the {len(values) * len(far)} values that were read): glitches, "
                    "or rare moves that a policy sees far out of its range",
                )

    def constants(self, meta: DatasetMetadata, stored: Mapping[str, Sequence[Range]]) -> Iterator[Finding]:
        """Find dimensions without spread, whose normalisation would divide by almost zero."""
        why = (
            "LeRobot normalises by dividing by almost nothing, so that the slightest change on the robot is a huge "
            "input; training here takes a range of its own (docs/statistics.md)"
        )
        for key in self.keys if self.rows > 1 else ():
            flat = np.ptp(self.all_rows(key), axis=0) == 0
            narrow = [r.q01 == r.q99 and not flat[i] for i, r in enumerate(stored.get(key, []))] or [False] * len(flat)
            for is_bad, problem in ((flat, "never changes"), (narrow, "has the same q01 and q99 though it changes")):
                if chosen := [name for name, bad in zip(dimension_names(meta, key), is_bad, strict=True) if bad]:
                    yield Finding("constant", f"{key}: {_list(chosen)} {problem}: {why}")

    def jumps(self, meta: DatasetMetadata) -> Iterator[Finding]:
        """Find actions that jump from one frame to the next."""
        for key in (key for key in self.keys if key == ACTION or key.startswith(f"{ACTION}.")):
            if not self.values.get(key):
                continue
            low, high = np.quantile(self.all_rows(key), [0.01, 0.99], axis=0)
            moves = {e: np.abs(np.diff(v, axis=0)) for e, v in self.values[key].items()}
            pooled = np.concatenate(list(moves.values()))
            for i, name in enumerate(dimension_names(meta, key)):
                moving = pooled[:, i][pooled[:, i] > 0]
                usual = float(np.median(moving)) if len(moving) else 0.0
                limit = max(JUMP_MEDIANS * usual, JUMP_RANGES * float(high[i] - low[i]))
                if not (jumps := int((moving > limit).sum())):
                    continue
                worst = max((e for e in moves if len(moves[e])), key=lambda e: float(moves[e][:, i].max()))
                at = int(moves[worst][:, i].argmax()) + 1
                yield Finding(
                    "jumps",
                    f"{key}: {name} jumps {jumps} times, by {moves[worst][at - 1, i]:.4g} into frame {at} of episode "
                    f"{worst}, where it usually moves by {usual:.2g} (a gripper may; a joint may not: a glitch, or an "
                    "angle that wraps around)",
                )


def _sample_cameras(
    meta: DatasetMetadata, cameras: Sequence[str], example: int, read: Sequence[int]
) -> tuple[list[Moment], list[Finding]]:
    """Decode moments of a few episodes; return those of `example`, and findings about dark or frozen cameras."""
    spread = [read[i] for i in evenly_spaced(len(read), CAMERA_EPISODES)]
    chosen = list(dict.fromkeys([example, *spread]))[: CAMERA_EPISODES if read else 0]
    images: dict[str, dict[int, np.ndarray]] = {key: {} for key in cameras}
    times, findings = dict[int, np.ndarray](), []
    for key in cameras:
        try:
            reader = EpisodeReader(meta, [key], _shown_size(meta.features[key]))
            for episode in chosen:
                frames = evenly_spaced(int(meta.episode_length[episode]), MOMENTS)
                images[key][episode] = reader.read(episode, frames)[key]
                times[episode] = frames / meta.fps
        except (ValueError, OSError) as error:
            findings.append(Finding("damaged", f"camera {key} cannot be read: {_reason(meta, error)}"))
        findings += camera_findings(key, images[key].values())
    sheet = [
        Moment(example, float(time_s), {key: images[key][example][i] for key in cameras if example in images[key]})
        for i, time_s in enumerate(times.get(example, []))
    ]
    return sheet, findings


def camera_findings(key: str, episodes: Iterable[np.ndarray]) -> list[Finding]:
    """Find out whether a camera is dark in all images of each episode, uint8 (N, H, W, 3), or frozen within each."""
    episodes = [images for images in episodes if len(images)]
    if not episodes:
        return []
    if max(float(np.quantile(images, 0.99)) for images in episodes) < DARK_LEVEL:
        return [Finding("dark", f"camera {key} is dark: covered, unplugged or not exposed?")]
    longer = [images for images in episodes if len(images) > 1]
    if longer and max(float(np.ptp(_blocks(images), axis=0).max()) for images in longer) <= FROZEN_CHANGE:
        return [Finding("frozen", f"camera {key} is frozen: its image does not change within an episode")]
    return []


def _blocks(images: np.ndarray) -> np.ndarray:
    """Return the mean brightness of blocks, which compression hardly changes, float (N, H', W')."""
    n, height, width, _ = images.shape
    side = min(BLOCK, height, width)
    rows, columns = height // side, width // side
    cropped = images[:, : rows * side, : columns * side].astype(np.float32)
    return cropped.reshape(n, rows, side, columns, side, 3).mean(axis=(2, 4, 5))


class EpisodeReader:
    """Reads frames of known episodes, with their vectors and some cameras; frames may be half a frame off in time."""

    def __init__(self, meta: DatasetMetadata, camera_keys: list[str], image_size: tuple[int, int] | None = None):
        features = Features(camera_keys, vector_keys(meta), image_size=image_size, tolerance_s=0.5 / meta.fps)
        known = known_episodes(meta)
        self.source = LeRobotDatasource([meta], Selection([known]), features, reading=Reading(check_files=False))
        length = meta.episode_length * np.isin(meta.episode_index, known)
        self._first = np.cumsum(length) - length  # position of each episode in stored order

    def read(self, episode: int, frames: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of some frames, ascending, of an episode."""
        (batch,) = self.source.read_rows((self._first[episode] + frames).tolist(), len(frames))
        return batch


def _shown_size(feature: Feature) -> tuple[int, int] | None:
    """Return height and width for decoding, an integer fraction of the camera's; None if it is small enough."""
    height, width = height_width(feature)
    factor = -(-max(height, width) // IMAGE_SIDE)
    return None if factor == 1 else (max(1, height // factor), max(1, width // factor))


def _reason(meta: DatasetMetadata, error: Exception) -> str:
    return str(error).removeprefix(f"dataset {meta.root}: ").removeprefix(f"{meta.root}: ")


def _episodes(numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"episode{'s' if len(numbers) > 1 else ''} {_list(list(map(str, numbers)))}"


def _list(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
