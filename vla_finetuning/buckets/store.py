"""Requests to object stores by obstore: Amazon S3, Google Cloud Storage, Azure and compatible stores.

`Store` retries a request until the caller's time limit. Reads and writes are atomic: a range is conditional on the
listed content, and a write may be conditional on the object's absence or its tag.

Credentials, region and endpoint come from the standard places: environment, profiles, the machine's role. This module
neither stores nor prints them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

logger = logging.getLogger(__name__)

# Store of each protocol, and the forms of an address for errors.
PROTOCOLS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az"}
FORMS = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"
# Default time limit of a call with its retries, in seconds.
PATIENCE_S = 60.0
# Timeout of a silent connection: in seconds, and at most this share of the call's time limit.
STALL_S, STALL_SHARE = 15.0, 1 / 4
# Pauses between attempts: at random, up to 0.5, 1, 2, 4, 8 s and then always 10 s.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
# Large files are sent and fetched in pieces of this size, with so many in memory at a time.
PIECE_BYTES, PIECES = 32 * 2**20, 8
# The largest object that is read into memory.
MOST_BYTES = 2**30
GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class StorageError(OSError):
    """A store refused or did not answer; the file itself may be intact. The message contains a remedy."""


class StoreAwayError(StorageError):
    """A store has failed for longer than the run's time limit."""


class ChangedError(StorageError):
    """Another process wrote the object: it exists already, or differs from the one that was read."""


class Content(NamedTuple):
    """Properties of an object: size in bytes, ETag of its content, UNIX time of its last write."""

    size: int
    tag: str
    written: float


def split_address(url: str) -> tuple[str, str, str]:
    """Split ``s3://bucket/a/b`` into protocol, bucket and ``a/b``. Raises ValueError for another protocol."""
    protocol, _, rest = url.partition("://")
    bucket, _, key = rest.strip("/").partition("/")
    if protocol not in PROTOCOLS or not bucket:
        raise ValueError(f"{url}: expected a path, {FORMS}")
    return protocol, bucket, key


