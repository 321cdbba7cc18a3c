"""How a model's parameters are spread over the training processes: a copy on each, or a part on each.

Runs in every training process, all of which call it alike.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vla_finetuning.config import Strategy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# PI0.5's two language models are computed without calling their layers, so a layer's hooks would never fire (LeRobot's
# own forward has that too: 0.6.1, #3767). What is called: the MLPs, most of a layer; the vision tower's layers; and the
# embedding of words, a sixth of what trains in full. Of 3.24 B parameters that train, 2.88 B are in these units.
UNIT = re.compile(
    r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.mlp"
    r"|.*\.vision_model\.encoder\.layers\.\d+"
    r"|.*\.language_model\.embed_tokens"
)


def spread(
    loss: nn.Module,
    strategy: Strategy,
    device: torch.device,
    world: int,
    *,
    autocast: torch.dtype | None = None,
    find_unused_parameters: bool = False,
) -> nn.Module:
    """The module to train, before its optimizer is made: parameters that FSDP2 shards are replaced in place.

    ddp: a copy on every process, and of the gradients one too, in DDP's buckets, which are there from here on. fsdp2:
    parameters, gradients and optimizer state in parts; parameters are whole from a step's first forward to the end of
    its last backward, as in ZeRO-2. fsdp2_reshard: a unit's are whole only while it computes, as in ZeRO-3. What does
    not train stays whole on every process, in its own precision.

    Args:
        loss: on `device`, with what trains chosen. Its `forward` must be called as the module.
        world: training processes; 1 leaves the module alone.
        autocast: what the forward runs under. FSDP2 then gathers units of nothing but linear layers in that precision,
            to which autocast would cast their weights anyway. Gradients travel in float32.
        find_unused_parameters: DDP's search, in every step, for what trains and got no gradient. FSDP2 needs none.
            What got none on any process then has none, and AdamW leaves it alone: zeros, it would decay. So gradients
            are not kept, and while they are accumulated there are two of each, the second in the buckets.
    """
    if world == 1:
        return loss
    if strategy == "ddp":
        if not find_unused_parameters:
            # DDP moves gradients that it finds into its buckets. Those made later, between the exchanges, would stay
            # beside them: a second copy (torch 2.11).
            hold_gradients(loss)
        return DistributedDataParallel(
            loss,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # constants
            find_unused_parameters=find_unused_parameters,
        )
    # Here: importing it takes half a second, and most runs need none of it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (world,))
    frozen = {parameter for parameter in loss.parameters() if not parameter.requires_grad}
    for unit in units(loss):
        policy = MixedPrecisionPolicy(autocast if _only_products(unit) else None, reduce_dtype=torch.float32)
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=strategy == "fsdp2_reshard", mp_policy=policy, ignored_params=frozen
        )
    # The rest: its backward comes last, so there is nothing to be gained by giving it up in between.
    sharded: Any = fully_shard(loss, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
    sharded.whole_between_micro_batches = strategy == "fsdp2"
    return sharded


def hold_gradients(loss: nn.Module) -> None:
    """Give all that trains gradients of zeros, which `util.TrainableOptimizer` then keeps."""
    for parameter in loss.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def units(loss: nn.Module) -> list[nn.Module]:
    """Modules that FSDP2 gathers and gives up one at a time: those that UNIT names, where something in them trains."""
    return [
        module
        for name, module in loss.named_modules()
        if UNIT.fullmatch(name) and any(parameter.requires_grad for parameter in module.parameters())
    ]


def _only_products(unit: nn.Module) -> bool:
    """Whether all parameters are of `nn.Linear`."""
    return all(isinstance(m, nn.Linear) for m in unit.modules() if next(m.parameters(recurse=False), None) is not None)


def is_part(tensor: Tensor) -> bool:
    """Whether this process holds a part of the tensor, and others hold others."""
    return hasattr(tensor, "to_local")


def held(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is a DTensor."""
    return cast("DTensor", tensor).to_local() if is_part(tensor) else tensor


def part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this process holds of a tensor, and where in the whole it begins: all of it, unless it is a DTensor."""
    if not is_part(tensor):
        return tensor, (0,) * tensor.ndim
    # What torch.distributed.checkpoint asks a DTensor (torch 2.11).
    (chunk,) = cast("DTensor", tensor).__create_chunk_list__()
    return held(tensor), tuple(chunk.offsets)
