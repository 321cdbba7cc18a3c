"""Write episodes of scripted experts or of a policy as one LeRobot v3 dataset, on all CPUs of a cluster.

A policy's episodes, failures included, are replayed from their executed actions with rendering on. Recording therefore
does not change an evaluation or slow it down. An episode whose replay starts or ends in another state is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import ray
from lerobot.envs.configs import EnvConfig
from lerobot.utils.constants import ACTION, DONE, REWARD
from ray.exceptions import WorkerCrashedError

from vla_finetuning.environment import Timeouts
from vla_finetuning.envs.configs import how_drawn
from vla_finetuning.envs.contract import ContractError
from vla_finetuning.envs.protocol import Maker, Observation, attribute, choose_gl, close_quietly
from vla_finetuning.envs.writing import merge_datasets, writing_videos
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.environment import ENVIRONMENT_NAME
from vla_finetuning.rollouts.episodes import PlayedEpisode
from vla_finetuning.rollouts.replay import NotRepeatedError, play_again
from vla_finetuning.rollouts.stage import Limited
from vla_finetuning.run.folder import check_place
from vla_finetuning.terminal import print_safe

if TYPE_CHECKING:  # experts are recorded without PyTorch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    from vla_finetuning.rollouts.player import Eyes

REPO_ID, SUCCESS = "recorded/episodes", "next.success"  # LeRobot's writer needs a name; nothing reads it
# Episodes that one task writes as a dataset of its own; more would balance worse, fewer would mostly start processes.
SHARE_EPISODES = 10
# Least height and width of a video. LeRobot's encoder, SVT-AV1 3.0.0 of PyAV 15.1, kills the process at widths, and at
# some heights, of 24 pixels or less. Smaller cameras are written as images.
MIN_VIDEO_SIDE = 25
# Interval of lines about parts while none is written.
TELL_EVERY_S = 300.0
# A frame as LeRobot's writer takes it.
Frame = dict[str, Any]
# Plays an episode in an environment of its task and returns its frames, or None to skip the episode.
Play = Callable[[gymnasium.Env[Any, Any], Any], Iterable[Frame] | None]
# Episodes: the environment's task and the argument of `Play`.
Share = Sequence[tuple[str, Any]]


def write_share(
    folder: Path, makers: Mapping[str, Maker], play: Play, share: Share, env_config: EnvConfig
) -> tuple[list[bool], list[str]]:
    """Write the episodes of a share as a dataset in `folder`, which is emptied first. Runs in a Ray task.

    Returns whether each episode was written, and the reasons for episodes that do not repeat or raised. Raises
    FileNotFoundError if the node does not see the driver's folder.
    """
    if not folder.parent.is_dir():
        raise FileNotFoundError(
            f"{socket.gethostname()} does not see {folder.parent}, where the driver collects the dataset's parts: give "
            "a path that all nodes share"
        )
    choose_gl()
    shutil.rmtree(folder, ignore_errors=True)
    dataset, current = None, None
    written: list[bool] = []
    left_out: list[str] = []
    with contextlib.ExitStack() as env_stack, writing_videos():
        try:
            for task, episode in share:
                if task != current:
                    env_stack.close()
                    env, current = makers[task](), task
                    env_stack.callback(close_quietly, env)
                written.append(False)
                try:
                    for frame in _frames(play, env, episode):
                        if dataset is None:
                            dataset = _create(folder, env_config, env, frame)
                        dataset.add_frame(frame)
                        written[-1] = True
                except NotRepeatedError as error:
                    left_out.append(f"{task}: {error}")
                    written[-1] = False
                    if dataset is not None:
                        dataset.clear_episode_buffer()
                    current = None  # the environment may be broken: make it anew
                if written[-1]:
                    assert dataset is not None  # no episode is empty
                    dataset.save_episode(parallel_encoding=False)
        finally:
            if dataset is not None:
                dataset.finalize()
    return written, left_out


def _frames(play: Play, env: gymnasium.Env[Any, Any], episode: Any) -> Iterator[Frame]:
    """Yield an episode's frames; raise an environment's errors as NotRepeatedError, so that only this episode ends."""
    try:
        yield from play(env, episode) or ()
    except (ContractError, NotRepeatedError):
        raise
    except Exception as error:
        raise NotRepeatedError(f"{type(error).__name__}: {error}") from error


def _create(folder: Path, config: EnvConfig, env: gymnasium.Env[Any, Any], frame: Frame) -> LeRobotDataset:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # needed for recording only, and takes seconds

    names = attribute(env, "dimension_names") or {}
    return LeRobotDataset.create(
        REPO_ID,
        config.fps,
        {key: _feature(value, names.get(key)) for key, value in frame.items() if key != "task"},
        root=folder,
        robot_type=attribute(env, "robot_type") or config.type,
        video_backend="pyav",
    )


def _feature(value: np.ndarray | str, names: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(value, str):
        return {"dtype": "string", "shape": (1,), "names": None}
    if value.ndim == 3:
        dtype = "video" if min(value.shape[:2]) >= MIN_VIDEO_SIDE else "image"
        return {"dtype": dtype, "shape": value.shape, "names": ["height", "width", "channels"]}
    return {"dtype": str(value.dtype), "shape": value.shape, "names": None if names is None else list(names)}


def record_dataset(
    root: Path,
    makers: Mapping[str, Maker],
    play: Play,
    episodes: Share,
    env_config: EnvConfig,
    about: Callable[[list[bool]], Mapping[str, Any]],
    nothing: str,
) -> list[bool]:
    """Write episodes as a dataset, which appears at `root` complete or not at all. Runs on the driver, on a cluster.

    Returns whether each episode was written; raises ValueError, with the message `nothing`, if none was.

    Args:
        root: folder of the dataset; `is_free` is true of it.
        about: function from the returned flags to the content of environment.json, besides how images are drawn.
    """
    shares, step_limit_s = list(itertools.batched(episodes, SHARE_EPISODES)), Timeouts.from_environment().step
    limited = {name: partial(Limited, make, step_limit_s) for name, make in makers.items()}
    root = root.resolve() if root.is_symlink() else root  # a link cannot be replaced
    partial_folder = root.parent / f".{root.name}.{os.getpid()}.partial"
    folders = [partial_folder / str(number) for number in range(len(shares))]
    partial_folder.mkdir(parents=True, exist_ok=True)
    task: Any = ray.remote(write_share).options(num_cpus=1)
    pending = [
        task.remote(folder, {name: limited[name] for name, _ in share}, play, share, env_config)
        for folder, share in zip(folders, shares, strict=True)
    ]
    running = list(pending)
    try:
        while running:
            ready, running = ray.wait(running, timeout=TELL_EVERY_S)
            ray.get(ready)
            free = "" if ready else f"; {ray.available_resources().get('CPU', 0):g} CPUs of the cluster are free"
            print_safe(f"{len(shares) - len(running)} of {len(shares)} parts of {root.name} written{free}")
        by_share, reasons = zip(*ray.get(pending), strict=True)
        full = [folder for folder, flags in zip(folders, by_share, strict=True) if any(flags)]
        written, left_out = (list(itertools.chain(*parts)) for parts in (by_share, reasons))
        if not full:
            raise ValueError(f"{nothing}: nothing is written{f'; {left_out[0]}' if left_out else ''}")
        if left_out:
            print_safe(f"left out     {len(left_out)} episodes, e.g. of {left_out[0]}")
        merged = partial_folder / "dataset"
        merge_datasets(REPO_ID, full, merged)
        write_json(merged / "meta" / ENVIRONMENT_NAME, {"drawn": how_drawn(env_config), **about(written)})
        merged.rename(root)  # absent, or an empty folder
    except WorkerCrashedError as error:
        why = f"its process died at each attempt, or a step took more than {step_limit_s:g} s (VLA_STEP_TIMEOUT_S)"
        raise RuntimeError(f"a part of {root.name} cannot be written: {why}") from error
    finally:
        for ref in running:
            ray.cancel(ref, force=True)
        shutil.rmtree(partial_folder, ignore_errors=True)
    return written


# ---- episodes that a policy has played ------------------------------------------------------------------------------


def replay_frames(
    eyes: Callable[[Observation], Mapping[str, np.ndarray]], env: gymnasium.Env[Any, Any], played: PlayedEpisode
) -> Iterator[Frame]:
    """Yield an episode's frames: observation, action, reward, success and end. Raises as `play_again`."""
    line, actions = played
    moments = play_again(env, line, actions)
    seen = next(moments).observation
    for action, after in zip(actions, moments, strict=True):
        yield {
            **eyes(seen),
            ACTION: np.asarray(action, np.float32),
            REWARD: np.array([after.reward], np.float32),
            DONE: np.array([after.over]),
            SUCCESS: np.array([bool(after.info.get("is_success", False))]),
            "task": line["instruction"],
        }
        seen = after.observation


