"""Fetch and load a LeRobot policy for training, and verify its weights.

LeRobot's policy classes build the network. This module refuses weights that do not load or are not finite, which
would otherwise go unnoticed.
"""

import contextlib
import dataclasses
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.initialization import no_init_weights

from vla_finetuning.buckets.mirror import as_path, contents, fetched_for_good
from vla_finetuning.data.hub import download_snapshot, resolve_commit
from vla_finetuning.files import read_foreign_json, refuse_pointer
from vla_finetuning.lerobot_options import make_config
from vla_finetuning.options.policy import ROBOT_NAME
from vla_finetuning.policies.family import MAX_DELAY
from vla_finetuning.policies.registry import family_of, family_of_class, find_type
from vla_finetuning.policies.remote_code import remote_code

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# Limit of a safetensors header: a tensor takes about 100 bytes, and PI0.5 has 800 tensors.
MAX_HEADER_BYTES = 8 * 2**20
# Fields of a saved configuration that describe the base's origin and publication, not the policy trained from it.
# `license` is kept: it also applies to derived policies.
ORIGIN_FIELDS = ("pretrained_path", "pretrained_revision", "push_to_hub", "repo_id", "private", "tags")
# Converts a policy from before LeRobot's processors.
MIGRATE = "python -m lerobot.processor.migrate_policy_normalization"
PRETRAINED_FILES = ["*.json", "*.safetensors", "*.model"]


def load_policy_config(folder: Path, options: Sequence[str] = ()) -> PreTrainedConfig:
    """Read a policy's configuration from its folder, overridden by options such as "--chunk_size=20".

    Unlike `PreTrainedConfig.from_pretrained`, it leaves no temporary file, ignores the parser's own flags and drops the
    fields in ORIGIN_FIELDS. MAX_DELAY is read from robot.json. Raises OSError or ValueError.
    """
    saved = read_foreign_json(folder / "config.json")
    policy_type = saved.pop("type")
    saved = {name: value for name, value in saved.items() if name not in ORIGIN_FIELDS}
    facts = read_foreign_json(folder / ROBOT_NAME) if (folder / ROBOT_NAME).is_file() else {}
    return make_policy_config(
        policy_type, options, saved | {key: facts[key] for key in facts.keys() & {MAX_DELAY}}, "config.json"
    )


def make_policy_config(
    policy_type: str, options: Sequence[str] = (), saved: Mapping[str, Any] | None = None, source: str = ""
) -> PreTrainedConfig:
    """Make LeRobot's configuration of a policy type, with device "cpu" whatever device is saved."""
    find_type(policy_type)
    cls, saved = PreTrainedConfig.get_choice_class(policy_type), {**(saved or {}), "device": "cpu"}
    max_delay = None
    if family_of_class(cls, policy_type).flow and MAX_DELAY not in {field.name for field in dataclasses.fields(cls)}:
        max_delay = str(saved.pop(MAX_DELAY, 0))
        for option in [option for option in options if option.startswith(f"--{MAX_DELAY}=")]:
            max_delay = option.partition("=")[2]
        options = [option for option in options if not option.startswith(f"--{MAX_DELAY}=")]
    config: Any = make_config(cls, "policy", options, saved, source)
    config.device = "cpu"
    _check_sizes(config, source)
    if max_delay is not None:
        limit = config.chunk_size - 1
        if not max_delay.isdecimal() or int(max_delay) > limit:
            raise ValueError(
                f"--policy.{MAX_DELAY}={max_delay}: expected a whole number of actions from 0 to {limit}, so that one "
                f"of a chunk (--policy.chunk_size={config.chunk_size}) is left to predict"
            )
        setattr(config, MAX_DELAY, int(max_delay))
    return config


# Largest sensible values of a policy's options, by a pattern of their names. Larger values would let the memory plan
# take minutes or exhaust the memory.
_LARGEST = {
    r"cameras|depth|layers|blocks|heads|n_obs_steps": 1000,
    r"chunk_size|horizon|n_action_steps|inference_steps|length|timesteps": 100_000,
    r"dim|width|size|tokens|vocab": 10_000_000,
}
# Options that must be positive.
_POSITIVE = (
    r"chunk_size|horizon|n_action_steps|n_obs_steps|dim_model|n_heads|max_(state|action)_dim|num_inference_steps"
)


def _check_sizes(config: PreTrainedConfig, source: str) -> None:
    """Refuse sizes that no policy has: a downloaded configuration may hold any number."""
    prefix = f"{source}: " if source else ""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if type(value) is not int:
            continue
        if value < 1 and re.fullmatch(_POSITIVE, field.name):
            raise ValueError(f"{prefix}--policy.{field.name}={value}: must be positive")
        largest = next((largest for names, largest in _LARGEST.items() if re.search(names, field.name)), value)
        if value > largest:
            raise ValueError(f"{prefix}{field.name} is {value:,}, more than the {largest:,} that a policy may have")


