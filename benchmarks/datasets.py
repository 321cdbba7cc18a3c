"""Make the datasets of the benchmarks in `.cache/benchmarks`, or reuse them."""

from __future__ import annotations

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
    """Write a dataset of `rows` rows with LeRobot's writer unless it exists, and return its root."""
    from tests.datasets import make_dataset
    from vla_finetuning.files import atomic_folder

    folder = CACHE / f"{name}-{rows}"
    if not folder.exists():
        sizes: dict[str, Any] = {"data_files_size_in_mb": 100, "video_files_size_in_mb": 100}
        with atomic_folder(folder) as partial:
            make_dataset(partial, episodes=[EPISODE_ROWS] * (rows // EPISODE_ROWS), fps=FPS, **sizes, **DATASETS[name])
    return folder
