"""Products of linear layers in 8 bits, by torchao.

Each row of both factors is scaled to the range of float8 (e4m3) by a power of two, rounded, and multiplied with sums in
float32; so are both products of backward where a layer trains. Weights stay what they are: their names, their precision
and checkpoints do not change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vla_finetuning.config import Fp8

# The oldest GPUs that multiply so (Ada), and what sizes must be multiples of.
MIN_CAPABILITY = (8, 9)
MULTIPLE = 16


def multiply_in_float8(layers: Any, which: Fp8, *, emulate: bool) -> int:
    """Have linear layers multiply in float8, in place; return how many.

    Left as they are: what modulates norms, a product of few rows; and what has sizes that GPUs cannot multiply so.

    Args:
        layers: modules of a policy, e.g. `LayeredLoss.layers()`, with what trains chosen.
        which: "all" linear layers in them, or those that are "frozen".
        emulate: multiply the rounded factors in float32, for where no GPU does it.
    """
    if which == "off":
        return 0
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Products whose inner size, the tokens of a batch, is no multiple of 16 are filled up with zeros.
    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate, pad_inner_dim=True)
    chosen = 0

    def choose(module: nn.Module, name: str) -> bool:
        nonlocal chosen
        assert isinstance(module, nn.Linear)
        sizes = module.in_features, module.out_features
        fits = all(size % MULTIPLE == 0 for size in sizes) and not name.endswith("norm.dense")
        takes = fits and (which == "all" or not module.weight.requires_grad)
        chosen += takes
        return takes

    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=choose, config=recipe)
    return chosen


def check_device(device: torch.device, autocast: torch.dtype | None) -> None:
    """Whether a device can multiply in float8; on a CPU it is emulated.

    Raises:
        ValueError: its GPU is too old, or the run computes in float32.
    """
    if device.type != "cuda":
        return
    if autocast is None:
        raise ValueError("--train.fp8 needs bfloat16 around its products: leave out --train.precision=fp32")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        raise ValueError(
            f"--train.fp8: {torch.cuda.get_device_name(device)} has compute capability {found}, and products in float8 "
            f"need {needed}; leave it out"
        )
