"""Make the demo: a small LeRobot v3 dataset, and the tiny policy that learns it.

A gantry robot moves its gripper over one of two bins (`envs/two_bins_scene.py`). Episodes come in pairs with equal
scene and start and different instructions, so that a policy needs both vision and language.

LeRobot's own writer writes the dataset with its default video encoding. The dataset has the variety of real ones:
cameras of different sizes, episodes of uneven length, one shorter than an action chunk, and several video and parquet
files that end at different episodes.
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

# The datasets of the demo, and the policies that it makes.
DEMO_CACHE = CACHE_DIR / "demo"
DEMO_PAIRS = 40  # of episodes
DEMO_SEED = 7
# For the demo of `grpo.py`: the share of episodes in which the demonstrator goes to the other bin. A policy imitates
# these too. With fewer pairs it does not learn the task at all.
DISOBEDIENT, DISOBEDIENT_PAIRS = 0.3, 120

# This pair starts close to one bin, so that one of its episodes is shorter than an action chunk.
SHORT_PAIR, SHORT_START = 1, (14.0, 23.0, 6.0)

# Small enough that a file holds only a few episodes; how many differs among cameras with their compression.
VIDEO_FILE_MB, DATA_FILE_MB = 0.05, 0.03
REPO_ID = "demo/two_bins"

# Source files that determine the dataset's content.
_CODE = (__file__, two_bins_scene.__file__)


def demo_scenes(pairs: int = DEMO_PAIRS, seed: int = DEMO_SEED) -> list[Scene]:
    """Draw the scene of each pair of episodes."""
    rng = np.random.default_rng(seed)
    scenes = [draw_scene(rng) for _ in range(pairs)]
    return [replace(scene, start=SHORT_START) if pair == SHORT_PAIR else scene for pair, scene in enumerate(scenes)]


# --- on disk ---------------------------------------------------------------------------------------------------------


def disobeyed(pairs: int, share: float, seed: int = DEMO_SEED) -> np.ndarray:
    """Choose the `share` of episodes in which the demonstrator goes to the wrong bin: bool (2 * pairs,)."""
    episodes = np.random.default_rng([seed, 1]).permutation(2 * pairs)
    return episodes < round(2 * pairs * share)


def make_demo_dataset(folder: Path, *, pairs: int, seed: int = DEMO_SEED, disobedient: float = 0.0) -> Path:
    """Write the demo dataset, or reuse `folder` if it exists. Safe to call from several processes at once.

    Episodes 2k and 2k + 1 show scene k with the instructions for red and for blue. The same arguments give the same
    bytes of everything but video. `disobedient` is the share of `disobeyed` episodes.
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
            video_backend="pyav",  # needs no system libraries
            video_files_size_in_mb=VIDEO_FILE_MB,
            data_files_size_in_mb=DATA_FILE_MB,
        )
        try:
            for scene, target, colour in episodes:
                for state, action in zip(*demonstrate(scene, colour), strict=True):
                    frame = {"observation.state": state, "action": action, "task": INSTRUCTIONS[target]}
                    images = two_bins_scene.render(scene, state).items()
                    dataset.add_frame({f"observation.images.{name}": image for name, image in images} | frame)
                dataset.save_episode(parallel_encoding=False)
        finally:
            dataset.finalize()  # also after a failure: the garbage collector would write again
    return folder


def prepare_dataset(cache_dir: Path) -> Path:
    """Make the demo dataset, or reuse an earlier run's; return its root."""
    return make_demo_dataset(Path(cache_dir) / f"dataset-{_cache_key(_CODE)}", pairs=DEMO_PAIRS)


def prepare_base(
    cache_dir: Path,
    *,
    features: Mapping[str, Any],
    tasks: Sequence[str],
    fps: float,
    labelled: bool = False,
    spare_words: int = 0,
) -> Path:
    """Make a LeRobot pretrained folder of a tiny PI0.5 for a run's data, or reuse an earlier run's.

    The folder has no statistics: the run gives all of them to the processors. `labelled` adds words for instructions
    that end with an advantage. Other arguments are those of `make_tiny_base`.
    """
    from vla_finetuning.options.recap import ADVANTAGE
    from vla_finetuning.policies import tiny

    endings = ("", *ADVANTAGE.values()) if labelled else ("",)
    description: dict[str, Any] = {
        "features": features,
        "tasks": [f"{task}{ending}" for task in tasks for ending in endings],
        "stats": None,
        "fps": fps,
        "spare_words": spare_words,
    }
    base = Path(cache_dir) / f"base-{_cache_key([tiny.CODE], description)}"
    if not base.exists():
        with atomic_folder(base) as partial:
            tiny.make_tiny_base(partial, **description)
    return base


def prepare_disobedient(cache_dir: Path) -> Path:
    """Make the dataset that `grpo.py`'s demo imitates, or reuse an earlier run's; return its root."""
    folder = Path(cache_dir) / f"disobedient-{_cache_key(_CODE)}"
    return make_demo_dataset(folder, pairs=DISOBEDIENT_PAIRS, disobedient=DISOBEDIENT)


def _cache_key(code: Sequence[str], description: Mapping[str, Any] | None = None) -> str:
    """Return a digest of source files, a description and LeRobot's version: twelve hex digits."""

    def encode(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else asdict(value)

    text = json.dumps([version("lerobot"), description], sort_keys=True, default=encode)
    return hashlib.sha256(text.encode() + b"".join(Path(file).read_bytes() for file in code)).hexdigest()[:12]
