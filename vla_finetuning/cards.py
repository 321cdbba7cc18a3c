"""GPUs: names, peak rates, memory, and the presets for them. Imports no third-party package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Flags that presets share. Sizes follow --dry_run for PI0.5 with 3 cameras: one micro-batch of 16 rows, or 32 on GPUs
# with more than 100 GiB, and 4 GiB free on every GPU (tests/training/test_capacity.py). Larger micro-batches fill the
# tiles of matrix products and amortise the optimizer. openpi trains PI0.5 in LIBERO on 256 rows a step. Predicted, not
# measured.
GPU = {"scaling.use_gpu": "true", "steps": "30000", "batch_size": "16", "grad_accum": "1"}
FULL = {**GPU, "train.mode": "full", "scaling.num_workers": "8", "scaling.strategy": "fsdp2"}
# RLinf's recipe for PI0.5 in LIBERO (libero_10_grpo_openpi_pi05.yaml) trains the action expert at this rate, with 2048
# decisions per update. Presets differ only in the rows of a micro-batch.
GRPO = {
    **{"scaling.use_gpu": "true", "scaling.num_workers": "8", "train.mode": "expert", "batch_size": "32"},
    **{"lr": "5e-6", "grpo.minibatch": "2048"},
}


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        words: part of `torch.cuda.get_device_name` that identifies the card.
        flops: peak rate of dense bf16 matrix products, FLOP/s. NVIDIA's data sheets give most "with sparsity", which is
            twice as much.
        name: Ray's name for the card; None if no run is planned for it.
        gib: memory that CUDA reports, the smallest "total capacity" in users' reports of PyTorch's memory errors
            (drivers and variants of a card differ by a tenth). Data sheets count 10^9 bytes, and the driver keeps some.
        preset: name of the card's preset; None without one.
        flags: flags of the preset for `vla.py`.
        grpo_flags: flags of the preset for `grpo.py`.
    """

    words: str
    flops: float
    name: str | None = None
    gib: float | None = None
    preset: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    grpo_flags: Mapping[str, str] = field(default_factory=lambda: GRPO)


CARDS = (
    # The first card whose words are in a device's name applies.
    Card("L40S", 362.05e12),  # nvidia.com/en-us/data-center/l40s
    Card(
        "L4",
        121e12,  # nvidia.com/en-us/data-center/l4: 242 with sparsity
        name="L4",
        gib=22.0,
        preset="l4",
        flags={**GPU, "train.mode": "expert", "scaling.num_workers": "4"},
        # For five random steps per decision.
        grpo_flags={**GRPO, "scaling.num_workers": "4", "batch_size": "4"},
    ),
    Card("A10G", 70e12),  # NVIDIA A10G for AWS, data sheet of 17 February 2022: 140 with sparsity
    Card(
        "A100",
        312e12,  # nvidia.com/en-us/data-center/a100
        name="A100-40G",
        gib=39.3,
        preset="a100_40",
        # Activations do not fit beside the shards of trainable parameters: recompute them.
        flags={**FULL, "train.activation_checkpointing": "true"},
    ),
    Card(
        "A100",
        312e12,
        name="A100-80G",
        gib=79.1,
        preset="a100",
        # Replicas of trainable parameters, 48 GiB with gradients and Adam's moments, do not fit beside activations.
        flags=FULL,
    ),
    Card("H100 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h100: 1671 with sparsity
    Card("H100 PCIe", 756.5e12),  # NVIDIA H100 PCIe, product brief PB-11133: 1513 with sparsity
    Card(
        "H100",
        989.5e12,  # nvidia.com/en-us/data-center/h100, SXM: 1979 with sparsity
        name="H100",
        gib=79.1,
        preset="h100",
        flags=FULL,
    ),
    Card("H200 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h200: 1671 with sparsity
    Card(
        "H200",
        989.5e12,  # nvidia.com/en-us/data-center/h200, SXM: 1979 with sparsity
        name="H200",
        gib=139.7,
        preset="h200",
        # Replicas fit too, but each would read and write 198 GB a step to cast, accumulate, clip and update parameters;
        # a shard 33 GB (computed for 8 GPUs).
        flags={**FULL, "batch_size": "32"},
    ),
    Card(
        "B200",
        2250e12,  # nvidia.com/en-us/data-center/hgx: 36 PFLOP/s with sparsity for 8 of them
        name="B200",
        gib=178.3,
        preset="b200",
        flags={**FULL, "batch_size": "32"},
    ),
)
# Cards that runs are planned for, by Ray's names and by presets.
PLANNED = {card.name: card for card in CARDS if card.name is not None}
OF_PRESET = {card.preset: card for card in CARDS if card.preset is not None}
CARDS_GIB = {name: card.gib for name, card in PLANNED.items() if card.gib is not None}
# Ray's name for either size, besides the names with the size: what does not fit the larger one fits neither.
CARDS_GIB["A100"] = CARDS_GIB["A100-80G"]
