"""Start a program that trains from the command line: help and errors come before seconds of imports."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vla_finetuning.options.command_line import Program, check_command_line
from vla_finetuning.terminal import print_safe, print_safe_error

if TYPE_CHECKING:
    from vla_finetuning.plan.preflight import Examined


def examine_command_line(program: Program) -> Examined:
    """Return the run of this process's command line, its folder and datasets looked at.

    Ends the process where help is asked for, the run cannot start, or nothing is left to do.
    """
    config = check_command_line(program, then="checked")
    from vla_finetuning.plan.preflight import examine  # seconds later than help

    try:
        examined = examine(config)
    except (ValueError, OSError) as error:
        print_safe_error(error)
        sys.exit(2)
    if examined.finished:
        sys.exit(0)
    print_safe(f"Checked      {examined}; loading PyTorch, LeRobot and Ray")
    return examined
