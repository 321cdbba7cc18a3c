"""The trained policy: of a checkpoint, and as `pretrained_model` for LeRobot to load."""

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
from vla_finetuning.policies.lora import add_adapters, merge
from vla_finetuning.policies.own_names import config_with_names, own_camera_names, pipeline_with_names, saved_names
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
    """The policy of a checkpoint, on the CPU, as it is exported and as it plays: the base with what trained put in.

    The base is read anew, because what is frozen may have been rounded to bf16 for training. With --ema.enable it is
    the average of what trained. Adapters are merged into it.

    Raises:
        ValueError, OSError: the checkpoint cannot be read, or is of another policy.
    """
    policy, adapted = _trained_policy(spec, checkpoint)
    if adapted is not None:
        merge(adapted)
    return policy


def _trained_policy(spec: PolicySpec, checkpoint: Path) -> tuple[PreTrainedPolicy, Any]:
    """`policy_at`, with the run's adapters still beside its weights; and PEFT's model of it, None without any."""
    policy, peft = spec.start(), spec.adapters
    adapted = add_adapters(policy, peft, spec.seed) if peft.enabled else None
    tensors = policy.state_dict() | family_of(spec.config).training_state()

    def targets(folder: Path, group_name: str, prefix: str = "") -> dict[str, Tensor]:
        names = {n for n in checkpoint_names(folder, group_name) if not n.startswith(CRITIC)}  # not the policy's
        if foreign := sorted(name for name in names if name.removeprefix(prefix) not in tensors):
            raise ValueError(f"checkpoint {folder}: it is of another policy, and holds {foreign[:5]}")
        return {name: tensors[name.removeprefix(prefix)] for name in names}

    with on_disk(checkpoint, (TRAINABLE, AVERAGE)) as folder:
        load_checkpoint(folder, targets(folder, TRAINABLE))
        if spec.ema.enable:  # of parameters; buffers are as they were
            load_checkpoint(folder, None, average=targets(folder, AVERAGE, "average."))
    return policy, adapted


def export(
    spec: PolicySpec,
    checkpoint: Path,
    output_dir: Path,
    renderings: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Write `pretrained_model`, as LeRobot loads it: the base with what trained put in, processors included.

    Of robots that differ, `pretrained_model/ROBOT` for each, which share the weights. Adapters are written to `adapter`
    if that was asked for, and merged into the weights.

    Args:
        checkpoint: whose policy it is. output_dir: the run's folder.
        renderings: how the simulator that a robot's data is from drew its pictures, if any, by the robot's name.
        facts: what each robot's robot.json says (`plan.robot_facts`), by its name; that of the base where none is said.
    """
    policy, adapted = _trained_policy(spec, checkpoint)
    robots = [robot.by_own_names() for robot in spec.robots]
    base = spec.folder_here()

    def describe_to(folder: Path, robot: Robot, renamed: Mapping[str, str]) -> None:
        about = dict(facts.get(robot.name) or (read_json(base / ROBOT_NAME) if base else {}))
        if "cameras" in about:
            about["cameras"] = {
                key: {"height": size["height"], "width": size["width"]}
                | ({"policy": renamed[key]} if key in renamed else {})
                for key, size in about["cameras"].items()
            }
        if robot.opening:
            # Of a policy that goes on from one of several robots no name is known, and none is needed.
            about |= {"robot": robot.name} if robot.name else {}
            about["instructions_begin_with"] = robot.opening
        if about:
            write_json(folder / ROBOT_NAME, about)
        if rendering := renderings.get(robot.name):
            # An evaluation in the simulator must show it the same pictures.
            write_json(folder / ENVIRONMENT_NAME, {"drawn": rendering})

    if adapted is not None:
        for robot in robots if spec.adapters.export == "adapter" else ():
            robot_spec = spec.select_robot(robot)
            with _made_for(output_dir / "adapter" / robot.name) as folder:
                pipelines, config, renamed = in_own_names(robot_spec)
                save_adapters(adapted, robot_spec.base["path"], robot_spec.base["revision"], *pipelines, folder, config)
                describe_to(folder, robot, renamed)
        merge(adapted)
    with _made_for(output_dir / "pretrained_model") as root:
        written = None
        for robot in robots:
            robot_spec, folder = spec.select_robot(robot), root / robot.name
            pipelines, config, renamed = in_own_names(robot_spec)
            save_pretrained(policy, *pipelines, folder, config, written)
            written = folder
            describe_to(folder, robot, renamed)


def export_run(run: Run) -> None:
    """Export the policy of a run that has done its last step, with what each robot must know. Raises as `export`."""
    checkpoint = exported_checkpoint(run.job, best=run.config.export == "best")
    export(run.policy, checkpoint, run.job.output_dir, run.drawn, robot_facts(run))


def in_own_names(spec: PolicySpec) -> tuple[Processors, PreTrainedConfig, dict[str, str]]:
    """Return the processors and the configuration of a robot's export, and which of its names are still renamed."""
    config, (before, after), (robot,) = exported_config(spec), spec.processors(), spec.robots
    rename_map = {**saved_names(before), **robot.rename_map}
    names, reason = own_camera_names(config, rename_map)
    names = {} if reason else names
    renamed = {key: name for key, name in rename_map.items() if name not in names}
    pipelines = pipeline_with_names(before, names, renamed), pipeline_with_names(after, names, renamed)
    return pipelines, config_with_names(config, names), renamed


def exported_config(spec: PolicySpec) -> PreTrainedConfig:
    """LeRobot's configuration of what a run trained, of one robot: with the policy's options that the run's replace.

    `optimizer_*` and `scheduler_*` stay, as with `lerobot-train`.
    """
    config = copy.deepcopy(spec.config)
    part = spec.train.mode != "full" and not spec.adapters.enabled
    replaced = {
        "train_expert_only": part,
        "freeze_vision_encoder": part,
        "compile_model": False,  # how a process computes, and not what
        "gradient_checkpointing": False,
    }
    for name in replaced.keys() & family_of(config).ignored_options.keys():
        setattr(config, name, replaced[name])
    config.use_peft = False
    return config


@contextlib.contextmanager
def _made_for(path: Path) -> Iterator[Path]:
    """A folder to write a policy to; of one in a bucket the files are sent after the block, and not kept here."""
    if mirror_of(path):
        remove(path)
    try:
        yield path
        push(path)
    finally:
        release(path)


def exported_checkpoint(job: Job, best: bool) -> Path:
    """Return what a finished run exports: its last checkpoint, or the best one. Raises RuntimeError: it has no last."""
    newest = latest_checkpoint(job.checkpoints_dir)
    if newest is None or load_progress(newest).step != job.steps:
        raise RuntimeError(
            f"{address(job.checkpoints_dir)}: no checkpoint of the last step, {job.steps}: nothing to export"
        )
    return (best_checkpoint(job.checkpoints_dir) if best else None) or newest


def describe_exported(config: Config, job: Job) -> str:
    """Say which weights were exported, if not the last step's."""
    average = ", averaged weights (--ema.enable)" if config.ema.enable else ""
    if config.export == "last":
        return average
    best = load_progress(exported_checkpoint(job, best=True))
    measured = "not measured over all held-out rows" if best.eval_loss is None else f"{best.eval_loss:.4g}"
    return f": step {best.step} of {job.steps}, held-out loss {measured}{average}"
