"""Functions of a network's layers, and `Unit`, through which FSDP2 gathers the weights of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import rotate_half

from vla_finetuning.columns import IS_PRESENT


def mask_absent(mask: Tensor, batch: Mapping[str, Tensor], tokens: Mapping[str, int]) -> None:
    """Mask in `mask`, bool (B, P), the tokens of cameras in the rows of robots without these cameras.

    The mask begins with each camera's number of `tokens`.
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
