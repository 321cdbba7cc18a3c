"""Does it help to train robots that differ together? The demo's gantry and arm, in one run and each in its own.

    python -m benchmarks.robots --json benchmarks/results/robots.json

    gantry, arm   vla.py trains each robot's policy on its own demonstrations
    together      vla.py trains one policy on both, for as many steps, with as many rows of each robot in every step

All start from the same weights (of a seed), and see the same scenes. Every robot then plays --eval_episodes scenes that
no policy has seen, with its own exported policy. Each of --pairs is a size of the datasets: so many pairs of
demonstrations of each robot. The same command goes on where it was broken off. Exit status: 0 done, otherwise that of
the program that failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import evaluate
import vla
from benchmarks import stages
from benchmarks.stages import Stages, score
from vla_finetuning.config import CACHE_DIR
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.demo import DEMO_CHUNK_SIZE, DEMO_PAIRS, ROBOTS, prepare_robots
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import compare, share
from vla_finetuning.policies.tiny import make_tiny_base
from vla_finetuning.run.folder import FINISHED_NAME

FIRST_EVALUATED = 1000
VECTORS = ("observation.state", "action")
Lines = Sequence[Mapping[str, Any]]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("outputs/robots"), help="of everything but the result")
    made.add_argument("--json", type=Path, help="where the result goes")
    made.add_argument("--seeds", default="1000,1001,1002,1003,1004", help="of weights, order of rows, and noise")
    made.add_argument("--pairs", default=f"{DEMO_PAIRS},4", help="of demonstrations, of each robot")
    made.add_argument("--steps", type=int, default=250, help="of each run")
    made.add_argument("--batch_size", type=int, default=32, help="rows of each robot in a step")
    made.add_argument("--eval_episodes", type=int, default=60, help="of each policy and robot")
    made.add_argument("--alone", action="store_true", help="leave out the runs on both robots")
    return made


class Cell(Stages):
    """The runs of one size of datasets and one seed, in their folder; each skips what is done."""

    def __init__(self, options: argparse.Namespace, pairs: int, seed: int) -> None:
        super().__init__(options.folder / f"{pairs}-{seed}", f"{pairs} pairs, seed {seed}:")
        self.options, self.pairs, self.seed = options, pairs, seed
        self.mixture = prepare_robots(CACHE_DIR / "demo", pairs)
        self.roots = {of["robot"]: root for root, of in self.mixture.items()}

    def run(self) -> dict[str, Any]:
        """All runs and evaluations; how each robot fared, alone and together."""
        for name, root in self.roots.items():
            self.play(name, name, self.policy(name, {"dataset.root": root}, self.options.batch_size))
        if not self.options.alone:
            mixed = {"dataset.mixture": json.dumps(self.mixture)}
            exported = self.policy("together", mixed, self.options.batch_size * len(self.roots))
            for name in self.roots:
                self.play("together", name, exported / name)
        return {
            "pairs": self.pairs,
            "seed": self.seed,
            "robots": {name: self.found(name) for name in self.roots},
            "seconds": self.seconds,
        }

    def policy(self, name: str, data: Mapping[str, Any], batch_size: int) -> Path:
        """A policy that `vla.py` trains; where it is exported."""
        folder = self.folder / name
        options = {
            "preset": "demo",
            **data,
            "dataset.eval_split": 0,
            "dataset.frame_cache": "auto",
            "policy.path": self.base(name),
            "output_dir": folder,
            "resume": "auto",
            "seed": self.seed,
            "steps": self.options.steps,
            "batch_size": batch_size,
            "scaling.num_workers": 1,
            "scaling.use_gpu": "false",
        }
        self.call(name, vla.main, options, done=folder / FINISHED_NAME)
        return folder / "pretrained_model"

    def base(self, name: str) -> Path:
        """The policy before training, for a robot or for both: the same weights, whose shapes no robot changes."""
        folder = self.folder / f"base-{name}"
        if not folder.exists():
            metas = [load_metadata(self.roots[name])] if name in self.roots else list(map(load_metadata, self.mixture))
            widest = max(metas, key=lambda meta: meta.features["action"].shape)
            make_tiny_base(
                folder,
                features={**metas[0].features, **{key: widest.features[key] for key in VECTORS}},
                tasks=sorted(metas[0].tasks.values()),
                stats=None,  # the run brings each robot's
                fps=metas[0].fps,
                chunk_size=DEMO_CHUNK_SIZE,
                seed=self.seed,
            )
        return folder

    def play(self, run: str, robot: str, policy: Path) -> None:
        """How often a robot succeeds with a policy, in scenes that no policy has seen."""
        folder = self.played(run, robot)
        options = {
            "policy.path": policy,
            "env.type": ROBOTS[robot].env_type,
            "eval.n_episodes": self.options.eval_episodes,
            "eval.videos": 0,
            "seed": FIRST_EVALUATED,
            "output_dir": folder,
        }
        self.call(folder.name, evaluate.main, options, done=folder / "report.html")

    def played(self, run: str, robot: str) -> Path:
        """Where a robot's evaluation with a run's policy is."""
        return self.folder / (f"play-{robot}" if run == robot else f"play-{robot}-{run}")

    def lines(self, run: str, robot: str) -> Lines:
        """The episodes that it played there."""
        return read_evaluation(self.played(run, robot))[1]

    def found(self, robot: str) -> dict[str, Any]:
        """A robot's successes, alone and together."""
        runs = {"alone": robot} if self.options.alone else {"alone": robot, "together": "together"}
        return {said: score(self.lines(run, robot)) for said, run in runs.items()}


