"""Start a program from the command line; help and errors come before imports that take seconds."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NoReturn

from vla_finetuning.options.command_line import Program, asks_for_help
from vla_finetuning.options.job import JobOptions
from vla_finetuning.terminal import escape_warnings, print_safe, print_safe_error, print_safe_text


def launch(program: Program[Any]) -> NoReturn:
    """Check this process's command line, run the program's `main`, and exit with its status.

    Of programs that train, the run's folder and datasets are checked too. The program is imported as a module, because
    Ray pickles functions of `__main__` by value and functions of modules by reference.
    """
    argv = sys.argv[1:]
    escape_warnings()
    if asks_for_help(argv):
        try:
            print_safe_text(program.help())
        except BrokenPipeError:  # the reader, such as `head`, is gone; the flush at exit must not fail either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    arguments: dict[str, Any] = {}
    try:
        if argv[0] != "--compare":  # of evaluate.py, which has no other flag then
            config = program.parse(argv)
            print_safe("Flags        checked")
            if isinstance(config, JobOptions):
                from vla_finetuning.plan.preflight import examine  # takes a second

                arguments["examined"] = examined = examine(config)
                if examined.finished:
                    sys.exit(0)
                print_safe(f"Checked      {examined}")
            print_safe("Loading      PyTorch, LeRobot and Ray")
    except (ValueError, OSError) as error:
        print_safe_error(error)
        sys.exit(2)
    sys.exit(importlib.import_module(program.command.removesuffix(".py")).main(**arguments))
