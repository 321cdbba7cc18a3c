"""How fast shuffled training batches come out of a LeRobot v3 dataset: ours, its peers, and the decoder alone.

    python -m benchmarks.data [--rows 2000] [--rounds 3] [--datasets av1_240x320x3,...] [--cores 2]

Every contender gives batches of 8 rows with action windows of 50 as contiguous uint8 arrays in this process. They
take turns, several rounds; medians are reported. `rows_per_s` is what arrives once all have started: the slope between
a fifth and nine tenths of the rows. Ours reads several epochs, on a warm Ray cluster; `rows_per_s_overall` is all rows
over all the time. `growth` compares a dataset with ten times the episodes, and times the plan of up to 100 000 of them.
`numbers` is the CPU time of a row's numbers, in data files of 100 MB with one row group each, or one for each episode;
`images` that of a row of three image columns, by decoder and by what the node has stored of them. `kept_frames`: epochs
without a cache of decoded frames, the first with one, and later ones. `adverse`: two epochs without a cache, and two
with one that cannot be used, is too small, or is emptied between them. `store`: rates from an S3 on loopback whose
answers take 30 ms, against those from the local disk.
Results go to `benchmarks/results/data-<hardware>-<date>.json`, dataset by dataset; a table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from benchmarks import RESULTS
from benchmarks.datasets import CAMERAS, DATASETS, FPS, LAYOUTS, NUMBER_FILES, grow, make, make_numbers
from benchmarks.readers import (
    BATCH,
    OUR_ROWS,
    WINDOW,
    Contender,
    carried,
    decoder_alone,
    handed_over,
    lance,
    lerobot_loader,
    measure,
    our_source,
    ours,
    ray_read_lerobot,
    shuffled,
    torchcodec_works,
)
from diagnostics.report import Environment
from vla_finetuning.data.options import Features, Order
from vla_finetuning.files import write_json
from vla_finetuning.options.dataset import DatasetOptions

if TYPE_CHECKING:
    from lerobot_datasource import LeRobotDatasource
    from vla_finetuning.data.plan import StreamPlan


# ---- how well a batch is mixed ----------------------------------------------------------------------------------


def distinct_episodes(plan: StreamPlan, batch_rows: int, batches: int) -> float:
    """Episodes in a batch of consecutive stream rows, on average over the run's first `batches`. Pure."""
    episodes = np.concatenate([s.episode[s.rows()[0]] for s in plan.slices(0, batches * batch_rows)])
    return float(np.mean([len(np.unique(batch)) for batch in episodes.reshape(batches, batch_rows)]))


def distinct_episodes_at_random(length: np.ndarray, batch_rows: int) -> float:
    """Return what `distinct_episodes` is expected to be when rows are drawn from all of an epoch: episodes of `length`
    (E,).

    An episode of n of the N rows is absent from a batch of B with probability C(N - n, B) / C(N, B).
    """
    total = int(length.sum())
    drawn = np.arange(batch_rows)
    left = np.maximum(total - length[:, None] - drawn, 0) / (total - drawn)
    return float((1 - left.prod(axis=1)).sum())


def mixing(windows: Sequence[int], episodes: int, rows: int) -> dict[str, Any]:
    """Distinct episodes per batch for several `shuffle_window`s, of a dataset of equal episodes."""
    from lerobot_datasource import SEGMENT_ROWS
    from vla_finetuning.data.options import WINDOW_SEGMENTS
    from vla_finetuning.data.plan import Episodes, StreamPlan, window_and_segment

    number, length = np.arange(episodes), np.full(episodes, rows)
    drawn_from = Episodes(np.zeros(episodes, np.int32), number, number * rows, length)
    found: dict[str, Any] = {"episodes": episodes, "rows_of_each": rows, "batches": {}}
    for batch in (8, 32, 64):
        plans = {}
        for w in windows:
            window, segment = window_and_segment(w, w, SEGMENT_ROWS, WINDOW_SEGMENTS)
            if w >= batch:
                plans[w] = StreamPlan(drawn_from, seed=0, segment_rows=segment, window_rows=window)
        found["batches"][batch] = {
            "global_shuffle": distinct_episodes_at_random(length, batch),
            "by_window": {w: distinct_episodes(plan, batch, 500) for w, plan in plans.items()},
        }
    return found


