"""A tool's result: where it was measured, its JSON, and a page that needs nothing else.

Benchmarks note their `Environment` here, too. Importing this module imports neither PyTorch nor Ray.
"""

from __future__ import annotations

import datetime
import html
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from vla_finetuning.plan.record import code_revision

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
        """Describe the calling process: call it where the work is done."""
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


# ---- the page ------------------------------------------------------------------------------------------------------

COLOURS = {
    "data_wait": "#c0392b",
    "copy": "#e59866",
    "forward": "#2471a3",
    "backward": "#5dade2",
    "clip": "#76448a",
    "optimizer": "#af7ac5",
    "zero_grad_schedule": "#d2b4de",
    "metrics": "#b7950b",
    "checkpoint": "#7d6608",
    "evaluation": "#d4ac0d",
    "other": "#aab7b8",
    # stages of the data engine
    "read": "#1e8449",
    "decode": "#2471a3",
    "convert": "#5dade2",
    "resize": "#76448a",
    "shuffle": "#b7950b",
    "prepare": "#af7ac5",
    "transfer": "#c0392b",
    "collate": "#e59866",
    # fates of parameters
    "unused": "#c0392b",
    "sometimes": "#e59866",
    "zero": "#b7950b",
    "frozen": "#aab7b8",
    "used": "#1e8449",
}
WIDTH, BAR, CHART = 960, 26, 220
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 2em } svg { width: 100%; height: auto }
pre { overflow-x: auto; background: #f6f7f8; padding: 1em; font-size: 12px; line-height: 1.45 }
.key { display: inline-block; margin-right: 1.2em; white-space: nowrap }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: .4em }
"""


def page(title: str, measured_on: str, charts: Sequence[tuple[str, str]], table: str) -> str:
    """HTML, UTF-8. charts: titles, and what `shares` and `time_line` draw. table: the result as text, shown below."""
    drawn = "".join(f"<h2>{html.escape(name)}</h2>{svg}" for name, svg in charts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(measured_on)}</p>"
        f"{drawn}<pre>{html.escape(table)}</pre></html>\n"
    )


def shares(parts: Mapping[str, float]) -> str:
    """One bar, the whole width: each part as large as its share of the sum; and what their colours mean."""
    drawn, x, whole = [], 0.0, sum(parts.values()) or 1.0
    for name, part in parts.items():
        drawn.append(_rectangle(name, x, 0, part / whole * WIDTH, BAR, f"{part / whole:.1%}"))
        x += part / whole * WIDTH
    keys = "".join(f'<span class="key"><i style="background:{_colour(name)}"></i>{name}</span>' for name in parts)
    return f'<svg viewBox="0 0 {WIDTH} {BAR}" role="img">{"".join(drawn)}</svg><p>{keys}</p>'


def time_line(seconds: Mapping[str, Sequence[float]]) -> str:
    """A column for each step: what it consists of on top of each other, under a scale that reaches to the longest."""
    steps = list(zip(*seconds.values(), strict=True))
    longest = max(map(sum, steps))
    width, parts = WIDTH / len(steps), []
    for i, step in enumerate(steps):
        y = float(CHART)
        for name, part in zip(seconds, step, strict=True):
            height = part / longest * CHART
            y -= height
            parts.append(_rectangle(name, i * width, y, 0.9 * width, height, f"step {i}: {1e3 * part:.2f} ms"))
    scale = (
        f'<line x1="0" x2="{WIDTH}" y1="0.5" y2="0.5" stroke="#ccc"/>'
        f'<text x="{WIDTH}" y="14" text-anchor="end" font-size="12">{1e3 * longest:.1f} ms</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {CHART}" role="img">{"".join(parts)}{scale}</svg>'


def _colour(name: str) -> str:
    return COLOURS.get(name, "#2471a3")


def _rectangle(name: str, x: float, y: float, width: float, height: float, text: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{_colour(name)}">'
        f"<title>{name}, {text}</title></rect>"
    )
