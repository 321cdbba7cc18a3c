"""Play many episodes of an environment at once, with policy servers that decide for batches of them.

The driver holds neither images nor weights: it distributes the list of episodes and collects their lines. An episode's
result does not depend on the process that plays it or on the episodes beside it. `play` is the entry point.
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
from vla_finetuning.rollouts.episodes import Acted, Condition, Episode, Key, LeftOver, Line, Playing, episode_key
from vla_finetuning.rollouts.scheduler import Policy, Scheduler, Seat
from vla_finetuning.rollouts.stage import Decision
from vla_finetuning.run.failures import root_cause

if TYPE_CHECKING:
    from vla_finetuning.rollouts.player import Player, PolicySource

# Deaths of policy servers that an evaluation survives.
MAX_SERVER_DEATHS = 3
# Two processes share a CPU: one waits for decisions while the other simulates or decides.
STAGE_CPUS = SERVER_CPUS = 0.5
# Additional seconds for a server's first answer, which waits until its policies are loaded.
LOAD_LIMIT_S = 900.0
# Limits of policy servers on CPUs: their number, the bytes of all weights, and the fewest episodes for each.
MAX_SERVERS, MAX_SERVERS_BYTES, MIN_SERVER_EPISODES = 4, 2 * 2**30, 10


@dataclass(frozen=True)
class Row:
    """A pending decision; `delay` as in `Condition`, `left` as in `Playing`."""

    policy: str
    instruction: str
    blindfolded: bool
    key: Key
    delay: int = 0
    rest: LeftOver | None = None


def load_players(sources: Mapping[str, PolicySource], threads: int) -> dict[str, Player]:
    """Load policies; all share with the first one the memory of equal weights."""
    players: dict[str, Player] = {}
    for name, source in sources.items():
        players[name] = source.load(threads, next(iter(players.values()), None))
    return players


class PolicyServer:
    """A Ray actor with the policies of an evaluation, by the names in `Condition.policy`.

    With `exact`, each batch is filled up to `batch_size` by repeating its last row, so that rounding does not depend on
    how many rows there are.
    """

    def __init__(self, sources: Mapping[str, PolicySource], batch_size: int, exact: bool, threads: int = 1) -> None:
        self._sources, self._batch_size, self._exact = sources, batch_size, exact
        self._threads = min(threads, os.cpu_count() or 1)
        self._players: dict[str, Player] = {}

    def load(self) -> None:
        """Load the policies, unless they are loaded. `act` raises their errors again."""
        if not self._players:
            self._players = load_players(self._sources, self._threads)

    def act(self, rows: Sequence[Row], *observations: Observation) -> list[Acted]:
        """Return what the policies do at each row, in their order."""
        self.load()
        seen = _blackened(concatenate(observations), rows)
        decided: dict[int, Acted] = {}
        # Rows of a forward share the delay, and all or none of them have a last chunk.
        groups: dict[tuple[str, int, bool], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((row.policy, row.delay, row.rest is None), []).append(i)
        for (policy, delay, _), numbers in groups.items():
            player = self._players[policy]
            is_filled = self._exact and not player.predicts_rows_alone
            for batch in itertools.batched(numbers, self._batch_size):
                padded = [*batch, *[batch[-1]] * (self._batch_size - len(batch))] if is_filled else batch
                shown = select_rows(seen, padded), [rows[i].instruction for i in padded], [rows[i].key for i in padded]
                acted = player.act(*shown, delay, [rows[i].rest for i in padded])
                decided |= dict(zip(batch, acted, strict=False))
        return [decided[i] for i in range(len(rows))]


def _blackened(observation: Observation, rows: Sequence[Row]) -> Observation:
    """Return an observation with black images for blindfolded rows."""
    sees = np.array([not row.blindfolded for row in rows])
    if sees.all():
        return observation

    def black(images: np.ndarray) -> np.ndarray:
        return images * sees.reshape(-1, 1, 1, 1)

    return {**observation, **map_arrays(black, {"pixels": observation["pixels"]})}


class PolicyServers(Policy):
    """Policy servers, each of which decides for one batch at a time; a dead or silent server is replaced."""

    def __init__(
        self,
        conditions: Mapping[str, Condition],
        sources: Mapping[str, PolicySource],
        options: EvalOptions,
        counts: Processes,
        *,
        seed: int,
        use_gpu: bool,
    ) -> None:
        super().__init__()
        self._conditions, self._options, self._seed, self._gpus = conditions, options, seed, int(use_gpu)
        self._arguments = dict(sources), options.batch_size, options.exact, counts.threads
        self._free, self._deaths = list[Any](), 0
        self._answer_limit_s = Timeouts.from_environment().worker
        self._loaded = set[Any]()  # servers that have decided
        # Server and start time of each pending call.
        self._busy: dict[ray.ObjectRef[Any], tuple[Any, float]] = {}
        for _ in range(counts.servers):
            self._make_server()

    def _make_server(self) -> None:
        server_class: Any = ray.remote(PolicyServer).options(num_cpus=SERVER_CPUS, num_gpus=self._gpus)
        server = server_class.remote(*self._arguments)
        self.missing_resources = SERVER_CPUS, self._gpus  # until a server answers
        self._track(server, server.__ray_ready__.remote(), [])
        server.load.remote()  # while the stages start

    def _track(self, server: Any, ref: ray.ObjectRef[Any], batch: list[Seat]) -> None:
        self._busy[ref], self.pending[ref] = (server, time.monotonic()), batch

    def _replace(self, ref: ray.ObjectRef[Any], why: str) -> None:
        """Replace the server of a call, and let its seats wait again, before all others."""
        (server, _), batch = self._busy.pop(ref), self.pending.pop(ref)
        ray.kill(server)
        self._deaths += 1
        if self._deaths > MAX_SERVER_DEATHS:
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
                decided = ray.get(ref)  # a few numbers per row
            except (RayActorError, OutOfMemoryError) as error:
                self._replace(ref, root_cause(error))
                continue
            except ObjectLostError as error:  # the node of a stage is gone, and its observations with it
                lost = error
            (server, _), batch = self._busy.pop(ref), self.pending.pop(ref)
            self._free.append(server)
            if lost is not None:
                yield batch, lost
                continue
            self.missing_resources = None
            if batch:
                self._loaded.add(server)
                waited = (playing for seat in batch for playing in seat.playing)
                for playing, acted in zip(waited, decided, strict=True):
                    playing.rest = acted.rest
                    playing.texts += [] if acted.text is None else [acted.text]
                yield batch, [acted.actions for acted in decided]
        for ref, (server, since) in list(self._busy.items()):
            limit_s = self._answer_limit_s + (0.0 if server in self._loaded else LOAD_LIMIT_S)
            if self.pending[ref] and time.monotonic() - since > limit_s:
                remedy = "raise VLA_WORKER_TIMEOUT_S, or lower --eval.batch_size"
                self._replace(ref, f"no answer for {limit_s:g} s: {remedy}")
        waiting = sorted((seat for seat in seats if seat.since is not None), key=lambda seat: seat.since or 0.0)
        while self._free and waiting:
            batch, rows = list[Seat](), list[Row]()
            while waiting and (not batch or len(rows) + len(waiting[0].playing) <= self._options.batch_size):
                batch.append(seat := waiting.pop(0))
                seat.since = None
                rows += map(self._row, seat.playing, seat.decisions)
            server = self._free.pop(0)
            self._track(server, server.act.remote(rows, *(seat.seen for seat in batch)), batch)

    def _row(self, playing: Playing, decision: Decision) -> Row:
        episode, condition = playing.episode, self._conditions[playing.episode.condition]
        instruction = condition.instructions.get(decision.instruction, decision.instruction)
        key = (self._seed, episode.task, episode.episode, decision.decision)
        return Row(condition.policy, instruction, condition.blindfolded, key, condition.delay, playing.rest)


@dataclass(frozen=True)
class Processes:
    """Numbers of policy servers and stages, of the CPU threads of a server, and of the episodes of a stage at once.

    While each server decides for a batch, another batch is simulated; more would only take memory, 155 MB for an
    environment of Meta-World.
    """

    servers: int
    stages: int
    threads: int
    slots: int

    @classmethod
    def of(
        cls, options: EvalOptions, cpus: float, *, episodes: int, weights_bytes: int = 0, use_gpu: bool
    ) -> Processes:
        """Choose the numbers of processes; the default of `options` fills `cpus`.

        On CPUs several servers of few threads decide for more rows a second than one of many; on GPUs one is enough.
        With `exact` a server has one thread, because the number of threads changes how sums are rounded.
        """
        fit, worth = MAX_SERVERS_BYTES // max(1, weights_bytes), episodes // MIN_SERVER_EPISODES
        servers = options.policy_actors or (1 if use_gpu else max(1, min(int(cpus), MAX_SERVERS, fit, worth)))
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
    on_end: Callable[[Line, np.ndarray | None], None],
    stopped: Callable[[], bool] | None = None,
) -> None:
    """Play the episodes of a list. Runs on the driver, joined to a cluster, and ends its processes in any case.

    Args:
        conditions, sources, makers: by the names in `Episode.condition`, `Condition.policy` and `Episode.task`.
        seed: seed of the policy's noise; environments have their own.
        on_end: callback for each finished episode, in order of completion: its line (`episodes.line_of`) and its
            executed actions, (steps, A), None after an error.
        stopped: as for `Scheduler.play`.

    Raises:
        ValueError, OSError: a policy cannot be loaded, or cannot use the observations.
        RuntimeError: as `Scheduler.play`; or too many policy servers died.
    """
    use_gpu = any(source.device == "cuda" for source in sources.values())
    cpus, weights_bytes = ray.cluster_resources().get("CPU", 1.0), sum(s.weights_bytes for s in sources.values())
    counts = Processes.of(options, cpus, episodes=len(episodes), weights_bytes=weights_bytes, use_gpu=use_gpu)
    used = {task: makers[task] for task in dict.fromkeys(episode.task for episode in episodes)}
    policy = PolicyServers(conditions, sources, options, counts, seed=seed, use_gpu=use_gpu)
    scheduler = Scheduler(
        used, stages=counts.stages, slots=counts.slots, cpus=STAGE_CPUS, step_limit_s=Timeouts.from_environment().step
    )
    try:
        scheduler.play(dict(enumerate(episodes)), policy, lambda _, *ended: on_end(*ended), stopped)
    finally:
        scheduler.close()
        policy.close()


def play_all(
    episodes: Sequence[Episode],
    conditions: Mapping[str, Condition],
    sources: Mapping[str, PolicySource],
    makers: Mapping[str, Maker],
    options: EvalOptions,
    *,
    seed: int,
) -> list[tuple[Line, np.ndarray | None]]:
    """Play the episodes of a list, as `play`; return the line and the executed actions of each, in the list's order."""
    played: dict[tuple[Any, ...], tuple[Line, np.ndarray | None]] = {}

    def on_end(line: Line, actions: np.ndarray | None) -> None:
        played[episode_key(line)] = line, actions

    shared = {name: source.shared() for name, source in sources.items()}
    play(episodes, conditions, shared, makers, options, seed=seed, on_end=on_end)
    return [played[episode_key(vars(episode))] for episode in episodes]
