"""Spread a model's parameters over the training processes, replicated or sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from util import local_shard, saved_buffers
from vla_finetuning.options.scaling import Strategy
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.training.worker import Worker

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def spread(
    loss: nn.Module,
    strategy: Strategy,
    device: torch.device,
    world: int,
    *,
    replicas: Sequence[Sequence[int]] | None = None,
    autocast: torch.dtype | None = None,
    find_unused_parameters: bool | None = None,
) -> nn.Module:
    """Return the module to train. Call it before the optimizer is made: FSDP2 replaces parameters in place.

    - ddp: parameters and gradients are whole on every process.
    - fsdp2: parameters, gradients and the optimizer's state are sharded. Parameters are gathered from a step's first
      forward to its last backward, as in ZeRO-2.
    - fsdp2_reshard: a unit's parameters are gathered only while it computes, as in ZeRO-3.
    - hsdp: fsdp2 among the processes that share a replica.

    Frozen parameters stay whole on every process.

    Args:
        loss: module on `device` with trainable parameters chosen. Call the module, not its `forward`.
        replicas: for hsdp, the ranks of each replica, from `replicas_on`; one replica when None.
        autocast: dtype of the forward. FSDP2 gathers units of linear layers alone in it. Gradients travel in float32.
        find_unused_parameters: whether DDP searches every step for parameters without a gradient on any process. AdamW
            skips them, but would decay parameters with zero gradients. When None, not `PolicyLoss.reaches_all`.
    """
    if world == 1:
        return loss
    if strategy == "ddp":
        if find_unused_parameters is None:
            find_unused_parameters = isinstance(loss, PolicyLoss) and not loss.reaches_all
        if not find_unused_parameters:
            # DDP moves existing gradients into its buckets. Gradients that are made later, between the exchanges, would
            # be a second copy (torch 2.11).
            hold_gradients(loss)
        return DistributedDataParallel(
            loss,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=25,  # DDP's own, of the first bucket too
            # Only if training changes buffers; rank 0's are then sent before every forward.
            broadcast_buffers=isinstance(loss, PolicyLoss) and bool(saved_buffers(loss.policy)),
            find_unused_parameters=find_unused_parameters,
        )
    # The import takes half a second, and most runs do not need it.
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if strategy == "hsdp" and replicas is not None and len(replicas) > 1:
        mesh = DeviceMesh(device.type, [list(ranks) for ranks in replicas], mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh(device.type, (world,))
    frozen = {parameter for parameter in loss.parameters() if not parameter.requires_grad}
    in_units: set[nn.Parameter] = set()
    for unit in units(loss):
        policy = MixedPrecisionPolicy(
            autocast if _only_products(unit) else None,
            reduce_dtype=torch.float32,
            # Autocast casts the inputs that need it.
            cast_forward_inputs=False,
        )
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=strategy == "fsdp2_reshard", mp_policy=policy, ignored_params=frozen
        )
        in_units.update(unit.parameters())
    # The remaining parameters: their backward comes last, so resharding after the forward gains nothing.
    sharded: Any = fully_shard(loss, mesh=mesh, reshard_after_forward=False, ignored_params=frozen | in_units)
    sharded.whole_between_micro_batches = strategy != "fsdp2_reshard"
    return sharded


def replicas(worker: Worker, shard_workers: int | None) -> list[list[int]]:
    """Gather the nodes of all ranks, and return `replicas_on` them. Every rank must call it."""
    nodes = torch.empty(worker.world, dtype=torch.int64, device=worker.device)
    dist.all_gather_into_tensor(nodes, torch.tensor([worker.node_rank], device=worker.device))
    return replicas_on(nodes.tolist(), shard_workers)


def replicas_on(nodes: Sequence[int], shard_workers: int | None) -> list[list[int]]:
    """Return the ranks of each replica of hsdp, all on one node, rank 0's replica first.

    `nodes` has the node of every rank. `shard_workers` ranks share a replica; all ranks of a node when None. Raises
    ValueError if nodes have different numbers of ranks, or a node's ranks do not form whole replicas.
    """
    counts = Counter(nodes)
    size = shard_workers or counts[nodes[0]]
    if any(count % size if shard_workers else count != size for count in counts.values()):
        placed = ", ".join(f"{count} on node {node}" for node, count in sorted(counts.items()))
        rule = f"a multiple of --scaling.shard_workers={shard_workers}" if shard_workers else "the same number on each"
        raise ValueError(
            f"--scaling.strategy=hsdp keeps a replica's shards on one node, and the workers are {placed}; needs "
            f"{rule}: choose a --scaling.num_workers that puts as many on every node, a --scaling.shard_workers that "
            "divides these numbers, or --scaling.strategy=fsdp2"
        )
    grouped = {node: [rank for rank, rank_node in enumerate(nodes) if rank_node == node] for node in counts}
    return [ranks[first : first + size] for ranks in grouped.values() for first in range(0, len(ranks), size)]


def hold_gradients(loss: nn.Module) -> None:
    """Set the gradients of all trainable parameters to zeros, which `util.TrainableOptimizer` then keeps."""
    for parameter in loss.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def free_gathered(loss: nn.Module) -> None:
    """Reshard FSDP2's parameters after a forward without a backward."""
    for module in loss.modules():
        if hasattr(module, "reshard"):
            cast("FSDPModule", module).reshard()


def units(loss: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP2 gathers one at a time; none of a module that is not a `PolicyLoss`."""
    return loss.make_units() if isinstance(loss, PolicyLoss) else []


def gathered_bytes(unit: nn.Module, autocast: torch.dtype | None) -> int:
    """Return the bytes of a unit's gathered parameters."""
    elements = sum(parameter.numel() for parameter in unit.parameters() if parameter.requires_grad)
    return elements * (autocast if autocast and _only_products(unit) else torch.float32).itemsize


def _only_products(unit: nn.Module) -> bool:
    return all(isinstance(m, nn.Linear) for m in unit.modules() if next(m.parameters(recurse=False), None) is not None)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def first_replica(tensor: Tensor) -> list[int]:
    """Return the ranks that hold one copy of a tensor: of a DTensor its first replica, else rank 0."""
    if not is_sharded(tensor):
        return [0]
    ranks = cast("DTensor", tensor).device_mesh.mesh
    return (ranks if ranks.ndim == 1 else ranks[0]).tolist()


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this process's shard of a tensor and its offsets in the whole; a plain tensor is its own shard."""
    if not is_sharded(tensor):
        return tensor, (0,) * tensor.ndim
    # As torch.distributed.checkpoint does (torch 2.11).
    (chunk,) = cast("DTensor", tensor).__create_chunk_list__()
    return local_shard(tensor), tuple(chunk.offsets)
