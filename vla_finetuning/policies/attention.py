"""Compute PI0.5's attention (`attend`), and choose a kernel that is correct on this device (`choose_kernel`).

PyTorch's fused kernels can silently give wrong results for masks of padded prompts at some lengths. Whether they do
depends on the GPU, the versions of PyTorch and cuDNN, and the shape. So `choose_kernel` computes each shape of a run
once, forward and backward, compares it with eager attention in float64, and rejects wrong kernels.

Runs in the training worker. Legend: B batch, H query heads, G key-value heads, P keys, D head width.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.utils.constants import OPENPI_ATTENTION_MASK_VALUE
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.gemma.modeling_gemma import eager_attention_forward

logger = logging.getLogger(__name__)

# "eager": LeRobot's code. "sdpa": the fused kernel that PyTorch chooses. The others: this fused kernel only.
Kernel = Literal["eager", "sdpa", "cudnn", "efficient", "flash", "math"]
BACKENDS: dict[Kernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
# In the order in which they are tried; the last is the reference.
CANDIDATES: tuple[Kernel, ...] = ("sdpa", *BACKENDS, "eager")
# Rows of a comparison: the unpadded share of each prompt. In the last row all scores are far below zero.
PROMPTS = (1.0, 0.5, 0.0, 0.75)
SCORE_BELOW_ZERO = 160.0
# Extra tolerance of the last row: its gradients are small differences of large numbers.
ROUNDING_BELOW_ZERO = 0.25


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kernel: Kernel) -> Tensor:
    """Compute attention of queries (B, H, tokens, D) to keys and values (B, G, P, D): (B, tokens, H * D).

    Args:
        module: LeRobot's attention layer, with `scaling` and `num_key_value_groups` (H / G).
        bias: float32 (B, 1, 1, P), or (B, 1, tokens, P), added to the scores.
    """
    if kernel == "eager":
        attended, _ = eager_attention_forward(module, query, key, value, bias, module.scaling)
        return attended.flatten(2)
    query, bias = _fold(query, key, bias)
    if kernel == "sdpa":
        attended = F.scaled_dot_product_attention(query, key, value, bias, scale=module.scaling)
    else:
        with sdpa_kernel(BACKENDS[kernel]):
            attended = F.scaled_dot_product_attention(query, key, value, bias, scale=module.scaling)
    groups = module.num_key_value_groups
    return attended.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2)


def _fold(query: Tensor, key: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries (B, H, tokens, D) as (B, G, tokens * H / G, D), and the bias in the matching shape."""
    # Kernels with a mask need as many key heads as query heads. Folding query heads that share keys into more queries
    # needs no copy where G is 1. Repeated keys and values would be stored for backward; as expanded views they make the
    # memory-efficient kernel wrong at some lengths (torch 2.11, pytorch/pytorch#191937).
    groups = query.shape[1] // key.shape[1]
    folded = query.unflatten(1, (-1, groups)).transpose(2, 3).flatten(2, 3)
    if bias.shape[2] > 1:
        bias = bias.repeat_interleave(groups, dim=2)
    return folded, bias.to(query.dtype)


# ---- whether a kernel is correct ------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Shape of one attention of a training step.

    Attributes:
        name: part of the network.
        images, prompt, steps: numbers of keys of each segment; the prompt is padded.
        backward: whether gradients flow through the attention.
        before: number of first queries that do not see the keys of later queries.
        causal: whether no query sees the keys of later queries.
    """

    name: str
    queries: int
    images: int
    prompt: int
    steps: int
    backward: bool
    before: int = 0
    causal: bool = False

    @property
    def keys(self) -> int:
        return self.images + self.prompt + self.steps

    def __str__(self) -> str:
        return f"{self.name} {self.queries} x {self.keys}"


@dataclass(frozen=True)
class Choice:
    """Kernel that a run uses, PyTorch's name of its backend by shape, and descriptions of wrong kernels before it."""

    kernel: Kernel
    backends: dict[str, str]
    refused: list[str]


def choose_kernel(
    preferred: Kernel, attentions: Iterable[tuple[nn.Module, Shape]], device: torch.device, dtype: torch.dtype
) -> Choice:
    """Return the first kernel, from `preferred` on, that is correct at every shape, forward and backward.

    Correct means finite, and no further from eager attention in float64 than rounding explains. Reads values from the
    device and needs some of its memory, so call it before gradients and optimizer state exist.

    Args:
        preferred: "eager" is the reference and is returned without a check.
        attentions: attention layers, of which only the sizes are used, with the shapes of their inputs.
    """
    attentions = list(attentions)
    refused: list[str] = []
    for kernel in CANDIDATES[CANDIDATES.index(preferred) :]:
        wrong = kernel != "eager" and find_fault(kernel, attentions, device, dtype)
        if not wrong:
            backends = {str(shape): _backend(kernel, layer, shape, device, dtype) for layer, shape in attentions}
            for reason in refused:
                logger.warning("attention: %s; the run uses %r in its place", reason, kernel)
            return Choice(kernel, backends, refused)
        if wrong is not UNAVAILABLE and wrong not in refused:  # "sdpa" may have chosen the same backend
            refused.append(str(wrong))
    raise AssertionError("eager attention is what others are compared with")


