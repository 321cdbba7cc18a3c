"""Count the floating point operations of a policy's training step from its configuration."""

from collections.abc import Sequence

from lerobot.configs import PreTrainedConfig
from numpy.polynomial import Polynomial
from torch.utils.flop_counter import FlopCounterMode

from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainMode
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import choose_trainable


def flops_per_sample(
    config: PreTrainedConfig,
    cameras: int,
    mode: TrainMode,
    draws: int = 1,
    prompt: int | None = None,
    adapters: PeftOptions | None = None,
) -> int:
    """Count the floating point operations of one sample's forward and backward, for a family with `from_config`.

    Runs the step on meta tensors under torch's `FlopCounterMode`, which counts multiplications and additions of matrix
    products, convolutions and attention. Recomputation for gradient checkpointing is not counted.

    Args:
        prompt: language tokens, padding included; None: `tokenizer_max_length` of the configuration.
    Raises:
        ValueError: sizes in the configuration do not fit each other.
    """
    family = family_of(config)
    config = family.with_cameras(config, cameras, prompt)
    counted = meta_policy(config)
    choose_trainable(counted, mode, adapters)
    loss = family.make_loss(counted, images=DeviceHalf(None, config))
    batch, noise, time = family.empty_inputs(config, 1, draws, "meta")
    try:
        with FlopCounterMode(display=False) as counter:
            loss(batch, noise, time).backward()
    except RuntimeError as error:  # of sizes that do not divide, as images into a backbone's patches
        raise ValueError(f"a '{config.type}' cannot compute with these options, --policy.*: {error}") from error
    return counter.get_total_flops()


def flops_by_prompt(
    config: PreTrainedConfig,
    cameras: int,
    mode: TrainMode,
    draws: int,
    prompts: Sequence[int],
    adapters: PeftOptions | None = None,
) -> dict[int, int]:
    """Return `flops_per_sample` for several prompt lengths.

    Counts three lengths and interpolates the others. The count is a quadratic polynomial of the length: linear layers
    are proportional to the number of tokens, attention to a product of two numbers of tokens.
    """
    some = sorted({prompts[0], prompts[len(prompts) // 2], prompts[-1]})
    counted = {n: flops_per_sample(config, cameras, mode, draws, n, adapters) for n in some}
    polynomial = Polynomial.fit(list(counted), list(counted.values()), len(counted) - 1)
    return {prompt: round(float(polynomial(prompt))) for prompt in prompts}
