"""The demo's environment against gymnasium's and LeRobot's checks, and datasets recorded in it."""

import warnings
from collections import defaultdict

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.envs.factory import make_env
from lerobot.envs.utils import env_to_policy_features, preprocess_observation

import record
from vla_finetuning.envs import two_bins
from vla_finetuning.envs.configs import env_config
from vla_finetuning.envs.two_bins_scene import (
    AXES,
    DWELL_FRAMES,
    EPISODE_LENGTH,
    INSTRUCTIONS,
    MANY_COLOURS,
    MAX_CM_PER_FRAME,
    demonstrate,
)
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.datasets import find_datasets
from vla_finetuning.plan.demo import demo_scenes
from vla_finetuning.plan.matching import policy_data

INSULATED = ["--train.mode=full", "--train.knowledge_insulation=true"]


@pytest.fixture
def env():
    with gymnasium.make(two_bins.GYM_ID, render_mode="rgb_array") as env:
        yield env


def run(env, seed, colour=None):
    """Yield the transitions of a demonstrator episode, to the instructed bin or another."""
    env.reset(seed=seed)
    bare = env.unwrapped
    _, actions = demonstrate(bare._scene, colour or bare.task)
    ended = False
    while not ended:
        action, actions = actions[0], actions[min(1, len(actions) - 1) :]
        transition = env.step(action)
        ended = transition[2] or transition[3]
        yield transition


