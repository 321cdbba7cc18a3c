"""Meta-World against LeRobot's environment, its experts in rollouts and recordings."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset

import record
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.metaworld import EPISODE_LENGTH, GYM_ID
from vla_finetuning.envs.protocol import choose_gl
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.rollouts.episodes import Acted, Condition, episode_list
from vla_finetuning.rollouts.servers import play

choose_gl()
metaworld = pytest.importorskip("metaworld", reason="Meta-World is installed by make metaworld")
policies = pytest.importorskip("metaworld.policies")

# Meta-World warns of expert actions beyond its limits.
pytestmark = pytest.mark.filterwarnings("ignore:Constant")
TEN = "reach-v3,push-v3,pick-place-v3,door-open-v3,drawer-open-v3,button-press-topdown-v3,peg-insert-side-v3," \
    "window-open-v3,basketball-v3,assembly-v3"  # fmt: skip


def test_metaworld_states_and_images_match_lerobot():
    from lerobot.envs.metaworld import MetaworldEnv

    def rollout(env):
        """Collect observations and rewards of the first steps from some seeds."""
        values, actions = [], np.random.default_rng(0).uniform(-1, 1, (3, 3, 4)).astype(np.float32)
        for seed, chunk in zip((5, 3, 5), actions, strict=True):
            observation, _ = env.reset(seed=seed)
            for action in chunk:
                values += [observation["pixels"], observation["agent_pos"]]
                other.step(action)
                observation, reward, *_ = env.step(action)
                values.append(reward)
        return values

    # Another environment renders in between: each has its own context.
    with gymnasium.make(GYM_ID, task="drawer-open-v3") as other, gymnasium.make(GYM_ID, task="push-v3") as ours:
        other.reset(seed=1)
        actual = rollout(ours)
        hashes = [ours.reset(seed=seed) and ours.unwrapped.state_hash() for seed in (5, 3, 5)]
        assert hashes[0] == hashes[2] != hashes[1]
        other.unwrapped.rendering = False
        lerobot_env = MetaworldEnv("push-v3", obs_type="pixels_agent_pos")
        expected = rollout(lerobot_env)
        lerobot_env.close()
    for value, reference in zip(actual, expected, strict=True):
        if np.ndim(value) == 3:  # two renderers round a few values differently
            difference = np.abs(value.astype(int) - reference)
            assert difference.max() <= 1 and np.count_nonzero(difference) < 1e-4 * difference.size
        else:
            np.testing.assert_array_equal(value, reference)


def test_image_size_quality_and_rendering_follow_options():
    images = {}
    for quality in ("full", "fast"):
        with gymnasium.make(GYM_ID, task="reach-v3", image_size=(48, 64), quality=quality) as env:
            observation, _ = env.reset(seed=0)
            assert env.observation_space.contains(observation) and observation["pixels"].std() > 10
            images[quality] = observation["pixels"].astype(int)
            assert env.unwrapped.rendering_s > 0
            env.unwrapped.rendering, env.unwrapped.rendering_s = False, 0.0
            observation, *_ = env.step(np.zeros(4, np.float32))
            assert not observation["pixels"].any() and env.unwrapped.rendering_s == 0.0 and env.render().any()
            with pytest.raises(ValueError, match="four finite numbers"):
                env.step(np.full(4, np.nan))
    assert 0 < np.abs(images["full"] - images["fast"]).mean() < 40  # shadows


@pytest.mark.parametrize("task", ["door-close-v3", "door-open-v3", "button-press-v3"])
def test_expert_does_not_change_state(task):
    """Experts of these tasks write to the observation that they are given."""
    with gymnasium.make(GYM_ID, task=task, obs_type="environment_state_agent_pos") as env:
        env.reset(seed=1)
        before, action = env.unwrapped.state_hash(), env.unwrapped.expert_action()
        assert env.unwrapped.state_hash() == before
        np.testing.assert_array_equal(env.unwrapped.expert_action(), action)


# ---- its experts in the engine --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """Player source that queries Meta-World's expert of each row's task."""

    tasks: tuple[str, ...]

    weights_bytes, device = 0, "cpu"

    def load(self, threads, other=None):
        experts = {task: policies.ENV_POLICY_MAP[task]() for task in self.tasks}

        def act(observation, _, keys, *late):
            rows = zip(keys, observation["environment_state"], strict=True)
            actions = np.clip([[experts[key[1]].get_action(state)] for key, state in rows], -1, 1)
            return list(map(Acted, actions.astype(np.float32)))

        return SimpleNamespace(act=act)


def plain_loop(task, seeds):
    """Return success and steps by seed from Meta-World's own environment, prepared as by LeRobot."""
    benchmark, policy = metaworld.MT1(task, seed=42), policies.ENV_POLICY_MAP[task]()
    env = benchmark.train_classes[task]()
    env.set_task(benchmark.train_tasks[0])
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    outcomes = {}
    for seed in seeds:
        env.seed(seed)
        state, _ = env.reset(seed=seed)
        success, step = False, 0
        while not success and step < EPISODE_LENGTH:
            state, _, _, _, info = env.step(np.clip(policy.get_action(state), -1, 1).astype(np.float32))
            success, step = bool(info["success"]), step + 1
        outcomes[task, seed] = success, step
    env.close()
    return outcomes


