"""How a model's parameters are spread over the training processes: whole on each, or sharded."""

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


def cache_casts(strategy: Strategy, micros: int, checkpointing: bool) -> bool:
    """Return whether a step casts weights once for all its micro-batches: where that takes no memory."""
    return micros > 1 and strategy == "ddp" and not checkpointing


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
    """The module to train, before its optimizer is made: parameters that FSDP2 shards are replaced in place.

    ddp: parameters and gradients are whole on every process. fsdp2: they and the optimizer's state are sharded;
    parameters are gathered from a step's first forward to its last backward, as in ZeRO-2. fsdp2_reshard: a unit's only
    while it computes, as in ZeRO-3. hsdp: as fsdp2 among the processes that hold a replica together. What does not
    train stays whole on every process.

    Args:
        loss: on `device`, with what trains chosen. Its `forward` must be called as the module.
        world: training processes; 1 leaves the module alone.
        replicas: for hsdp, the ranks that hold each replica together, from `replicas_on`; all hold one when None.
        autocast: what the forward runs under. FSDP2 then gathers units of nothing but linear layers in that precision.
            Gradients travel in float32.
        find_unused_parameters: DDP's search, in every step, for what got no gradient on any process, which AdamW then
            leaves alone (zeros, it would decay); when None, where a policy's loss may leave some out (not
            `PolicyLoss.reaches_all`).
    """
    if world == 1:
        return loss
    if strategy == "ddp":
        if find_unused_parameters is None:
            find_unused_parameters = isinstance(loss, PolicyLoss) and not loss.reaches_all
        if not find_unused_parameters:
            # DDP moves gradients that it finds into its buckets. Those made later, between the exchanges, would stay
            # beside them: a second copy (torch 2.11).
            hold_gradients(loss)
        return DistributedDataParallel(
            loss,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=25,  # DDP's own, of the first bucket too
            # Rank 0's, before every forward, where training changes some; others are constants.
            broadcast_buffers=isinstance(loss, PolicyLoss) and bool(saved_buffers(loss.policy)),
            find_unused_parameters=find_unused_parameters,
        )
    # Here: importing it takes half a second, and most runs need none of it.
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
            # A unit's inputs stay as they are: autocast casts those that need it.
            cast_forward_inputs=False,
        )
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=strategy == "fsdp2_reshard", mp_policy=policy, ignored_params=frozen
        )
        in_units.update(unit.parameters())
    # The rest: its backward comes last, so there is nothing to be gained by giving it up in between.
    sharded: Any = fully_shard(loss, mesh=mesh, reshard_after_forward=False, ignored_params=frozen | in_units)
    sharded.whole_between_micro_batches = strategy != "fsdp2_reshard"
    return sharded


def replicas(worker: Worker, shard_workers: int | None) -> list[list[int]]:
    """For hsdp, the ranks that hold each replica together. Every rank must call it. Raises as `replicas_on`."""
    nodes = torch.empty(worker.world, dtype=torch.int64, device=worker.device)
    dist.all_gather_into_tensor(nodes, torch.tensor([worker.node_rank], device=worker.device))
    return replicas_on(nodes.tolist(), shard_workers)


def replicas_on(nodes: Sequence[int], shard_workers: int | None) -> list[list[int]]:
    """For hsdp, the ranks that hold each replica together, which are on one node; rank 0's first.

    Args:
        nodes: the node of every rank.
        shard_workers: how many hold a replica; all that are on a node when None.
    Raises:
        ValueError: nodes have unequally many ranks, or a node's do not make whole replicas.
    """
    counts = Counter(nodes)
    size = shard_workers or counts[nodes[0]]
    if any(count % size if shard_workers else count != size for count in counts.values()):
        placed = ", ".join(f"{count} on node {node}" for node, count in sorted(counts.items()))
        rule = f"a multiple of --scaling.shard_workers={shard_workers}" if shard_workers else "as many on each"
        raise ValueError(
            f"--scaling.strategy=hsdp keeps a replica's shards on one node, and the workers are {placed}; needs "
            f"{rule}: choose a --scaling.num_workers that fills nodes alike, a --scaling.shard_workers that divides "
            "these numbers, or --scaling.strategy=fsdp2"
        )
    grouped = {node: [rank for rank, rank_node in enumerate(nodes) if rank_node == node] for node in counts}
    return [ranks[first : first + size] for ranks in grouped.values() for first in range(0, len(ranks), size)]


def hold_gradients(loss: nn.Module) -> None:
    """Give all that trains gradients of zeros, which `util.TrainableOptimizer` then keeps."""
    for parameter in loss.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def free_gathered(loss: nn.Module) -> None:
    """After a forward without a backward: FSDP2's parameters are in parts again, on every process."""
    for module in loss.modules():
        if hasattr(module, "reshard"):
            cast("FSDPModule", module).reshard()


def units(loss: nn.Module) -> list[nn.Module]:
    """Modules that FSDP2 gathers and gives up one at a time; none of what is no policy's loss."""
    return loss.make_units() if isinstance(loss, PolicyLoss) else []


def gathered_bytes(unit: nn.Module, autocast: torch.dtype | None) -> int:
    """Return the bytes of a unit while it is whole."""
    elements = sum(parameter.numel() for parameter in unit.parameters() if parameter.requires_grad)
    return elements * (autocast if autocast and _only_products(unit) else torch.float32).itemsize


def _only_products(unit: nn.Module) -> bool:
    """Return whether all parameters are of `nn.Linear`."""
    return all(isinstance(m, nn.Linear) for m in unit.modules() if next(m.parameters(recurse=False), None) is not None)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds a part of the tensor, and others hold others."""
    return hasattr(tensor, "to_local")


def first_replica(tensor: Tensor) -> list[int]:
    """The ranks that hold the shards of a tensor, each once; of one that is whole everywhere, rank 0 alone."""
    if not is_sharded(tensor):
        return [0]
    ranks = cast("DTensor", tensor).device_mesh.mesh
    return (ranks if ranks.ndim == 1 else ranks[0]).tolist()


def shard_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this process's shard of a tensor, all of it unless it is a DTensor, and where in the whole it begins."""
    if not is_sharded(tensor):
        return tensor, (0,) * tensor.ndim
    # What torch.distributed.checkpoint asks a DTensor (torch 2.11).
    (chunk,) = cast("DTensor", tensor).__create_chunk_list__()
    return local_shard(tensor), tuple(chunk.offsets)
