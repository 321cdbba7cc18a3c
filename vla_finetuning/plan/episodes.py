"""Choose the episodes that a run trains on and holds out, and the frames of the training episodes."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_finetuning.data.frames import FrameRanges, describe_weights, frame_ranges_of, movement_keys, table
from vla_finetuning.data.metadata import DatasetMetadata, check_readable, episode_ranges
from vla_finetuning.data.selection import choose_episodes
from vla_finetuning.options.mixture import Member
from vla_finetuning.options.programs import PRESETS, Config
from vla_finetuning.plan.datasets import Datasets
from vla_finetuning.plan.names import chosen_cameras

# A rehearsal holds out no episode of a task with fewer episodes.
FEW_EPISODES = 5
# Episodes of each dataset, int64, ascending.
PerDataset = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class ChosenEpisodes:
    """The episodes and frames that are used of each dataset."""

    train: PerDataset
    held_out: PerDataset  # disjoint from `train`
    notes: tuple[str, ...]  # lines for the plan on what was left out
    frames: tuple[FrameRanges, ...]  # frames of `train` that are rows, and their weights
    described: tuple[tuple[str, ...], ...]  # lines per dataset; empty without idle frames to leave out and weights

    @property
    def rows_per_dataset(self) -> tuple[int, ...]:
        return tuple(int(ranges.frames.sum()) for ranges in self.frames)

    @property
    def rows(self) -> int:
        """Count the rows of an epoch over all datasets; the average where episodes have weights."""
        return max(1, round(sum(ranges.rows for ranges in self.frames)))


def select(config: Config, datasets: Datasets, dropped: int = 0) -> ChosenEpisodes:
    """Choose the training and the held-out episodes. --dataset.skip_idle reads the training episodes' numeric columns.

    Rows leave out the last `dropped` frames of each training episode.
    """
    metas = datasets.metas
    candidates = choose(config, datasets)
    success: Sequence[np.ndarray | None] = datasets.success or [None] * len(metas)
    splits = [
        _split(meta, episodes, notes, config, dropped, outcomes)
        for meta, (episodes, notes), outcomes in zip(metas, candidates, success, strict=True)
    ]
    train, held_out, split_notes = zip(*splits, strict=True)
    if config.eval_steps and not any(map(len, held_out)):
        raise ValueError(
            f"--eval_steps={config.eval_steps}: --dataset.eval_split={config.dataset.eval_split:g} holds out no "
            "episode to compute a loss on; raise it, add episodes, or leave out --eval_steps"
        )
    notes = list(itertools.chain(*split_notes))
    seconds, weights, skip = config.dataset.skip_idle, datasets.weights, config.dataset.on_error == "skip"
    frames, described = [], []
    for meta, chosen, weight in zip(metas, train, weights or [None] * len(metas), strict=True):
        keys = movement_keys(meta)
        min_idle_s = None if meta.without_actions else seconds  # without actions nothing moves
        ranges = frame_ranges_of(
            meta, chosen, dropped=dropped, keys=keys, skip_idle=min_idle_s, weight=weight, skip_unreadable=skip
        )
        if not len(ranges.episode):
            raise ValueError(
                f"{meta.root}: nothing moves for longer than --dataset.skip_idle={seconds:g} s anywhere in the "
                f"{len(chosen)} training episodes: nothing is left; raise it"
            )
        if idle := len(chosen) - len(ranges.episodes):
            notes.append(f"{meta.root}: {idle} episodes are left out whole by --dataset.skip_idle")
        frames.append(ranges)
        if seconds is not None or weight is not None:
            line = [] if weight is None else [describe_weights(weight[chosen])]
            described.append((*line, *table(meta, chosen, ranges)))
    train = tuple(ranges.episodes for ranges in frames)
    return ChosenEpisodes(train, held_out, tuple(notes), tuple(frames), tuple(described))


def choose(config: Config, datasets: Datasets) -> list[tuple[np.ndarray, list[str]]]:
    """Return the episodes of each dataset that are trained on or held out, and notes (`choose_episodes`)."""
    weights: Sequence[np.ndarray | None] = datasets.weights or [None] * len(datasets.metas)
    chosen = []
    for number, (meta, member) in enumerate(zip(datasets.metas, datasets.members, strict=True)):
        excluded = member.exclude_episodes
        chosen.append(choose_episodes(meta, member.episodes, excluded, member.tasks, weights[number]))

        def remedy(episodes: list[int], number: int = number) -> str:
            return exclusion(config, datasets.members, {number: episodes})

        check_readable(meta, chosen[number][0], chosen_cameras(meta, member.camera_keys), remedy)
    return chosen


def exclusion(config: Config, members: Sequence[Member], unreadable: Mapping[int, Sequence[int]]) -> str:
    """Return the option that excludes episodes, `unreadable` by number of the dataset, besides those excluded."""
    excluded = {
        member.root: sorted({*(member.exclude_episodes or ()), *unreadable.get(number, ())})
        for number, member in enumerate(members)
    }
    if config.dataset.exclude_episodes is None and any(member.exclude_episodes for member in members):
        roots = [members[number].root for number in unreadable]
        return "; ".join(
            f"exclude_episodes of {root} in the mixture: {episode_ranges(excluded[root])}" for root in roots
        )
    several = json.dumps({root: numbers for root, numbers in excluded.items() if numbers}) if len(excluded) > 1 else ""
    return f"--dataset.exclude_episodes={shlex.quote(several or episode_ranges(*excluded.values()))}"


def _split(
    meta: DatasetMetadata,
    chosen: np.ndarray,
    notes: list[str],
    config: Config,
    dropped: int,
    success: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Split the chosen episodes of a dataset into training and held-out ones; return both, and notes.

    By default the last ceil(n x eval_split) episodes of each task are held out, as in LeRobot. A rehearsal with its
    preset's share holds out none from small tasks. With `success`, bool (E,), the share applies to each outcome and is
    rounded down. A dataset without actions holds out nothing.
    """
    share = config.dataset.eval_split
    if meta.without_actions:
        share, column = 0.0, config.train.text_targets
        notes = [
            *notes,
            f"{meta.root}: no actions: its rows train the text of {column!r} alone; no episode is held out",
        ]
    by_task: dict[str, list[int]] = {}
    for episode in chosen.tolist():
        by_task.setdefault((meta.episode_tasks[episode] or ("",))[0], []).append(episode)
    groups = list(by_task.values())
    if success is None and config.preset == "demo" and share == float(PRESETS["demo"]["dataset.eval_split"]):
        large = [group for group in groups if len(group) >= FEW_EPISODES]
        if len(large) < len(groups):
            groups = large or [max(groups, key=len)] * (len(chosen) > 1)
            count = sum(math.ceil(len(group) * share) for group in groups)
            reason = f"of tasks with at least {FEW_EPISODES}; those with fewer are all trained on"
            if not large:
                reason = f"of the largest task; no task has {FEW_EPISODES}" if groups else "since there is only one"
            notes = [*notes, f"{meta.root}: {count} of {len(chosen)} episodes held out, {reason}"]
    if success is None:
        held_out = sorted(e for group in groups for e in group[len(group) - math.ceil(len(group) * share) :])
    else:
        in_task_order = list(itertools.chain(*groups))
        outcomes = ([e for e in in_task_order if success[e] == outcome] for outcome in (True, False))
        held_out = sorted(e for group in outcomes for n, e in enumerate(group) if n * share // 1 < (n + 1) * share // 1)
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
    if short := len(train) - long_enough.sum():
        why = f"the last {dropped} frames of each are not trained on"
        notes = [*notes, f"{meta.root}: {short} training episodes have no rows: {why}"]
    train = train[long_enough]
    trained = np.zeros(meta.num_episodes, bool)
    trained[train] = True
    if untrained := [task for task, group in by_task.items() if not trained[group].any()]:
        examples = ", ".join(map(repr, untrained[:3])) + " ..." * (len(untrained) > 3)
        notes.append(f"{meta.root}: no row has the task {examples}: all of its episodes are held out or too short")
    return train, np.asarray(held_out, np.int64), notes
