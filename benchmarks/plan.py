"""Measure the time and memory to plan a large dataset, on the driver and in other processes.

    python -m benchmarks.plan [--episodes 1000000] [--members 60] [--json FILE]

The dataset consists of metadata: episodes of 100 to 500 rows with 3 cameras of 480x640 as stored, which gives the
shortest and therefore the most segments. Every stage runs in its own process with pickled inputs, as in a run.
`peak_mb` is the largest growth of its memory after imports. --members divides the episodes into a mixture of two robots
with different widths, rates and cameras. docs/scale.md lists the stages.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray import cloudpickle

from benchmarks.datasets import CAMERAS
from diagnostics.report import format_table, provenance
from lerobot_datasource import LeRobotDatasource
from tests.memory import Growth
from vla_finetuning.data.dataset_files import check_files
from vla_finetuning.data.metadata import DatasetMetadata, load_metadata
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.files import write_json
from vla_finetuning.plan.describe import episodes_in_a_batch

INSTRUCTIONS = 10_000
# Episodes of a file within LeRobot's limits: data of 100 MB, videos of 200 MB, metadata with statistics of 100 MB.
EPISODES_OF_FILE = {"data": 2000, "videos": 130, "meta": 12_000}
# LeRobot's writer flushes as many episodes at once, as a row group.
EPISODES_OF_GROUP = 10
STATISTICS = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")
# A cluster of 64 nodes, for `reads_per_task`.
CLUSTER = {"CPU": 64 * 96.0, "object_store_memory": 64 * 200e9}


def make(folder: Path, episodes: int, robot: int = 0) -> None:
    """Write metadata, and empty data and video files; odd and even `robot` differ in widths, rate and cameras."""
    width, fps, cameras = (14, 30, CAMERAS) if robot % 2 == 0 else (7, 10, CAMERAS[:1])
    rng = np.random.default_rng(0)
    length, number = rng.integers(100, 501, episodes), np.arange(episodes)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    instructions = [f"put the {i % 100}th thing into the {i // 100}th bin" for i in range(INSTRUCTIONS)]
    tasks = pa.table({"task_index": np.arange(INSTRUCTIONS), "task": instructions})
    pq.write_table(tasks, folder / "meta/tasks.parquet")
    instruction = pa.array(instructions).take(pa.array(rng.integers(0, INSTRUCTIONS, episodes)))
    columns: dict[str, Any] = {"episode_index": number, "length": length, "tasks": _lists_of(1, instruction)}
    for prefix in ("data", *(f"videos/{key}" for key in cameras)):
        file = number // EPISODES_OF_FILE[prefix.partition("/")[0]]
        columns |= {f"{prefix}/chunk_index": file // 1000, f"{prefix}/file_index": file % 1000}
        suffix = "parquet" if prefix == "data" else "mp4"
        for chunk, place in sorted(set(zip((file // 1000).tolist(), (file % 1000).tolist(), strict=True))):
            path = folder / f"{prefix}/chunk-{chunk:03d}/file-{place:03d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"PAR1" * 3 if suffix == "parquet" else b"\0\0\0\x08moov")  # valid but empty
    before = np.cumsum(length) - length
    columns |= {"dataset_from_index": before, "dataset_to_index": before + length}
    columns |= {"meta/episodes/chunk_index": 0 * number, "meta/episodes/file_index": number // EPISODES_OF_FILE["meta"]}
    for key in cameras:
        first = before[number // EPISODES_OF_FILE["videos"] * EPISODES_OF_FILE["videos"]]
        columns[f"videos/{key}/from_timestamp"] = (before - first) / fps
        columns[f"videos/{key}/to_timestamp"] = (before - first + length) / fps
    table = pa.table(columns)
    sizes = {"observation.state": width, "action": width, **dict.fromkeys(cameras, 3)}
    sizes |= dict.fromkeys(("timestamp", "frame_index", "episode_index", "index", "task_index"), 1)
    for nth, begin in enumerate(range(0, episodes, EPISODES_OF_FILE["meta"])):
        rows = table.slice(begin, EPISODES_OF_FILE["meta"])
        for key, size in sizes.items():
            for name in STATISTICS:
                values = pa.array(rng.random(len(rows) * size))
                if key in cameras:  # of shape (3, 1, 1)
                    values = _lists_of(1, _lists_of(1, values))
                rows = rows.append_column(f"stats/{key}/{name}", _lists_of(size, values))
            rows = rows.append_column(f"stats/{key}/count", pa.array([[1]] * len(rows), pa.list_(pa.int64())))
        path = folder / f"meta/episodes/chunk-000/file-{nth:03d}.parquet"
        pq.write_table(rows, path, row_group_size=EPISODES_OF_GROUP, compression="snappy")
    scalars = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
    features: dict[str, Any] = {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in scalars.items()}
    vector = {"dtype": "float32", "shape": [width], "names": None}
    features |= {"observation.state": vector, "action": vector}
    image = {"dtype": "video", "shape": [480, 640, 3], "names": ["height", "width", "channels"]}
    info = {"codebase_version": "v3.0", "fps": fps, "features": features | dict.fromkeys(cameras, image)}
    info |= {"total_episodes": episodes, "total_frames": int(length.sum())}
    (folder / "meta/info.json").write_text(json.dumps(info))


def _lists_of(size: int, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, size), pa.int32()), values)


def source_of(metas: Sequence[DatasetMetadata], stream: tuple[int, int] | None = None) -> LeRobotDatasource:
    """Return a run's source (`Rows.source`); several datasets form a mixture of robots."""
    mixed = len(metas) > 1
    padded: dict[str, Any] = {"padded": True, "window_steps": [1] * len(metas), "camera_keys": CAMERAS} if mixed else {}
    selection = Selection(weights=[1 + number % 3 for number in range(len(metas))] if mixed else None)
    features = Features(delta_timestamps={"action": [i / metas[0].fps for i in range(50)]}, **padded)
    order = Order(shuffle_seed=0, block_rows=8, stream=stream)
    return LeRobotDatasource(metas, selection, features, order=order, reading=Reading(check_files=False))


