"""Choose a run's normalisation statistics: stored in meta/stats.json, or computed from the training frames.

LeRobot averages the quantiles of episodes, which can leave half of a real dataset's values outside q01..q99. So a
sample of rows is compared with the stored statistics before a run, and statistics that do not fit are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.processor.relative_action_processor import RelativeActionsProcessorStep
from lerobot.utils.constants import IMAGENET_STATS

from vla_finetuning.data.dataset import Stats, known_episodes
from vla_finetuning.data.frames import movement_keys
from vla_finetuning.data.idle import Movement
from vla_finetuning.data.metadata import CAMERA_DTYPES, DatasetMetadata, Feature, dimension_names
from vla_finetuning.data.quantiles import LIMITS, Source, exact_stats, outside, sample_rows
from vla_finetuning.data.relative_actions import ACTION, RelativeActions, check_relative, relative_action_stats
from vla_finetuning.data.statistics import RANGES, check_stats, complete_stats
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.fields import decided, did_you_mean
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.mixture import AGGREGATED, check_ranges, join_stats, stats_in_row_order
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.processors import required_stats, with_imagenet_stats
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.run.checkpoint import latest_checkpoint
from vla_finetuning.run.folder import STATISTICS_NAME
from vla_finetuning.run.job import Job

logger = logging.getLogger(__name__)

# Names of statistics by feature: `{"action": {"q01", "q99"}}`.
Names = dict[str, set[str]]
Needed = Mapping[str, set[str]]
Mode = Literal["auto", "exact", "stored", "lerobot"]
# Half the range of a constant dimension, as a share of the larger of its value and 1. A policy's output then hardly
# changes the dimension, and a sensor's noise stays small. LeRobot's normaliser divides by 1e-8.
CONSTANT_RANGE = 0.01


@dataclass(frozen=True)
class Survey:
    """What a robot's policy needs of its datasets' stored statistics, and how well these describe the rows."""

    robot: Robot
    rows: Rows  # of the robot's datasets
    vectors: Needed  # statistics to compute for "exact"
    missing: Names
    misdescribed: str  # features, with commas
    lines: list[str]  # of the plan

    @property
    def reason(self) -> str:
        """Say why "auto" is "exact"; "" if the stored statistics suffice."""
        if self.misdescribed:
            return (
                f"those stored do not describe {self.misdescribed} (LeRobot averages the episodes' quantiles); "
                "--dataset.statistics=stored trains with them"
            )
        if self.missing:
            return f"meta/stats.json lacks {_format_names(self.missing)}"
        if len(self.rows.metas) > 1 and any(name.startswith("q") for names in self.vectors.values() for name in names):
            return "quantiles of several datasets cannot be joined from their own"
        return ""


def with_statistics(config: Config, rows: Rows, robots: Sequence[Robot]) -> tuple[Config, tuple[Robot, ...]]:
    """Decide --dataset.statistics=auto, with one result for all robots.

    Robots get their statistics, or the names of the statistics to compute (`missing_stats`).
    """
    surveys = [_survey(config.dataset, rows.select_datasets(robot.datasets), robot) for robot in robots]
    mode: Mode = config.dataset.statistics
    if mode == "auto":
        mode = "exact" if any(survey.reason for survey in surveys) else "stored"
    robots = tuple(_decide_robot(config, mode, survey) for survey in surveys)
    return decided(config, {"dataset.statistics": mode}), robots


def _survey(d: DatasetOptions, rows: Rows, robot: Robot) -> Survey:
    needed, relative = needed_stats(d, rows, robot), relative_actions(robot.config)
    missing = missing_stats(rows.metas, needed, () if relative is None else (ACTION,))
    if relative is not None and ACTION in missing:
        for number, meta in enumerate(rows.metas):
            episodes = known_episodes(meta) if d.statistics == "lerobot" else rows.train_episodes[number]
            check_relative(meta, replace(relative, step=rows.window_step(number)), episodes)
    vectors = needed_of_vectors(rows.metas[0].features, needed)
    computed_anew = set(vectors) if d.statistics == "exact" else set() if relative is None else {ACTION}
    for meta in rows.metas:
        check_stats(meta, {key: names for key, names in needed.items() if key not in computed_anew})
    lines, misdescribed = _compare(d, rows, vectors, relative)
    return Survey(robot, rows, vectors, missing, misdescribed, lines)


def _decide_robot(config: Config, mode: Mode, survey: Survey) -> Robot:
    d, robot, metas, missing = config.dataset, survey.robot, survey.rows.metas, survey.missing
    if mode == "stored" and missing:
        raise ValueError(
            "--dataset.statistics=stored, and what the policy is normalised by is not in meta/stats.json of the dataset"
            f"{'s' * (len(metas) > 1)} {', '.join(meta.root for meta in metas)}: {_format_names(missing)}; leave the "
            "flag out"
        )
    if not (missing or survey.misdescribed or d.mixed_ranges):
        check_ranges(metas, robot.match.keys)
    line = _describe_choice(d, mode, survey)
    if mode == "exact":
        missing = dict(survey.vectors)
    stats: Stats = {}
    if not missing:
        joint = joint_stats(config, survey.rows, robot, metas)
        stats = normalisation_stats(replace(d, statistics=mode), robot, metas, joint)
    return replace(robot, stats=stats, missing_stats=missing, statistics=(line, *survey.lines))


def with_placeholders(robot: Robot, metas: Sequence[DatasetMetadata]) -> Robot:
    """Replace missing statistics by a range of 0 to 1, so that the robot's processors can be built."""
    if not robot.missing_stats:
        return robot
    low, meta = {"min", "mean", "q01", "q10"}, metas[robot.datasets[0]]
    needed = required_stats(robot.config, {key: meta.features[key] for key in robot.match.keys})
    shapes = {key: (3, 1, 1) if key in meta.camera_keys else meta.features[key].shape for key in needed}
    stats = {
        key: {name: np.full(shapes[key], 0.0 if name in low else 1.0) for name in names}
        for key, names in needed.items()
    }
    return replace(robot, stats=stats)


