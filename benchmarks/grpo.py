"""What runs of `grpo.py` came to, and what its arithmetic gains over the plain way of writing it.

    python grpo.py --preset demo --seed 1000 --output_dir outputs/seeds/1000        (and so on, one after the other)
    python -m benchmarks.grpo outputs/seeds/*

reads the folders of finished runs, measures on a tiny PI0.5 in this process, one thread, and writes
benchmarks/results/grpo-<hardware>-<date>.json. A gain is a ratio of seconds, the plain way's over ours, in turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import RESULTS
from diagnostics.report import Environment
from tests.tiny import ACTION_DIM, make_batch, make_policy
from vla_finetuning.files import read_json, read_lines, write_json
from vla_finetuning.policies.registry import family_of
from vla_finetuning.rl.flow_sde import FlowSDE, Walk, sample, score
from vla_finetuning.terminal import tell_text

ROWS, STEPS, ROUNDS = 32, 5, 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="of finished runs")
    folders = parser.parse_args().folders
    torch.set_num_threads(1)
    date = datetime.date.today().isoformat()
    result = {
        "date": date,
        "command": f"-m benchmarks.grpo {' '.join(folder.name for folder in folders)}",
        "hardware": Environment.here().model_dump(),
        "runs": {folder.name: of_run(folder) for folder in folders},
        "gains": gains(),
    }
    path = RESULTS / f"grpo-{psutil.cpu_count()}cpu-{date}.json"
    write_json(path, result)
    tell_text(json.dumps({"runs": result["runs"], "gains": result["gains"]}, indent=1))
    return 0


def of_run(folder: Path) -> dict[str, Any]:
    """Before and after, the way there, and where the time went."""
    config, evaluation = read_json(folder / "config.json"), read_json(folder / "evaluation.json")
    lines = [json.loads(line) for line in read_lines(folder / "metrics.jsonl")]
    iterations = [line for line in lines if line["step"] > 0]
    names = [name for name in iterations[0] if name.endswith("_s")]
    return {
        "seed": config["seed"],
        "options": config["grpo"],
        "lr": config["lr"],
        **{name: evaluation["closed_loop"][name] for name in ("before", "after")},
        "held_out": {
            line["step"]: [line["held_out_successes"], line["held_out_episodes"]]
            for line in lines
            if "held_out_episodes" in line
        },
        "episodes": iterations[-1]["episodes"],
        "seconds": {name: round(sum(line.get(name, 0.0) for line in lines), 1) for name in names},
    }


def gains() -> dict[str, float]:
    """Ratios of medians, each pair in turns."""
    policy = make_policy(3, depth=4, chunk_size=10)
    loss: Any = family_of(policy.config).make_loss(policy)
    kind: Any = type(loss)
    sde = FlowSDE(STEPS, 0.6)
    batch = {key: value for key, value in make_batch(policy, ROWS)[0].items() if "action" not in key}
    config = policy.config
    shape = (config.chunk_size, config.max_action_dim, ACTION_DIM)
    draws = sde.draw([np.random.default_rng([0, row]) for row in range(ROWS)], shape)
    _, walk = sample(loss, batch, sde, draws)

    class SeesEveryTime(kind):
        """Computes images and language again for every step."""

        def velocity(self, noisy_actions: Any, time: Any, prefix: Any) -> Any:
            return super().velocity(noisy_actions, time, self.prefix(self.images(batch)))

    every_time = SeesEveryTime(policy)

    def one_by_one() -> None:
        for row in range(ROWS):
            part = {key: value[row : row + 1] for key, value in batch.items()}
            sample(loss, part, sde, type(draws)(*(value[row : row + 1] for value in draws)))

    def learn(parts: list[Walk]) -> None:
        for part in parts:
            score(loss, batch, sde, part)[0].sum().backward()
        loss.zero_grad()

    steps = [Walk(*(tensor[:, number : number + 1] for tensor in walk)) for number in range(STEPS)]

    def adam(fused: bool) -> Callable[[], None]:
        params = [torch.nn.Parameter(param.detach().clone()) for param in policy.parameters()]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = torch.optim.AdamW(params, fused=fused, foreach=False)
        return lambda: optimizer.step() and None

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "images and language once per decision": (
            lambda: sample(every_time, batch, sde, draws),
            lambda: sample(loss, batch, sde, draws),
        ),
        f"{ROWS} decisions at once": (one_by_one, lambda: sample(loss, batch, sde, draws)),
        "all steps of a decision in one suffix, with gradients": (lambda: learn(steps), lambda: learn([walk])),
        "fused AdamW": (adam(False), adam(True)),
    }
    return {name: round(_ratio(*pair), 2) for name, pair in pairs.items()}


def _ratio(plain: Callable[[], Any], ours: Callable[[], Any]) -> float:
    spent: dict[Callable[[], Any], list[float]] = {plain: [], ours: []}
    for _ in range(ROUNDS):
        for function, seconds in spent.items():
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
    return statistics.median(spent[plain][1:]) / statistics.median(spent[ours][1:])


if __name__ == "__main__":
    raise SystemExit(main())