# ---- numbers ----------------------------------------------------------------------------------------------------


def numbers(megabytes: int, windows: int = 40) -> dict[str, Any]:
    """CPU ms a row for the numbers alone, of shuffled windows with action chunks, in this process.

    `nothing_kept`: as if every window were the node's first. `first`: so many windows with an empty folder for what was
    unpacked, the unpacking included. `later`: other windows of the same files then. `settled`: after as many again.
    """
    from lerobot_datasource import LeRobotDatasource
    from vla_finetuning.data import number_cache, rows
    from vla_finetuning.data.metadata import load_metadata

    found: dict[str, Any] = {"files": NUMBER_FILES, "megabytes_of_file": megabytes, "windows": windows}
    size = DatasetOptions.shuffle_window
    for name in LAYOUTS:
        meta = load_metadata(make_numbers(name, megabytes))
        deltas = {"action": [i / FPS for i in range(WINDOW)]}
        source = LeRobotDatasource([meta], features=Features(delta_timestamps=deltas), order=Order(shuffle_seed=0))
        cost = partial(cpu_ms_per_row, source, size)
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(number_cache, "NUMBERS_DIR", folder):
            with mock.patch.object(rows, "file_identity", lambda *_: None):
                unkept = cost(0, 2)
            found[name] = {
                "rows": source.plan.rows_per_epoch,
                "nothing_kept_cpu_ms_per_row": unkept,
                "first_cpu_ms_per_row": cost(0, windows),
                "later_cpu_ms_per_row": cost(windows, windows),
                "settled_cpu_ms_per_row": [cost(n * windows, windows) for n in (2, 3)][-1],
            }
    return found


def cpu_ms_per_row(source: LeRobotDatasource, size: int, first: int, count: int) -> float:
    """Measure reading `count` windows of so many rows, in this process; they are planned beforehand."""
    from vla_finetuning.data import rows
    from vla_finetuning.data.read_tasks import read_of

    readers = [rows.DatasetFiles.of(meta) for meta in source.metas]
    bounds = range(first * size, (first + count) * size, size)
    reads = [read_of(list(source.plan.slices(a, a + size)), source._places) for a in bounds]
    options, before = source._options(source.block()), time.process_time()
    read = sum(len(block) for r in reads for block in rows.read_rows(readers, r, 0, options))
    return (time.process_time() - before) * 1000 / read


# ---- images of data files ---------------------------------------------------------------------------------------


