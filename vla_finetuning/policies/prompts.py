"""Shorten padded prompts to one of a few lengths that fits the longest prompt of a micro-batch.

Attention masks padded tokens, so loss and gradients are the same without them, up to rounding. Runs on the host in the
training worker, before batches are copied to the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS

# Lengths are multiples of STEP, or of a multiple of STEP that gives at most MAX_LENGTHS lengths: each is compiled, and
# its attention kernel checked.
STEP, MAX_LENGTHS = 32, 7
# Step by which lengths with known kernel faults grow; kernels align masks to it anyway.
ALIGNMENT = 8


def prompt_lengths(longest: int, images: int, steps: int) -> tuple[int, ...]:
    """Return the lengths that prompts are cut to, in ascending order.

    Args:
        longest: length that the tokenizer pads to.
        images, steps: numbers of positions before the prompt, and of those after it that attend to it.
    """
    step = STEP * -(-longest // (STEP * MAX_LENGTHS))
    lengths = (*range(step, longest, step), longest)
    return tuple(sorted({_next_safe_length(length, images, steps) for length in lengths}))


def _next_safe_length(length: int, images: int, steps: int) -> int:
    """Return the next length, from `length` on, without a known fault of a kernel."""
    # In torch 2.11 the memory-efficient kernel is wrong for keys % 32 == 1 (pytorch/pytorch#191937), and cuDNN's
    # backward gives NaN for keys % 128 == 64 (#196678). `attention.choose_kernel` detects other faults.
    while any(keys % 32 == 1 or keys % 128 == 64 for keys in (images + length, images + length + steps)):
        length += ALIGNMENT
    return length


def cut_prompts(columns: Mapping[str, np.ndarray], lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Cut prompts and masks of a micro-batch, (B, L), to the smallest of `lengths` that fits all; keep other columns.

    Padding on the left cannot be cut. Raises ValueError for a prompt that is longer than the last length.
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
