"""Does a policy learn Meta-World from its experts? Several tasks at once, distinguished by language, in closed loop.

    make metaworld
    python -m benchmarks.metaworld --folder outputs/metaworld --json benchmarks/results/metaworld.json

    record      scripted experts play --episodes of each task (record.py)
    train       vla.py trains a tiny PI0.5 from random weights on all of them together, language with it
    evaluate    --eval_episodes of each task from initial states that no expert has begun in, by evaluate.py's engine:
                before training, trained, and trained but given another task's instruction

Where tasks have several degrees of difficulty, their success is averaged as RLinf reports MT50: over the degrees, each
of which counts alike. RLinf ends episodes after 100 steps: success within as many is given beside that of the episode.

The same command goes on where it was broken off: what is recorded stays, training goes on at its last checkpoint (by
Ctrl-C or SIGTERM it takes one; timeout needs --foreground, for it signals Ray's processes too), and of the evaluation
only what is not played yet is played. --help lists sizes and budgets. Exit status: 0 done, 1 it failed, 2 it could not
start, 3 broken off; of training, as vla.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import record
import vla
from diagnostics.report import Environment
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs.configs import check_drawn, drawn_for, env_config, metaworld_tasks, task_makers
from vla_finetuning.evaluation.episodes import Book, read_evaluation
from vla_finetuning.evaluation.intervals import share, wilson
from vla_finetuning.evaluation.open_loop import other_instructions
from vla_finetuning.evaluation.trial import score_rows
from vla_finetuning.files import read_json, read_lines, write_json
from vla_finetuning.options.environment import ENVIRONMENT_NAME, EvalOptions
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.policies.tiny import make_tiny_base
from vla_finetuning.rollouts.episodes import Condition, episode_list
from vla_finetuning.rollouts.player import PolicySource, check_fits
from vla_finetuning.rollouts.scheduler import play
from vla_finetuning.run import cluster
from vla_finetuning.run.folder import EVALUATION_NAME, METRICS_NAME, RUN_NAME
from vla_finetuning.terminal import tell, tell_error, tell_text

# Far from each other: initial states that are evaluated are in no demonstration.
FIRST_RECORDED, FIRST_EVALUATED = 100_000, 1000
LABELS = {"untrained": "before training", "trained": "trained", "other_instruction": "trained, with another task"}
PACKAGES = ("metaworld", "mujoco")
# Of an episode, in RLinf's configurations of Meta-World's 50 tasks.
RLINF_STEPS = 100


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("outputs/metaworld"), help="of everything but the result")
    made.add_argument("--json", type=Path, help="where the result goes")
    made.add_argument("--seed", type=int, default=1, help="of initial weights, order of rows, and noise")
    made.add_argument("--tasks", default="reach-v3,push-v3,drawer-open-v3", help="at least two")
    made.add_argument("--episodes", type=int, default=120, help="recorded, of each task")
    made.add_argument("--image_size", type=int, default=112, help="pixels of a frame's side, and of what PI0.5 sees")
    made.add_argument("--patch_size", type=int, default=14, help="of PI0.5's vision")
    made.add_argument("--chunk_size", type=int, default=20, help="actions that PI0.5 predicts")
    made.add_argument("--n_action_steps", type=int, default=10, help="actions of them that are executed")
    made.add_argument("--steps", type=int, default=1300, help="of training")
    made.add_argument("--batch_size", type=int, default=16, help="rows, of each of two workers")
    made.add_argument("--noise_draws", type=int, default=4, help="per row")
    made.add_argument("--lr", type=float, default=1e-3, help="at its peak")
    made.add_argument("--eval_episodes", type=int, default=50, help="of each task and condition")
    made.add_argument("--episode_length", type=int, default=250, help="steps after which an episode has failed")
    return made


class Benchmark:
    """One run of it, in its folder.

    Raises:
        ValueError: Meta-World is not installed or has no such task, or the folder is of another run.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.settings = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
        self.folder: Path = options.folder.absolute()
        self.options = options
        size = options.image_size
        self.drawn = {"task": options.tasks, "image_size": f"[{size},{size}]", "render_quality": "fast"}
        flags = self.drawn | {"episode_length": options.episode_length}
        self.env = env_config("metaworld", [f"--{name}={value}" for name, value in flags.items()])
        self.makers = task_makers(self.env)
        if len(self.makers) < 2:
            raise ValueError(f"--tasks={options.tasks}: name at least two, so that language has something to tell")
        found = read_json(self.folder / "settings.json")
        if found and found != self.settings:
            differ = [name for name in self.settings if found.get(name) != self.settings[name]]
            raise ValueError(
                f"{self.folder} is of a run with other {', '.join(f'--{name}={found.get(name)}' for name in differ)}: "
                "give the same to go on with it, or name another --folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "settings.json", self.settings)

    # ---- the three stages; each skips what is done ----------------------------------------------------------------

    def record(self) -> int:
        root = self.folder / "dataset"
        if root.exists():
            return 0
        flags = {"env.type": "metaworld", **{f"env.{name}": value for name, value in self.drawn.items()}}
        flags |= {"episodes": self.options.episodes, "seed": FIRST_RECORDED, "root": root}
        with self._clocked("record"):
            return record.main([f"--{name}={value}" for name, value in flags.items()])

    def base(self) -> Path:
        """The policy before training: a tiny PI0.5 of random weights for the dataset."""
        folder = self.folder / "base"
        if not folder.exists():
            o, meta = self.options, load_metadata(self.folder / "dataset")
            make_tiny_base(
                folder,
                features=meta.features,
                tasks=sorted(meta.tasks.values()),
                stats={key: meta.stats[key] for key in ("observation.state", "action")},
                fps=meta.fps,
                chunk_size=o.chunk_size,
                seed=o.seed,
                image_resolution=(o.image_size, o.image_size),
                patch_size=o.patch_size,
            )
        return folder

    def train(self) -> int:
        o, folder = self.options, self.folder / "run"
        if (folder / "pretrained_model").exists() and (folder / EVALUATION_NAME).exists():
            return 0
        flags = {
            "preset": "demo",
            "dataset.root": self.folder / "dataset",
            "dataset.eval_split": 0.05,
            "policy.path": self.base(),
            "policy.n_action_steps": o.n_action_steps,
            "output_dir": folder,
            "resume": "auto",
            "seed": o.seed,
            "steps": o.steps,
            "batch_size": o.batch_size,
            "lr": o.lr,
            "train.noise_draws": o.noise_draws,
            "save_freq": 500,
            "scaling.use_gpu": "false",
        }
        with self._clocked("train"):
            return vla.main([f"--{name}={value}" for name, value in flags.items()])

    def evaluate(self) -> int:
        """Return all conditions at once, on the same initial states and with the same noise."""
        o = self.options
        trained = self.folder / "run" / "pretrained_model"
        check_drawn(drawn_for(trained), self.env, trained)
        sources = {"untrained": self._source(self.base()), "trained": self._source(trained)}
        conditions = {
            "untrained": Condition("untrained"),
            "trained": Condition("trained"),
            "other_instruction": Condition(
                "trained", instructions=other_instructions(load_metadata(self.folder / "dataset").tasks.values())
            ),
        }
        episodes = episode_list(conditions, self.makers, o.eval_episodes, FIRST_EVALUATED)
        book = Book(self.folder / "evaluation", {"settings": self.settings}, episodes)
        left = [episode for episode in episodes if not book.is_done(episode)]

        def playing() -> None:
            play(
                left,
                conditions,
                {name: source.shared() for name, source in sources.items()},
                self.makers,
                EvalOptions(),
                seed=o.seed,
                written=book.write,
            )

        if not left:
            return 0
        tell(f"Playing      {len(left)} episodes")
        with self._clocked("evaluate"):
            cluster.connect()
            playing()
        return 0

    def _source(self, folder: Path) -> PolicySource:
        steps = f"--n_action_steps={self.options.n_action_steps}"
        config = load_policy_config(folder, [steps])
        check_fits(config, self.env, {})
        return PolicySource(folder, config, self.env)

    @contextlib.contextmanager
    def _clocked(self, part: str) -> Iterator[None]:
        """Seconds of a part add up over the starts that it took."""
        path, started = self.folder / "seconds.json", time.monotonic()
        try:
            yield
        finally:
            spent = read_json(path)
            write_json(path, {**spent, part: round(spent.get(part, 0.0) + time.monotonic() - started, 1)})

    # ---- what came out ---------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        _, lines = read_evaluation(self.folder / "evaluation")
        meta = load_metadata(self.folder / "dataset")
        flags = " ".join(f"--{name} {value}" for name, value in self.settings.items())
        return {
            "command": f"python -m benchmarks.metaworld {flags}",
            "settings": self.settings,
            "environment": Environment.here().model_dump(mode="json")
            | {"simulator": {package: importlib.metadata.version(package) for package in PACKAGES}},
            "seconds": read_json(self.folder / "seconds.json"),
            "dataset": {
                "episodes": len(meta.episode_length),
                "frames": int(sum(meta.episode_length)),
                "failed": read_json(self.folder / "dataset" / "meta" / ENVIRONMENT_NAME)["failed"],
            },
            "training": self._training(),
            "success": success(lines),
        }

    def _training(self) -> dict[str, Any]:
        run = self.folder / "run"
        logged = [json.loads(line) for line in read_lines(run / METRICS_NAME)]
        errors = read_json(run / EVALUATION_NAME)
        mean, trained = errors["trained"]["mean_action"]["mse"], errors["trained"]
        open_loop = {
            "untrained": errors["untrained"]["policy"]["mse"] / mean,
            "trained": trained["policy"]["mse"] / mean,
            "other_instruction": trained["other_instruction"]["mse"] / mean,
        }
        by_instruction = {
            task: {"relative": of["policy"]["mse"] / of["mean_action"]["mse"], "mean_absolute": of["policy"]["mae"]}
            for task, of in trained["by_task"].items()
        }
        return {
            "parameters": read_json(run / RUN_NAME)["policy"]["parameters"],
            "samples": logged[-1]["samples"],
            "samples_per_s": round(statistics.median(line["samples_per_s"] for line in logged), 1),
            "loss": {line["step"]: round(line["loss"], 4) for line in logged[:: max(1, len(logged) // 20)]},
            "held_out_open_loop_error": {"relative_to_the_mean_action": open_loop, "by_instruction": by_instruction},
        }


def success(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By condition: of all episodes, by difficulty and by task, and how far off the end was, in metres.

    Where tasks have several degrees of difficulty, `mean_of_degrees` is the mean of their shares, each counted once.
    """
    found: dict[str, Any] = {}
    for condition, label in LABELS.items():
        own = [line for line in lines if line["condition"] == condition]
        found[condition] = {"label": label, "rows": [_with_distance(row, own) for row in score_rows(own)]}
        if len(degrees := _by_difficulty(own)) > 1:
            means = {
                key: statistics.mean(row[key] / row["episodes"] for row in degrees)
                for key in ("successes", "within_100_steps")
            }
            found[condition] |= {"degrees": degrees, "mean_of_degrees": means}
    return found


def _by_difficulty(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each of Meta-World's degrees of which tasks were played to an end."""
    rows = []
    for degree, tasks in metaworld_tasks()[1].items():
        own = [line for line in lines if line["task"] in tasks and line["error"] is None]
        if own:
            # An episode ends when it succeeds.
            successes = sum(line["success_once"] for line in own)
            rows.append(
                {
                    "label": degree,
                    "tasks": len({line["task"] for line in own}),
                    "successes": successes,
                    "episodes": len(own),
                    "interval": wilson(successes, len(own)),
                    "within_100_steps": sum(line["success_once"] and line["steps"] <= RLINF_STEPS for line in own),
                }
            )
    return rows


def _with_distance(row: dict[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """With the median distance at the end of what failed: hand, puck or handle to where it should be."""
    failed = [
        line["info"]["obj_to_target"]
        for line in lines
        if line["task"] == row["label"] and line["error"] is None and not line["success_once"]
    ]
    return row | ({"failures_end_m_away": round(statistics.median(failed), 3)} if failed else {})


def table(found: Mapping[str, Any]) -> str:
    """Success, a line for each condition and task."""
    lines = ["Success on initial states that are in no demonstration (95 % interval)"]
    for of_condition in found.values():
        for row in of_condition["rows"]:
            lines.append(
                f"  {of_condition['label']:28}{row['label']:30}{share(row['successes'], row['episodes'])}"
                + (f"; {row['errors']} more ended in an error" if "errors" in row else "")
            )
        for row in of_condition.get("degrees", ()):
            name = f"{row['label']}, {row['tasks']} tasks"
            lines.append(f"  {of_condition['label']:28}{name:30}{share(row['successes'], row['episodes'])}")
        if means := of_condition.get("mean_of_degrees"):
            both = f"{means['successes']:.1%}, within {RLINF_STEPS} steps {means['within_100_steps']:.1%}"
            lines.append(f"  {of_condition['label']:28}{'mean of degrees':30}{both.replace('%', ' %')}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        benchmark = Benchmark(options)
    except (ValueError, OSError) as error:
        tell_error(error)
        return 2
    for part in (benchmark.record, benchmark.train, benchmark.evaluate):
        if status := part():
            return status
    result = benchmark.result()
    tell_text(table(result["success"]))
    if options.json is not None:
        write_json(options.json, result)
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import metaworld as module

    sys.exit(module.main())
