"""Does the robot succeed? Many episodes of an environment at once, decided for by servers of the policy.

The driver sees neither images nor weights: it has the list (`episodes.py`), hands out episodes, and writes down how
they ended. Which process plays an episode, and with which others, leaves no trace in it.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError

from vla_finetuning.environment import Timeouts
from vla_finetuning.envs.protocol import Maker, Observation, concatenate, map_arrays, select_rows
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.rollouts.episodes import Condition, Episode, Key, LeftOver, Line, Playing
from vla_finetuning.rollouts.scheduler import Policy, Scheduler, Seat
from vla_finetuning.rollouts.stage import Decision
from vla_finetuning.run.failures import root_cause

if TYPE_CHECKING:
    from vla_finetuning.rollouts.player import Player, PolicySource

# Policy servers that may die before the evaluation gives up.
SERVER_DEATHS = 3
# Two processes share a CPU: while one waits for decisions, the other simulates or decides.
STAGE_CPUS = SERVER_CPUS = 0.5
# Policy servers on CPUs: at most so many, and bytes of weights in all; at least so many episodes for each.
MOST_SERVERS, SERVERS_BYTES, SERVER_EPISODES = 4, 2 * 2**30, 10


@dataclass(frozen=True)
class Row:
    """A decision to be made; `delay` as in `Condition`, `left` of the episode's last chunk."""

    policy: str
    instruction: str
    blindfolded: bool
    key: Key
    delay: int | None = None
    left: LeftOver | None = None


