"""Read and check the datasets of `--dataset.mixture`, from the command line or from a YAML file.

    power: 0.5
    members:
      - root: s3://bucket/gantry
        weight: 2
        robot: gantry
        rename_map: {observation.images.front: observation.images.base_0_rgb}
      - root: ../arm
        robot: arm

A file provides structure only; references are refused and tags ignored. Scalars are read as the values of flags, so
`episodes: 20:30` is a range, where YAML would read a number of base 60.
"""

from __future__ import annotations

import math
import os
import string
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from vla_finetuning.files import read_regular
from vla_finetuning.options.credentials import refuse_credentials
from vla_finetuning.options.fields import as_kind, did_you_mean, form_of, readings

FLAG = "--dataset.mixture"
# Bound of a file; a member with a hundred listed episodes takes a kilobyte.
MAX_FILE_BYTES = 4 * 2**20
# Largest exponent of a dataset's frames in its weight.
MAX_POWER = 4


@dataclass(frozen=True)
class Member:
    """A dataset of a mixture.

    Attributes:
        root: path or address of the dataset.
        weight, power: factors of the dataset's share of an epoch, weight x frames ** power over the sum of all members.
            `frames` counts the training episodes' frames. Power 1 weighs frames equally, power 0 datasets.
        robot: name of the robot and its control mode. Members of one robot share names, order, statistics and the
            exported policy. None if all members have the same robot.
        rename_map: the policy's names by the dataset's names, in addition to --rename_map.
        camera_keys: cameras to use; None for --dataset.camera_keys.
        episodes, exclude_episodes: numbers of this dataset's episodes to use and to leave out.
        tasks: patterns of tasks; None for --dataset.tasks.
        state, action: names of all dimensions in the order of rows; None for the stored order.
        fps: rate of the actions in a chunk, the dataset's rate divided by a whole number; None for the dataset's rate.
    """

    root: str
    weight: float = 1.0
    power: float = 0.0
    robot: str | None = None
    rename_map: dict[str, str] = field(default_factory=dict)
    camera_keys: list[str] | None = None
    episodes: list[int] | None = None
    exclude_episodes: list[int] | None = None
    tasks: list[str] | None = None
    state: list[str] | None = None
    action: list[str] | None = None
    fps: int | None = None

    def weighted(self, frames: int) -> Member:
        """Return the member with its power replaced by an equivalent weight, for so many training frames."""
        weight = self.weight * float(max(1, frames)) ** self.power if self.power else self.weight
        return replace(self, weight=weight, power=0.0)

    def orders(self) -> dict[str, list[str]]:
        """Return the names of dimensions in the order of rows, by LeRobot's name of the feature."""
        dimensions = {"observation.state": self.state, "action": self.action}
        return {key: names for key, names in dimensions.items() if names is not None}


_KINDS: dict[str, Any] = get_type_hints(Member)


def members(mixture: Mapping[str, Any] | str) -> tuple[Member, ...]:
    """Return the checked members of a mixture, which has the weight, or the member's other options, by root."""
    if isinstance(mixture, str):
        example = """'{"s3://bucket/a": 3, "/data/b": 1}'"""
        raise ValueError(f"{FLAG}={mixture}: expected JSON, as {example}, or @FILE")
    return tuple(
        _member(root, options if isinstance(options, Mapping) else {"weight": options}, f"{FLAG}: {root}")
        for root, options in mixture.items()
    )


def robots(listed: tuple[Member, ...]) -> tuple[str, ...]:
    """Return the sorted names of the robots; a single empty name if all members have the same robot."""
    named = sorted({member.robot for member in listed if member.robot is not None})
    unnamed = [member.root for member in listed if member.robot is None]
    if named and unnamed:
        raise ValueError(f"{FLAG}: {unnamed[0]} names no robot, others are of {', '.join(named)}; give it `robot`")
    return tuple(named) if len(named) > 1 else ("",)


