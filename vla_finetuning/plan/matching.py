"""How datasets are a policy's: of one robot, or of several that differ.

Datasets of one robot are one dataset: features called alike, dimensions in one order, one rate, statistics together.
Robots that differ have their own of all that, and share the policy's names: a row has the cameras of all of them, and
vectors as long as the widest (`data.options.Features.padded`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.configs.policies import PreTrainedConfig
from lerobot.utils.constants import ACTION, OBS_PREFIX

from vla_finetuning.data.metadata import CAMERA_DTYPES, DatasetMetadata, Feature, rename_features, without_features
from vla_finetuning.data.selection import tasks_of
from vla_finetuning.options.mixture import Member, robots
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.base_policy import Base
from vla_finetuning.plan.datasets import Datasets
from vla_finetuning.plan.images import check_images
from vla_finetuning.plan.mixture import (
    check_alike,
    check_dimension_map,
    named_alike,
    names_of_first,
    ordered_alike,
    ordered_by,
)
from vla_finetuning.plan.names import check_camera_keys, observations_renamed
from vla_finetuning.plan.statistics import relative_actions
from vla_finetuning.policies.loading import FeatureMatch, FeatureRow, match_features
from vla_finetuning.policies.processors import normalization_mode
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.spec import Robot

Metas = Sequence[DatasetMetadata]


@dataclass(frozen=True)
class Matched:
    """Datasets as the policy gets them.

    Attributes:
        metas: with the names and order of their robot; of several robots with the policy's names.
        config: the policy's. match: of all of them, by the names in `metas`.
        robots: without statistics; at least one.
        window_steps: as of `data.options.Features`.
    """

    metas: tuple[DatasetMetadata, ...]
    config: PreTrainedConfig
    match: FeatureMatch
    robots: tuple[Robot, ...]
    window_steps: tuple[int, ...] | None = None

    @property
    def rename_map(self) -> dict[str, str]:
        """Names in `metas` -> the policy's, alike for all robots."""
        return self.robots[0].rename_map


def match_datasets(config: Config, datasets: Datasets, base: Base) -> Matched:
    """Match a run's datasets with its policy, whose configuration is fitted to them in place.

    Raises:
        ValueError: datasets, rates or robots that do not go together, or not with the policy.
    """
    metas, members = datasets.metas, datasets.members
    steps = [window_step(meta, member.fps) for meta, member in zip(metas, members, strict=True)]
    maps = [_names_of(config, member) for member in members]
    if config.dataset.dimension_map:
        groups = [
            [n for n, member in enumerate(members) if member.robot == robot]
            for robot in {member.robot for member in members}
        ]
        alike = [named_alike([metas[n] for n in numbers], [maps[n] for n in numbers]) for numbers in groups]
        check_dimension_map(alike, config.dataset.dimension_map)
    if len(names := robots(members)) == 1:
        if config.dataset.robot_in_prompt:
            raise ValueError(
                "--dataset.robot_in_prompt=true: instructions name their robot in a mixture of robots that differ, and "
                f"this run has {'one' if members[0].robot else 'none'} by name; leave it out, or begin the dataset's "
                "own instructions with the name"
            )
        if config.dataset.mixture:
            check_rates(metas, steps)
        metas, match, rename_map = _match_robot(config, metas, members, maps, base.config, base.name)
        check_images(config, base.config)
        robot = Robot("", base.config, match, rename_map, datasets=tuple(range(len(metas))))
        return Matched(metas, base.config, match, (robot,), tuple(steps) if set(steps) != {1} else None)
    _check_policy(base)
    data, policy_metas = [], list(metas)
    for name in names:
        numbers = tuple(number for number, member in enumerate(members) if member.robot == name)
        fitted = copy.deepcopy(base.config)
        own_metas, own_members, own_maps = (
            [metas[n] for n in numbers],
            [members[n] for n in numbers],
            [maps[n] for n in numbers],
        )
        check_rates(own_metas, [steps[n] for n in numbers])
        lenient = replace(config, dataset=replace(config.dataset, missing_cameras="mask"))
        try:
            named, match, rename_map = _match_robot(lenient, own_metas, own_members, own_maps, fitted, base.name)
        except ValueError as error:
            raise ValueError(f"robot {name}: {error}") from error
        used = {key: name for key, name in rename_map.items() if key in match.dataset_keys}
        own_names = {name: key for key, name in used.items()}
        opening = f"{name}: " if config.dataset.robot_in_prompt else ""
        data.append(Robot(name, _of_its_own(fitted, match), match, {}, own_names, numbers, opening=opening))
        for number, meta in zip(numbers, named, strict=True):
            policy_metas[number] = _with_policy_names(meta, match, used)
    match = _join(config, base, data, policy_metas)
    check_images(config, base.config)
    return Matched(tuple(policy_metas), base.config, match, tuple(data), tuple(steps))


