"""Files of a node's cache are intact or absent under faults, and stay within the limit together."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vla_finetuning.data import disk_cache
from vla_finetuning.data.disk_cache import LEDGER, DiskCache

ROOT = Path(__file__).resolve().parents[2]
RECORD = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def opened(folder, limit=100_000):
    return DiskCache(folder, limit, "make room")


def place(cache, dataset="a", file="file", identity="content", name="0"):
    return cache.content(dataset, file, identity) / name


def read(cache, path):
    mapped = cache.map(path)
    return None if mapped is None else mapped.to_pybytes()


def store(cache, size=40_000, **where):
    """Write another file, and return whether it fitted."""
    path = place(cache, **where)
    cache.write(path, os.urandom(size))
    return path.exists()


def test_written_files_are_read_by_other_processes(folder):
    cache = opened(folder)
    assert read(cache, place(cache)) is None
    cache.write(place(cache), RECORD)
    cache.write(place(cache, name="empty"), b"")
    for reader in (cache, opened(folder)):
        assert read(reader, place(reader)) == RECORD and read(reader, place(reader, name="empty")) == b""
        assert read(reader, place(reader, name="1")) is None
    assert not [path for path in folder.rglob("*") if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("damage", ["zeros", "noise", "cut", "longer", "emptied", "checksum", "another place"])
def test_damaged_file_is_a_cache_miss(folder, damage):
    cache = opened(folder)
    path, other = place(cache), place(cache, identity="another")
    cache.write(path, RECORD)
    content = path.read_bytes()
    path.write_bytes(
        {
            "zeros": content[:5000] + bytes(len(content) - 5000),
            "noise": content[:5000] + os.urandom(100) + content[5100:],
            "cut": content[:-1],
            "longer": content + b"!",
            "emptied": b"",
            "checksum": content[:-8] + bytes(8),
            "another place": content,
        }[damage]
    )
    if damage == "another place":
        other.parent.mkdir()
        path = path.rename(other)
    assert read(cache, path) is None
    cache.write(path, RECORD)
    assert read(cache, path) == RECORD


KEYS = [(2, 0.2), (0, 0.0), (9, 0.9)]
FRAMES = [bytes([number]) * 5000 for number in range(3)]


def records(cache, keys=KEYS, **where):
    """Return the records of a file by their keys; None for a missing one."""
    out = [bytearray(5000) for _ in keys]
    is_there = cache.read_records(place(cache, **where), keys, out)
    return [bytes(record) if known else None for record, known in zip(out, is_there, strict=True)]


def test_records_are_read_by_exact_key(folder):
    cache = opened(folder)
    assert records(cache) == [None] * 3
    cache.write_records(place(cache), KEYS[:2], FRAMES[:2])
    cache.write_records(place(cache), KEYS[2:], FRAMES[2:])
    assert records(opened(folder), KEYS[::-1]) == FRAMES[::-1]
    # Misses: a place that was never written, another time at a place, another file of the same bytes.
    assert records(cache, [(1, 0.1), (2, 0.3), (10, 1.0)]) == [None] * 3
    other = place(cache, identity="another")
    other.parent.mkdir()
    place(cache).rename(other)
    assert records(cache, identity="another") == [None] * 3
    # Missing records are written in place, in multiples of the disk's blocks.
    cache.write_records(other, KEYS, FRAMES)
    assert records(cache, identity="another") == FRAMES and other.stat().st_blocks * 512 == 3 * 8192


@pytest.mark.parametrize("damage", ["noise", "checksum", "cut", "another's"])
def test_damaged_record_is_a_cache_miss(folder, damage):
    cache = opened(folder)
    cache.write_records(place(cache), KEYS, FRAMES)
    with open(place(cache), "r+b") as file:
        if damage == "cut":
            file.truncate(9 * 8192 + 5007)
        else:
            file.seek(9 * 8192 + (5000 if damage == "checksum" else 0))
            file.write({"noise": b"?", "checksum": bytes(8), "another's": place(cache).read_bytes()[:5008]}[damage])
    assert records(cache) == [*FRAMES[:2], None]
    cache.write_records(place(cache), KEYS[2:], FRAMES[2:])
    assert records(cache) == FRAMES


@pytest.mark.parametrize("kind", ["file", "records"])
def test_killed_writer_leaves_no_readable_entry(folder, kind):
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from tests.data.test_disk_cache import *
        cache, written = opened(Path(sys.argv[1])), []
        def dying(descriptor, parts, at, write=os.pwritev):
            written.append(at)
            if len(written) < 3:
                return write(descriptor, parts, at)
            write(descriptor, [bytes(parts[0])[:-1]], at)
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwritev = dying
        if sys.argv[2] == "file":
            cache.checksum = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            cache.write(place(cache), RECORD)
        cache.write_records(place(cache), KEYS, FRAMES)
    """)
    assert subprocess.run([sys.executable, "-c", script, folder, kind], cwd=ROOT).returncode == -signal.SIGKILL
    cache = opened(folder)
    assert list(place(cache).parent.iterdir())
    if kind == "records":
        assert records(cache) == [*FRAMES[:2], None]
        return
    assert read(cache, place(cache)) is None
    cache.write(place(cache), RECORD)
    assert read(cache, place(cache)) == RECORD


def test_mapped_file_stays_readable_after_removal(folder):
    cache = opened(folder)
    cache.write(place(cache), RECORD)
    mapped = cache.map(place(cache))
    cache.write(place(cache), RECORD[::-1])
    shutil.rmtree(folder)
    assert mapped.to_pybytes() == RECORD
    before = len(os.listdir("/proc/self/fd"))
    cache.write(place(cache), RECORD)
    maps = [cache.map(place(cache)) for _ in range(20)]
    assert all(copy.to_pybytes() == RECORD for copy in maps) and len(os.listdir("/proc/self/fd")) == before


