"""Another robot than the demo's: what it shows and does, for tests that refuse or match it. Importing registers it."""

from dataclasses import dataclass, field, replace

from lerobot.configs import PolicyFeature
from lerobot.envs.configs import EnvConfig

from vla_finetuning.envs.configs import TwoBinsConfig, _of_robot
from vla_finetuning.envs.two_bins_scene import GANTRY

ARM = replace(
    GANTRY,
    robot_type="tabletop_arm",
    dimensions=[f"joint_{number}_deg" for number in range(5)],
    low=[-90.0] * 5,
    high=[90.0] * 5,
    cameras={"overhead": (72, 96), "hand": (40, 40)},
)


@EnvConfig.register_subclass("arm")
@dataclass
class ArmConfig(TwoBinsConfig):
    features: dict[str, PolicyFeature] = field(default_factory=lambda: _of_robot(ARM)[0])
    features_map: dict[str, str] = field(default_factory=lambda: _of_robot(ARM)[1])
