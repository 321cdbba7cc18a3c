"""The interface of an objective of grpo.py: which episodes teach, what it adds to their decisions, and its loss.

Legend: B rows (decisions), N groups, G episodes of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from util import Batch
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup
from vla_finetuning.rl.sampler import FlowSDE

EPSILON = 1e-6


@dataclass(frozen=True)
class Totals:
    """Means over an update's rows, of all ranks.

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

    A subclass gives `used`, `prepare`, `forward` and `describe`, and is the METHOD of a module of this package.

    Args:
        loss: of the policy. sde: by which it acted. seed: of parameters that the objective adds.
    Attributes:
        scores: whether decisions are scored once more before the first update, which the plan counts.
        masks_padding: whether the policy's own loss leaves out actions that were not executed.
        critic: trains beside the policy and has no influence on it but by the advantages; None: there is none.
        sums: float32 (7,), on the device: what `Totals` is made of, of all micro-batches since `clear`.
    """

    scores: ClassVar[bool] = True
    masks_padding: ClassVar[bool] = False
    sums: Tensor

    def __init__(self, loss: FlowLoss, sde: FlowSDE, options: GrpoOptions, seed: int = 0):
        super().__init__()
        self.loss, self.sde, self.options, self.seed = loss, sde, options, seed
        self.critic: nn.Module | None = None
        loss.mask_padding = self.masks_padding
        self.register_buffer("sums", torch.zeros(7), persistent=False)

    @classmethod
    def describe(cls, options: GrpoOptions) -> str:
        """Return the plan's line about the objective."""
        raise NotImplementedError

    def used(self, group: RolloutGroup) -> Tensor:
        """Return a mask of the episodes to learn from, bool (N, G)."""
        raise NotImplementedError

    def prepare(self, rollouts: RolloutBatch, group: RolloutGroup, start: Objective | None) -> None:
        """Add to the decisions what `forward` takes, before the first update. Every rank must call it.

        Args:
            rollouts: `values` has a row for each decision of all ranks, `draw` what differs from pass to pass.
            start: the policy that the run started from, with --grpo.kl.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """Return the sum of the rows' losses, 0-d.

        Args:
            batch: B rows: what `FlowLoss` takes of images and language, `weight` float32 (B,), 0 for a row that only
                fills up, and what `prepare` has added.
            noise, time: not looked at; the batch has what is drawn.
        """
        raise NotImplementedError

    def metrics(self, rollouts: RolloutBatch, totals: Totals) -> dict[str, float | None]:
        """Return what a line of metrics.jsonl says of an iteration's updates; None where it means nothing."""
        return {
            "kl": totals.kl,
            "kl_start": totals.kl_start if self.options.kl else None,
            "clipped": totals.clipped,
            "ratio_off": totals.ratio_off,
            "value_loss": None,
            "explained_variance": None,
        }

    @torch.no_grad()
    def add(self, *values: Tensor) -> None:
        """Add a micro-batch to `sums`, in the order: rows, loss, kl, clipped, the largest |r - 1|, kl_start, value."""
        off = torch.maximum(self.sums[4], values[4]) if len(values) > 4 else self.sums[4].clone()
        for number, value in enumerate(values):
            self.sums[number] += value
        self.sums[4] = off

    def clear(self) -> None:
        self.sums.zero_()


def totals(sums: Tensor) -> Totals:
    """Return the means of `Objective.sums`, (7,), or (ranks, 7) of all ranks. Reads values from the device."""
    rows = cast("list[list[float]]", sums.reshape(-1, 7).tolist())
    weight, loss, kl, flat, _, away, value_loss = (sum(column) for column in zip(*rows, strict=True))
    weight = max(weight, 1e-9)
    return Totals(
        loss / weight, kl / weight, flat / weight, max(row[4] for row in rows), away / weight, value_loss / weight
    )
