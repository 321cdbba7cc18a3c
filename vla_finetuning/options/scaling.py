"""Options of workers, GPUs and read tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from vla_finetuning.options.fields import option

Strategy = Literal["ddp", "fsdp2", "fsdp2_reshard", "hsdp"]


@dataclass
class WorkerOptions:
    """Workers and GPUs."""

    num_workers: int = option(
        1,
        "Number of training processes, with one GPU each if there are any. 2,8: at least 2 and at most 8, as the "
        "capacity allows; a step always has the rows of 8 workers.",
        form="a whole number, or the least and the most, as 2,8",
        min=1,
    )
    min_workers: int | None = option(
        None,
        "Minimum number of workers; --scaling.num_workers 2,8 sets it.",
        flag=None,
        set_by="scaling.num_workers",
        min=1,
        conflicts={
            "scaling.strategy=fsdp2_reshard": "workers gather parameters together in every micro-batch, so none may "
            "have more of those than another; give --scaling.num_workers one number, or --scaling.strategy=fsdp2",
            "scaling.strategy=hsdp": "every node needs the same number of workers, which a varying number does not "
            "guarantee; give --scaling.num_workers one number, or --scaling.strategy=fsdp2",
        },
    )
    use_gpu: bool | None = option(
        None, "Train on GPUs. Default: if there are any; required when a machine without GPUs joins a cluster."
    )
    accelerator_type: str | None = option(
        None,
        "Ray's name of the workers' GPU type, such as L4 or H100. Ray names both sizes A100; A100-40G and A100-80G "
        "exist only on nodes that were started with these names.",
        conflicts={"scaling.use_gpu=false": "it is a type of GPU; leave it out, or give --scaling.use_gpu=true"},
    )
    strategy: Strategy = option(
        "ddp",
        "Distribution of the trained parameters over workers. ddp: a replica on each. fsdp2: each has a shard of "
        "parameters, gradients and Adam's moments; parameters are gathered for a whole step (as ZeRO-2). "
        "fsdp2_reshard: parameters are gathered layer by layer (as ZeRO-3). hsdp: fsdp2 within a node and a replica "
        "on each node, so that only gradients travel between nodes. --resume may change it.",
    )
    shard_workers: int | None = option(
        None,
        "hsdp: number of workers that share a replica. Default: the workers of a node.",
        min=1,
        requires={"scaling.strategy=hsdp": "it is for --scaling.strategy=hsdp; leave it out"},
    )
    cpus_per_worker: float = option(1.0, "CPUs of each training process. The other CPUs of a node decode.", above=0)
    max_failures: int = option(
        3,
        "Number of restarts of the worker group after failures before the run ends. -1: no limit. Preempted nodes do "
        "not count.",
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

    def on_gpus(self, gpus_found: int) -> bool:
        """Return `use_gpu`; if absent, whether there is an `accelerator_type` or any GPU was found."""
        return (self.accelerator_type is not None or gpus_found > 0) if self.use_gpu is None else self.use_gpu


@dataclass
class ScalingOptions(WorkerOptions):
    """Workers, GPUs and decoding."""

    cpus_per_read_task: float = option(1.0, "CPUs and decoder threads of a read task.", above=0)
