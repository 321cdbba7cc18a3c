"""Does the robot succeed? Many episodes of an environment at once, on Ray, and one batch of decisions after the other.

Stages (`stage.py`) simulate, on CPUs: each executes whole chunks in its episodes and then waits for decisions.
Policy servers decide for the waiting episodes of all stages. The driver sees neither images nor weights: it holds the
list (`episodes.py`), hands out episodes, and writes down how they ended. Which process plays an episode, and with which
others, leaves no trace in it; so what a dead process held is simply played again.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from vla_finetuning.environment import Timeouts
from vla_finetuning.envs.protocol import Maker, Observation
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.rollouts.episodes import Condition, Episode, line_of
from vla_finetuning.rollouts.stage import Decision, Ended, Stage, Start
from vla_finetuning.run.failures import root_cause
from vla_finetuning.terminal import tell

# An episode is played so often before what it died of is written down instead of a result.
ATTEMPTS = 3
# Policy servers that may die before the evaluation gives up.
SERVER_DEATHS = 3
# Stages that fail without an episode that ends between them, before it gives up: then it is no single episode's fault.
IN_VAIN = 20
# How often to look whether processes have started, and when to say that some wait for capacity. On a busy machine a
# process may take as long to start after it was placed.
LOOK_EVERY_S = 10.0
TELL_AFTER_S = 30.0
# How long the first processes that simulate and decide may wait for capacity.
ROOM_TIMEOUT_S = 600.0
# Two processes share a CPU: while one waits for decisions, the other simulates or decides.
STAGE_CPUS = SERVER_CPUS = 0.5
# Policy servers on CPUs: so many at most, with so many bytes of weights in all, and so many episodes for each at least.
MOST_SERVERS, SERVERS_BYTES, SERVER_EPISODES = 4, 2 * 2**30, 10
# Batches that a policy server has been given at most: the next one is there when one is done.
BATCHES_AHEAD = 2


class Player(Protocol):
    """Decides: (observation of N rows, N instructions, N keys of random numbers) to actions (N, T, A)."""

    def __call__(
        self, observation: Observation, instructions: Sequence[str], keys: Sequence[tuple[int, str, int, int]]
    ) -> np.ndarray: ...


class Source(Protocol):
    """Where a process gets a player from; can be pickled."""

    @property
    def weights_bytes(self) -> int: ...

    def load(self, threads: int) -> Player:
        """threads: for what it computes on CPUs."""
        ...


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
        threads: for what is computed on CPUs; of those of the machine at most.
    """

    def __init__(self, sources: Mapping[str, Source], batch_size: int, exact: bool, threads: int = 1) -> None:
        self._sources, self._batch_size, self._exact = sources, batch_size, exact
        self._threads = min(threads, os.cpu_count() or 1)
        self._players: dict[str, Player] = {}

    def load(self) -> None:
        """Load the policies, unless that is done. What is wrong with them is said by `act` again."""
        if not self._players:
            self._players = {name: source.load(self._threads) for name, source in self._sources.items()}

    def act(self, rows: Sequence[Row], *observations: Observation) -> np.ndarray:
        """Actions (N, T, A) of all rows, those of the first stacked observation first."""
        self.load()
        seen = concatenate(observations)
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