def images(root: Path, rounds: int) -> dict[str, Any]:
    """CPU ms a row of shuffled epochs of image columns without cached frames, in this process, in turn.

    `unstored`: every segment unpacks its row groups. `first`, `later`: epochs with an empty store of encoded images,
    and with one that has all. Each by what decodes PNGs; `nothing`: what is left where no image is decoded.
    """
    from vla_finetuning.data import decode, image_cache, number_cache
    from vla_finetuning.data.node_cache import NodeCache

    def refuse(*_: Any) -> np.ndarray:
        raise ValueError("left to Pillow")

    source = our_source(root, OUR_ROWS, shuffle_seed=0)
    blank = np.zeros((240, 320, 3), np.uint8)
    decoders = {"kornia-rs": decode.decode_image_png_u8, "Pillow": refuse, "nothing": lambda *_: blank}
    windows = -(-source.plan.rows_per_epoch // source._window)
    samples: dict[str, dict[str, list[float]]] = {
        stored: {name: [] for name in decoders} for stored in ("unstored", "first", "later")
    }

    @contextlib.contextmanager
    def new_node(images: Callable[[], NodeCache]) -> Iterator[Callable[[int], float]]:
        with (
            tempfile.TemporaryDirectory(dir=root.parent) as folder,
            mock.patch.object(number_cache, "NUMBERS_DIR", str(Path(folder).absolute())),
            mock.patch.object(image_cache, "images_cache", images),
        ):
            yield lambda epoch: cpu_ms_per_row(source, source._window, epoch * windows, windows)

    def nowhere() -> NodeCache:
        return NodeCache(Path("nowhere"), 0, "")

    with new_node(nowhere) as cost:
        cost(0)  # memory that the others use again
    for _ in range(rounds):
        for name, by in decoders.items():
            with mock.patch.object(decode, "decode_image_png_u8", by):
                with new_node(nowhere) as cost:
                    samples["unstored"][name].append(cost(0))
                with new_node(image_cache.images_cache) as cost:
                    samples["first"][name].append(cost(0))
                    samples["later"][name].append(cost(1))
    return {
        "cpu_ms_per_row": {
            stored: {name: statistics.median(values) for name, values in by_decoder.items()}
            for stored, by_decoder in samples.items()
        },
        "window_rows": source._window,
        "samples": samples,
    }


# ---- cached frames ----------------------------------------------------------------------------------------------


def kept_frames(root: Path, rounds: int, cores: int, seeds: Iterator[int]) -> dict[str, Any]:
    """Shuffled rows per second without a cache of decoded frames, with an empty one, and with one that has them all.

    A single epoch of the first two, and in turn: an empty cache is empty once. Decoder and DataLoader are measured
    beside them, and an upper bound of every cache: Ray Data with rows that are not read.
    """
    from vla_finetuning.data.frame_cache import FrameCache
    from vla_finetuning.data.metadata import load_metadata

    rows = load_metadata(root).total_frames
    samples: dict[str, list[float]] = {}

    def take(label: str, batches: Contender) -> None:
        samples.setdefault(label, []).append(measure(batches)["rows_per_s"])

    next(shuffled(root, rows, seeds))  # warms the cluster's worker processes up
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            cache = FrameCache(str(Path(folder).absolute()), 200.0)
            take("without", partial(shuffled, root, rows, seeds))
            take("first epoch", partial(shuffled, root, rows, seeds, frame_cache=cache))
            decoder = decoder_alone(root, cores)
            samples.setdefault("decoder alone", []).append(float("nan") if decoder is None else decoder)
            take("later epochs", partial(shuffled, root, OUR_ROWS, seeds, frame_cache=cache))
            through_store = our_source(root, OUR_ROWS, shuffle_seed=next(seeds), frame_cache=cache)
            take("later epochs, through the object store", partial(carried, through_store))
            take("handed over, nothing read", partial(handed_over, root, OUR_ROWS))
            take("LeRobot DataLoader, pyav", partial(lerobot_loader, root, "pyav", cores))
    medians = {label: statistics.median(values) for label, values in samples.items()}
    return {
        "rows": rows,
        "rows_per_s": medians,
        "first_epoch_of_decoder": medians["first epoch"] / medians["decoder alone"],
        "first_epoch_of_without": medians["first epoch"] / medians["without"],
        "later_of_decoder": medians["later epochs"] / medians["decoder alone"],
        "handed_over_of_decoder": medians["handed over, nothing read"] / medians["decoder alone"],
        "later_of_loader": medians["later epochs"] / medians["LeRobot DataLoader, pyav"],
        "samples": samples,
    }


# ---- caches that are not as hoped -------------------------------------------------------------------------------


def adverse(root: Path, rounds: int, seeds: Iterator[int]) -> dict[str, Any]:
    """Rates and CPU times of two epochs, start-up included, with caches of frames that fail, and without one."""
    from vla_finetuning.data.frame_cache import FrameCache

    source = our_source(root, OUR_ROWS)
    rows, gb = 2 * source.plan.rows_per_epoch, source.decoded_bytes() / 1e9

    def emptied(folder: Path) -> Iterator[dict[str, np.ndarray]]:
        """Once, when the first epoch is through."""
        read = 0
        for batch in shuffled(root, rows, seeds, frame_cache=FrameCache(str(folder), 200.0)):
            before, read = read, read + len(batch["index"])
            if before < rows // 2 <= read:
                shutil.rmtree(folder)
            yield batch

    def too_small(folder: Path) -> Iterator[dict[str, np.ndarray]]:
        return shuffled(root, rows, seeds, frame_cache=FrameCache(str(folder), gb / 2))

    def open_to_others(folder: Path) -> Iterator[dict[str, np.ndarray]]:
        folder.mkdir()
        folder.chmod(0o777)
        return shuffled(root, rows, seeds, frame_cache=FrameCache(str(folder), 200.0))

    samples: dict[str, list[dict[str, float]]] = {}
    next(shuffled(root, rows, seeds))  # warms the cluster's worker processes up
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=root.parent) as temporary:
            cases: dict[str, Contender] = {
                "without": partial(shuffled, root, rows, seeds),
                "emptied after an epoch": partial(emptied, Path(temporary).absolute() / "emptied"),
                "half of the frames fit": partial(too_small, Path(temporary).absolute() / "small"),
                "others may write there": partial(open_to_others, Path(temporary).absolute() / "open"),
            }
            for label, batches in cases.items():
                samples.setdefault(label, []).append(measure(batches))
    found: dict[str, Any] = {"rows": rows, "samples": samples}
    for key in ("rows_per_s_overall", "cpu_s_per_1000_rows"):
        medians = {label: statistics.median(run[key] for run in runs) for label, runs in samples.items()}
        found |= {key: medians, f"{key}_of_without": {k: value / medians["without"] for k, value in medians.items()}}
    return found


