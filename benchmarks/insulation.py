"""Measure what knowledge insulation is worth: success of the demo against steps, with and without it.

    python -m benchmarks.insulation --seeds 5

For each seed vla.py trains the demo three times, from the same weights and on the same rows: the whole policy by its
flow (`full`), the action expert alone (`expert`), and the backbone on action tokens beside the expert (`insulated`).
Checkpoints play, those of a seed in the same scenes, which no demonstration has; intervals are over scenes, not seeds.
The learning rate falls over all --steps: a checkpoint before the last is no run of its own. `obeyed`: of the episodes
that reached a bin, in so many it was the named one. With --many_instructions record.py records bins of four colours
first, named by colour, side or the other bin. The same command goes on where it was broken off. Exit status: as vla.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import record
import vla
from benchmarks.stages import FIRST_EVALUATED, Stage, parse_settings, run_stages, stages_parser
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.files import write_json
from vla_finetuning.plan.demo import DEMO_CACHE, prepare_base, prepare_dataset
from vla_finetuning.run.checkpoint import PREFIX
from vla_finetuning.run.folder import EVALUATIONS, FINISHED_NAME
from vla_finetuning.terminal import print_safe_text

# Flags of each policy.
ARMS: dict[str, dict[str, Any]] = {
    "full": {"train.mode": "full"},
    "expert": {"train.mode": "expert"},
    "insulated": {"train.mode": "full", "train.knowledge_insulation": "true"},
}


def stages(options: argparse.Namespace, seed: int) -> Iterator[Stage]:
    """Yield a seed's stages in their order."""
    root, many = prepare_dataset(DEMO_CACHE).absolute(), str(options.many_instructions).lower()
    if options.many_instructions:
        flags = {"env.type": "two_bins", "env.many_instructions": many, "episodes": 400}
        root = options.folder / "demonstrations"
        yield Stage(record.main, flags | {"root": root}, root)
    meta = load_metadata(root)
    data: dict[str, Any] = {"features": meta.features, "tasks": sorted(meta.tasks.values()), "fps": meta.fps}
    base = prepare_base(DEMO_CACHE, **data, insulated=True).absolute()
    shared = {"preset": "demo", "dataset.root": root, "dataset.eval_split": 0, "policy.path": base}
    shared |= {"resume": "auto", "seed": seed, "steps": options.steps, "scaling.use_gpu": "false"}
    shared |= {"env.type": "two_bins", "env.episode_length": 30, "env.many_instructions": many}
    shared |= {"save_freq": options.every, "env_eval_freq": options.every, "eval.n_episodes": options.eval_episodes}
    for arm, flags in ARMS.items():
        folder = options.folder / f"seed{seed}" / arm
        yield Stage(vla.main, shared | flags | {"output_dir": folder}, folder / FINISHED_NAME)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not done, and print success by steps. Returns the exit status: see the module."""
    parser = stages_parser(
        __doc__,
        "outputs/insulation",
        seeds=(5, "how many: of order of rows, noise and scenes"),
        steps=(900, "of each policy"),
        every=(150, "steps between checkpoints that play"),
        eval_episodes=(200, "of each checkpoint"),
    )
    parser.add_argument("--many_instructions", action="store_true", help="more colours, and more to understand")
    options = parse_settings(parser, argv)
    seeds = [FIRST_EVALUATED * (1 + number) for number in range(options.seeds)]  # no two of them share a scene
    if status := run_stages(stage for seed in seeds for stage in stages(options, seed)):
        return status
    scores, lines = {}, [f"Success of {options.seeds} seeds by steps (95 % interval)"]
    for arm in ARMS:
        for step in sorted({*range(options.every, options.steps, options.every), options.steps}):
            folders = [options.folder / f"seed{n}" / arm / EVALUATIONS / f"{PREFIX}{step:08d}" for n in seeds]
            played = [line for folder in folders for line in read_evaluation(folder)[1]]
            reached = [line for line in played if line["error"] is None and line["info"]["reached"]]
            obeyed = sum(line["success_once"] for line in reached)
            scores[f"{arm} {step}"] = {**score(played), "obeyed": obeyed, "reached": len(reached)}
            lines.append(f"  {arm:10}{step:5}  {share(score(played))}; obeyed in {obeyed} of {len(reached)}")
    write_json(options.folder / "insulation.json", {"seeds": options.seeds, "success": scores})
    print_safe_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import insulation as module

    sys.exit(module.main())
