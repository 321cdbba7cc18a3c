"""Schedule episodes on Ray: stages simulate, a policy decides for waiting episodes, and dead processes are replaced.

Stages (`stage.py`, on CPUs) execute whole chunks in their episodes and then wait for decisions. A policy decides in
its own servers (`servers.py`) or in the calling process (`InTurn`). An episode is a function of its numbers and its
chunks, so the episodes of a dead stage replay their chunks elsewhere, and no decision is computed twice.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from vla_finetuning.envs.contract import ContractError
from vla_finetuning.envs.protocol import Maker, Observation, concatenate
from vla_finetuning.rollouts.episodes import ATTEMPTS, Episode, Line, Playing, line_of
from vla_finetuning.rollouts.stage import MAKE_LIMIT_S, Decision, Stage
from vla_finetuning.run.failures import root_cause
from vla_finetuning.terminal import print_safe

# Failures of stages before any episode has ended, after which `play` gives up: the cause is not a single episode.
MAX_FAILURES = 20
# Interval of checks for capacity, delay of the message about missing capacity, and limit of the wait for it. Ray does
# not tell a process that waits for CPUs from one that has them and starts, so it is longer than making an environment.
LOOK_EVERY_S, TELL_AFTER_S, CAPACITY_TIMEOUT_S = 10.0, 30.0, MAKE_LIMIT_S + 300.0
# Groups of stages that take turns with a local policy.
HALVES = 2

logger = logging.getLogger(__name__)
# Function from the observation of N rows and their decisions to the actions to execute (N, T, A).
Decide = Callable[[Observation, Sequence[Decision]], np.ndarray]
# Callback for a finished episode: its number, its line, and its executed actions (steps, A), None after an error.
OnEnd = Callable[[int, Line, np.ndarray | None], None]


class NoCapacityError(RuntimeError):
    """The cluster has no capacity for stages or policy servers; the message names the missing resources."""


@dataclass(eq=False)
class Seat:
    """A stage and its state in the scheduler.

    Attributes:
        call: references to the pending results of `Stage.advance`; None if no call is pending.
        started: whether the stage has answered.
        queue: episodes that the stage may begin; shared by all seats unless the policy is local.
        assigned: episodes that the stage may begin in the pending call.
        decisions: pending decisions of `playing`, in the same order.
        seen: observation of the pending decisions, or a reference to it.
        since: time at which the decisions became pending; None if none are.
    """

    stage: Any = None
    call: tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]] | None = None
    started: bool = False
    queue: deque[Playing] = field(default_factory=deque)
    playing: list[Playing] = field(default_factory=list)
    assigned: list[Playing] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    seen: Any = None
    since: float | None = None


class Policy:
    """Base class of policies that decide for waiting seats.

    Attributes:
        is_local: whether the policy decides in this process, where `Seat.seen` is an observation and not a reference.
            Each seat then has its own episodes, so that batches depend on the episodes alone.
        pending: seats of each pending remote call.
        missing_resources: CPUs and GPUs that the policy waits for; None if it can decide.
    """

    is_local = False
    missing_resources: tuple[float, int] | None = None

    def __init__(self) -> None:
        self.pending: dict[ray.ObjectRef[Any], list[Seat]] = {}

    def decide(self, seats: Sequence[Seat]) -> Iterator[tuple[list[Seat], Sequence[np.ndarray] | RayError]]:
        """Yield seats with the actions (T, A) of each of their decisions, or with the error that lost `Seat.seen`."""
        raise NotImplementedError


class InTurn(Policy):
    """A local policy that decides for one half of the seats while the other half simulates.

    It waits for all seats of a half, so that batches do not depend on the speed of the stages.
    """

    is_local = True

    def __init__(self, decide: Decide) -> None:
        super().__init__()
        self._decide, self._turn = decide, 0

    def decide(self, seats: Sequence[Seat]) -> Iterator[tuple[list[Seat], Sequence[np.ndarray]]]:
        for _ in range(HALVES):
            half = [seat for seat in seats[self._turn :: HALVES] if seat.queue or seat.playing or seat.assigned]
            if any(seat.since is None for seat in half):
                return
            self._turn = (self._turn + 1) % HALVES
            if half:
                seen = concatenate([seat.seen for seat in half])
                yield half, list(self._decide(seen, [decision for seat in half for decision in seat.decisions]))
                return


class Scheduler:
    """A pool of stages that plays lists of episodes. The constructor starts them, each with `slots` environments."""

    def __init__(
        self, makers: Mapping[str, Maker], *, stages: int, slots: int, cpus: float, step_limit_s: float
    ) -> None:
        self._makers, self._slots, self._cpus, self._step_limit_s = dict(makers), slots, cpus, step_limit_s
        self._failures, self._any_ended = 0, False
        self.seats = [Seat() for _ in range(stages)]
        for seat in self.seats:
            self._make_stage(seat)

    def play_here(
        self, episodes: Mapping[int, Episode], decide: Decide, bootstraps: bool = False
    ) -> dict[int, tuple[Line, np.ndarray | None]]:
        """Play episodes with a local policy, as `play`; return the line and the actions of each, by number."""
        played: dict[int, tuple[Line, np.ndarray | None]] = {}

        def on_end(number: int, line: Line, actions: np.ndarray | None) -> None:
            if actions is None:
                logger.warning("%s, seed %d could not be played: %s", line["task"], line["seed"], line["error"])
            played[number] = line, actions

        self.play(episodes, InTurn(decide), on_end, bootstraps=bootstraps)
        return {number: played[number] for number in episodes}

    def play(
        self,
        episodes: Mapping[int, Episode],
        policy: Policy,
        on_end: OnEnd,
        stopped: Callable[[], bool] | None = None,
        bootstraps: bool = False,
    ) -> None:
        """Play all episodes, and call `on_end` for each in order of completion.

        `stopped` is polled about every second; True abandons all running episodes.

        Raises:
            NoCapacityError: no policy server, or no stage, has started for CAPACITY_TIMEOUT_S.
            RuntimeError: stages fail, and no episode has ever ended.
        """
        self._policy, self._on_end, self._left = policy, on_end, set(episodes)
        queue = deque(Playing(number, episode, bootstraps=bootstraps) for number, episode in episodes.items())
        for place, seat in enumerate(self.seats):
            seat.queue = deque(list(queue)[place :: len(self.seats)]) if policy.is_local else queue
        self._last_progress_s, self._reported = time.monotonic(), False
        while self._left and not (stopped is not None and stopped()):
            for seat in self.seats:
                if seat.started and seat.call is None and not seat.playing:
                    self._advance(seat)
            for batch, chunks in policy.decide(self.seats):
                if isinstance(chunks, RayError):
                    for seat in batch:
                        self._replace(seat, chunks)
                else:
                    self._send_chunks(batch, chunks)
            self._check_capacity()
            calls = {seat.call[0]: seat for seat in self.seats if seat.call is not None}
            timeout = LOOK_EVERY_S if stopped is None else 1.0
            for ref in ray.wait([*calls, *policy.pending], num_returns=1, timeout=timeout)[0]:
                if ref in calls:
                    self._receive(calls[ref])

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds that stages have spent simulating and rendering since the last call.

        The seconds of dead stages are lost. A stage that has not answered may still wait for a CPU, and is not called.
        """
        simulation_s = rendering_s = 0.0
        for spent in [seat.stage.take_seconds.remote() for seat in self.seats if seat.started]:
            with contextlib.suppress(RayError):
                simulated, rendered = ray.get(spent)
                simulation_s, rendering_s = simulation_s + simulated, rendering_s + rendered
        return simulation_s, rendering_s

    def close(self) -> None:
        for seat in self.seats:
            ray.kill(seat.stage)

    def _make_stage(self, seat: Seat) -> None:
        # DEFAULT: anywhere in the cluster, not in the placement group of Ray Train's worker.
        stage_class: Any = ray.remote(Stage).options(num_cpus=self._cpus, scheduling_strategy="DEFAULT")
        seat.stage = stage_class.remote(self._makers, self._slots, self._step_limit_s)
        seat.started = False
        seat.call = seat.stage.advance.options(num_returns=2).remote(())  # returns when the stage has started

    def _advance(self, seat: Seat, chunks: Sequence[np.ndarray] | None = None) -> None:
        seat.assigned, seat.since = self._assign(seat), None
        if seat.assigned or chunks is not None:
            seat.call = seat.stage.advance.options(num_returns=2).remote(seat.assigned, chunks)

    def _assign(self, seat: Seat) -> list[Playing]:
        """Pop the episodes that a seat may begin: all restarted ones, and at most one fresh one per environment."""
        queue, selected, fresh = seat.queue, list[Playing](), 0
        while queue and fresh < self._slots and not any(playing.is_suspect for playing in (*seat.playing, *selected)):
            if queue[0].is_suspect and (seat.playing or selected):
                break
            selected.append(queue.popleft())
            fresh += not selected[-1].chunks
        return selected

    def _send_chunks(self, batch: Sequence[Seat], chunks: Sequence[np.ndarray]) -> None:
        first = 0
        for seat in batch:
            # Copy, because views would keep the object in the store.
            seat_chunks = [np.array(chunk) for chunk in chunks[first : first + len(seat.playing)]]
            for playing, chunk in zip(seat.playing, seat_chunks, strict=True):
                playing.chunks.append(chunk)
            self._advance(seat, seat_chunks)
            first += len(seat_chunks)

    def _receive(self, seat: Seat) -> None:
        """Process the answer of a stage."""
        assert seat.call is not None
        (outcome, seen), seat.call = seat.call, None
        try:
            ended, seat.decisions = ray.get(outcome)
            seat.seen = ray.get(seen) if self._policy.is_local else seen
        except RayError as error:
            if isinstance(error, ContractError) or (isinstance(error, RayActorError) and error.actor_init_failed):
                raise  # another stage would fail alike
            self._replace(seat, error)
            return
        seat.started, self._any_ended = True, self._any_ended or bool(ended)
        remaining = {playing.number: playing for playing in (*seat.playing, *seat.assigned)}
        for number, line in ended.items():
            self._finish(remaining.pop(number), line)
        seat.playing, seat.assigned = [remaining.pop(decision.number) for decision in seat.decisions], []
        seat.queue.extendleft(reversed(remaining.values()))
        seat.since = time.monotonic() if seat.playing else None

    def _replace(self, seat: Seat, error: RayError) -> None:
        """Replace a stage and queue its episodes again, with their chunks."""
        ray.kill(seat.stage)
        self._failures += not self._any_ended
        why = _describe_failure(error, self._step_limit_s)
        if self._failures > MAX_FAILURES:
            raise RuntimeError(
                f"{self._failures} processes that simulate failed, and no episode ended: {why}"
            ) from error
        lost = [*seat.playing, *seat.assigned]
        seat.playing, seat.assigned = [], []
        for playing in reversed(lost):
            playing.failures += 1
            if playing.failures == ATTEMPTS:
                self._finish(playing, line_of(playing.episode, len(playing.chunks), error=why))
            elif playing.is_suspect:
                seat.queue.append(playing)
            else:
                seat.queue.appendleft(playing)
        self._make_stage(seat)

    def _finish(self, playing: Playing, line: Line) -> None:
        self._left.discard(playing.number)
        line = {**line, "texts": playing.texts} if playing.texts else line
        actions = None if line["error"] else np.concatenate(playing.chunks)[: line["steps"]]
        self._on_end(playing.number, line, actions)

    def _check_capacity(self) -> None:
        """Print the missing resources while nothing but a wait for capacity happens; raise after a limit."""
        policy, now = self._policy, time.monotonic()
        simulates = any(seat.started and seat.call is not None for seat in self.seats)
        if policy.missing_resources is None and (simulates or any(policy.pending.values())):
            self._last_progress_s = now
        waited_s = now - self._last_progress_s
        if waited_s > CAPACITY_TIMEOUT_S:
            role = "simulates" if policy.missing_resources is None else "decides"
            why = self._describe_missing() or "it got its CPUs but has not finished starting; see Ray's logs"
            raise NoCapacityError(f"no process that {role} has started for {CAPACITY_TIMEOUT_S:g} s: {why}")
        if waited_s > TELL_AFTER_S and not self._reported:
            self._reported = True
            if missing := self._describe_missing():
                unless = "unless processes of this program hold them and are still starting"
                limit = f"at most {CAPACITY_TIMEOUT_S:g} s"
                print_safe(f"waiting      for capacity, {limit}: {missing}, {unless}", file=sys.stderr)

    def _describe_missing(self) -> str | None:
        """Describe the resources that the next process waits for; None if the cluster has them free."""
        free, totals = ray.available_resources(), ray.cluster_resources()
        needs = zip(("CPU", "GPU"), self._policy.missing_resources or (self._cpus, 0), strict=True)
        lacking = [
            f"needs {n:g} {name}{'s' * (n != 1)}, {free.get(name, 0):g} of the cluster's {totals.get(name, 0):g} free"
            for name, n in needs
            if free.get(name, 0) < n
        ]
        remedy = "end what holds them, add nodes, or lower --eval.env_actors (grpo.py: --grpo.env_actors)"
        return f"{'; '.join(lacking)}; {remedy}" if lacking else None


def _describe_failure(error: RayError, step_limit_s: float) -> str:
    if isinstance(error, RayTaskError):
        return root_cause(error)
    message = str(error).strip().splitlines()[0]
    return f"its process died, or a step took more than {step_limit_s:g} s (VLA_STEP_TIMEOUT_S): {message}"
