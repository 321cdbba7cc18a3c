"""Configure environments by their `--env.type`, as LeRobot names them, and return makers of them for other processes.

Importing this module registers `two_bins` with LeRobot: `lerobot-eval
--env.discover_packages_path=vla_finetuning.envs --env.type=two_bins` runs it too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import gymnasium
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig, HubEnvConfig, LiberoEnv, MetaworldEnv
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGE, OBS_IMAGES, OBS_STATE
from lerobot.utils.import_utils import register_third_party_plugins

from vla_finetuning.envs import metaworld, two_bins
from vla_finetuning.envs.contract import checked
from vla_finetuning.envs.libero import RenderedOnDemand
from vla_finetuning.envs.protocol import Maker, attribute, choose_gl, close_quietly, load_package
from vla_finetuning.envs.two_bins_scene import AXES, CAMERAS, EPISODE_LENGTH, FPS
from vla_finetuning.files import read_json
from vla_finetuning.lerobot_options import make_config
from vla_finetuning.options.environment import ENVIRONMENT_NAME

# LeRobot's key and feature type of each part of an observation.
_SHOWN = {
    ACTION: (ACTION, FeatureType.ACTION),
    "pixels": (OBS_IMAGE, FeatureType.VISUAL),
    "agent_pos": (OBS_STATE, FeatureType.STATE),
    "environment_state": (OBS_ENV_STATE, FeatureType.ENV),
}


def _features(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, PolicyFeature], dict[str, str]]:
    """Return LeRobot's `features` and `features_map` for arrays of the given shapes, by name ("pixels/top")."""
    features = {key: PolicyFeature(_SHOWN[key.partition("/")[0]][1], shape) for key, shape in shapes.items()}
    return features, {key: f"{OBS_IMAGES}.{key.partition('/')[2]}" if "/" in key else _SHOWN[key][0] for key in shapes}


def _gantry_features() -> tuple[dict[str, PolicyFeature], dict[str, str]]:
    vectors = dict.fromkeys((ACTION, "agent_pos"), (len(AXES),))
    return _features(vectors | {f"pixels/{name}": (*size, 3) for name, size in CAMERAS.items()})


@EnvConfig.register_subclass("two_bins")
@dataclass
class TwoBinsConfig(EnvConfig):
    """Configuration of the demo's gantry (`two_bins.TwoBins`), whose only task has a new instruction per episode."""

    task: str | None = two_bins.GYM_ID.partition("/")[2]
    fps: int = FPS
    episode_length: int = EPISODE_LENGTH
    render_mode: str = "rgb_array"
    # Whether an episode ends with its success instead of after episode_length.
    terminates: bool = True
    # Bins of four colours, square or round, named by colour, by side, by shape or by the other bin.
    many_instructions: bool = False
    features: dict[str, PolicyFeature] = field(default_factory=lambda: _gantry_features()[0])
    features_map: dict[str, str] = field(default_factory=lambda: _gantry_features()[1])

    @property
    def package_name(self) -> str:
        return two_bins.__name__

    @property
    def gym_id(self) -> str:
        return f"vla_finetuning/{self.task}"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("render_mode", "terminates", "many_instructions")}
        return {**options, "max_episode_steps": self.episode_length}


