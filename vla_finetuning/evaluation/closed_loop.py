"""Does the robot succeed? Many episodes of an environment at once, on Ray, and one batch of decisions after the other.

Stages (`envs/stage.py`) simulate, on CPUs: each executes whole chunks in its episodes and then waits for decisions.
Policy servers decide for whoever waits, from whatever stage. The driver sees neither images nor weights: it holds the
list (`episodes.py`), hands out episodes, and writes down how they ended. Which process plays an episode, and with which
others, leaves no trace in it; so what a dead process held is simply played again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from vla_finetuning.config import EvalOptions
from vla_finetuning.envs.stage import Decision, Ended, Observation, Stage
from vla_finetuning.evaluation.episodes import Condition, Episode, line_of
from vla_finetuning.run.failures import root_cause

# An episode is played so often before what it died of is written down instead of a result.
ATTEMPTS = 3
# Policy servers that may die before the evaluation gives up.
SERVER_DEATHS = 3
# Stages that fail without an episode that ends between them, before it gives up: then it is no single episode's fault.
IN_VAIN = 20
# Two stages share a CPU: while one waits for decisions, the other simulates.
STAGE_CPUS = 0.5


class Player(Protocol):
    """Decides: (observation of N rows, N instructions, N keys of random numbers) to actions (N, T, A)."""

    def __call__(
        self, observation: Observation, instructions: Sequence[str], keys: Sequence[tuple[int, str, int, int]]
    ) -> np.ndarray: ...


class Source(Protocol):
    """Where a process gets a player from; can be pickled."""

    def load(self) -> Player: ...


@dataclass(frozen=True)
class Row:
    """A decision to be made: by which policy, on what."""

    policy: str
    instruction: str
    blindfolded: bool
    key: tuple[int, str, int, int]


class PolicyServer:
    """The policies of an evaluation, in one process. Made into an actor.

    Args:
        sources: by name, as conditions name them.
        batch_size: rows that a policy sees at most at once.
        exact: always so many; where fewer wait, the last row is repeated. What a batch computes for a row then does not
            depend on how many others there are.
    """

    def __init__(self, sources: Mapping[str, Source], batch_size: int, exact: bool) -> None:
        self._sources, self._batch_size, self._exact = sources, batch_size, exact
        self._players: dict[str, Player] = {}

    def load(self) -> None:
        """Load the policies, unless that is done. What is wrong with them is said by `act` again."""
        if not self._players:
            self._players = {name: source.load() for name, source in self._sources.items()}

    def act(self, rows: Sequence[Row], *observations: Observation) -> np.ndarray:
        """Actions (N, T, A) of all rows, those of the first stacked observation first."""
        self.load()
        seen = _concatenate(observations)
        seen = _blacked_out(seen, [i for i, row in enumerate(rows) if row.blindfolded])
        chunks: dict[int, np.ndarray] = {}
        for policy in dict.fromkeys(row.policy for row in rows):
            own = [i for i, row in enumerate(rows) if row.policy == policy]
            for start in range(0, len(own), self._batch_size):
                batch = own[start : start + self._batch_size]
                padded = batch + [batch[-1]] * (self._batch_size - len(batch)) if self._exact else batch
                actions = self._players[policy](
                    _rows(seen, padded), [rows[i].instruction for i in padded], [rows[i].key for i in padded]
                )
                chunks |= dict(zip(batch, actions, strict=False))
        return np.stack([chunks[i] for i in range(len(rows))])


def _concatenate(observations: Sequence[Observation]) -> Observation:
    first = observations[0]
    return {
        key: _concatenate([o[key] for o in observations])
        if isinstance(value, Mapping)
        else np.concatenate([o[key] for o in observations])
        for key, value in first.items()
    }


def _rows(observation: Mapping[str, Any], indices: Sequence[int]) -> Observation:
    return {k: _rows(v, indices) if isinstance(v, Mapping) else v[list(indices)] for k, v in observation.items()}


def _blacked_out(observation: Observation, indices: Sequence[int]) -> Observation:
    """With black images in some rows."""
    if not indices:
        return observation
    pixels = observation["pixels"]
    images = dict(pixels) if isinstance(pixels, Mapping) else {"": pixels}
    for name, array in images.items():
        images[name] = array.copy()
        images[name][list(indices)] = 0
    return {**observation, "pixels": images if isinstance(pixels, Mapping) else images[""]}


# ---- the driver -----------------------------------------------------------------------------------------------------


def play(
    episodes: Sequence[Episode],
    conditions: Mapping[str, Condition],
    sources: Mapping[str, Source],
    gym: tuple[str, Mapping[str, Any]],
    options: EvalOptions,
    *,
    seed: int,
    use_gpu: bool = False,
    written: Callable[[dict[str, Any]], None],
) -> None:
    """Play the episodes of a list, in whatever order they get done.

    Runs on the driver, joined to a cluster. Its processes end with it, however it ends.

    Args:
        conditions, sources: by the names that episodes and conditions have for them.
        gym: of the environment, for `gymnasium.make`: its id, and options.
        seed: of the noise; environments have their own.
        written: called with each episode's line (`episodes.line_of`) as it ends.
    Raises:
        ValueError, OSError: a policy cannot be loaded, or cannot use what it sees.
        RuntimeError: policy servers died again and again, or stages do without end.
    """
    game = _Game(list(episodes), conditions, sources, gym, options, seed, use_gpu, written)
    try:
        game.run()
    finally:
        game.close()


def stage_count(options: EvalOptions, cpus: float) -> int:
    """How many stages there are room for beside a policy server, two to a CPU; or as many as asked for."""
    return options.env_actors or max(2, int((cpus - 1) / STAGE_CPUS))


@dataclass(eq=False)
class _Seat:
    """A stage, and what the driver knows of it.

    Attributes:
        playing: numbers of the episodes that run in it. handed: those that it may begin in the call it is in.
        call: its results to come, (what ended and waits, what is seen); None when it is not in a call.
    """

    stage: Any
    playing: set[int] = field(default_factory=set)
    handed: list[int] = field(default_factory=list)
    call: tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]] | None = None


@dataclass(frozen=True, eq=False)
class _Request:
    """A stage's decisions that wait for a policy."""

    seat: _Seat
    decisions: list[Decision]
    seen: ray.ObjectRef[Any]
    since: float


