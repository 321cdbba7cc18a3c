"""Describe the interface of an exported policy in the robot's own names: `robot.json` beside the weights."""

from __future__ import annotations

from typing import Any

from vla_finetuning.data.metadata import dimension_names
from vla_finetuning.data.reader import height_width
from vla_finetuning.data.selection import tasks_of
from vla_finetuning.options.policy import WRITES
from vla_finetuning.options.recap import ADVANTAGE
from vla_finetuning.plan.resolve import Run
from vla_finetuning.plan.statistics import absolute_dimensions
from vla_finetuning.policies.family import MAX_DELAY
from vla_finetuning.policies.spec import Robot

# Thousands of instructions would hide the rest of the file.
MAX_INSTRUCTIONS = 100


def robot_facts(run: Run) -> dict[str, dict[str, Any]]:
    """Return the contents of each robot's `robot.json` by name of the robot, "" for a single robot.

    Keys:
        fps: actions per second; `frames_per_action` frames of the dataset apart, where that is not 1.
        state, action: names of the entries in order, from the dataset.
        action_kind: "absolute" or "relative to the state at the start of the chunk", except for `absolute_entries`.
        cameras: recorded height and width; `export` adds the policy's name if it differs.
        instructions: as in training, between `instructions_begin_with` and `instructions_end_with`.
        chunk_size, n_action_steps: number of predicted and of executed actions.
        rtc_training_max_delay: largest number of given first actions in training, if any.
        writes: --train.text_targets.
        statistics: --dataset.statistics.
    """
    return {robot.name: _facts(run, robot) for robot in run.robots}


def _facts(run: Run, robot: Robot) -> dict[str, Any]:
    rows, config, step = run.rows, robot.config, run.rows.window_step(robot.datasets[0])
    meta = rows.metas[robot.datasets[0]]
    keys = robot.row_match.dataset_keys
    vectors = {key: dimension_names(meta, key) for key in keys if key in meta.features and key not in meta.camera_keys}
    instructions = sorted({task for n in robot.datasets for task in tasks_of(rows.metas[n], rows.episodes[n])})
    relative = bool(getattr(config, "use_relative_actions", False))
    cameras = {}
    for key in robot.cameras:
        height, width = height_width(meta.features[key])
        cameras[robot.own_names.get(key, key)] = {"height": height, "width": width}
    return {
        **({"robot": robot.name} if robot.name else {}),
        **({"robot_type": meta.robot_type} if meta.robot_type else {}),
        "fps": meta.fps / step,
        **({"frames_per_action": step} if step > 1 else {}),
        **{robot.own_names.get(key, key): names for key, names in vectors.items()},
        "action_kind": "relative to the state at the start of the chunk" if relative else "absolute",
        **({"absolute_entries": sorted(set(sum(absolute_dimensions(config).values(), [])))} if relative else {}),
        "cameras": cameras,
        "instructions": instructions[:MAX_INSTRUCTIONS],
        "instructions_begin_with": robot.opening,
        "instructions_end_with": "" if rows.positive is None else ADVANTAGE[True],
        "chunk_size": len(config.action_delta_indices or [0]),
        "n_action_steps": getattr(config, "n_action_steps", 1),
        **({MAX_DELAY: delay} if (delay := getattr(config, MAX_DELAY, 0)) else {}),
        **({WRITES: text} if (text := run.config.train.text_targets) else {}),
        "statistics": run.config.dataset.statistics,
    }
