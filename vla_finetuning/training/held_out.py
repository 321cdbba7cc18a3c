"""Measure the loss on held-out episodes during training, with the same rows, noise and times at every evaluation.

Tasks read the rows independently of the training stream. Small sets stay in the object store; larger ones are read
again for each evaluation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError
from torch import Tensor

from lerobot_datasource import LeRobotDatasource
from util import Batch, NumpyToTorchCollate, cuda_prefetcher
from vla_finetuning.columns import IS_SKIPPED, ROW_COLUMNS
from vla_finetuning.plan.resolve import Run
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.flow import time_without_given
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.texts import with_texts
from vla_finetuning.training.feed import Collate, input_transforms
from vla_finetuning.training.model import make_prepare
from vla_finetuning.training.parallel import free_gathered
from vla_finetuning.training.state import Callback, TrainState
from vla_finetuning.training.stream import Columns, LazyPickle
from vla_finetuning.training.worker import Worker

# Read tasks of a rank at a time. Few, because each is a process, which imports LeRobot.
LOOK_AHEAD = 4
# Share of the cluster's object stores that held-out rows may fill between evaluations.
STORE_SHARE = 0.1
# Rows whose noise and times are drawn together, for any batch size.
DRAWN_TOGETHER = 64
# Reported intervals of the flow time, from 0 (action) to 1 (noise), and reported tasks.
TIME_INTERVALS, TASKS_REPORTED = 10, 32


class HeldOut(Callback):
    """Measure the held-out loss every --eval_steps, with the averaged weights if they are exported."""

    def on_start(self, state: TrainState) -> None:
        self._held_out = HeldOutLoss(state.run, state.worker)

    def wants_log(self, state: TrainState) -> bool:
        return state.every(state.run.config.eval_steps)

    def on_log(self, state: TrainState, line: dict[str, Any]) -> None:
        stop_requested = any(state.by_rank.get("stop", ()))
        if not self.wants_log(state) or (stop_requested and not state.finished):
            return
        state.clock.mark("evaluation")
        with state.optimizer.averaged() if state.run.policy.ema.enable else contextlib.nullcontext():
            line |= self._held_out.evaluate(state.loss, state.autocast)
        state.metrics.restart()  # the evaluation belongs to no step


class HeldOutLoss:
    """Compute the loss of a rank's share of the held-out rows. All ranks must make theirs together.

    Chunks, each of a micro-batch's rows, are assigned to the ranks in turn. FSDP2 needs the same number of forwards on
    all ranks: a rank without a chunk repeats the last one and discards the result.
    """

    def __init__(self, run: Run, worker: Worker):
        self._spec, self._device, self._timeout_s = run.policy, worker.device, run.job.timeouts.batch
        rows, spec, rank, world = run.rows, run.policy, worker.rank, worker.world
        self._rows = rows.held_out_rows(run.config.max_eval_samples)
        self._size = run.job.batch_size
        # A loss without values by row counts its mean for all rows of a batch.
        self._family = family_of(spec.config)
        self._per_row = spec.train.noise_draws if self._family.row_losses else 1
        self._chunks = -(-len(self._rows.positions) // self._size)
        self._assigned = list(range(rank, -(-self._chunks // world) * world, world))
        # The same shapes as in training: another one would be compiled again, on this rank only.
        self._collate = Collate(input_transforms(rows, spec), NumpyToTorchCollate(worker.device.type == "cuda"))
        source = rows.held_out()
        most = STORE_SHARE * ray.cluster_resources().get("object_store_memory", 0)
        caches = len(self._rows.positions) * source.row_bytes() <= most
        read = read_task(source, make_prepare(spec, rows), source.num_cpus)

        def read_number(number: int) -> Any:
            first = min(number, self._chunks - 1) * self._size
            return read(self._rows.positions[first : first + self._size])

        self._read: Callable[[int], Any] = functools.cache(read_number) if caches else read_number

    def evaluate(self, loss: PolicyLoss, autocast: torch.dtype | None) -> dict[str, Any]:
        """Compute the held-out loss, the same on all ranks, by one collective and one read from the device.

        Every rank must call it. `eval_loss` is the mean over all rows and draws. `eval_skipped` counts rows that could
        not be read (--dataset.on_error=skip). Several robots add `eval_loss_by_robot`. A loss by row adds
        `eval_loss_by_task` for the tasks with the most rows, and `eval_loss_by_time` over equal intervals of the flow
        time, None for an empty interval.
        """
        started = time.perf_counter()
        rows, chunk = len(self._rows.positions) * self._per_row, self._size * self._per_row
        # Loss, whether it counts, and time of every draw of every row. Zeros for rows of other ranks.
        table = torch.zeros(3, self._chunks * chunk, device=self._device)
        loss.eval()
        try:
            with torch.no_grad():
                batches = cuda_prefetcher(self._host_batches(), self._device)
                for number, batch in zip(self._assigned, batches, strict=True):
                    values, times = self._losses(loss, batch, number, autocast)
                    if number < self._chunks:
                        counted = torch.ones_like(values)
                        if IS_SKIPPED in batch:
                            counted = batch[IS_SKIPPED].logical_not().repeat_interleave(self._per_row).to(values)
                        table[:, number * chunk :][:, : len(values)] = torch.stack([values, counted, times])
        finally:
            loss.train()
            free_gathered(loss)
        if dist.is_initialized():
            dist.all_reduce(table)
        summary = self._summary(*table[:, :rows].cpu().double().numpy())  # the last chunk may be padded
        return {**summary, "eval_s": time.perf_counter() - started}

    def _losses(
        self, loss: PolicyLoss, batch: Batch, number: int, autocast: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Return losses and times of a chunk's draws; a loss without values by row repeats its mean for every row."""
        inputs = with_texts({key: value for key, value in batch.items() if key not in ROW_COLUMNS})
        rows = len(next(iter(inputs.values())))
        with torch.autocast(self._device.type, autocast, enabled=autocast is not None):
            if self._family.row_losses:
                noise, times = self._draws(number)
                return loss(inputs, noise, times, per_row=True), times
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(self._spec.seed * 1_000_003 + number)
                return loss(inputs).expand(rows), torch.zeros(rows, device=self._device)

    def _draws(self, number: int) -> tuple[Tensor, Tensor]:
        """Draw noise and times of a chunk's rows, as functions of the run's seed and of the rows' positions."""
        first = number * self._size if number < self._chunks else (self._chunks - 1) * self._size
        groups = range(first // DRAWN_TOGETHER, -(-(first + self._size) // DRAWN_TOGETHER))
        config, seed, many = self._spec.config, self._spec.seed, DRAWN_TOGETHER * self._per_row
        pairs = [self._family.draw(config, many, seed, -1 - group, self._device) for group in groups]
        skip = (first - groups.start * DRAWN_TOGETHER) * self._per_row
        row_slice = slice(skip, skip + self._size * self._per_row)
        noise, times = (torch.cat([pair[member] for pair in pairs])[row_slice] for member in (0, 1))  # type: ignore[misc]
        return noise, time_without_given(times)  # comparable with policies that were trained otherwise

    def _summary(self, losses: np.ndarray, counted: np.ndarray, times: np.ndarray) -> dict[str, Any]:
        """Return the metrics of an evaluation from float64 (N*K,) each."""
        chosen = counted > 0
        summary: dict[str, Any] = {"eval_loss": _mean(losses[chosen])}
        if skipped := int((~chosen).sum()) // self._per_row:
            summary["eval_skipped"] = skipped
        if self._family.row_losses:
            task = np.repeat(self._rows.task, self._per_row)
            many = np.argsort(-np.bincount(task, minlength=len(self._rows.tasks)), kind="stable")[:TASKS_REPORTED]
            summary["eval_loss_by_task"] = {
                self._rows.tasks[number]: _mean(losses[chosen & (task == number)]) for number in many.tolist()
            }
        if self._spec.mixes_robots:
            dataset = np.repeat(self._rows.dataset, self._per_row)
            summary["eval_loss_by_robot"] = {
                robot.name: _mean(losses[chosen & np.isin(dataset, robot.datasets)]) for robot in self._spec.robots
            }
        if self._family.row_losses and self._spec.value is None:
            interval = np.minimum((times * TIME_INTERVALS).astype(int), TIME_INTERVALS - 1)
            summary["eval_loss_by_time"] = [
                _mean(losses[chosen & (interval == number)]) for number in range(TIME_INTERVALS)
            ]
        return summary

    def _host_batches(self) -> Iterator[Batch]:
        for columns in fetch_ahead(map(self._read, self._assigned), self._timeout_s, "held-out rows"):
            missing = self._size - len(next(iter(columns.values())))
            if missing and self._family.row_losses:  # another shape than in training might be compiled
                columns = {k: np.concatenate([v, np.repeat(v[-1:], missing, axis=0)]) for k, v in columns.items()}
            yield self._collate(columns)


def read_chunk(source: LeRobotDatasource, prepare: LazyPickle, positions: np.ndarray) -> Columns:
    """Read the rows at stream `positions`, and prepare them. Runs in a Ray task."""
    (rows,) = source.read_rows(positions.tolist(), len(positions))
    return prepare(rows)


def read_task(
    source: LeRobotDatasource, prepare: Callable[[Columns], Columns], num_cpus: float
) -> Callable[[np.ndarray], Any]:
    """Return a function that starts `read_chunk` of stream positions in a Ray task, and returns its reference."""
    task: Any = ray.remote(read_chunk).options(num_cpus=num_cpus)
    return functools.partial(task.remote, ray.put(source), ray.put(LazyPickle(prepare)))


def fetch_ahead(tasks: Iterable[Any], timeout_s: float, what: str, ahead: int = LOOK_AHEAD) -> Iterator[Columns]:
    """Yield the results of tasks in order; the iterable starts them, `ahead` at a time. `what` are the rows."""
    starts = iter(tasks)
    pending = deque(itertools.islice(starts, ahead))
    while pending:
        try:
            columns: Columns = ray.get(pending.popleft(), timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"no {what} for {timeout_s:g} s (VLA_BATCH_TIMEOUT_S): a read task hangs, or the cluster has no CPU "
                "left for it (`ray list tasks` and `ray status` tell)"
            ) from error
        yield columns
        pending.extend(itertools.islice(starts, 1))


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
