"""Does a policy learn Meta-World from its experts? Several tasks at once, distinguished by language, in closed loop.

    make metaworld
    python -m benchmarks.metaworld --folder outputs/metaworld --json benchmarks/results/metaworld.json

    record      scripted experts play --episodes of each task (record.py)
    train       vla.py trains a tiny PI0.5 from random weights on all of them together, language with it
    evaluate    --eval_episodes of each task from initial states that no expert has begun in, by evaluate.py's engine:
                before training, trained, and trained but given another task's instruction

Where tasks have several degrees of difficulty, their success is averaged as RLinf reports MT50: over the degrees, each
of which counts alike. RLinf ends episodes after 100 steps: success within as many is given beside that of the episode.

The same command goes on where it was broken off (by Ctrl-C or SIGTERM training takes a checkpoint; timeout needs
--foreground, for it signals Ray's processes too). --help lists sizes and budgets. Exit status: 0 done, 1 it failed,
2 it could not start, 3 broken off; of training, as vla.py's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import record
import vla
from diagnostics.report import Environment
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs.configs import check_drawn, drawn_for, env_config, metaworld_tasks, task_makers
from vla_finetuning.evaluation.episodes import Book, read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.evaluation.open_loop import other_instructions
from vla_finetuning.evaluation.trial import score_rows
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.policies.tiny import make_tiny_base
from vla_finetuning.rollouts.episodes import Condition, episode_list
from vla_finetuning.rollouts.player import PolicySource, check_fits
from vla_finetuning.rollouts.servers import play
from vla_finetuning.run import cluster
from vla_finetuning.run.folder import EVALUATION_NAME
from vla_finetuning.terminal import print_safe, print_safe_error, print_safe_text

# Far from each other: initial states that are evaluated are in no demonstration.
FIRST_RECORDED, FIRST_EVALUATED = 100_000, 1000
LABELS = {"untrained": "before training", "trained": "trained", "other_instruction": "trained, with another task"}
# Of an episode, in RLinf's configurations of Meta-World's 50 tasks.
RLINF_STEPS = 100


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--folder", type=Path, default=Path("outputs/metaworld"), help="of everything but the result"
    )
    arguments.add_argument("--json", type=Path, help="where the result goes")
    arguments.add_argument("--seed", type=int, default=1, help="of initial weights, order of rows, and noise")
    arguments.add_argument("--tasks", default="reach-v3,push-v3,drawer-open-v3", help="at least two")
    arguments.add_argument("--episodes", type=int, default=120, help="recorded, of each task")
    arguments.add_argument(
        "--image_size", type=int, default=112, help="pixels of a frame's side, and of what PI0.5 sees"
    )
    arguments.add_argument("--patch_size", type=int, default=14, help="of PI0.5's vision")
    arguments.add_argument("--chunk_size", type=int, default=20, help="actions that PI0.5 predicts")
    arguments.add_argument("--n_action_steps", type=int, default=10, help="actions of them that are executed")
    arguments.add_argument("--steps", type=int, default=1300, help="of training")
    arguments.add_argument("--batch_size", type=int, default=16, help="rows, of each of two workers")
    arguments.add_argument("--noise_draws", type=int, default=4, help="per row")
    arguments.add_argument("--lr", type=float, default=1e-3, help="at its peak")
    arguments.add_argument("--eval_episodes", type=int, default=50, help="of each task and condition")
    arguments.add_argument("--episode_length", type=int, default=250, help="steps after which an episode has failed")
    return arguments


def run(program: Any, flags: Mapping[str, Any]) -> int:
    return program.main([f"--{name}={value}" for name, value in flags.items()])


def drawn(o: argparse.Namespace) -> dict[str, Any]:
    """Return the environment's options that decide what frames look like."""
    return {"task": o.tasks, "image_size": f"[{o.image_size},{o.image_size}]", "render_quality": "fast"}


def check_settings(o: argparse.Namespace) -> None:
    """Raise ValueError if the folder is of a run with other settings."""
    settings = {name: value for name, value in vars(o).items() if name not in ("folder", "json")}
    earlier = read_json(o.folder / "settings.json") or settings
    if differ := [f"--{name}={earlier.get(name)}" for name in settings if earlier.get(name) != settings[name]]:
        raise ValueError(
            f"{o.folder} is of a run with other {', '.join(differ)}: give the same to go on with it, or name another "
            "--folder"
        )
    o.folder.mkdir(parents=True, exist_ok=True)
    write_json(o.folder / "settings.json", settings)


def train(o: argparse.Namespace) -> int:
    """Record and train; what is done is left alone. Returns the exit status of the program that failed, or 0."""
    root, base, folder = o.folder / "dataset", o.folder / "base", o.folder / "run"
    if not root.exists():
        flags = {"env.type": "metaworld", **{f"env.{name}": value for name, value in drawn(o).items()}}
        if status := run(record, {**flags, "episodes": o.episodes, "seed": FIRST_RECORDED, "root": root}):
            return status
    meta = load_metadata(root)
    if not base.exists():
        make_tiny_base(
            base,
            features=meta.features,
            tasks=sorted(meta.tasks.values()),
            stats={key: meta.stats[key] for key in ("observation.state", "action")},
            fps=meta.fps,
            chunk_size=o.chunk_size,
            seed=o.seed,
            image_resolution=(o.image_size, o.image_size),
            patch_size=o.patch_size,
        )
    if (folder / "pretrained_model").exists() and (folder / EVALUATION_NAME).exists():
        return 0
    flags = {"preset": "demo", "dataset.root": root, "dataset.eval_split": 0.05, "policy.path": base}
    flags |= {"policy.n_action_steps": o.n_action_steps, "output_dir": folder, "resume": "auto", "seed": o.seed}
    flags |= {"steps": o.steps, "batch_size": o.batch_size, "lr": o.lr, "train.noise_draws": o.noise_draws}
    return run(vla, {**flags, "save_freq": 500, "scaling.use_gpu": "false"})


