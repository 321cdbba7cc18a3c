"""Options of a run that hold for every program: its folder, length, batches and workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_finetuning.environment import Timeouts
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.folder import CHECKPOINTS_NAME


@dataclass(frozen=True)
class Job:
    """Settings of a run. Pickled to training workers, without secrets: tokens stay in the environment."""

    output_dir: Path  # absolute, on a shared disk or in a bucket
    steps: int  # optimizer updates of the whole run; iterations in GRPO
    batch_size: int  # rows of a worker's micro-batch
    batches_per_step: int  # micro-batches of an optimizer step over all workers
    scaling: ScalingOptions  # with `use_gpu` decided
    start: Progress  # before the first step
    disk_bytes: int  # most in the folder at one time, without checkpoints that wait for an evaluation
    timeouts: Timeouts  # of the driver's environment

    @property
    def checkpoints_dir(self) -> Path:
        return self.output_dir / CHECKPOINTS_NAME

    @property
    def use_gpu(self) -> bool:
        return bool(self.scaling.use_gpu)

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step over all workers: the global batch size."""
        return self.batch_size * self.batches_per_step