# ---- one robot -----------------------------------------------------------------------------------------------------


def _match_robot(
    config: Config,
    metas: Metas,
    members: Sequence[Member],
    maps: Sequence[Mapping[str, str]],
    policy_config: PreTrainedConfig,
    policy_name: str,
) -> tuple[tuple[DatasetMetadata, ...], FeatureMatch, dict[str, str]]:
    """The datasets with one name and order for everything, how they are the policy's, and which names it renames."""
    camera_keys = _camera_keys(config, members[0])
    _check_one_choice(metas, members, maps, camera_keys)
    metas, together, rename_map = _named_alike(metas, maps)
    metas = tuple(
        ordered_by(meta, member.orders()) if member.orders() else meta
        for meta, member in zip(metas, members, strict=True)
    )
    match = _match(config, metas[0], camera_keys, rename_map, policy_config, policy_name)
    check_alike(metas, match.dataset_keys, together)
    metas = ordered_alike(metas, match.dataset_keys, config.dataset.dimension_map)
    relative = relative_actions(policy_config)
    for meta in metas:
        if relative is not None and any(meta.features[key].order is not None for key in match.dataset_keys):
            raise ValueError(
                f"dataset {meta.root}: its dimensions are in another order than the first dataset's, in which "
                "statistics of relative actions cannot be joined: convert it to that order, or train with absolute "
                "actions, --policy.use_relative_actions=false"
            )
    return tuple(metas), match, together


def _names_of(config: Config, member: Member) -> dict[str, str]:
    """The policy's names for observations of a dataset."""
    return observations_renamed({**config.rename_map, **member.rename_map})


def _camera_keys(config: Config, member: Member) -> list[str] | None:
    """The cameras chosen of a dataset; None: all."""
    return config.dataset.camera_keys if member.camera_keys is None else member.camera_keys


def _named_alike(
    metas: Metas, maps: Sequence[Mapping[str, str]]
) -> tuple[tuple[DatasetMetadata, ...], dict[str, str], dict[str, str]]:
    """A robot's datasets with the names of the first, the policy's names for all of them, and for the first."""
    metas = named_alike(metas, maps)
    together = {key: name for names in reversed(maps) for key, name in names.items()}
    return metas, together, names_of_first(metas, together)


def _check_one_choice(
    metas: Metas, members: Sequence[Member], maps: Sequence[Mapping[str, str]], camera_keys: list[str] | None
) -> None:
    """Refuse a member that chooses other cameras than `camera_keys`, those of its robot's first dataset."""

    def named(keys: Iterable[str], names: Mapping[str, str]) -> set[str]:
        return {names.get(key, key) for key in keys}

    first = named(metas[0].camera_keys if camera_keys is None else camera_keys, maps[0])
    for meta, member, names in zip(metas, members, maps, strict=True):
        if member.camera_keys is not None and named(member.camera_keys, names) != first:
            raise ValueError(
                f"dataset {meta.root}: camera_keys {sorted(member.camera_keys)}, where {metas[0].root} is read with "
                f"{sorted(first)}: datasets of one robot have the same cameras; give all the same camera_keys, or name "
                "another robot"
            )


