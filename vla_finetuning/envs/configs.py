"""Environments by their `--env.type`, as LeRobot names and configures them, and how a process makes one.

Importing this module registers `two_bins` with LeRobot: `lerobot-eval --env.discover_packages_path=vla_finetuning.envs
--env.type=two_bins` runs it too.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import draccus
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig, HubEnvConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

from vla_finetuning.envs import two_bins
from vla_finetuning.envs.two_bins_scene import AXES, CAMERAS, FPS


def _features() -> dict[str, PolicyFeature]:
    cameras = {f"pixels/{name}": PolicyFeature(FeatureType.VISUAL, (*size, 3)) for name, size in CAMERAS.items()}
    vectors = {ACTION: FeatureType.ACTION, "agent_pos": FeatureType.STATE}
    return {key: PolicyFeature(kind, (len(AXES),)) for key, kind in vectors.items()} | cameras


@EnvConfig.register_subclass("two_bins")
@dataclass
class TwoBinsConfig(EnvConfig):
    """The demo's gantry (`two_bins.TwoBins`). Its only task says in every episode where to go."""

    task: str | None = "TwoBins-v0"
    fps: int = FPS
    episode_length: int = two_bins.EPISODE_LENGTH
    render_mode: str = "rgb_array"
    features: dict[str, PolicyFeature] = field(default_factory=_features)
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            ACTION: ACTION,
            "agent_pos": OBS_STATE,
            **{f"pixels/{name}": f"{OBS_IMAGES}.{name}" for name in CAMERAS},
        }
    )

    @property
    def package_name(self) -> str:
        return two_bins.__name__

    @property
    def gym_id(self) -> str:
        return f"vla_finetuning/{self.task}"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {"render_mode": self.render_mode, "max_episode_steps": self.episode_length}


def gym_call(config: EnvConfig) -> tuple[str, dict[str, Any]]:
    """What `gymnasium.make` takes for an environment, in a process that need not know LeRobot: its id, and options.

    Raises:
        ValueError: an environment that LeRobot makes otherwise.
    """
    if type(config).create_envs is not EnvConfig.create_envs:
        raise ValueError(f"--env.type={config.type} has several tasks, which are not played here yet; lerobot-eval can")
    options = {**config.gym_kwargs, "disable_env_checker": config.disable_env_checker}
    return f"{config.package_name}:{config.gym_id}", options


def env_config(kind: str, options: Sequence[str] = ()) -> EnvConfig:
    """`--env.type` and the type's own options ("--episode_length=30") to LeRobot's configuration of it.

    Raises:
        ValueError: no such type; an option that it does not have; an environment that would be code from the Hub.
    """
    known = EnvConfig.get_known_choices()
    if kind not in known:
        raise ValueError(f"--env.type={kind}: LeRobot knows no such environment; expected one of {', '.join(known)}")
    if issubclass(known[kind], HubEnvConfig):
        raise ValueError(f"--env.type={kind} runs code from the Hub, which is not done here; lerobot-eval can")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return draccus.parse(known[kind], args=list(options))
    except (draccus.utils.DraccusException, SystemExit) as error:  # SystemExit: an option that it does not know
        names = sorted(f"--env.{name}" for name in known[kind].__dataclass_fields__)
        told = f": {' '.join(str(error).split())}" if str(error) != "2" else ""
        raise ValueError(f"--env.type={kind} with {list(options)}{told}; its options are {', '.join(names)}") from error
