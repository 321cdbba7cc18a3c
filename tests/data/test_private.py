"""Caches that another user of the machine has prepared are not read, and nothing is written through their links.

Another user is one whose number the process's own is not: what is this user's then belongs to another.
"""

import os
import shutil
from pathlib import Path

import pytest

from vla_finetuning.data import node_cache as module
from vla_finetuning.data import private
from vla_finetuning.data.node_cache import NodeCache, Records, is_in_memory, locked_ledger
from vla_finetuning.data.private import make_private, open_own
from vla_finetuning.data.storage import BLOCK_BYTES, BlockCache, StoragePolicy


def test_a_folder_is_made_for_its_user_alone(tmp_path):
    make_private(tmp_path / "a/b")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


def test_a_path_that_others_can_change_is_refused(tmp_path):
    """An ancestor that anybody may write to, be it on the path as it is named or where a link leads."""
    (tmp_path / "open/mine").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="anybody may write there.*open"):
        make_private(tmp_path / "open/mine")
    (tmp_path / "link").symlink_to(tmp_path / "open/mine")
    with pytest.raises(PermissionError, match="anybody may write there.*open"):
        make_private(tmp_path / "link")
    (tmp_path / "open").chmod(0o1777)  # as /tmp is
    make_private(tmp_path / "open/mine")


def test_what_belongs_to_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("666")
    monkeypatch.setattr(private.os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid():  # root's are let through
        with pytest.raises(PermissionError, match="belongs to another user"):
            make_private(tmp_path)
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_own(tmp_path / "file", os.O_RDONLY)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_files_are_opened(tmp_path, kind):
    (tmp_path / "victim").write_text("as it was")
    path = tmp_path / "planted"
    plant = {
        "link": lambda: path.symlink_to(tmp_path / "victim"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    plant[kind]()
    with pytest.raises(OSError):
        os.close(open_own(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    assert (tmp_path / "victim").read_text() == "as it was"


def block_cache(folder):
    """As another process opens it."""
    module.node_cache.cache_clear()
    return BlockCache.of(StoragePolicy(cache_dir=str(folder), cache_size_gb=1e-3), "robots", "robots/arm", "content")


@pytest.mark.parametrize("kind", ["ledger", "in use", Records.DATA, Records.MARKS])
def test_the_cache_of_blocks_follows_no_link(tmp_path, kind):
    folder, victim = tmp_path / "cache", tmp_path / "victim"
    victim.write_bytes(b"as it was")
    content = NodeCache(folder, 10**6, "").content("robots", "robots/arm", f"content\0{BLOCK_BYTES}")
    content.parent.mkdir()
    place = content.parent.parent
    planted = {"ledger": folder / module.LEDGER, "in use": place / NodeCache.IN_USE}
    planted = planted.get(kind, Path(f"{content}{kind}"))
    planted.unlink(missing_ok=True)
    planted.symlink_to(victim)
    cache = block_cache(folder)
    if cache is not None:
        cache.put(0, b"block")
        assert cache.get(0, 5) in (None, b"block")
    assert victim.read_bytes() == b"as it was"


def test_the_cache_of_blocks_reads_nothing_where_others_write(tmp_path):
    folder = tmp_path / "cache"
    block_cache(folder).put(0, b"block")
    moved = shutil.copytree(folder, tmp_path / "open/cache")
    moved.parent.chmod(0o777)
    assert block_cache(folder).get(0, 5) == b"block"
    assert block_cache(moved) is None


def test_a_place_that_others_may_write_to_is_refused(tmp_path):
    cache = NodeCache(tmp_path / "cache", 10**6, "")
    place = cache.place("a dataset")
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write there"):
        NodeCache(tmp_path / "cache", 10**6, "").place("a dataset")


def test_a_place_that_was_removed_is_made_anew(tmp_path, caplog):
    cache = NodeCache(tmp_path / "cache", 10**6, "")
    place = cache.place("a dataset")
    shutil.rmtree(tmp_path / "cache")
    with cache.doing_without():
        os.close(open_own(place / "frames", os.O_RDONLY))
    assert cache.works and not caplog.records
    assert cache.place("a dataset") == place and (place / cache.IN_USE).exists()
    assert cache.reserve_capacity(10)


def test_a_dataset_that_a_living_process_no_longer_reads_makes_room(tmp_path, monkeypatch):
    """As a notebook's of an hour ago: the next one would be decoded for ever."""
    cache = NodeCache(tmp_path / "cache", 10**6, "")
    first = cache.place("the first")
    assert cache.reserve_capacity(900_000)
    (first / "frames").write_bytes(b"1" * 900_000)
    cache.place("the second")
    assert not cache.reserve_capacity(900_000) and first.exists()
    cache._full_until = 0.0
    cache._used[first] -= module.IDLE_S + 1
    assert cache.reserve_capacity(900_000) and not first.exists()


def test_a_disk_that_is_memory_is_told_from_one(tmp_path):
    assert is_in_memory(Path("/dev/shm/nowhere/yet")) and not is_in_memory(Path("/proc/self"))


def test_a_cache_of_nothing_is_off(tmp_path, caplog):
    cache = NodeCache(tmp_path / "cache", 0, "")
    cache.place("a dataset")
    assert not cache.reserve_capacity(1) and not caplog.records
    with locked_ledger(tmp_path / "cache"):
        pass
