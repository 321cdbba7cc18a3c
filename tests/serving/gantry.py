"""A robot for LeRobot's robot_client: a tabletop gantry that remembers what it was told."""

from dataclasses import dataclass, field

import numpy as np
from lerobot.robots import Robot, RobotConfig

STATE = {"x": 1.0, "y": 2.0, "z": 3.0}
SIZES = {"top": (64, 96, 3), "front": (56, 56, 3), "wrist": (48, 48, 3)}


def camera_image(name):
    return np.random.default_rng(len(name)).integers(0, 256, SIZES[name], dtype=np.uint8)


@RobotConfig.register_subclass("gantry")
@dataclass(kw_only=True)
class GantryConfig(RobotConfig):
    camera_names: list[str] = field(default_factory=lambda: list(SIZES))


class Gantry(Robot):
    config_class, name = GantryConfig, "gantry"
    is_connected = is_calibrated = True

    def __init__(self, config):
        super().__init__(config)
        self._cameras, self.performed = config.camera_names, []

    @property
    def observation_features(self):
        return {**dict.fromkeys(STATE, float), **{name: SIZES[name] for name in self._cameras}}

    @property
    def action_features(self):
        return dict.fromkeys(STATE, float)

    def get_observation(self):
        return {
            **STATE,
            **{name: camera_image(name) for name in self._cameras},
        }

    def send_action(self, action):
        self.performed.append([action[name] for name in STATE])
        return action

    def connect(self, calibrate=True): ...

    def disconnect(self): ...

    def calibrate(self): ...

    def configure(self): ...
