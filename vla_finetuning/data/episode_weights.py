"""Read one number per episode, from a column of meta/episodes or from a file (`--dataset.episode_weights`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.data.dataset import DatasetMetadata
from vla_finetuning.data.limits import MAX_EPISODES_BYTES
from vla_finetuning.data.metadata import tables_of
from vla_finetuning.data.metadata_v3 import as_float64, is_number
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns

FLAG = "--dataset.episode_weights"
# Largest weight, the number of times that an epoch repeats an episode.
MAX_WEIGHT = 1000.0
# Smallest mean, or sum, of the weights that are not 0: probabilities would make epochs of one episode.
MIN_MEAN_WEIGHT, MIN_SUM = 0.01, 10


def _forms(flag: str, column: str) -> str:
    return (
        f"{flag}=@FILE takes a .csv or .parquet with the columns episode_index and {column} (of several datasets also "
        f'dataset, its root), or a .json with {{"EPISODE": {column}}} (of several datasets {{ROOT: ...}})'
    )


def episode_weights(
    metas: Sequence[DatasetMetadata], roots: Sequence[str], source: str, named: Callable[[str], str] = str
) -> list[np.ndarray]:
    """Return the weights of all episodes of each dataset, float64 (E,): their mean number of repeats in an epoch.

    Raises ValueError if there is no such column, or a weight is not a number from 0 to MAX_WEIGHT.

    Args:
        roots: names of the datasets.
        source: a numeric or bool column of meta/episodes, or @FILE (`episode_values`). Weights default to 1 with @FILE.
        named: function that normalises a root in the file to the form of `roots`.
    """
    if source.startswith("@"):
        path, weights = Path(source.removeprefix("@")).expanduser(), [np.ones(meta.num_episodes) for meta in metas]
        by_dataset = episode_values(path, metas, roots, "weight", FLAG, named)
        for weight, (number, value) in zip(weights, by_dataset, strict=True):
            weight[number] = value
        labels = [f"{path}: {root}" for root in roots]
    else:
        weights = [_read_column(meta, source) for meta in metas]
        labels = [f"dataset {meta.root}: {source} in meta/episodes" for meta in metas]
    for weight, label in zip(weights, labels, strict=True):
        if (wrong := np.flatnonzero(~((weight >= 0) & (weight <= MAX_WEIGHT)))).size:
            raise ValueError(
                f"{label}: the weight of episode {wrong[0]} is {weight[wrong[0]]:g}, expected a number from 0 (left "
                f"out) to {MAX_WEIGHT:g}; {len(wrong)} of {len(weight)} episodes have no such weight"
            )
    used = np.concatenate([weight[weight > 0] for weight in weights])
    if len(used) and used.mean() < MIN_MEAN_WEIGHT and used.sum() < MIN_SUM:
        raise ValueError(
            f"{FLAG}={source}: the weights are {used.mean():.2g} on average, and a weight is the number of times that "
            f"an epoch repeats an episode: multiply them by {1 / used.mean():.3g}"
        )
    return weights


def episode_values(
    path: Path,
    metas: Sequence[DatasetMetadata],
    roots: Sequence[str],
    column: str,
    flag: str,
    named: Callable[[str], str] = str,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read the episode numbers, int64 (N,), and values, float64 (N,), of each dataset from the file that `flag` names.

    Raises ValueError for another file format, a repeated or unknown episode, or a value that is NaN or empty.
    """
    by_root = _read_values(path, [named(root) for root in roots], named, column, flag)
    by_dataset = []
    for root, meta in zip(roots, metas, strict=True):
        number, value = by_root.get(named(root), by_root.get("", (np.empty(0, np.int64), np.empty(0))))
        if (unknown := number[(number < 0) | (number >= meta.num_episodes)]).size:
            raise ValueError(f"{path}: episode {unknown[0]} is not in {root}, which has 0..{meta.num_episodes - 1}")
        if (twice := number[np.bincount(number, minlength=1)[number] > 1]).size:
            raise ValueError(f"{path}: episode {twice[0]} of {root} is there more than once")
        if (empty := number[np.isnan(value)]).size:
            raise ValueError(f"{path}: the {column} of episode {empty[0]} is nan or an empty cell, of {root}")
        by_dataset.append((number, value))
    return by_dataset


