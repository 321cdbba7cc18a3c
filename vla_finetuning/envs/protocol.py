"""Define the protocol of environments: requirements and optional attributes beyond gymnasium's own interface.

A simulator is a `gymnasium.Env` with LeRobot's observations: `pixels`, uint8 (H, W, 3) or a dict of these by camera,
and vectors such as `agent_pos`. `info["is_success"]` tells success. `contract.Contract` checks this while an
environment is played. These attributes are optional:

    task_description  str, the instruction, new in each episode
    state_hash()      str, identifies the state; default: a digest of the observation
    rendering         bool, settable: whether the next steps render the cameras
    rendering_s       float, settable: seconds spent rendering
    initial_states    int, the length of its list of initial states; `unwrapped.init_state_id` selects one
    expert_action()   (A,), the next action of a scripted expert, for record.py
    subtask           str, the expert's current subtask, for record.py
    robot_type        str, and dimension_names {LeRobot's key: names of its dimensions}, for recorded datasets

Its configuration is a LeRobot `EnvConfig`; `configs.task_makers` makes environments of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import os
import pkgutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import gymnasium
import numpy as np

# Nested dicts of arrays, as gymnasium returns them or stacked.
Observation = dict[str, Any]
# Picklable function that makes a task's environment.
Maker = Callable[[], gymnasium.Env[Any, Any]]


def attribute(env: gymnasium.Env[Any, Any], name: str, default: Any = None) -> Any:
    """Return an optional attribute of an environment or of the environments that it wraps."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def instruction_of(env: gymnasium.Env[Any, Any]) -> str:
    """Return the instruction of an episode, by the same attributes in the same order as LeRobot's evaluation."""
    return str(attribute(env, "task_description", attribute(env, "task")) or "")


def choose_initial_state(env: gymnasium.Env[Any, Any], number: int) -> None:
    """Select the initial state of the next reset, if the environment has a list of them."""
    if hasattr(env.unwrapped, "init_state_id"):
        cast(Any, env.unwrapped).init_state_id = number


def look_on_demand(env: gymnasium.Env[Any, Any], look: bool) -> None:
    """Set whether the next steps render the cameras, which takes most of many environments' time."""
    env.set_wrapper_attr("rendering", look, force=False)


def shows_state(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether the last images show the current state."""
    return bool(attribute(env, "rendering", True))


def close_quietly(env: gymnasium.Env[Any, Any]) -> None:
    """Close an environment, and ignore what a broken simulator raises while it closes."""
    with contextlib.suppress(Exception):
        env.close()


def choose_gl() -> None:
    """Select off-screen rendering, with one thread in Mesa. Call it before simulators are imported."""
    os.environ.setdefault("LP_NUM_THREADS", "1")
    if sys.platform != "linux" or "MUJOCO_GL" in os.environ:
        return
    for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")):
        with contextlib.suppress(OSError):
            ctypes.CDLL(library)
            os.environ["MUJOCO_GL"] = name
            os.environ.setdefault("PYOPENGL_PLATFORM", name)
            return


def state_hash(env: gymnasium.Env[Any, Any], observation: Observation) -> str:
    """Return a hash of an environment's state: its `state_hash()`, or a digest of the observation."""
    if env.has_wrapper_attr("state_hash"):
        return str(env.get_wrapper_attr("state_hash")())
    digest = hashlib.sha256()
    for key, array in sorted(leaves(observation)):
        if array.dtype != object:  # whose bytes are addresses
            digest.update(f"{'/' * bool(key)}{key} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def map_arrays(function: Callable[..., np.ndarray], *observations: Observation) -> Observation:
    """Apply a function to the arrays of each name in all observations; return the results by name."""
    mapped = {}
    for key, first in observations[0].items():
        values = [observation[key] for observation in observations]
        mapped[key] = map_arrays(function, *values) if isinstance(first, Mapping) else function(*values)
    return mapped


def stack(observations: Sequence[Observation]) -> Observation:
    """Stack N observations into one with N rows, without texts and objects, which no policy takes."""
    first = {k: v for k, v in observations[0].items() if isinstance(v, Mapping) or np.asarray(v).dtype.kind in "biuf"}
    return map_arrays(lambda *arrays: np.stack(arrays), first, *observations[1:])


def concatenate(observations: Sequence[Observation]) -> Observation:
    """Concatenate stacked observations."""
    return map_arrays(lambda *arrays: np.concatenate(arrays), *observations)


def select_rows(observation: Observation, rows: Sequence[int]) -> Observation:
    """Return some rows of a stacked observation."""
    return map_arrays(lambda array: array[list(rows)], observation)


def leaves(observation: Any, key: str = "") -> list[tuple[str, np.ndarray]]:
    """Return (name, array) of each array of an observation, for instance "pixels/top"."""
    if isinstance(observation, Mapping):
        return [leaf for name, part in observation.items() for leaf in leaves(part, f"{key}/{name}".lstrip("/"))]
    return [(key, np.asarray(observation))]


def load_module(name: str, label: str = "") -> ModuleType:
    """Import the module of an environment; raise ValueError, whose message begins with `label`, if that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{label or f'{name}, which has the environment,'} cannot be imported on {socket.gethostname()} ({error}): "
            "install it (pip install -e FOLDER), or name its folder in PYTHONPATH, on every node that simulates"
        ) from error


def load_package(name: str) -> None:
    """Import a package and its modules, which register environments. Raises ValueError if that fails."""
    label = f"--env.discover_packages_path={name}:"
    for module in pkgutil.iter_modules(getattr(load_module(name, label), "__path__", ()), f"{name}."):
        load_module(module.name, label)
