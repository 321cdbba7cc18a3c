"""Measure how fast the data engine delivers batches without a model, and where its CPU time goes.

    python -m diagnostics.profile_dataloader --preset demo
    python -m diagnostics.profile_dataloader --preset demo --against step.json

The tool takes the flags of `vla.py` and pulls batches through `vla.build_dataset` and `feed` in all workers at once.
Then it times the stages of a few read tasks in one process. The rate counts rows that were read after the warm-up, over
the time until the last of them arrives, so rows buffered before do not count. Exit status: 0 done, 1 the run failed, 2
it could not start.
"""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import ray
import torch

import vla
from diagnostics.report import Environment, RankRecord, Spread, WorkersReport, format_table, shares, time_line
from diagnostics.step_report import StepReport
from diagnostics.tool import Options, Result, count, run_tool, run_workers, scratch_run, write_record
from diagnostics.watch import ClusterWatch
from util import Batch, Clock, NumpyToTorchCollate, Phase
from vla_finetuning.data import parquet_columns
from vla_finetuning.data import rows as lerobot_rows
from vla_finetuning.data import videos as lerobot_videos
from vla_finetuning.data.decode import VideoReader
from vla_finetuning.data.video_index import RemoteVideo
from vla_finetuning.plan.resolve import Run, with_config
from vla_finetuning.policies.processors import Prepare
from vla_finetuning.run.progress import log_to
from vla_finetuning.terminal import print_safe
from vla_finetuning.training.feed import feed
from vla_finetuning.training.fitting import on_cluster
from vla_finetuning.training.stream import LazyPickle, RankSchedule, TrainingData
from vla_finetuning.training.worker import RayWorker, Worker

Columns = dict[str, np.ndarray]
Stage = Literal["read", "decode", "convert", "resize", "shuffle", "prepare", "transfer", "collate", "other"]
EXPLAINED: dict[Stage, str] = {
    "read": "parquet columns",
    "decode": "video and image files to frames",
    "convert": "frames to RGB",
    "resize": "where --dataset.image_size says so",
    "shuffle": "rows to their places",
    "prepare": "normalise, tokenise",
    "transfer": "to Arrow, into the object store and out",
    "collate": "into the tensors that a GPU copies from",
    "other": "",
}
# Functions of each stage; time in nested functions counts for the innermost.
FUNCTIONS: dict[Stage, dict[Any, str]] = {
    "read": {lerobot_rows: "_read_tabular", RemoteVideo: "__init__ ask", parquet_columns: "read_groups _copied"},
    "decode": {VideoReader: "__init__ _frame_at", lerobot_videos: "decode_image decode_depth_image"},
    "convert": {VideoReader: "_pixels"},
    "resize": {lerobot_videos: "resize_with_pad"},
    "shuffle": {lerobot_rows: "_group_by_episode _fill_numbers _fill_texts read_frames"},
    "prepare": {Prepare: "__call__"},
    "transfer": {lerobot_rows: "to_table"},
    "collate": {NumpyToTorchCollate: "__call__"},
}
STAGED_TASKS = 2
PRODUCED = "produced_s"
# Rates with a smaller ratio are balanced.
BALANCED = 1.05
# Options that must be equal in two results.
COMPARED = ("batch_size", "dataset", "policy_path", "policy_type")