class Store:
    """A client of a bucket. Thread-safe; a pickle holds the address and the options.

    All methods raise FileNotFoundError for a missing object, and `StorageError` for other failures.

    Args:
        options: options of obstore (endpoint, credentials); they override the environment.
        patience_s: time limit of a call with its retries, in seconds; `within` overrides it.
    """

    def __init__(
        self, protocol: str, bucket: str, options: Mapping[str, Any] | None = None, patience_s: float = PATIENCE_S
    ):
        self.protocol, self.bucket, self.options, self.patience_s = protocol, bucket, dict(options or {}), patience_s
        self._kind = PROTOCOLS[protocol]
        self._lock = threading.Lock()
        self._clients: dict[tuple[float, bool], Any] = {}
        self._region: str | None = None  # the bucket's, if it is not the one of the environment
        self._unsigned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.protocol, self.bucket, tuple(self.options.items()), self.patience_s)

    # ---- reading --------------------------------------------------------------------------------------------------

    def head(self, key: str) -> Content:
        return _content(self._call(key, obstore.head, key))

    def names(self, key: str) -> tuple[list[str], dict[str, Content]]:
        """List the folders and the objects directly below `key`, by name."""
        folders, objects = self._listed(_directly_below, key)
        return sorted(folders), {name: _content(meta) for name, meta in objects.items()}

    def below(self, key: str) -> dict[str, Content]:
        """List all objects below `key`, by name relative to `key`."""
        return {name: _content(meta) for name, meta in self._listed(_all_below, key).items()}

    def get(self, key: str) -> tuple[bytes, str]:
        """Return an object's bytes and its tag for `put`. Raises ValueError above MOST_BYTES."""
        data, meta = self._call(key, _whole, key)
        return data, self._put_tag(meta)

    def range(self, key: str, start: int, end: int, tag: str = "") -> bytes:
        """Return bytes [start, end) of an object. Raises ChangedError for another tag than `tag`, or fewer bytes."""
        return self._call(key, _range, key, start, end, tag)

    def download(self, key: str, content: Content, file: Path) -> None:
        """Write an object into a local file, in pieces. Raises ChangedError if the object is not `content`."""
        with open(file, "wb") as target:
            for starts in itertools.batched(range(0, content.size, PIECE_BYTES), PIECES):
                spans = [(start, min(start + PIECE_BYTES, content.size)) for start in starts]
                target.writelines(in_parallel(lambda span: self.range(key, span[0], span[1], content.tag), spans))

    # ---- writing --------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, tag: str | None = None) -> str:
        """Write an object, and return its tag.

        Args:
            tag: tag of the object to replace, from `get` or `put`; "" to create it; None for no condition.
        Raises:
            ChangedError: the condition is not met.
        """
        mode: Any = "overwrite" if tag is None else {self._tag_kind: tag} if tag else "create"
        try:
            return self._put_tag(self._call(key, _put, key, data, mode))
        except ChangedError:
            # A retry after a lost answer finds this process's own data.
            with contextlib.suppress(FileNotFoundError):
                stored, its_tag = self.get(key)
                if stored == data:
                    return its_tag
            raise

    def upload(self, file: Path, key: str) -> None:
        """Write a local file of any size to an object, atomically."""
        if file.stat().st_size <= PIECE_BYTES:
            self.put(key, file.read_bytes())
        else:
            for is_last in (False, True):
                try:
                    return self._call(key, _put_pieces, key, file, in_pieces=True)
                except FileNotFoundError as error:
                    # The store lost the upload's pieces, or completed it and lost the answer: try once more.
                    if is_last or not file.exists():
                        raise StorageError(f"{self._url(key)}: the store does not know the upload ({error})") from error

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; ignore missing ones."""

        def delete_one(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._call(key, obstore.delete, key)

        in_parallel(delete_one, keys)

    def abort_uploads(self, key: str) -> None:
        """Abort uploads below `key` that dead processes left incomplete: they cost money and are not listed.

        Log refusals as warnings.
        """
        if self._kind != "s3":  # the other stores expire them
            return
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            client, prefix = _boto3_client(self.options), f"{key}/" if key else ""
            for upload in client.list_multipart_uploads(Bucket=self.bucket, Prefix=prefix).get("Uploads", ()):
                client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except (BotoCoreError, ClientError) as error:
            logger.warning("%s: uploads that were begun and not completed stay: %s", self._url(key), error)

    # ---- requests -------------------------------------------------------------------------------------------------

    def _listed(self, request: Callable[..., Any], key: str) -> Any:
        try:
            return self._call(key, request, key)
        except FileNotFoundError as error:
            bucket = f"{self.protocol}://{self.bucket}"
            raise FileNotFoundError(f"there is no {bucket}; make it first, or check its name") from error

    def _call(self, key: str, request: Callable[..., Any], *args: Any, in_pieces: bool = False) -> Any:
        from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

        started, patience_s = time.monotonic(), min(_patience_s.get() or self.patience_s, _longest_s)
        retrying = Retrying(
            retry=retry_if_exception(lambda error: may_pass(error) or self._reset_clients(error, region)),
            wait=wait_random_exponential(FIRST_PAUSE_S, max=min(LONGEST_PAUSE_S, patience_s / 2)),
            stop=stop_before_delay(patience_s),
            reraise=True,
        )
        try:
            for attempt in retrying:
                with attempt:
                    region = self._region
                    return request(self._client(patience_s, in_pieces), *args)
        except (FileNotFoundError, ValueError):
            raise
        except Exception as error:
            if isinstance(error, AlreadyExistsError | PreconditionError):
                raise ChangedError(f"{self._url(key)}: another process wrote it") from error
            if http_status(error) == 404:
                raise FileNotFoundError(self._url(key)) from error
            words = _summarize(error)
            if self._unsigned and http_status(error) in (401, 403):
                words += "; no credentials were found, so the request had none"
            if may_pass(error):
                raise StorageError(
                    f"{self._url(key)}: the store does not answer ({words}), for {time.monotonic() - started:.0f} s: "
                    "check the network, the endpoint and that it is not overloaded. VLA_READ_TIMEOUT_S (datasets; in "
                    "read_lerobot storage_policy) or VLA_STORE_TIMEOUT_S (checkpoints) sets a longer time; --resume "
                    "continues a run"
                ) from error
            raise StorageError(
                f"{self._url(key)}: the store refuses ({words}): check credentials, permissions and endpoint "
                "(environment variables of the object store, on every node)"
            ) from error

    def _reset_clients(self, error: BaseException, asked: str | None) -> bool:
        """Reset the clients if new credentials or the bucket's region may help; return whether to retry.

        `asked` is the region of the failed client: another thread may have found the right one meanwhile.
        """
        text, status, region = str(error), http_status(error), self._region
        named = re.search("incorrectly configured region|AuthorizationHeaderMalformed", text)
        wrong_region = self._kind == "s3" and (status == 301 or named is not None)
        if wrong_region:
            region = region or bucket_region(self.bucket)
            may_help = region not in (None, asked)
        elif self._unsigned and status == 403:  # the machine's role may have been out of reach for a moment
            may_help = not self._arguments().get("skip_signature")
        else:
            may_help = status == 401 or re.search("ExpiredToken|TokenRefreshRequired", text) is not None
        if not may_help:
            return False
        with self._lock:
            self._region = region
            self._clients.clear()
        return True

    def _client(self, patience_s: float, in_pieces: bool) -> Any:
        """Return the cached client with the request timeout `patience_s`."""
        with self._lock:
            if (patience_s, in_pieces) not in self._clients:
                self._clients[patience_s, in_pieces] = self._connect(patience_s, in_pieces)
            return self._clients[patience_s, in_pieces]

    def _connect(self, patience_s: float, in_pieces: bool) -> Any:
        from obstore.store import AzureStore, GCSStore, S3Store

        stall_s = min(STALL_S, patience_s * STALL_SHARE)
        http = {
            "connect_timeout": timedelta(seconds=stall_s),
            "read_timeout": timedelta(seconds=stall_s),
            "timeout": timedelta(seconds=patience_s),
            "user_agent": "vla-fine-tuning",
        }
        # `_call` retries requests; obstore retries each piece of a large object.
        pauses = {"init_backoff": timedelta(seconds=FIRST_PAUSE_S), "max_backoff": timedelta(seconds=LONGEST_PAUSE_S)}
        retries = {"max_retries": 1000 if in_pieces else 0, "retry_timeout": timedelta(seconds=patience_s)}
        store_class = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self._kind]
        arguments = self._arguments()
        self._unsigned = bool(arguments.get("skip_signature"))
        if self._region is not None:
            arguments["region"] = self._region
        http["allow_http"] = any("http://" in str(value) for value in arguments.values())
        return store_class(self.bucket, **arguments, client_options=http, retry_config={**retries, "backoff": pauses})

    def _arguments(self) -> dict[str, Any]:
        return {"s3": _s3_options, "gs": _google_options, "az": _azure_options}[self._kind](self.options)

    @property
    def _tag_kind(self) -> str:
        """Return the field that conditional puts compare: Google's generation, or the ETag."""
        return "version" if self._kind == "gs" else "e_tag"

    def _put_tag(self, meta: Mapping[str, Any]) -> str:
        return str(meta.get(self._tag_kind) or "")

    def _url(self, key: str) -> str:
        return f"{self.protocol}://{self.bucket}/{key}"


