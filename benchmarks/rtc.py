"""Measure what training for a delay is worth: the demo's success over latency, with and without it.

    python -m benchmarks.rtc --seeds 5

For each seed vla.py trains the demo twice, as it is and with --policy.rtc_training_max_delay. `late` plays the first
with chunks that arrive late, `guided` by LeRobot's real-time chunking to what is left of the last chunk, `default` by
LeRobot's default, also to zeros where less than 10 actions are left; `trained` plays the second, whose chunks go on
from the actions that are executed meanwhile. All play the same scenes; intervals are over scenes, not over seeds. The
same command goes on where it was broken off. Exit status: 0 done, otherwise that of the program that failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import vla
from benchmarks.stages import Stage, parse_settings, play_two_bins, run_stages, stages_parser
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.files import write_json
from vla_finetuning.run.folder import FINISHED_NAME
from vla_finetuning.terminal import print_safe_text

# The demo's gantry takes 10 actions a second and a chunk has 10, of which 5 are executed.
LATENCIES_S, MAX_DELAY, EXECUTED = (0.0, 0.1, 0.2, 0.3), 3, 5
# By their names: whether the policy was trained for a delay, and flags of evaluate.py.
ARMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "late": (False, {}),
    "guided": (False, {"eval.controller": "rtc"}),
    "default": (False, {"eval.controller": "rtc", "policy.rtc_config.execution_horizon": 10}),
    "trained": (True, {"eval.controller": "rtc"}),
}


def stages(options: argparse.Namespace, seed: int) -> Iterator[Stage]:
    """Yield a seed's stages in their order."""
    folder = options.folder / f"seed{seed}"
    for name, delay in (("plain", 0), ("delayed", MAX_DELAY)):
        flags: dict[str, Any] = {"preset": "demo", "seed": seed, "steps": options.steps, "resume": "auto"}
        flags |= {"scaling.use_gpu": "false", "policy.rtc_training_max_delay": delay, "output_dir": folder / name}
        yield Stage(vla.main, flags, folder / name / FINISHED_NAME)
    for arm, (delayed, controller) in ARMS.items():
        policy = folder / ("delayed" if delayed else "plain") / "pretrained_model"
        flags = {"policy.n_action_steps": EXECUTED, "eval.latency_s": ",".join(map(str, LATENCIES_S))}
        yield play_two_bins(folder / arm, policy, options.eval_episodes, flags | controller)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is not done, and print success by latency. Returns the exit status: see the module."""
    parser = stages_parser(
        __doc__,
        "outputs/rtc",
        seeds=(5, "how many: of weights, order of rows, and noise"),
        steps=(900, "of each policy"),
        eval_episodes=(200, "of each policy and latency"),
    )
    options = parse_settings(parser, argv)
    seeds = range(1000, 1000 + options.seeds)
    if status := run_stages(stage for seed in seeds for stage in stages(options, seed)):
        return status
    scores, lines = {}, [f"Success of {options.seeds} seeds, {options.steps} steps (95 % interval)"]
    for arm in ARMS:
        played = [line for seed in seeds for line in read_evaluation(options.folder / f"seed{seed}" / arm)[1]]
        for latency_s in LATENCIES_S:
            scores[f"{arm} {latency_s:g} s"] = result = score([x for x in played if x["latency_s"] == latency_s])
            lines.append(f"  {arm:8} {latency_s:3g} s  {share(result)}")
    write_json(options.folder / "rtc.json", {"seeds": options.seeds, "steps": options.steps, "success": scores})
    print_safe_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import rtc as module

    sys.exit(module.main())