def evaluate(o: argparse.Namespace, env: Any, makers: Mapping[str, Any]) -> None:
    """Play what is not played yet under all conditions: on the same initial states and with the same noise."""
    trained = o.folder / "run" / "pretrained_model"
    check_drawn(drawn_for(trained), env, trained)
    sources = {}
    for name, folder in (("untrained", o.folder / "base"), ("trained", trained)):
        config = load_policy_config(folder, [f"--n_action_steps={o.n_action_steps}"])
        check_fits(config, env, {})
        sources[name] = PolicySource(folder, config, env)
    swapped = other_instructions(load_metadata(o.folder / "dataset").tasks.values())
    conditions = {name: Condition(name) for name in ("untrained", "trained")}
    conditions["other_instruction"] = Condition("trained", instructions=swapped)
    episodes = episode_list(conditions, makers, o.eval_episodes, FIRST_EVALUATED)
    book = Book(o.folder / "evaluation", {}, episodes)
    if remaining := [episode for episode in episodes if not book.is_done(episode)]:
        print_safe(f"Playing      {len(remaining)} episodes")
        cluster.connect()
        shared = {name: source.shared() for name, source in sources.items()}
        play(remaining, conditions, shared, makers, EvalOptions(), seed=o.seed, on_end=lambda line, _: book.write(line))


def result(o: argparse.Namespace) -> dict[str, Any]:
    simulator = {package: importlib.metadata.version(package) for package in ("metaworld", "mujoco")}
    errors, meta = read_json(o.folder / "run" / EVALUATION_NAME), load_metadata(o.folder / "dataset")
    return {
        "command": shlex.join(sys.orig_argv[1:]),
        "settings": read_json(o.folder / "settings.json"),
        "environment": Environment.here().model_dump(mode="json") | {"simulator": simulator},
        "dataset": {"episodes": meta.num_episodes, "frames": meta.total_frames},
        "open_loop_mse": {name: error["mse"] for name, error in errors["trained"].items() if "mse" in (error or ())},
        "success": success(read_evaluation(o.folder / "evaluation")[1]),
    }


def success(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By condition: of all episodes, by difficulty and by task.

    Where tasks have several degrees of difficulty, `mean_of_degrees` is the mean of their shares, each counted once.
    """
    scores: dict[str, Any] = {}
    for condition, label in LABELS.items():
        played = [line for line in lines if line["condition"] == condition]
        scores[condition] = {"label": label, "rows": score_rows(played)}
        if len(degrees := _by_difficulty(played)) > 1:
            means = {
                key: statistics.mean(row[key] / row["episodes"] for row in degrees)
                for key in ("successes", "within_100_steps")
            }
            scores[condition] |= {"degrees": degrees, "mean_of_degrees": means}
    return scores


def _by_difficulty(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each of Meta-World's degrees of which tasks were played to an end. Success ends an episode."""
    rows = []
    for degree, tasks in metaworld_tasks()[1].items():
        if played := [line for line in lines if line["task"] in tasks and line["error"] is None]:
            took = [line["steps"] for line in played if line["success_once"]]
            row = {"label": degree, "tasks": len({line["task"] for line in played}), **score(played)}
            rows.append({**row, "within_100_steps": sum(steps <= RLINF_STEPS for steps in took)})
    return rows


def table(scores: Mapping[str, Any]) -> str:
    """Success, a line for each condition and task."""
    lines = ["Success on initial states that are in no demonstration (95 % interval)"]
    for condition in scores.values():
        for row in [*condition["rows"], *condition.get("degrees", ())]:
            name = f"{row['label']}, {row['tasks']} tasks" if "tasks" in row else row["label"]
            lines.append(f"  {condition['label']:28}{name:30}{share(row)}")
        if means := condition.get("mean_of_degrees"):
            both = f"{means['successes']:.1%}, within {RLINF_STEPS} steps {means['within_100_steps']:.1%}"
            lines.append(f"  {condition['label']:28}{'mean of degrees':30}{both.replace('%', ' %')}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    options.folder = options.folder.absolute()
    try:
        flags = drawn(options) | {"episode_length": options.episode_length}
        env = env_config("metaworld", [f"--{name}={value}" for name, value in flags.items()])
        makers = task_makers(env)
        if len(makers) < 2:
            raise ValueError(f"--tasks={options.tasks}: name at least two, so that language has something to tell")
        check_settings(options)
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 2
    if status := train(options):
        return status
    evaluate(options, env, makers)
    scores = result(options)
    print_safe_text(table(scores["success"]))
    if options.json is not None:
        write_json(options.json, scores)
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import metaworld as module

    sys.exit(module.main())
