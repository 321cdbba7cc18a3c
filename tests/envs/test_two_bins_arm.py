"""The demo's arm: its kinematics against rotations by scipy and finite differences, and what its datasets hold."""

from collections import defaultdict

import gymnasium
import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from scipy.spatial.transform import Rotation

import record
from vla_finetuning.demo import demo_scenes, make_demo_dataset
from vla_finetuning.envs import two_bins
from vla_finetuning.envs.two_bins_arm import (
    ARM,
    BASE_X,
    BASE_Y,
    FOREARM,
    HAND,
    HIGH,
    JOINTS,
    LOW,
    MAX_DEG_PER_FRAME,
    SHOULDER_Z,
    UPPER_ARM,
    forward,
    inverse,
    position,
    render,
)
from vla_finetuning.envs.two_bins_scene import COLOURS, INSTRUCTIONS, Scene, draw_scene

# ---- kinematics -----------------------------------------------------------------------------------------------------


def chained(joints):
    """Points and the hand's turn, from scipy's rotations about each joint's axis in turn."""
    axes = ([0, 0, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0])
    turns = [Rotation.from_rotvec(np.radians(angle) * np.array(axis)) for angle, axis in zip(joints, axes, strict=True)]
    points, turn = [np.array([BASE_X, BASE_Y, SHOULDER_Z])], Rotation.from_euler("z", 180, degrees=True) * turns[0]
    for rotation, length in zip(turns[1:4], (UPPER_ARM, FOREARM, HAND), strict=True):
        turn = turn * rotation
        points.append(points[-1] + turn.apply([0, length, 0]))
    return np.array(points), (turn * turns[4]).as_matrix()


def test_points_are_those_of_rotations_one_after_the_other():
    rng = np.random.default_rng(0)
    for joints in rng.uniform(LOW, HIGH, (200, 5)):
        for found, expected in zip(forward(joints), chained(joints), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-9)


def test_the_inverse_goes_there_with_the_hand_straight_down():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        scene = draw_scene(rng)
        tip = scene.start + rng.uniform(0, 1) * (np.array(scene.place("red")) - scene.start)
        points, turn = chained(inverse(tip))
        np.testing.assert_allclose(points[-1], tip, atol=1e-9)
        np.testing.assert_allclose(turn, [[-1, 0, 0], [0, 0, -1], [0, -1, 0]], atol=1e-9)
        assert points[1, 2] > points[2, 2]  # elbow above wrist
        # The other way round: the joints that it came from.
        np.testing.assert_allclose(inverse(forward(inverse(tip))[0][-1]), inverse(tip), atol=1e-9)


def test_a_small_turn_moves_the_tip_as_a_turn_about_the_joints_axis_does():
    """Finite differences of `position` against the cross product of axis and lever."""
    rng = np.random.default_rng(1)
    for joints in rng.uniform(LOW, HIGH, (50, 5)):
        points, turn = forward(joints)
        across = -np.array([np.cos(np.radians(joints[0])), np.sin(np.radians(joints[0])), 0.0])
        axes = [np.array([0.0, 0.0, 1.0]), across, across, across, turn[:, 1]]
        for joint, (axis, at) in enumerate(zip(axes, (*points[[0, 0, 1, 2]], points[3]), strict=True)):
            step = 1e-4 * np.eye(5)[joint]
            moved = (forward(joints + step)[0][-1] - forward(joints - step)[0][-1]) / np.radians(2e-4)
            np.testing.assert_allclose(moved, np.cross(axis, points[3] - at), atol=1e-5)


def test_places_out_of_reach_are_refused():
    for tip in ([0, -20, 3], [0, 45, 3], [-20, 80, 10]):
        with pytest.raises(ValueError, match="the arm does not reach"):
            inverse(np.array(tip, float))


# ---- in the scene ---------------------------------------------------------------------------------------------------


def test_demonstrations_are_straight_and_within_what_the_drives_can():
    for scene in demo_scenes(20):
        for colour in INSTRUCTIONS:
            state, action = ARM.demonstrate(scene, colour)
            np.testing.assert_array_equal(action[:-1], state[1:])
            assert np.abs(action - state).max() < 0.9 * MAX_DEG_PER_FRAME
            path = np.array([position(joints) for joints in [*state, action[-1]]])
            np.testing.assert_allclose(path[[0, -1]], [scene.start, scene.place(colour)], atol=1e-3)
            way = path[-1] - path[0]
            off = np.cross(path - path[0], way / np.linalg.norm(way))
            assert np.linalg.norm(off, axis=1).max() < 1e-3


def test_drives_are_slow_and_stay_above_the_table():
    with gymnasium.make(two_bins.ARM_GYM_ID) as env:
        before = env.reset(seed=0)[0]["agent_pos"]
        seen = env.step(np.array(HIGH, np.float32))[0]["agent_pos"]
        np.testing.assert_allclose(seen - before, np.minimum(MAX_DEG_PER_FRAME, HIGH - before), atol=1e-4)
        down = np.array([0, -20, 0, -90, 0], np.float32)
        for _ in range(ARM.episode_length - 1):
            seen = env.step(down)[0]
            assert env.observation_space.contains(seen) and forward(seen["agent_pos"])[0][:, 2].min() >= 0