UNAVAILABLE = "this device or dtype has no such kernel"


def find_fault(
    kernel: Kernel, attentions: Sequence[tuple[nn.Module, Shape]], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Describe the first wrong result of a kernel at these shapes; return UNAVAILABLE if it cannot run, else None."""
    for layer, shape in attentions:
        inputs = _inputs(layer, shape, device, dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch explains at length why a kernel is not applicable
                results = _compute(layer, shape, inputs, kernel)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if kernel != "sdpa":
                return UNAVAILABLE
            return f"{_backend(kernel, layer, shape, device, dtype)} fails at {shape}: {' '.join(str(error).split())}"
        exact = _compute(layer, shape, [tensor.double() for tensor in inputs], "eager")
        eager = _compute(layer, shape, inputs, "eager")
        for name, value in results.items():
            reason = _describe_error(value.double(), exact[name], eager[name].double(), dtype)
            if reason:
                backend = _backend(kernel, layer, shape, device, dtype)
                return f"{backend} computes a wrong {name} at {shape} ({dtype}, queries x keys): {reason}"
    return None


def _inputs(layer: Any, shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys, values, the bias and the gradient of the result, from a fixed seed."""
    groups, width = layer.num_key_value_groups, layer.head_dim
    kv_heads = layer.k_proj.out_features // width
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(len(PROMPTS), *sizes, generator=generator)

    query, key = 2 * normal(kv_heads * groups, shape.queries, width), normal(kv_heads, shape.keys, width)
    value, gradient = normal(kv_heads, shape.keys, width), normal(shape.queries, kv_heads * groups * width)
    # cuDNN's backward gives NaN where the log-sum-exp of a row is below -88.7 (pytorch/pytorch#196678).
    key[-1] = 1 + 0.1 * key[-1]
    query[-1] -= SCORE_BELOW_ZERO / (layer.scaling * width)
    column = torch.arange(shape.keys) - shape.images
    prompts = torch.tensor([max(1, round(share * shape.prompt)) for share in PROMPTS])[:, None]
    counts = (column < prompts) | (column >= shape.prompt)
    bias = torch.where(counts, 0.0, OPENPI_ATTENTION_MASK_VALUE)[:, None, None, :]
    if shape.before:
        bias = bias.repeat(1, 1, shape.queries, 1)
        bias[:, :, : shape.before, shape.images + shape.prompt + shape.before :] = OPENPI_ATTENTION_MASK_VALUE
    if shape.causal:
        bias = bias.repeat(1, 1, shape.queries, 1)
        later = torch.ones(shape.queries, shape.queries, dtype=torch.bool).triu(1)
        bias[..., -shape.queries :].masked_fill_(later, OPENPI_ATTENTION_MASK_VALUE)
    leaves = [tensor.to(device, dtype).requires_grad_(shape.backward) for tensor in (query, key, value)]
    return [*leaves, bias.to(device), gradient.to(device, dtype)]


def _compute(layer: Any, shape: Shape, inputs: Sequence[Tensor], kernel: Kernel) -> dict[str, Tensor]:
    """Compute the result by row and head, and the gradients, by their names."""
    bias, gradient = inputs[3:]
    leaves = [leaf.detach().requires_grad_(shape.backward) for leaf in inputs[:3]]
    query, key, value = leaves
    with torch.set_grad_enabled(shape.backward), torch.autocast(bias.device.type, enabled=False):
        result = attend(layer, query, key, value, bias, kernel)
    results = {"result": result.detach().unflatten(-1, (-1, layer.head_dim))}
    if shape.backward:
        names = ("gradient of the queries", "gradient of the keys", "gradient of the values")
        results |= zip(names, torch.autograd.grad(result, leaves, gradient), strict=True)
    return results


def _describe_error(actual: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> str | None:
    """Describe how far a result is off beyond rounding; return None if it is not. Tensors are float64 (B, ..., D)."""
    # Compared by vector: a mean would hide an error at one position of a thousand.
    if not torch.isfinite(actual).all():
        return "it is not finite"
    apart, rounding, size = ((t.norm(dim=-1).flatten(1).amax(1)) for t in (actual - exact, eager - exact, exact))
    allowed = 4 * rounding.nan_to_num(0.0) + max(2 * torch.finfo(dtype).eps, 1e-5) * size
    allowed[-1] += ROUNDING_BELOW_ZERO * size[-1]
    excess = (apart / allowed).nan_to_num(0.0).max().item()
    return f"{excess:.3g} times further from eager attention than rounding explains" if excess > 1 else None


def _backend(kernel: Kernel, layer: Any, shape: Shape, device: torch.device, dtype: torch.dtype) -> str:
    if kernel == "eager":
        return "eager"
    if kernel != "sdpa":
        return BACKENDS[kernel].name
    query, key, value, bias, _ = _inputs(layer, shape, device, dtype)
    query, bias = _fold(query, key, bias)
    chosen = torch._fused_sdp_choice(query, key, value, bias, scale=layer.scaling)
    return SDPBackend(chosen).name
