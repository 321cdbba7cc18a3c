"""How far does each way of learning from failures get? From the same policy, with the same number of episodes.

    python -m benchmarks.methods --start_seed 1000 --seeds 1000,1001 --json benchmarks/results/methods.json

    start       vla.py imitates all of the demo's demonstrations, 30 % of which go to the wrong bin (benchmarks.recap)
    rloo, grpo, ppo, filtered
                grpo.py plays --episodes episodes, and learns from them by this method, all with the options of its
                preset; filtered takes half of each minibatch from the same demonstrations
    more, successes, rabc, recap
                vla.py goes on for --more_steps with the demonstrations: all of them, the successful ones alone, weighed
                by what the value function sees them gain, or with its labels in the prompts. No episode is played

Every policy plays the same --eval_episodes scenes, by LeRobot's sampler. The folder is that of benchmarks.recap, whose
imitation and value function are taken; the same command goes on where it was broken off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpo
from benchmarks import recap, stages
from benchmarks.recap import Benchmark
from vla_finetuning.run.folder import FINISHED_NAME
from vla_finetuning.run.labels import LABELS_NAME

# Of an iteration of grpo.py's preset.
EPISODES_PER_ITERATION = 128
ONLINE, OFFLINE = ("rloo", "grpo", "ppo", "filtered"), ("more", "successes", "rabc", "recap")
NAMES = {
    "start": "imitation (the start)",
    "more": "more imitation",
    "successes": "imitation of the successes",
    "rabc": "RA-BC by the value function",
    "recap": "RECAP, prompted positive",
    "filtered": "filtered, with demonstrations",
    "rloo": "rloo",
    "grpo": "GRPO",
    "ppo": "PPO",
}


def parser() -> argparse.ArgumentParser:
    made = recap.parser()
    made.description = __doc__
    made.add_argument("--more_steps", type=int, default=300, help="of each method without a simulator")
    made.add_argument("--episodes", type=int, default=1152, help="that each method with a simulator plays")
    made.add_argument("--methods", default=",".join((*OFFLINE, *ONLINE)), help="to compare")
    return made


class Comparison(Benchmark):
    """The methods of one seed."""

    def compare(self) -> dict[str, Any]:
        """All of them; what came of each."""
        first = self.first()
        start = first.start()
        scores = {}
        # With --start_seed all seeds start from one policy, whose episodes count once.
        if self.options.start_seed is None or self.seed == int(self.options.seeds.split(",")[0]):
            scores["start"] = first.play("imitation", start)
        for name in self.options.methods.split(","):
            policy = self.online(name, start) if name in ONLINE else self.offline(name, start)
            scores[name] = self.play(f"on-{name}", policy, "positive" if name == "recap" else None)
        seconds = {name: spent for name, spent in self.seconds.items() if name.startswith("on-")}
        return {"seed": self.seed, "success": scores, "seconds": seconds}

    def offline(self, name: str, start: Path) -> Path:
        """The start, after `vla.py`."""
        flags: dict[str, Any] = {}
        if name == "successes":
            flags = {"dataset.episodes": self.successes()}
        elif name != "more":
            value = self.first().judge("value", self.root, start)
            flags = {"recap.labels": value / LABELS_NAME}
            if name == "rabc":
                flags = {"sample_weighting.progress_path": self.progress(value)}
        return self.policy(f"on-{name}", self.root, start, self.options.more_steps, **flags)

    def online(self, name: str, start: Path) -> Path:
        """The start, after `grpo.py`."""
        iterations, left = divmod(self.options.episodes, EPISODES_PER_ITERATION)
        if left:
            raise ValueError(f"--episodes={self.options.episodes}: must be a multiple of {EPISODES_PER_ITERATION}")
        folder = self.folder / f"on-{name}"
        flags = {
            "preset": "demo",
            "policy.path": start,
            "output_dir": folder,
            "resume": "auto",
            "seed": self.seed,
            "grpo.method": name,
            "grpo.iterations": iterations,
            "eval.n_episodes": 1,  # what it looks at on the way is not used
            "scaling.use_gpu": "false",
        }
        if name == "filtered":
            flags["grpo.demonstrations"] = self.root
        self.call(f"on-{name}", grpo.main, flags, done=folder / FINISHED_NAME)
        return folder / "pretrained_model"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    return stages.run(
        options,
        lambda: recap.found([Comparison(options, seed).compare() for seed in seeds]),
        partial(recap.table, names=NAMES),
    )


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import methods as module

    sys.exit(module.main())
