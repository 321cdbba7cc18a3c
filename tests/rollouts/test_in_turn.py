"""Synchronous episodes on Ray against a plain loop, with and without killed processes."""

import contextlib
import os
import signal
from functools import partial

import gymnasium
import pytest
import ray

from tests.rollouts.players import Seeing, plain_loop
from vla_finetuning.envs import two_bins
from vla_finetuning.rollouts.episodes import Episode
from vla_finetuning.rollouts.scheduler import Scheduler

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
MAKERS = {"two_bins": partial(gymnasium.make, f"{two_bins.__name__}:{two_bins.GYM_ID}", max_episode_steps=30)}
EPISODES = {number: Episode("plain", "two_bins", 0, 100 + number // 2) for number in range(12)}
FIRST = {number: EPISODES[number] for number in range(3)}


class ScatteredDecider:
    """Decides by the observation and the decision's numbers; records its batches."""

    def __init__(self):
        self.asked = []

    def __call__(self, observation, decisions):
        self.asked.append([(decision.number, decision.decision) for decision in decisions])
        keys = [(3, "two_bins", decision.number, decision.decision) for decision in decisions]
        return Seeing()(observation, [decision.instruction for decision in decisions], keys)


def make_scheduler(stages=3, slots=3, cpus=0.1):
    return Scheduler(MAKERS, stages=stages, slots=slots, cpus=cpus, step_limit_s=60.0)


def play(rollouts, disturb=lambda rollouts, batches: None):
    """Return each episode's line, the batches, and the seconds."""
    decide = ScatteredDecider()

    def disturbed(observation, decisions):
        disturb(rollouts, decide.asked)
        return decide(observation, decisions)

    played = rollouts.play_here(EPISODES, disturbed)
    return {number: line for number, (line, _) in played.items()}, decide.asked, rollouts.take_seconds()


@pytest.fixture(scope="module")
def rollouts(ray_cluster):
    with contextlib.closing(make_scheduler()) as rollouts:
        yield rollouts


def test_pending_process_without_episode_is_not_awaited(rollouts):
    """Three of four processes start; there are three episodes."""
    seats, without = rollouts.seats, make_scheduler(stages=1, slots=1, cpus=1000.0)
    rollouts.seats = seats + without.seats
    try:
        assert len(rollouts.play_here(FIRST, ScatteredDecider())) == 3
        assert rollouts.take_seconds()[0] > 0 and rollouts.take_seconds() == (0.0, 0.0)
    finally:
        rollouts.seats = seats
        without.close()


@pytest.fixture(scope="module")
def undisturbed(rollouts):
    return play(rollouts)


def test_synchronous_episodes_match_plain_loop(undisturbed):
    ended, batches, (simulation_s, rendering_s) = undisturbed
    assert list(ended) == list(EPISODES)
    assert len({line["initial_state"] for line in ended.values()}) == 6  # the scenes, of two episodes each
    for number in range(4):
        key = (3, "two_bins", number)
        _, success, steps, decisions, initial_state, _ = plain_loop(EPISODES[number].seed, key, max_episode_steps=30)
        line = ended[number]
        actual = (line["success_once"], line["steps"], line["decisions"], line["initial_state"])
        assert actual == (success, steps, decisions, initial_state)
        assert sum(one[0] == number for half in batches for one in half) == decisions
    assert 0 < rendering_s < 30 and 0 < simulation_s < 30
    assert max(map(len, batches)) <= 6  # no more at once than half of the environments hold


def test_killed_process_changes_no_episode_and_no_batch(rollouts, undisturbed):
    """One is killed between two plays, two while they simulate; batches do not depend on timing."""
    killed = []

    def kill(rollouts, batches):
        if len(batches) in (2, 5):
            stage = rollouts.seats[1 if len(batches) == 2 else 2].stage
            pid = ray.get(stage.__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    rollouts.play_here(FIRST, ScatteredDecider())
    ray.kill(rollouts.seats[0].stage)
    assert rollouts.take_seconds()[0] > 0  # the others'
    ended, batches, _ = play(rollouts, kill)
    assert len(set(killed)) == 2 and (ended, batches) == undisturbed[:2]
