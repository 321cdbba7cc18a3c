"""The tables of episodes and of texts that `metadata_v2` and `metadata_v3` read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_finetuning.data.limits import MAX_INSTRUCTION


@dataclass
class EpisodeTable:
    """The episodes in the order of the files.

    Attributes:
        columns: by name, arrays (E,): `episode_index` and `length` int64; `data/` and `videos/KEY/` `chunk_index` and
            `file_index` int32; `videos/KEY/from_timestamp` float64.
        tasks: texts of each episode; () if the files name none.
        broken: `{"data" | video key: {episode: reason}}` of unreadable episodes; their columns hold a neighbour's
            values.
    """

    columns: dict[str, np.ndarray]
    tasks: list[tuple[str, ...]]
    broken: dict[str, dict[int, str]] = field(default_factory=dict)


def task_texts(value: Any, same: dict[tuple[str, ...], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the texts of an episode's `tasks`: a list of texts, or one text; () for others. `same` has equal ones."""
    texts = tuple(text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str))
    return same.setdefault(texts, texts)


def texts_by_index(rows: Iterable[tuple[str, int, str]]) -> dict[int, str]:
    """Return the texts of a table by their index, from rows (label for errors, index, text).

    Raises ValueError for an index with two texts, and for a text that is too long or holds NUL: it is tokenised.
    """
    by_index: dict[int, str] = {}
    for label, index, text in rows:
        if "\0" in text:
            raise ValueError(f"{label} {index} holds a NUL character: {text!r:.100}")
        if len(text) > MAX_INSTRUCTION:
            raise ValueError(
                f"{label} {index} has {len(text):,} characters, more than the {MAX_INSTRUCTION:,} of an instruction: "
                f"{text!r:.100}"
            )
        if by_index.setdefault(index, text) != text:
            raise ValueError(f"{label} {index} is both {by_index[index]!r:.100} and {text!r:.100}")
    return by_index