def _compare(d: DatasetOptions, rows: Rows, vectors: Needed, relative: RelativeActions | None) -> tuple[list[str], str]:
    """Compare stored statistics with a sample of rows; return lines for the plan, and features that do not fit."""
    lines, misdescribed = [], []
    for meta, chosen in zip(rows.metas, rows.train_episodes, strict=True):
        movement = movement_of(meta, d.skip_idle)
        sample, read = sample_rows(meta, chosen, list(vectors), movement) if vectors else ({}, 0)
        if not read:
            continue
        label = f"{meta.root}: " if len(rows.metas) > 1 else ""
        count = len(next(iter(sample.values())))
        lines.append(f"{label}looked at {count:,} rows of {read} of the {len(chosen):,} training episodes")
        for key, names in vectors.items():
            if relative is not None and key == ACTION:
                continue
            share = _share_outside(meta, key, names, sample[key])
            if share is not None:
                (low, high), shares = share
                worst = _entry_names(meta, key, len(shares))[int(shares.argmax())]
                lines.append(
                    f"{label}{key}: of the values, {shares.mean():.1%} lie outside {low}..{high} of meta/stats.json, "
                    f"{shares.max():.1%} of {worst}"
                )
                if shares.max() > LIMITS[low, high]:
                    misdescribed.append(key)
    return lines, ", ".join(dict.fromkeys(misdescribed))


def _describe_choice(d: DatasetOptions, mode: Mode, survey: Survey) -> str:
    if mode == "exact":
        if not survey.vectors:
            return "not needed: the policy normalises neither state nor actions"
        frames = "all frames of the training episodes" + " that --dataset.skip_idle leaves" * (d.skip_idle is not None)
        reason = survey.reason if d.statistics == "auto" else ""
        return f"computed before training, over {frames}{f': {reason}' if reason else ''}"
    text = "those in meta/stats.json"
    if mode == "lerobot":
        text += ", as LeRobot reads them"
        if survey.missing:
            names = _format_names(survey.missing)
            text += f"; to be computed as LeRobot does, averaging the episodes' quantiles: {names}"
    if survey.misdescribed:
        text += f"; WARNING: they do not describe {survey.misdescribed}: train with --dataset.statistics=exact"
    return text


def _format_names(missing: Needed) -> str:
    return "; ".join(f"{key}: {', '.join(sorted(names))}" for key, names in missing.items())


