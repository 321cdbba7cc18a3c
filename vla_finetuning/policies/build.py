"""The module that trains, made of a policy: the same in the training worker and where its memory is planned."""

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
    """Choose what of a policy trains, leave off what training never uses, cast what is frozen; return its loss.

    Args:
        policy: changed in place, on any device; the meta device will do.
        mode, adapters, seed: as for `choose_trainable`.
        autocast: what the step runs under, and what does not train is cast to; None: everything stays as it is.
        options: of the loss, as for `Family.make_loss`.
    """
    choose_trainable(policy, mode, adapters, seed)
    leave_off_unused(policy)
    if autocast is not None:
        cast_frozen(policy, autocast)
    return family_of(policy.config).make_loss(policy, **options)
