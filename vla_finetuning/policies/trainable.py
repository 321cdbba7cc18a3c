"""What of a policy trains, what it is kept in, and what no training process need hold."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.pi_gemma import PiGemmaRMSNorm
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import nn
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings

from vla_finetuning.config import PeftOptions, TrainMode
from vla_finetuning.policies.lora import add_adapters

HEAD_MODULES = ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out")
UNUSED = "unused in training"


@dataclass(frozen=True)
class TrainableReport:
    """Numbers of parameters (scalars, not tensors) after `choose_trainable`.

    Attributes:
        total, trainable: of the whole policy.
        frozen: those that do not train, by part of the policy.
    """

    total: int
    trainable: int
    frozen: dict[str, int]


def choose_trainable(
    policy: PreTrainedPolicy, mode: TrainMode, adapters: PeftOptions | None = None, seed: int = 0
) -> TrainableReport:
    """Set `requires_grad` of every parameter according to the mode, and count.

    `heads` trains the projections of actions and time, `expert` also the action expert, `full` everything.
    What PI0.5 never uses in training is frozen in every mode, so that every trainable parameter gets a
    gradient in every step and DDP runs with `find_unused_parameters=False`: both language heads, the
    language model's final norm, and of its last layer all but what makes keys and values. (LeRobot's own
    step gives that layer's `q_proj` a gradient of zeros, so its AdamW only decays it; PI0.5's output does
    not depend on it.)

    Args:
        policy: PI0.5, or for `full` any policy; others than PI0.5 stay as their configuration made them.
        mode: what trains.
        adapters: where enabled, these are put into the policy and train, whatever the mode. seed: of their weights.
    Raises:
        ValueError: the mode is unknown, or is not `full` and the policy is not PI0.5.
    """
    if mode not in ("heads", "expert", "full"):
        raise ValueError(f"train mode {mode!r} is unknown; choose 'heads', 'expert' or 'full'")
    if adapters is not None and adapters.enabled:
        add_adapters(policy, adapters, seed)
        is_pi05 = isinstance(policy, PI05Policy)
        parts = dict(_pi05_parts(policy)) if is_pi05 else dict.fromkeys(dict(policy.named_parameters()), "the policy")
        for name, parameter in policy.named_parameters():
            if parts[name] == UNUSED:
                parameter.requires_grad_(False)
    elif isinstance(policy, PI05Policy):
        parts = dict(_pi05_parts(policy))
        trained = {
            "heads": {"heads"},
            "expert": {"heads", "action expert"},
            "full": {"heads", "action expert", "language model", "vision"},
        }[mode]
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(parts[name] in trained)
    elif mode == "full":
        parts = {name: "frozen by the policy's configuration" for name, _ in policy.named_parameters()}
    else:
        raise ValueError(
            f"train mode {mode!r} names parts of PI0.5, and this policy is of type '{policy.config.type}'; use "
            "'full', or what the policy's own configuration offers to freeze parts of it"
        )
    frozen: dict[str, int] = {}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            frozen[parts[name]] = frozen.get(parts[name], 0) + parameter.numel()
    total = sum(parameter.numel() for parameter in policy.parameters())
    return TrainableReport(total, total - sum(frozen.values()), frozen)


def _pi05_parts(policy: PI05Policy) -> Iterator[tuple[str, str]]:
    """The part of PI0.5 each parameter belongs to: (name, part)."""
    language = "model.paligemma_with_expert.paligemma.model.language_model."
    depth = len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers)
    last = f"{language}layers.{depth - 1}."
    unused = (
        "model.paligemma_with_expert.paligemma.lm_head.",
        "model.paligemma_with_expert.gemma_expert.lm_head.",
        f"{language}norm.",
        f"{last}self_attn.q_proj.",
        f"{last}self_attn.o_proj.",
        f"{last}post_attention_layernorm.",
        f"{last}mlp.",
    )
    # The first prefix that fits decides.
    parts = (
        *((prefix, UNUSED) for prefix in unused),
        *((f"model.{module}.", "heads") for module in HEAD_MODULES),
        ("model.paligemma_with_expert.gemma_expert.", "action expert"),
        (language, "language model"),
        ("model.paligemma_with_expert.paligemma.model.", "vision"),
    )
    for name, _ in policy.named_parameters():
        part = next((part for prefix, part in parts if name.startswith(prefix)), None)
        if part is None:
            raise ValueError(f"parameter {name!r} is in no known part of PI0.5; is this LeRobot 0.6.1?")
        yield name, part


def leave_off_unused(policy: PreTrainedPolicy) -> list[str]:
    """Take away what PI0.5 never uses in training and `choose_trainable` froze. Returns the names; others have none.

    0.9 B of 4.1 B parameters, 1.7 GiB in bfloat16, that no training process need hold. `PolicyLoss` gives the same
    numbers without them; LeRobot's own `forward` does not run any more.
    """
    if not isinstance(policy, PI05Policy):
        return []
    parts, frozen = dict(_pi05_parts(policy)), {n for n, p in policy.named_parameters() if not p.requires_grad}
    names = [name for name in frozen if parts[name] == UNUSED]
    for name in names:
        module, _, own = name.rpartition(".")
        policy.get_submodule(module).register_parameter(own, None)
    return names


def cast_frozen(policy: PreTrainedPolicy, dtype: torch.dtype) -> None:
    """Cast the weights that do not train to `dtype`, in place; what trains keeps its precision.

    For bfloat16 on GPUs, under autocast: without it, autocast would cast the float32 weights again in every
    step. What autocast computes in float32 keeps it, as in LeRobot's own bfloat16 policy: the norms, and what
    the vision tower starts from, patches and positions. From these the residual stream has its precision, so
    the features of images are to the bit those of float32 weights under autocast.
    """
    kept = {
        module
        for part in policy.modules()
        if isinstance(part, (PiGemmaRMSNorm, nn.LayerNorm, SiglipVisionEmbeddings))
        for module in part.modules()
    }
    for module in policy.modules():
        for parameter in () if module in kept else module.parameters(recurse=False):
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def autocast_of(precision: str, device: torch.device) -> torch.dtype | None:
    """What a run of that `--train.precision` computes under on `device`; None: fp32 throughout."""
    auto = precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if precision == "bf16" or auto else None
