"""Represent a training process: its rank, device and rows, and communication with the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray.train.collective
import ray.train.torch
import torch

from vla_finetuning.run.progress import spilled_bytes


class Worker:
    """A process that trains alone, on the rows of `shard` (a `ray.data.DataIterator`)."""

    rank, world, node_rank, local_world = 0, 1, 0, 1
    storage = Path()  # Ray Train's storage folder of the run

    def __init__(self, device: torch.device, shard: Any = None):
        self.device, self._shard = device, shard

    @property
    def shard(self) -> Any:
        return self._shard

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value. Every rank must call it."""
        return value

    def report(self, metrics: dict[str, Any], **checkpoint: Any) -> None:
        """Report metrics and a checkpoint to Ray Train. Every rank must call it."""

    def preemption_deadline_ms(self) -> int | None:
        """Return the time at which a node of this group is preempted: UNIX time in ms, 0 if unknown, None for never."""
        return None

    def spilled_bytes(self) -> int | None:
        """Return the bytes that the cluster's object stores have spilled; None if a node did not answer."""
        return 0


class RayWorker(Worker):
    """A process of Ray Train's worker group, in its training function."""

    def __init__(self) -> None:
        super().__init__(ray.train.torch.get_device())
        context = ray.train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.node_rank, self.local_world = context.get_node_rank(), context.get_local_world_size()
        self.storage = Path(context.get_storage().experiment_fs_path)

    @property
    def shard(self) -> Any:
        return ray.train.get_dataset_shard("train")

    def broadcast(self, value: Any) -> Any:
        return ray.train.collective.broadcast_from_rank_zero(value)

    def report(self, metrics: dict[str, Any], **checkpoint: Any) -> None:
        ray.train.report(metrics, **checkpoint)

    def preemption_deadline_ms(self) -> int | None:
        notice = ray.train.get_preemption_info()
        return None if notice is None else notice.deadline_ms or 0

    def spilled_bytes(self) -> int | None:
        return spilled_bytes()