def concatenate(observations: Sequence[Observation]) -> Observation:
    """Stacked observations, one after the other."""
    first = observations[0]
    return {
        key: concatenate([o[key] for o in observations])
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
    makers: Mapping[str, Maker],
    options: EvalOptions,
    *,
    seed: int,
    use_gpu: bool = False,
    written: Callable[[dict[str, Any]], None],
    acted: Callable[[dict[str, Any], np.ndarray], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> None:
    """Play the episodes of a list, in whatever order they get done.

    Runs on the driver, joined to a cluster. Its processes end with it, however it ends.

    Args:
        conditions, sources: by the names that episodes and conditions have for them.
        makers: of the tasks' environments, by the names that episodes have for them.
        seed: of the noise; environments have their own.
        written: called with each episode's line (`episodes.line_of`) as it ends.
        acted: called just before with the line and every action that was executed, (steps, A), where the episode came
            to an end: what `film` shows it by.
        stopped: asked every second or so; when it says so, what is not over is let go.
    Raises:
        ValueError, OSError: a policy cannot be loaded, or cannot use what it sees.
        NoCapacityError: nothing that decides, or nothing that simulates, has started for ROOM_TIMEOUT_S.
        RuntimeError: policy servers died again and again, or stages do without end.
    """
    game = _Game(list(episodes), conditions, sources, makers, options, seed, use_gpu, written, acted, stopped)
    try:
        game.run()
    finally:
        game.close()


@dataclass(frozen=True)
class Cast:
    """How many processes play an evaluation.

    Attributes:
        servers, stages: that decide, and that simulate.
        threads: of a server, for what it computes on CPUs.
        slots: how many episodes a stage plays at once. While every server decides for a batch, another is simulated.
            More would only take memory: an environment of Meta-World that renders has 155 MB.
    """

    servers: int
    stages: int
    threads: int
    slots: int

    @classmethod
    def of(cls, options: EvalOptions, cpus: float, *, episodes: int, weights_bytes: int = 0, use_gpu: bool) -> Cast:
        """Decide the numbers of actors; what is not given fills the CPUs of a cluster.

        On CPUs several servers of few threads decide for more rows a second than one of many; on GPUs one is enough to
        begin with, and one thread. With `exact` they have one thread, too, as threads change how sums are rounded.
        """
        fit, worth = SERVERS_BYTES // max(1, weights_bytes), episodes // SERVER_EPISODES
        servers = options.policy_actors or (1 if use_gpu else max(1, min(int(cpus), MOST_SERVERS, fit, worth)))
        stages = options.env_actors or max(2, int((cpus - servers * SERVER_CPUS) / STAGE_CPUS))
        stages = max(1, min(stages, episodes))
        threads = 1 if options.exact or use_gpu else max(1, round(stages * STAGE_CPUS / servers + SERVER_CPUS))
        of_two_batches = math.ceil(2 * options.batch_size * servers / stages)
        return cls(servers, stages, threads, min(options.batch_size, of_two_batches, math.ceil(episodes / stages)))


class NoCapacityError(RuntimeError):
    """The cluster has no capacity for the processes of an evaluation; says what is missing."""


@dataclass(eq=False)
class _Seat:
    """A stage, and what the driver knows of it.

    Attributes:
        starting: its pending start; None when it has started. Until then it holds no episode.
        playing: numbers of the episodes that run in it. handed: those that it may begin in the call it is in.
        call: its results to come, (what ended and waits, what is seen); None when it is not in a call.
    """

    stage: Any
    starting: ray.ObjectRef[Any] | None
    playing: set[int] = field(default_factory=set)
    handed: list[int] = field(default_factory=list)
    call: tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]] | None = None


