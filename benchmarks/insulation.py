"""Measure the success of policies with and without knowledge insulation, by training steps.

    python -m benchmarks.insulation --seeds 5

record.py records demonstrations of two_bins. For each seed vla.py trains the policies of `ARMS` from the same weights
on the same rows. Checkpoints of a seed play the same unseen scenes; the last one of `subtask` also plays with its own
subtask (`writing`). Intervals are over scenes, not seeds. The learning rate falls over all --steps, so earlier
checkpoints are no complete runs. `obeyed` counts the episodes that reached the named bin, among those that reached
any. Repeat the command to resume. Exit status: as vla.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import evaluate
import record
import vla
from benchmarks.stages import FIRST_EVALUATED, Stage, parse_settings, run_stages, stages_parser
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs.two_bins import TwoBins
from vla_finetuning.envs.two_bins_scene import MANY_COLOURS
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.files import write_json
from vla_finetuning.options.train import ACTION_WORDS
from vla_finetuning.plan.demo import DEMO_CACHE, prepare_base
from vla_finetuning.policies.text_targets import with_text
from vla_finetuning.run.exported import POLICY_DIR
from vla_finetuning.run.folder import EVALUATIONS, FINISHED_NAME
from vla_finetuning.run.manifest import checkpoint_name
from vla_finetuning.terminal import print_safe_text

INSULATED = {"train.mode": "full", "train.knowledge_insulation": "true"}
# Flags by policy.
ARMS: dict[str, dict[str, Any]] = {
    "full": {"train.mode": "full"},
    "expert": {"train.mode": "expert"},
    "insulated": INSULATED,
    "subtask": {**INSULATED, "train.text_targets": "subtask"},
}
ENVIRONMENT = {"env.type": "two_bins", "env.many_instructions": "true"}


def stages(options: argparse.Namespace, seed: int) -> Iterator[Stage]:
    root = options.folder / "demonstrations"
    yield Stage(record.main, {**ENVIRONMENT, "root": root, "episodes": options.demonstrations}, root)
    meta = load_metadata(root)
    tasks = sorted(meta.tasks.values())
    longest = max(tasks, key=lambda task: len(task.split()))
    tasks += [with_text(longest, text) for colour in MANY_COLOURS for text in TwoBins.subtasks(colour)]
    base = prepare_base(DEMO_CACHE, features=meta.features, tasks=tasks, fps=meta.fps, spare_words=ACTION_WORDS)
    played = {**ENVIRONMENT, "env.episode_length": 30, "eval.n_episodes": options.eval_episodes, "seed": seed}
    shared = {"preset": "demo", "dataset.root": root, "dataset.eval_split": 0, "policy.path": base.absolute(), **played}
    shared |= {"scaling.use_gpu": "false", "resume": "auto", "steps": options.steps}
    shared |= {"save_freq": options.every, "env_eval_freq": options.every}
    for arm, flags in ARMS.items():
        folder = options.folder / f"seed{seed}" / arm
        yield Stage(vla.main, shared | flags | {"output_dir": folder}, folder / FINISHED_NAME)
    writing = options.folder / f"seed{seed}" / "writing"
    flags = {**played, "policy.path": folder / POLICY_DIR, "policy.subtask": "true", "output_dir": writing}
    yield Stage(evaluate.main, flags, writing / "report.html")


def success(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the joint score of evaluations, and the numbers of episodes that reached a bin and the named bin."""
    played = [line for folder in folders for line in read_evaluation(folder)[1]]
    reached = [line for line in played if line["error"] is None and line["info"]["reached"]]
    return {**score(played), "obeyed": sum(line["success_once"] for line in reached), "reached": len(reached)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the remaining stages, print success by steps, and return the exit status."""
    parser = stages_parser(
        __doc__,
        "outputs/insulation",
        seeds=(5, "how many: of order of rows, noise and scenes"),
        demonstrations=(400, "that record.py plays"),
        steps=(1500, "of each policy"),
        every=(300, "steps between checkpoints that play"),
        eval_episodes=(200, "of each checkpoint"),
    )
    options = parse_settings(parser, argv)
    seeds = [FIRST_EVALUATED * (1 + number) for number in range(options.seeds)]  # seeds share no scene
    if status := run_stages(stage for seed in seeds for stage in stages(options, seed)):
        return status
    steps = sorted({*range(options.every, options.steps, options.every), options.steps})
    runs = [options.folder / f"seed{seed}" for seed in seeds]
    scores = {
        f"{arm} {step}": success([run / arm / EVALUATIONS / checkpoint_name(step) for run in runs])
        for arm in ARMS
        for step in steps
    }
    scores[f"writing {options.steps}"] = success([run / "writing" for run in runs])
    settings = {name: value for name, value in vars(options).items() if name != "folder"}
    write_json(options.folder / "insulation.json", {**settings, "success": scores})
    lines = [f"  {name:15}  {share(s)}; obeyed in {s['obeyed']} of {s['reached']}" for name, s in scores.items()]
    print_safe_text("\n".join([f"Success of {options.seeds} seeds by steps (95 % interval)", *lines]))
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import insulation as module

    sys.exit(module.main())
