"""Options of a run that hold for every program: its folder, length, batches and workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_finetuning.environment import FRAME_CACHE_GB, Timeouts
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.folder import CHECKPOINTS_NAME


@dataclass(frozen=True)
class Job:
    """Settings of a run. Pickled to training workers, without secrets: tokens stay in the environment.

    Attributes:
        output_dir: absolute path of the run's folder, on a shared disk or in a bucket.
        steps: optimizer updates of the whole run; iterations in GRPO.
        batch_size: rows of a worker's micro-batch.
        batches_per_step: micro-batches of an optimizer step over all workers.
        scaling: workers and their resources, with `use_gpu` decided.
        start: progress of the run before its first step.
        disk_bytes: most bytes in the folder at one time, without checkpoints that wait for an evaluation.
        timeouts: timeouts of the driver's environment.
        feature_cache_gb: size limit of cached features of the driver's environment.
    """

    output_dir: Path
    steps: int
    batch_size: int
    batches_per_step: int
    scaling: ScalingOptions
    start: Progress
    disk_bytes: int
    timeouts: Timeouts
    feature_cache_gb: float = FRAME_CACHE_GB

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