@dataclass
class MetaworldConfig(MetaworldEnv):
    """Configuration of Meta-World (`metaworld.Metaworld`), with an image size and a rendering quality.

    `task` is a task, one of Meta-World's four groups (`easy`, `medium`, `hard`, `very_hard`), or several of these.
    """

    episode_length: int = metaworld.EPISODE_LENGTH
    # Height and width of the policy's images. LeRobot's are always 480x480 in full quality.
    image_size: tuple[int, int] = (480, 480)
    render_quality: str = "full"

    def __post_init__(self) -> None:
        if self.obs_type not in metaworld.OBS_TYPES or self.render_quality not in metaworld.QUALITIES:
            raise ValueError(
                f"obs_type={self.obs_type}, render_quality={self.render_quality}: expected one of "
                f"{', '.join(metaworld.OBS_TYPES)}, and one of {', '.join(metaworld.QUALITIES)}"
            )
        if min(self.image_size) < 8 or not 0 < self.episode_length <= metaworld.EPISODE_LENGTH:
            raise ValueError(
                f"image_size={list(self.image_size)}, episode_length={self.episode_length}: expected [height, width] "
                f"of at least 8, and at most {metaworld.EPISODE_LENGTH} steps"
            )
        shapes = {"pixels": (*self.image_size, 3), "agent_pos": (4,), "environment_state": (39,)}
        shown = {key: shape for key, shape in shapes.items() if key in self.obs_type}
        self.features, self.features_map = _features({**shown, ACTION: (4,)})

    @property
    def type(self) -> str:
        return "metaworld"

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        options = {"obs_type": self.obs_type, "image_size": tuple(self.image_size), "quality": self.render_quality}
        return {**options, "max_episode_steps": self.episode_length}

    def makers(self) -> dict[str, Maker]:
        """Return makers, as `task_makers`, by the names of Meta-World's tasks."""
        lists = json.loads(files("lerobot.envs").joinpath("metaworld_config.json").read_text())
        instructions, groups = lists["TASK_DESCRIPTIONS"], lists["DIFFICULTY_TO_TASKS"]
        names = [name.strip().removeprefix("metaworld-") for name in self.task.split(",")]
        tasks = list(dict.fromkeys(task for name in names for task in groups.get(name, [name])))
        if unknown := [task for task in tasks if task not in instructions]:
            raise ValueError(
                f"--env.task: Meta-World has no {', '.join(unknown)}; expected some of {', '.join(groups)}, "
                f"{', '.join(sorted(instructions))}"
            )
        if missing := [name for name in ("metaworld", "mujoco") if importlib.util.find_spec(name) is None]:
            raise ValueError(
                f"--env.type=metaworld needs {' and '.join(missing)} (on every node that simulates): make metaworld"
            )
        make = partial(gymnasium.make, f"{metaworld.__name__}:{metaworld.GYM_ID}", **self.gym_kwargs)
        return {task: partial(make, task=task, instruction=instructions[task]) for task in tasks}


@EnvConfig.register_subclass("gym")
@dataclass
class GymConfig(EnvConfig):
    """Configuration of any environment that gymnasium registers: `--env.task NAMESPACE/Name-v0`, or `module:Name-v0`.

    The constructor makes one environment, whose spaces, metadata and registration complete the configuration.
    """

    fps: int = 0
    episode_length: int | None = None
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    # Arguments of the environment's constructor.
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.task:
            raise ValueError("which environment? give --env.task NAMESPACE/Name-v0, as gymnasium registers it")
        if self.features:
            return  # a copy
        choose_gl()
        with gymnasium.make(f"{self.package_name}:{self.gym_id}", **self.gym_kwargs) as env:
            self.episode_length = self.episode_length or (env.spec.max_episode_steps if env.spec else None)
            if self.episode_length is None:
                raise ValueError(
                    f"{self.task} has no step limit, so that an episode may never end: register it with "
                    "max_episode_steps=N, or give --env.episode_length N"
                )
            rate = env.metadata.get("render_fps") or 30
            if not self.fps and rate != int(rate):
                raise ValueError(f"{self.task} has render_fps={rate}, which is not whole: give --env.fps")
            self.fps = self.fps or int(rate)
            spaces = {ACTION: env.action_space, **_leaves_of(env.observation_space)}
        shapes: dict[str, tuple[int, ...]] = {}
        for key, space in spaces.items():
            if key.partition("/")[0] not in _SHOWN:
                continue
            axes = 3 if key.startswith("pixels") else 1
            if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != axes:
                kind = "a Box (height, width, channels)" if axes == 3 else "a Box of one axis"
                raise ValueError(f"{self.task}: '{key}' is {space}: expected {kind}")
            shapes[key] = tuple(space.shape)
        self.features, self.features_map = _features(shapes)
        if len(self.features) == 1:
            raise ValueError(
                f"{self.task} shows {', '.join(spaces.keys() - {ACTION, ''}) or 'one array'}: expected a "
                "gymnasium.spaces.Dict of 'pixels' (one camera, or a Dict by camera), 'agent_pos', 'environment_state'"
            )

    @property
    def package_name(self) -> str:
        module, _, name = str(self.task).rpartition(":")
        namespace = name.rpartition("/")[0]
        return module or (namespace if namespace and importlib.util.find_spec(namespace) else "gymnasium")

    @property
    def gym_id(self) -> str:
        return str(self.task).rpartition(":")[2]

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        limit = {} if self.episode_length is None else {"max_episode_steps": self.episode_length}
        return {**self.kwargs, **limit}


def _leaves_of(space: gymnasium.Space[Any], key: str = "") -> dict[str, gymnasium.Space[Any]]:
    if not isinstance(space, gymnasium.spaces.Dict):
        return {key: space}
    return {
        k: leaf for name, part in space.items() for k, leaf in _leaves_of(part, f"{key}/{name}".lstrip("/")).items()
    }


