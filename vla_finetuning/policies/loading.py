"""A LeRobot policy for training: fetched, loaded and verified, matched to a dataset, and saved again.

LeRobot's policy classes do the work; this module refuses what would otherwise go wrong silently: weights that do
not load, cameras that do not match, states too wide. The processors are `pipelines`, the loss is its family's.
"""

import contextlib
import copy
import dataclasses
import difflib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import DeviceProcessorStep, PolicyProcessorPipeline, TokenizerProcessorStep
from lerobot.utils.constants import (
    ACTION,
    OBS_PREFIX,
    OBS_STATE,
    POLICY_POSTPROCESSOR_DEFAULT_NAME,
    POLICY_PREPROCESSOR_DEFAULT_NAME,
    REWARD,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file, save_model
from torch import Tensor
from transformers.initialization import no_init_weights

from vla_finetuning.data.hub import download_snapshot, resolve_commit
from vla_finetuning.files import let_others_read, read_foreign_json, refuse_pointer
from vla_finetuning.lerobot_options import make_config
from vla_finetuning.mirror import as_path, contents, fetched_for_good
from vla_finetuning.policies.lora import write_adapters
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.processors import (
    EMPTY_CAMERA,
    TOKENIZER_FOLDER,
    DatasetFeature,
    normalization_mode,
    policy_feature,
)
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.remote_code import remote_code
from vla_finetuning.policies.trainable import with_float32_masters

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# Of a safetensors file: a tensor takes 100 bytes, PI0.5 has 800 of them.
MAX_HEADER_BYTES = 8 * 2**20
# Of a saved configuration: where that policy came from and was published, which is not so of what is trained from it.
# Its license stays: it is also that of what is derived.
WHENCE = ("pretrained_path", "pretrained_revision", "push_to_hub", "repo_id", "private", "tags")
PRETRAINED_FILES = ("*.json", "*.safetensors", "*.model")


# --- fetch and load ---------------------------------------------------------------------------------------


def load_policy_config(folder: Path, options: Sequence[str] = ()) -> PreTrainedConfig:
    """LeRobot's configuration of a policy, as its folder says, with options ("--chunk_size=20") in its place.

    As `PreTrainedConfig.from_pretrained`, which also leaves a temporary file behind, takes its parser's own flags, and
    keeps where the folder's policy came from and was published (WHENCE).

    Raises:
        OSError, ValueError: config.json cannot be read, is no policy's, or an option is not the policy's.
    """
    saved = read_foreign_json(folder / "config.json")
    policy_type = saved.pop("type")
    return make_policy_config(
        policy_type, options, {name: value for name, value in saved.items() if name not in WHENCE}, "config.json"
    )


def make_policy_config(
    policy_type: str, options: Sequence[str] = (), saved: Mapping[str, Any] | None = None, source: str = ""
) -> PreTrainedConfig:
    """LeRobot's configuration of a type of policy, on the CPU: where it was saved, another device may be named."""
    cls = PreTrainedConfig.get_choice_class(policy_type)
    config = cast(PreTrainedConfig, make_config(cls, "policy", options, {**(saved or {}), "device": "cpu"}, source))
    config.device = "cpu"
    _check_sizes(config, source)
    return config


# Of a policy's options by what their names hold, the largest sensible value: far above those of any policy, and below
# what makes the memory plan, or the features that LeRobot makes of them, take minutes or all memory.
_LARGEST = {
    r"cameras|depth|layers|blocks|heads|n_obs_steps": 1000,
    r"chunk_size|horizon|n_action_steps|inference_steps|length|timesteps": 100_000,
    r"dim|width|size|tokens|vocab": 10_000_000,
}


# Options of policies that no network can do without.
_POSITIVE = (
    r"chunk_size|horizon|n_action_steps|n_obs_steps|dim_model|n_heads|max_(state|action)_dim|num_inference_steps"
)


def _check_sizes(config: PreTrainedConfig, source: str) -> None:
    """Refuse sizes that no policy has: of a configuration that came from elsewhere, anything may be asked for."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if type(value) is int and value < 1 and re.fullmatch(_POSITIVE, field.name):
            raise ValueError(f"{f'{source}: ' if source else ''}--policy.{field.name}={value}: must be positive")
        most = next((limit for names, limit in _LARGEST.items() if re.search(names, field.name)), None)
        if type(value) is int and most is not None and value > most:
            prefix = f"{source}: " if source else ""
            raise ValueError(f"{prefix}{field.name} is {value:,}, more than the {most:,} that a policy may have")


def fetch_pretrained(
    path: str, revision: str | None = None, look: Callable[[Path], Any] = lambda folder: None
) -> tuple[Path, str | None]:
    """Find a pretrained policy, and download it if `path` is an id on the Hub. Runs on the driver.

    Only configuration, safetensors and tokenizer files are downloaded.

    Args:
        path: a folder, on a disk or in a bucket, or `owner/name` on the Hub. An existing folder wins.
        revision: branch, tag or commit on the Hub.
        look: called with the folder of a download that has nothing but config.json yet; what it raises ends this.
    Returns:
        The folder, fetched if it is in a bucket, and the commit it holds or None for a folder of the user's.
    Raises:
        FileNotFoundError: neither a folder nor a Hub id, or no config.json in it.
        ValueError: a URI; a revision of a local folder; no such repository or revision, or no access.
        OSError: the Hub cannot be reached, and the cache does not hold the files.
    """
    folder, commit = _here(path), None
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{path} is a local folder, which has no revision {revision!r}")
    elif not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise FileNotFoundError(f"{path} is no folder and no Hub id of the form owner/name")
    else:
        commit = resolve_commit(path, revision, repo_type="model")
        folder = Path(download_snapshot(path, commit, repo_type="model", allow_patterns=("config.json",)))
        _require_config(path, folder)
        look(folder)
        folder = Path(download_snapshot(path, commit, repo_type="model", allow_patterns=PRETRAINED_FILES))
    _require_config(path, folder)
    return folder, commit


def _here(path: str) -> Path:
    """The folder; of one in a bucket a copy on this machine, once it is known to be a policy's."""
    folder = as_path(path)
    if "://" in path:
        _require_config(path, folder)
    return fetched_for_good(folder)


def _require_config(path: str, folder: Path) -> None:
    names = contents(folder)
    if "config.json" not in names:
        remedy = "; it is a checkpoint: give its run's pretrained_model" if "state.json" in names else ""
        raise FileNotFoundError(f"{path} is no pretrained LeRobot policy: no config.json among {names}{remedy}")


def new_policy(config: PreTrainedConfig, *, trusted: bool = False) -> PreTrainedPolicy:
    """Build a policy with random weights on the CPU; `config.device` becomes "cpu".

    `trusted`: whether code that comes with what `config` names may run. Raises RemoteCodeError if not, and some would.
    """
    config.device = "cpu"
    with remote_code(trusted):
        return get_policy_class(config.type)(config)


def load_policy(
    folder: Path, config: PreTrainedConfig, *, trusted: bool = False, weights: Mapping[str, Tensor] | None = None
) -> PreTrainedPolicy:
    """Build a policy on the CPU and load its weights, all of them or none.

    LeRobot's own `PI05Policy.from_pretrained` catches every error and goes on with random weights (lerobot
    0.6.1); this reads the same files, renames keys as it does, and verifies. Runs wherever the policy is
    needed.

    Args:
        folder: a pretrained folder with model.safetensors, or its shards and their index.
        config: the policy's configuration, from that folder and fitted to the dataset (`match_features`). Its
            `device` becomes "cpu".
        trusted: whether code that comes with what `config` names may run.
        weights: what `read_weights` found in the folder, so that it need not be read here.
    Returns:
        The policy, in eval mode, parameters in the precision of its configuration.
    Raises:
        FileNotFoundError: no safetensors weights in the folder.
        ValueError: a file is corrupt; keys are missing, unexpected or of another shape; a weight is not finite.
    """
    folder = Path(folder)
    # Every weight is about to be loaded, so drawing 4 billion random ones first (a minute) is left out.
    with no_init_weights() if family_of(config).from_config else contextlib.nullcontext():
        policy = new_policy(config, trusted=trusted)
    weights = _matching_weights(folder, policy, weights)
    _check_finite(folder, weights)
    policy.load_state_dict(weights, strict=False)
    return policy.eval()


def check_weights(folder: Path, policy: PreTrainedPolicy) -> None:
    """Refuse what `load_policy` would refuse of a folder's files: keys, shapes, values. Runs on the driver.

    Args:
        policy: built for the folder's configuration, on any device; the meta device will do.
    """
    _check_finite(Path(folder), _matching_weights(Path(folder), policy))


def _check_finite(folder: Path, weights: Mapping[str, Tensor]) -> None:
    for key, tensor in weights.items():
        # A sum is finite where all values are, unless they are huge: that is looked at again.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise ValueError(
                    f"{key} in {folder} holds values that are not finite, {bad:,} of {tensor.numel():,}: the file is "
                    "damaged, or the policy had diverged when it was saved; start from another one"
                )


