"""How much memory a training step needs, found by running it on tensors without storage.

Nothing here is a formula: `util.train_step` runs for real, on PyTorch's fake tensors, and what would be alive at each
moment is added up. Runs on the driver; needs neither a GPU nor memory.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from util import make_trainable_optimizer, train_step
from vla_finetuning.config import Attention, TrainMode
from vla_finetuning.policies.pi05 import (
    PolicyLoss,
    cast_frozen,
    choose_trainable,
    empty_inputs,
    meta_policy,
    with_cameras,
)
from vla_finetuning.policies.processors import DeviceHalf


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device of one training process, at worst. CUDA's own context and fragmentation come on top.

    Attributes:
        weights: parameters and buffers, each in its precision. gradients: of what trains. optimizer: Adam's moments.
        saved: what a micro-batch's forward leaves for its backward.
        peak: all of the above that is alive at one time, with what is computed in between.
    """

    weights: int
    gradients: int
    optimizer: int
    saved: int
    peak: int

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "Adam's moments": self.optimizer,
            "gradients": self.gradients,
            "activations": self.saved,
        }
        listed = ", ".join(f"{name} {amount / 2**30:.2f}" for name, amount in parts.items())
        return f"{self.peak / 2**30:.2f} GiB at the worst moment ({listed})"


def step_memory(
    config: PI05Config,
    mode: TrainMode,
    *,
    cameras: int,
    batch_size: int,
    grad_accum: int,
    draws: int,
    bf16: bool,
    attention: Attention,
    checkpointing: bool,
) -> StepMemory:
    """Run two steps of PI0.5 without storage and add up what would be alive in the second.

    Args:
        config: the policy's. cameras: in a batch. The others are the run's own options; bf16: under autocast, with
            what is frozen kept in bf16.
    """
    checkpointing = checkpointing or config.gradient_checkpointing
    config = with_cameras(config, cameras)
    cpu = torch.device("cpu")
    policy = meta_policy(config)
    # The CPU's autocast in place of CUDA's, and its fused attention: autograd runs fake tensors on no other device.
    with FakeTensorMode():
        _give_storage(policy, cpu)
        choose_trainable(policy, mode)
        if bf16:
            cast_frozen(policy, torch.bfloat16)
        loss = PolicyLoss(policy, images=DeviceHalf(None, config), attention=attention, checkpointing=checkpointing)
        optimizer = make_trainable_optimizer(
            policy, schedule=lambda step: 0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0
        )
        batch, noise, time = empty_inputs(config, batch_size, draws, cpu)
        alive = Alive([*loss.parameters(), *loss.buffers(), *batch.values(), noise, time])
        before, saved = 0, 0

        def note_before(*_: Any) -> None:
            nonlocal before
            before = alive.bytes

        def note_saved(*_: Any) -> None:
            nonlocal saved
            saved = alive.bytes - before

        loss.register_forward_pre_hook(note_before)
        loss.register_forward_hook(note_saved)
        with alive:
            for step in range(2):
                alive.peak = alive.bytes
                train_step(
                    loss,
                    optimizer,
                    itertools.repeat(batch),
                    step=step,
                    # From the second micro-batch on gradients are there from the start.
                    grad_accum=min(grad_accum, 2),
                    mean_over=grad_accum,
                    draws=lambda micro: (noise, time),
                    autocast=torch.bfloat16 if bf16 else None,
                    device=cpu,
                )
        state = [tensor for values in optimizer.optimizer.state.values() for tensor in values.values()]
        return StepMemory(
            weights=_bytes([*loss.parameters(), *loss.buffers()]),
            gradients=_bytes(optimizer.params),
            optimizer=_bytes(state),
            saved=saved,
            peak=alive.peak,
        )


def _give_storage(module: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device; under a FakeTensorMode, `Module.to_empty` cannot."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                )
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _bytes(tensors: list[Any]) -> int:
    """Of their storages, each counted once."""
    return sum({id(s): s.nbytes() for s in [tensor.untyped_storage() for tensor in tensors]}.values())


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that are alive: those of `tensors`, and those made while it is active."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.bytes = self.peak = 0
        self._seen = WeakIdKeyDictionary()
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self.bytes)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        self.bytes += size
        weakref.finalize(storage, self._remove, size).atexit = False

    def _remove(self, size: int) -> None:
        self.bytes -= size
