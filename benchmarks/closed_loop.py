"""How fast episodes are played, against `lerobot-eval` and against what they must cost.

    python -m benchmarks.closed_loop [--env two_bins metaworld] --json FILE

A small ACT with random weights, which draws nothing, plays the same episodes three ways, one after the other: by
LeRobot's own `eval_policy` (what `lerobot-eval` calls; without its videos, in batches of one as it chooses on two
cores), on Ray as evaluate.py does, and in one process and one thread with nothing but physics, rendering where the
policy looks, and inference in the same batches. That an episode's success and return are the same all three ways is
checked. On Ray, how long one more episode takes is told apart from what starting costs, by playing few and many.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from lerobot.configs import FeatureType
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import env_to_policy_features
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
from lerobot.scripts.lerobot_eval import eval_policy

from diagnostics.environment import Environment
from vla_finetuning.config import EvalOptions
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.stage import Stage, Start
from vla_finetuning.evaluation.closed_loop import Cast, PolicyServer, Row, play
from vla_finetuning.evaluation.episodes import Condition, episode_list
from vla_finetuning.evaluation.player import PolicySource
from vla_finetuning.policies.loading import load_policy, save_pretrained
from vla_finetuning.policies.processors import load_processors
from vla_finetuning.run import cluster
from vla_finetuning.terminal import tell

# Name, its flags, steps of an episode, how many are played: by LeRobot, and on Ray few and many; and rows of a batch.
# Few are as many as make the same processes and environments as many do: what differs is episodes alone.
# Meta-World as LeRobot draws it, 480x480 in full quality: the same pictures for both.
SETTINGS: dict[str, tuple[list[str], int, tuple[int, int, int], int]] = {
    "two_bins": (["--episode_length=40"], 40, (20, 128, 512), 32),
    "metaworld": (["--task=push-v3", "--episode_length=60"], 60, (2, 20, 48), 8),
}
N_ACTION_STEPS = 10
SEED = 1000


def make_policy(env: EnvConfig, folder: Path) -> None:
    """A small ACT for what an environment shows, the same one every time."""
    features = env_to_policy_features(env)
    inputs = {key: feature for key, feature in features.items() if feature.type is not FeatureType.ACTION}
    config = ACTConfig(
        input_features=inputs, output_features={"action": features["action"]}, chunk_size=N_ACTION_STEPS,
        n_action_steps=N_ACTION_STEPS, dim_model=64, n_heads=4, dim_feedforward=128, n_encoder_layers=1,
        n_decoder_layers=1, use_vae=False, vision_backbone="resnet18", pretrained_backbone_weights=None, device="cpu",
    )  # fmt: skip
    torch.manual_seed(0)
    vectors = {key: feature for key, feature in features.items() if len(feature.shape) == 1}
    stats = {key: {"mean": np.zeros(f.shape), "std": np.ones(f.shape)} for key, f in vectors.items()}
    pre, post = make_pre_post_processors(config, dataset_stats=stats)
    save_pretrained(ACTPolicy(config), pre, post, folder)


def by_lerobot(env: EnvConfig, source: PolicySource, steps: int, episodes: int) -> tuple[float, dict[int, float]]:
    """Seconds an episode, and returns by seed, of LeRobot's own evaluation with its own environments."""
    config = env if env.type == "two_bins" else EnvConfig.get_known_choices()[env.type](task=env.task)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        (vector,) = next(iter(config.create_envs(n_envs=1).values())).values()
        for one in vector.envs:
            one.unwrapped._max_episode_steps = steps  # where LeRobot's rollout ends an episode
        policy = load_policy(source.folder, source.config)
        pre, post = load_processors(source.folder, source.config)
        same = config.get_env_processors()
        eval_policy(vector, policy, *same, pre, post, n_episodes=1, start_seed=SEED)  # what only the first one costs
        started = time.perf_counter()
        found = eval_policy(vector, policy, *same, pre, post, n_episodes=episodes, start_seed=SEED)
        seconds = time.perf_counter() - started
        vector.close()
    returns = {one["seed"]: one["sum_reward"] for one in found["per_episode"]}
    return seconds / episodes, returns


