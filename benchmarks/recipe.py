"""Does the recipe help? Augmentation and an average of the weights, each against none, on little data and odd cameras.

    python -m benchmarks.recipe --seeds 1,2,3,4,5 --json benchmarks/results/recipe.json

The demo's task with a tenth of its data: for each seed, another 8 demonstrations and other noise in training. A policy
is trained without augmentation and with each kind, by the run's own step on the run's own rows, in this process. The
averaged weights are of the same training as the plain ones. Each is then tried on scenes that no dataset has, as they
are, with every camera shifted, and with other colours:

    open loop     the error of its action chunks, relative to that of the mean action
    closed loop   in how many of 60 episodes it reaches the bin that it was told to (evaluation/, envs/two_bins)

Own flags: --seeds, --steps (300), --rows of a batch (32), --kinds (none,openpi,lerobot), --decay (0.99), --json PATH,
which is added to if it is there. Exit status: 0 done, 2 it could not start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diagnostics.environment import Environment
from util import Batch, NumpyToTorchCollate, train_step
from vla_finetuning.demo import DEMO_CHUNK_SIZE, make_demo_dataset
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.stage import Stage, Start
from vla_finetuning.envs.two_bins_scene import INSTRUCTIONS, demonstrate, draw_scene, render
from vla_finetuning.evaluation.intervals import share
from vla_finetuning.evaluation.open_loop import open_loop_errors
from vla_finetuning.evaluation.player import Player
from vla_finetuning.flags import parse_args
from vla_finetuning.run.plan import Run, resolve
from vla_finetuning.terminal import tell, tell_error
from vla_finetuning.training.stream import Dealt
from vla_finetuning.training.worker import (
    build_model,
    build_optimizer,
    collate_cut,
    noise_for,
    policy_batches,
    prepare_of,
    start_policy,
)

# A tenth of the demo's 40 pairs.
PAIRS = 4
EPISODES, FIRST_SEED, OPEN_LOOP_SCENES = 60, 1000, 6
KINDS = {
    "none": [],
    "openpi": ["--train.augmentation=openpi"],
    "lerobot": ["--dataset.image_transforms.enable=true"],
}
CPU = torch.device("cpu")
Images = dict[str, np.ndarray]


# ---- odd cameras -----------------------------------------------------------------------------------------------------


def as_they_are(image: np.ndarray) -> np.ndarray:
    return image


def shifted(image: np.ndarray) -> np.ndarray:
    """uint8 (..., H, W, 3), its contents 5 % to the right and down; what comes into view is what was at the edge."""
    height, width = image.shape[-3:-1]
    rows, columns = (np.maximum(np.arange(size) - round(0.05 * size), 0) for size in (height, width))
    return image[..., rows[:, None], columns[None, :], :]


def recoloured(image: np.ndarray) -> np.ndarray:
    """Darker, and in a warmer light."""
    return (image * np.array([0.95, 0.8, 0.6])).astype(np.uint8)


CAMERAS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as they are": as_they_are,
    "shifted": shifted,
    "recoloured": recoloured,
}


# ---- one training ----------------------------------------------------------------------------------------------------


def resolved(folder: Path, root: Path, seed: int, kind: str, options: argparse.Namespace) -> Run:
    flags = {
        "preset": "demo",
        "dataset.root": root,
        "dataset.eval_split": 0,
        "output_dir": folder / "run",
        "scaling.num_workers": 1,
        "scaling.use_gpu": "false",
        "batch_size": options.rows,
        "steps": options.steps,
        "seed": seed,
        "ema.enable": "true",
        "ema.decay": options.decay,
    }
    return resolve(parse_args([*(f"--{k}={v}" for k, v in flags.items()), *KINDS[kind]]), gpus_found=0)


def rows_of(run: Run) -> Iterator[Batch]:
    """The run's own batches. Its few rows are decoded once."""
    source = run.reader()(stream=(0, run.last_row))
    plan, prepare, size = source.plan, prepare_of(run), run.config.batch_size
    first_epoch = np.concatenate([window.rows()[1] for window in plan.slices(0, run.rows_per_epoch)])
    (rows,) = source.read_rows(range(run.rows_per_epoch), run.rows_per_epoch)
    place = {int(index): number for number, index in enumerate(first_epoch)}
    collate = NumpyToTorchCollate(False)
    for start in range(0, run.steps * size, size):
        index = np.concatenate([window.rows()[1] for window in plan.slices(start, start + size)])
        chosen = [place[int(i)] for i in index]
        batch = {key: column[chosen] for key, column in rows.items()}
        yield collate_cut(run, collate, prepare(batch | {"position": np.arange(start, start + size)}))


def train(run: Run) -> dict[str, dict[str, Tensor]]:
    """What trained, by its names: the weights after the last step, and their average."""
    loss, autocast = build_model(run, CPU)
    optimizer = build_optimizer(run, loss)
    dealt = Dealt(run.config.batch_size, run.block_rows, 0, 1, run.batches_per_step)
    batches = policy_batches(run, rows_of(run), dealt)
    for step in range(run.steps):
        train_step(
            loss,
            optimizer,
            batches,
            step=step,
            grad_accum=1,
            mean_over=1,
            draws=noise_for(run, step, dealt, CPU),
            autocast=autocast,
            device=CPU,
        )
    return {"weights": optimizer.named(), "average": dict(zip(optimizer.names, optimizer.average, strict=True))}