def read_mixture(path: str) -> dict[str, Any]:
    """Read a mixture from a YAML file; return the members' options by root, sorted by root.

    Relative roots start at the file's folder. `power` beside `members` is the default of all members. Errors name the
    file, the member and the key.
    """
    file = Path(path).expanduser()
    try:
        text = read_regular(file, MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        raise FileNotFoundError(f"{FLAG}=@{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}") from error
    refuse_credentials(text, str(path))
    mixture: dict[str, Any] = {}
    for label, options in _listed(path, text):
        root = options.pop("root", None)
        if not isinstance(root, str) or not root.strip():
            raise ValueError(f"{label}: root is {root!r:.100}, expected a path or address of a dataset")
        if "://" not in root and not root.startswith("~"):
            root = os.path.normpath(file.absolute().parent / root)
        if root in mixture:
            raise ValueError(f"{label}: root {root} is listed twice")
        member = _member(root, options, label)
        mixture[root] = {key: getattr(member, key) for key in options}
    return dict(sorted(mixture.items()))


def _member(root: str, options: Mapping[str, Any], label: str) -> Member:
    names = [f.name for f in fields(Member) if f.name != "root"]
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in names:
            raise ValueError(f"{label}: {key!r:.100} is no option of a member{did_you_mean(str(key), names)}")
        try:
            values[key] = _value(_KINDS[key], value)
        except ValueError:
            raise ValueError(f"{label}: {key} is {value!r:.100}, expected {form_of(_KINDS[key])}") from None
    member = Member(root, **values)
    if not (member.weight > 0 and math.isfinite(member.weight)):
        raise ValueError(f"{label}: the weight of {root} is {member.weight}; must be positive, or leave it out")
    if not abs(member.power) <= MAX_POWER:
        raise ValueError(f"{label}: power is {member.power}, expected a number between {-MAX_POWER} and {MAX_POWER}")
    if member.fps is not None and member.fps < 1:
        raise ValueError(f"{label}: fps is {member.fps}, expected at least 1")
    robot = member.robot
    if robot is not None and (not robot or len(robot) > 100 or not robot[0].isalnum() or set(robot) - _NAME):
        raise ValueError(f"{label}: robot is {robot!r:.100}; it names a folder: use letters, digits, _, - and .")
    return member


_NAME = set(string.ascii_letters + string.digits + "_-.")


def _value(kind: Any, value: Any) -> Any:
    """Convert a JSON value or a text of a file into a type. Raises ValueError."""
    candidates = [value]
    if isinstance(value, str):
        candidates = list(readings(value))
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        candidates += readings(",".join(value))
    for candidate in candidates:
        with suppress(ValueError):
            return as_kind(kind, candidate)
    raise ValueError


def _listed(path: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location of each member in a file, in words, and the member's values as written."""
    import yaml

    class Loader(yaml.BaseLoader):
        """Refuse references, which make a small file large in memory, and keys that are given twice."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                refuse("a reference (*name), which no mixture needs", self.peek_event())
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            names: set[str] = set()
            for key, _ in node.value:
                if str(key.value) in names:
                    refuse(f"{key.value!r:.100} is given twice", key)
                names.add(str(key.value))
            return super().construct_mapping(node, deep)

    def refuse(problem: str, where: Any) -> NoReturn:
        raise ValueError(f"{path}, line {where.start_mark.line + 1}: {problem}")

    try:
        top = Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    listed = top.get("members") if isinstance(top, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(member, dict) for member in listed):
        raise ValueError(f"{path}: expected members, a list of datasets, each with its root")
    if unknown := sorted(top.keys() - {"members", "power"}):
        raise ValueError(f"{path}: {unknown[0]!r:.100}: expected members, a list of datasets, and power")
    defaults = {key: value for key, value in top.items() if key == "power"}
    for number, member in enumerate(listed, start=1):
        values = {**defaults, **member}
        label = f"{path}, member {number} (root {member.get('root')!r:.100})"
        yield label, {key: None if value in ("", "~", "null") else value for key, value in values.items()}
