"""Which episodes a run trains on, and which it holds out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from vla_finetuning.config import PRESETS, Config
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.selection import Choice, choose_episodes, of_each

# Of a task: fewer are not split in a rehearsal.
FEW_EPISODES = 5
# Episodes of each dataset, int64, ascending.
PerDataset = tuple[np.ndarray, ...]


def split_episodes(
    metas: Sequence[DatasetMetadata], roots: Sequence[str], config: Config, dropped: int = 0
) -> tuple[PerDataset, PerDataset, tuple[list[str], ...]]:
    """The episodes to train on, those to hold out, and notes on what was left out.

    `roots` are what flags name. Of each training episode the last `dropped` frames are left out.
    """
    d = config.dataset
    wanted = of_each(d.episodes, roots, "--dataset.episodes")
    excluded = of_each(cast(Choice, d.exclude_episodes), roots, "--dataset.exclude_episodes")
    parts = [
        _split(meta, *choose_episodes(meta, episodes, without, d.tasks), config, dropped)
        for meta, episodes, without in zip(metas, wanted, excluded, strict=True)
    ]
    train, held_out, notes = zip(*parts, strict=True)
    return train, held_out, notes


def _split(
    meta: DatasetMetadata, chosen: np.ndarray, notes: list[str], config: Config, dropped: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Of the episodes chosen of a dataset, those to train on and to hold out, and notes.

    The last ceil(n x eval_split) of each task are held out, as in LeRobot. A rehearsal, whose preset chose the share,
    leaves tasks of a few episodes to training.
    """
    share = config.dataset.eval_split
    by_task: dict[str, list[int]] = {}
    for episode in chosen.tolist():
        by_task.setdefault((meta.episode_tasks[episode] or ("",))[0], []).append(episode)
    groups = list(by_task.values())
    if config.preset == "demo" and share == float(PRESETS["demo"]["dataset.eval_split"]):
        large = [group for group in groups if len(group) >= FEW_EPISODES]
        if len(large) < len(groups):
            groups = large or [max(groups, key=len)] * (len(chosen) > 1)
            notes = [
                *notes,
                f"{sum(math.ceil(len(group) * share) for group in groups)} of {len(chosen)} episodes held out: tasks "
                f"with fewer than {FEW_EPISODES} are left to training",
            ]
    held_out = sorted(e for group in groups for e in group[len(group) - math.ceil(len(group) * share) :])
    train = np.setdiff1d(chosen, held_out)
    if not len(train):
        raise ValueError(
            f"{meta.root}: --dataset.eval_split={share} leaves no episode to train on ({len(chosen)} episodes, "
            f"{len(by_task)} tasks, at least one held out of each); lower it or add episodes"
        )
    long_enough = meta.episode_length[train] > dropped
    if not long_enough.any():
        raise ValueError(
            f"{meta.root}: the last {dropped} frames of each episode are not trained on, and the longest of "
            f"{len(train)} training episodes has {meta.episode_length[train].max()}: nothing is left; lower "
            "--dataset.drop_n_last_frames"
        )
    if not long_enough.all():
        shorter = len(train) - long_enough.sum()
        notes = [*notes, f"{shorter} episodes have no more than the {dropped} last frames that are not trained on"]
    train = train[long_enough]
    trained = np.zeros(meta.num_episodes, bool)
    trained[train] = True
    if untrained := [task for task, group in by_task.items() if not trained[group].any()]:
        told = ", ".join(map(repr, untrained[:3])) + (f" and {len(untrained) - 3} more" if len(untrained) > 3 else "")
        notes.append(f"no training episode has the task {told}: all of its episodes are held out")
    return train, np.asarray(held_out, np.int64), notes
