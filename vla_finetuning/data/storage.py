"""Read datasets in object stores by byte ranges, with read-ahead, retries, time limits and a disk cache.

`connect` returns a file system with the interface of the local one. Requests go through `buckets/store.py`, with
`StoragePolicy.timeout_s` as the limit of each, so a store that fails or stalls never hangs a run. `RemoteFile.ask`
prefetches ranges in parallel. Every request is conditional on the content that was listed.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.buckets.store import (
    PROTOCOLS,
    ChangedError,
    Content,
    StorageError,
    Store,
    request_threads,
    split_address,
)
from vla_finetuning.data.disk_cache import DiskCache, disk_cache
from vla_finetuning.environment import CACHE_GB, Timeouts

# Size of the blocks that are fetched and cached. A segment of a shuffled window is smaller.
BLOCK_BYTES = 2**17
# Read-ahead of reads that were not prefetched; a smaller one costs sequential round trips.
AHEAD_BYTES = 2**20
# Most blocks that an open file keeps in memory.
KEPT_BLOCKS = 256
# Largest gap between two blocks that one request fetches.
GAP_BYTES = 2**19
# Largest request, so that a slow connection finishes it within the time limit.
MAX_REQUEST_BYTES = 16 * 2**20


def check_still_there(fs: fsspec.AbstractFileSystem, root: str, paths: Sequence[str]) -> None:
    """Check, after a failed read, that the dataset `root` is still present and only lacks files.

    `paths` are files that existed when the job started. Raises StorageError if the folder of one is gone, or empty like
    an unmounted drive.
    """
    for path in paths:
        folder = path.rpartition("/")[0]
        try:
            present = bool(fs.ls(folder, detail=False))
        except FileNotFoundError:
            present = False
        if not present:
            raise StorageError(
                f"{root}: {folder} is gone, or empty: the dataset was moved, its drive is not mounted, or this node "
                "never had it; restore it on every node, then continue with --resume"
            )


@dataclass(frozen=True)
class StoragePolicy:
    """Time limit and cache of reads from object stores.

    Attributes:
        timeout_s: time limit of one request with all its retries, in seconds.
        cache_dir: local folder that caches blocks of files across runs and processes; None for no cache.
        cache_size_gb: capacity of the cache, in 10^9 bytes. Only datasets that are not being read are evicted.
    """

    timeout_s: float = Timeouts.read
    cache_dir: str | None = None
    cache_size_gb: float = CACHE_GB


def connect(
    url: str, policy: StoragePolicy, storage_options: Mapping[str, Any] | None = None
) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the path inside it, without any request.

    `storage_options` are options of obstore (`endpoint`, `access_key_id`, …), which override the environment. Raises
    ValueError for an unsupported protocol.
    """
    protocol = fsspec.utils.get_protocol(url)
    if protocol in ("file", "local"):
        return fsspec.core.url_to_fs(url)
    if protocol not in PROTOCOLS:
        instead = "copy or mount the dataset"
        if protocol == "hf":
            instead = "--dataset.repo_id USER/NAME downloads what is needed of a dataset on the Hub, once and pinned"
        raise ValueError(f"{protocol}:// is not read: {instead}")
    protocol, bucket, key = split_address(url)
    base = f"{bucket}/{key}".rstrip("/")
    return RemoteFileSystem(Store(protocol, bucket, storage_options, policy.timeout_s), policy, root=base), base


