"""Whose place there is in a folder of the node, and how large all of them grow."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vla_finetuning.data.node_cache import LEDGER, NodeCache, Records

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


def write_records(cache, dataset, file, identity, count):
    """How many records of 4096 bytes were stored of a file's content."""
    records = Records(cache, cache.content(dataset, file, identity), 4096)
    stored = 0
    for number in range(count):
        if records.reserve_capacity(1):
            records.write(number, memoryview(bytes([number]) * 4096))
            stored += records.read(number, memoryview(bytearray(4096)))
    return stored


def test_a_files_new_content_takes_the_space_of_the_old(folder):
    """A nightly export to one path: after three of them the cache would hold nothing that is read."""
    for night in range(5):
        cache = opened(folder, 6 * 5000)
        cache.place("a")  # as a run that goes on through the night
        assert [write_records(cache, "a", f"file{n}", f"night {night}", 2) for n in range(3)] == [2, 2, 2]
    assert len(list(folder.glob("*/*/*.data"))) == 3


def test_a_new_file_costs_no_listing_of_the_others(folder, monkeypatch):
    """26 ms for each of 8,000 files; with one for each of 50,000 episodes it took hours."""
    cache = opened(folder, 10**7)
    for number in range(20):
        write_records(cache, "a", f"file{number}", "content", 1)
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (found := list(scandir(path)), listed.extend(found))[0])
    assert write_records(cache, "a", "another", "content", 1) == 1
    assert len(listed) < 5


def test_reading_ahead_asks_for_no_more_than_the_system_reads_at_once(folder, monkeypatch):
    """One request for 64 MiB leaves 8 MiB in memory, or 128 KiB: `read_ahead_kb`."""
    cache, asked = opened(folder, 10**8), []
    write_records(cache, "a", "file", "content", 5)
    records = Records(cache, cache.content("a", "file", "content"), 4096)
    assert records.mark(0)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, how: asked.append((at, size)), raising=False)
    records.read_ahead(3, 1000)
    assert max(size for _, size in asked) <= 128 * 1024
    assert [at for at, _ in asked] == [3 * 4096 + sum(size for _, size in asked[:n]) for n in range(len(asked))]
    assert sum(size for _, size in asked) == 997 * 4096


def test_threads_share_records(folder):
    cache = opened(folder, 10**8)
    for attempt in range(20):
        records = Records(cache, cache.content("a", f"file{attempt}", "content"), 4096)

        def write(number, records=records):
            if records.reserve_capacity(1):
                records.write(number, memoryview(bytes([number]) * 4096))
            out = bytearray(4096)
            return records.read(number, memoryview(out)) and out == bytes([number]) * 4096

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(write, range(16)))
        records.close()


def test_a_file_that_is_closed_meanwhile_is_not_mistaken_for_another(tmp_path, monkeypatch):
    """A request that is under way stores its block when the file that asked for it is closed."""
    cache = NodeCache(tmp_path / "cache", 10**6, "make room")
    records = Records(cache, cache.content("dataset", "file", "content"), 4096)
    assert records.reserve_capacity(1)
    others, pwrite = [], os.pwrite

    def closing(descriptor, data, offset):
        if not others:
            records.close()
            # They take the numbers that are free.
            others.extend(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "abcd")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", closing)
    records.write(0, memoryview(bytes(range(256)) * 16))
    assert [os.fstat(other).st_size for other in others] == [0] * 4
    for other in others:
        os.close(other)
    found = bytearray(4096)
    assert records.read(0, memoryview(found)) and found == bytes(range(256)) * 16
