"""Summarise and format the result of `profile_step`, and compare two results."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from diagnostics.report import RankRecord, Record, Spread, WorkersReport, format_table, shares, time_line
from diagnostics.step_clock import MEASURED, Communication, Pass, Times
from util import Phase
from vla_finetuning.plan.resolve import Run

# Least number of blocks of a pass, whose spread decides whether two runs differ.
MIN_BLOCKS = 5
COMMUNICATION_STEPS = 6
TRACED_STEPS = 3
# Notable phases: share of a step from which they are reported, description and remedy.
REMEDIES: dict[Phase, tuple[float, str, str]] = {
    "data_wait": (0.05, "Waiting for data is", "diagnostics.profile_dataloader --against this result says why."),
    "copy": (0.05, "Copies to the GPU are", "They are not hidden: is the host's memory pinned?"),
    "optimizer": (0.10, "The optimizer is", "--grad_accum makes it rarer, --train.mode=expert smaller."),
    "metrics": (0.05, "Metrics are", "A larger --log_freq makes log steps rarer."),
}


class Settings(Record):
    """Settings of a profile. `steps` counts the steps of each pass, in blocks of `block_steps`."""

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
        """Make settings with whole blocks of `log_freq` steps, or shorter ones for at least MIN_BLOCKS blocks."""
        block = min(run.config.log_freq, max(1, options.profile_steps // MIN_BLOCKS))
        # The warm-up contains the traced steps, which are not the first ones.
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
        """Return the pass of each step. Passes take turns in going first, so that a drift favours none."""
        names = MEASURED if self.sync else MEASURED[:2]
        # Trace early steps, while data is still being read ahead.
        traced = TRACED_STEPS if self.trace else 0
        plan: list[Pass] = ["warmup"] * self.warmup
        plan[self.warmup - traced - 1 : -1] = ["traced"] * traced
        for turn in range(self.steps // self.block_steps):
            first = turn % len(names)
            plan += [name for name in names[first:] + names[:first] for _ in range(self.block_steps)]
        plan += ["communication"] * (COMMUNICATION_STEPS if world > 1 else 0)
        return plan + ["checkpoint"] * self.checkpoint


class RankProfile(RankRecord):
    """Measurements of one worker. `block_step_s`: seconds of the mean step in each block, by pass."""

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
    """A phase over all timed steps and ranks; `full` and `exposed` as in `Times`.

    `share` is the exposed share of the step, `quartiles` its lower and upper quartile over blocks.
    """

    full: Spread
    exposed: Spread
    share: float
    quartiles: tuple[float, float]
    slowest_rank: int
    slowest_rank_mean: float

    @property
    def range(self) -> str:
        return f"{self.quartiles[0]:.0%} to {self.quartiles[1]:.0%}"


class StepReport(WorkersReport[RankProfile]):
    """Result of `profile_step`. `step_s`: seconds of the mean step over ranks in each block, by pass."""

    tool: Literal["profile_step"] = "profile_step"
    settings: Settings
    global_batch_size: int
    step_s: dict[Pass, list[float]]
    phases: dict[Phase, PhaseSummary]
    steps_per_s: float
    samples_per_s: float
    mfu: float | None

    @property
    def untouched_s(self) -> float:
        """Return the mean seconds of an untouched step."""
        return float(np.mean(self.step_s["untouched"]))

    @property
    def hidden_s(self) -> float:
        """Return the mean seconds of work in a step that overlaps with other work."""
        return sum(phase.full.mean - phase.exposed.mean for phase in self.phases.values())


def summarise(run: Run, settings: Settings, ranks: Sequence[RankProfile]) -> StepReport:
    step_s = {name: np.mean([r.block_step_s[name] for r in ranks], axis=0).tolist() for name in ranks[0].block_step_s}
    steps_per_s = 1 / float(np.mean(step_s["untouched"]))
    samples_per_s, mfu_per_rate = steps_per_s * run.config.global_batch_size, ranks[0].mfu_per_rate
    return StepReport.of(
        run,
        ranks,
        settings=settings,
        global_batch_size=run.config.global_batch_size,
        step_s=step_s,
        phases={phase: _summarise_phase(phase, settings.block_steps, ranks) for phase in ranks[0].timed.full},
        steps_per_s=steps_per_s,
        samples_per_s=samples_per_s,
        mfu=mfu_per_rate and mfu_per_rate * samples_per_s,
    )


def _summarise_phase(phase: Phase, block_steps: int, ranks: Sequence[RankProfile]) -> PhaseSummary:
    # Arrays of shape (rank, step).
    full, exposed = (np.array([getattr(rank.timed, of)[phase] for rank in ranks]) for of in ("full", "exposed"))
    step = np.array([sum(map(np.asarray, rank.timed.exposed.values())) for rank in ranks])
    by_block = [seconds.reshape(-1, block_steps).sum(axis=1) for seconds in (exposed, step)]
    lower, upper = np.quantile(by_block[0] / by_block[1], (0.25, 0.75))
    means = full.mean(axis=1)
    return PhaseSummary(
        full=Spread.of(full.ravel().tolist()),
        exposed=Spread.of(exposed.ravel().tolist()),
        share=float(exposed.sum() / step.sum()),
        quartiles=(float(lower), float(upper)),
        slowest_rank=int(means.argmax()),
        slowest_rank_mean=float(means.max()),
    )


def table(report: StepReport) -> str:
    s, config, many, gib = report.settings, report.config, report.world_size > 1, 2**30
    allocated = [r.peak_allocated_bytes for r in report.ranks if r.peak_allocated_bytes is not None]
    adds = sum(p.exposed.mean for p in report.phases.values())
    rows = [["phase", "mean ms", "median", "p95", "adds ms", "share", "quartiles", *["slowest rank"] * many]]
    for phase, p in report.phases.items():
        rows.append([phase, *p.full.cells(), f"{1e3 * p.exposed.mean:.2f}", f"{p.share:.1%}", p.range])
        rows[-1] += [f"{p.slowest_rank}: {1e3 * p.slowest_rank_mean:.2f} ms"] * many
    total = f"{1e3 * (adds + report.hidden_s):.2f}"
    rows.append(["sum", total, "", "", f"{1e3 * adds:.2f}", "100.0%", *[""] * (1 + many)])
    lines = [
        f"Step         {config['batch_size']} rows x {config['grad_accum']} micro-steps x {report.world_size} "
        f"{'GPU' if allocated else 'CPU'} workers = {report.global_batch_size} rows",
        f"Measured     {s.steps} steps untouched and {s.steps} timed, in turns of {s.block_steps}, after {s.warmup}",
        f"On           {report.environment.line()}",
        "",
        *format_table(rows),
        "",
        f"{1e3 * report.untouched_s:.1f} ms untouched, {_compare_untouched(report, 'timed')} with "
        f"{'events' if allocated else 'clocks'}; phases sum to {1e3 * (adds + report.hidden_s):.1f} ms: "
        f"{1e3 * report.hidden_s:.1f} ms hidden by overlap",
    ]
    if "synchronized" in report.step_s:
        lines.append(f"{_compare_untouched(report, 'synchronized')} with a synchronize at every phase")
    if traffic := [r.communication for r in report.ranks if r.communication is not None]:
        travels = "gradients travel" if config["scaling"]["strategy"] == "ddp" else "parameters and gradients travel"
        total, hidden = (
            1e3 * np.mean([x for c in traffic for x in getattr(c, key)]) for key in ("total_s", "hidden_s")
        )
        lines.append(
            f"{travels} between workers {total:.1f} ms a step, {hidden:.1f} ms of it hidden behind computation, "
            f"{total - hidden:.1f} ms not"
        )
    mfu = f", MFU {report.mfu:.1%}" if report.mfu is not None else ""
    lines.append(f"{report.steps_per_s:.2f} steps/s, {report.samples_per_s:.1f} samples/s over all workers{mfu}")
    if allocated:
        reserved = max(r.peak_reserved_bytes or 0 for r in report.ranks)
        lines.append(f"peak memory {max(allocated) / gib:.2f} GiB allocated, {reserved / gib:.2f} GiB reserved per GPU")
    else:
        lines.append(f"peak memory {max(r.peak_rss_bytes for r in report.ranks) / gib:.2f} GiB per worker")
    # The last step of each block is a log step.
    log_s = float(np.mean([r.timed.exposed["metrics"][s.block_steps - 1 :: s.block_steps] for r in report.ranks]))
    lines.append(f"a log step takes {_cost_per_step(log_s, config, 'log_freq')}")
    if checkpoint_s := max((r.checkpoint_s or 0.0 for r in report.ranks), default=0.0):
        lines.append(f"a checkpoint holds training up for {_cost_per_step(checkpoint_s, config, 'save_freq')}")
    return "\n".join([*lines, "", *advice(report)])


def _cost_per_step(seconds: float, config: dict[str, Any], every: str) -> str:
    """Return the cost per step of something that happens once in `--every` steps."""
    per_step = 1e3 * seconds / config[every]
    return f"{1e3 * seconds:.1f} ms: {per_step:.2f} ms a step, at one in --{every}={config[every]}"


def _compare_untouched(report: StepReport, name: Pass) -> str:
    """Return the mean step of a pass, and the 95 % interval of its relative difference from an untouched step."""
    blocks, untouched = report.step_s[name], report.step_s["untouched"]
    mean = f"{1e3 * float(np.mean(blocks)):.1f} ms"
    if len(blocks) < 2:
        return mean
    _, low, high = judge(untouched, blocks)
    return f"{mean} ({low - 1:+.1%} to {high - 1:+.1%})"


def charts(report: StepReport) -> list[tuple[str, str]]:
    steps = [(f"Rank {r.rank}: every timed step, in milliseconds", time_line(r.timed.exposed)) for r in report.ranks]
    return [("Shares", shares({phase: p.share for phase, p in report.phases.items()})), *steps]


def advice(report: StepReport) -> list[str]:
    """Return sentences on the phases whose share is notable in most blocks, largest first."""
    phases = report.phases
    notable = [phase for phase in REMEDIES if phase in phases and phases[phase].quartiles[0] > REMEDIES[phase][0]]
    notable.sort(key=lambda phase: -phases[phase].share)
    if not notable:
        compute = phases["forward"].share + phases["backward"].share
        return [f"Forward and backward are {compute:.0%} of a step: the model is what takes the time."]
    return [
        f"{REMEDIES[phase][1]} {phases[phase].share:.0%} of a step ({phases[phase].range} in the middle half of the "
        f"blocks). {REMEDIES[phase][2]}"
        for phase in notable
    ]


class Verdict(NamedTuple):
    """Ratio of B's time per step to A's, with its 95 % interval."""

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
    """Return Welch's t interval of the ratio of two geometric means of blocks.

    Blocks, at least two, are the samples, because single steps depend on their neighbours.
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
    """Format a comparison: differing settings, untouched steps and phases, and the verdict."""
    old, new = _settings(a), _settings(b)
    differing = [key for key in old | new if old.get(key) != new.get(key)]
    lines = [f"{key:36} A {old.get(key)}   B {new.get(key)}" for key in differing] or ["the same settings"]
    means = [(p, a.phases[p].exposed.mean, b.phases[p].exposed.mean) for p in a.phases if p in b.phases]
    rows = [["phase (adds, mean ms)", "A", "B", "B - A", "B / A"]]
    for name, a_s, b_s in [*means, ("step, untouched", a.untouched_s, b.untouched_s)]:
        ratio = f"{b_s / a_s:.2f}" if a_s else "-"
        rows.append([name, f"{1e3 * a_s:.2f}", f"{1e3 * b_s:.2f}", f"{1e3 * (b_s - a_s):+.2f}", ratio])
    lines += ["", *format_table(rows), "", f"per step: {judge(a.step_s['untouched'], b.step_s['untouched'])}"]
    if a.global_batch_size != b.global_batch_size:
        rows_a, rows_b = ([s / r.global_batch_size for s in r.step_s["untouched"]] for r in (a, b))
        lines.append(f"per row:  {judge(rows_a, rows_b)}")
    if a.environment.gpus != b.environment.gpus or a.environment.cpu != b.environment.cpu:
        lines.append("They were measured on different hardware: the verdict is about that too.")
    return "\n".join(lines)


def _settings(report: StepReport) -> dict[str, Any]:
    """Return settings and versions by name."""
    where = report.environment
    flat: dict[str, Any] = {"git revision": where.git_revision, "gpus": where.gpus, "cpu": where.cpu}
    flat |= {f"{name} version": version for name, version in where.versions.items()}
    flat |= {f"profile {name}": value for name, value in report.settings.model_dump().items()}
    for key, value in report.config.items():
        nested = value if isinstance(value, dict) and key != "rename_map" else None
        flat |= {f"--{key}": value} if nested is None else {f"--{key}.{k}": v for k, v in nested.items()}
    return flat
