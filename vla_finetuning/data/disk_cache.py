"""Files on a node's own disk that can be made again at any time: what was fetched, unpacked, decoded or computed.

A file is whole or absent. It is written under another name and renamed; what is read must have the size that its reader
expects, and a checksum of its bytes and its place, so that a torn file, or one of another place, is missing. So a
folder that is full, broken or gone costs a warning and the cache, never the run, and any number of processes share it.

What is too small to be a file (a decoded frame) is a record: of one size, at a fixed place in a sparse file, with a
checksum of its own. So a record is whole or absent, too, whoever else writes to the file.

In a folder: a folder for each dataset, in it one for each of its files, in it one for the file's present content.
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
import stat
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import xxhash

from vla_finetuning.environment import DEFAULT_NUMBERS_DIR, NUMBERS_DIR, numbers_limit_gb

logger = logging.getLogger(__name__)

# Ray stops putting objects on a disk that is fuller than 0.95, and checkpoints need space too.
FULLEST_DISK = 0.9
# What is meant to fit may take this share of what is left below that.
SPACE_SHARE = 0.8
# A process that found no space, or an error, asks again after this time.
RETRY_S = 60.0
# A dataset that no process has read for so long may be dropped for space; processes that read it say so this often.
IDLE_S, TOUCH_S = 3600.0, 600.0
# Capacity that a process takes at once.
SLICE_BYTES = 2**26
# No space, or no permission to write: what is cached already can be read all the same.
_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_CHECKSUM_BYTES = 8
_READ_BYTES = 2**22
_BLOCK_BYTES = 4096
_NAME_LENGTH = 32
# Of a folder: the bytes stored and taken, never too few.
LEDGER = "ledger"
# A record's place in its file, and a number that must be the same for it to be served.
Key = tuple[int, float]


# What a cache holds is read as if it were the dataset. So another user of the machine must not be able to put a file
# there, to put a folder or a link in its place, or to have this user write through a link.


def make_private(folder: Path) -> None:
    """Make a folder, for this user alone where it is not there, and check it and everything that leads to it.

    Only owners, and the group of a folder that leads there, may rename or remove a component of the path.

    Raises:
        PermissionError: a part of the path belongs to another user, or anybody may write there. OSError.
    """
    folder = Path(os.path.abspath(folder))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (folder, Path(os.path.realpath(folder))):  # as it is named, and where links lead
        for part in (path, *path.parents):
            _check_owner(part, os.lstat(part))


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a file of this user's, made with mode 0600; a link is not followed.

    Raises:
        PermissionError: it is another user's, or no regular file. OSError: as `os.open`.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "belongs to another user, or is no file", str(path))
    return descriptor


def _check_owner(path: Path, info: os.stat_result) -> None:
    if info.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    # Where the sticky bit is set, as in /tmp, only its owner removes or renames an entry. A link has no mode.
    writable = stat.S_IWOTH & info.st_mode and not (info.st_mode & stat.S_ISVTX or stat.S_ISLNK(info.st_mode))
    if writable:
        raise PermissionError(errno.EPERM, "anybody may write there", str(path))


class DiskCache:
    """A folder with a folder for each dataset. Get it from `disk_cache`, which gives a process one of each.

    Nothing of a dataset that is read is dropped for space: an epoch reads all of it once, so the least recently used is
    wanted next. What does not fit is not cached. Datasets that were not read for an hour are dropped for space, the one
    read longest ago first; and of each file all but its newest content. Threads may share it; no method raises OSError.

    Attributes:
        is_readable: whether to read; False for a minute after an error of the disk.
    """

    def __init__(self, folder: Path, limit_bytes: int, remedy: str):
        self.folder, self.limit_bytes, self.remedy = folder, limit_bytes, remedy
        self._broken_until = self._full_until = -float("inf")
        self._touched: dict[Path, float] = {}
        self._prefix = len(os.fsencode(folder))
        self._capacity = 0
        self._lock = threading.Lock()
        self._warned = False

    @property
    def is_readable(self) -> bool:
        return bool(self.limit_bytes) and time.monotonic() >= self._broken_until

    @property
    def is_writable(self) -> bool:
        """Return whether it is worth to make something for it: False for a while after an error, or without space."""
        return self.is_readable and time.monotonic() >= self._full_until

    def content(self, dataset: str, file: str, identity: str) -> Path | None:
        """Return the folder for what is made of a file's content, which need not be there; None if the cache fails.

        Args:
            dataset, file: tell it from others. identity: tells this content from other contents of the file.
        """
        with self.tolerating_errors():
            if self.is_readable:
                place = self.folder / short_hash(dataset)
                if time.monotonic() - self._touched.get(place, -float("inf")) > TOUCH_S:
                    self._mark_read(place)
                return place / short_hash(file) / short_hash(identity)
        return None

    def read(self, path: Path, out: Any) -> bool:
        """Fill a buffer with a file that has just its size; False if it is not there."""
        with self.tolerating_errors(), self._open_to_read(path) as descriptor:
            tail, out = bytearray(_CHECKSUM_BYTES + 1), memoryview(out).cast("B")
            size = os.preadv(descriptor, [out, tail], 0)
            return size == len(out) + _CHECKSUM_BYTES and tail[:-1] == self.checksum(path, out)
        return False

    def map(self, path: Path) -> pa.Buffer | None:
        """Return a file's bytes, mapped, after all of them were read and checked; None if it is not there."""
        with self.tolerating_errors(), self._open_to_read(path) as descriptor:
            content_bytes = os.fstat(descriptor).st_size - _CHECKSUM_BYTES
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                parts = iter(lambda: file.read(max(0, min(_READ_BYTES, content_bytes - file.tell()))), b"")
                if content_bytes >= 0 and self.checksum(path, *parts) == file.read(_CHECKSUM_BYTES):
                    with pa.memory_map(str(path)) as mapped:  # keeps no descriptor, but the mapping
                        return mapped.read_buffer(content_bytes)
        return None

    def read_records(self, path: Path, keys: Sequence[Key], out: Sequence[Any]) -> list[bool]:
        """Fill buffers of one size with the records of a file; return which of them are there."""
        is_present = [False] * len(keys)
        with self.tolerating_errors(), self._open_to_read(path) as descriptor:
            for nth, key in enumerate(keys):
                record, checksum = memoryview(out[nth]).cast("B"), bytearray(_CHECKSUM_BYTES)
                size = os.preadv(descriptor, [record, checksum], key[0] * _stride(len(record)))
                is_whole = size == len(record) + _CHECKSUM_BYTES
                is_present[nth] = is_whole and checksum == self._record_checksum(path, key, record)
        return is_present

    def write_records(self, path: Path, keys: Sequence[Key], records: Sequence[Any]) -> None:
        """Store records of one size, each at its place in a file of a folder from `content`, if there is space."""
        with self.tolerating_errors():
            if not self.is_writable or not self.reserve(sum(_stride(memoryview(record).nbytes) for record in records)):
                return
            descriptor = self._open_to_write(path, os.O_WRONLY | os.O_CREAT)
            with open(descriptor, "wb", buffering=0) as file:
                for key, record in zip(keys, records, strict=True):
                    record = memoryview(record).cast("B")
                    file.seek(key[0] * _stride(len(record)))
                    _write_all(file, (record, self._record_checksum(path, key, record)))

    def write(self, path: Path, data: Any) -> None:
        """Store a buffer as a file of a folder from `content`, if there is space."""
        data = memoryview(data).cast("B")
        with self.tolerating_errors():
            if not self.is_writable or not self.reserve(len(data) + _CHECKSUM_BYTES):
                return
            partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
            descriptor = self._open_to_write(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                with open(descriptor, "wb", buffering=0) as file:
                    _write_all(file, (data, self.checksum(path, data)))
                os.rename(partial, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise

    @contextlib.contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Keep other processes and threads that do the same for `path` waiting meanwhile."""
        descriptor = None
        with self.tolerating_errors():
            self.make_folder(path.parent)
            descriptor = open_own(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open_to_write(self, path: Path, flags: int) -> int:
        try:
            return open_own(path, flags)
        except FileNotFoundError:
            self.make_folder(path.parent)
            return open_own(path, flags)

    @contextlib.contextmanager
    def _open_to_read(self, path: Path) -> Iterator[int]:
        if not self.is_readable:
            raise FileNotFoundError
        descriptor = open_own(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def checksum(self, path: Path, *parts: Any) -> bytes:
        digest = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(os.fsencode(path)[self._prefix :]))
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _record_checksum(self, path: Path, key: Key, record: Any) -> bytes:
        return self.checksum(path, struct.pack("<qd", *key), record)

    def _mark_read(self, place: Path) -> None:
        """Make the folder of a dataset, for this user alone, and note that the dataset is read."""
        make_private(place)
        if (info := place.lstat()).st_uid != os.geteuid() or info.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "belongs to another user, or others may write there", str(place))
        os.utime(place)
        self._touched[place] = time.monotonic()

    def make_folder(self, content: Path) -> None:
        """Make the folder of a content, and delete what was made of other contents of the file."""
        if not content.exists():
            self._mark_read(content.parents[1])
            for folder in (content.parent, content):
                folder.mkdir(exist_ok=True, mode=0o700)
            for entry in os.scandir(content.parent):
                if entry.name != content.name:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def reserve(self, size: int) -> bool:
        """Return whether `size` more bytes may be stored; they count as stored from now on."""
        with self._lock:
            if size > self._capacity:
                self._capacity = self._take_capacity(size)
            if fits := size <= self._capacity:
                self._capacity -= size
        return fits

    def _take_capacity(self, size: int) -> int:
        """Take capacity, `size` or more, out of the ledger; 0 where there is none."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, before = open_own(self.folder / LEDGER, os.O_RDWR | os.O_CREAT), time.monotonic()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            ledger = os.pread(descriptor, 20, 0)
            stored = int(ledger) if ledger.isdigit() else self._evict(float("inf"))
            if stored + size > self.limit_bytes:
                stored = self._evict(self.limit_bytes - size)
            if self._disk_is_full(size):
                stored = self._evict(0)
            fits = stored + size <= self.limit_bytes and not self._disk_is_full(size)
            capacity = max(size, min(SLICE_BYTES, (self.limit_bytes - stored) // 16)) if fits else 0
            os.pwrite(descriptor, b"%020d" % (stored + capacity), 0)
        finally:
            os.close(descriptor)  # lets go of the lock, as the end of the process would
        if not fits:
            # To count the files of a large folder takes seconds.
            self._full_until = time.monotonic() + max(RETRY_S, 50 * (time.monotonic() - before))
            self._warn("is full")
        return capacity

    def _evict(self, goal_bytes: float) -> int:
        """Drop datasets that no process reads until `goal_bytes` are left; return the bytes left. Under the lock."""
        names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
        places = [self.folder / name for name in names if len(name) == _NAME_LENGTH]  # others' folders stay
        datasets = sorted((place.stat().st_mtime, _size_on_disk(place), place) for place in places)
        stored = sum(size for _, size, _ in datasets)
        for read_at, size, place in datasets:
            if stored > goal_bytes and time.time() - read_at > IDLE_S:
                shutil.rmtree(place, ignore_errors=True)
                stored -= size
        return stored

    def _disk_is_full(self, size: int) -> bool:
        used, most = _disk_bytes(self.folder)
        return used + size > most

    @contextlib.contextmanager
    def tolerating_errors(self) -> Iterator[None]:
        """An OSError inside ends the block, and the use of the folder, with a warning: the first of the process.

        After one about space or permissions, cached content is still read. A missing file ends the block only.
        """
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self._full_until = time.monotonic() + RETRY_S
            if error.errno not in _NO_WRITING:
                self._broken_until = self._full_until
            self._warn(f"fails ({error})")

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "cache folder %s %s: going on without what it cannot keep; %s", self.folder, problem, self.remedy
            )


@functools.cache
def disk_cache(folder: Path, limit_bytes: int, remedy: str) -> DiskCache:
    """Return the process's `DiskCache` of a folder. `remedy` ends the warning of one that is full or broken."""
    return DiskCache(folder, limit_bytes, remedy)


@dataclass(frozen=True)
class CacheFolder:
    """Where a node keeps something. folder: of every node's own. gb: the most it takes on a node, in 10^9 bytes."""

    folder: str
    gb: float
    remedy: ClassVar[str] = ""

    def open(self) -> DiskCache:
        return disk_cache(Path(self.folder), int(self.gb * 1e9), self.remedy)


class FrameCache(CacheFolder):
    """Where a node keeps decoded frames as rows have them (uint8, at the requested size): those of a file's content, at
    a time, by the rules and libraries that would decode them again.
    """

    remedy = (
        "other frames are decoded in every epoch; free some there, raise VLA_CACHE_GB, or choose another "
        "folder for --dataset.frame_cache"
    )


def has_capacity(folder: Path, size: int) -> bool:
    """Return whether so many bytes fit the disk of a folder (which need not be there) with a margin; what it holds goes
    first.

    Raises OSError.
    """
    ledger = b""
    with contextlib.suppress(FileNotFoundError):
        ledger = (folder / LEDGER).read_bytes()[:20]
    used, most = _disk_bytes(next(place for place in (folder, *folder.parents) if place.exists()))
    cached = min(int(ledger), used) if ledger.isdigit() else 0
    return size <= SPACE_SHARE * (most - (used - cached))


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


def _stride(record_bytes: int) -> int:
    """Return the bytes from a record to the next: whole blocks of the disk, so that each takes up just so many."""
    return -(-(record_bytes + _CHECKSUM_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES


def _write_all(file: Any, parts: Iterable[Any]) -> None:
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[file.write(rest) :]


def _disk_bytes(folder: Path) -> tuple[int, float]:
    """Return the bytes that are used on the disk of a folder, and how many of those there may be."""
    disk = shutil.disk_usage(folder)
    return disk.used, FULLEST_DISK * (disk.used + disk.free)


def short_hash(text: str) -> str:
    """Return a name of a file for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_LENGTH]


def _size_on_disk(folder: Path) -> int:
    """Return the bytes that a folder's files take on the disk; some may be removed meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    return size


# ---- numbers and encoded images of data files --------------------------------------------------------------------


def numbers_gb() -> float:
    """10^9 bytes of numbers that this node caches, at most; 0 where the default folder is memory (tmpfs).

    Raises ValueError for what VLA_NUMBERS_GB cannot be.
    """
    return 0.0 if NUMBERS_DIR == DEFAULT_NUMBERS_DIR and is_in_memory(Path(NUMBERS_DIR)) else numbers_limit_gb()


def numbers_cache() -> DiskCache:
    return disk_cache(
        Path(NUMBERS_DIR),
        int(numbers_gb() * 1e9),
        "row groups are unpacked whenever rows of them are wanted, which is slow where they are large; free some, or "
        "set VLA_NUMBERS_DIR, on every node, to a folder on another disk",
    )


def images_cache() -> DiskCache:
    """Beside the numbers, which are a thousandth, and would find no space among them."""
    return disk_cache(
        Path(NUMBERS_DIR) / "images",
        int(numbers_gb() * 1e9),
        "row groups of the other images are unpacked for every segment; raise VLA_NUMBERS_GB, or set VLA_NUMBERS_DIR, "
        "on every node, to a folder on another disk",
    )


def describe_numbers() -> str:
    """The plan's line about the cache of numbers."""
    if size := numbers_gb():
        return (
            f"Numbers      at most {size:g} GB on each node, unpacked once, in {NUMBERS_DIR}, and as much of encoded "
            "images of data files (VLA_NUMBERS_GB=0: none)"
        )
    in_memory = f"{NUMBERS_DIR} is memory (tmpfs); VLA_NUMBERS_DIR names another folder"
    why = in_memory if numbers_limit_gb() else "VLA_NUMBERS_GB=0"
    return f"Numbers      unpacked whenever rows of them are wanted, as images of data files are, on this node: {why}"
