"""Run a program: parse its flags, check them before Ray starts, work on a cluster, return an exit status."""

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
from vla_finetuning.options.command_line import Program
from vla_finetuning.plan.preflight import Examined, examine
from vla_finetuning.plan.record import record_run
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.run.exported import POLICY_DIR, REPORT_NAME, policy_problem
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import empty, finish, own_folder, prepare_folder
from vla_finetuning.run.job import Job
from vla_finetuning.run.push import push_all
from vla_finetuning.terminal import escape_warnings, print_safe, print_safe_error

# Joins or starts a cluster, works on it and returns the exit status.
Work = Callable[[], int]


def run_program(argv: Sequence[str] | None, prepare: Callable[[list[str], ExitStack], Work | None]) -> int:
    """Run a program, and print errors as messages.

    `prepare` does all checks that need no Ray, and returns the work; None, as for a dry run, if there is none. Contexts
    that it enters into the stack are closed when the program ends. Return the exit status: 0 done, 1 the work failed, 2
    it could not start, or another status of the work.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    escape_warnings()
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
    except StorageError as error:  # from the upload of a run's last files when the stack is closed
        print_safe_error(f"not all files are in the bucket: {error}")
        return 1


# ---- programs that train ------------------------------------------------------------------------------------------


class TrainingRun(Protocol):
    """A resolved run of `vla.py`, `grpo.py` or `value.py`."""

    @property
    def config(self) -> Any: ...
    @property
    def job(self) -> Job: ...


def run_training[R: TrainingRun](
    program: Program,
    argv: Sequence[str] | None,
    examined: Examined | None,
    resolve: Callable[[Examined, ExitStack], R],
    plan: Callable[[R], Work],
) -> int:
    """Run a program that trains: resolve the run, lock its folder, print its plan, work. Return the exit status.

    `examined` is the result of `examine` for the same command line; None examines it here.
    """

    def prepare(argv: list[str], stack: ExitStack) -> Work | None:
        checked = examined or examine(program.parse(argv))
        if checked.finished:
            return None
        require_tracker(checked.config.track)
        run = resolve(checked, stack)
        config, job = run.config, run.job
        stack.enter_context(own_folder(config, job.start, job.steps, job.disk_bytes))
        work = plan(run)
        if config.dry_run:
            return None
        prepare_folder(config)
        try:
            stack.enter_context(track(job.output_dir, config.track, config.track_project))
        except BaseException:
            with contextlib.suppress(OSError):  # of a bucket without the right to delete
                if not config.resume:  # the same command may start again
                    empty(job.output_dir)
            raise
        return work

    return run_program(argv, prepare)


@contextlib.contextmanager
def reported(
    job: Job, policy: PolicySpec, plan: str, rows: Rows | None = None, repo_id: str | None = None
) -> Iterator[None]:
    """Write `run.json`, and update the run's report while the block runs. Args: as `record_run`."""
    from vla_finetuning.report.page import keep_report  # imported here: training processes need no matplotlib

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
    """Check the exported policies of `robots`, push them, and mark the run as finished; return the exit status.

    `weights` says which weights were exported. Raises FileNotFoundError if a policy is missing or damaged.
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
