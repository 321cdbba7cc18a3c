"""Check clients' observations against the inputs of a policy, and convert them for `Player`.

Legend: N rows, H W C image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STR

from vla_finetuning.envs.protocol import Observation
from vla_finetuning.files import read_json
from vla_finetuning.options.fields import did_you_mean
from vla_finetuning.options.policy import ROBOT_NAME
from vla_finetuning.policies.pipelines import saved_rename_map, saved_shapes
from vla_finetuning.policies.processors import EMPTY_CAMERA
from vla_finetuning.policies.registry import family_of

INSTRUCTIONS = ("prompt", "task")
MOST_CHARACTERS = 2000
MOST_NAMES = 1000  # reading blocks the event loop that serves all robots


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a robot's policy.

    Attributes:
        robot: name of the robot; "" if there is only one.
        cameras: whether the policy needs each camera, by the dataset's names.
        vectors: length of each vector, by the dataset's names.
        chunk_size: number of actions of an answer.
        rename_map: maps clients' names to the dataset's. Vectors with the same target are joined.
        facts: content of robot.json.
    """

    robot: str
    policy_type: str
    cameras: Mapping[str, bool]
    vectors: Mapping[str, int]
    action_width: int
    chunk_size: int
    rename_map: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_export(cls, robot: str, folder: Path, config: PreTrainedConfig, rename_map: Mapping[str, str]) -> Interface:
        """Describe the policy in a folder, with the entries of `rename_map` whose targets are inputs of it."""
        facts, trained = read_json(folder / ROBOT_NAME), saved_shapes(folder, config)
        names = {policy: name for name, policy in saved_rename_map(folder).items()}
        trained_names = {*trained, *facts.get("cameras", ())}
        cameras, vectors = {}, {}
        for key, feature in config.input_features.items():
            name = names.get(key, key)
            if key in config.image_features:
                if not key.startswith(EMPTY_CAMERA):
                    cameras[name] = not family_of(config).masks_cameras or not trained_names.isdisjoint((key, name))
            elif key.startswith(OBS_STR):
                vectors[name] = trained.get(key, feature.shape)[0]
        own_names = {name: target for name, target in rename_map.items() if target in {**cameras, **vectors}}
        width, settings = config.output_features[ACTION].shape[0], vars(config)
        return cls(robot, config.type, cameras, vectors, width, settings["n_action_steps"], own_names, facts)

    def describe(self) -> dict[str, Any]:
        """Return the metadata for clients, as JSON."""
        return {
            **self.facts,
            "policy_type": self.policy_type,
            "sees": {**{name: "uint8 (H, W, 3)" for name in self.cameras}, **self.vectors},
            "action_width": self.action_width,
            "chunk_size": self.chunk_size,
        }

    def read(self, message: Mapping[Any, Any]) -> tuple[Observation, str]:
        """Read an observation and its instruction.

        Args:
            message: arrays by name: `observation.images.front`, `observation/images/front` and `{"observation":
                {"images": {"front": ...}}}` are the same; images uint8, (H, W, 3) or (3, H, W); the instruction is
                `prompt` or `task`.
        Returns:
            The observation as gymnasium's vector environments have it, images uint8 (1, H, W, 3), vectors float32
            (1, S); and the instruction.
        Raises:
            ValueError: an entry is missing, unknown or of another shape; the message names the remedy.
        """
        sent = dict(itertools.islice(_flat(message), MOST_NAMES + 1))
        if len(sent) > MOST_NAMES:
            raise ValueError(f"the observation has more than {MOST_NAMES} names: send arrays by name")
        instruction = _instruction(sent)
        images: dict[str, np.ndarray] = {}
        vectors: dict[str, list[np.ndarray]] = {name: [] for name in self.vectors}
        # In the order of the map, in which vectors are joined.
        for name, value in {name: sent[name] for name in (*self.rename_map, *sent) if name in sent}.items():
            target = self._target(name)
            if target in self.cameras:
                images[target] = _image(name, value)
            elif target in vectors:
                vectors[target].append(_vector(name, value))
            elif isinstance(value, np.ndarray) and value.ndim >= 3:
                raise ValueError(
                    f"image {name!r}: the policy has no such camera, it sees {', '.join(self.cameras) or 'none'}"
                    f"{did_you_mean(target, list(self.cameras))}; send it by that name, start the server with "
                    f"""--rename_map '{{"{name}": "CAMERA"}}', or leave it out"""
                )
        missing = [name for name, needed in self.cameras.items() if needed and name not in images]
        missing += [name for name in vectors if not vectors[name]]
        if missing:
            raise ValueError(
                f"the observation lacks {', '.join(missing)}; it has {', '.join(map(str, sent)) or 'nothing'}: send "
                f"""it, or start the server with --rename_map '{{"NAME": "{missing[0]}"}}'"""
            )
        return self._arrange(images, {name: np.concatenate(values) for name, values in vectors.items()}), instruction

    def _target(self, name: str) -> str:
        """Return the dataset's name of an entry that a client calls `name`."""
        if name in self.rename_map:
            return self.rename_map[name]
        dotted = name.replace("/", ".")
        return dotted if dotted.startswith(f"{OBS_STR}.") else f"{OBS_STR}.{dotted}"

    def _arrange(self, images: Mapping[str, np.ndarray], vectors: Mapping[str, np.ndarray]) -> Observation:
        """Return images and vectors as gymnasium's environments name them. Raises ValueError for a wrong length."""
        arranged: dict[str, Any] = {"pixels": {}}
        for name, image in images.items():
            if name.startswith(f"{OBS_IMAGES}."):
                arranged["pixels"][name.removeprefix(f"{OBS_IMAGES}.")] = image[None]
            else:  # as LeRobot's `preprocess_observation` passes on unknown entries
                arranged[name.removeprefix(f"{OBS_STR}.")] = image[None].transpose(0, 3, 1, 2).astype(np.float32) / 255
        for name, vector in vectors.items():
            if len(vector) != self.vectors[name]:
                entries = self.facts.get(name)
                named = f" ({', '.join(map(str, entries))})" if isinstance(entries, list) else ""
                raise ValueError(
                    f"{name!r} has {len(vector)} entries, and the policy was trained with {self.vectors[name]}{named}: "
                    "it is another robot's, or entries are missing"
                )
            arranged[name.removeprefix(f"{OBS_STR}.")] = vector[None]
        return arranged if arranged["pixels"] else {key: value for key, value in arranged.items() if key != "pixels"}


