"""Resolve the policy that a run starts from, apply the user's options, and check that it can be trained.

A resumed run is refused if its policy is not the one that it was started from. Runs on the driver; loads no weights.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_finetuning.files import read_foreign_json
from vla_finetuning.options.fields import decided
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.policy import PolicyOptions, RunPolicyOptions
from vla_finetuning.options.programs import Config
from vla_finetuning.options.train import LOSS_OPTIONS, TrainOptions
from vla_finetuning.policies.loading import check_weights, fetch_pretrained, load_policy_config, make_policy_config
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.registry import (
    family_of,
    refuse_update,
    require_trained,
    supports,
    train_by_options,
    types_that,
)
from vla_finetuning.policies.remote_code import HOW_TO_TRUST, RemoteCodeError, code_source, remote_code
from vla_finetuning.policies.spec import pretrained_digests, weights_file
from vla_finetuning.policies.trainable import TrainableReport, choose_trainable, with_float32_masters
from vla_finetuning.run.checkpoint import check_base, latest_checkpoint, load_progress
from vla_finetuning.run.folder import CHECKPOINTS_NAME

Decision = tuple[str, Any, str]
# Options that --warmup_frac and --final_lr_frac replace.
SCHEDULER_OPTIONS = ("scheduler_warmup_steps", "scheduler_decay_steps", "scheduler_decay_lr")


@dataclass(frozen=True)
class Base:
    """The policy that a run starts from: configuration with the user's options, and the folder of its weights if any.

    `identity` is `{"path", "revision", "digest", "files"}`, equal for equal policies.
    """

    config: PreTrainedConfig
    folder: Path | None
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        return f"policy {self.identity['path']}"


def find_base(config: Config, path: str | None) -> tuple[Config, Base]:
    """Find the policy that a run starts from, and check the options that depend on its type.

    Returns:
        The options with the policy's revision and training precision; the policy.
    Raises:
        ValueError, OSError: as `resolve_policy`; the policy brings code that is not trusted, or cannot be trained with
            an option.
    """
    base = Base(*resolve_policy(config, path))
    policy_type, family = base.config.type, family_of(base.config)
    if (source := code_source(base.config)) and not config.policy_trust_remote_code:
        raise RemoteCodeError(f"{base.name}: a '{policy_type}' runs code that comes with {source}: {HOW_TO_TRUST}")
    if config.dataset.on_error == "skip" and not family.row_losses:
        raise ValueError(
            f"{base.name}: --dataset.on_error=skip needs a loss that can leave rows out, as that of "
            f"{types_that(lambda family: family.row_losses)}; this is a '{policy_type}': use --dataset.on_error=stop"
        )
    family.check_run(config)
    refuse_update(base.config)
    config = decided(config, {"policy_revision": base.identity["revision"]})
    train_by_options(base.config, config.train, base.folder)
    # As LeRobot trains it on GPUs, too.
    in_float32 = family.in_float32 or "use_amp" in config.policy_option_names
    if config.train.precision == "auto" and in_float32 and not base.config.use_amp:
        config = decided(config, {"train.precision": "fp32"})
    return config, base


def check_policy(
    policy_config: PreTrainedConfig, folder: Path | None, train: TrainOptions, adapters: PeftOptions | None = None
) -> TrainableReport | None:
    """Refuse weights that do not load, and count parameters on the meta device.

    The count is None for a policy that cannot be built from its configuration alone.
    """
    family = family_of(policy_config)
    if train.mode != "full" and not family.modes:
        raise ValueError(
            f"--train.mode={train.mode} names parts of {types_that(lambda other: other.modes)}, and the policy is of "
            f"type {policy_config.type}; use --train.mode=full, or what the policy's own options (--policy.*) offer to "
            "freeze parts of it"
        )
    for name in LOSS_OPTIONS:
        value, default = getattr(train, name), getattr(TrainOptions(), name)
        if value != default and not supports(family, name):
            types_with_option = types_that(lambda other: supports(other, name))  # noqa: B023  (called at once)
            raise ValueError(
                f"--train.{name}={value} is for {types_with_option}, and the policy is of type {policy_config.type}: "
                f"leave it out, or give {str(default).lower()}, the default; the policy's own options (--policy.*) may "
                "have an equivalent"
            )
    policy_class: Any = get_policy_class(policy_config.type)
    has_targets = policy_class._get_default_peft_targets is not PreTrainedPolicy._get_default_peft_targets
    if adapters is not None and adapters.enabled and adapters.target_modules is None and not has_targets:
        raise ValueError(
            f"--peft.method_type={adapters.method_type}: LeRobot chooses no layers of a '{policy_config.type}' for "
            "adapters; give --peft.target_modules"
        )
    if not (family.from_config or family.offline):
        _require_float32(str(getattr(policy_config, "dtype", "float32")))
        return None  # building such a policy may download its backbone
    policy = with_float32_masters(meta_policy(policy_config))
    if folder is not None:
        check_weights(folder, policy)
    report = choose_trainable(policy, train.mode, adapters)
    for dtype in {parameter.dtype for parameter in policy.parameters() if parameter.requires_grad}:
        _require_float32(str(dtype).removeprefix("torch."))
    return report


def _require_float32(dtype: str) -> None:
    if dtype != "float32":
        raise ValueError(
            f"--policy.dtype={dtype}, the user's or the pretrained policy's own: weights that train must "
            "be float32, or small updates are lost; give --policy.dtype=float32 (--train.precision says what the step "
            "computes in, and keeps what is frozen in bf16)"
        )


def resolve_policy(config: PolicyOptions, path: str | None) -> tuple[PreTrainedConfig, Path | None, dict[str, Any]]:
    """Find the policy of a folder or Hub id, or a new one for `path` None, and read its configuration.

    Returns:
        The configuration; the folder of the weights, None for random ones; the identity as in `Base`.
    Raises:
        ValueError, OSError: no policy at `path`, it cannot be read, its type cannot be trained, a resumed run was
            started from another policy, or an option has no effect on it.
    """
    if path is None:
        assert isinstance(config, RunPolicyOptions)
        policy_type = config.policy_type or ""
        nothing = {"path": f"{policy_type} from random weights", "revision": None, "digest": None}
        require_trained(policy_type, f"--policy.type={policy_type}")
        policy_config = policy_config_of(f"--policy.type={policy_type}", policy_type, None, config.policy_options)
        if policy_config.pretrained_path is not None:
            raise ValueError(
                f"--policy.type={policy_type}: lerobot-train starts such a policy from the weights of "
                f"{policy_config.pretrained_path}: give them with --policy.path, or null for the option that names them"
            )
        check_policy_options(config, policy_config)
        return policy_config, None, nothing
    folder, revision = fetch_pretrained(path, config.policy_revision, partial(_trained_type, path))
    folder = folder.absolute()
    if not weights_file(folder).is_file():
        files = sorted(entry.name for entry in folder.iterdir())
        if "adapter_config.json" in files:
            raise FileNotFoundError(
                f"policy {path} is adapters without the policy that they belong to; merge them, and give what is "
                f"written: python -m diagnostics.merge_adapter {path} {folder.name}_merged (of a run of vla.py, its "
                "pretrained_model is the same policy, merged)"
            )
        raise FileNotFoundError(
            f"policy {path}: no model.safetensors, found {files}: there are no weights to start from; copy it again, "
            "or use --policy.type if random ones are meant"
        )
    base = {"path": path, "revision": revision, **pretrained_digests(folder)}
    newest = None
    if isinstance(config, Config) and config.resume:
        newest = latest_checkpoint(config.folder / CHECKPOINTS_NAME)
    if newest is not None:
        # The path may come from the run's own config.json, which others may have edited: compare digests before any
        # file of the policy is parsed.
        check_base(load_progress(newest), base)
    policy_type = _trained_type(path, folder)
    policy_config = policy_config_of(f"policy {path}", policy_type, folder, config.policy_options)
    check_policy_options(config, policy_config)
    policy_config.pretrained_path = folder
    return policy_config, folder, base


def _trained_type(path: str, folder: Path) -> str:
    try:
        saved = read_foreign_json(folder / "config.json")
    except ValueError as error:
        raise ValueError(f"policy {path}: config.json is damaged ({error}); copy it again") from error
    if not isinstance(saved, dict) or "type" not in saved:
        keys = ", ".join(sorted(saved)[:8]) if isinstance(saved, dict) else ""
        raise ValueError(
            f"policy {path}: config.json is of no LeRobot policy: it has no `type`, but {keys or 'nothing'}: give the "
            "pretrained_model of a run or a Hub id, as lerobot/pi05_base; weights of openpi have to be converted"
        )
    policy_type = saved["type"]
    require_trained(policy_type, f"policy {path}")
    return policy_type


def policy_config_of(label: str, policy_type: str, folder: Path | None, options: list[str]) -> PreTrainedConfig:
    """Return the configuration saved in `folder`, or the defaults, with the user's `options`; errors name `label`."""
    try:
        with warnings.catch_warnings(), remote_code(trusted=False):
            warnings.simplefilter("ignore")
            return load_policy_config(folder, options) if folder else make_policy_config(policy_type, options)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error


