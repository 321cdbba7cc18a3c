"""Demonstrations by scripted experts, written as one LeRobot v3 dataset by all CPUs of a cluster (`record.py`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from lerobot.configs import FeatureType
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION

from vla_finetuning.envs.configs import MetaworldConfig, env_config, how_drawn, task_makers
from vla_finetuning.envs.stage import Maker, choose_gl
from vla_finetuning.envs.writing import merge_datasets, writing_videos
from vla_finetuning.files import write_json
from vla_finetuning.options.environment import ENVIRONMENT_NAME
from vla_finetuning.options.programs import RecordConfig
from vla_finetuning.terminal import tell

# Environments with scripted experts (`expert_action`), and their options where the command line says nothing: of
# Meta-World what policies see, drawn as fast as it goes.
DEFAULTS = {
    "metaworld": ("--image_size=[224,224]", "--render_quality=fast"),
    "two_bins": (),
}
# Of which a process writes a dataset of its own: enough that starting it is not what takes the time.
SHARE_EPISODES = 10


@dataclass(frozen=True)
class RecordingBatch:
    """Episodes of one task that one process plays and writes.

    Attributes:
        folder: where they are; it does not exist if no episode succeeded.
        failed: seeds of those that did not.
    """

    task: str
    seeds: tuple[int, ...]
    folder: Path
    failed: tuple[int, ...] = ()


def repo_id(env: EnvConfig) -> str:
    """What recorded datasets of an environment call themselves."""
    return f"recorded/{env.type}"


def record_share(share: RecordingBatch, maker: Maker, config: EnvConfig) -> RecordingBatch:
    """Play a share's episodes and write those that succeed. Runs in a Ray task; done again, it begins anew."""
    choose_gl()
    # Needed for recording only, and takes seconds to import.
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    shutil.rmtree(share.folder, ignore_errors=True)
    env = maker()
    names = env.get_wrapper_attr("dimension_names")
    features = {
        key: {"dtype": "video", "shape": feature.shape, "names": ["height", "width", "channels"]}
        if feature.type is FeatureType.VISUAL
        else {"dtype": "float32", "shape": feature.shape, "names": names[key]}
        for key, feature in ((config.features_map[seen], feature) for seen, feature in config.features.items())
    }
    dataset, failed = None, []
    with writing_videos():
        try:
            for seed in share.seeds:
                frames, success = play_expert(env, seed, config.features_map)
                if not success:
                    failed.append(seed)
                    continue
                dataset = dataset or LeRobotDataset.create(
                    repo_id(config),
                    config.fps,
                    features,
                    root=share.folder,
                    robot_type=env.get_wrapper_attr("robot_type"),
                    video_backend="pyav",
                )
                for frame in frames:
                    dataset.add_frame(frame)
                dataset.save_episode(parallel_encoding=False)
        finally:
            env.close()
            if dataset is not None:
                dataset.finalize()
    return RecordingBatch(share.task, share.seeds, share.folder, tuple(failed))


def play_expert(env: Any, seed: int, features_map: Mapping[str, str]) -> tuple[list[dict[str, Any]], bool]:
    """An episode's frames as LeRobot's writer takes them, each with the action that followed; whether it succeeded.

    Args:
        features_map: LeRobot's: names of the dataset by those of the environment, as `pixels/top`.
    """
    seen, _ = env.reset(seed=seed)
    frames, over, success = [], False, False
    while not over:
        action = env.get_wrapper_attr("expert_action")()
        frame = {name: action if name == ACTION else _found(seen, key) for key, name in features_map.items()}
        frames.append({**frame, "task": env.get_wrapper_attr("task_description")})
        seen, _, terminated, truncated, info = env.step(action)
        over, success = terminated or truncated, info["is_success"]
    return frames, success


def _found(observation: Any, key: str) -> np.ndarray:
    """An observation's images as they are, uint8, and its vectors as float32."""
    for name in key.split("/"):
        observation = observation[name]
    return observation if observation.dtype == np.uint8 else observation.astype(np.float32)


@dataclass(frozen=True)
class Recording:
    """What is to be recorded, found and checked."""

    config: RecordConfig
    env: EnvConfig
    makers: dict[str, Maker]
    root: Path


def resolve_recording(config: RecordConfig) -> Recording:
    """Find and check the environment and the place.

    Raises:
        ValueError: nothing can be recorded so.
    """
    kind = config.env_type or ""
    if kind not in DEFAULTS:
        env_config(kind)  # which says what there is
        raise ValueError(f"--env.type={kind} has no scripted expert; those of {', '.join(DEFAULTS)} can be recorded")
    env = env_config(kind, [*DEFAULTS[kind], *config.env_options])
    if isinstance(env, MetaworldConfig) and env.obs_type != "pixels_agent_pos":
        raise ValueError(f"--env.type={kind}, obs_type={env.obs_type}: what is recorded is pixels_agent_pos")
    root = Path(config.root or "").expanduser().absolute()
    if root.is_file() or (root.is_dir() and any(root.iterdir())):
        raise ValueError(f"--root={root} exists and is not empty: name a new folder, or remove it")
    return Recording(config, env, task_makers(env), root)


def record(recording: Recording) -> str:
    """Record on the cluster that this process has joined, and say what became of it.

    The dataset appears at its place complete or not at all.

    Raises:
        ValueError: no episode succeeded.
    """
    config, env, makers, root = recording.config, recording.env, recording.makers, recording.root
    parts = root.parent / f".{root.name}.{os.getpid()}.partial"
    seeds = range(config.seed, config.seed + config.episodes)
    shares = [
        RecordingBatch(task, tuple(seeds[first : first + SHARE_EPISODES]), parts / f"{task}-{first}")
        for task in makers
        for first in range(0, len(seeds), SHARE_EPISODES)
    ]
    try:
        done = _record_all(shares, makers, env)
        written = [share.folder for share in done if len(share.failed) < len(share.seeds)]
        if not written:
            raise ValueError(f"the experts of {', '.join(makers)} succeeded in no episode: nothing is written")
        merge_datasets(repo_id(env), written, parts / "dataset")
        about = {"drawn": how_drawn(env), "task": env.task, "seed": config.seed, "episodes": config.episodes}
        failed = {task: [seed for share in done if share.task == task for seed in share.failed] for task in makers}
        write_json(parts / "dataset" / "meta" / ENVIRONMENT_NAME, {**about, "failed": failed})
        (parts / "dataset").rename(root)
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    lines = [
        f"{'Recorded' if i == 0 else '':12} {config.episodes - len(seeds)} of {config.episodes}  {task}"
        + (f"; its expert failed from {len(seeds)}, which are left out" if seeds else "")
        for i, (task, seeds) in enumerate(failed.items())
    ]
    return "\n".join([*lines, f"Dataset      {root}"])


def _record_all(shares: Sequence[RecordingBatch], makers: dict[str, Maker], env: EnvConfig) -> list[RecordingBatch]:
    """The shares as they were done, in their order."""
    one: Any = ray.remote(record_share).options(num_cpus=1)
    pending = [one.remote(share, makers[share.task], env) for share in shares]
    results, left = list(pending), list(pending)
    try:
        while left:
            (ready,), left = ray.wait(left)
            share = ray.get(ready)
            tell(
                f"{len(shares) - len(left)} of {len(shares)}  {share.task}, seeds {share.seeds[0]} to {share.seeds[-1]}"
            )
    except BaseException:
        for ref in left:
            ray.cancel(ref, force=True)
        raise
    return list(ray.get(results))
