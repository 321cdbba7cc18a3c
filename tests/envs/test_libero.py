"""LIBERO: LeRobot's episodes and pictures, drawn only where a policy looks, and played in our engine."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from lerobot.envs.configs import EnvConfig

from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.libero import RenderedOnDemand
from vla_finetuning.envs.protocol import choose_gl
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.rollouts.episodes import Acted, Condition, episode_list
from vla_finetuning.rollouts.servers import play

choose_gl()
libero = pytest.importorskip("libero.libero", reason="LIBERO is installed by those who want it: docs/simulators.md")

FLAGS = ["--task=libero_10", "--task_ids=[3, 6]", "--observation_height=64", "--observation_width=48",
    "--episode_length=9"]  # fmt: skip
CHUNK, PLACES = 4, "LIBERO_CONFIG_PATH"


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory):
    """LIBERO's configuration, with initial states in the form that LeRobot reads, whichever wheel brought them."""
    from libero.libero.benchmark import get_benchmark

    folder = tmp_path_factory.mktemp("libero")
    brought = Path(libero.get_libero_path("init_states")) / "libero_10"
    (folder / "libero_10").mkdir()
    for task_id in (3, 6):
        name = get_benchmark("libero_10")().tasks[task_id].init_states_file
        states = np.load(brought / f"{name}.npz")["states"]
        torch.save(states, folder / "libero_10" / name)
    (folder / "config.yaml").write_text(json.dumps({"init_states": str(folder)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACES, str(folder))
        yield folder


def made_there(folder, maker):
    """Runs in a process of Ray's, which may have been started before."""
    os.environ[PLACES] = str(folder)
    return maker()


def lerobots(task_id) -> gymnasium.Env:
    """LeRobot's own environment of one task."""
    config = replace(env_config("libero", FLAGS), task_ids=[task_id])
    assert type(config) is EnvConfig.get_known_choices()["libero"]
    return config.create_envs(n_envs=1)["libero_10"][task_id].envs[0]


def actions_of(robot_state):
    """A chunk that any other state of the arm would change. Of pictures, contexts differ by a level of a few pixels."""
    digest = hashlib.sha256(b"".join(robot_state["joints"][name].tobytes() for name in ("pos", "vel"))).digest()
    return np.random.default_rng(list(digest)).uniform(-1, 1, (CHUNK, 7)).astype(np.float32)


def assert_same_picture(found, expected):
    differ = np.abs(found.astype(int) - expected)
    assert differ.max() <= 1 and np.count_nonzero(differ) < 0.01 * differ.size


def state_of(env):
    return hashlib.sha256(env.unwrapped._env.sim.get_state().flatten().tobytes()).hexdigest()[:16]


def test_libero_observations_match_lerobot():
    """In three episodes, the last from the state that the first began in: a reset makes new cameras."""
    rng = np.random.default_rng(0)
    with lerobots(3) as theirs, RenderedOnDemand(lerobots(3)) as ours:
        begun = []
        for number in (0, 1, 0):
            ours.rendering = True
            ours.unwrapped.init_state_id = theirs.init_state_id = number
            expected, found = theirs.reset(seed=5)[0], ours.reset(seed=5)[0]
            begun.append(ours.state_hash())
            assert begun[-1] == state_of(theirs)
            np.testing.assert_equal(found["robot_state"], expected["robot_state"])
            for name, image in found["pixels"].items():
                assert_same_picture(image, expected["pixels"][name])
                assert image.std() > 10
            for look in (False, True, False, False, True):
                before, action = found, rng.uniform(-1, 1, 7).astype(np.float32)
                ours.rendering, ours.rendering_s = look, 0.0
                expected, found = theirs.step(action), ours.step(action)
                assert found[1:4] == expected[1:4] and ours.state_hash() == state_of(theirs)
                np.testing.assert_equal(found[0]["robot_state"], expected[0]["robot_state"])
                found, expected = found[0], expected[0]
                for name, image in found["pixels"].items():
                    assert_same_picture(image, expected["pixels"][name]) if look else None
                    assert np.array_equal(image, before["pixels"][name]) != look
                assert (ours.rendering_s > 0) == look
        assert begun[0] == begun[2] != begun[1]


@dataclass(frozen=True)
class Feeling:
    """A source of a player whose actions are `actions_of` what its arm feels."""

    weights_bytes, device = 0, "cpu"

    def load(self, threads, other=None):
        def act(seen, _, keys, *late):
            joints = seen["robot_state"]["joints"]
            rows = [{"joints": {name: joints[name][row] for name in joints}} for row in range(len(keys))]
            assert all(image.std() > 10 for images in seen["pixels"].values() for image in images)
            return [Acted(actions_of(row)) for row in rows]

        return SimpleNamespace(act=act)


@pytest.mark.ray
def test_libero_episodes_match_plain_loop(ray_cluster, places):
    makers = {
        task: partial(made_there, places, maker) for task, maker in task_makers(env_config("libero", FLAGS)).items()
    }
    lines = []
    play(
        episode_list(["plain"], makers, 2, seed=1000), {"plain": Condition()}, {"policy": Feeling()}, makers,
        EvalOptions(env_actors=1, batch_size=2), seed=0, on_end=lambda line, _: lines.append(line),
    )  # fmt: skip
    assert not any(line["error"] for line in lines), lines
    found = {
        (line["task"], line["seed"]): (line["initial_state"], line["final_state"], line["steps"]) for line in lines
    }
    expected = {}
    for task_id in (3, 6):
        with lerobots(task_id) as env:
            for number, seed in enumerate((1000, 1001)):
                env.init_state_id = number
                seen, _ = env.reset(seed=seed)
                begun, steps, over = state_of(env), 0, False
                while not over:
                    for action in actions_of(seen["robot_state"]):
                        seen, _, terminated, truncated, _ = env.step(action)
                        steps += 1
                        if over := terminated or truncated or steps == 9:
                            break
                expected[f"libero_10/{task_id}", seed] = begun, state_of(env), steps
    assert found == expected
    assert {line["instruction"] for line in lines} == {env.task_description for env in map(lerobots, (3, 6))}
