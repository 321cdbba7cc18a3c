"""openpi's protocol: a websocket with msgpack messages of numpy arrays. `openpi-client` connects unchanged.

The first message describes the policy's inputs. The answer to an observation is `{"actions": (T, A), ...}`, or an error
message as text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import msgpack
import numpy as np
from prometheus_client import generate_latest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from vla_finetuning.serving.gateway import AuthenticationError, Gateway, Session
from vla_finetuning.serving.pickles import array_of


def pack(message: Any) -> bytes:
    """Pack a message as `openpi_client.msgpack_numpy` does."""
    return msgpack.packb(message, default=_packed)


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"{type(value).__name__} has no form in a message")


def unpack(data: bytes) -> dict[Any, Any]:
    """Unpack a message. Raises ValueError if it is not a dictionary in msgpack, or has arrays of other than numbers."""
    try:
        message = msgpack.unpackb(data, object_hook=_unpacked)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"the message is not in openpi's msgpack format: {error}") from error
    if not isinstance(message, dict):
        raise ValueError(f"the message is a {type(message).__name__}: send a dictionary of arrays by name")
    return message


def _unpacked(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return array_of(value.get(b"data"), value.get(b"dtype"), value.get(b"shape"))
    if b"__npgeneric__" in value:
        return value.get(b"data")
    return value


@asynccontextmanager
async def listening(
    gateway: Gateway, host: str, port: int, max_bytes: int, is_healthy: Callable[[], Awaitable[bool]]
) -> AsyncIterator[int]:
    """Listen: openpi's protocol on any path, GET /healthz, GET /metrics. Yields the port; raises OSError if taken."""

    async def check_request(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/healthz":
            if await is_healthy():
                return connection.respond(HTTPStatus.OK, "OK\n")
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "no replica runs\n")
        scheme, _, token = (request.headers.get("Authorization") or "").partition(" ")
        try:
            remedy = "give api_key to WebsocketClientPolicy"
            gateway.check_token(token if scheme in ("Api-Key", "Bearer") else None, remedy)
        except AuthenticationError as error:
            return connection.respond(HTTPStatus.UNAUTHORIZED, f"{error}\n")
        if request.path == "/metrics":
            return connection.respond(HTTPStatus.OK, generate_latest(gateway.registry).decode())
        return None

    async def handle(connection: ServerConnection) -> None:
        assert connection.request is not None
        try:
            session = gateway.open(connection.request.path)
        except ValueError as error:
            await connection.close(1008, str(error)[:120])  # a reason has at most 123 bytes
            return
        with gateway.sessions.labels("openpi").track_inprogress(), suppress(ConnectionClosed):
            await connection.send(pack({"session": session.name, **session.interface.describe()}))
            async for data in connection:
                await connection.send(await _answer(gateway, session, data))

    # Browsers, which send an origin, are refused: a web page must not reach local ports. Few messages are queued, since
    # each may be as long as the limit.
    options: Any = {"origins": [None], "max_size": max_bytes, "max_queue": 2, "compression": None}
    async with serve(handle, host, port, process_request=check_request, **options) as server:
        yield next(iter(server.sockets)).getsockname()[1]


async def _answer(gateway: Gateway, session: Session, data: bytes | str) -> bytes | str:
    started = time.perf_counter()
    try:
        with gateway.reading(session):
            observed = session.interface.read(unpack(data if isinstance(data, bytes) else b""))
        answer = await gateway.decide(session, *observed)
    except (ValueError, RuntimeError) as error:
        return str(error)
    timing = {"infer_ms": 1e3 * answer.seconds, "total_ms": 1e3 * (time.perf_counter() - started)}
    return pack({"actions": answer.actions, "server_timing": timing, "batch_rows": answer.rows})
