"""Define episodes, the conditions they are played under, their random numbers and their result lines.

An episode is a function of its own numbers. Its seed fixes the scene, and the noise of its n-th decision is drawn from
(seed, task, episode, n). Batching and the order of execution therefore change nothing.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

# Key of a decision's random numbers: seed of the noise, task, episode number, decision number.
Key = tuple[int, str, int, int]
# An episode's result, as a line of episodes.jsonl: the fields of `Episode`, OUTCOME, the number of decisions, `texts`
# if the policy wrote any, and, as `error`, the last failure of an episode that failed ATTEMPTS times.
Line = dict[str, Any]
# What the environment says: its instruction (the policy may get another one), success, steps, hashes of the first and
# the last state ("" for a state without a hash that was not rendered), scalars of the last step's info, the sum of the
# rewards of each decision, the first successful decision or None, and whether the time limit ended the episode.
OUTCOME = (
    *("instruction", "success_once", "success_at_end", "success_at_reset", "steps", "total_reward", "initial_state"),
    *("info", "final_state", "rewards", "success_decision", "truncated"),
)
# A finished episode: its line and the executed actions, (steps, A).
PlayedEpisode = tuple[Line, np.ndarray]
# Attempts at an episode before its error becomes its result.
ATTEMPTS = 3


@dataclass(frozen=True)
class Condition:
    """How an episode is played.

    Attributes:
        instructions: replacement for each instruction; an instruction without an entry stays.
        blindfolded: whether the policy sees black images.
        delay: environment steps while a chunk is computed (`Player.act`).
    """

    policy: str = "policy"
    instructions: Mapping[str, str] = field(default_factory=dict)
    blindfolded: bool = False
    delay: int = 0


@dataclass(frozen=True)
class Episode:
    """An episode to play: names of its condition and task, its number, and the seed of its environment.

    If the environment has a list of initial states, it begins in the one with the index `episode` modulo the list's
    length, as in `lerobot-eval`.
    """

    condition: str
    task: str
    episode: int
    seed: int


@dataclass(frozen=True)
class LeftOver:
    """The rest of a chunk while the next chunk is computed.

    Attributes:
        actions: actions to execute until the next chunk arrives, float32 (delay, A), in the environment's units.
        prefix: all remaining actions for real-time chunking, float32 (T, A), or None. They are normalised; those of a
            policy with relative actions are absolute and in the dataset's units.
    """

    actions: np.ndarray
    prefix: np.ndarray | None


class Acted(NamedTuple):
    """What a policy does at a decision.

    Attributes:
        actions: actions to execute until the next decision, float32 (T, A), in the environment's units.
        rest: rest of the chunk; None if nothing depends on it.
        text: text that the policy wrote, if it has written one.
    """

    actions: np.ndarray
    rest: LeftOver | None = None
    text: str | None = None


@dataclass(eq=False)
class Playing:
    """A running episode, with its index in the list of episodes.

    Attributes:
        chunks: chunks to execute so far, (T, A) each; a restarted episode replays them.
        failures: number of processes that failed while they held the episode.
        bootstraps: whether the policy also decides for the state at the time limit; this decision is not executed.
        rest: the rest of the last chunk (`Player.act`).
        texts: texts that the policy wrote, one per decision.
    """

    number: int
    episode: Episode
    chunks: list[np.ndarray] = field(default_factory=list)
    failures: int = 0
    bootstraps: bool = False
    rest: LeftOver | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def is_suspect(self) -> bool:
        """Return whether to play the episode alone, because it may have made processes fail."""
        return self.failures > 1


def episode_list(
    conditions: Iterable[str],
    tasks: Iterable[str],
    count: int,
    seed: int,
    number: Callable[[str, int], int] = lambda _, i: i,
) -> list[Episode]:
    """Return `count` episodes of each task, equal for all conditions.

    A task's first episode has `seed`, and the others count up, as in `lerobot-eval`; `number` returns
    `Episode.episode` of a task and an index.
    """
    names = list(conditions)
    return [Episode(name, task, number(task, i), seed + i) for task in tasks for i in range(count) for name in names]


def noise(seed: int, task: str, episode: int, decision: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the initial noise of a policy's sampling: standard normal, float32."""
    return generator(seed, task, episode, decision).standard_normal(shape, np.float32)


def generator(seed: int, task: str, episode: int, decision: int) -> np.random.Generator:
    """Return the generator of a decision's random numbers; all conditions share its draws."""
    return np.random.default_rng([seed, zlib.crc32(task.encode()), episode, decision])


def line_of(episode: Episode, decisions: int, *, error: str | None = None, **outcome: Any) -> Line:
    """Return an episode's line, with `outcome` by the names in OUTCOME; all are None after an error."""
    return {**asdict(episode), **dict.fromkeys(OUTCOME), **outcome, "decisions": decisions, "error": error}


def episode_key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that identifies an episode's line in its list."""
    return tuple(line[name] for name in Episode.__dataclass_fields__)


def pack_actions(actions: np.ndarray) -> dict[str, Any]:
    """Encode actions (steps, A) as JSON without loss."""
    return {"dtype": actions.dtype.str, "shape": actions.shape, "base64": base64.b64encode(actions.tobytes()).decode()}


def unpack_actions(line: Mapping[str, Any]) -> np.ndarray:
    """Decode the actions of `pack_actions`."""
    return np.frombuffer(base64.b64decode(line["base64"]), line["dtype"]).reshape(line["shape"])