def _share_outside(
    meta: DatasetMetadata, key: str, names: set[str], values: np.ndarray
) -> tuple[tuple[str, str], np.ndarray] | None:
    """Return the names of a feature's range, as q01 and q99, and each dimension's share of values outside of it.

    None if the feature is not normalised by a range, or the stored one is incomplete.
    """
    stored = stats_in_row_order(meta, key)
    for ends in RANGES:
        if set(ends) <= names and all(np.size(stored.get(name, ())) == values.shape[1] for name in ends):
            return ends, outside(values, *(stored[name] for name in ends))
    return None


def _entry_names(meta: DatasetMetadata, key: str, width: int) -> list[str]:
    """Return the names of a feature's entries, also for features of more than one dimension."""
    names = dimension_names(meta, key)
    return names if len(names) == width else [f"{key}[{i}]" for i in range(width)]


def needed_of_vectors(features: Mapping[str, Feature], needed: Needed) -> dict[str, set[str]]:
    """Return the statistics to compute for "exact": `needed` without cameras."""
    return {key: set(names) for key, names in needed.items() if features[key].dtype not in CAMERA_DTYPES}


def movement_of(meta: DatasetMetadata, skip_idle: float | None) -> Movement | None:
    """Return the criterion for idle frames of --dataset.skip_idle; None without the option."""
    return None if skip_idle is None else Movement.from_metadata(meta, movement_keys(meta), skip_idle)


def compute_stats(
    config: Config, trained: Rows, robot: Robot, cache_dir: Path
) -> tuple[tuple[DatasetMetadata, ...], Stats]:
    """Return the metadata with a robot's missing statistics of each dataset, and `normalisation_stats` of all.

    With mixture_stats "weights", a dataset's weight is its number of rows in an epoch. Frames that --dataset.skip_idle
    leaves out do not count. Raises ValueError or FileNotFoundError for a data file that is missing or damaged.
    """
    metas, missing, relative = trained.metas, robot.missing_stats, relative_actions(robot.config)
    steps = trained.features.window_steps or (1,) * len(metas)
    if config.dataset.statistics == "lerobot":
        chosen = [np.union1d(*episodes) for episodes in zip(trained.train_episodes, trained.eval_episodes, strict=True)]
        specs = [None if relative is None else replace(relative, step=step) for step in steps]
        completed = tuple(
            _compute_as_lerobot(meta, episodes, missing, spec, cache_dir)
            for meta, episodes, spec in zip(metas, chosen, specs, strict=True)
        )
        joint = joint_stats(config, trained, robot, completed)
        return completed, normalisation_stats(config.dataset, robot, completed, joint)
    weights = [1.0] * len(metas)
    if _weighted(config):
        ranges_of_all = trained.selection.frame_ranges or ()
        counts = trained.identity["rows_per_source"]
        weights = [count / ranges.moving for count, ranges in zip(counts, ranges_of_all, strict=True)]
    movements = [movement_of(meta, config.dataset.skip_idle) for meta in metas]
    sources = [Source(*source) for source in zip(metas, trained.train_episodes, weights, movements, steps, strict=True)]
    joint, per_dataset = exact_stats(
        sources,
        list(missing),
        cache_dir=cache_dir,
        relative=relative,
        skip_unreadable=config.dataset.on_error == "skip",
    )
    completed = tuple(
        replace(meta, stats={**meta.stats, **{key: _as_in_files(meta, key, values) for key, values in stats.items()}})
        for meta, stats in zip(metas, per_dataset, strict=True)
    )
    joint = {**joint_stats(config, trained, robot, metas), **joint}
    return completed, normalisation_stats(config.dataset, robot, completed, joint)


def joint_stats(config: Config, rows: Rows, robot: Robot, metas: Sequence[DatasetMetadata]) -> Stats:
    """Join the own statistics of a robot's datasets `metas`, of the features that its policy gets."""
    counts = rows.identity["rows_per_source"] if _weighted(config) else None
    return join_stats(metas, counts, robot.match.keys)


def _weighted(config: Config) -> bool:
    return bool(config.dataset.mixture) and config.dataset.mixture_stats == "weights"


