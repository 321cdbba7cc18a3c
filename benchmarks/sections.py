"""Run measurements in separate processes with time limits, and record failures as results.

A section is a process, so a CUDA error, exhausted memory, a crash or a hang does not affect the next section.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vla_finetuning.files import read_json, write_json
from vla_finetuning.terminal import print_safe

TAIL = 4000  # characters of a failed process's output to keep
# Time that a process needs to start; with less time left, no section starts.
SHORTEST_S = 2.0


class Results:
    """Measurements by name, each written to a file when it is done. One process writes at a time.

    Args:
        path: file of results, JSON.
        ends: deadline by `time.monotonic`, which all processes of a machine share.
    """

    def __init__(self, path: Path, ends: float):
        self.path, self._ends = path, ends

    @property
    def entries(self) -> dict[str, Any]:
        return read_json(self.path)

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def take(self, name: str, about_s: float, measure: Callable[[], Any]) -> Any:
        """Measure, and write the result or the error; skip the measurement if less than `about_s` is left."""
        if self.left_s < about_s:
            self.leave_out(name, about_s)
            return None
        started = time.monotonic()
        try:
            entry: dict[str, Any] = {"result": measure()}
        except Exception as error:
            entry = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        self.write(name, {**entry, "seconds": time.monotonic() - started})
        gc.collect()
        return entry.get("result")

    def leave_out(self, name: str, about_s: float) -> None:
        self.write(name, {"left_out": f"takes about {about_s:g} s, and {max(self.left_s, 0):.0f} s are left"})

    def write(self, name: str, entry: dict[str, Any]) -> None:
        write_json(self.path, {**self.entries, name: entry})
        summary = entry.get("error") or entry.get("left_out") or json.dumps(entry["result"])
        print_safe(f"{name}: {summary[:300]}")


@dataclass(frozen=True)
class Section:
    """A measurement in a process of its own. `measure` must be picklable.

    The section starts only if `about_s` seconds are left, and is killed after `limit_s` seconds.
    """

    name: str
    measure: Callable[[Results], None]
    about_s: float
    limit_s: float


def run_sections(sections: Sequence[Section], path: Path, minutes: float) -> dict[str, Any]:
    """Run sections in order within `minutes`; return the content of the file.

    A section that ends early has an entry with its exit status and the end of its output.
    """
    results = Results(path, time.monotonic() + 60 * minutes)
    write_json(path, {})
    for section in sections:
        if results.left_s < max(section.about_s, SHORTEST_S):
            results.leave_out(section.name, section.about_s)
            continue
        with tempfile.NamedTemporaryFile("r", prefix="section-", errors="replace") as log:
            started, limit_s = time.monotonic(), min(section.limit_s, results.left_s)
            # After this process has queried CUDA devices, forked children could not use them.
            spawned = multiprocessing.get_context("spawn")
            process = spawned.Process(target=_measure, args=(section, path, log.name, limit_s))
            try:
                process.start()
                process.join(limit_s)
                ended = _ended(process.exitcode, limit_s)
            finally:
                _kill(process)
            output = log.read()
        sys.stderr.write(output)
        if ended is not None:
            seconds = time.monotonic() - started
            results.write(section.name, {"error": ended, "traceback": output[-TAIL:], "seconds": seconds})
    return results.entries


def _ended(code: int | None, limit_s: float) -> str | None:
    """Describe how a process ended early; return None if it finished."""
    if code is None:
        return f"TimeoutError: not done after {limit_s:.0f} s"
    if code < 0:
        return f"ChildProcessError: ended by {signal.Signals(-code).name}"
    return f"ChildProcessError: ended with status {code}" if code else None


def _kill(process: BaseProcess) -> None:
    """Kill a process and its descendants."""
    if process.pid is not None and process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not created its process group yet
            process.kill()
        process.join()


def _measure(section: Section, path: Path, log: str, limit_s: float) -> None:
    os.setsid()
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(limit_s - 1, 0.5))  # shows where it hangs
    section.measure(Results(path, time.monotonic() + limit_s))
    faulthandler.cancel_dump_traceback_later()
