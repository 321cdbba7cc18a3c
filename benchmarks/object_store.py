"""An S3 on loopback whose answers take a while, and what its requests cost with one client and another.

    python -m benchmarks.object_store FOLDER LATENCY_S

serves a dataset's folder as `s3://benchmark/dataset` until its standard input ends, and prints its address.
`benchmarks.data` starts it (`--datasets store`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BUCKET, PREFIX = "benchmark", "dataset"
Request = tuple[str, int, int]  # path with the bucket, first byte, the one after the last


@contextlib.contextmanager
def served(folder: Path, latency_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The folder in a store of its own process; yields its URL and the storage options that lead there."""
    command = [sys.executable, "-m", "benchmarks.object_store", str(folder), str(latency_s)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        options = {"key": "nobody", "secret": "nothing", "client_kwargs": {"region_name": "us-east-1"}}
        yield f"s3://{BUCKET}/{PREFIX}", options | {"endpoint_url": endpoint}
    finally:
        server.communicate()


def serve(folder: Path, latency_s: float) -> None:
    import boto3

    from tests.loopback import Faults, Proxy, ProxyRequest, s3_server, serving

    class Ranges(ProxyRequest):
        """Ranges come from the folder: moto copies the whole object for each of them, 27 ms of CPU for 40 MB."""

        def do_GET(self) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            path = folder / self.path.removeprefix(f"/{BUCKET}/{PREFIX}/").partition("?")[0]
            if self.command != "GET" or not wanted or not path.is_file():
                return super().do_GET()
            time.sleep(latency_s)
            size = path.stat().st_size
            first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
            about = {"Content-Range": f"bytes {first}-{last}/{size}", "ETag": '"unchanged"'}
            self.answer(206, headers=about | {"Content-Length": str(last - first + 1)})
            self.wfile.flush()
            with open(path, "rb") as file:  # by the kernel alone: what a store takes of these cores is not the reader's
                self.connection.sendfile(file, first, last - first + 1)

    with s3_server() as moto:
        client = boto3.client(
            "s3",
            endpoint_url=moto,
            aws_access_key_id="nobody",
            aws_secret_access_key="nothing",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        for path in folder.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), BUCKET, f"{PREFIX}/{path.relative_to(folder).as_posix()}")
        proxy = Proxy(moto, Faults(delay_s=latency_s))
        proxy.RequestHandlerClass = Ranges
        with serving(proxy) as endpoint:
            print(endpoint, flush=True)
            sys.stdin.read()


# ---- clients ----------------------------------------------------------------------------------------------------


def readers(endpoint: str) -> dict[str, Callable[[Request], bytes]]:
    """How each client reads one range."""
    import pyarrow.fs
    import s3fs

    fs = s3fs.S3FileSystem(
        key="nobody",
        secret="nothing",
        endpoint_url=endpoint,
        config_kwargs={"max_pool_connections": 16},
        client_kwargs={"region_name": "us-east-1"},
    )
    arrow = pyarrow.fs.S3FileSystem(
        access_key="nobody", secret_key="nothing", endpoint_override=endpoint, region="us-east-1"
    )
    opened: dict[str, Any] = {}  # it asks for a file's size whenever it opens it

    def by_arrow(request: Request) -> bytes:
        path, first, end = request
        file = opened.get(path) or opened.setdefault(path, arrow.open_input_file(path))
        return file.read_at(end - first, first)

    found: dict[str, Callable[[Request], bytes]] = {
        "s3fs": lambda request: fs.cat_file(request[0], start=request[1], end=request[2]),
        "pyarrow.fs.S3FileSystem": by_arrow,
    }
    if importlib.util.find_spec("obstore") is None:
        print("obstore is not installed (it is not in the lock): its comparison is left out")
        return found
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="nobody",
        secret_access_key="nothing",
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )
    found["obstore"] = lambda r: bytes(obstore.get_range(store, r[0].partition("/")[2], start=r[1], end=r[2]))
    return found


def clients(endpoint: str, requests: Sequence[Request], rounds: int) -> dict[str, Any]:
    """The same requests, 16 side by side, by each client in turn: seconds, and CPU ms a request in this process."""
    import statistics

    samples: dict[str, dict[str, list[float]]] = {}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        by_client = readers(endpoint)
        expected = [request[2] - request[1] for request in requests]
        for number in range(-1, rounds):
            for name, read in by_client.items():
                begin, cpu = time.perf_counter(), time.process_time()
                assert [len(data) for data in pool.map(read, requests)] == expected
                if number >= 0:  # connections are open
                    taken = samples.setdefault(name, {"wall_s": [], "cpu_ms_per_request": []})
                    taken["wall_s"].append(time.perf_counter() - begin)
                    taken["cpu_ms_per_request"].append((time.process_time() - cpu) * 1000 / len(requests))
    return {
        name: {key: statistics.median(values) for key, values in taken.items()} | {"samples": taken}
        for name, taken in samples.items()
    }


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