def metadata(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    metas = [load_metadata(path) for path in sorted(folder.glob("dataset*"))]
    for meta in metas:
        check_files(meta)
    return {"metas": metas}, {"rows": sum(meta.total_frames for meta in metas)}


def plan(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    metas = load(folder, "metas")
    source = source_of(metas, (0, 2 * sum(meta.total_frames for meta in metas)))
    mixed = episodes_in_a_batch(source.plan, 256)
    source.plan.identity()
    sizes = {"window_rows": source.plan.window_rows, "segment_rows": source.plan.segment_rows}
    return {"source": source}, {**sizes, "episodes_in_a_batch_of_256": mixed}


def coordinator(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan the read tasks of a first start, and of a restart in the second epoch."""
    metas = load(folder, "metas")
    rows = sum(meta.total_frames for meta in metas)
    tasks = source_of(metas, (0, 2 * rows)).get_read_tasks(1)
    source_of(metas, (rows + rows // 2, 2 * rows)).get_read_tasks(1)
    return {"task": tasks[len(tasks) // 2].read_fn}, {"tasks": len(tasks)}


def epoch(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    tasks = source_of(load(folder, "metas")).get_read_tasks(1)
    return {"epoch": tasks[len(tasks) // 2].read_fn}, {"tasks": len(tasks)}


def walk(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    task = load(folder, name)
    windows = (window for runs in task.reads for window in task.context.plan.slices_of(runs))
    return {}, {"rows": sum(window.hi - window.lo for window in windows)}


STAGES: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    "metadata": metadata,
    "plan": plan,
    "coordinator": coordinator,
    "read task": partial(walk, name="task"),
    "epoch": epoch,
    "epoch's task": partial(walk, name="epoch"),
}


def load(folder: Path, name: str) -> Any:
    return pickle.loads((folder / name).read_bytes())


def measure(stage: str, folder: Path) -> dict[str, Any]:
    """Run a stage in this process without Ray; measure objects for the object store by their pickled size."""
    with (
        mock.patch("ray.put", lambda value: value),
        mock.patch("ray.cluster_resources", lambda: CLUSTER),
        mock.patch("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node")),
        Growth() as growth,
    ):
        start, cpu = time.perf_counter(), time.process_time()
        travels, about = STAGES[stage](folder)
        times = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    for name, value in travels.items():
        (folder / name).write_bytes(cloudpickle.dumps(value))
    sizes_mb = {name: (folder / name).stat().st_size / 1e6 for name in travels}
    return {**times, "peak_mb": growth.mebibytes * 1.048576, **about, "travels_mb": sizes_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--members", type=int, default=1, help="datasets of a mixture of two robots")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    results = provenance(episodes=options.episodes, members=options.members)
    rows = [("stage", "s", "CPU s", "MB")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number in range(options.members):
            make(folder / f"dataset-{number:03d}", options.episodes // options.members, number)
        for stage in STAGES:
            # A fresh process, for its memory.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                results[stage] = figures = process.submit(measure, stage, folder).result()
            rows.append((stage, f"{figures['seconds']:.2f}", f"{figures['cpu_s']:.2f}", f"{figures['peak_mb']:.0f}"))
    print("\n".join(format_table(rows)))
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
