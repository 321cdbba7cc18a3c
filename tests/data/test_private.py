"""Caches that another user prepared are not read, and nothing is written through their links.

The tests change the process's user number, so that this user's files belong to another.
"""

import os
import threading
from pathlib import Path

import pytest

from vla_finetuning.data.disk_cache import LEDGER, DiskCache, is_in_memory, make_private, open_own


def test_world_writable_ancestor_is_refused(tmp_path):
    """Also where a link leads below such an ancestor."""
    (tmp_path / "open/mine").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="anybody may write there.*open"):
        make_private(tmp_path / "open/mine")
    (tmp_path / "link").symlink_to(tmp_path / "open/mine")
    with pytest.raises(PermissionError, match="anybody may write there.*open"):
        make_private(tmp_path / "link")
    (tmp_path / "open").chmod(0o1777)  # as /tmp is
    make_private(tmp_path / "open/mine")
    make_private(tmp_path / "a/b")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


def test_files_of_another_user_are_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("666")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid():  # root's are let through
        with pytest.raises(PermissionError, match="belongs to another user"):
            make_private(tmp_path)
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_own(tmp_path / "file", os.O_RDONLY)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(tmp_path, kind):
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


def opened(folder):
    """As another process opens it."""
    return DiskCache(folder, 10**6, "")


@pytest.mark.parametrize("kind", ["ledger", "partial", "file"])
def test_cache_follows_no_symlink(tmp_path, kind):
    folder, victim = tmp_path / "cache", tmp_path / "victim"
    victim.write_bytes(b"as it was")
    content = opened(folder).content("robots", "robots/arm", "content")
    content.mkdir(parents=True)
    partial = content / f"0.{os.getpid()}-{threading.get_ident()}"
    planted = {"ledger": folder / LEDGER, "partial": partial, "file": content / "0"}[kind]
    planted.symlink_to(victim)
    cache = opened(folder)
    assert cache.map(content / "0") is None
    cache = opened(folder)
    cache.write(content / "0", b"block")
    assert (cache.map(content / "0") is not None) == (kind == "file")  # which replaces the link
    assert victim.read_bytes() == b"as it was"


def test_is_in_memory(tmp_path):
    assert is_in_memory(Path("/dev/shm/nowhere/yet")) and not is_in_memory(Path("/proc/self"))


def test_cache_of_size_zero_is_disabled(tmp_path, caplog):
    cache = DiskCache(tmp_path / "cache", 0, "")
    assert cache.content("a dataset", "", "") is None and not cache.is_writable
    assert not (tmp_path / "cache").exists() and not caplog.records
