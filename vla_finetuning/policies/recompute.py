"""MLPs whose backward recomputes the GELU and its product with the other factor (`feed_forward`).

Autograd saves the gate, its GELU, the other factor and their product for every token. This module saves only the gate
and the other factor. Values and gradients are bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def feed_forward(mlp: Any, hidden: Tensor) -> Tensor:
    """Compute Gemma's MLP, down(gelu(gate(x)) * up(x)), or SigLIP's, fc2(gelu(fc1(x))).

    Calls `mlp` itself under `torch.compile`, which recomputes by its own rules, and without gradients.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or mlp.config.hidden_act != "gelu_pytorch_tanh":
        return mlp(hidden)
    if hasattr(mlp, "fc1"):
        wide = mlp.fc1(hidden)
        product = _gelu(wide)
        with _recomputing(product, _gelu, wide):
            return mlp.fc2(product)
    gate, up = mlp.gate_proj(hidden), mlp.up_proj(hidden)
    product = _Gated.apply(gate, up)
    with _recomputing(product, _gated, gate, up):
        return mlp.down_proj(product)


def _gelu(wide: Tensor) -> Tensor:
    return F.gelu(wide, approximate="tanh")


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return _gelu(gate) * up


class _Gated(torch.autograd.Function):
    """Compute gelu(gate) * up and save only the two factors for backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        gate_gradient = up_gradient = None
        if ctx.needs_input_grad[0]:
            gate_gradient = torch.ops.aten.gelu_backward(gradient * up, gate, approximate="tanh")
        if ctx.needs_input_grad[1]:
            up_gradient = gradient * _gelu(gate)
        return gate_gradient, up_gradient


@contextmanager
def _recomputing(product: Tensor, make: Callable[..., Tensor], *factors: Tensor) -> Iterator[None]:
    """Have backward of the block recompute `product` as make(*factors) instead of saving it."""
    storage = product.untyped_storage()._cdata
    factors = tuple(factor.detach() for factor in factors)

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        return tensor.shape if tensor.untyped_storage()._cdata == storage else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        return packed if isinstance(packed, Tensor) else make(*factors).view(packed)

    with saved_tensors_hooks(pack, unpack):
        yield
