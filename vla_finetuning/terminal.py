"""Print to the terminal and format logs, with control characters escaped.

Names, instructions and paths are untrusted text. Control characters in them could clear the screen, overwrite lines or
reorder text, and so fake a plan. Nothing else in the project prints (`tests/test_terminal.py`).
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


def escaped(text: str) -> str:
    """Escape all characters but printable ones and spaces as in Python: `\\x1b`, `\\n`. Idempotent."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_safe(*lines: str, file: TextIO | None = None) -> None:
    """Print each text as one line, escaped, by default to standard output."""
    for line in lines:
        print(escaped(line), file=file or sys.stdout, flush=True)


def print_safe_text(text: str) -> None:
    """Print a text of several lines, in which untrusted text must already be escaped."""
    print_safe(*text.split("\n"))


def print_safe_error(error: object) -> None:
    """Print an error to standard error, with the lines after its first one indented."""
    print_safe(*_indent_rest(f"error: {error}"), file=sys.stderr)


class LogFormatter(logging.Formatter):
    """Escape records, and indent the lines after a record's first one."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, _indent_rest(super().format(record))))


def escape_warnings() -> None:
    """Escape log records of this process that no handler takes and that Python prints."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter())


def _indent_rest(text: str) -> list[str]:
    first, *rest = text.split("\n")
    return [first, *(f"    {line}" for line in rest)]