# Option of all environments, as in LeRobot's parser.
DISCOVER = "--discover_packages_path="
# Values of `--env.type` with a configuration of ours instead of LeRobot's.
OURS: dict[str, type[EnvConfig]] = {"metaworld": MetaworldConfig}
# Packages of --env.discover_packages_path in this process; stages import them too.
_discovered: dict[str, None] = {}


def is_own(config: EnvConfig) -> bool:
    """Return whether an environment is the user's own, neither LeRobot's nor ours."""
    return isinstance(config, GymConfig) or not type(config).__module__.startswith(("lerobot.", "vla_finetuning."))


def task_makers(config: EnvConfig) -> dict[str, Maker]:
    """Return a maker of each task's environment, equal to LeRobot's `make_env` and in its order.

    Runs on the driver. An environment with one task is named by its type, `pusht`; Meta-World's tasks have their own
    names, `reach-v3`; others have suite and number, `libero_10/3`. Makers of environments that gymnasium registers do
    not import LeRobot. Raises ValueError if a package is not installed, or the environment has no such task.
    """
    own: dict[str, Any] = {}
    if is_own(config):
        module = config.package_name if isinstance(config, GymConfig) else type(config).__module__
        own["packages"], own["module"] = tuple(_discovered), module
        own["shapes"] = {key: tuple(feature.shape) for key, feature in config.features.items() if key != ACTION}
    return {task: partial(checked, pickle.dumps(make), **own) for task, make in _makers(config).items()}


def _makers(config: EnvConfig) -> dict[str, Maker]:
    if isinstance(config, MetaworldConfig):
        return config.makers()
    if type(config).create_envs is EnvConfig.create_envs:
        options = {**config.gym_kwargs, "disable_env_checker": config.disable_env_checker}
        if is_own(config) and config.gym_id in gymnasium.registry:
            return {config.type: partial(gymnasium.make, config.gym_id, **options)}
        package = config.package_name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--env.type={config.type} needs the package {package}, which is not installed (on any node that "
                f"simulates): pip install {package.replace('_', '-')}"
            )
        return {config.type: partial(gymnasium.make, f"{config.package_name}:{config.gym_id}", **options)}
    return {f"{suite}/{number}": partial(_lerobot_env, config, suite, number) for suite, number in _create_envs(config)}


def _of_each_task(config: EnvConfig, name: str) -> dict[str, Any]:
    """Return an attribute of each task's environment, None where it has none. Raises as `task_makers`."""
    if type(config).create_envs is EnvConfig.create_envs:
        envs = {task: make() for task, make in task_makers(config).items()}
    else:  # once: without `task_ids`, each maker makes the environments of all tasks
        made = _create_envs(config).items()
        envs = {f"{suite}/{number}": _adapted(config, env) for (suite, number), env in made}
    values = {task: attribute(env, name) for task, env in envs.items()}
    for env in envs.values():
        close_quietly(env)
    return values


def longest_episode(config: EnvConfig) -> int | None:
    """Return the longest step limit of all tasks; None if one has none. Raises as `task_makers`."""
    if (length := getattr(config, "episode_length", None)) is not None:
        return length
    limits = list(_of_each_task(config, "_max_episode_steps").values())
    return None if None in limits else max(limits)


def initial_state_counts(config: EnvConfig) -> dict[str, int]:
    """Return the number of initial states of each task that has a list of them; other tasks draw theirs from the seed.

    Raises as `task_makers`.
    """
    if not is_own(config) and not isinstance(config, LiberoEnv):
        return {}  # these have none, and the fifty environments of Meta-World take long to make
    return {task: count for task, count in _of_each_task(config, "initial_states").items() if count is not None}


def how_drawn(config: EnvConfig) -> dict[str, Any]:
    """Return the options that decide how an environment is rendered, as JSON; empty if there are none."""
    if not isinstance(config, MetaworldConfig):
        return {}
    return {"type": config.type, "image_size": list(config.image_size), "render_quality": config.render_quality}


def drawn_for(folder: Path) -> Any:
    """Return `how_drawn` of the images that a policy was trained on, from its folder, or None."""
    return read_json(folder / ENVIRONMENT_NAME).get("drawn")


