"""What a dataset's metadata says of its episodes, in either format."""

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
        tasks: texts of each episode; none where the files name none.
        broken: episodes that cannot be read, by "data" or the video key: what is wrong with each, by its number. Their
            columns hold a neighbour's values.
    """

    columns: dict[str, np.ndarray]
    tasks: list[tuple[str, ...]]
    broken: dict[str, dict[int, str]] = field(default_factory=dict)

    def known_tasks(self, listed: Collection[str], path: str, not_read: list[str]) -> list[tuple[str, ...]]:
        """Return the tasks without texts that the dataset's list of tasks lacks: rows name theirs by number.

        Lines on those, and on episodes without any, go to `not_read`.
        """
        replaced = {texts: tuple(text for text in texts if text in listed) for texts in set(self.tasks)}
        unknown = sorted({text for texts in replaced for text in texts if text not in listed})
        if unknown:
            not_read.append(f"{path}: {len(unknown)} texts that are no task of the dataset, e.g. {unknown[0]!r:.100}")
        tasks = [replaced[texts] for texts in self.tasks]
        if without := sum(not texts for texts in tasks):
            not_read.append(f"{path}: tasks of {without} of {len(tasks)} episodes, which it does not name")
        return tasks


def check_instruction(label: str, text: str) -> None:
    """Raise ValueError for a text that no one would tell a robot: every row of it is tokenised."""
    if "\0" in text:
        raise ValueError(f"{label} holds a NUL character: {text!r:.100}")
    if len(text) > MAX_INSTRUCTION:
        raise ValueError(
            f"{label} has {len(text):,} characters, more than the {MAX_INSTRUCTION:,} of an instruction: {text!r:.100}"
        )
