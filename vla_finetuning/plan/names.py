"""Rename features of datasets by --rename_map and --dataset.state_features, and propose missing names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence

from vla_finetuning.data.metadata import (
    CAMERA_DTYPES,
    FRAME_FEATURES,
    NUMERIC_DTYPES,
    DatasetMetadata,
    Feature,
    join_features,
    read_modality,
    rename_features,
)
from vla_finetuning.options.fields import did_you_mean

OBSERVATION = "observation."
STATE = "observation.state"
# openpi's DROID dataset has separate features for the state of the arm and of the gripper.
DROID_STATE = ["joint_position", "gripper_position"]
# Feature names of openpi's LIBERO, DROID and ALOHA datasets -> LeRobot's names.
WELL_KNOWN = {
    **{"state": "observation.state", "joint_position": "observation.state", "qpos": "observation.state"},
    **{"actions": "action", "image": "observation.images.base_0_rgb", "cam_high": "observation.images.base_0_rgb"},
    "exterior_image_1_left": "observation.images.base_0_rgb",
    **dict.fromkeys(("wrist_image", "wrist_image_left", "cam_left_wrist"), "observation.images.left_wrist_0_rgb"),
    **dict.fromkeys(("cam_right_wrist", "exterior_image_2_left"), "observation.images.right_wrist_0_rgb"),
}


def with_names(
    metas: Sequence[DatasetMetadata],
    rename_map: Mapping[str, str],
    state_features: Sequence[str] = (),
    own_maps: Sequence[Mapping[str, str]] = (),
) -> tuple[DatasetMetadata, ...]:
    """Rename features of datasets by --rename_map, and of each by its entry in `own_maps`, which comes first.

    Several vectors that are renamed to `action` are joined in the map's order, and `state_features` into
    `observation.state`. Raises ValueError as `load_datasets`.
    """
    keys = sorted({key for meta in metas for key in meta.features})
    if state_features and metas and not any(key in keys for key in state_features):
        raise ValueError(
            f"--dataset.state_features {','.join(state_features)}: the datasets' features are {', '.join(keys)}"
            f"{did_you_mean(state_features[0], keys)}"
        )
    metas = [
        join_features(meta, state_features, STATE) if any(key in meta.features for key in state_features) else meta
        for meta in metas
    ]
    check_known_names(metas, rename_map)
    renamed = []
    for meta, first in zip(metas, own_maps or [{}] * len(metas), strict=True):
        check_known_names([meta], first, label=f"--dataset.mixture, {meta.root}: rename_map")
        names = {key: name for key, name in rename_map.items() if key not in first} | dict(first)
        meta = _with_names(meta, names)
        _check_names(meta, names)
        renamed.append(meta)
    return tuple(renamed)


def own_names(meta: DatasetMetadata) -> dict[str, str]:
    """Return the dataset's own names of renamed observations, as its robot calls them, by their names in rows."""
    return {name: f.key for name, f in meta.features.items() if f.key != name and f.key.startswith(OBSERVATION)}


def chosen_cameras(meta: DatasetMetadata, camera_keys: Sequence[str] | None) -> list[str]:
    """Return the names in rows of the cameras `camera_keys`, which are the dataset's own; None: of all cameras.

    Datasets of images and text may have fewer of them.
    """
    if camera_keys is None:
        return list(meta.camera_keys)
    names = own_names(meta)
    known = [names.get(key, key) for key in meta.camera_keys]
    if (unknown := sorted({*camera_keys} - {*known})) and not meta.without_actions:
        raise ValueError(
            f"--dataset.camera_keys: dataset {meta.root} has no camera {unknown[0]!r}, but "
            f"{','.join(known) or 'none'}{did_you_mean(unknown[0], known)}"
        )
    return [key for key in meta.camera_keys if names.get(key, key) in camera_keys]


def _with_names(meta: DatasetMetadata, names: Mapping[str, str]) -> DatasetMetadata:
    keys: dict[str, list[str]] = {}
    for key, name in names.items():
        if key in meta.features:
            keys.setdefault(name, []).append(key)
    single = {sources[0]: name for name, sources in keys.items() if len(sources) == 1}
    for name, sources in keys.items():
        if len(sources) > 1 and name == "action" and not any(key.startswith(OBSERVATION) for key in sources):
            meta = join_features(meta, sources, name)
        elif len(sources) > 1:
            single |= dict.fromkeys(sources, name)  # `rename_features` raises an error with both names
    return rename_features(meta, single)


