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
L4 = {**GPU, "train.mode": "expert", "scaling.num_workers": "4"}
L4_GRPO = {**GRPO, "scaling.num_workers": "4", "batch_size": "4"}  # for five random steps per decision


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        words: part of `torch.cuda.get_device_name` that identifies the card.
        flops: peak rate of dense bf16 matrix products, FLOP/s; half of what data sheets give "with sparsity".
        name: Ray's name for the card; None if no run is planned for it.
        gib: memory that CUDA reports, the smallest "total capacity" in users' reports of PyTorch's memory errors
            (drivers and variants of a card differ by a tenth). Data sheets count 10^9 bytes, and the driver keeps some.
        preset: name of the card's preset, with its flags for `vla.py` and `grpo.py`.
    """

    words: str
    flops: float
    name: str | None = None
    gib: float | None = None
    preset: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    grpo_flags: Mapping[str, str] = field(default_factory=lambda: GRPO)


# The first card whose words are in a device's name applies. Rates are of nvidia.com/en-us/data-center/l40s, l4, a100,
# h100, h200 and hgx (8 B200), of "NVIDIA A10G for AWS" (17 February 2022), and of the H100 PCIe's brief PB-11133.
CARDS = (
    Card("L40S", 362.05e12),
    Card("L4", 121e12, "L4", 22.0, "l4", L4, L4_GRPO),
    Card("A10G", 70e12),
    # Activations do not fit beside the shards of trainable parameters: recompute them.
    Card("A100", 312e12, "A100-40G", 39.3, "a100_40", {**FULL, "train.activation_checkpointing": "true"}),
    # Replicas of trainable parameters, 48 GiB with gradients and Adam's moments, do not fit beside activations.
    Card("A100", 312e12, "A100-80G", 79.1, "a100", FULL),
    Card("H100 NVL", 835.5e12),
    Card("H100 PCIe", 756.5e12),
    Card("H100", 989.5e12, "H100", 79.1, "h100", FULL),
    Card("H200 NVL", 835.5e12),
    # Replicas fit too, but each would read and write 198 GB a step to cast, accumulate, clip and update parameters; a
    # shard 33 GB (computed for 8 GPUs).
    Card("H200", 989.5e12, "H200", 139.7, "h200", {**FULL, "batch_size": "32"}),
    Card("B200", 2250e12, "B200", 178.3, "b200", {**FULL, "batch_size": "32"}),
)
# Cards that runs are planned for, by Ray's names and by presets.
PLANNED = {card.name: card for card in CARDS if card.name is not None}
OF_PRESET = {card.preset: card for card in CARDS if card.preset is not None}
CARDS_GIB = {name: card.gib for name, card in PLANNED.items() if card.gib is not None}
# Ray's name for either size, besides the names with the size: what does not fit the larger one fits neither.
CARDS_GIB["A100"] = CARDS_GIB["A100-80G"]
