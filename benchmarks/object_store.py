"""An S3 on loopback whose answers take a while.

    python -m benchmarks.object_store FOLDER LATENCY_S

serves a dataset's folder as `s3://benchmark/dataset` until its standard input ends, and prints its address.
`benchmarks.data` starts it (`--datasets store`).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUCKET, PREFIX = "benchmark", "dataset"


@contextlib.contextmanager
def served(folder: Path, latency_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The folder in a store of its own process; yields its URL and the storage options that lead there."""
    command = [sys.executable, "-m", "benchmarks.object_store", str(folder), str(latency_s)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        options = {"access_key_id": "nobody", "secret_access_key": "nothing", "region": "us-east-1"}
        yield f"s3://{BUCKET}/{PREFIX}", options | {"endpoint": server.stdout.readline().strip()}
    finally:
        server.communicate()


def serve(folder: Path, latency_s: float) -> None:
    import boto3

    from tests.loopback import Faults, Proxy, ProxyRequest, s3_server, serving

    class Ranges(ProxyRequest):
        """Ranges come from the folder, by the kernel alone: moto copies an object for each, on the reader's cores."""

        def do_GET(self) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            path = folder / self.path.removeprefix(f"/{BUCKET}/{PREFIX}/").partition("?")[0]
            if self.command != "GET" or not wanted or not path.is_file():
                return super().do_GET()
            time.sleep(latency_s)
            size = path.stat().st_size
            first, last = int(wanted[1]), min(int(wanted[2]), size - 1)
            about = {"Content-Range": f"bytes {first}-{last}/{size}", "Content-Length": str(last - first + 1)}
            self.answer(206, headers=about | {"ETag": '"unchanged"'})
            self.wfile.flush()
            with open(path, "rb") as file:
                self.connection.sendfile(file, first, last - first + 1)

    with s3_server() as moto:
        secrets = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nothing", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=moto, **secrets)
        client.create_bucket(Bucket=BUCKET)
        for path in filter(Path.is_file, folder.rglob("*")):
            client.upload_file(str(path), BUCKET, f"{PREFIX}/{path.relative_to(folder).as_posix()}")
        proxy = Proxy(moto, Faults(delay_s=latency_s))
        proxy.RequestHandlerClass = Ranges
        with serving(proxy) as endpoint:
            print(endpoint, flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
