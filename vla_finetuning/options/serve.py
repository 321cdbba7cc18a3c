"""Options of the server, and its secret from the environment."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vla_finetuning.options.fields import option

# Read from the environment, because `ps` shows command lines.
TOKEN_VARIABLE = "VLA_SERVE_TOKEN"


@dataclass
class ServeOptions:
    """The server."""

    host: str = option("127.0.0.1", f"Address to listen at. Others than this machine's own need {TOKEN_VARIABLE}.")
    port: int = option(8000, "Port of openpi's protocol, /healthz and /metrics.", min=0, max=65535)
    grpc_port: int | None = option(
        8080, "Port of LeRobot's asynchronous inference. null: do not serve it.", min=0, max=65535
    )
    replicas: int = option(1, "Number of replicas of the policy, each with a GPU if there are any.", min=1)
    cpus_per_replica: int = option(1, "CPUs and compute threads of each replica.", min=1)
    batch_size: int = option(32, "Maximum number of observations in a batch of a replica.", min=1)
    wait_ms: float = option(
        5.0, "Milliseconds that an observation waits for others, when several arrive at a time.", min=0
    )
    max_message_mb: float = option(16.0, "Maximum size of an observation in 10^6 bytes.", above=0, max=1000)

    def check(self, config: Any) -> None:
        if not is_loopback(self.host) and not read_token():
            raise ValueError(
                f"--serve.host={self.host} opens the server to other machines: set {TOKEN_VARIABLE} in the environment "
                "to a secret that clients must send, or leave --serve.host out"
            )
        if self.port and self.port == self.grpc_port:
            raise ValueError(f"--serve.port and --serve.grpc_port are both {self.port}: give another for one of them")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token() -> str | None:
    """Return the secret that clients must send, LeRobot's client in an address; None if none is set."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and len(token) < 16:
        raise ValueError(f"{TOKEN_VARIABLE} has {len(token)} characters: give at least 16, as `openssl rand -hex 16`")
    if token is not None and parse_qs(urlsplit(f"?token={token}").query).get("token") != [token]:
        raise ValueError(f"{TOKEN_VARIABLE} has characters that mean something else in an address: give letters and "
                         "digits, as `openssl rand -hex 16`")  # fmt: skip
    return token
