"""Compute batches of requests in replicas on Ray Serve, each of which holds all policies.

`Batches` sends each free replica a batch. `serve.batch` would gather requests in the replica's process, which is busy
computing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import serve

from vla_finetuning.envs.protocol import Observation, concatenate, leaves
from vla_finetuning.rollouts.player import Key, Player, PolicySource
from vla_finetuning.rollouts.servers import load_players
from vla_finetuning.run.failures import root_cause

RETRY = "send the observation again"


@dataclass(frozen=True)
class Request:
    """A decision to compute: the robot, an observation of one row, the instruction, and the key of random numbers."""

    robot: str
    observation: Observation
    instruction: str
    key: Key


@dataclass(frozen=True)
class Answer:
    """A chunk of actions, float32 (T, A), with the number of rows in its batch and the seconds of the batch."""

    actions: np.ndarray
    rows: int
    seconds: float


def compute(players: Mapping[str, Player], requests: Sequence[Request]) -> list[Answer | str]:
    """Answer requests, in batches of equal robot and image sizes; those that fail alone too with an error message."""
    groups: dict[Any, list[int]] = {}
    for i, request in enumerate(requests):
        shapes = sorted((name, array.shape) for name, array in leaves(request.observation))
        groups.setdefault((request.robot, *shapes), []).append(i)
    answers: dict[int, Answer | str] = {}
    for (robot, *_), rows in groups.items():
        group, started = [requests[i] for i in rows], time.perf_counter()
        try:
            observation = concatenate([request.observation for request in group])
            instructions, keys = [request.instruction for request in group], [request.key for request in group]
            chunks = players[robot](observation, instructions, keys)
            seconds = time.perf_counter() - started
            answers |= {i: Answer(chunk, len(group), seconds) for i, chunk in zip(rows, chunks, strict=True)}
        except Exception as error:  # other rows are still answered
            alone = [root_cause(error)] if len(rows) == 1 else [compute(players, [request])[0] for request in group]
            answers |= dict(zip(rows, alone, strict=True))
    return [answers[i] for i in range(len(requests))]


@serve.deployment
class Replica:
    """A process that holds all policies and computes batches."""

    def __init__(self, sources: Mapping[str, PolicySource], threads: int) -> None:
        self._players = load_players(sources, threads)

    def predict(self, requests: Sequence[Request]) -> list[Answer | str]:
        return compute(self._players, requests)


class Batches:
    """Send requests to the replicas, one batch per replica at a time.

    `replicas` is Serve's handle of the deployment, which has `count` replicas; `size` is the maximum number of rows of
    a batch, and `timeout_s` of its seconds. After a batch of several rows, more requests are waited for `wait_s`.
    """

    def __init__(self, replicas: Any, count: int, size: int, wait_s: float, timeout_s: float) -> None:
        self._replicas, self._free, self._size = replicas, count, size
        self._wait_s, self._timeout_s, self._last_rows = wait_s, timeout_s, 1
        self._waiting: deque[tuple[Request, asyncio.Future[Answer | str]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def compute(self, request: Request) -> Answer | str:
        """Return the answer, or an error message."""
        future: asyncio.Future[Answer | str] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._start()
        return await future

    def _start(self) -> None:
        if self._waiting and self._free:
            self._free -= 1
            task = asyncio.create_task(self._run())  # not awaited: callers may be cancelled
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        if self._last_rows > 1 and len(self._waiting) < self._size:
            await asyncio.sleep(self._wait_s)
        batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
        self._last_rows = len(batch) or self._last_rows
        self._start()  # the remaining requests, on another replica
        answers: Sequence[Answer | str] = []
        try:
            if batch:
                requests = [request for request, _ in batch]
                answers = await asyncio.wait_for(self._replicas.predict.remote(requests), self._timeout_s)
        except TimeoutError:
            answers = [f"no replica answered within {self._timeout_s:g} s; {RETRY}"] * len(batch)
        except Exception as error:  # Ray's or Serve's: the waiting callers must be answered
            answers = [f"the replica that was computing this has died ({type(error).__name__}); {RETRY}"] * len(batch)
        finally:
            self._free += 1
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
        self._start()
