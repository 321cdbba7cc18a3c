"""Decide the normalisation statistics of each robot of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.statistics import Stats, check_stats
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.mixture import check_ranges
from vla_finetuning.plan.rows import Rows
from vla_finetuning.plan.statistics import (
    Mode,
    decide,
    joint_stats,
    missing_stats,
    needed_of_vectors,
    needed_stats,
    normalisation_stats,
    relative_actions,
)
from vla_finetuning.policies.processors import required_stats
from vla_finetuning.policies.spec import Robot


def with_statistics(config: Config, rows: Rows, robots: Sequence[Robot]) -> tuple[Config, tuple[Robot, ...]]:
    """Decide --dataset.statistics=auto, with one result for all robots.

    Returns:
        The options with "exact", "stored" or "lerobot"; the robots with their statistics, or with the names of the
        statistics to compute (`missing_stats`).
    """
    views = [(rows.select_datasets(robot.datasets), robot) for robot in robots]
    decided, modes = zip(*(_decide_robot(config, *view) for view in views), strict=True)
    mode: Mode = "exact" if "exact" in modes else modes[0]
    config = replace(config, dataset=replace(config.dataset, statistics=mode))
    again = zip(decided, modes, views, strict=True)
    return config, tuple(
        robot if robot_mode == mode else _decide_robot(config, *view)[0] for robot, robot_mode, view in again
    )


def _decide_robot(config: Config, rows: Rows, robot: Robot) -> tuple[Robot, Mode]:
    d, metas, match, policy_config = config.dataset, rows.metas, robot.row_match, robot.config
    keys, cameras = match.dataset_keys, match.camera_keys
    needed = needed_stats(policy_config, metas[0], cameras, keys, d.use_imagenet_stats, rows.any_held_out)
    relative = relative_actions(policy_config)
    missing = missing_stats(metas, needed, () if relative is None else ("action",))
    for meta in metas if d.statistics != "exact" else ():
        check_stats(meta, {key: names for key, names in needed.items() if relative is None or key != "action"})
    decision = decide(config, metas, rows.train_episodes, needed, missing, relative, rows.rename_map)
    if decision.described and not d.mixed_ranges:
        check_ranges(metas, keys)
    if decision.statistics == "exact":
        missing = needed_of_vectors(metas[0].features, needed)
    stats: Stats = {}
    if not missing:
        joint = joint_stats(config, metas, rows.identity["rows_per_source"])
        d = replace(d, statistics=decision.statistics)
        stats = normalisation_stats(d, policy_config, metas, cameras, keys, joint)
    return replace(robot, stats=stats, missing_stats=missing, statistics=decision.lines), decision.statistics


def with_placeholders(robot: Robot, metas: Sequence[DatasetMetadata]) -> Robot:
    """Replace missing statistics by a range of 0 to 1, so that the robot's processors can be built."""
    if not robot.missing_stats:
        return robot
    low, meta = {"min", "mean", "q01", "q10"}, metas[robot.datasets[0]]
    needed = required_stats(robot.config, {key: meta.features[key] for key in robot.row_match.dataset_keys})
    shapes = {key: (3, 1, 1) if key in meta.camera_keys else meta.features[key].shape for key in needed}
    stats = {
        key: {name: np.full(shapes[key], 0.0 if name in low else 1.0) for name in names}
        for key, names in needed.items()
    }
    return replace(robot, stats=stats)
