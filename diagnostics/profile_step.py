"""Where the time of a training step goes, without the instrument in the way.

    python -m diagnostics.profile_step --preset demo
    python -m diagnostics.profile_step --compare A.json B.json

takes the flags of `vla.py` and runs that program's own loop, `vla.train`, on its own data and workers, into a folder
that is removed afterwards. The steps alternate, in blocks that each end with a log step, between untouched ones, of
which only whole blocks are timed, and ones whose phases are timed: by CUDA events that are read after the run, on the
CPU by the clock. Own flags, each also an environment variable in capitals:

    --profile_steps N         steps per pass (100)
    --profile_warmup N        steps before the first (20)
    --profile_sync            a third pass, with a synchronize at every phase: what each takes when nothing overlaps
    --profile_no_optim        no clipping, no optimizer, no clearing of gradients: forward and backward alone
    --find_unused_params B    DDP's search for parameters without a gradient (default: as the policy's loss needs)
    --fused_adamw B           false: AdamW as a list of kernels instead of one
    --profile_checkpoint B    write a checkpoint at the end, and time it (true)
    --profile_step_json PATH  the result for scripts, raw samples included
    --trace PATH              a Chrome trace of 3 steps on rank 0, with the cluster's tasks on the same time line
    --html PATH               the result as a page

Whatever else is to be compared is a flag of `vla.py`: --batch_size, --grad_accum, --train.precision,
--policy.compile_model, ... Exit status: 0 done, 1 the run failed, 2 it could not start.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

import vla
from diagnostics.report import Environment, Spread, shares, time_line
from diagnostics.step_clock import Communication, Pass, StepClock
from diagnostics.step_report import PhaseSummary, RankProfile, Settings, StepReport, compare, judge
from diagnostics.tool import Options, Result, count, run_tool, scratch_run, truth
from util import UNWATCHED, Clock, Phase, TrainableOptimizer
from vla_finetuning.files import read_lines
from vla_finetuning.plan.launch import on_cluster
from vla_finetuning.plan.resolve import Run, with_config
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.folder import LOG_NAME, METRICS_NAME, prepare_folder
from vla_finetuning.terminal import tell, tell_error, tell_text
from vla_finetuning.training.model import build_optimizer
from vla_finetuning.training.worker import RayWorker, Worker

TRACE_NAME = "trace.json"
# Below these shares of a step there is nothing to be gained.
NOTABLE = {"data_wait": 0.05, "optimizer": 0.10, "metrics": 0.05, "copy": 0.05}


# ---- options ------------------------------------------------------------------------------------------------------


def parse_options(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The tool's own options, and what is left for `vla.py`'s parser."""
    options = Options(json="profile_step_json")
    options.add("profile_steps", count, 100, "steps per pass")
    options.add("profile_warmup", count, 20, "steps before the first")
    options.add("profile_sync", truth, False, "a third pass, with a synchronize at every phase")
    options.add("profile_no_optim", truth, False, "forward and backward alone")
    options.add("find_unused_params", truth, None, "DDP's search for parameters without a gradient")
    options.add("fused_adamw", truth, None, "one kernel for the optimizer")
    options.add("profile_checkpoint", truth, True, "write and time a checkpoint")
    options.add("profile_trace", Path, None, "a Chrome trace", "--trace")
    options.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    return options.parse_known_args(argv)


# ---- what is measured, in every training process ------------------------------------------------------------------


def profile_loop(loop_config: dict[str, Any]) -> None:
    """Runs in every training process."""
    profile_worker(ray.get(loop_config["run"]), loop_config["settings"], RayWorker())


