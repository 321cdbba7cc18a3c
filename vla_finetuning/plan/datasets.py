"""Find the datasets of a run and read their metadata, once, before the policy is loaded.

Imports neither PyTorch nor LeRobot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from vla_finetuning.data.dataset import FRAME_FEATURES, absent_vector
from vla_finetuning.data.dataset_files import fetch_dataset
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.metadata import DatasetMetadata, load_metadata
from vla_finetuning.data.selection import Choice, of_each
from vla_finetuning.data.storage import StoragePolicy
from vla_finetuning.environment import CACHE_GB, Timeouts, cache_gb
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.fields import decided
from vla_finetuning.options.mixture import Member, members
from vla_finetuning.options.programs import Config
from vla_finetuning.options.recap import without_label
from vla_finetuning.options.train import TEXT_FLAGS
from vla_finetuning.plan.names import chosen_cameras, proposed_names, with_names
from vla_finetuning.plan.paths import absolute, with_absolute_paths


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; at least one. Datasets without actions come last.

    Attributes:
        metas: metadata of each dataset, with the names that --rename_map gives features.
        members: options of each dataset (`listed_members`).
        weights: float64 (E,) per dataset, weights of its episodes (--dataset.episode_weights); None for equal ones.
        success: bool (E,) per dataset, outcomes of its episodes, to hold out a share of each outcome; None otherwise.
    """

    metas: tuple[DatasetMetadata, ...]
    members: tuple[Member, ...]
    weights: tuple[np.ndarray, ...] | None = None
    success: tuple[np.ndarray, ...] | None = None

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the absolute paths and URIs of the datasets."""
        return tuple(member.root for member in self.members)

    @property
    def with_actions(self) -> Datasets:
        """Return the datasets that have actions."""
        count = sum(not meta.without_actions for meta in self.metas)
        weights, success = (column and column[:count] for column in (self.weights, self.success))
        return Datasets(self.metas[:count], self.members[:count], weights, success)

    def __str__(self) -> str:
        return "; ".join(
            f"dataset {meta.root}: {meta.total_episodes} episodes, {meta.total_frames} frames" for meta in self.metas
        )


def find_datasets(config: Config) -> tuple[Config, Datasets]:
    """Find the datasets of a run: on the Hub, at the given roots, or the demo's own if the options name none.

    Return them with the options, which get absolute paths and the commit of a dataset on the Hub. Raises OSError or
    ValueError if a dataset cannot be read, or lacks a feature or camera that an option or a policy needs.
    """
    config = with_absolute_paths(config)
    config, roots = _find_roots(config)
    listed = listed_members(config.dataset, roots)
    listed, metas = _sort_actions_first(config, listed, load_datasets(config, listed))
    for meta, member in zip(metas, listed, strict=True):
        chosen_cameras(meta, member.camera_keys)  # refuses unknown ones
    if config.recap.labels is not None:
        metas = tuple(map(without_labels, metas))
    source = config.dataset.episode_weights
    weights = None if source is None else tuple(episode_weights(metas, [m.root for m in listed], source, absolute))
    return config, Datasets(metas, listed, weights)


def listed_members(d: DatasetOptions, roots: Sequence[str]) -> tuple[Member, ...]:
    """Return the options of each dataset: from its mixture entry, or else from the flags for all datasets."""
    listed = members(d.mixture) or tuple(map(Member, roots))
    included = of_each(d.episodes, roots, "--dataset.episodes")
    excluded = of_each(cast(Choice, d.exclude_episodes), roots, "--dataset.exclude_episodes")
    return tuple(
        replace(
            member,
            camera_keys=d.camera_keys if member.camera_keys is None else member.camera_keys,
            tasks=d.tasks if member.tasks is None else member.tasks or None,
            episodes=member.episodes if episodes is None or member.episodes is not None else list(episodes),
            exclude_episodes=member.exclude_episodes or list(without or ()),
        )
        for member, episodes, without in zip(listed, included, excluded, strict=True)
    )


def load_datasets(config: Config, listed: Sequence[Member]) -> tuple[DatasetMetadata, ...]:
    """Read the metadata of datasets and rename their features by --rename_map and the maps of a mixture.

    A dataset that has texts and nothing that could be an action is `without_actions`.
    """
    metas = [
        _add_absent_action(
            load_metadata(member.root, storage_policy=storage_policy(config.dataset)),
            {**config.rename_map, **member.rename_map},
        )
        for member in listed
    ]
    own_maps = [member.rename_map for member in listed]
    return with_names(metas, config.rename_map, config.dataset.state_features or (), own_maps)


def _add_absent_action(meta: DatasetMetadata, rename_map: Mapping[str, str]) -> DatasetMetadata:
    names = {rename_map.get(key, key) for key in meta.features}
    if "action" in names or not meta.text_keys or "action" in proposed_names(meta)[0].values():
        return meta
    return replace(meta, features={**meta.features, "action": absent_vector("action")})


def _sort_actions_first(
    config: Config, listed: tuple[Member, ...], metas: tuple[DatasetMetadata, ...]
) -> tuple[tuple[Member, ...], tuple[DatasetMetadata, ...]]:
    """Move datasets without actions to the end; refuse them if the run does not train texts, or all are such."""
    texts = [meta for meta in metas if meta.without_actions]
    if not texts:
        return listed, metas
    for meta, member in zip(metas, listed, strict=True):
        if meta.without_actions and (member.orders() or member.fps):
            raise ValueError(f"dataset {meta.root} has no actions: leave state, action and fps out of its entry")
    label = f"dataset {texts[0].root}: no feature is called action"
    if config.train.text_targets is None:
        named = [key for key in texts[0].features if key not in ("action", *FRAME_FEATURES)]
        raise ValueError(
            f"{label}; its features are {', '.join(named)}. Beside datasets with actions (--dataset.mixture) it trains "
            f"the texts of a column alone: {TEXT_FLAGS} "
            f"{texts[0].text_keys[0]}{''.join(f'; not read of the dataset: {line}' for line in texts[0].not_read)}"
        )
    if len(texts) == len(metas):
        example = json.dumps({**{meta.root: 1 for meta in metas}, "ROOT": 1})
        raise ValueError(
            f"{label}, and no dataset of the run has one: name it beside one with actions, "
            f"--dataset.mixture='{example}'"
        )
    if not config.dataset.mixture:
        raise ValueError(f"{label}: name it beside those with actions in --dataset.mixture")
    if config.recap.labels is not None:
        raise ValueError(
            f"--recap.labels: dataset {texts[0].root} has no actions, and no advantage: leave it out, or the labels"
        )
    order = sorted(range(len(metas)), key=lambda number: metas[number].without_actions)
    return tuple(listed[number] for number in order), tuple(metas[number] for number in order)


def without_labels(meta: DatasetMetadata) -> DatasetMetadata:
    """Strip the advantage from the end of task texts, as the run appends its own; note it for the plan."""
    tasks = {number: without_label(text) for number, text in meta.tasks.items()}
    ended = [text for number, text in meta.tasks.items() if text != tasks[number]]
    if not ended:
        return meta
    line = f"the advantage that {len(ended)} of {len(tasks)} tasks end with, as {ended[0]!r:.200}"
    return replace(
        meta,
        tasks=tasks,
        episode_tasks=[tuple(dict.fromkeys(map(without_label, texts))) for texts in meta.episode_tasks],
        not_read=(*meta.not_read, line),
    )


def storage_policy(d: DatasetOptions) -> StoragePolicy:
    """Return the timeout and the cache for reads from object stores."""
    return StoragePolicy(Timeouts.from_environment().read, d.cache_dir or None, cache_gb(CACHE_GB))


def _find_roots(config: Config) -> tuple[Config, list[str]]:
    """Fetch the dataset from the Hub or make the demo's own if needed; return the options and the roots."""
    repo_id = config.dataset.repo_id
    if repo_id:
        keys = config.dataset.camera_keys
        own = {name: key for key, name in config.rename_map.items() if not key.startswith("observation.")}
        path, commit = fetch_dataset(
            repo_id,
            config.dataset.revision,
            episodes=of_each(config.dataset.episodes, [repo_id], "--dataset.episodes")[0],
            camera_keys=None if keys is None else [own.get(key, key) for key in keys],
        )
        return decided(config, {"dataset.revision": commit}), [path]
    if config.preset != "demo" or config.dataset.roots:
        return config, config.dataset.roots
    from vla_finetuning.plan import demo  # imports drawing and video encoding

    return config, [absolute(demo.prepare_dataset(demo.DEMO_CACHE))]
