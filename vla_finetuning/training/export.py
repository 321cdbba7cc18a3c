"""Load the trained policy of a checkpoint, and export it as `pretrained_model` for LeRobot."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from vla_finetuning.buckets.mirror import address, mirror_of, push, release, remove
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.environment import ENVIRONMENT_NAME
from vla_finetuning.options.grpo import CRITIC
from vla_finetuning.options.policy import ROBOT_NAME
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.resolve import Run
from vla_finetuning.plan.robot_facts import robot_facts
from vla_finetuning.policies.lora import add_adapters
from vla_finetuning.policies.own_names import config_with_names, own_camera_names, pipeline_with_names
from vla_finetuning.policies.pipelines import saved_rename_map
from vla_finetuning.policies.processors import saved_names
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.saving import save_adapters, save_pretrained
from vla_finetuning.policies.spec import PolicySpec, Processors, Robot
from vla_finetuning.run.checkpoint import (
    AVERAGE,
    TRAINABLE,
    best_checkpoint,
    checkpoint_names,
    latest_checkpoint,
    load_checkpoint,
    load_progress,
    on_disk,
)
from vla_finetuning.run.job import Job


def policy_at(spec: PolicySpec, checkpoint: Path) -> PreTrainedPolicy:
    """Return the policy of a checkpoint on the CPU: the base with the trained tensors.

    The base is read again, because training may have rounded frozen tensors to bf16. With --ema.enable the trained
    tensors are averages. Adapters are merged into the weights. Raises ValueError or OSError if the checkpoint cannot be
    read, or belongs to another policy.
    """
    policy, adapted = _trained_policy(spec, checkpoint)
    if adapted is not None:
        adapted.merge_and_unload()
    return policy


def _trained_policy(spec: PolicySpec, checkpoint: Path) -> tuple[PreTrainedPolicy, Any]:
    """Return the policy of a checkpoint with unmerged adapters, and PEFT's model of it, or None without adapters."""
    policy, peft = spec.start(), spec.adapters
    adapted = add_adapters(policy, peft, spec.seed) if peft.enabled else None
    tensors = policy.state_dict() | family_of(spec.config).training_state()

    def targets(folder: Path, group_name: str, prefix: str = "") -> dict[str, Tensor]:
        names = {n for n in checkpoint_names(folder, group_name) if not n.startswith(CRITIC)}  # not part of the policy
        if foreign := sorted(name for name in names if name.removeprefix(prefix) not in tensors):
            raise ValueError(f"checkpoint {folder}: it is of another policy, and holds {foreign[:5]}")
        return {name: tensors[name.removeprefix(prefix)] for name in names}

    with on_disk(checkpoint, (TRAINABLE, AVERAGE)) as folder:
        load_checkpoint(folder, targets(folder, TRAINABLE))
        if spec.ema.enable:  # averages exist for parameters; buffers come from TRAINABLE
            load_checkpoint(folder, None, average=targets(folder, AVERAGE, "average."))
    return policy, adapted