# ---- an object store --------------------------------------------------------------------------------------------

LATENCY_S = 0.03


def store(root: Path, rounds: int, seeds: Iterator[int]) -> dict[str, Any]:
    """Shuffled rows from the local disk and from a store on loopback, without a cache of its bytes, in turn.

    Rates through Ray, and CPU ms a row of read tasks alone, in this process, which other work hardly changes.
    """
    from benchmarks.object_store import served

    rates: dict[str, list[dict[str, float]]] = {"local": [], "store": []}
    read: dict[str, list[float]] = {"local": [], "store": []}
    with served(root.absolute(), LATENCY_S) as (url, options):
        places: dict[str, tuple[Path | str, Any]] = {"local": (root, None), "store": (url, options)}
        sources = {label: our_source(place, OUR_ROWS, o, shuffle_seed=0) for label, (place, o) in places.items()}
        for number in range(-1, 3 * rounds):
            for label, source in sources.items():
                cost = cpu_ms_per_row(source, source._window, number + 1, 1)
                read[label] += [cost] * (number >= 0)  # the first unpacks the numbers
        for _ in range(rounds):
            for label, (place, o) in places.items():
                rates[label].append(measure(partial(shuffled, place, OUR_ROWS, seeds, storage_options=o)))
    rate = {label: statistics.median(run["rows_per_s"] for run in runs) for label, runs in rates.items()}
    cpu = {label: statistics.median(costs) for label, costs in read.items()}
    return {
        "latency_s": LATENCY_S,
        "rows_per_s": rate,
        "store_of_local": rate["store"] / rate["local"],
        "read_cpu_ms_per_row": cpu,
        "read_cpu_local_of_store": cpu["local"] / cpu["store"],
        "samples": {"rates": rates, "read_cpu_ms_per_row": read},
    }


# ---- growth -----------------------------------------------------------------------------------------------------