def profile_worker(run: Run, settings: Settings, worker: Worker, **options: Any) -> None:
    """`vla.train`, watched; leaves a `RankProfile` in the run's folder. `options`: more of `vla.train`'s."""
    rank, device = worker.rank, worker.device
    clock = StepClock(
        settings.passes(worker.world),
        settings.block_steps,
        device,
        run.job.output_dir / TRACE_NAME if rank == 0 else None,
    )
    options |= {
        "make_optimizer": partial(make_optimizer, settings),
        "find_unused_parameters": settings.find_unused_params,
    }
    vla.train(run, worker, [clock], clock=clock, **options)
    timed, last = clock.times("timed"), clock.times("checkpoint")
    assert timed is not None
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    profile = RankProfile(
        rank=rank,
        environment=Environment.here(),
        block_step_s={name: blocks for name, blocks in clock.block_step_s.items() if blocks},
        timed=timed,
        synchronized=clock.times("synchronized"),
        communication=clock.communication(),
        checkpoint_s=sum(last.exposed["checkpoint"]) if last else None,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if cuda else None,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        mfu_per_rate=mfu_per_rate(run),
    )
    _rank_path(run, rank).write_text(profile.model_dump_json())


def mfu_per_rate(run: Run) -> float | None:
    """Model FLOP utilisation per sample/s of the whole run, as its metrics say; None where they do not."""
    lines = [json.loads(line) for line in read_lines(run.job.output_dir / METRICS_NAME)]
    known = [(line["mfu"], line["samples_per_s"]) for line in lines if line["mfu"] is not None]
    return sum(mfu for mfu, _ in known) / sum(rate for _, rate in known) if known else None


def _rank_path(run: Run, rank: int) -> Path:
    return run.job.output_dir / f"profile-{rank}.json"


