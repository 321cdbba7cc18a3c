"""One store on a node's own disk, for decoded frames, unpacked numbers and blocks of remote files.

Its content can be computed again at any time. So a folder that is full, broken or gone costs a warning and the cache,
never the run. Any number of processes and runs share a folder; checksums detect damaged content.

In a folder: a folder per dataset, in it one per file of the dataset, in it what was made of the file's present content.
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
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

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


# A file with holes takes whole ones of the disk.
BLOCK_BYTES = 4096
# Linux reads no more than a disk's read-ahead for one request, and 128 KiB is its smallest default.
READ_AHEAD_BYTES = 2**17
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
    """Return whether so many bytes fit the disk of a folder (which need not be there) with a margin; what it holds goes
    first.

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


@functools.cache
def is_in_memory(folder: Path) -> bool:
    """Return whether a folder (which need not be there) is on a disk in memory (tmpfs), as far as this system says."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    kinds = {line.split(" ")[1]: line.split(" ")[2] for line in mounts}
    real = Path(os.path.realpath(folder))
    return next((kinds[str(place)] for place in (real, *real.parents) if str(place) in kinds), "") in ("tmpfs", "ramfs")


class NodeCache:
    """A folder with a folder for each dataset. Get it from `node_cache`, which gives a process one of each.

    Nothing of a dataset that a process reads is ever dropped for space: an epoch reads all of it once, so the least
    recently used is wanted next. What does not fit is not cached. Datasets that no process reads are dropped for space,
    the one read longest ago first; and of each file all but its newest content.

    Attributes:
        works: whether to read; False for a minute after an error of the disk.
    """

    IN_USE = "in-use"  # in each dataset's folder; every process that reads the dataset holds a lock on it

    def __init__(self, folder: Path, limit_bytes: int, remedy: str):
        self.folder, self.limit_bytes, self.remedy = folder, limit_bytes, remedy
        self._broken_until = self._full_until = -float("inf")
        self._held: dict[Path, int] = {}
        self._used: dict[Path, float] = {}
        self._told = False

    def place(self, dataset: str) -> Path:
        """The folder of a dataset, which is not dropped as long as this process lives. Raises OSError."""
        place = self.folder / _short_hash(dataset)
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

    def content(self, dataset: str, file: str, identity: str) -> Path:
        """The beginning of the paths of what is made of a file's content: a name in the file's folder. Raises OSError.

        Args:
            dataset, file: tell it from others. identity: tells this content from other contents of the file.
        """
        return self.place(dataset) / _short_hash(file) / _short_hash(identity)

    def make_folder(self, content: Path) -> None:
        """Make the folder of a file, and delete what was made of other contents of it. Raises OSError."""
        content.parent.mkdir(exist_ok=True, mode=0o700)
        superseded = [file for file in os.scandir(content.parent) if not file.name.startswith(content.name)]
        if superseded:
            with locked_ledger(self.folder) as ledger:
                freed = 0
                for file in superseded:
                    with contextlib.suppress(FileNotFoundError):
                        freed += file.stat(follow_symlinks=False).st_blocks * 512
                        os.unlink(file)
                if (stored := _read_count(ledger)) is not None:
                    _write_count(ledger, max(0, stored - freed))
            self._full_until = -float("inf")

    @contextlib.contextmanager
    def alone(self, content: Path, path: Path) -> Iterator[None]:
        """Keep other processes and threads that do the same for `path`, a file of the content, waiting meanwhile."""
        descriptor = None
        with self.doing_without():
            if not path.exists():
                self.make_folder(content)
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @property
    def works(self) -> bool:
        return time.monotonic() >= self._broken_until

    @property
    def takes(self) -> bool:
        """Return whether it is worth asking for space: False for a minute after an error, or where there was none."""
        return self.works and time.monotonic() >= self._full_until

    def promise(self, datasets: Sequence[str], size: int) -> bool:
        """Return whether this node can store all that will be cached of some datasets together, `size` bytes.

        The bytes are promised to them: other promises get what is left, as long as a process reads the datasets.

        Raises:
            OSError: nothing can be stored there.
        """
        places = [self.place(dataset) for dataset in datasets]
        with locked_ledger(self.folder):
            others = sum(self._promised(Path(entry)) for entry in os.scandir(self.folder) if Path(entry) not in places)
            fits = size <= self.limit_bytes - others and has_capacity(self.folder, size + others)
            for place, promised in zip(places, [size, *[0] * len(places)], strict=False):
                _write_count(self._held[place], promised * fits)
        return fits

    def _promised(self, place: Path) -> int:
        """Bytes of a dataset that a process reads: stored, or promised if that is more. 0 of others, which may go."""
        try:
            descriptor = open_own(place / self.IN_USE, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return 0
        except BlockingIOError:
            return max(_size_on_disk(str(place)), _read_count(descriptor) or 0)
        finally:
            os.close(descriptor)

    def reserve_capacity(self, size: int) -> bool:
        """Return whether `size` more bytes may be stored; they count as stored from now on. Raises OSError."""
        if not self.takes or not self.limit_bytes:
            return False
        with locked_ledger(self.folder) as ledger:
            known = _read_count(ledger)
            stored = self._drop(self.limit_bytes) if known is None else known
            if stored + size > self.limit_bytes:
                stored = self._drop(self.limit_bytes - size)
            if self._disk_is_full(size):
                stored = self._drop(0)
            fits = stored + size <= self.limit_bytes and not self._disk_is_full(size)
            _write_count(ledger, stored + size * fits)
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
            self._full_until = time.monotonic() + ASK_AGAIN_S
            if error.errno not in _NO_WRITING:
                self._broken_until = self._full_until
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
                    found.append(
                        (os.stat(Path(entry.path) / self.IN_USE).st_mtime, _size_on_disk(entry.path), Path(entry.path))
                    )
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


def _read_count(descriptor: int) -> int | None:
    """The number of bytes that a file begins with; None if it does not."""
    known = os.pread(descriptor, 20, 0)
    return int(known) if known.isdigit() else None


def _write_count(descriptor: int, size: int) -> None:
    os.pwrite(descriptor, b"%020d" % size, 0)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _size_on_disk(place: str) -> int:
    """Bytes that a dataset's files take on the disk: they have holes."""
    size = 0
    for entry in os.scandir(place):
        if entry.is_dir(follow_symlinks=False):
            size += _size_on_disk(entry.path)
        else:
            size += entry.stat(follow_symlinks=False).st_blocks * 512
    return size


