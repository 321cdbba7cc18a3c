"""Match a dataset's cameras, state and action with a policy's, by their names and shapes."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.datasets.factory import resolve_delta_timestamps
from lerobot.utils.constants import ACTION, OBS_STATE

from vla_finetuning.policies.processors import EMPTY_CAMERA, DatasetFeature, normalization_mode, policy_feature
from vla_finetuning.policies.registry import family_of


@dataclass(frozen=True)
class FeatureRow:
    """A policy's feature and the dataset's own name of it, which is None for a masked camera.

    `policy_shape` is that of the configuration before it was fitted, with images channel-first.
    """

    dataset_key: str | None
    policy_key: str
    dataset_shape: tuple[int, ...] | None
    policy_shape: tuple[int, ...]
    normalization: str


@dataclass(frozen=True)
class FeatureMatch:
    """How a dataset feeds a policy: the cameras to decode, and a row for each input and output of the policy.

    Names are the policy's. `delta_timestamps` are offsets from a frame in seconds, from LeRobot's
    `resolve_delta_timestamps`.
    """

    camera_keys: tuple[str, ...]
    rows: tuple[FeatureRow, ...]
    delta_timestamps: dict[str, list[float]]

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the dataset's features that the policy uses."""
        return tuple(row.policy_key for row in self.rows if row.dataset_key is not None)

    @property
    def own_names(self) -> dict[str, str]:
        """Return the dataset's own names of the features `keys`, where they differ."""
        keys = {row.policy_key: row.dataset_key for row in self.rows}
        return {name: key for name, key in keys.items() if key is not None and key != name}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the dataset's shapes by the policy's keys, without masked cameras."""
        return {row.policy_key: row.dataset_shape for row in self.rows if row.dataset_shape is not None}

    def table(self) -> list[str]:
        """Format the rows as aligned lines of text."""
        cells = []
        for row in self.rows:
            shape = "masked" if row.dataset_shape is None else "x".join(map(str, row.dataset_shape))
            policy_shape = "x".join(map(str, row.policy_shape))
            source = row.dataset_key or "(no camera)"
            cells.append((source, shape, "->", row.policy_key, policy_shape, row.normalization))
        return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def match_features(
    config: PreTrainedConfig,
    dataset_features: Mapping[str, DatasetFeature],
    own_names: Mapping[str, str] = MappingProxyType({}),
    *,
    fps: float,
    missing_cameras: Literal["error", "mask"] = "error",
    excluded: Sequence[str] = (),
) -> FeatureMatch:
    """Match a dataset's features to a policy's, and fit the configuration to the dataset in place.

    Like LeRobot's `make_policy`, it sets `config.output_features` to the dataset's actions, `config.input_features` if
    empty, and `config.action_feature_names`. LeRobot keeps the base robot's input shapes and drops unmatched cameras
    without a message. Here shapes are the dataset's, and a camera is dropped only on request.

    Args:
        dataset_features: the dataset's features by the names that --rename_map gives them.
        own_names: the dataset's own names of those that it renames, for messages and the table.
        missing_cameras: "mask" to run without cameras that the dataset lacks, if the policy can.
        excluded: cameras of the dataset that were not chosen and are not in `dataset_features`, for a message.
    Raises:
        ValueError: features do not match; the message names the key, both shapes or names, and the flag to use.
    """
    sources = {key: own_names.get(key, key) for key in dataset_features}
    for key, source in sources.items():
        if source != key and config.input_features and key not in config.input_features:
            hint = f": it has '{source}' already, leave that out" if source in config.input_features else ""
            inputs_text = f"and the policy's inputs are {sorted(config.input_features)}"
            raise ValueError(f'--rename_map has "{source}": "{key}", {inputs_text}{hint}')
    available = {key: policy_feature(sources[key], feature) for key, feature in dataset_features.items()}
    features = {key: feature for key, feature in available.items() if feature is not None}

    outputs = {key: feature for key, feature in features.items() if feature.type is FeatureType.ACTION}
    if ACTION not in outputs:
        raise ValueError(f"the dataset has no '{ACTION}'; its features are {sorted(dataset_features)}")
    config.output_features = outputs
    config.input_features = config.input_features or {key: f for key, f in features.items() if key not in outputs}
    if callable(set_features := getattr(config, "set_dataset_feature_metadata", None)):
        set_features(
            {key: {"dtype": f.dtype, "shape": tuple(f.shape), "names": f.names} for key, f in dataset_features.items()}
        )
    config.validate_features()  # adds inputs as the policy's constructor does; they need statistics too
    inputs = config.input_features
    cameras = [key for key, feature in features.items() if feature.type is FeatureType.VISUAL]
    masked = _check_cameras(config, inputs, cameras, own_names, missing_cameras, excluded)
    for key, feature in inputs.items():
        if feature.type is not FeatureType.VISUAL and key not in features:
            raise ValueError(
                f"the policy needs '{key}', and the dataset's features are {sorted(dataset_features)}; "
                f'--rename_map=\'{{"observation.x": "{key}"}}\' gives one of them that name'
            )
    proprio_dim = getattr(config, "proprio_dim", None)
    if proprio_dim is not None and OBS_STATE in features and features[OBS_STATE].shape != (proprio_dim,):
        shape = features[OBS_STATE].shape
        raise ValueError(
            f"'{sources[OBS_STATE]}' has the shape {shape}, and the policy's proprio_dim is {proprio_dim}: give "
            f"--policy.proprio_dim={shape[0]}, or null for a policy that sees no state"
        )
    for key, limit in ((OBS_STATE, "max_state_dim"), (ACTION, "max_action_dim")):
        if key in features:
            _check_vector(sources[key], dataset_features[key], limit, getattr(config, limit, None))
    if len(cameras) > (most := getattr(config, "max_views", len(cameras))):
        raise ValueError(
            f"the policy takes {most} cameras (max_views), and would drop others of {cameras}: choose some with "
            "--dataset.camera_keys, or give another --policy.max_views"
        )
    for key in cameras if family_of(config).keeps_size(config) else ():
        if (size := features[key].shape) != (needed := inputs[key].shape):
            raise ValueError(
                f"'{sources[key]}' has images of {size}, and the policy's are {needed}: a '{config.type}' would crop "
                "them without resizing; resize the dataset's images, or train a new policy (--policy.type)"
            )

    fixed = {FeatureType.VISUAL} if family_of(config).sized_by_images else set()
    config.input_features = {
        key: feature if feature.type in fixed or key not in features else replace(feature, shape=features[key].shape)
        for key, feature in inputs.items()
    }
    if hasattr(config, "action_feature_names"):
        names = list(dataset_features[ACTION].names or ()) or config.action_feature_names
        # The base's names may belong to another robot.
        config.action_feature_names = names if names and len(names) == outputs[ACTION].shape[0] else None

    rows = tuple(
        FeatureRow(
            None if key in masked else sources[key],
            key,
            None if key in masked else tuple(dataset_features[key].shape),
            tuple(feature.shape),
            normalization_mode(config, feature.type).value,
        )
        for key, feature in {**inputs, **outputs}.items()
    )
    matched = {row.policy_key for row in rows if row.dataset_key is not None}
    metadata: Any = SimpleNamespace(features=[key for key in dataset_features if key in matched], fps=fps)
    return FeatureMatch(
        camera_keys=tuple(key for key in config.image_features if key in cameras),
        rows=rows,
        delta_timestamps=resolve_delta_timestamps(config, metadata) or {},
    )


def _check_cameras(
    config: PreTrainedConfig,
    inputs: Mapping[str, PolicyFeature],
    cameras: Sequence[str],
    own_names: Mapping[str, str],
    missing_cameras: str,
    excluded: Sequence[str],
) -> set[str]:
    """Return the policy's cameras to mask. Raise ValueError if others do not match the dataset's."""
    policy_cameras = [key for key, feature in inputs.items() if feature.type is FeatureType.VISUAL]
    empty = {key for key in policy_cameras if key.startswith(EMPTY_CAMERA) and key not in cameras}
    missing = [key for key in policy_cameras if key not in cameras and key not in empty]
    unknown = [key for key in cameras if key not in policy_cameras]
    masks = family_of(config).masks_cameras
    can_mask = masks and len(missing) < len(policy_cameras) - len(empty)
    if not unknown and (not missing or (missing_cameras == "mask" and can_mask)):
        return empty | set(missing)
    reason = f"are not among those chosen ({list(excluded)} are left out)" if excluded else "the dataset lacks"
    problems = [f"the policy has cameras that {reason}: {missing}"] if missing else []
    if unknown:
        problems.append(f"the dataset has cameras that the policy does not know: {unknown}")
    pairs = _pair_names(unknown, missing)
    rename_map = {source: key for key, source in own_names.items()}
    remedies = {
        f"if these are the same cameras, --rename_map='{json.dumps({**rename_map, **pairs})}'": pairs,
        "choose more cameras with --dataset.camera_keys": excluded,
        "name the dataset's cameras to use with --dataset.camera_keys": unknown,
        "run without the missing ones with --dataset.missing_cameras=mask": missing and cameras and masks,
    }
    helpful = [remedy for remedy, helps in remedies.items() if helps] or ["choose another policy"]
    raise ValueError("; ".join(problems) + ("; " if len(helpful) == 1 else ". Either ") + ", or ".join(helpful))


def _pair_names(keys: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Pair each key with the most similar unused name, best pairs first."""

    def tail(key: str) -> str:
        return key.rpartition(".")[2]

    candidates = sorted(
        ((difflib.SequenceMatcher(None, tail(key), tail(name)).ratio(), key, name) for key in keys for name in names),
        key=lambda candidate: -candidate[0],
    )
    pairs: dict[str, str] = {}
    for _, key, name in candidates:
        if key not in pairs and name not in pairs.values():
            pairs[key] = name
    return pairs


def _check_vector(key: str, feature: DatasetFeature, limit_name: str, limit: int | None) -> None:
    shape = tuple(feature.shape)
    if len(shape) != 1 or shape[0] < 2:
        # LeRobot reads shape (1,) as a scalar, and its processors then mistake rows for dimensions.
        raise ValueError(f"'{key}' has the shape {shape}; policies need a vector of two or more numbers")
    if limit is not None and shape[0] > limit:
        raise ValueError(f"'{key}' has {shape[0]} dimensions, and the policy takes {limit} ({limit_name})")
