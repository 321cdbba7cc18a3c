"""Represent a tool's result with its environment, and write it as JSON and as a self-contained page.

Benchmarks record their `Environment` too. Importing this module imports neither PyTorch nor Ray.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from vla_finetuning.run.revision import code_revision

if TYPE_CHECKING:
    from vla_finetuning.plan.resolve import Run

PACKAGES = ("torch", "ray", "lerobot", "transformers", "numpy", "av", "pyarrow")


class Record(BaseModel):
    """Part of a result; reading it refuses missing, unknown and mistyped fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Environment(Record):
    """Hardware, software, revision and date of a measurement."""

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
        """Describe the machine of the calling process; call this in the process that is measured."""
        import torch

        driver, cpus = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")
        models = [line for line in cpus.read_text().splitlines() if "model name" in line] if cpus.exists() else []
        return cls(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            git_revision=code_revision(),
            cpu=models[0].partition(":")[2].strip() if models else platform.processor(),
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


def provenance(**settings: Any) -> dict[str, Any]:
    """Return the head of a benchmark's result: its command, hardware and settings."""
    hardware = Environment.here().model_dump()
    return {"command": shlex.join(sys.orig_argv[1:]), "hardware": hardware, "settings": settings}


def medians(samples: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Return the median of each number over the samples, and all samples."""
    keys = [key for key, value in samples[0].items() if value is not None]
    return {key: np.median([sample[key] for sample in samples]).item() for key in keys} | {"samples": list(samples)}


def format_table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align rows of equally many cells: the first `left` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{'<' if column < left else '>'}{width}" for column, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


class Report(Record):
    """A tool's result. `config` holds the run's options as in `config.json`."""

    schema_version: Literal[1] = 1
    tool: str
    environment: Environment
    config: dict[str, Any]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a result. Raises ValueError or FileNotFoundError naming the file and the problem."""
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


class RankRecord(Record):
    """Measurements of one worker, and its environment."""

    rank: int
    environment: Environment


class WorkersReport[R: RankRecord](Report):
    """A tool's result from several workers, by rank."""

    world_size: int
    ranks: list[R]

    @classmethod
    def of(cls, run: Run, ranks: Sequence[R], **measurements: Any) -> Self:
        where, config = ranks[0].environment, run.config.to_json()
        return cls(environment=where, config=config, world_size=len(ranks), ranks=list(ranks), **measurements)


class Spread(Record):
    """Mean, median and 95th percentile in seconds."""

    mean: float
    median: float
    p95: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        values = np.asarray(samples, float)
        return cls(mean=values.mean(), median=np.median(values), p95=np.percentile(values, 95))

    def cells(self) -> list[str]:
        """Return mean, median and p95 in milliseconds."""
        return [f"{1e3 * value:.2f}" for value in (self.mean, self.median, self.p95)]


def page(title: str, measured_on: str, charts: Sequence[tuple[str, str]], table: str) -> str:
    """Render an HTML page with charts, (title, SVG) from `shares` and `time_line`, and the result as text below."""
    from vla_finetuning.report.page import page_template

    return page_template("tool.html").render(title=title, measured_on=measured_on, charts=charts, table=table)


def shares(parts: Mapping[Any, float]) -> str:
    """Draw each part's share of the sum as a bar, in percent; return SVG."""
    from vla_finetuning.report import figures

    percent = [(name, round(100 * part / (sum(parts.values()) or 1.0), 1)) for name, part in parts.items()]
    figure = figures.bars(percent, xlabel="share / %")
    return figures.to_svg(figure, "Shares: " + ", ".join(f"{name} {share:g} %" for name, share in percent))


def time_line(seconds: Mapping[Any, Sequence[float]]) -> str:
    """Draw the parts of every step as stacked areas, in milliseconds; return SVG."""
    from vla_finetuning.report import figures

    parts = {name: 1e3 * np.asarray(values) for name, values in seconds.items()}
    figure = figures.stack(parts, xlabel="step", ylabel="ms")
    return figures.to_svg(figure, f"Milliseconds of every step: {', '.join(parts)}")
