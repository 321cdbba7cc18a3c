"""PPO: GRPO's clipped policy gradient, with advantages from a critic that learns beside the policy.

Legend: B rows (decisions), N groups, G episodes of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from util import Batch
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.policies.value import advantages_and_targets, make_value_head
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup, stack_ranks
from vla_finetuning.rl.objectives.base import EPSILON, Objective
from vla_finetuning.rl.objectives.grpo import GRPO
from vla_finetuning.rl.sampler import FlowSDE


def value_loss(value: Tensor, old: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error of values (B,), or that of values clipped to `old` +- `clip` if it is larger.

    As in PPO's reference implementation (arXiv 1707.06347, openai/baselines).
    """
    errors = (value - target).square()
    if clip is not None:
        errors = torch.maximum(errors, (old + (value - old).clamp(-clip, clip) - target).square())
    return errors / 2.0


class PPO(GRPO):
    """As `GRPO`, with an advantage per decision. A micro-batch also has the critic's `value` and `target` (B,)."""

    def __init__(self, loss: FlowLoss, sde: FlowSDE, options: GrpoOptions, seed: int = 0):
        super().__init__(loss, sde, options, seed)
        self.critic = make_value_head(loss.value_layers(), seed)

    @classmethod
    def describe(cls, options: GrpoOptions) -> str:
        moves = f"values move by {options.value_clip:g} an iteration at most, " if options.value_clip else ""
        critic = f"rate {options.value_lr:g}, {moves}gamma {options.gamma:g}, lambda {options.gae_lambda:g}"
        return f"decisions against a critic ({critic}), {super().describe(options)}"

    def select_episodes(self, group: RolloutGroup) -> Tensor:
        """Return a mask of the played episodes, bool (N, G), or of none where all returns are zero."""
        played = group.returns.isfinite()
        return (played & (group.returns != 0)).any() & played

    def prepare(self, rollouts: RolloutBatch, group: RolloutGroup, start: Objective | None) -> None:
        self.score_rollouts(rollouts, start)
        if rollouts.rows:  # the same on all ranks
            self.estimate_advantages(rollouts, group, self.values_after(rollouts, group))

    def score_rows(self, batch: Batch, prefix: Any, start: Objective | None) -> dict[str, Tensor]:
        return super().score_rows(batch, prefix, start) | {"value": self.values(prefix)}

    def values_after(self, rollouts: RolloutBatch, group: RolloutGroup) -> dict[int, float]:
        """Return the critic's value of the last state of this rank's truncated episodes, by episode number."""
        if not self.options.bootstrap_time_limit:
            return {}
        values = dict[int, float]()
        with torch.no_grad(), rollouts.computing():
            for numbers, batch in rollouts.last_states(group):
                prefix = self.loss.prefix(self.loss.images(batch))
                values |= dict(zip(numbers, self.values(prefix).tolist(), strict=True))
        return values

    def estimate_advantages(self, rollouts: RolloutBatch, group: RolloutGroup, after: Mapping[int, float]) -> None:
        """Add advantages and value targets of all ranks' decisions, from the critic before the first update.

        `after` is the result of `values_after`; the value after other episodes is 0.
        """
        episodes, values = rollouts.episode, rollouts.values["value"]
        estimates = torch.zeros(3, rollouts.rows)  # advantages, targets, values; zero in other ranks' rows
        for episode in np.unique(episodes[rollouts.owned]):
            rows = np.flatnonzero(episodes == episode)
            number, options = int(group.numbers.flat[episode]), self.options
            pair = advantages_and_targets(
                group.rewards(number), values[rows].tolist(), options.gamma, options.gae_lambda, after.get(number, 0.0)
            )
            estimates[:, rows] = torch.stack([*map(torch.tensor, pair), values[rows]])
        advantage, target, value = stack_ranks(estimates.to(self.sums.device)).sum(dim=0).cpu()
        normalised = (advantage - advantage.mean()) / (advantage.std(correction=0) + EPSILON)
        rollouts.values |= {"advantage": normalised, "target": target, "value": value}

    def values(self, prefix: Any) -> Tensor:
        """Return the critic's values of the observations behind `prefix`, float32 (B,)."""
        assert self.critic is not None
        return self.critic(prefix)[:, 0]

    def value_loss(self, batch: Batch, prefix: Any) -> Tensor:
        errors = value_loss(self.values(prefix), batch["value"], batch["target"], self.options.value_clip)
        return (errors * batch["weight"]).sum()

    def metrics(self, rollouts: RolloutBatch, means: Mapping[str, float]) -> dict[str, float | None]:
        """Add the critic's loss, and the share of the targets' variance that its values explain."""
        explained = None
        if "target" in rollouts.values:
            target, value = rollouts.values["target"], rollouts.values["value"]
            unexplained = (target - value).var(correction=0)
            explained = float(1.0 - unexplained / target.var(correction=0).clamp(min=1e-12))
        critic = {"value_loss": means["value_loss"], "explained_variance": explained}
        return super().metrics(rollouts, means) | critic


METHOD = PPO