def check_policy_options(config: PolicyOptions, policy_config: PreTrainedConfig) -> None:
    """Refuse options of the policy that would be ignored, and name the flag that has their effect."""
    trains = isinstance(config, Config)
    remedies = {
        "device": "use --scaling.use_gpu" if trains else "use --use_gpu",
        "pretrained_path": "use --policy.path",
        # Where pushing is a flag, these never are options of the policy.
        **dict.fromkeys(
            ("repo_id", "push_to_hub", "private"), "python -m vla_finetuning.run.push pushes the policy of a run"
        ),
        **({name: f"use {flag}" for name, flag in family_of(policy_config).ignored_options.items()} if trains else {}),
    }
    for name in sorted(remedies.keys() & config.policy_option_names):
        raise ValueError(f"--policy.{name} has no effect on a '{policy_config.type}' here; {remedies[name]}")


# ---- options of the policy that options of the run decide -----------------------------------------------------------
# LeRobot's config.json has a policy's architecture and also how it was trained: frozen parts, precision, device,
# learning rate, repository. The run's options decide the latter.


def check_decided_options(config: Config, policy_config: PreTrainedConfig, report: TrainableReport | None) -> None:
    """Refuse an option of the policy on the command line that contradicts another option of the run."""
    explicit = config.policy_option_names
    for name, value, by in _decisions(config, policy_config, report):
        if name in explicit and _comparable(requested := getattr(policy_config, name)) != _comparable(value):
            raise ValueError(f"--policy.{name}={_format(requested)} has no effect with {by}: give one of them")


