"""What `profile_step` finds, as its JSON holds it, and whether two results differ by more than their own spread."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from diagnostics.report import Environment, Record, Report, Spread
from diagnostics.step_clock import MEASURED, Communication, Pass, Times
from util import Phase
from vla_finetuning.plan.resolve import Run

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
    find_unused_params: bool | None
    fused_adamw: bool
    checkpoint: bool
    trace: bool

    @classmethod
    def of(cls, options: Namespace, run: Run) -> Settings:
        """Whole blocks; one is as long as the run's way from log step to log step, if that leaves MIN_BLOCKS."""
        block = min(run.config.log_freq, max(1, options.profile_steps // MIN_BLOCKS))
        # The traced steps are among the first ones, but not the very first.
        warmup = max(options.profile_warmup, TRACED_STEPS + 2 if options.profile_trace else 1)
        return cls(
            steps=block * math.ceil(options.profile_steps / block),
            warmup=block * math.ceil(warmup / block),
            block_steps=block,
            sync=options.profile_sync,
            no_optim=options.profile_no_optim,
            find_unused_params=options.find_unused_params,
            fused_adamw=options.fused_adamw is not False,
            checkpoint=options.profile_checkpoint and not options.profile_no_optim,
            trace=options.profile_trace is not None,
        )

    def passes(self, world: int) -> list[Pass]:
        """Return what each step of the run serves. The passes take turns in going first, so that none
        gains by a drift.
        """
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
        """Mean seconds of a step that is not measured inside."""
        return float(np.mean(self.step_s["untouched"]))

    @property
    def exposed_wait_s(self) -> float:
        """Mean seconds of a step in which nothing is computed, for want of data."""
        return self.phases["data_wait"].exposed.mean

    @property
    def hidden_s(self) -> float:
        """Mean seconds of work in a step that takes none of its time, because other work goes on meanwhile."""
        return sum(phase.full.mean - phase.exposed.mean for phase in self.phases.values())


# ---- two results side by side -------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """B's time per step over A's, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f"95 % interval {self.low:.3f} to {self.high:.3f}"
        if self.low <= 1 <= self.high:
            return f"no difference that these blocks can show: B takes {self.ratio:.3f} of A's time ({interval})"
        faster = f"{1 / self.ratio:.2f}x faster" if self.ratio < 1 else f"{self.ratio:.2f}x slower"
        return f"B is {faster}: it takes {self.ratio:.3f} of A's time ({interval})"


def judge(a: Sequence[float], b: Sequence[float]) -> Verdict:
    """Welch's t interval of the ratio of two geometric means. Blocks are the samples: steps depend on their neighbours.

    Raises:
        ValueError: fewer than two blocks: there is no spread to judge by.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError("one block of steps has no spread to judge by: measure with more --profile_steps")
    log_a, log_b = np.log(a), np.log(b)
    ratio = float(np.exp(log_b.mean() - log_a.mean()))
    if np.ptp(log_a) == np.ptp(log_b) == 0:
        return Verdict(ratio, ratio, ratio)
    low, high = stats.ttest_ind(log_b, log_a, equal_var=False).confidence_interval(0.95)
    return Verdict(ratio, float(np.exp(low)), float(np.exp(high)))


def compare(a: StepReport, b: StepReport) -> str:
    """The A/B table: untouched steps and phases, what differs between the runs, and the verdict."""
    lines = [f"{key:36} A {left}   B {right}" for key, left, right in _differences(a, b)] or ["the same settings"]
    lines += ["", f"{'phase (adds, mean ms)':28}{'A':>10}{'B':>10}{'B - A':>10}{'B / A':>8}"]
    rows = [(p, a.phases[p].exposed.mean, b.phases[p].exposed.mean) for p in a.phases if p in b.phases]
    for name, left, right in [*rows, ("step, untouched", a.untouched_s, b.untouched_s)]:
        ratio = f"{right / left:8.2f}" if left else f"{'-':>8}"
        lines.append(f"{name:28}{1e3 * left:10.2f}{1e3 * right:10.2f}{1e3 * (right - left):+10.2f}{ratio}")
    steps_a, steps_b = a.step_s["untouched"], b.step_s["untouched"]
    lines += ["", f"per step: {judge(steps_a, steps_b)}"]
    if a.global_batch_size != b.global_batch_size:
        rows_a, rows_b = ([s / r.global_batch_size for s in r.step_s["untouched"]] for r in (a, b))
        lines.append(f"per row:  {judge(rows_a, rows_b)}")
    if a.environment.gpus != b.environment.gpus or a.environment.cpu != b.environment.cpu:
        lines.append("They were measured on different hardware: the verdict is about that too.")
    return "\n".join(lines)


def _differences(a: StepReport, b: StepReport) -> list[tuple[str, Any, Any]]:
    """Return what was set, or installed, differently."""

    def flat(report: StepReport) -> dict[str, Any]:
        environment = report.environment
        top: dict[str, Any] = {
            "git revision": environment.git_revision,
            "gpus": environment.gpus,
            "cpu": environment.cpu,
        }
        top |= {f"{name} version": version for name, version in environment.versions.items()}
        top |= {f"profile {name}": value for name, value in report.settings.model_dump().items()}
        for key, value in report.config.items():
            nested = value if isinstance(value, dict) and key != "rename_map" else None
            top |= {f"--{key}.{k}": v for k, v in nested.items()} if nested is not None else {f"--{key}": value}
        return top

    left, right = flat(a), flat(b)
    return [(key, left.get(key), right.get(key)) for key in left | right if left.get(key) != right.get(key)]
