"""Run a diagnostic tool, from its command line to the result as text, JSON and a page."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import ray
import torch
from ray.data import ExecutionOptions
from ray.exceptions import RayError
from ray.train import TrainingFailedError
from torch import Tensor

import vla
from diagnostics.report import Record, Report, page
from util import UNWATCHED, Batch, Clock, NumpyToTorchCollate, TrainableOptimizer
from vla_finetuning.buckets.mirror import address, as_path, pull, push, remove
from vla_finetuning.options.command_line import VLA, parse_args
from vla_finetuning.plan.resolve import Run, resolve, with_config
from vla_finetuning.plan.statistics import with_placeholders
from vla_finetuning.run import cluster
from vla_finetuning.run.failures import root_cause
from vla_finetuning.terminal import escape_warnings, print_safe, print_safe_error, print_safe_text
from vla_finetuning.training.feed import Collate, input_transforms, training_transforms
from vla_finetuning.training.model import make_prepare
from vla_finetuning.training.stream import RankSchedule


class Result(NamedTuple):
    """A tool's result: report for scripts, table as text, charts (title, SVG) for the page, exit status."""

    report: Report
    table: str
    charts: Sequence[tuple[str, str]] = ()
    status: int = 0


def run_tool(
    argv: Sequence[str] | None = None,
    *,
    doc: str | None,
    parse_options: Callable[[Sequence[str]], tuple[Namespace, list[str]]],
    prepare: Callable[[Run, Namespace], Callable[[], Result]],
) -> int:
    """Parse the command line, run the tool, and print and write its result.

    Args:
        parse_options: function that returns the tool's own options, with the paths `json` and `html`, and other flags.
        prepare: function that checks a resolved run and returns the measurement to call.
    Returns:
        The result's exit status; 1 if the measurement failed, 2 if it could not start.
    """
    argv = sys.argv[1:] if argv is None else argv
    escape_warnings()
    try:
        options, rest = parse_options(argv)
        config = parse_args(rest)
        examine = prepare(resolve(config, cluster.gpus_found(config.scaling, config.preset)), options)
    except Help as flags:
        print_safe_text(f"{doc}\n{flags}\nEach is also an environment variable in capitals.\n\n{VLA.help()}")
        return 0
    except (ValueError, OSError, RayError) as error:
        print_safe_error(root_cause(error))
        return 2
    try:
        result = examine()
        print_safe_text(result.table)
        if options.json:
            result.report.write(options.json)
            print_safe(f"written to {options.json}")
        if options.html:
            title = f"{result.report.tool}: {doc.splitlines()[0] if doc else ''}"
            options.html.parent.mkdir(parents=True, exist_ok=True)
            options.html.write_text(page(title, result.report.environment.line(), result.charts, result.table))
            print_safe(f"page written to {options.html}")
        return result.status
    except (TrainingFailedError, RayError, ValueError, OSError, RuntimeError) as error:
        print_safe_error(root_cause(error))
        return 1


class Help(Exception):
    """Request for help on the command line; the message describes the tool's own flags."""


class Options(argparse.ArgumentParser):
    """Parser of a tool's own flags, which leaves others to `vla.py` and raises ValueError for mistakes.

    Every tool has `--html PATH` (PROFILE_HTML in the environment) and `--json PATH`, with the longer name `json`.
    """

    def __init__(self, json: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
        self.add(json, Path, None, "the result for scripts", "--json", dest="json")
        self.add("profile_html", Path, None, "the result as a page", "--html", dest="html")

    def add(self, name: str, kind: Callable[[str], Any], default: Any, help: str, *aliases: str, **more: Any) -> None:
        """Add `--name`, with NAME in the environment as its default. A bare flag of kind `truth` means true."""
        if in_environment := os.environ.get(name.upper()):
            try:
                default = kind(in_environment)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise ValueError(f"{name.upper()}={in_environment!r} in the environment: {error}") from error
        more |= {"nargs": "?", "const": True} if kind is truth else {}
        metavar = name.rsplit("_")[-1]
        self.add_argument(f"--{name}", *aliases, type=kind, default=default, help=help, metavar=metavar, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if {"--help", "-h"} & set(args):
            raise Help(self.format_help())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def truth(text: str) -> bool:
    if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return text.lower() in ("1", "true", "yes")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return int(text)


@contextlib.contextmanager
def scratch_run(run: Run) -> Iterator[Run]:
    """Yield the run with a temporary folder beside its own, on the same shared disk or bucket.

    The run starts from the beginning, with its largest number of workers, and fails at the first failure. Ray is shut
    down afterwards if the block started it.
    """
    own, had_ray = run.job.output_dir, ray.is_initialized()
    beside = address(own).rpartition("/")[0]
    if beside.endswith(":/"):  # the run's folder is a whole bucket
        beside = address(own)
    folder = as_path(f"{beside}/{own.name}-scratch-{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    scaling = replace(run.config.scaling, min_workers=None, max_failures=0)
    config = replace(run.config, output_dir=address(folder), resume=False, eval_steps=0, scaling=scaling)
    try:
        yield with_config(run, config)
    finally:
        remove(folder)
        if not had_ray:
            ray.shutdown()


def write_record(run: Run, rank: int, record: Record) -> None:
    """Write a worker's record as JSON for `run_workers`."""
    (run.job.output_dir / f"rank-{rank}.json").write_text(record.model_dump_json())
    push(run.job.output_dir)


def run_workers[R: Record](
    run: Run, data_options: ExecutionOptions, kind: type[R], loop: Callable[[dict[str, Any]], None], **options: Any
) -> list[R]:
    """Run `loop` in every worker of a run; return the records of type `kind` that they wrote.

    `options` go to `vla.make_trainer`, which passes unknown ones to `loop`.
    """
    vla.make_trainer(run, data_options, loop, **options).fit()
    pull(run.job.output_dir)
    files = (run.job.output_dir / f"rank-{rank}.json" for rank in range(run.config.scaling.num_workers))
    return [kind.model_validate_json(file.read_bytes()) for file in files]


def with_stub_stats(run: Run) -> Run:
    """Replace statistics that need a pass over the data by placeholders."""
    robots = [replace(with_placeholders(robot, run.rows.metas), missing_stats={}) for robot in run.robots]
    return replace(run, policy=replace(run.policy, robots=tuple(robots)))


def host_batches(run: Run, schedule: RankSchedule, batches: int) -> Iterator[Batch]:
    """Read and prepare a rank's first batches in this process, as in training."""
    rows = run.rows
    prepare, source = make_prepare(run.policy, rows), rows.source()
    transforms = [*input_transforms(rows, run.policy), *training_transforms(run)]
    collate = Collate(transforms, NumpyToTorchCollate(run.job.use_gpu))
    for micro in range(batches):
        for batch in source.read_rows(schedule.rows(micro).tolist(), run.config.batch_size):
            yield collate(prepare(batch))


def free_memory(device: torch.device) -> None:
    """Free unreferenced memory, and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak bytes in use since `free_memory`; None without CUDA."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


@dataclass
class NoOptimizer(TrainableOptimizer):
    """Optimizer that changes no parameter and allocates no state."""

    @classmethod
    def of(cls, optimizer: TrainableOptimizer) -> Self:
        return cls(**{field.name: getattr(optimizer, field.name) for field in fields(TrainableOptimizer)})

    def step(self, number: int, clock: Clock = UNWATCHED) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros((), device=self.params[0].device)
        return nothing, nothing
