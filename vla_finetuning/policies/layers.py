"""A flow matching loss whose networks are computed layer by layer, by functions that take a layer.

So each layer's function can be compiled, be computed again in backward, and have its weights gathered by FSDP2, while
parameters keep LeRobot's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import rotate_half

from vla_finetuning.columns import IS_PRESENT
from vla_finetuning.policies.attention import Kernel
from vla_finetuning.policies.family import WORDS
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.policies.processors import DeviceHalf


class LayeredLoss(FlowLoss):
    """A flow matching loss that is computed layer by layer.

    Args:
        policy, images, mask_padding: as for `FlowLoss`.
        attention: the language model and the expert attend as LeRobot computes it, or by PyTorch's
            `scaled_dot_product_attention`: equal up to rounding, without the weights in memory. May be changed later,
            to what `attention.choose_kernel` says.
        checkpointing: keep only what enters each layer, and compute the layer again in backward. The same numbers from
            less memory.
        compile: what to make of a layer's function before it is used, e.g. a `compiling.Compiler`; kept as `compiler`.
    """

    def __init__(
        self,
        policy: PreTrainedPolicy,
        *,
        images: DeviceHalf | None = None,
        mask_padding: bool = False,
        attention: Kernel = "eager",
        checkpointing: bool = False,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ):
        super().__init__(policy, images=images, mask_padding=mask_padding)
        self.attention = attention
        self.compiler = compile
        self._checkpointing = checkpointing
        self._units: dict[nn.Module, Unit] = {}

    def layers(self) -> Iterable[nn.Module]:
        """The layers that are computed whole."""
        raise NotImplementedError

    def make_units(self) -> list[nn.Module]:
        """Have each layer in which something trains run inside of a module that holds its matrices: these, and words.

        For hooks that gather and give up parameters around a layer (FSDP2's). A layer is not called as a module here,
        nor by LeRobot (0.6.1, #3767), so its own hooks never fire; those of modules in it would, in the middle of what
        is compiled. Names of parameters stay what they are.
        """
        if not self._units:
            for layer in self.layers():
                if any(parameter.requires_grad for parameter in layer.parameters()):
                    self._units[layer] = Unit(module for module in layer.modules() if isinstance(module, nn.Linear))
            self.units = nn.ModuleList(self._units.values())
        return [*self._units.values(), *self._training_modules(WORDS)]

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.compiler(function) if self.compiler else function

    def _run(self, function: Any, layer: nn.Module, *arguments: Any) -> Any:
        """Call for a layer; with checkpointing, keep only the arguments and call again in backward."""
        if self._checkpointing and torch.is_grad_enabled():
            function = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        return self._call(function, layer, *arguments)

    def _call(self, function: Any, layer: nn.Module, *arguments: Any) -> Any:
        """Call for a layer, whose weights are gathered meanwhile where they are sharded."""
        unit = self._units.get(layer)
        return unit(function, layer, *arguments) if unit else function(layer, *arguments)


def mask_absent(counts: Tensor, batch: Mapping[str, Tensor], tokens: Mapping[str, int]) -> None:
    """Mask the tokens of cameras in rows of robots that lack them, in place.

    Args:
        counts: bool (B, P), which tokens of the prefix count; those of images come first.
        tokens: how many each camera has, in order.
    """
    first = 0
    for key, many in tokens.items():
        if (present := batch.get(key + IS_PRESENT)) is not None:
            counts[:, first : first + many] = present[:, None]
        first += many


def heads_of(projection: nn.Module, tokens: Tensor, module: Any) -> Tensor:
    """Project (B, tokens, width) to (B, heads, tokens, head_dim), as the attention `module` has them."""
    return projection(tokens).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


def rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn (B, heads, tokens, head_dim) by the cosines and sines of each token's place: rotary embeddings."""
    cosines, sines = rotation
    return (heads * cosines + rotate_half(heads) * sines).to(heads.dtype)


class Unit(nn.Module):
    """Some modules of a layer, as a module whose hooks fire around whatever is called through it."""

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__()
        self.modules_of_layer = nn.ModuleList(modules)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)
