"""Instructions for policies whose forward reads them as text: bytes on the way, strings where they are read.

Columns of a block are numbers of a fixed shape. So is this one, UTF-8 with zeros after it, which a training process
makes strings of without asking its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_finetuning.columns import TASK_BYTES

# Three times the longest instruction of common datasets; the column's width.
LONGEST_BYTES = 1024
TASK = "task"


def encode(text: str) -> bytes:
    """An instruction as it is in the column, without what fills it up.

    Raises:
        ValueError: it is longer than the column is wide, or has a zero.
    """
    encoded = text.encode()
    if len(encoded) > LONGEST_BYTES or b"\0" in encoded:
        raise ValueError(
            f"the instruction {text!r:.100} has {len(encoded):,} bytes: at most {LONGEST_BYTES:,}, none of them zero, "
            "reach a policy that reads it as text; shorten it in the dataset"
        )
    return encoded


def as_bytes(texts: Sequence[str]) -> np.ndarray:
    """Texts as uint8 (N, LONGEST_BYTES). Raises ValueError as `encode`."""
    column = np.zeros((len(texts), LONGEST_BYTES), np.uint8)
    for row, text in zip(column, texts, strict=True):
        encoded = encode(text)
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return column


def as_texts(column: Any) -> list[str]:
    """The texts of `as_bytes`, an array or a tensor on the CPU."""
    return [bytes(row).rstrip(b"\0").decode() for row in np.asarray(column)]


def with_texts(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with its texts as LeRobot's forwards take them: `task`, a list of strings. Without any, as it is."""
    if TASK_BYTES not in batch:
        return batch
    return {key: value for key, value in batch.items() if key != TASK_BYTES} | {TASK: as_texts(batch[TASK_BYTES])}
