"""Buckets for runs, on loopback: moto's S3 behind a proxy that fails as it is told."""

import contextlib
import os
from collections.abc import Iterator

import boto3
import pytest
from obstore.store import MemoryStore

from tests.loopback import Faults, Proxy, s3_server, serving
from vla_finetuning import bucket, lines
from vla_finetuning.store import Store

SECRET = "canary-secret-access-key"


@contextlib.contextmanager
def runs_bucket() -> Iterator[Faults]:
    """A bucket `runs` that programs find by environment variables alone; yields what is done to their requests."""
    faults = Faults()
    with (
        s3_server() as endpoint,
        serving(Proxy(endpoint, faults)) as proxy,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        environment.setenv("AWS_ACCESS_KEY_ID", "canary")
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        environment.setenv("AWS_ENDPOINT_URL", proxy)
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


def forget() -> None:
    """What this process knows of stores and of lines that it appends, as a new process would."""
    bucket._store.cache_clear()
    lines._appenders.clear()
    lines._segments.clear()
    lines._recent.clear()