class RemoteFileSystem(fsspec.AbstractFileSystem):
    """A read-only file system of a bucket. Paths are ``bucket/key``.

    All methods raise FileNotFoundError for a missing object, and `StorageError` for every other failure.

    Attributes:
        root: name of the dataset in the cache.
        listed: result of the last `find` for each file. It is pickled, so that only the driver lists a dataset, and
            opening a file needs no request.
    """

    cachable = False

    def __init__(self, store: Store, policy: StoragePolicy, listed: dict[str, Content] | None = None, root: str = ""):
        super().__init__()
        self.store, self.policy, self.protocol, self.root = store, policy, store.protocol, root
        self.listed = {} if listed is None else listed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.policy, self.listed, self.root)

    def exists(self, path: str, **_: Any) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.info(path)
            return True
        return False

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self._key(path)
        with contextlib.suppress(FileNotFoundError):
            if key:  # without one, stores answer for the bucket
                return _info(path, self.store.head(key))
        if not any(self.store.names(key)):
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        folders, objects = self.store.names(self._key(path))
        entries = {f"{path}/{name}": {"name": f"{path}/{name}", "size": 0, "type": "directory"} for name in folders}
        entries |= {f"{path}/{name}": _info(f"{path}/{name}", content) for name, content in objects.items()}
        return list(entries.values()) if detail else sorted(entries)

    def find(self, path: str, maxdepth: int | None = None, detail: bool = False, **_: Any) -> Any:
        """List the files below `path`, or directly below it with `maxdepth` 1."""
        key = self._key(path)
        objects = self.store.below(key) if maxdepth is None else self.store.names(key)[1]
        files = {f"{path}/{name}": content for name, content in sorted(objects.items())}
        self.listed |= files
        return {name: _info(name, content) for name, content in files.items()} if detail else list(files)

    def content(self, path: str) -> Content:
        """Return the listed content of a file, or request it from the store."""
        return self.listed.get(path) or self.store.head(self._key(path))

    def read_range(self, path: str, start: int, end: int, content: Content) -> bytes:
        """Read bytes [start, end) of a file, on the condition that it is still `content`."""
        try:
            return self.store.range(self._key(path), start, end, content.tag)
        except ChangedError as error:
            raise StorageError(
                "the file changed after this run had listed the dataset; datasets must not be written to while they "
                "are read: continue with --resume when it is whole"
            ) from error

    def invalidate_cache(self, path: str | None = None) -> None:
        inside = "" if path is None else f"{path.rstrip('/')}/"
        for name in [name for name in self.listed if name.startswith(inside)]:
            del self.listed[name]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> RemoteFile:
        if mode != "rb":
            raise ValueError(f"{path}: datasets are only read, not opened with mode {mode!r}")
        return RemoteFile(self, path)

    def uncached(self) -> RemoteFileSystem:
        """Return the same store without the cache of blocks, for data that is cached in another form."""
        return RemoteFileSystem(self.store, replace(self.policy, cache_dir=None), self.listed, self.root)

    def _key(self, path: str) -> str:
        return path.partition("://")[2].partition("/")[2] if "://" in path else path.strip("/").partition("/")[2]


def _info(path: str, content: Content) -> dict[str, Any]:
    return {"name": path, "size": content.size, "type": "file", "ETag": content.tag, "LastModified": content.written}


def file_identity(fs: fsspec.AbstractFileSystem, path: str) -> str | None:
    """Return a string that changes with the file's content; None if it is unknown or the file does not exist."""
    if isinstance(fs, LocalFileSystem):
        try:
            status = os.stat(path)
        except OSError:
            return None  # opening it raises the error
        # A copy may keep size and mtime; only the system sets ctime.
        return f"file\0{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"
    if not isinstance(fs, RemoteFileSystem):
        return None
    try:
        return _identity(fs, path, fs.content(path))
    except FileNotFoundError:
        return None


def _identity(fs: RemoteFileSystem, path: str, content: Content) -> str | None:
    return f"{fs.protocol}\0{path}\0{content.size}\0{content.tag}" if content.tag else None


# A cache, and its folder of a file's blocks, named by number.
CachedBlocks = tuple[DiskCache, Path]


