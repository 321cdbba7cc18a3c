"""Count the floating point operations of a policy's step from its configuration alone."""

from collections.abc import Sequence

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from numpy.polynomial import Polynomial
from torch.utils.flop_counter import FlopCounterMode

from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainMode
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable


def flops_per_sample(
    policy: PreTrainedPolicy | PreTrainedConfig,
    cameras: int,
    mode: TrainMode,
    draws: int = 1,
    prompt: int | None = None,
    adapters: PeftOptions | None = None,
    features: bool = False,
) -> int | None:
    """Count the floating point operations of one sample's forward and backward through its loss.

    Multiplications and additions of matrix products, convolutions and attention, as torch's
    `FlopCounterMode` counts them, run on tensors without storage. Recomputation for gradient checkpointing
    is not work and not counted.

    Args:
        policy: any policy, or its configuration.
        cameras: cameras in a batch, at least 1.
        mode, adapters: as for `choose_trainable`.
        draws: of noise and time per row.
        prompt: language tokens, padding included; as many as the tokenizer gives when absent.
        features: of a row whose cameras' features are there: without the vision tower.
    Returns:
        The count, or None for a policy that is not built from its configuration alone.
    """
    config = policy if isinstance(policy, PreTrainedConfig) else policy.config
    family = family_of(config)
    if not family.from_config:
        return None
    config = family.with_cameras(config, cameras, prompt)
    counted = meta_policy(config)
    choose_trainable(counted, mode, adapters)
    loss = family.make_loss(counted, images=DeviceHalf(None, config))
    batch, noise, time = family.empty_inputs(config, 1, draws, "meta")
    if features:
        batch |= {key: torch.empty(1, *shape, device="meta") for key, shape in family.feature_shapes(config).items()}
    with FlopCounterMode(display=False) as counter:
        loss(batch, noise, time).backward()
    return counter.get_total_flops()


def flops_by_prompt(
    config: PreTrainedConfig,
    cameras: int,
    mode: TrainMode,
    draws: int,
    prompts: Sequence[int],
    adapters: PeftOptions | None = None,
    features: bool = False,
) -> dict[int, int]:
    """`flops_per_sample` for prompts of several lengths.

    Counted for three of them. The others follow: all that a step computes is proportional to how many tokens there are,
    or in attention to the product of two such numbers, so that the count is a polynomial of the second degree.
    """

    def count(prompt: int) -> int:
        flops = flops_per_sample(config, cameras, mode, draws, prompt, adapters, features)
        assert flops is not None
        return flops

    counted = {prompt: count(prompt) for prompt in sorted({prompts[0], prompts[len(prompts) // 2], prompts[-1]})}
    polynomial = Polynomial.fit(list(counted), list(counted.values()), len(counted) - 1)
    return {prompt: round(float(polynomial(prompt))) for prompt in prompts}
