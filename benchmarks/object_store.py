"""A store on loopback whose answers take a while: a folder as a bucket of Google Cloud Storage."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.loopback import GoogleStorage, GoogleStorageRequest, serving

BUCKET = "benchmark"


@contextlib.contextmanager
def served(folder: Path, latency_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Serve a dataset's folder from a process of its own; yields its URL and the storage options that lead there."""
    spawned = multiprocessing.get_context("spawn")
    here, there = spawned.Pipe()
    server = spawned.Process(target=serve, args=(folder, latency_s, there), daemon=True)
    server.start()
    there.close()
    try:
        account = {"gcs_base_url": here.recv(), "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        yield f"gs://{BUCKET}/{folder.name}", {"service_account_key": json.dumps(account)}
    finally:
        server.terminate()
        server.join()


def serve(folder: Path, latency_s: float, address: Connection) -> None:
    """Serve until the process ends; send the address."""

    class SlowRequest(GoogleStorageRequest):
        def do_GET(self) -> None:
            time.sleep(latency_s)
            super().do_GET()

    storage = GoogleStorage(BUCKET, folder.parent)
    storage.RequestHandlerClass = SlowRequest
    with serving(storage) as endpoint:
        address.send(endpoint)
        while True:
            time.sleep(3600)
