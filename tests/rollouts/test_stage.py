"""Stages that play several episodes in chunks, against a plain loop over gymnasium."""

import contextlib
import functools
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest

from vla_finetuning.envs import two_bins, two_bins_scene
from vla_finetuning.envs.contract import ContractError
from vla_finetuning.envs.protocol import state_hash
from vla_finetuning.envs.two_bins_scene import EPISODE_LENGTH, demonstrate, render
from vla_finetuning.rollouts import stage
from vla_finetuning.rollouts.episodes import Episode, Playing
from vla_finetuning.rollouts.stage import Decision, Stage


def playing_of(number, seed=1000, task="two_bins"):
    return Playing(number, Episode("plain", task, 0, seed))


EPISODES = [playing_of(number, 1000 + number) for number in range(7)]
MAKERS = {"two_bins": partial(gymnasium.make, two_bins.GYM_ID)}
CHUNK = 4


@functools.cache
def paths():
    """Return the demonstrator's actions of each episode and their outcome in a plain loop."""
    lines = {}
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
        lines[number] = actions, (instruction, info["is_success"], step + 1, reward, state, info)
    return lines


def played(make, slots, episodes):
    """Play episodes; return lines by number, and the decisions of each call."""
    playing, left = Stage({"two_bins": make}, slots, step_limit_s=60), list(episodes)
    lines, order, chunks = {}, [], None
    while True:
        (ended, waiting), observation = playing.advance(left, chunks)
        lines |= ended
        order.append([(decision.number, decision.decision) for decision in waiting])
        left = [start for start in left if start.number not in {*lines, *(number for number, _ in order[-1])}]
        if not waiting:
            return lines, order
        assert observation["agent_pos"].shape == (len(waiting), 3)
        assert all(image.any() for images in observation["pixels"].values() for image in images)
        chunks = np.stack([paths()[number][0][CHUNK * decision :][:CHUNK] for number, decision in order[-1]])


def outcome(line):
    names = ("instruction", "success_once", "steps", "total_reward", "initial_state", "info")
    return tuple(line[name] for name in names)


@pytest.mark.parametrize("slots", [3, 10])
def test_stage_episodes_match_plain_loop(slots):
    lines, order = played(MAKERS["two_bins"], slots, EPISODES)
    assert lines.keys() == paths().keys()
    assert all(outcome(line) == paths()[number][1] for number, line in lines.items())
    ends = [(line["success_at_end"], line["success_at_reset"]) for line in lines.values()]
    assert ends == [(line["success_once"], False) for line in lines.values()]
    assert lines[3]["success_once"] is False and max(map(len, order)) == min(slots, len(EPISODES))


