"""This node's disk, for what travels to and from a bucket."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from vla_finetuning.bucket import BucketPath


def scratch(path: BucketPath) -> Path:
    """This node's folder for what travels to and from a place in a bucket: below TMPDIR, of this user alone."""
    root = Path(tempfile.gettempdir(), f"vla-fine-tuning-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user; set TMPDIR to a folder of your own")
    folder = root / hashlib.sha256(str(path).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    return folder


def node_folder(path: Path) -> Path:
    """A folder on this machine for what goes with a place: itself, or of one in a bucket this node's."""
    return scratch(path) if isinstance(path, BucketPath) else path


@contextlib.contextmanager
def on_disk(path: Path, fetch: Callable[[Path], None], name: str = "fetched") -> Iterator[Path]:
    """While the block runs: a folder of this node that `fetch` has filled, once for all processes that want it.

    A folder on a disk is yielded as it is. The last process to leave removes the folder.
    """
    if not isinstance(path, BucketPath):
        yield path
        return
    folder = scratch(path) / name
    whole = folder.with_name(f"{name}.whole")
    with open(folder.with_name(f"{name}.lock"), "w") as lock:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            whole.unlink(missing_ok=True)  # nobody uses it: a process was killed that did, and the bucket may differ
        while True:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if whole.exists():
                break
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():  # nobody was faster
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                fetch(folder)
                whole.touch()
        try:
            yield folder
        finally:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                whole.unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)


def fetched(path: Path) -> contextlib.AbstractContextManager[Path]:
    """A folder with all files below `path` while the block runs: itself where it is on a disk."""

    def fetch(folder: Path) -> None:
        assert isinstance(path, BucketPath)
        for name, found in path.below().items():
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{path}: {name!r} leads out of it")
            target.parent.mkdir(parents=True, exist_ok=True)
            (path / name).download(target, found)

    return on_disk(path, fetch)


def fetched_for_good(path: Path) -> Path:
    """Fetch a folder as `fetched`, until this process ends."""
    return _until_the_end().enter_context(fetched(path))


@functools.cache
def _until_the_end() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack


def upload_folder(folder: Path, path: BucketPath, last: str) -> None:
    """Have `path` hold a folder's files and no others. Those named `last` go first, come last and mark it whole."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    before = sorted(path.below(), key=lambda name: name.rpartition("/")[2] != last)
    for name in before:
        if name not in names or name.rpartition("/")[2] == last:
            (path / name).unlink()
    for name in sorted(names, key=lambda name: name.rpartition("/")[2] == last):
        (path / name).upload(folder / name)
