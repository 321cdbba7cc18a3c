"""Variants of `Point` with one defect each, registered as broken/NAME-v0."""

from dataclasses import dataclass, field

import gymnasium
import numpy as np
from lerobot.configs import PolicyFeature
from lerobot.envs.configs import EnvConfig

from tests.envs.point import Point
from vla_finetuning.envs.configs import _features


class Reports(Point):
    """Returns another info and reward than `Point`."""

    def __init__(self, info=None, reward=0.0):
        self.info, self.reward = info or {}, reward

    def reset(self, **options):
        return super().reset(**options)[0], {}

    def step(self, action):
        seen, _, terminated, truncated, _ = super().step(action)
        return seen, self.reward, terminated, truncated, dict(self.info)


class Seedless(Point):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if hasattr(self, "position") else seed)


class Shown(Point):
    """Returns observations outside its space."""

    def __init__(self, key="agent_pos", value=None):
        self.key, self.value = key, value

    def see(self):
        return {**super().see(), self.key: self.value}


class Measured(Point):
    """Returns an infinite distance, noisy images and a text, and has no instruction, which are no defects."""

    grain, task_description = 0, None

    def see(self):
        self.grain += 1
        seen = super().see()
        return {**seen, "pixels": seen["pixels"] // 2 + np.uint8(self.grain % 8), "mission": "go"}

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "distance": float("inf")}


class Listed(Point):
    """Begins in one of a list of states; reports success in its last step only."""

    initial_states, init_state_id, task_description = 5, 0, None
    metadata = {"render_fps": 12.5}  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.steps = np.full(3, self.init_state_id / 10, np.float32), 0
        return self.see(), {"is_success": False}

    def expert_action(self):
        return np.zeros(3, np.float32)

    def step(self, action):
        *rest, _ = super().step(action)
        self.steps += 1
        return *rest, {"is_success": True} if self.steps == 5 else {}


class Named(Point):
    """Names its step limit, as LeRobot's environments do, without enforcing it."""

    def __init__(self, limit=4):
        self._max_episode_steps = limit


DEFECTS = {
    "Listed": (Listed, {}),
    "Silent": (Reports, {"info": {"score": 1.0}}),
    "NaN": (Reports, {"info": {"is_success": float("nan")}}),
    "Text": (Reports, {"info": {"is_success": "no"}}),
    "Words": (Reports, {"info": {"is_success": False}, "reward": "much"}),
    "NaNReward": (Reports, {"info": {"is_success": False}, "reward": float("nan")}),
    "Seedless": (Seedless, {}),
    "Wide": (Shown, {"value": np.zeros(7, np.float32)}),
    "Float": (Shown, {"key": "pixels", "value": np.zeros((32, 32, 3), np.float32)}),
    "Small": (Shown, {"key": "pixels", "value": np.zeros((16, 16, 3), np.uint8)}),
    "Lost": (Shown, {"value": np.full(3, np.nan, np.float32)}),
    "Measured": (Measured, {}),
}
for name, (entry_point, kwargs) in DEFECTS.items():
    gymnasium.register(f"broken/{name}-v0", entry_point=entry_point, kwargs=kwargs, max_episode_steps=5)
gymnasium.register("broken/Endless-v0", entry_point=Point)
gymnasium.register("broken/Named-v0", entry_point=Named)
gymnasium.register("broken/NamedByNumpy-v0", entry_point=Named, kwargs={"limit": np.int64(4)})
gymnasium.register("broken/Unbounded-v0", entry_point=Named, kwargs={"limit": float("inf")})
SHAPES = {"action": (3,), "agent_pos": (3,), "pixels": (32, 32, 3)}


@EnvConfig.register_subclass("unlimited_point")
@dataclass
class UnlimitedPoint(EnvConfig):
    """Configuration as a LeRobot package defines it, of an environment without step limit."""

    task: str | None = "Endless-v0"
    features: dict[str, PolicyFeature] = field(default_factory=lambda: _features(SHAPES)[0])
    features_map: dict[str, str] = field(default_factory=lambda: _features(SHAPES)[1])

    @property
    def gym_id(self):
        return f"broken/{self.task}"

    @property
    def gym_kwargs(self):
        return {}
