"""Measure what training for a delay is worth: the demo's success over latency, with and without it.

    python -m benchmarks.rtc --seeds 5

For each seed vla.py trains the demo twice, as it is and with --policy.rtc_training_max_delay. `late` plays the first
with chunks that arrive late, `guided` by LeRobot's real-time chunking; `trained` plays the second, whose chunks go on
from the actions that are executed meanwhile. All play the same scenes; intervals are over scenes, not over seeds. The
same command goes on where it was broken off. Exit status: 0 done, otherwise that of the program that failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import evaluate
import vla
from benchmarks.recap import FIRST_EVALUATED, Stage
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.files import write_json
from vla_finetuning.run import cluster
from vla_finetuning.run.folder import FINISHED_NAME
from vla_finetuning.terminal import print_safe, print_safe_text

# The demo's gantry takes 10 actions a second and a chunk has 10, of which 5 are executed.
LATENCIES_S, MAX_DELAY, EXECUTED = (0.0, 0.1, 0.2, 0.3), 3, 5
# By their names: whether the policy was trained for a delay, and the controller.
ARMS = {"late": (False, "chunk"), "guided": (False, "rtc"), "trained": (True, "rtc")}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, default=Path("outputs/rtc"), help="of all runs")
    arguments.add_argument("--seeds", type=int, default=5, help="how many: of weights, order of rows, and noise")
    arguments.add_argument("--steps", type=int, default=900, help="of each policy")
    arguments.add_argument("--eval_episodes", type=int, default=200, help="of each policy and latency")
    return arguments


def stages(options: argparse.Namespace, seed: int) -> Iterator[Stage]:
    """Yield a seed's stages in their order."""
    folder = options.folder.absolute() / f"seed{seed}"
    for name, delay in (("plain", 0), ("delayed", MAX_DELAY)):
        flags: dict[str, Any] = {"preset": "demo", "seed": seed, "steps": options.steps, "resume": "auto"}
        flags |= {"scaling.use_gpu": "false", "policy.rtc_training_max_delay": delay, "output_dir": folder / name}
        yield Stage(f"seed{seed}, {name}", vla.main, flags, folder / name / FINISHED_NAME)
    for arm, (delayed, controller) in ARMS.items():
        policy = folder / ("delayed" if delayed else "plain") / "pretrained_model"
        flags = {"policy.path": policy, "policy.n_action_steps": EXECUTED, "eval.controller": controller}
        flags |= {"eval.latency_s": ",".join(map(str, LATENCIES_S)), "seed": FIRST_EVALUATED, "eval.videos": 0}
        flags |= {"env.type": "two_bins", "env.episode_length": 30, "eval.n_episodes": options.eval_episodes}
        yield Stage(
            f"seed{seed}, {arm}", evaluate.main, flags | {"output_dir": folder / arm}, folder / arm / "report.html"
        )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    cluster.connect()
    seeds = range(1000, 1000 + options.seeds)
    for stage in (stage for seed in seeds for stage in stages(options, seed)):
        if not stage.done.is_file():
            print_safe(f"Stage        {stage.name}")
            if status := stage.program([f"--{flag}={value}" for flag, value in stage.flags.items()]):
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
