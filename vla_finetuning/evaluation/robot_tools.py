"""Compare the actions of LeRobot's own tools with those of evaluate.py, for an exported policy.

Each tool's functions get the same recorded frames, in the form of its robot or environment. Measured on LeRobot 0.6.1.
lerobot-rollout's real-time engine and PolicyServer postprocess a chunk when it is predicted; the other tools
postprocess each action when it is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE, OBS_STR
from lerobot.utils.feature_utils import build_dataset_frame, hw_to_dataset_features

from vla_finetuning.policies.pipelines import load_processors
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.remote_code import remote_code

TASK = "task"
# Most compared actions of a chunk.
MOST_STEPS = 16


class Robot:
    """A stand-in for a LeRobot robot that returns recorded frames. Raises ValueError for observations of no robot."""

    def __init__(self, frame: Mapping[str, Any]):
        keys = [key for key in frame if key.startswith(f"{OBS_STR}.")]
        self._cameras = {key: key.removeprefix(f"{OBS_IMAGES}.") for key in keys if frame[key].ndim == 3}
        if unknown := [key for key in keys if key != OBS_STATE and not key.startswith(f"{OBS_IMAGES}.")]:
            raise ValueError(f"robots of LeRobot show {OBS_STATE} and {OBS_IMAGES}.NAME, and the policy sees {unknown}")
        self._motors = [f"{number}.pos" for number in range(len(frame[OBS_STATE]))]
        hardware: dict[str, Any] = dict.fromkeys(self._motors, float)
        hardware |= {name: (*frame[key].shape[1:], 3) for key, name in self._cameras.items()}
        self.features = hw_to_dataset_features(hardware, OBS_STR, use_video=False)

    def observation(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        """Return a frame like `robot.get_observation()`: a number per motor, cameras uint8 (H, W, 3)."""
        motors = dict(zip(self._motors, map(float, frame[OBS_STATE]), strict=True))
        return motors | {
            name: (frame[key] * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
            for key, name in self._cameras.items()
        }


def compare_tools(
    policy: PreTrainedPolicy, folder: Path, frames: Sequence[Mapping[str, Any]], *, trusted: bool = False
) -> dict[str, Any]:
    """Predict actions for frames as evaluate.py does, and by the functions of LeRobot's tools.

    Args:
        policy: the policy that was exported to `folder`, on its device.
        frames: frames of one episode under the robot's own names, from `open_loop.episode_frames`.
    Returns:
        By tool, the largest difference of an action in the dataset's units, 0.0 for equal bits; or the reason why the
        tool cannot play the policy. Empty if evaluate.py cannot play it.
    """
    family, config = family_of(policy.config), policy.config
    if family.remembers(config) or family.cannot_predict(config):
        return {}
    steps = min(len(frames), getattr(config, "n_action_steps", 1), MOST_STEPS)
    frames, device, was_training = frames[:steps], next(policy.parameters()).device, policy.training
    # LeRobot's tools override the device and the export's rename map.
    loading = {"rename_observations_processor": {"rename_map": {}}, "device_processor": {"device": device.type}}

    def lerobots() -> tuple[Any, Any]:
        return make_pre_post_processors(config, pretrained_path=str(folder), preprocessor_overrides=loading)

    def ours() -> torch.Tensor:
        before, after = load_processors(folder, config, trusted=trusted)
        inputs = before({key: value[None] if torch.is_tensor(value) else [value] for key, value in first.items()})
        inputs = {key: value.to(device) if torch.is_tensor(value) else value for key, value in inputs.items()}
        with torch.autocast(device.type, enabled=config.use_amp):
            chunk = family.predict_chunk(policy, inputs)
        return after(chunk)[0, :steps]

    first = {key: value for key, value in frames[0].items() if key != ACTION}
    tools: dict[str, Callable[[], torch.Tensor]] = {
        "select_action": lambda: _select_actions(policy, lerobots(), frames),
        "lerobot-rollout": lambda: _rollout(policy, lerobots(), frames),
        "PolicyServer": lambda: _served(policy, lerobots(), frames, steps),
    }
    differences: dict[str, Any] = {}
    policy.eval()
    try:
        with remote_code(trusted):
            expected = _seeded(ours, device)
            for name, play in tools.items():
                try:
                    differences[name] = float((_seeded(play, device) - expected).abs().max())
                except NotImplementedError as error:
                    differences[name] = str(error)
                except Exception as error:  # report any error of LeRobot
                    differences[name] = f"{type(error).__name__}: {error}"
    finally:
        policy.reset()
        policy.train(was_training)
    return differences


def _seeded(play: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return actions (steps, A) on the CPU, with the same draws every time."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        return play().double().cpu()


def _select_actions(
    policy: PreTrainedPolicy, pipelines: tuple[Any, Any], frames: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Act like lerobot-eval's `rollout` and the loop of README.ipynb."""
    before, after = pipelines
    policy.reset()
    actions = []
    for frame in frames:
        observation = {key: frame[key][None] for key in frame if key.startswith(OBS_STR)} | {TASK: [frame[TASK]]}
        with torch.autocast(next(policy.parameters()).device.type, enabled=policy.config.use_amp):
            actions.append(after(policy.select_action(before(observation))))
    return torch.cat(actions)


def _rollout(policy: PreTrainedPolicy, pipelines: tuple[Any, Any], frames: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Act like lerobot-rollout with its default engine; raise NotImplementedError for relative actions."""
    from lerobot.rollout.inference.sync import SyncInferenceEngine  # not above: it imports drivers of robots

    if getattr(policy.config, "use_relative_actions", False):
        raise NotImplementedError("it refuses relative actions, but with --inference.type=rtc")
    robot, names = Robot(frames[0]), [f"{number}.pos" for number in range(len(frames[0][ACTION]))]
    features = {**robot.features, ACTION: {"dtype": "float32", "shape": (len(names),), "names": names}}
    device = str(next(policy.parameters()).device)
    engine = SyncInferenceEngine(policy, *pipelines, features, names, frames[0][TASK], device, "")
    engine.reset()
    observations = [build_dataset_frame(robot.features, robot.observation(frame), prefix=OBS_STR) for frame in frames]
    return torch.stack([torch.as_tensor(engine.get_action(seen)) for seen in observations])


def _served(
    policy: PreTrainedPolicy, pipelines: tuple[Any, Any], frames: Sequence[Mapping[str, Any]], steps: int
) -> torch.Tensor:
    """Predict a chunk of the first frame like PolicyServer."""
    from lerobot.async_inference import helpers  # not above: it imports drivers of robots

    (before, after), robot = pipelines, Robot(frames[0])
    raw = {**robot.observation(frames[0]), TASK: frames[0][TASK]}
    observation = helpers.raw_observation_to_observation(raw, robot.features, policy.config.image_features)
    chunk = policy.predict_action_chunk(before(observation))
    return torch.stack([after(chunk[:, step]) for step in range(steps)], dim=1)[0]


def describe_tools(differences: Mapping[str, Any]) -> list[str]:
    """Format the result of `compare_tools` as lines."""
    same = [name for name, difference in differences.items() if difference == 0.0]
    lines = [f"{', '.join(same)}: as evaluate.py, bit for bit"] if same else []
    for name, difference in differences.items():
        if isinstance(difference, str):
            lines.append(f"{name}: {difference}")
        elif difference:
            lines.append(f"{name}: up to {difference:.3g} from what evaluate.py plays, in the dataset's units")
    return lines
