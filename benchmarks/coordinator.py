"""What Ray Data's split coordinators deal, and what it costs: every block of a group of ranks passes one process.

    python -m benchmarks.coordinator [--consumers 64,128,256,512] [--pace 150] [--ranks 128] [--blocks 1500]
                                     [--rounds 2] [--json FILE]

The blocks need no decoding and are as small as blocks can be that go through the object store, as training's do; they
take the way of a run (`read_source`, order kept, `GroupedRanks`, `streaming_split(equal=True)`).
Consumers are threads of a few processes, each of which asks for its next block as soon as it has one, as a rank's
iterator does.

Few of them first, that take what they get; then more and more that take a block at a pace, all together `--pace` blocks
a second, or as many as say so (`128:320`: 2.5 each, a GPU's 20 rows/s in blocks of 8). So blocks are ready before they
are asked for, as they are while GPUs are the limit. Each number of them is dealt to by one coordinator, and then, where
they are more, by one for every `--ranks`; all that `--rounds` times:

    coordinators        that deal side by side, each with an execution of its own
    blocks_per_s        dealt by all of them together. On a machine of few cores they share those with the consumers
    dealing_cpu_ms      CPU time of the coordinators' processes for a block. The Python of each runs on one core, so one
                        deals about 1000 / dealing_cpu_ms blocks a second at the most, on a core like these
    busiest_core_share  of a core, of the one that used most while they dealt
    waiting_core_share  of a core, of each, while all consumers wait for a block: each looks every 10 ms (Ray 2.60)
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray
from ray.data import ExecutionOptions
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask

from diagnostics.environment import Environment
from lerobot_datasource import SHARE, Share, read_source
from vla_finetuning.training.coordinators import RANKS_PER_COORDINATOR, GroupedRanks

BLOCK_ROWS, ROW_BYTES = 8, 16 * 1024
BLOCKS_OF_TASK = 144  # four windows of 288 rows
PROCESSES = 2
CPUS = 4  # as Ray counts them: whole ones are what several executions divide among themselves
WAIT_S = 5.0
FEW = 8


class Blocks(Datasource):
    """So many blocks of rows that only have a `position`; what `read_source` needs of a source. The last one waits."""

    num_cpus = 0.5
    block_rows = BLOCK_ROWS
    nameable = False
    _read_rows = BLOCKS_OF_TASK * BLOCK_ROWS // 4

    def __init__(self, blocks: int, wait_s: float):
        super().__init__()
        self._blocks, self._wait_s = blocks, wait_s

    def block(self) -> tuple[int, int]:
        return BLOCK_ROWS, BLOCK_ROWS * ROW_BYTES

    def estimate_inmemory_data_size(self) -> int:
        return self._blocks * BLOCK_ROWS * ROW_BYTES

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        share = (data_context and data_context.get_config(SHARE)) or Share(0, 1, 1)
        runs = share.runs(0, self._blocks, 1)
        blocks = np.concatenate([np.arange(start, end) for start, end in runs.tolist()])
        tasks = []
        for first in range(0, len(blocks), BLOCKS_OF_TASK):
            here = blocks[first : first + BLOCKS_OF_TASK]
            rows = len(here) * BLOCK_ROWS
            metadata = BlockMetadata(num_rows=rows, size_bytes=rows * ROW_BYTES, input_files=None, exec_stats=None)
            # Only the first: blocks are dealt in order, so all consumers wait for it.
            wait_s = self._wait_s if first == 0 else 0.0
            tasks.append(ReadTask(partial(read_blocks, here, wait_s), metadata))
        return tasks


def read_blocks(blocks: np.ndarray, wait_s: float) -> Iterator[pa.Table]:
    """In a read task."""
    time.sleep(wait_s)
    for block in blocks:
        position = np.arange(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS)
        payload = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(ROW_BYTES), BLOCK_ROWS, [None, pa.py_buffer(bytes(BLOCK_ROWS * ROW_BYTES))]
        )
        yield pa.table({"position": position, "payload": payload})


class Consumers:
    """A thread for each of some splits."""

    def take(self, splits: list[Any], pause_s: float) -> tuple[list[float], list[int]]:
        """Returns when each block arrived, and how many rows each split had. After a block, each takes a pause."""
        arrived: list[float] = []
        rows: list[int] = []

        def consume(split: Any) -> None:
            blocks, _, _ = split._to_ref_bundle_iterator()  # what its public iterators begin with (Ray 2.60)
            mine = 0
            for bundle in blocks:
                arrived.append(time.time())
                mine += bundle.num_rows()
                time.sleep(pause_s)
            split._on_iteration_end(None)
            rows.append(mine)

        threads = [threading.Thread(target=consume, args=(split,)) for split in splits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return arrived, rows


def deal(consumers: int, ranks: int, blocks: int, pause_s: float) -> dict[str, Any]:
    """Deal blocks to so many consumers, after they have all waited for the first one for WAIT_S and more.

    `ranks`: a coordinator for so many of them.
    """
    source: Any = Blocks(blocks, 2 * WAIT_S)
    dataset = read_source(source)
    dataset.context.enable_progress_bars = False
    data = GroupedRanks(ExecutionOptions(preserve_order=True), 0.0, Blocks.num_cpus, ranks)
    of_ranks = data.configure({"train": dataset}, consumers, None, None)
    splits: list[Any] = [split["train"] for split in of_ranks]
    coordinators = list(getattr(splits[0]._coord_actor, "_actors", [splits[0]._coord_actor]))
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in coordinators])
    processes = [psutil.Process(pid) for pid in pids]

    def cpu_s() -> list[float]:
        return [times.user + times.system for times in (process.cpu_times() for process in processes)]

    remote: Any = ray.remote(num_cpus=0)(Consumers)
    actors = [remote.remote() for _ in range(PROCESSES)]
    taken = [actor.take.remote(splits[i::PROCESSES], pause_s) for i, actor in enumerate(actors)]
    # All wait when as much of the time has gone as is left: the first task has started, and sleeps on.
    used, waited = [cpu_s()], [time.time()]
    while not ray.wait(taken, num_returns=len(taken), timeout=0.5)[0]:
        used.append(cpu_s())
        waited.append(time.time())
    arrived = sorted(t for times, _ in ray.get(taken) for t in times)
    rows = sum(n for _, of_process in ray.get(taken) for n in of_process)
    at, of_each = np.array(waited), np.array(used)
    waiting = (at > arrived[0] - WAIT_S) & (at < arrived[0] - 0.5)
    dealing = (at > arrived[max(consumers, len(arrived) // 10)]) & (at < arrived[-1])
    share = np.polyfit(at[waiting], of_each[waiting].mean(axis=1), 1)[0]
    # Of what they use while they deal, by the blocks that they dealt meanwhile.
    first, last = np.flatnonzero(dealing)[[0, -1]]
    dealt = np.searchsorted(arrived, at[last]) - np.searchsorted(arrived, at[first])
    cpu = of_each[last] - of_each[first]
    for actor in (*actors, *coordinators):
        ray.kill(actor)
    return {
        "coordinators": len(coordinators),
        "blocks": len(arrived),
        "rows": rows,
        "blocks_per_s": float(dealt / (at[last] - at[first])),
        "dealing_cpu_ms": float(cpu.sum() / dealt * 1000),
        "busiest_core_share": float(cpu.max() / (at[last] - at[first])),
        "waiting_core_share": float(share),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--consumers", default="64,128,256,512")
    parser.add_argument("--ranks", type=int, default=RANKS_PER_COORDINATOR, help="a coordinator for so many consumers")
    parser.add_argument("--pace", type=float, default=150, help="blocks per second of all consumers together")
    parser.add_argument("--blocks", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    ray.init(
        num_cpus=CPUS,
        object_store_memory=2 * 10**9,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    results: dict[str, Any] = {"command": shlex.join(sys.orig_argv[1:]), "block_bytes": BLOCK_ROWS * ROW_BYTES}
    results["hardware"] = Environment.here().model_dump()
    results["dealt"] = []
    cases = [(FEW, FEW, math.inf)]
    for case in options.consumers.split(","):
        number, _, own_pace = case.partition(":")
        consumers, pace = int(number), float(own_pace or options.pace)
        for ranks in dict.fromkeys((consumers, min(consumers, options.ranks))):
            cases.append((consumers, ranks, pace))
    try:
        for _ in range(options.rounds):
            for consumers, ranks, pace in cases:
                # All take equally many whole ones, and three at least: those for which all have waited are no measure.
                turns = max(3, round(options.blocks / consumers))
                found = deal(consumers, ranks, turns * consumers, consumers / pace)
                asked = pace if pace < math.inf else None
                results["dealt"].append({"consumers": consumers, "asked_blocks_per_s": asked, **found})
                print(
                    f"{consumers:6} consumers, {found['coordinators']} coordinators: {found['blocks_per_s']:6.0f} "
                    f"blocks/s, {found['dealing_cpu_ms']:.2f} ms of a coordinator for a block, the busiest "
                    f"{found['busiest_core_share']:.2f} of a core, {found['waiting_core_share']:.2f} while all wait",
                    flush=True,
                )
                if options.json:
                    options.json.write_text(json.dumps(results, indent=2) + "\n")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
