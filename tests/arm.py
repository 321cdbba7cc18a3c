"""Another robot than the demo's: what it shows and does, for tests that refuse or match it. Importing registers it."""

from dataclasses import dataclass, field

from lerobot.configs import PolicyFeature
from lerobot.envs.configs import EnvConfig

from vla_finetuning.envs.configs import TwoBinsConfig, _features

SHAPES = {"action": (5,), "agent_pos": (5,), "pixels/overhead": (72, 96, 3), "pixels/hand": (40, 40, 3)}


@EnvConfig.register_subclass("arm")
@dataclass
class ArmConfig(TwoBinsConfig):
    features: dict[str, PolicyFeature] = field(default_factory=lambda: _features(SHAPES)[0])
    features_map: dict[str, str] = field(default_factory=lambda: _features(SHAPES)[1])
