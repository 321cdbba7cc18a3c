"""What the program shows people, on a terminal and in logs; what a dataset or a policy is called does nothing there.

Names, instructions and paths are a stranger's text. A control character among them could clear the screen, write over a
line or end it and begin another, and one for bidirectional text show it in another order: the user would read a plan
that is not the run's. So nothing else in the project prints (`tests/test_terminal.py`).
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


def escaped(text: str) -> str:
    """A line with everything but printable characters and spaces written as Python writes it: `\\x1b`, `\\n`.

    Twice is as good as once.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_safe(*lines: str, file: TextIO | None = None) -> None:
    """Print lines, each of them one whatever is in it. Standard output by default."""
    for line in lines:
        print(escaped(line), file=file or sys.stdout, flush=True)


def print_safe_text(text: str) -> None:
    """Print a text of several lines, in which untrusted text is escaped already."""
    print_safe(*text.split("\n"))


def print_safe_error(error: object) -> None:
    """Print an error to standard error. What follows its first line, as others' errors may have it, is set apart."""
    print_safe(*_set_apart(f"error: {error}"), file=sys.stderr)


class LogFormatter(logging.Formatter):
    """As `logging.Formatter`, but a record's first line is the only one that begins where lines begin."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, _set_apart(super().format(record))))


def escape_warnings() -> None:
    """Escape what is logged in this process and goes to the terminal because no handler was made for it."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter())


def _set_apart(text: str) -> list[str]:
    first, *rest = text.split("\n")
    return [first, *(f"    {line}" for line in rest)]
