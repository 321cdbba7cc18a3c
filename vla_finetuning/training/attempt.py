"""Start an attempt of a training process: set up logs and PyTorch, and find the checkpoint to resume from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from util import enable_expandable_segments, enable_gpu_perf_flags
from vla_finetuning.buckets.mirror import keep_synced, pull
from vla_finetuning.run.attempts import is_newest, start_attempt
from vla_finetuning.run.checkpoint import Progress, check_resumable, load_progress
from vla_finetuning.run.folder import checkpoint_to_resume
from vla_finetuning.run.job import Job
from vla_finetuning.run.progress import log_to
from vla_finetuning.training.worker import Worker


@dataclass(frozen=True)
class Attempt:
    """Start of the worker group.

    Attributes:
        number: number of earlier starts.
        progress: progress of the run when this start begins.
        checkpoint: newest usable checkpoint, or None before the first one.
    """

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
