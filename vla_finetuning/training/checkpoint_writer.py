"""Checkpoints that are taken while training goes on."""

from __future__ import annotations

import datetime
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray.train
import torch
import torch.distributed as dist
from ray.train import CheckpointUploadMode
from torch import Tensor

from util import TrainableOptimizer
from vla_finetuning.buckets.mirror import address, mirror_of, push
from vla_finetuning.buckets.store import ChangedError, StorageError, StoreAwayError, within
from vla_finetuning.run.attempts import attempts, is_newest, resumed_at
from vla_finetuning.run.checkpoint import (
    AVERAGE,
    OPTIMIZER,
    STATE,
    TRAINABLE,
    Files,
    Piece,
    Progress,
    Staging,
    commit,
    discard,
    forget_unsent,
    partial_folder,
    require_space_to_write,
    send,
    superseded,
    write_pieces,
)
from vla_finetuning.run.folder import checkpoint_written
from vla_finetuning.run.job import Job
from vla_finetuning.run.recovery import keep_manifest, keep_small_files
from vla_finetuning.training.parallel import first_replica, is_sharded, shard_of
from vla_finetuning.training.worker import Worker

logger = logging.getLogger(__name__)

# With less time than this, a checkpoint of the little that was trained meanwhile would hardly be whole in time.
SHORTEST_NOTICE_S = 10.0
# As slow as a checkpoint may travel to a bucket while other ranks wait.
SLOWEST_UPLOAD_BYTES_PER_S = 2**20


