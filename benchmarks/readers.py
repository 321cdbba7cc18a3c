"""What reads a dataset for benchmarks/data.py: ours in its variants, its peers, and the decoder; and what it takes.

Each reader yields batches of `BATCH` rows with action windows of `WINDOW`, as dicts of arrays.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from benchmarks.datasets import FPS, scratch_of
from diagnostics.watch import ClusterWatch
from vla_finetuning.data.options import Features, Order, Reading

if TYPE_CHECKING:
    from lerobot_datasource import LeRobotDatasource

BATCH, WINDOW = 8, 50
WINDOWS = {"action": [i / FPS for i in range(WINDOW)]}
# Read in one go. Ours: enough for read tasks as long as those of a run; a DataLoader is too slow for more.
OUR_ROWS, PEER_ROWS = 12000, 800
Contender = Callable[[], Iterator[dict[str, np.ndarray]]]


def ours(
    root: Path | str, rows: int, storage_options: dict[str, Any] | None = None, **options: Any
) -> Iterator[dict[str, np.ndarray]]:
    """Epoch after epoch, `rows` in all, as training on one node reads."""
    from lerobot_datasource import local_batches

    yield from local_batches(our_source(root, rows, storage_options, **options), BATCH)


def our_source(
    root: Path | str, rows: int, storage_options: dict[str, Any] | None = None, **options: Any
) -> LeRobotDatasource:
    from lerobot_datasource import LeRobotDatasource
    from vla_finetuning.data.metadata import load_metadata

    meta = load_metadata(root, storage_options=storage_options)
    order = Order(stream=(0, rows), shuffle_seed=options.pop("shuffle_seed", None))
    features = Features(delta_timestamps=WINDOWS, image_size=options.pop("image_size", None))
    return LeRobotDatasource([meta], features=features, order=order, reading=Reading(**options))


def shuffled(root: Path | str, rows: int, seeds: Iterator[int], **options: Any) -> Iterator[dict[str, np.ndarray]]:
    """Every round another order."""
    return ours(root, rows, shuffle_seed=next(seeds), **options)


def ray_read_lerobot(root: Path) -> Iterator[dict[str, np.ndarray]]:
    import ray

    dataset = ray.data.read_lerobot(str(root), delta_timestamps=WINDOWS, read_granularity="episode")
    for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy", prefetch_batches=2):
        # Its tensors have no fixed shape and come out as objects.
        yield {
            k: np.stack(list(v)) if v.dtype == object and k not in ("task", "stats") else v for k, v in batch.items()
        }


def lerobot_loader(root: Path, backend: str, cores: int) -> Iterator[dict[str, np.ndarray]]:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("benchmark", root=root, video_backend=backend, return_uint8=True, delta_timestamps=WINDOWS)
    yield from loaded(dataset, cores, "spawn")


def loaded(dataset: Any, cores: int, context: Any) -> Iterator[dict[str, np.ndarray]]:
    """Yield shuffled batches of a torch dataset by a DataLoader's processes."""
    import torch

    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=cores, multiprocessing_context=context
    )
    for batch in itertools.islice(loader, PEER_ROWS // BATCH):
        yield {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def lance(root: Path, cores: int) -> Contender | None:
    """LanceDB's loader on a converted copy, made once; None where it is not installed (`make peers`)."""
    if any(importlib.util.find_spec(name) is None for name in ("lerobot_lancedb", "lancedb")):
        print("lerobot-lancedb is not installed (make peers): its comparison is left out")
        return None
    from lerobot_lancedb.convert import convert

    folder = root.with_name(f"{root.name}-lance")
    if not folder.exists():
        scratch = scratch_of(folder)
        convert(scratch, root=root)
        scratch.rename(folder)
    return partial(lance_loader, folder, cores)


def lance_loader(folder: Path, cores: int) -> Iterator[dict[str, np.ndarray]]:
    from lerobot_lancedb import LanceDBDataset, lance_mp_context

    dataset = LanceDBDataset(root=folder, return_uint8=True, delta_timestamps=WINDOWS)
    yield from loaded(dataset, cores, lance_mp_context())


def decode_file(path: str) -> int:
    """Every frame of a video to RGB, one thread: what no reader can be faster than."""
    import av
    from av.video.reformatter import VideoReformatter

    frames = 0
    with av.open(path) as container:
        container.streams.video[0].codec_context.thread_count = 1
        reformatter = VideoReformatter()
        for frame in container.decode(video=0):
            reformatter.reformat(frame, format="rgb24")
            frames += 1
    return frames


def decoder_alone(root: Path, cores: int) -> float | None:
    """Rows/s of the decoder alone, as many processes as cores; None without videos."""
    videos = [str(p) for p in sorted((root / "videos").rglob("*.mp4"))]
    if not videos:
        return None
    cameras = len({Path(v).parent.parent.name for v in videos})
    with concurrent.futures.ProcessPoolExecutor(cores) as pool:
        list(pool.map(decode_file, videos[:cores]))  # starts the processes
        start = time.perf_counter()
        frames = sum(pool.map(decode_file, videos))
        return frames / cameras / (time.perf_counter() - start)


def torchcodec_works() -> bool:
    try:
        from torchcodec.decoders import VideoDecoder  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def touch(array: np.ndarray) -> None:
    """Read every byte, at the speed of memory."""
    flat = array.reshape(-1)
    np.bitwise_xor.reduce(flat[: len(flat) // 8 * 8].view(np.uint64))


def measure(batches: Contender) -> dict[str, float]:
    """Read all that comes. Every byte of every image is touched, so that nothing is counted that did not arrive."""
    begin = time.perf_counter()
    arrived: list[float] = []
    rows: list[int] = []
    episodes = images = image_bytes = 0
    with Watch() as watch:
        for batch in batches():
            arrived.append(time.perf_counter() - begin)
            rows.append(len(batch["index"]))
            for key, value in batch.items():
                if key.startswith("observation.images") and np.asarray(value).ndim >= 4:
                    value = np.ascontiguousarray(value)
                    touch(value)
                    image_bytes += value.nbytes
                    images += len(value)
            episodes += len(np.unique(np.asarray(batch["episode_index"])))
    total = sum(rows)
    so_far = np.cumsum(rows)
    steady = (so_far > total / 5) & (so_far <= total * 9 / 10)
    return {
        "rows": total,
        "rows_per_s": float(np.polyfit(np.array(arrived)[steady], so_far[steady], 1)[0]),
        "rows_per_s_overall": total / arrived[-1],
        "first_batch_s": arrived[0],
        "cpu_s_per_1000_rows": watch.cpu_s * 1000 / total,
        "peak_store_bytes": watch.peak_bytes,
        "peak_worker_bytes": watch.worker_bytes,
        "episodes_per_batch": episodes / len(rows),
        "bytes_per_image": image_bytes / max(images, 1),
    }


class Watch(ClusterWatch):
    """While the block runs: the CPU seconds of this process and all it has started, and the most bytes they hold.

    Ray, its workers, a DataLoader's. Looked at every half second, so that a process that ends counts with what it had
    used until then. The object store's pages, which a process has in its memory too, are not its own.

    Attributes:
        cpu_s: after the block. worker_bytes: what one process has for itself.
    """

    def __init__(self) -> None:
        super().__init__(every_s=0.5)
        self.cpu_s, self.worker_bytes = 0.0, 0
        self._used: dict[tuple[int, float], float] = {}

    def __enter__(self) -> Self:
        self._look_at_processes()
        self._before = sum(self._used.values())
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._look_at_processes()
        self.cpu_s = sum(self._used.values()) - self._before

    def look(self) -> None:
        super().look()
        self._look_at_processes()

    def _look_at_processes(self) -> None:
        import psutil

        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times, memory = process.cpu_times(), process.memory_info()
                self._used[process.pid, process.create_time()] = times.user + times.system
                if process != this:
                    self.worker_bytes = max(self.worker_bytes, memory.rss - memory.shared)
