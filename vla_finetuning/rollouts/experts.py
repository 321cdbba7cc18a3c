"""Record demonstrations of scripted experts as a LeRobot v3 dataset, on all CPUs of a cluster (`record.py`)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION

from vla_finetuning.columns import SUBTASK
from vla_finetuning.envs.configs import MetaworldConfig, env_config, is_own, task_makers
from vla_finetuning.envs.protocol import Maker, choose_initial_state, instruction_of
from vla_finetuning.options.programs import RecordConfig
from vla_finetuning.rollouts.recording import Frame, is_free, record_dataset

# Environments with scripted experts (`expert_action`), and their default options. Those of Meta-World are the usual
# image size of policies and the fastest rendering.
DEFAULTS = {"metaworld": ("--image_size=[224,224]", "--render_quality=fast"), "two_bins": ()}


def play_expert(config: EnvConfig, first_seed: int, env: gymnasium.Env[Any, Any], seed: int) -> list[Frame] | None:
    """Play an episode; return its frames, each with the action that followed, or None if it did not succeed.

    The episode of `first_seed` starts in the first of the environment's initial states, if it has a list.
    """
    names = {key: config.features_map[key] for key in config.features}
    choose_initial_state(env, seed - first_seed)
    seen, _ = env.reset(seed=seed)
    frames, over, success = [], False, False
    while not over:
        action = env.get_wrapper_attr("expert_action")()
        frame = {name: action if name == ACTION else _read(seen, key) for key, name in names.items()}
        if env.has_wrapper_attr(SUBTASK):
            frame[SUBTASK] = env.get_wrapper_attr(SUBTASK)
        frames.append({**frame, "task": instruction_of(env)})
        seen, _, terminated, truncated, info = env.step(action)
        over, success = terminated or truncated, bool(info.get("is_success", False))
    return frames if success else None


def _read(observation: Any, key: str) -> np.ndarray:
    """Return the value of an observation at `key` ("pixels/top"): images as uint8, vectors as float32."""
    for name in key.split("/"):
        observation = observation[name]
    return observation if observation.dtype == np.uint8 else observation.astype(np.float32)


def resolve_recording(config: RecordConfig) -> Callable[[], str]:
    """Resolve and check the environment and the destination; return the call of `record`. Raises ValueError."""
    env_type = config.env_type or ""
    env = env_config(env_type, [*DEFAULTS.get(env_type, ()), *config.env_options])
    if env_type not in DEFAULTS and not (is_own(env) and _has_expert(env)):
        raise ValueError(
            f"--env.type={env_type} has no scripted expert; those of {', '.join(DEFAULTS)} can be recorded, and an "
            "environment of your own that has expert_action()"
        )
    if isinstance(env, MetaworldConfig) and env.obs_type != "pixels_agent_pos":
        raise ValueError(f"--env.type={env_type}, obs_type={env.obs_type}: only pixels_agent_pos can be recorded")
    root = Path(config.root or "").expanduser().absolute()
    if not is_free(root, "--root"):
        raise ValueError(f"--root={root} exists and is not empty: name a new folder, or remove it")
    return partial(record, config, env, task_makers(env), root)


def _has_expert(config: EnvConfig) -> bool:
    with contextlib.closing(next(iter(task_makers(config).values()))()) as env:
        return env.has_wrapper_attr("expert_action")


def record(config: RecordConfig, env: EnvConfig, makers: Mapping[str, Maker], root: Path) -> str:
    """Record on the cluster that this process has joined; return a summary. Raises as `record_dataset`."""
    episodes = list(itertools.product(makers, range(config.seed, config.seed + config.episodes)))

    def failures(written: list[bool]) -> dict[str, list[int]]:
        failed: dict[str, list[int]] = {task: [] for task in makers}
        for (task, seed), success in zip(episodes, written, strict=True):
            failed[task] += [] if success else [seed]
        return failed

    about = {"task": env.task, "seed": config.seed, "episodes": config.episodes}
    play = partial(play_expert, env, config.seed)
    nothing = f"the experts of {', '.join(makers)} succeeded in no episode"
    written = record_dataset(
        root, makers, play, episodes, env, lambda flags: {**about, "failed": failures(flags)}, nothing
    )
    lines = [
        f"{'Recorded' if i == 0 else '':12} {config.episodes - len(seeds)} of {config.episodes}  {task}"
        + (f"; its expert failed from {len(seeds)}, which are left out" if seeds else "")
        for i, (task, seeds) in enumerate(failures(written).items())
    ]
    return "\n".join([*lines, f"Dataset      {root}"])
