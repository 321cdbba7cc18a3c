"""Read a dataset for benchmarks/data.py with our reader, its peers and the decoder, and measure the readers.

Each reader yields batches of `BATCH` rows with action windows of `WINDOW`, as dicts of arrays. The processes of a
peer's loader import this module, so it imports our own modules only in functions.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import torch
from av.video.reformatter import VideoReformatter
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from benchmarks.datasets import FPS

BATCH, WINDOW = 8, 50
WINDOWS = {"action": [i / FPS for i in range(WINDOW)]}
# Rows of a measurement. Ours needs as many for read tasks as long as in a run; a DataLoader is too slow for as many.
OUR_ROWS, PEER_ROWS = 12000, 800
Batches = Iterator[dict[str, np.ndarray]]
Contender = Callable[[], Batches]


def ours(root: Path, rows: int, *, seed: int | None = None, camera_keys: Any = None, **options: Any) -> Batches:
    """Yield `rows` rows over several epochs, as training on one node reads them; `options` go to `Reading`."""
    from lerobot_datasource import LeRobotDatasource, read_source
    from vla_finetuning.data.metadata import load_metadata
    from vla_finetuning.data.options import Features, Order, Reading

    features = Features(camera_keys, delta_timestamps=WINDOWS)
    order = Order(stream=(0, rows), shuffle_seed=seed)
    source = LeRobotDatasource([load_metadata(root)], features=features, order=order, reading=Reading(**options))
    at_once = max(1, source.block() // BATCH) * BATCH  # about a block, to save Ray Data's work for each batch
    for read in read_source(source).iter_batches(batch_size=at_once, batch_format="numpy", prefetch_batches=0):
        for first in range(0, len(read["index"]), BATCH):
            yield {key: values[first : first + BATCH] for key, values in read.items()}


def shuffled(root: Path, rows: int, seeds: Iterator[int], **options: Any) -> Batches:
    """Read in an order with the next seed."""
    return ours(root, rows, seed=next(seeds), **options)


def ray_read_lerobot(root: Path) -> Batches:
    import ray

    dataset = ray.data.read_lerobot(str(root), delta_timestamps=WINDOWS, read_granularity="episode")
    for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy", prefetch_batches=2):
        # Tensors without a fixed shape are arrays of objects.
        tensors = {key for key, values in batch.items() if values.dtype == object} - {"task", "stats"}
        yield {key: np.stack(list(values)) if key in tensors else values for key, values in batch.items()}


def lerobot_loader(root: Path, backend: str, cores: int) -> Batches:
    dataset = LeRobotDataset("benchmark", root=root, video_backend=backend, return_uint8=True, delta_timestamps=WINDOWS)
    yield from loaded(dataset, cores, "spawn")


def loaded(dataset: Any, cores: int, context: Any) -> Batches:
    """Yield shuffled batches of a torch dataset, read by a DataLoader's processes."""
    loader = torch.utils.data.DataLoader(dataset, BATCH, True, num_workers=cores, multiprocessing_context=context)
    for batch in itertools.islice(loader, PEER_ROWS // BATCH):
        yield {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def lance(root: Path, cores: int) -> Contender | None:
    """Return LanceDB's loader on a converted copy; None if it is not installed (`make peers`)."""
    if any(importlib.util.find_spec(name) is None for name in ("lerobot_lancedb", "lancedb")):
        return None
    from lerobot_lancedb.convert import convert

    from vla_finetuning.files import atomic_folder

    folder = root.with_name(f"{root.name}-lance")
    if not folder.exists():
        with atomic_folder(folder) as partly:
            convert(partly, root=root)
    return partial(lance_loader, folder, cores)


def lance_loader(folder: Path, cores: int) -> Batches:
    from lerobot_lancedb import LanceDBDataset, lance_mp_context

    dataset = LanceDBDataset(root=folder, return_uint8=True, delta_timestamps=WINDOWS)
    yield from loaded(dataset, cores, lance_mp_context())


def decode_file(path: str) -> int:
    """Decode every frame of a video to RGB in one thread, the upper bound of every reader; return their number."""
    frames = 0
    with av.open(path) as container:
        container.streams.video[0].codec_context.thread_count = 1
        reformatter = VideoReformatter()
        for frame in container.decode(video=0):
            reformatter.reformat(frame, format="rgb24")
            frames += 1
    return frames


def decoder_alone(root: Path, cores: int) -> float | None:
    """Return the decoder's rows/s with a process per core; None without videos."""
    videos = [str(p) for p in sorted((root / "videos").rglob("*.mp4"))]
    if not videos:
        return None
    cameras = len({Path(v).parent.parent.name for v in videos})
    spawn = multiprocessing.get_context("spawn")  # forking a process with Ray's threads crashed
    with concurrent.futures.ProcessPoolExecutor(cores, spawn) as pool:
        list(pool.map(decode_file, videos[:cores]))  # start the processes
        start = time.perf_counter()
        frames = sum(pool.map(decode_file, videos))
        return frames / cameras / (time.perf_counter() - start)


def measure(batches: Contender) -> dict[str, float]:
    """Read all batches, touching every byte of every image, and return rates and costs."""
    from diagnostics.watch import ClusterWatch

    begin, cpu_begin = time.perf_counter(), cpu_seconds()
    arrived: list[float] = []
    rows: list[int] = []
    episodes = 0
    with ClusterWatch(every_s=0.5) as watch:
        for batch in batches():
            arrived.append(time.perf_counter() - begin)
            rows.append(len(batch["index"]))
            for key, value in batch.items():
                if key.startswith("observation.images") and np.asarray(value).ndim >= 4:
                    flat = np.ascontiguousarray(value).reshape(-1)
                    np.bitwise_xor.reduce(flat[: len(flat) // 8 * 8].view(np.uint64))  # reads at the speed of memory
            episodes += len(np.unique(np.asarray(batch["episode_index"])))
    cpu_s, so_far = cpu_seconds() - cpu_begin, np.cumsum(rows)
    total = int(so_far[-1])
    steady = (so_far > total / 5) & (so_far <= total * 9 / 10)
    return {
        "rows": total,
        "rows_per_s": float(np.polyfit(np.array(arrived)[steady], so_far[steady], 1)[0]),
        "first_batch_s": arrived[0],
        "cpu_s_per_1000_rows": cpu_s * 1000 / total,
        "peak_store_bytes": watch.peak_bytes,
        "episodes_per_batch": episodes / len(rows),
    }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants, such as Ray's workers."""
    seconds, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])  # its own, and its finished children's
    return seconds
