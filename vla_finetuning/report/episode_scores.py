"""How good every episode of a dataset is, in numbers that a person can check, and which ones look better left out.

Every row's numbers are read and a few frames of every camera are decoded, in this process. `Score.reasons` are
reasons to look at an episode, not verdicts; a run leaves out only what `--dataset.exclude_episodes @FILE` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.idle import STILL, idle_frames, reach_of, span_of
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.report.dataset_look import ACTION, MOMENTS, STATE, camera_findings, looking_source, vector_keys

# Reasons to look at an episode: a robot that mostly stands still; actions that lie at the end of their range for most
# of the time; actions that jerk, or that the next state is off, so many times as much as in half of the episodes.
IDLE, SATURATED, MEDIANS = 0.8, 0.5, 10.0
# A dimension that lies at an end of its range in most frames of the dataset is a switch, as grippers are.
SWITCH = 0.5


@dataclass(frozen=True)
class Score:
    """One episode, in numbers.

    Attributes:
        idle: share of frames from which to the next neither state nor action moves (`data.idle`, however short).
        jerk: mean absolute third difference of the actions, in ranges of the dimension; the worst dimension's.
        saturated: share of frames in which an action is at an end of its range over the whole dataset; the worst
            dimension's, of those that are no switches.
        apart: mean distance of an action from the state one frame later, in ranges; the worst dimension's. None where
            state and action have not the same names of dimensions.
        same_as: an earlier episode with the same states and actions, to the bit.
        reasons: why the episode should be looked at; empty for most.
    """

    episode: int
    frames: int
    idle: float
    jerk: float
    saturated: float
    apart: float | None
    same_as: int | None
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class _Measured:
    """What one episode's numbers say, before it is compared with others: shares and distances by dimension, (D,)."""

    episode: int
    frames: int
    idle: float
    jerk: np.ndarray
    at_end: np.ndarray
    apart: np.ndarray | None
    digest: bytes


def score_episodes(meta: DatasetMetadata, read: Iterable[int] | None = None) -> Iterator[Score]:
    """Scores of all episodes, in order. Reads the whole dataset's numbers: seconds for every 100 000 rows.

    Args:
        read: the episodes, for instance wrapped in a progress bar; all by default.
    Raises:
        ValueError, OSError: rows that cannot be read; `look_at` says which episodes those are.
    """
    keys = [key for key in vector_keys(meta) if key in (STATE, ACTION)]
    if ACTION not in keys:
        raise ValueError(f"{meta.root}: episodes are scored by their actions, and it has no vector 'action'")
    low, high = reach_of(meta, ACTION)
    span = {key: span_of(meta, key) for key in keys}
    names = [meta.features[key].names for key in keys]
    alike = len(keys) == 2 and bool(names[0]) and names[0] == names[1]
    source, cameras = looking_source(meta, []), _Cameras(meta)
    measured, views = [], []
    for episode in range(meta.num_episodes) if read is None else read:
        first, frames = int(meta.episode_start[episode]), int(meta.episode_length[episode])
        (batch,) = source.read_rows(range(first, first + frames), frames)
        values = {key: batch[key].astype(np.float64).reshape(frames, -1) for key in keys}
        action = values[ACTION]
        jerk = np.abs(np.diff(action, n=3, axis=0)) / span[ACTION]
        edge = STILL * (high - low)
        measured.append(
            _Measured(
                episode,
                frames,
                idle=float(idle_frames(list(values.values()), list(span.values()), moves=1).mean()),
                jerk=jerk.mean(axis=0) if len(jerk) else np.zeros(action.shape[1]),
                at_end=((action <= low + edge) | (action >= high - edge)).mean(axis=0),
                apart=np.abs((action[:-1] - values[STATE][1:]) / span[ACTION]).mean(axis=0)
                if alike and frames > 1
                else None,
                digest=hashlib.sha256(b"".join(v.tobytes() for v in values.values())).digest(),
            )
        )
        views.append(cameras.reasons(episode))
    yield from _compare(measured, views, movable=high > low)


def _compare(measured: list[_Measured], views: list[tuple[str, ...]], movable: np.ndarray) -> Iterator[Score]:
    at_end = np.array([m.at_end for m in measured])
    counted = movable & (np.average(at_end, axis=0, weights=[m.frames for m in measured]) < SWITCH)
    seen: dict[bytes, int] = {}
    scores = []
    for m, view in zip(measured, views, strict=True):
        same_as = seen.setdefault(m.digest, m.episode)
        scores.append(
            Score(
                episode=m.episode,
                frames=m.frames,
                idle=m.idle,
                jerk=float(m.jerk.max()),
                saturated=float(m.at_end[counted].max()) if counted.any() else 0.0,
                apart=None if m.apart is None else float(m.apart.max()),
                same_as=None if same_as == m.episode else same_as,
                reasons=view,
            )
        )
    jerk = float(np.median([s.jerk for s in scores]))
    apart = float(np.median([s.apart for s in scores if s.apart is not None] or [0.0]))
    for s in scores:
        reasons = []
        if s.idle > IDLE:
            reasons.append(f"stands still in {s.idle:.0%} of its frames")
        if s.saturated > SATURATED:
            reasons.append(f"an action is at the end of its range in {s.saturated:.0%} of its frames")
        if jerk > 0 and s.jerk > MEDIANS * jerk:
            reasons.append(f"actions jerk {s.jerk / jerk:.0f} times as much as in half of the episodes")
        if apart > 0 and s.apart is not None and s.apart > MEDIANS * apart:
            reasons.append(f"the next state is {s.apart / apart:.0f} times as far from the action as usual")
        if s.same_as is not None:
            reasons.append(f"the same states and actions as episode {s.same_as}")
        yield replace(s, reasons=(*reasons, *s.reasons))


class _Cameras:
    """A few moments of every episode through every camera."""

    def __init__(self, meta: DatasetMetadata):
        self._meta = meta
        cameras = [key for key in meta.camera_keys if not meta.features[key].is_depth]
        self._sources: dict[str, LeRobotDatasource] = {key: looking_source(meta, [key]) for key in cameras}

    def reasons(self, episode: int) -> tuple[str, ...]:
        first, frames = int(self._meta.episode_start[episode]), int(self._meta.episode_length[episode])
        rows = (first + np.unique(np.linspace(0, frames - 1, MOMENTS).astype(np.int64))).tolist()
        found: list[str] = []
        for key, source in self._sources.items():
            (batch,) = source.read_rows(rows, len(rows))
            found += [f"camera {key} is {finding.kind}" for finding in camera_findings(key, [batch[key]])]
        return tuple(found)
