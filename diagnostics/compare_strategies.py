"""Compare the time and memory of a training step under each `--scaling.strategy`.

    python -m diagnostics.compare_strategies --preset demo

The tool takes the flags of `vla.py` and runs its training step with each strategy (`training/parallel.py`) in the same
workers, on the same model, noise and batches. A strategy whose plan (`--dry_run`) does not fit is left out. Exit
status: 0 done, 1 the run failed, 2 it could not start.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import nn

from diagnostics import tool
from diagnostics.report import Environment, RankRecord, Record, WorkersReport, format_table, time_line
from diagnostics.tool import Options, Result, count, host_batches
from util import Batch, TrainableOptimizer, cuda_prefetcher, train_step
from vla_finetuning.options.scaling import Strategy
from vla_finetuning.plan.resolve import Run
from vla_finetuning.terminal import print_safe
from vla_finetuning.training.capacity import fits, planned_memory
from vla_finetuning.training.feed import policy_batches
from vla_finetuning.training.fitting import on_cluster
from vla_finetuning.training.memory import GIB
from vla_finetuning.training.model import build_model, build_optimizer, check_attention
from vla_finetuning.training.parallel import replicas, shard_of, spread
from vla_finetuning.training.state import noise_for
from vla_finetuning.training.stream import RankSchedule
from vla_finetuning.training.worker import RayWorker, Worker

WARMUP_STEPS = 3
BATCHES = 4


def parse_options(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    options = Options(json="compare_strategies_json")
    options.add("compare_steps", count, 20, "measured steps of each, after 3 to warm up (20)")
    options.add("strategies", _strategies, list(get_args(Strategy)), "which to compare, with commas (all)")
    return options.parse_known_args(argv)


def _strategies(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in get_args(Strategy)]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(get_args(Strategy))}")
    return names


class Spreading(Record):
    """Measurements of one strategy by one rank; without steps if the strategy's plan does not fit.

    Attributes:
        step_s: seconds of each measured step, including the synchronisation at its end.
        losses: losses of all steps, including the warm-up.
        state_bytes: parameters and optimizer state on this rank between steps.
        peak_bytes: largest memory in use on the GPU; None without one.
        planned_bytes: memory that a GPU needs by the plan; None without a GPU or a plan.
    """

    strategy: Strategy
    step_s: list[float]
    losses: list[float]
    state_bytes: int
    peak_bytes: int | None
    planned_bytes: int | None = None


class RankStrategies(RankRecord):
    spreadings: list[Spreading]


class StrategiesReport(WorkersReport[RankStrategies]):
    """Result of `compare_strategies`: ranks in order, each with the strategies in the same order."""

    tool: Literal["compare_strategies"] = "compare_strategies"
    global_batch_size: int


def table(report: StrategiesReport) -> str:
    """Format the result as text: the slowest rank's time, the largest memory of any rank."""
    config = report.config
    heads = ("s/step", "samples/s", "of first", "state GiB", "planned GiB", "peak GiB", "losses apart")
    rows, first = [["strategy", *heads]], None
    for spreadings in zip(*(rank.spreadings for rank in report.ranks), strict=True):
        s = spreadings[0]
        planned = "-" if s.planned_bytes is None else f"{s.planned_bytes / GIB:.2f}"
        if not s.step_s:
            rows.append([s.strategy, *["-"] * 4, planned, "left out", "-"])
            continue
        first = first or spreadings
        step_s, first_s = (max(float(np.median(r.step_s)) for r in ranks) for ranks in (spreadings, first))
        peaks = [r.peak_bytes for r in spreadings if r.peak_bytes is not None]
        losses, firsts = (np.array([r.losses for r in ranks]) for ranks in (spreadings, first))
        rate, state = report.global_batch_size / step_s, max(r.state_bytes for r in spreadings) / GIB
        rows.append([s.strategy, f"{step_s:.4f}", f"{rate:.1f}", f"{step_s / first_s:.2f}x", f"{state:.4f}", planned])
        rows[-1] += [f"{max(peaks) / GIB:.2f}" if peaks else "-"]
        rows[-1] += [f"{np.max(np.abs(losses - firsts) / np.abs(firsts)):.1e}"]
    return "\n".join(
        [
            f"Step         {config['batch_size']} rows x {config['grad_accum']} micro-steps x {report.world_size} "
            f"workers = {report.global_batch_size} rows, --train.mode={config['train']['mode']}",
            f"On           {report.ranks[0].environment.line()}",
            "",
            *format_table(rows),
            "",
            "state: parameters and Adam's moments that a rank holds between two steps",
            "planned: what a GPU must have, as --dry_run says it; what does not fit is left out",
            "peak: the most memory in use on any GPU",
            "losses apart: from the first strategy's, relative, at most over all steps and ranks",
        ]
    )