def test_threads_share_a_cache(folder):
    cache = opened(folder, 10**8)

    def write(number):
        content = bytes([number // 8]) * 4096  # two threads, the same file, and the same records of another
        path, shared = place(cache, file=f"file{number % 4}", name=str(number // 8)), place(cache, name="records")
        cache.write(path, content)
        cache.write_records(shared, [(number // 8, 0.0)], [content])
        out = bytearray(4096)
        return cache.read_records(shared, [(number // 8, 0.0)], [out]) == [True] and read(cache, path) == content

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write, range(200)))
    keys, out = [(number, 0.0) for number in range(25)], [bytearray(4096) for _ in range(25)]
    assert all(cache.read_records(place(cache, name="records"), keys, out))
    assert out == [bytes([number]) * 4096 for number in range(25)]


@pytest.mark.parametrize(
    "fault",
    ["full disk", "broken disk", "read-only folder", "folder is a file", "folder of others", "other's place"],
)
def test_failing_folder_is_warned_about_once(folder, monkeypatch, caplog, fault):
    cache = opened(folder)
    before = place(cache, name="before")
    cache.write(before, RECORD)
    number = {"full disk": errno.ENOSPC, "read-only folder": errno.EROFS}.get(fault, errno.EIO)

    def failing(*_):
        raise OSError(number, os.strerror(number))

    if fault == "full disk":
        monkeypatch.setattr(os, "rename", failing)
    elif fault == "broken disk":
        monkeypatch.setattr(disk_cache, "open_own", failing)
    elif fault == "read-only folder":
        monkeypatch.setattr(os, "utime", failing)
    elif fault == "folder is a file":
        shutil.rmtree(folder)
        folder.write_text("")
    else:
        folder.chmod(0o777) if fault == "folder of others" else before.parents[2].chmod(0o770)
    cache = cache if "disk" in fault else opened(folder)
    for name in "abc":
        path = cache.content("a", "file", "content")
        if path is not None:
            cache.write(path / name, RECORD)
            assert read(cache, path / name) is None
            cache.write_records(path / "records", KEYS, FRAMES)
    content = cache.content("a", "file", "content")
    readable = content is not None and read(cache, content / "before") is not None
    assert readable == (fault in ("full disk", "read-only folder"))
    with cache.locked(before):
        pass
    (warning,) = caplog.records
    assert str(folder) in warning.message and "make room" in warning.message
    assert not [path for path in folder.rglob("*.*") if path.suffix != ".lock"]  # no partial files


def test_full_cache_evicts_no_dataset_in_use(folder, caplog):
    cache = opened(folder)
    assert [store(cache, name=str(n)) for n in range(4)] == [True, True, False, False]
    (warning,) = caplog.records
    assert f"{folder} is full" in warning.message and "make room" in warning.message
    # Nor is there space for another process with another dataset.
    assert not store(opened(folder), dataset="b") and len(list(folder.rglob("?"))) == 2


def test_idle_datasets_are_evicted_oldest_first(folder):
    cache = opened(folder)
    for dataset, hours in (("old", 2), ("older", 3)):
        assert store(cache, dataset=dataset)
        os.utime(place(cache, dataset=dataset).parents[2], (time.time() - 3600 * hours,) * 2)
    cache = opened(folder)
    assert store(cache, dataset="new")
    left = {path.name for path in folder.iterdir() if path.is_dir()}
    assert left == {place(cache, dataset=name).parents[2].name for name in ("old", "new")}


def test_reading_a_dataset_refreshes_its_age(folder, monkeypatch):
    cache = opened(folder)
    assert store(cache) and store(cache, name="1")
    os.utime(place(cache).parents[2], (0, 0))
    monkeypatch.setattr(disk_cache, "TOUCH_S", 0)
    assert place(cache).exists()
    assert not store(opened(folder), dataset="b") and place(cache).exists()


def test_full_cache_is_searched_again_after_a_pause(folder, monkeypatch):
    cache = opened(folder)
    assert store(cache, size=90_000, dataset="a") and not store(cache, dataset="b")
    os.utime(place(cache, dataset="a").parents[2], (0, 0))
    assert not store(cache, dataset="b")  # the folder is not searched again at once
    monkeypatch.setattr(cache, "_full_until", 0.0)
    assert store(cache, dataset="b")


@pytest.mark.parametrize("lost", [False, True])
def test_processes_together_respect_the_limit(folder, lost):
    for number in range(20):
        store(opened(folder), size=9_000, name=str(number))
        if lost:
            (folder / LEDGER).write_bytes(b"")
    sizes = [path.stat().st_size for path in folder.glob("*/*/*/*")]
    assert 70_000 < sum(sizes) <= 100_000


def test_nearly_full_disk_is_not_written(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, "FULLEST_DISK", 0.0)
    assert not store(opened(folder), size=1)


def test_new_file_content_replaces_old_entries(folder):
    """Else three nightly exports to one path would fill the cache."""
    for night in range(5):
        cache = opened(folder, 60_000)
        assert all(store(cache, size=9_000, file=f"file{n}", identity=f"night {night}") for n in range(3))
    assert len(list(folder.glob("*/*/*/0"))) == 3


def test_foreign_folders_in_cache_are_not_removed(folder):
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "file").write_bytes(bytes(90_000))
    os.utime(folder / "images", (0, 0))
    cache = opened(folder)
    assert store(cache) and store(cache, name="1") and not store(cache, name="2")
    assert (folder / "images" / "file").exists()


def test_checksum_needs_little_memory(folder):
    cache = opened(folder, 10**9)
    cache.write(place(cache), bytes(2**26))
    tracemalloc.start()
    assert cache.map(place(cache)).size == 2**26
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()
