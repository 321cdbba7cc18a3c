"""Match the datasets of a run with its policy, for one robot or several.

Datasets of one robot are treated as one dataset: equal feature names, dimensions in one order, one rate, joint
statistics. Different robots each have their own: a row has the cameras of all robots and vectors of the widest robot's
length (`data.options.Features.padded`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.configs.policies import PreTrainedConfig
from lerobot.utils.constants import ACTION, OBS_PREFIX

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.dataset import absent_vector
from vla_finetuning.data.metadata import CAMERA_DTYPES, DatasetMetadata, Feature, without_features
from vla_finetuning.data.options import Features, Reading, Selection
from vla_finetuning.data.rows import row_dtype
from vla_finetuning.data.selection import tasks_of
from vla_finetuning.options.mixture import Member
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.base_policy import Base
from vla_finetuning.plan.datasets import Datasets
from vla_finetuning.plan.images import check_images
from vla_finetuning.plan.mixture import (
    check_dimension_map,
    check_same_features,
    reorder_by_names,
    unify_order,
)
from vla_finetuning.plan.names import chosen_cameras, own_names
from vla_finetuning.policies.matching import FeatureMatch, FeatureRow, match_features
from vla_finetuning.policies.processors import normalization_mode
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.spec import Robot, TextDataset
from vla_finetuning.policies.text_targets import one_line, with_text

Metas = Sequence[DatasetMetadata]


@dataclass(frozen=True)
class Matched:
    """The result of `match_datasets`.

    Attributes:
        metas: datasets with the policy's feature names and their robot's order of dimensions. Datasets without actions
            have empty vectors for features that they lack.
        match: match of the features of all datasets.
        robots: at least one, without statistics.
        window_steps: as in `data.options.Features`.
    """

    metas: tuple[DatasetMetadata, ...]
    config: PreTrainedConfig
    match: FeatureMatch
    robots: tuple[Robot, ...]
    window_steps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RobotDatasets:
    """The datasets of one robot, in the mixture's order of dimensions.

    Attributes:
        robot: name of the robot; None if the options name none.
        numbers: indices of its datasets in the run.
        excluded: cameras of the first dataset that are not chosen.
    """

    robot: str | None
    numbers: tuple[int, ...]
    metas: tuple[DatasetMetadata, ...]
    excluded: tuple[str, ...]

    @property
    def features(self) -> dict[str, Feature]:
        """Return the first dataset's features, without depth cameras and cameras that are not chosen."""
        features = self.metas[0].features.items()
        return {key: feature for key, feature in features if key not in self.excluded and not feature.is_depth}


def by_robot(datasets: Datasets) -> Iterator[RobotDatasets]:
    """Yield the datasets with actions of each robot, in the order of each robot's first dataset.

    Raises:
        ValueError: datasets of one robot choose different cameras, or an order does not list the dimensions of a
            feature.
    """
    for robot in dict.fromkeys(member.robot for member in datasets.members):
        numbers = tuple(number for number, member in enumerate(datasets.members) if member.robot == robot)
        metas, members = [datasets.metas[n] for n in numbers], [datasets.members[n] for n in numbers]
        chosen = _chosen_cameras(metas, members)
        ordered = (
            reorder_by_names(meta, member.orders()) if member.orders() else meta
            for meta, member in zip(metas, members, strict=True)
        )
        excluded = tuple(key for key in metas[0].camera_keys if key not in chosen)
        yield RobotDatasets(robot, numbers, tuple(ordered), excluded)


def match_datasets(config: Config, datasets: Datasets, base: Base) -> Matched:
    """Match a run's datasets with its policy, and set the features in the policy's configuration in place.

    Raises:
        ValueError: datasets, rates or robots do not match each other or the policy.
    """
    if len((with_actions := datasets.with_actions).metas) < len(datasets.metas):
        return _add_texts(config, datasets, match_datasets(config, with_actions, base))
    steps = [window_step(meta, member.fps) for meta, member in zip(datasets.metas, datasets.members, strict=True)]
    groups = list(by_robot(datasets))
    if config.dataset.dimension_map:
        check_dimension_map([group.metas for group in groups], config.dataset.dimension_map)
    for group in groups if config.dataset.mixture else ():
        check_rates(group.metas, [steps[number] for number in group.numbers])
    if len(groups) == 1:
        (group,) = groups
        if config.dataset.robot_in_prompt:
            raise ValueError(
                "--dataset.robot_in_prompt=true: instructions name their robot in a mixture of robots that differ, and "
                f"this run has {'one' if group.robot else 'none'} by name; leave it out, or begin the dataset's own "
                "instructions with the name"
            )
        metas, match = _match_robot(config, group, base.config, base.name)
        check_images(config, base.config)
        robot = Robot("", base.config, match, match.own_names, datasets=group.numbers)
        return Matched(metas, base.config, match, (robot,), tuple(steps) if set(steps) != {1} else None)
    _check_policy(base)
    with_masked_cameras = replace(config, dataset=replace(config.dataset, missing_cameras="mask"))
    robots, policy_metas = [], list(datasets.metas)
    for group in sorted(groups, key=lambda group: str(group.robot)):
        name, fitted = str(group.robot), copy.deepcopy(base.config)
        try:
            metas, match = _match_robot(with_masked_cameras, group, fitted, base.name)
        except ValueError as error:
            raise ValueError(f"robot {name}: {error}") from error
        fitted.input_features = {key: value for key, value in fitted.input_features.items() if key in match.shapes}
        opening = f"{name}: " if config.dataset.robot_in_prompt else ""
        robots.append(Robot(name, fitted, match, match.own_names, group.numbers, opening=opening))
        for number, meta in zip(group.numbers, metas, strict=True):
            policy_metas[number] = _without_unmatched(meta, match.keys)
    match = _join_robots(config, base, robots, policy_metas)
    check_images(config, base.config)
    return Matched(tuple(policy_metas), base.config, match, tuple(robots), tuple(steps))


