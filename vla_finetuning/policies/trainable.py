"""Turn a policy into the module that trains: trainable parameters, dtypes, adapters, loss.

`build_loss` does all of it, for training workers and for the memory plan.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from lerobot.policies.pi_gemma import PiGemmaRMSNorm
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainMode
from vla_finetuning.policies.family import UNUSED, PolicyLoss
from vla_finetuning.policies.lora import adapted_layers, add_adapters
from vla_finetuning.policies.registry import family_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainableReport:
    """Counts of parameters (scalars, not tensors) after `choose_trainable`.

    Attributes:
        frozen: number of frozen parameters by part of the policy.
        adapted: lines that say which layers each name in --peft.* matched; empty without adapters.
        parts: parts (`Family.parts`) with trainable parameters.
    """

    total: int
    trainable: int
    frozen: dict[str, int]
    adapted: tuple[str, ...] = ()
    parts: frozenset[str] = frozenset()


def choose_trainable(
    policy: PreTrainedPolicy, mode: TrainMode, adapters: PeftOptions | None = None, seed: int = 0
) -> TrainableReport:
    """Set `requires_grad` of every parameter according to the mode, and count.

    `heads` trains the projections of actions and time, `expert` also the action expert, `full` everything. Parameters
    in the part UNUSED are always frozen: every trainable parameter then gets a gradient in every step, and DDP runs
    with `find_unused_parameters=False`. A family without modes takes `full` only, and keeps its `requires_grad`.

    If enabled, `adapters` are added with random weights of `seed`, and train instead of the mode's parts. Raises
    ValueError if they name a missing layer.
    """
    family, default_part = family_of(policy.config), "frozen by the policy's configuration"
    adapted: tuple[str, ...] = ()
    if adapters is not None and adapters.enabled:
        add_adapters(policy, adapters, seed)
        parts, default_part = family.parts(policy), "the policy"
        for name, parameter in policy.named_parameters():
            if parts.get(name) == UNUSED:
                parameter.requires_grad_(False)
        adapted = adapted_layers(policy, adapters)
    elif family.modes:
        parts = family.parts(policy)
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(parts[name] in family.modes[mode])
    else:
        assert mode == "full"  # `base_policy.check_policy` refuses others
        parts = {}
    frozen: dict[str, int] = {}
    training = frozenset(parts[name] for name, p in policy.named_parameters() if p.requires_grad and name in parts)
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            part = parts.get(name, default_part)
            frozen[part] = frozen.get(part, 0) + parameter.numel()
    total = sum(parameter.numel() for parameter in policy.parameters())
    return TrainableReport(total, total - sum(frozen.values()), frozen, adapted, training)


_NORMS = (PiGemmaRMSNorm, LlamaRMSNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def with_float32_masters(policy: PreTrainedPolicy) -> PreTrainedPolicy:
    """Convert a policy to float32 in place if a trainable parameter has another precision; return the policy.

    Some policies of LeRobot take the precision from a backbone's configuration, e.g. SmolVLA's bfloat16 expert (LeRobot
    0.6.1). Adam's updates would then mostly be rounded away. Frozen weights become float32 too, because forwards expect
    one precision; `cast_frozen` casts them for training. Policies with an option `dtype`, which the driver checks, stay
    unchanged.
    """
    if family_of(policy.config).from_config and hasattr(policy.config, "dtype"):
        return policy
    low = [p for p in policy.parameters() if p.requires_grad and p.is_floating_point() and p.dtype != torch.float32]
    if not low:
        return policy
    logger.warning(
        "%d weights that train are %s by the configuration of a '%s': all are made float32, or updates would be lost",
        *(sum(p.numel() for p in low), str(low[0].dtype).removeprefix("torch."), policy.config.type),
    )
    return policy.float()


def remove_unused(policy: PreTrainedPolicy) -> list[str]:
    """Remove frozen parameters in the part UNUSED; return their names.

    The family's loss gives the same numbers without them. LeRobot's own `forward` no longer runs.
    """
    parts = family_of(policy.config).parts(policy)
    names = [n for n, p in policy.named_parameters() if not p.requires_grad and parts.get(n) == UNUSED]
    for name in names:
        module, _, attribute = name.rpartition(".")
        policy.get_submodule(module).register_parameter(attribute, None)
    return names


def cast_frozen(policy: PreTrainedPolicy, dtype: torch.dtype) -> None:
    """Cast frozen weights to `dtype` in place.

    Under bfloat16 autocast this saves the cast of float32 weights in every step. Norms stay float32, as under autocast.
    The vision tower's patch and position embeddings stay too, because they set the residual stream's precision, and
    heads, because losses compute some heads without autocast.
    """
    heads = {name for name, part in family_of(policy.config).parts(policy).items() if part == "heads"}
    float32_modules = {
        module
        for layer in policy.modules()
        if isinstance(layer, _NORMS) or (hasattr(layer, "patch_embedding") and hasattr(layer, "position_embedding"))
        for module in layer.modules()
    }
    for module_name, module in policy.named_modules():
        for name, parameter in () if module in float32_modules else module.named_parameters(recurse=False):
            if not parameter.requires_grad and parameter.is_floating_point() and f"{module_name}.{name}" not in heads:
                parameter.data = parameter.data.to(dtype)


def build_loss(
    policy: PreTrainedPolicy,
    mode: TrainMode,
    *,
    adapters: PeftOptions | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> PolicyLoss:
    """Choose a policy's trainable parameters, drop unused ones, cast frozen ones to `autocast`, and return the loss.

    The policy may be on any device, meta included, and is changed in place. `options` are those of `Family.make_loss`.
    """
    choose_trainable(policy, mode, adapters, seed)
    remove_unused(policy)
    if autocast is not None:
        cast_frozen(policy, autocast)
    return family_of(policy.config).make_loss(policy, **options)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype for a value of `--train.precision` on `device`; None for fp32."""
    # GPUs before Ampere emulate bf16, which is slower than fp32.
    auto = precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or auto else None
