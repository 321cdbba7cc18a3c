"""Look up a value per frame for the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class PerFrame:
    """Values of all frames, found by a batch's `dataset_index` and `index`.

    Args:
        by_dataset: for each dataset, an array whose first dimension is its frames.
    """

    def __init__(self, by_dataset: Sequence[np.ndarray]):
        self._values = np.concatenate(by_dataset)
        self._first = np.cumsum([0, *map(len, by_dataset)])

    def __call__(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        return self._values[self._first[batch["dataset_index"]] + batch["index"]]