def _match(
    config: Config,
    meta: DatasetMetadata,
    camera_keys: list[str] | None,
    rename_map: dict[str, str],
    policy_config: PreTrainedConfig,
    policy_name: str,
) -> FeatureMatch:
    """Return how the (first) dataset's features are the policy's; what the policy cannot take is refused."""
    check_camera_keys(meta, camera_keys)
    try:
        return match_features(
            policy_config,
            _selected_features(meta, camera_keys),
            rename_map,
            missing_cameras=config.dataset.missing_cameras,
            fps=meta.fps,
            left_out=sorted(set(meta.camera_keys) - set(camera_keys or meta.camera_keys)),
        )
    except ValueError as error:
        not_read = f" (not read of the dataset: {'; '.join(meta.not_read)})" if meta.not_read else ""
        raise ValueError(f"dataset {meta.root} and {policy_name}: {error}{not_read}") from error


def _selected_features(meta: DatasetMetadata, camera_keys: list[str] | None) -> dict[str, Any]:
    dropped = set(meta.camera_keys) - set(camera_keys) if camera_keys is not None else set()
    return {k: f for k, f in meta.features.items() if k not in dropped and not f.is_depth}


def window_step(meta: DatasetMetadata, fps: int | None) -> int:
    """Return how many frames of a dataset lie between two actions of a chunk."""
    step, rest = divmod(meta.fps, fps or meta.fps)
    if rest or not step:
        raise ValueError(
            f"dataset {meta.root} has {meta.fps} frames per second, and the mixture asks for {fps}: give a rate that "
            f"{meta.fps} is a multiple of, or leave fps out for its own"
        )
    return step


