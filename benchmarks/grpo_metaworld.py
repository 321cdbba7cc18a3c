"""Does learning from success help beyond the demo? One task of Meta-World, GRPO beside its baselines, some seeds.

    make metaworld
    python -m benchmarks.metaworld --folder outputs/some --tasks drawer-open-v3,push-v3 --episodes 50 \\
        --image_size 84 --steps 440 --episode_length 200
    python -m benchmarks.grpo_metaworld --imitation outputs/some --task drawer-open-v3 --json FILE

The first command trains a policy by imitation, here too short a time, and says how often it succeeds. (Of its tasks one
has to move the gripper, or there is no scale to normalise that by.) The second has
copies of that policy learn from success alone, by `grpo.py`, with each method and seed: from the same policy, with as
many episodes, on the same initial states for methods of a seed. Before and after are 200 fresh initial states, played
by LeRobot's own sampler. It goes on where it was broken off. Exit status: 0 done, otherwise grpo.py's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpo
from benchmarks.grpo import of_run
from diagnostics.environment import Environment
from vla_finetuning.evaluation.intervals import share
from vla_finetuning.files import read_json
from vla_finetuning.run.folder import EVALUATION_NAME
from vla_finetuning.terminal import tell_text

METHODS = ("grpo", "rloo", "filtered")
# Two workers and their environments on two cores.
PLACE = {
    **{"scaling.num_workers": 2, "scaling.cpus_per_worker": 0.5, "scaling.use_gpu": "false"},
    **{"grpo.env_actors": 2, "grpo.envs_per_actor": 8, "grpo.env_actor_cpus": 0.25, "train.mode": "full"},
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--imitation", type=Path, required=True, help="folder of a finished benchmarks.metaworld")
    made.add_argument("--task", default="drawer-open-v3", help="one of those that it was trained on")
    made.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1000, 1001, 1002])
    made.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    made.add_argument("--iterations", type=int, default=15)
    made.add_argument("--groups", type=int, default=8)
    made.add_argument("--group_size", type=int, default=8)
    made.add_argument("--lr", type=float, default=2e-5)
    made.add_argument("--noise_level", type=float, default=0.3)
    made.add_argument("--folder", type=Path, help="of the runs; by default `grpo` in that of the imitation")
    made.add_argument("--json", type=Path, help="where the result goes")
    return made


def flags_of(options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Of one run of `grpo.py`: the pictures and the episodes' length are those of the imitation."""
    settings = read_json(options.imitation / "settings.json")
    size = settings["image_size"]
    return {
        "policy.path": options.imitation / "run" / "pretrained_model",
        "policy.n_action_steps": settings["n_action_steps"],
        "env.type": "metaworld",
        "env.task": options.task,
        "env.image_size": f"[{size},{size}]",
        "env.render_quality": "fast",
        "env.episode_length": settings["episode_length"],
        "eval.n_episodes": 50,
        "seed": seed,
        "lr": options.lr,
        "batch_size": 32,
        "save_freq": options.iterations,
        "grpo.method": method,
        "grpo.iterations": options.iterations,
        "grpo.groups": options.groups,
        "grpo.group_size": options.group_size,
        "grpo.noise_level": options.noise_level,
        "grpo.eval_every": 5,
        **PLACE,
    }


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["Success on 200 fresh initial states, by LeRobot's own sampler (95 % interval)"]
    for name, run in runs.items():
        before, after = (share(run[of]["successes"], run[of]["episodes"]) for of in ("before", "after"))
        lines.append(f"  {name:14}{before}  ->  {after}; {run['episodes']} episodes, {run['seconds']['step_s']:.0f} s")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    runs = {}
    for seed, method in itertools.product(options.seeds, options.methods):
        folder = (options.folder or options.imitation / "grpo") / f"{method}-{seed}"
        if not (folder / EVALUATION_NAME).exists():
            flags = flags_of(options, method, seed) | {"output_dir": folder, "resume": "auto"}
            if status := grpo.main([f"--{name}={value}" for name, value in flags.items()]):
                return status
        runs[f"{method} {seed}"] = of_run(folder)
        if options.json is not None:
            result = {
                "command": f"python -m benchmarks.grpo_metaworld --imitation {options.imitation.name} --task "
                f"{options.task} --seeds {','.join(map(str, options.seeds))} --methods {','.join(options.methods)} "
                f"--iterations {options.iterations} --groups {options.groups} --group_size {options.group_size} "
                f"--lr {options.lr:g} --noise_level {options.noise_level:g}",
                "imitation": read_json(options.imitation / "settings.json"),
                "environment": Environment.here().model_dump(mode="json"),
                "runs": runs,
            }
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    tell_text(table(runs))
    return 0


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import grpo_metaworld as module

    sys.exit(module.main())
