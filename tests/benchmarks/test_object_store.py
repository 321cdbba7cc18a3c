"""The store on loopback that the data benchmark reads from: the same bytes, later."""

import os
import time

from benchmarks.object_store import served
from vla_finetuning.data.storage import StoragePolicy, connect


def test_it_serves_a_folder_and_takes_its_time(tmp_path):
    (tmp_path / "videos").mkdir()
    data = os.urandom(3_000_000)
    (tmp_path / "videos/file.mp4").write_bytes(data)
    with served(tmp_path, 0.2) as (url, options):
        fs, base = connect(url, StoragePolicy(timeout_s=30), options)
        assert [entry["size"] for entry in fs.find(base, detail=True).values()] == [len(data)]
        begin = time.monotonic()
        with fs.open(f"{base}/videos/file.mp4") as file:
            file.seek(1_000_000)
            assert file.read(1_500_000) == data[1_000_000:2_500_000]
        assert time.monotonic() - begin >= 0.2
