"""Episodes on Ray: processes simulate, a policy decides for those that wait, and one that dies costs nothing but time.

Stages (`stage.py`, on CPUs) execute whole chunks in their episodes and then wait for decisions. A policy decides in
servers of its own (`servers.py`) or in the process that plays (`InTurn`). An episode is a function of its numbers and
of the chunks that it was given: what a dead process held begins anew with these chunks, and the policy decides nothing
twice.
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
from vla_finetuning.rollouts.episodes import ATTEMPTS, Ended, Episode, Failed, Line, Playing, line_of
from vla_finetuning.rollouts.stage import Decision, Stage
from vla_finetuning.run.failures import root_cause
from vla_finetuning.terminal import print_safe

# Stages that fail before any episode has ended, before `play` gives up: it is no single episode's fault.
IN_VAIN = 20
# How often to look whether processes have started, when to say that some wait for capacity, and how long nothing else
# may happen. On a busy machine a process may take as long to start after it was placed.
LOOK_EVERY_S, TELL_AFTER_S, ROOM_TIMEOUT_S = 10.0, 30.0, 600.0
# Groups of stages that take turns with a policy of this process.
HALVES = 2

logger = logging.getLogger(__name__)
# Decides: (what N rows observe, their decisions) to the actions to execute (N, T, A).
Decide = Callable[[Observation, Sequence[Decision]], np.ndarray]
# Takes an episode that is over: its number, its line, and all executed actions, (steps, A), None after an error.
OnEnd = Callable[[int, Line, np.ndarray | None], None]


class NoCapacityError(RuntimeError):
    """The cluster has no capacity for the processes that play; says what is missing."""


@dataclass(eq=False)
class Seat:
    """A stage, and what is known of it here.

    Attributes:
        call: its results to come, (what ended and waits, what is seen); None when it is in no call.
        started: whether it has answered. worked: whether it had an episode since its seconds were last taken.
        queue: what it may begin, of all seats or its own. handed: what it may begin in the call it is in.
        playing: the episodes that run in it; decisions, seen: theirs, in their order. since: when they began to wait;
            None: they do not.
    """

    stage: Any = None
    call: tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]] | None = None
    started: bool = False
    worked: bool = False
    queue: deque[Playing] = field(default_factory=deque)
    playing: list[Playing] = field(default_factory=list)
    handed: list[Playing] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    seen: Any = None
    since: float | None = None


class Policy:
    """Decides for seats that wait.

    Attributes:
        is_local: it decides in this process, where `Seat.seen` is an observation and not a reference. Each seat has
            episodes of its own, so that what is decided together depends on the episodes alone.
        pending: what it computes elsewhere, and for whom.
        lacks: the CPUs and GPUs that it waits for; None once it can decide.
    """

    is_local = False
    lacks: tuple[float, int] | None = None

    def __init__(self) -> None:
        self.pending: dict[ray.ObjectRef[Any], list[Seat]] = {}

    def decide(self, seats: Sequence[Seat]) -> Iterator[tuple[list[Seat], Sequence[np.ndarray] | RayError]]:
        """Yield seats with the actions (T, A) of each of their decisions, or with why what they saw is lost."""
        raise NotImplementedError


class InTurn(Policy):
    """A policy of this process, which decides for one half of the seats while the other simulates.

    It decides when all of a half waits: what is computed together does not depend on which process was faster.
    """

    is_local = True

    def __init__(self, decide: Decide) -> None:
        super().__init__()
        self._decide, self._turn = decide, 0

    def decide(self, seats: Sequence[Seat]) -> Iterator[tuple[list[Seat], Sequence[np.ndarray]]]:
        for _ in range(HALVES):
            half = [seat for seat in seats[self._turn :: HALVES] if seat.queue or seat.playing or seat.handed]
            if any(seat.since is None for seat in half):
                return
            self._turn = (self._turn + 1) % HALVES
            if half:
                seen = concatenate([seat.seen for seat in half])
                yield half, list(self._decide(seen, [decision for seat in half for decision in seat.decisions]))
                return


class Scheduler:
    """Processes that simulate, for one `play` after another. They start as this is made.

    Args:
        makers, step_limit_s: as `Stage` takes them.
        stages: processes; slots: environments in each; cpus: that each holds.
    """

    def __init__(
        self, makers: Mapping[str, Maker], *, stages: int, slots: int, cpus: float, step_limit_s: float
    ) -> None:
        self._makers, self._slots, self._cpus, self._step_limit_s = dict(makers), slots, cpus, step_limit_s
        self._in_vain, self._works = 0, False
        self.seats = [Seat() for _ in range(stages)]
        for seat in self.seats:
            self._make_stage(seat)

    def play_here(
        self, episodes: Mapping[int, Episode], decide: Decide, bootstraps: bool = False
    ) -> dict[int, tuple[Line, np.ndarray | None]]:
        """Play episodes, by number, with a policy of this process; return of each what `OnEnd` takes. As `play`."""
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
        """Play episodes, by number, in whatever order they get done.

        Args:
            on_end: called as each ends. stopped: asked every second or so; when it says so, what is not over is let go.
            bootstraps: as `Playing` has it.
        Raises:
            NoCapacityError: nothing that decides, or nothing that simulates, has started for ROOM_TIMEOUT_S.
            RuntimeError: stages fail, and no episode has ever ended.
        """
        self._policy, self._on_end, self._left = policy, on_end, set(episodes)
        queue = deque(Playing(number, episode, bootstraps=bootstraps) for number, episode in episodes.items())
        for place, seat in enumerate(self.seats):
            seat.queue = deque(list(queue)[place :: len(self.seats)]) if policy.is_local else queue
        self._moved_s, self._told = time.monotonic(), False
        while self._left and not (stopped is not None and stopped()):
            for seat in self.seats:
                if seat.started and seat.call is None and not seat.playing:
                    self._advance(seat)
            for batch, chunks in policy.decide(self.seats):
                if isinstance(chunks, RayError):
                    for seat in batch:
                        self._replace(seat, chunks)
                else:
                    self._give(batch, chunks)
            self._check_capacity()
            calls = {seat.call[0]: seat for seat in self.seats if seat.call is not None}
            timeout = LOOK_EVERY_S if stopped is None else 1.0
            for ref in ray.wait([*calls, *policy.pending], num_returns=1, timeout=timeout)[0]:
                if ref in calls:
                    self._take(calls[ref])

    def take_seconds(self) -> tuple[float, float]:
        """Return seconds that the stages have simulated and rendered since this was last called.

        Those of a stage that died are not known. One that had no episode may wait for a CPU still, and is not called.
        """
        seconds = [seat.stage.take_seconds.remote() for seat in self.seats if seat.worked]
        simulation_s = rendering_s = 0.0
        for seat in self.seats:
            seat.worked = False
        for spent in seconds:
            with contextlib.suppress(RayError):
                simulated, rendered = ray.get(spent)
                simulation_s, rendering_s = simulation_s + simulated, rendering_s + rendered
        return simulation_s, rendering_s

    def close(self) -> None:
        for seat in self.seats:
            ray.kill(seat.stage)

    # -- one after the other --

    def _make_stage(self, seat: Seat) -> None:
        # DEFAULT: anywhere in the cluster, not in the placement group that Ray Train holds for this process.
        stage_class: Any = ray.remote(Stage).options(num_cpus=self._cpus, scheduling_strategy="DEFAULT")
        seat.stage = stage_class.remote(self._makers, self._slots, self._step_limit_s)
        seat.started = seat.worked = False
        seat.call = seat.stage.advance.options(num_returns=2).remote(())  # answered when it has started

    def _advance(self, seat: Seat, chunks: Sequence[np.ndarray] | None = None) -> None:
        seat.handed, seat.since = self._hand_out(seat), None
        if seat.handed or chunks is not None:
            seat.call, seat.worked = seat.stage.advance.options(num_returns=2).remote(seat.handed, chunks), True

    def _hand_out(self, seat: Seat) -> list[Playing]:
        """Take what a seat may begin: what goes on elsewhere, and as many others as it has environments."""
        queue, selected, fresh = seat.queue, list[Playing](), 0
        while queue and fresh < self._slots and not any(playing.is_suspect for playing in (*seat.playing, *selected)):
            if queue[0].is_suspect and (seat.playing or selected):
                break
            selected.append(queue.popleft())
            fresh += not selected[-1].chunks
        return selected

    def _give(self, batch: Sequence[Seat], chunks: Sequence[np.ndarray]) -> None:
        first = 0
        for seat in batch:
            # No views into the object store.
            seat_chunks = [np.array(chunk) for chunk in chunks[first : first + len(seat.playing)]]
            for playing, chunk in zip(seat.playing, seat_chunks, strict=True):
                playing.chunks.append(chunk)
            self._advance(seat, seat_chunks)
            first += len(seat_chunks)

    def _take(self, seat: Seat) -> None:
        """Take a stage's answer."""
        assert seat.call is not None
        (outcome, seen), seat.call = seat.call, None
        try:
            ended, seat.decisions = ray.get(outcome)
            seat.seen = ray.get(seen) if self._policy.is_local else seen
        except RayError as error:
            if isinstance(error, ContractError) or (isinstance(error, RayActorError) and error.actor_init_failed):
                raise  # no other would fare better
            self._replace(seat, error)
            return
        seat.started, self._works = True, self._works or bool(ended)
        remaining = {playing.number: playing for playing in (*seat.playing, *seat.handed)}
        for over in ended:
            failed = isinstance(over, Failed)
            self._end(remaining.pop(over.number), None if failed else over, over.error if failed else None)
        seat.playing, seat.handed = [remaining.pop(decision.number) for decision in seat.decisions], []
        seat.queue.extendleft(reversed(remaining.values()))
        seat.since = time.monotonic() if seat.playing else None

    def _replace(self, seat: Seat, error: RayError) -> None:
        """Make a stage anew; what it held goes on with the chunks that it had."""
        ray.kill(seat.stage)
        self._in_vain += not self._works
        why = _why(error, self._step_limit_s)
        if self._in_vain > IN_VAIN:
            raise RuntimeError(
                f"{self._in_vain} processes that simulate failed, and no episode ended: {why}"
            ) from error
        lost = [*seat.playing, *seat.handed]
        seat.playing, seat.handed = [], []
        for playing in reversed(lost):
            playing.failures += 1
            if playing.failures == ATTEMPTS:
                self._end(playing, None, why)
            elif playing.is_suspect:
                seat.queue.append(playing)
            else:
                seat.queue.appendleft(playing)
        self._make_stage(seat)

    def _end(self, playing: Playing, ended: Ended | None, error: str | None = None) -> None:
        self._left.discard(playing.number)
        line = line_of(playing.episode, ended, error, len(playing.chunks), playing.texts)
        self._on_end(playing.number, line, None if ended is None else np.concatenate(playing.chunks)[: ended.steps])

    def _check_capacity(self) -> None:
        """Say what the cluster lacks while nothing but a wait for capacity happens; end the wait after a limit."""
        policy, now = self._policy, time.monotonic()
        simulates = any(seat.started and seat.call is not None for seat in self.seats)
        if policy.lacks is None and (simulates or any(policy.pending.values())):
            self._moved_s = now
        waited_s = now - self._moved_s
        if waited_s > ROOM_TIMEOUT_S:
            role, why = "simulates" if policy.lacks is None else "decides", self._what_lacks() or "it has its CPUs"
            raise NoCapacityError(f"no process that {role} has started for {ROOM_TIMEOUT_S:g} s: {why}")
        if waited_s > TELL_AFTER_S and not self._told:
            self._told = True
            # Ray does not tell a process that waits for CPUs from one that has them and imports its modules.
            if lacks := self._what_lacks():
                why = f"{lacks}, unless they are held by processes of this program that a busy machine is slow to start"
                print_safe(f"waiting      for capacity, at most {ROOM_TIMEOUT_S:g} s: {why}", file=sys.stderr)

    def _what_lacks(self) -> str | None:
        """Return what a process waits for that is to start, in words; None if the cluster has it free."""
        free, totals = ray.available_resources(), ray.cluster_resources()
        needs = zip(("CPU", "GPU"), self._policy.lacks or (self._cpus, 0), strict=True)
        lacking = [
            f"needs {n:g} {name}{'s' * (n != 1)}, {free.get(name, 0):g} of the cluster's {totals.get(name, 0):g} free"
            for name, n in needs
            if free.get(name, 0) < n
        ]
        remedy = "end what holds them, add nodes, or lower --eval.env_actors (grpo.py: --grpo.env_actors)"
        return f"{'; '.join(lacking)}; {remedy}" if lacking else None


def _why(error: RayError, step_limit_s: float) -> str:
    if isinstance(error, RayTaskError):
        return root_cause(error)
    message = str(error).strip().splitlines()[0]
    return f"its process died, or a step took more than {step_limit_s:g} s (VLA_STEP_TIMEOUT_S): {message}"
