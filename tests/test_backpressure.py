"""A slow consumer: the object store fills up to its limit and no further. With a control that does spill."""

import shutil
import tempfile
import time

import numpy as np
import pytest

from lerobot_datasource import LeRobotDatasource, read_source
from lerobot_metadata import load_metadata
from progress import spilled_bytes
from tests.datasets import make_dataset

STORE_BYTES = 100 * 10**6
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def small_cluster():
    """A Ray cluster of its own, whose object store holds a quarter of what the test reads."""
    import ray

    temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=temp_dir,
    )
    yield
    ray.shutdown()
    shutil.rmtree(temp_dir, ignore_errors=True)


def used_bytes():
    import ray

    return STORE_BYTES - ray.available_resources().get("object_store_memory", STORE_BYTES)


@pytest.mark.ray
def test_a_slow_consumer_makes_nothing_spill(small_cluster, tmp_path):
    import ray

    root = make_dataset(
        tmp_path / "d", episodes=(40, 40), cameras={TOP: (480, 640)}, vcodec="h264", video_files_size_in_mb=100
    )
    source = LeRobotDatasource([load_metadata(root)], shuffle_seed=0, shuffle_window=16, stream=(0, 400), block_rows=8)
    assert source.row_bytes() * 400 > 3 * STORE_BYTES
    rows = 0
    for batch in read_source(source).iter_batches(batch_size=8, batch_format="numpy", prefetch_batches=1):
        rows += len(batch["index"])
        time.sleep(0.1)
    assert rows == 400
    assert spilled_bytes() == 0

    # The same amount with nobody to hold it back: this is how spilling shows.
    held = [ray.put(np.zeros(STORE_BYTES // 8, np.uint8)) for _ in range(12)]
    deadline = time.monotonic() + 20
    while not spilled_bytes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(held) == 12 and spilled_bytes() > 0
