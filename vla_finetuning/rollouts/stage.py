"""Run several episodes of environments in one process: execute their chunks, and return their pending decisions.

Imports gymnasium and no policy, so that a process which only simulates is small and starts fast.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
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
    instruction_of,
    look_on_demand,
    shows_state,
    stack,
    state_hash,
)
from vla_finetuning.rollouts.episodes import ATTEMPTS, Line, Playing, line_of

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
    ) -> tuple[tuple[dict[int, Line], list[Decision]], Observation | None]:
        """Execute a chunk in each waiting episode, and begin episodes in free slots.

        Args:
            begin: episodes to begin, those with chunks first; the rest is ignored when no slot is free.
            chunks: a chunk, float (T, A), for each decision of the last call; None if there were none.

        Returns:
            The lines of finished episodes by number, and the pending decisions; and the stacked observations of the
            decisions.
        """
        started = time.perf_counter()
        ended, to_begin = dict[int, Line](), list(begin)
        for slot, chunk in zip(self._waiting, () if chunks is None else chunks, strict=True):
            slot.execute(chunk)
        # Begin restarted episodes before finished ones free their slots, so that their order is kept.
        for slot in self._slots:
            if slot.decision is None and slot.line is None and to_begin and to_begin[0].chunks:
                slot.begin(to_begin.pop(0))
        for slot in self._slots:
            while slot.decision is None and (slot.line is not None or to_begin):
                if slot.line is not None:
                    ended[slot.playing.number], slot.line = slot.line, None
                else:
                    slot.begin(to_begin.pop(0))
        self._waiting = [slot for slot in self._slots if slot.decision is not None]
        decisions = [slot.decision for slot in self._slots if slot.decision is not None]
        seen = stack([slot.observation for slot in self._waiting]) if self._waiting else None
        self._busy_s += time.perf_counter() - started
        return (ended, decisions), seen

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds spent simulating and rendering (`rendering_s`) since the last call."""
        rendered_s = 0.0
        for env in (slot.env for slot in self._slots if slot.env is not None):
            rendered_s += attribute(env, "rendering_s", 0.0)
            env.set_wrapper_attr("rendering_s", 0.0, force=False)
        busy_s, self._busy_s = self._busy_s, 0.0
        return busy_s - rendered_s, rendered_s


class _Slot:
    """An environment, and the episode in it: either its pending decision, or its line, or neither."""

    playing: Playing
    observation: Observation

    def __init__(self, makers: Mapping[str, Maker], step_limit_s: float) -> None:
        self._makers, self._step_limit_s = makers, step_limit_s
        self._task: str | None = None
        self.env: gymnasium.Env[Any, Any] | None = None
        self.decision: Decision | None = None
        self.line: Line | None = None

    def make(self, task: str) -> gymnasium.Env[Any, Any]:
        """Return an environment of the task: the slot's own, or a new one."""
        if self.env is None or task != self._task:
            self._drop_env()
            self.env, self._task = Limited(self._makers[task], self._step_limit_s), task
        return self.env

    def _drop_env(self) -> None:
        if self.env is not None:
            close_quietly(self.env)
        self.env = None

    def begin(self, playing: Playing) -> None:
        """Begin an episode, and execute the chunks that it has already."""
        self.playing, self._chunks = playing, list(playing.chunks)
        self._running = self._play()
        self._advance(None)

    def execute(self, chunk: np.ndarray) -> None:
        """Step through the actions of a chunk (T, A) until the episode is over."""
        self._chunks.append(chunk)
        self._advance(chunk)

    def _advance(self, chunk: np.ndarray | None) -> None:
        """Play on to the next decision or the end. Restart in a new environment if it raises, up to ATTEMPTS times."""
        self.decision, failure = None, ""
        for _ in range(ATTEMPTS):
            try:
                self.decision = self._running.send(chunk)
                return
            except StopIteration as end:
                self.line = end.value
                return
            except ContractError:
                raise  # all other episodes would fail alike
            except Exception as error:  # an environment may raise anything, which ends its episode alone
                self._drop_env()
                failure, chunk, self._running = f"{type(error).__name__}: {error}", None, self._play()
        self.line = line_of(self.playing.episode, len(self._chunks), error=failure)

    def _play(self) -> Generator[Decision, Any, Line]:
        """Play the episode from its reset: yield its decisions, receive their chunks, return its line.

        Chunks that it has already are executed first, without rendering, but for the last state.
        """
        playing, episode, chunks = self.playing, self.playing.episode, list(self._chunks)
        env = self.make(episode.task)
        look_on_demand(env, True)
        choose_initial_state(env, episode.episode)
        self.observation, info = env.reset(seed=episode.seed)
        initial_state = state_hash(env, self.observation)
        instruction = instruction_of(env)
        limit = attribute(env, "_max_episode_steps")
        success, total, rewards = [bool(info.get("is_success", False))], 0.0, list[float]()
        success_decision: int | None = None
        terminated = truncated = False
        while not (terminated or truncated):
            number = len(rewards)
            chunk = chunks[number] if number < len(chunks) else (yield Decision(playing.number, number, instruction))
            look = number >= len(chunks) - 1
            rewards.append(0.0)
            for place, action in enumerate(chunk, 1):
                steps = len(success)
                # The step limit may end the episode, whose last state the policy sees too.
                may_be_last = playing.bootstraps and limit in (None, steps)
                look_on_demand(env, look and (place == len(chunk) or may_be_last))
                self.observation, reward, terminated, truncated, info = env.step(action)
                if not math.isfinite(reward):
                    raise ValueError(f"step {steps} gave the reward {reward}: expected a finite number")
                total += float(reward)
                rewards[-1] += float(reward)
                success.append(bool(info.get("is_success", False)))
                if success[-1] and success_decision is None:
                    success_decision = number
                if terminated or truncated:
                    break
        truncated = bool(truncated and not terminated)
        decisions = len(rewards)
        if truncated and playing.bootstraps:
            if decisions >= len(chunks):
                if not shows_state(env):
                    raise ContractError(
                        f"{episode.task} ended an episode after {len(success) - 1} steps, before its step limit, and "
                        "its last state was not rendered: register it with that limit as max_episode_steps, or leave "
                        "out --grpo.bootstrap_time_limit"
                    )
                yield Decision(playing.number, decisions, instruction)
            decisions += 1
        can_tell = env.has_wrapper_attr("state_hash") or shows_state(env)
        return line_of(
            episode,
            decisions,
            instruction=instruction,
            success_once=any(success),
            success_at_end=success[-1],
            success_at_reset=success[0],
            steps=len(success) - 1,
            total_reward=total,
            initial_state=initial_state,
            info={key: plain for key, value in info.items() if (plain := _plain(value)) is not None},
            final_state=state_hash(env, self.observation) if can_tell else "",
            rewards=tuple(rewards),
            success_decision=success_decision,
            truncated=truncated,
        )


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
