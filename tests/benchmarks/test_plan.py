"""The dataset whose planning is measured."""

import pyarrow.parquet as pq

from benchmarks.datasets import CAMERAS
from benchmarks.plan import make
from tests.datasets import make_dataset


def schema_of(root):
    """Names, types, row groups and compression of meta/episodes."""
    (path,) = root.glob("meta/episodes/*/*.parquet")
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(n) for n in range(file.num_row_groups)]
        columns = {column.name: str(column.type) for column in file.schema_arrow}
        return columns, [g.num_rows for g in groups], {g.column(0).compression for g in groups}


def test_plan_benchmark_writes_episodes_as_lerobot(tmp_path):
    make(tmp_path / "ours", 23)
    whole = {"chunks_size": 1000, "data_files_size_in_mb": 100, "video_files_size_in_mb": 100}
    make_dataset(tmp_path / "theirs", episodes=[2] * 23, cameras=dict.fromkeys(CAMERAS, (32, 32)), **whole)
    assert schema_of(tmp_path / "ours") == schema_of(tmp_path / "theirs")
