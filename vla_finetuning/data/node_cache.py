"""Folders on a node's own disk that keep what was dear to work out: whose place is there, and how large it may grow.

A cache's content can be computed again at any time. So a folder that is full, broken or gone costs a warning and the
cache, never the run. Any number of processes and runs share a folder; checksums detect damaged content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from vla_finetuning.data.private import make_private, open_own

logger = logging.getLogger(__name__)

# Ray stops putting objects on a disk that is fuller than 0.95, and checkpoints need space too.
FULLEST_DISK = 0.9
# What is meant to fit may take this share of what is left below that.
SPACE_SHARE = 0.8
# A process that found no space asks again after this time: another one that held a dataset may have ended.
ASK_AGAIN_S = 60.0
# A dataset that a process has not opened a file of for so long may be dropped though that process lives.
IDLE_S = 1800.0
# No space, or no permission to write: what is cached already can be read all the same.
_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


# Of a folder: the bytes stored, never too few.
LEDGER = "ledger"


@contextlib.contextmanager
def locked_ledger(folder: Path) -> Iterator[int]:
    """The file descriptor of a folder's ledger, locked. Files in the folder are dropped under this lock."""
    descriptor = open_own(folder / LEDGER, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)  # lets go of the lock, as the end of the process would


def has_capacity(folder: Path, size: int) -> bool:
    """Whether so many bytes fit the disk of a folder (which need not be there) with a margin; what it holds goes first.

    Raises OSError.
    """
    known = b""
    with contextlib.suppress(FileNotFoundError):
        known = (folder / LEDGER).read_bytes()[:20]
    there = next(place for place in (folder, *folder.parents) if place.exists())
    disk = os.statvfs(there)
    used, free = (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_bavail * disk.f_frsize
    own = min(int(known), used) if known.isdigit() else 0
    return size <= SPACE_SHARE * (FULLEST_DISK * (used + free) - (used - own))


def is_in_memory(folder: Path) -> bool:
    """Whether a folder (which need not be there) is on a disk in memory (tmpfs), as far as this system says."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    kinds = {line.split(" ")[1]: line.split(" ")[2] for line in mounts}
    real = Path(os.path.realpath(folder))
    return next((kinds[str(place)] for place in (real, *real.parents) if str(place) in kinds), "") in ("tmpfs", "ramfs")


class NodeCache:
    """A folder with a folder for each dataset. Get it from `node_cache`, which gives a process one of each.

    Nothing of a dataset that a process reads is ever dropped: an epoch reads all of it once, so the least recently used
    is wanted next. What does not fit is not cached. Datasets that no process reads are dropped for space, the one read
    longest ago first.

    Attributes:
        works: whether anything can be read; False after an error of the disk.
    """

    IN_USE = "in-use"  # in each dataset's folder; every process that reads the dataset holds a lock on it

    def __init__(self, folder: Path, limit_bytes: int, remedy: str):
        self.folder, self.limit_bytes, self.remedy = folder, limit_bytes, remedy
        self.works = True
        self._writable = True
        self._full_until = -float("inf")
        self._held: dict[Path, int] = {}
        self._used: dict[Path, float] = {}
        self._told = False

    def place(self, dataset: str) -> Path:
        """The folder of a dataset, which is not dropped as long as this process lives. Raises OSError."""
        place = self.folder / hashlib.sha256(dataset.encode()).hexdigest()[:32]
        if place in self._held and not os.fstat(self._held[place]).st_nlink:
            os.close(self._held.pop(place))  # the folder was removed
        while place not in self._held:
            make_private(self.folder)
            place.mkdir(exist_ok=True, mode=0o700)
            if (found := place.lstat()).st_uid != os.geteuid() or found.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "belongs to another user, or others may write there", str(place))
            try:
                descriptor = open_own(place / self.IN_USE, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                continue  # dropped in between
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                os.utime(descriptor)
                self._held[place] = descriptor
            else:
                os.close(descriptor)  # the folder was dropped under the lock
        self._used[place] = time.monotonic()
        return place

    @property
    def takes(self) -> bool:
        """Whether it is worth asking for space."""
        return self._writable and time.monotonic() >= self._full_until

    def reserve_capacity(self, size: int) -> bool:
        """Whether `size` more bytes may be stored; they count as stored from now on. Raises OSError."""
        if not self.takes or not self.limit_bytes:
            return False
        with locked_ledger(self.folder) as ledger:
            known = os.pread(ledger, 20, 0)
            stored = int(known) if known.isdigit() else self._drop(self.limit_bytes)
            if stored + size > self.limit_bytes:
                stored = self._drop(self.limit_bytes - size)
            if self._disk_is_full(size):
                stored = self._drop(0)
            fits = stored + size <= self.limit_bytes and not self._disk_is_full(size)
            os.pwrite(ledger, b"%020d" % (stored + size * fits), 0)
        if not fits:
            self._full_until = time.monotonic() + ASK_AGAIN_S
            self._tell("is full")
        return fits

    @contextlib.contextmanager
    def doing_without(self) -> Iterator[None]:
        """An OSError inside ends the block, and the use of the folder, with a warning: the first of the process.

        After one about space or permissions, cached content is still read. A missing file ends the block only: the
        folder was removed, and `place` makes it anew.
        """
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self._writable = False
            self.works = self.works and error.errno in _NO_WRITING
            self._tell(f"fails ({error})")

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "cache folder %s %s: going on without what it cannot keep; %s", self.folder, what, self.remedy
            )

    def _drop(self, goal_bytes: float) -> int:
        """Drop datasets that no process reads until `goal_bytes` are left; returns the bytes left. Under the lock."""
        found = []
        for entry in os.scandir(self.folder):
            if entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    # Files have holes: what counts is what they take on the disk.
                    size = sum(file.stat().st_blocks * 512 for file in os.scandir(entry.path))
                    found.append((os.stat(Path(entry.path) / self.IN_USE).st_mtime, size, Path(entry.path)))
        stored = sum(size for _, size, _ in found)
        for _, size, place in sorted(found):
            if stored <= goal_bytes:
                break
            # Of this process what it has not asked for lately, a notebook's dataset of an hour ago, may go too.
            if place in self._held and time.monotonic() - self._used[place] > IDLE_S:
                os.close(self._held.pop(place))
            if place not in self._held and self._drop_place(place):
                stored -= size
        return stored

    def _drop_place(self, place: Path) -> bool:
        descriptor = open_own(place / self.IN_USE, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _disk_is_full(self, size: int) -> bool:
        disk = os.statvfs(self.folder)
        used, free = (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_bavail * disk.f_frsize
        return used + size > FULLEST_DISK * (used + free)


@functools.cache
def node_cache(folder: Path, limit_bytes: int, remedy: str) -> NodeCache:
    """The process's `NodeCache` of a folder. `remedy` ends the warning of one that is full or broken."""
    return NodeCache(folder, limit_bytes, remedy)
