"""Run several episodes of environments in one process: execute their chunks, and return their pending decisions.

Imports gymnasium and no policy, so that a process which only simulates is small and starts fast.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from vla_finetuning.envs.contract import ContractError
from vla_finetuning.envs.protocol import (
    Maker,
    Observation,
    attribute,
    choose_gl,
    choose_initial_state,
    close_quietly,
    look_on_demand,
    shows_state,
    stack,
    state_hash,
)
from vla_finetuning.rollouts.episodes import ATTEMPTS, Ended, Playing

# Time limit of making an environment. Some load gigabytes of meshes and compile them.
MAKE_LIMIT_S = 900.0


@dataclass(frozen=True)
class Decision:
    """A request for an action chunk: the `decision`-th of episode `number`, from 0."""

    number: int
    decision: int
    instruction: str


class Limited(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose process ends when it hangs: Python cannot interrupt a native call.

    The limit of a step, or of a reset but the first, is `step_limit_s` seconds; an expert may plan for longer.
    """

    def __init__(self, make: Maker, step_limit_s: float) -> None:
        with _limit(MAKE_LIMIT_S):
            super().__init__(make())
        self._step_limit_s, self._reset_limit_s = step_limit_s, MAKE_LIMIT_S  # some load their simulator in a reset

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        with _limit(self._reset_limit_s):
            self._reset_limit_s = self._step_limit_s
            return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        with _limit(self._step_limit_s):
            return self.env.step(action)


