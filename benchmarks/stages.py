"""Run programs one after the other, skipping finished ones, so that the same command resumes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import evaluate
from vla_finetuning.files import read_json, write_json
from vla_finetuning.run import cluster
from vla_finetuning.terminal import print_safe

# Seed of the evaluated scenes, which no demonstration contains.
FIRST_EVALUATED = 1000


class Stage(NamedTuple):
    """A program, its flags, and the file or folder that it writes last (`done`)."""

    program: Callable[[list[str]], int]
    flags: Mapping[str, Any]
    done: Path


def run_stages(stages: Iterable[Stage]) -> int:
    """Run the stages that are not done; return the exit status of the first failure, else 0."""
    cluster.connect()
    for stage in stages:
        if not stage.done.exists():
            print_safe(f"Stage        {stage.done.parent}")
            if status := stage.program([f"--{flag}={value}" for flag, value in stage.flags.items()]):
                return status
    return 0


def play_two_bins(folder: Path, policy: Path, episodes: int, flags: Mapping[str, Any]) -> Stage:
    """Return the stage that evaluates a policy in two_bins, in the same scenes for all; `flags` are added."""
    flags = {**flags, "policy.path": policy, "output_dir": folder, "seed": FIRST_EVALUATED, "eval.videos": 0}
    flags |= {"env.type": "two_bins", "env.episode_length": 30, "eval.n_episodes": episodes}
    return Stage(evaluate.main, flags, folder / "report.html")


def stages_parser(doc: str | None, folder: str, **numbers: tuple[int, str]) -> argparse.ArgumentParser:
    """Return a parser of --folder and of integer flags, given as (default, help)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(folder), help="of all runs")
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    return parser


def parse_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; exit with status 2 if its folder holds a run with other settings."""
    options = parser.parse_args(argv)
    options.folder = options.folder.absolute()
    path = options.folder / "settings.json"
    settings = {name: value for name, value in vars(options).items() if name not in ("folder", "json", "seeds")}
    if (earlier := read_json(path) or settings) != settings:
        parser.error(f"{options.folder} is of a run with {earlier}: give the same to go on, or another --folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)
    return options