def _compute_as_lerobot(
    meta: DatasetMetadata, chosen: np.ndarray, missing: Needed, relative: RelativeActions | None, cache_dir: Path
) -> DatasetMetadata:
    """Compute missing statistics as LeRobot does, from all episodes, or from `chosen` if others cannot be read."""
    absolute = {key: names for key, names in missing.items() if relative is None or key != ACTION}

    def completed(episodes: np.ndarray) -> DatasetMetadata:
        stats = complete_stats(meta, absolute, cache_dir=cache_dir, episodes=episodes)
        if relative is not None and ACTION in missing:
            values = relative_action_stats(meta, relative, cache_dir=cache_dir, episodes=episodes)
            stats[ACTION] = _as_in_files(meta, ACTION, values)
        return replace(meta, stats=stats)

    episodes = known_episodes(meta)
    try:
        return completed(episodes)
    except (ValueError, FileNotFoundError) as error:
        if np.isin(episodes, chosen).all():
            raise
        result = completed(chosen)
        logger.warning("%s; statistics are computed of the chosen episodes alone", error)
        return result


def _as_in_files(meta: DatasetMetadata, key: str, stats: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return statistics whose dimensions are in the order of rows as `meta.stats` has them."""
    order = meta.features[key].order
    if order is None:
        return stats
    return {name: value if name == "count" else value[np.argsort(order)] for name, value in stats.items()}


def widen_ranges(stats: Stats, needed: Needed) -> Stats:
    """Widen the ranges of dimensions for which a normaliser would divide by zero.

    An empty range, as from q01 to q99, becomes minimum to maximum. If these are equal too, it becomes CONSTANT_RANGE
    around the value.
    """
    result = dict(stats)
    for key, names in needed.items():
        values = {name: np.asarray(value, np.float64) for name, value in stats.get(key, {}).items()}
        for low, high in (ends for ends in RANGES if set(ends) <= names & values.keys()):
            lower, upper = values[low], values[high]
            if {"min", "max"} <= values.keys():
                flat = _nearly_equal(lower, upper)
                lower, upper = np.where(flat, values["min"], lower), np.where(flat, values["max"], upper)
            flat, half = _nearly_equal(lower, upper), CONSTANT_RANGE * np.maximum(1, abs(lower))
            values[low], values[high] = np.where(flat, lower - half, lower), np.where(flat, upper + half, upper)
        if "std" in names & values.keys():
            mean, std = values["mean"], values["std"]
            values["std"] = np.where(std <= 1e-6 * abs(mean), CONSTANT_RANGE * np.maximum(1, abs(mean)), std)
        changed = {name for name in values if not np.array_equal(values[name], stats[key][name])}
        if changed:
            result[key] = {**stats[key], **{name: values[name] for name in changed}}
    return result


def _nearly_equal(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return high - low <= 1e-6 * np.maximum(abs(low), abs(high))


def needed_stats(d: DatasetOptions, rows: Rows, robot: Robot) -> Names:
    """Return the statistics that the policy's normalisation and its evaluation need."""
    match, features = robot.match, rows.metas[0].features
    needed = required_stats(robot.config, {key: features[key] for key in match.keys})
    if d.use_imagenet_stats:
        reduced = {k: names - IMAGENET_STATS.keys() if k in match.camera_keys else names for k, names in needed.items()}
        needed = {key: names for key, names in reduced.items() if names}
    if rows.any_held_out:
        # On held-out episodes, a policy is compared with the mean action (evaluation/open_loop.py).
        needed["action"] = needed.get("action", set()) | {"mean"}
    return needed


def missing_stats(
    metas: Sequence[DatasetMetadata], needed: Mapping[str, set[str]], always: Sequence[str] = ()
) -> Names:
    """Return the needed statistics that are not stored in every dataset, and all of features `always`.

    For several datasets, also the statistics from which LeRobot joins them. Raises ValueError if ones of cameras are
    missing.
    """
    if len(metas) > 1:
        needed = {key: names | AGGREGATED for key, names in needed.items()}
    missing = {
        key: {name for name in names if key in always or any(name not in meta.stats.get(key, {}) for meta in metas)}
        for key, names in needed.items()
    }
    missing = {key: names for key, names in missing.items() if names}
    if cameras := sorted(missing.keys() & set(metas[0].camera_keys)):
        raise ValueError(
            f"dataset {', '.join(meta.root for meta in metas)}: the policy normalises images, and meta/stats.json "
            f"lacks {', '.join(f'{sorted(missing[key])} of {key}' for key in cameras)}. These are not computed here, "
            "since every video would have to be decoded; have LeRobot write them with "
            "`python -m lerobot.scripts.augment_dataset_quantile_stats`"
        )
    return missing


def normalisation_stats(d: DatasetOptions, robot: Robot, metas: Sequence[DatasetMetadata], stats: Stats) -> Stats:
    """Return a robot's normalisation statistics: joint `stats` with widened ranges, and ImageNet's for cameras."""
    match = robot.match
    if not d.mixed_ranges:
        check_ranges(metas, match.keys)
    if d.statistics != "lerobot":
        features = {key: metas[0].features[key] for key in match.keys}
        stats = widen_ranges(stats, needed_of_vectors(features, required_stats(robot.config, features)))
    return with_imagenet_stats(stats, match.camera_keys) if d.use_imagenet_stats else stats


def relative_actions(policy_config: PreTrainedConfig) -> RelativeActions | None:
    """Return which dimensions of a policy's actions are relative to the state; None if it predicts absolute ones."""
    if not getattr(policy_config, "use_relative_actions", False):
        return None
    names = getattr(policy_config, "action_feature_names", None)
    step = RelativeActionsProcessorStep(True, getattr(policy_config, "relative_exclude_joints", []), names)
    dimensions = step._build_mask(policy_config.output_features["action"].shape[0])
    return RelativeActions(len(policy_config.action_delta_indices or [0]), tuple(dimensions))


def absolute_dimensions(policy_config: PreTrainedConfig) -> dict[str, list[str]]:
    """Return the dimensions that each of `relative_exclude_joints` leaves absolute, matched by name as in LeRobot."""
    if not getattr(policy_config, "use_relative_actions", False):
        return {}
    names = [str(name) for name in getattr(policy_config, "action_feature_names", None) or []]
    listed = [str(joint) for joint in getattr(policy_config, "relative_exclude_joints", []) if joint]
    return {joint: [name for name in names if joint.lower() in name.lower()] for joint in listed}


def check_absolute_dimensions(given: Collection[str], configs: Sequence[PreTrainedConfig]) -> None:
    """Refuse a joint in --policy.relative_exclude_joints that matches no dimension of any robot.

    LeRobot's default and a policy's own list may name unknown joints; the plan says so.
    """
    flag = "relative_exclude_joints"
    if flag not in given:
        return
    if not any(getattr(config, "use_relative_actions", False) for config in configs):
        raise ValueError(
            f"--policy.{flag} does nothing without --policy.use_relative_actions=true: give both, or neither"
        )
    names = list(
        dict.fromkeys(name for config in configs for name in getattr(config, "action_feature_names", []) or [])
    )
    for joint in dict.fromkeys(joint for config in configs for joint in absolute_dimensions(config)):
        if not any(absolute_dimensions(config).get(joint) for config in configs):
            hint = f"are {', '.join(names)}{did_you_mean(joint, names)}" if names else "have no names in the dataset"
            raise ValueError(
                f"--policy.{flag}: {joint!r} is in no name of a dimension of the action, which would all be relative; "
                f"they {hint}"
            )


def check_run_statistics(job: Job, policy: PolicySpec) -> None:
    """Write the statistics into the run's folder; refuse others than before for a run with a checkpoint."""
    path = job.output_dir / STATISTICS_NAME
    stats = {
        f"{robot.name}/{feature}" if robot.name else feature: {
            name: np.asarray(value).tolist() for name, value in values.items()
        }
        for robot in policy.robots
        for feature, values in (robot.stats or {}).items()
    }
    saved = read_json(path)
    if saved and latest_checkpoint(job.checkpoints_dir) is not None:
        differ = [feature for feature in stats if not _are_close(saved.get(feature), stats[feature])]
        if differ:
            raise ValueError(
                f"{path}: the run has been normalised by other statistics of {', '.join(differ)} than the datasets "
                "have now: a file of them was changed, or repaired after it had been left out, or --dataset.statistics "
                "or --dataset.mixture_stats was; give what it was, or begin a run in another --output_dir"
            )
        return
    write_json(path, stats)


def _are_close(a: Mapping[str, Any] | None, b: Mapping[str, Any]) -> bool:
    """Return whether two features' statistics are equal but for rounding, as sums depend on the order of files."""
    if a is None or a.keys() != b.keys():
        return False
    pairs = [(np.asarray(a[name], np.float64), np.asarray(b[name], np.float64)) for name in a]
    return all(x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-8) for x, y in pairs)