# ---- one robot -----------------------------------------------------------------------------------------------------


def _match_robot(
    config: Config, group: RobotDatasets, policy_config: PreTrainedConfig, policy_name: str
) -> tuple[tuple[DatasetMetadata, ...], FeatureMatch]:
    """Reorder the dimensions of a robot's datasets as in the first one, and match its features with the policy's."""
    meta = group.metas[0]
    try:
        match = match_features(
            policy_config,
            group.features,
            own_names(meta),
            missing_cameras=config.dataset.missing_cameras,
            fps=meta.fps,
            excluded=group.excluded,
        )
    except ValueError as error:
        not_read = f" (not read of the dataset: {'; '.join(meta.not_read)})" if meta.not_read else ""
        raise ValueError(f"dataset {meta.root} and {policy_name}: {error}{not_read}") from error
    check_same_features(group.metas, match.keys)
    return unify_order(group.metas, match.keys, config.dataset.dimension_map), match


def _chosen_cameras(metas: Metas, members: Sequence[Member]) -> list[str]:
    """Return the cameras to read of a robot's datasets; refuse different choices."""
    first = chosen_cameras(metas[0], members[0].camera_keys)
    for meta, member in zip(metas, members, strict=True):
        if member.camera_keys is not None and set(chosen_cameras(meta, member.camera_keys)) != set(first):
            raise ValueError(
                f"dataset {meta.root}: camera_keys {sorted(member.camera_keys)}, where {metas[0].root} is read with "
                f"{sorted(first)}: datasets of one robot have the same cameras; give all the same camera_keys, or name "
                "another robot"
            )
    return first


def window_step(meta: DatasetMetadata, fps: int | None) -> int:
    """Return the frames between two actions of a chunk, for actions at `fps` (None: the dataset's rate)."""
    step, rest = divmod(meta.fps, fps or meta.fps)
    if rest or not step:
        raise ValueError(
            f"dataset {meta.root} has {meta.fps} frames per second, and the mixture asks for {fps}: give a rate that "
            f"{meta.fps} is a multiple of, or leave fps out for its own"
        )
    return step


