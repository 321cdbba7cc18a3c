"""Callbacks of every training loop: logs, counts of work, checkpoints, requests to stop, compilation."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch._dynamo.exc import TorchDynamoException

from util import Batch, peak_flops
from vla_finetuning.buckets.mirror import file_of_process
from vla_finetuning.columns import IS_SKIPPED
from vla_finetuning.files import append_line, open_lines, read_json_lines
from vla_finetuning.options.programs import Config
from vla_finetuning.policies.family import MEAN_COUNT
from vla_finetuning.policies.flow import time_without_given
from vla_finetuning.policies.registry import family_of
from vla_finetuning.run.folder import METRICS_NAME, ROWS_NAME, STOP_NAME, evaluations, prune_checkpoints
from vla_finetuning.run.progress import check_skipped, keep_metrics, keep_skipped, success_of
from vla_finetuning.training.parallel import free_gathered
from vla_finetuning.training.state import Callback, LoopState, TrainState, noise_for


class WorkDone(Callback):
    """Count tokens and FLOPs from the shapes of micro-batches, without a read from the device; log rates of work."""

    def __init__(self, state: TrainState):
        self._policy = state.run.policy
        self._tokens = self._flops = 0.0

    def on_batch(self, number: int, columns: Batch, inputs: Batch) -> None:
        policy = self._policy
        if policy.flops_by_prompt:
            rows, prompt = inputs[OBS_LANGUAGE_TOKENS].shape
            family, config = family_of(policy.config), policy.config
            self._tokens += rows * family.tokens(config, policy.cameras, policy.train.noise_draws, prompt)
            self._flops += rows * policy.flops_by_prompt[prompt]

    def host_metrics(self, state: TrainState) -> dict[str, float]:
        counted = {"tokens": self._tokens, "flops": self._flops}
        self._tokens = self._flops = 0.0
        return counted

    def on_log(self, state: TrainState, line: dict[str, Any]) -> None:
        elapsed_s = max(state.by_rank["elapsed_s"])
        line["tokens_per_s"] = sum(state.by_rank["tokens"]) / elapsed_s or None
        line["flops_per_s"] = sum(state.by_rank["flops"]) / elapsed_s or None
        flops_per_s, peak = line["flops_per_s"], peak_flops(state.worker.device)
        line["mfu"] = flops_per_s / (state.worker.world * peak) if flops_per_s and peak else None
        for name, per_sample in state.run.rows.rates.items():
            line[name] = None if per_sample is None else per_sample * line["samples_per_s"]
        if state.worker.rank == 0:
            line["spilled_bytes"] = state.worker.spilled_bytes()


class RowLog(Callback):
    """Write `rows/rank<r>.jsonl`, the rows that each step trains on, for `check_rows` (--run.record_rows)."""

    def __init__(self, state: TrainState):
        path = state.run.job.output_dir / ROWS_NAME / f"rank{state.worker.rank}.jsonl"
        self._lines = open_lines(file_of_process(path))
        self._rows, self._schedule, self._attempt = state.run.rows, state.schedule, state.attempt.number

    def on_batch(self, number: int, columns: Batch, inputs: Batch) -> None:
        place = np.stack([columns[key].numpy() for key in ("dataset_index", "index")], axis=1)
        is_skipped = columns[IS_SKIPPED].numpy() if IS_SKIPPED in columns else np.zeros(len(place), bool)
        epochs, step = self._rows.epochs_of(columns["position"].numpy()), self._schedule.step_of(number) + 1
        for epoch in np.unique(epochs).tolist():
            rows, skipped = (place[(epochs == epoch) & chosen].tolist() for chosen in (~is_skipped, is_skipped))
            line = {"attempt": self._attempt, "epoch": epoch, "step": step, "rows": rows, "skipped": skipped}
            self._lines.write(f"{json.dumps(line)}\n")

    def on_end(self, state: TrainState) -> None:
        self._lines.close()


class ExactMean(Callback):
    """Divide each micro-batch's loss by the step's mean count of loss terms (--train.exact_mean)."""

    def on_step_begin(self, state: TrainState, batches: Iterator[Batch]) -> Iterator[Batch]:
        micro_batches = list(itertools.islice(batches, state.micros))
        count = torch.stack([state.loss.count(batch) for batch in micro_batches]).sum(dim=0).to(torch.float32)
        if state.worker.world > 1:
            dist.all_reduce(count)
        mean = count.clamp_min(1) / state.run.job.batches_per_step
        for batch in micro_batches:
            yield {**batch, MEAN_COUNT: mean}


class Compile(Callback):
    """Compile the layers before the first step for every length of prompts, on all ranks at once (--train.compile)."""

    def on_start(self, state: TrainState) -> None:
        if state.finished or getattr(state.loss, "compiler", None) is None:
            return
        try:
            self._compile(state)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split())  # PyTorch's messages fill pages
            raise ValueError(f"--train.compile: torch.compile failed, leave it out ({reason:.500})") from error

    def _compile(self, state: TrainState) -> None:
        spec, loss, device = state.run.policy, state.loss, state.worker.device
        batch = state.batches.peek()
        noise, time = noise_for(spec, state.step, state.schedule, device)(0)
        for length in spec.prompts:
            padded = {
                key: F.pad(value, (0, length - value.shape[1]))
                for key, value in batch.items()
                if key in (OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS)
            }
            with torch.autocast(device.type, state.autocast, enabled=state.autocast is not None):
                result = state.model({**batch, **padded}, noise, time)
            result.backward()
            if state.run.config.eval_steps:  # held-out losses take the layers without gradients
                loss.eval()
                with torch.no_grad(), torch.autocast(device.type, state.autocast, enabled=state.autocast is not None):
                    loss({**batch, **padded}, noise, time if time is None else time_without_given(time))
                loss.train()
                free_gathered(loss)
        state.optimizer.clear_gradients()


class CollectGarbage(Callback):
    """Collect garbage at log steps only: a collection between them would stall the host at random."""

    def on_start(self, state: TrainState) -> None:
        gc.disable()
        gc.collect()
        gc.freeze()  # else each log step scans all objects of libraries and model again: half a second

    def on_log(self, state: TrainState, line: dict[str, Any]) -> None:
        gc.collect()

    def on_end(self, state: TrainState) -> None:
        gc.unfreeze()
        gc.enable()


class StopFile(Callback):
    """End the run when its folder has a file `stop`."""

    def host_metrics(self, state: LoopState) -> dict[str, float]:
        return {"stop": float(state.worker.rank == 0 and (state.run.job.output_dir / STOP_NAME).exists())}


class NonfiniteSteps(Callback):
    """End a run that keeps producing losses or gradients that are not finite (--train.max_nonfinite)."""

    def __init__(self) -> None:
        self._count = 0  # since the worker group started

    def on_log(self, state: LoopState, line: dict[str, Any]) -> None:
        recent, limit = line["nonfinite_steps"], state.run.config.train.max_nonfinite
        self._count += recent
        if recent and self._count > limit:
            raise FloatingPointError(
                f"{self._count} steps had a loss or gradient that is not finite, {recent} of them since the last log "
                f"step (more than --train.max_nonfinite={limit}; they were skipped): {state.nonfinite_remedy()}"
            )


class SkippedRows(Callback):
    """End a run that skips more rows than --dataset.max_skipped (--dataset.on_error skip)."""

    def __init__(self, state: TrainState):
        if state.worker.rank == 0:
            keep_skipped(state.run.job.output_dir, state.rows)

    def on_log(self, state: TrainState, line: dict[str, Any]) -> None:
        if state.worker.rank == 0:
            run = state.run
            trained, share = state.step * run.job.rows_per_step, run.config.dataset.max_skipped
            check_skipped(run.job.output_dir, share, trained, run.rows.per_epoch)


class Checkpoints(Callback):
    """Save checkpoints every --save_freq steps, every --save_every_s seconds, and before a node is preempted."""

    def __init__(self, options: Config):
        self._options = options
        self._losses: list[float] = []
        self._eval_loss: float | None = None
        self._preempted = False

    def on_start(self, state: LoopState) -> None:
        job, options = state.run.job, self._options
        prune = partial(prune_checkpoints, options, job.steps)
        self._writer = state.make_checkpoints(
            job, state.optimizer, state.worker, state.attempt.number, options.save_every_s, prune
        )
        if state.worker.rank == 0:  # a process that was killed after a commit did not
            with contextlib.suppress(OSError):  # of a store; the next checkpoint tries again
                prune()

    def on_step_end(self, state: LoopState) -> None:
        self._eval_loss = None

    def wants_log(self, state: LoopState) -> bool:
        """Return whether a checkpoint follows: a resumed run begins a line's mean there, and its loss ranks it."""
        return state.every(self._options.save_freq)

    def host_metrics(self, state: LoopState) -> dict[str, float]:
        return {"save": float(state.worker.rank == 0 and self._writer.due())}

    def on_log(self, state: LoopState, line: dict[str, Any]) -> None:
        if math.isfinite(loss := state.loss_of(line)):  # else all steps of the window were skipped
            self._losses.append(loss)
        # A loss over a part of the held-out rows must not decide which checkpoint is best.
        self._eval_loss = None if line.get("eval_skipped") else line.get("eval_loss")
        line["checkpoint_pause_s"] = self._writer.paused_s()
        # The call is a barrier, and all ranks get the same answer (Ray 2.60). The deadline may come later than the
        # notice. Ray Train restarts the group when the node is gone.
        deadline_ms = state.worker.preemption_deadline_ms()
        if deadline_ms is not None:
            state.save = state.save or not self._preempted
            self._writer.preempted_at(deadline_ms)
        self._preempted = deadline_ms is not None

    def on_save(self, state: LoopState) -> None:
        state.clock.mark("checkpoint")
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        start = state.attempt.progress
        self._writer.save(replace(start, step=state.step, rows=state.rows, loss=loss, eval_loss=self._eval_loss))
        self._losses.clear()

    def on_end(self, state: LoopState) -> None:
        self._writer.close()


class SuccessInLoop(Callback):
    """Add the success of checkpoints that have played to the log's lines, of each once (--env.type)."""

    def on_start(self, state: TrainState) -> None:
        lines = read_json_lines(state.run.job.output_dir / METRICS_NAME)
        self._reported = {line.get("success_step") for line in lines}

    def on_log(self, state: TrainState, line: dict[str, Any]) -> None:
        played = evaluations(state.run.job.output_dir) if state.worker.rank == 0 else ()
        for evaluation in [one for one in played if one["step"] not in self._reported][:1]:
            self._reported.add(evaluation["step"])
            line |= success_of(evaluation)


class MetricsLines(Callback):
    """Write metrics.jsonl on rank 0. The last callback, so that a line includes the metrics that others added."""

    def __init__(self, state: LoopState):
        # At step 0, line 0 of an earlier attempt of grpo.py is removed too.
        is_first = state.worker.rank == 0
        self._path = keep_metrics(state.run.job.output_dir, state.step or -1) if is_first else None

    def on_start(self, state: Any) -> None:
        state.metrics.restart()

    def on_log(self, state: Any, line: dict[str, Any]) -> None:
        if self._path is not None:
            append_line(self._path, json.dumps({"step": state.step, **line}))
