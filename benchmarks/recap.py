"""Does a policy learn from failures? RECAP on demonstrators who go to the wrong bin in 30 % of their episodes.

    make recap
    python -m benchmarks.recap --seeds 1000,1001,1002,1003,1004 --json benchmarks/results/recap.json

    imitation   vla.py imitates all demonstrations, wrong ones too
    value       value.py learns what frames are worth, by which episodes succeeded, and labels them
    recap       vla.py learns from the same demonstrations with the labels in its prompts, from the same weights and for
                as many steps
    second      the policy plays --rollouts episodes, recorded by evaluate.py; values, labels and policy anew, on
                demonstrations and rollouts (with --second)

Every policy plays the same --eval_episodes scenes. Nothing simulates while it trains. With --start_seed all seeds have
the imitation and the value function of that one. The same command goes on where it was broken off. Exit status: 0 done,
otherwise that of the program that failed. benchmarks.methods compares with other ways to go on from the imitation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import evaluate
import value
import vla
from benchmarks import stages
from benchmarks.stages import Stages, score, together
from vla_finetuning.config import CACHE_DIR
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.demo import DISOBEDIENT, DISOBEDIENT_PAIRS, disobeyed, prepare_base, prepare_disobedient
from vla_finetuning.evaluation.episodes import read_evaluation
from vla_finetuning.evaluation.intervals import share
from vla_finetuning.files import read_json, write_json
from vla_finetuning.run.folder import FINISHED_NAME, VALUES_NAME
from vla_finetuning.run.labels import LABELS_NAME

# Of the scenes that no policy has seen: far from those of rollouts.
FIRST_EVALUATED, FIRST_ROLLOUT = 1000, 50_000
NAMES = {
    "imitation": "imitation of all demonstrations",
    "recap": "RECAP, prompted positive",
    "negative": "RECAP, prompted negative",
    "second": "RECAP, second iteration",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("outputs/recap"), help="of everything but the result")
    made.add_argument("--json", type=Path, help="where the result goes")
    made.add_argument("--seeds", default="1000", help="of weights, order of rows, and noise; each is a run")
    made.add_argument("--start_seed", type=int, help="of the imitation and the value function that all seeds have")
    made.add_argument("--steps", type=int, default=900, help="of each policy")
    made.add_argument("--noise_draws", type=int, default=2, help="per row")
    made.add_argument("--value_steps", type=int, default=600, help="of each value function")
    made.add_argument("--positive", type=float, default=0.6, help="share of the frames")
    made.add_argument("--horizon", type=int, default=10, help="frames of an advantage; episodes have 7 to 22")
    made.add_argument("--eval_episodes", type=int, default=200, help="of each policy")
    made.add_argument("--rollouts", type=int, default=120, help="episodes of the second iteration")
    made.add_argument("--negative", action="store_true", help="also prompt the policy negative")
    made.add_argument("--second", action="store_true", help="also play, and learn from that")
    return made


class Benchmark(Stages):
    """The runs of one seed, in their folder; each skips what is done."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        super().__init__(options.folder / str(seed), str(seed))
        self.options, self.seed = options, seed
        self.root = prepare_disobedient(CACHE_DIR / "demo").absolute()
        # All start from the same weights, whose tokenizer knows the words.
        meta = load_metadata(self.root)
        data: dict[str, Any] = {"features": meta.features, "tasks": sorted(meta.tasks.values()), "fps": meta.fps}
        self.base = prepare_base(CACHE_DIR / "demo", **data, labelled=True).absolute()
        wrong = disobeyed(DISOBEDIENT_PAIRS, DISOBEDIENT)
        self.outcomes: dict[str, dict[str, bool]] = {
            str(self.root): {str(i): not w for i, w in enumerate(wrong.tolist())}
        }

    def run(self) -> dict[str, Any]:
        """All stages; what came of them."""
        first, o = self.first(), self.options
        start = first.start()
        value = first.judge("value", self.root, start)
        recap = self.policy("recap", self.root, self.base, o.steps, **{"recap.labels": value / LABELS_NAME})
        scores = {"imitation": first.play("imitation", start)}
        scores["recap"] = self.play("recap", recap, "positive")
        values = {"value": read_json(value / VALUES_NAME)["labels"]}
        if o.negative:
            scores["negative"] = self.play("negative", recap, "negative")
        if o.second:
            rollouts = self.record("rollouts", recap)
            both = f"{self.root},{rollouts}"
            again = self.judge("value-2", both, start)
            second = self.policy("second", both, self.base, o.steps, **{"recap.labels": again / LABELS_NAME})
            scores["second"] = self.play("second", second, "positive")
            values["value-2"] = read_json(again / VALUES_NAME)["labels"]
        seconds = {**first.seconds, **self.seconds}
        return {"seed": self.seed, "success": scores, "values": values, "seconds": seconds}

    def first(self) -> Benchmark:
        """The seed whose imitation and value function this one has."""
        seed = self.options.start_seed
        return self if seed in (None, self.seed) else Benchmark(self.options, seed)

    def start(self) -> Path:
        """The policy that imitates all demonstrations."""
        return self.policy("imitation", self.root, self.base, self.options.steps)

    # ---- programs --------------------------------------------------------------------------------------------------

    def policy(self, name: str, root: Any, start: Path, steps: int, **flags: Any) -> Path:
        """A policy that `vla.py` trains from another; its folder."""
        o, folder = self.options, self.folder / name
        options = {
            "preset": "demo",
            "dataset.root": root,
            "dataset.eval_split": 0,
            "policy.path": start,
            "output_dir": folder,
            "resume": "auto",
            "seed": self.seed,
            "steps": steps,
            "train.noise_draws": o.noise_draws,
            "scaling.use_gpu": "false",
            **flags,
        }
        self.call(name, vla.main, options, done=folder / FINISHED_NAME)
        return folder / "pretrained_model"

    def judge(self, name: str, root: Any, policy: Path) -> Path:
        """A value function that `value.py` trains on what a policy sees, and labels; the folder."""
        o, folder = self.options, self.folder / name
        path = self.folder / f"{name}-outcomes.json"
        known = self.outcomes
        write_json(path, known if len(known) > 1 else next(iter(known.values())))
        options = {
            "preset": "demo",
            "dataset.root": root,
            "policy.path": policy,
            "outcome.success": f"@{path}",
            "output_dir": folder,
            "resume": "auto",
            "seed": self.seed,
            "steps": o.value_steps,
            "value.horizon": o.horizon,
            "value.positive": o.positive,
            "scaling.use_gpu": "false",
        }
        self.call(name, value.main, options, done=folder / FINISHED_NAME)
        return folder

    def successes(self) -> str:
        """The demonstrations that succeeded, as a flag takes them."""
        return ",".join(i for i, success in self.outcomes[str(self.root)].items() if success)

    def progress(self, judged: Path) -> Path:
        """The values of frames as LeRobot's RA-BC reads progress: from 0 to 1."""
        rows, path = pq.read_table(judged / LABELS_NAME), self.folder / "progress.parquet"
        known = {"index": pa.array(range(len(rows))), "episode_index": rows["episode_index"]}
        pq.write_table(pa.table({**known, "progress_sparse": pc.add(rows["value"].cast("float64"), 1.0)}), path)
        return path

    def play(self, name: str, policy: Path, advantage: str | None = None) -> dict[str, Any]:
        """How often a policy succeeds in scenes that no policy has seen."""
        folder = self.folder / f"play-{name}"
        told = {} if advantage is None else {"policy.advantage": advantage}
        flags = {"eval.n_episodes": self.options.eval_episodes, "seed": FIRST_EVALUATED, "eval.videos": 0, **told}
        self._play(f"play-{name}", folder, policy, flags)
        return score(read_evaluation(folder)[1])

    def record(self, name: str, policy: Path) -> Path:
        """Episodes of a policy as a dataset, whose outcomes are known then."""
        root, folder = self.folder / f"{name}-dataset", self.folder / name
        flags = {
            "eval.n_episodes": self.options.rollouts,
            "seed": FIRST_ROLLOUT + self.seed,
            "eval.videos": 0,
            "eval.record_dataset": root,
            "policy.advantage": "positive",
        }
        self._play(name, folder, policy, flags)
        played = [line["success_once"] for line in read_evaluation(folder)[1] if line["error"] is None]
        self.outcomes[str(root)] = {str(i): bool(success) for i, success in enumerate(played)}
        return root

    def _play(self, name: str, folder: Path, policy: Path, flags: dict[str, Any]) -> None:
        env = {"env.type": "two_bins", "env.episode_length": 30}
        options = {"policy.path": policy, "output_dir": folder, **env, **flags}
        self.call(name, evaluate.main, options, done=folder / "report.html")


def table(found: dict[str, Any], names: dict[str, str] = NAMES) -> str:
    """Success of each policy, a line for each seed and one for all together."""
    lines = ["Success on scenes that no policy has seen (95 % interval)"]
    for name, label in names.items():
        scores = [(run["seed"], run["success"][name]) for run in found["runs"] if name in run["success"]]
        if len(scores) > 1:
            scores.append(("all", found["all_seeds"][name]))
        lines += [f"  {label:34}{seed:<6}{share(of['successes'], of['episodes'])}" for seed, of in scores]
    return "\n".join(lines)


def found(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The runs of each seed, and their scores together."""
    names = dict.fromkeys(name for run in runs for name in run["success"])
    scores = {name: [run["success"][name] for run in runs if name in run["success"]] for name in names}
    return {"runs": runs, "all_seeds": {name: together(of) for name, of in scores.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    return stages.run(options, lambda: found([Benchmark(options, seed).run() for seed in seeds]), table)


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    from benchmarks import recap as module

    sys.exit(module.main())
