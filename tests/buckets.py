"""Buckets for runs, on loopback: moto's S3 behind a proxy that fails as it is told."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from obstore.store import MemoryStore

from tests.loopback import Faults, Proxy, s3_server, serving, use_s3
from vla_finetuning.buckets import mirror, store
from vla_finetuning.buckets.store import Store, split_address


@contextlib.contextmanager
def runs_bucket() -> Iterator[Faults]:
    """A bucket `runs` that programs find by environment variables alone; yields what is done to their requests."""
    faults = Faults()
    with (
        s3_server() as endpoint,
        serving(Proxy(endpoint, faults)) as proxy,
        pytest.MonkeyPatch.context() as environment,
    ):
        use_s3(environment, proxy)
        forget()
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="runs")
        try:
            yield faults
        finally:
            forget()


class MemoryBucket(Store):
    """A bucket in this process's memory, for what depends on no network. Not for other processes."""

    def __init__(self) -> None:
        super().__init__("s3", "memory")
        self._memory = MemoryStore()

    def _connect(self, patience_s: float, in_pieces: bool) -> MemoryStore:
        return self._memory


class Bucket:
    """Objects below an address, as anybody reads and writes them."""

    def __init__(self, url: str) -> None:
        protocol, bucket, self._key = split_address(url)
        self.url, self.store = url, Store(protocol, bucket)

    def __truediv__(self, name: str) -> "Bucket":
        return Bucket(f"{self.url}/{name}")

    def names(self) -> set[str]:
        return set(self.store.below(self._key))

    def read(self, name: str = "") -> bytes:
        return self.store.get(self._named(name))[0]

    def write(self, name: str, data: bytes) -> None:
        self.store.put(self._named(name), data)

    def delete(self, *names: str) -> None:
        self.store.delete([self._named(name) for name in names or self.names()])

    def _named(self, name: str) -> str:
        return "/".join(filter(None, (self._key, name)))


def other_process(url: str) -> Path:
    """Return the copy of an address that another process has, beside this one's."""
    mirror._mirrors.append(made := mirror.Mirror(url))
    return made.folder


def forget() -> None:
    """Forget what this process knows of stores and its copies of them, as a new process does."""
    for made in mirror._mirrors:
        made.stop_syncing()
    mirror._mirrors.clear()
    mirror._folder_of_process.cache_clear()
    store._shared.cache_clear()
