"""Which GPUs a run fits, as planned: said by `--dry_run`, and before a run starts that would end out of memory.

Runs on the driver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from lerobot.policies.pi05.configuration_pi05 import PI05Config

from vla_finetuning.config import Attention, Config, Strategy, TrainMode
from vla_finetuning.policies.pi05 import with_cameras
from vla_finetuning.run.plan import Run
from vla_finetuning.training.memory import GIB, StepMemory, step_memory

# GiB that CUDA reports of GPUs, by Ray's names for them: the "total capacity" in PyTorch's errors about memory, the
# least of those that users have posted (drivers and forms of a card differ by a tenth). The data sheets' numbers are in
# units of 10^9 bytes, and of what is left a driver keeps some: an L4 has 24 GB there.
CARDS_GIB = {"L4": 22.0, "A100-40G": 39.3, "A100-80G": 79.1, "H100": 79.1, "H200": 139.7, "B200": 178.3}
# Ray calls both sizes this, besides the name with the size: what does not fit the larger fits neither.
CARDS_GIB["A100"] = CARDS_GIB["A100-80G"]
PRESET_CARDS = {
    "l4": "L4",
    "a100_40": "A100-40G",
    "a100": "A100-80G",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
}


def planned_memory(run: Run, config: Config | None = None) -> StepMemory | None:
    """What each worker needs; None for policies other than PI0.5. `config` stands in for the run's own."""
    if not isinstance(run.policy_config, PI05Config):
        return None
    config = config or run.config
    train, scaling, cameras = config.train, config.scaling, len(run.match.camera_keys)
    return step_memory(
        # Of the lengths that prompts may have, the longest.
        with_cameras(run.policy_config, cameras, run.prompts[-1]),
        cast(TrainMode, train.mode),
        cameras=cameras,
        batch_size=config.batch_size,
        grad_accum=config.grad_accum,
        draws=train.noise_draws,
        # Every GPU that can hold a VLA knows bf16.
        bf16=train.precision == "bf16" or (train.precision == "auto" and run.use_gpu),
        attention=cast(Attention, train.attention),
        checkpointing=train.activation_checkpointing,
        strategy=cast(Strategy, scaling.strategy),
        workers=scaling.min_workers or scaling.num_workers,
        find_unused_parameters=scaling.find_unused_parameters,
        frame_bytes=sum(
            math.prod(run.image_size or run.metas[0].features[key].shape[:2]) * 3 for key in run.match.camera_keys
        ),
    )


def card_of(run: Run, found_gib: float | None) -> tuple[str, float] | None:
    """The GPU that the run is for and its GiB: the one asked for, else the one found here, else the preset's.

    None where none of these is known, or the run uses no GPU.
    """
    if not run.use_gpu:
        return None
    asked, preset = run.config.scaling.accelerator_type, PRESET_CARDS.get(run.config.preset or "")
    if asked is not None:
        return (asked, CARDS_GIB[asked]) if asked in CARDS_GIB else None
    if found_gib is not None:
        return "the GPU found here", found_gib
    return (preset, CARDS_GIB[preset]) if preset else None


def describe_memory(run: Run, needed: StepMemory) -> str:
    """The plan's lines for people."""
    gib = needed.needed / GIB
    fits = [f"{name} ({size:g} GiB)" for name, size in CARDS_GIB.items() if gib <= size]
    small = [f"{name} ({size:g} GiB)" for name, size in CARDS_GIB.items() if gib > size]
    lines = [f"Memory       per worker {needed}"]
    if run.use_gpu:
        lines.append(
            f"             fits (planned): {', '.join(fits) or 'none'}; too small: {', '.join(small) or 'none'}"
        )
    return "\n".join(lines)


def check_room(run: Run, needed: StepMemory, found_gib: float | None) -> None:
    """Refuse a run whose plan does not fit its GPU.

    Args:
        found_gib: what CUDA reports of a GPU of this machine; None where there is none.
    Raises:
        ValueError: says what is needed, what there is, and flags with which the same rows of a step fit.
    """
    card = card_of(run, found_gib)
    if card is None or needed.needed <= card[1] * GIB:
        return
    name, size = card
    enough = None
    for recomputed in sorted({run.config.train.activation_checkpointing, True}):
        ways = list(_smaller(run.config, recomputed))
        # The last takes the least, and each costs seconds to find out.
        if enough is None and ways and _fits(run, ways[-1][1], size):
            enough = next(flags for flags, config in ways if _fits(run, config, size))
    remedy = f"it would fit with {enough}" if enough else "nor would it with smaller micro-batches and in parts"
    raise ValueError(
        f"the run needs {needed.needed / GIB:.1f} GiB per worker (planned), and {name} has {size:.1f}: {remedy}; or "
        "choose a larger GPU with --scaling.accelerator_type, or fewer trained weights with --train.mode"
    )


def _fits(run: Run, config: Config, gib: float) -> bool:
    planned = planned_memory(run, config)
    return planned is not None and planned.needed <= gib * GIB


def _smaller(config: Config, recomputed: bool) -> Iterator[tuple[str, Config]]:
    """Ways to train on the same rows in each step with less memory, as flags, the fastest first."""
    scaling, rows, was_recomputed = config.scaling, config.batch_size, config.train.activation_checkpointing
    strategies = [cast(Strategy, scaling.strategy)]
    if scaling.num_workers > 1 and not config.train.compile:
        sharded: list[Strategy] = ["fsdp2"] if scaling.min_workers else ["fsdp2", "fsdp2_reshard"]
        strategies += [strategy for strategy in sharded if strategy not in strategies]
    for split in itertools.takewhile(lambda split: rows % split == 0, (2**power for power in range(16))):
        for strategy in strategies:
            changed = {
                f"--batch_size {rows // split} --grad_accum {config.grad_accum * split}": split > 1,
                f"--scaling.strategy {strategy}": strategy != scaling.strategy,
                "--train.activation_checkpointing true": recomputed != was_recomputed,
            }
            if any(changed.values()):
                yield (
                    " ".join(flags for flags, given in changed.items() if given),
                    replace(
                        config,
                        batch_size=rows // split,
                        grad_accum=config.grad_accum * split,
                        train=replace(config.train, activation_checkpointing=recomputed),
                        scaling=replace(scaling, strategy=strategy),
                    ),
                )
