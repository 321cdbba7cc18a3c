"""What a policy did, failures included, as a LeRobot v3 dataset (`evaluate.py --eval.record_dataset`).

Episodes are played again from the actions that were executed, with rendering on, each checked to end in the state in
which it had ended; so an evaluation that records is the one that does not, and writing waits for nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import preprocess_observation
from lerobot.utils.constants import ACTION, DONE, OBS_STR, REWARD

from vla_finetuning.envs.configs import how_drawn
from vla_finetuning.envs.film import play_again
from vla_finetuning.envs.stage import Maker, Observation, choose_gl
from vla_finetuning.envs.writing import merge_datasets, writing_videos
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.environment import ENVIRONMENT_NAME
from vla_finetuning.policies.processors import IMAGENET_STEP
from vla_finetuning.policies.registry import family_of
from vla_finetuning.terminal import tell

REPO_ID, SUCCESS = "recorded/policy", "next.success"
# Episodes that a process writes as a dataset of its own: enough that starting it is not what takes the time.
SHARE_EPISODES = 10
# An episode: its line in episodes.jsonl, and the actions that were executed, (steps, A).
PlayedEpisode = tuple[Mapping[str, Any], np.ndarray]


@dataclass(frozen=True)
class Eyes:
    """How an environment's observations become a dataset's, as a policy sees them before its own processors."""

    env: EnvConfig
    config: PreTrainedConfig

    def __call__(self, observation: Observation) -> dict[str, np.ndarray]:
        """Of one observation: cameras uint8 (H, W, 3), vectors float32, by LeRobot's names."""
        before, _ = family_of(self.config).env_processors(self.config, self.env, own=(IMAGENET_STEP,))
        seen = before(preprocess_observation(_stacked(observation)))
        found = {}
        for key, value in seen.items():
            if key.startswith(OBS_STR) and isinstance(value, torch.Tensor):
                row = value[0]
                image = row.ndim == 3
                found[key] = ((row * 255).round().to(torch.uint8).permute(1, 2, 0) if image else row.float()).numpy()
        return found


def _stacked(observation: Observation) -> Observation:
    return {k: _stacked(v) if isinstance(v, dict) else np.asarray(v)[None] for k, v in observation.items()}


def recorded_frames(maker: Maker, eyes: Eyes, played: PlayedEpisode) -> Iterator[dict[str, Any]]:
    """The frames of an episode as LeRobot's writer takes them: what was seen, done, and came of it.

    Raises:
        ValueError: it began or ended in another state than it had.
    """
    line, actions = played
    with maker() as env:
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


def record_share(folder: Path, makers: Mapping[str, Maker], eyes: Eyes, share: Sequence[PlayedEpisode]) -> Path:
    """Write some episodes as a dataset of their own. Runs in a Ray task; done again, it begins anew."""
    choose_gl()
    with makers[share[0][0]["task"]]() as env:
        names = env.get_wrapper_attr("dimension_names") if env.has_wrapper_attr("dimension_names") else {}
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # needed for recording only, and takes seconds

    shutil.rmtree(folder, ignore_errors=True)
    dataset = None
    with writing_videos():
        try:
            for played in share:
                for frame in recorded_frames(makers[played[0]["task"]], eyes, played):
                    if dataset is None:
                        dataset = LeRobotDataset.create(
                            REPO_ID,
                            eyes.env.fps,
                            {key: _feature(value, names.get(key)) for key, value in frame.items() if key != "task"},
                            root=folder,
                            robot_type=eyes.env.type,
                            video_backend="pyav",
                        )
                    dataset.add_frame(frame)
                assert dataset is not None  # no episode is empty
                dataset.save_episode(parallel_encoding=False)
        finally:
            if dataset is not None:
                dataset.finalize()
    return folder


def _feature(value: np.ndarray, names: Sequence[str] | None) -> dict[str, Any]:
    if value.ndim == 3:
        return {"dtype": "video", "shape": value.shape, "names": ["height", "width", "channels"]}
    return {"dtype": str(value.dtype), "shape": value.shape, "names": None if names is None else list(names)}


def is_recorded(root: Path, about: Mapping[str, Any], flag: str = "--eval.record_dataset") -> bool:
    """Whether a folder holds the dataset of this evaluation.

    Args:
        about: as for `record_played`. flag: by which the folder was given.
    Raises:
        ValueError: it holds something else.
    """
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    if read_json(root / "meta" / ENVIRONMENT_NAME).get("evaluation") != json.loads(json.dumps(about)):
        raise ValueError(f"{flag}={root} exists and is not empty: name a new folder, or remove it")
    return True


def record_played(
    root: Path,
    makers: Mapping[str, Maker],
    eyes: Eyes,
    episodes: Sequence[PlayedEpisode],
    about: Mapping[str, Any],
) -> None:
    """Write episodes as a dataset, which appears at its place complete or not at all.

    Runs on the driver, joined to a cluster.

    Args:
        about: what tells this evaluation from others, as JSON.
    """
    parts = root.parent / f".{root.name}.{os.getpid()}.partial"
    shares = [episodes[first : first + SHARE_EPISODES] for first in range(0, len(episodes), SHARE_EPISODES)]
    write: Any = ray.remote(record_share).options(num_cpus=1)
    pending = [write.remote(parts / str(number), dict(makers), eyes, share) for number, share in enumerate(shares)]
    left = list(pending)
    try:
        while left:
            (ready,), left = ray.wait(left)
            ray.get(ready)
            tell(f"{len(shares) - len(left)} of {len(shares)} parts of {root.name} written")
        merge_datasets(REPO_ID, ray.get(pending), parts / "dataset")
        write_json(parts / "dataset" / "meta" / ENVIRONMENT_NAME, {"drawn": how_drawn(eyes.env), "evaluation": about})
        if root.is_dir():
            root.rmdir()  # it is empty
        (parts / "dataset").rename(root)
    except BaseException:
        for ref in left:
            ray.cancel(ref, force=True)
        raise
    finally:
        shutil.rmtree(parts, ignore_errors=True)
