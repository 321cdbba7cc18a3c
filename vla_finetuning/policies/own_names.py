"""Rename the cameras of an exported policy to the names that its robot uses.

LeRobot 0.6.1 replaces a saved rename step by its own flag, which is empty by default, in lerobot-rollout, lerobot-eval
and its PolicyServer. The server also looks cameras up by the robot's names before it renames.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.processor import PolicyProcessorPipeline, ProcessorStep, RenameObservationsProcessorStep

from vla_finetuning.policies.processors import with_steps
from vla_finetuning.policies.registry import family_of


def own_camera_names(config: PreTrainedConfig, rename_map: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the robot's camera names by the policy's names, and the reason why the export cannot use them or "".

    `rename_map` has the policy's names by the robot's.
    """
    names = {name: key for key, name in rename_map.items() if name in config.image_features and name != key}
    after = [names.get(key, key) for key in config.input_features or ()]
    if duplicates := sorted({key for key in after if after.count(key) > 1}):
        return names, f"{', '.join(duplicates)} is also the name of another camera of the policy"
    cameras = sorted(config.image_features)
    if family_of(config).sorts_cameras and sorted(cameras, key=lambda key: names.get(key, key)) != cameras:
        return names, f"a '{config.type}' orders cameras by name, and the robot's names would order them differently"
    return names, ""


def describe_names(config: PreTrainedConfig, rename_map: Mapping[str, str]) -> str:
    """Describe the flag that LeRobot's tools need if an export keeps the policy's camera names; "" if it does not."""
    names, reason = own_camera_names(config, rename_map)
    if not reason:
        return ""
    option = json.dumps({key: name for name, key in names.items()})
    return (
        f"cameras keep the policy's names in the export, because {reason}: lerobot-rollout and lerobot-eval need "
        f"--rename_map='{option}', and LeRobot's PolicyServer cannot run it"
    )


def config_with_names(config: PreTrainedConfig, names: Mapping[str, str]) -> PreTrainedConfig:
    """Return a copy of the configuration with renamed cameras, in the same order."""
    changed = copy.deepcopy(config)
    for field in dataclasses.fields(config):
        setattr(changed, field.name, _rename_values(getattr(changed, field.name), names))
    return changed


def pipeline_with_names(
    pipeline: PolicyProcessorPipeline, names: Mapping[str, str], rename_map: Mapping[str, str]
) -> PolicyProcessorPipeline:
    """Return a copy of LeRobot's pipeline with cameras renamed by `names`, and `rename_map` in its rename step."""
    return with_steps(pipeline, [_step_with_names(step, names, rename_map) for step in pipeline.steps])


def _step_with_names(step: ProcessorStep, names: Mapping[str, str], rename_map: Mapping[str, str]) -> ProcessorStep:
    if isinstance(step, RenameObservationsProcessorStep):
        return RenameObservationsProcessorStep(rename_map=dict(rename_map))
    options = step.get_config()
    changed = _rename_values(options, names)
    state = {}
    for key, value in step.state_dict().items():  # FEATURE.STATISTIC
        feature, dot, statistic = key.rpartition(".")
        state[f"{names.get(feature, feature)}{dot}{statistic}"] = value
    if changed == options and state.keys() == step.state_dict().keys():
        return step
    renamed_step: Any = type(step)(**changed)
    renamed_step.load_state_dict(state)
    return renamed_step


def _rename_values(value: Any, names: Mapping[str, str]) -> Any:
    """Replace each key or string of a JSON value that is a camera name."""
    if isinstance(value, dict):
        return {names.get(key, key): _rename_values(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rename_values(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value
