"""EVO1: its instructions become tokens in its forward, beside the images of an InternVL."""

from __future__ import annotations

from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_finetuning.policies.family import Family, PolicyLoss


class Evo1(Family):
    """EVO1 and types that derive from it."""

    pads_statistics = True

    def action_width(self, config: PreTrainedConfig) -> int:
        """As wide as the policy's own: its processors add zeros."""
        return config.max_action_dim

    def make_loss(self, policy: PreTrainedPolicy, **options: Any) -> PolicyLoss:
        loss = super().make_loss(policy, **options)
        # It makes pixels of the precision that its option says (vlm_dtype), whatever the weights have become.
        policy.model.embedder.model_dtype = next(policy.model.embedder.model.parameters()).dtype
        return loss
