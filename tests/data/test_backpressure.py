"""A slow consumer, which may pause: the object store fills up to its limit and no further. A control does spill."""

import time

import pytest
from ray.data import DataContext

from tests import clusters
from tests.datasets import datasource, make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.run.progress import spilled_bytes
from vla_finetuning.training.stream import LazyPickle, TrainingData

STORE_BYTES = 100 * 10**6
ROWS, SIZE = 240, (480, 640)  # 221 MB of frames
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def small_cluster():
    """A Ray cluster whose object store fits less than half of the rows."""
    clusters.start(num_cpus=2, object_store_memory=STORE_BYTES)
    yield
    clusters.stop()


@pytest.mark.gate
@pytest.mark.ray
def test_slow_consumer_causes_no_spilling(small_cluster, tmp_path, monkeypatch):
    root = make_dataset(
        tmp_path / "d", episodes=(30, 30), cameras={TOP: SIZE}, vcodec="h264", video_files_size_in_mb=100
    )

    def read(**options):
        """Four epochs, in read tasks of 16 rows and blocks of 8."""
        return datasource([load_metadata(root)], shuffle_seed=0, shuffle_window=16, block_rows=8, **options)

    rows = TrainingData(read, ROWS, LazyPickle(dict), SIZE[0] * SIZE[1] * 3, tmp_path / "checkpoints")
    monkeypatch.setattr(DataContext.get_current(), "execution_no_progress_timeout_s", 3)
    assert ROWS * SIZE[0] * SIZE[1] * 3 > 2 * STORE_BYTES
    positions = []
    for batch in rows().iter_batches(batch_size=8, batch_format="numpy", prefetch_batches=1):
        positions += batch["position"].tolist()
        # The read tasks are several times as fast. Once they wait for longer than Ray Data's own guard would.
        time.sleep(8 if len(positions) == 80 else 0.15)
    assert sorted(positions) == list(range(ROWS))
    assert spilled_bytes() == 0

    # The control: the same rows without backpressure.
    assert rows().materialize().count() == ROWS
    assert spilled_bytes() > 0