def test_two_bins_passes_gymnasium_check_env(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # Actions are in cm, as in the dataset.
        warnings.filterwarnings("ignore", ".*symmetric and normalized space")
        check_env(env.unwrapped)


def test_demonstrator_succeeds_only_at_the_instructed_bin(env):
    for seed in range(12):
        *_, last = run(env, seed)
        assert last[1:] == (1.0, True, False, {"is_success": True, "reached": env.unwrapped.task})
        (other,) = INSTRUCTIONS.keys() - {env.unwrapped.task}
        *_, last = run(env, seed, other)
        assert last[1:] == (0.0, True, False, {"is_success": False, "reached": other})


def test_each_of_many_instructions_describes_its_bin():
    config = env_config("two_bins", ["--many_instructions=true"])
    sides, texts = {"left": slice(0, 48), "right": slice(48, 96)}, set()
    with gymnasium.make(two_bins.GYM_ID, **config.gym_kwargs) as env:
        for seed in range(150):
            first, _ = env.reset(seed=seed)
            bare, text = env.unwrapped, env.unwrapped.task_description
            texts.add(text)
            # Colour and shape from the image: a square fills its corners.
            top, colours_seen, shapes = first["pixels"]["top"], {}, {}
            for side, half in sides.items():
                covered = {name: (top[:, half] == rgb).all(2) for name, rgb in MANY_COLOURS.items()}
                (colours_seen[side],) = (name for name, mask in covered.items() if mask.any())
                rows, columns = np.nonzero(covered[colours_seen[side]])
                shapes[side] = "square" if covered[colours_seen[side]][rows.min(), columns.min()] else "round"
            assert colours_seen["left"] != colours_seen["right"]
            word, *words = text.removeprefix("go to the ").split()
            if word == "bin":  # left of the blue one
                side = words[0]
                assert colours_seen[{"left": "right", "right": "left"}[side]] == words[3]
            else:
                (side,) = (s for s in sides if word in (s, shapes[s], colours_seen[s]))
            assert colours_seen[side] == bare.task
            assert bare.subtask == f"move to the {bare.task} bin"
            if seed < 6:
                subtasks = [bare.subtask for *_, info in run(env, seed) if not info["is_success"]]
                assert set(subtasks[:-2]) == {f"move to the {bare.task} bin", f"stay over the {bare.task} bin"}
                assert [*run(env, seed)][-1][4]["is_success"]
    colours = list(MANY_COLOURS)
    wanted = [f"go to the {name} bin" for name in [*colours, *sides, "square", "round"]]
    wanted += [f"go to the bin {side} of the {colour} one" for side in sides for colour in colours]
    assert texts == set(wanted)


def test_success_at_end_requires_staying_if_episode_continues():
    config = env_config("two_bins", ["--terminates=false"])
    with gymnasium.make(two_bins.GYM_ID, **config.gym_kwargs) as env:
        env.reset(seed=0)
        bare = env.unwrapped
        goal = np.array(bare._scene.place(bare.task), np.float32)
        away = goal - np.array([0, 6, 0], np.float32)
        bare._state = goal.copy()
        places, successes = [goal] * (DWELL_FRAMES + 2) + [away] * 3 + [goal] * 2, []
        for place in places:
            _, reward, terminated, truncated, info = env.step(place)
            successes.append(info["is_success"])
            assert not terminated and not truncated and reward == info["is_success"]
        reached = [False] * (DWELL_FRAMES - 1) + [True] * 3
        assert successes[: len(reached)] == reached and successes[-4:] == [False, False, True, True]
        for _ in range(EPISODE_LENGTH - len(places)):
            *_, truncated, info = env.step(goal)
        assert truncated and info["is_success"]


def test_success_requires_distance_and_dwell_time(env):
    env.reset(seed=0)
    ends = [env.step(env.unwrapped._state)[2:4] for _ in range(EPISODE_LENGTH)]
    assert ends == [(False, False)] * (EPISODE_LENGTH - 1) + [(False, True)]
    bare = env.unwrapped
    goal = np.array(bare._scene.place(bare.task), np.float32)
    for distance, reached in ((two_bins.GOAL_RADIUS_CM - 0.01, bare.task), (two_bins.GOAL_RADIUS_CM + 0.01, "")):
        env.reset(seed=0)
        place = goal - np.array([0, distance, 0], np.float32)
        bare._state = place.copy()
        infos = [env.step(place)[4] for _ in range(DWELL_FRAMES)]
        assert [info["reached"] for info in infos] == [""] * (DWELL_FRAMES - 1) + [reached]
    # One frame beyond the limit restarts the count.
    env.reset(seed=0)
    near, beyond = (goal - np.array([0, distance, 0], np.float32) for distance in (4.5, 6.0))
    bare._state = near.copy()
    places = [near] * (DWELL_FRAMES - 1) + [beyond] + [near] * DWELL_FRAMES
    reached = [env.step(place)[4]["reached"] for place in places]
    assert reached == [""] * (2 * DWELL_FRAMES - 1) + [bare.task]


def test_motion_is_limited_in_speed_and_to_the_table(env):
    env.reset(seed=0)
    before = env.unwrapped._state.copy()
    far = np.array([1000, 1000, -1000], np.float32)
    observation = env.step(far)[0]
    assert np.linalg.norm(observation["agent_pos"] - before) == pytest.approx(MAX_CM_PER_FRAME, rel=1e-5)
    for _ in range(30):
        observation = env.step(far)[0]
    assert env.observation_space.contains(observation)
    for action in (np.array([np.nan, 0, 0], np.float32), np.zeros(2, np.float32)):
        with pytest.raises(ValueError, match="finite numbers"):
            env.step(action)


def test_seed_determines_episode_and_hash_distinguishes_states(env):
    def hashes(seed):
        return [env.unwrapped.state_hash() for _ in run(env, seed)]

    first = hashes(3)
    assert first == hashes(3) and len(set(first)) == len(first)
    assert len({hashes(seed)[0] for seed in range(10)}) == 10


def test_scenes_are_balanced_and_absent_from_the_dataset(env):
    drawn = []
    for seed in range(1000, 1060):
        env.reset(seed=seed)
        drawn.append((env.unwrapped._scene, env.unwrapped.task))
    assert not {scene for scene, _ in drawn} & set(demo_scenes())
    left = sum(scene.left == task for scene, task in drawn)
    assert 18 < left < 42 and 18 < sum(task == "red" for _, task in drawn) < 42


def test_lerobot_features_match_config():
    config = env_config("two_bins", ["--episode_length=30"])
    ((vector,),) = (tasks.values() for tasks in make_env(config, n_envs=1).values())
    observation, _ = vector.reset(seed=1)
    shapes = {key: tuple(value.shape[1:]) for key, value in preprocess_observation(observation).items()}
    features = env_to_policy_features(config)
    assert shapes | {"action": (3,)} == {key: feature.shape for key, feature in features.items()}
    assert vector.call("_max_episode_steps") == (30,)


# ---- as datasets ----------------------------------------------------------------------------------------------------


def check_rows(dataset, seeds):
    """Compare rows with gymnasium, and each video with its neighbouring frames, as its compression loses much."""
    for episode, seed in enumerate(seeds):
        with gymnasium.make(two_bins.GYM_ID) as env:
            observation, _ = env.reset(seed=seed)
            first, last = (int(dataset.meta.episodes[f"dataset_{end}_index"][episode]) for end in ("from", "to"))
            rendered, recorded = defaultdict(list), defaultdict(list)
            for row in map(dataset.__getitem__, range(first, last)):
                assert (row["task"], row["subtask"]) == (env.unwrapped.task_description, env.unwrapped.subtask)
                np.testing.assert_allclose(row["observation.state"], observation["agent_pos"], atol=1e-4)
                for name, image in observation["pixels"].items():
                    rendered[name].append(image.astype(float))
                    recorded[name].append((row[f"observation.images.{name}"].permute(1, 2, 0) * 255).numpy())
                observation, _, over, _, info = env.step(row["action"].numpy())
            assert over and info["is_success"]
            for name, images in rendered.items():
                frames = np.array(recorded[name])
                difference, before, after = (
                    np.abs(frames[1:-1] - images[1 + late : len(images) - 1 + late]).mean() for late in (0, -1, 1)
                )
                assert difference < 5 and difference < 0.9 * min(before, after)


@pytest.mark.ray
def test_recorded_frames_match_gymnasium(ray_cluster, tmp_path, capsys):
    root = tmp_path / "data"
    assert record.main(["--env.type=two_bins", "--episodes=2", f"--root={root}"]) == 0
    assert "2 of 2  two_bins" in capsys.readouterr().out
    dataset = LeRobotDataset("recorded/data", root=root, video_backend="pyav")
    assert dataset.meta.robot_type == "tabletop_gantry" and dataset.fps == 10
    assert dataset.meta.total_episodes == 2
    assert dataset.meta.names["action"] == dataset.meta.names["observation.state"] == AXES
    check_rows(dataset, (100000, 100001))

    # The demo policy's tokenizer covers all texts to generate.
    config = parse_args([f"--dataset.root={root}", "--preset=demo", "--train.text_targets=subtask", *INSULATED])
    _, datasets = find_datasets(config)
    tasks = set(dataset.meta.tasks.index)
    texts = {row["subtask"] for row in map(dataset.__getitem__, range(len(dataset)))}
    data = policy_data(config, datasets, [meta.episode_index for meta in datasets.metas])
    assert {task.partition(", Subtask: ")[2] for task in data["tasks"]} == texts | {""}
    assert {task.partition(", Subtask: ")[0] for task in data["tasks"]} == tasks
    first = dataset[0]["subtask"]
    of_first = {"", first, first.replace("move to", "stay over")}
    data = policy_data(config, datasets, [np.array([0])])
    assert {task.partition(", Subtask: ")[2] for task in data["tasks"]} == of_first
