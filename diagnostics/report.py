"""What the diagnostics have in common: their options, and results that say where and with what they were measured."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np
import psutil
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

import vla
from run_plan import Run
from training_data import Dealt
from util import Batch, NumpyToTorchCollate

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "ray", "lerobot", "transformers", "numpy", "av", "pyarrow")
TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


# ---- options ------------------------------------------------------------------------------------------------------


class Options(argparse.ArgumentParser):
    """A tool's own flags; what they do not know is left to `vla.py`'s. Mistakes are ValueErrors."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def add(self, name: str, kind: Callable[[str], Any], default: Any, help: str) -> None:
        """`--name`, or NAME in the environment; the flag wins. A bare flag of kind `truth` means true."""
        in_environment = os.environ.get(name.upper())
        if in_environment:
            try:
                default = kind(in_environment)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f"{name.upper()}={in_environment!r} in the environment: {error}") from error
        bare: dict[str, Any] = {"nargs": "?", "const": True} if kind is truth else {}
        self.add_argument(f"--{name}", type=kind, default=default, help=help, metavar=name.rsplit("_")[-1], **bare)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def truth(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return TRUTHS[text.lower()]


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return int(text)


# ---- a run that leaves nothing behind -----------------------------------------------------------------------------


@contextlib.contextmanager
def scratch_run(run: Run) -> Iterator[Run]:
    """The run with another folder, beside its own so that all nodes share it too, and gone afterwards.

    It starts from the beginning, on as many workers as it may have at most, and nothing is tried twice.
    """
    run.output_dir.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f".{run.output_dir.name}-", dir=run.output_dir.parent)
    scaling = replace(run.config.scaling, min_workers=None, max_failures=0)
    try:
        yield replace(run, config=replace(run.config, output_dir=folder, resume=False, scaling=scaling))
    finally:
        shutil.rmtree(folder)


def host_batches(run: Run, dealt: Dealt, batches: int) -> Iterator[Batch]:
    """A rank's first batches, read and prepared in this process by the functions of the run's read tasks."""
    data, collate = vla.build_dataset(run), NumpyToTorchCollate(run.use_gpu)
    source = data.read(stream=(0, run.last_row))
    for micro in range(batches):
        for rows in source.read_rows(dealt.rows(micro).tolist(), run.config.batch_size):
            yield collate(data.prepare(rows))


# ---- results ------------------------------------------------------------------------------------------------------


class Record(BaseModel):
    """Part of a result: nothing in it is missing, of another type or unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Environment(Record):
    """Where and with what something was measured."""

    date: str
    git_revision: str | None
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
        driver = Path("/proc/driver/nvidia/version")
        return cls(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            git_revision=_git_revision(),
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
        revision = f", {self.git_revision[:12]}" if self.git_revision else ""
        return (
            f"{gpus}{self.cores} cores of {self.cpu}; torch {self.versions['torch']}, ray {self.versions['ray']}, "
            f"lerobot {self.versions['lerobot']}{revision}, {self.date}"
        )


class Report(Record):
    """A tool's result. `config` is the run's, as `config.json` has it."""

    schema_version: Literal[1] = 1
    tool: str
    environment: Environment
    config: dict[str, Any]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError or FileNotFoundError naming the file and what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} does not exist; a run of the tool writes it") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"{path} is no result of this version's {cls.model_fields['tool'].default}: {where}: {first['msg']}; "
                "measure again"
            ) from error


class Spread(Record):
    """Of a list of seconds."""

    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        values = np.asarray(samples, float)
        return cls(mean=values.mean(), median=np.median(values), p95=np.percentile(values, 95))

    def columns(self) -> str:
        return "".join(f"{1e3 * value:11.2f}" for value in (self.mean, self.median, self.p95))


def _git_revision() -> str | None:
    """The commit, with a `+` when files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
