"""Record the starts of a run's worker group.

`OUTPUT_DIR/attempts.jsonl` has a line per start: {"attempt": 1, "resumed_from_step": 10, "world_size": 2}. Records of
an attempt are void for steps after the one that a later attempt resumed from.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path

from vla_finetuning.buckets.mirror import address, pull, push, read_stored
from vla_finetuning.buckets.store import ChangedError
from vla_finetuning.files import append_line, drop_half_line, read_json_lines

ATTEMPTS_NAME = "attempts.jsonl"


def start_attempt(output_dir: Path, resumed_from_step: int, world_size: int) -> int:
    """Append a line to `attempts.jsonl`, and return its number. Raises RuntimeError if another process has added it."""
    path = output_dir / ATTEMPTS_NAME
    pull(path)
    number = len(attempts(output_dir))
    drop_half_line(path)
    line = {"attempt": number, "resumed_from_step": resumed_from_step, "world_size": world_size}
    append_line(path, json.dumps({**line, "claimed_by": uuid.uuid4().hex}))  # no two processes write the same line
    try:
        push(path, only_if_unchanged=True)
    except ChangedError as error:
        raise RuntimeError(f"{address(output_dir)}: another process has taken over this run") from error
    return number


def attempts(output_dir: Path) -> list[dict[str, int]]:
    """Return the lines of `attempts.jsonl`, oldest first."""
    return read_json_lines(output_dir / ATTEMPTS_NAME)


def is_newest(output_dir: Path, attempt: int) -> bool:
    """Return whether `attempt` is the newest. Raises StorageError."""
    with contextlib.suppress(FileNotFoundError):
        return read_stored(output_dir / ATTEMPTS_NAME).count(b"\n") == attempt + 1
    return False


def trained_by(starts: list[dict[str, int]], step: int) -> int:
    """Return the attempt that trained `step`: the newest that began before it."""
    return max((n for n, line in enumerate(starts) if line["resumed_from_step"] < step), default=0)


def resumed_at(starts: list[dict[str, int]], attempt: int) -> int | None:
    """Return the last step of an attempt that is valid: the earliest that a later one resumed from, or None."""
    return min((line["resumed_from_step"] for line in starts[attempt + 1 :]), default=None)