@dataclass(eq=False)
class _Server:
    """A policy server, its start to come (None when it has started), and how many batches it has been given."""

    actor: Any
    starting: ray.ObjectRef[Any] | None
    batches: int = 0


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
        makers: Mapping[str, Maker],
        options: EvalOptions,
        seed: int,
        use_gpu: bool,
        written: Callable[[dict[str, Any]], None],
        acted: Callable[[dict[str, Any], np.ndarray], None] | None,
        stopped: Callable[[], bool] | None,
    ) -> None:
        self._episodes, self._conditions, self._options, self._seed = episodes, conditions, options, seed
        self._step_limit_s = Timeouts.from_environment().step
        self._written, self._acted, self._stopped = written, acted, stopped
        # The chunks of episodes that are being played, where actions are recorded.
        self._chunks: dict[int, list[np.ndarray]] = {}
        self._pending = deque(range(len(episodes)))
        # Episodes of a process that died: whose fault it was is not known, so each is played again alone.
        self._suspects: deque[int] = deque()
        self._failed: dict[int, int] = {}
        self._decided = [0] * len(episodes)
        self._cast = Cast.of(
            options,
            ray.cluster_resources().get("CPU", 1.0),
            episodes=len(episodes),
            weights_bytes=sum(source.weights_bytes for source in sources.values()),
            use_gpu=use_gpu,
        )
        self._makers = {task: makers[task] for task in dict.fromkeys(episode.task for episode in episodes)}
        self._sources, self._use_gpu = dict(sources), use_gpu
        self._server_deaths = self._in_vain = 0
        self._servers = [self._make_server() for _ in range(self._cast.servers)]
        # What they decide, by its result.
        self._serving: dict[ray.ObjectRef[Any], tuple[_Server, list[_Request]]] = {}
        self._seats = [_Seat(*self._make_stage()) for _ in range(self._cast.stages)]
        self._requests: deque[_Request] = deque()

    def _make_stage(self) -> tuple[Any, ray.ObjectRef[Any]]:
        """A stage, and its start to come."""
        made: Any = ray.remote(Stage).options(num_cpus=STAGE_CPUS)
        stage = made.remote(self._makers, self._cast.slots, self._step_limit_s)
        return stage, stage.__ray_ready__.remote()

    def _make_server(self) -> _Server:
        made: Any = ray.remote(PolicyServer).options(num_cpus=SERVER_CPUS, num_gpus=1 if self._use_gpu else 0)
        server = made.remote(self._sources, self._options.batch_size, self._options.exact, self._cast.threads)
        started = server.__ray_ready__.remote()
        server.load.remote()  # while the stages begin
        return _Server(server, started)

    def run(self) -> None:
        waits = _Waits(ROOM_TIMEOUT_S, 1 if self._use_gpu else 0)
        while True:
            for seat in self._seats:
                if seat.starting is None and seat.call is None and not seat.playing:
                    self._advance(seat)
            self._serve()
            busy = {seat.call[0]: seat for seat in self._seats if seat.call is not None}
            # Only of use while there is something left to begin.
            starts = {seat.starting: seat for seat in self._seats if seat.starting is not None}
            if not (busy or self._serving or self._requests or self._pending or self._suspects):
                return
            if self._stopped is not None and self._stopped():
                return
            decides = any(server.starting is None for server in self._servers)
            stuck = not decides or not (busy or any(seat.starting is None for seat in self._seats))
            waits.look(stuck, decides)
            starting = {server.starting: server for server in self._servers if server.starting is not None}
            timeout = self._options.wait_ms / 1000 if self._requests and self._next_server(0) else LOOK_EVERY_S
            timeout = timeout if self._stopped is None else min(timeout, 1.0)
            for ref in ray.wait([*busy, *self._serving, *starts, *starting], num_returns=1, timeout=timeout)[0]:
                if ref in busy:
                    self._take_stage(busy[ref])
                elif ref in starts:
                    self._take_start(starts[ref])
                elif ref in starting:
                    starting[ref].starting = None  # one that died says so when it is to decide
                else:
                    self._take_chunks(ref)

    def close(self) -> None:
        for actor in (*(server.actor for server in self._servers), *(seat.stage for seat in self._seats)):
            ray.kill(actor)

    # -- stages --

    def _take_start(self, seat: _Seat) -> None:
        started, seat.starting = seat.starting, None
        assert started is not None
        try:
            ray.get(started)
        except RayError as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise  # no other would fare better
            self._replace_stage(seat, error)

    def _advance(self, seat: _Seat, chunks: ray.ObjectRef[Any] | None = None, first: int = 0) -> None:
        seat.handed = self._hand_out(seat)
        if not seat.handed and not seat.playing:
            return
        begin = [self._start(number) for number in seat.handed]
        seat.call = seat.stage.advance.options(num_returns=2).remote(begin, chunks, first)

    def _start(self, number: int) -> Start:
        episode = self._episodes[number]
        return Start(number, episode.task, episode.seed, episode.episode)

    def _hand_out(self, seat: _Seat) -> list[int]:
        """Episodes that a stage may begin."""
        if any(number in self._failed for number in seat.playing):
            return []
        if self._pending:
            return [self._pending.popleft() for _ in range(min(self._cast.slots, len(self._pending)))]
        return [self._suspects.popleft()] if self._suspects and not seat.playing else []

    def _take_stage(self, seat: _Seat) -> None:
        assert seat.call is not None
        (outcome, seen), seat.call = seat.call, None
        try:
            ended, decisions = ray.get(outcome)
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
                f"{_why(error, self._step_limit_s)}"
            ) from error
        lost, seat.playing, seat.handed = sorted({*seat.playing, *seat.handed}), set(), []
        for number in lost:
            self._failed[number] = self._failed.get(number, 0) + 1
            if self._failed[number] < ATTEMPTS:
                self._suspects.append(number)
            else:
                self._write(number, None, _why(error, self._step_limit_s))
        seat.stage, seat.starting = self._make_stage()

    def _back(self, number: int) -> None:
        (self._suspects if number in self._failed else self._pending).appendleft(number)

    def _write(self, number: int, ended: Ended | None, error: str | None) -> None:
        line = line_of(self._episodes[number], ended, error, self._decided[number])
        chunks = self._chunks.pop(number, None)
        if self._acted is not None and ended is not None and chunks:
            self._acted(line, np.concatenate(chunks)[: ended.steps])
        self._written(line)

    # -- policies --

    def _next_server(self, rows: int) -> _Server | None:
        """The server for so many waiting rows: a free one; for a whole batch, also the next that becomes free."""
        ahead = BATCHES_AHEAD if rows >= self._options.batch_size else 1
        there = [server for server in self._servers if server.starting is None and server.batches < ahead]
        return min(there, key=lambda server: server.batches, default=None)

    def _serve(self) -> None:
        """Give waiting rows to policy servers, unless more are about to come."""
        while self._requests:
            waiting = sum(len(request.decisions) for request in self._requests)
            server = self._next_server(waiting)
            oldest_s = time.monotonic() - self._requests[0].since
            simulating = any(seat.call is not None for seat in self._seats)
            company = waiting < self._options.batch_size and simulating and oldest_s < self._options.wait_ms / 1000
            if server is None or company:
                return
            batch: list[_Request] = []
            while self._requests and (
                not batch or sum(len(r.decisions) for r in (*batch, self._requests[0])) <= self._options.batch_size
            ):
                batch.append(self._requests.popleft())
            rows = [self._row(decision) for request in batch for decision in request.decisions]
            server.batches += 1
            self._serving[server.actor.act.remote(rows, *(request.seen for request in batch))] = server, batch

    def _row(self, decision: Decision) -> Row:
        episode = self._episodes[decision.number]
        condition = self._conditions[episode.condition]
        self._decided[decision.number] = decision.decision + 1
        instruction = condition.instructions.get(decision.instruction, decision.instruction)
        key = (self._seed, episode.task, episode.episode, decision.decision)
        return Row(condition.policy, instruction, condition.blindfolded, key)

    def _take_chunks(self, ref: ray.ObjectRef[Any]) -> None:
        server, batch = self._serving.pop(ref)
        server.batches -= 1
        try:
            chunks = ray.get(ref)  # a few numbers a row; what went wrong is raised here
        except RayActorError as error:
            self._requests.extendleft(reversed(batch))
            if server in self._servers:  # of its batches the first to say so
                self._server_deaths += 1
                if self._server_deaths > SERVER_DEATHS:
                    times = f"{self._server_deaths} times"
                    raise RuntimeError(f"policy servers died {times}: {root_cause(error)}") from error
                ray.kill(server.actor)
                self._servers[self._servers.index(server)] = self._make_server()
            return
        first = 0
        for request in batch:
            self._advance(request.seat, ref, first)
            if self._acted is not None:
                self._note(request, chunks[first:])
            first += len(request.decisions)

    def _note(self, request: _Request, chunks: np.ndarray) -> None:
        """Keep what is about to be executed. An episode that is played again begins again here too."""
        for decision, chunk in zip(request.decisions, chunks, strict=False):
            noted = self._chunks.setdefault(decision.number, [])
            noted[decision.decision :] = [np.array(chunk)]  # not a view into the object store, which it would keep