def pooled(cells: Sequence[Cell]) -> dict[str, Any]:
    """Of cells that differ in nothing but the seed: all episodes of a robot together, and the paired comparison.

    Episodes of one seed share their policy, so intervals and test are of these policies, not of all seeds there are;
    `by_seed` has each seed's share of successes.
    """
    found: dict[str, Any] = {}
    for robot in ROBOTS:
        alone, together = ([cell.lines(run, robot) for cell in cells] for run in (robot, "together"))
        compared = compare(*([line for lines in of for line in lines] for of in (alone, together)))
        estimate, low, high = compared.difference
        found[robot] = {
            "alone": score([line for lines in alone for line in lines]),
            "together": score([line for lines in together for line in lines]),
            "together_minus_alone": {
                **asdict(compared),
                **{"difference": estimate, "interval": [low, high], "p_value": compared.p_value},
                "verdict": compared.verdict.replace("A succeeds", "alone succeeds").replace("B succ", "together succ"),
            },
            "by_seed": {
                str(cell.seed): [round(score(of)["successes"] / max(1, score(of)["episodes"]), 3) for of in pair]
                for cell, *pair in zip(cells, alone, together, strict=True)
            },
        }
    return found


def table(found: Mapping[str, Any]) -> str:
    """Success, a line for each size, seed, robot and kind of run; and of all seeds, whether it differs."""
    lines = ["Success on scenes that no policy has seen (95 % interval)"]
    for cell in found["runs"]:
        for robot, runs in cell["robots"].items():
            for run, of in runs.items():
                said = f"  {cell['pairs']:3} pairs  seed {cell['seed']}  {robot:8}{run:10}"
                lines.append(f"{said}{share(of['successes'], of['episodes'])}")
    for pairs, robots in found["all_seeds"].items():
        for robot, of in robots.items():
            for run in ("alone", "together"):
                said = f"  {pairs:>3} pairs  all seeds  {robot:8}{run:10}"
                lines.append(f"{said}{share(of[run]['successes'], of[run]['episodes'])}")
            paired = of["together_minus_alone"]
            low, high = paired["interval"]
            lines.append(
                f"  {pairs:>3} pairs  all seeds  {robot:8}together - alone {100 * paired['difference']:+.1f} points "
                f"({100 * low:+.1f} to {100 * high:+.1f}), p = {paired['p_value']:.2g}: {paired['verdict']}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    sizes, seeds = ([int(given) for given in text.split(",")] for text in (options.pairs, options.seeds))
    cells = [Cell(options, pairs, seed) for seed in seeds for pairs in sizes]

    def work() -> dict[str, Any]:
        runs = [cell.run() for cell in cells]
        by_size = {} if options.alone else {pairs: [cell for cell in cells if cell.pairs == pairs] for pairs in sizes}
        return {"runs": runs, "all_seeds": {str(pairs): pooled(of) for pairs, of in by_size.items()}}

    return stages.run(options, work, table)


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import robots as module

    sys.exit(module.main())