class PolicyServer:
    """The policies of an evaluation, in one process. Made into an actor.

    Args:
        sources: by the names that conditions have for them.
        batch_size: rows that a policy sees at most at once; with `exact` always, the last one being repeated, so that
            what is computed for a row does not depend on how many others there are.
        threads: for what is computed on CPUs.
    """

    def __init__(self, sources: Mapping[str, PolicySource], batch_size: int, exact: bool, threads: int = 1) -> None:
        self._sources, self._batch_size, self._exact = sources, batch_size, exact
        self._threads = min(threads, os.cpu_count() or 1)
        self._players: dict[str, Player] = {}

    def load(self) -> None:
        """Load the policies, unless that is done. `act` raises again what is wrong with them."""
        if not self._players:
            self._players = {name: source.load(self._threads) for name, source in self._sources.items()}

    def act(
        self, rows: Sequence[Row], *observations: Observation
    ) -> tuple[list[np.ndarray], list[LeftOver | None], list[str | None]]:
        """Return actions (T, A) of all rows, those of the first observation first, what is left of late chunks, and the
        texts that policies wrote.
        """
        self.load()
        seen = _blacked_out(concatenate(observations), rows)
        chunks: dict[int, np.ndarray] = {}
        left: dict[int, LeftOver] = {}
        texts: dict[int, str | None] = {}
        # A network is called for rows of one delay that all have a chunk before them, or none.
        groups: dict[tuple[str, int | None, bool], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((row.policy, row.delay, row.left is None), []).append(i)
        for (policy, delay, is_first), numbers in groups.items():
            for batch in itertools.batched(numbers, self._batch_size):
                padded = [*batch, *[batch[-1]] * (self._batch_size - len(batch))] if self._exact else batch
                shown = select_rows(seen, padded), [rows[i].instruction for i in padded], [rows[i].key for i in padded]
                player = self._players[policy]
                if delay is None:
                    chunks |= dict(zip(batch, player(*shown), strict=False))
                else:
                    before = None if is_first else [last for i in padded if (last := rows[i].left) is not None]
                    executed, remaining = player.act_late(*shown, delay, before)
                    chunks |= dict(zip(batch, executed, strict=False))
                    left |= dict(zip(batch, remaining, strict=False))
                texts |= dict(zip(batch, player.written, strict=False))
        order = range(len(rows))
        return [chunks[i] for i in order], [left.get(i) for i in order], [texts.get(i) for i in order]


def _blacked_out(observation: Observation, rows: Sequence[Row]) -> Observation:
    """Return an observation with black images for the blindfolded."""
    sees = np.array([not row.blindfolded for row in rows])
    if sees.all():
        return observation

    def black(images: np.ndarray) -> np.ndarray:
        return images * sees.reshape(-1, 1, 1, 1)

    return {**observation, **map_arrays(black, {"pixels": observation["pixels"]})}


class PolicyServers(Policy):
    """Policy servers, each of which decides for a batch at a time; one that dies is replaced."""

    def __init__(
        self,
        conditions: Mapping[str, Condition],
        sources: Mapping[str, PolicySource],
        options: EvalOptions,
        cast: Cast,
        *,
        seed: int,
        use_gpu: bool,
    ) -> None:
        super().__init__()
        self._conditions, self._options, self._seed, self._gpus = conditions, options, seed, int(use_gpu)
        self._arguments = dict(sources), options.batch_size, options.exact, cast.threads
        self._free, self._deaths = list[Any](), 0
        self._answer_limit_s = Timeouts.from_environment().worker
        # By call: the server, and when it was called.
        self._busy: dict[ray.ObjectRef[Any], tuple[Any, float]] = {}
        for _ in range(cast.servers):
            self._make_server()

    def _make_server(self) -> None:
        server_class: Any = ray.remote(PolicyServer).options(num_cpus=SERVER_CPUS, num_gpus=self._gpus)
        server = server_class.remote(*self._arguments)
        self.lacks = SERVER_CPUS, self._gpus  # until a server answers
        self._await(server, server.__ray_ready__.remote(), [])
        server.load.remote()  # while the stages begin

    def _await(self, server: Any, ref: ray.ObjectRef[Any], batch: list[Seat]) -> None:
        self._busy[ref], self.pending[ref] = (server, time.monotonic()), batch

    def _replace(self, ref: ray.ObjectRef[Any], why: str) -> None:
        """Replace the server of a call, and let its seats wait again, before others."""
        (server, _), batch = self._busy.pop(ref), self.pending.pop(ref)
        ray.kill(server)
        self._deaths += 1
        if self._deaths > SERVER_DEATHS:
            raise RuntimeError(f"policy servers died {self._deaths} times: {why}")
        self._make_server()
        for seat in batch:
            seat.since = 0.0

    def close(self) -> None:
        for server in (*self._free, *(server for server, _ in self._busy.values())):
            ray.kill(server)

    def decide(self, seats: Sequence[Seat]) -> Iterator[tuple[list[Seat], Sequence[np.ndarray] | RayError]]:
        for ref in ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0)[0] if self.pending else ():
            lost: ObjectLostError | None = None
            try:
                decided = ray.get(ref)  # a few numbers a row; what went wrong is raised here
            except (RayActorError, OutOfMemoryError) as error:
                self._replace(ref, root_cause(error))
                continue
            except ObjectLostError as error:  # with the node of a stage whose episodes waited
                lost = error
            (server, _), batch = self._busy.pop(ref), self.pending.pop(ref)
            self._free.append(server)
            if lost is not None:
                yield batch, lost
                continue
            self.lacks = None
            if batch:
                chunks, left, texts = decided
                waited = (playing for seat in batch for playing in seat.playing)
                for playing, remaining, text in zip(waited, left, texts, strict=True):
                    playing.left = remaining
                    playing.texts += [] if text is None else [text]
                yield batch, chunks
        for ref, (_, since) in list(self._busy.items()):
            if self.pending[ref] and time.monotonic() - since > self._answer_limit_s:
                why = f"no answer for {self._answer_limit_s:g} s (VLA_WORKER_TIMEOUT_S); lower --eval.batch_size"
                self._replace(ref, why)
        waiting = sorted((seat for seat in seats if seat.since is not None), key=lambda seat: seat.since or 0.0)
        while self._free and waiting:
            batch, rows = list[Seat](), list[Row]()
            while waiting and (not batch or len(rows) + len(waiting[0].playing) <= self._options.batch_size):
                batch.append(seat := waiting.pop(0))
                seat.since = None
                rows += map(self._row, seat.playing, seat.decisions)
            server = self._free.pop(0)
            self._await(server, server.act.remote(rows, *(seat.seen for seat in batch)), batch)

    def _row(self, playing: Playing, decision: Decision) -> Row:
        episode, condition = playing.episode, self._conditions[playing.episode.condition]
        instruction = condition.instructions.get(decision.instruction, decision.instruction)
        key = (self._seed, episode.task, episode.episode, decision.decision)
        return Row(condition.policy, instruction, condition.blindfolded, key, condition.delay, playing.left)