def make_optimizer(settings: Settings, spec: PolicySpec, loss: PolicyLoss, steps: int) -> TrainableOptimizer:
    """`build_optimizer`'s, or what the settings want in its place."""
    made = build_optimizer(spec, loss, steps)
    if not settings.fused_adamw:
        constants = {key: made.optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        made = replace(made, optimizer=_ForeachAdamW(made.params, **constants, foreach=True))
    if settings.no_optim:
        return _NoOptimizer(**{of.name: getattr(made, of.name) for of in fields(TrainableOptimizer)})
    return made


class _ForeachAdamW(torch.optim.AdamW):
    """AdamW that is not fused: it cannot leave out a step whose gradients are not finite, and is not asked to."""

    def step(self, closure: Any = None) -> Any:
        self.found_inf = None
        return super().step(closure)


@dataclass
class _NoOptimizer(TrainableOptimizer):
    """Changes nothing; gradients pile up. AdamW allocates its state at its first step, so there is none."""

    def step(self, number: int, clock: Clock = UNWATCHED) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros((), device=self.params[0].device)
        return nothing, nothing


# ---- the result ---------------------------------------------------------------------------------------------------


def summarise(run: Run, settings: Settings, ranks: Sequence[RankProfile]) -> StepReport:
    passes = ranks[0].block_step_s
    step_s = {name: np.mean([r.block_step_s[name] for r in ranks], axis=0).tolist() for name in passes}
    whole = float(np.mean([sum(map(sum, r.timed.exposed.values())) for r in ranks]))
    phases: dict[Phase, PhaseSummary] = {}
    for phase in ranks[0].timed.full:
        means = [float(np.mean(r.timed.full[phase])) for r in ranks]
        exposed = [seconds for r in ranks for seconds in r.timed.exposed[phase]]
        phases[phase] = PhaseSummary(
            full=Spread.of([seconds for r in ranks for seconds in r.timed.full[phase]]),
            exposed=Spread.of(exposed),
            share=sum(exposed) / len(ranks) / whole,
            quartiles=_quartiles(phase, settings.block_steps, ranks),
            slowest_rank=int(np.argmax(means)),
            slowest_rank_mean=max(means),
        )
    steps_per_s = 1 / float(np.mean(step_s["untouched"]))
    samples_per_s = steps_per_s * run.config.global_batch_size
    mfu_per_rate = ranks[0].mfu_per_rate
    return StepReport(
        environment=ranks[0].environment,
        config=run.config.to_json(),
        settings=settings,
        world_size=len(ranks),
        global_batch_size=run.config.global_batch_size,
        step_s=step_s,
        phases=phases,
        steps_per_s=steps_per_s,
        samples_per_s=samples_per_s,
        mfu=None if mfu_per_rate is None else mfu_per_rate * samples_per_s,
        ranks=list(ranks),
    )


def _quartiles(phase: Phase, block_steps: int, ranks: Sequence[RankProfile]) -> tuple[float, float]:
    """The lower and the upper quartile of a phase's share of a block of steps, over blocks and ranks."""
    shares = []
    for rank in ranks:
        seconds = {
            name: np.reshape(values, (-1, block_steps)).sum(axis=1) for name, values in rank.timed.exposed.items()
        }
        shares.append(seconds[phase] / sum(seconds.values()))
    lower, upper = np.quantile(np.concatenate(shares), (0.25, 0.75))
    return float(lower), float(upper)


def table(report: StepReport) -> str:
    """The result for people."""
    s, config, many = report.settings, report.config, report.world_size > 1
    where = "GPU" if report.ranks[0].peak_allocated_bytes is not None else "CPU"
    lines = [
        f"Step         {config['batch_size']} rows x {config['grad_accum']} micro-steps x {report.world_size} {where} "
        f"workers = {report.global_batch_size} rows",
        f"Measured     {s.steps} steps untouched and {s.steps} timed, in turns of {s.block_steps}, after {s.warmup}",
        f"On           {report.environment.line()}",
        "",
        f"{'phase':20}{'mean ms':>11}{'median':>11}{'p95':>11}{'adds ms':>11}{'share':>8}{'quartiles':>14}"
        + ("   slowest rank" if many else ""),
    ]
    for phase, p in report.phases.items():
        slowest = f"   {p.slowest_rank}: {1e3 * p.slowest_rank_mean:.2f} ms" if many else ""
        lines.append(f"{phase:20}{p.full.columns()}{1e3 * p.exposed.mean:11.2f}{p.share:8.1%}{_range(p):>14}{slowest}")
    adds = sum(p.exposed.mean for p in report.phases.values())
    lines += [f"{'sum':20}{1e3 * (adds + report.hidden_s):11.2f}{'':22}{1e3 * adds:11.2f}{1:8.1%}", ""]
    lines.append(
        f"{1e3 * report.untouched_s:.1f} ms untouched, {_beside_untouched(report, 'timed')} with "
        f"{'events' if where == 'GPU' else 'clocks'}; phases sum to {1e3 * (adds + report.hidden_s):.1f} ms: "
        f"{1e3 * report.hidden_s:.1f} ms hidden by overlap"
    )
    if "synchronized" in report.step_s:
        lines.append(f"{_beside_untouched(report, 'synchronized')} with a synchronize at every phase")
    seen = [r.communication for r in report.ranks if r.communication is not None]
    if seen:
        what = "gradients travel" if config["scaling"]["strategy"] == "ddp" else "parameters and gradients travel"
        total, hidden = (float(np.mean([x for c in seen for x in values])) for values in _both(seen))
        lines.append(
            f"{what} between workers {1e3 * total:.1f} ms a step, {1e3 * hidden:.1f} ms of it hidden behind "
            f"computation, {1e3 * (total - hidden):.1f} ms not"
        )
    mfu = f", MFU {report.mfu:.1%}" if report.mfu is not None else ""
    lines.append(f"{report.steps_per_s:.2f} steps/s, {report.samples_per_s:.1f} samples/s over all workers{mfu}")
    lines.append(_memory(report))
    log_s = _log_step_s(report)
    lines.append(f"a log step takes {1e3 * log_s:.1f} ms: {1e3 * log_s / config['log_freq']:.2f} ms a step, at one in "
                 f"--log_freq={config['log_freq']}")  # fmt: skip
    if checkpoint_s := max((r.checkpoint_s or 0.0 for r in report.ranks), default=0.0):
        per_step = checkpoint_s / config["save_freq"]
        lines.append(
            f"a checkpoint holds training up for {1e3 * checkpoint_s:.1f} ms: {1e3 * per_step:.2f} ms a step, at one "
            f"in --save_freq={config['save_freq']}"
        )
    return "\n".join([*lines, "", *advice(report)])


def _range(phase: PhaseSummary) -> str:
    return f"{phase.quartiles[0]:.0%} to {phase.quartiles[1]:.0%}"


def charts(report: StepReport) -> list[tuple[str, str]]:
    """Return what a step consists of, and every timed step."""
    drawn = [("Shares", shares({phase: p.share for phase, p in report.phases.items()}))]
    for rank in report.ranks:
        seconds = {str(phase): values for phase, values in rank.timed.exposed.items()}
        drawn.append((f"Rank {rank.rank}: every timed step, in milliseconds", time_line(seconds)))
    return drawn


def _beside_untouched(report: StepReport, name: Pass) -> str:
    """A pass's step, and by how much it is longer than an untouched one, with the 95 % interval of that."""
    blocks, untouched = report.step_s[name], report.step_s["untouched"]
    mean = f"{1e3 * float(np.mean(blocks)):.1f} ms"
    if len(blocks) < 2:
        return mean
    _, low, high = judge(untouched, blocks)
    return f"{mean} ({low - 1:+.1%} to {high - 1:+.1%})"


def _both(seen: Sequence[Communication]) -> tuple[list[list[float]], list[list[float]]]:
    return [c.total_s for c in seen], [c.hidden_s for c in seen]


def _log_step_s(report: StepReport) -> float:
    """Mean seconds of `metrics` in a log step: the last step of each block."""
    block = report.settings.block_steps
    return float(np.mean([r.timed.exposed["metrics"][block - 1 :: block] for r in report.ranks]))


def _memory(report: StepReport) -> str:
    gib = 2**30
    allocated = [r.peak_allocated_bytes for r in report.ranks if r.peak_allocated_bytes is not None]
    if allocated:
        reserved = [r.peak_reserved_bytes or 0 for r in report.ranks]
        return f"peak memory {max(allocated) / gib:.2f} GiB allocated, {max(reserved) / gib:.2f} GiB reserved per GPU"
    return f"peak memory {max(r.peak_rss_bytes for r in report.ranks) / gib:.2f} GiB per worker"


def advice(report: StepReport) -> list[str]:
    """Return what the numbers say, in words: first the phases whose share is notable in most blocks,
    the largest first.
    """
    fused = "" if report.settings.fused_adamw else " FUSED_ADAMW=true is faster."
    remedies: dict[Phase, tuple[str, str]] = {
        "data_wait": (
            "Waiting for data is",
            "Find out what the data engine can do: python -m diagnostics.profile_dataloader, with the same flags and "
            "--against this result's JSON.",
        ),
        "copy": ("Copies to the GPU are", "They are not hidden: is the host's memory pinned?"),
        "optimizer": (
            "The optimizer is",
            f"This is normal for little compute; --grad_accum makes it rarer, --train.mode=expert smaller.{fused}",
        ),
        "metrics": ("Metrics are", "A larger --log_freq makes log steps rarer."),
    }
    phases = report.phases
    notable = [phase for phase in remedies if phase in phases and phases[phase].quartiles[0] > NOTABLE[phase]]
    notable.sort(key=lambda phase: -phases[phase].share)
    said = [
        f"{remedies[phase][0]} {phases[phase].share:.0%} of a step ({_range(phases[phase])} in the middle half of the "
        f"blocks). {remedies[phase][1]}"
        for phase in notable
    ]
    for first, second in itertools.pairwise(notable):
        if phases[first].quartiles[0] < phases[second].quartiles[1]:
            said.append(f"Which of {first} and {second} is larger is not certain; a larger --profile_steps tells.")
    share = {phase: p.share for phase, p in phases.items()}
    if not said:
        compute = share["forward"] + share["backward"]
        said.append(f"Forward and backward are {compute:.0%} of a step: the model is what takes the time.")
    return said


# ---- the driver ---------------------------------------------------------------------------------------------------


def watched_run(run: Run, settings: Settings) -> Run:
    """The run with blocks that end with log steps, longer than the plan, and no checkpoint but where that has one."""
    planned = len(settings.passes(run.config.scaling.num_workers))
    save = planned if settings.checkpoint else planned + 1
    steps = max(run.job.steps, planned + 1)
    train = replace(run.config.train, max_nonfinite=sys.maxsize)
    config = replace(
        run.config,
        log_freq=settings.block_steps,
        save_freq=save,
        save_every_s=None,
        steps=steps,
        train=train,
    )
    return with_config(run, config, steps)


def profile(run: Run, settings: Settings, trace_path: Path | None = None) -> StepReport:
    """Profile a resolved run on the Ray cluster, which is started if there is none. Raises as `vla.main`'s parts do."""
    started_ray = not ray.is_initialized()
    try:
        with scratch_run(run) as scratch:
            watched = watched_run(scratch, settings)
            job = watched.job
            prepare_folder(watched.config)
            watched, data_options = on_cluster(watched)
            vla.make_trainer(watched, data_options, profile_loop, settings=settings).fit()
            ranks = [
                RankProfile.model_validate_json(_rank_path(watched, rank).read_bytes())
                for rank in range(run.config.scaling.num_workers)
            ]
            log = job.output_dir / LOG_NAME
            tell(*read_lines(log), file=sys.stderr)
            if trace_path is not None:
                write_trace(job.output_dir / TRACE_NAME, ray.timeline(), trace_path)
            return summarise(run, settings, ranks)
    finally:
        if started_ray:
            ray.shutdown()


def write_trace(torch_trace: Path, tasks: Sequence[dict[str, Any]], path: Path) -> None:
    """PyTorch's trace and Ray's events on one clock, microseconds since 1970, from the first to the last step."""
    trace = json.loads(torch_trace.read_bytes())
    base_us = trace.pop("baseTimeNanoseconds", 0) / 1000
    events = [event | {"ts": event["ts"] + base_us} if "ts" in event else event for event in trace["traceEvents"]]
    spans = [(e["ts"], e["ts"] + e.get("dur", 0)) for e in events if e.get("ph") == "X"]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    seen = [
        task for task in tasks if "ts" not in task or first <= task["ts"] + task.get("dur", 0) and task["ts"] <= last
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace | {"traceEvents": [*events, *seen]}))


