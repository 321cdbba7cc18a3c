"""Training from the outcomes of episodes alone: advantages, and the loss of the executed actions.

Pure functions of numbers, and `Objective`, the module that a training loop wraps in DDP and calls.

Legend: B rows (decisions), S random steps of each, T chunk, E of it executed, A action, N groups, G episodes of a
group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from util import Batch
from vla_finetuning.options.grpo import GrpoOptions, Method
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.policies.value import make_value_head
from vla_finetuning.rl.flow_sde import FlowSDE, Walk, score

EPSILON = 1e-6


def advantages(returns: Tensor, method: Method, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """What each episode is worth above the others of its group; and which episodes there is something to learn from.

    grpo: the return less the group's mean, by the group's standard deviation (DeepSeekMath, arXiv 2402.03300); a group
    whose returns are all equal teaches nothing. filtered: 1 for every episode with a return above zero. ppo: zero here,
    as a critic judges decisions (`learning.RolloutBatch`); nothing is learned where no episode was worth anything.

    Args:
        returns: float (N, G), one row per group. normalise: whether grpo divides by the standard deviation.
    Returns:
        float (N, G), and bool (N, G).
    """
    if method == "filtered":
        good = returns > 0
        return good.float(), good
    if method == "ppo":
        return torch.zeros_like(returns), (returns != 0).any().expand_as(returns)
    differ = (returns != returns[:, :1]).any(dim=1, keepdim=True)
    centred = returns - returns.mean(dim=1, keepdim=True)
    worth = centred / (returns.std(dim=1, keepdim=True) + EPSILON) if normalise else centred
    return worth * differ, differ.expand_as(returns)


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss -min(r A, clip(r) A), and where it is flat because r has gone far enough.

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


def value_loss(value: Tensor, old: Tensor, target: Tensor, clip: float | None) -> Tensor:
    """Half of the squared error of values, the larger of that and the one within `clip` of the old value.

    All of shape (B,); as in PPO's reference implementation (arXiv 1707.06347, openai/baselines).
    """
    errors = (value - target).square()
    if clip is not None:
        errors = torch.maximum(errors, (old + (value - old).clamp(-clip, clip) - target).square())
    return errors / 2.0


@dataclass(frozen=True)
class Totals:
    """What an update says of itself, of all ranks.

    Attributes:
        loss: mean. kl: of the policy that acted to the policy now, by (r - 1) - log r, per executed dimension (of an
            action, times actions). clipped: share of the steps that the clip left without a gradient. ratio_off: the
            largest |r - 1|. kl_start: as kl, to the policy that the run started from. value_loss: mean, of the critic.
    """

    loss: float
    kl: float
    clipped: float
    ratio_off: float
    kl_start: float
    value_loss: float


class Objective(nn.Module):
    """The loss of a micro-batch of decisions: the sum over its rows, whatever they are then divided by.

    A micro-batch, all of B rows: what `FlowLoss` takes of images and language; `weight` float32 (B,), 0 for a row
    that only fills up; and for grpo and ppo `x`, `after`, `which` (`flow_sde.Walk`), `advantage` (B,), `old`
    (B, S), the log-probabilities before the first update, and `start_mean` (B, S, E, A) with `--grpo.kl`; for ppo also
    `value` and `target` (B,); for filtered `action` (B, T, A), `action_is_pad` bool (B, T), `noise` and `time`.

    Args:
        seed: of the critic's first parameters.
    Attributes:
        critic: of ppo, which trains beside the policy and has no influence on it but by the advantages.
        sums: float32 (7,), on the device: what `Totals` is made of, of all micro-batches since `clear`.
    """

    sums: Tensor

    def __init__(self, loss: FlowLoss, sde: FlowSDE, options: GrpoOptions, seed: int = 0):
        super().__init__()
        self.loss, self.sde, self.options = loss, sde, options
        self.critic = make_value_head(loss.value_layers(), seed) if options.method == "ppo" else None
        self.register_buffer("sums", torch.zeros(7), persistent=False)

    def forward(self, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """The sum of the rows' losses, 0-d. `noise`, `time` are in the batch, for filtered; these are not looked at."""
        options, weight = self.options, batch["weight"]
        if options.method == "filtered":
            rows, of_row = len(weight), weight
            if self.loss.mask_padding:
                # The mean over what was executed, or a demonstration would weigh several decisions.
                steps = batch["action_is_pad"].shape[1]
                of_row = weight * (steps / (steps - batch["action_is_pad"].sum(dim=1)))
            loss = self.loss({**batch, "row_weight": of_row}, batch["noise"], batch["time"]) * rows
            self._add(weight.sum(), loss.detach())
            return loss
        prefix = self.loss.prefix(self.loss.images(batch))
        found, mean, std = self.score(batch, prefix)
        # A row that fills up must not even be NaN times zero.
        change = torch.where(weight[:, None] > 0, found - batch["old"], 0.0)
        ratio, advantage = change.exp(), batch["advantage"][:, None]
        losses, flat = clipped(ratio, advantage, options.clip_low, options.clip_high, options.dual_clip)
        away = torch.zeros_like(losses)
        if options.kl:
            away = ((mean - batch["start_mean"]) / std[:, :, None, None]).square().sum((2, 3)) / 2.0
            losses = losses + options.kl * away
        loss = (losses.mean(dim=1) * weight).sum()
        of_values = torch.zeros_like(loss)
        if self.critic is not None:
            errors = value_loss(self.values(prefix), batch["value"], batch["target"], options.value_clip)
            of_values = (errors * weight).sum()
        with torch.no_grad():
            dimensions = batch["after"].shape[2:].numel()
            divergence = (ratio - 1.0 - change) / dimensions

            def total(values: Tensor) -> Tensor:
                return (values.float().mean(dim=1) * weight).sum()

            off = (ratio - 1.0).abs().max()
            self._add(weight.sum(), loss, total(divergence), total(flat), off, total(away / dimensions), of_values)
        return loss + of_values

    def score(self, batch: Batch, prefix: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """`flow_sde.score` of a micro-batch."""
        return score(self.loss, batch, self.sde, Walk(batch["x"], batch["after"], batch["which"]), prefix)

    def values(self, prefix: Any) -> Tensor:
        """What the critic expects from here on, float32 (B,)."""
        assert self.critic is not None
        with torch.autocast(self.sums.device.type, enabled=False):
            return self.critic(*self.loss.value_inputs(prefix))[:, 0]

    @torch.no_grad()
    def _add(self, *values: Tensor) -> None:
        off = torch.maximum(self.sums[4], values[4]) if len(values) > 4 else self.sums[4].clone()
        for number, value in enumerate(values):
            self.sums[number] += value
        self.sums[4] = off

    def clear(self) -> None:
        self.sums.zero_()


def totals(sums: Tensor) -> Totals:
    """What `Objective.sums` says: (7,), or (ranks, 7) of all ranks. Reads values from the device."""
    rows = cast("list[list[float]]", sums.reshape(-1, 7).tolist())
    weight, loss, kl, flat, _, away, of_values = (sum(column) for column in zip(*rows, strict=True))
    weight = max(weight, 1e-9)
    return Totals(
        loss / weight, kl / weight, flat / weight, max(row[4] for row in rows), away / weight, of_values / weight
    )
