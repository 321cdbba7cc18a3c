"""Chunks of several episodes in one process, against a plain loop over gymnasium."""

import contextlib
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest

from vla_finetuning.envs import two_bins
from vla_finetuning.envs.protocol import state_hash
from vla_finetuning.envs.two_bins_scene import GANTRY, demonstrate
from vla_finetuning.rollouts import stage
from vla_finetuning.rollouts.episodes import Episode, Playing
from vla_finetuning.rollouts.stage import Decision, Stage


def begun(number, seed=1000, task="two_bins"):
    return Playing(number, Episode("plain", task, 0, seed))


EPISODES = [begun(number, 1000 + number) for number in range(7)]
MAKERS = {"two_bins": partial(gymnasium.make, two_bins.GYM_ID)}
CHUNK = 4


def paths():
    """Where the demonstrator goes in each episode, and what a plain loop says of it."""
    found = {}
    for start in EPISODES:
        number = start.number
        with gymnasium.make(two_bins.GYM_ID) as env:
            env.reset(seed=start.episode.seed)
            state, colour = env.unwrapped.state_hash(), env.unwrapped.task
            if number == 3:
                (colour,) = {"red", "blue"} - {colour}
            _, actions = demonstrate(env.unwrapped._scene, colour)
            actions = np.concatenate([actions, np.tile(actions[-1], (20, 1))])
            for step in range(len(actions)):
                _, reward, terminated, _, info = env.step(actions[step])
                if terminated:
                    break
            instruction = env.unwrapped.task_description
        found[number] = actions, (instruction, info["is_success"], step + 1, reward, state, info)
    return found


@pytest.mark.parametrize("slots", [1, 3, 10])
def test_episodes_are_those_of_a_plain_loop(slots):
    expected = paths()
    playing = Stage(MAKERS, slots, step_limit_s=60)
    left, found, chunks, most = list(EPISODES), {}, None, 0
    while True:
        (ended, waiting), seen = playing.advance(left, chunks)
        there = {d.number for d in waiting} | {e.number for e in ended}
        left = [start for start in left if start.number not in there]
        for one in ended:
            found[one.number] = (
                *(one.instruction, one.success_once, one.steps, one.total_reward, one.initial_state, one.info),
            )
            assert (one.success_at_end, one.success_at_reset) == (one.success_once, False)
        if not waiting:
            break
        most = max(most, len(waiting))
        assert seen["agent_pos"].shape == (len(waiting), 3)
        assert all(image.any() for images in seen["pixels"].values() for image in images)
        chunks = np.stack([expected[d.number][0][CHUNK * d.decision :][:CHUNK] for d in waiting])
    assert found == {number: episode for number, (_, episode) in expected.items()}
    assert found[3][1] is False and most == min(slots, len(EPISODES))


def test_an_episode_of_a_process_that_failed_is_the_same_and_waits_in_the_same_order():
    expected, held = paths(), [begun(number, 1000 + number) for number in range(3)]
    for playing in held:
        actions = expected[playing.number][0]
        playing.chunks = list(actions[: 2 * CHUNK].reshape(2, CHUNK, -1))
    (ended, waiting), seen = Stage(MAKERS, 3, step_limit_s=60).advance([*held, begun(3, 1003)])
    assert not ended and [(d.number, d.decision) for d in waiting] == [(0, 2), (1, 2), (2, 2)]
    assert all(image.any() for images in seen["pixels"].values() for image in images)
    # One that was in its last chunk leaves its place to the next.
    held[0].chunks = np.array_split(expected[0][0], len(expected[0][0]) // CHUNK)
    ((one,), waiting), _ = Stage(MAKERS, 3, step_limit_s=60).advance([*held, begun(3, 1003)])
    assert (one.instruction, one.success_once, one.steps, one.total_reward, one.initial_state, one.info) == expected[0][
        1
    ]
    assert [(d.number, d.decision) for d in waiting] == [(3, 0), (1, 2), (2, 2)]


def test_a_slot_has_one_environment_of_the_task_it_plays():
    """What another task's environment holds, a simulator's memory, is let go."""
    made, closed = [], []

    class Noted(two_bins.TwoBins):
        def close(self):
            closed.append(self)

    def make(task):
        made.append((task, Noted()))
        return made[-1][1]

    playing = Stage({task: partial(make, task) for task in "ab"}, 1, step_limit_s=60)
    assert [task for task, _ in made] == ["a"]  # what cannot be made is known at once
    for number, task in enumerate("aabba"):
        playing.advance([begun(number, task=task)])
        goal = made[-1][1]._scene.place(made[-1][1].task)
        while playing.advance([], np.tile(np.float32(goal), (1, 40, 1)))[0][1]:
            pass
    assert [task for task, _ in made] == ["a", "b", "a"]
    assert closed == [env for _, env in made[:2]]


def test_only_the_first_reset_of_an_environment_may_take_long(monkeypatch):
    """Some load and compile their simulator in it."""
    limits = []
    monkeypatch.setattr(stage, "_limit", lambda seconds: limits.append(seconds) or contextlib.nullcontext())
    playing = Stage(MAKERS, 1, step_limit_s=60)
    playing.advance(EPISODES[:1])
    playing.advance(EPISODES[1:2], np.zeros((1, 60, 3), np.float32))
    steps = GANTRY.episode_length
    assert limits == [stage.MAKE_LIMIT_S] * 2 + [60] * steps + [60]


def test_it_looks_only_where_a_policy_does(monkeypatch):
    playing = Stage(MAKERS, 1, step_limit_s=60)
    looks = []
    noted = replace(GANTRY, render=lambda *seen: looks.append(1) or GANTRY.render(*seen))
    monkeypatch.setattr(two_bins.TwoBins, "robot", noted)
    (_, (decision,)), _ = playing.advance([begun(5)])
    assert decision == Decision(5, 0, decision.instruction) and len(looks) == 1
    playing.advance([], np.zeros((1, 6, 3), np.float32))
    assert len(looks) == 2


def test_decisions_that_are_missing_are_no_silence():
    playing = Stage(MAKERS, 2, step_limit_s=60)
    playing.advance(EPISODES)
    with pytest.raises(ValueError, match="shorter"):
        playing.advance([], np.zeros((1, CHUNK, 3), np.float32))


def test_a_state_without_a_hash_of_its_own_is_told_by_what_is_seen():
    with gymnasium.make("CartPole-v1") as env:
        hashes = [state_hash(env, env.reset(seed=seed)[0]) for seed in (1, 2, 1)]
    assert hashes[0] == hashes[2] != hashes[1]
