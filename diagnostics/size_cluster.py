"""What nodes, CPUs and network a run needs to feed so many GPUs.

    python -m diagnostics.size_cluster --preset h100 --dataset.root s3://bucket/arm --policy.path lerobot/pi05_base \\
        --output_dir out [--json FILE]

takes the flags of `vla.py` and prints a table for 8 to 1000 GPUs, each computing its micro-batches as the flags say.
Bytes of a row are those of the dataset's metadata and files; what a row costs to read is measured here, on a few of the
run's own windows. Every rate is printed with where it comes from, and can be given instead. Own flags:

    --gpus 8,16,...                numbers of GPUs (8,16,32,64,128,256,512,1000)
    --against PATH                 a result of profile_step: rows a second that a GPU computes
    --gpu_rows_per_s R             the same, given
    --cpu_ms_per_row MS            of a core, to read, decode and prepare a row; nothing is read then
    --transport_cpu_ms_per_mb MS   of a core, in Ray, for a decoded megabyte
    --decoding_share S             of a core's time that goes into all that; the rest of it waits for tasks and blocks
    --stored_bytes_per_row B       out of the dataset's files. --row_bytes B: decoded and prepared, between processes
    --coordinator_ms_per_block MS  of a process that deals blocks to a group of ranks (docs/scale.md)
    --node_gpus N, --node_cpus N   of a node that trains; --cpu_node_cpus N: of one that only decodes
    --json PATH                    the result for scripts

It is a prediction: nothing but the reading was measured, and no run of so many GPUs was. Exit status: 0 done, 1 the
dataset cannot be read, 2 the flags do not go together.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import vla
from diagnostics.report import Environment, Record, Report
from diagnostics.step_report import StepReport
from diagnostics.tool import Options, Result, count, run_tool, with_any_stats
from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.read_tasks import MAX_READS_PER_TASK
from vla_finetuning.data.rows import DatasetFiles, column_to_numpy, read_rows
from vla_finetuning.run.cluster import DATA_SHARE
from vla_finetuning.run.resolve import Run
from vla_finetuning.training.coordinators import RANKS_PER_COORDINATOR
from vla_finetuning.training.stream import TrainingData

GPUS = "8,16,32,64,128,256,512,1000"
# Rows that are read before those that count (libraries load, files come into the page cache), and so many at least.
MEASURED_ROWS = 256
# Blocks that a rank has at once: one in use, two batches prefetched, one asked for.
BLOCKS_OF_RANK = 4


class Rate(Record):
    """A number, and where it comes from."""

    value: float
    source: str


ASSUMED = {
    "gpu_rows_per_s": Rate(value=30, source="assumed: all of PI0.5 on an H100"),
    # docs/data_engine.md, "CPU time of a row": into the object store and Ray's own processes, rows of 0.69 MB.
    "transport_cpu_ms_per_mb": Rate(value=0.75, source="measured: docs/data_engine.md"),
    "decoding_share": Rate(value=0.7, source="measured: rows of a run against the decoder alone, docs/data_engine.md"),
    "coordinator_ms_per_block": Rate(value=1.9, source="measured, and extended to 320 blocks/s: docs/scale.md"),
}


class Rates(Record):
    """What a row, a megabyte or a block costs; see the module's flags."""

    gpu_rows_per_s: Rate
    cpu_ms_per_row: Rate
    transport_cpu_ms_per_mb: Rate
    decoding_share: Rate
    stored_bytes_per_row: Rate
    row_bytes: Rate
    coordinator_ms_per_block: Rate


class Layout(Record):
    """The run's way of reading, and the nodes. `cpus_per_worker`: held by each training process."""

    block_rows: int
    window_rows: int
    cpus_per_read_task: float
    cpus_per_worker: float
    node_gpus: int
    node_cpus: int
    cpu_node_cpus: int


class Size(Record):
    """What so many GPUs need.

    Attributes:
        decode_cpus: CPUs for read tasks. nodes, cpu_nodes: that train, and that only decode beside them.
        stored_bytes_per_s: out of the dataset's store, where no node keeps anything.
        node_bytes_per_s: into a node that trains, from those that decode.
        node_store_bytes: capacity of a node's object store; the data may fill DATA_SHARE of it.
        coordinators: processes that deal blocks, each to a group of GPUs. coordinator_share: of the time of one of
            them; above 1 they are the limit.
    """

    gpus: int
    rows_per_s: float
    decode_cpus: float
    nodes: int
    cpu_nodes: int
    stored_bytes_per_s: float
    node_bytes_per_s: float
    node_store_bytes: float
    blocks_per_s: float
    coordinators: int
    coordinator_share: float


