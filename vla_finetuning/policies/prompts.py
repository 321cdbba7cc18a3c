"""Cut prompts, which a tokenizer pads to one length, to one of a few lengths that holds a micro-batch's longest.

A padded token is masked out of every attention, so loss and gradients are the same without it, up to rounding. Runs on
the host in the training worker, before the copy to the device, which is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS

# Lengths are multiples of this, or of so many times this that there are few: each is compiled, and compared, by itself.
STEP, MAX_LENGTHS = 32, 7
# A length at which a kernel is known to be wrong is left in steps of this, to which kernels align masks anyway.
ALIGNMENT = 8


def prompt_lengths(longest: int, images: int, steps: int) -> tuple[int, ...]:
    """The lengths that prompts may have, the shortest first.

    Args:
        longest: what the tokenizer pads to.
        images, steps: positions before a prompt and after it that attend to it.
    """
    step = STEP * -(-longest // (STEP * MAX_LENGTHS))
    return tuple(sorted({_sound(length, images, steps) for length in (*range(step, longest, step), longest)}))


def _sound(length: int, images: int, steps: int) -> int:
    """Return this length, or the next one at which no kernel is known to be wrong."""
    # Where 32 divides the keys but for one, the memory-efficient kernel is wrong (pytorch/pytorch#191937); where 128
    # does but for 64, cuDNN's backward has a NaN (#196678). torch 2.11; `attention.choose_kernel` sees others.
    while any(keys % 32 == 1 or keys % 128 == 64 for keys in (images + length, images + length + steps)):
        length += ALIGNMENT
    return length


def cut_prompts(columns: Mapping[str, np.ndarray], lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A micro-batch with prompts of the smallest of the lengths that holds them all; other columns as they are.

    Args:
        columns: among others tokens int (B, L) and their mask bool (B, L), of a tokenizer that pads on whichever side;
            what is padded on the left cannot be cut.
        lengths: `prompt_lengths`; the last one holds every prompt.
    Raises:
        ValueError: a prompt is longer than all of them.
    """
    counts = np.flatnonzero(columns[OBS_LANGUAGE_ATTENTION_MASK].any(axis=0))
    longest = int(counts[-1]) + 1 if len(counts) else 0
    length = next((length for length in lengths if length >= longest), None)
    if length is None:
        raise ValueError(
            f"a prompt has {longest} tokens, and the policy takes {lengths[-1]} (its tokenizer_max_length); train with "
            "--policy.tokenizer_max_length as its tokenizer pads"
        )
    fitted = {}
    for key in (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK):
        values = columns[key][:, :length]
        fitted[key] = np.pad(values, ((0, 0), (0, length - values.shape[1])))
    return {**columns, **fitted}