def _read_column(meta: DatasetMetadata, name: str) -> np.ndarray:
    """Return a column of meta/episodes, float64 (E,): NaN for an empty value, 0 for a number without an episode."""
    try:
        index, values = tables_of(meta.codebase_version).read_column(meta.fs, meta.base, name)
    except ValueError as error:
        raise ValueError(f"dataset {meta.root}: {FLAG}={name}: {error}; a file is given as @FILE") from error
    weight = np.zeros(meta.num_episodes)
    weight[index] = values
    return weight


# {root: (episode numbers, int64 (N,), and values, float64 (N,))}; the root is "" if the file names no dataset.
ValuesByRoot = dict[str, tuple[np.ndarray, np.ndarray]]


def _read_values(path: Path, roots: Sequence[str], named: Callable[[str], str], column: str, flag: str) -> ValuesByRoot:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {_forms(flag, column)}")
    try:
        by_root = _by_root(_read_table(path, column), named, column)
    except (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException) as error:
        raise ValueError(f"{path}: {error}; {_forms(flag, column)}") from error
    if "" in by_root and len(roots) > 1:
        raise ValueError(
            f"{path}: names no dataset for its episodes, and there are {len(roots)}; {_forms(flag, column)}"
        )
    if unknown := sorted(by_root.keys() - {"", *roots}):
        raise ValueError(f"{path} names {unknown}, which are not among the datasets {list(roots)}")
    return by_root


def _read_table(path: Path, column: str) -> pa.Table:
    if path.suffix == ".csv":
        return pyarrow.csv.read_csv(path)
    if path.suffix == ".parquet":
        with open_parquet(LocalFileSystem(), str(path)) as file:
            columns = [name for name in ("episode_index", column, "dataset") if name in file.schema_arrow.names]
            return read_columns(file, columns, Budget("episodes", MAX_EPISODES_BYTES))
    if path.suffix != ".json":
        raise ValueError("unknown file type: expected .csv, .parquet or .json")
    content = json.loads(path.read_text())
    if not isinstance(content, Mapping):
        raise ValueError(f"found a {type(content).__name__}")
    is_nested = bool(content) and all(isinstance(entry, Mapping) for entry in content.values())
    by_name = content if is_nested else {"": content}
    values = [
        int(value) if isinstance(value, bool) else value for episodes in by_name.values() for value in episodes.values()
    ]
    table = {
        "episode_index": pa.array([int(number) for episodes in by_name.values() for number in episodes], pa.int64()),
        column: pa.array(values, None if values else pa.float64()),
    }
    if is_nested:
        table["dataset"] = pa.array([name for name, episodes in by_name.items() for _ in episodes], pa.string())
    return pa.table(table)


def _by_root(rows: pa.Table, named: Callable[[str], str], column: str) -> ValuesByRoot:
    for name in ("episode_index", column):
        if name not in rows.column_names:
            raise ValueError(f"found the columns {rows.column_names!s:.200}")
        if not is_number(rows[name].type):
            raise ValueError(f"column {name} is of type {rows[name].type}")
    number, value = as_float64(rows["episode_index"]), as_float64(rows[column])
    if not (number == np.rint(number)).all():
        raise ValueError("an episode_index is no whole number")
    number = number.astype(np.int64)
    if "dataset" not in rows.column_names:
        return {"": (number, value)}
    names = rows["dataset"].cast(pa.string()).to_pylist()
    root_of = {name: named(name) for name in set(names)}
    root = np.array([root_of[name] for name in names], object)
    return {name: (number[root == name], value[root == name]) for name in set(root_of.values())}
