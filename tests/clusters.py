"""The local Ray cluster of a test process: one at a time, started by the first test that needs it."""

import contextlib
import gc
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from tests import forked_workers

ROOT = Path(__file__).resolve().parent.parent
_temp_dir: str | None = None
_beside = contextlib.ExitStack()


def start(num_cpus: int = 3, object_store_memory: int = 10**9, forked: bool = False) -> None:
    """A cluster whose processes inherit the environment as it is now. One that runs already is stopped first.

    forked: its workers are forked from a process that has imported LeRobot.

    3 logical CPUs whatever the machine has: two train workers and the read tasks beside them must all be schedulable
    at once. Each more would be one more process for them, which imports LeRobot for 9 s of CPU.
    """
    global _temp_dir
    stop()
    # Ray puts Unix sockets under this folder, and their paths may have no more than about 100 characters: the
    # temporary folder of macOS is too long for that.
    _temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        # Workers find the top-level modules wherever pytest was started from.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        if forked:
            for name, value in _beside.enter_context(forked_workers.forking(_temp_dir)).items():
                patch.setenv(name, value)
            patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", forked_workers.__file__)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_memory,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=_temp_dir,
        )


def stop() -> None:
    """End the cluster, if one runs, and remove what it left."""
    global _temp_dir
    if ray.is_initialized():
        gc.collect()  # a handle that goes later counts as one of the next cluster's, whose actors have the same ids
        ray.shutdown()
    _beside.close()
    if _temp_dir is not None:
        shutil.rmtree(_temp_dir, ignore_errors=True)
        _temp_dir = None


class _Nodes(Cluster):
    """Each node unpacks the run's code into a folder of its own, as on separate machines.

    In a shared folder (Ray 2.60's default for nodes of one session) a node that joins removes the code of the others
    and unpacks it again: the working directory of their processes is gone, and imports there raise FileNotFoundError.
    """

    _number = itertools.count(1)

    def add_node(self, wait=True, **options):
        if self.head_node is not None:  # the head's folder is also the driver's, which looks for the default name
            options["runtime_env_dir_name"] = f"runtime_resources_{next(self._number)}"
        return super().add_node(wait, **options)


@contextlib.contextmanager
def of_several_nodes(**head):
    """A cluster on this machine to which nodes can be added; so far it is its head. `head`: what `add_node` takes."""
    # `Cluster` (Ray 2.60) notes its address here, whatever its own folder is, and expects the place to be there.
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    cluster = _Nodes(initialize_head=True, head_node_args={**head, "temp_dir": temp_dir})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)