# ---- how good it is --------------------------------------------------------------------------------------------------


def unseen(seed: int, change: Callable[[np.ndarray], np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Frames of demonstrations on scenes of their own, an episode at a time, as the cameras see them."""
    rng = np.random.default_rng(10_000 + seed)
    for number in range(OPEN_LOOP_SCENES):
        scene = draw_scene(rng)
        for colour, instruction in INSTRUCTIONS.items():
            states, actions = demonstrate(scene, colour)
            ahead = np.arange(len(states))[:, None] + np.arange(DEMO_CHUNK_SIZE)
            seen = [render(scene, state) for state in states]
            yield {
                **{f"observation.images.{name}": change(np.stack([s[name] for s in seen])) for name in seen[0]},
                "observation.state": states,
                "action": actions[np.minimum(ahead, len(actions) - 1)],
                "action_is_pad": ahead >= len(actions),
                "task": np.array([instruction] * len(states), object),
                "episode_index": np.full(len(states), number),
            }


def successes(player: Player, change: Callable[[np.ndarray], np.ndarray], seed: int) -> int:
    """Episodes that end at the right bin, of EPISODES, all played at once in this process."""
    stage = Stage(task_makers(env_config("two_bins")), slots=EPISODES, step_limit_s=600.0)
    begin = [Start(number, "two_bins", FIRST_SEED + number) for number in range(EPISODES)]
    chunks, reached = None, 0
    while True:
        (ended, waiting), seen = stage.advance(begin, chunks)
        begin, reached = [], reached + sum(episode.success_once for episode in ended)
        if seen is None:
            return reached
        looked = {**seen, "pixels": {name: change(image) for name, image in seen["pixels"].items()}}
        keys = [(seed, "two_bins", decision.number, decision.decision) for decision in waiting]
        chunks = player(looked, [decision.instruction for decision in waiting], keys)


def measure(run: Run, trained: Mapping[str, Tensor], seed: int) -> dict[str, dict[str, float]]:
    """By how the cameras are: `open_loop`, relative to the mean action, and `successes`."""
    policy = start_policy(run)
    policy.load_state_dict(dict(trained), strict=False)
    pre, post = run.processors()
    player = Player(policy, pre, post, env=env_config("two_bins"), rename_map={})
    found = {}
    for name, change in CAMERAS.items():
        errors = open_loop_errors(
            policy, pre, post, unseen(seed, change), mean_action=run.stats["action"]["mean"], seed=seed
        )
        found[name] = {
            "open_loop": errors["policy"]["mse"] / errors["mean_action"]["mse"],
            "successes": successes(player, change, seed),
        }
    return found


# ---- the result ------------------------------------------------------------------------------------------------------


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means over seeds; successes with their interval over all episodes."""
    lines = [
        f"{'cameras':14}{'augmentation':14}{'weights':10}{'seeds':>6}{'open-loop error':>17}   success in the loop"
    ]
    recipes = list(dict.fromkeys((r["kind"], r["weights"]) for r in results))
    for cameras, (kind, weights) in itertools.product(CAMERAS, recipes):
        own = [r["measured"][cameras] for r in results if (r["kind"], r["weights"]) == (kind, weights)]
        errors = [m["open_loop"] for m in own]
        won = share(sum(m["successes"] for m in own), EPISODES * len(own))
        spread = f"{np.mean(errors):.3f} ({min(errors):.3f}-{max(errors):.3f})"
        lines.append(f"{cameras:14}{kind:14}{weights:10}{len(own):6}  {spread:>17}   {won}")
    return lines


def _listed(results: Sequence[Mapping[str, Any]], key: str) -> str:
    return ",".join(dict.fromkeys(str(result[key]) for result in results))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 5])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--decay", type=float, default=0.99)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.kinds) - KINDS.keys()):
        tell_error(ValueError(f"--kinds {unknown[0]}: expected some of {', '.join(KINDS)}"))
        return 2
    settings = {name: getattr(options, name) for name in ("steps", "rows", "decay")}
    results: list[dict[str, Any]] = []
    if options.json is not None and options.json.is_file():
        before = json.loads(options.json.read_text())
        if before["settings"] != settings:
            tell_error(ValueError(f"{options.json} is of {before['settings']}, not {settings}; choose another file"))
            return 2
        results = before["results"]
    with tempfile.TemporaryDirectory(prefix="recipe-") as scratch:
        for seed, kind in itertools.product(options.seeds, options.kinds):
            folder = Path(scratch, f"{seed}")
            root = make_demo_dataset(folder / "dataset", pairs=PAIRS, seed=seed)
            run = resolved(folder, root, seed, kind, options)
            started = time.perf_counter()
            trained = train(run)
            train_s = time.perf_counter() - started
            results = [r for r in results if (r["seed"], r["kind"]) != (seed, kind)]
            for weights, tensors in trained.items():
                measured = measure(run, tensors, seed)
                results.append({"seed": seed, "kind": kind, "weights": weights, "measured": measured})
            tell(f"seed {seed}, {kind}: trained in {train_s:.0f} s")
            if options.json is not None:
                written = {
                    "command": f"python -m benchmarks.recipe --seeds {_listed(results, 'seed')} "
                    f"--kinds {_listed(results, 'kind')}",
                    "settings": settings,
                    "environment": Environment.here().model_dump(mode="json"),
                    "results": results,
                }
                options.json.write_text(json.dumps(written, indent=1) + "\n")
    tell(*table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
