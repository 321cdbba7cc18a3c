"""The normalisation statistics of a run: what the policy needs, what datasets lack, all datasets joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lerobot.configs.policies import PreTrainedConfig
from lerobot.processor.relative_action_processor import RelativeActionsProcessorStep
from lerobot.utils.constants import IMAGENET_STATS

from vla_finetuning.config import DatasetOptions
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.relative_actions import RelativeActions, relative_action_stats
from vla_finetuning.data.statistics import check_stats, complete_stats
from vla_finetuning.policies.processors import required_stats, with_imagenet_stats
from vla_finetuning.run.mixture import AGGREGATED, Stats, check_ranges, join_stats

# Names of statistics by feature, `{"action": {"q01", "q99"}}`.
Names = dict[str, set[str]]


def needed_stats(
    policy_config: PreTrainedConfig,
    meta: DatasetMetadata,
    camera_keys: Sequence[str],
    keys: Sequence[str],
    use_imagenet_stats: bool,
    any_held_out: bool,
) -> Names:
    """What the policy normalises with, and what its evaluation compares it with."""
    needed = required_stats(policy_config, {k: meta.features[k] for k in keys})
    if use_imagenet_stats:
        own = {k: names - IMAGENET_STATS.keys() if k in camera_keys else names for k, names in needed.items()}
        needed = {key: names for key, names in own.items() if names}
    if any_held_out:
        # The mean action is what a policy must beat on held-out episodes (evaluation/open_loop.py).
        needed["action"] = needed.get("action", set()) | {"mean"}
    return needed


def missing_stats(
    metas: Sequence[DatasetMetadata], needed: Mapping[str, set[str]], always: Sequence[str] = ()
) -> Names:
    """What has to be computed; of several datasets, all must have what is joined. Of features `always`, everything.

    Raises:
        ValueError: statistics of cameras are among them.
    """
    if len(metas) > 1:
        needed = {key: names | AGGREGATED for key, names in needed.items()}
    missing = {
        key: {name for name in names if key in always or any(name not in meta.stats.get(key, {}) for meta in metas)}
        for key, names in needed.items()
    }
    missing = {key: names for key, names in missing.items() if names}
    if cameras := sorted(missing.keys() & set(metas[0].camera_keys)):
        raise ValueError(
            f"dataset {', '.join(meta.root for meta in metas)}: the policy normalises images, and meta/stats.json "
            f"lacks {', '.join(f'{sorted(missing[key])} of {key}' for key in cameras)}. These are not computed here, "
            "since every video would have to be decoded; have LeRobot write them with "
            "`python -m lerobot.scripts.augment_dataset_quantile_stats`"
        )
    return missing


def computed_stats(
    metas: Sequence[DatasetMetadata], missing: Names, relative: RelativeActions | None, cache_dir: Path
) -> tuple[DatasetMetadata, ...]:
    """The datasets with the missing statistics, computed in a Ray Data pass and cached in `cache_dir`."""
    missing = dict(missing)
    of_relative = {"action": missing.pop("action")} if relative is not None else {}
    completed = []
    for meta in metas:
        stats = complete_stats(meta, missing, cache_dir=cache_dir)[0]
        if relative is not None:
            stats["action"] = relative_action_stats(meta, relative, cache_dir=cache_dir)
            check_stats(replace(meta, stats=stats), of_relative)
        completed.append(replace(meta, stats=stats))
    return tuple(completed)


def joined_stats(
    d: DatasetOptions,
    metas: Sequence[DatasetMetadata],
    camera_keys: Sequence[str],
    keys: Sequence[str],
    rows_per_source: Sequence[int],
) -> Stats:
    """The run's statistics, of all its datasets together.

    Args:
        keys: features that the policy uses. rows_per_source: rows of each dataset in an epoch.
    """
    if not d.mixed_ranges:
        check_ranges(metas, keys)
    stats = join_stats(metas, rows_per_source if d.mixture and d.mixture_stats == "weights" else None)
    return with_imagenet_stats(stats, camera_keys) if d.use_imagenet_stats else stats


def relative_actions(policy_config: PreTrainedConfig) -> RelativeActions | None:
    """How the actions that a policy predicts are relative to the state; None if they are absolute."""
    if not getattr(policy_config, "use_relative_actions", False):
        return None
    names = getattr(policy_config, "action_feature_names", None)
    step = RelativeActionsProcessorStep(True, getattr(policy_config, "relative_exclude_joints", []), names)
    dimensions = step._build_mask(policy_config.output_features["action"].shape[0])
    return RelativeActions(len(policy_config.action_delta_indices or [0]), tuple(dimensions))
