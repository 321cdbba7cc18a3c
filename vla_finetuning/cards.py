"""GPUs, and what goes by them: presets, memory, peak rates, and the cluster files in configs/.

    python -m vla_finetuning.cards      # writes configs/aws_<preset>.yaml and configs/gcp_<preset>.yaml

Needs no package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# What presets set besides. The GPU ones are sized by what --dry_run plans for PI0.5 with 3 cameras: one micro-batch of
# 16 rows, of 32 on GPUs with more than 100 GiB, with 4 GiB to spare on every GPU (tests/training/test_capacity.py).
# More rows fill more whole tiles of matrix products and share the optimizer's time. openpi trains PI0.5 in LIBERO on
# 256 rows a step. Planned, not measured.
GPU = {"scaling.use_gpu": "true", "steps": "30000", "batch_size": "16", "grad_accum": "1"}
FULL = {**GPU, "train.mode": "full", "scaling.num_workers": "8", "scaling.strategy": "fsdp2"}
# What RLinf publishes of PI0.5 in LIBERO (libero_10_grpo_openpi_pi05.yaml) trains the action expert at this rate, with
# 2048 decisions per update; presets differ in nothing but how many rows at once fit.
GRPO = {
    **{"scaling.use_gpu": "true", "scaling.num_workers": "8", "train.mode": "expert", "batch_size": "32"},
    **{"lr": "5e-6", "grpo.minibatch": "2048"},
}


@dataclass(frozen=True)
class Machine:
    """A type of machine that a cloud lends. `memory` as the cloud's own table gives it; `note` about others like it."""

    name: str
    cpus: int
    memory: str
    gpus: int = 0
    note: str = ""


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        words: those of `torch.cuda.get_device_name` that tell it.
        flops: dense bf16 matrix products, FLOP/s. NVIDIA's data sheets give most "with sparsity": those are halved.
        name: Ray's, where runs are planned for it. gib: what CUDA reports of its memory: the "total capacity" in
            PyTorch's errors about memory, the least of those that users have posted (drivers and forms of a card differ
            by a tenth). The data sheets' numbers are in units of 10^9 bytes, and of what is left a driver keeps some.
        sold: how it is called where it is lent. preset, flags, grpo_flags: of `vla.py` and `grpo.py`.
        machines: with such GPUs, by cloud. decoders: CPU-only machines beside them, at most.
    """

    words: str
    flops: float
    name: str | None = None
    gib: float | None = None
    sold: str = ""
    preset: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    grpo_flags: Mapping[str, str] = field(default_factory=lambda: GRPO)
    machines: Mapping[str, Machine] = field(default_factory=dict)
    decoders: int = 4


CARDS = (
    # The first whose words a device's name has counts.
    Card("L40S", 362.05e12),  # nvidia.com/en-us/data-center/l40s
    Card(
        "L4",
        121e12,  # nvidia.com/en-us/data-center/l4: 242 with sparsity
        name="L4",
        gib=22.0,
        sold="L4 24 GB",
        preset="l4",
        flags={**GPU, "train.mode": "expert", "scaling.num_workers": "4"},
        # Of five random steps each.
        grpo_flags={**GRPO, "scaling.num_workers": "4", "batch_size": "4"},
        machines={
            "aws": Machine("g6.12xlarge", 48, "192 GiB", 4),
            "gcp": Machine("g2-standard-48-nvidia-l4-4", 48, "192 GB", 4),
        },
        decoders=2,
    ),
    Card("A10G", 70e12),  # NVIDIA A10G for AWS, data sheet of 17 February 2022: 140 with sparsity
    Card(
        "A100",
        312e12,  # nvidia.com/en-us/data-center/a100
        name="A100-40G",
        gib=39.3,
        sold="A100 40 GB",
        preset="a100_40",
        # What activations take would not fit beside the shards of what trains: computed again.
        flags={**FULL, "train.activation_checkpointing": "true"},
        machines={
            "aws": Machine("p4d.24xlarge", 96, "1152 GiB", 8),
            "gcp": Machine("a2-highgpu-8g-nvidia-tesla-a100-8", 96, "680 GB", 8),
        },
    ),
    Card(
        "A100",
        312e12,
        name="A100-80G",
        gib=79.1,
        sold="A100 80 GB",
        preset="a100",
        # Replicas of what trains, 48 GiB with gradients and Adam's moments, would not fit beside activations.
        flags=FULL,
        machines={
            "aws": Machine("p4de.24xlarge", 96, "1152 GiB", 8, "p4d has 40 GB: --preset a100_40"),
            "gcp": Machine(
                "a2-ultragpu-8g-nvidia-a100-80gb-8", 96, "1360 GB", 8, "a2-highgpu has 40 GB: --preset a100_40"
            ),
        },
    ),
    Card("H100 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h100: 1671 with sparsity
    Card("H100 PCIe", 756.5e12),  # NVIDIA H100 PCIe, product brief PB-11133: 1513 with sparsity
    Card(
        "H100",
        989.5e12,  # nvidia.com/en-us/data-center/h100, SXM: 1979 with sparsity
        name="H100",
        gib=79.1,
        sold="H100 80 GB",
        preset="h100",
        flags=FULL,
        machines={
            "aws": Machine("p5.48xlarge", 192, "2048 GiB", 8),
            "gcp": Machine("a3-highgpu-8g-nvidia-h100-80gb-8", 208, "1872 GB", 8),
        },
    ),
    Card("H200 NVL", 835.5e12),  # nvidia.com/en-us/data-center/h200: 1671 with sparsity
    Card(
        "H200",
        989.5e12,  # nvidia.com/en-us/data-center/h200, SXM: 1979 with sparsity
        name="H200",
        gib=139.7,
        sold="H200 141 GB",
        preset="h200",
        # Here replicas fit too, but each would read and write 198 GB a step to cast, accumulate, clip and update what
        # all of them hold; of shards it is 33 (counted, 8 GPUs).
        flags={**FULL, "batch_size": "32"},
        machines={
            "aws": Machine("p5en.48xlarge", 192, "2048 GiB", 8),
            "gcp": Machine("a3-ultragpu-8g-nvidia-h200-141gb-8", 224, "2952 GB", 8),
        },
    ),
    Card(
        "B200",
        2250e12,  # nvidia.com/en-us/data-center/hgx: 36 PFLOP/s with sparsity for 8 of them
        name="B200",
        gib=178.3,
        sold="B200 180 GB",
        preset="b200",
        flags={**FULL, "batch_size": "32"},
        machines={
            "aws": Machine("p6-b200.48xlarge", 192, "2048 GiB", 8),
            "gcp": Machine("a4-highgpu-8g-nvidia-b200-8", 224, "3968 GB", 8),
        },
    ),
)
# Those that runs are planned for, by Ray's names and by presets.
PLANNED = {card.name: card for card in CARDS if card.name is not None}
OF_PRESET = {card.preset: card for card in CARDS if card.preset is not None}
CARDS_GIB = {name: card.gib for name, card in PLANNED.items() if card.gib is not None}
# Ray calls both sizes this, besides the name with the size: what does not fit the larger fits neither.
CARDS_GIB["A100"] = CARDS_GIB["A100-80G"]

CLOUDS = {
    "aws": ("AWS", Machine("m5.2xlarge", 8, "32 GiB"), Machine("m6i.8xlarge", 32, "128 GiB")),
    "gcp": ("Google Cloud", Machine("n2-standard-8", 8, "32 GB"), Machine("n2-standard-32", 32, "128 GB")),
}


def cluster_file(card: Card, cloud: str) -> str:
    """The text of configs/<cloud>_<preset>.yaml: an Anyscale compute config."""
    (title, head, decoder), gpu = CLOUDS[cloud], card.machines[cloud]
    alone, all_cpus = gpu.cpus // gpu.gpus, (gpu.cpus + card.decoders * decoder.cpus) // gpu.gpus
    note = f" ({gpu.note})" if gpu.note else ""
    name = f"vla-{card.preset}".replace("_", "-")
    return f"""\
