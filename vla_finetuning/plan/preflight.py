"""Checks of a run that take a second: its folder, and what is wrong with its datasets.

Runs before a program imports PyTorch, LeRobot and Ray, which takes many. Everything is checked again where it is used:
between the two, folders and datasets may change.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_finetuning.data.metadata import (
    CAMERA_DTYPES,
    FRAME_FEATURES,
    DatasetMetadata,
    join_features,
    load_metadata,
    read_modality,
    rename_features,
)
from vla_finetuning.data.selection import Choice, read_choice
from vla_finetuning.data.storage import StoragePolicy
from vla_finetuning.environment import CACHE_GB, Timeouts, cache_gb
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.fields import did_you_mean
from vla_finetuning.options.job import JobOptions
from vla_finetuning.options.mixture import Member, members, robots
from vla_finetuning.options.programs import Config, GrpoConfig, ValueConfig
from vla_finetuning.plan.episodes import select
from vla_finetuning.plan.missing_files import certain_cameras, check_holes
from vla_finetuning.run.checkpoint import latest_checkpoint
from vla_finetuning.run.exported import result_of, result_problem
from vla_finetuning.run.folder import CHECKPOINTS_NAME, check_folder, is_finished, resumption
from vla_finetuning.terminal import tell, tell_error

OBSERVATION = "observation."
STATE = "observation.state"
# openpi's DROID has the state of the arm and of the gripper in features of their own.
DROID_STATE = ["joint_position", "gripper_position"]
# Names outside LeRobot's own, and what they stand for: openpi's LIBERO, DROID and ALOHA datasets.
WELL_KNOWN = {
    **{"state": "observation.state", "joint_position": "observation.state", "qpos": "observation.state"},
    **{"actions": "action", "image": "observation.images.base_0_rgb", "cam_high": "observation.images.base_0_rgb"},
    "exterior_image_1_left": "observation.images.base_0_rgb",
    **dict.fromkeys(("wrist_image", "wrist_image_left", "cam_left_wrist"), "observation.images.left_wrist_0_rgb"),
    **dict.fromkeys(("cam_right_wrist", "exterior_image_2_left"), "observation.images.right_wrist_0_rgb"),
}


@dataclass(frozen=True)
class Examined:
    """What was found of a run. `metas`: its datasets, as far as they are named by where they are."""

    finished: bool = False
    metas: tuple[DatasetMetadata, ...] = ()

    def __str__(self) -> str:
        found = [
            f"dataset {meta.root}: {meta.num_episodes} episodes, {meta.total_frames} frames" for meta in self.metas
        ]
        return "; ".join(["flags and folder", *found])


def examine(config: JobOptions) -> Examined:
    """Check the folder and the datasets of a run.

    Raises:
        OSError, ValueError: what a start would refuse, and what to do.
    """
    config = as_saved(config)
    check_folder(config)
    if is_finished(config):
        done, (what, path) = f"Finished     the run in {config.folder} did all of its steps", result_of(config)
        problem = result_problem(config)
        if problem is None:
            more = "--resume with a larger --steps"
            if latest_checkpoint(config.folder / CHECKPOINTS_NAME) is None:
                more = "a new run, because no checkpoint of this one can be used"
            tell(f"{done}: its {what}, {path}; nothing is left to do. More steps: {more}")
            return Examined(finished=True)
        tell(f"{done}, but {problem}: it is written again")
    if config.resume:
        tell(f"Resuming     {resumption(config.folder)}")
    return Examined(metas=_datasets(config) if isinstance(config, Config) else ())


def check_start_of(config: JobOptions) -> Examined:
    """What `examine` found; ends the process where the run cannot start, or has nothing left to do."""
    try:
        examined = examine(config)
    except (ValueError, OSError) as error:
        tell_error(error)
        sys.exit(2)
    if examined.finished:
        sys.exit(0)
    tell(f"Checked      {examined}; loading PyTorch, LeRobot and Ray")
    return examined


def load_datasets(config: Config, roots: Sequence[str]) -> tuple[DatasetMetadata, ...]:
    """Read the metadata of the run's datasets, with the names that --rename_map gives their features.

    Names of observations are left alone: as in lerobot-train, the policy's own processors rename those.

    Raises:
        OSError, ValueError: a dataset cannot be read, has no feature of a name, or lacks what a policy needs.
    """
    metas = [load_metadata(root, storage_policy=storage_policy(config.dataset)) for root in roots]
    state, of_mixture = config.dataset.state_features or (), members(config.dataset.mixture)
    if not any(member.rename_map for member in of_mixture):
        return with_names(metas, config.rename_map, state)
    _check_names_known(metas, config.rename_map, state)
    found: list[DatasetMetadata] = []
    for meta, member in zip(metas, of_mixture, strict=True):
        others = {key: name for key, name in config.rename_map.items() if key in meta.features}
        joined = state if any(key in meta.features for key in state) else ()
        try:
            found += with_names([meta], {**others, **member.rename_map}, joined)
        except ValueError as error:
            raise ValueError(f"--dataset.mixture, {meta.root}: {error}") from error
    return tuple(found)


def with_names(
    metas: Sequence[DatasetMetadata],
    rename_map: Mapping[str, str],
    state_features: Sequence[str] = (),
    *,
    observations: bool = False,
) -> tuple[DatasetMetadata, ...]:
    """The datasets with the names that --rename_map gives their features. Raises ValueError as `load_datasets`.

    Args:
        state_features: joined into `observation.state`, by the names in the files, in all datasets that have any.
        observations: rename those, too, where no policy's processors will.
    """
    joined = [any(key in meta.features for key in state_features) for meta in metas]
    _check_names_known(metas, {}, state_features)
    metas = [
        join_features(meta, state_features, STATE) if has_some else meta
        for meta, has_some in zip(metas, joined, strict=True)
    ]
    names = dict(rename_map) if observations else features_renamed(rename_map)
    _check_names_known(metas, rename_map)
    found = tuple(
        rename_features(meta, {key: name for key, name in names.items() if key in meta.features}) for meta in metas
    )
    for meta in found:
        _check_names(meta, rename_map)
    return found


def _check_names_known(
    metas: Sequence[DatasetMetadata], rename_map: Mapping[str, str], state_features: Sequence[str] = ()
) -> None:
    """Refuse names of features that no dataset has, and those that LeRobot's own columns keep."""
    known = sorted({key for meta in metas for key in meta.features})
    if state_features and metas and not any(key in known for key in state_features):
        raise ValueError(
            f"--dataset.state_features {','.join(state_features)}: the datasets' features are {', '.join(known)}"
            f"{did_you_mean(state_features[0], known)}"
        )
    for key, name in rename_map.items() if metas else ():
        where = f'--rename_map has "{key}": "{name}"'
        if key in FRAME_FEATURES:
            raise ValueError(f"{where}; LeRobot's own columns {', '.join(FRAME_FEATURES)} keep their names")
        if key not in known:
            raise ValueError(f"{where}, and the datasets' features are {', '.join(known)}{did_you_mean(key, known)}")