class CheckpointWriter:
    """Takes checkpoints while training goes on: the step waits for a copy in host memory, not for the disk.

    Rank 0, or where parameters are sharded every rank of the first replica, copies its shards; a thread of Ray Train's
    then writes them to a disk, and from there into the bucket of a run in one. When all ranks have written theirs, rank
    0 has the checkpoint appear. One is in flight at a time, so host memory holds one copy (12 bytes for each parameter
    that trains). All ranks make their writers together.

    Args:
        attempt: number of this start of the worker group. A writer whose attempt is over refuses to write.
        every_s: --save_every_s. prune: deletes the checkpoints that the run need not keep.

    Raises:
        OSError: this node's disk is too small for a checkpoint on its way to a bucket.
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
        forget_unsent(job.checkpoints_dir)  # of earlier attempts, without which this one has begun
        self._failing_since: float | None = None
        self._away: StoreAwayError | None = None
        self._group = None
        if worker.world > 1:
            # A group for this alone: threads must not disturb each other's collectives. One rank may send and try for
            # so long, while the others have nothing to send.
            tensors = [tensor for named in self._state().values() for tensor in named.values()]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            timeout_s = job.timeouts.collective + job.timeouts.store + size / SLOWEST_UPLOAD_BYTES_PER_S
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._staging: Staging | None = None
        if self._rank in self._writers:
            shards = {name: piece.values for group in self._shards().values() for name, piece in group.items()}
            # In a bucket, the disk is this node's.
            sharing = min(len(self._writers), worker.local_world) if mirror_of(job.output_dir) else len(self._writers)
            needed = sharing * sum(shard.nbytes for shard in shards.values())
            require_space_to_write(job.checkpoints_dir / "step", needed)
            self._staging = Staging(shards)
        self._idle = threading.Event()
        self._idle.set()
        self._last = time.monotonic()
        self._ends = math.inf
        self._paused_s = 0.0

    def due(self) -> bool:
        """Return whether a checkpoint is due, by this rank's clock: --save_every_s has gone by since the last one.

        When a node is about to be taken away, also whenever half of the time has gone that was left at the last one.
        """
        every_s, now = self._every_s, time.monotonic()
        remaining_s = self._ends - self._last
        return (every_s is not None and now - self._last >= every_s) or (
            remaining_s > SHORTEST_NOTICE_S and now - self._last >= remaining_s / 2
        )

    def ends_at(self, deadline_ms: int) -> None:
        """A node is taken away then (UNIX time in ms); 0: at an unknown time."""
        if deadline_ms:
            self._ends = time.monotonic() + deadline_ms / 1000 - time.time()

    def paused_s(self) -> float:
        """Seconds that training has waited for checkpoints since this was last asked."""
        paused_s, self._paused_s = self._paused_s, 0.0
        return paused_s

    def save(self, progress: Progress) -> None:
        """Take a checkpoint of this moment. Every rank must call it."""
        started = time.monotonic()
        name = f"step_{progress.step:08d}"
        self.wait()
        self._idle.clear()
        copies = self._copies()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._worker.report(
            {"step": progress.step},
            # Not what is uploaded: `_write` makes that from memory, straight in its place.
            checkpoint=ray.train.Checkpoint.from_directory(self._worker.storage),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=partial(self._write, copies, progress),
            delete_local_checkpoint_after_upload=False,
        )
        self._last = time.monotonic()
        self._paused_s += self._last - started

    def wait(self) -> None:
        """Wait until nothing is being written. An error while writing ends the attempt by way of Ray Train."""
        self._idle.wait()

    def close(self) -> None:
        """Wait until nothing is being written. Raises StoreAwayError: the last one did not reach the bucket."""
        self.wait()
        if self._staging is not None:
            self._staging.close()
        if self._away is not None:
            raise self._away
        with within(self._job.timeouts.store / 10):
            push(self._job.output_dir)

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """Return what a checkpoint holds, by kind and name, on the device."""
        optimizer = self._optimizer
        kinds = {TRAINABLE: optimizer.named(), OPTIMIZER: optimizer.state(), AVERAGE: optimizer.named_average()}
        return {group: tensors for group, tensors in kinds.items() if tensors}

    def _shards(self) -> dict[str, dict[str, Piece]]:
        """Return what this rank writes: its own shards, and on rank 0 all that is whole."""
        return {
            group: {
                name: Piece(*shard_of(tensor))
                for name, tensor in tensors.items()
                if self._rank == 0 or is_sharded(tensor)
            }
            for group, tensors in self._state().items()
        }

    def _copies(self) -> dict[str, dict[str, Piece]]:
        """Copy what this rank writes to host memory, where further steps do not change it."""
        if self._staging is None:
            return {}
        groups = self._shards()
        copies = self._staging.copied({name: p.values for group in groups.values() for name, p in group.items()})
        return {
            group: {name: Piece(copies[name], piece.offsets) for name, piece in pieces.items()}
            for group, pieces in groups.items()
        }

    def _write(
        self, copies: dict[str, dict[str, Piece]], progress: Progress, rays: ray.train.Checkpoint, name: str
    ) -> ray.train.Checkpoint:
        folder = self._job.checkpoints_dir / name
        limit_s, started = self._job.timeouts.store, time.monotonic()
        try:
            # The last one has all the time there is: no other comes after it.
            with within(limit_s if progress.step == self._job.steps else limit_s / 10):
                written = self._write_pieces(folder, copies)
                everyones = self._gathered(written)
                appeared = False
                try:
                    if self._rank == 0:
                        appeared = self._finish(folder, progress, everyones, started)
                finally:
                    self._tidy(folder, progress.step, appeared)
            if written.error is not None and not isinstance(written.error, StorageError):
                raise written.error
        finally:
            self._idle.set()
        return ray.train.Checkpoint.from_directory(Path(rays.path) / name)

    def _write_pieces(self, folder: Path, copies: dict[str, dict[str, Piece]]) -> _Written:
        """Write this rank's pieces, and have them and its lines where the run is. An error is for `_finish`."""
        files: Files = {}
        error: Exception | None = None
        try:
            if resumed_at(attempts(self._job.output_dir), self._attempt) is not None:
                raise superseded(folder)  # before it writes where a later attempt does
            if self._rank in self._writers:
                files = write_pieces(folder, copies, self._writers.index(self._rank), len(self._writers))
            push(self._job.output_dir)
            send(folder, files, self._attempt)
        except ChangedError:  # this process no longer owns its own files
            error = superseded(folder)
        except Exception as raised:
            error = raised
        return _Written(files, error, f"{socket.gethostname()}:{partial_folder(folder)}")

    def _gathered(self, written: _Written) -> list[_Written]:
        """On rank 0 what all ranks have written, when all have; its own first. On others this rank's."""
        if self._group is None:
            return [written]
        everyones: list[Any] = [None] * self._worker.world if self._rank == 0 else []
        dist.gather_object(written, everyones or None, group=self._group)
        return everyones or [written]

    def _tidy(self, folder: Path, step: int, appeared: bool) -> None:
        """Remove this node's files of a checkpoint that has `appeared` (known to rank 0), and of earlier ones."""
        # Of a checkpoint that ends the attempt, neither: nothing is of use.
        is_kept = self._rank == 0 and not appeared and (partial_folder(folder) / STATE).exists()
        if self._group is not None:
            outcome = [appeared, is_kept]
            dist.broadcast_object_list(outcome, group=self._group)
            appeared, is_kept = outcome
        if not (appeared or is_kept):
            return
        if appeared:
            discard(folder)
        else:
            keep_small_files(folder, self._rank)
            if self._group is not None:
                try:
                    dist.barrier(self._group)  # an error of rank 0 ends all
                except RuntimeError:  # of another rank, which says by itself what is wrong
                    return
        forget_unsent(folder.parent, before=step)

    def _finish(self, folder: Path, progress: Progress, everyones: list[_Written], started: float) -> bool:
        """Have the checkpoint appear, or raise a rank's error; return False where the store failed."""
        errors = [report.error for report in everyones if report.error is not None]
        files = {name: file for report in everyones for name, file in report.files.items()}
        try:
            for error in sorted(errors, key=lambda error: isinstance(error, StorageError)):
                raise error
            if not is_newest(self._job.output_dir, self._attempt):
                raise superseded(folder)
            commit(folder, progress, files, self._attempt)
        except StorageError as error:
            keep_manifest(folder, progress, files, self._attempt)
            self._give_up(progress, everyones, error, started)
            return False
        except OSError:
            discard(folder)
            raise
        self._failing_since = self._away = None
        try:
            checkpoint_written(self._job.output_dir, progress.step, self._attempt)
            self._prune()
        except Exception as error:  # this one is in its place, whatever is wrong with older ones
            logger.warning("%s is written; old checkpoints are not deleted: %s", folder.name, error)
        return True

    def _give_up(self, progress: Progress, everyones: list[_Written], error: StorageError, started: float) -> None:
        """Go on without this checkpoint, or stop after VLA_STORE_TIMEOUT_S without any."""
        self._failing_since = started if self._failing_since is None else self._failing_since
        since_s = time.monotonic() - self._failing_since
        places = ", ".join(sorted({report.place for report in everyones if report.files}))
        self._away = StoreAwayError(
            f"no checkpoint has reached {address(self._job.output_dir)} for {since_s:.0f} s (VLA_STORE_TIMEOUT_S): "
            f"{error}; the state of step {progress.step} is in {places}: --resume with these nodes in the cluster "
            "sends it and goes on from there; without them, the run goes on from the newest checkpoint in the bucket, "
            "if there is one"
        )
        if since_s >= self._job.timeouts.store or progress.step == self._job.steps:
            raise self._away
        logger.warning(
            "the checkpoint of step %d is given up, and training goes on (for %.0f of %.0f s without one): %s",
            *(progress.step, since_s, self._job.timeouts.store, error),
        )


class _Written(NamedTuple):
    """What a rank wrote of a checkpoint, or the error that it met; and where on which node it is."""

    files: Files
    error: Exception | None
    place: str