def _decisions(config: Config, policy: PreTrainedConfig, report: TrainableReport | None) -> Iterator[Decision]:
    """Yield (name, value, flag): options of policies that the run decides, its value, and the deciding flag."""
    train, family = config.train, family_of(policy)
    what_trains = (
        f"--peft.method_type={config.peft.method_type}" if config.peft.enabled else f"--train.mode={train.mode}"
    )
    for name, value in family.freezes(policy, report.parts).items() if report is not None else ():
        yield name, value, what_trains
    if train.precision != "auto":  # "auto" depends on the GPU, or on use_amp
        yield "use_amp", config.planned_in_bf16, f"--train.precision={train.precision}"
    yield "use_peft", config.peft.enabled, "--peft.method_type" + ("" if config.peft.enabled else ", which is absent")
    if not config.use_policy_training_preset:
        for name in vars(policy):
            if name.startswith(("optimizer_", "scheduler_")):
                yield name, None, "--use_policy_training_preset=false"
        return
    if config.lr is not None:
        yield "optimizer_lr", config.lr, f"--lr={config.lr:g}"
    if config.warmup_frac is not None or config.final_lr_frac is not None:
        by = "--warmup_frac" if config.warmup_frac is not None else "--final_lr_frac"
        for name in SCHEDULER_OPTIONS:
            yield name, None, by
    for group, options in (("optimizer", config.optimizer_options), ("scheduler", config.scheduler_options)):
        for name, _, text in (option.removeprefix("--").partition("=") for option in options):
            if name != "type":
                requested: Any = text
                with suppress(ValueError):
                    requested = json.loads(text)
                yield f"{group}_{name.removeprefix('num_')}", requested, f"--{group}.{name}={text}"


def _comparable(value: Any) -> Any:
    """Return a value as in JSON, for comparisons."""
    return json.loads(json.dumps(value, default=lambda item: getattr(item, "value", None) or vars(item)))


def _format(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_comparable(value))
