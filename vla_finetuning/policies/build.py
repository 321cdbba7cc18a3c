"""Turn a policy into the module that trains. Used by training workers and by the memory plan."""

from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainMode
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import cast_frozen, choose_trainable, leave_off_unused


def build_loss(
    policy: PreTrainedPolicy,
    mode: TrainMode,
    *,
    adapters: PeftOptions | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> PolicyLoss:
    """Choose a policy's trainable parameters, drop unused ones, cast frozen ones, and return the loss.

    Args:
        policy: policy on any device, meta included; changed in place.
        mode, adapters, seed: see `choose_trainable`.
        autocast: dtype of the step's autocast, to which frozen parameters are cast; None casts nothing.
        options: options of `Family.make_loss`.
    """
    choose_trainable(policy, mode, adapters, seed)
    leave_off_unused(policy)
    if autocast is not None:
        cast_frozen(policy, autocast)
    return family_of(policy.config).make_loss(policy, **options)
