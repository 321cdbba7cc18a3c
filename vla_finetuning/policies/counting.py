"""Sizes of PI0.5 that follow from its configuration: positions, floating point operations, empty inputs."""

import copy
import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import (
    ACTION,
    OBS_IMAGES,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vla_finetuning.config import PeftOptions, TrainMode
from vla_finetuning.policies.pi05 import PolicyLoss, image_tokens
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.trainable import choose_trainable


def meta_policy(config: PI05Config) -> PI05Policy:
    """PI0.5 as LeRobot builds it for a configuration, without storage: to count, and to compare names and shapes."""
    config = copy.deepcopy(config)
    config.device = "meta"
    with torch.device("meta"):
        return get_policy_class(config.type)(config)


def flops_per_sample(
    policy: PreTrainedPolicy | PreTrainedConfig,
    cameras: int,
    mode: TrainMode,
    draws: int = 1,
    prompt: int | None = None,
    adapters: PeftOptions | None = None,
) -> int | None:
    """Count the floating point operations of one sample's forward and backward through `PolicyLoss`.

    Multiplications and additions of matrix products, convolutions and attention, as torch's
    `FlopCounterMode` counts them, run on tensors without storage. Recomputation for gradient checkpointing
    is not work and not counted.

    Args:
        policy: any policy, or its configuration.
        cameras: cameras in a batch, at least 1.
        mode, adapters: as for `choose_trainable`.
        draws: of noise and time per row.
        prompt: language tokens, padding included; as many as the tokenizer gives when absent.
    Returns:
        The count, or None for policies other than PI0.5.
    """
    config = policy if isinstance(policy, PreTrainedConfig) else policy.config
    if not isinstance(config, PI05Config):
        return None
    config = with_cameras(config, cameras, prompt)
    counted = meta_policy(config)
    choose_trainable(counted, mode, adapters)
    inputs = empty_inputs(config, 1, draws, "meta")
    with FlopCounterMode(display=False) as counter:
        PolicyLoss(counted, images=DeviceHalf(None, config))(*inputs).backward()
    return counter.get_total_flops()


def flops_by_prompt(
    config: PI05Config,
    cameras: int,
    mode: TrainMode,
    draws: int,
    prompts: Sequence[int],
    adapters: PeftOptions | None = None,
) -> dict[int, int]:
    """`flops_per_sample` for prompts of several lengths.

    Counted for three of them. The others follow: all that a step computes is proportional to how many tokens there are,
    or in attention to the product of two such numbers, so that the count is a polynomial of the second degree.
    """

    def count(prompt: int) -> int:
        flops = flops_per_sample(config, cameras, mode, draws, prompt, adapters)
        assert flops is not None
        return flops

    counted = {prompt: count(prompt) for prompt in sorted({prompts[0], prompts[len(prompts) // 2], prompts[-1]})}

    def interpolated(prompt: int) -> int:
        total = Fraction(0)
        for at, flops in counted.items():
            others = [other for other in counted if other != at]
            total += flops * math.prod(Fraction(prompt - other, at - other) for other in others)
        return int(total)

    return {prompt: counted.get(prompt) or interpolated(prompt) for prompt in prompts}


def tokens_per_sample(config: PreTrainedConfig, cameras: int, draws: int = 1, prompt: int | None = None) -> int | None:
    """Positions that PI0.5 computes for a row: image patches, language with its padding, action steps of each draw.

    None for other policies. `prompt`: language tokens, padding included; as many as the tokenizer gives when absent.
    """
    if not isinstance(config, PI05Config):
        return None
    language = config.tokenizer_max_length if prompt is None else prompt
    return cameras * image_tokens(config) + language + draws * config.chunk_size


def with_cameras(config: PI05Config, cameras: int, prompt: int | None = None) -> PI05Config:
    """A copy of a PI0.5's configuration for so many cameras, with no options that recompute or compile.

    `prompt`: and for so many language tokens; as many as before when absent.
    """
    config = copy.deepcopy(config)
    config.tokenizer_max_length = config.tokenizer_max_length if prompt is None else prompt
    image = PolicyFeature(FeatureType.VISUAL, (3, *config.image_resolution))
    config.input_features = {f"{OBS_IMAGES}.{i}": image for i in range(cameras)}
    config.empty_cameras = 0
    config.gradient_checkpointing = config.compile_model = False
    return config


def empty_inputs(
    config: PI05Config, rows: int, draws: int, device: torch.device | str
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What PI0.5's loss takes, uninitialised: a batch of B rows, noise (B*K, T, max_action_dim) and time (B*K,)."""
    with torch.device(device):
        tokens = (rows, config.tokenizer_max_length)
        batch = {key: torch.empty(rows, *image.shape) for key, image in config.image_features.items()}
        batch[OBS_LANGUAGE_TOKENS] = torch.empty(tokens, dtype=torch.int64)
        batch[OBS_LANGUAGE_ATTENTION_MASK] = torch.empty(tokens, dtype=torch.bool)
        batch[ACTION] = torch.empty(rows, config.chunk_size, config.output_features[ACTION].shape[0])
        return (
            batch,
            torch.empty(rows * draws, config.chunk_size, config.max_action_dim),
            torch.empty(rows * draws),
        )
