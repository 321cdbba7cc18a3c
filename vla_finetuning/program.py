"""What all programs share: flags, checks that start nothing, work on a cluster, exit statuses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import ray
from ray.exceptions import RayError
from ray.train import TrainingFailedError

from vla_finetuning.options.command_line import Program, asks_for_help
from vla_finetuning.run.failures import root_cause
from vla_finetuning.store import StorageError
from vla_finetuning.terminal import escape_warnings, print_safe_error, print_safe_text

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
        with ExitStack() as held:
            try:
                work = prepare(argv, held)
            except (ValueError, OSError) as error:
                print_safe_error(error)
                return 2
            if work is None:
                return 0
            if not ray.is_initialized():
                held.callback(ray.shutdown)
            try:
                return work()
            except (TrainingFailedError, RayError, RuntimeError, ValueError, OSError) as error:
                print_safe_error(root_cause(error))
                return 1
    except StorageError as error:  # the last files of a run in a bucket
        print_safe_error(f"not all files are in the bucket: {error}")
        return 1
