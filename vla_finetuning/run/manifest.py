"""Write and parse a checkpoint's `state.json`: the run's progress, and files with sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TRAINABLE, OPTIMIZER, AVERAGE, STATE = "trainable", "optimizer", "average", "state.json"
FORMAT = 3
FILE_NAME = rf"({TRAINABLE}|{OPTIMIZER}|{AVERAGE})(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors"
# Folder of an attempt's files of a checkpoint, next to `state.json`.
ATTEMPT_FOLDER = "attempt-{:05d}"


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None for another name."""
    return int(name.removeprefix("step_")) if re.fullmatch("step_[0-9]+", name) else None


@dataclass
class Progress:
    """Progress and identity of a run."""

    step: int  # completed optimizer steps
    rows: int  # end of the trained stream positions [0, rows)
    stream: dict[str, Any]  # `StreamPlan.identity()`
    base: dict[str, Any]  # path, revision and digest of the pretrained policy
    mode: str  # words on what trains (`PolicySpec.trained_part`)
    global_batch_size: int  # rows of an optimizer step
    loss: float | None = None  # mean of `LoopState.loss_of` since the last checkpoint; None if no step was logged
    eval_loss: float | None = None  # held-out loss of these weights, or None if not measured

    @property
    def score(self) -> tuple[float, float]:
        """Sort key, lower is better: held-out losses before training losses, NaN last."""
        losses = [math.inf if loss is None or math.isnan(loss) else loss for loss in (self.eval_loss, self.loss)]
        return losses[0], losses[1]


LOSS = (float, int, type(None))
PROGRESS_TYPES = {
    **dict.fromkeys(("step", "rows", "global_batch_size"), (int,)),
    **dict.fromkeys(("stream", "base"), (dict,)),
    **dict.fromkeys(("loss", "eval_loss"), LOSS),
    "mode": (str,),
}
# Files in state.json: {"trainable.safetensors": {"bytes": ..., "sha256": ...}}.
Files = dict[str, dict[str, Any]]


def manifest(progress: Progress, files: Files, attempt: int) -> dict[str, Any]:
    """Return the content of `state.json` of a checkpoint that an attempt wrote."""
    state = {"format": FORMAT, "files": files, "progress": asdict(progress), "attempt": attempt}
    return {**state, "sha256": _digest(state)}


def parsed(text: str | bytes) -> dict[str, Any]:
    """Parse `state.json`, and remove its checksum. Raises ValueError if it is damaged."""
    try:
        state = json.loads(text)
        if state["format"] != FORMAT:
            raise ValueError(
                f"format {state['format']}, this version reads {FORMAT}: finish the run with the version that began it"
            )
        if state.pop("sha256") != _digest(state):
            raise ValueError("its checksum is another")
        _check_form(state)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no {error}" if isinstance(error, KeyError) else str(error)) from error
    return state


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _check_form(state: Mapping[str, Any]) -> None:
    """Raise ValueError for content that `manifest` does not write: a checksum does not prove the author."""
    for name, written in state["files"].items():
        if not re.fullmatch(FILE_NAME, name):
            raise ValueError(f"{name!r:.100} is no file of a checkpoint")
        if type(written["bytes"]) is not int or type(written["sha256"]) is not str:
            raise ValueError(f"size and checksum of {name} are {written!r:.100}")
    if type(state["attempt"]) is not int:
        raise ValueError(f"attempt is {state['attempt']!r:.100}")
    progress = asdict(Progress(**state["progress"]))
    for name, expected in PROGRESS_TYPES.items():
        if type(progress[name]) not in expected:
            raise ValueError(f"{name} is {progress[name]!r:.100}")
