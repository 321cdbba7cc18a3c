"""What `profile_step` finds, as its JSON holds it, for itself and for the tools that read it."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Literal

import numpy as np

from diagnostics.environment import Environment, Record
from diagnostics.report import Report, Spread
from diagnostics.step_clock import MEASURED, Communication, Pass, Times
from util import Phase
from vla_finetuning.run.resolve import Run

# A pass is at least so many blocks: their spread is what a difference between two runs is judged by.
MIN_BLOCKS = 5
COMMUNICATION_STEPS = 6
TRACED_STEPS = 3


class Settings(Record):
    """How a run was profiled. `steps` are those of each pass, in blocks of `block_steps`."""

    steps: int
    warmup: int
    block_steps: int
    sync: bool
    no_optim: bool
    find_unused_params: bool
    fused_adamw: bool
    checkpoint: bool
    trace: bool

    @classmethod
    def of(cls, options: Namespace, run: Run) -> Settings:
        """Whole blocks; one is as long as the run's way from log step to log step, if that leaves MIN_BLOCKS."""
        block = min(run.config.log_freq, max(1, options.profile_steps // MIN_BLOCKS))
        search = options.find_unused_params
        # The traced steps are among the first ones, but not the very first.
        warmup = max(options.profile_warmup, TRACED_STEPS + 2 if options.profile_trace else 1)
        return cls(
            steps=block * math.ceil(options.profile_steps / block),
            warmup=block * math.ceil(warmup / block),
            block_steps=block,
            sync=options.profile_sync,
            no_optim=options.profile_no_optim,
            find_unused_params=run.config.scaling.find_unused_parameters if search is None else search,
            fused_adamw=options.fused_adamw is not False,
            checkpoint=options.profile_checkpoint and not options.profile_no_optim,
            trace=options.profile_trace is not None,
        )

    def passes(self, world: int) -> list[Pass]:
        """What each step of the run serves. The passes take turns in going first, so that none gains by a drift."""
        names = MEASURED if self.sync else MEASURED[:2]
        # Early, while data is still being read ahead.
        traced = TRACED_STEPS if self.trace else 0
        plan: list[Pass] = ["warmup"] * self.warmup
        plan[self.warmup - traced - 1 : -1] = ["traced"] * traced
        for turn in range(self.steps // self.block_steps):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                plan += [name] * self.block_steps
        if world > 1:
            plan += ["communication"] * COMMUNICATION_STEPS
        if self.checkpoint:
            plan += ["checkpoint"]
        return plan


class RankProfile(Record):
    """What one training process measured. `block_step_s`: per pass, each block's mean step in seconds."""

    rank: int
    environment: Environment
    block_step_s: dict[Pass, list[float]]
    timed: Times
    synchronized: Times | None
    communication: Communication | None
    checkpoint_s: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int
    mfu_per_rate: float | None


class PhaseSummary(Record):
    """A phase over all timed steps and ranks. `full` and `exposed` as in `Times`; `share` of the step, exposed.

    `quartiles`: the lower and the upper quartile of that share over the blocks of steps that end with a log step.
    """

    full: Spread
    exposed: Spread
    share: float
    quartiles: tuple[float, float]
    slowest_rank: int
    slowest_rank_mean: float


class StepReport(Report):
    """What `profile_step` found. `step_s`: each pass's mean step by block, over ranks, which wait for each other."""

    tool: Literal["profile_step"] = "profile_step"
    settings: Settings
    world_size: int
    global_batch_size: int
    step_s: dict[Pass, list[float]]
    phases: dict[Phase, PhaseSummary]
    steps_per_s: float
    samples_per_s: float
    mfu: float | None
    ranks: list[RankProfile]

    @property
    def untouched_s(self) -> float:
        """Mean seconds of a step that nobody watched."""
        return float(np.mean(self.step_s["untouched"]))

    @property
    def exposed_wait_s(self) -> float:
        """Mean seconds of a step in which nothing is computed, for want of data."""
        return self.phases["data_wait"].exposed.mean

    @property
    def hidden_s(self) -> float:
        """Mean seconds of work in a step that takes none of its time, because other work goes on meanwhile."""
        return sum(phase.full.mean - phase.exposed.mean for phase in self.phases.values())
