"""Which parameters of a policy train, their dtypes, and which ones training does not need."""

import logging
from dataclasses import dataclass

import torch
from lerobot.policies.pi_gemma import PiGemmaRMSNorm
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainMode
from vla_finetuning.policies.family import UNUSED
from vla_finetuning.policies.lora import adapted_layers, add_adapters
from vla_finetuning.policies.registry import family_of, types_that

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainableReport:
    """Numbers of parameters (scalars, not tensors) after `choose_trainable`.

    Attributes:
        total, trainable: of the whole policy.
        frozen: those that do not train, by part of the policy.
        adapted: where adapters train, what each name that the user gave for them matched, as lines.
        parts: of the policy (`Family.parts`), of which something trains.
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

    `heads` trains the projections of actions and time, `expert` also the action expert, `full` everything.
    What the family says is never used in training is frozen in every mode, so that every trainable parameter gets a
    gradient in every step and DDP runs with `find_unused_parameters=False`.

    Args:
        policy: any for `full`; one whose family names no modes stays as its configuration made it.
        mode: what trains.
        adapters: where enabled, these are put into the policy and train, whatever the mode. seed: of their weights.
    Raises:
        ValueError: the mode is unknown, or none of the policy's family; adapters name a layer that there is not.
    """
    if mode not in ("heads", "expert", "full"):
        raise ValueError(f"train mode {mode!r} is unknown; choose 'heads', 'expert' or 'full'")
    family, other = family_of(policy.config), "frozen by the policy's configuration"
    adapted: tuple[str, ...] = ()
    if adapters is not None and adapters.enabled:
        add_adapters(policy, adapters, seed)
        parts, other = family.parts(policy), "the policy"
        for name, parameter in policy.named_parameters():
            if parts.get(name) == UNUSED:
                parameter.requires_grad_(False)
        adapted = adapted_layers(policy, adapters)
    elif family.modes:
        parts = family.parts(policy)
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(parts[name] in family.modes[mode])
    elif mode == "full":
        parts = {}
    else:
        raise ValueError(
            f"train mode {mode!r} names parts of {types_that(lambda family: family.modes)}, and this policy is of type "
            f"'{policy.config.type}'; use 'full', or what the policy's own configuration offers to freeze parts of it"
        )
    frozen: dict[str, int] = {}
    training = frozenset(parts[name] for name, p in policy.named_parameters() if p.requires_grad and name in parts)
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            part = parts.get(name, other)
            frozen[part] = frozen.get(part, 0) + parameter.numel()
    total = sum(parameter.numel() for parameter in policy.parameters())
    return TrainableReport(total, total - sum(frozen.values()), frozen, adapted, training)


_NORMS = (PiGemmaRMSNorm, LlamaRMSNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def with_float32_masters(policy: PreTrainedPolicy) -> PreTrainedPolicy:
    """A policy made float32, in place, if anything that its configuration lets train is in another precision.

    Some of LeRobot's policies take the precision of a backbone's configuration: SmolVLA's expert is bfloat16 where
    SmolVLM's text model says so (LeRobot 0.6.1), and steps of Adam are then mostly rounded away. Frozen weights become
    float32 too, as forwards do not expect two precisions where they had one; `cast_frozen` casts them for training.
    Where the policy's own option says the precision (`dtype`), the driver has looked at it, and it stays.
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


def leave_off_unused(policy: PreTrainedPolicy) -> list[str]:
    """Take away what a policy never uses in training and `choose_trainable` froze; return the names.

    The family's loss gives the same numbers without them; LeRobot's own `forward` does not run any more.
    """
    parts = family_of(policy.config).parts(policy)
    names = [n for n, p in policy.named_parameters() if not p.requires_grad and parts.get(n) == UNUSED]
    for name in names:
        module, _, attribute = name.rpartition(".")
        policy.get_submodule(module).register_parameter(attribute, None)
    return names


def cast_frozen(policy: PreTrainedPolicy, dtype: torch.dtype) -> None:
    """Cast the weights that do not train to `dtype`, in place; what trains keeps its precision.

    For bfloat16 on GPUs, under autocast, which would cast the float32 weights again in every step. What autocast
    computes in float32 keeps it: the norms, and what the vision tower starts from, patches and positions, which give
    the residual stream its precision. The heads keep it too: losses compute some of them without autocast.
    """
    heads = {name for name, part in family_of(policy.config).parts(policy).items() if part == "heads"}
    unchanged = {
        module
        for part in policy.modules()
        if isinstance(part, _NORMS) or (hasattr(part, "patch_embedding") and hasattr(part, "position_embedding"))
        for module in part.modules()
    }
    for place, module in policy.named_modules():
        for name, parameter in () if module in unchanged else module.named_parameters(recurse=False):
            if not parameter.requires_grad and parameter.is_floating_point() and f"{place}.{name}" not in heads:
                parameter.data = parameter.data.to(dtype)


def autocast_of(precision: str, device: torch.device) -> torch.dtype | None:
    """Return what a run of that `--train.precision` computes under on `device`; None: fp32 throughout."""
    # Before Ampere it is emulated, which is slower than fp32.
    auto = precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if precision == "bf16" or auto else None
