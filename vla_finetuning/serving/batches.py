"""Observations that wait together travel and are computed together.

Not `serve.batch`, which gathers at a replica: there each observation is a message of its own, which the process that
computes has no time to take. Here a replica gets a batch when it is done with the last one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from vla_finetuning.serving.replica import Answer, Request


class Batches:
    """Sends requests to the replicas, one batch to each at a time.

    Args:
        replicas: Serve's handle of the deployment; `count`: how many there are.
        size: rows of a batch, at most. wait_s: how long one waits for more, where the last one was of several.
        timeout_s: how long a batch may take.
    """

    def __init__(self, replicas: Any, count: int, size: int, wait_s: float, timeout_s: float) -> None:
        self._replicas, self._free, self._size = replicas, count, size
        self._wait_s, self._timeout_s = wait_s, timeout_s
        self._waiting: deque[tuple[Request, asyncio.Future[Answer | str]]] = deque()
        self._last_rows = 1
        self._tasks: set[asyncio.Task[None]] = set()

    async def compute(self, request: Request) -> Answer | str:
        """Return the answer, or a text that says what went wrong."""
        future: asyncio.Future[Answer | str] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._start()
        return await future

    def _start(self) -> None:
        """Start a batch for each replica that is free, while requests wait."""
        if self._waiting and self._free:
            self._free -= 1
            task = asyncio.create_task(self._run())  # of no caller, who may leave before it is done
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        if self._last_rows > 1 and len(self._waiting) < self._size:
            await asyncio.sleep(self._wait_s)
        batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
        self._last_rows = len(batch) or self._last_rows
        self._start()  # what is left over, on another replica
        answers: list[Answer | str] = []
        try:
            if batch:
                requests = [request for request, _ in batch]
                answers = await asyncio.wait_for(self._replicas.predict.remote(requests), self._timeout_s)
        except TimeoutError:
            answers = [f"no replica answered within {self._timeout_s:g} s; send the observation again"] * len(batch)
        except Exception as error:  # Ray's or Serve's: nobody else would tell those who wait
            text = f"the replica that computed this is gone ({type(error).__name__}); send the observation again"
            answers = [text] * len(batch)
        finally:
            self._free += 1
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
        self._start()