def _restored(*description: Any) -> Store:
    """Unpickle a store: the process's shared one, unless its options are not hashable."""
    try:
        return _shared(*description)
    except TypeError:
        return _shared.__wrapped__(*description)


@functools.lru_cache(maxsize=64)
def _shared(protocol: str, bucket: str, options: tuple[tuple[str, Any], ...], patience_s: float) -> Store:
    """Return a store that read tasks of a process share, with its credentials and connections."""
    return Store(protocol, bucket, dict(options), patience_s)


# Requests: (client, ...).


def _content(meta: Mapping[str, Any]) -> Content:
    return Content(meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())


# Web consoles create empty objects "FOLDER/", which obstore lists as "FOLDER"; skip them.


def _directly_below(client: Any, key: str) -> tuple[set[str], dict[str, Any]]:
    listing = obstore.list_with_delimiter(client, f"{key}/" if key else None)
    folders = {name.rstrip("/").rpartition("/")[2] for name in listing["common_prefixes"]}
    return folders, {meta["path"].rpartition("/")[2]: meta for meta in listing["objects"] if meta["path"] != key}


def _all_below(client: Any, key: str) -> dict[str, Any]:
    inside = f"{key}/" if key else ""
    pages = obstore.list(client, inside or None)
    objects = {meta["path"].removeprefix(inside): meta for page in pages for meta in page if meta["path"] != key}
    folders = {folder for name in objects for folder in map(str, PurePosixPath(name).parents)}
    return {name: meta for name, meta in objects.items() if meta["size"] or name not in folders}


