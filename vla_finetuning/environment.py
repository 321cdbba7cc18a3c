"""Limits that an operator may set by environment variables, and no recipe turns."""

from __future__ import annotations

import math
import os
from contextlib import suppress

# Size of a cache on each node, in 10^9 bytes: of fetched bytes, a few of LeRobot's larger datasets; of decoded frames
# (16 for every hour of three cameras of 224x224 at 10 Hz), and of features.
CACHE_GB, FRAME_CACHE_GB = 100.0, 200.0


def number_from_environment(name: str, default: float) -> float:
    """Return the number that an environment variable is set to, or the default. Raises ValueError if it is invalid."""
    text = os.environ.get(name)
    if not text:
        return default
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise ValueError(f"{name}={text!r} in the environment: expected a number above 0")


def cache_gb(default: float) -> float:
    """Return the size of a cache on each node: `VLA_CACHE_GB`, which applies to each of them, or the default."""
    return number_from_environment("VLA_CACHE_GB", default)