def check_rates(metas: Metas, steps: Sequence[int]) -> None:
    """Refuse datasets of one robot with different action rates, whose chunks would span different times."""
    rates = {meta.fps // step: meta.root for meta, step in zip(metas, steps, strict=True)}
    if len(rates) > 1:
        (a, first), (b, second) = list(rates.items())[:2]
        raise ValueError(
            f"datasets {first} and {second} are of one robot, and have {a} and {b} actions per second: give the faster "
            "one fps, the rate of the other, or give each a robot of its own"
        )


# ---- datasets without actions ---------------------------------------------------------------------------------------


def _add_texts(config: Config, datasets: Datasets, matched: Matched) -> Matched:
    """Add the datasets without actions to `matched`, each to a robot as which its rows are prepared.

    Raises:
        ValueError: a dataset without actions has no camera of the others.
    """
    action_count = len(matched.metas)
    cameras, keys = matched.match.camera_keys, matched.match.keys
    metas, robots = list(matched.metas), list(matched.robots)
    dataset_names = [{}, *map(own_names, metas)]
    for number in range(action_count, len(datasets.metas)):
        meta, member = datasets.metas[number], datasets.members[number]
        used = [
            key
            for key in meta.camera_keys
            if key in cameras
            and (
                member.camera_keys is None
                or {meta.features[key].key, *(names.get(key, key) for names in dataset_names)} & {*member.camera_keys}
            )
        ]
        if not used:
            camera_names = [meta.features[key].key for key in meta.camera_keys]
            raise ValueError(
                f"dataset {meta.root}: none of its cameras {camera_names} is called as one of the datasets with "
                f"actions, {list(cameras)}: its rename_map in the mixture, or --rename_map, gives it that name"
            )
        same_robot = [n for n, other in enumerate(datasets.members[:action_count]) if other.robot == member.robot]
        stand_in = same_robot[0] if same_robot else 0
        owner = next(n for n, robot in enumerate(robots) if stand_in in robot.datasets)
        features = metas[stand_in].features
        vectors = {key: features[key].shape for key in keys if key in features and key not in cameras and key != ACTION}
        row_vectors = [key for key, feature in meta.features.items() if feature.shape == vectors.get(key)]
        has_state = bool(same_robot) and set(row_vectors) == vectors.keys()
        meta = _without_unmatched(without_features(meta, [ACTION]), [*used, *(row_vectors if has_state else ())])
        missing = [key for key in keys if key not in cameras and key not in meta.features]
        given = {key: feature for other in metas[:action_count] for key, feature in other.features.items()}
        absent = {key: absent_vector(key, row_dtype(given[key]).name) for key in missing}
        meta = replace(meta, features={**meta.features, **absent})
        if has_state:
            _, meta = unify_order([metas[stand_in], meta], [*vectors, ACTION], config.dataset.dimension_map)
        metas.append(meta)
        text = TextDataset(number, frozenset(used), has_state, robots[owner].opening if same_robot else "")
        robots[owner] = replace(robots[owner], texts=(*robots[owner].texts, text))
    steps = (*(matched.window_steps or (1,) * action_count), *(1,) * (len(metas) - action_count))
    return replace(matched, metas=tuple(metas), robots=tuple(robots), window_steps=steps)


# ---- robots that differ --------------------------------------------------------------------------------------------


def _check_policy(base: Base) -> None:
    family, policy_type = family_of(base.config), base.config.type
    if not (family.row_losses and family.masks_cameras):
        raise ValueError(
            f"{base.name}: robots that differ need a loss that knows each row's own dimensions and cameras, as that of "
            f"{types_that(lambda family: family.row_losses and family.masks_cameras)}; this is a '{policy_type}'"
        )
    if normalization_mode(base.config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY:
        raise ValueError(f"{base.name}: images are normalised by statistics of one robot; train without that")


def _without_unmatched(meta: DatasetMetadata, keys: Iterable[str]) -> DatasetMetadata:
    """Drop all observations but texts and the features `keys`."""
    other = {
        key
        for key, feature in meta.features.items()
        if key not in (*keys, *meta.text_keys) and (key.startswith(OBS_PREFIX) or feature.dtype in CAMERA_DTYPES)
    }
    return without_features(meta, other)


def policy_data(config: Config, datasets: Datasets, chosen: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the features, tasks and fps for which to make a policy, as `match_datasets` would give them.

    Features have the policy's names and the widest robot's vectors, tasks are as in prompts. The first dataset of each
    robot decides. `chosen` are the episodes that are used of each dataset. Raises ValueError as `by_robot`.
    """
    features: dict[str, Feature] = {}
    for group in by_robot(datasets.with_actions):
        for key, feature in group.features.items():
            features[key] = max(features.get(key, feature), feature, key=lambda candidate: candidate.shape)
    tasks = {
        f"{member.robot}: {task}" if config.dataset.robot_in_prompt else task
        for member, meta, episodes in zip(datasets.members, datasets.metas, chosen, strict=True)
        for task in tasks_of(meta, episodes)
    }
    if (column := config.train.text_targets) and tasks:
        longest = max(sorted(tasks), key=lambda task: len(task.split()))
        pairs = zip(datasets.metas, chosen, strict=True)
        tasks |= {
            with_text(longest, text) for meta, episodes in pairs for text in _read_texts(config, meta, episodes, column)
        }
    fps = datasets.members[0].fps or datasets.metas[0].fps
    return {"features": features, "tasks": sorted(tasks), "fps": fps}


def _read_texts(config: Config, meta: DatasetMetadata, episodes: np.ndarray, column: str) -> set[str]:
    """Return the texts in a column, from the metadata or else from the rows of `episodes`."""
    if (feature := meta.features.get(column)) is None:
        return set()
    texts: Iterable[str | None] = feature.texts.values()
    if not feature.texts:
        features = Features(camera_keys=[], columns=[column])
        reading = Reading(on_error=config.dataset.on_error, check_files=False)
        source = LeRobotDatasource([meta], Selection([episodes]), features, reading=reading)
        rows = source.plan.rows_per_epoch
        (batch,) = source.read_rows(list(range(rows)), rows)
        texts = batch[column]
    return {one_line(text) for text in texts}


def _join_robots(config: Config, base: Base, robots: Sequence[Robot], metas: Metas) -> FeatureMatch:
    """Set the policy's features to the cameras of all robots and the widest vectors; return the joint match."""
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
    for robot in robots:  # training and the robot need one order of cameras
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
        for name, seconds in robot.match.delta_timestamps.items():
            if name in matched:  # offsets are in frames of the first dataset
                deltas[name] = [round(second * first.fps) / metas[0].fps for second in seconds]
    return FeatureMatch(tuple(key for key in base.config.image_features if key not in masked), rows, deltas)
