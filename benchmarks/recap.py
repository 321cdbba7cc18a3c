"""Learn from failures (RECAP), on demonstrators who go to the wrong bin in 30 % of their episodes.

    make recap

    imitation   vla.py imitates all demonstrations, wrong ones too
    value       value.py learns what frames are worth, by which episodes succeeded, and labels them
    recap       vla.py learns from the same demonstrations with the labels in its prompts, from the same weights and for
                as many steps

Both policies play the same scenes, which neither has seen. Nothing simulates while they train. The same command goes on
where it was broken off. Exit status: 0 done, otherwise that of the program that failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import evaluate
import value
import vla
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.files import write_json
from vla_finetuning.plan.demo import (
    DEMO_CACHE,
    DISOBEDIENT,
    DISOBEDIENT_PAIRS,
    disobeyed,
    prepare_base,
    prepare_disobedient,
)
from vla_finetuning.run import cluster
from vla_finetuning.run.exported import LABELS_NAME
from vla_finetuning.run.folder import FINISHED_NAME
from vla_finetuning.terminal import print_safe, print_safe_text

# Seed of the scenes that are played: in no demonstration.
FIRST_EVALUATED = 1000
NAMES = {"imitation": "imitation of all demonstrations", "recap": "RECAP, prompted positive"}


class Stage(NamedTuple):
    """A program, its flags, and the file that it writes last."""

    name: str
    program: Callable[[list[str]], int]
    flags: dict[str, Any]
    done: Path


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, default=Path("outputs/recap"), help="of all runs")
    arguments.add_argument("--seed", type=int, default=1000, help="of weights, order of rows, and noise")
    arguments.add_argument("--steps", type=int, default=900, help="of each policy")
    arguments.add_argument("--value_steps", type=int, default=600, help="of the value function")
    arguments.add_argument("--eval_episodes", type=int, default=200, help="of each policy")
    return arguments


def stages(options: argparse.Namespace) -> Iterator[Stage]:
    """Yield the stages in their order."""
    folder = options.folder.absolute()
    root = prepare_disobedient(DEMO_CACHE).absolute()
    meta = load_metadata(root)
    data: dict[str, Any] = {"features": meta.features, "tasks": sorted(meta.tasks.values()), "fps": meta.fps}
    base = prepare_base(DEMO_CACHE, **data, labelled=True).absolute()
    wrong = disobeyed(DISOBEDIENT_PAIRS, DISOBEDIENT)
    outcomes = folder / "outcomes.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(outcomes, {str(i): not w for i, w in enumerate(wrong.tolist())})
    shared = {"preset": "demo", "dataset.root": root, "resume": "auto", "seed": options.seed}
    shared |= {"scaling.use_gpu": "false"}
    learns = shared | {"dataset.eval_split": 0, "policy.path": base.absolute(), "steps": options.steps}
    learns |= {"train.noise_draws": 2}
    judges = shared | {"policy.path": folder / "imitation" / "pretrained_model", "outcome.success": f"@{outcomes}"}
    # An advantage over 10 frames: episodes have 7 to 22.
    judges |= {"steps": options.value_steps, "value.horizon": 10, "value.positive": 0.6}
    labels = {"recap.labels": folder / "value" / LABELS_NAME}
    for name, program, flags in (
        ("imitation", vla.main, learns),
        ("value", value.main, judges),
        ("recap", vla.main, learns | labels),
    ):
        yield Stage(name, program, flags | {"output_dir": folder / name}, folder / name / FINISHED_NAME)
    for name, prompt in (("imitation", {}), ("recap", {"policy.advantage": "positive"})):
        played = folder / f"play-{name}"
        plays = {"policy.path": folder / name / "pretrained_model", "output_dir": played, "seed": FIRST_EVALUATED}
        plays |= {"env.type": "two_bins", "env.episode_length": 30, "eval.n_episodes": options.eval_episodes}
        yield Stage(f"play-{name}", evaluate.main, plays | {"eval.videos": 0} | prompt, played / "report.html")


def table(folder: Path) -> str:
    """Return a line for each policy with its success."""
    lines = ["Success on scenes that no policy has seen (95 % interval)"]
    for name, label in NAMES.items():
        lines.append(f"  {label:34}{share(score(read_evaluation(folder / f'play-{name}')[1]))}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    cluster.connect()
    for stage in stages(options):
        if stage.done.is_file():
            continue
        print_safe(f"Stage        {stage.name}")
        if status := stage.program([f"--{flag}={value}" for flag, value in stage.flags.items()]):
            return status
    print_safe_text(table(options.folder))
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import recap as module

    sys.exit(module.main())
