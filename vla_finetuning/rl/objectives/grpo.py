"""GRPO: the clipped policy gradient of the executed actions, with returns compared within a group (arXiv 2402.03300).

Legend: B rows (decisions), S random steps of each, E executed actions, A action, N groups, G episodes of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from util import Batch
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup, alike
from vla_finetuning.rl.objectives.base import EPSILON, Objective
from vla_finetuning.rl.sampler import Walk, score


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic loss -min(r A, clip(r) A), and where it is flat because r has gone far enough.

    Args:
        low, high: r is clipped to [1 - low, 1 + high].
        dual: of a negative advantage, the loss is at most -dual A, however large r is (arXiv 1912.09729).
    """
    plain, bounded = -ratio * advantage, -ratio.clamp(1.0 - low, 1.0 + high) * advantage
    flat = bounded > plain
    loss = torch.maximum(plain, bounded)
    if dual is not None:
        most = -dual * advantage
        over = (advantage < 0) & (loss > most)
        loss, flat = torch.where(over, most, loss), flat | over
    return loss, flat


def comparable(returns: Tensor) -> Tensor:
    """Return a mask of the finite returns (N, G) of groups whose returns differ, bool (N, G)."""
    return ~alike(returns)[:, None] & returns.isfinite()


class GRPO(Objective):
    """The clipped loss of each random step, by the advantage of its episode above the others of its group.

    A micro-batch has `x`, `after`, `which` (`sampler.Walk`), `advantage` (B,), `old` (B, S), the log-probabilities
    before the first update, and `start_mean` (B, S, E, A) with `--grpo.kl`.
    """

    @classmethod
    def describe(cls, options: GrpoOptions) -> str:
        clip = f"ratio clipped to {1 - options.clip_low:g} .. {1 + options.clip_high:g}"
        if options.dual_clip:
            clip += f", dual clip {options.dual_clip:g}"
        if options.target_kl:
            clip += f", an iteration's updates end at a KL of {options.target_kl:g} per executed dimension"
        return clip

    def used(self, group: RolloutGroup) -> Tensor:
        """Return a mask of the played episodes of groups whose returns differ, bool (N, G)."""
        return comparable(group.returns)

    def advantages(self, returns: Tensor) -> Tensor:
        """Return each episode's return less its group's mean, by the group's standard deviation: float (N, G).

        A group is of the episodes that could be played; the advantage of others is 0.
        """
        worth = self._normalised(returns)
        for row in returns.isnan().any(dim=1).nonzero().flatten():
            played = returns[row].isfinite()
            worth[row, played] = self._normalised(returns[row, played][None])[0]
        return torch.where(comparable(returns), worth, 0.0)

    def _normalised(self, returns: Tensor) -> Tensor:
        centred = returns - returns.mean(dim=1, keepdim=True)
        return centred / (returns.std(dim=1, keepdim=True) + EPSILON) if self.options.normalise else centred

    def prepare(self, rollouts: RolloutBatch, group: RolloutGroup, start: Objective | None) -> None:
        rollouts.values["advantage"] = self.advantages(group.returns).flatten()[rollouts.table.episode]
        self.score_rollouts(rollouts, start)

    def score_rollouts(self, rollouts: RolloutBatch, start: Objective | None) -> None:
        """Add log-probabilities before the first update, in the first pass's micro-batches: the first ratio is 1."""
        # Also on a rank with nothing to learn from, whose row of weight zero needs them.
        for name, shape in self.row_shapes(rollouts.columns, start).items():
            rollouts.values[name] = torch.zeros(rollouts.rows, *shape)
        with torch.no_grad(), rollouts.computing():
            for rows, batch in rollouts.first_pass():
                prefix = self.loss.prefix(self.loss.images(batch))
                for name, value in self.score_rows(batch, prefix, start).items():
                    rollouts.values[name][rows] = value.cpu()

    def row_shapes(self, columns: Batch, start: Objective | None) -> dict[str, tuple[int, ...]]:
        """Return the shape of a row of each value that `score_rows` gives."""
        shapes = {"old": tuple(columns["which"].shape[1:]) if columns else (0,)}
        return shapes | ({"start_mean": tuple(columns["after"].shape[1:])} if start is not None and columns else {})

    def score_rows(self, batch: Batch, prefix: Any, start: Objective | None) -> dict[str, Tensor]:
        """Return what `forward` compares a micro-batch with, by name."""
        values = {"old": self.score(batch, prefix)[0]}
        return values | ({"start_mean": start.score(batch)[1]} if isinstance(start, GRPO) else {})

    def forward(self, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        options, weight = self.options, batch["weight"]
        prefix = self.loss.prefix(self.loss.images(batch))
        log_probs, mean, std = self.score(batch, prefix)
        # A row that fills up must not even be NaN times zero.
        change = torch.where(weight[:, None] > 0, log_probs - batch["old"], 0.0)
        ratio, advantage = change.exp(), batch["advantage"][:, None]
        losses, flat = clipped(ratio, advantage, options.clip_low, options.clip_high, options.dual_clip)
        away = torch.zeros_like(losses)
        if options.kl:
            away = ((mean - batch["start_mean"]) / std[:, :, None, None]).square().sum((2, 3)) / 2.0
            losses = losses + options.kl * away
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
                clipped=total(flat),
                ratio_off=(ratio - 1.0).abs().max(),
                kl_start=total(away / dimensions),
                value_loss=value_loss,
            )
        return loss + value_loss

    def value_loss(self, batch: Batch, prefix: Any) -> Tensor:
        """Return the sum of a critic's losses, 0-d; zero without one."""
        return torch.zeros_like(batch["weight"][0])

    def score(self, batch: Batch, prefix: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return `sampler.score` of a micro-batch."""
        return score(self.loss, batch, self.sde, Walk(batch["x"], batch["after"], batch["which"]), prefix)


METHOD = GRPO
