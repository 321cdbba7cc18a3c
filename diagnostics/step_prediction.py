"""What a step would take on a GPU of a preset, for `profile_step --predict`: nothing is trained, no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION

from vla_finetuning.cards import OF_PRESET, Card
from vla_finetuning.config import Config
from vla_finetuning.flags import parse_args
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training.capacity import needed_by
from vla_finetuning.training.memory import GIB, StepMemory
from vla_finetuning.training.step_time import Operations, StepTime, assumptions, describe, predict

# Prompts of usual length: an instruction, and a state in words.
CAMERAS, PROMPT = 3, 96
# What `vla.py` asks for, and a prediction does not need.
PLACES = ("--policy.path=p", "--dataset.root=d", "--output_dir=o")


def predicted(config: Config, policy: PreTrainedConfig, card: Card, workers: int) -> tuple[StepMemory, list[StepTime]]:
    """A step of a run with these options on so many cards, eager and compiled.

    Args:
        policy: with as many cameras as a batch has, and prompts of one length.
    """
    cameras, operations = len(policy.image_features), Operations()
    config = replace(config, scaling=replace(config.scaling, num_workers=workers, min_workers=None))
    needed = needed_by(config, policy, cameras=cameras, frames=(), operations=operations)
    flops = flops_per_sample(policy, cameras, config.train.mode, config.train.noise_draws, adapters=config.peft)
    assert flops is not None
    times = [
        predict(
            operations.found,
            card,
            compiled=compiled,
            rows=config.batch_size,
            flops=flops,
            grad_accum=config.grad_accum,
            workers=workers,
            exchanged_bytes=needed.gradients if config.scaling.strategy == "ddp" else 0,
        )
        for compiled in (False, True)
    ]
    return needed, times


def policy_to_predict(kind: str, cameras: int = CAMERAS, prompt: int = PROMPT) -> PreTrainedConfig:
    """A policy of its real size.

    Raises:
        ValueError: its type is not built from its configuration alone.
    """
    make: Any = PreTrainedConfig.get_choice_class(kind)
    policy = make(device="cpu", pretrained_path=Path("base"))
    family = family_of(policy)
    if not family.from_config:
        raise ValueError(f"--policy.type={kind}: what its step computes is not known from its configuration alone")
    policy.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (policy.max_action_dim,))}
    return family.with_cameras(policy, cameras, prompt)


def predict_step(preset: str, kind: str, flags: Sequence[str]) -> str:
    """The table for one card and for as many as the preset has.

    Args:
        preset: of a card, e.g. h100. kind: the policy's type. flags: of `vla.py`, which change what the preset sets.
    Raises:
        ValueError: there is no such preset, or a flag is wrong.
    """
    if preset not in OF_PRESET:
        raise ValueError(f"--predict={preset}: no card has such a preset; choose one of {', '.join(OF_PRESET)}")
    config = parse_args([f"--preset={preset}", *PLACES, *flags])
    card, policy = OF_PRESET[preset], policy_to_predict(kind)
    lines = [
        f"A {kind} of real size, {CAMERAS} cameras, prompts of {PROMPT} tokens, --train.mode={config.train.mode}, "
        f"{config.batch_size} rows x {config.grad_accum} micro-steps on each {card.sold}"
    ]
    for workers in sorted({1, config.scaling.num_workers}):
        needed, times = predicted(config, policy, card, workers)
        fits = "fits" if card.gib is not None and needed.needed <= card.gib * GIB else "DOES NOT FIT"
        how = config.scaling.strategy if workers > 1 else "alone"
        lines += ["", f"{workers} x {card.sold}, {how}: {needed.needed / GIB:.1f} GiB of {card.gib:g} ({fits})"]
        lines.append(describe(times))
    return "\n".join([*lines, "", assumptions()])