def _flat(message: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in message.items():
        if not isinstance(key, str):
            raise ValueError(f"the observation has the key {key!r}: names are texts")
        if isinstance(value, Mapping):
            if depth == 3:
                raise ValueError(f"{prefix}{key} is nested too deep: send arrays by name")
            yield from _flat(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _instruction(sent: dict[str, Any]) -> str:
    """Remove the instruction from `sent`, and return it. Raises ValueError if there is none."""
    instructions = [sent.pop(name) for name in INSTRUCTIONS if name in sent]
    text = str(instructions[0]) if instructions and isinstance(instructions[0], (str, np.str_)) else None
    if text is None:
        problem = f"it is {type(instructions[0]).__name__}" if instructions else "there is none"
        raise ValueError(f"the observation needs an instruction, a text by the name 'prompt' or 'task'; {problem}")
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"the instruction has {len(text):,} characters: send at most {MOST_CHARACTERS:,}")
    return text


def _image(name: str, value: Any) -> np.ndarray:
    description = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3:
        if value.shape[2] != 3 and value.shape[0] == 3:
            value = value.transpose(1, 2, 0)
        if value.shape[2] == 3 and min(value.shape[:2]) > 3:
            return np.ascontiguousarray(value)
    raise ValueError(f"camera {name!r} is {description}: send RGB as uint8 (H, W, 3) or (3, H, W)")


def _vector(name: str, value: Any) -> np.ndarray:
    array = None
    if isinstance(value, (np.ndarray, np.number, float, int, list)):
        with suppress(ValueError):  # lists of unequal lengths
            array = np.atleast_1d(np.asarray(value))
    if array is None or array.dtype.kind not in "fiu" or array.ndim != 1:
        description = type(value).__name__ if array is None else f"{array.dtype} {array.shape}"
        raise ValueError(f"{name!r} is {description}: send a vector of numbers")
    vector = array.astype(np.float32)
    if not np.isfinite(vector).all():
        raise ValueError(f"{name!r} holds values that are not finite: {vector}")
    return vector