@dataclass(frozen=True)
class Cast:
    """How many processes play an evaluation.

    Attributes:
        servers, stages: that decide, and that simulate. threads: of a server, for what it computes on CPUs.
        slots: how many episodes a stage plays at once: while every server decides for a batch, another is simulated.
            More would only take memory, 155 MB for an environment of Meta-World.
    """

    servers: int
    stages: int
    threads: int
    slots: int

    @classmethod
    def of(cls, options: EvalOptions, cpus: float, *, episodes: int, weights_bytes: int = 0, use_gpu: bool) -> Cast:
        """Decide the numbers of actors; what is not given fills the CPUs of a cluster.

        On CPUs several servers of few threads decide for more rows a second than one of many; on GPUs one is enough.
        With `exact` they have one thread, as threads change how sums are rounded.
        """
        fit, worth = SERVERS_BYTES // max(1, weights_bytes), episodes // SERVER_EPISODES
        servers = options.policy_actors or (1 if use_gpu else max(1, min(int(cpus), MOST_SERVERS, fit, worth)))
        stages = options.env_actors or max(2, int((cpus - servers * SERVER_CPUS) / STAGE_CPUS))
        stages = max(1, min(stages, episodes))
        threads = 1 if options.exact or use_gpu else max(1, round(stages * STAGE_CPUS / servers + SERVER_CPUS))
        two_batches = math.ceil(2 * options.batch_size * servers / stages)
        return cls(servers, stages, threads, min(options.batch_size, two_batches, math.ceil(episodes / stages)))


def play(
    episodes: Sequence[Episode],
    conditions: Mapping[str, Condition],
    sources: Mapping[str, PolicySource],
    makers: Mapping[str, Maker],
    options: EvalOptions,
    *,
    seed: int,
    use_gpu: bool = False,
    on_end: Callable[[Line, np.ndarray | None], None],
    stopped: Callable[[], bool] | None = None,
) -> None:
    """Play the episodes of a list, in whatever order they get done.

    Runs on the driver, joined to a cluster. Its processes end with it, however it ends.

    Args:
        conditions, sources, makers: by the names that episodes and conditions have for them.
        seed: of the noise; environments have their own.
        on_end: called as each ends, with its line (`episodes.line_of`) and all actions that it executed, (steps, A),
            None after an error.
        stopped: asked every second or so; when it says so, what is not over is let go.
    Raises:
        ValueError, OSError: a policy cannot be loaded, or cannot use what it sees.
        RuntimeError: as `Scheduler.play`; or policy servers died again and again.
    """
    cpus, weights_bytes = ray.cluster_resources().get("CPU", 1.0), sum(s.weights_bytes for s in sources.values())
    cast = Cast.of(options, cpus, episodes=len(episodes), weights_bytes=weights_bytes, use_gpu=use_gpu)
    used = {task: makers[task] for task in dict.fromkeys(episode.task for episode in episodes)}
    policy = PolicyServers(conditions, sources, options, cast, seed=seed, use_gpu=use_gpu)
    scheduler = Scheduler(
        used, stages=cast.stages, slots=cast.slots, cpus=STAGE_CPUS, step_limit_s=Timeouts.from_environment().step
    )
    try:
        scheduler.play(dict(enumerate(episodes)), policy, lambda _, *ended: on_end(*ended), stopped)
    finally:
        scheduler.close()
        policy.close()
