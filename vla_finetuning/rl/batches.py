"""Cut the decisions of an iteration's episodes into minibatches and micro-batches, for all ranks.

Every rank has the table of all decisions, and the columns (images, actions) of its own groups. A minibatch is a slice
of a permutation of the table, which depends on the episodes and the seed only. A rank computes its own rows of a
minibatch. All ranks have equally many micro-batches: rows of weight zero fill up, and sums are divided by the number
of rows of all ranks.

Legend: N groups, G episodes of a group, E = N G, R rows (decisions) to learn from, W ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from util import Batch
from vla_finetuning.options.grpo import Reward
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.rl.actor import Actor, StochasticActor
from vla_finetuning.rl.demonstrations import Read, as_batch, split_positions
from vla_finetuning.rollouts.episodes import Line, PlayedEpisode
from vla_finetuning.training.stream import Columns
from vla_finetuning.training.worker import Worker


def stack_ranks(mine: Tensor) -> Tensor:
    """Stack a tensor of every rank, in the order of ranks. Every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine[None]
    ranks = torch.empty(dist.get_world_size() * mine.numel(), dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(ranks, mine.flatten())
    return ranks.view(dist.get_world_size(), *mine.shape)


def merge_ranks[K, V](mine: Mapping[K, V]) -> dict[K, V]:
    """Merge every rank's dictionary; of equal keys the last rank's value stays. Every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(mine)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dict(mine))
    return {key: value for rank in ranks for key, value in rank.items()}


def pad_empty(columns: Batch) -> Batch:
    """Return this rank's columns; one row of zeros in other ranks' shapes if it has none. Every rank must call it."""
    shapes = merge_ranks({key: (tuple(value.shape[1:]), value.dtype) for key, value in columns.items()})
    return columns or {key: torch.zeros(1, *shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}


def equal_returns(returns: Tensor) -> Tensor:
    """Return a mask, bool (N,), of the groups whose played episodes have equal returns (N, G); NaN: not played."""
    highest, lowest = (sign * (sign * returns).nan_to_num(nan=-torch.inf).amax(dim=1) for sign in (1, -1))
    return highest <= lowest


@dataclass(frozen=True)
class RolloutGroup:
    """The episodes of some groups, as all ranks know them.

    Attributes:
        numbers: int64 (N, G), the number of each episode.
        lines: the lines of all ranks' episodes by number, replaced ones too; `error` is set if one could not be played.
        episodes: the episodes that this rank has played to their end, replaced ones too.
    """

    numbers: np.ndarray
    lines: Mapping[int, Line]
    reward: Reward
    episodes: Sequence[PlayedEpisode] = ()

    @property
    def worth(self) -> str:
        """Return the name of an episode's return in its line."""
        return "success_once" if self.reward == "success" else "total_reward"

    @property
    def returns(self) -> Tensor:
        """Return what each episode is worth, float32 (N, G), NaN if it could not be played."""
        return self._column(self.worth)

    @property
    def success(self) -> Tensor:
        """Return whether each episode succeeded, float32 (N, G), NaN if it could not be played."""
        return self._column("success_once")

    @property
    def ordered(self) -> list[Line]:
        """Return the E lines in the order of `numbers`."""
        return [self.lines[number] for number in self.numbers.ravel().tolist()]

    @property
    def decisions(self) -> np.ndarray:
        """Return how many decisions each episode had, int64 (E,); 0 if it could not be played."""
        return np.array([len(line["rewards"] or ()) for line in self.ordered])

    def rewards(self, number: int) -> list[float]:
        """Return the reward of each decision of an episode: the environment's, or 1 for the first that succeeds."""
        line = self.lines[number]
        if self.reward == "return":
            return list(line["rewards"])
        return [float(decision == line["success_decision"]) for decision in range(len(line["rewards"]))]

    def with_groups(self, other: RolloutGroup, places: Tensor) -> RolloutGroup:
        """Return a copy with the groups of `other` at `places`, int64 (groups of `other`,)."""
        numbers = self.numbers.copy()
        numbers[places.numpy()] = other.numbers
        return RolloutGroup(numbers, {**self.lines, **other.lines}, self.reward, [*self.episodes, *other.episodes])

    def _column(self, name: str) -> Tensor:
        values = [math.nan if line["error"] is not None else float(line[name]) for line in self.ordered]
        return torch.tensor(values).view(self.numbers.shape)


def group_seed(seed: int, iteration: int, group: int) -> int:
    """Return the seed of a group's initial state, at least 2^31: held-out episodes have smaller seeds."""
    state = np.random.SeedSequence([seed, iteration, group]).generate_state(1)
    return int(2**31 + state[0] % 2**31)


def rank_of[T: (int, np.ndarray)](group: T, ranks: int) -> T:
    """Return the rank that plays a group, or the ranks of an array of groups."""
    return group % ranks


def decision_table(decisions: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return episode and number of each decision to learn from, int64 (R,), in the order of episodes.

    Args:
        decisions: number of decisions of each episode, int (E,).
        used: mask of the episodes to learn from, bool (E,).
    """
    counts = np.where(used, decisions, 0)
    episode = np.repeat(np.arange(len(counts)), counts)
    return episode, np.arange(len(episode)) - np.repeat(np.cumsum(counts) - counts, counts)


def minibatches(
    owner: np.ndarray, *, rank: int, ranks: int, size: int, micro_rows: int, key: tuple[int, ...]
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield a pass over the table in minibatches, cut evenly, in the order that `key` seeds.

    A minibatch is its number of rows, of all ranks, and this rank's rows of each micro-batch, which may be none.

    Args:
        owner: the rank that holds each row, int (R,).
        size, micro_rows: maximum numbers of rows of a minibatch, and of a micro-batch.
    """
    order = np.random.default_rng(list(key)).permutation(len(owner))
    for rows in np.array_split(order, -(-len(owner) // size)) if len(owner) else ():
        largest = int(np.bincount(owner[rows], minlength=ranks).max())
        yield len(rows), np.array_split(rows[owner[rows] == rank], -(-largest // micro_rows))


class RolloutBatch:
    """This rank's rows of an iteration's decisions, and the order in which all ranks learn from them.

    Args:
        used: mask of the episodes to learn from, bool (N, G).
        demonstrations: reads rows of a dataset; each minibatch has as many of them as it has decisions.
        first_row: position in the stream of demonstrations.

    Attributes:
        episode, decision: the table, int64 (R,) each (`decision_table`).
        owned: mask of this rank's rows of the table, bool (R,).
        columns: the records of this rank's decisions, by name.
        values: what the objective computed for each row before the first update, (R, ...) by name.
        draw: returns the random numbers of rows, given the rows and the key of a pass.
    """

    def __init__(
        self,
        config: GrpoConfig,
        actor: Actor,
        explorer: StochasticActor,
        group: RolloutGroup,
        used: Tensor,
        *,
        worker: Worker,
        demonstrations: Read | None = None,
        first_row: int = 0,
    ) -> None:
        self._demonstrations, self._first_row = demonstrations, first_row
        self._config, self._actor, self._iteration = config, actor, explorer.iteration
        self._rank, self._world = worker.rank, worker.world
        self.episode, self.decision = decision_table(group.decisions, used.flatten().numpy())
        self._owner = rank_of(self.episode // config.grpo.group_size, worker.world)
        self.owned = self._owner == worker.rank
        # A rank whose episodes all failed computes with a row of weight zero.
        columns, self._columns_of = explorer.columns(), explorer.rows
        self.columns = pad_empty(columns) if self.rows else columns
        # The row of `columns` for each row of the table; -1 if another rank holds it.
        self._column_rows = np.full(self.rows, -1)
        self._column_rows[self.owned] = explorer.rows(
            group.numbers.ravel()[self.episode[self.owned]], self.decision[self.owned]
        )
        self.values: dict[str, Tensor] = {}
        self.draw: Callable[[np.ndarray, tuple[int, ...]], Mapping[str, Tensor]] = lambda rows, key: {}

    @property
    def rows(self) -> int:
        """Return the number of decisions to learn from, of all ranks."""
        return len(self.episode)

    @property
    def demonstrated(self) -> int:
        """Return the number of demonstration rows that all passes read, of all ranks."""
        return self.rows * self._config.grpo.epochs if self._demonstrations else 0

    def computing(self) -> torch.autocast:
        return self._actor.computing()

    def first_pass(self) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield rows and their columns on the device, for each of this rank's micro-batches of the first pass."""
        for _, micros in self._minibatches(0):
            for rows in micros:
                yield rows, self._recorded(rows)

    def last_states(self, group: RolloutGroup) -> Iterator[tuple[list[int], Batch]]:
        """Yield numbers of this rank's truncated episodes, with their last observations (`Playing.bootstraps`)."""
        is_owned = rank_of(np.arange(len(group.numbers)), self._world) == self._rank
        numbers = np.sort(group.numbers[is_owned], axis=None).tolist()
        ended = [number for number in numbers if group.lines[number]["truncated"]]
        for some in itertools.batched(ended, self._config.batch_size):
            after = np.array([len(group.lines[number]["rewards"]) for number in some])
            yield list(some), self._batch(np.array(self._columns_of(np.array(some), after)))

    def epoch(self, number: int) -> Iterator[tuple[int, int, Iterator[Batch]]]:
        """Yield for each minibatch of a pass: rows of all ranks, number of micro-batches, and the micro-batches."""
        if self._demonstrations is None:
            for count, micros in self._minibatches(number):
                yield count, len(micros), self._micro_batches(micros, number)
            return
        first, demos, minibatches = self._first_row + number * self.rows, [], list(self._minibatches(number))
        for count, _ in minibatches:
            shares = {"rank": self._rank, "ranks": self._world, "micro_rows": self._config.batch_size}
            demos.append(split_positions(first, count, **shares))
            first += count
        # A rank without rows in a micro-batch reads the stream's first row, as one of weight zero.
        read = self._demonstrations([p if len(p) else np.array([self._first_row]) for parts in demos for p in parts])
        for (count, micros), parts in zip(minibatches, demos, strict=True):
            demonstrations = (self._demonstration(next(read), positions) for positions in parts)
            batches = itertools.chain(self._micro_batches(micros, number), demonstrations)
            yield 2 * count, len(micros) + len(parts), batches

    def _micro_batches(self, micros: Sequence[np.ndarray], epoch: int) -> Iterator[Batch]:
        return (self._micro_batch(rows, epoch) for rows in micros)

    def _minibatches(self, number: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        config, options = self._config, self._config.grpo
        return minibatches(
            self._owner,
            rank=self._rank,
            ranks=self._world,
            size=options.minibatch if self._demonstrations is None else max(1, options.minibatch // 2),
            micro_rows=config.batch_size,
            key=(config.seed, self._iteration, number),
        )

    def _demonstration(self, columns: Columns, positions: np.ndarray) -> Batch:
        """Return prepared rows at `positions` as the objective's batch; a row of weight zero for no positions."""
        batch = self._actor.on_device(as_batch(columns))
        names = [(self._config.seed, int(position)) for position in positions] or [(0, 0)]
        weight = torch.full((len(names),), float(len(positions) > 0))
        return batch | self._to_device({"weight": weight, **imitation_draws(self._actor.loss.policy.config, names)})

    def _batch(self, places: np.ndarray) -> Batch:
        return self._actor.on_device({key: value[places] for key, value in self.columns.items()})

    def _micro_batch(self, rows: np.ndarray, epoch: int) -> Batch:
        """Return rows of the table as the objective's batch; a row of weight zero for no rows."""
        weight = torch.ones(len(rows)) if len(rows) else torch.zeros(1)
        places = rows if len(rows) else np.zeros(1, np.int64)
        values = {"weight": weight, **{name: value[places] for name, value in self.values.items()}}
        values |= self.draw(places, (self._config.seed, self._iteration, epoch))
        return self._recorded(rows) | self._to_device(values)

    def _recorded(self, rows: np.ndarray) -> Batch:
        """Return this rank's records of rows of the table; its first record for no rows."""
        return self._batch(self._column_rows[rows] if len(rows) else np.zeros(1, np.int64))

    def _to_device(self, values: Mapping[str, Tensor]) -> Batch:
        return {key: value.to(self._actor.device) for key, value in values.items()}


def imitation_draws(config: Any, names: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    """Draw noise and time of each named row from LeRobot's distributions (`policies.flow.sample_noise_and_time`)."""
    noise, times = [], []
    for name in names:
        rng = np.random.default_rng(name)
        noise.append(rng.standard_normal((config.chunk_size, config.max_action_dim), np.float32))
        fraction = rng.beta(config.time_sampling_beta_alpha, config.time_sampling_beta_beta)
        times.append(fraction * config.time_sampling_scale + config.time_sampling_offset)
    return {"noise": torch.from_numpy(np.stack(noise)), "time": torch.tensor(times, dtype=torch.float32)}