def test_restored_episode_is_identical_and_keeps_its_order():
    expected, restored = paths(), [playing_of(number, 1000 + number) for number in range(3)]
    for playing in restored:
        actions = expected[playing.number][0]
        playing.chunks = list(actions[: 2 * CHUNK].reshape(2, CHUNK, -1))
    (ended, waiting), observation = Stage(MAKERS, 3, step_limit_s=60).advance([*restored, playing_of(3, 1003)])
    assert not ended and [(d.number, d.decision) for d in waiting] == [(0, 2), (1, 2), (2, 2)]
    assert all(image.any() for images in observation["pixels"].values() for image in images)
    # An episode in its last chunk frees its slot.
    restored[0].chunks = np.array_split(expected[0][0], len(expected[0][0]) // CHUNK)
    (ended, waiting), _ = Stage(MAKERS, 3, step_limit_s=60).advance([*restored, playing_of(3, 1003)])
    assert outcome(ended[0]) == expected[0][1]
    assert [(d.number, d.decision) for d in waiting] == [(3, 0), (1, 2), (2, 2)]


class Failing(two_bins.TwoBins):
    """`TwoBins` whose episode of seed 1001 fails in its sixth step, `times` times."""

    times, how = 0, ""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.np_random_seed == 1001 and self._frame == 6 and Failing.times:
            Failing.times -= 1
            if self.how == "raises":
                raise ArithmeticError("the simulation diverged")
            reward = float("nan")
        return observation, reward, *rest


@pytest.mark.parametrize(("how", "times"), [("raises", 2), ("raises", 3), ("nan", 3)])
def test_failing_environment_fails_its_episode_alone(monkeypatch, how, times):
    """Two retries leave no trace; the third failure is the result."""

    plain, order = played(MAKERS["two_bins"], 2, EPISODES[:4])
    monkeypatch.setattr(Failing, "how", how)
    monkeypatch.setattr(Failing, "times", times)
    lines, order_of_failing = played(partial(gymnasium.make, FAILING_ID), 2, EPISODES[:4])
    assert Failing.times == 0
    failed = lines.pop(1) if times == 3 else None
    assert lines == {number: line for number, line in plain.items() if failed is None or number != 1}
    if failed is None:
        assert order_of_failing == order
    else:
        message = "ArithmeticError: the simulation diverged" if how == "raises" else "step 6 gave the reward nan"
        assert message in failed["error"]


FAILING_ID = "Failing-v0"
gymnasium.register(FAILING_ID, entry_point=Failing, max_episode_steps=EPISODE_LENGTH)


@pytest.mark.parametrize("limit", [10, 12])
def test_final_observation_is_returned_on_truncation(limit):
    """Also after a restored process; a success has none."""
    make, away = partial(gymnasium.make, two_bins.GYM_ID, max_episode_steps=limit), np.zeros((1, CHUNK, 3), np.float32)
    with make() as env:
        env.reset(seed=1000)
        for _ in range(limit):
            last, *_ = env.step(away[0, 0])
    playing, start = Stage({"two_bins": make}, 1, step_limit_s=60), replace(playing_of(0), bootstraps=True)
    playing.advance([start])
    for decision in (1, 2, 3):
        (ended, waiting), observation = playing.advance([], away)
        assert not ended and waiting[0].decision == decision
    resumed = Stage({"two_bins": make}, 1, step_limit_s=60).advance([replace(start, chunks=list(away.repeat(3, 0)))])
    for actual in (observation, resumed[1]):
        np.testing.assert_array_equal(actual["agent_pos"][0], last["agent_pos"])
        for name, image in last["pixels"].items():
            np.testing.assert_array_equal(actual["pixels"][name][0], image)
    (ended, waiting), _ = playing.advance([], away)
    line = ended[0]
    assert (line["steps"], line["truncated"], len(line["rewards"])) == (limit, True, 3) and not waiting
    assert line["decisions"] == 4
    actions = paths()[0][0]
    stage_of_success = Stage(MAKERS, 1, step_limit_s=60)
    stage_of_success.advance([start])
    (ended, waiting), _ = stage_of_success.advance([], actions[None])
    assert ended[0]["success_at_end"] and not ended[0]["truncated"] and not waiting


class EndsEarly(two_bins.TwoBins):
    """`TwoBins` that truncates each episode in the sixth step, before its step limit."""

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self._frame == 6, info


def test_unrendered_final_state_is_not_bootstrapped():
    away = np.zeros((1, CHUNK, 3), np.float32)
    playing = Stage({"two_bins": lambda: gymnasium.wrappers.TimeLimit(EndsEarly(), 40)}, 1, step_limit_s=60)
    playing.advance([replace(playing_of(0), bootstraps=True)])
    playing.advance([], away)
    with pytest.raises(ContractError, match="after 6 steps, before its step limit.*--grpo.bootstrap_time_limit"):
        playing.advance([], away)


def test_slot_has_one_environment_of_its_current_task():
    """Environments of other tasks are released, even if closing them fails."""
    environments, closed = [], []

    class Noted(two_bins.TwoBins):
        def close(self):
            closed.append(self)
            raise RuntimeError("the simulator is gone")

    def make(task):
        environments.append((task, Noted()))
        return environments[-1][1]

    playing = Stage({task: partial(make, task) for task in "ab"}, 1, step_limit_s=60)
    assert [task for task, _ in environments] == ["a"]  # what cannot be made is known at once
    for number, task in enumerate("aabba"):
        playing.advance([playing_of(number, task=task)])
        goal = environments[-1][1]._scene.place(environments[-1][1].task)
        while playing.advance([], np.tile(np.float32(goal), (1, 40, 1)))[0][1]:
            pass
    assert [task for task, _ in environments] == ["a", "b", "a"]
    assert closed == [env for _, env in environments[:2]]


def test_first_reset_of_an_environment_has_the_long_time_limit(monkeypatch):
    limits = []
    monkeypatch.setattr(stage, "_limit", lambda seconds: limits.append(seconds) or contextlib.nullcontext())
    playing = Stage(MAKERS, 1, step_limit_s=60)
    playing.advance(EPISODES[:1])
    playing.advance(EPISODES[1:2], np.zeros((1, 60, 3), np.float32))
    steps = EPISODE_LENGTH
    assert limits == [stage.MAKE_LIMIT_S] * 2 + [60] * steps + [60]


def test_images_are_rendered_only_for_decisions(monkeypatch):
    playing = Stage(MAKERS, 1, step_limit_s=60)
    looks = []
    monkeypatch.setattr(two_bins_scene, "render", lambda *observation: looks.append(1) or render(*observation))
    (_, (decision,)), _ = playing.advance([playing_of(5)])
    assert decision == Decision(5, 0, decision.instruction) and len(looks) == 1
    playing.advance([], np.zeros((1, 6, 3), np.float32))
    assert len(looks) == 2


def test_state_hash_defaults_to_observation():
    with gymnasium.make("CartPole-v1") as env:
        hashes = [state_hash(env, env.reset(seed=seed)[0]) for seed in (1, 2, 1)]
        with_object = {"agent_pos": np.zeros(2), "info": None}
        assert state_hash(env, with_object) == state_hash(env, {"agent_pos": np.zeros(2)})
    assert hashes[0] == hashes[2] != hashes[1]
