"""Make paths in a run's options absolute: its workers, and a resumed run, have other working directories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_finetuning.data.selection import Choice, read_choice
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.job import JobOptions
from vla_finetuning.options.programs import Config, GrpoConfig, ValueConfig


def absolute(path: str | Path) -> str:
    """Return a local path as an absolute one, `~` being home; return a URI unchanged."""
    return str(path) if "://" in str(path) else str(Path(os.path.expanduser(path)).absolute())


def with_absolute_paths[C: JobOptions](config: C) -> C:
    """Return the options of any program with absolute paths, as the run saves them in its folder.

    Raises:
        OSError, ValueError: a mixture names a dataset twice; the file of --dataset.exclude_episodes is wrong.
    """
    changed: dict[str, Any] = {"output_dir": absolute(config.output_dir or "")}
    if isinstance(config, Config | ValueConfig):
        changed["dataset"] = _absolute_dataset(config.dataset)
    if isinstance(config, Config):
        weighting, recap, train = config.sample_weighting, config.recap, config.train
        changed["sample_weighting"] = replace(weighting, progress_path=_absolute_or_none(weighting.progress_path))
        changed["recap"] = replace(recap, labels=_absolute_or_none(recap.labels))
        tokenizer = absolute(train.action_tokenizer)  # else its name on the Hub, fit or auto
        tokenizer = tokenizer if Path(tokenizer).is_dir() else train.action_tokenizer
        feature_cache = _absolute_or_none(train.feature_cache)
        changed["train"] = replace(train, feature_cache=feature_cache, action_tokenizer=tokenizer)
    if isinstance(config, ValueConfig) and (config.outcome.success or "").startswith("@"):
        file = absolute((config.outcome.success or "").removeprefix("@"))
        changed["outcome"] = replace(config.outcome, success=f"@{file}")
    if isinstance(config, GrpoConfig):
        grpo = config.grpo
        changed["grpo"] = replace(
            grpo,
            record_dataset=_absolute_or_none(grpo.record_dataset),
            demonstrations=_absolute_or_none(grpo.demonstrations),
        )
    policy = getattr(config, "policy_path", None)
    if policy and Path(absolute(policy)).is_dir():  # else its name on the Hub
        changed["policy_path"] = absolute(policy)
    return replace(config, **changed)


def _absolute_dataset(d: DatasetOptions) -> DatasetOptions:
    roots = [absolute(root) for root in d.roots]
    assert isinstance(d.mixture, dict)  # a file is read with the flags
    mixture = dict(zip(roots, d.mixture.values(), strict=False))
    if len(mixture) < len(d.mixture):
        raise ValueError(f"--dataset.mixture names a dataset twice: {list(d.mixture)}")
    excluded: Any = d.exclude_episodes
    if isinstance(excluded, str):  # the file as it is now counts, also for a resumed run
        excluded = read_choice(excluded.removeprefix("@"))
    weights = d.episode_weights
    if weights is not None and weights.startswith("@"):
        weights = f"@{absolute(weights.removeprefix('@'))}"
    return replace(
        d,
        root=None if mixture else ",".join(roots) or None,
        mixture=mixture,
        frame_cache=absolute(d.frame_cache) if d.frame_cache not in (None, "", "auto") else d.frame_cache,
        episodes=_by_absolute_root(d.episodes),
        exclude_episodes=_by_absolute_root(excluded),
        episode_weights=weights,
    )


def _absolute_or_none(path: str | None) -> str | None:
    return absolute(path) if path else None


def _by_absolute_root(choice: Choice) -> Any:
    return {absolute(root): numbers for root, numbers in choice.items()} if isinstance(choice, Mapping) else choice