def test_cameras_show_bins_arm_and_what_is_below_the_hand():
    scene = Scene("red", "blue", (0.0, 10.0, 10.0))
    state, _ = ARM.demonstrate(scene, "blue")
    first, last = render(scene, state[0]), render(scene, state[-1])
    assert {name: image.shape for name, image in first.items()} == {"overhead": (72, 96, 3), "hand": (40, 40, 3)}
    red, blue, dark = (COLOURS[name] for name in ("red", "blue", "gripper"))
    left, right = np.split(first["overhead"], 2, axis=1)
    for half, shown, other in ((left, red, blue), (right, blue, red)):
        assert 400 < (half == shown).all(axis=-1).sum() < 600 and not (half == other).all(axis=-1).any()
    # The hand's tip at x = 18 and y = 28, in a picture of 64 by 48 cm.
    row, column = round((50 - 28) / 48 * 71), round((18 + 32) / 64 * 95)
    assert tuple(last["overhead"][row, column]) == dark != tuple(first["overhead"][row, column])
    assert tuple(last["hand"][20, 20]) == blue and tuple(first["hand"][20, 20]) == COLOURS["table"]
    # It turns with the hand: what the hand turns to the left, the picture turns to the right.
    aside = state[-1] + [6, 0, 0, 0, 0]
    turned = aside + [0, 0, 0, 0, -90]
    np.testing.assert_array_equal(np.rot90(render(scene, aside)["hand"], -1), render(scene, turned)["hand"])


# ---- as datasets ----------------------------------------------------------------------------------------------------


def check_rows(dataset, make, seeds):
    """Rows are what gymnasium shows for the same actions, each episode a success.

    Videos lose much of 40x40 pixels; that no frame is its neighbour shows in errors of all frames of an episode.
    """
    for episode, reset in enumerate(seeds):
        with make() as env:
            seen = reset(env)
            first, last = (int(dataset.meta.episodes[f"dataset_{end}_index"][episode]) for end in ("from", "to"))
            played, films = defaultdict(list), defaultdict(list)
            for row in map(dataset.__getitem__, range(first, last)):
                assert row["task"] == env.unwrapped.task_description
                np.testing.assert_allclose(row["observation.state"], seen["agent_pos"], atol=1e-4)
                for name, image in seen["pixels"].items():
                    played[name].append(image.astype(float))
                    films[name].append((row[f"observation.images.{name}"].permute(1, 2, 0) * 255).numpy())
                seen, _, over, _, info = env.step(row["action"].numpy())
            assert over and info["is_success"]
            for name, images in played.items():
                shown = np.array(films[name])
                own, before, after = (
                    np.abs(shown[1:-1] - images[1 + late : len(images) - 1 + late]).mean() for late in (0, -1, 1)
                )
                assert own < 5 and own < 0.9 * min(before, after)


def test_the_demos_dataset_is_what_gymnasium_shows(tmp_path):
    root = make_demo_dataset(tmp_path / "arm", pairs=2, robot=ARM)
    dataset = LeRobotDataset("demo/arm", root=root, video_backend="pyav")
    assert dataset.meta.robot_type == "tabletop_arm" and dataset.fps == 15 and dataset.meta.total_episodes == 4
    assert dataset.meta.names["action"] == dataset.meta.names["observation.state"] == JOINTS

    def begun(scene, colour):
        def reset(env):
            env.reset(seed=0)
            bare = env.unwrapped
            bare._scene, bare.task, bare.task_description = scene, colour, INSTRUCTIONS[colour]
            bare._state = ARM.start(scene)
            return bare._observation()

        return reset

    episodes = [begun(scene, colour) for scene in demo_scenes(2) for colour in INSTRUCTIONS]
    check_rows(dataset, lambda: gymnasium.make(two_bins.ARM_GYM_ID), episodes)
    with pytest.raises(ValueError, match=r"another dataset, with .*tabletop_arm.*instead of .*tabletop_gantry"):
        make_demo_dataset(root, pairs=2)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("kind", "gym_id", "robot_type"),
    [("two_bins", two_bins.GYM_ID, "tabletop_gantry"), ("two_bins_arm", two_bins.ARM_GYM_ID, "tabletop_arm")],
)
def test_recorded_episodes_are_what_gymnasium_shows(ray_cluster, tmp_path, capsys, kind, gym_id, robot_type):
    root = tmp_path / "data"
    assert record.main([f"--env.type={kind}", "--episodes=2", f"--root={root}"]) == 0
    assert f"2 of 2  {kind}" in capsys.readouterr().out
    dataset = LeRobotDataset("recorded/data", root=root, video_backend="pyav")
    robot = two_bins.GANTRY if kind == "two_bins" else ARM
    assert dataset.meta.robot_type == robot_type and dataset.fps == robot.fps and dataset.meta.total_episodes == 2
    assert dataset.meta.names["action"] == dataset.meta.names["observation.state"] == list(robot.dimensions)
    seeds = [lambda env, seed=seed: env.reset(seed=seed)[0] for seed in (100000, 100001)]
    check_rows(dataset, lambda: gymnasium.make(gym_id), seeds)