def charts(report: StrategiesReport) -> list[tuple[str, str]]:
    measured = {s.strategy: s.step_s for s in report.ranks[0].spreadings if s.step_s}
    return [(f"{s}: every step of rank 0, in milliseconds", time_line({s: step_s})) for s, step_s in measured.items()]


def compare_loop(loop_config: dict[str, Any]) -> None:
    """Measure the strategies in a worker, and write the result to the run's folder."""
    run, options, worker = ray.get(loop_config["run"]), loop_config["options"], RayWorker()
    result = compare(run, options.strategies, options.compare_steps, worker)
    tool.write_record(run, worker.rank, result)


def compare(run: Run, strategies: Sequence[Strategy], steps: int, worker: Worker) -> RankStrategies:
    """Measure every strategy whose plan fits; call this in all ranks of the process group."""
    schedule = RankSchedule(
        run.job.batch_size, run.rows.block_rows, worker.rank, worker.world, run.job.batches_per_step
    )
    host = host_batches(run, schedule, BATCHES)
    batches = list(policy_batches(cuda_prefetcher(host, worker.device), run.policy.config))
    spreadings, gpu_bytes, planned = [], _gpu_bytes(worker.device), planned_memory(run.policy, run.rows.frames)
    for strategy in strategies:
        by_node = replicas(worker, run.job.scaling.shard_workers) if strategy == "hsdp" and schedule.world > 1 else None
        scaling = replace(run.config.scaling, strategy=strategy, shard_workers=len(by_node[0]) if by_node else None)
        needed = None if gpu_bytes is None else planned(replace(run.config, scaling=scaling))
        if gpu_bytes is None or needed is None or fits(needed, gpu_bytes / GIB):
            spreading = _measure(run, strategy, steps, batches, schedule, worker, by_node)
            tool.free_memory(worker.device)
            if dist.is_initialized():
                dist.barrier()
        else:
            spreading = Spreading(strategy=strategy, step_s=[], losses=[], state_bytes=0, peak_bytes=None)
        spreadings.append(spreading.model_copy(update={"planned_bytes": needed and needed.needed}))
    return RankStrategies(rank=worker.rank, environment=Environment.here(), spreadings=spreadings)


def _gpu_bytes(device: torch.device) -> int | None:
    """Return the memory of the smallest GPU of all ranks; None on CPUs."""
    if device.type != "cuda":
        return None
    total = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    if dist.is_initialized():
        dist.all_reduce(total, dist.ReduceOp.MIN)
    return int(total)


def _measure(
    run: Run,
    strategy: Strategy,
    steps: int,
    batches: Sequence[Batch],
    schedule: RankSchedule,
    worker: Worker,
    by_node: Sequence[Sequence[int]] | None,
) -> Spreading:
    device, accum = worker.device, run.config.grad_accum
    loss, autocast = build_model(run.policy, device)
    check_attention(run.policy, loss, device, autocast)
    model = spread(loss, strategy, device, schedule.world, replicas=by_node, autocast=autocast)
    optimizer = build_optimizer(run.policy, loss, run.job.steps)
    step = partial(train_step, model, optimizer, autocast=autocast, device=device)
    tool.free_memory(device)
    feed, step_s, losses = itertools.cycle(batches), [], []
    for number in range(WARMUP_STEPS + steps):
        start = time.perf_counter()
        draws = noise_for(run.policy, number, schedule, device)
        result = step(feed, step=number, grad_accum=accum, mean_over=accum, draws=draws)
        losses.append(result.loss.item())  # waits for the device
        step_s.append(time.perf_counter() - start)
    return Spreading(
        strategy=strategy,
        step_s=step_s[WARMUP_STEPS:],
        losses=losses,
        state_bytes=state_bytes(model, optimizer),
        peak_bytes=tool.peak_memory(device),
    )


def state_bytes(model: nn.Module, optimizer: TrainableOptimizer) -> int:
    """Return the bytes of parameters and optimizer state on this rank."""
    held = [*model.parameters(), *optimizer.state().values()]
    return sum(shard_of(tensor)[0].nbytes for tensor in held)


def prepare(run: Run, options: Namespace) -> Callable[[], Result]:
    workers = run.config.scaling.num_workers
    if workers < 2:
        raise ValueError(f"--scaling.num_workers={workers}: there is nothing to spread; give at least 2")

    def examine() -> Result:
        print_safe(f"Running {', '.join(options.strategies)} on {workers} workers ...")
        with tool.scratch_run(run) as scratch:
            scratch, data_options = on_cluster(scratch)
            ranks = tool.run_workers(scratch, data_options, RankStrategies, compare_loop, options=options)
        report = StrategiesReport.of(run, ranks, global_batch_size=run.config.global_batch_size)
        return Result(report, table(report), charts(report))

    return examine


main = partial(tool.run_tool, doc=__doc__, parse_options=parse_options, prepare=prepare)


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from diagnostics import compare_strategies

    sys.exit(compare_strategies.main())
