"""Episodes of an environment side by side in one process: chunks are executed here, and only decisions leave.

Knows gymnasium, and nothing of policies: a process that only simulates is small and starts fast.
"""

from __future__ import annotations

import faulthandler
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

# As gymnasium returns them, and stacked: nested dicts of arrays.
Observation = dict[str, Any]


@dataclass(frozen=True)
class Decision:
    """An episode that waits for an action chunk: the `decision`-th of it, from 0."""

    number: int
    decision: int
    instruction: str


@dataclass(frozen=True)
class Ended:
    """An episode that is over.

    Attributes:
        number: which of the list.
        instruction: of the environment, whatever the policy was told.
        success_once, success_at_end, success_at_reset: what `info["is_success"]` said.
        total_reward: undiscounted.
        initial_state: hash of the state after `reset`.
        info: strings, numbers and truth values of the last step's info.
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


class Stage:
    """Environments of one kind, and the episodes that run in them.

    Args:
        gym_id: as `gymnasium.make` takes it; a module before a colon is imported first.
        options: of `gymnasium.make`.
        slots: how many episodes at once.
        step_limit_s: the process ends when a step, or a reset, takes longer. Not an exception: what hangs need not let
            Python run any more.
    """

    def __init__(self, gym_id: str, options: Mapping[str, Any], slots: int, step_limit_s: float) -> None:
        self._step_limit_s = step_limit_s
        self._slots = [_Slot(gymnasium.make(gym_id, **options)) for _ in range(slots)]
        self._waiting: list[_Slot] = []

    def advance(
        self, begin: Sequence[tuple[int, int]], chunks: np.ndarray | None = None, first: int = 0
    ) -> tuple[tuple[list[Ended], list[Decision]], Observation | None]:
        """Execute a chunk in each episode that waits, and begin others where there is room.

        Args:
            begin: (number, seed) of episodes; those for which no slot becomes free are left alone.
            chunks: float (N, T, A), of which rows from `first` on belong to the decisions that the last call returned,
                in their order. None where there are none.
        Returns:
            What ended, and what waits; and what those see, stacked, in their order.
        """
        ended = []
        own = np.empty((0, 0, 0)) if chunks is None else chunks[first : first + len(self._waiting)]
        for slot, chunk in zip(self._waiting, own, strict=True):
            for action, last in zip(chunk, [False] * (len(chunk) - 1) + [True], strict=True):
                with _limit(self._step_limit_s):
                    slot.step(action, look=last)
                if slot.over:
                    break
        to_begin = list(begin)
        for slot in self._slots:
            while (slot.free or slot.over) and (slot.over or to_begin):
                if slot.over:
                    ended.append(slot.take_ended())
                else:
                    with _limit(self._step_limit_s):
                        slot.begin(*to_begin.pop(0))
        self._waiting = [slot for slot in self._slots if not slot.free]
        seen = _stack([slot.observation for slot in self._waiting]) if self._waiting else None
        return (ended, [slot.decision() for slot in self._waiting]), seen


class _Slot:
    """An environment and the episode in it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self.free, self.over = True, False

    def begin(self, number: int, seed: int) -> None:
        self._look(True)
        self.observation, info = self._env.reset(seed=seed)
        self.free, self.over = False, False
        self._number, self._decisions = number, 0
        self._initial_state = state_hash(self._env, self.observation)
        # Where LeRobot's evaluation looks, in its order.
        named = [name for name in ("task_description", "task") if self._env.has_wrapper_attr(name)]
        self._instruction = str(self._env.get_wrapper_attr(named[0])) if named else ""
        self._success = [bool(info.get("is_success", False))]
        self._reward, self._info = 0.0, info

    def step(self, action: np.ndarray, look: bool) -> None:
        self._look(look)
        self.observation, reward, terminated, truncated, self._info = self._env.step(action)
        self._reward += float(reward)
        self._success.append(bool(self._info.get("is_success", False)))
        self.over = terminated or truncated

    def decision(self) -> Decision:
        self._decisions += 1
        return Decision(self._number, self._decisions - 1, self._instruction)

    def take_ended(self) -> Ended:
        self.free, self.over = True, False
        return Ended(
            number=self._number,
            instruction=self._instruction,
            success_once=any(self._success),
            success_at_end=self._success[-1],
            success_at_reset=self._success[0],
            steps=len(self._success) - 1,
            total_reward=self._reward,
            initial_state=self._initial_state,
            info={key: plain for key, value in self._info.items() if (plain := _plain(value)) is not None},
        )

    def _look(self, look: bool) -> None:
        """Rendering is what most environments spend their time on; ours can go without where no policy looks."""
        if hasattr(self._env.unwrapped, "rendering"):
            self._env.unwrapped.rendering = look


class _limit:
    """The process ends, with its stacks on standard error, if the block takes longer than so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(self._seconds, exit=True)

    def __exit__(self, *exception: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def state_hash(env: gymnasium.Env[Any, Any], observation: Observation) -> str:
    """What tells an environment's state from others: its own `state_hash()`, otherwise a digest of what is observed."""
    own = getattr(env.unwrapped, "state_hash", None)
    if own is not None:
        return str(own())
    digest = hashlib.sha256()
    for key, array in sorted(_leaves(observation)):
        digest.update(f"{key} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _leaves(observation: Any, key: str = "") -> list[tuple[str, np.ndarray]]:
    if isinstance(observation, Mapping):
        return [leaf for name, part in observation.items() for leaf in _leaves(part, f"{key}/{name}")]
    return [(key, np.asarray(observation))]


def _stack(observations: Sequence[Observation]) -> Observation:
    """Nested dicts of arrays with a row for each."""
    return {
        key: _stack([o[key] for o in observations])
        if isinstance(value, Mapping)
        else np.stack([o[key] for o in observations])
        for key, value in observations[0].items()
    }


def _plain(value: Any) -> str | float | int | bool | None:
    """A value as JSON has it; None if it is no single one."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, (str, float, int, bool)) else None
