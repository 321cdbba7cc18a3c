"""LIBERO with rendering on demand, against LeRobot's own environment."""

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
CHUNK, CONFIG_VARIABLE = 4, "LIBERO_CONFIG_PATH"


@pytest.fixture(scope="module", autouse=True)
def libero_config(tmp_path_factory):
    """Configure LIBERO with initial states in the format that LeRobot reads."""
    from libero.libero.benchmark import get_benchmark

    folder = tmp_path_factory.mktemp("libero")
    installed = Path(libero.get_libero_path("init_states")) / "libero_10"
    (folder / "libero_10").mkdir()
    for task_id in (3, 6):
        name = get_benchmark("libero_10")().tasks[task_id].init_states_file
        states = np.load(installed / f"{name}.npz")["states"]
        torch.save(states, folder / "libero_10" / name)
    (folder / "config.yaml").write_text(json.dumps({"init_states": str(folder)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONFIG_VARIABLE, str(folder))
        yield folder


def make_with_config(folder, maker):
    """Make an environment in a Ray process, which may have started earlier."""
    os.environ[CONFIG_VARIABLE] = str(folder)
    return maker()


def lerobot_env(task_id) -> gymnasium.Env:
    config = replace(env_config("libero", FLAGS), task_ids=[task_id])
    assert type(config) is EnvConfig.get_known_choices()["libero"]
    return config.create_envs(n_envs=1)["libero_10"][task_id].envs[0]


def actions_of(robot_state):
    """Return a chunk that depends on every bit of the joint state; images differ slightly between contexts."""
    digest = hashlib.sha256(b"".join(robot_state["joints"][name].tobytes() for name in ("pos", "vel"))).digest()
    return np.random.default_rng(list(digest)).uniform(-1, 1, (CHUNK, 7)).astype(np.float32)


def assert_same_image(actual, expected):
    differ = np.abs(actual.astype(int) - expected)
    assert differ.max() <= 1 and np.count_nonzero(differ) < 0.01 * differ.size


def state_of(env):
    return hashlib.sha256(env.unwrapped._env.sim.get_state().flatten().tobytes()).hexdigest()[:16]


def test_libero_observations_match_lerobot():
    """Run three episodes, the last from the first one's state: a reset makes new cameras."""
    rng = np.random.default_rng(0)
    with lerobot_env(3) as reference, RenderedOnDemand(lerobot_env(3)) as on_demand:
        initial_states = []
        for number in (0, 1, 0):
            on_demand.rendering = True
            on_demand.unwrapped.init_state_id = reference.init_state_id = number
            expected, actual = reference.reset(seed=5)[0], on_demand.reset(seed=5)[0]
            initial_states.append(on_demand.state_hash())
            assert initial_states[-1] == state_of(reference)
            np.testing.assert_equal(actual["robot_state"], expected["robot_state"])
            for name, image in actual["pixels"].items():
                assert_same_image(image, expected["pixels"][name])
                assert image.std() > 10
            for renders in (False, True, False, False, True):
                before, action = actual, rng.uniform(-1, 1, 7).astype(np.float32)
                on_demand.rendering, on_demand.rendering_s = renders, 0.0
                expected, actual = reference.step(action), on_demand.step(action)
                assert actual[1:4] == expected[1:4] and on_demand.state_hash() == state_of(reference)
                np.testing.assert_equal(actual[0]["robot_state"], expected[0]["robot_state"])
                actual, expected = actual[0], expected[0]
                for name, image in actual["pixels"].items():
                    assert_same_image(image, expected["pixels"][name]) if renders else None
                    assert np.array_equal(image, before["pixels"][name]) != renders
                assert (on_demand.rendering_s > 0) == renders
        assert initial_states[0] == initial_states[2] != initial_states[1]


@dataclass(frozen=True)
class Feeling:
    """Player source that acts by `actions_of` the joint state."""

    weights_bytes, device = 0, "cpu"

    def load(self, threads, other=None):
        def act(observation, _, keys, *late):
            joints = observation["robot_state"]["joints"]
            rows = [{"joints": {name: joints[name][row] for name in joints}} for row in range(len(keys))]
            assert all(image.std() > 10 for images in observation["pixels"].values() for image in images)
            return [Acted(actions_of(row)) for row in rows]

        return SimpleNamespace(act=act)


@pytest.mark.ray
def test_libero_episodes_match_plain_loop(ray_cluster, libero_config):
    makers = task_makers(env_config("libero", FLAGS))
    makers = {task: partial(make_with_config, libero_config, maker) for task, maker in makers.items()}
    lines = []
    play(
        episode_list(["plain"], makers, 2, seed=1000), {"plain": Condition()}, {"policy": Feeling()}, makers,
        EvalOptions(env_actors=1, batch_size=2), seed=0, on_end=lambda line, _: lines.append(line),
    )  # fmt: skip
    assert not any(line["error"] for line in lines), lines
    actual = {
        (line["task"], line["seed"]): (line["initial_state"], line["final_state"], line["steps"]) for line in lines
    }
    expected = {}
    for task_id in (3, 6):
        with lerobot_env(task_id) as env:
            for number, seed in enumerate((1000, 1001)):
                env.init_state_id = number
                observation, _ = env.reset(seed=seed)
                initial_state, steps, over = state_of(env), 0, False
                while not over:
                    for action in actions_of(observation["robot_state"]):
                        observation, _, terminated, truncated, _ = env.step(action)
                        steps += 1
                        if over := terminated or truncated or steps == 9:
                            break
                expected[f"libero_10/{task_id}", seed] = initial_state, state_of(env), steps
    assert actual == expected
    assert {line["instruction"] for line in lines} == {env.task_description for env in map(lerobot_env, (3, 6))}
