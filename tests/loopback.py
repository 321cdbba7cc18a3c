"""Object stores on loopback, and a proxy that makes them fail: real HTTP, no network, nothing to install."""

import contextlib
import http.client
import json
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


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


class GoogleStorage(ThreadingHTTPServer):
    """What gcsfs asks of Google Cloud Storage's JSON API: one bucket, whose objects are a folder's files.

    https://cloud.google.com/storage/docs/json_api/v1 (objects: get, list, insert, delete; buckets: get).
    """

    def __init__(self, bucket: str, folder: Path):
        self.bucket, self.folder, self.lock = bucket, folder, threading.Lock()
        # Uploads that were begun, by their number; and how much of a piece is taken, in bytes.
        self.sessions: dict[str, tuple[str, bytearray]] = {}
        self.takes = 2**30
        super().__init__(("127.0.0.1", 0), GoogleStorageRequest)


class GoogleStorageRequest(Handler):
    def do_POST(self):
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        if query.get("uploadType") == "resumable":  # the object follows, to where this answer says
            number = len(self.server.sessions)
            self.server.sessions[f"{number}"] = query["name"], bytearray()
            return self.answer(200, headers={"Location": f"http://{self.headers['Host']}/upload/session/{number}"})
        file, wanted = self.server.folder / query["name"], query.get("ifGenerationMatch")
        with self.server.lock:
            if wanted is not None and wanted != (self.metadata(query["name"])["generation"] if file.exists() else "0"):
                return self.answer(412, b'{"error": {"code": 412, "message": "Precondition Failed"}}')
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            self.json(self.metadata(query["name"]))

    def do_PUT(self):
        """A piece of an upload: https://cloud.google.com/storage/docs/performing-resumable-uploads."""
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        session = self.server.sessions.get(urlsplit(self.path).path.rpartition("/")[2])
        if session is None:
            return self.not_found()
        start, last, size = map(int, re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", self.headers["Content-Range"]).groups())
        name, has = session
        if start > len(has) or len(data) != last + 1 - start or (last + 1 < size and len(data) % 2**18):
            return self.answer(400, b'{"error": {"code": 400, "message": "planted"}}')
        with self.server.lock:
            has += data[len(has) - start :][: self.server.takes]
        if len(has) < size:
            return self.answer(308, headers={"Range": f"bytes=0-{len(has) - 1}"} if has else {})
        file = self.server.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(has)
        self.json(self.metadata(name))

    def do_DELETE(self):
        if self.server.sessions.pop(urlsplit(self.path).path.rpartition("/")[2], None) is not None:
            return self.answer(499)
        file = self.server.folder / unquote(urlsplit(self.path).path.rpartition("/o/")[2])
        if not file.is_file():
            return self.not_found()
        file.unlink()
        self.answer(204)

    def do_GET(self):
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        found = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)(/o)?(?:/([^/]+))?", url.path)
        if not found or found[1] != self.server.bucket:
            return self.not_found()
        if not found[2]:
            return self.json({"kind": "storage#bucket", "name": found[1]})
        if not found[3]:
            return self.json(self.listing(query.get("prefix", ""), query.get("delimiter", "")))
        name = unquote(found[3])
        file = self.server.folder / name
        if not file.is_file():
            return self.not_found()
        if query.get("alt") != "media":
            return self.json(self.metadata(name))
        if query.get("ifGenerationMatch", (generation := self.metadata(name)["generation"])) != generation:
            return self.answer(412)
        data = file.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, data, {"X-Goog-Generation": generation})
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        return self.answer(206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def metadata(self, name):
        status = (self.server.folder / name).stat()
        return {
            "kind": "storage#object",
            "bucket": self.server.bucket,
            "name": name,
            "size": str(status.st_size),
            "generation": str(status.st_mtime_ns),
            "etag": f"CL{status.st_mtime_ns:x}EAE=",
        }

    def listing(self, prefix, delimiter):
        files = (path for path in sorted(self.server.folder.rglob("*")) if path.is_file())
        names = [name for file in files if (name := file.relative_to(self.server.folder).as_posix()).startswith(prefix)]
        inner = {name: name[len(prefix) :].partition(delimiter)[0] + delimiter for name in names} if delimiter else {}
        folders = {prefix + part for name, part in inner.items() if prefix + part != name + delimiter}
        items = [self.metadata(n) for n in names if not any(n.startswith(folder) for folder in folders)]
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}

    def json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def not_found(self):
        self.answer(404, b'{"error": {"code": 404, "message": "Not Found"}}')


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
    "lost" (it is served, and the answer is not passed on), "expired" (credentials), "slow" (the store asks to)."""

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
        if fault == "cut":
            data = data[: len(data) // 2]
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
