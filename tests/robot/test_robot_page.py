"""docs/robot.md, command by command: LeRobot's programs move the gantry as the policy predicts in process."""

import json
import re
import shlex
import sys
from dataclasses import make_dataclass
from threading import Event
from types import SimpleNamespace

import draccus
import numpy as np
import pytest
import torch
from lerobot.cameras.opencv import OpenCVCameraConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.robots import RobotConfig
from lerobot.robots.so_follower import SO101FollowerConfig
from lerobot.rollout.strategies import core
from lerobot.scripts import lerobot_rollout

from diagnostics import check_export
from tests.ci.test_docs import PAGES
from tests.datasets import make_dataset
from tests.evaluation.test_robot_tools import make_relative
from tests.robot.gantry import AXES, Gantry, GantryConfig
from tests.rollouts.test_player import FEATURES, make_base
from tests.serving.servers import PORTS, InProcess, served
from vla_finetuning.envs.two_bins import TwoBins
from vla_finetuning.envs.two_bins_scene import CAMERAS
from vla_finetuning.evaluation.trial import resolve_trial
from vla_finetuning.options.command_line import parse_evaluate, parse_serve
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy
from vla_finetuning.rollouts.episodes import Playing
from vla_finetuning.rollouts.stage import Stage
from vla_finetuning.serving.server import resolve_service

BLOCKS = re.findall(r"```(python|)\n(.*?)```", PAGES["docs/robot.md"], flags=re.DOTALL)
COMMANDS = [shlex.split(block.replace("\\\n", " "), comments=True) for language, block in BLOCKS if not language]
(PYTHON,) = (block for language, block in BLOCKS if language)
TASK, STEPS = "pick up the cube", 4
SHOWN = {f"observation.images.{name}": CAMERAS[name] for name in ("front", "wrist")}


def commands(*program):
    return [command[len(program) :] for command in COMMANDS if tuple(command[: len(program)]) == program]


ROLLOUTS = commands("lerobot-rollout")
(CHECK,) = commands("python", "-m", "diagnostics.check_export")
(SERVE,) = commands("python", "serve.py")
(CLIENT,) = commands("python", "-m", "lerobot.async_inference.robot_client")
FIRST, PLAIN, REALTIME = ROLLOUTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the policies and the dataset by the page's names for them."""
    root = tmp_path_factory.mktemp("robot")
    environment = TwoBins()
    environment.reset(seed=Gantry.SCENE)
    tasks = [environment.task_description, TASK]
    inputs = {key: FEATURES[key] for key in (*SHOWN, "observation.state")}
    policy = make_base(root / "out" / "pretrained_model", tasks, inputs, AXES, chunk_size=50)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "n_action_steps": STEPS}))
    facts = {
        "fps": 10.0,
        "observation.state": AXES,
        "action": AXES,
        "cameras": {key: dict(zip(("height", "width"), size, strict=True)) for key, size in SHOWN.items()},
        "instructions": tasks,
        "n_action_steps": STEPS,
    }
    (policy / "robot.json").write_text(json.dumps(facts))
    make_relative(policy, root / "out" / "relative" / "pretrained_model")
    make_dataset(root / "USER" / "DATASET", episodes=(6,), cameras=SHOWN, state_dim=3, action_dim=3)
    make_dataset(root / "another", episodes=(6,), state_dim=3, action_dim=3)
    return root


@pytest.fixture
def run(folder, monkeypatch):
    """Call a LeRobot program with the arguments of a documented command, for the gantry and its policy."""

    def call(main, command, **others):
        texts = {
            "so101_follower": "gantry",
            "=pi05": "=tiny_pi05",
            "=50": f"={STEPS}",
            "--fps=30": "--fps=10",
            **others,
        }
        for text, other in texts.items():
            command = [argument.replace(text, other) for argument in command]
        monkeypatch.setattr(sys, "argv", ["program", *command])
        main()
        return Gantry.connected

    monkeypatch.chdir(folder)  # the page's paths are relative; robot_client makes a folder for logs
    return call


@pytest.fixture
def rollout(run, monkeypatch):
    handler = SimpleNamespace(shutdown_event=Event())
    monkeypatch.setattr(lerobot_rollout, "ProcessSignalHandler", lambda **_: handler)  # pytest's own Ctrl-C stays
    monkeypatch.setattr(lerobot_rollout, "init_logging", lambda: None)
    monkeypatch.setattr(core, "precise_sleep", lambda seconds: None)  # on the way back
    return lambda command: run(lerobot_rollout.main, command)


def gantry(**limits):
    camera = OpenCVCameraConfig(0, fps=30, width=640, height=480)
    return Gantry(GantryConfig(cameras={key.rpartition(".")[2]: camera for key in SHOWN}, **limits))


def observed(robot):
    """Return an observation in LeRobot's dataset format, in a batch of one."""
    observation = robot.get_observation()
    images = {key: torch.from_numpy(observation[key.rpartition(".")[2]]).permute(2, 0, 1)[None] / 255 for key in SHOWN}
    return {**images, "observation.state": torch.tensor([[observation[name] for name in AXES]])}


def loaded(folder):
    policy = TinyPI05Policy.from_pretrained(folder).eval()
    return policy, *make_pre_post_processors(policy.config, pretrained_path=str(folder))


def perform(robot, actions):
    """Execute actions until the robot interrupts."""
    robot.connect()
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        for action in actions:
            robot.send_action(dict(zip(AXES, map(float, action), strict=True)))
    return robot


def select_actions(policy, before, after, robot):
    while True:
        yield after(policy.select_action(before({**observed(robot), "task": [TASK]})))[0]


