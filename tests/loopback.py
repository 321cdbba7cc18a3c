"""Object stores on loopback, and a proxy that makes them fail: real HTTP, no network, nothing to install."""

import contextlib
import http.client
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

SECRET = "canary-secret-access-key"


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run the server in a thread; yields its URL."""
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield "http://{}:{}".format(*server.server_address[:2])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one go

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def handle_expect_100(self):
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def answer(self, status, data=b"", headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


# ---- stores --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3; yields its endpoint. All servers of a process serve the same buckets."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


def use_s3(environment: pytest.MonkeyPatch, endpoint: str) -> None:
    """Have programs find an S3 by environment variables alone, and nothing of this machine's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        environment.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "canary",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        environment.setenv(name, value)


class GoogleStorage(ThreadingHTTPServer):
    """What obstore asks of Google Cloud Storage's XML API: one bucket, whose objects are a folder's files.

    https://cloud.google.com/storage/docs/xml-api/reference-methods
    """

    def __init__(self, bucket: str, folder: Path):
        self.bucket, self.folder, self.lock = bucket, folder, threading.Lock()
        self.uploads: dict[str, dict[int, bytes]] = {}  # those that were begun in pieces
        super().__init__(("127.0.0.1", 0), GoogleStorageRequest)


class GoogleStorageRequest(Handler):
    def place(self):
        """The object's name, its file, and the query."""
        url = urlsplit(self.path)
        _, bucket, name = (*unquote(url.path).split("/", 2), "")[:3]
        query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        return (name if bucket == self.server.bucket else None), self.server.folder / name, query

    def do_PUT(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name, file, query = self.place()
        if name is None or ("uploadId" in query and query["uploadId"] not in self.server.uploads):
            return self.not_found()
        with self.server.lock:
            if "uploadId" in query:
                self.server.uploads[query["uploadId"]][int(query["partNumber"])] = data
                return self.answer(200, headers={"ETag": f'"{query["partNumber"]}"'})
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted is not None and wanted != (self.headers_of(file)["x-goog-generation"] if file.exists() else "0"):
                return self.answer(412)
            self.write(file, data)

    def do_POST(self):
        """https://cloud.google.com/storage/docs/multipart-uploads."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name, file, query = self.place()
        with self.server.lock:
            if "uploads" in query:
                number = f"{len(self.server.uploads)}"
                self.server.uploads[number] = {}
                said = f"<Bucket>{self.server.bucket}</Bucket><Key>{name}</Key><UploadId>{number}</UploadId>"
                return self.xml("InitiateMultipartUploadResult", said)
            pieces = self.server.uploads.pop(query["uploadId"], None)
            if pieces is None:
                return self.not_found()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"".join(pieces[number] for number in sorted(pieces)))
            etag = self.headers_of(file)["ETag"]
            self.xml("CompleteMultipartUploadResult", f"<Key>{name}</Key><ETag>{escape(etag)}</ETag>")

    def do_DELETE(self):
        _, file, query = self.place()
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
            return self.answer(204)
        if not file.is_file():
            return self.not_found()
        file.unlink()
        self.answer(204)

    def do_GET(self):
        name, file, query = self.place()
        if name == "":
            return self.listing(query.get("prefix", ""), query.get("delimiter", ""))
        if name is None or not file.is_file():
            return self.not_found()
        headers = self.headers_of(file)
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return self.answer(412)
        size, asked = file.stat().st_size, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, file.read_bytes(), {**headers, "Content-Length": str(size)})
        first, last = int(asked[1]), min(int(asked[2]), size - 1)
        at = {"Content-Range": f"bytes {first}-{last}/{size}", "Content-Length": str(last + 1 - first)}
        with file.open("rb") as opened:
            opened.seek(first)
            return self.answer(206, opened.read(last + 1 - first), {**headers, **at})

    def write(self, file, data):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        self.answer(200, headers=self.headers_of(file))

    def headers_of(self, file):
        generation = file.stat().st_mtime_ns
        written = formatdate(generation / 1e9, usegmt=True)
        return {"ETag": f'"{generation:x}"', "x-goog-generation": str(generation), "Last-Modified": written}

    def listing(self, prefix, delimiter):
        files = (path for path in sorted(self.server.folder.rglob("*")) if path.is_file())
        names = [name for file in files if (name := file.relative_to(self.server.folder).as_posix()).startswith(prefix)]
        inner = {name: name[len(prefix) :].partition(delimiter)[0] + delimiter for name in names} if delimiter else {}
        folders = {prefix + part for name, part in inner.items() if prefix + part != name + delimiter}
        text = ""
        for name in (n for n in names if not any(n.startswith(folder) for folder in folders)):
            file = self.server.folder / name
            written = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat()
            etag = escape(self.headers_of(file)["ETag"])
            text += f"<Contents><Key>{escape(name)}</Key><Size>{file.stat().st_size}</Size>"
            text += f"<LastModified>{written}</LastModified><ETag>{etag}</ETag></Contents>"
        text += "".join(f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>" for n in sorted(folders))
        self.xml("ListBucketResult", text)

    def xml(self, name, text):
        self.answer(200, f"<{name}>{text}</{name}>".encode(), {"Content-Type": "application/xml"})

    def not_found(self):
        self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")


# ---- a way to a store that fails -----------------------------------------------------------------------------------


@dataclass
class Request:
    """A request that came by: its number among those for the same URL and range, and how much was sent back."""

    method: str
    url: str
    range: str
    attempt: int
    sent_bytes: int = 0

    @property
    def path(self) -> str:
        return urlsplit(self.url).path


@dataclass
class Faults:
    """What the proxy does to a request: `choose(request)` gives one of None, "503", "reset", "cut", "stall", "403", and
    "short" (half of the bytes, as if they were all), "weak" (its tag is marked as weak), "lost" (it is served, and the
    answer is not passed on), "expired" (credentials), "slow" (the store asks to)."""

    choose: Callable[[Request], str | None] = lambda request: None
    ignored: tuple[str, ...] = ()  # headers, in lower case, that the store does not know
    delay_s: float = 0.0
    requests: list[Request] = field(default_factory=list)

    def of(self, file: str) -> list[Request]:
        """The requests for a file's content."""
        return [r for r in self.requests if r.path.endswith(file) and r.method == "GET"]


class Proxy(ThreadingHTTPServer):
    """Passes requests on to `upstream`, as `faults` lets it."""

    def __init__(self, upstream: str, faults: Faults):
        self.upstream, self.faults = urlsplit(upstream).netloc, faults
        self.closing, self.lock = threading.Event(), threading.Lock()
        super().__init__(("127.0.0.1", 0), ProxyRequest)

    def shutdown(self):
        self.closing.set()
        super().shutdown()

    def handle_error(self, request, client_address):
        pass  # clients hang up on stalled connections


class ProxyRequest(Handler):
    def do_PUT(self):
        self.do_GET()

    do_POST = do_DELETE = do_PUT

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        faults, wanted = self.server.faults, self.headers.get("Range") or self.headers.get("Content-Range", "")
        with self.server.lock:
            same = [r for r in faults.requests if (r.method, r.url, r.range) == (self.command, self.path, wanted)]
            request = Request(self.command, self.path, wanted, len(same) + 1)
            faults.requests.append(request)
        fault = faults.choose(request)
        time.sleep(faults.delay_s)
        if fault == "stall":
            self.server.closing.wait(60)
        if fault in ("stall", "reset"):
            return self.reset()
        if fault in ("503", "403"):
            return self.answer(int(fault), b"")
        if fault in ("expired", "slow"):
            status, code = {"expired": (400, "ExpiredToken"), "slow": (503, "SlowDown")}[fault]
            return self.answer(status, f"<Error><Code>{code}</Code><Message>planted</Message></Error>".encode())
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in ("expect", *faults.ignored)
        }
        connection.request(self.command, self.path, body=body, headers=headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if fault == "lost":
            return self.reset()
        headers = {k: v for k, v in response.getheaders() if k.lower() not in ("connection", "date", "server")}
        if fault in ("cut", "short"):
            data = data[: len(data) // 2]
        if fault == "short":
            headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
        if fault == "weak":
            headers |= {k: f"W/{v}" for k, v in headers.items() if k.lower() == "etag"}
        request.sent_bytes = len(data) if self.command == "GET" else 0
        self.answer(response.status, data, headers)
        if fault == "cut":
            self.wfile.flush()
            self.reset()

    def reset(self):
        """Close at once with a reset, as a load balancer that goes away."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.wfile.close = lambda: None
        self.connection.close()
