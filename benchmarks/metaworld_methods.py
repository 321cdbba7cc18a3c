"""How far do PPO and GRPO get in Meta-World? From one policy, with the same number of episodes.

    make metaworld
    python -m benchmarks.metaworld --folder outputs/short --tasks drawer-open-v3,push-v3 --episodes 8 \\
        --image_size 84 --steps 440 --episode_length 200
    python -m benchmarks.metaworld_methods --imitation outputs/short --json benchmarks/results/metaworld_methods.json

The first command trains a policy by imitation of few demonstrations. The second has copies of it learn --task from
success by grpo.py, with each method and seed. Methods share all options but the critic's. Before and after are 200
initial states that no method has seen, played by LeRobot's sampler. The same command goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpo
from benchmarks import recap, stages
from benchmarks.stages import Stages
from vla_finetuning.files import read_json, read_lines
from vla_finetuning.run.folder import EVALUATION_NAME, FINISHED_NAME, METRICS_NAME

NAMES = {"start": "imitation (the start)", "grpo": "GRPO", "ppo": "PPO", "rloo": "rloo", "filtered": "filtered"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--imitation", type=Path, required=True, help="folder of a finished benchmarks.metaworld")
    made.add_argument("--folder", type=Path, default=Path("outputs/metaworld_methods"), help="of everything else")
    made.add_argument("--json", type=Path, help="where the result goes")
    made.add_argument("--task", default="drawer-open-v3", help="one that the policy has imitated")
    made.add_argument("--seeds", default="1000,1001,1002,1003,1004", help="of initial states, noise and minibatches")
    made.add_argument("--methods", default="grpo,ppo", help="to compare")
    made.add_argument("--iterations", type=int, default=15)
    made.add_argument("--groups", type=int, default=8)
    made.add_argument("--group_size", type=int, default=8)
    made.add_argument("--lr", type=float, default=2e-5)
    made.add_argument("--value_lr", type=float, default=1e-3, help="of PPO's critic")
    made.add_argument("--noise_level", type=float, default=0.3)
    return made


class Comparison(Stages):
    """The methods of one seed."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        super().__init__(options.folder / str(seed), str(seed))
        self.options, self.seed = options, seed

    def compare(self) -> dict[str, Any]:
        """All methods; what came of each."""
        learned = {method: self.learn(method) for method in self.options.methods.split(",")}
        closed_loop = {method: read_json(folder / EVALUATION_NAME)["closed_loop"] for method, folder in learned.items()}
        # All methods of a seed start with the same episodes.
        start = next(iter(closed_loop.values()))["before"]
        return {
            "seed": self.seed,
            "success": {"start": start, **{method: found["after"] for method, found in closed_loop.items()}},
            "held_out": {method: held_out(folder) for method, folder in learned.items()},
            "seconds": self.seconds,
        }

    def learn(self, method: str) -> Path:
        """The folder of a run of `grpo.py`; images and lengths of episodes are those of the imitation."""
        o, folder = self.options, self.folder / method
        imitated = read_json(o.imitation / "settings.json")
        size = imitated["image_size"]
        flags = {
            "policy.path": o.imitation.absolute() / "run" / "pretrained_model",
            "policy.n_action_steps": imitated["n_action_steps"],
            "env.type": "metaworld",
            "env.task": o.task,
            "env.image_size": f"[{size},{size}]",
            "env.render_quality": "fast",
            "env.episode_length": imitated["episode_length"],
            "eval.n_episodes": 50,
            "eval.batch_size": 16,  # each environment takes 150 MB
            "output_dir": folder,
            "resume": "auto",
            "seed": self.seed,
            "lr": o.lr,
            "batch_size": 32,
            "train.mode": "full",
            "grpo.method": method,
            "grpo.iterations": o.iterations,
            "grpo.groups": o.groups,
            "grpo.group_size": o.group_size,
            "grpo.noise_level": o.noise_level,
            "grpo.eval_every": 5,
            # Two workers and their environments share two cores.
            "grpo.env_actor_cpus": 0.25,
            "scaling.num_workers": 2,
            "scaling.cpus_per_worker": 0.5,
            "scaling.use_gpu": "false",
        }
        if method == "ppo":
            flags["grpo.value_lr"] = o.value_lr
        self.call(method, grpo.main, flags, done=folder / FINISHED_NAME)
        return folder


def held_out(folder: Path) -> dict[int, list[int]]:
    """By the number of iterations: successes on the way, and episodes that were played for them."""
    lines = [json.loads(line) for line in read_lines(folder / METRICS_NAME)]
    played = [line for line in lines if "held_out_episodes" in line]
    return {line["step"]: [line["held_out_successes"], line["held_out_episodes"]] for line in played}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    seeds = [int(seed) for seed in options.seeds.split(",")]

    def work() -> dict[str, Any]:
        runs = [Comparison(options, seed).compare() for seed in seeds]
        return {"imitation": read_json(options.imitation / "settings.json"), **recap.found(runs)}

    return stages.run(options, work, partial(recap.table, names=NAMES))


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import metaworld_methods as module

    sys.exit(module.main())
