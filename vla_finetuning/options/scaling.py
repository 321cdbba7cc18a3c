"""Options of workers, GPUs and read tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from vla_finetuning.options.fields import option

Strategy = Literal["ddp", "fsdp2", "fsdp2_reshard", "hsdp"]
# Reasons by the strategies that need a fixed number of workers.
FIXED_WORKERS = {
    "fsdp2_reshard": "workers gather parameters together in every micro-batch, so none may have more of those than "
    "another",
    "hsdp": "every node must have as many workers as another, which a number that changes does not keep",
}


@dataclass
class WorkerOptions:
    """Workers and GPUs."""

    num_workers: int = option(
        1,
        "Training processes, one GPU each where there are GPUs. 2,8: as many as there is capacity for, at least 2 and "
        "at most 8; a step's rows stay those of 8 workers.",
        form="a whole number, or the least and the most, as 2,8",
        min=1,
    )
    min_workers: int | None = option(
        None, "The least number of workers; --scaling.num_workers 2,8 sets it.", flag=None, min=1
    )
    use_gpu: bool | None = option(
        None, "Train on GPUs. When absent: as found, and needed where a cluster is joined from a machine without."
    )
    accelerator_type: str | None = option(
        None,
        "Ray's name of the GPU type that workers need, e.g. L4 or H100. Ray calls both sizes A100; A100-40G and "
        "A100-80G are of nodes that were started with these names.",
        conflicts={"scaling.use_gpu=false": "it is a type of GPU"},
    )
    strategy: Strategy = option(
        "ddp",
        "How what trains is spread over workers. ddp: a replica on each. fsdp2: a shard of "
        "parameters, gradients and Adam's moments on each; parameters are whole during a step (as ZeRO-2). "
        "fsdp2_reshard: parameters are whole only where they are computed with (as ZeRO-3). hsdp: as fsdp2 among the "
        "workers of a node, with a replica on every node, so that nothing but gradients travels between nodes. "
        "--resume may change it.",
    )
    shard_workers: int | None = option(
        None,
        "hsdp: how many workers hold a replica together; those of a node when absent.",
        min=1,
        requires={"scaling.strategy=hsdp": "it is for --scaling.strategy=hsdp; leave it out"},
    )
    cpus_per_worker: float = option(
        1.0, "CPUs that each training process holds; the other CPUs of a node decode.", above=0
    )
    max_failures: int = option(
        3,
        "Number of times that the worker group is started anew after failures before the run gives up; -1: no limit. "
        "Preempted nodes do not count.",
        min=-1,
    )

    def check(self, config: Any) -> None:
        least, most = self.min_workers, self.num_workers
        if least is not None:
            flag = f"--scaling.num_workers {least},{most}"
            if least > most:
                raise ValueError(f"{flag}: the least and the most, in that order")
            if config.batch_size * self.common_multiple > 2**31:
                raise ValueError(
                    f"{flag}: too many different numbers of workers to share data evenly among any of them; choose a "
                    "narrower range"
                )
            if why := FIXED_WORKERS.get(self.strategy):
                raise ValueError(
                    f"--scaling.strategy={self.strategy} {flag}: {why}; use a fixed number of workers, or "
                    "--scaling.strategy=fsdp2"
                )
        if self.strategy == "hsdp" and self.shard_workers is not None and most % self.shard_workers:
            raise ValueError(
                f"--scaling.shard_workers={self.shard_workers} --scaling.num_workers={most}: the workers do not divide "
                f"into replicas; give a divisor of {most}"
            )

    def describe(self, use_gpu: bool, precision: str) -> list[str]:
        """Return the plan's lines on hardware."""
        workers = f"{self.min_workers} to {self.num_workers}" if self.min_workers else str(self.num_workers)
        device = "GPU" if use_gpu else "CPU"
        return [f"Hardware     {workers} {device} workers, {self.strategy}, {precision} precision"]

    @property
    def common_multiple(self) -> int:
        """Return the least common multiple of all allowed numbers of workers."""
        return math.lcm(*range(self.min_workers or self.num_workers, self.num_workers + 1))

    def decided(self, gpus_found: int) -> Self:
        """Return the options with an absent `use_gpu` set: true with an `accelerator_type` or any GPU found."""
        if self.use_gpu is not None:
            return self
        return replace(self, use_gpu=self.accelerator_type is not None or gpus_found > 0)


@dataclass
class ScalingOptions(WorkerOptions):
    """Workers, GPUs and decoding."""

    cpus_per_read_task: float = option(1.0, "CPUs (and decoder threads) of a read task.", above=0)