def _whole(client: Any, key: str) -> tuple[bytes, Mapping[str, Any]]:
    result = obstore.get(client, key)
    if (size := result.meta["size"]) > MOST_BYTES:
        raise ValueError(f"{key} has {size / 2**20:,.0f} MiB, more than {MOST_BYTES / 2**20:,.0f} MiB")
    return bytes(result.bytes()), result.meta


def _range(client: Any, key: str, start: int, end: int, tag: str) -> bytes:
    condition: Any = {"if_match": tag} if tag else {}
    result = obstore.get(client, key, options={"range": (start, end), **condition})
    # Some stores ignore the condition, Azure's listings quote no tags, and proxies mark tags as weak.
    tags = {each.removeprefix("W/").strip('"') for each in (tag, result.meta["e_tag"] or tag)}
    if tag and len(tags) > 1 or result.meta["size"] < end:
        raise PreconditionError(key)
    data = bytes(result.bytes())
    if len(data) != end - start:
        raise ConnectionError(f"{len(data)} bytes from {start}, expected {end - start}")
    return data


def _put(client: Any, key: str, data: bytes, mode: Any) -> Mapping[str, Any]:
    return obstore.put(client, key, data, mode=mode, attributes=_attributes(key), use_multipart=False)


def _put_pieces(client: Any, key: str, file: Path) -> None:
    options: Any = {"attributes": _attributes(key), "chunk_size": PIECE_BYTES, "max_concurrency": PIECES}
    obstore.put(client, key, file, use_multipart=True, **options)


def _attributes(key: str) -> dict[str, str]:
    """Return a content type that browsers display instead of downloading."""
    kinds = {"html": "text/html; charset=utf-8", "json": "application/json", "jsonl": "text/plain; charset=utf-8"}
    return {"Content-Type": kinds.get(key.rpartition(".")[2], "application/octet-stream")}


# ---- where credentials and endpoints are --------------------------------------------------------------------------


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    from obstore.auth.boto3 import Boto3CredentialProvider

    session, endpoint = _boto3_session()
    options = {key.lower().removeprefix("aws_"): value for key, value in options.items()}  # obstore takes both
    # Not every S3-compatible store supports bulk deletes.
    store_options: dict[str, Any] = {"region": session.region_name or "us-east-1", "disable_bulk_delete": True}
    store_options |= {**({"endpoint": endpoint} if endpoint else {}), **options}
    if {"access_key_id", "skip_signature", "credential_provider"}.isdisjoint(store_options):
        if session.get_credentials() is None:
            store_options["skip_signature"] = True  # a public bucket needs none
        else:
            store_options["credential_provider"] = Boto3CredentialProvider(session)
    return store_options


def _boto3_session() -> tuple[Any, str | None]:
    """Return a session and the endpoint of the environment or the profile."""
    import boto3
    import botocore.session

    core = botocore.session.Session()
    profile = core.get_scoped_config()
    services = core.full_config.get("services", {}).get(profile.get("services"), {})
    named = (
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
        services.get("s3", {}).get("endpoint_url"),
        profile.get("endpoint_url"),
    )
    return boto3.Session(botocore_session=core), next(filter(None, named), None)


