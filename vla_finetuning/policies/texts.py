"""Encode instructions for policies whose forward takes strings.

Columns of a block are numbers of a fixed shape, so a text travels as zero-padded UTF-8 (`as_bytes`). The training
worker decodes it on the host (`with_texts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_finetuning.columns import TASK_BYTES

# Width of the column: three times the longest instruction of common datasets.
LONGEST_BYTES = 1024
TASK = "task"


def encode(text: str) -> bytes:
    """Encode an instruction without padding. Raises ValueError for more than LONGEST_BYTES bytes, or a zero."""
    encoded = text.encode()
    if len(encoded) > LONGEST_BYTES or b"\0" in encoded:
        raise ValueError(
            f"the instruction {text!r:.100} has {len(encoded):,} bytes: at most {LONGEST_BYTES:,}, none of them zero, "
            "reach a policy that reads it as text; shorten it in the dataset"
        )
    return encoded


def as_bytes(texts: Sequence[str]) -> np.ndarray:
    """Encode texts as uint8 (N, LONGEST_BYTES). Raises ValueError as `encode`."""
    column = np.zeros((len(texts), LONGEST_BYTES), np.uint8)
    for row, text in zip(column, texts, strict=True):
        encoded = encode(text)
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return column


def with_texts(batch: dict[str, Any]) -> dict[str, Any]:
    """Replace the column of encoded texts by `task`, a list of strings; return a batch without it unchanged."""
    if TASK_BYTES not in batch:
        return batch
    texts = [bytes(row).rstrip(b"\0").decode() for row in np.asarray(batch[TASK_BYTES])]
    return {key: value for key, value in batch.items() if key != TASK_BYTES} | {TASK: texts}
