"""A start of the worker group: where the run goes on."""

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
    """A start of the worker group.

    Attributes:
        number: how many starts there were before. progress: how far the run is.
        checkpoint: the newest sound one, which has that progress; None where there is none yet.
    """

    number: int
    progress: Progress
    checkpoint: Path | None


def begin(job: Job, worker: Worker, deterministic: bool) -> Attempt:
    """Log to the run's folder, set PyTorch up, and find where the run goes on. Every rank must call it."""
    pull(job.output_dir, at_the_top=True)
    log_to(job.output_dir)
    enable_gpu_perf_flags(deterministic)
    enable_expandable_segments()
    progress, checkpoint = saved_progress(job, worker)
    is_first = worker.rank == 0
    number = worker.broadcast(start_attempt(job.output_dir, progress.step, worker.world) if is_first else None)
    # Rank 0 looks for requests to stop and for what was evaluated; the others only write.
    keep_synced(job.output_dir, partial(is_newest, job.output_dir, number), pulls="top" if is_first else None)
    return Attempt(number, progress, checkpoint)


def saved_progress(job: Job, worker: Worker) -> tuple[Progress, Path | None]:
    """Return how far the run is, and its newest checkpoint; a collective. Raises ValueError: none can be used."""
    # Where the folder is on a network, other ranks may see its files late.
    checkpoint = worker.broadcast(checkpoint_to_resume(job.output_dir) if worker.rank == 0 else None)
    progress = job.start if checkpoint is None else load_progress(checkpoint)
    check_resumable(progress, job.start)
    return progress, checkpoint
