"""ACT: LeRobot's loss, and the same with the mean over the valid action steps of a whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F  # noqa: N812
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_IMAGES
from torch import Tensor

from vla_finetuning.policies.family import MEAN_COUNT, Family, PolicyLoss


class ACTLoss(PolicyLoss):
    """LeRobot's loss: the mean error over valid action steps, and the latent's divergence, a mean over rows.

    With MEAN_COUNT in the batch, the first is over the valid steps of the whole step, and the second stays as it is.
    """

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        if MEAN_COUNT not in batch:
            return super().forward(batch)
        config, seen = self.policy.config, self.images(batch)
        if config.image_features:
            seen |= {OBS_IMAGES: [seen[key] for key in config.image_features]}
        actions, (mean, log_variance) = self.policy.model(seen)
        errors = F.l1_loss(seen[ACTION], actions, reduction="none") * ~seen["action_is_pad"].unsqueeze(-1)
        loss = errors.sum() / (batch[MEAN_COUNT] * errors.shape[-1])
        self.note({"l1_loss": loss})
        if config.use_vae and log_variance is not None:
            divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
            self.note({"kld_loss": divergence.mean()})
            loss = loss + divergence.mean() * config.kl_weight
        return loss

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (~batch["action_is_pad"]).sum()


class ACT(Family):
    """ACT and types that derive from it."""

    train_options = frozenset({"exact_mean"})

    def remembers(self, config: Any) -> str:
        if config.temporal_ensemble_coeff is None:
            return super().remembers(config)
        return (
            f"with temporal_ensemble_coeff={config.temporal_ensemble_coeff:g} averages the chunks of past steps "
            "(--policy.temporal_ensemble_coeff=null: without)"
        )

    def make_loss(self, policy: PreTrainedPolicy, **options: Any) -> PolicyLoss:
        return ACTLoss(policy, images=super().make_loss(policy, **options).images)
