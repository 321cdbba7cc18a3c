"""The demo's gantry as a LeRobot robot, which executes what LeRobot's tools command."""

from dataclasses import dataclass, field

import numpy as np
import torch
from lerobot.cameras import CameraConfig
from lerobot.robots import Robot, RobotConfig
from lerobot.robots.utils import ensure_safe_goal_position

from vla_finetuning.envs.two_bins import TwoBins
from vla_finetuning.envs.two_bins_scene import CAMERAS

AXES = ("x.pos", "y.pos", "z.pos")  # lerobot-rollout sees only what ends so


@RobotConfig.register_subclass("gantry")
@dataclass(kw_only=True)
class GantryConfig(RobotConfig):
    """The options of so101_follower that docs/robot.md uses."""

    port: str = ""
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    max_relative_target: float | dict[str, float] | None = None


class Gantry(Robot):
    """Interrupts its program, as Ctrl-C does, after so many actions.

    Attributes:
        SCENE, ACTIONS: of all gantries. connected: the latest.
        performed: the actions until then, as commanded and within the limits; places: where the gripper was.
        succeeded: whether it has reached the bin of the scene's instruction.
    """

    config_class, name = GantryConfig, "gantry"
    is_connected = is_calibrated = True
    SCENE, ACTIONS = 1000, 7
    connected = None

    def __init__(self, config):
        super().__init__(config)
        self.config, self._env = config, TwoBins()
        self._seen, _ = self._env.reset(seed=self.SCENE)
        self.performed, self.places, self.succeeded = [], [self._seen["agent_pos"]], False
        self.instruction = self._env.task_description

    @property
    def observation_features(self):
        return {**dict.fromkeys(AXES, float), **{name: (*CAMERAS[name], 3) for name in self.config.cameras}}

    @property
    def action_features(self):
        return dict.fromkeys(AXES, float)

    def get_observation(self):
        state = dict(zip(AXES, map(float, self._seen["agent_pos"]), strict=True))
        return {**state, **{name: self._seen["pixels"][name] for name in self.config.cameras}}

    def send_action(self, action):
        if (limit := self.config.max_relative_target) is not None:
            state = self.get_observation()
            action = ensure_safe_goal_position({name: (action[name], state[name]) for name in AXES}, limit)
        target = np.array([action[name] for name in AXES], np.float32)
        self._seen, *_, info = self._env.step(target)
        self.succeeded |= info["is_success"]
        if len(self.performed) < self.ACTIONS:
            self.performed.append(target)
            self.places.append(self._seen["agent_pos"])
            if len(self.performed) == self.ACTIONS:
                raise KeyboardInterrupt
        return action

    def connect(self, calibrate=True):
        type(self).connected = self
        torch.manual_seed(0)  # what LeRobot's tools draw is then a matter of the test

    def disconnect(self): ...

    def calibrate(self): ...

    def configure(self): ...
