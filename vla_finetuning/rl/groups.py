"""Episodes of an iteration: groups that begin in the same state, played by the ranks, and the held-out list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vla_finetuning.environment import Timeouts
from vla_finetuning.envs.configs import task_makers
from vla_finetuning.options.grpo import GrpoOptions, Reward
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.rl.actor import Actor, DeterministicActor, StochasticActor
from vla_finetuning.rl.batches import RolloutGroup, everyone, group_seed, rank_of
from vla_finetuning.rl.recording import recorded_episodes
from vla_finetuning.rl.resolve import Scene
from vla_finetuning.rollouts.episodes import episode_list
from vla_finetuning.rollouts.lockstep import Rollouts
from vla_finetuning.rollouts.scheduler import ROOM_TIMEOUT_S
from vla_finetuning.rollouts.stage import Ended, Start
from vla_finetuning.training.worker import Worker


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
    """Return for each decision the sum of the environment's rewards, or 1 for the one that succeeded first and 0."""
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


def check_first(options: GrpoOptions, iteration: int, played: RolloutGroup, used: Tensor) -> None:
    """Refuse to go on if nothing can be learned from the first iteration: it would be the same in the next one."""
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
