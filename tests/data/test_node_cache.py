"""Whose place there is in a folder of the node, and how large all of them grow."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vla_finetuning.data.node_cache import LEDGER, NodeCache

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def opened(folder, limit=100_000):
    return NodeCache(folder, limit, "make room")


def store(cache, dataset, size):
    """Whether another file fitted."""
    place = cache.place(dataset)
    if not cache.reserve_capacity(size):
        return False
    (place / f"{len(list(place.iterdir()))}.data").write_bytes(os.urandom(size))
    return True


def datasets(folder):
    return [path for path in folder.iterdir() if path.is_dir()]


def test_nothing_of_a_dataset_that_is_read_is_dropped(folder, caplog):
    cache = opened(folder)
    kept = [store(cache, "a", 40_000) for _ in range(4)]
    assert kept == [True, True, False, False]
    assert len(list(cache.place("a").glob("*.data"))) == 2
    (warning,) = caplog.records
    assert f"{folder} is full" in warning.message and "make room" in warning.message
    # Another process, or run, on another dataset: there is no space either.
    assert not store(opened(folder), "b", 40_000)


def test_datasets_that_nobody_reads_are_removed_oldest_first(folder):
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from tests.data.test_node_cache import opened, store
        cache = opened(Path(sys.argv[1]))
        for dataset, when in (("old", 1_000_000_000), ("older", 900_000_000)):
            assert store(cache, dataset, 40_000)
            os.utime(cache._held[cache.place(dataset)], (when, when))
    """)
    subprocess.run([sys.executable, "-c", script, folder], cwd=ROOT, check=True)
    assert len(datasets(folder)) == 2
    cache = opened(folder)
    assert store(cache, "new", 40_000)
    assert {path.name for path in datasets(folder)} == {cache.place(name).name for name in ("old", "new")}


def test_a_disk_that_is_nearly_full_is_left_alone(folder, monkeypatch):
    cache = opened(folder)
    monkeypatch.setattr("vla_finetuning.data.node_cache.FULLEST_DISK", 0.0)
    assert not store(cache, "a", 1)


def test_a_lost_ledger_is_made_again(folder):
    cache = opened(folder)
    assert store(cache, "a", 40_000)
    (folder / LEDGER).write_bytes(b"")
    assert store(cache, "a", 40_000) and not store(cache, "a", 40_000)


def test_there_is_room_again_when_somebody_ends(folder, monkeypatch):
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path; from tests.data.test_node_cache import *; "
         "store(opened(Path(sys.argv[1])), 'a', 90_000); print(flush=True); input()", folder],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    holder.stdout.readline()
    cache = opened(folder)
    assert not store(cache, "b", 40_000)
    holder.communicate(b"\n")
    assert not store(cache, "b", 40_000)  # not asked again at once: it means to search the folder
    monkeypatch.setattr(cache, "_full_until", 0.0)
    assert store(cache, "b", 40_000) and len(datasets(folder)) == 1
