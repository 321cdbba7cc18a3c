"""Base class of flow matching losses that compute their networks layer by layer, with functions of a layer.

Each function can be compiled, be recomputed in backward, and run with weights gathered by FSDP2. Parameters keep
LeRobot's names.
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
from vla_finetuning.policies.family import WORD_EMBEDDINGS
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.policies.processors import DeviceHalf


class LayeredLoss(FlowLoss):
    """A flow matching loss that is computed layer by layer.

    Args:
        attention: kernel of the language model and the expert. "eager" is LeRobot's code; the others are equal up to
            rounding and store no attention weights. May be set later, e.g. to the result of `attention.choose_kernel`.
        checkpointing: save only the inputs of each layer and recompute the layer in backward. Saves memory and gives
            the same numbers.
        compile: wrapper of each layer's function, e.g. a `compiling.Compiler`; stored as `compiler`.
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
        """Return the layers that are computed completely."""
        raise NotImplementedError

    def make_units(self) -> list[nn.Module]:
        """Run each trained layer through a `Unit` that holds its matrices; return these units and word embeddings.

        FSDP2 gathers and frees parameters in hooks around a unit. Hooks of the layers themselves never fire, because
        neither this class nor LeRobot calls a layer as a module (0.6.1, #3767). Hooks of modules inside a layer would
        fire within compiled code. Parameters keep their names.
        """
        if not self._units:
            for layer in self.layers():
                if any(parameter.requires_grad for parameter in layer.parameters()):
                    self._units[layer] = Unit(module for module in layer.modules() if isinstance(module, nn.Linear))
            self.units = nn.ModuleList(self._units.values())
        return [*self._units.values(), *self._training_modules(WORD_EMBEDDINGS)]

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.compiler(function) if self.compiler else function

    def _run(self, function: Any, layer: nn.Module, *arguments: Any) -> Any:
        """Call the function of a layer; with checkpointing, save only the arguments and call it again in backward."""
        if self._checkpointing and torch.is_grad_enabled():
            function = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        return self._call(function, layer, *arguments)

    def _call(self, function: Any, layer: nn.Module, *arguments: Any) -> Any:
        """Call the function of a layer, through the layer's unit if it has one."""
        unit = self._units.get(layer)
        return unit(function, layer, *arguments) if unit else function(layer, *arguments)


def mask_absent(mask: Tensor, batch: Mapping[str, Tensor], tokens: Mapping[str, int]) -> None:
    """Mask in place the tokens of cameras in the rows of robots without these cameras.

    Args:
        mask: bool (B, P), True for tokens that are attended to. It begins with each camera's number of `tokens`.
    """
    first = 0
    for key, number in tokens.items():
        if (present := batch.get(key + IS_PRESENT)) is not None:
            mask[:, first : first + number] = present[:, None]
        first += number


def heads_of(projection: nn.Module, tokens: Tensor, module: Any) -> Tensor:
    """Project tokens (B, tokens, width) to the heads (B, heads, tokens, head_dim) of the attention `module`."""
    return projection(tokens).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


def rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings to heads (B, heads, tokens, head_dim); `rotation` is the cosines and sines."""
    cosines, sines = rotation
    return (heads * cosines + rotate_half(heads) * sines).to(heads.dtype)


class Unit(nn.Module):
    """Module that holds some modules of a layer and calls any function; its hooks fire around the call."""

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__()
        self.modules_of_layer = nn.ModuleList(modules)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)
