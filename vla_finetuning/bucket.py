"""Paths in object stores, for what a run writes: `place` gives a `Path`, whose objects are read and written whole.

A reader sees an object as it was or as it is, never half of it. An object that must not exist yet, or must still be the
one that was read, is put under that condition, and the store refuses it otherwise. Lines are appended by lines.py.

A store that fails for a while is asked again; one that fails for longer raises `StorageError`, after PATIENCE_S or what
`within` says. Credentials and endpoint come from the environment, as for datasets; nothing here holds or prints them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

PROTOCOLS = ("s3", "s3a", "gs", "gcs")
# The longest that a call tries, in seconds, unless it says otherwise.
PATIENCE_S = 60.0
# A connection that is silent for so long is given up and made anew.
STALL_S = 15.0
# Pauses between attempts: at random, up to 0.5, 1, 2, 4, 8 s and then always 10 s.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
# Large files travel in pieces of this size, so many at a time: what a process holds of them in memory.
PIECE_BYTES, PIECES = 32 * 2**20, 8
# Of an object that is read into memory.
MOST_BYTES = 2**30


class StorageError(OSError):
    """A store refused or did not answer. Says nothing about what the file holds; the message tells what to do."""


class StoreAwayError(StorageError):
    """A store has failed for longer than a run waits."""


class ChangedError(StorageError):
    """An object is there already, or is not the one that was read: another process wrote it."""


def place(name: str | Path) -> Path:
    """The path that a name stands for, on a disk or in a bucket; `~` is home.

    Raises:
        ValueError: an address of no store that is known here.
    """
    text = str(name)
    if "://" not in text:
        return Path(text).expanduser()
    protocol, _, rest = text.partition("://")
    if protocol not in PROTOCOLS or not rest.strip("/"):
        raise ValueError(f"{text}: expected a path, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")
    return BucketPath(text)


class Found(NamedTuple):
    """An object: its bytes, what tells its content from others (S3's ETag, Google's generation), its UNIX time."""

    size: int
    tag: str
    written: float


class BucketPath(PosixPath):
    """A path in a bucket. What `Path` does and this does not (renaming, locking, `open`) raises TypeError.

    All methods raise FileNotFoundError for what is not there, and `StorageError`.
    """

    def __str__(self) -> str:
        protocol, *rest = self.parts or (".",)
        return f"{protocol}//{'/'.join(rest)}" if protocol.endswith(":") else "/".join(self.parts) or "."

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in a bucket, and was used as a path on a disk")

    def __bytes__(self) -> bytes:
        return str(self).encode()

    @property
    def key(self) -> str:
        """Bucket and name in it."""
        return "/".join(self.parts[1:])

    @property
    def store(self) -> Store:
        return _store(self.parts[0].removesuffix(":"))

    def absolute(self) -> BucketPath:
        return self

    def expanduser(self) -> BucketPath:
        return self

    def is_absolute(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False

    def found(self) -> Found:
        return self.store.found(self.key)

    def exists(self, **_: Any) -> bool:
        return self.store.exists(self.key)

    def is_file(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.found()
            return True
        return False

    def is_dir(self) -> bool:
        return any(True for _ in self.iterdir())

    def iterdir(self) -> Generator[BucketPath]:
        yield from [self / name for name in self.store.names(self.key)]

    def glob(self, pattern: str, **_: Any) -> Iterator[BucketPath]:  # type: ignore[override]
        if "/" in pattern or "**" in pattern:
            raise TypeError(f"{self}: folders in folders are not searched")
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def below(self) -> dict[str, Found]:
        """All objects below, by their names from here."""
        return self.store.below(self.key)

    def read_bytes(self, most_bytes: int = MOST_BYTES) -> bytes:
        return self.store.get(self.key, most_bytes)[0]

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def read_tagged(self) -> tuple[bytes, str]:
        """What is there, and its tag."""
        return self.store.get(self.key)

    def put(self, data: bytes, *, tag: str | None = None, patience_s: float | None = None) -> str:
        """Write an object; returns its tag.

        Args:
            tag: of what must still be there; "" where nothing may be.
        Raises:
            ChangedError: something else is there.
        """
        return self.store.put(self.key, data, tag, patience_s)

    def write_bytes(self, data: Any) -> int:
        self.put(bytes(data))
        return len(data)

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        self.put(b"")

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Folders need not be made."""

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.delete([self.key])

    def remove_tree(self) -> None:
        """Delete all objects below, and the one of this name."""
        self.store.delete([self.key, *(f"{self.key}/{name}" for name in self.below())])

    def upload(self, file: Path) -> None:
        """Write a file of this machine, however large."""
        self.store.upload(file, self.key)

    def download(self, file: Path, found: Found) -> None:
        """Write into a file of this machine what was found here."""
        self.store.download(self.key, found, file)


