"""Connect the protocols to the replicas: sessions, the token, metrics, error messages."""

from __future__ import annotations

import hmac
import itertools
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vla_finetuning.envs.protocol import Observation
from vla_finetuning.rollouts.player import Key
from vla_finetuning.serving.observations import Interface
from vla_finetuning.serving.replicas import Answer, Batches, Request

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class AuthenticationError(ValueError):
    """The token is missing or wrong."""


@dataclass
class Session:
    """A client's session. Its name and the number of a decision, from 0, determine the decision's random numbers."""

    interface: Interface
    name: str
    decisions: int = 0


class Gateway:
    """Send the observations of sessions to the replicas as requests.

    `interfaces` are those of each robot's policy, by the robot's name. Clients must send `token` unless it is None.
    """

    def __init__(self, interfaces: Mapping[str, Interface], batches: Batches, seed: int, token: str | None) -> None:
        self._interfaces, self._batches, self._seed, self._token = interfaces, batches, seed, token
        self._numbers = itertools.count()
        self.registry = registry = CollectorRegistry()
        outcomes = "Observations by outcome: ok, refused (the client's), failed (the server's)"
        self._requests = Counter("vla_requests", outcomes, ["robot", "outcome"], registry=registry)
        latency = "From an observation to its actions"
        self._seconds = Histogram("vla_request_seconds", latency, ["robot"], buckets=SECONDS, registry=registry)
        rows = "Rows of the batch in which an observation was computed"
        self._rows = Histogram("vla_batch_rows", rows, buckets=ROWS, registry=registry)
        sessions = "Open sessions; for LeRobot's protocol, which reports no end of a session, those that are remembered"
        self.sessions = Gauge("vla_sessions", sessions, ["protocol"], registry=registry)

    def check_token(self, sent: str | None, remedy: str) -> None:
        """Raise AuthenticationError, with `remedy`, unless the sent token is the server's."""
        if self._token is not None and not hmac.compare_digest((sent or "").encode(), self._token.encode()):
            raise AuthenticationError(f"the token is missing or wrong: {remedy}")

    def open(self, address: str) -> Session:
        """Begin a session at `ROBOT?session=NAME`, where the name is optional. Raises ValueError for an unknown robot.

        The robot is ignored if there is only one.
        """
        parts, names = urlsplit(address), list(self._interfaces)
        robot = names[0] if len(names) == 1 else re.split(r"[/\\]", parts.path.rstrip("/"))[-1]
        if robot not in names:
            raise ValueError(
                f"which robot? {robot!r} is none of {', '.join(names)}: give one, as ws://HOST:PORT/{names[0]}, or "
                f"--pretrained_name_or_path={names[0]} of robot_client"
            )
        named = parse_qs(parts.query).get("session")
        return Session(self._interfaces[robot], named[0] if named else f"connection {next(self._numbers)}")

    @contextmanager
    def reading(self, session: Session) -> Iterator[None]:
        """Count an observation as refused where reading it, in the block, raises ValueError."""
        try:
            yield
        except ValueError:
            self._requests.labels(session.interface.robot, "refused").inc()
            raise

    async def decide(
        self, session: Session, observation: Observation, instruction: str, decision: int | None = None
    ) -> Answer:
        """Return the actions for an observation from `Interface.read`; they do not depend on the replica.

        `decision` is the decision's number; None for the session's next one. Raises RuntimeError if the actions could
        not be computed: then the decision is not counted, and the session goes on.
        """
        robot, started = session.interface.robot, time.perf_counter()
        key: Key = (self._seed, session.name, 0, session.decisions if decision is None else decision)
        answer = await self._batches.compute(Request(robot, observation, instruction, key))
        if not isinstance(answer, Answer):
            self._requests.labels(robot, "failed").inc()
            raise RuntimeError(answer)
        session.decisions += decision is None
        self._requests.labels(robot, "ok").inc()
        self._seconds.labels(robot).observe(time.perf_counter() - started)
        self._rows.observe(answer.rows)
        return answer
