"""What a base policy's config.json says of decisions that are the run's own, and which of its options overrules it.

LeRobot keeps in one file what a policy is and how it was trained: what is frozen, precision, device, learning rate,
where it was pushed to. Here the run's options decide those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

from vla_finetuning.files import read_foreign_json
from vla_finetuning.options.programs import Config
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import TrainableReport

Decision = tuple[str, Any, str]
# What a cosine of --warmup_frac and --final_lr_frac stands in for.
SCHEDULER_OPTIONS = ("scheduler_warmup_steps", "scheduler_decay_steps", "scheduler_decay_lr")


def overruled(
    config: Config, policy_config: PreTrainedConfig, folder: Path | None, report: TrainableReport | None
) -> tuple[str, ...]:
    """A line for each option of the run that overrules something in the base's config.json.

    Args:
        folder: the base's; None where weights are random. report: what trains, where that is known without its weights.
    Raises:
        ValueError: an option of the policy, given for this run, that another option of the run overrules.
    """
    saved = {} if folder is None else read_foreign_json(folder / "config.json")
    saved = {name: value for name, value in saved.items() if value is not None}
    explicit = {option.removeprefix("--").partition("=")[0].partition(".")[0] for option in config.policy_options}
    lines: dict[str, list[str]] = {}
    for name, value, by in _decisions(config, policy_config, report):
        if name in explicit and _plain(requested := getattr(policy_config, name)) != _plain(value):
            raise ValueError(f"--policy.{name}={_shown(requested)} has no effect with {by}: give one of them")
        if name in saved and name not in explicit and _plain(saved[name]) != _plain(value):
            lines.setdefault(by, []).append(f"{name}={_shown(saved[name])}")
    for name in sorted(explicit & saved.keys()):
        value = getattr(policy_config, name)
        if _plain(saved[name]) != _plain(value):
            lines.setdefault(f"--policy.{name}={_shown(value)}", []).append(f"{name}={_shown(saved[name])}")
    return tuple(
        f"{', '.join(names)} of the base's config.json {'is' if len(names) == 1 else 'are'} overruled by {by}"
        for by, names in lines.items()
    )


def _decisions(config: Config, policy: PreTrainedConfig, report: TrainableReport | None) -> Iterator[Decision]:
    """Options of policies that the run decides: what it does, as they would say it, and by which of its options."""
    train, family = config.train, family_of(policy)
    what_trains = (
        f"--peft.method_type={config.peft.method_type}" if config.peft.enabled else f"--train.mode={train.mode}"
    )
    for name, value in family.freezes(policy, report.parts).items() if report is not None else ():
        yield name, value, what_trains
    for name, flag in (("compile_model", "compile"), ("gradient_checkpointing", "activation_checkpointing")):
        if name in family.ignored_options:
            yield name, getattr(train, flag), f"--train.{flag}={_shown(getattr(train, flag))}"
    if train.precision != "auto":  # which goes by the GPU, or by use_amp
        yield "use_amp", config.planned_in_bf16, f"--train.precision={train.precision}"
    yield "use_peft", config.peft.enabled, "--peft.method_type" + ("" if config.peft.enabled else ", which is absent")
    device = "cuda" if config.scaling.use_gpu else "cpu"
    yield "device", device, f"--scaling.use_gpu={_shown(bool(config.scaling.use_gpu))}"
    repo_flag = f"--policy.repo_id={config.hub_repo_id}" if config.hub_repo_id else "--policy.repo_id, which is absent"
    yield "repo_id", config.hub_repo_id, repo_flag
    yield from _of_learning(config, policy)


def _of_learning(config: Config, policy: PreTrainedConfig) -> Iterator[Decision]:
    preset = "--use_policy_training_preset=false"
    if not config.use_policy_training_preset:
        for name in vars(policy):
            if name.startswith(("optimizer_", "scheduler_")):
                yield name, None, preset
        return
    if config.lr is not None:
        yield "optimizer_lr", config.lr, f"--lr={config.lr:g}"
    if config.warmup_frac is not None or config.final_lr_frac is not None:
        by = "--warmup_frac" if config.warmup_frac is not None else "--final_lr_frac"
        for name in SCHEDULER_OPTIONS:
            yield name, None, by
    for group, options in (("optimizer", config.optimizer_options), ("scheduler", config.scheduler_options)):
        for name, _, text in (option.removeprefix("--").partition("=") for option in options):
            if name != "type":
                yield f"{group}_{name.removeprefix('num_')}", _read(text), f"--{group}.{name}={text}"


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    """A value as JSON has it, for a comparison; of a device, its kind."""
    if isinstance(value, str):
        return value.partition(":")[0] if value.startswith(("cuda", "cpu", "mps")) else value
    return json.loads(json.dumps(value, default=lambda item: getattr(item, "value", None) or vars(item)))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_plain(value))