# ---- stores -------------------------------------------------------------------------------------------------------


@functools.cache
def _store(protocol: str) -> Store:
    """That of this process."""
    return Store(protocol)


@functools.cache
def _pieces() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(PIECES, thread_name_prefix="bucket")


class Store:
    """An object store, by its fsspec file system: requests that are made again while they may succeed.

    Keys are `bucket/name`.
    """

    def __init__(self, protocol: str):
        self._protocol = protocol
        self._is_s3 = protocol in ("s3", "s3a")
        self._lock = threading.Lock()
        self._fs: Any = None

    def found(self, key: str) -> Found:
        info = self._call(key, _info)
        if info["type"] != "file":
            raise FileNotFoundError(f"{self._protocol}://{key}")
        return _found(info)

    def exists(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._call(key, _info)
            return True
        return False

    def names(self, key: str) -> list[str]:
        """Of what is directly below."""
        with contextlib.suppress(FileNotFoundError):
            inside = {info["name"].rstrip("/") for info in self._call(key, _ls)} - {key}
            return sorted(name.rpartition("/")[2] for name in inside)
        return []

    def below(self, key: str) -> dict[str, Found]:
        with contextlib.suppress(FileNotFoundError):
            found = self._call(key, _find)
            inside = f"{key}/"
            return {name.removeprefix(inside): _found(info) for name, info in found.items() if name.startswith(inside)}
        return {}

    def get(self, key: str, most_bytes: int = MOST_BYTES) -> tuple[bytes, str]:
        data, tag = self._call(key, _get_s3 if self._is_s3 else _get_google, most_bytes)
        return data, tag

    def put(self, key: str, data: bytes, tag: str | None = None, patience_s: float | None = None) -> str:
        try:
            return str(self._call(key, _put_s3 if self._is_s3 else _put_google, data, tag, patience_s=patience_s))
        except (ChangedError, FileNotFoundError) as error:
            if tag is None:
                raise
            # An answer may have been lost, and the request repeated: then it is our own that is there.
            with contextlib.suppress(FileNotFoundError):
                found, its_tag = self.get(key)
                if found == data:
                    return its_tag
            if isinstance(error, ChangedError):
                raise
            raise ChangedError(f"{self._protocol}://{key}: was deleted meanwhile") from error

    def delete(self, keys: Sequence[str]) -> None:
        def one(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._call(key, _delete)

        for _ in _pieces().map(one, keys) if len(keys) > 1 else map(one, keys):
            pass

    def upload(self, file: Path, key: str) -> None:
        size, patience_s = file.stat().st_size, _patience(None)
        if size <= PIECE_BYTES:
            self.put(key, file.read_bytes(), patience_s=patience_s)
        elif self._is_s3:
            self._upload_pieces(file, key, size, patience_s)
        else:
            self._upload_session(file, key, size, patience_s)

    def _upload_pieces(self, file: Path, key: str, size: int, patience_s: float) -> None:
        """S3 takes an object in pieces, of which each is repeated by itself. It appears when all are there."""
        call = functools.partial(self._call, key, patience_s=patience_s)
        upload = call(_begin_s3)

        def send(number: int) -> dict[str, Any]:
            with open(file, "rb") as source:
                source.seek(number * PIECE_BYTES)
                data = source.read(PIECE_BYTES)
            return {"PartNumber": number + 1, "ETag": call(_piece_s3, upload, number + 1, data)}

        try:
            sent = list(_pieces().map(send, range(-(-size // PIECE_BYTES))))
            call(_complete_s3, upload, sent)
        except BaseException:
            with contextlib.suppress(OSError):
                self._call(key, _abort_s3, upload, patience_s=STALL_S)
            raise

    def _upload_session(self, file: Path, key: str, size: int, patience_s: float) -> None:
        """Google's store takes an object in pieces one after the other, of which each is repeated by itself."""
        call = functools.partial(self._call, key, patience_s=patience_s)
        session, sent = call(_begin_google), 0
        try:
            with open(file, "rb") as source:
                while sent < size:
                    source.seek(sent)
                    sent = call(_piece_google, session, source.read(PIECE_BYTES), sent, size)
        except BaseException:
            with contextlib.suppress(OSError):
                self._call(key, _abort_google, session, patience_s=STALL_S)
            raise

    def abort_uploads(self, key: str) -> None:
        """Forget objects below that were begun in pieces and not completed: they cost money, and are not listed."""
        if self._is_s3:
            for name, upload in self._call(key, _begun_s3):
                self._call(name, _abort_s3, upload)

    def download(self, key: str, found: Found, file: Path) -> None:
        patience_s = _patience(None)
        get = range_s3 if self._is_s3 else range_google
        with open(file, "wb") as target:
            target.truncate(found.size)
            descriptor = target.fileno()

            def receive(start: int) -> None:
                end = min(start + PIECE_BYTES, found.size)
                data = self._call(key, get, start, end, found.tag, patience_s=patience_s)
                if len(data) != end - start:
                    raise StorageError(f"{self._protocol}://{key}: {len(data)} bytes, expected {end - start}")
                os.pwrite(descriptor, data, start)

            for _ in _pieces().map(receive, range(0, found.size, PIECE_BYTES)):
                pass

    def _connected(self) -> Any:
        import fsspec

        with self._lock:
            if self._fs is None:
                self._fs = fsspec.filesystem(
                    self._protocol, skip_instance_cache=True, use_listings_cache=False, **client_options(self._protocol)
                )
                if self._is_s3:
                    self._fs.retries = 1  # s3fs (2026.2.0) would retry 5 times what is retried here
            return self._fs

    def _call(self, key: str, request: Callable[..., Any], *args: Any, patience_s: float | None = None) -> Any:
        import fsspec
        from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

        started, patience_s = time.monotonic(), _patience(patience_s)
        last: Exception | None = None
        retrying = Retrying(
            retry=retry_if_exception(lambda error: may_pass(error) or _is_expired(error)),
            wait=wait_random_exponential(FIRST_PAUSE_S, max=min(LONGEST_PAUSE_S, patience_s / 2)),
            stop=stop_before_delay(patience_s),
            reraise=True,
        )
        try:
            for attempt in retrying:
                with attempt:
                    fs, left_s = self._connected(), max(0.05, patience_s - (time.monotonic() - started))
                    try:
                        return fsspec.asyn.sync(fs.loop, request, fs, key, *args, timeout=left_s)
                    except TimeoutError as error:
                        last = last or error  # what went wrong before time was up says more
                        raise
                    except Exception as error:
                        last = error
                        if _is_expired(error):
                            self._fs = None  # credentials are looked for anew, where they may have been renewed
                        raise
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._explained(key, last or error, time.monotonic() - started) from error

    def _explained(self, key: str, error: Exception, elapsed_s: float) -> StorageError:
        where = f"{self._protocol}://{key}"
        if http_status(error) == 412 or isinstance(error, FileExistsError):
            return ChangedError(f"{where}: another process wrote it")
        if isinstance(error, StorageError):
            return error
        message = " ".join(str(error).split())
        words = f"{type(error).__name__}: {message}" if message else "no answer"
        if may_pass(error):
            return StorageError(
                f"{where}: the store does not answer ({words}), for {elapsed_s:.0f} s: check the network, the endpoint "
                "and that it is not overloaded"
            )
        return StorageError(
            f"{where}: the store refuses ({words}): check credentials, permissions and endpoint (environment variables "
            "of the object store, on every node)"
        )


_limits = threading.local()
_longest_s = math.inf


def _patience(patience_s: float | None) -> float:
    return min(getattr(_limits, "patience_s", PATIENCE_S) if patience_s is None else patience_s, _longest_s)


def hurry(longest_s: float = math.inf) -> None:
    """From now on no call of this process tries for longer, whatever it says: of a process that only has to end."""
    global _longest_s
    _longest_s = longest_s


@contextlib.contextmanager
def within(patience_s: float) -> Iterator[None]:
    """While the block runs in this thread: each call that does not say otherwise tries for so long, in seconds."""
    before = _patience(None)
    _limits.patience_s = patience_s
    try:
        yield
    finally:
        _limits.patience_s = before


def client_options(protocol: str, stall_s: float = STALL_S, requests: int = 2 * PIECES) -> dict[str, Any]:
    """Options that make a store's client notice a stalled connection, and leave retries to its caller."""
    if protocol in ("s3", "s3a"):
        config = {"connect_timeout": stall_s, "read_timeout": stall_s, "retries": {"total_max_attempts": 1}}
        # botocore (1.43) would make up a name anew for every request, an eighth of its CPU time.
        return {"config_kwargs": config | {"max_pool_connections": requests, "user_agent": "vla-fine-tuning"}}
    if protocol in ("gs", "gcs"):
        import aiohttp

        # Without this gcsfs waits for ever. Its own retries (6 attempts, half a minute in all) cannot be configured.
        return {"requests_timeout": aiohttp.ClientTimeout(sock_connect=stall_s, sock_read=stall_s)}
    return {}


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    import aiohttp
    from botocore.exceptions import ConnectionError as BotoConnectionError
    from botocore.exceptions import CredentialRetrievalError, HTTPClientError

    status = http_status(error)
    if status is not None:
        # 409: another conditional request for that object was under way.
        return status in (408, 409, 429) or status >= 500
    passing = (TimeoutError, ConnectionError, aiohttp.ClientError, HTTPClientError, BotoConnectionError)
    return isinstance(error, (*passing, CredentialRetrievalError))


def http_status(error: BaseException) -> int | None:
    """The status that a store answered with: s3fs keeps it in the cause, gcsfs in `code`, aiohttp in `status`."""
    response = _response(error)
    if response is not None:
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    # Not of the cause: aiohttp calls an answer that was cut off 400.
    status = str(getattr(error, "code", None) or getattr(error, "status", None))
    return int(status) if status.isdigit() else None


def _response(error: BaseException) -> dict[str, Any] | None:
    for e in (error, error.__cause__):
        response = getattr(e, "response", None)
        if isinstance(response, dict):
            return response
    return None


def _is_expired(error: BaseException) -> bool:
    """Whether credentials were valid once: new ones may be found."""
    code = ((_response(error) or {}).get("Error") or {}).get("Code")
    return code in ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired") or http_status(error) == 401


def _found(info: Mapping[str, Any]) -> Found:
    written = info.get("LastModified") or info.get("mtime") or info.get("updated")
    tag = info.get("generation") or info.get("ETag") or info.get("etag") or ""
    return Found(int(info["size"] or 0), str(tag), written.timestamp() if isinstance(written, datetime) else 0.0)


# Requests: (file system, key, ...). s3fs and gcsfs (2026.2.0) have no conditions on what they write but "is new".


async def _info(fs: Any, key: str) -> dict[str, Any]:
    return await fs._info(key)


async def _ls(fs: Any, key: str) -> list[dict[str, Any]]:
    return await fs._ls(key, detail=True)


async def _find(fs: Any, key: str) -> dict[str, Any]:
    return await fs._find(key, detail=True)


async def _delete(fs: Any, key: str) -> None:
    await fs._rm_file(key)


async def _get_s3(fs: Any, key: str, most_bytes: int) -> tuple[bytes, str]:
    bucket, name, _ = fs.split_path(key)
    response = await fs._call_s3("get_object", Bucket=bucket, Key=name, **fs.req_kw)
    async with response["Body"] as body:
        return _limited(await body.read(), key, most_bytes), response["ETag"]


async def _get_google(fs: Any, key: str, most_bytes: int) -> tuple[bytes, str]:
    headers, data = await fs._call("GET", fs.url(key))
    return _limited(data, key, most_bytes), str(headers.get("X-Goog-Generation", ""))


def _limited(data: bytes, key: str, most_bytes: int) -> bytes:
    if len(data) > most_bytes:
        raise ValueError(f"{key} has {len(data) / 2**20:,.0f} MiB, more than {most_bytes / 2**20:,.0f} MiB")
    return data


async def _put_s3(fs: Any, key: str, data: bytes, tag: str | None) -> str:
    bucket, name, _ = fs.split_path(key)
    only = {} if tag is None else {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
    response = await fs._call_s3("put_object", Bucket=bucket, Key=name, Body=data, ContentType=_kind(name), **only)
    return response["ETag"]


async def _put_google(fs: Any, key: str, data: bytes, tag: str | None) -> str:
    bucket, _, name = key.partition("/")
    only = {} if tag is None else {"ifGenerationMatch": tag or "0"}
    answer = await fs._call(
        "POST",
        f"{fs._location}/upload/storage/v1/b/{bucket}/o",
        uploadType="media",
        name=name,
        headers={"Content-Type": _kind(name)},
        data=data,
        json_out=True,
        **only,
    )
    return str(answer["generation"])


# https://cloud.google.com/storage/docs/performing-resumable-uploads; gcsfs itself has no limit of time for a piece.


async def _begin_google(fs: Any, key: str) -> str:
    bucket, _, name = key.partition("/")
    headers, _ = await fs._call(
        "POST",
        f"{fs._location}/upload/storage/v1/b/{bucket}/o",
        uploadType="resumable",
        name=name,
        headers={"X-Upload-Content-Type": _kind(name)},
    )
    return headers["Location"]


async def _piece_google(fs: Any, key: str, session: str, data: bytes, start: int, size: int) -> int:
    """How much of the object the store has then, of the first bytes on: of a piece that is not the last perhaps less.

    What it has already, because an answer was lost, it ignores.
    """
    at = {"Content-Range": f"bytes {start}-{start + len(data) - 1}/{size}"}
    try:
        status, headers, _, _ = await fs._request("PUT", session, headers=at, data=data)
    except FileNotFoundError as error:
        raise StorageError(f"gs://{key}: the store has forgotten an upload that was begun") from error
    if status != 308:  # "resume incomplete"
        return size
    _, _, last = headers.get("Range", "").rpartition("-")
    has = int(last) + 1 if last else 0
    if has <= start:
        raise ConnectionError("the store took nothing of a piece")
    return has


async def _abort_google(fs: Any, key: str, session: str) -> None:
    await fs._request("DELETE", session)


def _kind(name: str) -> str:
    """So that a browser shows a page and lines rather than save them."""
    kinds = {"html": "text/html; charset=utf-8", "json": "application/json", "jsonl": "text/plain; charset=utf-8"}
    return kinds.get(name.rpartition(".")[2], "application/octet-stream")


async def _begin_s3(fs: Any, key: str) -> str:
    bucket, name, _ = fs.split_path(key)
    return (await fs._call_s3("create_multipart_upload", Bucket=bucket, Key=name))["UploadId"]


async def _piece_s3(fs: Any, key: str, upload: str, number: int, data: bytes) -> str:
    bucket, name, _ = fs.split_path(key)
    at = {"Bucket": bucket, "Key": name, "UploadId": upload, "PartNumber": number}
    return (await fs._call_s3("upload_part", **at, Body=data))["ETag"]


async def _complete_s3(fs: Any, key: str, upload: str, sent: list[dict[str, Any]]) -> None:
    bucket, name, _ = fs.split_path(key)
    at = {"Bucket": bucket, "Key": name, "UploadId": upload}
    try:
        await fs._call_s3("complete_multipart_upload", **at, MultipartUpload={"Parts": sent})
    except FileNotFoundError:
        await fs._call_s3("head_object", Bucket=bucket, Key=name)  # an answer was lost, and it is there


async def _abort_s3(fs: Any, key: str, upload: str) -> None:
    bucket, name, _ = fs.split_path(key)
    await fs._call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=upload)


async def _begun_s3(fs: Any, key: str) -> list[tuple[str, str]]:
    bucket, name, _ = fs.split_path(key)
    found = await fs._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{name}/")
    return [(f"{bucket}/{one['Key']}", one["UploadId"]) for one in found.get("Uploads", ())]


async def range_s3(fs: Any, key: str, start: int, end: int, tag: str) -> bytes:
    """Bytes [start, end) of an object that is still the one of that tag. s3fs itself has no way to name the content."""
    bucket, name, _ = fs.split_path(key)
    wanted = {"Bucket": bucket, "Key": name, "Range": f"bytes={start}-{end - 1}", "IfMatch": tag}
    response = await fs._call_s3("get_object", **wanted, **fs.req_kw)
    async with response["Body"] as body:
        return await body.read()


async def range_google(fs: Any, key: str, start: int, end: int, generation: str) -> bytes:
    """As `range_s3`. gcsfs itself would ask for an old generation, which buckets rarely keep, by another name."""
    address = f"{fs.url(key)}&ifGenerationMatch={generation}"
    return (await fs._call("GET", address, headers={"Range": f"bytes={start}-{end - 1}"}))[1]
