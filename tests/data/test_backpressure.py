"""A slow consumer: the object store fills up to its limit and no further. With a control that does spill."""

import time

import pytest

from lerobot_datasource import read_source
from tests import clusters
from tests.datasets import datasource, make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.run.progress import spilled_bytes

STORE_BYTES = 100 * 10**6
ROWS, SIZE = 240, (480, 640)  # 221 MB of frames
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def small_cluster():
    """A Ray cluster of its own, whose object store holds less than half of what is read."""
    clusters.start(num_cpus=2, object_store_memory=STORE_BYTES)
    yield
    clusters.stop()


@pytest.mark.ray
def test_a_slow_consumer_makes_nothing_spill(small_cluster, tmp_path):
    root = make_dataset(
        tmp_path / "d", episodes=(30, 30), cameras={TOP: SIZE}, vcodec="h264", video_files_size_in_mb=100
    )

    def rows():
        """Four epochs, in read tasks of 16 rows and blocks of 8."""
        stream = {"shuffle_seed": 0, "shuffle_window": 16, "stream": (0, ROWS), "block_rows": 8}
        return read_source(datasource([load_metadata(root)], **stream))

    assert ROWS * SIZE[0] * SIZE[1] * 3 > 2 * STORE_BYTES
    positions = []
    for batch in rows().iter_batches(batch_size=8, batch_format="numpy", prefetch_batches=1):
        positions += batch["position"].tolist()
        time.sleep(0.15)  # the read tasks are several times as fast
    assert sorted(positions) == list(range(ROWS))
    assert spilled_bytes() == 0

    kept = rows().materialize()  # the same rows with nothing that holds them back
    assert kept.count() == ROWS
    assert spilled_bytes() > 0
