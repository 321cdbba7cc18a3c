"""What a run leaves behind: checkpoints that hold only what trains, and the position in the run's stream of rows.

A checkpoint folder::

    trainable.safetensors    the parameters that train, by their names in the policy
    optimizer.safetensors    Adam's state, `exp_avg.<name>`, `exp_avg_sq.<name>`, `step.<name>`
    state.json               step, rows trained, the stream they were drawn from, the base policy, checksums

Nothing is pickled. torch is imported where tensors are read or written, because processes of Ray that only look for
progress should not have to load it. Randomness needs no state: noise, times and row order are functions of (seed,
step) or of (seed, position). Knows nothing of how a step is computed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

TRAINABLE, OPTIMIZER, STATE = "trainable.safetensors", "optimizer.safetensors", "state.json"
FORMAT = 1
PREFIX = "step_"
# Left free on the disk after a checkpoint, for logs and everybody else.
SPARE_BYTES = 256 * 2**20


@dataclass
class Progress:
    """How far a run is, and what it is a run of.

    step: optimizer steps done. rows: stream positions [0, rows) have been trained. stream: `StreamPlan.identity()`.
    base: the pretrained policy (path, revision, digest of its weights). mode: what trains.
    """

    step: int
    rows: int
    stream: dict[str, Any]
    base: dict[str, Any]
    mode: str
    global_batch_size: int


@dataclass
class Checkpoint:
    progress: Progress
    trainable: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into `folder` (made if absent). `state.json` comes last: without it, it is none.

    Raises:
        OSError: the disk is full; says how much was needed. Nothing half-written is left.
    """
    from safetensors.torch import save_file

    tensors = {TRAINABLE: checkpoint.trainable, OPTIMIZER: checkpoint.optimizer}
    needed = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
    require_space(folder.parent, needed, "a checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        digests = {}
        for name, group in tensors.items():
            save_file({k: t.detach().cpu().contiguous() for k, t in group.items()}, folder / name)
            digests[name] = file_digest(folder / name)
        state = {"format": FORMAT, "sha256": digests, "progress": asdict(checkpoint.progress)}
        write_json(folder / STATE, state)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"checkpoint not written to {folder} ({needed / 1e9:.2f} GB needed): {error}") from error


def load_progress(folder: Path) -> Progress:
    """Only `state.json`. Raises ValueError when it is missing or damaged."""
    return Progress(**_state(folder)["progress"])


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify. Raises ValueError naming the file that is missing, damaged or not what was written."""
    from safetensors.torch import load_file

    state = _state(folder)
    _verify(folder, state)
    return Checkpoint(Progress(**state["progress"]), load_file(folder / TRAINABLE), load_file(folder / OPTIMIZER))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that is whole; None when there is none.

    One that is not (a crash while writing, a damaged disk) is reported and the one before is taken.
    """
    if not folder.is_dir():
        return None
    for path in sorted((p for p in folder.iterdir() if p.name.startswith(PREFIX)), reverse=True):
        try:
            state = _state(path)
            _verify(path, state)
            return path
        except ValueError as error:
            logger.warning("%s; taking the one before", error)
    return None


def check_resumable(
    found: Progress, stream: Mapping[str, Any], base: Mapping[str, Any], mode: str, global_batch_size: int
) -> None:
    """Refuse to go on with another run's checkpoint, saying what differs."""
    if found.global_batch_size != global_batch_size:
        raise ValueError(
            f"batch_size x grad_accum x num_workers is {global_batch_size}, but the run was started with "
            f"{found.global_batch_size}: its steps and learning rates would mean something else; choose numbers with "
            "the same product"
        )
    if found.mode != mode:
        raise ValueError(
            f"--train.mode is {mode}, but the run was started with {found.mode}: what trains cannot change"
        )
    if found.base.get("digest") != base.get("digest"):
        raise ValueError(
            f"the base policy is not the one the run was started from: {base.get('path')} has digest "
            f"{base.get('digest')}, the checkpoint expects {found.base.get('digest')} ({found.base.get('path')})"
        )
    differing = {k: (found.stream.get(k), v) for k, v in stream.items() if found.stream.get(k) != v}
    if differing:
        told = "; ".join(f"{k}: was {was}, is {now}" for k, (was, now) in differing.items())
        raise ValueError(
            f"the data is not what the run was started with ({told}), so which rows are left cannot be told; "
            "start a new run with --policy.path set to this run's pretrained_model"
        )


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises OSError when the disk of `folder` cannot take `needed_bytes` more."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + SPARE_BYTES:
        raise OSError(
            f"no space for {what} in {folder}: {needed_bytes / 1e9:.2f} GB needed (and {SPARE_BYTES / 1e9:.2f} GB "
            f"spare), {free / 1e9:.2f} GB free; make room or choose another --output_dir"
        )


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Atomically: readers see the old file or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(scratch, path)


def _state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        state = json.loads(path.read_text())
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, this version reads {FORMAT}")
        Progress(**state["progress"])
        return state
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint {folder}: {STATE} is missing or damaged ({error})") from error


def _verify(folder: Path, state: Mapping[str, Any]) -> None:
    for name in (TRAINABLE, OPTIMIZER):
        path = folder / name
        if not path.is_file() or file_digest(path) != state["sha256"].get(name):
            raise ValueError(f"checkpoint {folder}: {name} is missing, truncated or changed since it was written")