def _matching_weights(
    folder: Path, policy: PreTrainedPolicy, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return all tensors of a pretrained folder under the policy's keys, mapped into memory and not read yet."""
    stored = read_weights(folder) if tensors is None else dict(tensors)
    _explain_names(folder, list(stored))
    weights = family_of(policy.config).own_keys(policy, stored)
    _check_keys(folder, policy.config, weights, policy.state_dict(keep_vars=True))
    return weights


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a pretrained folder, mapped into memory and not read yet."""
    if (folder / WEIGHTS_FILE).is_file():
        files = [WEIGHTS_FILE]
    elif (folder / WEIGHTS_INDEX).is_file():
        try:
            files = sorted(set(read_foreign_json(folder / WEIGHTS_INDEX)["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{folder / WEIGHTS_INDEX} is no index of safetensors shards: {error!r}") from error
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{folder / WEIGHTS_INDEX} names {file!r}, which is no file in its own folder")
    else:
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else "nothing"
        raise FileNotFoundError(
            f"no {WEIGHTS_FILE} in {folder}, found {names}; pickled weights (.bin, .pt) are never loaded, "
            "and adapters must be merged into their base first"
        )
    weights: dict[str, Tensor] = {}
    for file in files:
        check_header(folder / file)
        try:
            with safe_open(folder / file, framework="pt", device="cpu") as opened:
                weights.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{folder / WEIGHTS_INDEX} names {file}, which is not there") from error
        except SafetensorError as error:
            raise ValueError(f"{folder / file} is truncated or no safetensors file: {error}") from error
    return weights


def check_header(path: Path) -> None:
    """Refuse a safetensors file whose header lists more tensors than a policy has, before it is parsed."""
    if not path.exists():
        return
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        begin = file.read(64)
        refuse_pointer(str(path), begin)
        size = int.from_bytes(begin[:8], "little") if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    if size is None or size > MAX_HEADER_BYTES:
        fault = "is not a regular file" if size is None else f"claims a header of {size / 2**20:,.0f} MiB"
        raise ValueError(
            f"{path} {fault}, more than the {MAX_HEADER_BYTES / 2**20:.0f} MiB that the names of a policy's tensors "
            "take: it is truncated or no safetensors file"
        )


def _check_keys(
    folder: Path, config: PreTrainedConfig, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    # One tensor under two names is written once; loading either loads both.
    loaded = {id(expected[key]) for key in expected if key in weights}
    missing = [key for key in expected if key not in weights and id(expected[key]) not in loaded]
    unexpected = [key for key in weights if key not in expected]
    shapes = [
        f"{key} (found {tuple(weights[key].shape)}, expected {tuple(expected[key].shape)})"
        for key in expected
        if key in weights and weights[key].shape != expected[key].shape
    ]
    problems = [
        f"{len(keys)} {fault}: {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
        for fault, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if keys
    ]
    if problems:
        raise ValueError(
            f"the weights in {folder} are not of its '{config.type}' policy: {'; '.join(problems)}. Nothing "
            "was loaded. Check that config.json and weights belong together, and to this version of LeRobot"
        )


# What wraps a policy puts before the names of its weights.
WRAPPERS = r"((module|_orig_mod)\.)+|base_model\.model\."


def _explain_names(folder: Path, names: Sequence[str]) -> None:
    """Raise ValueError with the cause and the command, where names of weights are wrong for a known reason."""
    wrapped = [re.match(WRAPPERS, name) for name in names]
    if wrapped and all(wrapped):
        prefix = os.path.commonprefix([match[0] for match in wrapped if match])
        code = (
            "from safetensors.torch import load_file, save_file; p = 'model.safetensors'; "
            f"save_file({{k.removeprefix('{prefix}'): v for k, v in load_file(p).items()}}, p, {{'format': 'pt'}})"
        )
        raise ValueError(
            f"the names of the weights in {folder} all begin with {prefix!r}: they were saved from a policy wrapped in "
            "DistributedDataParallel, torch.compile or PEFT. Take it off, once, in that folder: "
            f'python -c "{code}"'
        )
    inside = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
    if old := [name for name in names if name.removeprefix("model.").startswith(inside)]:
        raise ValueError(
            f"the weights in {folder} have normalisation inside of the policy ({old[0]}), as LeRobot saved it before "
            "processors: python -m lerobot.processor.migrate_policy_normalization "
            f"--pretrained-path {folder} --output-dir {folder.name}_migrated, and give that folder"
        )


# --- match dataset and policy -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureRow:
    """A policy's feature and where it comes from, for a printed table.

    Attributes:
        dataset_key, dataset_shape: None for a camera that is masked.
        policy_key, policy_shape: images channel-first; the shape that its configuration had before it was fitted.
        normalization: mode, as LeRobot names it.
    """

    dataset_key: str | None
    policy_key: str
    dataset_shape: tuple[int, ...] | None
    policy_shape: tuple[int, ...]
    normalization: str


@dataclass(frozen=True)
class FeatureMatch:
    """How a dataset feeds a policy.

    Attributes:
        camera_keys: cameras to decode, by their names in the dataset.
        rows: a row for each input and output of the policy.
        delta_timestamps: seconds from a frame, by dataset key, as LeRobot's `resolve_delta_timestamps`.
    """

    camera_keys: tuple[str, ...]
    rows: tuple[FeatureRow, ...]
    delta_timestamps: dict[str, list[float]]

    @property
    def dataset_keys(self) -> tuple[str, ...]:
        """Return the dataset's features that the policy uses."""
        return tuple(row.dataset_key for row in self.rows if row.dataset_key is not None)

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Return what the policy is trained on: the dataset's shapes by the policy's keys, masked cameras not among
        them.
        """
        return {row.policy_key: row.dataset_shape for row in self.rows if row.dataset_shape is not None}

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the match with other names for features of the dataset."""
        rows = tuple(replace(row, dataset_key=names.get(row.dataset_key or "", row.dataset_key)) for row in self.rows)
        deltas = {names.get(key, key): seconds for key, seconds in self.delta_timestamps.items()}
        cameras = tuple(names.get(key, key) for key in self.camera_keys)
        return replace(self, camera_keys=cameras, rows=rows, delta_timestamps=deltas)

    def table(self) -> list[str]:
        """The rows as aligned lines of text."""
        cells = [
            (
                row.dataset_key or "(no camera)",
                "masked" if row.dataset_shape is None else "x".join(map(str, row.dataset_shape)),
                "->",
                row.policy_key,
                "x".join(map(str, row.policy_shape)),
                row.normalization,
            )
            for row in self.rows
        ]
        return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as text, in columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def match_features(
    config: PreTrainedConfig,
    dataset_features: Mapping[str, DatasetFeature],
    rename_map: Mapping[str, str],
    *,
    fps: float,
    missing_cameras: Literal["error", "mask"] = "error",
    left_out: Sequence[str] = (),
) -> FeatureMatch:
    """Match a dataset's features to a policy's, and fit the configuration to the dataset.

    As LeRobot's `make_policy`, it sets `config.output_features` to the dataset's actions,
    `config.input_features` if it is empty, and `config.action_feature_names`. LeRobot leaves the shapes of the
    other robot in the inputs of a pretrained policy; here they are the dataset's. LeRobot takes any cameras
    as long as one side's are a subset of the other's; here a camera is left out only on request.

    Args:
        config: the policy's configuration.
        dataset_features: the dataset's features, without the cameras that were not chosen.
        rename_map: dataset key to policy key, for `observation.*`.
        fps: frames per second of the dataset.
        missing_cameras: "mask" lets a policy that can run without cameras that it has and the dataset lacks.
        left_out: cameras of the dataset that were not chosen, for a message.
    Raises:
        ValueError: naming the key, what was found, what was expected, and the flag that settles it.
    """
    _check_rename_map(config, dataset_features, rename_map)
    sources = {rename_map.get(key, key): key for key in dataset_features}
    available = {key: policy_feature(source, dataset_features[source]) for key, source in sources.items()}
    features = {key: feature for key, feature in available.items() if feature is not None}

    outputs = {key: feature for key, feature in features.items() if feature.type is FeatureType.ACTION}
    if ACTION not in outputs:
        raise ValueError(f"the dataset has no '{ACTION}'; its features are {sorted(dataset_features)}")
    fitted = copy.deepcopy(config)
    fitted.output_features = outputs
    fitted.input_features = fitted.input_features or {key: f for key, f in features.items() if key not in outputs}
    described = {key: dataset_features[source] for key, source in sources.items()}
    _tell_features(fitted, described)
    fitted.validate_features()  # what the policy's constructor adds, its state among others, must be normalised too
    inputs = fitted.input_features
    cameras = [key for key, feature in features.items() if feature.type is FeatureType.VISUAL]
    masked = _check_cameras(config, inputs, cameras, sources, rename_map, missing_cameras, left_out)
    for key, feature in inputs.items():
        if feature.type is not FeatureType.VISUAL and key not in features:
            raise ValueError(
                f"the policy needs '{key}', and the dataset's features are {sorted(dataset_features)}; "
                f'--rename_map=\'{{"observation.x": "{key}"}}\' gives one of them that name'
            )
    exact = getattr(config, "proprio_dim", None)
    if exact is not None and OBS_STATE in features and features[OBS_STATE].shape != (exact,):
        shape = features[OBS_STATE].shape
        raise ValueError(
            f"'{sources[OBS_STATE]}' has the shape {shape}, and the policy's proprio_dim is {exact}: give "
            f"--policy.proprio_dim={shape[0]}, or null for a policy that sees no state"
        )
    for key, limit in ((OBS_STATE, "max_state_dim"), (ACTION, "max_action_dim")):
        if key in features:
            _check_vector(sources[key], dataset_features[sources[key]], limit, getattr(config, limit, None))

    keeps = {FeatureType.VISUAL} if family_of(config).sized_by_images else set()
    config.output_features = outputs
    config.input_features = {
        key: feature if feature.type in keeps or key not in features else replace(feature, shape=features[key].shape)
        for key, feature in inputs.items()
    }
    _tell_features(config, described)
    if hasattr(config, "action_feature_names"):
        named = _flat_names(dataset_features[ACTION].names) or config.action_feature_names
        # Those that the pretrained policy had may be of another robot.
        config.action_feature_names = named if named and len(named) == outputs[ACTION].shape[0] else None

    used = {**inputs, **outputs}
    rows = tuple(
        FeatureRow(
            None if key in masked else sources[key],
            key,
            None if key in masked else tuple(dataset_features[sources[key]].shape),
            tuple(feature.shape),
            normalization_mode(config, feature.type).value,
        )
        for key, feature in used.items()
    )
    return FeatureMatch(
        camera_keys=tuple(sources[key] for key in config.image_features if key in cameras),
        rows=rows,
        delta_timestamps=_delta_timestamps(config, dataset_features, fps),
    )


def _tell_features(config: PreTrainedConfig, features: Mapping[str, DatasetFeature]) -> None:
    """Describe a dataset's features to a configuration that asks for them, as LeRobot's `make_policy` does."""
    if callable(set_features := getattr(config, "set_dataset_feature_metadata", None)):
        set_features(
            {key: {"dtype": f.dtype, "shape": tuple(f.shape), "names": f.names} for key, f in features.items()}
        )


def _check_rename_map(
    config: PreTrainedConfig, dataset_features: Mapping[str, DatasetFeature], rename_map: Mapping[str, str]
) -> None:
    names = {key: rename_map.get(key, key) for key in dataset_features}
    for key, name in rename_map.items():
        entry = f'--rename_map has "{key}": "{name}"'
        if key not in dataset_features:
            raise ValueError(f"{entry}, and the dataset's features are {sorted(dataset_features)}")
        if not key.startswith(OBS_PREFIX):
            raise ValueError(f"{entry}; LeRobot renames only keys that start with '{OBS_PREFIX}'")
        if config.input_features and name not in config.input_features:
            hint = f": it has '{key}' already, leave that out" if key in config.input_features else ""
            raise ValueError(f"{entry}, and the policy's inputs are {sorted(config.input_features)}{hint}")
        same = sorted(other for other in names if names[other] == name)
        if len(same) > 1:
            raise ValueError(f"{entry}, so that {same} would all be called '{name}'")


def _check_cameras(
    config: PreTrainedConfig,
    inputs: Mapping[str, PolicyFeature],
    cameras: Sequence[str],
    sources: Mapping[str, str],
    rename_map: Mapping[str, str],
    missing_cameras: str,
    left_out: Sequence[str],
) -> set[str]:
    """The policy's cameras that stay without an image; an error unless that was asked for."""
    policy_cameras = [key for key, feature in inputs.items() if feature.type is FeatureType.VISUAL]
    empty = {key for key in policy_cameras if key.startswith(EMPTY_CAMERA) and key not in cameras}
    missing = [key for key in policy_cameras if key not in cameras and key not in empty]
    unknown = [key for key in cameras if key not in policy_cameras]
    masks = family_of(config).masks_cameras
    can_mask = masks and len(missing) < len(policy_cameras) - len(empty)
    if not unknown and (not missing or (missing_cameras == "mask" and can_mask)):
        return empty | set(missing)
    problems, ways = [], []
    if missing:
        reason = f"are not among those chosen ({list(left_out)} are left out)" if left_out else "the dataset lacks"
        problems.append(f"the policy has cameras that {reason}: {missing}")
    if unknown:
        problems.append(f"the dataset has cameras that the policy does not know: {[sources[key] for key in unknown]}")
    if missing and unknown:
        pairs = _pair_names(unknown, missing)
        suggestion = json.dumps({**rename_map, **{sources[key]: name for key, name in pairs.items()}})
        ways.append(f"if these are the same cameras, --rename_map='{suggestion}'")
    if left_out:
        ways.append("choose more cameras with --dataset.camera_keys")
    if unknown:
        ways.append("name the dataset's cameras to use with --dataset.camera_keys")
    if missing and cameras and masks:
        ways.append("let the policy run without the missing ones with --dataset.missing_cameras=mask")
    ways = ways or ["choose another policy"]
    remedy = f". Either {', or '.join(ways)}" if len(ways) > 1 else f"; {ways[0]}"
    raise ValueError("; ".join(problems) + remedy)


def _pair_names(keys: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Pair each key with one name, the most alike first."""

    def last(key: str) -> str:
        return key.rpartition(".")[2]

    likeness = sorted(
        ((difflib.SequenceMatcher(None, last(key), last(name)).ratio(), key, name) for key in keys for name in names),
        key=lambda candidate: -candidate[0],
    )
    pairs: dict[str, str] = {}
    for _, key, name in likeness:
        if key not in pairs and name not in pairs.values():
            pairs[key] = name
    return pairs


def _check_vector(key: str, feature: DatasetFeature, limit_name: str, limit: int | None) -> None:
    shape = tuple(feature.shape)
    if len(shape) != 1 or shape[0] < 2:
        # LeRobot reads a feature of shape (1,) as a scalar, and its processors then take rows for dimensions.
        raise ValueError(f"'{key}' has the shape {shape}; policies need a vector of two or more numbers")
    if limit is not None and shape[0] > limit:
        raise ValueError(f"'{key}' has {shape[0]} dimensions, and the policy takes {limit} ({limit_name})")


def _flat_names(names: Any) -> list[str] | None:
    """The names of a vector's dimensions: datasets store a list, or a dict of lists."""
    if isinstance(names, Mapping):
        names = [name for group in names.values() for name in group]
    return [str(name) for name in names] if names else None


def _delta_timestamps(
    config: PreTrainedConfig, dataset_features: Mapping[str, DatasetFeature], fps: float
) -> dict[str, list[float]]:
    """Seconds for each windowed key, by the rule of LeRobot's `resolve_delta_timestamps`."""
    deltas: dict[str, list[float]] = {}
    for key in dataset_features:
        if key == ACTION:
            indices = config.action_delta_indices
        elif key == REWARD:
            indices = config.reward_delta_indices
        else:
            indices = config.observation_delta_indices if key.startswith(OBS_PREFIX) else None
        if indices is not None:
            deltas[key] = [index / fps for index in indices]
    return deltas


# --- save -------------------------------------------------------------------------------------------------


def exported_dtypes(policy: PreTrainedPolicy) -> dict[str, torch.dtype]:
    """The keys `save_pretrained` writes, and their precision: where it can be built, those of LeRobot's own new policy.

    Raises:
        ValueError: the policy's keys or shapes are not those LeRobot's class has for its configuration.
    """
    tensors = policy.state_dict()
    if not family_of(policy.config).from_config:
        return {key: tensor.dtype for key, tensor in tensors.items()}
    built = with_float32_masters(meta_policy(policy.config)).state_dict()
    different = sorted(
        key
        for key in tensors.keys() | built.keys()
        if key not in tensors or key not in built or tensors[key].shape != built[key].shape
    )
    if different:
        raise ValueError(f"the policy is not as LeRobot builds it; keys or shapes differ: {different[:5]}")
    return {key: tensor.dtype for key, tensor in built.items()}


def save_pretrained(
    policy: PreTrainedPolicy,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
    folder: Path,
    config: PreTrainedConfig | None = None,
    weights_of: Path | None = None,
) -> None:
    """Write what LeRobot calls a pretrained policy. An existing folder is replaced, never half-written.

    config.json, model.safetensors, both processors with their statistics, and the tokenizer if LeRobot
    would fetch it by name. No device and no local path is in it. `from_pretrained` and
    `make_pre_post_processors` of LeRobot read it.

    Args:
        config: what is written of the policy's configuration; its own when None.
        weights_of: a folder that the same policy was written to, whose weights this one shares (as one file under two
            names, where the file system has that).

    Raises:
        ValueError: the tokenizer has no name under which LeRobot would find it.
        OSError: of the file system; nothing is left behind.
    """
    with _pretrained_folder(folder, config or policy.config, preprocessor, postprocessor) as partial:
        if weights_of is not None:
            try:
                os.link(weights_of / WEIGHTS_FILE, partial / WEIGHTS_FILE)
            except OSError:  # a file system without hard links
                shutil.copyfile(weights_of / WEIGHTS_FILE, partial / WEIGHTS_FILE)
        elif family_of(policy.config).from_config:
            dtypes = exported_dtypes(policy)
            named = policy.state_dict(keep_vars=True)
            once = {id(tensor): key for key, tensor in named.items()}  # one tensor under two names is written once
            weights = {key: named[key].detach().to("cpu", dtypes[key]).contiguous() for key in once.values()}
            save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        else:
            save_model(policy, str(partial / WEIGHTS_FILE))


def save_adapters(
    adapted: Any,
    base: str,
    revision: str | None,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
    folder: Path,
    config: PreTrainedConfig,
) -> None:
    """Write what LeRobot calls a pretrained policy that uses PEFT: adapters, and where the other weights are.

    Args:
        adapted: from `lora.add_adapters`. config: what is written of its policy's configuration. The others as for
            `save_pretrained`, and `lora.write_adapters`.
    """
    config = copy.deepcopy(config)
    config.use_peft = True
    with _pretrained_folder(folder, config, preprocessor, postprocessor) as partial:
        write_adapters(adapted, base, revision, partial)


@contextlib.contextmanager
def _pretrained_folder(
    folder: Path,
    config: PreTrainedConfig,
    preprocessor: PolicyProcessorPipeline,
    postprocessor: PolicyProcessorPipeline,
) -> Iterator[Path]:
    """Yield a temporary folder with a pretrained policy's all but its weights; it then takes the place of `folder`."""
    with _replacing_folder(Path(folder)) as partial:
        config = copy.deepcopy(config)
        config.device = None
        config.pretrained_path = None
        config._save_pretrained(partial)
        yield partial
        _save_tokenizer(preprocessor, partial)
        for pipeline, name in (
            (preprocessor, POLICY_PREPROCESSOR_DEFAULT_NAME),
            (postprocessor, POLICY_POSTPROCESSOR_DEFAULT_NAME),
        ):
            pipeline = copy.copy(pipeline)
            pipeline.steps = [
                DeviceProcessorStep("cpu", step.float_dtype) if isinstance(step, DeviceProcessorStep) else step
                for step in pipeline.steps
            ]
            pipeline.save_pretrained(partial, config_filename=f"{name}.json")
        for path in partial.rglob("*.safetensors"):
            let_others_read(path)


def _save_tokenizer(preprocessor: PolicyProcessorPipeline, folder: Path) -> None:
    for step in preprocessor.steps:
        if type(step) is not TokenizerProcessorStep:
            continue  # other classes know how to save themselves
        if "tokenizer_name" not in step.get_config():
            raise ValueError(
                "the preprocessor's tokenizer was given as an object, and LeRobot saves only the name of one on "
                "the Hub: the policy could not be loaded again. Use a step that saves its tokenizer itself"
            )
        step.input_tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)


@contextlib.contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling to fill; it takes the place of `folder` if the block ends without error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        partial = workspace / "new"
        partial.mkdir()
        yield partial
        if folder.exists():
            os.rename(folder, workspace / "old")
        os.rename(partial, folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
