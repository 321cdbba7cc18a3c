"""Cache on a node's disk what can be made again at any time: fetched, unpacked or decoded data.

A file is whole or absent: it is written under another name and renamed, and it has a checksum of its bytes and path, so
that a torn or moved file counts as missing. A full, broken or deleted folder costs a warning and the cache, never the
run. Any number of processes may share a folder.

Small items (decoded frames) are records: of one size, at a fixed place in a sparse file, each with a checksum. So a
record is whole or absent too, with concurrent writers.

A cache folder has a folder per dataset, in it one per file, and in that one for the file's present content.
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
from typing import Any

import pyarrow as pa
import xxhash

from vla_finetuning.environment import DEFAULT_NUMBERS_DIR, NUMBERS_DIR, numbers_limit_gb

logger = logging.getLogger(__name__)

# Ray stops putting objects on a disk that is fuller than 0.95, and checkpoints need space too.
FULLEST_DISK = 0.9
# Share of the remaining capacity that planned data may take.
SPACE_SHARE = 0.8
# Seconds until a process that met an error, or no space, tries again.
RETRY_S = 60.0
# Seconds without a reader after which a dataset may be evicted, and between two marks of its readers.
IDLE_S, TOUCH_S = 3600.0, 600.0
# Capacity that a process takes from the ledger at a time.
SLICE_BYTES = 2**26
# Errors of space or permission, which leave cached content readable.
_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_CHECKSUM_BYTES = 8
_READ_BYTES = 2**22
_BLOCK_BYTES = 4096
_NAME_LENGTH = 32
# File of a cache folder with the bytes stored and taken, an upper bound.
LEDGER = "ledger"
# A record's place in its file, and a number that must match.
Key = tuple[int, float]


# Cached data is read as if it were the dataset. Another user of the machine must not be able to add a file, to replace
# a folder or a link, or to make this user write through a link.


def make_private(folder: Path) -> None:
    """Create a folder with access for this user only, and check the owners of it and of every parent.

    Only this user may write to the folder, and only the owners, and the group of a parent, may be able to rename or
    remove a component of its path. Raises PermissionError otherwise.
    """
    folder = Path(os.path.abspath(folder))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (folder, Path(os.path.realpath(folder))):  # the path itself, and the target of its links
        for part in (path, *path.parents):
            info = os.lstat(part)
            if info.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EPERM, "belongs to another user", str(part))
            # In a folder with the sticky bit, as /tmp, only its owner removes or renames an entry. A link has no mode.
            if info.st_mode & stat.S_IWOTH and not (info.st_mode & stat.S_ISVTX or stat.S_ISLNK(info.st_mode)):
                raise PermissionError(errno.EPERM, "anybody may write there", str(part))
    if (info := os.lstat(folder)).st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "belongs to another user, or others may write there", str(folder))


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user, created with mode 0600, without following a link; return its descriptor.

    Raises PermissionError for another user's file, or no regular file, and OSError as `os.open`.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "belongs to another user, or is no file", str(path))
    return descriptor


class DiskCache:
    """A cache folder with a folder per dataset. Get it from `disk_cache`: one instance per folder and process.

    Data that does not fit is not cached. Datasets in use are never evicted: an epoch reads all of a dataset once, so
    its least recently used data is needed next. Datasets not read for an hour are evicted for space, oldest first, and
    all but the newest content of each file. Thread-safe. No method raises OSError.
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
        """Return False for a minute after a disk error, or if the limit is 0."""
        return bool(self.limit_bytes) and time.monotonic() >= self._broken_until

    @property
    def is_writable(self) -> bool:
        """Return False for a while after an error, or without space: then making data for the cache is in vain."""
        return self.is_readable and time.monotonic() >= self._full_until

    def content(self, dataset: str, file: str, identity: str) -> Path | None:
        """Return the folder for data derived from a file's content, which may not exist; None if the cache fails.

        `identity` identifies this content among other contents of the file.
        """
        with self.tolerating_errors():
            if self.is_readable:
                dataset_folder = self.folder / short_hash(dataset)
                if time.monotonic() - self._touched.get(dataset_folder, -float("inf")) > TOUCH_S:
                    self._mark_read(dataset_folder)
                return dataset_folder / short_hash(file) / short_hash(identity)
        return None

    def map(self, path: Path) -> pa.Buffer | None:
        """Return a file's bytes, mapped after its checksum was verified; None if there is none."""
        with self.tolerating_errors(), self._open_to_read(path) as descriptor:
            content_bytes = os.fstat(descriptor).st_size - _CHECKSUM_BYTES
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                parts = iter(lambda: file.read(max(0, min(_READ_BYTES, content_bytes - file.tell()))), b"")
                if content_bytes >= 0 and self.checksum(path, parts) == file.read(_CHECKSUM_BYTES):
                    with pa.memory_map(str(path)) as mapped:  # the mapping outlives the descriptor
                        return mapped.read_buffer(content_bytes)
        return None

    def read_records(self, path: Path, keys: Sequence[Key], out: Sequence[Any]) -> list[bool]:
        """Fill buffers of one size with the records of a file; return which of them were found."""
        is_present = [False] * len(keys)
        with self.tolerating_errors(), self._open_to_read(path) as descriptor:
            for nth, key in enumerate(keys):
                record = memoryview(out[nth]).cast("B")
                at = key[0] * _stride(len(record))
                checksum = os.pread(descriptor, _CHECKSUM_BYTES, at + len(record))
                # A hole reads as zeros; copying and checking a frame of zeros costs as much as storing a frame.
                if any(checksum) and os.preadv(descriptor, [record], at) == len(record):
                    is_present[nth] = checksum == self._record_checksum(path, key, record)
        return is_present

    def write_records(self, path: Path, keys: Sequence[Key], records: Sequence[Any]) -> None:
        """Store records of one size in a file of a folder from `content`, if there is capacity."""
        with self.tolerating_errors():
            if not self.is_writable or not self.reserve(sum(_stride(memoryview(record).nbytes) for record in records)):
                return
            descriptor = self._open_to_write(path, os.O_WRONLY | os.O_CREAT)
            try:
                for key, record in zip(keys, records, strict=True):
                    record = memoryview(record).cast("B")
                    # A record that is cut short lacks its checksum, and counts as absent.
                    parts = record, self._record_checksum(path, key, record)
                    os.pwritev(descriptor, parts, key[0] * _stride(len(record)))
            finally:
                os.close(descriptor)

    def write(self, path: Path, data: Any) -> None:
        """Store a buffer as a file of a folder from `content`, if there is capacity."""
        data = memoryview(data).cast("B")
        with self.tolerating_errors():
            if not self.is_writable or not self.reserve(len(data) + _CHECKSUM_BYTES):
                return
            partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
            descriptor = self._open_to_write(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.write(self.checksum(path, [data]))
                os.rename(partial, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise

    @contextlib.contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold a lock on `path` against other processes and threads."""
        with contextlib.ExitStack() as held:
            with self.tolerating_errors():
                descriptor = self._open_to_write(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

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

    def checksum(self, path: Path, parts: Iterable[Any]) -> bytes:
        digest = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(os.fsencode(path)[self._prefix :]))
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _record_checksum(self, path: Path, key: Key, record: Any) -> bytes:
        return self.checksum(path, (struct.pack("<qd", *key), record))

    def _mark_read(self, dataset_folder: Path) -> None:
        """Create the folder of a dataset, for this user only, and record that the dataset is in use."""
        make_private(dataset_folder)
        self._touched[dataset_folder] = time.monotonic()
        with self.tolerating_errors():  # a read-only disk has no such record
            os.utime(dataset_folder)

    def make_folder(self, content: Path) -> None:
        """Create the folder of a content, and delete data derived from other contents of the file."""
        if not content.exists():
            self._mark_read(content.parents[1])
            for folder in (content.parent, content):
                folder.mkdir(exist_ok=True, mode=0o700)
            for entry in os.scandir(content.parent):
                if entry.name != content.name:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def reserve(self, size: int) -> bool:
        """Return whether `size` more bytes may be stored, and count them as stored."""
        with self._lock:
            if size > self._capacity:
                self._capacity = self._take_capacity(size)
            if fits := size <= self._capacity:
                self._capacity -= size
        return fits

    def _take_capacity(self, size: int) -> int:
        """Take capacity of at least `size` from the ledger; return 0 if there is none."""

        def is_full() -> bool:
            used, most = _disk_bytes(self.folder)
            return used + size > most

        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, before = open_own(self.folder / LEDGER, os.O_RDWR | os.O_CREAT), time.monotonic()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            ledger = os.pread(descriptor, 20, 0)
            stored = int(ledger) if ledger.isdigit() else self._evict(float("inf"))
            if stored + size > self.limit_bytes:
                stored = self._evict(self.limit_bytes - size)
            if is_full():
                stored = self._evict(0)
            fits = stored + size <= self.limit_bytes and not is_full()
            capacity = max(size, min(SLICE_BYTES, (self.limit_bytes - stored) // 16)) if fits else 0
            os.pwrite(descriptor, b"%020d" % (stored + capacity), 0)
        finally:
            os.close(descriptor)  # releases the lock
        if not fits:
            # Counting the files of a large folder takes seconds.
            self._full_until = time.monotonic() + max(RETRY_S, 50 * (time.monotonic() - before))
            self._warn("is full")
        return capacity

    def _evict(self, goal_bytes: float) -> int:
        """Evict unused datasets until `goal_bytes` are left; return the bytes left. Call under the lock."""
        names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
        places = [self.folder / name for name in names if len(name) == _NAME_LENGTH]  # folders of other programs stay
        datasets = sorted((place.stat().st_mtime, _size_on_disk(place), place) for place in places)
        stored = sum(size for _, size, _ in datasets)
        for read_at, size, place in datasets:
            if stored > goal_bytes and time.time() - read_at > IDLE_S:
                shutil.rmtree(place, ignore_errors=True)
                stored -= size
        return stored

    @contextlib.contextmanager
    def tolerating_errors(self) -> Iterator[None]:
        """End the block at an OSError, with a warning for the first in a process, and pause the use of the folder.

        After an error about space or permissions, cached content is still read. A missing file only ends the block.
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
            logger.warning("cache folder %s %s; tried again in a minute: %s", self.folder, problem, self.remedy)


@functools.cache
def disk_cache(folder: Path, limit_bytes: int, remedy: str) -> DiskCache:
    """Return the process's `DiskCache` of a folder. `remedy` ends the warning about a full or broken folder."""
    return DiskCache(folder, limit_bytes, remedy)


@dataclass(frozen=True)
class FrameCache:
    """A node's cache of decoded frames, as rows have them (uint8, at the requested size).

    A frame is identified by the file's content, its time, and the rules and libraries that decode it.

    Attributes:
        folder: path on every node's own disk.
        gb: maximum size on each node, in 10^9 bytes.
    """

    folder: str
    gb: float

    def open(self) -> DiskCache:
        return disk_cache(
            Path(self.folder),
            int(self.gb * 1e9),
            "frames that are not cached are decoded in every epoch; free disk space, raise the limit (VLA_CACHE_GB; "
            "frame_cache_gb of read_lerobot), or choose another folder (--dataset.frame_cache)",
        )


def has_capacity(folder: Path, size: int) -> bool:
    """Return whether `size` bytes, replacing a folder's content, fit its disk with a margin. Raises OSError."""
    ledger = b""
    with contextlib.suppress(FileNotFoundError):
        ledger = (folder / LEDGER).read_bytes()[:20]
    used, most = _disk_bytes(next(place for place in (folder, *folder.parents) if place.exists()))
    cached = min(int(ledger), used) if ledger.isdigit() else 0
    return size <= SPACE_SHARE * (most - (used - cached))


@functools.cache
def is_in_memory(folder: Path) -> bool:
    """Return whether a folder (which may not exist) is on a disk in memory (tmpfs), by /proc/self/mounts."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    kinds = {line.split(" ")[1]: line.split(" ")[2] for line in mounts}
    real = Path(os.path.realpath(folder))
    return next((kinds[str(place)] for place in (real, *real.parents) if str(place) in kinds), "") in ("tmpfs", "ramfs")


def _stride(record_bytes: int) -> int:
    """Return the bytes from a record to the next: whole disk blocks, so that a sparse file has no other overhead."""
    return -(-(record_bytes + _CHECKSUM_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES


def _disk_bytes(folder: Path) -> tuple[int, float]:
    disk = shutil.disk_usage(folder)
    return disk.used, FULLEST_DISK * (disk.used + disk.free)


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_LENGTH]


def _size_on_disk(folder: Path) -> int:
    """Return the bytes that a folder's files occupy; files may be removed meanwhile."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    return size


# ---- numbers and encoded images of data files --------------------------------------------------------------------


def numbers_gb() -> float:
    """Return the maximum size of the cache of numbers on this node, in 10^9 bytes; 0 if the default folder is tmpfs."""
    return 0.0 if NUMBERS_DIR == DEFAULT_NUMBERS_DIR and is_in_memory(Path(NUMBERS_DIR)) else numbers_limit_gb()


def numbers_cache() -> DiskCache:
    return disk_cache(
        Path(NUMBERS_DIR),
        int(numbers_gb() * 1e9),
        "row groups that are not cached are unpacked for every read, which is slow for large ones; free disk space, "
        "or set VLA_NUMBERS_DIR, on every node, to a folder on another disk",
    )


def images_cache() -> DiskCache:
    """Return the cache of encoded images. It is separate, since images are a thousand times larger than numbers."""
    return disk_cache(
        Path(NUMBERS_DIR) / "images",
        int(numbers_gb() * 1e9),
        "row groups of the other images are unpacked for every segment; raise VLA_NUMBERS_GB, or set VLA_NUMBERS_DIR, "
        "on every node, to a folder on another disk",
    )


def describe_numbers() -> str:
    if size := numbers_gb():
        return (
            f"Numbers      unpacked parquet columns are cached in {NUMBERS_DIR}: at most {size:g} GB per node, and "
            f"{size:g} GB more for encoded images (VLA_NUMBERS_GB=0: no cache)"
        )
    in_memory = f"{NUMBERS_DIR} is memory (tmpfs); VLA_NUMBERS_DIR names another folder"
    why = in_memory if numbers_limit_gb() else "VLA_NUMBERS_GB=0"
    return f"Numbers      no cache on this node, so parquet columns and images are unpacked for every read: {why}"
