"""Checkpoints that are taken while training goes on."""

from __future__ import annotations

import datetime
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import CheckpointUploadMode
from torch import Tensor

from util import TrainableOptimizer
from vla_finetuning.run.checkpoint import (
    AVERAGE,
    OPTIMIZER,
    TRAINABLE,
    Files,
    Piece,
    Progress,
    Staging,
    commit,
    discard,
    write_pieces,
)
from vla_finetuning.run.folder import attempts
from vla_finetuning.run.job import Job
from vla_finetuning.training.parallel import first_replica, is_sharded, shard_of
from vla_finetuning.training.worker import Worker

# With less time than this, a checkpoint of the little that was trained meanwhile would hardly be whole in time.
SHORTEST_NOTICE_S = 10.0


class CheckpointWriter:
    """Takes checkpoints while training goes on: the step waits for a copy in host memory, not for the disk.

    Rank 0, or where parameters are in parts every rank of the first copy, copies what it holds; a thread of Ray Train's
    then writes that into the run's folder. When all have, rank 0 has the checkpoint appear there, and it is reported.
    One is in flight at a time: the next one waits for it, so host memory holds one copy (12 bytes for each parameter
    that trains), in memory made once. All ranks make their writers together.

    Args:
        attempt: number of this start of the worker group. A writer whose attempt is over refuses to write.
        every_s: --save_every_s. prune: deletes the checkpoints that the run need not keep.
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
        self._group = None
        if len(self._writers) > 1:
            # Of its own: threads must not disturb each other's collectives. On the host, as the files are.
            timeout = datetime.timedelta(seconds=job.scaling.collective_timeout_s)
            self._group = dist.new_group(self._writers, backend="gloo", timeout=timeout)
        self._staging: Staging | None = None
        if self._rank in self._writers:
            mine = [self._mine(tensors) for tensors in self._state().values()]
            self._staging = Staging({name: shard_of(tensor)[0] for tensors in mine for name, tensor in tensors.items()})
        self._idle = threading.Event()
        self._idle.set()
        self._last = time.monotonic()
        self._ends = math.inf
        self._paused_s = 0.0

    def due(self) -> bool:
        """Whether one is, by this rank's clock.

        It is when --save_every_s has gone by since the last one. And when a node is about to be taken away, whenever
        half of the time has gone that was left when the last one was taken: what is trained after that is lost.
        """
        every_s, now = self._every_s, time.monotonic()
        left = self._ends - self._last
        return (every_s is not None and now - self._last >= every_s) or (
            left > SHORTEST_NOTICE_S and now - self._last >= left / 2
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
        if self._rank not in self._writers:
            self._worker.report({"step": progress.step}, checkpoint_dir_name=name)
        else:
            self.wait()
            self._idle.clear()
            taken = {kind: self._copied(tensors) for kind, tensors in self._state().items()}
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._worker.report(
                {"step": progress.step},
                # Not what is uploaded: `_write` makes that from memory, straight in its place.
                checkpoint=ray.train.Checkpoint.from_directory(self._job.checkpoints_dir),
                checkpoint_dir_name=name,
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=partial(self._write, taken, progress),
                delete_local_checkpoint_after_upload=False,
            )
        self._last = time.monotonic()
        self._paused_s += self._last - started

    def wait(self) -> None:
        """Until nothing is being written. An error while writing ends the attempt by way of Ray Train."""
        self._idle.wait()

    def close(self) -> None:
        """Wait until nothing is being written, and give the memory back."""
        self.wait()
        if self._staging is not None:
            self._staging.close()

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, by kind and name, on the device."""
        own = self._optimizer
        kinds = {TRAINABLE: own.named(), OPTIMIZER: own.state(), AVERAGE: own.named_average()}
        return {kind: tensors for kind, tensors in kinds.items() if tensors}

    def _mine(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that this rank writes: of parts its own, of the rest rank 0's."""
        return {name: tensor for name, tensor in tensors.items() if self._rank == 0 or is_sharded(tensor)}

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Copies in host memory, where further steps do not change them."""
        assert self._staging is not None
        pieces = {}
        for name, tensor in self._mine(tensors).items():
            held, offsets = shard_of(tensor)
            pieces[name] = Piece(self._staging.copied(name, held), offsets)
        return pieces

    def _write(
        self, taken: dict[str, dict[str, Piece]], progress: Progress, _: ray.train.Checkpoint, name: str
    ) -> ray.train.Checkpoint:
        folder = self._job.checkpoints_dir / name
        try:
            files = self._write_pieces(folder, taken)
            if self._rank == 0:
                commit(folder, progress, files)
                self._prune()
        except OSError:
            if self._rank == 0:
                discard(folder)
            raise
        finally:
            self._idle.set()
        return ray.train.Checkpoint.from_directory(folder)

    def _write_pieces(self, folder: Path, taken: dict[str, dict[str, Piece]]) -> Files:
        """Write this rank's pieces. Returns this rank's files; on rank 0 all ranks', when all have written theirs."""
        written: Files | Exception
        try:
            if len(attempts(self._job.output_dir)) != self._attempt + 1:
                raise RuntimeError(
                    f"{self._job.output_dir}: another process goes on with this run; {folder.name} is not written"
                )
            written = write_pieces(folder, taken, self._writers.index(self._rank), len(self._writers))
        except Exception as error:
            written = error
        everyones: list[Any] = [written]
        if self._group is not None:
            everyones = [None] * len(self._writers) if self._rank == 0 else []
            dist.gather_object(written, everyones or None, group=self._group)
        for of_rank in [written, *everyones]:
            if isinstance(of_rank, Exception):
                raise of_rank
        return {name: file for files in everyones for name, file in files.items()}
