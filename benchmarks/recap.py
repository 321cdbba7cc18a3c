"""Compare RECAP with imitation, on demonstrators who go to the wrong bin in 30 % of their episodes.

    make recap

    imitation   vla.py imitates all demonstrations, including the wrong ones
    value       value.py learns values from the episodes' outcomes, and labels frames
    recap       vla.py learns from the same demonstrations, weights and steps, with the labels in its prompts

Both policies play the same unseen scenes. Repeat the command to resume. Exit status: as the first program that fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import evaluate
import value
import vla
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.files import read_json, write_json
from vla_finetuning.plan import demo
from vla_finetuning.run import cluster
from vla_finetuning.run.exported import LABELS_NAME
from vla_finetuning.run.folder import FINISHED_NAME
from vla_finetuning.terminal import print_safe, print_safe_text

NAMES = {"imitation": "imitation of all demonstrations", "recap": "RECAP, prompted positive"}
# Seed of the evaluated scenes, which no demonstration contains.
FIRST_EVALUATED = 1000
# Default and description of each flag.
SETTINGS = {
    "seed": (1000, "of weights, order of rows, and noise"),
    "steps": (900, "of each policy"),
    "value_steps": (600, "of the value function"),
    "eval_episodes": (200, "of each policy"),
}


class Stage(NamedTuple):
    """A program, its flags, and the file or folder that it writes last (`done`)."""

    program: Callable[[list[str]], int]
    flags: Mapping[str, Any]
    done: Path


def stages(options: argparse.Namespace) -> Iterator[Stage]:
    folder, outcomes = options.folder, options.folder / "outcomes.json"
    root = demo.prepare_disobedient(demo.DEMO_CACHE).absolute()
    meta = load_metadata(root)
    data: dict[str, Any] = {"features": meta.features, "tasks": sorted(meta.tasks.values()), "fps": meta.fps}
    base = demo.prepare_base(demo.DEMO_CACHE, **data, labelled=True).absolute()
    wrong = demo.disobeyed(demo.DISOBEDIENT_PAIRS, demo.DISOBEDIENT).tolist()
    write_json(outcomes, {str(episode): not is_wrong for episode, is_wrong in enumerate(wrong)})
    shared = {"preset": "demo", "dataset.root": root, "resume": "auto", "seed": options.seed}
    shared |= {"scaling.use_gpu": "false"}
    learns = shared | {"dataset.eval_split": 0, "policy.path": base, "steps": options.steps, "train.noise_draws": 2}
    judges = shared | {"policy.path": folder / "imitation" / "pretrained_model", "outcome.success": f"@{outcomes}"}
    # Episodes have 7 to 22 frames.
    judges |= {"steps": options.value_steps, "value.horizon": 10, "value.positive": 0.6}
    labels = {"recap.labels": folder / "value" / LABELS_NAME}
    for name, program, flags in (
        ("imitation", vla.main, learns),
        ("value", value.main, judges),
        ("recap", vla.main, learns | labels),
    ):
        yield Stage(program, flags | {"output_dir": folder / name}, folder / name / FINISHED_NAME)
    plays = {"env.type": "two_bins", "env.episode_length": 30, "eval.n_episodes": options.eval_episodes}
    plays |= {"eval.videos": 0, "seed": FIRST_EVALUATED}
    for name, prompt in (("imitation", {}), ("recap", {"policy.advantage": "positive"})):
        played = folder / f"play-{name}"
        flags = {**plays, **prompt, "policy.path": folder / name / "pretrained_model", "output_dir": played}
        yield Stage(evaluate.main, flags, played / "report.html")


def run_stages(stages: Iterable[Stage]) -> int:
    """Run the stages that are not done; return the exit status of the first failure, else 0."""
    cluster.connect()
    for stage in stages:
        if not stage.done.exists():
            print_safe(f"Stage        {stage.done.parent}")
            if status := stage.program([f"--{flag}={value}" for flag, value in stage.flags.items()]):
                return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the remaining stages, print each policy's success, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/recap"), help="of all runs")
    for name, (default, text) in SETTINGS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    options = parser.parse_args(argv)
    options.folder = options.folder.absolute()
    settings = {name: getattr(options, name) for name in SETTINGS}
    if (earlier := read_json(options.folder / "settings.json") or settings) != settings:
        parser.error(f"{options.folder} is of a run with {earlier}: give the same to go on, or another --folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    write_json(options.folder / "settings.json", settings)
    if status := run_stages(stages(options)):
        return status
    print_safe_text("Success on scenes that no policy has seen (95 % interval)")
    for name, label in NAMES.items():
        print_safe_text(f"  {label:34}{share(score(read_evaluation(options.folder / f'play-{name}')[1]))}")
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import recap as module

    sys.exit(module.main())