def features_renamed(rename_map: Mapping[str, str]) -> dict[str, str]:
    """What of --rename_map is the dataset's: names that lerobot-train does not rename."""
    return {key: name for key, name in rename_map.items() if not key.startswith(OBSERVATION)}


def observations_renamed(rename_map: Mapping[str, str]) -> dict[str, str]:
    """What of --rename_map the policy's processors do, as in lerobot-train."""
    return {key: name for key, name in rename_map.items() if key.startswith(OBSERVATION)}


def _check_names(meta: DatasetMetadata, rename_map: Mapping[str, str]) -> None:
    """Refuse a dataset without actions or observations by LeRobot's names, and propose the flag that gives them."""
    lacks = [] if "action" in meta.features else ["action"]
    lacks += [] if any(key.startswith(OBSERVATION) for key in meta.features) else [f"{OBSERVATION}*"]
    if not lacks:
        return
    proposed, state = proposed_names(meta)
    flags = f"--rename_map {shlex.quote(json.dumps({**rename_map, **proposed}))}" if proposed else ""
    flags += f" --dataset.state_features {','.join(state)}" if state else ""
    flag = f"; {flags.strip()} gives them LeRobot's names" if flags else ""
    raise ValueError(
        f"dataset {meta.root}: no feature is called {' or '.join(lacks)}; its features are "
        f"{', '.join(key for key in meta.features if key not in FRAME_FEATURES)}"
        f"{''.join(f'; not read of the dataset: {line}' for line in meta.not_read)}{flag}"
    )


def proposed_names(meta: DatasetMetadata) -> tuple[dict[str, str], list[str]]:
    """LeRobot's names for features of a dataset, and the features that are its state together, if several are.

    As GR00T's meta/modality.json says, or as openpi's LIBERO, DROID and ALOHA examples and their like call them;
    cameras get PI0.5's names where it is known which is which.
    """
    modality = {kind: {k: c for k, c in of.items() if c in meta.features} for kind, of in read_modality(meta).items()}
    state = list(dict.fromkeys(modality["state"].values()))
    state = state or (DROID_STATE if meta.features.keys() >= set(DROID_STATE) else [])
    free = [key for key in meta.features if not key.startswith(OBSERVATION) and key not in ("action", *FRAME_FEATURES)]
    taken, proposed = set(meta.features), dict[str, str]()
    if len(state) > 1:
        free = [key for key in free if key not in state]
        taken.add(STATE)

    def propose(key: str, name: str) -> None:
        if key in free and key not in proposed and name not in taken:
            proposed[key] = name
            taken.add(name)

    for key in state[:1]:
        propose(key, STATE)
    if len(actions := list(dict.fromkeys(modality["action"].values()))) == 1:
        propose(actions[0], "action")
    for name, key in modality["video"].items():
        propose(key, f"{OBSERVATION}images.{name}")
    for key, name in WELL_KNOWN.items():
        propose(key, name)
    for key in free:
        if meta.features[key].dtype in CAMERA_DTYPES:
            propose(key, f"{OBSERVATION}images.{key.rpartition('.')[2]}")
    return proposed, state if len(state) > 1 else []


