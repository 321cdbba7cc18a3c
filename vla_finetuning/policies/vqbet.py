"""VQ-BeT: what its training keeps between steps besides weights.

Its first `n_vqvae_training_steps` forwards train a codebook of action chunks, which is a buffer; then that is frozen,
and the rest trains. LeRobot 0.6.1 counts the forwards in an int, which its own resume begins anew from 0, and counts
those without a gradient too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.queued import Queued

# The forwards that the codebook has been trained in.
MODULE, COUNT = "vqbet.action_head.vqvae_model", "optimized_steps"


class VQBeTLoss(PolicyLoss):
    """LeRobot's loss, whose count of forwards is a buffer of the policy while it trains, and counts only those."""

    def __init__(self, policy: PreTrainedPolicy, *, images: DeviceHalf | None = None):
        super().__init__(policy, images=images)
        vqvae = policy.get_submodule(MODULE)
        if COUNT not in dict(vqvae.named_buffers()):
            count: Any = vqvae.__dict__.pop(COUNT)
            vqvae.register_buffer(COUNT, torch.tensor(count))

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        if self.training:
            self.policy.train()  # as `lerobot-train` before every step: LeRobot freezes the codebook in eval mode
            return super().forward(batch)
        count = self.policy.get_buffer(f"{MODULE}.{COUNT}")
        before = count.clone()
        count.fill_(-1)  # far from where the codebook is frozen
        try:
            return super().forward(batch)
        finally:
            count.copy_(before)


class VQBeT(Queued):
    """VQ-BeT and types that derive from it."""

    no_adapters = (
        "its first steps (n_vqvae_training_steps) train a codebook and nothing else, and adapters leave that frozen"
    )

    def training_state(self) -> dict[str, Tensor]:
        return {f"{MODULE}.{COUNT}": torch.tensor(0)}

    def make_loss(self, policy: PreTrainedPolicy, **options: Any) -> PolicyLoss:
        return VQBeTLoss(policy, images=super().make_loss(policy, **options).images)
