"""Describe an exported policy in the robot's own names: `robot.json` and `environment.json` beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

from vla_finetuning.data.metadata import dimension_names
from vla_finetuning.data.reader import height_width
from vla_finetuning.data.selection import tasks_of
from vla_finetuning.files import read_json
from vla_finetuning.options.environment import ENVIRONMENT_NAME
from vla_finetuning.options.policy import ROBOT_NAME, WRITES
from vla_finetuning.options.programs import Config
from vla_finetuning.options.recap import ADVANTAGE
from vla_finetuning.plan.rows import Rows
from vla_finetuning.plan.statistics import absolute_dimensions
from vla_finetuning.policies.family import MAX_DELAY
from vla_finetuning.policies.pipelines import saved_rename_map
from vla_finetuning.policies.spec import Robot

# Thousands of instructions would hide the rest of the file.
MAX_INSTRUCTIONS = 100


def trained_files(config: Config, rows: Rows, robot: Robot) -> dict[str, dict[str, Any]]:
    """Return `Robot.files` of a robot that learns from datasets.

    Keys of `robot.json`:
        fps: actions per second; `frames_per_action` frames of the dataset apart, where that is not 1.
        state, action: names of the entries in order, from the dataset.
        action_kind: "absolute" or "relative to the state at the start of the chunk", except for `absolute_entries`.
        cameras: recorded height and width; `export` adds the policy's name if it differs.
        instructions: as in training, between `instructions_begin_with` and `instructions_end_with`.
        chunk_size, n_action_steps: number of predicted and of executed actions.
        rtc_training_max_delay: largest number of given first actions in training, if any.
        writes: --train.text_targets.
        statistics: --dataset.statistics.
        step: optimizer steps of the weights; `export` adds it.
    """
    rendering = rows.drawn(robot.datasets)
    return {ROBOT_NAME: _facts(config, rows, robot)} | _environment(rendering)


def learned_files(
    base: Path, config: PreTrainedConfig, own_names: Mapping[str, str], rendering: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return `Robot.files` of a policy that learns in an environment: those of `base`, with its own cameras' names."""
    facts, saved = read_json(base / ROBOT_NAME), saved_rename_map(base)
    if facts:
        cameras = facts.get("cameras", {}).items()
        facts["cameras"] = {own_names.get(saved.get(key, key), key): size for key, size in cameras}
        facts.pop(MAX_DELAY, None)
        facts |= {"instructions_end_with": "", **_of_chunks(config)}
    return ({ROBOT_NAME: facts} if facts else {}) | _environment(rendering)


def _of_chunks(config: PreTrainedConfig) -> dict[str, int]:
    """Return the facts about chunks of actions, which options of the policy decide."""
    steps, delay = getattr(config, "n_action_steps", 1), getattr(config, MAX_DELAY, 0)
    facts = {"chunk_size": len(config.action_delta_indices or [0]), "n_action_steps": steps}
    return {**facts, MAX_DELAY: delay} if delay else facts


def _environment(rendering: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the file of rendering options: evaluations in the simulator must render the same images."""
    return {ENVIRONMENT_NAME: {"drawn": dict(rendering)}} if rendering else {}


def _facts(run_config: Config, rows: Rows, robot: Robot) -> dict[str, Any]:
    config, step = robot.config, rows.window_step(robot.datasets[0])
    meta = rows.metas[robot.datasets[0]]
    keys = robot.match.keys
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
        **_of_chunks(config),
        **({WRITES: text} if (text := run_config.train.text_targets) else {}),
        "statistics": run_config.dataset.statistics,
    }
