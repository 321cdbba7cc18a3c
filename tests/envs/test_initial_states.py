"""Lists of initial states: counts and splits, with LeRobot's LIBERO environment over a stub simulator."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.evaluation import several
from vla_finetuning.envs.configs import env_config, initial_state_counts
from vla_finetuning.envs.libero import RenderedOnDemand
from vla_finetuning.envs.protocol import choose_initial_state
from vla_finetuning.rl.resolve import InitialStates, reserve_last

COUNT = 50


def test_training_and_evaluation_use_disjoint_initial_states():
    states = reserve_last({"a": COUNT}, 10)["a"]
    assert states.evaluated == range(40, 50)
    trained = [states.number(states.trained, nth) % COUNT for nth in range(200)]
    assert sorted(trained) == sorted(list(range(40)) * 5)  # in turns: each as often as another
    numbers = [states.number(states.evaluated, nth) for nth in range(100)]
    assert sorted(number % COUNT for number in numbers) == sorted(list(range(40, 50)) * 10)
    assert len(set(numbers)) == 100  # and so each with noise of its own
    all_of_them = InitialStates(3)
    for subset in (all_of_them.trained, all_of_them.evaluated):
        assert [all_of_them.number(subset, nth) for nth in range(7)] == [*range(7)]


def test_initial_states_are_counted_per_task():
    with mock.patch.object(several, "Started", wraps=several.Started) as constructor:
        assert initial_state_counts(several.SeveralConfig()) == dict.fromkeys(["near/0", "near/1", "far/0"], 3)
    assert constructor.call_count == 3  # an environment may take a minute
    assert initial_state_counts(env_config("two_bins")) == {}  # drawn from the seed
    assert initial_state_counts(env_config("metaworld")) == {}  # without making its environments


class Simulator:
    """Records the states that it is set to, in place of LIBERO's simulator."""

    def __init__(self, **_):
        self.robots, self.set_to = [SimpleNamespace(controller=SimpleNamespace(use_delta=True, ee_ori_mat=0))], []
        image = np.zeros((2, 2, 3), np.uint8)
        self.seen = {"agentview_image": image, "robot0_eye_in_hand_image": image}
        self.env = SimpleNamespace(_observables={})

    def seed(self, _):
        pass

    def reset(self):
        return self.seen

    def set_init_state(self, state):
        self.set_to.append(float(state[0]))
        return self.seen

    def step(self, _):
        return self.seen, 0.0, False, {}


@pytest.fixture
def libero(tmp_path, monkeypatch):
    """Provide the modules that LeRobot's LIBERO imports: a suite of two tasks with files of initial states."""
    tasks = [
        SimpleNamespace(name=f"t{n}", language="do", problem_folder="p", bddl_file="b", init_states_file=f"t{n}.init")
        for n in range(2)
    ]
    (tmp_path / "p").mkdir()
    for n, task in enumerate(tasks):
        torch.save(np.arange(COUNT - 20 * n, dtype=float)[:, None], tmp_path / "p" / task.init_states_file)
    suite = SimpleNamespace(tasks=tasks, get_task=tasks.__getitem__)
    names = ("libero", "libero.libero", "libero.libero.benchmark", "libero.libero.envs")
    _, libero, benchmark, envs = modules = [ModuleType(name) for name in names]
    benchmark.get_benchmark_dict, benchmark.Benchmark = lambda: {"libero_10": lambda: suite}, object
    libero.benchmark, libero.get_libero_path = benchmark, lambda _: str(tmp_path)
    envs.OffScreenRenderEnv = Simulator
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "lerobot.envs.libero", raising=False)
    yield importlib.import_module("lerobot.envs.libero")
    sys.modules.pop("lerobot.envs.libero", None)  # not by `monkeypatch`, which would put it back


def test_libero_resets_to_the_reserved_states(libero):
    flags = ["--task=libero_10", "--obs_type=pixels", "--episode_length=9"]
    config = env_config("libero", flags)
    counts = initial_state_counts(config)
    assert counts == {"libero_10/0": 50, "libero_10/1": 30}
    states = reserve_last(counts, 10)["libero_10/0"]
    env = RenderedOnDemand(config.create_envs(n_envs=1)["libero_10"][0].envs[0])
    assert isinstance(env.unwrapped, libero.LiberoEnv) and env.initial_states == 50
    for nth in range(115):
        number = states.number(*((states.trained, nth) if nth < 90 else (states.evaluated, nth)))
        choose_initial_state(env, number)
        env.reset(seed=number)
    set_to = env.unwrapped._env.set_to
    assert set(set_to[:90]) == set(range(40)) and set(set_to[90:]) == set(range(40, 50))
    assert initial_state_counts(env_config("libero", [*flags, "--init_states=false"])) == {}
