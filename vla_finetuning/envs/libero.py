"""Render LeRobot's LIBERO only on demand, because rendering takes most of its time. Imports gymnasium only."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np

Sensor = Callable[[Any], np.ndarray]


class RenderedOnDemand(gymnasium.Wrapper):
    """A wrapper of LeRobot's LIBERO with equal states, rewards and images that can be switched off.

    Attributes:
        rendering: whether steps render the cameras; if not, observations repeat the last images.
        rendering_s: seconds that steps spent rendering; the reader may reset it.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.rendering, self.rendering_s = True, 0.0

    @property
    def initial_states(self) -> int | None:
        """Return the number of states that LeRobot loaded for the task; None with `--env.init_states=false`."""
        states = cast(Any, self.unwrapped)._init_states
        return None if states is None else len(states)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation = self.env.reset(**options)
        # A reset builds the simulation and its sensors anew. robosuite calls a new sensor once, to test it.
        inside, rendering, self.rendering = self._simulated(), self.rendering, False
        for name, observable in inside._observables.items():
            if observable.modality == "image" and not isinstance(observable._sensor, _Camera):
                inside.modify_observable(name, "sensor", _Camera(self, observable._sensor, observable.obs))
        self.rendering = rendering
        return observation

    def state_hash(self) -> str:
        """Return a digest of MuJoCo's time, positions and velocities."""
        return hashlib.sha256(np.asarray(self._simulated().sim.get_state().flatten()).tobytes()).hexdigest()[:16]

    def _simulated(self) -> Any:
        """Return robosuite's environment, which is inside LIBERO's, which is inside LeRobot's."""
        lerobots: Any = self.unwrapped
        return lerobots._env.env


class _Camera:
    """A robosuite sensor that returns the last image while rendering is off."""

    def __init__(self, env: RenderedOnDemand, draw: Sensor, last: np.ndarray) -> None:
        self._env, self._draw, self._last = env, draw, last
        self.__modality__ = "image"  # attribute that robosuite's decorator adds

    def __call__(self, cache: Any) -> np.ndarray:
        if self._env.rendering:
            started = time.perf_counter()
            self._last = self._draw(cache)
            self._env.rendering_s += time.perf_counter() - started
        return self._last
