"""Limits that an operator may set by environment variables, and no recipe turns."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

# Size of a cache on each node, in 10^9 bytes: of fetched bytes, a few of LeRobot's larger datasets; of decoded frames
# (16 for every hour of three cameras of 224x224 at 10 Hz), and of features.
CACHE_GB, FRAME_CACHE_GB = 100.0, 200.0

CACHE_DIR = Path(os.environ.get("VLA_CACHE", ".cache"))
# The very first request to an object store has less time than others (environment.py): a store that does not answer at
# all is more often a wrong name than an outage.
FIRST_ANSWER_TIMEOUT_S = 15.0
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vla-fine-tuning"
FRAMES_DIR = os.environ.get("VLA_FRAMES_DIR") or str(_CACHE / "frames")
# Unpacked numbers of data files (data/parquet_columns.py), on every node's own disk: a hundredth of what the videos
# take. Beside them, up to as many bytes of images of data files, as they are encoded.
# Where the home folder is a network drive, VLA_NUMBERS_DIR and VLA_FRAMES_DIR should name a local disk.
DEFAULT_NUMBERS_DIR = str(_CACHE / "numbers")
NUMBERS_DIR = os.environ.get("VLA_NUMBERS_DIR") or DEFAULT_NUMBERS_DIR


def number_from_environment(name: str, default: float, *, zero: bool = False) -> float:
    """Return the number that an environment variable is set to, or the default. Raises ValueError if it is invalid."""
    text = os.environ.get(name)
    if not text:
        return default
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf or (zero and number == 0):
            return number
    raise ValueError(f"{name}={text!r} in the environment: expected a number above 0{', or 0' * zero}")


def cache_gb(default: float) -> float:
    """Return the size of a cache on each node: `VLA_CACHE_GB`, which applies to each of them, or the default."""
    return number_from_environment("VLA_CACHE_GB", default)


def numbers_limit_gb() -> float:
    """Return `VLA_NUMBERS_GB`: the size of the cache of numbers on each node; 0: there is none."""
    return number_from_environment("VLA_NUMBERS_GB", 20.0, zero=True)


@dataclass(frozen=True)
class Timeouts:
    """How many seconds a run waits for what may never come; `VLA_READ_TIMEOUT_S` and so on in the driver's environment.

    Attributes:
        read: a request to an object store, with its retries. Long enough to sit out an overload or a restart of the
            store (half a minute to a minute), short enough that a run reports a lost store while its user is watching.
        batch: a training process for its next batch, as nothing else notices a read that hangs. Longer than several
            requests that each take all of `read`, shorter than `collective`, after which the other ranks could only
            say that this one is missing.
        collective: a collective, because a rank is stuck. Longer than the slowest batch or checkpoint that the other
            ranks may have to wait for.
        worker: an answer of a training process. Longer than any pause that is not a fault: compiling kernels and
            loading weights keep a process from answering for tens of seconds.
        nodes: nodes with capacity for the workers. Longer than an autoscaler usually takes to bring a node, and a spot
            instance or a machine that restarts to come back; what still runs is paid for meanwhile.
        store: checkpoints that fail to reach the bucket of --output_dir, before the run stops and leaves its state on
            the node; a request is given up after a tenth of it.
        step: a step of an environment, or a reset but the first; its process then ends, and its episodes go on in
            another.
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
        """Return what the environment of this process says. Raises ValueError if that is invalid."""
        names = [of.name for of in fields(cls)]
        return cls(
            **{name: number_from_environment(f"VLA_{name.upper()}_TIMEOUT_S", getattr(cls, name)) for name in names}
        )
