"""Play the episodes of an iteration: groups of equal initial state, shared out to the ranks, and held-out episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vla_finetuning.evaluation.intervals import score
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.rl.actor import Actor, StochasticActor, deterministic
from vla_finetuning.rl.batches import RolloutGroup, equal_returns, group_seed, merge_ranks, rank_of
from vla_finetuning.rl.resolve import GrpoRun
from vla_finetuning.rollouts.episodes import Episode, Line, episode_list
from vla_finetuning.rollouts.scheduler import Scheduler
from vla_finetuning.training.worker import Worker


def make_rollouts(run: GrpoRun) -> Scheduler:
    g, makers = run.options, run.scene.makers
    return Scheduler(
        makers, stages=g.env_actors, slots=g.envs_per_actor, cpus=g.env_actor_cpus, step_limit_s=run.job.timeouts.step
    )


def play_iteration(run: GrpoRun, rollouts: Scheduler, explorer: StochasticActor, worker: Worker) -> RolloutGroup:
    """Return the groups to learn from. Every rank must call it.

    An episode fails if its environment raises, dies, hangs or gives a reward that is not finite. Failed episodes are
    left out of their groups; it raises ValueError if all have failed. With `--grpo.resample`, groups of equal returns
    are replaced by groups with another initial state, in at most that many rounds (dynamic sampling, DAPO, arXiv
    2503.14476).
    """
    group = play_groups(run, rollouts, explorer, worker, range(run.options.groups))
    for replacement in range(1, run.options.resample + 1):
        places = equal_returns(group.returns).nonzero().flatten()
        if not len(places):
            break
        group = group.with_groups(play_groups(run, rollouts, explorer, worker, places.tolist(), replacement), places)
    check_played(group.ordered)
    return group


def play_groups(
    run: GrpoRun,
    rollouts: Scheduler,
    explorer: StochasticActor,
    worker: Worker,
    groups: Sequence[int],
    replacement: int = 0,
) -> RolloutGroup:
    """Play this rank's `groups`, which have been replaced `replacement` times, and gather the lines of all ranks."""
    options, scene = run.options, run.scene
    size, count, iteration = options.group_size, options.groups, explorer.iteration
    firsts = (replacement * count + np.array(groups)) * size
    episodes: dict[int, Episode] = {}
    for group, first in zip(groups, firsts.tolist(), strict=True):
        if rank_of(group, worker.world) == worker.rank:
            nth = (iteration + replacement) * count + group
            task, seed = scene.tasks[nth % len(scene.tasks)], group_seed(explorer.seed, iteration, first // size)
            nth //= len(scene.tasks)
            if task in scene.states and replacement * count % (len(scene.tasks) * len(scene.states[task].trained)) == 0:
                nth += replacement  # the list has come round to the state of the replaced group
            episode = Episode("plain", task, scene.train_number(task, nth), seed)
            episodes |= dict.fromkeys(range(first, first + size), episode)
    ended = rollouts.play_here(episodes, explorer, bootstraps=options.bootstrap_time_limit)
    lines = merge_ranks({number: line for number, (line, _) in ended.items()})
    _check_alike(lines, size)
    played = [(line, actions) for line, actions in ended.values() if actions is not None]
    return RolloutGroup(firsts[:, None] + np.arange(size), lines, options.reward, played)


def check_played(lines: Sequence[Line]) -> None:
    """Raise ValueError if none of the ranks' episodes could be played: the next ones would fail in the same way."""
    errors = [line["error"] for line in lines]
    if None not in errors:
        raise ValueError(
            f"none of {len(errors)} episodes could be played to its end, the first because of {errors[0]}: repair the "
            "environment, and --resume goes on"
        )


def _check_alike(lines: Mapping[int, Line], size: int) -> None:
    states: dict[int, str] = {}
    for number, line in lines.items():
        if line["error"] is None and states.setdefault(number // size, line["initial_state"]) != line["initial_state"]:
            raise ValueError(
                "episodes of one group began in different states: the environment's reset(seed=...) does not decide "
                "its initial state, so their returns cannot be compared; where it does, and only pictures differ by "
                "rounding, give the environment a state_hash()"
            )


def check_first(options: GrpoOptions, iteration: int, played: RolloutGroup, used: Tensor) -> None:
    """Raise ValueError if no episode of the first iteration is used: the next iterations would be the same."""
    if iteration or bool(used.any()):
        return
    success = played.success[played.success.isfinite()]
    rate, episodes = float(success.mean()), len(success)
    remedy = (
        "start from a policy that succeeds at times (more imitation, or an easier task), or raise --grpo.noise_level"
        if rate == 0
        else "the policy succeeds in every episode already: choose a harder task"
        if rate == 1
        else "raise --grpo.group_size, or --grpo.noise_level"
    )
    raise ValueError(
        f"rewards are equal within each of the first iteration's {options.groups} groups of {options.group_size}, and "
        f"there is nothing to learn from: {round(rate * episodes)} of {episodes} episodes succeeded; {remedy}"
    )


def held_out(run: GrpoRun, rollouts: Scheduler, actor: Actor, worker: Worker) -> dict[str, Any]:
    """Play the held-out episodes by the deterministic sampler; return `intervals.score` with names "held_out_...".

    Ranks share the episodes; every rank must call it. Raises ValueError if every episode failed.
    """
    config, scene = run.config, run.scene
    listed = episode_list(["plain"], scene.tasks, config.eval.n_episodes, config.seed, scene.eval_number)
    rank_episodes = {number: episode for number, episode in enumerate(listed) if number % worker.world == worker.rank}
    played = rollouts.play_here(rank_episodes, deterministic(actor, config.seed, rank_episodes))
    lines = merge_ranks({number: line for number, (line, _) in played.items()})
    check_played(list(lines.values()))
    return {f"held_out_{name}": value for name, value in score([lines[number] for number in sorted(lines)]).items()}
