"""Filtered imitation: the policy's own loss on the decisions of successful episodes; a baseline.

Legend: B rows (decisions), T chunk, A action, N groups, G episodes of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from util import Batch
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup, imitation_draws
from vla_finetuning.rl.objectives.base import Objective


class FilteredImitation(Objective):
    """The policy's own loss; a micro-batch has `action` (B, T, A), `action_is_pad` bool (B, T), `noise` and `time`."""

    scores = False
    masks_padding = True

    @classmethod
    def describe(cls, options: GrpoOptions) -> str:
        shared = f"; half of each minibatch from {options.demonstrations}" if options.demonstrations else ""
        return f"imitation of the episodes that succeeded; --grpo.target_kl does not stop it{shared}"

    def select_episodes(self, group: RolloutGroup) -> Tensor:
        """Return a mask of the episodes that succeeded, bool (N, G), whatever their rewards are."""
        return group.success > 0

    def prepare(self, rollouts: RolloutBatch, group: RolloutGroup, start: Objective | None) -> None:
        for name in ("x", "after", "step_numbers"):
            rollouts.columns.pop(name, None)
        config: Any = self.loss.policy.config

        def draw(rows: np.ndarray, key: tuple[int, ...]) -> dict[str, Tensor]:
            names = [(*key, rollouts.episode[row], rollouts.decision[row]) for row in rows]
            # Actions that were not executed are no examples of success.
            padded = (torch.arange(config.chunk_size) >= config.n_action_steps).repeat(len(rows), 1)
            return {**imitation_draws(config, names), "action_is_pad": padded}

        rollouts.draw = draw

    def forward(self, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        # A row is the mean over its executed actions: a decision then weighs as much as a demonstration.
        weight, steps = batch["weight"], batch["action_is_pad"].shape[1]
        row_weight = weight * (steps / (steps - batch["action_is_pad"].sum(dim=1)))
        loss = self.loss({**batch, "row_weight": row_weight}, batch["noise"], batch["time"]) * len(weight)
        self.add(rows=weight.sum(), loss=loss.detach())
        return loss

    def metrics(self, rollouts: RolloutBatch, means: Mapping[str, float]) -> dict[str, float | None]:
        return super().metrics(rollouts, means) | {"kl": None}  # imitation computes no ratios


METHOD = FilteredImitation
