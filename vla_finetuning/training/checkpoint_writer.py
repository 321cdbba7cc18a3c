"""Write checkpoints in the background while training continues."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray.train
import torch
import torch.distributed as dist
from ray.train import CheckpointUploadMode
from torch import Tensor

from util import TrainableOptimizer
from vla_finetuning.buckets.mirror import address, keep_unsent, push, release, remove, upload
from vla_finetuning.buckets.store import ChangedError, StorageError, StoreAwayError, within
from vla_finetuning.run.attempts import attempts, is_newest, resumed_at
from vla_finetuning.run.checkpoint import (
    AVERAGE,
    OPTIMIZER,
    TRAINABLE,
    Files,
    Piece,
    Progress,
    Staging,
    attempt_folder,
    commit,
    require_space_to_write,
    superseded,
    write_pieces,
)
from vla_finetuning.run.folder import checkpoint_written
from vla_finetuning.run.job import Job
from vla_finetuning.run.manifest import checkpoint_name
from vla_finetuning.run.recovery import forget_unsent, keep_manifest, unsent_folder
from vla_finetuning.training.parallel import first_replica, is_sharded, shard_of
from vla_finetuning.training.worker import Worker

logger = logging.getLogger(__name__)

# A shorter notice does not leave time to write another checkpoint.
SHORTEST_NOTICE_S = 10.0
# What became of a checkpoint: stored, kept on nodes, or neither, which ends the attempt.
Outcome = Literal["stored", "kept"] | None
# Slowest write or upload of a checkpoint for which other ranks wait.
SLOWEST_BYTES_PER_S = 5 * 2**20


class CheckpointWriter:
    """Write checkpoints asynchronously: a step waits for a copy to host memory, not for the disk.

    With sharded parameters, every rank of the first replica copies its shards; otherwise rank 0 copies everything. A
    thread of Ray Train writes the copy to a disk, and uploads it if the run is in a bucket. Rank 0 commits the
    checkpoint when all ranks have written their files. One checkpoint is in flight at a time, so host memory holds one
    copy (12 bytes for each trainable parameter). All ranks must make their writers together.

    `attempt` is the number of this start of the worker group: a writer whose attempt is over refuses to write. `prune`
    deletes checkpoints that the run need not keep. Raises OSError if the disk is too small for a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        optimizer: TrainableOptimizer,
        worker: Worker,
        attempt: int,
        every_s: float | None = None,
        prune: Callable[[], None] = lambda: None,
    ):
        self._job, self._optimizer, self._worker, self._rank = job, optimizer, worker, worker.rank
        self._attempt, self._every_s, self._prune = attempt, every_s, prune
        self._writers = max((first_replica(param) for param in optimizer.params), key=len, default=[0])
        forget_unsent(job.checkpoints_dir)  # of earlier attempts
        self._failing_since: float | None = None
        self._store_error: StoreAwayError | None = None
        self._group = None
        if worker.world > 1:
            # A group of its own, because this thread must not disturb collectives of other threads. Its timeout
            # covers a write, or an upload with retries, by one rank while the others have nothing to send.
            tensors = [tensor for named in self._state().values() for tensor in named.values()]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            timeout_s = job.timeouts.collective + job.timeouts.store + size / SLOWEST_BYTES_PER_S
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._staging: Staging | None = None
        if self._rank in self._writers:
            shards = {name: piece.values for group in self._shards().values() for name, piece in group.items()}
            # Of this node's writers; the driver has checked a disk that all share (`folder.own_folder`).
            needed = min(len(self._writers), worker.local_world) * sum(shard.nbytes for shard in shards.values())
            require_space_to_write(job.checkpoints_dir / "step", needed)
            self._staging = Staging(shards)
        self._idle = threading.Event()
        self._idle.set()
        self._last = time.monotonic()
        self._preempted_at = math.inf
        self._paused_s = 0.0

    def due(self) -> bool:
        """Return whether a checkpoint is due by this rank's clock: --save_every_s has passed since the last one.

        Before a preemption, a checkpoint is also due when half of the time that was left at the last one has passed.
        """
        every_s, now = self._every_s, time.monotonic()
        remaining_s = self._preempted_at - self._last
        return (every_s is not None and now - self._last >= every_s) or (
            remaining_s > SHORTEST_NOTICE_S and now - self._last >= remaining_s / 2
        )

    def preempted_at(self, deadline_ms: int) -> None:
        """Set the time at which a node is preempted: UNIX time in ms, or 0 if unknown."""
        if deadline_ms:
            self._preempted_at = time.monotonic() + deadline_ms / 1000 - time.time()

    def paused_s(self) -> float:
        """Return the seconds that training has waited for checkpoints since the last call."""
        paused_s, self._paused_s = self._paused_s, 0.0
        return paused_s

    def save(self, progress: Progress) -> None:
        """Begin to write a checkpoint of the current state. Every rank must call it."""
        started = time.monotonic()
        name = checkpoint_name(progress.step)
        self.wait()
        self._idle.clear()
        copies = self._copies()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._worker.report(
            {"step": progress.step},
            # A stand-in: `_write` writes the checkpoint from memory.
            checkpoint=ray.train.Checkpoint.from_directory(self._worker.storage),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=partial(self._write, copies, progress),
            delete_local_checkpoint_after_upload=False,
        )
        self._last = time.monotonic()
        self._paused_s += self._last - started

    def wait(self) -> None:
        """Wait until nothing is being written. Ray Train ends the attempt after an error while writing."""
        self._idle.wait()

    def close(self) -> None:
        """Wait for the last checkpoint. Raises StoreAwayError if it did not reach the bucket."""
        self.wait()
        if self._staging is not None:
            self._staging.close()
        if self._store_error is not None:
            raise self._store_error
        with within(self._job.timeouts.store / 10):
            push(self._job.output_dir)

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint on the device, by kind and name."""
        optimizer = self._optimizer
        kinds = {TRAINABLE: optimizer.named(), OPTIMIZER: optimizer.state(), AVERAGE: optimizer.named_average()}
        return {group: tensors for group, tensors in kinds.items() if tensors}

    def _shards(self) -> dict[str, dict[str, Piece]]:
        """Return the tensors that this rank writes: its own shards, and on rank 0 also unsharded tensors."""
        return {
            group: {
                name: Piece(*shard_of(tensor))
                for name, tensor in tensors.items()
                if self._rank == 0 or is_sharded(tensor)
            }
            for group, tensors in self._state().items()
        }

    def _copies(self) -> dict[str, dict[str, Piece]]:
        if self._staging is None:
            return {}
        groups = self._shards()
        copies = self._staging.copied({name: p.values for group in groups.values() for name, p in group.items()})
        return {
            group: {name: Piece(copies[name], piece.offsets) for name, piece in pieces.items()}
            for group, pieces in groups.items()
        }

    def _write(
        self, copies: dict[str, dict[str, Piece]], progress: Progress, ray_checkpoint: ray.train.Checkpoint, name: str
    ) -> ray.train.Checkpoint:
        folder = self._job.checkpoints_dir / name
        limit_s, started = self._job.timeouts.store, time.monotonic()
        try:
            # Only the last checkpoint gets the whole timeout: a later one can replace the others.
            with within(limit_s if progress.step == self._job.steps else limit_s / 10):
                written = self._write_pieces(folder, copies)
                reports = self._gather(written)
                outcome, error = self._finish(folder, progress, reports, started) if self._rank == 0 else (None, None)
                self._tidy(folder, progress, reports, outcome)
            if error is None and not isinstance(written.error, StorageError):
                error = written.error
            if error is not None:
                raise error
        finally:
            self._idle.set()
        return ray.train.Checkpoint.from_directory(Path(ray_checkpoint.path) / name)

    def _write_pieces(self, folder: Path, copies: dict[str, dict[str, Piece]]) -> _Written:
        """Write and send this rank's pieces and its logs. Return any error to `_finish`."""
        files: Files = {}
        error: Exception | None = None
        stored = attempt_folder(folder, self._attempt)
        try:
            if resumed_at(attempts(self._job.output_dir), self._attempt) is not None:
                raise superseded(folder)
            try:
                push(self._job.output_dir)
            finally:  # what is not sent is kept on this node
                if self._rank in self._writers:
                    number, count = self._writers.index(self._rank), len(self._writers)
                    files = write_pieces(folder, copies, number, count, self._attempt)
            upload(stored, files, stored)
        except ChangedError:  # this process no longer owns its own files
            error = superseded(folder)
        except Exception as raised:
            error = raised
        return _Written(files, error, f"{socket.gethostname()}:{unsent_folder(folder)}")

    def _gather(self, written: _Written) -> list[_Written]:
        """Return, on rank 0, the reports of all ranks in order; on other ranks, their own."""
        if self._group is None:
            return [written]
        reports: list[Any] = [None] * self._worker.world if self._rank == 0 else []
        dist.gather_object(written, reports or None, group=self._group)
        return reports or [written]

    def _tidy(self, folder: Path, progress: Progress, reports: list[_Written], outcome: Outcome) -> None:
        """Keep what was not stored on this node, and forget earlier checkpoints; `outcome` is valid on rank 0."""
        outcomes = [outcome]
        if self._group is not None:
            dist.broadcast_object_list(outcomes, group=self._group)
        (outcome,) = outcomes
        if outcome == "kept":
            keep_unsent(self._job.output_dir, unsent_folder(folder))
            try:
                self._meet()
                if self._rank == 0:  # last, when all nodes have the files that it names
                    keep_manifest(folder, progress, _files_of(reports), self._attempt)
                self._meet()
            except RuntimeError:  # of a rank that failed, which reports its error
                return
        release(attempt_folder(folder, self._attempt))
        if outcome is not None:
            forget_unsent(folder.parent, before=progress.step)

    def _meet(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)

    def _finish(
        self, folder: Path, progress: Progress, reports: list[_Written], started: float
    ) -> tuple[Outcome, Exception | None]:
        """Commit the checkpoint. Return what became of it, and the error that ends the attempt."""
        errors = [report.error for report in reports if report.error is not None]
        try:
            for error in sorted(errors, key=lambda error: isinstance(error, StorageError)):
                raise error
            if not is_newest(self._job.output_dir, self._attempt):
                raise superseded(folder)
            commit(folder, progress, _files_of(reports), self._attempt)
        except StorageError as error:
            return "kept", self._give_up(progress, reports, error, started)
        except OSError as error:
            with contextlib.suppress(OSError):
                remove(attempt_folder(folder, self._attempt))
            return None, error
        except Exception as error:
            return None, error
        self._failing_since = self._store_error = None
        try:
            checkpoint_written(self._job.output_dir, progress.step, self._attempt)
            self._prune()
        except Exception as error:  # the new checkpoint is committed
            logger.warning("%s is written; old checkpoints are not deleted: %s", folder.name, error)
        return "stored", None

    def _give_up(
        self, progress: Progress, reports: list[_Written], error: StorageError, started: float
    ) -> StoreAwayError | None:
        """Continue without this checkpoint, or return the error after VLA_STORE_TIMEOUT_S without any."""
        self._failing_since = started if self._failing_since is None else self._failing_since
        since_s = time.monotonic() - self._failing_since
        places = ", ".join(sorted({report.place for report in reports if report.files}))
        self._store_error = StoreAwayError(
            f"no checkpoint has reached {address(self._job.output_dir)} for {since_s:.0f} s (VLA_STORE_TIMEOUT_S): "
            f"{error}; the state of step {progress.step} is in {places}: --resume with these nodes in the cluster "
            "sends it and goes on from there; without them, the run goes on from the newest checkpoint in the bucket, "
            "if there is one"
        )
        if since_s >= self._job.timeouts.store or progress.step == self._job.steps:
            return self._store_error
        logger.warning(
            "the checkpoint of step %d was not stored; training continues, and stops if none is stored for %.0f s "
            "(%.0f s so far): %s",
            *(progress.step, self._job.timeouts.store, since_s, error),
        )
        return None


class _Written(NamedTuple):
    """Report of a rank: the files of a checkpoint that it wrote, its error, and their host and folder."""

    files: Files
    error: Exception | None
    place: str


def _files_of(reports: list[_Written]) -> Files:
    return {name: file for report in reports for name, file in report.files.items()}
