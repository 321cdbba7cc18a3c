"""The protocol of environments: what the project asks of a simulator beside gymnasium's own interface.

A simulator is a `gymnasium.Env` whose observations are LeRobot's: `pixels`, uint8 (H, W, 3) or a dict of these by
camera, and vectors such as `agent_pos`. `info["is_success"]` says whether it has succeeded; `contract.Contract` checks
that while it is played. These attributes are optional; without them an environment is played all the same:

    task_description  str, the instruction, new in each episode
    state_hash()      str, tells states from each other; else a digest of what is observed
    rendering         bool, settable: whether the next steps look through the cameras
    rendering_s       float, settable: seconds spent rendering
    initial_states    int, the length of its list of initial states; `unwrapped.init_state_id` chooses one
    expert_action()   (A,), what a scripted expert does next, for record.py
    subtask           str, what it is at in this frame, for record.py
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

# As gymnasium returns them, and stacked: nested dicts of arrays.
Observation = dict[str, Any]
# Makes a task's environment; can be pickled.
Maker = Callable[[], gymnasium.Env[Any, Any]]


def attribute(env: gymnasium.Env[Any, Any], name: str, default: Any = None) -> Any:
    """Return an optional attribute of an environment or of what it wraps."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def choose_initial_state(env: gymnasium.Env[Any, Any], number: int) -> None:
    """Have the next reset begin from a state of the environment's list, where it has one."""
    if hasattr(env.unwrapped, "init_state_id"):
        cast(Any, env.unwrapped).init_state_id = number


def look_on_demand(env: gymnasium.Env[Any, Any], look: bool) -> None:
    """Set whether the next steps look through the cameras, on which most environments spend their time."""
    env.set_wrapper_attr("rendering", look, force=False)


def looked(env: gymnasium.Env[Any, Any]) -> bool:
    """Return whether the images observed last are of the state that it is in."""
    return bool(attribute(env, "rendering", True))


def close_quietly(env: gymnasium.Env[Any, Any]) -> None:
    """Close an environment, and ignore what a broken simulator raises while it closes."""
    with contextlib.suppress(Exception):
        env.close()


def choose_gl() -> None:
    """Have simulators draw without a screen, Mesa with one thread. Call before they are imported: they look then."""
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
    """Return what tells an environment's state from others: its `state_hash()`, or a digest of what is observed."""
    if env.has_wrapper_attr("state_hash"):
        return str(env.get_wrapper_attr("state_hash")())
    digest = hashlib.sha256()
    for key, array in sorted(leaves(observation)):
        if array.dtype == object:  # its bytes are addresses
            continue
        digest.update(
            f"{'/' * bool(key)}{key} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        )
    return digest.hexdigest()[:16]


def map_arrays(function: Callable[..., np.ndarray], *observations: Observation) -> Observation:
    """Return what a function makes of the arrays that observations have by one name, by this name."""
    mapped = {}
    for key, first in observations[0].items():
        values = [observation[key] for observation in observations]
        mapped[key] = map_arrays(function, *values) if isinstance(first, Mapping) else function(*values)
    return mapped


def stack(observations: Sequence[Observation]) -> Observation:
    """Return N observations as one of N rows."""
    return map_arrays(lambda *arrays: np.stack(arrays), *observations)


def concatenate(observations: Sequence[Observation]) -> Observation:
    """Return stacked observations as one, row after row."""
    return map_arrays(lambda *arrays: np.concatenate(arrays), *observations)


def select_rows(observation: Observation, rows: Sequence[int]) -> Observation:
    """Return some rows of a stacked observation."""
    return map_arrays(lambda array: array[list(rows)], observation)


def leaves(observation: Any, key: str = "") -> list[tuple[str, np.ndarray]]:
    """Return the arrays of an observation after their names, "pixels/top"."""
    if isinstance(observation, Mapping):
        return [leaf for name, part in observation.items() for leaf in leaves(part, f"{key}/{name}".lstrip("/"))]
    return [(key, np.asarray(observation))]


def load_module(name: str, label: str = "") -> ModuleType:
    """Import the module of an environment. Raises ValueError, beginning with `label`, where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{label or f'{name}, which has the environment,'} cannot be imported on {socket.gethostname()} ({error}): "
            "install it (pip install -e FOLDER), or name its folder in PYTHONPATH, on every node that simulates"
        ) from error


def load_package(name: str) -> None:
    """Import a package and its modules, which register their environments, as LeRobot's --env.discover_packages_path.

    Raises:
        ValueError: it cannot be imported here.
    """
    label = f"--env.discover_packages_path={name}:"
    for module in pkgutil.iter_modules(getattr(load_module(name, label), "__path__", ()), f"{name}."):
        load_module(module.name, label)