@functools.cache
def node_cache(folder: Path, limit_bytes: int, remedy: str) -> NodeCache:
    """The process's `NodeCache` of a folder. `remedy` ends the warning of one that is full or broken."""
    return NodeCache(folder, limit_bytes, remedy)


@dataclass(frozen=True)
class CacheFolder:
    """A folder on each node's own disk that an option names, and how much it may hold: `gb` is in 10^9 bytes.

    Attributes:
        remedy: for when it is full or broken, as for `node_cache`; each kind has its own.
    """

    folder: str
    gb: float
    remedy: ClassVar[str]

    def opened(self) -> NodeCache:
        return node_cache(Path(self.folder), int(self.gb * 1e9), self.remedy)


def _checksum(record: Any) -> int:
    """Return the checksum of a record's bytes; never 0, which is what a hole has in its place."""
    return xxhash.xxh3_64_intdigest(record) or 1


class _Files:
    """Open files of data and marks, closed when the last user is done: a descriptor must not become another file's."""

    def __init__(self, data: int, marks: int):
        self.data, self.marks = data, marks

    def __del__(self) -> None:
        os.close(self.data)
        os.close(self.marks)


class Records:
    """Records of one file's content: number n is at place n of a file with holes; a second file says which are there.

    The mark of a record is written after it, and is what makes it one: it holds a checksum, so that a record whose
    writer was killed, that two processes write at once, or that the disk lost is missing. Files are read and written,
    not mapped: a full disk or one that is gone would otherwise kill the process. Threads may share it.

    Args:
        content: `NodeCache.content`. record_bytes: the most that a record takes.
    """

    DATA, MARKS = ".data", ".marks"
    # A checksum, 0 in a hole, and what else must be equal for the record to be the one that is asked for.
    MARK = struct.Struct("<Qd")
    MOST = 2**32  # of a file; a number beyond comes from damaged input

    def __init__(self, cache: NodeCache, content: Path, record_bytes: int):
        self.cache, self.record_bytes = cache, record_bytes
        self._content, self._paths = content, [Path(f"{content}{end}") for end in (self.DATA, self.MARKS)]
        self._files: _Files | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, cache: NodeCache, dataset: str, file: str, identity: str, record_bytes: int) -> Records | None:
        """Return the records of a file's content, as `NodeCache.content` identifies it; None where there is no space
        for them.
        """
        found = None
        with cache.doing_without():
            if cache.works and cache.limit_bytes:
                found = cls(cache, cache.content(dataset, file, identity), record_bytes)
        return found

    def close(self) -> None:
        """Close the files, until the next access; for threads that use them they stay open until then."""
        self._files = None

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes that change these records waiting, as `NodeCache.alone`."""
        return self.cache.alone(self._content, self._paths[1])

    def reserve_capacity(self, records: int, size: int | None = None) -> bool:
        """Return whether so many records more may be written, which take `size` bytes; None: the most.
        Raises OSError.
        """
        size = records * self.record_bytes if size is None else size
        fits = self.cache.reserve_capacity(size + records * self.MARK.size)
        return fits and self._open(create=True) is not None

    def mark(self, number: int, tag: float = 0.0) -> int:
        """The checksum of a record; 0 if it is not there, or has another tag. Raises OSError."""
        return self._mark(self._open(), number, tag)[0]

    def _mark(self, files: _Files | None, number: int, tag: float | None) -> tuple[int, float]:
        """Checksum and tag of a record; a checksum of 0 if it is not there, or has another tag than `tag`."""
        if files is None or number >= self.MOST:
            return 0, 0.0
        content = os.pread(files.marks, self.MARK.size, number * self.MARK.size)
        checksum, marked = self.MARK.unpack(content) if len(content) == self.MARK.size else (0, 0.0)
        if not checksum and not os.fstat(files.marks).st_nlink:
            self.close()  # the folder was removed; it may be there again
        return checksum if tag in (None, marked) else 0, marked

    def read(self, number: int, out: memoryview, tag: float = 0.0) -> bool:
        """Fill `out` (bytes, as many as were written) with a record; False if it is not there. Raises OSError."""
        files = self._open()
        checksum, _ = self._mark(files, number, tag)
        if not checksum or files is None or os.preadv(files.data, [out], number * self.record_bytes) != len(out):
            return False
        return _checksum(out) == checksum

    def write(self, number: int, record: memoryview, tag: float = 0.0) -> None:
        """Store a record that capacity was reserved for. Raises OSError."""
        files = self._files
        if not self.cache.takes or files is None or number >= self.MOST:
            return
        if os.pwrite(files.data, record, number * self.record_bytes) == len(record):
            mark = self.MARK.pack(_checksum(record), tag)
            os.pwrite(files.marks, mark, number * self.MARK.size)

    def get(self, number: int) -> bytes | None:
        """A record that `put` stored; None if it is not there, or the cache fails."""
        with self.cache.doing_without():
            files = self._open() if self.cache.works else None
            checksum, size = self._mark(files, number, None)
            if checksum and files is not None and 0 < size <= self.record_bytes:
                record = os.pread(files.data, int(size), number * self.record_bytes)
                return record if _checksum(record) == checksum else None
        return None

    def put(self, records: Sequence[tuple[int, memoryview]]) -> None:
        """Store records of any length, tagged with it, if there is space for all; long and empty ones are left out."""
        fitting = [(number, record) for number, record in records if 0 < len(record) <= self.record_bytes]
        size = sum(-(-len(record) // BLOCK_BYTES) * BLOCK_BYTES for _, record in fitting)
        with self.cache.doing_without():
            if self.reserve_capacity(len(fitting), size):
                for number, record in fitting:
                    self.write(number, record, len(record))

    def has(self, number: int) -> bool:
        """Return whether a record was written; False where the cache fails."""
        with self.cache.doing_without():
            return bool(self.mark(number))
        return False

    def read_range(self, first: int, out: np.ndarray) -> bool:
        """Fill `out`, (N,) of any dtype of `record_bytes`, with records `first` and following; False unless all are
        there. Raises OSError."""
        records, files = self._bytes(out), self._open()
        if files is None:
            return False
        marks = os.pread(files.marks, len(records) * self.MARK.size, first * self.MARK.size)
        if os.preadv(files.data, [records.reshape(-1).data], first * self.record_bytes) != records.nbytes:
            return False
        return marks == self._marks(records)

    def put_range(self, first: int, rows: np.ndarray) -> None:
        """Store `rows`, as `read_range` reads them, if there is space for all."""
        records = self._bytes(rows)
        with self.cache.doing_without():
            if self.reserve_capacity(len(records)) and (files := self._files) is not None:
                os.pwrite(files.data, records.reshape(-1).data, first * self.record_bytes)
                os.pwrite(files.marks, self._marks(records), first * self.MARK.size)

    def _bytes(self, rows: np.ndarray) -> np.ndarray:
        return rows.view(np.uint8).reshape(len(rows), self.record_bytes)

    def _marks(self, records: np.ndarray) -> bytes:
        return b"".join(self.MARK.pack(_checksum(record), 0.0) for record in records)

    def read_ahead(self, first: int, last: int) -> None:
        """Have the system read records [first, last) from the disk, where it supports this (Linux)."""
        files = self._files
        if files is not None and hasattr(os, "posix_fadvise"):
            start, end = first * self.record_bytes, last * self.record_bytes
            for at in range(start, end, READ_AHEAD_BYTES):
                size = min(READ_AHEAD_BYTES, end - at)
                os.posix_fadvise(files.data, at, size, os.POSIX_FADV_WILLNEED)

    def _open(self, create: bool = False) -> _Files | None:
        """The files; None if they are not there and not to be made."""
        files = self._files
        if files is None:
            with self._lock:
                files = self._files
                if files is None:
                    data, marks = self._paths
                    if not os.path.exists(marks):
                        if not create:
                            return None
                        self.cache.make_folder(self._content)
                    opened = open_own(data, os.O_RDWR | os.O_CREAT)
                    try:
                        files = self._files = _Files(opened, open_own(marks, os.O_RDWR | os.O_CREAT))
                    except OSError:
                        os.close(opened)
                        raise
        return files
