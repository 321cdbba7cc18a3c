"""Reported differences of LeRobot's tools against its PolicyServer and rollout on a fake robot."""

import json
import pickle
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors
from lerobot.rollout import context
from lerobot.rollout.inference import SyncInferenceConfig
from lerobot.utils.feature_utils import build_dataset_frame, hw_to_dataset_features

from tests.datasets import make_dataset
from tests.in_process import TINY
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.evaluation.robot_tools import compare_tools, describe_tools
from vla_finetuning.policies.loading import load_policy, load_policy_config
from vla_finetuning.policies.own_names import pipeline_with_names
from vla_finetuning.policies.pipelines import make_processors
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy

STEPS, CHUNK = 5, 6
MOTORS = [f"{number}.pos" for number in range(3)]
TOP, WRIST = "observation.images.top", "observation.images.wrist"
BASE, LEFT = "observation.images.base_0_rgb", "observation.images.left_wrist_0_rgb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Export `own`, in the robot's names, and `base`, with renamed square cameras and a rename step."""
    folder = tmp_path_factory.mktemp("tools")
    meta = load_metadata(make_dataset(folder / "dataset", episodes=(9,), state_dim=3, action_dim=3))
    make_base(folder / "own", meta, chunk_size=CHUNK, **TINY)
    cameras = {BASE: (32, 32), LEFT: (32, 32)}
    root = make_dataset(folder / "renamed", episodes=(6,), cameras=cameras, state_dim=3, action_dim=3)
    base = make_base(folder / "renamed_base", load_metadata(root), chunk_size=CHUNK, **TINY)
    config = load_policy_config(base)
    before, after = make_processors(base, config, meta.stats)
    before = pipeline_with_names(before, {}, {TOP: BASE, WRIST: LEFT})
    save_pretrained(load_policy(base, config), before, after, folder / "base")
    return folder


@pytest.fixture(scope="module")
def frames(folder):
    dataset = LeRobotDataset("local/x", root=folder / "dataset", video_backend="pyav")
    keys = ("task", "action", "observation.state", TOP, WRIST)
    return [{key: dataset[number][key] for key in keys} for number in range(STEPS)]


def robot_observation(frame):
    """Return a frame as a LeRobot robot observes it."""
    images = {key.rpartition(".")[2]: (frame[key] * 255).round().to(torch.uint8) for key in (TOP, WRIST)}
    motors = dict(zip(MOTORS, frame["observation.state"].tolist(), strict=True))
    return motors | {name: image.permute(1, 2, 0).numpy() for name, image in images.items()}


def hardware_features(frames):
    return {key: float if key in MOTORS else value.shape for key, value in robot_observation(frames[0]).items()}


def plain_chunk(export, frames):
    """Predict a chunk of the first frame with LeRobot's calls."""
    policy = TinyPI05Policy.from_pretrained(export).eval()
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(export))
    torch.manual_seed(0)
    with torch.no_grad():
        observation = {key: value for key, value in frames[0].items() if key != "action"}
        return after(policy.predict_action_chunk(before(observation)))[0, :STEPS]


def rollout_actions(export, frames, monkeypatch):
    """Return the actions that lerobot-rollout commands."""
    names = [*MOTORS]
    robot = SimpleNamespace(
        name="fake", robot_type="fake", connect=lambda: None, get_observation=lambda: robot_observation(frames[0])
    )
    robot.observation_features, robot.action_features = hardware_features(frames), dict.fromkeys(names, float)
    monkeypatch.setattr(context, "make_robot_from_config", lambda config: robot)
    policy = PreTrainedConfig.from_pretrained(export, cli_overrides=["--device=cpu"])
    policy.pretrained_path = str(export)
    config = {"inference": SyncInferenceConfig(), "policy": policy, "robot": None, "teleop": None, "dataset": None}
    config |= {"device": "cpu", "task": frames[0]["task"], "fps": 10.0, "rename_map": {}, "strategy": None}
    config |= {"use_torch_compile": False, "compile_warmup_inferences": 0, "resume": False}
    rollout = context.build_rollout_context(SimpleNamespace(**config), Event())
    engine = rollout.policy.inference
    torch.manual_seed(0)
    features, shown = rollout.data.hw_features, map(robot_observation, frames)
    return torch.stack([engine.get_action(build_dataset_frame(features, seen, prefix="observation")) for seen in shown])


