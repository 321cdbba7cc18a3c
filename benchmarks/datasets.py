"""The datasets that are measured: made once, in `.cache/benchmarks`, and used again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

FPS, EPISODE_ROWS = 30, 100
CAMERAS = ("observation.images.top", "observation.images.left", "observation.images.right")
DATASETS: dict[str, dict[str, Any]] = {
    "av1_240x320x3": {"cameras": dict.fromkeys(CAMERAS, (240, 320))},
    "av1_480x640x2": {"cameras": dict.fromkeys(CAMERAS[:2], (480, 640))},
    "h264_480x640x2": {"cameras": dict.fromkeys(CAMERAS[:2], (480, 640)), "vcodec": "h264"},
    "images_240x320x1": {"cameras": {}, "image_cameras": {CAMERAS[0]: (240, 320)}},
}
CACHE = Path(".cache/benchmarks")


def make(name: str, rows: int) -> Path:
    """The dataset, written once by LeRobot's writer."""
    from tests.datasets import make_dataset

    folder = CACHE / f"{name}-{rows}"
    if not folder.exists():
        scratch = scratch_of(folder)
        episodes = [EPISODE_ROWS] * (rows // EPISODE_ROWS)
        make_dataset(
            scratch, episodes=episodes, fps=FPS, data_files_size_in_mb=100, video_files_size_in_mb=100, **DATASETS[name]
        )
        scratch.rename(folder)
    return folder


def scratch_of(folder: Path) -> Path:
    """Return where to make a folder that is moved into place when it is whole; what an interrupted one
    left is removed.
    """
    scratch = folder.with_name(folder.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    return scratch


def grow(root: Path, times: int) -> Path:
    """Repeat the episodes at `root` so many times, aggregated by LeRobot."""
    from lerobot.datasets.aggregate import aggregate_datasets

    folder = root.with_name(f"{root.name}-times-{times}")
    if not folder.exists():
        scratch = scratch_of(folder)
        aggregate_datasets(
            repo_ids=[f"local/{root.name}"] * times, aggr_repo_id="local/grown", roots=[root] * times, aggr_root=scratch
        )
        scratch.rename(folder)
    return folder
