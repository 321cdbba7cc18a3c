"""Score every episode of a dataset in numbers that a person can check.

`score_episodes` reads all numeric columns and decodes a few frames of every camera, in this process. `Score.reasons`
are reasons to look at an episode, not verdicts; a run leaves out only episodes in `--dataset.exclude_episodes @FILE`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from vla_finetuning.data.dataset import known_episodes
from vla_finetuning.data.idle import STILL, idle_frames, value_range, value_span
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.relative_actions import ACTION, STATE
from vla_finetuning.report.dataset_look import MOMENTS, EpisodeReader, camera_findings, vector_keys

# Thresholds of reasons: share of idle frames; share of frames with an action at the end of its range; jerk, or distance
# of action and next state, as a multiple of the median episode.
IDLE, SATURATED, MEDIANS = 0.8, 0.5, 10.0
# A dimension at an end of its range in a larger share of all frames is a switch, as a gripper.
SWITCH = 0.5


@dataclass(frozen=True)
class Score:
    """The scores of one episode. NaN and infinity count as 0.

    Attributes:
        idle: share of frames after which neither state nor action moves (`data.idle`).
        jerk: mean absolute third difference of the actions, in ranges of the dimension; maximum over dimensions.
        saturated: share of frames with an action at an end of its range in the dataset; maximum over dimensions that
            are not switches.
        apart: mean distance of an action from the next state, in ranges; maximum over dimensions. None if state and
            action have different dimension names.
        same_as: an earlier episode with equal states and actions, bit for bit.
        reasons: reasons to look at the episode; empty for most.
    """

    episode: int
    frames: int
    idle: float
    jerk: float
    saturated: float
    apart: float | None
    same_as: int | None
    reasons: tuple[str, ...]


def score_episodes(meta: DatasetMetadata, read: Iterable[int] | None = None) -> Iterator[Score]:
    """Yield the scores of all episodes, or of those in `read`, in order. Takes seconds per 100,000 rows.

    Raises ValueError or OSError if rows cannot be read; `look_at` names their episodes.
    """
    keys = [key for key in vector_keys(meta) if key in (STATE, ACTION)]
    if ACTION not in keys:
        raise ValueError(f"{meta.root}: episodes are scored by their actions, and it has no vector 'action'")
    low, high = value_range(meta, ACTION)
    edge, span = STILL * (high - low), {key: value_span(meta, key) for key in keys}
    names = [meta.features[key].names for key in keys]
    alike = len(keys) == 2 and bool(names[0]) and names[0] == names[1]
    cameras = [key for key in meta.camera_keys if not meta.features[key].is_depth]
    reader, readers = EpisodeReader(meta, []), {key: EpisodeReader(meta, [key]) for key in cameras}
    scores, at_end, digests = [], [], dict[bytes, int]()
    for episode in known_episodes(meta).tolist() if read is None else read:
        frames = int(meta.episode_length[episode])
        batch = reader.read(episode, np.arange(frames))
        is_finite = all(np.isfinite(batch[key]).all() for key in keys)
        finite = {key: np.nan_to_num(batch[key].astype(np.float64), posinf=0.0, neginf=0.0) for key in keys}
        values = {key: array.reshape(frames, -1) for key, array in finite.items()}
        action = values[ACTION]
        at_end.append(((action <= low + edge) | (action >= high - edge)).mean(axis=0))
        jerk = np.abs(np.diff(action, n=3, axis=0)) / span[ACTION]
        apart = np.abs((action[:-1] - values[STATE][1:]) / span[ACTION]) if alike and frames > 1 else None
        digest = hashlib.sha256(b"".join(v.tobytes() for v in values.values())).digest()
        same_as = digests.setdefault(digest, episode)
        moments = evenly_spaced(frames, MOMENTS)
        scores.append(
            Score(
                episode=episode,
                frames=frames,
                idle=float(idle_frames(list(values.values()), list(span.values()), moves=1).mean()),
                jerk=float(jerk.mean(axis=0).max()) if len(jerk) else 0.0,
                saturated=0.0,  # set below, when the switches are known
                apart=None if apart is None else float(apart.mean(axis=0).max()),
                same_as=None if same_as == episode else same_as,
                reasons=(
                    *(() if is_finite else ("states or actions hold NaN or infinity",)),
                    *(
                        f"camera {key} is {finding.kind}"
                        for key, camera in readers.items()
                        for finding in camera_findings(key, [camera.read(episode, moments)[key]])
                    ),
                ),
            )
        )
    by_episode = np.array(at_end)
    moves = (high > low) & (np.average(by_episode, axis=0, weights=[s.frames for s in scores]) < SWITCH)
    saturated = by_episode[:, moves].max(axis=1, initial=0.0).tolist()
    yield from _compare([replace(s, saturated=share) for s, share in zip(scores, saturated, strict=True)])


def _compare(scores: list[Score]) -> Iterator[Score]:
    """Yield the scores with reasons from their numbers, before those from cameras."""
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
