"""Episodes that are fixed beforehand: what each is played under, its random numbers, and its line of what became of it.

An episode is a function of its own numbers: its seed fixes the scene, and the noise of its n-th decision is drawn from
(seed, task, episode, n), so that neither batches nor the order in which things happen change it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# Of a decision's random numbers: the seed of the noise, the task, the episode's number and the decision's.
Key = tuple[int, str, int, int]
# What became of an episode, as episodes.jsonl has it.
Line = dict[str, Any]
# An episode that came to its end: its line, and the actions that were executed, (steps, A).
PlayedEpisode = tuple[Line, np.ndarray]
# An episode is begun so often before what it failed of is its result.
ATTEMPTS = 3


@dataclass(frozen=True)
class Condition:
    """Under what an episode is played.

    Attributes:
        policy: which of the policies that take part.
        instructions: what the policy gets in place of an instruction; itself where there is no entry.
        blindfolded: the policy sees black images.
        delay: steps that the environment goes on while a chunk is computed (`Player.act_late`); None: it stands still.
    """

    policy: str = "policy"
    instructions: Mapping[str, str] = field(default_factory=dict)
    blindfolded: bool = False
    delay: int | None = None


@dataclass(frozen=True)
class Episode:
    """One of the list. `seed` is the environment's; `condition` names one of the evaluation's conditions.

    Where an environment has a list of states to start from, `episode` modulo its length is the place in it, as in
    `lerobot-eval`.
    """

    condition: str
    task: str
    episode: int
    seed: int


@dataclass(frozen=True)
class LeftOver:
    """What is left of a chunk when the next one is computed.

    Attributes:
        actions: to execute until that arrives, float32 (delay, A), in the environment's units.
        prefix: all that is left, float32 (T, A), for real-time chunking, or None: normalised, but absolute and in the
            dataset's units where the policy's actions are relative to the state.
    """

    actions: np.ndarray
    prefix: np.ndarray | None


@dataclass(eq=False)
class Playing:
    """An episode that is not over.

    Attributes:
        number: which of the list. chunks: what it was given to execute, (T, A) each; it begins anew with these.
        failures: how many processes failed that held it.
        bootstraps: what is seen when its time is over is shown to the policy too, as a decision that is not executed.
        left: of its last chunk, where chunks are late.
        is_suspect: it is played alone, since it may be what made processes fail.
        texts: that the policy wrote, one a decision (`Player.written`).
    """

    number: int
    episode: Episode
    chunks: list[np.ndarray] = field(default_factory=list)
    failures: int = 0
    bootstraps: bool = False
    left: LeftOver | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def is_suspect(self) -> bool:
        return self.failures > 1


@dataclass(frozen=True)
class Ended:
    """An episode that is over.

    Attributes:
        number: which of the list. instruction: of the environment; the policy's may be another one.
        success_once, success_at_end, success_at_reset: what `info["is_success"]` said.
        info: strings, numbers and truth values of the last step's info.
        initial_state, final_state: hashes of the state; "" where only images show it, and none were rendered.
        rewards: the sum of each decision's rewards. success_decision: the first that succeeded, from 0, or None.
        truncated: it ended because its time was over.
    """

    number: int
    instruction: str
    success_once: bool
    success_at_end: bool
    success_at_reset: bool
    steps: int
    total_reward: float
    initial_state: str
    info: dict[str, Any]
    final_state: str = ""
    rewards: tuple[float, ...] = ()
    success_decision: int | None = None
    truncated: bool = False


@dataclass(frozen=True)
class Failed:
    """An episode that cannot be played: its environment failed ATTEMPTS times. `error` says of what."""

    number: int
    error: str


def episode_list(
    conditions: Iterable[str],
    tasks: Iterable[str],
    count: int,
    seed: int,
    number: Callable[[str, int], int] = lambda _, i: i,
) -> list[Episode]:
    """`count` episodes of each task for each condition, the same ones: seeds from `seed` on, as in `lerobot-eval`.

    Args:
        number: `Episode.episode` of a task's i-th.
    """
    names = list(conditions)
    return [Episode(name, task, number(task, i), seed + i) for task in tasks for i in range(count) for name in names]


def noise(seed: int, task: str, episode: int, decision: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return what a policy's sampling starts from: standard normal, float32."""
    return generator(seed, task, episode, decision).standard_normal(shape, np.float32)


def generator(seed: int, task: str, episode: int, decision: int) -> np.random.Generator:
    """Return the generator of all random numbers of a decision; conditions are compared on the same draws."""
    return np.random.default_rng([seed, zlib.crc32(task.encode()), episode, decision])


def line_of(
    episode: Episode, ended: Ended | None, error: str | None, decisions: int, texts: Sequence[str] = ()
) -> Line:
    """Return an episode's line, with `texts` if the policy wrote any.

    One that could not be played to its end has an `error`, and null for the unknown.
    """
    outcome = asdict(ended) if ended is not None else dict.fromkeys(Ended.__dataclass_fields__)
    outcome.pop("number")
    written = {"texts": list(texts)} if texts else {}
    return {**asdict(episode), **outcome, "decisions": decisions, **written, "error": error}


def name_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells an episode's line from the others' of its list."""
    return tuple(line[name] for name in Episode.__dataclass_fields__)


def pack_actions(actions: np.ndarray) -> dict[str, Any]:
    """Return actions (steps, A) as JSON has them, to the bit."""
    return {"dtype": actions.dtype.str, "shape": actions.shape, "base64": base64.b64encode(actions.tobytes()).decode()}


def unpack_actions(line: Mapping[str, Any]) -> np.ndarray:
    """Undo `pack_actions`."""
    return np.frombuffer(base64.b64decode(line["base64"]), line["dtype"]).reshape(line["shape"])