def on_ray(makers: Any, source: PolicySource, options: EvalOptions, episodes: int) -> tuple[float, dict[int, float]]:
    """Seconds of a whole evaluation, on a cluster that runs already, and returns by seed."""
    returns: dict[int, float] = {}

    def written(line: dict[str, Any]) -> None:
        assert line["error"] is None, line
        returns[line["seed"]] = line["total_reward"]

    listed = episode_list(["plain"], makers, episodes, SEED)
    started = time.perf_counter()
    play(listed, {"plain": Condition()}, {"policy": source}, makers, options, seed=0, written=written)
    return time.perf_counter() - started, returns


def alone(makers: Any, source: PolicySource, rows: int, episodes: int) -> tuple[float, dict[int, float]]:
    """Seconds an episode in this process and one thread, `rows` of them side by side, and returns by seed."""
    torch.set_num_threads(1)
    stage, server = Stage(makers, rows, 600.0), PolicyServer({"policy": source}, rows, exact=False)
    (task,) = makers
    returns: dict[int, float] = {}

    def run(first: int, last: int) -> None:
        left = [Start(i, task, SEED + i, i) for i in range(first, last)]
        actions = None
        while True:
            (ended, waiting), seen = stage.advance(left, actions)
            begun = {one.number for one in ended} | {one.number for one in waiting}
            left = [start for start in left if start.number not in begun]
            returns.update({SEED + one.number: one.total_reward for one in ended})
            if seen is None:
                return
            actions = server.act(
                [Row("policy", d.instruction, False, (0, task, d.number, d.decision)) for d in waiting], seen
            )

    run(0, rows)  # what only the first ones cost
    started = time.perf_counter()
    run(0, episodes)
    return (time.perf_counter() - started) / episodes, returns


def measure(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    flags, steps, (theirs, few, many), batch_size = SETTINGS[name]
    env = env_config(name, flags)
    make_policy(env, folder)
    config = ACTConfig.from_pretrained(folder)
    source, makers, options = PolicySource(folder, config, env), task_makers(env), EvalOptions(batch_size=batch_size)
    cores = len(os.sched_getaffinity(0))
    cast, same = (
        Cast.of(options, cores, episodes=n, weights_bytes=source.weights_bytes, use_gpu=False) for n in (many, few)
    )
    assert cast == same, (cast, same)
    rounds_of: dict[str, list[float]] = {"lerobot_s": [], "alone_s": [], "start_s": [], "ours_s": []}
    threads = torch.get_num_threads()
    for _ in range(rounds):
        torch.set_num_threads(threads)
        seconds, expected = by_lerobot(env, source, steps, theirs)
        rounds_of["lerobot_s"].append(seconds)
        short, _ = on_ray(makers, source, options, few)
        long, found = on_ray(makers, source, options, many)
        rounds_of["ours_s"].append((long - short) / (many - few))
        rounds_of["start_s"].append(short - few * rounds_of["ours_s"][-1])
        seconds, bare = alone(makers, source, cast.slots, min(many, 2 * cast.slots))
        rounds_of["alone_s"].append(seconds)
        for seed, value in expected.items():
            assert np.allclose([found[seed], bare[seed]], value, rtol=1e-4, atol=1e-4), (seed, value, found[seed])
    best = {key: float(np.median(values)) for key, values in rounds_of.items()}
    result = {
        "flags": flags,
        "episodes": {"lerobot": theirs, "ours": [few, many]},
        "processes": asdict(cast),
        "seconds_an_episode": rounds_of,
        "episodes_per_minute": {"lerobot": 60 / best["lerobot_s"], "ours": 60 / best["ours_s"]},
        "start_s": best["start_s"],
        "times_lerobot": best["lerobot_s"] / best["ours_s"],
        # All cores busy with nothing else would need alone_s / cores.
        "of_the_possible": best["alone_s"] / cores / best["ours_s"],
    }
    tell(f"{name}: {json.dumps(result)}")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the result goes")
    args = parser.parse_args(argv)
    cluster.connect()
    try:
        with tempfile.TemporaryDirectory(prefix="closed-loop-") as folder:
            found = {name: measure(name, Path(folder) / name, args.rounds) for name in args.env}
    finally:
        ray.shutdown()
    result = {
        "command": f"python -m benchmarks.closed_loop --env {' '.join(args.env)} --rounds {args.rounds}",
        "hardware": Environment.here().model_dump(),
        "results": found,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
