"""The table of episodes that `metadata_v2` and `metadata_v3` read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

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

    def known_tasks(self, listed: Collection[str], path: str, not_read: list[str]) -> list[tuple[str, ...]]:
        """Return the tasks of each episode without texts outside `listed`, which no row can refer to.

        Append lines on these texts, and on episodes without tasks, to `not_read`.
        """
        replaced = {texts: tuple(text for text in texts if text in listed) for texts in set(self.tasks)}
        unknown = sorted({text for texts in replaced for text in texts if text not in listed})
        if unknown:
            not_read.append(f"{path}: {len(unknown)} texts that are no task of the dataset, e.g. {unknown[0]!r:.100}")
        tasks = [replaced[texts] for texts in self.tasks]
        if without := sum(not texts for texts in tasks):
            not_read.append(f"{path}: the tasks of {without} of {len(tasks)} episodes, which it does not list")
        return tasks


def check_instruction(label: str, text: str) -> None:
    """Raise ValueError for a text that is too long or holds NUL: every row of it is tokenised."""
    if "\0" in text:
        raise ValueError(f"{label} holds a NUL character: {text!r:.100}")
    if len(text) > MAX_INSTRUCTION:
        raise ValueError(
            f"{label} has {len(text):,} characters, more than the {MAX_INSTRUCTION:,} of an instruction: {text!r:.100}"
        )
