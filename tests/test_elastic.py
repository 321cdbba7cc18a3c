"""Nodes that go and come back: a cluster of two raylets on one machine."""

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import vla
from diagnostics import check_rows
from run_folder import attempts
from tests import test_faults
from tests.test_faults import flags, wait_for_step

setting = test_faults.setting
pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.slow]


@pytest.fixture
def two_nodes(monkeypatch):
    """A head node for the data and two nodes for a training worker each: the cluster, those two, a way to add one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "temp_dir": temp_dir, "object_store_memory": 4 * 10**8}
    )

    def add():
        return cluster.add_node(num_cpus=1, num_gpus=0, resources={"trainer": 1}, object_store_memory=2 * 10**8)

    nodes = [add(), add()]
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, nodes, add
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(temp_dir, ignore_errors=True)


def test_a_node_dies_and_another_one_comes(setting, two_nodes, tmp_path):
    """3 workers' worth of data a step, dealt to 2 and then to 1; every row once all the same."""
    cluster, nodes, add = two_nodes
    folder = tmp_path / "elastic"
    changes = {
        "output_dir": folder,
        "scaling.num_workers": "1,2",
        "scaling.cpus_per_worker": 1,
        "scaling.cpus_per_read_task": 0.5,
        "scaling.max_failures": 3,
        "scaling.resize_interval_s": 5,
        "batch_size": 2,
        "grad_accum": 1,
        "steps": 400,
        "save_freq": 20,
    }
    killed = []

    def disturb():
        wait_for_step(folder, 25)
        cluster.remove_node(nodes[0], allow_graceful=False)
        killed.append(len(attempts(folder)))
        while len(attempts(folder)) == killed[0]:
            time.sleep(0.1)
        wait_for_step(folder, 60)
        add()

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    assert vla.main(flags(setting, "elastic", **changes)) == 0
    thread.join(timeout=60)
    print(attempts(folder), os.getpid(), json.dumps(killed))
    assert check_rows.main([str(folder)]) == 0
    worlds = [line["world_size"] for line in attempts(folder)]
    assert worlds[0] == 2 and 1 in worlds