class RemoteFile(io.RawIOBase):
    """A read-only file in a store. Reads use prefetched blocks (`ask`), or fetch blocks with read-ahead.

    `cached_blocks` is the disk cache of later fetches, or None.

    Raises FileNotFoundError when opened, or at the first read of a listed file; `StorageError` afterwards.
    """

    def __init__(self, fs: RemoteFileSystem, path: str):
        self.fs, self.path, self._content = fs, path, fs.content(path)
        self.size = self._content.size
        identity = _identity(fs, path, self._content)
        self.cached_blocks = None if identity is None else _blocks_cache(fs, path, identity)
        self._blocks: dict[int, bytes] = {}
        self._coming: dict[int, tuple[int, Future[list[bytes]]]] = {}  # first block of a request, and the request
        self._at = 0
        self._found = False
        # FFmpeg repeats failed reads, and each would wait for all retries.
        self._failed: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        # Lengths may come from a damaged file: never allocate more than the file holds.
        rest = max(0, self.size - self._at)
        return super().read(rest if size is None or size < 0 else min(size, rest)) or b""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        first, last = self._at // BLOCK_BYTES, -(-min(self._at + len(view), self.size) // BLOCK_BYTES)
        done = 0
        for number in range(first, last):
            # Block by block, so that a long read needs no more memory than KEPT_BLOCKS.
            block = self._block(number, last)
            part = memoryview(block)[self._at - number * BLOCK_BYTES :][: len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)
            self._at += len(part)
        return done

    def ask(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prefetch the byte ranges [start, end) in the background; reading them raises any errors.

        Merge nearby ranges to one request. Prefetched blocks stay in memory until they are read.
        """
        blocks: set[int] = set()
        for start, end in ranges:
            blocks.update(range(max(0, start) // BLOCK_BYTES, -(-min(end, self.size) // BLOCK_BYTES)))
        for first, last in _runs(sorted(blocks - self._blocks.keys() - self._coming.keys())):
            request = request_threads().submit(self._get, first, last, self.cached_blocks)
            self._coming |= dict.fromkeys(range(first, last), (first, request))

    def close(self) -> None:
        for _, request in self._coming.values():
            request.cancel()
        self._coming.clear()
        self._blocks.clear()
        super().close()

    def _block(self, number: int, until: int) -> bytes:
        """Return block `number`; if it was not prefetched, fetch it with read-ahead, at least up to block `until`."""
        block = self._blocks.pop(number, None)
        if block is None and number in self._coming:
            first, request = self._coming.pop(number)
            block = request.result()[number - first]
        if block is None:
            first, last = self._around(number, until)
            for n, fetched in zip(range(first, last), self._get(first, last, self.cached_blocks), strict=True):
                self._keep(n, fetched)
            block = self._blocks.pop(number)
        self._keep(number, block)
        return block

    def _around(self, number: int, until: int) -> tuple[int, int]:
        """Return the range of blocks [first, last) to fetch around `number`, without blocks that are present."""
        most = max(1, min(KEPT_BLOCKS, MAX_REQUEST_BYTES // BLOCK_BYTES))
        ahead = max(1, min(most, AHEAD_BYTES // BLOCK_BYTES))
        lowest = number - number % ahead
        highest = min(-(-max(until, number + 1) // ahead) * ahead, -(-self.size // BLOCK_BYTES), lowest + most)
        present = self._blocks.keys() | self._coming.keys()
        first = max((n + 1 for n in range(lowest, number) if n in present), default=lowest)
        return first, min((n for n in range(number, highest) if n in present), default=highest)

    def _keep(self, number: int, block: bytes) -> None:
        self._blocks[number] = block
        while len(self._blocks) > KEPT_BLOCKS:
            del self._blocks[next(iter(self._blocks))]  # least recently used

    def _get(self, first: int, last: int, cache: CachedBlocks | None) -> list[bytes]:
        """Get blocks [first, last) from the disk cache, and the missing ones in one request. Thread-safe."""
        blocks: dict[int, bytes | None] = dict.fromkeys(range(first, last))
        if cache is not None:
            for n in blocks:
                cached = cache[0].map(cache[1] / str(n))
                blocks[n] = None if cached is None else cached.to_pybytes()
        if missing := [n for n, block in blocks.items() if block is None]:
            start = missing[0] * BLOCK_BYTES
            data = self._fetch(start, self._end(missing[-1]))
            for n in range(missing[0], missing[-1] + 1):
                block = blocks[n] = data[n * BLOCK_BYTES - start :][:BLOCK_BYTES]
                if cache is not None and n in missing:
                    cache[0].write(cache[1] / str(n), block)
        return [block for block in blocks.values() if block is not None]

    def _fetch(self, start: int, end: int) -> bytes:
        if self._failed is not None:
            raise self._failed
        try:
            data = self.fs.read_range(self.path, start, end, self._content)
        except (FileNotFoundError, StorageError) as error:
            is_gone = self._found and isinstance(error, FileNotFoundError)
            self._failed = StorageError("was deleted while it was being read; copy it again") if is_gone else error
            raise self._failed from error.__cause__
        self._found = True
        return data

    def _end(self, number: int) -> int:
        return min((number + 1) * BLOCK_BYTES, self.size)


def _blocks_cache(fs: RemoteFileSystem, path: str, identity: str) -> CachedBlocks | None:
    """Return the disk cache of a file's blocks, or None."""
    if fs.policy.cache_dir is None:
        return None
    cache = disk_cache(
        Path(fs.policy.cache_dir),
        int(fs.policy.cache_size_gb * 1e9),
        "blocks that are not cached are fetched from the store every time: choose another folder "
        "(--dataset.cache_dir), or raise the limit (VLA_CACHE_GB; storage_policy of read_lerobot)",
    )
    folder = cache.content(fs.root, path, f"{identity}\0{BLOCK_BYTES}")
    return None if folder is None else (cache, folder)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Merge ascending block numbers to runs [first, last), with small gaps and a limited length."""
    gap, longest = GAP_BYTES // BLOCK_BYTES, max(1, MAX_REQUEST_BYTES // BLOCK_BYTES)
    runs: list[tuple[int, int]] = []
    for number in blocks:
        if runs and number - runs[-1][1] <= gap and number + 1 - runs[-1][0] <= longest:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
