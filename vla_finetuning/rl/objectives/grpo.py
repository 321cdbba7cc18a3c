"""GRPO: clipped policy gradient of the executed actions, with returns compared within a group (arXiv 2402.03300).

Legend: B rows (decisions), S random steps of each, E executed actions, A action, N groups, G episodes of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from util import Batch
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup, equal_returns
from vla_finetuning.rl.objectives.base import EPSILON, Objective
from vla_finetuning.rl.sampler import Walk, score


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    """Return PPO's loss -min(r A, clip(r) A), and a mask of the entries without gradient because r was clipped.

    r is clipped to [1 - low, 1 + high]. For A < 0, -dual A bounds the loss (dual clip, arXiv 1912.09729), unless None.
    """
    plain, bounded = -ratio * advantage, -ratio.clamp(1.0 - low, 1.0 + high) * advantage
    is_clipped = bounded > plain
    loss = torch.maximum(plain, bounded)
    if dual is not None:
        bound = -dual * advantage
        is_bounded = (advantage < 0) & (loss > bound)
        loss, is_clipped = torch.where(is_bounded, bound, loss), is_clipped | is_bounded
    return loss, is_clipped


def comparable(returns: Tensor) -> Tensor:
    """Return a mask of the finite returns (N, G) of groups whose returns differ, bool (N, G)."""
    return ~equal_returns(returns)[:, None] & returns.isfinite()


class GRPO(Objective):
    """The clipped loss of each random step, with the advantage of its episode within its group.

    A micro-batch has `x`, `after` and `step_numbers` (`sampler.Walk`), `advantage` (B,), and `old` (B, S), which are
    log-probabilities before the first update. With `--grpo.kl` it has `start_mean` (B, S, E, A).
    """

    @classmethod
    def describe(cls, options: GrpoOptions) -> str:
        clip = f"ratio clipped to {1 - options.clip_low:g} .. {1 + options.clip_high:g}"
        if options.dual_clip:
            clip += f", dual clip {options.dual_clip:g}"
        if options.target_kl:
            clip += f", an iteration's updates end at a KL of {options.target_kl:g} per executed dimension"
        return clip

    def select_episodes(self, group: RolloutGroup) -> Tensor:
        """Return a mask of the played episodes of groups whose returns differ, bool (N, G)."""
        return comparable(group.returns)

    def advantages(self, returns: Tensor) -> Tensor:
        """Return each return minus its group's mean, divided by the group's standard deviation, float (N, G).

        Failed episodes do not count in their group, and have the advantage 0.
        """
        advantages = self._normalised(returns)
        for row in (returns.isnan().any(dim=1) & ~equal_returns(returns)).nonzero().flatten():
            played = returns[row].isfinite()
            advantages[row, played] = self._normalised(returns[row, played][None])[0]
        return torch.where(comparable(returns), advantages, 0.0)

    def _normalised(self, returns: Tensor) -> Tensor:
        centred = returns - returns.mean(dim=1, keepdim=True)
        return centred / (returns.std(dim=1, keepdim=True) + EPSILON) if self.options.normalise else centred

    def prepare(self, rollouts: RolloutBatch, group: RolloutGroup, start: Objective | None) -> None:
        rollouts.values["advantage"] = self.advantages(group.returns).flatten()[rollouts.episode]
        self.score_rollouts(rollouts, start)

    def score_rollouts(self, rollouts: RolloutBatch, start: Objective | None) -> None:
        """Add log-probabilities, in the micro-batches of the first pass, so that the first ratio is exactly 1."""
        with torch.no_grad(), rollouts.computing():
            for rows, batch in rollouts.first_pass():
                prefix = self.loss.prefix(self.loss.images(batch))
                for name, value in self.score_rows(batch, prefix, start).items():
                    # The values of a micro-batch without rows have a shape, and go nowhere.
                    values = rollouts.values.setdefault(name, torch.zeros(rollouts.rows, *value.shape[1:]))
                    values[rows] = value[: len(rows)].to(values)

    def score_rows(self, batch: Batch, prefix: Any, start: Objective | None) -> dict[str, Tensor]:
        """Return the values before the first update that `forward` compares with, by name."""
        values = {"old": self.score(batch, prefix)[0]}
        return values | ({"start_mean": start.score(batch)[1]} if isinstance(start, GRPO) else {})

    def forward(self, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        options, weight = self.options, batch["weight"]
        prefix = self.loss.prefix(self.loss.images(batch))
        log_probs, mean, std = self.score(batch, prefix)
        # Rows of weight zero may have NaN here, and NaN times zero is NaN.
        change = torch.where(weight[:, None] > 0, log_probs - batch["old"], 0.0)
        ratio, advantage = change.exp(), batch["advantage"][:, None]
        losses, is_clipped = clipped(ratio, advantage, options.clip_low, options.clip_high, options.dual_clip)
        start_kl = torch.zeros_like(losses)
        if options.kl:
            start_kl = ((mean - batch["start_mean"]) / std[:, :, None, None]).square().sum((2, 3)) / 2.0
            losses = losses + options.kl * start_kl
        loss = (losses.mean(dim=1) * weight).sum()
        value_loss = self.value_loss(batch, prefix)
        with torch.no_grad():
            dimensions = batch["after"].shape[2:].numel()
            divergence = (ratio - 1.0 - change) / dimensions

            def total(values: Tensor) -> Tensor:
                return (values.float().mean(dim=1) * weight).sum()

            self.add(
                rows=weight.sum(),
                loss=loss,
                kl=total(divergence),
                clipped=total(is_clipped),
                ratio_off=(ratio - 1.0).abs().max(),
                kl_start=total(start_kl / dimensions),
                value_loss=value_loss,
            )
        return loss + value_loss

    def value_loss(self, batch: Batch, prefix: Any) -> Tensor:
        """Return the sum of the critic's losses, 0-d; zero without a critic."""
        return torch.zeros_like(batch["weight"][0])

    def score(self, batch: Batch, prefix: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return `sampler.score` of a micro-batch."""
        return score(self.loss, batch, self.sde, Walk(batch["x"], batch["after"], batch["step_numbers"]), prefix)


METHOD = GRPO
