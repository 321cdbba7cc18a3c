"""Episodes of an iteration: groups that begin in the same state, played by the ranks, and the held-out list."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from vla_finetuning.environment import Timeouts
from vla_finetuning.envs.configs import task_makers
from vla_finetuning.evaluation.intervals import AT_END, ONCE, score
from vla_finetuning.options.grpo import GrpoOptions, Reward
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.rl.actor import Actor, DeterministicActor, StochasticActor
from vla_finetuning.rl.batches import RolloutGroup, alike, everyone, group_seed, rank_of
from vla_finetuning.rl.resolve import Scene
from vla_finetuning.rollouts.episodes import Episode, Line, episode_list
from vla_finetuning.rollouts.scheduler import Scheduler
from vla_finetuning.training.worker import Worker


def make_rollouts(scene: Scene, options: GrpoOptions, timeouts: Timeouts) -> Scheduler:
    """This process's environments, which start now."""
    return Scheduler(
        task_makers(scene.env),
        stages=options.env_actors,
        slots=options.envs_per_actor,
        cpus=options.env_actor_cpus,
        step_limit_s=timeouts.step,
    )


def play_iteration(
    options: GrpoOptions, scene: Scene, rollouts: Scheduler, acting: StochasticActor, worker: Worker
) -> tuple[RolloutGroup, list[RolloutGroup]]:
    """The groups to learn from, and all that were played for them. Every rank must call it.

    Episodes that could not be played, because their environment raised, died, hung or gave a reward that is not finite,
    are left out of their groups. With `--grpo.resample`, groups whose returns are all equal are replaced by groups that
    begin elsewhere, so many times at most (dynamic sampling, DAPO, arXiv 2503.14476).

    Raises:
        ValueError: none could be played.
    """
    group = play_groups(options, scene, rollouts, acting, worker, range(options.groups))
    rounds = [group]
    for again in range(1, options.resample + 1):
        places = alike(group.returns).nonzero().flatten()
        if not len(places):
            break
        rounds.append(play_groups(options, scene, rollouts, acting, worker, places.tolist(), again))
        group = group.with_groups(rounds[-1], places)
    check_played(group.returns.isfinite(), [error for played in rounds for error in played.errors])
    return group, rounds


