"""Measure the time of a training step by phase, beside untouched steps that show the cost of measuring.

    python -m diagnostics.profile_step --preset demo
    python -m diagnostics.profile_step --compare A.json B.json

The tool takes the flags of `vla.py` and runs `vla.train` on the run's data and workers, in a temporary folder. Blocks
of steps, which end with a log step, alternate: untouched blocks are timed as a whole, the others by phase. CUDA events,
read after the run, time phases on a GPU. Exit status: 0 done, 1 the run failed, 2 it could not start.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

import vla
from diagnostics import tool
from diagnostics.report import Environment
from diagnostics.step_clock import StepClock
from diagnostics.step_report import RankProfile, Settings, StepReport, charts, compare, summarise, table
from diagnostics.tool import Options, Result, count, truth
from util import TrainableOptimizer
from vla_finetuning.files import read_json_lines, read_lines
from vla_finetuning.plan.resolve import Run, with_config
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.folder import LOG_NAME, METRICS_NAME, prepare_folder
from vla_finetuning.terminal import print_safe, print_safe_error, print_safe_text
from vla_finetuning.training.capacity import UNSHARDED_OPTIMIZERS
from vla_finetuning.training.fitting import on_cluster
from vla_finetuning.training.model import build_optimizer
from vla_finetuning.training.worker import RayWorker, Worker

TRACE_NAME = "trace.json"


def parse_options(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    options = Options(json="profile_step_json")
    options.add("profile_steps", count, 100, "steps per pass (100)")
    options.add("profile_warmup", count, 20, "steps before the first (20)")
    options.add("profile_sync", truth, False, "a third pass, with a synchronize at every phase: nothing overlaps")
    options.add("profile_no_optim", truth, False, "forward and backward alone: no clipping, no optimizer")
    options.add("find_unused_params", truth, None, "DDP's search for parameters without a gradient (as the loss needs)")
    options.add("fused_adamw", truth, None, "false: AdamW as a list of kernels instead of one")
    options.add("profile_checkpoint", truth, True, "write a checkpoint at the end, and time it (true)")
    options.add("profile_trace", Path, None, "a Chrome trace of 3 steps on rank 0, with the cluster's tasks", "--trace")
    options.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    return options.parse_known_args(argv)


def profile_loop(loop_config: dict[str, Any]) -> None:
    profile_worker(ray.get(loop_config["run"]), loop_config["settings"], RayWorker())


def profile_worker(run: Run, settings: Settings, worker: Worker, **options: Any) -> None:
    """Run `vla.train` with a clock, and write a `RankProfile` to the run's folder; `options` go to `vla.train`."""
    rank, device = worker.rank, worker.device
    trace = run.job.output_dir / TRACE_NAME if rank == 0 else None
    clock = StepClock(settings.passes(worker.world), settings.block_steps, device, trace)
    options |= {"make_optimizer": partial(make_optimizer, settings)}
    options |= {"find_unused_parameters": settings.find_unused_params}
    vla.train(run, worker, [clock], clock=clock, **options)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)  # events have no times before
    timed, last = clock.times("timed"), clock.times("checkpoint")
    assert timed is not None
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
    tool.write_record(run, rank, profile)


def mfu_per_rate(run: Run) -> float | None:
    """Return the model FLOP utilisation per sample/s, from the run's metrics; None if they lack it."""
    lines = read_json_lines(run.job.output_dir / METRICS_NAME)
    rates = [(line["mfu"], line["samples_per_s"]) for line in lines if line["mfu"] is not None]
    return sum(mfu for mfu, _ in rates) / sum(rate for _, rate in rates) if rates else None


def make_optimizer(settings: Settings, spec: PolicySpec, loss: PolicyLoss, steps: int) -> TrainableOptimizer:
    """Build the run's optimizer, changed as the settings say."""
    optimizer = build_optimizer(spec, loss, steps)
    if not settings.fused_adamw:
        groups = [{**group, "fused": False, "foreach": True} for group in optimizer.optimizer.param_groups]
        optimizer = replace(optimizer, optimizer=_ForeachAdamW(groups))
    return tool.NoOptimizer.of(optimizer) if settings.no_optim else optimizer