def planning(root: Path, episodes: Sequence[int], rows: int = 300) -> dict[str, Any]:
    """Seconds from metadata to the read tasks of the first execution, and the bytes of the largest task.

    Of datasets with so many episodes of `rows` rows, in the files of the one at `root`.
    """
    from ray import cloudpickle

    from lerobot_datasource import LeRobotDatasource
    from vla_finetuning.data.metadata import load_metadata

    found: dict[str, Any] = {}
    meta = load_metadata(root)
    for count in episodes:

        def repeated(column: np.ndarray, count: int = count) -> np.ndarray:
            return np.resize(column, count)

        large = dataclasses.replace(
            meta,
            episode_index=np.arange(count),
            episode_length=np.full(count, rows),
            episode_start=np.arange(count) * rows,
            episode_data_file=repeated(meta.episode_data_file),
            episode_data_row=repeated(meta.episode_data_row),
            episode_video_file={k: repeated(v) for k, v in meta.episode_video_file.items()},
            episode_video_start_s={k: repeated(v) for k, v in meta.episode_video_start_s.items()},
        )
        start = time.perf_counter()
        tasks = LeRobotDatasource([large], order=Order(shuffle_seed=0, stream=(0, count * rows))).get_read_tasks(1)
        seconds = time.perf_counter() - start
        largest = max(len(cloudpickle.dumps(task.read_fn)) for task in tasks[:: max(1, len(tasks) // 20)])
        found[str(count)] = {"plan_s": seconds, "tasks": len(tasks), "largest_task_bytes": largest}
    return found


def growth(root: Path, rounds: int, seeds: Iterator[int], times: int = 10) -> dict[str, Any]:
    """The same number of shuffled rows from a dataset, and from one with ten times the episodes, in turn."""
    roots = {1: root, times: grow(root, times)}
    samples: dict[int, list[float]] = {number: [] for number in roots}
    for _ in range(rounds):
        for number, grown in roots.items():
            samples[number].append(measure(partial(shuffled, grown, OUR_ROWS, seeds))["rows_per_s"])
    medians = {number: statistics.median(values) for number, values in samples.items()}
    return {
        "times": times,
        "rows_per_s": medians,
        "ratio": medians[times] / medians[1],
        "samples": samples,
        "planning": planning(root, (1000, 10_000, 100_000)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="of each dataset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--datasets", default=",".join((*DATASETS, "growth", "numbers", "images", "kept_frames", "adverse", "store"))
    )
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    import ray

    seeds, rounds = iter(range(10**6)), options.rounds

    def of_av1(times: int = 1) -> Path:
        root = make("av1_240x320x3", options.rows)
        return root if times == 1 else grow(root, times)

    cells: dict[str, Callable[[], dict[str, Any]]] = {
        "growth": lambda: growth(of_av1(), rounds, seeds),
        "numbers": lambda: numbers(100),
        "images": lambda: images(make("images_240x320x3", options.rows), rounds),
        # An epoch with an empty cache is read once, and of few rows most of it is starting up.
        "kept_frames": lambda: kept_frames(of_av1(5), rounds, options.cores, seeds),
        "adverse": lambda: adverse(of_av1(), rounds, seeds),
        # Of few rows, what opening a video reads is all of it, and the node keeps that.
        "store": lambda: store(of_av1(10), rounds, seeds),
    }
    today = datetime.date.today().isoformat()
    path = RESULTS / f"data-{options.cores}cpu-{today}.json"
    # What is measured one at a time comes together in the day's file; each has its own command, hardware and revision.
    before = json.loads(path.read_text()) if path.exists() else {}
    results: dict[str, Any] = {"date": today, "datasets": {}, **before}
    measured = {
        "command": shlex.join(sys.orig_argv[1:]),
        "hardware": Environment.here().model_dump(),
        "settings": {"rows": options.rows, "rounds": rounds, "batch": BATCH, "window": WINDOW, "our_rows": OUR_ROWS},
    }
    results["mixing"] = mixing([64, 128, 256, 512, 1024, 2048, 4096], episodes=1000, rows=300)
    print(mixing_table(results["mixing"]), flush=True)
    ray.init(num_cpus=options.cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        for name in options.datasets.split(","):
            if name in cells:
                results[name] = measured | cells[name]()
                print(json.dumps(results[name], indent=2), flush=True)
            else:
                results["datasets"][name] = measured | compare(name, options.rows, rounds, options.cores, seeds)
                print(table(name, results["datasets"][name]), flush=True)
            write_json(path, results)
    finally:
        ray.shutdown()
    print(f"written to {path}")


def compare(name: str, rows: int, rounds: int, cores: int, seeds: Iterator[int]) -> dict[str, Any]:
    """Return all contenders on one dataset, in turn."""
    from vla_finetuning.data.frame_cache import FrameCache

    root = make(name, rows)
    contenders: dict[str, Contender] = {
        "ours, in order": partial(ours, root, OUR_ROWS),
        "ours, shuffled": partial(shuffled, root, OUR_ROWS, seeds),
        "ray.data.read_lerobot": partial(ray_read_lerobot, root),
        "LeRobot DataLoader, pyav, shuffled": partial(lerobot_loader, root, "pyav", cores),
        "ours, shuffled, fitted to 224x224": partial(shuffled, root, OUR_ROWS, seeds, image_size=(224, 224)),
    }
    cameras = DATASETS[name]["cameras"]
    if len(cameras) > 1:
        # As many frames as of all cameras: a stream so much shorter in bytes has tasks so much shorter, which training,
        # epoch after epoch, does not.
        one_camera = partial(shuffled, root, len(cameras) * OUR_ROWS, seeds, camera_keys=[CAMERAS[0]])
        contenders["ours, shuffled, one camera"] = one_camera
    if (by_lance := lance(root, cores)) is not None:
        contenders["LanceDB DataLoader, shuffled"] = by_lance
    if torchcodec_works():
        contenders["LeRobot DataLoader, torchcodec, shuffled"] = partial(lerobot_loader, root, "torchcodec", cores)
    else:
        print("torchcodec cannot be loaded (FFmpeg's libraries are missing): its comparison is left out")
    for label in ("ours, shuffled", "ray.data.read_lerobot"):
        next(contenders[label]())  # warms the cluster's worker processes up
    samples: dict[str, list[dict[str, float]]] = {label: [] for label in contenders}
    limits = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            cache = FrameCache(str(Path(folder).absolute()), 200.0)
            epoch = partial(shuffled, root, rows, seeds, frame_cache=cache)
            later = partial(shuffled, root, OUR_ROWS, seeds, frame_cache=cache)
            cached: dict[str, Contender] = {"ours, first epoch with a frame cache": epoch, "ours, later epochs": later}
            for label, batches in (contenders | cached).items():
                if label == "ours, shuffled":
                    limits.append(decoder_alone(root, cores))  # next to what is compared with it
                samples.setdefault(label, []).append(measure(batches))
    return summary(samples, limits)


def mixing_table(found: dict[str, Any]) -> str:
    windows = list(found["batches"][8]["by_window"])
    lines = [f"\nDistinct episodes in a batch, of {found['episodes']} episodes of {found['rows_of_each']} rows"]
    lines.append(f"  {'shuffle_window':18}" + "".join(f"{w:8}" for w in windows) + f"{'all rows':>12}")
    for batch, counts in found["batches"].items():
        cells = "".join(f"{counts['by_window'].get(w, float('nan')):8.1f}" for w in windows)
        lines.append(f"  a batch of {batch:<7}" + cells + f"{counts['global_shuffle']:12.1f}")
    return "\n".join(lines)


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
    lines.append(
        f"  {'':42}{'rows/s':>8}{'of decoder':>12}{'ours is':>9}{'first batch':>13}{'CPU s/1000':>12}"
        f"{'store MB':>10}{'process MB':>12}{'episodes/batch':>16}"
    )
    for label, r in result["contenders"].items():
        share = f"{r['rows_per_s'] / limit:.2f}" if limit else "-"
        lines.append(
            f"  {label:42}{r['rows_per_s']:8.0f}{share:>12}{reference / r['rows_per_s']:8.2f}x"
            f"{r['first_batch_s']:11.2f} s{r['cpu_s_per_1000_rows']:12.2f}{r['peak_store_bytes'] / 1e6:10.0f}"
            f"{r['peak_worker_bytes'] / 1e6:12.0f}{r['episodes_per_batch']:16.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