def check_rates(metas: Metas, steps: Sequence[int]) -> None:
    """Refuse datasets of one robot whose action chunks would span other times."""
    rates = {meta.fps // step: meta.root for meta, step in zip(metas, steps, strict=True)}
    if len(rates) > 1:
        (a, first), (b, second) = list(rates.items())[:2]
        raise ValueError(
            f"datasets {first} and {second} are of one robot, and have {a} and {b} actions per second: give the faster "
            "one fps, the rate of the other, or give each a robot of its own"
        )


# ---- robots that differ --------------------------------------------------------------------------------------------


def _check_policy(base: Base) -> None:
    """Refuse a policy that cannot be trained on robots that differ."""
    family, policy_type = family_of(base.config), base.config.type
    if not (family.row_losses and family.masks_cameras):
        raise ValueError(
            f"{base.name}: robots that differ need a loss that knows each row's own dimensions and cameras, as that of "
            f"{types_that(lambda family: family.row_losses and family.masks_cameras)}; this is a '{policy_type}'"
        )
    if normalization_mode(base.config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY:
        raise ValueError(f"{base.name}: images are normalised by statistics of one robot; train without that")


def _of_its_own(config: PreTrainedConfig, match: FeatureMatch) -> PreTrainedConfig:
    """The policy's configuration, fitted to this robot, with its cameras alone."""
    config.input_features = {key: config.input_features[key] for key in config.input_features if key in match.trained}
    return config


def _with_policy_names(meta: DatasetMetadata, match: FeatureMatch, rename_map: Mapping[str, str]) -> DatasetMetadata:
    """The dataset with the policy's names for what the policy gets, and without its other cameras and observations."""
    used = set(match.dataset_keys)
    other = {
        key
        for key, feature in meta.features.items()
        if key not in used and (key.startswith(OBS_PREFIX) or feature.dtype in CAMERA_DTYPES)
    }
    return rename_features(without_features(meta, other), rename_map)


@dataclass(frozen=True)
class PolicyData:
    """What a policy sees of a run's datasets.

    Attributes:
        features: by the policy's names; of robots that differ those of all, the widest of vectors.
        tasks: instructions of the chosen episodes, as prompts have them. fps: actions per second.
    """

    features: dict[str, Feature]
    tasks: list[str]
    fps: float


def policy_data(config: Config, datasets: Datasets, chosen: Sequence[np.ndarray]) -> PolicyData:
    """Return what a policy made for a run's datasets sees: names, cameras, order of dimensions, instructions.

    `match_datasets` gives the same to a policy that exists: of each robot, its first dataset decides.

    Args:
        chosen: episodes of each dataset that are used.
    Raises:
        ValueError: a camera that the dataset has not, dimensions of other names, two features of one name.
    """
    metas, members = datasets.metas, datasets.members
    features: dict[str, Feature] = {}
    for robot in dict.fromkeys(member.robot for member in members):
        numbers = [number for number, member in enumerate(members) if member.robot == robot]
        first, maps = members[numbers[0]], [_names_of(config, members[number]) for number in numbers]
        (meta, *_), _, names = _named_alike([metas[number] for number in numbers], maps)
        camera_keys = _camera_keys(config, first)
        check_camera_keys(meta, camera_keys)
        selected = _selected_features(ordered_by(meta, first.orders()), camera_keys)
        by_name: dict[str, str] = {}
        for key, feature in selected.items():
            name = names.get(key, key)
            if (other := by_name.setdefault(name, key)) != key:
                raise ValueError(f"--rename_map: dataset {meta.root}: {other!r} and {key!r} would both be {name!r}")
            features[name] = max(features.get(name, feature), feature, key=lambda candidate: candidate.shape)
    openings = [f"{member.robot}: " if config.dataset.robot_in_prompt else "" for member in members]
    tasks = {
        f"{opening}{task}"
        for opening, meta, episodes in zip(openings, metas, chosen, strict=True)
        for task in tasks_of(meta, episodes)
    }
    return PolicyData(features, sorted(tasks), members[0].fps or metas[0].fps)


def _join(config: Config, base: Base, robots: Sequence[Robot], metas: Metas) -> FeatureMatch:
    """Fit the policy's configuration to all robots: the cameras that any has, and the widest vectors."""
    widest: dict[str, PolicyFeature] = {}
    for robot in robots:
        for key, feature in {**robot.config.input_features, **robot.config.output_features}.items():
            widest[key] = max(widest.get(key, feature), feature, key=lambda candidate: candidate.shape)
    outputs = {ACTION: widest.pop(ACTION)}
    inputs: dict[str, PolicyFeature] = {**(base.config.input_features or {}), **widest}
    matched = {row.policy_key: row for robot in robots for row in robot.match.rows if row.dataset_key is not None}
    masked = [key for key in inputs if key not in matched]
    if masked and config.dataset.missing_cameras != "mask":
        raise ValueError(
            f"{base.name}: no robot of the mixture has the cameras {masked} that the policy has: map some with "
            "rename_map, or let the policy run without them with --dataset.missing_cameras=mask"
        )
    base.config.input_features, base.config.output_features = inputs, outputs
    for robot in robots:  # cameras are seen in one order, in training and on the robot
        features = robot.config.input_features
        robot.config.input_features = {key: features[key] for key in inputs if key in features}
    rows = tuple(
        FeatureRow(
            None if key in masked else key,
            key,
            None if key in masked else matched[key].dataset_shape,
            tuple(feature.shape),
            (matched.get(key) or robots[0].match.rows[0]).normalization,
        )
        for key, feature in {**inputs, **outputs}.items()
    )
    deltas = {}
    for robot in robots:
        first = metas[robot.datasets[0]]
        for name, seconds in robot.match_of_rows.delta_timestamps.items():
            if name in matched:  # in frames of the first dataset
                deltas[name] = [round(second * first.fps) / metas[0].fps for second in seconds]
    return FeatureMatch(tuple(key for key in base.config.image_features if key not in masked), rows, deltas)
