"""How fast shuffled training batches come out of a LeRobot v3 dataset: ours, its peers, and the decoder alone.

    python -m benchmarks.data [--rows 800] [--rounds 3] [--datasets av1_240x320x3,...] [--cores 2]

Every contender gives batches of 8 rows with action windows of 50 as contiguous uint8 arrays in this process. They
take turns, several rounds; medians are reported. `rows_per_s` is all rows over the whole time on a warm Ray cluster; a
DataLoader's is counted from its first batch on, because it starts its processes anew each time. Results go to
`benchmarks/results/data-<hardware>-<date>.json`; a table is printed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lerobot_plan import StreamPlan

BATCH, WINDOW, FPS, EPISODE_ROWS = 8, 50, 30, 100
CAMERAS = ("observation.images.top", "observation.images.left", "observation.images.right")
DATASETS: dict[str, dict[str, Any]] = {
    "av1_240x320x3": {"cameras": dict.fromkeys(CAMERAS, (240, 320))},
    "av1_480x640x2": {"cameras": dict.fromkeys(CAMERAS[:2], (480, 640))},
    "h264_480x640x2": {"cameras": dict.fromkeys(CAMERAS[:2], (480, 640)), "vcodec": "h264"},
    "images_240x320x1": {"cameras": {}, "image_cameras": {CAMERAS[0]: (240, 320)}},
}
RESULTS = Path(__file__).parent / "results"
CACHE = Path(".cache/benchmarks")
Contender = Callable[[], Iterator[dict[str, np.ndarray]]]


def make(name: str, rows: int) -> Path:
    """The dataset, written once by LeRobot's writer."""
    from tests.datasets import make_dataset

    folder = CACHE / f"{name}-{rows}"
    if not folder.exists():
        scratch = folder.with_name(folder.name + ".partial")
        episodes = [EPISODE_ROWS] * (rows // EPISODE_ROWS)
        make_dataset(
            scratch, episodes=episodes, fps=FPS, data_files_size_in_mb=100, video_files_size_in_mb=100, **DATASETS[name]
        )
        scratch.rename(folder)
    return folder


# ---- contenders: each yields batches, as dicts of arrays --------------------------------------------------------


def ours(root: Path, **options: Any) -> Iterator[dict[str, np.ndarray]]:
    from lerobot_datasource import read_lerobot

    windows = {"action": [i / FPS for i in range(WINDOW)]}
    dataset = read_lerobot(root, delta_timestamps=windows, **options)
    yield from dataset.iter_batches(batch_size=BATCH, batch_format="numpy", prefetch_batches=2)


def shuffled(root: Path, seeds: Iterator[int], **options: Any) -> Iterator[dict[str, np.ndarray]]:
    """Every round another epoch."""
    return ours(root, shuffle_seed=next(seeds), **options)


def ray_read_lerobot(root: Path) -> Iterator[dict[str, np.ndarray]]:
    import ray

    windows = {"action": [i / FPS for i in range(WINDOW)]}
    dataset = ray.data.read_lerobot(str(root), delta_timestamps=windows, read_granularity="episode")
    for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy", prefetch_batches=2):
        # Its tensors have no fixed shape and come out as objects.
        yield {
            k: np.stack(list(v)) if v.dtype == object and k not in ("task", "stats") else v for k, v in batch.items()
        }


def lerobot_loader(root: Path, backend: str, cores: int) -> Iterator[dict[str, np.ndarray]]:
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    windows = {"action": [i / FPS for i in range(WINDOW)]}
    dataset = LeRobotDataset("benchmark", root=root, video_backend=backend, return_uint8=True, delta_timestamps=windows)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=cores, multiprocessing_context="spawn"
    )
    for batch in loader:
        yield {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


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


# ---- how well a batch is mixed ----------------------------------------------------------------------------------


def distinct_episodes(plan: StreamPlan, batch_rows: int, batches: int) -> float:
    """Episodes in a batch of consecutive stream rows, on average over the run's first `batches`. Pure."""
    episodes = np.concatenate([s.episode[s.rows()[0]] for s in plan.slices(0, batches * batch_rows)])
    return float(np.mean([len(np.unique(batch)) for batch in episodes.reshape(batches, batch_rows)]))


def distinct_episodes_at_random(length: np.ndarray, batch_rows: int) -> float:
    """What `distinct_episodes` is expected to be when rows are drawn from all of an epoch: episodes of `length` (E,).

    An episode of n of the N rows is absent from a batch of B with probability C(N - n, B) / C(N, B).
    """
    total = int(length.sum())
    drawn = np.arange(batch_rows)
    left = np.maximum(total - length[:, None] - drawn, 0) / (total - drawn)
    return float((1 - left.prod(axis=1)).sum())


def mixing(windows: Sequence[int], episodes: int, rows: int) -> dict[str, Any]:
    """Distinct episodes per batch for several `shuffle_window`s, of a dataset of equal episodes."""
    from lerobot_datasource import SEGMENT_ROWS
    from lerobot_plan import Episodes, StreamPlan

    number, length = np.arange(episodes), np.full(episodes, rows)
    drawn_from = Episodes(np.zeros(episodes, np.int32), number, number * rows, length)
    found: dict[str, Any] = {"episodes": episodes, "rows_of_each": rows, "batches": {}}
    for batch in (8, 32, 64):
        plans = {
            w: StreamPlan(drawn_from, seed=0, segment_rows=SEGMENT_ROWS, window_rows=w) for w in windows if w >= batch
        }
        found["batches"][batch] = {
            "global_shuffle": distinct_episodes_at_random(length, batch),
            "by_window": {w: distinct_episodes(plan, batch, 500) for w, plan in plans.items()},
        }
    return found


# ---- measuring --------------------------------------------------------------------------------------------------


def touch(array: np.ndarray) -> None:
    """Read every byte, at the speed of memory."""
    flat = array.reshape(-1)
    np.bitwise_xor.reduce(flat[: len(flat) // 8 * 8].view(np.uint64))


def measure(batches: Contender, from_first_batch: bool) -> dict[str, float]:
    """Read everything once. Every byte of every image is touched, so that nothing is counted that did not arrive."""
    begin = start = time.perf_counter()
    first = None
    rows = episodes = batches_seen = images = image_bytes = 0
    for batch in batches():
        if first is None:
            first = time.perf_counter() - start
        if from_first_batch and not batches_seen:
            begin = time.perf_counter()
        else:
            rows += len(batch["index"])
        for key, value in batch.items():
            if key.startswith("observation.images") and np.asarray(value).ndim >= 4:
                value = np.ascontiguousarray(value)
                touch(value)
                image_bytes += value.nbytes
                images += len(value)
        episodes += len(np.unique(np.asarray(batch["episode_index"])))
        batches_seen += 1
    assert first is not None
    return {
        "rows_per_s": rows / (time.perf_counter() - begin),
        "first_batch_s": first,
        "episodes_per_batch": episodes / batches_seen,
        "bytes_per_image": image_bytes / max(images, 1),
    }


def ray_cpu_s() -> float:
    """CPU seconds that this process and Ray's workers have used so far."""
    import psutil

    total = 0.0
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        line = " ".join(process.info["cmdline"] or [])
        if line.startswith("ray::") or process.pid == os.getpid():
            total += process.info["cpu_times"].user + process.info["cpu_times"].system
    return total


def hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{p: importlib.metadata.version(p) for p in ("ray", "lerobot", "torch", "av", "pyarrow")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    import ray

    ray.init(num_cpus=options.cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    seeds = iter(range(10**6))
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "settings": {**vars(options), "batch": BATCH, "window": WINDOW},
        "datasets": {},
        "mixing": mixing([64, 128, 256, 512, 1024, 2048, 4096], episodes=1000, rows=300),
    }
    print(mixing_table(results["mixing"]), flush=True)
    try:
        for name in options.datasets.split(","):
            root = make(name, options.rows)
            contenders: dict[str, Contender] = {
                "ours, in order": partial(ours, root),
                "ours, shuffled": partial(shuffled, root, seeds),
                "ray.data.read_lerobot": partial(ray_read_lerobot, root),
                "LeRobot DataLoader, pyav, shuffled": partial(lerobot_loader, root, "pyav", options.cores),
            }
            cameras = DATASETS[name]["cameras"]
            contenders["ours, shuffled, fitted to 224x224"] = partial(shuffled, root, seeds, image_size=(224, 224))
            if len(cameras) > 1:
                contenders["ours, shuffled, one camera"] = partial(shuffled, root, seeds, camera_keys=[CAMERAS[0]])
            if torchcodec_works():
                contenders["LeRobot DataLoader, torchcodec, shuffled"] = partial(
                    lerobot_loader, root, "torchcodec", options.cores
                )
            else:
                print("torchcodec cannot be loaded (FFmpeg's libraries are missing): its comparison is left out")
            for label in ("ours, shuffled", "ray.data.read_lerobot"):
                measure(contenders[label], from_first_batch=False)  # warms the cluster's worker processes up
            samples: dict[str, list[dict[str, float]]] = {label: [] for label in contenders}
            limits = []
            for _ in range(options.rounds):
                limits.append(decoder_alone(root, options.cores))
                for label, batches in contenders.items():
                    cpu = ray_cpu_s()
                    sample = measure(batches, from_first_batch="DataLoader" in label)
                    if "DataLoader" not in label:  # its processes are gone by now, and their time with them
                        sample["cpu_s_per_1000_rows"] = (ray_cpu_s() - cpu) * 1000 / options.rows
                    samples[label].append(sample)
            results["datasets"][name] = summary(samples, limits)
            print(table(name, results["datasets"][name]), flush=True)
    finally:
        results["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ray.shutdown()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"data-{options.cores}cpu-{results['date']}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {path}")


def mixing_table(found: dict[str, Any]) -> str:
    windows = list(found["batches"][8]["by_window"])
    lines = [f"\nDistinct episodes in a batch, of {found['episodes']} episodes of {found['rows_of_each']} rows"]
    lines.append(f"  {'shuffle_window':18}" + "".join(f"{w:8}" for w in windows) + f"{'all rows':>12}")
    for batch, counts in found["batches"].items():
        cells = "".join(f"{counts['by_window'].get(w, float('nan')):8.1f}" for w in windows)
        lines.append(f"  a batch of {batch:<7}" + cells + f"{counts['global_shuffle']:12.1f}")
    return "\n".join(lines)


def torchcodec_works() -> bool:
    try:
        from torchcodec.decoders import VideoDecoder  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def summary(samples: dict[str, list[dict[str, float]]], limits: list[float | None]) -> dict[str, Any]:
    decoder = [v for v in limits if v is not None]
    return {
        "decoder_alone_rows_per_s": statistics.median(decoder) if decoder else None,
        "contenders": {
            label: {key: statistics.median(s[key] for s in runs) for key in runs[0]} | {"samples": runs}
            for label, runs in samples.items()
        },
    }


def table(name: str, result: dict[str, Any]) -> str:
    limit = result["decoder_alone_rows_per_s"]
    reference = result["contenders"]["ours, shuffled"]["rows_per_s"]
    lines = [f"\n{name}" + (f": the decoder alone, {limit:.0f} rows/s" if limit else "")]
    lines.append(f"  {'':42}{'rows/s':>8}{'of decoder':>12}{'ours is':>9}{'first batch':>13}{'episodes/batch':>16}")
    for label, r in result["contenders"].items():
        share = f"{r['rows_per_s'] / limit:.2f}" if limit else "-"
        lines.append(
            f"  {label:42}{r['rows_per_s']:8.0f}{share:>12}{reference / r['rows_per_s']:8.2f}x"
            f"{r['first_batch_s']:11.2f} s{r['episodes_per_batch']:16.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
