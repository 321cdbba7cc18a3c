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
from collections.abc import Iterator, Sequence
from typing import Any

import value
import vla
from benchmarks.stages import Stage, parse_settings, play_two_bins, run_stages, stages_parser
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.files import write_json
from vla_finetuning.plan import demo
from vla_finetuning.run.exported import LABELS_NAME
from vla_finetuning.run.folder import FINISHED_NAME
from vla_finetuning.terminal import print_safe_text

NAMES = {"imitation": "imitation of all demonstrations", "recap": "RECAP, prompted positive"}


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
    for name, prompt in (("imitation", {}), ("recap", {"policy.advantage": "positive"})):
        policy = folder / name / "pretrained_model"
        yield play_two_bins(folder / f"play-{name}", policy, options.eval_episodes, prompt)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the remaining stages, print each policy's success, and return the exit status."""
    parser = stages_parser(
        __doc__,
        "outputs/recap",
        seed=(1000, "of weights, order of rows, and noise"),
        steps=(900, "of each policy"),
        value_steps=(600, "of the value function"),
        eval_episodes=(200, "of each policy"),
    )
    options = parse_settings(parser, argv)
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