def size(gpus: int, rates: Rates, layout: Layout) -> Size:
    """Pure."""
    rows_per_s, row_bytes = gpus * rates.gpu_rows_per_s.value, rates.row_bytes.value
    cpu_ms = rates.cpu_ms_per_row.value + rates.transport_cpu_ms_per_mb.value * row_bytes / 1e6
    decode_cpus = rows_per_s * cpu_ms / 1000 / rates.decoding_share.value
    nodes = math.ceil(gpus / layout.node_gpus)
    beside_training = nodes * layout.node_cpus - gpus * layout.cpus_per_worker
    coordinators = math.ceil(gpus / RANKS_PER_COORDINATOR)
    if coordinators > 1:
        # In each turn, the window in which a group's blocks meet the next group's is decoded for both, at worst wholly.
        decode_cpus *= 1 + layout.window_rows * coordinators / (gpus * layout.block_rows)
        # Their executions share a node's CPUs in whole ones.
        beside_training = nodes * (beside_training // nodes // coordinators * coordinators)
    cpu_nodes = max(0, math.ceil((decode_cpus - beside_training) / layout.cpu_node_cpus))
    # Blocks are dealt in turn, wherever they were made: of those for a node, its own part of the cluster made few.
    elsewhere = 1 - 1 / (nodes + cpu_nodes)
    # Blocks leave in the plan's order, so all that running tasks have made may wait for the first of them.
    tasks = math.ceil(decode_cpus / layout.cpus_per_read_task)
    waiting = tasks * MAX_READS_PER_TASK * layout.window_rows * row_bytes
    with_ranks = gpus * BLOCKS_OF_RANK * layout.block_rows * row_bytes
    blocks_per_s = rows_per_s / layout.block_rows
    return Size(
        gpus=gpus,
        rows_per_s=rows_per_s,
        decode_cpus=decode_cpus,
        nodes=nodes,
        cpu_nodes=cpu_nodes,
        stored_bytes_per_s=rows_per_s * rates.stored_bytes_per_row.value,
        node_bytes_per_s=min(gpus, layout.node_gpus) * rates.gpu_rows_per_s.value * row_bytes * elsewhere,
        node_store_bytes=(waiting + with_ranks) / (nodes + cpu_nodes) / DATA_SHARE,
        blocks_per_s=blocks_per_s,
        coordinators=coordinators,
        coordinator_share=blocks_per_s / coordinators * rates.coordinator_ms_per_block.value / 1000,
    )


class SizeReport(Report):
    """What `size_cluster` computed."""

    tool: Literal["size_cluster"] = "size_cluster"
    rates: Rates
    layout: Layout
    sizes: list[Size]


# ---- rates --------------------------------------------------------------------------------------------------------


def stored_bytes_per_row(metas: Iterable[DatasetMetadata], camera_keys: Sequence[str]) -> float:
    """Of the data files and the chosen cameras' videos."""
    total = rows = 0
    for meta in metas:
        wanted = {*meta.data_files, *(f for key in camera_keys for f in meta.video_files.get(key, ()))}
        for folder in {path.rpartition("/")[0] for path in wanted}:
            for path, entry in meta.fs.find(f"{meta.base}/{folder}", maxdepth=1, detail=True).items():
                total += entry["size"] if path.removeprefix(f"{meta.base}/") in wanted else 0
        rows += meta.total_frames
    return total / rows


def reading_cpu_ms(data: TrainingData, source: LeRobotDatasource) -> tuple[float, int]:
    """CPU ms of a row in a read task, reading, decoding and preparing it in this process; and of how many rows."""
    readers = [DatasetFiles.of(meta, source.columns()) for meta in source.metas]
    window, (first, last) = source.plan.window_rows, source.execution(0)
    begun, rows = time.process_time(), 0
    for a in range(first, last, window):
        windows = list(source.plan.slices(a, min(a + window, last)))
        for block in read_rows(readers, source._read(windows), a, source._options(source.block_rows)):
            data.prepare({name: column_to_numpy(block.column(name)) for name in block.column_names})
            rows += len(block)
        if a == first:
            begun, rows = time.process_time(), 0
        elif rows >= MEASURED_ROWS:
            break
    if not rows:
        raise ValueError(
            f"the run has {last - first} rows, which are a single window: too few to measure what one costs to read; "
            "give --cpu_ms_per_row"
        )
    return (time.process_time() - begun) * 1000 / rows, rows


def rates_of(run: Run, options: Namespace) -> Rates:
    ready = with_any_stats(run)
    data = vla.build_dataset(ready.rows, ready.policy, ready.job.checkpoints_dir)
    source = data.read(stream=(0, run.rows.last_row))

    def rate(name: str, otherwise: Callable[[], Rate] | None = None) -> Rate:
        given = getattr(options, name)
        if given is not None:
            return Rate(value=given, source=f"given: --{name}")
        return ASSUMED[name] if otherwise is None else otherwise()

    def computed() -> Rate:
        if options.against is None:
            return ASSUMED["gpu_rows_per_s"]
        step = StepReport.read(options.against)
        return Rate(value=step.samples_per_s / step.world_size, source=f"measured: {options.against}")

    def read() -> Rate:
        cpu_ms, rows = reading_cpu_ms(data, source)
        return Rate(value=cpu_ms, source=f"measured: {rows} rows of the run, read here")

    def stored() -> Rate:
        found = stored_bytes_per_row(run.rows.metas, run.rows.camera_keys)
        return Rate(value=found, source="the dataset's files, over its rows")

    return Rates(
        gpu_rows_per_s=rate("gpu_rows_per_s", computed),
        cpu_ms_per_row=rate("cpu_ms_per_row", read),
        stored_bytes_per_row=rate("stored_bytes_per_row", stored),
        row_bytes=rate("row_bytes", lambda: Rate(value=data.row_bytes, source="meta/info.json and the policy")),
        transport_cpu_ms_per_mb=rate("transport_cpu_ms_per_mb"),
        decoding_share=rate("decoding_share"),
        coordinator_ms_per_block=rate("coordinator_ms_per_block"),
    )


# ---- the tool -----------------------------------------------------------------------------------------------------


def parse_options(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The tool's own options, and what is left for `vla.py`'s parser."""
    options = Options(json="size_cluster_json")
    # Not in the environment, as other tools' are: GPUS or ROW_BYTES may mean something else there.
    options.add_argument("--gpus", type=counts, default=counts(GPUS))
    options.add_argument("--against", type=Path)
    for name in Rates.model_fields:
        options.add_argument(f"--{name}", type=positive)
    # An H100 node of AWS and one that decodes beside it, as in configs/aws_h100.yaml.
    for name, default in (("node_gpus", 8), ("node_cpus", 192), ("cpu_node_cpus", 32)):
        options.add_argument(f"--{name}", type=count, default=default)
    return options.parse_known_args(argv)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentTypeError(f"expected a positive number, found {text!r}")
    return value


def prepare(run: Run, options: Namespace) -> Callable[[], Result]:
    def examine() -> Result:
        scaling = run.config.scaling
        layout = Layout(
            block_rows=run.rows.block_rows,
            window_rows=run.rows.source(stream=(0, run.rows.last_row)).plan.window_rows,
            cpus_per_read_task=scaling.cpus_per_read_task,
            cpus_per_worker=scaling.cpus_per_worker,
            node_gpus=options.node_gpus,
            node_cpus=options.node_cpus,
            cpu_node_cpus=options.cpu_node_cpus,
        )
        rates = rates_of(run, options)
        report = SizeReport(
            environment=Environment.here(),
            config=run.config.to_json(),
            rates=rates,
            layout=layout,
            sizes=[size(gpus, rates, layout) for gpus in options.gpus],
        )
        return Result(report, table(report))

    return examine


def table(report: SizeReport) -> str:
    layout = report.layout
    lines = ["Rates"]
    for name, rate in report.rates:
        lines.append(f"  {name:26}{rate.value:14,.2f}  {rate.source}")
    lines.append(
        f"Nodes        {layout.node_gpus} GPUs and {layout.node_cpus} CPUs each; beside them some of "
        f"{layout.cpu_node_cpus} CPUs that only decode. Blocks of {layout.block_rows} rows, windows of "
        f"{layout.window_rows}"
    )
    lines.append(
        f"{'GPUs':>5}{'rows/s':>9}{'CPUs':>7}{'nodes':>7}{'+ CPU':>7}{'dataset':>11}{'into a node':>13}"
        f"{'its store':>11}{'blocks/s':>10}{'coordinators':>14}"
    )
    for s in report.sizes:
        dealing = f"{s.coordinators} at {s.coordinator_share:.0%}"
        lines.append(
            f"{s.gpus:5}{s.rows_per_s:9,.0f}{s.decode_cpus:7.0f}{s.nodes:7}{s.cpu_nodes:7}"
            f"{s.stored_bytes_per_s / 1e6:6,.0f} MB/s{s.node_bytes_per_s / 1e6:8,.0f} MB/s"
            f"{s.node_store_bytes / 1e9:8.1f} GB{s.blocks_per_s:10,.0f}{dealing:>14}"
        )
    over = [s.gpus for s in report.sizes if s.coordinator_share > 1]
    if over:
        lines.append(
            f"With {', '.join(map(str, over))} GPUs the processes that deal the blocks are the limit, not the CPUs: a "
            "larger --batch_size makes fewer blocks of as many rows"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Size the cluster for the run that the flags describe. Returns the exit status: see the module."""
    return run_tool(argv, __doc__, parse_options, prepare)


if __name__ == "__main__":
    sys.exit(main())