def is_free(root: Path, flag: str) -> bool:
    """Return whether a folder is absent or empty, for a dataset.

    Raises ValueError for an empty mount point, and OSError as `check_place`.
    """
    if os.path.isdir(root) and any(root.iterdir()):
        return False
    check_place(root, flag)
    if os.path.ismount(root):
        raise ValueError(f"{flag}={root} is a mount point, which no finished dataset can replace: name a folder in it")
    return True


def is_recorded(root: Path, about: Mapping[str, Any], flag: str = "--eval.record_dataset") -> bool:
    """Return whether a folder holds the dataset of `record_played`. Raises ValueError if it holds something else."""
    if is_free(root, flag):
        return False
    stored = {"errors": 0, **read_json(root / "meta" / ENVIRONMENT_NAME).get("evaluation", {})}
    if not json.loads(json.dumps(about)).items() <= stored.items():
        raise ValueError(
            f"{flag}={root} exists and is not empty, and not of exactly these episodes: name a new folder, or remove it"
        )
    return True


def record_played(
    root: Path, makers: Mapping[str, Maker], eyes: Eyes, episodes: Sequence[PlayedEpisode], about: Mapping[str, Any]
) -> None:
    """Write a policy's finished episodes as a dataset in `root`, which is absent or empty, and print a summary.

    `about` is the identity of the evaluation, as JSON. Runs on the driver, joined to a cluster.
    """
    played = [(line["task"], (line, actions)) for line, actions in episodes]
    play, nothing = partial(replay_frames, eyes), "no episode could be repeated from its actions"
    written = record_dataset(root, makers, play, played, eyes.env, lambda _: {"evaluation": about}, nothing)
    lines = [line for (line, _), is_written in zip(episodes, written, strict=True) if is_written]
    succeeded, left_out = sum(line["success_once"] for line in lines), len(episodes) - len(lines)
    besides = f"; {left_out} left out, which do not repeat: their environment is not deterministic" if left_out else ""
    print_safe(f"Dataset      {root}: {len(lines)} episodes, {succeeded} succeeded{besides}")