def play_groups(
    options: GrpoOptions,
    scene: Scene,
    rollouts: Scheduler,
    acting: StochasticActor,
    worker: Worker,
    groups: Sequence[int],
    again: int = 0,
) -> RolloutGroup:
    """Play this rank's groups, and learn from the other ranks how theirs went. Every rank must call it.

    Args:
        again: how many times these have been replaced.
    """
    size, count, iteration = options.group_size, options.groups, acting.iteration
    episodes: dict[int, Episode] = {}
    places: dict[int, int] = {}  # of episodes in the table, by their numbers
    for place, group in enumerate(groups):
        if rank_of(group, worker.world) != worker.rank:
            continue
        number, nth = again * count + group, (iteration + again) * count + group
        task, seed = scene.tasks[nth % len(scene.tasks)], group_seed(acting.seed, iteration, number)
        episode = Episode("plain", task, scene.train_number(task, nth // len(scene.tasks)), seed)
        episodes |= {number * size + i: episode for i in range(size)}
        places |= {number * size + i: place * size + i for i in range(size)}
    begun = rollouts.play_here(episodes, acting, bootstraps=options.bootstrap_time_limit)
    played = {number: (line, actions) for number, (line, actions) in begun.items() if actions is not None}
    lines = {number: line for number, (line, _) in played.items()}
    _check_alike(lines, size)
    rewards = {number: rewards_of(line, options.reward) for number, line in lines.items()}
    table = torch.zeros((len(groups) * size, 6), dtype=torch.float64)
    for number, place in places.items():
        table[place, 0] = number
        if (line := lines.get(number)) is not None:
            worth = float(line["success_once"]) if options.reward == "success" else line["total_reward"]
            row = [worth, line["success_once"], len(rewards[number]), line["steps"], 1.0]
            table[place, 1:] = torch.tensor(row)
    gathered = everyone(table.to(acting.device)).sum(dim=0).cpu()
    # One that could not be played is NaN: it is left out of its group.
    gathered[:, 1:3] = torch.where(gathered[:, 5:] > 0, gathered[:, 1:3], torch.nan)
    returns, success = (gathered[:, column].float().view(-1, size) for column in (1, 2))
    numbers, decisions, steps = (gathered[:, column].long().numpy() for column in (0, 3, 4))
    truncated = frozenset(number for number, line in lines.items() if line["truncated"])
    errors = [line["error"] for line, actions in begun.values() if actions is None]
    return RolloutGroup(returns, success, decisions, steps, numbers, rewards, list(played.values()), truncated, errors)


def check_played(is_played: Tensor, errors: Sequence[str]) -> None:
    """End the run where no episode of any rank could be played: others would go the same way.

    Args:
        is_played: bool, of any shape. errors: of this rank's episodes.
    """
    if not bool(is_played.any()):
        why = f", the first because of {errors[0]}" if errors else ""
        raise ValueError(
            f"none of {is_played.numel()} episodes could be played to its end{why}: repair the environment, and "
            "--resume goes on"
        )


def rewards_of(line: Line, reward: Reward) -> list[float]:
    """Return for each decision the sum of the environment's rewards, or 1 for the one that succeeded first and 0."""
    if reward == "return":
        return list(line["rewards"])
    return [float(number == line["success_decision"]) for number in range(len(line["rewards"]))]


def _check_alike(lines: Mapping[int, Line], size: int) -> None:
    states: dict[int, str] = {}
    for number, line in lines.items():
        if states.setdefault(number // size, line["initial_state"]) != line["initial_state"]:
            raise ValueError(
                "episodes of one group began in different states: the environment's reset(seed=...) does not decide "
                "its initial state, so their returns cannot be compared; where it does, and only pictures differ by "
                "rounding, give the environment a state_hash()"
            )


def check_first(options: GrpoOptions, iteration: int, played: RolloutGroup, used: Tensor) -> None:
    """Refuse to go on if nothing can be learned from the first iteration: it would be the same in the next one."""
    if iteration or bool(used.any()):
        return
    success = played.success[played.success.isfinite()]
    rate, episodes = float(success.mean()), len(success)
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


def held_out(config: GrpoConfig, scene: Scene, rollouts: Scheduler, actor: Actor, worker: Worker) -> dict[str, Any]:
    """Return `intervals.score` of the deterministic sampler on the held-out list, shared out to the ranks, its names
    after "held_out_". Every rank must call it.

    Raises:
        ValueError: none could be played.
    """
    listed = episode_list(["plain"], scene.tasks, config.eval.n_episodes, config.seed, scene.eval_number)
    rank_episodes = {number: episode for number, episode in enumerate(listed) if number % worker.world == worker.rank}
    played = rollouts.play_here(rank_episodes, DeterministicActor(actor, config.seed, rank_episodes))
    table = torch.zeros((len(listed), 4), dtype=torch.float64)
    for number, (line, actions) in played.items():
        if actions is not None:
            state = int(hashlib.sha256(line["initial_state"].encode()).hexdigest()[:12], 16)  # exact in float64
            row = [1.0, line["success_once"], line["success_at_end"], state]
            table[number] = torch.tensor(row, dtype=torch.float64)
    gathered = everyone(table.to(actor.device)).sum(dim=0).cpu()
    check_played(gathered[:, 0] > 0, [line["error"] for line, actions in played.values() if actions is None])
    lines = [
        {
            **asdict(episode),
            "error": None if row[0] else "failed",
            ONCE: row[1],
            AT_END: row[2],
            "initial_state": row[3],
        }
        for episode, row in zip(listed, gathered.tolist(), strict=True)
    ]
    return {f"held_out_{name}": value for name, value in score(lines).items()}