def test_documented_robot_options_parse():
    options = make_dataclass("Options", [("robot", RobotConfig)])
    for command in (*ROLLOUTS, CLIENT):
        arguments = [argument for argument in command if argument.startswith("--robot.")]
        robot = draccus.parse(options, args=arguments).robot
        assert type(robot) is SO101FollowerConfig and robot.port == "/dev/ttyACM0"
        assert {name: type(camera) for name, camera in robot.cameras.items()} == {
            "front": OpenCVCameraConfig,
            "wrist": OpenCVCameraConfig,
        }
        assert type(robot.max_relative_target) is (float if command is FIRST else type(None))
    assert len(COMMANDS) == 1 + len(ROLLOUTS) + 3 and COMMANDS[0][:2] == ["pip", "install"]


def test_documented_check_export_command_reports_differences(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert check_export.main(CHECK) == 0
    assert "On the robot select_action, lerobot-rollout, PolicyServer: as evaluate.py, bit" in capsys.readouterr().out
    assert check_export.main(["out/relative/pretrained_model", CHECK[1]]) == 1
    assert "lerobot-rollout: it refuses relative actions, but with --inference.type=rtc" in capsys.readouterr().out
    assert check_export.main([CHECK[0], "another"]) == 2
    assert "another has no observation.images.front, which the policy" in capsys.readouterr().err
    assert check_export.main([*CHECK, "--episode=1"]) == 2
    assert "has episodes 0 to 0" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "limits"), [(FIRST, {"max_relative_target": 5.0}), (PLAIN, {})])
def test_lerobot_rollout_performs_actions_of_select_action(folder, rollout, command, limits):
    robot, expected = rollout(command), gantry(**limits)
    perform(expected, select_actions(*loaded(folder / "out" / "pretrained_model"), expected))
    np.testing.assert_array_equal(robot.performed, expected.performed)
    furthest = np.abs(np.subtract(robot.performed, robot.places[:-1])).max()
    assert furthest <= 5 + 1e-4 if limits else furthest > 6
    start = np.array([robot.get_observation()[name] for name in AXES])
    np.testing.assert_allclose(start, robot.places[0], atol=1e-3)


def test_real_time_engine_converts_relative_chunk_by_its_start_state(folder, rollout):
    robot, start = rollout(REALTIME), gantry()
    policy, before, after = loaded(folder / "out" / "relative" / "pretrained_model")
    start.connect()
    with torch.no_grad():
        chunk = after(policy.predict_action_chunk(before({**observed(start), "task": [TASK]})))[0].numpy()
    (late,) = np.flatnonzero((chunk == robot.performed[0]).all(1))
    rows = chunk[late : max(late + 1, 20)][: Gantry.ACTIONS]  # the next chunk begins where 30 of 50 are left
    np.testing.assert_array_equal(robot.performed[: len(rows)], rows)
    assert late > 0 and np.abs(chunk - chunk[0]).max() > 0.01


def test_relative_actions_are_refused_without_real_time_engine(rollout):
    with pytest.raises(NotImplementedError, match="Use --inference.type=rtc"):
        rollout([argument for argument in REALTIME if not argument.startswith("--inference")])


@pytest.fixture(scope="module")
def server(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        service = resolve_service(parse_serve([*SERVE, *PORTS]))
    with served(service, InProcess(service)) as addresses:
        yield service, addresses


def gym_observation(robot):
    observation = robot.get_observation()
    pixels = {key.rpartition(".")[2]: observation[key.rpartition(".")[2]][None] for key in SHOWN}
    return {"agent_pos": np.array([[observation[name] for name in AXES]], np.float32), "pixels": pixels}


def served_actions(service, robot):
    """Yield actions as robot_client counts: a later chunk begins with the action of the last step."""
    player, latest = service.sources[""].load(1), -1
    while True:
        first = max(latest, 0)
        (chunk,) = player(gym_observation(robot), [TASK], [(service.config.seed, "monday-1", 0, first)])
        for latest in range(latest + 1, first + STEPS):  # noqa: B020
            yield chunk[latest - first]


def test_robot_client_performs_predicted_actions(run, server):
    service, addresses = server
    from lerobot.async_inference.robot_client import async_client  # makes a folder for logs

    with pytest.raises(KeyboardInterrupt):
        run(async_client, CLIENT, **{"127.0.0.1:8080": f"127.0.0.1:{addresses.grpc}"})
    expected = gantry()
    perform(expected, served_actions(service, expected))
    np.testing.assert_array_equal(Gantry.connected.performed, expected.performed)


def test_openpi_client_performs_actions_of_evaluate(folder, server, tmp_path):
    pytest.importorskip("openpi_client.websocket_client_policy", reason="openpi's client: make openpi")
    code = PYTHON.replace("lerobot.robots.so_follower", "tests.robot.gantry").replace("SO101Follower", "Gantry")
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{server[1].port}").replace("monday-1", "two_bins")
    with pytest.raises(KeyboardInterrupt):
        exec(code, {})
    flags = ["--env.type=two_bins", "--eval.n_episodes=1", "--use_gpu=false", f"--output_dir={tmp_path / 'out'}"]
    trial = resolve_trial(parse_evaluate([f"--policy.path={folder / 'out' / 'pretrained_model'}", *flags]))
    (episode,), player, stage = trial.episodes, trial.source.load(1), Stage(trial.makers, 1, 60)
    begin, chunks, played = [Playing(0, episode)], None, []
    while len(played) < Gantry.ACTIONS:
        (_, (waiting,)), observation = stage.advance(begin, chunks)
        key = (trial.config.seed, episode.task, episode.episode, waiting.decision)
        begin, chunks = [], player(observation, [waiting.instruction], [key])
        played += list(chunks[0])
    assert episode.seed == Gantry.SCENE and chunks.shape[1] == STEPS
    np.testing.assert_array_equal(Gantry.connected.performed, played[: Gantry.ACTIONS])