class _ForeachAdamW(torch.optim.AdamW):
    """AdamW with foreach kernels, which cannot skip a step with nonfinite gradients as the fused kernel does."""

    def step(self, closure: Any = None) -> Any:
        self.found_inf = None
        return super().step(closure)


def watched_run(run: Run, settings: Settings) -> Run:
    """Return the run with a log step per block, more steps than the passes, and only the passes' checkpoint."""
    planned = len(settings.passes(run.config.scaling.num_workers))
    save = planned if settings.checkpoint else planned + 1
    steps = max(run.job.steps, planned + 1)
    train = replace(run.config.train, max_nonfinite=sys.maxsize)
    changes: dict[str, Any] = {"log_freq": settings.block_steps, "save_freq": save, "save_every_s": None}
    return with_config(run, replace(run.config, steps=steps, train=train, **changes), steps)


def write_trace(torch_trace: Path, tasks: Sequence[dict[str, Any]], path: Path) -> None:
    """Merge PyTorch's trace with Ray's events in its time span; times are microseconds since 1970."""
    trace = json.loads(torch_trace.read_bytes())
    base_us = trace.pop("baseTimeNanoseconds", 0) / 1000
    events = [event | {"ts": event["ts"] + base_us} if "ts" in event else event for event in trace["traceEvents"]]
    spans = [(e["ts"], e["ts"] + e.get("dur", 0)) for e in events if e.get("ph") == "X"]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    ray_events = [
        task for task in tasks if "ts" not in task or first <= task["ts"] + task.get("dur", 0) and task["ts"] <= last
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace | {"traceEvents": [*events, *ray_events]}))


def prepare(run: Run, options: Namespace) -> Callable[[], Result]:
    settings = Settings.of(options, run)
    if not settings.fused_adamw:
        scaling, optimizer = run.config.scaling, run.policy.recipe.optimizer.type
        if optimizer in UNSHARDED_OPTIMIZERS:
            raise ValueError(f"--fused_adamw=false: the run's optimizer is {optimizer}, not AdamW; leave the flag out")
        if scaling.strategy != "ddp" and scaling.num_workers > 1:
            raise ValueError(
                f"--fused_adamw=false: the shards of --scaling.strategy={scaling.strategy} are updated by the fused "
                "kernel alone; give --scaling.strategy=ddp"
            )

    def examine() -> Result:
        if options.profile_trace:
            os.environ.setdefault("RAY_PROFILING", "1")
        workers = run.config.scaling.num_workers
        print_safe(f"Running {len(settings.passes(workers))} steps by {workers} workers ...")
        with tool.scratch_run(run) as scratch:
            watched = watched_run(scratch, settings)
            folder = watched.job.output_dir
            prepare_folder(watched.config)
            watched, data_options = on_cluster(watched)
            ranks = tool.run_workers(watched, data_options, RankProfile, profile_loop, settings=settings)
            print_safe(*read_lines(folder / LOG_NAME), file=sys.stderr)
            if options.profile_trace:
                write_trace(folder / TRACE_NAME, ray.timeline(), options.profile_trace)
                print_safe(f"trace written to {options.profile_trace}: open it in https://ui.perfetto.dev")
        report = summarise(run, settings, ranks)
        return Result(report, table(report), charts(report))

    return examine


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the run that the flags describe, or compare two results; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if "--compare" in argv and not {"--help", "-h"} & set(argv):
        try:
            if len(argv) != 3:
                raise ValueError("--compare takes two results, and no other flags beside it")
            print_safe_text(compare(*map(StepReport.read, parse_options(argv)[0].compare)))
            return 0
        except (ValueError, OSError) as error:
            print_safe_error(error)
            return 2
    return tool.run_tool(argv, doc=__doc__, parse_options=parse_options, prepare=prepare)


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from diagnostics import profile_step

    sys.exit(profile_step.main())