def prepare(run: Run, options: Namespace) -> Callable[[], Result]:
    settings = Settings.of(options, run)
    if not settings.fused_adamw:
        scaling = run.config.scaling
        if scaling.strategy != "ddp" and scaling.num_workers > 1:
            raise ValueError(
                f"--fused_adamw=false: the shards of --scaling.strategy={scaling.strategy} are updated by the fused "
                "kernel alone; give --scaling.strategy=ddp"
            )

    def examine() -> Result:
        if options.profile_trace:
            os.environ.setdefault("RAY_PROFILING", "1")
        steps = len(settings.passes(run.config.scaling.num_workers))
        tell(f"Running {steps} steps by {run.config.scaling.num_workers} workers ...")
        report = profile(run, settings, options.profile_trace)
        if options.profile_trace:
            tell(f"trace written to {options.profile_trace}: open it in https://ui.perfetto.dev")
        return Result(report, table(report), charts(report))

    return examine


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the run that the flags describe, or compare two results. Returns the exit status: see the module."""
    argv = sys.argv[1:] if argv is None else argv
    if any(arg.partition("=")[0] == "--compare" for arg in argv):
        try:
            tell_text(compare(*map(StepReport.read, parse_options(argv)[0].compare)))
            return 0
        except (ValueError, OSError) as error:
            tell_error(error)
            return 2
    return run_tool(argv, __doc__, parse_options, prepare)


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from diagnostics import profile_step

    sys.exit(profile_step.main())