def check_drawn(trained: Any, config: EnvConfig, path: object) -> None:
    """Refuse an environment that is rendered otherwise than `trained`, the `how_drawn` of a policy's training images.

    Raises ValueError, which names `path`, the source of `trained`, and the flags that make both equal.
    """
    rendering = how_drawn(config)
    if not isinstance(trained, dict) or trained.get("type") != rendering.get("type"):
        return  # recorded in another environment, or unknown
    if differ := {key: trained[key] for key in rendering if key in trained and trained[key] != rendering[key]}:
        flags = " ".join(f"--env.{key}={str(value).replace(' ', '')}" for key, value in differ.items())
        raise ValueError(f"{path}: its images were rendered with other options ({ENVIRONMENT_NAME}): give {flags}")


def check_rate(fps: float, step: int, config: EnvConfig, path: object) -> None:
    """Raise ValueError if a mixture's `fps` took every `step`-th action, and the environment has another rate."""
    if step > 1 and fps != config.fps:
        raise ValueError(
            f"{path}: the policy's actions are {step} frames apart, {fps:g} per second (fps in the mixture), and "
            f"--env.type={config.type} takes {config.fps} per second: train without fps, or give --env.fps={fps:g} if "
            "the environment holds each action for that long"
        )


def _create_envs(config: EnvConfig) -> dict[tuple[str, int], Any]:
    """Make LeRobot's environments, by suite and number of the task."""
    choose_gl()
    printed = io.StringIO()
    try:
        # LIBERO's first import asks in the terminal for the folder of its files.
        with contextlib.redirect_stdout(printed), _no_input():
            suites = config.create_envs(n_envs=1)
            return {(suite, number): vector.envs[0] for suite, own in suites.items() for number, vector in own.items()}
    except ImportError as error:
        raise ValueError(
            f"--env.type={config.type} needs what is not installed ({error}; on any node that simulates); LeRobot's "
            f"documentation says how: https://huggingface.co/docs/lerobot/{config.type.partition('_')[0]}"
        ) from error
    except EOFError as error:
        raise ValueError(
            f"--env.type={config.type} asks a question at its first import ({printed.getvalue().strip()[-200:]!r}): "
            "import it once in a terminal, on every node that simulates, and answer"
        ) from error
    except (KeyError, AssertionError, FileNotFoundError) as error:
        raise ValueError(
            f"--env.type={config.type} --env.task={config.task}: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _no_input() -> Iterator[None]:
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = stdin


def _lerobot_env(config: EnvConfig, suite: str, number: int) -> gymnasium.Env[Any, Any]:
    """Make the environment of one task."""
    changes: dict[str, Any] = {"task_ids": [number]} if hasattr(config, "task_ids") else {}
    if suite in [name.strip() for name in str(config.task).split(",")]:  # a name may stand for several suites
        changes["task"] = suite
    return _adapted(config, _create_envs(replace(config, **changes))[suite, number])


def _adapted(config: EnvConfig, env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Wrap LeRobot's environment to render on demand, if it is LIBERO."""
    return RenderedOnDemand(env) if isinstance(config, LiberoEnv) else env


def env_config(env_type: str, options: Sequence[str] = ()) -> EnvConfig:
    """Return LeRobot's configuration of an environment, with options of its type ("--episode_length=30").

    "--discover_packages_path=PACKAGE" imports a package that registers types; installed packages lerobot_env_* are
    imported anyway. Raises ValueError for an unknown type or option, code from the Hub, or a package that cannot be
    imported.
    """
    packages = [option.removeprefix(DISCOVER) for option in options if option.startswith(DISCOVER)]
    options = [option for option in options if not option.startswith(DISCOVER)]
    for package in packages:
        load_package(package)
        _discovered[package] = None
    if env_type not in EnvConfig.get_known_choices() and "/" not in env_type:
        register_third_party_plugins()
    config_classes = EnvConfig.get_known_choices() | OURS
    if "/" in env_type or (env_type in config_classes and issubclass(config_classes[env_type], HubEnvConfig)):
        raise ValueError(
            f"--env.type={env_type} would run code from the Hub, which is not done here; lerobot-eval can, with "
            "--trust_remote_code"
        )
    if env_type not in config_classes:
        raise ValueError(
            f"--env.type={env_type}: LeRobot knows no such environment; expected one of {', '.join(config_classes)}; "
            "--env.discover_packages_path PACKAGE registers others, and --env.type gym plays what gymnasium registers"
        )
    try:
        config = cast(EnvConfig, make_config(config_classes[env_type], "env", options))
        for name in ("fps", "episode_length"):  # -1 is endless for gymnasium
            if (value := getattr(config, name, None)) is not None and value < 1:
                raise ValueError(f"--env.{name}={value}: expected at least 1")
    except ValueError as error:
        raise ValueError(f"--env.type={env_type}: {error}") from error
    return config
