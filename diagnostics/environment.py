"""Where and with what something was measured: part of every result, of diagnostics and benchmarks alike."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel, ConfigDict

from vla_finetuning.run.record import code_revision

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "ray", "lerobot", "transformers", "numpy", "av", "pyarrow")


class Record(BaseModel):
    """Part of a result: nothing in it is missing, of another type or unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Environment(Record):
    """Where and with what something was measured."""

    date: str
    git_revision: str
    cpu: str
    cores: int
    memory_bytes: int
    gpus: list[str]
    driver: str | None
    python: str
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Self:
        """Of the calling process: call it where the work is done."""
        import torch

        driver = Path("/proc/driver/nvidia/version")
        return cls(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            git_revision=code_revision(),
            cpu=_cpu_name(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory_bytes=psutil.virtual_memory().total,
            gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            driver=driver.read_text().splitlines()[0] if driver.exists() else None,
            python=platform.python_version(),
            versions={package: importlib.metadata.version(package) for package in PACKAGES},
        )

    def line(self) -> str:
        gpus = f"{len(self.gpus)}x {self.gpus[0]}, " if self.gpus else ""
        return (
            f"{gpus}{self.cores} cores of {self.cpu}; torch {self.versions['torch']}, ray {self.versions['ray']}, "
            f"lerobot {self.versions['lerobot']}, {self.git_revision[:12]}, {self.date}"
        )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
