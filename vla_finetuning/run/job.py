"""What a run does, whatever it trains: where it writes, how long it trains, in which batches, on which workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_finetuning.environment import FRAME_CACHE_GB, Timeouts
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.folder import CHECKPOINTS_NAME


@dataclass(frozen=True)
class Job:
    """What a run does. Pickled in flight to training workers (without secrets; tokens stay in the environment).

    Attributes:
        output_dir: absolute; all nodes see it, on a disk that they share or in a bucket.
        steps: optimizer updates of the whole run; in GRPO iterations.
        batch_size: rows of a worker's micro-batch.
        batches_per_step: micro-batches of an optimizer step, of all workers together.
        scaling: workers and what each of them holds; `use_gpu` is decided.
        start: the progress of the run before its first step.
        disk_bytes: the most that the run has in its folder at once, without checkpoints that are yet to play.
        timeouts, feature_cache_gb: as the driver's environment has them.
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
        """Rows of an optimizer step, of all workers: the global batch size."""
        return self.batch_size * self.batches_per_step
