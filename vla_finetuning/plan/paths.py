"""Make paths in a run's options absolute, as workers and resumed runs have other working directories."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_finetuning.data.selection import read_choice
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.fields import get_option, options_of, set_option
from vla_finetuning.options.job import JobOptions
from vla_finetuning.options.programs import Config, ValueConfig


def absolute(path: str | Path) -> str:
    """Return a local path as an absolute one, with `~` expanded; return a URI unchanged."""
    return str(path) if "://" in str(path) else str(Path(os.path.expanduser(path)).absolute())


def with_absolute_paths[C: JobOptions](config: C) -> C:
    """Return the options of any program with absolute paths, and with the file of --dataset.exclude_episodes read."""
    config = copy.deepcopy(config)
    for option in options_of(type(config)):
        if option.file is not None and (value := get_option(config, option.path)):
            set_option(config, option.path, _absolute_value(option.file, value))
    if isinstance(config, Config | ValueConfig):
        _make_absolute(config.dataset)
    return config


def _absolute_value(kind: str, value: str) -> str:
    if kind == "@":
        return f"@{absolute(value[1:])}" if value.startswith("@") else value
    return value if kind == "name" and not Path(absolute(value)).is_dir() else absolute(value)


def _make_absolute(d: DatasetOptions) -> None:
    """Make paths of datasets and caches absolute, and read the file of --dataset.exclude_episodes."""
    roots = [absolute(root) for root in d.roots]
    assert isinstance(d.mixture, dict)  # the parser of flags has read a file
    mixture = dict(zip(roots, d.mixture.values(), strict=False))
    if len(set(roots)) < len(roots):
        raise ValueError(f"--dataset.{'mixture' if mixture else 'root'} names a dataset twice: {d.roots}")
    d.root, d.mixture = None if mixture else ",".join(roots) or None, mixture
    if d.frame_cache not in (None, "", "auto"):
        d.frame_cache = absolute(d.frame_cache)
    excluded: Any = d.exclude_episodes
    if isinstance(excluded, str):  # later changes of the file do not change a resumed run
        excluded = read_choice(excluded.removeprefix("@"))
    d.episodes, d.exclude_episodes = (_by_absolute_root(choice, d.repo_id) for choice in (d.episodes, excluded))


def _by_absolute_root(choice: Any, repo_id: str | None) -> Any:
    if isinstance(choice, Mapping):
        return choice[repo_id] if list(choice) == [repo_id] else {absolute(root): n for root, n in choice.items()}
    return choice
