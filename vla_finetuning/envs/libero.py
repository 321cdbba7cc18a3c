"""LeRobot's LIBERO, rendered only on demand: its cameras take most of its time.

Imports gymnasium only. The caller wraps LeRobot's environment, which needs robosuite.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np

Sensor = Callable[[Any], np.ndarray]


class DrawnOnDemand(gymnasium.Wrapper):
    """LeRobot's LIBERO with the same states and rewards, and the same images where they are requested.

    Attributes:
        rendering: whether steps look through the cameras. Off, they show what was seen last.
        rendering_s: seconds spent on that; the reader may reset it.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.rendering, self.rendering_s = True, 0.0

    @property
    def initial_states(self) -> int | None:
        """Return how many states LeRobot loaded for the task; None with `--env.init_states=false`."""
        states = cast(Any, self.unwrapped)._init_states
        return None if states is None else len(states)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        seen = self.env.reset(**options)
        # A reset builds the simulation anew, and its sensors with it. robosuite tries those that it is given.
        inside, rendering, self.rendering = self._simulated(), self.rendering, False
        for name, observable in inside._observables.items():
            if observable.modality == "image" and not isinstance(observable._sensor, _Camera):
                inside.modify_observable(name, "sensor", _Camera(self, observable._sensor, observable.obs))
        self.rendering = rendering
        return seen

    def state_hash(self) -> str:
        """Return a digest of time, positions and velocities, as MuJoCo has them."""
        return hashlib.sha256(np.asarray(self._simulated().sim.get_state().flatten()).tobytes()).hexdigest()[:16]

    def _simulated(self) -> Any:
        """robosuite's environment: inside LIBERO's, inside LeRobot's."""
        lerobots: Any = self.unwrapped
        return lerobots._env.env


class _Camera:
    """A sensor of robosuite's that shows the last image where rendering is off."""

    def __init__(self, env: DrawnOnDemand, draw: Sensor, last: np.ndarray) -> None:
        self._asked, self._draw, self._last = env, draw, last
        self.__modality__ = "image"  # robosuite's name for what its decorator adds to a function

    def __call__(self, cache: Any) -> np.ndarray:
        if self._asked.rendering:
            started = time.perf_counter()
            self._last = self._draw(cache)
            self._asked.rendering_s += time.perf_counter() - started
        return self._last
