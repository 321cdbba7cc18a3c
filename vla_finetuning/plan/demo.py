"""The embedded default: a small LeRobot v3 dataset made on the spot, and the tiny policy that learns it.

A gantry robot moves its gripper over one of two bins (`envs/two_bins_scene.py`). Episodes come in pairs with the same
scene and start and the other instruction, so a policy that is blind, or deaf to language, cannot know where to go.

A dataset is written by LeRobot's own writer with its default video encoding. It is small but shaped like real ones:
cameras of different sizes, episodes of uneven length, one shorter than an action chunk, and several video and parquet
files that roll over at different episodes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.environment import CACHE_DIR
from vla_finetuning.envs import two_bins_scene
from vla_finetuning.envs.two_bins_scene import AXES, INSTRUCTIONS, ROBOT_TYPE, Scene, demonstrate, draw_scene
from vla_finetuning.envs.writing import writing_videos
from vla_finetuning.files import atomic_folder

# Words of a tiny policy for 512 tokens of actions, their end and their beginning.
ACTION_WORDS = 514
# The datasets of the demo, and the policies that it makes.
DEMO_CACHE = CACHE_DIR / "demo"
DEMO_PAIRS = 40  # of episodes
DEMO_SEED = 7
# What `grpo.py` repairs: in so many of its episodes the demonstrator goes to the other bin. Imitation picks that up,
# and has enough that is right to start from; with fewer pairs a policy does not learn the task beside it.
DISOBEDIENT, DISOBEDIENT_PAIRS = 0.3, 120

# The pair that starts close to one bin: its episode there is over before one action chunk is.
SHORT_PAIR, SHORT_START = 1, (14.0, 23.0, 6.0)

# Small enough that files roll over every few episodes; a camera's roll-over point follows from how well it compresses.
VIDEO_FILE_MB, DATA_FILE_MB = 0.05, 0.03
REPO_ID = "demo/two_bins"

# Code that decides what the dataset holds.
_CODE = (__file__, two_bins_scene.__file__)


def demo_scenes(pairs: int = DEMO_PAIRS, seed: int = DEMO_SEED) -> list[Scene]:
    """The scene of each pair of episodes."""
    rng = np.random.default_rng(seed)
    scenes = [draw_scene(rng) for _ in range(pairs)]
    return [replace(scene, start=SHORT_START) if pair == SHORT_PAIR else scene for pair, scene in enumerate(scenes)]


# --- on disk ---------------------------------------------------------------------------------------------------------


def disobeyed(pairs: int, share: float, seed: int = DEMO_SEED) -> np.ndarray:
    """In which episodes the demonstrator goes to the bin that was not named, bool (2 * pairs,): a share of them."""
    episodes = np.random.default_rng([seed, 1]).permutation(2 * pairs)
    return episodes < round(2 * pairs * share)


def make_demo_dataset(
    folder: Path, *, pairs: int = DEMO_PAIRS, seed: int = DEMO_SEED, disobedient: float = 0.0
) -> Path:
    """Write the demo dataset, or reuse `folder` if it exists. Safe to call from several processes at once.

    Episodes 2k and 2k + 1 show scene k with the instructions for red and for blue. The same arguments give the same
    bytes of everything but video.

    Args:
        folder: the dataset's root; it appears complete or not at all.
        pairs: number of pairs of episodes, at least 2, so that the short episode is among them.
        disobedient: share of the episodes in which the demonstrator goes to the other bin (`disobeyed`).
    Returns:
        `folder`.
    """
    assert pairs > SHORT_PAIR
    if folder.exists():
        return folder
    tasks = [(scene, target) for scene in demo_scenes(pairs, seed) for target in INSTRUCTIONS]
    other = dict(zip(INSTRUCTIONS, reversed(INSTRUCTIONS), strict=True))
    wrong = disobeyed(pairs, disobedient, seed)
    episodes = [(*task, other[task[1]] if is_wrong else task[1]) for task, is_wrong in zip(tasks, wrong, strict=True)]

    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    vector = {"dtype": "float32", "shape": (len(AXES),), "names": list(AXES)}
    features = {
        f"observation.images.{name}": {"dtype": "video", "shape": (*size, 3), "names": ["height", "width", "channels"]}
        for name, size in two_bins_scene.CAMERAS.items()
    } | {"observation.state": vector, "action": dict(vector)}
    with atomic_folder(folder) as partial, writing_videos():
        dataset = LeRobotDataset.create(
            REPO_ID,
            two_bins_scene.FPS,
            features,
            root=partial,
            robot_type=ROBOT_TYPE,
            video_backend="pyav",  # the one that needs no system libraries
            video_files_size_in_mb=VIDEO_FILE_MB,
            data_files_size_in_mb=DATA_FILE_MB,
        )
        try:
            for scene, target, colour in episodes:
                for state, action in zip(*demonstrate(scene, colour), strict=True):
                    frame = {"observation.state": state, "action": action, "task": INSTRUCTIONS[target]}
                    seen = two_bins_scene.render(scene, state).items()
                    dataset.add_frame({f"observation.images.{name}": image for name, image in seen} | frame)
                dataset.save_episode(parallel_encoding=False)
        finally:
            dataset.finalize()  # after a failure too: left to the garbage collector, it would write once more
    return folder


def prepare_dataset(cache_dir: Path) -> Path:
    """The demo dataset, made now or reused from an earlier run; its root."""
    return make_demo_dataset(Path(cache_dir) / f"dataset-{_cache_key(_CODE)}")


def prepare_base(
    cache_dir: Path,
    *,
    features: Mapping[str, Any],
    tasks: Sequence[str],
    fps: float,
    labelled: bool = False,
    insulated: bool = False,
) -> Path:
    """A LeRobot pretrained folder of a tiny PI0.5 for a run's data, made now or reused from an earlier run.

    It has no statistics: the run gives all of them to its processors.

    Args:
        cache_dir: of the base policies. features, tasks, fps: as `make_tiny_base`.
        labelled: whether instructions may end with an advantage, for which the policy needs the words.
        insulated: whether it is to learn tokens of actions, which need words too.
    Raises:
        ValueError: PI0.5 cannot use the data (`make_tiny_base`).
    """
    from vla_finetuning.options.recap import ADVANTAGE
    from vla_finetuning.policies import tiny

    endings = ("", *ADVANTAGE.values()) if labelled else ("",)
    description: dict[str, Any] = {
        "features": features,
        "tasks": [f"{task}{ending}" for task in tasks for ending in endings],
        "stats": None,
        "fps": fps,
        **({"spare_words": ACTION_WORDS} if insulated else {}),
    }
    base = Path(cache_dir) / f"base-{_cache_key([tiny.CODE], description)}"
    if not base.exists():
        with atomic_folder(base) as partial:
            tiny.make_tiny_base(partial, **description)
    return base


def prepare_disobedient(cache_dir: Path) -> Path:
    """The dataset that `grpo.py`'s demo imitates, made now or reused; its root."""
    folder = Path(cache_dir) / f"disobedient-{_cache_key(_CODE)}"
    return make_demo_dataset(folder, pairs=DISOBEDIENT_PAIRS, disobedient=DISOBEDIENT)


def _cache_key(code: Sequence[str], description: Mapping[str, Any] | None = None) -> str:
    """Twelve hex digits for what files of code make of a description: they change when any does, or LeRobot."""

    def encode(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else asdict(value)

    text = json.dumps([version("lerobot"), description], sort_keys=True, default=encode)
    return hashlib.sha256(text.encode() + b"".join(Path(file).read_bytes() for file in code)).hexdigest()[:12]
