"""What benchmarks of whole runs share: the project's programs one after the other, each once, and what came of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from diagnostics.report import Environment
from vla_finetuning.evaluation.intervals import wilson
from vla_finetuning.files import read_json, write_json
from vla_finetuning.run import cluster
from vla_finetuning.terminal import tell, tell_text


class Failed(Exception):
    """A program ended with this status."""


class Stages:
    """Programs that work in one folder, where `seconds.json` says what each took.

    Args:
        folder: of what they write; made. label: what they are of, for the line that says which one begins.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder.absolute(), label
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> dict[str, float]:
        """What each stage took, the last time that it ran."""
        return read_json(self.folder / "seconds.json")

    def call(self, name: str, program: Callable[[list[str]], int], flags: Mapping[str, Any], *, done: Path) -> None:
        """Run a program, unless the file that it writes last exists.

        Raises:
            Failed: it ended with another status than 0.
        """
        if done.is_file():
            return
        tell(f"Stage        {self.label} {name}")
        started = time.monotonic()
        if status := program([f"--{flag}={given}" for flag, given in flags.items()]):
            raise Failed(status)
        write_json(self.folder / "seconds.json", {**self.seconds, name: round(time.monotonic() - started, 1)})


def score(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Successes of episodes that were played to their end, with Wilson's 95 % interval."""
    played = [bool(line["success_once"]) for line in lines if line["error"] is None]
    return {"successes": sum(played), "episodes": len(played), "interval": wilson(sum(played), len(played))}


def together(scores: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The episodes of several seeds as one score.

    Episodes of a seed share their policy, so the interval is of these policies, not of all seeds there are.
    """
    found = list(scores)
    successes, episodes = (sum(score[key] for score in found) for key in ("successes", "episodes"))
    return {"successes": successes, "episodes": episodes, "interval": wilson(successes, episodes)}


def run(options: argparse.Namespace, work: Callable[[], dict[str, Any]], table: Callable[[dict[str, Any]], str]) -> int:
    """Do a benchmark's work on a Ray cluster, show its table, and write its result to `options.json`.

    Returns the exit status: 0, or that of the program that failed.
    """
    cluster.connect()
    try:
        found = work()
    except Failed as failed:
        return int(failed.args[0])
    tell_text(table(found))
    if options.json is not None:
        settings = {name: given for name, given in vars(options).items() if name not in ("folder", "json")}
        environment = Environment.here().model_dump(mode="json")
        given = {name: value for name, value in settings.items() if value is not None and value is not False}
        flags = "".join(f" --{name}" if value is True else f" --{name} {value}" for name, value in given.items())
        command = f"python -m benchmarks.{Path(sys.argv[0]).stem}{flags}"
        result = {"command": command, "settings": settings, "environment": environment, **found}
        write_json(options.json, json.loads(json.dumps(result, default=str)))
    return 0
