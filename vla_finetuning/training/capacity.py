"""Compare the planned memory of a run with its GPUs.

`--dry_run` prints the plan. A run that would end out of memory is refused before it starts. Runs on the driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from ray._common.utils import get_system_memory

from vla_finetuning.cards import CARDS_GIB, OF_PRESET
from vla_finetuning.options.programs import Config
from vla_finetuning.options.scaling import Strategy
from vla_finetuning.plan.resolve import Run
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.cluster import is_local
from vla_finetuning.terminal import print_safe_text
from vla_finetuning.training.memory import GIB, StepMemory, step_memory

# GPUs of a usual node, for which hsdp is planned on a driver without GPUs.
GPUS_OF_A_NODE = 8
# Optimizers that a run refuses with sharded parameters (`policies.optim.make_recipe`).
UNSHARDED_OPTIMIZERS = ("sgd", "muon")
# Returns the memory that each worker needs with these options, or None if it cannot be planned.
Plan = Callable[[Config], StepMemory | None]


def planned_memory(spec: PolicySpec, frames: Sequence[tuple[int, int]]) -> Plan:
    """Return the function that plans a worker's memory from options. `frames`: (height, width) of each camera."""

    def planned(config: Config) -> StepMemory | None:
        family = family_of(spec.config)
        if not family.from_config:
            return None
        policy = family.with_cameras(spec.config, spec.cameras, spec.prompts[-1])
        shards = planned_shards(config)
        return step_memory(policy, config, cameras=spec.cameras, frames=frames, shard_workers=shards)

    return planned


def planned_shards(config: Config) -> int | None:
    """Return the number of workers that share a replica in an hsdp run; None for the other strategies."""
    scaling = config.scaling
    if scaling.strategy != "hsdp" or scaling.shard_workers is not None:
        return scaling.shard_workers
    on_a_node = is_local() and torch.cuda.device_count() or GPUS_OF_A_NODE
    return max(n for n in range(1, on_a_node + 1) if scaling.num_workers % n == 0)


def card_of(config: Config, found_gib: float | None) -> tuple[str, float] | None:
    """Return the name and GiB of the run's GPU: the requested one, else one of this machine, else the preset's."""
    if not config.scaling.use_gpu:
        return None
    accelerator, card = config.scaling.accelerator_type, OF_PRESET.get(config.preset or "")
    if accelerator is not None:
        return (accelerator, CARDS_GIB[accelerator]) if accelerator in CARDS_GIB else None
    if found_gib is not None:
        return "the GPU found here", found_gib
    return (card.name, CARDS_GIB[card.name]) if card and card.name else None


def fits(needed: StepMemory | None, gib: float) -> bool:
    """Return whether a planned step fits a GPU with `gib` GiB, as CUDA reports its memory."""
    return needed is not None and needed.needed <= gib * GIB


def describe_memory(config: Config, needed: StepMemory, checkpoint_bytes: int) -> str:
    """Return the plan's lines on memory. `checkpoint_bytes`: host memory for a checkpoint, at most on a node."""
    large, small = (
        [f"{name} ({size:g} GiB)" for name, size in CARDS_GIB.items() if fits(needed, size) is fitting]
        for fitting in (True, False)
    )
    lines = [f"Memory       per worker {needed}"]
    if shards := planned_shards(config):
        lines.append(f"             hsdp, planned with {shards} workers on a node that share a replica")
    if config.scaling.use_gpu:
        lines.append(
            f"             fits (planned): {', '.join(large) or 'none'}; too small: {', '.join(small) or 'none'}"
        )
    memory = get_system_memory()
    lines.append(
        f"Host memory  {checkpoint_bytes / 1e9:.1f} GB for a checkpoint while it is written, on the node of rank 0 "
        "(ddp) or of a replica's workers"
    )
    if checkpoint_bytes > memory:
        lines.append(
            f"             TOO LITTLE on this machine: {memory / 1e9:.1f} GB; run on nodes with more, or train fewer "
            "weights (--train.mode)"
        )
    return "\n".join(lines)


def check_memory(run: Run) -> int:
    """Return the bytes that a worker needs on its GPU, or 0 if unknown. Raises as `check_capacity`."""
    config, planned = run.config, planned_memory(run.policy, run.rows.frames)
    needed = planned(config) if run.job.use_gpu or config.dry_run else None
    if needed is None:
        return 0
    if config.dry_run:
        print_safe_text(describe_memory(config, needed, run.policy.checkpoint_bytes))
    on_gpu = is_local() and torch.cuda.is_available()
    found_gib = torch.cuda.get_device_properties(0).total_memory / GIB if on_gpu else None
    check_capacity(config, needed, planned, found_gib, run.policy.recipe.optimizer.type)
    return needed.needed


def check_capacity(
    config: Config, needed: StepMemory, planned: Plan, found_gib: float | None, optimizer: str = "adamw"
) -> None:
    """Raise ValueError for a run that does not fit its GPU, with flags with which a step on the same rows fits.

    `found_gib` is the memory of a GPU of this machine, None without one.
    """
    card = card_of(config, found_gib)
    if card is None or fits(needed, card[1]):
        return
    name, size = card
    sharded = "" if optimizer in UNSHARDED_OPTIMIZERS else " and sharded parameters"
    remedy = f"it would not fit with smaller micro-batches, activation checkpointing{sharded} either"
    for recomputed in sorted({config.train.activation_checkpointing, True}):
        ways = list(_smaller(config, recomputed, optimizer))
        # Each plan takes seconds: try the last first, which needs the least.
        if ways and fits(planned(ways[-1][1]), size):
            enough = next(flags for flags, smaller in ways if fits(planned(smaller), size))
            remedy = f"it would fit with {enough}"
            break
    raise ValueError(
        f"the run needs {needed.needed / GIB:.1f} GiB per worker (planned), and {name} has {size:.1f}: {remedy}; or "
        "choose a larger GPU with --scaling.accelerator_type, or fewer trained weights with --train.mode"
    )


def _smaller(config: Config, recomputed: bool, optimizer: str) -> Iterator[tuple[str, Config]]:
    """Yield flags and options that train on the same rows of a step with less memory, the fastest first."""
    scaling, rows, was_recomputed = config.scaling, config.batch_size, config.train.activation_checkpointing
    strategies, without = [scaling.strategy], " (without --scaling.shard_workers)" if scaling.shard_workers else ""
    if scaling.num_workers > 1 and optimizer not in UNSHARDED_OPTIMIZERS:
        no_reshard = scaling.min_workers or config.train.text_targets
        sharded: list[Strategy] = ["fsdp2"] if no_reshard else ["fsdp2", "fsdp2_reshard"]
        strategies += [strategy for strategy in sharded if strategy not in strategies]
    for split in itertools.takewhile(lambda split: rows % split == 0, (2**power for power in range(16))):
        for strategy in strategies:
            batch_size, grad_accum = rows // split, config.grad_accum * split
            changed = {
                f"--batch_size {batch_size} --grad_accum {grad_accum}": split > 1,
                f"--scaling.strategy {strategy}{without}": strategy != scaling.strategy,
                "--train.activation_checkpointing true": recomputed != was_recomputed,
            }
            flags = " ".join(name for name, is_changed in changed.items() if is_changed)
            if flags:
                train = replace(config.train, activation_checkpointing=recomputed)
                shards = scaling.shard_workers if strategy == scaling.strategy else None
                spread = replace(scaling, strategy=strategy, shard_workers=shards)
                yield flags, replace(config, batch_size=batch_size, grad_accum=grad_accum, train=train, scaling=spread)
