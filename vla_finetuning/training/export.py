"""Load the trained policy of a checkpoint, and export it as `pretrained_model` for LeRobot."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from vla_finetuning.buckets.mirror import address, push, release, remove
from vla_finetuning.files import write_json
from vla_finetuning.options.grpo import CRITIC
from vla_finetuning.options.policy import ROBOT_NAME
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.resolve import Run
from vla_finetuning.policies.lora import add_adapters
from vla_finetuning.policies.own_names import config_with_names, own_camera_names, pipeline_with_names
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
)
from vla_finetuning.run.folder import EVALUATION_NAME
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

    def targets(group_name: str, prefix: str = "") -> dict[str, Tensor]:
        names = {name for name in checkpoint_names(checkpoint, group_name) if not name.startswith(CRITIC)}
        if foreign := sorted(name for name in names if name.removeprefix(prefix) not in tensors):
            raise ValueError(f"checkpoint {checkpoint}: it is of another policy, and holds {foreign[:5]}")
        return {name: tensors[name.removeprefix(prefix)] for name in names}

    load_checkpoint(checkpoint, targets(TRAINABLE))
    if spec.ema.enable:  # averages exist for parameters; buffers come from TRAINABLE
        load_checkpoint(checkpoint, None, average=targets(AVERAGE, "average."))
    return policy, adapted


def export(spec: PolicySpec, checkpoint: Path, output_dir: Path) -> None:
    """Write the policy of a checkpoint with its processors to `pretrained_model`, as LeRobot loads it.

    Several robots get a folder `pretrained_model/ROBOT` each, which share the weights. Adapters are merged into the
    weights, and also written to `adapter` if the options ask for that.
    """
    policy, adapted = _trained_policy(spec, checkpoint)
    step = load_progress(checkpoint).step
    if adapted is not None:
        path, revision = spec.base["path"], spec.base["revision"]
        for robot in spec.robots if spec.adapters.export == "adapter" else ():
            with _export_folder(output_dir / "adapter" / robot.name) as folder:
                pipelines, config, renamed = in_own_names(spec.select_robot(robot))
                save_adapters(adapted, path, revision, *pipelines, folder, config)
                _write_files(folder, robot, renamed, step)
        adapted.merge_and_unload()
    remove(output_dir / EVALUATION_NAME)  # of the policy that this one replaces
    with _export_folder(output_dir / "pretrained_model") as root:
        written = None
        for robot in spec.robots:
            folder = root / robot.name
            pipelines, config, renamed = in_own_names(spec.select_robot(robot))
            save_pretrained(policy, *pipelines, folder, config, written)
            written = folder
            _write_files(folder, robot, renamed, step)


def _write_files(folder: Path, robot: Robot, renamed: Mapping[str, str], step: int) -> None:
    """Write `robot.files`, with the step; cameras that the export still renames get the policy's names."""
    for name, content in robot.files.items():
        if name == ROBOT_NAME:
            cameras = {
                key: {"height": size["height"], "width": size["width"]}
                | ({"policy": renamed[key]} if key in renamed else {})
                for key, size in content["cameras"].items()
            }
            content = {**content, "cameras": cameras, "step": step}
        write_json(folder / name, content)


def export_run(run: Run) -> None:
    """Export the policy of a run that has done its last step. Raises as `export`."""
    export(run.policy, exported_checkpoint(run.job, best=run.config.export == "best"), run.job.output_dir)


def in_own_names(spec: PolicySpec) -> tuple[Processors, PreTrainedConfig, dict[str, str]]:
    """Return the processors and configuration of a robot's export, and the map of names that it still renames."""
    config, (before, after), (robot,) = spec.exported_config(), spec.processors(), spec.robots
    rename_map = {**saved_names(before), **robot.rename_map}
    names, reason = own_camera_names(config, rename_map)
    names = {} if reason else names
    renamed = {key: name for key, name in rename_map.items() if name not in names}
    pipelines = pipeline_with_names(before, names, renamed), pipeline_with_names(after, names, renamed)
    return pipelines, config_with_names(config, names), renamed


@contextlib.contextmanager
def _export_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write a policy to; then replace an earlier policy, and upload that of a run in a bucket."""
    hidden = path.with_name(f".{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed
    try:
        yield hidden / path.name
        remove(path)
        os.replace(hidden / path.name, path)
        push(path)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
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