def _boto3_client(options: Mapping[str, Any]) -> Any:
    from botocore.config import Config

    session, endpoint = _boto3_session()
    config = Config(connect_timeout=STALL_S, read_timeout=STALL_S, retries={"total_max_attempts": 3})
    return session.client("s3", endpoint_url=options.get("endpoint", endpoint), config=config)


def bucket_region(bucket: str) -> str | None:
    """Request a bucket's region from Amazon, without credentials; None on failure."""
    import httpx

    with contextlib.suppress(httpx.HTTPError):
        return httpx.head(f"https://s3.amazonaws.com/{bucket}", timeout=STALL_S).headers.get("x-amz-bucket-region")
    return None


def _google_options(options: Mapping[str, Any]) -> dict[str, Any]:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        address = emulator if "://" in emulator else f"http://{emulator}"
        # With `skip_signature` obstore (0.12.1) would sign what it writes nevertheless.
        account = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": ""}
        return {"service_account_key": json.dumps({**account, "private_key_id": ""}), **options}
    if not {"service_account", "service_account_key", "bearer_token", "skip_signature"}.isdisjoint(options):
        return dict(options)
    from obstore.auth.google import GoogleCredentialProvider

    try:
        credentials, _ = google.auth.default(scopes=[GOOGLE_SCOPE])
    except DefaultCredentialsError:
        return {"skip_signature": True, **options}  # a public bucket needs none
    return {"credential_provider": GoogleCredentialProvider(credentials), **options}


def _azure_options(options: Mapping[str, Any]) -> dict[str, Any]:
    # AZURE_STORAGE_ACCOUNT_NAME and so on are obstore's own.
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT")
    return {**({"endpoint": endpoint} if endpoint else {}), **options}


# ---- errors -------------------------------------------------------------------------------------------------------


def http_status(error: BaseException) -> int | None:
    """Parse the HTTP status from an error's text, as obstore (0.12.1) has no field for it."""
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match[1]) if match else None


def may_pass(error: BaseException) -> bool:
    """Return whether a retry of the same request may succeed."""
    status = http_status(error)
    if status is not None:
        # 409: another conditional request for that object was under way; Azure's for an object that exists is final.
        return status in (408, 409, 429) and "BlobAlreadyExists" not in str(error) or status >= 500
    return isinstance(error, TimeoutError | ConnectionError) or "HTTP error" in str(error)


def _summarize(error: BaseException) -> str:
    """Format the store's answer and host, without the URL, which may contain a signature."""
    text = " ".join(str(error).partition("Debug source:")[0].split())
    host = re.search(r"https?://([^/?\s]+)", text)
    words = f"{type(error).__name__}: {text.rpartition(' - ')[2].rstrip(':')}"
    return f"{words}, from {host[1]}" if host else words


# ---- patience -----------------------------------------------------------------------------------------------------

_patience_s: ContextVar[float | None] = ContextVar("patience_s", default=None)
_longest_s = float("inf")


def limit_retries(longest_s: float = float("inf")) -> None:
    """Limit the time of every later call of this process, e.g. when it only has to end."""
    global _longest_s
    _longest_s = longest_s


@contextlib.contextmanager
def within(patience_s: float) -> Iterator[None]:
    """Set the time limit of calls inside the block, in seconds: of this thread's, and of `in_parallel`."""
    before = _patience_s.set(patience_s)
    try:
        yield
    finally:
        _patience_s.reset(before)


@functools.cache
def request_threads() -> ThreadPoolExecutor:
    """Return the threads in which this process makes requests at once."""
    return ThreadPoolExecutor(16, thread_name_prefix="object-store")


def in_parallel(function: Callable[[Any], Any], items: Iterable[Any], threads: Any = None) -> list[Any]:
    """Call a function for each item in threads (`request_threads`), with the time limit of this one (`within`).

    After an error, no further call begins.
    """
    calls = [(threads or request_threads()).submit(copy_context().run, function, item) for item in items]
    try:
        return [call.result() for call in calls]
    finally:
        for call in calls:
            call.cancel()
