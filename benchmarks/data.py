"""How fast shuffled training batches come out of a LeRobot v3 dataset: ours, its peers, and the decoder alone.

    python -m benchmarks.data [--rows 2000] [--rounds 3] [--datasets av1_240x320x3,...] [--cores 2]

Every contender gives batches of 8 rows with action windows of 50 as contiguous uint8 arrays in this process. They
take turns, several rounds; medians are reported. `rows_per_s` is what arrives once all have started: the slope between
a fifth and nine tenths of the rows. Ours reads several epochs, on a warm Ray cluster; `rows_per_s_overall` is all rows
over all the time. An epoch with an empty cache of frames is read once: of few --rows most of it is starting up.
`growth` compares a dataset with ten times the episodes (benchmarks/plan.py has a million). `store`: rates from an S3 on
loopback whose answers take 30 ms, against those from the local disk.
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.datasets import CAMERAS, DATASETS, grow, make
from benchmarks.readers import (
    BATCH,
    OUR_ROWS,
    WINDOW,
    Contender,
    decoder_alone,
    lance,
    lerobot_loader,
    measure,
    ours,
    ray_read_lerobot,
    shuffled,
    torchcodec_works,
)
from diagnostics.report import Environment
from vla_finetuning.files import write_json

LATENCY_S = 0.03


def in_turn(variants: dict[str, Contender], rounds: int) -> dict[str, Any]:
    """Measure variants in turn, several rounds: rows/s, and how many times the first one's."""
    samples: dict[str, list[float]] = {label: [] for label in variants}
    for label, batches in list(variants.items()) * rounds:
        samples[label].append(measure(batches)["rows_per_s"])
    medians = {label: statistics.median(rates) for label, rates in samples.items()}
    first = next(iter(medians.values()))
    return {"rows_per_s": medians, "of_first": {k: v / first for k, v in medians.items()}, "samples": samples}


def growth(root: Path, rounds: int, seeds: Iterator[int]) -> dict[str, Any]:
    """The same number of shuffled rows from a dataset, and from one with ten times the episodes."""
    roots = {"once": root, "ten times": grow(root, 10)}
    return in_turn({name: partial(shuffled, grown, OUR_ROWS, seeds) for name, grown in roots.items()}, rounds)


def store(root: Path, rounds: int, seeds: Iterator[int]) -> dict[str, Any]:
    """Shuffled rows from the local disk and from a store on loopback, without a cache of its bytes."""
    from benchmarks.object_store import served

    with served(root.absolute(), LATENCY_S) as (url, options):
        remote = partial(shuffled, url, OUR_ROWS, seeds, storage_options=options)
        rates = in_turn({"local": partial(shuffled, root, OUR_ROWS, seeds), "store": remote}, rounds)
    return {"latency_s": LATENCY_S, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="of each dataset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datasets", default=",".join((*DATASETS, "growth", "store")))
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    import ray

    seeds, rounds = iter(range(10**6)), options.rounds

    def of_av1(times: int = 1) -> Path:
        root = make("av1_240x320x3", options.rows)
        return root if times == 1 else grow(root, times)

    cells: dict[str, Callable[[], dict[str, Any]]] = {
        "growth": lambda: growth(of_av1(), rounds, seeds),
        # Of few rows, what opening a video reads is all of it, and the node keeps that.
        "store": lambda: store(of_av1(10), rounds, seeds),
    }
    names = options.datasets.split(",")
    if unknown := [name for name in names if name not in DATASETS and name not in cells]:
        parser.error(f"--datasets: {unknown[0]!r} is none of {', '.join([*DATASETS, *cells])}")
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
        for name in names:
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
            cached: dict[str, Contender] = {
                "ours, first epoch with a frame cache": epoch,
                "ours, later epochs": later,
            }
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
        f"  {'':46}{'rows/s':>8}{'of decoder':>12}{'ours is':>9}{'first batch':>13}{'CPU s/1000':>12}"
        f"{'store MB':>10}{'process MB':>12}{'episodes/batch':>16}"
    )
    for label, r in result["contenders"].items():
        share = f"{r['rows_per_s'] / limit:.2f}" if limit else "-"
        lines.append(
            f"  {label:46}{r['rows_per_s']:8.0f}{share:>12}{reference / r['rows_per_s']:8.2f}x"
            f"{r['first_batch_s']:11.2f} s{r['cpu_s_per_1000_rows']:12.2f}{r['peak_store_bytes'] / 1e6:10.0f}"
            f"{r['peak_worker_bytes'] / 1e6:12.0f}{r['episodes_per_batch']:16.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
