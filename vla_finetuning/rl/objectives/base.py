"""The interface of an objective of `grpo.py`: which episodes it uses, what it adds to their decisions, its loss.

Legend: B rows (decisions), N groups, G episodes of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from util import Batch
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup
from vla_finetuning.rl.sampler import FlowSDE

EPSILON = 1e-6
# Entries of `Objective.sums`: sums over rows, `ratio_off` a maximum. KLs are (r - 1) - log r per executed dimension (of
# an action, times actions): `kl` of the policy that acted to the policy now, `kl_start` to that of the run's start.
# `clipped` is the share of steps that the clip left without a gradient, `ratio_off` the largest |r - 1|.
SUMS = ("rows", "loss", "kl", "clipped", "ratio_off", "kl_start", "value_loss")


class Objective(nn.Module):
    """The loss of a micro-batch of decisions, as a sum over its rows. A subclass is the METHOD of a module.

    Attributes:
        scores: whether decisions are scored before the first update; the plan counts this.
        masks_padding: whether the policy's loss leaves out actions that were not executed.
        critic: a module that trains beside the policy and affects it by advantages only; None if there is none.
        sums: float32 (len(SUMS),) on the device, over the micro-batches of an iteration.
    """

    scores: ClassVar[bool] = True
    masks_padding: ClassVar[bool] = False
    sums: Tensor

    def __init__(self, loss: FlowLoss, sde: FlowSDE, options: GrpoOptions, seed: int = 0):
        super().__init__()
        self.loss, self.sde, self.options, self.seed = loss, sde, options, seed
        self.critic: nn.Module | None = None
        loss.mask_padding = self.masks_padding
        self.register_buffer("sums", torch.zeros(len(SUMS)), persistent=False)

    @classmethod
    def describe(cls, options: GrpoOptions) -> str:
        """Return the plan's line about the objective."""
        raise NotImplementedError

    def select_episodes(self, group: RolloutGroup) -> Tensor:
        """Return a mask of the episodes to learn from, bool (N, G)."""
        raise NotImplementedError

    def prepare(self, rollouts: RolloutBatch, group: RolloutGroup, start: Objective | None) -> None:
        """Add the inputs of `forward` to the decisions, before the first update. Every rank must call it.

        Args:
            rollouts: set `values` for inputs that stay, one row per decision of all ranks; `draw` for those of a pass.
            start: the objective with the policy that the run started from, for --grpo.kl; else None.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """Return the sum of the rows' losses, 0-d; `noise` and `time` are unused.

        A batch has images and language as `FlowLoss` takes them, `weight` float32 (B,), which is 0 for rows that fill
        up, and the inputs that `prepare` added, with all random numbers.
        """
        raise NotImplementedError

    def metrics(self, rollouts: RolloutBatch, means: Mapping[str, float]) -> dict[str, float | None]:
        """Return an iteration's entries of metrics.jsonl from `sum_means`; None marks those that do not apply."""
        absent = {"value_loss": None, "explained_variance": None}
        return {**means, **absent, **({} if self.options.kl else {"kl_start": None})}

    @torch.no_grad()
    def add(self, **values: Tensor) -> None:
        """Add a micro-batch's values, 0-d, to `sums` by their names in `SUMS`."""
        for name, value in values.items():
            total = self.sums[SUMS.index(name)]
            total.copy_(torch.maximum(total, value) if name == "ratio_off" else total + value)


def sum_means(sums: Tensor) -> dict[str, float]:
    """Return the means over rows of `Objective.sums` of all ranks, (ranks, len(SUMS)), by name. Reads the device."""
    ranks = cast("list[list[float]]", sums.reshape(-1, len(SUMS)).tolist())
    columns = dict(zip(SUMS, zip(*ranks, strict=True), strict=True))
    rows, ratio_off = max(sum(columns.pop("rows")), 1e-9), max(columns["ratio_off"])
    return {name: sum(column) / rows for name, column in columns.items()} | {"ratio_off": ratio_off}