@pytest.mark.ray
@pytest.mark.parametrize(
    ("tasks", "seeds"), [("peg-insert-side-v3,reach-v3", 2), pytest.param(TEN, 20, marks=pytest.mark.slow)]
)
def test_expert_episodes_match_plain_loop(ray_cluster, tasks, seeds):
    makers = task_makers(env_config("metaworld", [f"--task={tasks}", "--obs_type=environment_state_agent_pos"]))
    lines = []
    play(
        episode_list(["plain"], makers, seeds, seed=1000), {"plain": Condition()}, {"policy": Experts(tuple(makers))},
        makers, EvalOptions(env_actors=3), seed=0, on_end=lambda line, _: lines.append(line),
    )  # fmt: skip
    expected = {}
    for task in makers:
        expected |= plain_loop(task, range(1000, 1000 + seeds))
    assert {(line["task"], line["seed"]): (line["success_once"], line["steps"]) for line in lines} == expected
    assert not any(line["error"] for line in lines) and all(line["instruction"] for line in lines)


# ---- its experts in datasets ----------------------------------------------------------------------------------------

RENDERING = ["--env.image_size=[48,64]", "--env.render_quality=fast"]


@pytest.mark.ray
def test_recorded_actions_solve_the_task_when_replayed(ray_cluster, tmp_path, capsys):
    """The push expert exceeds the step limit: its failed episodes are left out."""
    root, flags = tmp_path / "data", ["--env.type=metaworld", "--env.task=reach-v3,push-v3", "--env.episode_length=52"]
    assert record.main([*flags, RENDERING[0], "--episodes=3", f"--root={root}"]) == 0
    out = capsys.readouterr().out
    assert "3 of 3  reach-v3" in out and "0 of 3  push-v3; its expert failed from 3, which are left out" in out
    about = json.loads((root / "meta" / "environment.json").read_text())
    assert about["drawn"] == {"type": "metaworld", "image_size": [48, 64], "render_quality": "fast"}
    assert about["failed"] == {"reach-v3": [], "push-v3": [100000, 100001, 100002]}
    assert [path.name for path in tmp_path.iterdir()] == ["data"]

    dataset = LeRobotDataset("recorded/metaworld", root=root, video_backend="pyav")
    assert (dataset.meta.total_episodes, dataset.fps) == (3, 80)
    assert list(dataset.meta.tasks.index) == ["Reach a goal position"]
    make = task_makers(env_config("metaworld", ["--task=reach-v3", *(flag.replace("env.", "") for flag in RENDERING)]))
    with make["reach-v3"]() as env:
        for episode in range(3):
            observation, _ = env.reset(seed=100000 + episode)
            first, last = (int(dataset.meta.episodes[f"dataset_{end}_index"][episode]) for end in ("from", "to"))
            for row in map(dataset.__getitem__, range(first, last)):
                np.testing.assert_array_equal(row["observation.state"], np.float32(observation["agent_pos"]))
                image = row["observation.image"].permute(1, 2, 0).numpy() * 255
                assert np.abs(image - observation["pixels"]).mean() < 6  # encoding error
                observation, _, success, _, _ = env.step(row["action"].numpy())
            assert success
