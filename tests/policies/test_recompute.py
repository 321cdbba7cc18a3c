"""Perceptrons recomputed in backward against transformers' own: equal bits, half of the saved memory."""

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, SiglipVisionConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.siglip.modeling_siglip import SiglipMLP

from vla_finetuning.policies.recompute import feed_forward

WIDTH, WIDE, ROWS, TOKENS = 16, 64, 3, 5
FP32, BF16 = torch.float32, torch.bfloat16
# Of the weights, and of autocast.
PRECISIONS = [(FP32, None), (FP32, BF16), (BF16, None)]


def make_mlp(dtype=torch.float32, act="gelu_pytorch_tanh"):
    torch.manual_seed(0)
    return GemmaMLP(GemmaConfig(hidden_size=WIDTH, intermediate_size=WIDE, hidden_act=act)).to(dtype)


def make_vision_mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return SiglipMLP(SiglipVisionConfig(hidden_size=WIDTH, intermediate_size=WIDE)).to(dtype)


def computed(function, mlp, autocast=None, trains=True):
    """Return the output, the gradients, and the bytes that autograd saved by storage."""
    mlp.zero_grad()
    mlp.requires_grad_(trains)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(next(mlp.parameters()).dtype)
    x.requires_grad_()
    saved = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = function(mlp, x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in mlp.parameters() if p.requires_grad)], saved


def make_silu_mlp(dtype=torch.float32):
    return make_mlp(dtype, act="silu")


@pytest.mark.parametrize(("make", "matrices"), [(make_mlp, 3), (make_vision_mlp, 4), (make_silu_mlp, 3)])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS)
def test_recomputed_mlp_equals_transformers_bitwise(make, matrices, dtype, autocast, trains):
    mlp = make(dtype)
    expected, _ = computed(lambda mlp, x: mlp(x), mlp, autocast, trains)
    actual, _ = computed(feed_forward, mlp, autocast, trains)
    assert len(actual) == len(expected) == 2 + trains * matrices
    assert all(torch.equal(value, reference) for value, reference in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("make", "before", "after"), [(make_mlp, 4, 2), (make_vision_mlp, 2, 1)])
def test_recomputed_mlp_saves_half_of_widest_tensors(make, before, after):
    mlp, wide = make(), ROWS * TOKENS * WIDE * 4

    def widest(function):
        _, saved = computed(function, mlp)
        return sum(size == wide for size in saved.values())

    # The saved tensors of the recomputed product are in neither count.
    assert widest(lambda mlp, x: mlp(x)) == before and widest(feed_forward) == after


def test_recomputed_mlp_supports_repeated_backward():
    mlp, x = make_mlp(), torch.randn(2, WIDTH, requires_grad=True)
    y = feed_forward(mlp, x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
