"""How fast shuffled training batches come out of a LeRobot v3 dataset: ours, its peers, and the decoder alone.

    python -m benchmarks.data [--rows 2000] [--rounds 3] [--datasets av1_240x320x3,...] [--cores 2]

Every contender gives batches of 8 rows with action windows of 50 as contiguous uint8 arrays in this process. They
take turns, several rounds; medians are reported. `rows_per_s` is what arrives once all have started: the slope between
a fifth and nine tenths of the rows. Ours reads several epochs, on a warm Ray cluster; `rows_per_s_overall` is all rows
over all the time. `growth` compares a dataset with ten times the episodes (benchmarks/plan.py has a million).
`kept_frames`: epochs without a cache of decoded frames, the first with one, and later ones. `store`: rates from an S3
on loopback whose answers take 30 ms, against those from the local disk.
Results go to `benchmarks/results/data-<hardware>-<date>.json`, dataset by dataset; a table is printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import RESULTS
from benchmarks.datasets import CAMERAS, DATASETS, grow, make
from benchmarks.readers import (
    BATCH,
    OUR_ROWS,
    WINDOW,
    Contender,
    carried,
    decoder_alone,
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
from vla_finetuning.files import write_json

if TYPE_CHECKING:
    from lerobot_datasource import LeRobotDatasource


# ---- the CPU time of a row --------------------------------------------------------------------------------------


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


# ---- cached frames ----------------------------------------------------------------------------------------------


def kept_frames(root: Path, rounds: int, cores: int, seeds: Iterator[int]) -> dict[str, Any]:
    """Shuffled rows per second without a cache of decoded frames, with an empty one, and with one that has them all.

    A single epoch of the first two, and in turn: an empty cache is empty once. Decoder and DataLoader are measured
    beside them.
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
            take("LeRobot DataLoader, pyav", partial(lerobot_loader, root, "pyav", cores))
    medians = {label: statistics.median(values) for label, values in samples.items()}
    return {
        "rows": rows,
        "rows_per_s": medians,
        "first_epoch_of_decoder": medians["first epoch"] / medians["decoder alone"],
        "first_epoch_of_without": medians["first epoch"] / medians["without"],
        "later_of_decoder": medians["later epochs"] / medians["decoder alone"],
        "later_of_loader": medians["later epochs"] / medians["LeRobot DataLoader, pyav"],
        "samples": samples,
    }


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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="of each dataset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datasets", default=",".join((*DATASETS, "growth", "kept_frames", "store")))
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    import ray

    seeds, rounds = iter(range(10**6)), options.rounds

    def of_av1(times: int = 1) -> Path:
        root = make("av1_240x320x3", options.rows)
        return root if times == 1 else grow(root, times)

    cells: dict[str, Callable[[], dict[str, Any]]] = {
        "growth": lambda: growth(of_av1(), rounds, seeds),
        # An epoch with an empty cache is read once, and of few rows most of it is starting up.
        "kept_frames": lambda: kept_frames(of_av1(5), rounds, options.cores, seeds),
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
