"""Small files that are read while others write them, and the permissions of what is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Atomically: readers see the old file or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(scratch, path)


def read_json(path: Path) -> dict[str, Any]:
    """What a file of the run's folder holds; nothing when there is none."""
    return json.loads(path.read_text()) if path.is_file() else {}


def read_lines(path: Path) -> list[str]:
    """Whole lines of the file; one that is still being written is left for the next time."""
    if not path.exists():
        return []
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()


def let_others_read(path: Path) -> None:
    """Give a file the permissions that the process's umask gives every other file: those of its folder.

    safetensors makes its files for their owner only (0.8.0, github.com/safetensors/safetensors/issues/782), so that the
    user who drives the robot could not read a policy; this can go when it asks the umask again.
    """
    mode = path.stat().st_mode
    usual = mode | path.parent.stat().st_mode & 0o666
    if usual != mode:  # a network drive with fixed permissions need not be asked
        path.chmod(usual)