def check_camera_keys(meta: DatasetMetadata, camera_keys: list[str] | None) -> None:
    """Raises ValueError for a camera that the dataset has not."""
    if unknown := sorted(set(camera_keys or ()) - set(meta.camera_keys)):
        raise ValueError(
            f"--dataset.camera_keys: dataset {meta.root} has no camera {unknown[0]!r}, but "
            f"{','.join(meta.camera_keys) or 'none'}{did_you_mean(unknown[0], meta.camera_keys)}"
        )


def with_absolute_paths(config: Config) -> tuple[Config, list[str]]:
    """The options with paths that are the same in every process, and the datasets' roots.

    Workers and resumed runs have other working directories.
    """
    roots, d = [absolute(root) for root in config.roots], config.dataset
    assert isinstance(d.mixture, dict)  # a file is read with the flags
    mixture = dict(zip(roots, d.mixture.values(), strict=False))
    if len(mixture) < len(d.mixture):
        raise ValueError(f"--dataset.mixture names a dataset twice: {list(d.mixture)}")
    out = d.exclude_episodes
    excluded = read_choice(out.removeprefix("@")) if isinstance(out, str) else out  # what the file says now counts
    progress, features = config.sample_weighting.progress_path, config.train.feature_cache
    config = replace(
        config,
        output_dir=absolute(config.output_dir or ""),
        recap=replace(config.recap, labels=absolute(config.recap.labels) if config.recap.labels else None),
        train=replace(config.train, feature_cache=absolute(features) if features else None),
        sample_weighting=replace(config.sample_weighting, progress_path=absolute(progress) if progress else None),
        dataset=replace(
            d,
            root=None if mixture else ",".join(roots) or None,
            mixture=mixture,
            frame_cache=absolute(d.frame_cache) if d.frame_cache not in (None, "", "auto") else d.frame_cache,
            episodes=_of_absolute(d.episodes),
            exclude_episodes=_of_absolute(excluded),
            episode_weights=_absolute_file(d.episode_weights),
        ),
    )
    return config, roots


def as_saved[C: JobOptions](config: C) -> C:
    """The options of any program with paths as a run saves them in its folder: the same from any working directory.

    Raises:
        OSError, ValueError: as `with_absolute_paths`.
    """
    changed: dict[str, Any] = {"output_dir": absolute(config.output_dir or "")}
    if isinstance(config, Config):
        changed = vars(with_absolute_paths(config)[0])
    elif isinstance(config, ValueConfig):
        changed["dataset"] = with_absolute_paths(config.training())[0].dataset
    elif isinstance(config, GrpoConfig):
        written, read = config.grpo.record_dataset, config.grpo.demonstrations
        written, read = absolute(written) if written else None, absolute(read) if read else None
        changed["grpo"] = replace(config.grpo, record_dataset=written, demonstrations=read)
    policy = getattr(config, "policy_path", None)
    if policy and Path(absolute(policy)).is_dir():  # else its name on the Hub
        changed = {**changed, "policy_path": absolute(policy)}
    return replace(config, **changed)


def storage_policy(d: DatasetOptions) -> StoragePolicy:
    """How the run's datasets are read from object stores."""
    return StoragePolicy(
        Timeouts.from_environment().read, absolute(d.cache_dir) if d.cache_dir else None, cache_gb(CACHE_GB)
    )


def absolute(path: str | Path) -> str:
    """Local paths made absolute, `~` being home; URIs as they are."""
    return str(path) if "://" in str(path) else str(Path(os.path.expanduser(path)).absolute())


def _absolute_file(source: str | None) -> str | None:
    """@FILE by a path that is the same from any folder."""
    return f"@{absolute(source.removeprefix('@'))}" if source is not None and source.startswith("@") else source


def _of_absolute(choice: Choice) -> Any:
    """Episodes by the roots as `resolve` knows them."""
    return {absolute(root): numbers for root, numbers in choice.items()} if isinstance(choice, Mapping) else choice


def _datasets(config: Config) -> tuple[DatasetMetadata, ...]:
    config, roots = with_absolute_paths(config)
    metas = load_datasets(config, roots)
    of_mixture = members(config.dataset.mixture)
    for meta, member in zip(metas, of_mixture or [Member(meta.root) for meta in metas], strict=True):
        own = member.camera_keys
        check_camera_keys(meta, config.dataset.camera_keys if own is None else own)
    if metas:  # frames that do not move are found in the data files, which takes longer
        chosen = select(metas, roots, replace(config, dataset=replace(config.dataset, skip_idle=None)))
        if config.dataset.episode_weights is None:  # else some are left out, by columns and files of their own
            cameras = certain_cameras(config, metas[0]) if len(robots(of_mixture)) < 2 else []
            check_holes(config, roots, metas, chosen, cameras)
    return metas