def server_actions(export, frames, monkeypatch, tmp_path):
    """Return the actions that PolicyServer answers."""
    monkeypatch.chdir(tmp_path)  # it makes a folder for logs where it is imported
    from lerobot.async_inference import helpers, policy_server
    from lerobot.async_inference.configs import PolicyServerConfig

    monkeypatch.setattr(policy_server, "get_policy_class", lambda _: TinyPI05Policy)
    server = policy_server.PolicyServer(PolicyServerConfig())
    features = hw_to_dataset_features(hardware_features(frames), "observation", use_video=False)
    setup = helpers.RemotePolicyConfig("pi05", str(export), features, STEPS)
    server.SendPolicyInstructions(SimpleNamespace(data=pickle.dumps(setup)), SimpleNamespace(peer=lambda: "x"))
    raw = {**robot_observation(frames[0]), "task": frames[0]["task"]}
    torch.manual_seed(0)
    with torch.no_grad():
        answer = server._predict_action_chunk(helpers.TimedObservation(timestamp=0.0, timestep=0, observation=raw))
    return torch.stack([action.get_action() for action in answer])


def compare(export, frames):
    return compare_tools(TinyPI05Policy.from_pretrained(export).eval(), export, frames)


def largest(a, b):
    return float((a.double() - b.double()).abs().max())


def test_all_tools_play_an_export_in_robot_names(folder, frames, tmp_path, monkeypatch):
    export = folder / "own"
    result, expected = compare(export, frames), plain_chunk(export, frames)
    assert result == {"select_action": 0.0, "lerobot-rollout": 0.0, "PolicyServer": 0.0}
    assert largest(rollout_actions(export, frames, monkeypatch), expected) == 0.0
    assert largest(server_actions(export, frames, monkeypatch, tmp_path), expected) == 0.0
    assert describe_tools(result) == ["select_action, lerobot-rollout, PolicyServer: as evaluate.py, bit for bit"]


def test_export_with_renamed_keys_fails_as_reported(folder, frames, tmp_path, monkeypatch):
    export = folder / "base"
    result = compare(export, frames)
    with pytest.raises(ValueError, match="Visual feature mismatch"):
        rollout_actions(export, frames, monkeypatch)
    assert "image features are missing" in result["lerobot-rollout"]
    with pytest.raises(KeyError, match=TOP):
        server_actions(export, frames, monkeypatch, tmp_path)
    assert result["PolicyServer"] == f"KeyError: '{TOP}'"
    assert any("select_action: ValueError" in line for line in describe_tools(result))


def test_image_sizes_other_than_the_cameras_are_measured(folder, frames, tmp_path, monkeypatch):
    """PolicyServer stretches images to the sizes in config.json."""
    export = tmp_path / "square"
    config = load_policy_config(folder / "own")
    for key in (TOP, WRIST):
        config.input_features[key].shape = (3, 32, 32)
    policy = load_policy(folder / "own", config)
    save_pretrained(policy, *make_pre_post_processors(config, pretrained_path=str(folder / "own")), export)
    result = compare(export, frames)
    assert result["select_action"] == result["lerobot-rollout"] == 0.0 < result["PolicyServer"]
    stretched = server_actions(export, frames, monkeypatch, tmp_path)
    assert result["PolicyServer"] == pytest.approx(largest(stretched, plain_chunk(export, frames)), rel=1e-6)


def make_relative(folder, export):
    """Save a copy of a policy with actions relative to the state."""
    config = load_policy_config(folder)
    config.use_relative_actions = True
    processors = make_pre_post_processors(
        config,
        pretrained_path=str(folder),
        preprocessor_overrides={"relative_actions_processor": {"enabled": True}},
        postprocessor_overrides={"absolute_actions_processor": {"enabled": True}},
    )
    save_pretrained(load_policy(folder, config), *processors, export)
    return export


def test_relative_actions_differ_by_the_state_they_start_from(folder, frames, tmp_path, monkeypatch):
    export = make_relative(folder / "own", tmp_path / "relative")
    result = compare(export, frames)
    states = np.stack([frame["observation.state"].numpy() for frame in frames])
    assert result["select_action"] == pytest.approx(np.abs(states - states[0]).max(), rel=1e-4) and states.std() > 0
    answered = server_actions(export, frames, monkeypatch, tmp_path)
    assert result["PolicyServer"] == 0.0 == largest(answered, plain_chunk(export, frames))
    with pytest.raises(NotImplementedError, match="--inference.type=rtc"):
        rollout_actions(export, frames, monkeypatch)
    assert "refuses relative actions, but with --inference.type=rtc" in result["lerobot-rollout"]
    assert json.loads(json.dumps(result)) == result