def export(
    spec: PolicySpec,
    checkpoint: Path,
    output_dir: Path,
    renderings: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Write the policy of a checkpoint with its processors to `pretrained_model`, as LeRobot loads it.

    Several robots get a folder `pretrained_model/ROBOT` each, which share the weights. Adapters are merged into the
    weights, and also written to `adapter` if the options ask for that.

    By a robot's name, `renderings` has rendering options of the simulator that recorded its data, and `facts` the
    content of its robot.json (`plan.robot_facts`). A robot without facts has learned in an environment, and gets the
    base's file with its own cameras' names and executed actions.
    """
    policy, adapted = _trained_policy(spec, checkpoint)
    robots = [robot.by_own_names() for robot in spec.robots]
    base = spec.folder_here()

    def describe_to(folder: Path, robot: Robot, renamed: Mapping[str, str]) -> None:
        about = dict(facts.get(robot.name) or (_learned_facts(base, robot) if base else {}))
        if "cameras" in about:
            about["cameras"] = {
                key: {"height": size["height"], "width": size["width"]}
                | ({"policy": renamed[key]} if key in renamed else {})
                for key, size in about["cameras"].items()
            }
        if robot.opening:
            # The name is unknown in a run that starts from the policy of one of several robots.
            about |= {"robot": robot.name} if robot.name else {}
            about["instructions_begin_with"] = robot.opening
        if about:
            write_json(folder / ROBOT_NAME, about)
        if rendering := renderings.get(robot.name):
            # Evaluations in the simulator must render the same images.
            write_json(folder / ENVIRONMENT_NAME, {"drawn": rendering})

    if adapted is not None:
        for robot in robots if spec.adapters.export == "adapter" else ():
            robot_spec = spec.select_robot(robot)
            with _export_folder(output_dir / "adapter" / robot.name) as folder:
                pipelines, config, renamed = in_own_names(robot_spec)
                save_adapters(adapted, robot_spec.base["path"], robot_spec.base["revision"], *pipelines, folder, config)
                describe_to(folder, robot, renamed)
        adapted.merge_and_unload()
    with _export_folder(output_dir / "pretrained_model") as root:
        written = None
        for robot in robots:
            robot_spec, folder = spec.select_robot(robot), root / robot.name
            pipelines, config, renamed = in_own_names(robot_spec)
            save_pretrained(policy, *pipelines, folder, config, written)
            written = folder
            describe_to(folder, robot, renamed)


def _learned_facts(base: Path, robot: Robot) -> dict[str, Any]:
    about = read_json(base / ROBOT_NAME)
    if about:
        saved, own_names = saved_rename_map(base), {name: key for key, name in robot.rename_map.items()}
        sizes = about.get("cameras", {}).items()
        about["cameras"] = {own_names.get(saved.get(key, key), key): size for key, size in sizes}
        about |= {"instructions_end_with": "", "n_action_steps": getattr(robot.config, "n_action_steps", 1)}
    return about


def export_run(run: Run) -> None:
    """Export the policy of a run that has done its last step, with the facts of its robots. Raises as `export`."""
    checkpoint = exported_checkpoint(run.job, best=run.config.export == "best")
    export(run.policy, checkpoint, run.job.output_dir, run.drawn, robot_facts(run))


def in_own_names(spec: PolicySpec) -> tuple[Processors, PreTrainedConfig, dict[str, str]]:
    """Return the processors and configuration of a robot's export, and the map of names that it still renames."""
    config, (before, after), (robot,) = exported_config(spec), spec.processors(), spec.robots
    rename_map = {**saved_names(before), **robot.rename_map}
    names, reason = own_camera_names(config, rename_map)
    names = {} if reason else names
    renamed = {key: name for key, name in rename_map.items() if name not in names}
    pipelines = pipeline_with_names(before, names, renamed), pipeline_with_names(after, names, renamed)
    return pipelines, config_with_names(config, names), renamed


def exported_config(spec: PolicySpec) -> PreTrainedConfig:
    """Return LeRobot's configuration of a robot's policy, with the options that the run replaces.

    `optimizer_*` and `scheduler_*` stay, as with `lerobot-train`.
    """
    config = copy.deepcopy(spec.config)
    partly_frozen = spec.train.mode != "full" and not spec.adapters.enabled
    replaced = {
        "train_expert_only": partly_frozen,
        "freeze_vision_encoder": partly_frozen,
        "compile_model": False,  # a setting of the process, not of the policy
        "gradient_checkpointing": False,
    }
    for name in replaced.keys() & family_of(config).ignored_options.keys():
        setattr(config, name, replaced[name])
    config.use_peft = False
    return config


@contextlib.contextmanager
def _export_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write a policy to; then upload the files of a run in a bucket, and remove them here."""
    if mirror_of(path):
        remove(path)
    try:
        yield path
        push(path)
    finally:
        release(path)


def exported_checkpoint(job: Job, best: bool) -> Path:
    """Return the checkpoint to export, the last or the best. Raises RuntimeError without one of the last step."""
    newest = latest_checkpoint(job.checkpoints_dir)
    if newest is None or load_progress(newest).step != job.steps:
        raise RuntimeError(
            f"{address(job.checkpoints_dir)}: no checkpoint of the last step, {job.steps}: nothing to export"
        )
    return (best_checkpoint(job.checkpoints_dir) if best else None) or newest


def describe_exported(config: Config, job: Job) -> str:
    """Describe the exported weights, or return "" for the last step's."""
    average = ", averaged weights (--ema.enable)" if config.ema.enable else ""
    if config.export == "last":
        return average
    best = load_progress(exported_checkpoint(job, best=True))
    measured = "not measured over all held-out rows" if best.eval_loss is None else f"{best.eval_loss:.4g}"
    return f": step {best.step} of {job.steps}, held-out loss {measured}{average}"
