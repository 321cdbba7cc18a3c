"""What the sizes of a cluster are computed from, against what a small read really takes."""

import json
import math
from pathlib import Path

import pytest

from diagnostics import size_cluster
from diagnostics.size_cluster import Layout, Rate, Rates, parse_options, rates_of, size
from tests import in_process
from vla_finetuning.data.rows import read_rows
from vla_finetuning.policies.processors import Prepare

SMALL = {"steps": 100, "dataset.shuffle_window": 16, "dataset.window_segments": 4}


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return in_process.make_setting(tmp_path_factory.mktemp("size"), episodes=(60, 50, 40))


@pytest.fixture(scope="module")
def run(setting):
    return in_process.resolved(setting, **SMALL)


def options_of(*argv):
    return parse_options(argv)[0]


def test_rates_are_those_of_a_read(run, monkeypatch):
    """A row takes 4 ms to read and 1 ms to prepare, after the first window, which loads libraries."""
    monkeypatch.setattr(size_cluster, "MEASURED_ROWS", 64)
    clock, libraries_s = in_process.GivenTime(), [1000.0]
    monkeypatch.setattr(size_cluster, "time", clock)
    prepared_bytes = []

    def read_slowly(*args):
        clock.spend(libraries_s.pop() if libraries_s else 0)
        for block in read_rows(*args):
            clock.spend(0.004 * len(block))
            yield block

    def prepare_slowly(prepare, columns):
        prepared = original(prepare, columns)
        rows = len(next(iter(prepared.values())))
        clock.spend(0.001 * rows)
        if not libraries_s:  # not an example that only names the columns
            prepared_bytes.append(sum(column.nbytes for column in prepared.values()) / rows)
        return prepared

    original = Prepare.__call__
    monkeypatch.setattr(size_cluster, "read_rows", read_slowly)
    monkeypatch.setattr(Prepare, "__call__", prepare_slowly)
    rates = rates_of(run, options_of())
    assert rates.cpu_ms_per_row.value == pytest.approx(5)
    assert set(prepared_bytes) == {rates.row_bytes.value}

    layout = Layout(
        block_rows=2, window_rows=16, cpus_per_read_task=1, cpus_per_worker=1, node_gpus=8, node_cpus=8, cpu_node_cpus=8
    )
    busy = {"transport_cpu_ms_per_mb": Rate(value=1e-9, source=""), "decoding_share": Rate(value=1, source="")}
    found = size(1, rates.model_copy(update={**busy, "gpu_rows_per_s": Rate(value=150, source="")}), layout)
    assert found.decode_cpus == pytest.approx(0.75)  # 150 rows/s of 5 ms
    files = [
        p for part in ("data", "videos") for p in (Path(run.rows.metas[0].root) / part).rglob("*.*") if p.is_file()
    ]
    assert found.stored_bytes_per_s == pytest.approx(sum(p.stat().st_size for p in files))


def test_statistics_that_are_to_be_computed_are_not_waited_for(setting, monkeypatch):
    """They take a pass, and Ray; what reading costs does not depend on them."""
    monkeypatch.setattr(size_cluster, "MEASURED_ROWS", 16)
    exact = in_process.resolved(setting, **SMALL, **{"dataset.statistics": "exact"})
    assert exact.missing_stats and rates_of(exact, options_of()).cpu_ms_per_row.value > 0


RATES = Rates(
    gpu_rows_per_s=Rate(value=20, source=""),
    cpu_ms_per_row=Rate(value=2, source=""),
    transport_cpu_ms_per_mb=Rate(value=1, source=""),
    decoding_share=Rate(value=0.5, source=""),
    stored_bytes_per_row=Rate(value=1e4, source=""),
    row_bytes=Rate(value=5e5, source=""),
    coordinator_ms_per_block=Rate(value=1, source=""),
)
LAYOUT = Layout(
    block_rows=8,
    window_rows=288,
    cpus_per_read_task=1,
    cpus_per_worker=1,
    node_gpus=8,
    node_cpus=12,
    cpu_node_cpus=16,
)


def test_the_arithmetic_of_a_size():
    found = size(64, RATES, LAYOUT)
    assert (found.rows_per_s, found.nodes, found.blocks_per_s) == (1280, 8, 160)
    assert found.decode_cpus == pytest.approx(1280 * 2.5e-3 / 0.5)  # 6.4, of 32 beside training
    assert found.cpu_nodes == 0
    assert (found.coordinators, found.coordinator_share) == (1, pytest.approx(0.16))
    assert found.node_bytes_per_s == pytest.approx(8 * 20 * 5e5 * 7 / 8)
    assert found.node_store_bytes == pytest.approx((7 * 4 * 288 + 64 * 4 * 8) * 5e5 / 8 / 0.5)
    slow = RATES.model_copy(update={"cpu_ms_per_row": Rate(value=20, source="")})
    assert size(64, slow, LAYOUT).cpu_nodes == 2  # 52.5 CPUs
    assert size(1, RATES, LAYOUT).node_bytes_per_s == 0  # all on one node
    # Three coordinators share 3 of the 4 CPUs that a node has beside training.
    found = size(384, slow, LAYOUT)
    assert (found.coordinators, found.coordinator_share) == (3, pytest.approx(0.32))
    # And each of them decodes, of its 128 blocks of 8 in a turn, a window of 288 more.
    assert found.decode_cpus == pytest.approx(384 * 20 * 20.5e-3 / 0.5 * (1 + 288 / 1024))
    assert found.cpu_nodes == math.ceil((found.decode_cpus - 48 * 3) / 16)


def test_the_tool(setting, tmp_path, capsys):
    result = tmp_path / "size.json"
    argv = [*in_process.flags(setting), "--cpu_ms_per_row=2", "--coordinator_ms_per_block=1", f"--json={result}"]
    assert size_cluster.main([*argv, "--gpus=8,1000"]) == 0
    printed = capsys.readouterr().out
    assert "given: --cpu_ms_per_row" in printed and "predicted: all of PI0.5" in printed and "are the limit" in printed
    sizes = json.loads(result.read_text())["sizes"]
    assert [s["gpus"] for s in sizes] == [8, 1000] and sizes[1]["blocks_per_s"] == 15_000  # blocks of 2 rows
    assert size_cluster.main([*argv, "--decoding_share=0"]) == 2
    assert "expected a positive number, found '0'" in capsys.readouterr().err
    assert size_cluster.main([a for a in argv if "cpu_ms" not in a]) == 1
    assert "too few to measure" in capsys.readouterr().err
