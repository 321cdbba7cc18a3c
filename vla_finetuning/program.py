"""What all programs share: flags, checks that start nothing, work on a cluster, exit statuses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.train import TrainingFailedError

from vla_finetuning.buckets.mirror import address
from vla_finetuning.buckets.store import StorageError
from vla_finetuning.options.command_line import Program, asks_for_help
from vla_finetuning.plan.preflight import Examined, examine
from vla_finetuning.plan.record import record_run
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.run.exported import POLICY_DIR, REPORT_NAME, policy_problem
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import finish, own_folder, prepare_folder
from vla_finetuning.run.job import Job
from vla_finetuning.run.push import push_all
from vla_finetuning.terminal import escape_warnings, print_safe, print_safe_error, print_safe_text

# Does what was prepared, on a cluster that it joins or starts, and returns the exit status.
Work = Callable[[], int]


def run_program(
    program: Program, argv: Sequence[str] | None, prepare: Callable[[list[str], ExitStack], Work | None]
) -> int:
    """Run a program, and report what goes wrong as a message.

    Args:
        argv: the command line; the process's own when None.
        prepare: checks everything that can be checked before Ray starts, and returns the work; None when there is none
            (`--dry_run`). What it enters into the stack is left when the program ends.
    Returns:
        The exit status: 0 done, 1 the work failed, 2 it could not start; others as the work says.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    escape_warnings()
    if asks_for_help(argv):
        print_safe_text(program.help())
        return 0
    try:
        with ExitStack() as stack:
            try:
                work = prepare(argv, stack)
            except (ValueError, OSError) as error:
                print_safe_error(error)
                return 2
            if work is None:
                return 0
            if not ray.is_initialized():
                stack.callback(ray.shutdown)
            try:
                return work()
            except (TrainingFailedError, RayError, RuntimeError, ValueError, OSError) as error:
                print_safe_error(root_cause(error))
                return 1
    except StorageError as error:  # the last files of a run in a bucket
        print_safe_error(f"not all files are in the bucket: {error}")
        return 1


# ---- programs that train ------------------------------------------------------------------------------------------


class TrainingRun(Protocol):
    """What a program that trains decided from its options: `vla.py`'s, `grpo.py`'s, `value.py`'s."""

    @property
    def config(self) -> Any: ...
    @property
    def job(self) -> Job: ...


def run_training[R: TrainingRun](
    program: Program,
    argv: Sequence[str] | None,
    examined: Examined | None,
    resolve: Callable[[Examined, ExitStack], R | None],
    plan: Callable[[R, Examined], Work],
) -> int:
    """Run a program that trains: resolve the run, take its folder, print its plan, do its work.

    Args:
        examined: of the same command line, where it was done before.
        resolve: decides what the run does; None where a dry run cannot say more than `resolve` printed.
        plan: prints the plan, checks what can be checked before Ray starts, and returns the work.
    Returns:
        The exit status, as `run_program`.
    """

    def prepare(argv: list[str], stack: ExitStack) -> Work | None:
        checked = examined or examine(program.parse(argv))
        if checked.finished:
            return None
        require_tracker(checked.config.track)
        run = resolve(checked, stack)
        if run is None:
            return None
        config, job = run.config, run.job
        stack.enter_context(own_folder(config, job.start, job.steps, job.disk_bytes))
        work = plan(run, checked)
        if config.dry_run:
            return None
        prepare_folder(config)
        stack.enter_context(track(job.output_dir, config.track, config.track_project))
        return work

    return run_program(program, argv, prepare)


@contextlib.contextmanager
def reported(
    job: Job, policy: PolicySpec, plan: str, rows: Rows | None = None, repo_id: str | None = None
) -> Iterator[None]:
    """Write `run.json`, and keep the run's report up to date while the block runs. Args: as `record_run`."""
    from vla_finetuning.report.page import keep_report  # not above: training processes need no matplotlib

    record_run(job, policy, plan, ray.cluster_resources(), rows, repo_id)
    with keep_report(job.output_dir):
        yield


def deliver(
    job: Job,
    status: int,
    *,
    robots: Sequence[str] = (),
    weights: str = "",
    repositories: Mapping[str, str] | None = None,
) -> int:
    """Check the exported policy, push it, and note that the run is done.

    Args:
        status: the exit status so far. robots: by whose names policies are exported; none of a single robot.
        weights: which weights were exported, in words. repositories: where each robot's policy is pushed to.
    Returns:
        The exit status.
    Raises:
        FileNotFoundError: the policy is missing or damaged.
    """
    exported = job.output_dir / POLICY_DIR
    if problem := policy_problem(exported, robots):
        raise FileNotFoundError(f"{problem}; --resume exports it again from the last checkpoint")
    print_safe(f"Policy       {address(exported)}{weights}", report_line(job.output_dir))
    status = push_all(job.output_dir, repositories or {}) or status
    if not status:
        finish(job.output_dir, job.steps)
    return status


def report_line(output_dir: Path) -> str:
    """Return the terminal's line on a run's report."""
    path = output_dir / REPORT_NAME
    return f"Report       {address(path)}" if path.is_file() else "Report       not written; a warning above says why"
