"""FastWAM: a world model of videos beside an expert of actions, which reads instructions and frames in its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from vla_finetuning.policies.family import Family, PolicyLoss


class FastWAMLoss(PolicyLoss):
    """LeRobot's loss, computed where the weights are and in their precision.

    LeRobot 0.6.1 notes device and precision where it builds the model, and moves its inputs there ever after.
    """

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        core: Any = self.policy.model
        trains = next(parameter for parameter in core.parameters() if parameter.requires_grad)
        core.device, core.torch_dtype = trains.device, trains.dtype
        return super().forward(batch)


class FastWAM(Family):
    """FastWAM and types that derive from it."""

    def make_loss(self, policy: PreTrainedPolicy, **options: Any) -> PolicyLoss:
        return FastWAMLoss(policy, images=super().make_loss(policy, **options).images)
