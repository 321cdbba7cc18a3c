"""An iteration in a training process: groups played, what they teach, in micro-batches for the training step.

`grpo.train` is the loop that calls these. Legend: N groups, G episodes of a group, E = N G, R decisions to learn from.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from util import Batch, StepResult, TrainableOptimizer, make_trainable_optimizer
from vla_finetuning.environment import Timeouts
from vla_finetuning.envs.configs import task_makers
from vla_finetuning.envs.stage import Ended, Start
from vla_finetuning.evaluation.closed_loop import ROOM_TIMEOUT_S
from vla_finetuning.evaluation.episodes import episode_list
from vla_finetuning.evaluation.recording import PlayedEpisode
from vla_finetuning.lines import append_line
from vla_finetuning.options.grpo import CRITIC, GrpoOptions, Reward
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.policies.value import advantages_and_targets
from vla_finetuning.rl.acting import Actor, DeterministicActor, StochasticActor
from vla_finetuning.rl.demonstrations import Read, as_batch, in_tasks, micro_positions
from vla_finetuning.rl.minibatches import Minibatch, Table, group_seed, minibatches, rank_of
from vla_finetuning.rl.objective import EPSILON, Objective, advantages, totals
from vla_finetuning.rl.recording import recorded_episodes
from vla_finetuning.rl.resolve import Scene
from vla_finetuning.rl.rollout import Rollouts
from vla_finetuning.run.progress import keep_metrics
from vla_finetuning.training.stream import Columns
from vla_finetuning.training.worker import Worker

logger = logging.getLogger(__name__)


# ---- all ranks together -----------------------------------------------------------------------------------------


def everyone(mine: Tensor) -> Tensor:
    """A tensor of every rank, stacked in their order. Every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine[None]
    ranks = torch.empty(dist.get_world_size() * mine.numel(), dtype=mine.dtype, device=mine.device)
    dist.all_gather_into_tensor(ranks, mine.flatten())
    return ranks.view(dist.get_world_size(), *mine.shape)


# ---- episodes ----------------------------------------------------------------------------------------------------


def make_rollouts(scene: Scene, options: GrpoOptions, timeouts: Timeouts) -> Rollouts:
    """This process's environments, which start now."""
    return Rollouts(
        task_makers(scene.env),
        actors=options.env_actors,
        slots=options.envs_per_actor,
        cpus=options.env_actor_cpus,
        step_limit_s=timeouts.step,
        room_s=ROOM_TIMEOUT_S,
    )


def make_demonstrations(rows: Rows | None, policy: PolicySpec, timeouts: Timeouts) -> Read | None:
    """How this process reads the demonstrations; None without any."""
    return None if rows is None else in_tasks(rows, policy, timeouts.batch)


@dataclass(frozen=True)
class RolloutGroup:
    """What all ranks know of some groups' episodes.

    Attributes:
        returns, success: float32 (N, G). decisions, steps, numbers: int64 (N G,), of each episode.
        rewards: of each decision, by the number of the episode; of this rank's episodes.
        episodes: this rank's, where they are recorded.
    """

    returns: Tensor
    success: Tensor
    decisions: np.ndarray
    steps: np.ndarray
    numbers: np.ndarray
    rewards: Mapping[int, list[float]]
    episodes: Sequence[PlayedEpisode] = ()

    @property
    def alike(self) -> Tensor:
        """Groups whose returns are all equal, bool (N,): nothing distinguishes their episodes."""
        return (self.returns == self.returns[:, :1]).all(dim=1)

    def with_groups(self, others: RolloutGroup, places: Tensor) -> RolloutGroup:
        """The same with other groups at `places`, int64 (number of the others,)."""
        size = self.returns.shape[1]
        episodes = (places[:, None] * size + torch.arange(size)).flatten().numpy()
        columns = {name: getattr(self, name).copy() for name in ("decisions", "steps", "numbers")}
        for name, column in columns.items():
            column[episodes] = getattr(others, name)
        returns = self.returns.index_copy(0, places, others.returns)
        success = self.success.index_copy(0, places, others.success)
        return RolloutGroup(returns, success, **columns, rewards={**self.rewards, **others.rewards})


