"""Read which episodes of a run's datasets succeeded, and which frames a person corrected (`--outcome.*`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.data.episode_weights import episode_values
from vla_finetuning.data.metadata import NUMERIC_DTYPES, DatasetMetadata
from vla_finetuning.data.statistics import episode_arrays, in_threads
from vla_finetuning.options.fields import did_you_mean
from vla_finetuning.options.recap import OutcomeOptions

FLAG = "--outcome.success"
# LeRobot's column names for corrections: of lerobot-rollout's DAgger, and of `TeleopEvents`.
INTERVENTIONS = ("intervention", "is_intervention")


def episode_success(
    options: OutcomeOptions,
    metas: Sequence[DatasetMetadata],
    episodes: Sequence[np.ndarray],
    roots: Sequence[str],
    named: Callable[[str], str] = str,
) -> tuple[np.ndarray, ...]:
    """Return whether each episode succeeded, by dataset: bool (E,), False for episodes that are not chosen.

    Others than the chosen `episodes` are not read. `roots` and `named` are as for `episode_weights`. Raises ValueError
    if there is no such column, or the file lacks a chosen episode.
    """
    outcomes = [np.zeros(meta.num_episodes, bool) for meta in metas]
    if not options.success.startswith("@"):
        for success, meta, chosen in zip(outcomes, metas, episodes, strict=True):
            values = np.split(_frame_values(meta, chosen, options.success, FLAG), np.cumsum(meta.episode_length)[:-1])
            success[chosen] = [values[episode].max() >= options.threshold for episode in chosen]
        return tuple(outcomes)
    path = Path(options.success.removeprefix("@")).expanduser()
    listed_values = episode_values(path, metas, roots, "success", FLAG, named)
    for root, success, chosen, (number, value) in zip(roots, outcomes, episodes, listed_values, strict=True):
        if (missing := np.setdiff1d(chosen, number)).size:
            raise ValueError(f"{path}: does not say whether episode {missing[0]} of {root} succeeded")
        is_chosen = np.isin(number, chosen)
        success[number[is_chosen]] = value[is_chosen] >= options.threshold
    return tuple(outcomes)


def corrected_frames(
    options: OutcomeOptions, metas: Sequence[DatasetMetadata], episodes: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Return which frames a person corrected, by dataset: bool (F,), False outside the chosen `episodes`.

    A dataset without such a column has no corrections. Errors are those of `intervention_columns`.
    """
    return tuple(
        np.zeros(meta.total_frames, bool)
        if key is None
        else _frame_values(meta, chosen, key, "--outcome.intervention") > 0
        for meta, chosen, key in zip(metas, episodes, intervention_columns(options, metas), strict=True)
    )


def intervention_columns(options: OutcomeOptions, metas: Sequence[DatasetMetadata]) -> tuple[str | None, ...]:
    """Return each dataset's column of corrections, None if it has none.

    Raises ValueError if no dataset has the column that is named, or none is named and a dataset has several.
    """
    candidates = INTERVENTIONS if options.intervention is None else (options.intervention,)
    columns = [[name for name in candidates if name in meta.features] for meta in metas]
    if options.intervention is not None and not any(columns):
        features = sorted({key for meta in metas for key in meta.features})
        raise ValueError(
            f"--outcome.intervention={options.intervention}: no dataset has that column, but {', '.join(features)}"
            f"{did_you_mean(options.intervention, features)}"
        )
    for meta, names in zip(metas, columns, strict=True):
        if len(names) > 1:
            raise ValueError(
                f"dataset {meta.root} has the columns {' and '.join(names)}: say which is of corrections by a person, "
                f"--outcome.intervention={names[0]}"
            )
    return tuple(names[0] if names else None for names in columns)


def _frame_values(meta: DatasetMetadata, episodes: np.ndarray, key: str, flag: str) -> np.ndarray:
    """Read a column of the chosen episodes: float64 (F,), 0 for frames of other episodes."""
    if key not in meta.features:
        columns = list(meta.features)
        raise ValueError(
            f"dataset {meta.root}: {flag}={key}, and its columns are {', '.join(columns)}{did_you_mean(key, columns)}; "
            "a file is given as @FILE"
        )
    feature = meta.features[key]
    if int(np.prod(feature.shape)) != 1 or feature.dtype not in NUMERIC_DTYPES:
        raise ValueError(f"dataset {meta.root}: {flag}={key} is {feature.dtype} {feature.shape}; expected one number")

    def read_file(file: dict[str, Any]) -> list[tuple[int, np.ndarray]]:
        episodes = episode_arrays(meta.fs, features=[feature], **file)
        return [(episode, arrays[feature.key].reshape(-1).astype(np.float64)) for episode, arrays in episodes]

    values, first = np.zeros(meta.total_frames), np.cumsum(meta.episode_length) - meta.episode_length
    for file_arrays in in_threads(meta, episodes, read_file):
        for episode, array in file_arrays:
            values[first[episode] : first[episode] + len(array)] = array
    return values
