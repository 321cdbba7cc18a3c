"""Check the requirements on environments (docs/simulators.md) while they are played. Imports gymnasium and numpy."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np

from vla_finetuning.envs.protocol import (
    Observation,
    attribute,
    choose_initial_state,
    leaves,
    load_module,
    load_package,
    state_hash,
)

# Tolerances between two resets with one seed, without `state_hash`: the rounding of a renderer or a solver.
GREY_LEVELS, TOLERANCE = 32, 1e-3


class ContractError(ValueError):
    """An environment breaks a requirement, so that another attempt would fail alike."""


class Contract(gymnasium.Wrapper):
    """A wrapper that checks observations, rewards and infos, and passes them on unchanged.

    `reset` and `step` raise ContractError, and ValueError for an observation that is not finite, which may be the
    fault of one scene.

    Args:
        shapes: expected shapes by name, "pixels/top"; other names are not checked.
        is_own: also check that there is a step limit and, once per process, that the seed decides the scene.
    """

    _repeats: ClassVar[bool] = False

    def __init__(self, env: gymnasium.Env[Any, Any], shapes: Mapping[str, Sequence[int]], is_own: bool) -> None:
        super().__init__(env)
        self._shapes, self._is_own, self._steps, self._has_told_success = shapes, is_own, 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._is_own and attribute(self.env, "_max_episode_steps") is None:
            raise ContractError(
                f"{self._name} has no step limit, so that an episode may never end: register it with "
                "max_episode_steps=N, or give --env.episode_length N where its configuration has that"
            )
        number = getattr(self.unwrapped, "init_state_id", 0)
        observation, info = self.env.reset(seed=seed, options=options)
        if self._is_own and not Contract._repeats:
            first, first_state = observation, state_hash(self.env, observation)
            choose_initial_state(self.env, number)
            observation, info = self.env.reset(seed=seed, options=options)
            if first_state != state_hash(self.env, observation) and _differ(first, observation):
                raise ContractError(
                    f"{self._name} ignores its seed: two resets with seed={seed} show different states. Episodes are "
                    "compared and played again by their seeds: draw everything from self.np_random, after "
                    "super().reset(seed=seed); where only pictures differ by rounding, give it a state_hash()"
                )
            Contract._repeats = True
        self._steps, self._has_told_success = 0, False
        self._check(observation, info)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        self._check(observation, info)
        if not _is_number(reward):
            raise ContractError(f"{self._name} gave the reward {reward!r:.80} {self._when}: expected a number")
        if (terminated or truncated) and not self._has_told_success:
            raise ContractError(
                f"{self._name} never said whether it succeeded: no info of an episode has 'is_success' (the last one "
                f"has {', '.join(map(str, info)) or 'nothing'}); give info['is_success'] = True or False in every step"
            )
        return observation, reward, terminated, truncated, info

    @property
    def _name(self) -> str:
        return f"environment {self.spec.id if self.spec else type(self.unwrapped).__name__}"

    @property
    def _when(self) -> str:
        return f"after step {self._steps}" if self._steps else "at its reset"

    def _check(self, observation: Observation, info: Mapping[str, Any]) -> None:
        arrays = {key: array for key, array in leaves(observation) if array.dtype != object}
        for key, shape in self._shapes.items():
            if key not in arrays:
                raise ContractError(
                    f"{self._name} does not show '{key}' {self._when}, which its configuration's features have; it "
                    f"shows {', '.join(arrays)}"
                )
            dtype, is_image = arrays[key].dtype, key.startswith("pixels")
            if arrays[key].shape != tuple(shape) or (dtype != np.uint8 if is_image else dtype.kind not in "biuf"):
                kind = "uint8 (height, width, channels)" if is_image else "numbers"
                raise ContractError(
                    f"{self._name} shows '{key}' as {dtype} {arrays[key].shape} {self._when}: expected {kind} "
                    f"{tuple(shape)}, as its configuration's features have it"
                )
        for key, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                numbers = np.array2string(array.ravel(), threshold=8, precision=4)
                raise ValueError(f"{self._name}: '{key}' is not finite {self._when}: {numbers}")
        if "is_success" in info:
            self._has_told_success, success = True, info["is_success"]
            if not _is_number(success) or float(success) not in (0.0, 1.0):
                raise ContractError(
                    f"{self._name} gave info['is_success'] = {success!r:.80} {self._when}: expected True or False"
                )


def checked(
    make: bytes,
    packages: Sequence[str] = (),
    module: str | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> gymnasium.Env[Any, Any]:
    """Make an environment wrapped in `Contract`, after its packages are imported. Runs in a stage.

    Its step limit is enforced, as by LeRobot's evaluation: an environment may only name it. An environment that names
    another value, such as infinity, ends by itself.

    Args:
        make: a pickled `Maker`.
        module: module of the user's own environment; None for LeRobot's and ours.
    """
    for package in packages:
        load_package(package)
    if module is not None:
        load_module(module)
    env = pickle.loads(make)()
    if _is_number(limit := attribute(env, "_max_episode_steps")) and 0 < limit < math.inf:
        env = gymnasium.wrappers.TimeLimit(env, math.ceil(limit))
    return Contract(env, shapes or {}, module is not None)


def _differ(a: Observation, b: Observation) -> bool:
    for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
        allowed = GREY_LEVELS if x.dtype == np.uint8 else TOLERANCE
        if x.shape != y.shape or (x.dtype.kind in "uf" and not np.allclose(x, y, TOLERANCE, allowed, equal_nan=True)):
            return True
    return False


def _is_number(value: Any) -> bool:
    array = np.asarray(value)
    return array.size == 1 and array.dtype.kind in "biuf"
