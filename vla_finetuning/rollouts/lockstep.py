"""Episodes played by the process that trains: its own environments, in two halves that take turns with inference.

While one half of the stages (`stage.py`, processes on CPUs) executes its chunks, the policy decides for the other.
A half is decided for when all of it waits, in the order of its seats: so what is computed together, and every bit of
the result, depends on the episodes alone, not on which process was faster.

A stage is a function of the calls it has had. One that dies is made anew and its calls are repeated, without the policy
being asked: nothing changes but the time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from vla_finetuning.envs.protocol import Maker, Observation
from vla_finetuning.rollouts.scheduler import concatenate
from vla_finetuning.rollouts.stage import Decision, Ended, Stage, Start
from vla_finetuning.run.failures import root_cause

# A stage is made anew so often during one `play` before that gives up.
DEATHS = 3
# Stages in a half, and halves.
HALVES = 2

# Decides: (what N rows observe, their decisions) to the actions to execute (N, n, A).
Decide = Callable[[Observation, Sequence[Decision]], np.ndarray]


@dataclass(eq=False)
class _Seat:
    """A stage, and the calls that it has had since the play began.

    Attributes:
        queue: episodes that it has not begun. calls: (begin, chunks) of every call.
        answer: results to come of the last call.
        started: None once it has. spent: whether it has worked since its seconds were last asked for.
    """

    stage: Any
    started: ray.ObjectRef[Any] | None
    queue: deque[Start] = field(default_factory=deque)
    calls: list[tuple[list[Start], np.ndarray | None]] = field(default_factory=list)
    answer: tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]] | None = None
    deaths: int = 0
    spent: bool = False


class Rollouts:
    """The stages of one training process.

    Args:
        makers: of each task's environment.
        actors: processes that simulate; slots: environments in each; cpus: that each holds.
        step_limit_s: as `Stage` takes it. room_s: how long to wait until a process has started.
    """

    def __init__(
        self,
        makers: Mapping[str, Maker],
        *,
        actors: int,
        slots: int,
        cpus: float,
        step_limit_s: float,
        room_s: float,
    ) -> None:
        self._makers, self._slots, self._cpus, self._step_limit_s = dict(makers), slots, cpus, step_limit_s
        self._room_s = room_s
        self._seats = [_Seat(*self._make_stage()) for _ in range(actors)]

    def _make_stage(self) -> tuple[Any, ray.ObjectRef[Any]]:
        # DEFAULT: anywhere in the cluster, not in the placement group that Ray Train holds for this process.
        made: Any = ray.remote(Stage).options(num_cpus=self._cpus, scheduling_strategy="DEFAULT")
        stage = made.remote(self._makers, self._slots, self._step_limit_s)
        return stage, stage.__ray_ready__.remote()

    def play(self, episodes: Sequence[Start], decide: Decide) -> dict[int, Ended]:
        """Play episodes to their ends; by number.

        Raises:
            RuntimeError: a stage failed again and again, or an environment does not repeat what it did.
        """
        for place, seat in enumerate(self._seats):
            seat.queue, seat.calls, seat.deaths = deque(episodes[place :: len(self._seats)]), [], 0
            self._advance(seat, None)
        halves = [self._seats[first::HALVES] for first in range(HALVES)]
        ended: dict[int, Ended] = {}
        while any(seat.answer is not None for seat in self._seats):
            for half in halves:
                waiting = [(seat, *self._answer(seat, ended)) for seat in half if seat.answer is not None]
                waiting = [one for one in waiting if one[1]]
                if waiting:
                    seen = concatenate([observation for _, _, observation in waiting])
                    actions = decide(seen, [decision for _, decisions, _ in waiting for decision in decisions])
                    first = 0
                    for seat, decisions, _ in waiting:
                        # Its own: repeated if the stage dies, and small enough to go with the call.
                        self._advance(seat, actions[first : first + len(decisions)])
                        first += len(decisions)
        return {start.number: ended[start.number] for start in episodes}

    def take_seconds(self) -> tuple[float, float]:
        """Seconds of all stages together, simulating and rendering, since this was last asked.

        Those of a stage that died are not known; it is made anew when it is needed. One that had no episode may be
        waiting for a CPU still, and is not asked.
        """
        simulation_s = rendering_s = 0.0
        worked = [seat for seat in self._seats if seat.spent]
        for seat in worked:
            seat.spent = False
        for spent in [seat.stage.take_seconds.remote() for seat in worked]:
            with contextlib.suppress(RayError):
                simulated, rendered = ray.get(spent)
                simulation_s, rendering_s = simulation_s + simulated, rendering_s + rendered
        return simulation_s, rendering_s

    def close(self) -> None:
        for seat in self._seats:
            ray.kill(seat.stage)

    def _advance(self, seat: _Seat, chunks: np.ndarray | None) -> None:
        begin = list(seat.queue)[: self._slots]
        seat.answer = None
        if begin or chunks is not None:
            seat.calls.append((begin, chunks))
            seat.spent = True
            seat.answer = seat.stage.advance.options(num_returns=2).remote(begin, chunks)

    def _answer(self, seat: _Seat, ended: dict[int, Ended]) -> tuple[list[Decision], Observation]:
        """Wait for a seat: the decisions it needs now, and what they see."""
        while True:
            assert seat.answer is not None
            try:
                if seat.started is not None:
                    ray.get(seat.started, timeout=self._room_s)
                    seat.started = None
                # It answers or ends: the stage limits each step, and the making of each environment.
                (over, decisions), seen = ray.get(list(seat.answer))
                break
            except GetTimeoutError as error:
                raise RuntimeError(
                    f"an environment's process has not started for {self._room_s:g} s: each needs {self._cpus:g} CPUs "
                    "(--grpo.env_actor_cpus) beside the training processes; give the cluster more, or lower "
                    "--grpo.env_actors"
                ) from error
            except RayError as error:
                self._replace(seat, error)
        seat.answer = None
        ended.update({one.number: one for one in over})
        begun = {one.number for one in over} | {decision.number for decision in decisions}
        while seat.queue and seat.queue[0].number in begun:
            seat.queue.popleft()
        return decisions, seen

    def _replace(self, seat: _Seat, error: RayError) -> None:
        """Make a stage anew and have it do what it did."""
        seat.deaths += 1
        if seat.deaths > DEATHS or (isinstance(error, RayActorError) and error.actor_init_failed):
            raise RuntimeError(
                f"an environment's process failed {seat.deaths} times (a step longer than VLA_STEP_TIMEOUT_S="
                f"{self._step_limit_s:g}?): {root_cause(error)}"
            ) from error
        ray.kill(seat.stage)
        seat.stage, seat.started = self._make_stage()
        for begin, chunks in seat.calls:
            seat.answer = seat.stage.advance.options(num_returns=2).remote(begin, chunks)