class Stage:
    """Environments of several tasks, and the episodes that run in them, one in each of `slots`.

    The constructor makes the first task's environment, to fail early. `step_limit_s` as for `Limited`.
    """

    def __init__(self, makers: Mapping[str, Maker], slots: int, step_limit_s: float) -> None:
        choose_gl()
        self._slots = [_Slot(makers, step_limit_s) for _ in range(slots)]
        self._slots[0].make(next(iter(makers)))
        self._waiting: list[_Slot] = []
        self._busy_s = 0.0

    def advance(
        self, begin: Sequence[Playing], chunks: Sequence[np.ndarray] | None = None
    ) -> tuple[tuple[list[Ended], list[Decision]], Observation | None]:
        """Execute a chunk in each waiting episode, and begin episodes in free slots.

        An episode whose environment raises is restarted in a new environment, up to ATTEMPTS times.

        Args:
            begin: episodes to begin, those with chunks first; the rest is ignored when no slot is free.
            chunks: a chunk, float (T, A), for each decision of the last call; None if there were none.

        Returns:
            The finished episodes and the pending decisions; and the stacked observations of the decisions.
        """
        started = time.perf_counter()
        ended, to_begin = list[Ended](), list(begin)
        for slot, chunk in zip(self._waiting, () if chunks is None else chunks, strict=True):
            slot.execute(chunk)
        # Begin restarted episodes before finished ones free their slots, so that their order is kept.
        for slot in self._slots:
            if slot.free and to_begin and to_begin[0].chunks:
                slot.begin(to_begin.pop(0))
        for slot in self._slots:
            while (slot.free or slot.over) and (slot.over or to_begin):
                if slot.over:
                    ended.append(slot.pop_result())
                else:
                    slot.begin(to_begin.pop(0))
        self._waiting = [slot for slot in self._slots if not slot.free]
        seen = stack([slot.observation for slot in self._waiting]) if self._waiting else None
        self._busy_s += time.perf_counter() - started
        return (ended, [slot.decision() for slot in self._waiting]), seen

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds spent simulating and rendering (`rendering_s`) since the last call."""
        rendered_s = sum(slot.pop_rendering_s() for slot in self._slots)
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s - rendered_s, rendered_s


class _Slot:
    """An environment and the episode in it."""

    _env: gymnasium.Env[Any, Any]

    def __init__(self, makers: Mapping[str, Maker], step_limit_s: float) -> None:
        self._makers, self._step_limit_s = makers, step_limit_s
        self._task: str | None = None
        self._failed: Ended | None = None
        self.free, self.over = True, False

    def make(self, task: str) -> None:
        """Make the environment of a task, unless the slot has it."""
        if task == self._task:
            return
        if self._task is not None:
            close_quietly(self._env)
        self._env, self._task = Limited(self._makers[task], self._step_limit_s), task

    def begin(self, playing: Playing) -> None:
        """Reset the environment of the episode's task, and execute the chunks that the episode has already."""
        self._playing, self._chunks = playing, list(playing.chunks)
        self._with_retries(self._begin)

    def execute(self, chunk: np.ndarray) -> None:
        """Step through the actions of a chunk (T, A) until the episode is over."""
        self._chunks.append(chunk)
        self._with_retries(lambda: self._execute(chunk))

    def _with_retries(self, play: Callable[[], None]) -> None:
        for last in (*[False] * (ATTEMPTS - 1), True):
            try:
                return play()
            except ContractError:
                raise  # all other episodes would fail alike
            except Exception as error:  # an environment may raise anything, which ends its episode alone
                self._drop_env()
                if last:
                    self._failed = Ended(self._playing.number, error=f"{type(error).__name__}: {error}")
                    self.free, self.over = False, True
            play = self._begin

    def _drop_env(self) -> None:
        """Drop the environment, so that the next episode makes a new one."""
        if self._task is not None:
            close_quietly(self._env)
        self._task = None

    def _begin(self) -> None:
        playing, episode = self._playing, self._playing.episode
        self.make(episode.task)
        look_on_demand(self._env, True)
        choose_initial_state(self._env, episode.episode)
        self.observation, info = self._env.reset(seed=episode.seed)
        self.free, self.over = False, False
        self._number, self._truncated = playing.number, False
        self._initial_state = state_hash(self._env, self.observation)
        # The same attributes in the same order as LeRobot's evaluation.
        self._instruction = str(attribute(self._env, "task_description", attribute(self._env, "task", "")))
        self._success = [bool(info.get("is_success", False))]
        self._rewards: list[float] = []
        self._success_decision: int | None = None
        self._reward, self._info = 0.0, info
        for number, chunk in enumerate(self._chunks, 1):
            self.decision()
            self._execute(chunk, look=number == len(self._chunks))

    def _execute(self, chunk: np.ndarray, look: bool = True) -> None:
        """Step through a chunk; `look`: render after its last action."""
        if self._truncated:
            self.over = True
        for number, action in enumerate(chunk, 1):
            if self.over or self._truncated:
                return
            self._step(action, look and (number == len(chunk) or self._may_be_last()))
            if look and self._truncated and self._playing.bootstraps and not shows_state(self._env):
                raise ContractError(
                    f"{self._playing.episode.task} ended an episode after {len(self._success) - 1} steps, before its "
                    "step limit, and its last state was not rendered: register it with that limit as "
                    "max_episode_steps, or leave out --grpo.bootstrap_time_limit"
                )

    def _may_be_last(self) -> bool:
        """Return whether to render after the next step, because the step limit may end the episode."""
        limit = attribute(self._env, "_max_episode_steps")
        return self._playing.bootstraps and limit in (None, len(self._success))

    def _step(self, action: np.ndarray, look: bool) -> None:
        look_on_demand(self._env, look)
        self.observation, reward, terminated, truncated, self._info = self._env.step(action)
        if not math.isfinite(reward):
            raise ValueError(f"step {len(self._success)} gave the reward {reward}: expected a finite number")
        self._reward += float(reward)
        self._rewards[-1] += float(reward)
        self._success.append(bool(self._info.get("is_success", False)))
        if self._success[-1] and self._success_decision is None:
            self._success_decision = len(self._rewards) - 1
        self._truncated = bool(truncated and not terminated)
        self.over = bool(terminated or (truncated and not self._playing.bootstraps))

    def decision(self) -> Decision:
        self._rewards.append(0.0)
        return Decision(self._number, len(self._rewards) - 1, self._instruction)

    def pop_result(self) -> Ended:
        self.free, self.over = True, False
        failed, self._failed = self._failed, None
        if failed is not None:
            return failed
        can_tell = self._env.has_wrapper_attr("state_hash") or shows_state(self._env)
        # The decision after a time limit has no reward.
        rewards = self._rewards[: len(self._rewards) - (self._truncated and self._playing.bootstraps)]
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
            final_state=state_hash(self._env, self.observation) if can_tell else "",
            rewards=tuple(rewards),
            success_decision=self._success_decision,
            truncated=self._truncated,
        )

    def pop_rendering_s(self) -> float:
        if self._task is None or not self._env.has_wrapper_attr("rendering_s"):
            return 0.0
        seconds = float(self._env.get_wrapper_attr("rendering_s"))
        self._env.set_wrapper_attr("rendering_s", 0.0)
        return seconds


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """End the process, with its stacks on standard error, if the block takes longer than `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _plain(value: Any) -> str | float | int | bool | None:
    """Convert a scalar to JSON, NaN and infinities to text; return None for other values."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, float, int, bool)) else None
