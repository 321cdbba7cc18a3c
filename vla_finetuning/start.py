"""Start a program that trains from the command line; help and errors come before imports that take seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vla_finetuning.options.command_line import Program, check_command_line
from vla_finetuning.terminal import print_safe, print_safe_error

if TYPE_CHECKING:
    from vla_finetuning.plan.preflight import Examined


def examine_command_line(program: Program) -> Examined:
    """Parse this process's command line, and check the run's folder and datasets.

    Ends the process after --help, if the run cannot start, or if nothing is left to do.
    """
    config = check_command_line(program, then="checked")
    from vla_finetuning.plan.preflight import examine  # takes seconds

    try:
        examined = examine(config)
    except (ValueError, OSError) as error:
        print_safe_error(error)
        sys.exit(2)
    if examined.finished:
        sys.exit(0)
    print_safe(f"Checked      {examined}; loading PyTorch, LeRobot and Ray")
    return examined
