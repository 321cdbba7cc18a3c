"""State that a training loop shares with its callbacks: step, model, optimizer and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from util import (
    UNWATCHED,
    Batch,
    Clock,
    DeviceMetrics,
    Draws,
    TimedIterator,
    TrainableOptimizer,
    enable_expandable_segments,
    enable_gpu_perf_flags,
    train_step,
)
from vla_finetuning.buckets.mirror import keep_synced, pull
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.attempts import is_newest, start_attempt
from vla_finetuning.run.checkpoint import Progress, check_resumable, load_checkpoint, load_progress
from vla_finetuning.run.folder import checkpoint_to_resume
from vla_finetuning.run.job import Job
from vla_finetuning.run.progress import log_to
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.feed import feed
from vla_finetuning.training.model import build_model, build_optimizer, check_attention
from vla_finetuning.training.parallel import replicas, spread
from vla_finetuning.training.stream import RankSchedule
from vla_finetuning.training.worker import Worker


class Callback:
    """Base of callbacks of a training loop. Every rank makes the same callbacks and calls them in the same order.

    `state` is a `LoopState`. Callbacks must not read from the device between two log steps.
    """

    def on_batch(self, number: int, columns: Batch, inputs: Batch) -> None:
        """Handle a micro-batch: its number since the start, the columns that identify rows, and the policy's inputs."""

    def on_start(self, state: Any) -> None:
        """Prepare for the first step, after model and optimizer are built and loaded."""

    def on_step_begin(self, state: Any, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the micro-batches of the next step."""
        return batches

    def on_step_end(self, state: Any) -> None:
        """Handle the end of a step; `state.step` counts it."""

    def wants_log(self, state: Any) -> bool:
        """Return whether to log this step regardless of --log_freq, with the same answer on every rank."""
        return False

    def host_metrics(self, state: Any) -> dict[str, float]:
        """Return this rank's numbers for the collective of a log step, under the same names on all ranks.

        `stop` and `save` are requests: all ranks stop, or save, if any rank's number is not zero.
        """
        return {}

    def on_log(self, state: Any, line: dict[str, Any]) -> None:
        """Add metrics to the line of a log step; `state.by_rank` has every rank's `host_metrics`."""

    def on_save(self, state: Any) -> None:
        """Save a checkpoint of `state`."""

    def on_end(self, state: Any) -> None:
        """Clean up after the last step of this process."""


@dataclass(frozen=True)
class Attempt:
    """Start of the worker group: the number of earlier starts, the run's progress, and its newest usable checkpoint."""

    number: int
    progress: Progress
    checkpoint: Path | None


def begin(job: Job, worker: Worker, deterministic: bool) -> Attempt:
    """Log to the run's folder, configure PyTorch, and find the checkpoint to resume from. Every rank must call it."""
    pull(job.output_dir, at_the_top=True)
    log_to(job.output_dir)
    enable_gpu_perf_flags(deterministic)
    enable_expandable_segments()
    progress, checkpoint = saved_progress(job, worker)
    is_first = worker.rank == 0
    number = worker.broadcast(start_attempt(job.output_dir, progress.step, worker.world) if is_first else None)
    keep_synced(job.output_dir, partial(is_newest, job.output_dir, number), pulls="top" if is_first else None)
    return Attempt(number, progress, checkpoint)


def saved_progress(job: Job, worker: Worker) -> tuple[Progress, Path | None]:
    """Return the run's progress and newest checkpoint. A collective. Raises ValueError if no checkpoint is usable."""
    # On a network file system, other ranks may see new files late.
    checkpoint = worker.broadcast(checkpoint_to_resume(job.output_dir) if worker.rank == 0 else None)
    progress = job.start if checkpoint is None else load_progress(checkpoint)
    check_resumable(progress, job.start)
    return progress, checkpoint


@dataclass
class LoopState:
    """State of a process of a training loop between two steps."""

    run: Any  # with `config` and `job`
    worker: Worker
    attempt: Attempt
    step: int  # number of completed steps
    clock: Clock = UNWATCHED
    make_checkpoints: Callable[..., CheckpointWriter] = CheckpointWriter
    save: bool = False  # whether to save a checkpoint after this step
    stop: bool = False  # whether to end the loop after this step
    by_rank: dict[str, list[float]] = field(default_factory=dict)  # `Callback.host_metrics` of the newest log step
    optimizer: TrainableOptimizer = field(init=False)
    batches: Any = field(default=(), init=False)

    @classmethod
    def restore(cls, run: Any, worker: Worker, **options: Any) -> Self:
        """Make the state of the newest checkpoint. Every rank must call it. `options`: fields of the state."""
        attempt = begin(run.job, worker, run.config.train.deterministic)
        return cls(run, worker, attempt, attempt.progress.step, **options)

    def open_batches(self, hooks: Sequence[Callback]) -> None:
        """Begin to fetch the batches of the first step, while the model is built."""
        raise NotImplementedError

    def build(self) -> None:
        """Build the model and the optimizer, and load the checkpoint. Every rank must call it."""
        raise NotImplementedError

    def take_step(self, batches: Iterator[Batch]) -> None:
        """Train one step."""
        raise NotImplementedError

    def gather(self, hooks: Sequence[Callback]) -> dict[str, Any]:
        """Fetch the metrics and requests of all ranks at a log step. Every rank must call it."""
        raise NotImplementedError

    def nonfinite_remedy(self) -> str:
        """Return what to do about steps since the last log step whose loss or gradient is not finite."""
        raise NotImplementedError

    def loss_of(self, line: dict[str, Any]) -> float:
        """Return the loss in a line of the log, whose mean since the last checkpoint ranks a checkpoint."""
        return line["loss"]

    @property
    def finished(self) -> bool:
        return self.step >= self.run.job.steps

    @property
    def log_freq(self) -> int:
        return self.run.config.log_freq

    @property
    def rows(self) -> int:
        """Rows of the stream that the completed steps have used."""
        return self.step * self.run.job.rows_per_step

    def every(self, steps: int) -> bool:
        """Return whether `step` is a multiple of `steps` or the last one; False for 0."""
        return steps > 0 and (self.finished or self.step % steps == 0)

    def heed(self, by_rank: dict[str, list[float]]) -> None:
        """Store the numbers of all ranks, and set `stop` and `save` if any rank requests it."""
        self.by_rank = by_rank
        stop, save = (any(by_rank.get(request, ())) for request in ("stop", "save"))
        self.stop, self.save = self.stop or stop, self.save or stop or save


@dataclass
class TrainState(LoopState):
    """State of a process that trains on a stream of rows, between two optimizer steps."""

    make_optimizer: Callable[[PolicySpec, PolicyLoss, int], TrainableOptimizer] = build_optimizer
    find_unused_parameters: bool | None = None  # as in `spread`
    schedule: RankSchedule = field(init=False)
    metrics: DeviceMetrics = field(init=False)
    batches: TimedIterator = field(init=False)
    loss: PolicyLoss = field(init=False)
    autocast: torch.dtype | None = field(init=False)
    model: nn.Module = field(init=False)
    _waited_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        job, worker = self.run.job, self.worker
        self.schedule = RankSchedule(
            job.batch_size, self.run.rows.block_rows, worker.rank, worker.world, job.batches_per_step, self.step
        )
        self.metrics = DeviceMetrics(worker.device)

    def open_batches(self, hooks: Sequence[Callback]) -> None:
        first_row = self.attempt.progress.rows
        self.batches = feed(self.run, self.worker, self.schedule, first_row, hooks=hooks, clock=self.clock)

    def build(self) -> None:
        run, worker, scaling, policy = self.run, self.worker, self.run.job.scaling, self.run.policy
        self.loss, self.autocast = build_model(policy, worker.device)
        self.loss.metrics = self.metrics
        if policy.mixes_robots and policy.value is None:
            self.loss.robots = tuple(robot.name for robot in policy.robots)
            self.metrics.sums("loss_by_robot", self.loss.robots)
        check_attention(policy, self.loss, worker.device, self.autocast)
        hybrid = scaling.strategy == "hsdp" and worker.world > 1
        self.model = spread(
            self.loss,
            scaling.strategy,
            worker.device,
            worker.world,
            replicas=replicas(worker, scaling.shard_workers) if hybrid else None,
            autocast=self.autocast,
            find_unused_parameters=self.find_unused_parameters,
        )
        self.optimizer = self.make_optimizer(policy, self.loss, run.job.steps)
        if self.attempt.checkpoint is not None:
            named, average = self.optimizer.named(), self.optimizer.named_average() or None
            load_checkpoint(self.attempt.checkpoint, named, self.optimizer.state(), average)

    @property
    def micros(self) -> int:
        """Micro-batches of this rank in the next step."""
        return len(self.schedule.micros(self.step))

    def take_step(self, batches: Iterator[Batch]) -> None:
        job, device = self.run.job, self.worker.device
        result = train_step(
            self.model,
            self.optimizer,
            batches,
            step=self.step,
            grad_accum=self.micros,
            mean_over=job.batches_per_step / self.worker.world,
            draws=noise_for(self.run.policy, self.step, self.schedule, device),
            autocast=self.autocast,
            device=device,
            clock=self.clock,
        )
        self.clock.mark("metrics")
        self.metrics.add_step(result, samples=job.batch_size * self.micros)

    def gather(self, hooks: Sequence[Callback]) -> dict[str, Any]:
        """Fetch the metrics of all ranks in one collective and one read, and begin the next window."""
        waited_s = self.batches.waited_s
        host = {"waited_s": waited_s - self._waited_s}
        for hook in hooks:
            host |= hook.host_metrics(self)
        line, by_rank = self.metrics.gather(host)
        self._waited_s = waited_s
        self.metrics.restart()
        self.heed(by_rank)
        epoch, rate = round(self.rows / self.run.rows.per_epoch, 4), self.optimizer.schedule(self.step - 1)
        return {"epoch": epoch, "lr": rate, **line, "samples": self.rows}

    def nonfinite_remedy(self) -> str:
        window = self.run.rows.in_words(self.rows - int(sum(self.by_rank["samples"])), self.rows)
        return (
            "lower --lr, or look for bad values in the state and action columns of the rows of these steps, by "
            f"`index`: {window}"
        )


def noise_for(spec: PolicySpec, step: int, schedule: RankSchedule, device: torch.device) -> Callable[[int], Draws]:
    """Draw noise and times of a step, and return a function that selects this rank's rows of a micro-step.

    They are drawn for the whole global batch, so that a run does not depend on the number of workers.
    """
    per_row, seed = spec.train.noise_draws, spec.seed
    rows = schedule.rows_per_step * per_row
    noise, time = family_of(spec.config).draw(spec.config, rows, seed, step, device)
    if noise is None or time is None:
        torch.manual_seed(seed * 1_000_003 + step * schedule.world + schedule.rank)
        return lambda micro: (None, None)

    def draws(nth: int) -> Draws:
        # Slices of blocks: indexing with a list of rows would make the host wait for the device.
        starts = schedule.rows_of_step(step, nth)[:: schedule.block_rows].tolist()
        blocks = [slice(start * per_row, (start + schedule.block_rows) * per_row) for start in starts]
        return torch.cat([noise[block] for block in blocks]), torch.cat([time[block] for block in blocks])

    return draws
