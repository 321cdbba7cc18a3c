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
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import record
import vla
from benchmarks.stages import FIRST_EVALUATED, Stage, parse_settings, run_stages, stages_parser
from diagnostics.report import provenance
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
from vla_finetuning.run.folder import EVALUATION_NAME, FINISHED_NAME
from vla_finetuning.terminal import print_safe, print_safe_error, print_safe_text

FIRST_RECORDED = 100_000  # far from what is evaluated: those initial states are in no demonstration
LABELS = {"untrained": "before training", "trained": "trained", "other_instruction": "trained, with another task"}
RLINF_STEPS = 100  # of an episode, in RLinf's configurations of Meta-World's 50 tasks


def parser() -> argparse.ArgumentParser:
    arguments = stages_parser(
        __doc__,
        "outputs/metaworld",
        seed=(1, "of initial weights, order of rows, and noise"),
        episodes=(120, "recorded, of each task"),
        image_size=(112, "pixels of a frame's side, and of what PI0.5 sees"),
        patch_size=(14, "of PI0.5's vision"),
        chunk_size=(20, "actions that PI0.5 predicts"),
        n_action_steps=(10, "actions of them that are executed"),
        steps=(1300, "of training"),
        batch_size=(16, "rows, of each of two workers"),
        noise_draws=(4, "per row"),
        eval_episodes=(50, "of each task and condition"),
        episode_length=(250, "steps after which an episode has failed"),
    )
    arguments.add_argument("--json", type=Path, help="where the result goes")
    arguments.add_argument("--tasks", default="reach-v3,push-v3,drawer-open-v3", help="at least two")
    arguments.add_argument("--lr", type=float, default=1e-3, help="at its peak")
    return arguments


def drawn(o: argparse.Namespace) -> dict[str, Any]:
    """Return the environment's options that decide what frames look like."""
    return {"task": o.tasks, "image_size": f"[{o.image_size},{o.image_size}]", "render_quality": "fast"}


def stages(o: argparse.Namespace) -> Iterator[Stage]:
    """Yield the recording and, with the base policy for what it has recorded, the training."""
    root, base, folder = o.folder / "dataset", o.folder / "base", o.folder / "run"
    flags = {"env.type": "metaworld", **{f"env.{name}": value for name, value in drawn(o).items()}}
    yield Stage(record.main, {**flags, "episodes": o.episodes, "seed": FIRST_RECORDED, "root": root}, root / "meta")
    meta = load_metadata(root)
    if not base.exists():
        stats = {key: meta.stats[key] for key in ("observation.state", "action")}
        shape = {"chunk_size": o.chunk_size, "image_resolution": (o.image_size,) * 2, "patch_size": o.patch_size}
        tasks = sorted(meta.tasks.values())
        make_tiny_base(base, features=meta.features, tasks=tasks, stats=stats, fps=meta.fps, seed=o.seed, **shape)
    flags = {"preset": "demo", "dataset.root": root, "dataset.eval_split": 0.05, "policy.path": base}
    flags |= {"policy.n_action_steps": o.n_action_steps, "output_dir": folder, "resume": "auto", "seed": o.seed}
    flags |= {"steps": o.steps, "batch_size": o.batch_size, "lr": o.lr, "train.noise_draws": o.noise_draws}
    yield Stage(vla.main, flags | {"save_freq": 500, "scaling.use_gpu": "false"}, folder / FINISHED_NAME)


def evaluate(o: argparse.Namespace, env: Any, makers: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        shared = {name: source.shared() for name, source in sources.items()}
        play(remaining, conditions, shared, makers, EvalOptions(), seed=o.seed, on_end=lambda line, _: book.write(line))
    return read_evaluation(o.folder / "evaluation")[1]


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
    """Record, train and evaluate what is not done, and print success. Returns the exit status: see the module."""
    options = parse_settings(parser(), argv)
    try:
        flags = drawn(options) | {"episode_length": options.episode_length}
        env = env_config("metaworld", [f"--{name}={value}" for name, value in flags.items()])
        makers = task_makers(env)
        if len(makers) < 2:
            raise ValueError(f"--tasks={options.tasks}: name at least two, so that language has something to tell")
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 2
    if status := run_stages(stages(options)):
        return status
    scores = success(evaluate(options, env, makers))
    print_safe_text(table(scores))
    if options.json is not None:
        meta, errors = load_metadata(options.folder / "dataset"), read_json(options.folder / "run" / EVALUATION_NAME)
        mse = {name: error["mse"] for name, error in errors["trained"].items() if "mse" in (error or ())}
        simulator = {package: importlib.metadata.version(package) for package in ("metaworld", "mujoco")}
        result = provenance(**read_json(options.folder / "settings.json")) | {"simulator": simulator, "success": scores}
        size = {"episodes": meta.num_episodes, "frames": meta.total_frames}
        write_json(options.json, result | {"dataset": size, "open_loop_mse": mse})
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import metaworld as module

    sys.exit(module.main())
