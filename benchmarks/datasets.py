"""The datasets that are measured: made once, in `.cache/benchmarks`, and used again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

FPS, EPISODE_ROWS = 30, 100
CAMERAS = ("observation.images.top", "observation.images.left", "observation.images.right")
DATASETS: dict[str, dict[str, Any]] = {
    "av1_240x320x3": {"cameras": dict.fromkeys(CAMERAS, (240, 320))},
    "av1_480x640x2": {"cameras": dict.fromkeys(CAMERAS[:2], (480, 640))},
    "h264_480x640x2": {"cameras": dict.fromkeys(CAMERAS[:2], (480, 640)), "vcodec": "h264"},
    "images_240x320x1": {"cameras": {}, "image_cameras": {CAMERAS[0]: (240, 320)}},
    # With noise, so that images are as large as a camera's are as PNG: 0.1 MB.
    "images_240x320x3": {"cameras": {}, "image_cameras": dict.fromkeys(CAMERAS, (240, 320)), "noise": 8},
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


# ---- numbers alone ----------------------------------------------------------------------------------------------

NUMBER_FILES, NUMBERS_OF_ROW = 12, {"observation.state": 14, "action": 14}
NUMBERS_EPISODE_ROWS = 300
# Rows of a row group: all of a file, as LeRobot's converter writes, or an episode, as its recorder does.
LAYOUTS = {"row group per file": None, "row group per episode": NUMBERS_EPISODE_ROWS}


def make_numbers(name: str, megabytes: int) -> Path:
    """A dataset without cameras in files of about so many megabytes each, from a half to one and a half of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = CACHE / f"numbers-{name.replace(' ', '-')}-{megabytes}"
    if folder.exists():
        return folder
    scratch = scratch_of(folder)
    rng, row_bytes = np.random.default_rng(0), 4 * sum(NUMBERS_OF_ROW.values()) + 4
    episodes_of_file = [
        max(1, round(share * megabytes * 1e6 / row_bytes / NUMBERS_EPISODE_ROWS))
        for share in np.linspace(0.5, 1.5, NUMBER_FILES)
    ]
    first = 0
    for number, count in enumerate(episodes_of_file):
        rows = count * NUMBERS_EPISODE_ROWS
        frame = np.tile(np.arange(NUMBERS_EPISODE_ROWS), count)
        columns: dict[str, Any] = {
            key: pa.FixedSizeListArray.from_arrays(rng.normal(size=rows * size).astype(np.float32), size).cast(
                pa.list_(pa.float32())
            )
            for key, size in NUMBERS_OF_ROW.items()
        }
        columns |= {
            "timestamp": (frame / FPS).astype(np.float32),
            "frame_index": frame,
            "episode_index": first + np.repeat(np.arange(count), NUMBERS_EPISODE_ROWS),
            "index": first * NUMBERS_EPISODE_ROWS + np.arange(rows),
            "task_index": np.zeros(rows, np.int64),
        }
        path = scratch / f"data/chunk-000/file-{number:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=LAYOUTS[name] or rows)
        first += count
    scalars = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
    features = {key: {"dtype": "float32", "shape": [size], "names": None} for key, size in NUMBERS_OF_ROW.items()}
    features |= {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in scalars.items()}
    info = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "fps": FPS,
        "features": features,
        "total_episodes": first,
        "total_frames": first * NUMBERS_EPISODE_ROWS,
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "splits": {"train": f"0:{first}"},
    }
    episodes = {
        "episode_index": np.arange(first),
        "length": np.full(first, NUMBERS_EPISODE_ROWS),
        "data/chunk_index": np.zeros(first, np.int64),
        "data/file_index": np.repeat(np.arange(NUMBER_FILES), episodes_of_file),
        "tasks": [["wave"]] * first,
    }
    (scratch / "meta/episodes/chunk-000").mkdir(parents=True)
    (scratch / "meta/info.json").write_text(json.dumps(info))
    pq.write_table(pa.table({"task_index": [0], "task": ["wave"]}), scratch / "meta/tasks.parquet")
    pq.write_table(pa.table(episodes), scratch / "meta/episodes/chunk-000/file-000.parquet")
    scratch.rename(folder)
    return folder
