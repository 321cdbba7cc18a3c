"""Limits and folders that an operator sets by environment variables, independent of any recipe."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

# Size of a cache on each node, in 10^9 bytes. CACHE_GB is for bytes from object stores, and holds a few of LeRobot's
# larger datasets. FRAME_CACHE_GB is for decoded frames (16 per hour of three 224x224 cameras at 10 Hz).
CACHE_GB, FRAME_CACHE_GB = 100.0, 200.0

CACHE_DIR = Path(os.environ.get("VLA_CACHE", ".cache"))
# Timeout of the first request to an object store: no answer at all is more often a wrong name than an outage.
FIRST_ANSWER_TIMEOUT_S = 15.0
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vla-fine-tuning"
# Absolute, because read tasks have another working directory; files of settings leave a ~ to the program.
FRAMES_DIR = str(Path(os.environ.get("VLA_FRAMES_DIR") or _CACHE / "frames").expanduser().absolute())
# Folder of unpacked numeric columns (data/parquet_columns.py), a hundredth of the videos' size, and of up to as many
# bytes of encoded images. If the home folder is a network drive, VLA_NUMBERS_DIR and VLA_FRAMES_DIR should name a local
# disk.
DEFAULT_NUMBERS_DIR = str(_CACHE / "numbers")
NUMBERS_DIR = str(Path(os.environ.get("VLA_NUMBERS_DIR") or DEFAULT_NUMBERS_DIR).expanduser().absolute())


def number_from_environment(name: str, default: float, *, zero: bool = False) -> float:
    """Return the number in environment variable `name`, or `default`. Raises ValueError for an invalid one."""
    text = os.environ.get(name)
    if not text:
        return default
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf or (zero and number == 0):
            return number
    raise ValueError(f"{name}={text!r} in the environment: expected a number above 0{', or 0' * zero}")


def cache_gb(default: float) -> float:
    """Return the size of a cache on each node in 10^9 bytes: `VLA_CACHE_GB`, for each cache alike, or `default`."""
    return number_from_environment("VLA_CACHE_GB", default)


def numbers_limit_gb() -> float:
    """Return `VLA_NUMBERS_GB`, the size of the cache of numeric columns on each node; 0 disables it."""
    return number_from_environment("VLA_NUMBERS_GB", 20.0, zero=True)


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds, from `VLA_READ_TIMEOUT_S` and so on in the driver's environment.

    Attributes:
        read: a request to an object store with its retries. Longer than a restart of the store, about a minute.
        batch: waiting of a training process for its next batch, to detect a read that hangs. Longer than several
            requests of `read` each, and shorter than `collective`, so that the error names the cause.
        collective: a collective operation, to detect a stuck rank. Longer than the slowest batch or checkpoint of
            another rank.
        worker: an answer of a training process, or of a policy server after its policies are loaded. Longer than
            compiling kernels or loading weights.
        nodes: waiting for nodes with capacity for the workers; running nodes cost money meanwhile.
        store: failing uploads of checkpoints to the bucket of --output_dir, before the run stops and leaves its state
            on the node. One request times out after a tenth of it.
        step: a step of an environment, or a reset other than the first. Its process is then ended, and another one
            continues its episodes.
    """

    read: float = 120.0
    batch: float = 600.0
    collective: float = 900.0
    worker: float = 300.0
    nodes: float = 3600.0
    store: float = 1800.0
    step: float = 60.0

    @classmethod
    def from_environment(cls) -> Timeouts:
        """Return the timeouts in this process's environment. Raises ValueError for an invalid one."""
        names = [timeout.name for timeout in fields(cls)]
        return cls(
            **{name: number_from_environment(f"VLA_{name.upper()}_TIMEOUT_S", getattr(cls, name)) for name in names}
        )