def play_iteration(
    options: GrpoOptions, scene: Scene, rollouts: Rollouts, explorer: StochasticActor, worker: Worker
) -> tuple[RolloutGroup, list[RolloutGroup]]:
    """The groups to learn from, and all that were played for them. Every rank must call it.

    With `--grpo.resample`, groups whose returns are all equal are replaced by groups that begin elsewhere, so many
    times at most (dynamic sampling, DAPO, arXiv 2503.14476).
    """
    found = play_groups(options, scene, rollouts, explorer, worker)
    rounds = [found]
    for again in range(1, options.resample + 1):
        places = found.alike.nonzero().flatten()
        if not len(places):
            break
        rounds.append(play_groups(options, scene, rollouts, explorer, worker, places.tolist(), again))
        found = found.with_groups(rounds[-1], places)
    return found, rounds


def play_groups(
    options: GrpoOptions,
    scene: Scene,
    rollouts: Rollouts,
    explorer: StochasticActor,
    worker: Worker,
    groups: Sequence[int] | None = None,
    again: int = 0,
) -> RolloutGroup:
    """Play this rank's groups, and learn from the other ranks how theirs went. Every rank must call it.

    Args:
        groups: of the iteration; all when None. again: how many times these have been replaced.
    """
    size, count, iteration = options.group_size, options.groups, explorer.iteration
    groups = range(count) if groups is None else groups
    tasks, starts = scene.tasks, []
    places: dict[int, int] = {}  # of episodes in the table, by their numbers
    for place, group in enumerate(groups):
        if rank_of(group, worker.world) != worker.rank:
            continue
        number, nth = again * count + group, (iteration + again) * count + group
        task, seed = tasks[nth % len(tasks)], group_seed(explorer.seed, iteration, number)
        state = scene.train_number(task, nth // len(tasks))
        starts += [Start(number * size + i, task, seed, state) for i in range(size)]
        places |= {number * size + i: place * size + i for i in range(size)}
    ended = rollouts.play(starts, explorer)
    _check_alike(ended, size)
    table = torch.zeros((len(groups) * size, 5), dtype=torch.float64)
    for number, one in ended.items():
        worth = float(one.success_once) if options.reward == "success" else one.total_reward
        row = [worth, one.success_once, explorer.decisions(number), one.steps, number]
        table[places[number]] = torch.tensor(row)
    device = explorer.device
    whole = everyone(table.to(device)).sum(dim=0).cpu()
    returns, success = (whole[:, column].float().view(-1, size) for column in (0, 1))
    decisions, steps, numbers = (whole[:, column].long().numpy() for column in (2, 3, 4))
    rewards = {number: rewards_of(one, options.reward) for number, one in ended.items()}
    recorded = recorded_episodes(starts, ended, explorer) if explorer.recorded else ()
    return RolloutGroup(returns, success, decisions, steps, numbers, rewards, recorded)


def rewards_of(episode: Ended, reward: Reward) -> list[float]:
    """Of each decision: the sum of the environment's rewards, or 1 for the one that succeeded first and 0."""
    if reward == "return":
        return list(episode.rewards)
    return [float(number == episode.success_decision) for number in range(len(episode.rewards))]


def _check_alike(ended: Mapping[int, Ended], size: int) -> None:
    states: dict[int, str] = {}
    for number, one in ended.items():
        if states.setdefault(number // size, one.initial_state) != one.initial_state:
            raise ValueError(
                "episodes of one group began in different states: the environment's reset(seed=...) does not decide "
                "its initial state, so their returns cannot be compared"
            )


def check_first(options: GrpoOptions, iteration: int, played: RolloutGroup) -> None:
    """Refuse to go on if nothing can be learned from the first iteration: it would be the same in the next one."""
    _, used = advantages(played.returns, options.method, options.normalise)
    if iteration or bool(used.any()):
        return
    rate, episodes = float(played.success.mean()), played.success.numel()
    remedy = (
        "start from a policy that succeeds at times (more imitation, or an easier task), or raise --grpo.noise_level"
        if rate == 0
        else "there is nothing left to learn here: choose a harder task"
        if rate == 1
        else "raise --grpo.group_size, or --grpo.noise_level"
    )
    raise ValueError(
        f"in none of the first iteration's {options.groups} groups of {options.group_size} do the rewards "
        f"differ: {round(rate * episodes)} of {episodes} episodes succeeded, so that none is better than others of its "
        f"group; {remedy}"
    )


def check_finite(limit: int, nonfinite: int) -> None:
    """End a run with more updates than `limit` whose gradients are not finite; such updates were skipped."""
    if nonfinite > limit:
        raise FloatingPointError(
            f"{nonfinite} updates had a gradient that is not finite (more than --train.max_nonfinite="
            f"{limit}; they were skipped): lower --lr, or raise --grpo.warmup"
        )


def held_out(config: GrpoConfig, scene: Scene, rollouts: Rollouts, actor: Actor, worker: Worker) -> dict[str, int]:
    """Success of the deterministic sampler on the held-out list, shared out to the ranks. Every rank must call it."""
    listed = episode_list(["plain"], scene.tasks, config.eval.n_episodes, config.seed, scene.eval_number)
    episodes = dict(enumerate(listed))
    own = {number: one for number, one in episodes.items() if number % worker.world == worker.rank}
    starts = [Start(number, one.task, one.seed, one.episode) for number, one in own.items()]
    ended = rollouts.play(starts, DeterministicActor(actor, config.seed, own))
    counts = torch.tensor([sum(one.success_once for one in ended.values()), len(ended)], device=actor.device)
    successes, count = everyone(counts).sum(dim=0).tolist()
    return {"held_out_successes": successes, "held_out_episodes": count}


# ---- what they teach ---------------------------------------------------------------------------------------------


class RolloutBatch:
    """This rank's rows of what an iteration's episodes teach, and the order in which all ranks learn from them.

    Args:
        start: the policy that the run started from, for `--grpo.kl`.
        demonstrations: reads the rows of a dataset that are as many of each minibatch as decisions are.
        first_row: of their stream.
    """

    def __init__(
        self,
        config: GrpoConfig,
        objective: Objective,
        start: Objective | None,
        actor: Actor,
        explorer: StochasticActor,
        played: RolloutGroup,
        *,
        worker: Worker,
        demonstrations: Read | None = None,
        first_row: int = 0,
    ) -> None:
        options, rank, world = config.grpo, worker.rank, worker.world
        self._demonstrations, self._first_row = demonstrations, first_row
        self._config, self._actor, self._iteration, self._rank, self._world = (
            config,
            actor,
            explorer.iteration,
            rank,
            world,
        )
        worth, used = advantages(played.returns, options.method, options.normalise)
        self._table = Table.of(played.decisions, used.flatten().numpy())
        self._owner = rank_of(self._table.episode // options.group_size, world)
        self._columns = explorer.columns()
        own = np.flatnonzero(self._owner == rank)
        # Where a row of the table is in this rank's columns.
        self._place = np.full(len(self._table.episode), -1)
        self._place[own] = explorer.rows(played.numbers[self._table.episode[own]], self._table.decision[own])
        self._advantage = worth.flatten()[self._table.episode]
        self._old: Tensor | None = None
        self._values: Tensor | None = None
        self._targets: Tensor | None = None
        self._start_mean: Tensor | None = None
        if options.method == "filtered":
            self._columns = {k: v for k, v in self._columns.items() if k not in ("x", "after", "which")}
        else:
            self._score(objective, start)
        if options.method == "ppo":
            self._estimate_advantages(played)

    @property
    def rows(self) -> int:
        """Decisions to learn from, of all ranks."""
        return len(self._table.episode)

    @property
    def demonstrated(self) -> int:
        """Rows of the demonstrations that all passes take, of all ranks."""
        return self.rows * self._config.grpo.epochs if self._demonstrations else 0

    def epoch(self, number: int) -> Iterator[tuple[int, int, Iterator[Batch]]]:
        """A pass: of each minibatch its rows on all ranks, and this rank's micro-batches: how many, and one by one.

        A micro-batch is on the device from when it is asked for; a minibatch of images is gigabytes.
        """
        listed = list(self._minibatches(number))
        if self._demonstrations is None:
            for minibatch in listed:
                yield minibatch.rows, len(minibatch.micros), self._micro_batches(minibatch, number)
            return
        first, beside = self._first_row + number * self.rows, []
        for minibatch in listed:
            shares = {"rank": self._rank, "ranks": self._world, "micro_rows": self._config.batch_size}
            beside.append(micro_positions(first, minibatch.rows, **shares))
            first += minibatch.rows
        # A rank without rows of its own in a micro-batch fills it up with the stream's first.
        read = self._demonstrations([p if len(p) else np.array([self._first_row]) for micros in beside for p in micros])
        for minibatch, micros in zip(listed, beside, strict=True):
            beside_own = (self._demonstration(next(read), positions) for positions in micros)
            own = itertools.chain(self._micro_batches(minibatch, number), beside_own)
            yield 2 * minibatch.rows, len(minibatch.micros) + len(micros), own

    def _micro_batches(self, minibatch: Minibatch, epoch: int) -> Iterator[Batch]:
        return (self._micro_batch(rows, epoch) for rows in minibatch.micros)

    def _minibatches(self, number: int) -> Iterator[Minibatch]:
        config, options = self._config, self._config.grpo
        return minibatches(
            self._table,
            self._owner,
            rank=self._rank,
            ranks=self._world,
            size=options.minibatch if self._demonstrations is None else max(1, options.minibatch // 2),
            micro_rows=config.batch_size,
            key=(config.seed, self._iteration, number),
        )

    def _demonstration(self, columns: Columns, positions: np.ndarray) -> Batch:
        """Prepared rows at these positions of the stream as `Objective` takes them; of none, one of weight zero."""
        batch = self._actor.on_device(as_batch(columns))
        names = [(self._config.seed, int(position)) for position in positions] or [(0, 0)]
        own = {"weight": torch.full((len(names),), float(len(positions) > 0)), **self._noise(names)}
        return batch | {key: value.to(self._actor.device) for key, value in own.items()}

    def _score(self, objective: Objective, start: Objective | None) -> None:
        """Log-probabilities before the first update, by the learner itself and in the first epoch's micro-batches.

        Computed as they will be computed again, so that the first ratio is 1 and not nearly 1.
        """
        steps = self._columns["which"].shape[1] if self._columns else 0
        old, values = torch.zeros(self.rows, steps), torch.zeros(self.rows)
        if start is not None and self._columns:
            # Also on a rank with nothing to learn from, whose row of weight zero needs one.
            self._start_mean = torch.zeros(self.rows, *self._columns["after"].shape[1:])
        for minibatch in self._minibatches(0):
            for rows in minibatch.micros:
                if not len(rows):
                    continue
                with torch.no_grad(), self._actor.computing():
                    batch = self._batch(self._place[rows])
                    prefix = objective.loss.prefix(objective.loss.images(batch))
                    old[rows] = objective.score(batch, prefix)[0].cpu()
                    if objective.critic is not None:
                        values[rows] = objective.values(prefix).cpu()
                    if start is not None and self._start_mean is not None:
                        self._start_mean[rows] = start.score(batch)[1].cpu()
        self._old, self._values = old, values

    def _estimate_advantages(self, played: RolloutGroup) -> None:
        """Advantages and value targets of the decisions of all ranks, by the critic before the first update."""
        options, episodes, values = self._config.grpo, self._table.episode, self._values
        assert values is not None
        if not self.rows:  # of no rank
            return
        judged = torch.zeros(3, self.rows)  # advantages, targets, values; of this rank's rows
        for episode in np.unique(episodes[self._owner == self._rank]):
            rows = np.flatnonzero(episodes == episode)  # one after the other
            own, rewards = values[rows], played.rewards[int(played.numbers[episode])]
            found = advantages_and_targets(rewards, own.tolist(), options.gamma, options.gae_lambda)
            judged[:, rows] = torch.stack([*map(torch.tensor, found), own])
        advantage, self._targets, self._values = everyone(judged.to(self._actor.device)).sum(dim=0).cpu()
        self._advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + EPSILON)

    def explained_variance(self) -> float | None:
        """Share of the variance of the value targets that the values before the first update explain; with ppo."""
        if self._targets is None or self._values is None or not self.rows:
            return None
        left = (self._targets - self._values).var(correction=0)
        return float(1.0 - left / self._targets.var(correction=0).clamp(min=1e-12))

    def _batch(self, places: np.ndarray) -> Batch:
        return self._actor.on_device({key: value[places] for key, value in self._columns.items()})

    def _micro_batch(self, rows: np.ndarray, epoch: int) -> Batch:
        """Rows of the table as `Objective` takes them; of none, one row of weight zero."""
        filled = len(rows) == 0
        batch = self._batch(np.zeros(1, np.int64) if filled else self._place[rows])
        rows = np.zeros(1, np.int64) if filled else rows
        own = {"weight": torch.full((len(rows),), 0.0 if filled else 1.0), "advantage": self._advantage[rows]}
        if self._old is not None:
            own["old"] = self._old[rows]
        if self._targets is not None and self._values is not None:
            own |= {"value": self._values[rows], "target": self._targets[rows]}
        if self._start_mean is not None:
            own["start_mean"] = self._start_mean[rows]
        if self._config.grpo.method == "filtered":
            key = (self._config.seed, self._iteration, epoch)
            own |= self._noise([(*key, self._table.episode[row], self._table.decision[row]) for row in rows])
            # What was not executed is no example of success.
            config: Any = self._actor.loss.policy.config
            own["action_is_pad"] = (torch.arange(config.chunk_size) >= config.n_action_steps).repeat(len(rows), 1)
        return batch | {key: value.to(self._actor.device) for key, value in own.items()}

    def _noise(self, names: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
        """Noise and time of imitation of each row, LeRobot's distributions (`policies.flow.sample_noise_and_time`)."""
        config: Any = self._actor.loss.policy.config
        noise, times = [], []
        for name in names:
            rng = np.random.default_rng(name)
            noise.append(rng.standard_normal((config.chunk_size, config.max_action_dim), np.float32))
            fraction = rng.beta(config.time_sampling_beta_alpha, config.time_sampling_beta_beta)
            times.append(fraction * config.time_sampling_scale + config.time_sampling_offset)
        return {"noise": torch.from_numpy(np.stack(noise)), "time": torch.tensor(times, dtype=torch.float32)}


def build_grpo_optimizer(config: GrpoConfig, objective: Objective) -> TrainableOptimizer:
    """AdamW with the policy's own constants but no decay, which would pull away from the policy that was imitated.

    The critic of ppo is a group with a rate of its own; its names begin with `critic.`.
    """
    policy, critic = objective.loss.policy, objective.critic
    preset = policy.config.get_optimizer_preset()
    assert config.lr is not None  # the check refuses it
    peak, warmup = config.lr, config.grpo.warmup
    optimizer = make_trainable_optimizer(
        policy,
        schedule=lambda iteration: peak * min(1.0, (iteration + 1) / (warmup + 1)),
        betas=preset.betas,
        eps=preset.eps,
        weight_decay=0.0,
        clip_norm=preset.grad_clip_norm,
    )
    if critic is None:
        return optimizer
    own = {f"{CRITIC}{name}": param for name, param in critic.named_parameters()}
    optimizer.optimizer.add_param_group({"params": list(own.values()), "lr_scale": config.grpo.value_lr / peak})
    return replace(optimizer, names=[*optimizer.names, *own], params=[*optimizer.params, *own.values()])


def frozen_copy(objective: Objective) -> Objective:
    """The policy as it is now, to compare with later."""
    start = copy.deepcopy(objective)
    return start.requires_grad_(False)


# ---- what is written down ----------------------------------------------------------------------------------------


class Times:
    """Where an iteration's time goes, in seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.spent: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What has gone by since the last mark was for this."""
        now = time.perf_counter()
        self.spent[name], self._last = self.spent.get(name, 0.0) + now - self._last, now

    def gather(self, rollouts: Rollouts, actor: Actor) -> dict[str, float]:
        """Of all ranks: their mean, of simulation and rendering the sum over all processes. All must call it.

        Means add up to the iteration; the slowest ranks of each phase would not, as one waits for another in the next.

        `played` and `held_out` are inference and waiting for environments; held-out episodes count only there.
        """
        self.spent["step"] = time.perf_counter() - self._began
        names = ("play", "score", "update", "held_out", "step")
        simulation_s, rendering_s = rollouts.take_seconds()
        inference_s, actor.busy_s = actor.busy_s, 0.0
        mine = [self.spent.get(name, 0.0) for name in names] + [inference_s, simulation_s, rendering_s]
        ranks = everyone(torch.tensor(mine, dtype=torch.float64).to(actor.device)).cpu()
        mean, total = ranks.mean(dim=0).tolist(), ranks.sum(dim=0).tolist()
        seconds = {f"{name}_s": mean[number] for number, name in enumerate(names)}
        seconds |= {"inference_s": mean[5], "simulation_s": total[6], "rendering_s": total[7]}
        seconds["waiting_s"] = max(0.0, seconds["play_s"] + seconds["held_out_s"] - seconds["inference_s"])
        return {name: round(value, 4) for name, value in seconds.items()}


def metrics_of(
    options: GrpoOptions,
    played: RolloutGroup,
    rounds: Sequence[RolloutGroup],
    lessons: RolloutBatch,
    objective: Objective,
    results: Sequence[StepResult],
) -> dict[str, Any]:
    """An iteration in numbers, the same on all ranks. Every rank must call it.

    Args:
        played: the groups that it learned from. rounds: all that were played, whose success and costs these are.
    """
    said = totals(everyone(objective.sums))
    norms = [float(result.grad_norm) for result in results]
    return {
        "success": float(torch.cat([one.success for one in rounds]).mean()),
        "return": float(torch.cat([one.returns for one in rounds]).mean()),
        "mixed_groups": 1.0 - float(played.alike.float().mean()),
        "resampled_groups": sum(len(one.returns) for one in rounds[1:]),
        "decisions": sum(int(one.decisions.sum()) for one in rounds),
        "used": lessons.rows,
        "demonstrated": lessons.demonstrated,
        "env_steps": sum(int(one.steps.sum()) for one in rounds),
        "updates": len(results),
        "nonfinite_steps": int(sum(float(result.skipped) for result in results)),
        "loss": said.loss,
        "kl": None if options.method == "filtered" else said.kl,
        "kl_start": said.kl_start if options.kl else None,
        "clipped": said.clipped,
        "ratio_off": said.ratio_off,
        "value_loss": said.value_loss if options.method == "ppo" else None,
        "explained_variance": lessons.explained_variance(),
        "grad_norm": float(np.mean(norms)) if norms else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


class IterationLog:
    """`metrics.jsonl`, a line per iteration, written by rank 0; line 0 is the policy before the first."""

    def __init__(self, output_dir: Path, resumed_step: int) -> None:
        # A run that begins again has line 0 to come.
        self._path = keep_metrics(output_dir, resumed_step or -1)

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        append_line(self._path, json.dumps({"step": step, **line}))


def iteration_line(line: Mapping[str, Any]) -> str:
    """The terminal's line on an iteration."""
    text = f"success {line['success']:.1%} while exploring, {line['mixed_groups']:.0%} of the groups mixed"
    if line.get("held_out_episodes"):
        text += f"; held out {line['held_out_successes']} of {line['held_out_episodes']}"
    shares = {"waiting": line["waiting_s"], "inference": line["inference_s"], "updates": line["update_s"]}
    return f"{text}; {line['step_s']:.1f} s, " + ", ".join(f"{k} {v:.1f}" for k, v in shares.items())