def check_known_names(
    metas: Sequence[DatasetMetadata], rename_map: Mapping[str, str], label: str = "--rename_map"
) -> None:
    """Refuse feature names that no dataset has, and renaming of LeRobot's own columns."""
    keys = sorted({key for meta in metas for key in meta.features})
    for key, name in rename_map.items() if metas else ():
        entry = f'{label} has "{key}": "{name}"'
        if key in FRAME_FEATURES:
            raise ValueError(f"{entry}; LeRobot's own columns {', '.join(FRAME_FEATURES)} keep their names")
        if key not in keys:
            raise ValueError(f"{entry}, and the datasets' features are {', '.join(keys)}{did_you_mean(key, keys)}")


def _check_names(meta: DatasetMetadata, rename_map: Mapping[str, str]) -> None:
    """Refuse a dataset without `action` or `observation.*`, and propose the flag that renames features to these."""
    missing = [] if "action" in meta.features else ["action"]
    missing += [] if any(key.startswith(OBSERVATION) for key in meta.features) else [f"{OBSERVATION}*"]
    if not missing:
        return
    proposed, state = proposed_names(meta)
    flags = f"--rename_map {shlex.quote(json.dumps({**rename_map, **proposed}))}" if proposed else ""
    flags += f" --dataset.state_features {','.join(state)}" if state else ""
    flag = f"; {flags.strip()} gives them LeRobot's names" if flags else ""
    if len(action_parts := [key for key, name in proposed.items() if name == "action"]) > 1:
        widths = ", ".join(f"{key} ({meta.features[key].shape[0]})" for key in action_parts)
        flag += f"; the action is then {widths}, in the map's order: leave out what says the same in another way"
    raise ValueError(
        f"dataset {meta.root}: no feature is called {' or '.join(missing)}; its features are "
        f"{', '.join(key for key in meta.features if key not in FRAME_FEATURES)}"
        f"{''.join(f'; not read of the dataset: {line}' for line in meta.not_read)}{flag}"
    )


def proposed_names(meta: DatasetMetadata) -> tuple[dict[str, str], list[str]]:
    """Propose LeRobot's names for features of a dataset, and the features to join into its state, if several.

    Uses GR00T's meta/modality.json, or the names of openpi's LIBERO, DROID and ALOHA examples. Cameras get PI0.5's
    names where the correspondence is known.
    """
    modality = {key: {k: c for k, c in keys.items() if c in meta.features} for key, keys in read_modality(meta).items()}
    state = list(dict.fromkeys(modality["state"].values()))
    state = state or (DROID_STATE if meta.features.keys() >= set(DROID_STATE) else [])
    unnamed = [
        key for key in meta.features if not key.startswith(OBSERVATION) and key not in ("action", *FRAME_FEATURES)
    ]
    taken_names, proposed = set(meta.features), dict[str, str]()
    if len(state) > 1:
        unnamed = [key for key in unnamed if key not in state]
        taken_names.add(STATE)

    def propose(key: str, name: str) -> None:
        if key in unnamed and key not in proposed and name not in taken_names:
            proposed[key] = name
            taken_names.add(name)

    for key in state[:1]:
        propose(key, STATE)
    action_parts = [key for key in unnamed if re.match(r"actions?[._]", key) and _is_vector(meta.features[key])]
    actions = list(dict.fromkeys(modality["action"].values())) or action_parts
    if len(actions) == 1:
        propose(actions[0], "action")
    elif "action" not in taken_names and "actions" not in taken_names:
        proposed |= dict.fromkeys(actions, "action")
        taken_names |= {"action"} if actions else set()
    for name, key in modality["video"].items():
        propose(key, f"{OBSERVATION}images.{name}")
    for key, name in WELL_KNOWN.items():
        propose(key, name)
    for key in unnamed:
        if meta.features[key].dtype in CAMERA_DTYPES:
            propose(key, f"{OBSERVATION}images.{key.rpartition('.')[2]}")
    return proposed, state if len(state) > 1 else []


def _is_vector(feature: Feature) -> bool:
    return feature.dtype in NUMERIC_DTYPES and feature.dtype != "bool" and len(feature.shape) == 1