def fetch_pretrained(
    path: str, revision: str | None = None, check_config: Callable[[Path], Any] = lambda folder: None
) -> tuple[Path, str | None]:
    """Find a pretrained policy, and download it if `path` is a bucket or Hub address.

    Args:
        path: folder on a disk or in a bucket, or `owner/name` on the Hub. An existing folder wins.
        check_config: check that is called when only config.json has been downloaded; it may raise.
    Returns:
        The local folder, and its commit; None as commit unless it is from the Hub.
    Raises:
        ValueError, OSError: `path` is no folder and no Hub id, cannot be read, or has no config.json or `revision`.
    """
    folder, commit = as_path(path), None
    if "://" in path:
        _require_config(path, folder)  # before it is copied to this machine
    folder = fetched_for_good(folder)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{path} is a local folder, which has no revision {revision!r}")
    elif not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise FileNotFoundError(f"{path} is no folder and no Hub id of the form owner/name")
    else:
        commit = resolve_commit(path, revision, repo_type="model")
        folder = Path(download_snapshot(path, commit, repo_type="model", allow_patterns=["config.json"]))
        _require_config(path, folder)
        check_config(folder)
        folder = Path(download_snapshot(path, commit, repo_type="model", allow_patterns=PRETRAINED_FILES))
    _require_config(path, folder)
    return folder, commit


def _require_config(path: str, folder: Path) -> None:
    names = contents(folder)
    if "config.json" not in names:
        remedy = "; it is a checkpoint: give its run's pretrained_model" if "state.json" in names else ""
        raise FileNotFoundError(f"{path} is no pretrained LeRobot policy: no config.json among {names}{remedy}")


def new_policy(config: PreTrainedConfig, *, trusted: bool = False) -> PreTrainedPolicy:
    """Build a policy with random weights on the CPU. Raises RemoteCodeError for code that is not trusted."""
    config.device = "cpu"
    with remote_code(trusted):
        return get_policy_class(config.type)(config)


def load_policy(
    folder: Path, config: PreTrainedConfig, *, trusted: bool = False, weights: Mapping[str, Tensor] | None = None
) -> PreTrainedPolicy:
    """Build a policy on the CPU and load all of its weights.

    LeRobot's own `PI05Policy.from_pretrained` catches every error and continues with random weights (lerobot 0.6.1).
    This function reads the same files, renames keys in the same way, and verifies the result. The policy is in eval
    mode, with parameters in the configured precision.

    Args:
        config: configuration from that folder, fitted to the dataset (`match_features`). `device` becomes "cpu".
        trusted: whether code of the repositories that `config` names may run.
        weights: result of `read_weights(folder)`, if it has been read already.
    Raises:
        FileNotFoundError: the folder has no safetensors weights.
        ValueError: a file is corrupt; keys are missing, unexpected or of another shape; a weight is not finite.
    """
    # Skip the random initialisation: it takes a minute for 4 billion weights, and every weight is loaded below.
    with no_init_weights() if family_of(config).from_config else contextlib.nullcontext():
        policy = new_policy(config, trusted=trusted)
    weights = _matching_weights(folder, policy, weights)
    _check_finite(folder, weights)
    policy.load_state_dict(weights, strict=False)
    return policy.eval()


def check_weights(folder: Path, policy: PreTrainedPolicy) -> None:
    """Raise the errors of `load_policy` about keys, shapes and values for a policy on any device, meta included."""
    _check_finite(folder, _matching_weights(folder, policy))


def _check_finite(folder: Path, weights: Mapping[str, Tensor]) -> None:
    for key, tensor in weights.items():
        # The sum is fast, but may overflow for huge finite values: count only if it is not finite.
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum(dtype=torch.float32)):
            count = int((~torch.isfinite(tensor)).sum())
            if count:
                raise ValueError(
                    f"{key} in {folder} holds values that are not finite, {count:,} of {tensor.numel():,}: the file is "
                    "damaged, or the policy had diverged when it was saved; start from another one"
                )


def _matching_weights(
    folder: Path, policy: PreTrainedPolicy, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return `read_weights` under the policy's keys, which it must have, with the policy's shapes."""
    stored = read_weights(folder) if tensors is None else dict(tensors)
    _explain_names(folder, list(stored))
    weights = family_of(policy.config).own_keys(policy, stored)
    _check_keys(folder, policy.config, weights, policy.state_dict(keep_vars=True))
    return weights


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a pretrained folder, memory-mapped."""
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
    """Refuse a safetensors file with an oversized header before it is parsed. A missing file passes."""
    if not path.exists():
        return
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        head = file.read(64)
        refuse_pointer(str(path), head)
        size = int.from_bytes(head[:8], "little") if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    if size is None:
        raise ValueError(f"{path} is not a regular file")
    if size > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path} claims a header of {size / 2**20:,.0f} MiB, more than the {MAX_HEADER_BYTES / 2**20:.0f} MiB that "
            "the names of a policy's tensors take: it is truncated or no safetensors file"
        )


def _check_keys(
    folder: Path, config: PreTrainedConfig, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    # A tensor with two names (tied weights) is saved under one of them; loading that one loads both.
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
            f"the weights in {folder} do not belong to its '{config.type}' policy: {'; '.join(problems)}. Nothing "
            "was loaded. Check that config.json and weights belong together, and to this version of LeRobot"
        )


def _explain_names(folder: Path, names: Sequence[str]) -> None:
    """Raise ValueError with LeRobot's migration command if the weights predate LeRobot's processors."""
    prefixes = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
    if old := [name for name in names if name.removeprefix("model.").startswith(prefixes)]:
        raise ValueError(
            f"the weights in {folder} have normalisation inside of the policy ({old[0]}), as LeRobot saved it before "
            f"processors: {MIGRATE} --pretrained-path {folder} --output-dir {folder.name}_migrated; give that folder"
        )