class _Waits:
    """Report what the cluster lacks while processes wait for capacity, and end the wait after a limit."""

    def __init__(self, limit_s: float, gpus: int) -> None:
        self._limit_s, self._gpus = limit_s, gpus
        self._since, self._told = time.monotonic(), False

    def look(self, stuck: bool, decides: bool) -> None:
        """Raises NoCapacityError when it has been stuck for too long. `decides`: a policy has capacity."""
        now = time.monotonic()
        if not stuck:
            self._since = now
            return
        lacks = what_lacks(STAGE_CPUS if decides else SERVER_CPUS, 0 if decides else self._gpus)
        if now - self._since > self._limit_s:
            raise NoCapacityError(
                f"no process that {'simulates' if decides else 'decides'} has started for {self._limit_s:g} s: "
                f"{lacks or 'the cluster has capacity for it, but it did not start'}"
            )
        if lacks and not self._told and now - self._since > TELL_AFTER_S:
            # Ray does not tell a process that waits for CPUs from one that has them and imports its modules.
            why = f"{lacks}, unless they are held by processes of this evaluation that a busy machine is slow to start"
            tell(f"waiting      for capacity, at most {self._limit_s:g} s: {why}", file=sys.stderr)
            self._told = True


def what_lacks(cpus: float, gpus: int) -> str | None:
    """Return what a process that needs so much waits for, in words; None if the cluster has it free."""
    needs = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    free, there = ray.available_resources(), ray.cluster_resources()
    lacking = [
        f"needs {n:g} {kind}{'s' * (n != 1)}, {free.get(kind, 0):g} of the cluster's {there.get(kind, 0):g} free"
        for kind, n in needs.items()
        if free.get(kind, 0) < n
    ]
    return "; ".join(lacking) + "; end what holds them, or add nodes" if lacking else None


def _why(error: RayError, step_limit_s: float) -> str:
    if isinstance(error, RayTaskError):
        return root_cause(error)
    what = str(error).strip().splitlines()[0]
    return f"its process died, or a step took more than {step_limit_s:g} s (VLA_STEP_TIMEOUT_S): {what}"