# Written by `python -m vla_finetuning.cards`.
# --preset {card.preset} on {title}: `anyscale compute-config create -n {name} -f configs/{cloud}_{card.preset}.yaml`
# CPUs per GPU: {alone} on the GPU node, {all_cpus} with all CPU-only workers. See configs/README.md.
head_node:
  instance_type: {head.name} # {head.cpus} vCPUs, {head.memory}; only the driver, so no task may land here
  resources:
    CPU: 0
    GPU: 0
worker_nodes:
  - name: gpu
    instance_type: {gpu.name} # {gpu.cpus} vCPUs, {gpu.memory}, {gpu.gpus} x {card.sold}{note}
    min_nodes: 1
    max_nodes: 1
  - name: decode
    # {decoder.cpus} vCPUs, {decoder.memory}; started only while Ray Data asks for more CPUs
    instance_type: {decoder.name}
    min_nodes: 0
    max_nodes: {card.decoders}
"""


def cluster_files() -> dict[str, str]:
    """All of them, by their names in configs/."""
    return {
        f"{cloud}_{preset}.yaml": cluster_file(card, cloud) for cloud in CLOUDS for preset, card in OF_PRESET.items()
    }


if __name__ == "__main__":
    for file_name, text in cluster_files().items():
        Path("configs", file_name).write_text(text)
