"""Measure the rate of shuffled training batches from a LeRobot v3 dataset: our reader, peers, and the decoder alone.

    python -m benchmarks.data [--rows 2000] [--rounds 3] [--datasets av1_240x320x3,...] [--cores 2]

Every contender yields batches of 8 rows with action windows of 50 as contiguous uint8 arrays. Contenders alternate for
several rounds, and medians are reported. `rows_per_s` is the slope between a fifth and nine tenths of the rows. An
epoch with an empty frame cache is read once per round, so with few --rows start-up dominates it. Results are written to
`benchmarks/results/data-<hardware>-<date>.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, readers
from benchmarks.datasets import CAMERAS, DATASETS, make
from benchmarks.readers import BATCH, OUR_ROWS, WINDOW, Contender, measure
from diagnostics.report import format_table, medians, provenance
from vla_finetuning.files import read_json, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="of each dataset")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    import ray  # imported late, as in benchmarks/readers.py

    names = options.datasets.split(",")
    if unknown := [name for name in names if name not in DATASETS]:
        parser.error(f"--datasets: {unknown[0]!r} is none of {', '.join(DATASETS)}")
    today = datetime.date.today().isoformat()
    path = RESULTS / f"data-{options.cores}cpu-{today}.json"
    # Runs of one day share a file; each dataset has its own command, hardware and revision.
    results: dict[str, Any] = {"date": today, "datasets": {}, **read_json(path)}
    measured = provenance(rows=options.rows, rounds=options.rounds, batch=BATCH, window=WINDOW, our_rows=OUR_ROWS)
    ray.init(num_cpus=options.cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    seeds = iter(range(10**6))
    try:
        for name in names:
            result = results["datasets"][name] = measured | compare(name, options, seeds)
            print(table(name, result), flush=True)
            write_json(path, results)
    finally:
        ray.shutdown()
    print(f"written to {path}")


def contenders_of(name: str, root: Path, cores: int, seeds: Iterator[int]) -> dict[str, Contender]:
    contenders: dict[str, Contender | None] = {
        "ours, shuffled": partial(readers.shuffled, root, OUR_ROWS, seeds),
        "ours, in order": partial(readers.ours, root, OUR_ROWS),
        "ray.data.read_lerobot": partial(readers.ray_read_lerobot, root),
        "LeRobot DataLoader, pyav, shuffled": partial(readers.lerobot_loader, root, "pyav", cores),
        "LanceDB DataLoader, shuffled": readers.lance(root, cores),
        "LeRobot DataLoader, torchcodec, shuffled": None,
    }
    cameras = DATASETS[name]["cameras"]
    if len(cameras) > 1:
        # Read as many frames as with all cameras: a shorter stream would have shorter tasks than training has.
        one_camera = partial(readers.shuffled, root, len(cameras) * OUR_ROWS, seeds, camera_keys=[CAMERAS[0]])
        contenders["ours, shuffled, one camera"] = one_camera
    with contextlib.suppress(ImportError, OSError, RuntimeError):  # torchcodec needs FFmpeg's libraries
        from torchcodec.decoders import VideoDecoder  # noqa: F401

        torchcodec = partial(readers.lerobot_loader, root, "torchcodec", cores)
        contenders["LeRobot DataLoader, torchcodec, shuffled"] = torchcodec
    for label in [label for label, contender in contenders.items() if contender is None]:
        print(f"{label}: left out, it is not installed")
    return {label: contender for label, contender in contenders.items() if contender is not None}


def compare(name: str, options: argparse.Namespace, seeds: Iterator[int]) -> dict[str, Any]:
    """Measure all readers of a dataset and the decoder alternately for several rounds."""
    from vla_finetuning.data.disk_cache import FrameCache

    root = make(name, options.rows)
    contenders = contenders_of(name, root, options.cores, seeds)
    for _ in readers.ours(root, options.rows):
        pass  # start the cluster's workers: a read that is broken off would end them again
    samples: dict[str, list[dict[str, float]]] = {}
    limits: list[float | None] = []
    for _ in range(options.rounds):
        limits.append(readers.decoder_alone(root, options.cores))  # close in time to the readers
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            cache = FrameCache(str(Path(folder).absolute()), 200.0)
            cached = partial(readers.shuffled, root, seeds=seeds, frame_cache=cache)
            epochs: dict[str, Contender] = {
                "ours, first epoch with a frame cache": partial(cached, rows=options.rows),
                "ours, later epochs": partial(cached, rows=OUR_ROWS),
            }
            for label, batches in (contenders | epochs).items():
                samples.setdefault(label, []).append(measure(batches))
    decoder = [limit for limit in limits if limit is not None]  # empty without videos
    limit = statistics.median(decoder) if decoder else None
    return {"decoder_alone_rows_per_s": limit, "contenders": {label: medians(s) for label, s in samples.items()}}


def table(name: str, result: dict[str, Any]) -> str:
    """Format the contenders as a table, compared with the decoder and with the first contender."""
    limit, contenders = result["decoder_alone_rows_per_s"], result["contenders"]
    reference = next(iter(contenders.values()))["rows_per_s"]
    rows = [[name, "rows/s", "of decoder", "first is", "first batch", "CPU s/1000", "store MB", "episodes/batch"]]
    for label, r in contenders.items():
        share = f"{r['rows_per_s'] / limit:.2f}" if limit else "-"
        times = f"{reference / r['rows_per_s']:.2f}x", f"{r['first_batch_s']:.2f} s", f"{r['cpu_s_per_1000_rows']:.2f}"
        memory = f"{r['peak_store_bytes'] / 1e6:.0f}"
        rows.append([label, f"{r['rows_per_s']:.0f}", share, *times, memory, f"{r['episodes_per_batch']:.1f}"])
    if limit:
        rows.append(["the decoder alone", f"{limit:.0f}", "1", *[""] * 5])
    return "\n".join(["", *format_table(rows)])


if __name__ == "__main__":
    main()