class _Game:
    """One `play`."""

    def __init__(
        self,
        episodes: list[Episode],
        conditions: Mapping[str, Condition],
        sources: Mapping[str, Source],
        gym: tuple[str, Mapping[str, Any]],
        options: EvalOptions,
        seed: int,
        use_gpu: bool,
        written: Callable[[dict[str, Any]], None],
    ) -> None:
        self._episodes, self._conditions, self._options, self._seed = episodes, conditions, options, seed
        self._written = written
        self._pending = deque(range(len(episodes)))
        # Episodes of a process that died: whose fault it was is not known, so each is played again alone.
        self._suspects: deque[int] = deque()
        self._failed: dict[int, int] = {}
        self._decided = [0] * len(episodes)
        stages = stage_count(options, ray.cluster_resources().get("CPU", 1.0))
        stages = max(1, min(stages, len(episodes)))
        self._slots = min(options.batch_size, math.ceil(len(episodes) / stages))
        self._gym = gym
        self._sources, self._use_gpu = dict(sources), use_gpu
        self._server_deaths = self._in_vain = 0
        self._free_servers = [self._make_server() for _ in range(options.policy_actors)]
        # What each is deciding, by the result to come.
        self._serving: dict[ray.ObjectRef[Any], tuple[Any, list[_Request]]] = {}
        self._seats = [_Seat(self._make_stage()) for _ in range(stages)]
        self._requests: deque[_Request] = deque()

    def _make_stage(self) -> Any:
        made: Any = ray.remote(Stage).options(num_cpus=STAGE_CPUS)
        return made.remote(self._gym[0], dict(self._gym[1]), self._slots, self._options.step_limit_s)

    def _make_server(self) -> Any:
        made: Any = ray.remote(PolicyServer).options(num_cpus=1, num_gpus=1 if self._use_gpu else 0)
        server = made.remote(self._sources, self._options.batch_size, self._options.exact)
        server.load.remote()  # while the stages begin
        return server

    def run(self) -> None:
        while True:
            for seat in self._seats:
                if seat.call is None and not seat.playing:
                    self._advance(seat)
            self._serve()
            busy = {seat.call[0]: seat for seat in self._seats if seat.call is not None}
            calls = [*busy, *self._serving]
            if not calls:
                return
            timeout = self._options.wait_ms / 1000 if self._requests and self._free_servers else None
            for ref in ray.wait(calls, num_returns=1, timeout=timeout)[0]:
                if ref in busy:
                    self._take_stage(busy[ref])
                else:
                    self._take_chunks(ref)

    def close(self) -> None:
        serving = [server for server, _ in self._serving.values()]
        for actor in (*serving, *self._free_servers, *(seat.stage for seat in self._seats)):
            ray.kill(actor)

    # -- stages --

    def _advance(self, seat: _Seat, chunks: ray.ObjectRef[Any] | None = None, first: int = 0) -> None:
        seat.handed = self._hand_out(seat)
        if not seat.handed and not seat.playing:
            return
        begin = [(number, self._episodes[number].seed) for number in seat.handed]
        seat.call = seat.stage.advance.options(num_returns=2).remote(begin, chunks, first)

    def _hand_out(self, seat: _Seat) -> list[int]:
        """Episodes that a stage may begin."""
        if any(number in self._failed for number in seat.playing):
            return []
        if self._pending:
            return [self._pending.popleft() for _ in range(min(self._slots, len(self._pending)))]
        return [self._suspects.popleft()] if self._suspects and not seat.playing else []

    def _take_stage(self, seat: _Seat) -> None:
        assert seat.call is not None
        (told, seen), seat.call = seat.call, None
        try:
            ended, decisions = ray.get(told)
            self._in_vain = 0 if ended else self._in_vain
        except RayError as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise  # no other would fare better
            self._replace_stage(seat, error)
            return
        for one in ended:
            self._write(one.number, one, None)
        seat.playing = {decision.number for decision in decisions}
        over = {one.number for one in ended}
        for number in reversed(seat.handed):
            if number not in seat.playing and number not in over:
                self._back(number)
        seat.handed = []
        if decisions:
            self._requests.append(_Request(seat, decisions, seen, time.monotonic()))

    def _replace_stage(self, seat: _Seat, error: RayError) -> None:
        ray.kill(seat.stage)
        self._in_vain += 1
        if self._in_vain > IN_VAIN:
            raise RuntimeError(
                f"{self._in_vain} processes that simulate failed, and no episode ended meanwhile: "
                f"{_why(error, self._options.step_limit_s)}"
            ) from error
        lost, seat.playing, seat.handed = sorted({*seat.playing, *seat.handed}), set(), []
        for number in lost:
            self._failed[number] = self._failed.get(number, 0) + 1
            if self._failed[number] < ATTEMPTS:
                self._suspects.append(number)
            else:
                self._write(number, None, _why(error, self._options.step_limit_s))
        seat.stage = self._make_stage()

    def _back(self, number: int) -> None:
        (self._suspects if number in self._failed else self._pending).appendleft(number)

    def _write(self, number: int, ended: Ended | None, error: str | None) -> None:
        self._written(line_of(self._episodes[number], ended, error, self._decided[number]))

    # -- policies --

    def _serve(self) -> None:
        """Give whoever waits to a policy server that is free, unless more are about to come."""
        waiting = sum(len(request.decisions) for request in self._requests)
        if not self._free_servers or not waiting:
            return
        oldest_s = time.monotonic() - self._requests[0].since
        simulating = any(seat.call is not None for seat in self._seats)
        if waiting < self._options.batch_size and simulating and oldest_s < self._options.wait_ms / 1000:
            return
        batch: list[_Request] = []
        while self._requests and (
            not batch or sum(len(r.decisions) for r in (*batch, self._requests[0])) <= self._options.batch_size
        ):
            batch.append(self._requests.popleft())
        rows = [self._row(decision) for request in batch for decision in request.decisions]
        server = self._free_servers.pop()
        self._serving[server.act.remote(rows, *(request.seen for request in batch))] = server, batch

    def _row(self, decision: Decision) -> Row:
        episode = self._episodes[decision.number]
        condition = self._conditions[episode.condition]
        self._decided[decision.number] = decision.decision + 1
        told = condition.told.get(decision.instruction, decision.instruction)
        key = (self._seed, episode.task, episode.episode, decision.decision)
        return Row(condition.policy, told, condition.blindfolded, key)

    def _take_chunks(self, ref: ray.ObjectRef[Any]) -> None:
        server, batch = self._serving.pop(ref)
        try:
            ray.get(ref)  # a few numbers a row; what went wrong is raised here
        except RayActorError as error:
            self._server_deaths += 1
            if self._server_deaths > SERVER_DEATHS:
                raise RuntimeError(f"policy servers died {self._server_deaths} times: {root_cause(error)}") from error
            ray.kill(server)
            self._free_servers.append(self._make_server())
            self._requests.extendleft(reversed(batch))
            return
        self._free_servers.append(server)
        first = 0
        for request in batch:
            self._advance(request.seat, ref, first)
            first += len(request.decisions)


def _why(error: RayError, step_limit_s: float) -> str:
    if isinstance(error, RayTaskError):
        return root_cause(error)
    return f"its process died, or a step took more than {step_limit_s:g} s: {str(error).strip().splitlines()[0]}"
