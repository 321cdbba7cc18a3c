"""How a model's parameters are spread over the training processes: a copy on each, or a part on each.

Runs in every training process, all of which call it alike.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# fsdp2: parameters, gradients and optimizer state in parts; parameters are whole from a step's forward to the end of
# its backward, as in ZeRO-2. fsdp2_reshard: a unit's are whole only while it computes, as in ZeRO-3.
Strategy = Literal["ddp", "fsdp2", "fsdp2_reshard"]

# PI0.5's two language models are computed without calling their layers, so a layer's hooks would never fire (LeRobot's
# own forward has that too: 0.6.1, #3767). What is called: the MLPs, most of a layer, and the vision tower's layers.
UNIT = re.compile(r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.mlp|.*\.vision_model\.encoder\.layers\.\d+")


def spread(
    loss: nn.Module, strategy: Strategy, device: torch.device, world: int, find_unused_parameters: bool = False
) -> nn.Module:
    """The module to train, before its optimizer is made: parameters that FSDP2 shards are replaced in place.

    What does not train stays whole on every process, in its own precision.

    Args:
        loss: on `device`, with what trains chosen. Its `forward` must be called as the module.
        world: training processes; 1 leaves the module alone.
        find_unused_parameters: DDP's search, in every step, for what trains and got no gradient. FSDP2 needs none.
    """
    if world == 1:
        return loss
    if strategy == "ddp":
        return DistributedDataParallel(
            loss,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # constants
            find_unused_parameters=find_unused_parameters,
        )
    mesh = init_device_mesh(device.type, (world,))
    frozen = {parameter for parameter in loss.parameters() if not parameter.requires_grad}
    for unit in units(loss):
        fully_shard(unit, mesh=mesh, reshard_after_forward=strategy == "fsdp2_reshard", ignored_params=frozen)
    # The rest: its backward comes last, so there is nothing to be gained by giving it up in between.
    fully_shard(loss, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
    return loss


def units(loss: nn.Module) -> list[nn.Module]:
    """Modules that FSDP2 gathers and gives up one at a time: those that UNIT names, where something in them trains."""
    return [
        module
        for name, module in loss.named_modules()
        if UNIT.fullmatch(name) and any(parameter.requires_grad for parameter in module.parameters())
    ]
