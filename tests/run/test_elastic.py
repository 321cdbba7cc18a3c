"""Nodes that go and come back: a cluster of several raylets on one machine."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import clusters, planted_data
from tests.broken import SAVE_FREQ, flags, started
from tests.run import test_faults
from tests.run.test_faults import assert_every_row_once, wait_for_step
from vla_finetuning.run.folder import STOP_NAME, attempts

setting, measured = test_faults.setting, test_faults.measured
pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(monkeypatch):
    """A head node for the data, and a node for a training worker."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    # Not enough for a worker beside the read task.
    with clusters.of_several_nodes(num_cpus=1, object_store_memory=3 * 10**8) as cluster:
        yield cluster


def wait_for_attempt(folder, number, process):
    while len(attempts(folder)) <= number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    return attempts(folder)[number]


@pytest.mark.parametrize(
    ("ranks", "shards", "cpus"),
    [(128, 1, 2), (1, 1, 2), (128, 2, 3)],
    ids=["one coordinator", "a coordinator for each", "a shard for each, read beside its worker"],
)
def test_elastic_run_survives_loss_and_return_of_a_node(setting, cluster, tmp_path, ranks, shards, cpus):
    """A step has two workers' rows, dealt to two, then to one, then to two again; every row once all the same."""
    nodes = [cluster.add_node(num_cpus=cpus, object_store_memory=2 * 10**8) for _ in range(2)]
    folder = tmp_path / "elastic"
    changes = {
        "scaling.num_workers": "1,2",
        "scaling.cpus_per_worker": 2,
        "scaling.cpus_per_read_task": 0.5 if shards == 1 else 1,
        "scaling.max_failures": 3,
        "dataset.shards": shards,
        "dataset.frame_cache": tmp_path / "kept",
        "steps": 5000,
    }
    process = started(
        flags(setting, folder, **changes), address=cluster.address, TEST_RANKS=str(ranks), TEST_RESIZE_S="5"
    )
    assert wait_for_attempt(folder, 0, process)["world_size"] == 2
    wait_for_step(folder, 10, process)
    planted_data.note(folder, "fault")
    cluster.remove_node(nodes[0], allow_graceful=False)
    second = wait_for_attempt(folder, 1, process)
    assert second["world_size"] == 1
    assert second["resumed_from_step"] >= 10 - 2 * SAVE_FREQ  # the newest was maybe still being written
    wait_for_step(folder, second["resumed_from_step"] + 10, process)
    cluster.add_node(num_cpus=cpus, object_store_memory=2 * 10**8)
    third = wait_for_attempt(folder, 2, process)
    assert third["world_size"] == 2
    wait_for_step(folder, third["resumed_from_step"] + 6, process)
    (folder / STOP_NAME).touch()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 3, printed
    assert_every_row_once(folder)


def test_preemption_notice_triggers_checkpoint_and_restart(setting, cluster, tmp_path):
    """A spot instance's notice: checkpoints are taken while there is time, and it does not count as a failure."""
    node, _ = (cluster.add_node(num_cpus=2, object_store_memory=2 * 10**8) for _ in range(2))
    folder = tmp_path / "drained"
    changes = {"scaling.cpus_per_worker": 2, "steps": 100_000, "save_freq": 100_000}
    process = started(flags(setting, folder, **changes), address=cluster.address)
    wait_for_attempt(folder, 0, process)
    wait_for_step(folder, 10, process)
    cluster.add_node(num_cpus=2, object_store_memory=2 * 10**8)
    notice = ["--reason-message=spot", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds=20"]
    command = [Path(sys.executable).with_name("ray"), "drain-node", f"--address={cluster.address}"]
    rows = subprocess.run(
        [*command, f"--node-id={node.node_id}", *notice], capture_output=True, text=True, check=False, timeout=60
    )
    assert rows.returncode == 0, rows.stdout + rows.stderr
    planted_data.note(folder, "fault")
    second = wait_for_attempt(folder, 1, process)
    assert second["world_size"] == 2
    # Ray looks for notices every 5 s; half of what is then left later, there is another checkpoint.
    (noticed,) = planted_data.noted(folder, "fault")
    saved = planted_data.noted(folder, "step")[second["resumed_from_step"] - 1]
    assert saved["attempt"] == 0 and saved["time"] - noticed["time"] > 8
    cluster.remove_node(node, allow_graceful=False)
    wait_for_step(folder, second["resumed_from_step"] + 6, process)
    (folder / STOP_NAME).touch()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 3, printed
    assert_every_row_once(folder)
