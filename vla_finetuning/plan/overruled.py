"""Compare a base policy's config.json with the run's options, which overrule it.

LeRobot's config.json has a policy's architecture and also how it was trained: frozen parts, precision, device, learning
rate, repository. The run's options decide the latter, and the plan names what they overrule.
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
# Options that --warmup_frac and --final_lr_frac replace.
SCHEDULER_OPTIONS = ("scheduler_warmup_steps", "scheduler_decay_steps", "scheduler_decay_lr")


def overruled(
    config: Config, policy_config: PreTrainedConfig, folder: Path | None, report: TrainableReport | None
) -> tuple[str, ...]:
    """Return a line for each option of the run that overrules an entry of the base's config.json.

    Args:
        folder: folder of the base; None for random weights.
        report: the trainable parameters; None if unknown without weights.
    Raises:
        ValueError: an option of the policy on this run's command line contradicts another option of the run.
    """
    saved = {} if folder is None else read_foreign_json(folder / "config.json")
    saved = {name: value for name, value in saved.items() if value is not None}
    explicit = {option.removeprefix("--").partition("=")[0].partition(".")[0] for option in config.policy_options}
    lines: dict[str, list[str]] = {}
    for name, value, by in _decisions(config, policy_config, report):
        if name in explicit and _comparable(requested := getattr(policy_config, name)) != _comparable(value):
            raise ValueError(f"--policy.{name}={_format(requested)} has no effect with {by}: give one of them")
        if name in saved and name not in explicit and _comparable(saved[name]) != _comparable(value):
            lines.setdefault(by, []).append(f"{name}={_format(saved[name])}")
    for name in sorted(explicit & saved.keys()):
        value = getattr(policy_config, name)
        if _comparable(saved[name]) != _comparable(value):
            lines.setdefault(f"--policy.{name}={_format(value)}", []).append(f"{name}={_format(saved[name])}")
    return tuple(
        f"{', '.join(names)} of the base's config.json {'is' if len(names) == 1 else 'are'} overruled by {by}"
        for by, names in lines.items()
    )


def _decisions(config: Config, policy: PreTrainedConfig, report: TrainableReport | None) -> Iterator[Decision]:
    """Yield (name, value, flag): options of policies that the run decides, its value, and the deciding flag."""
    train, family = config.train, family_of(policy)
    what_trains = (
        f"--peft.method_type={config.peft.method_type}" if config.peft.enabled else f"--train.mode={train.mode}"
    )
    for name, value in family.freezes(policy, report.parts).items() if report is not None else ():
        yield name, value, what_trains
    for name, flag in (("compile_model", "compile"), ("gradient_checkpointing", "activation_checkpointing")):
        if name in family.ignored_options:
            yield name, getattr(train, flag), f"--train.{flag}={_format(getattr(train, flag))}"
    if train.precision != "auto":  # "auto" depends on the GPU, or on use_amp
        yield "use_amp", config.planned_in_bf16, f"--train.precision={train.precision}"
    yield "use_peft", config.peft.enabled, "--peft.method_type" + ("" if config.peft.enabled else ", which is absent")
    device = "cuda" if config.scaling.use_gpu else "cpu"
    yield "device", device, f"--scaling.use_gpu={_format(bool(config.scaling.use_gpu))}"
    repo_flag = f"--policy.repo_id={config.hub_repo_id}" if config.hub_repo_id else "--policy.repo_id, which is absent"
    yield "repo_id", config.hub_repo_id, repo_flag
    yield from _learning_decisions(config, policy)


def _learning_decisions(config: Config, policy: PreTrainedConfig) -> Iterator[Decision]:
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
                yield f"{group}_{name.removeprefix('num_')}", _parse_value(text), f"--{group}.{name}={text}"


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _comparable(value: Any) -> Any:
    """Return a value as in JSON, for comparisons; a device without its index."""
    if isinstance(value, str):
        return value.partition(":")[0] if value.startswith(("cuda", "cpu", "mps")) else value
    return json.loads(json.dumps(value, default=lambda item: getattr(item, "value", None) or vars(item)))


def _format(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_comparable(value))