def parse_options(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    options = Options(json="profile_dataloader_json")
    options.add("profile_batches", count, 300, "batches per worker (300)")
    options.add("profile_warmup", count, 20, "batches per worker before those (20)")
    options.add("against", Path, None, "a result of profile_step: which side is the bottleneck")
    options, rest = options.parse_known_args(argv)
    if options.against:  # refuse a wrong file before the dataset is read
        options.against = StepReport.read(options.against)
    return options, rest


class RankFetches(RankRecord):
    """Measurements of one worker after its warm-up.

    Attributes:
        warm_at_s, done_at_s: end of the warm-up and arrival of the last batch, seconds since 1970.
        fetch_s: seconds of waiting for each batch.
        copy_s: seconds of each copy to the GPU; None without one.
        produced_at_s: mean time at which each batch's rows were read, seconds since 1970.
    """

    warm_at_s: float
    done_at_s: float
    fetch_s: list[float]
    copy_s: list[float] | None
    produced_at_s: list[float]


class LoaderReport(WorkersReport[RankFetches]):
    """Result of `profile_dataloader`. `stages`: CPU seconds per 1000 rows. `data_cpus`: CPUs that no worker holds."""

    tool: Literal["profile_dataloader"] = "profile_dataloader"
    batches: int
    warmup: int
    rows: int
    wall_s: float
    rows_per_s: float
    data_cpus: float
    stages: dict[Stage, float]
    object_store_peak_bytes: int
    spilled_bytes: int


def summarise(
    run: Run,
    options: Namespace,
    ranks: Sequence[RankFetches],
    stages: Mapping[Stage, float],
    data_cpus: float,
    store: ClusterWatch,
) -> LoaderReport:
    """Count the rows read after the last worker's warm-up, and the time from then to the last worker's last batch."""
    start, end = max(r.warm_at_s for r in ranks), max(r.done_at_s for r in ranks)
    rows = run.config.batch_size * sum(at > start for r in ranks for at in r.produced_at_s)
    if not rows:
        early = f"everything was read before the warm-up of {options.profile_warmup} batches ended"
        raise ValueError(f"{early}: there is nothing to measure; raise --profile_batches")
    return LoaderReport.of(
        run,
        ranks,
        batches=options.profile_batches,
        warmup=options.profile_warmup,
        rows=rows,
        wall_s=end - start,
        rows_per_s=rows / (end - start),
        data_cpus=data_cpus,
        stages=dict(stages),
        object_store_peak_bytes=store.peak_bytes,
        spilled_bytes=store.spilled_bytes,
    )


def table(report: LoaderReport) -> str:
    fetches = [["fetch", "mean ms", "median", "p95", "batches/s", "copy ms"]]
    for r in report.ranks:
        rate = len(r.fetch_s) / (r.done_at_s - r.warm_at_s)
        copy = f"{1e3 * float(np.mean(r.copy_s)):.2f}" if r.copy_s else "-"
        fetches.append([f"rank {r.rank}", *Spread.of(r.fetch_s).cells(), f"{rate:.2f}", copy])
    stages, total = [["stage", "CPU s per 1000 rows", "share"]], sum(report.stages.values())
    stages += [[name, f"{s:.3f}", f"{s / total:.1%}"] for name, s in [*report.stages.items(), ("sum", total)] if s]
    busy = f"at this rate, {total * report.rows_per_s / 1000:.1f} CPUs; the cluster has {report.data_cpus:g} besides"
    notes = ["", *(EXPLAINED[stage] for stage, seconds in report.stages.items() if seconds), f"{busy} the workers'"]
    return "\n".join(
        [
            f"Pulled       {report.batches} batches of {report.config['batch_size']} rows by each of "
            f"{report.world_size} workers at once, after {report.warmup}",
            f"On           {report.environment.line()}",
            "",
            *format_table(fetches),
            "",
            f"{report.rows_per_s:.1f} rows/s over all workers: {report.rows} rows that were read after the warm-up, in "
            f"{report.wall_s:.1f} s",
            "",
            *(f"{line}   {note}".rstrip() for line, note in zip(format_table(stages), notes, strict=True)),
            "",
            f"object store: {report.object_store_peak_bytes / 2**20:.0f} MiB at most, "
            f"{report.spilled_bytes / 2**20:.0f} MiB spilled to disk",
        ]
    )


def charts(report: LoaderReport) -> list[tuple[str, str]]:
    fetches = [
        (f"Rank {r.rank}: every fetch, in milliseconds", time_line({"data_wait": r.fetch_s})) for r in report.ranks
    ]
    return [("CPU time by stage", shares({stage: s for stage, s in report.stages.items() if s})), *fetches]


def balance(loader: LoaderReport, step: StepReport) -> list[str]:
    """Return sentences on the bottleneck, its factor, and the CPUs per worker that would balance both sides."""
    waiting, loader_rate = step.phases["data_wait"].share, loader.rows_per_s
    step_rate = step.global_batch_size / (step.untouched_s * (1 - waiting))
    sentences = [
        f"The step, never waiting, takes {step_rate:.1f} rows/s; the data engine gives {loader_rate:.1f} rows/s. "
        f"(The step was measured waiting {waiting:.0%} of its time.)"
    ]
    if loader_rate * BALANCED < step_rate:
        times = step_rate / loader_rate
        sentences.append(f"The data engine is the bottleneck: the step could take {times:.2f}x as much.")
    elif loader_rate > step_rate * BALANCED:
        times = loader_rate / step_rate
        sentences.append(f"The step is the bottleneck: the data engine could feed {times:.2f}x as much.")
    else:
        sentences.append("They are balanced.")
    if loader.data_cpus > 0:
        needed = step_rate / loader_rate * loader.data_cpus / step.world_size
        holder = "GPU" if step.ranks[0].peak_allocated_bytes is not None else "worker"
        sentences.append(
            f"{needed:.2f} CPUs for data per {holder} would balance them, besides what the workers hold; there are "
            f"{loader.data_cpus / loader.world_size:.2f}."
        )
    differs = {key: loader.config.get(key) != step.config.get(key) for key in COMPARED}
    differs |= {"cpu": loader.environment.cpu != step.environment.cpu, "workers": loader.world_size != step.world_size}
    if any(differs.values()):
        sentences.append(f"Beware: the two results differ in {', '.join(name for name in differs if differs[name])}.")
    return sentences


class Stamped:
    """Wrap `prepare` and add the time at which each row was prepared."""

    def __init__(self, prepare: Callable[[Columns], Columns]):
        self._prepare = prepare

    def __call__(self, batch: Columns) -> Columns:
        prepared = self._prepare(batch)
        return prepared | {PRODUCED: np.full(len(next(iter(prepared.values()))), time.time())}


class _StampReader(NumpyToTorchCollate):
    """Remove the time stamps; keep their mean by a batch's first stream position."""

    def __init__(self, pin_memory: bool):
        super().__init__(pin_memory)
        self.produced_at_s: dict[int, float] = {}

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Batch:
        self.produced_at_s[int(batch["position"][0])] = float(batch[PRODUCED].mean())
        return super().__call__({key: value for key, value in batch.items() if key != PRODUCED})


class _CopyClock(Clock):
    """Time copies by CUDA events on their stream, which are read at the end."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self, phase: Phase) -> None:
        # Only `cuda_prefetcher` marks this clock: at the begin and the end of each copy.
        self._events.append(torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)))

    def copy_s(self) -> list[float] | None:
        if self._events:
            torch.cuda.synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=False)
        return [1e-3 * start.elapsed_time(end) for start, end in pairs] or None


def pull_loop(loop_config: dict[str, Any]) -> None:
    pull(ray.get(loop_config["run"]), loop_config["warmup"], RayWorker())


def pull(run: Run, warmup: int, worker: Worker) -> None:
    """Pull all batches of a worker, and write its `RankFetches` to the run's folder."""
    rank = worker.rank
    log_to(run.job.output_dir)
    collate, clock = _StampReader(run.job.use_gpu), _CopyClock()
    schedule = RankSchedule(run.job.batch_size, run.rows.block_rows, rank, worker.world, run.job.batches_per_step)
    batches = feed(run, worker, schedule, 0, to_tensors=collate, clock=clock)
    fetch_s: list[float] = []
    warm_at_s, before = time.time(), 0.0
    for _ in batches:
        fetch_s.append(batches.waited_s - before)
        before = batches.waited_s
        if len(fetch_s) == warmup:
            warm_at_s = time.time()
    done_at_s = time.time()
    produced = [collate.produced_at_s[int(schedule.rows(micro)[0])] for micro in range(len(fetch_s))]
    copies = clock.copy_s()
    measured: dict[str, Any] = {"fetch_s": fetch_s[warmup:], "produced_at_s": produced[warmup:]}
    measured |= {"copy_s": copies and copies[warmup:], "warm_at_s": warm_at_s, "done_at_s": done_at_s}
    write_record(run, rank, RankFetches(rank=rank, environment=Environment.here(), **measured))


class StageClock:
    """Count CPU seconds of this process by stage; in nested stages the innermost counts."""

    def __init__(self) -> None:
        self.cpu_s: dict[Stage, float] = dict.fromkeys(get_args(Stage), 0.0)
        self._stack: list[Stage] = []
        self._since = time.process_time()

    @contextlib.contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        self._count()
        self._stack.append(name)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def _count(self) -> None:
        now = time.process_time()
        if self._stack:
            self.cpu_s[self._stack[-1]] += now - self._since
        self._since = now


def time_stages(data: TrainingData, last_row: int, batch_size: int) -> dict[Stage, float]:
    """Run a few of the run's read tasks in this process; return CPU seconds per 1000 rows by stage.

    The first task is a warm-up, which loads libraries and fills the page cache.
    """
    source = data.read(stream=(0, last_row))
    chosen = source.get_read_tasks(1)[: 1 + STAGED_TASKS]
    collate = NumpyToTorchCollate(torch.cuda.is_available())
    rows = 0
    with contextlib.ExitStack() as stack:
        clock = StageClock()
        for stage, owners in FUNCTIONS.items():
            for owner, name in ((owner, name) for owner, names in owners.items() for name in names.split()):
                stack.enter_context(mock.patch.object(owner, name, clock.stage(stage)(getattr(owner, name))))
        for number, task in enumerate(chosen):
            if number == 1:
                rows = 0
                clock.cpu_s = dict.fromkeys(clock.cpu_s, 0.0)
            with clock.stage("other"):
                for block in task():
                    columns = {name: lerobot_rows.column_to_numpy(block.column(name)) for name in block.column_names}
                    prepared = data.prepare(columns)
                    with clock.stage("transfer"):
                        arrived = ray.get(ray.put(prepared))
                    for first in range(0, len(arrived["position"]), batch_size):
                        collate({key: value[first : first + batch_size] for key, value in arrived.items()})
                    rows += len(arrived["position"])
    return {stage: 1000 * seconds / rows for stage, seconds in clock.cpu_s.items()}


def pulled_run(run: Run, options: Namespace) -> Run:
    """Return the run with as many steps as batches to pull."""
    steps = options.profile_warmup + options.profile_batches
    return with_config(run, replace(run.config, grad_accum=1, steps=steps), steps)


def prepare(run: Run, options: Namespace) -> Callable[[], Result]:
    def examine() -> Result:
        scaling, warmup = run.config.scaling, options.profile_warmup
        print_safe(f"Pulling {warmup + options.profile_batches} batches by each of {scaling.num_workers} workers ...")
        with scratch_run(run) as scratch:
            pulled, data_options = on_cluster(pulled_run(scratch, options))
            data = vla.build_dataset(pulled)
            stamped = replace(data, prepare=LazyPickle(Stamped(data.prepare)))
            with ClusterWatch() as watch:
                ranks = run_workers(pulled, data_options, RankFetches, pull_loop, data=stamped, warmup=warmup)
            data_cpus = watch.cpus - scaling.num_workers * scaling.cpus_per_worker
            staged = ray.remote(time_stages).options(num_cpus=scaling.cpus_per_read_task)
            stages = ray.get(staged.remote(data, pulled.rows.last_row, run.config.batch_size))
        report = summarise(run, options, ranks, stages, data_cpus, watch)
        compared = ["", *balance(report, options.against)] if options.against else []
        return Result(report, "\n".join([table(report), *compared]), charts(report))

    return examine


main = partial(run_tool, doc=__doc__, parse_options=parse_options, prepare=prepare)


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from diagnostics import profile_dataloader

    sys.exit(profile_dataloader.main())
