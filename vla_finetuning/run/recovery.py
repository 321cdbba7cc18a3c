"""Recover checkpoints that nodes could not upload to the run's bucket, when the run is resumed.

Each node keeps what its ranks have not sent of such a checkpoint, their other files too, in a folder on its disk, under
the names in the run's folder. Rank 0's node also has its `state.json`.
"""

from __future__ import annotations

import logging
import math
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vla_finetuning.buckets.mirror import scratch, sizes, upload
from vla_finetuning.buckets.store import within
from vla_finetuning.files import file_digest, write_json
from vla_finetuning.run.attempts import is_newest
from vla_finetuning.run.checkpoint import (
    attempt_folder,
    check_resumable,
    commit,
    latest_checkpoint,
    load_progress,
)
from vla_finetuning.run.job import Job
from vla_finetuning.run.manifest import STATE, Files, Progress, checkpoint_name, manifest, parsed, step_of
from vla_finetuning.terminal import print_safe

logger = logging.getLogger(__name__)


class LocalCheckpoint(NamedTuple):
    """A node's unsent files with their sizes, and the checkpoint's `state.json`, empty but on the node of rank 0."""

    host: str
    folder: str
    step: int
    files: dict[str, int]
    state: dict[str, Any]


# Runs functions on nodes by their ids, and returns the results.
OnNodes = Callable[[Mapping[str, Callable[[], Any]]], dict[str, Any]]


def unsent_folder(folder: Path) -> Path:
    """Return the folder on this node's disk for files of the run that do not reach the bucket by the checkpoint."""
    return scratch(folder.parent) / folder.name


def unsent(checkpoints: Path) -> dict[int, Path]:
    """Return this node's folders with unsent files, by step."""
    return {step: path for path in scratch(checkpoints).iterdir() if (step := step_of(path.name)) is not None}


def forget_unsent(checkpoints: Path, before: float = math.inf) -> None:
    """Remove this node's unsent files of checkpoints of steps less than `before`."""
    for step, path in unsent(checkpoints).items():
        if step < before:
            shutil.rmtree(path, ignore_errors=True)


def keep_manifest(folder: Path, progress: Progress, files: Files, attempt: int) -> None:
    """Write `state.json` of an unsent checkpoint to the disk, for `recover_local_checkpoints`. Called by rank 0."""
    unsent_folder(folder).mkdir(exist_ok=True)
    write_json(unsent_folder(folder) / STATE, manifest(progress, files, attempt))


def recover_local_checkpoints(job: Job, nodes: Iterable[str], on_nodes: OnNodes) -> int | None:
    """Send the newest unsent checkpoint of the nodes to the run's bucket. Return its step, or None without one.

    Runs on the driver, joined to the run's cluster, before the worker group starts. Raises ValueError if files are
    missing or have changed, or the checkpoint belongs to another run, and StorageError if the store does not answer.
    """
    checkpoints = job.checkpoints_dir
    by_node = on_nodes({node: partial(local_checkpoints, checkpoints) for node in nodes})
    candidates = [local for saved in by_node.values() for local in saved if local.state]
    if not candidates:
        return None
    newest = latest_checkpoint(checkpoints)
    done = 0 if newest is None else load_progress(newest).step
    usable = [local for local in candidates if _goes_on(local, job, done)]
    chosen = max(usable, key=lambda local: local.step, default=None)
    if chosen is not None:
        folder, state = checkpoints / checkpoint_name(chosen.step), chosen.state
        having = {node: [local for local in saved if local.step == chosen.step] for node, saved in by_node.items()}
        _require_all(chosen, folder, [local for saved in having.values() for local in saved], done)
        sending = partial(send_local_checkpoint, folder, state, job.timeouts.store)
        on_nodes({node: sending for node, saved in having.items() if saved})
        commit(folder, Progress(**state["progress"]), state["files"], state["attempt"])
        print_safe(
            f"Recovered    the state of step {chosen.step}, from the disk of {chosen.host}, is in the bucket now"
        )
    on_nodes({node: partial(forget_unsent, checkpoints) for node in by_node})
    return None if chosen is None else chosen.step


def local_checkpoints(checkpoints: Path) -> list[LocalCheckpoint]:
    """Return this node's unsent files by checkpoint."""
    stored = []
    for step, disk in sorted(unsent(checkpoints).items()):
        state: dict[str, Any] = {}
        try:
            if (disk / STATE).exists():
                state = parsed((disk / STATE).read_text())
        except (OSError, ValueError) as error:
            logger.warning("%s on %s cannot be read: %s", disk / STATE, socket.gethostname(), error)
        stored.append(LocalCheckpoint(socket.gethostname(), str(disk), step, sizes(disk), state))
    return stored


def send_local_checkpoint(folder: Path, state: Mapping[str, Any], timeout_s: float) -> None:
    """Send this node's unsent files of a checkpoint and of its ranks.

    Raises ValueError: a file has changed since it was written. StorageError: the store does not answer.
    """
    disk, output_dir = unsent_folder(folder), folder.parent.parent
    for name, written in _files(folder, state).items():
        if (disk / name).is_file() and file_digest(disk / name) != written["sha256"]:
            raise ValueError(f"{socket.gethostname()}:{disk / name} has changed since it was written")
    with within(timeout_s):
        upload(disk, sorted(sizes(disk).keys() - {STATE}), output_dir)


def _files(folder: Path, state: Mapping[str, Any]) -> Files:
    """Return the files of a checkpoint by their names in the run's folder."""
    inside = attempt_folder(folder, state["attempt"]).relative_to(folder.parent.parent)
    return {str(inside / name): written for name, written in state["files"].items()}


def _goes_on(local: LocalCheckpoint, job: Job, done: int) -> bool:
    """Return whether a checkpoint is newer than step `done` in the bucket, and belongs to the newest attempt."""
    progress = Progress(**local.state["progress"])
    if progress.step <= done or not is_newest(job.output_dir, local.state["attempt"]):
        return False
    try:
        check_resumable(progress, job.start)
        if progress.step > job.steps:
            raise ValueError(f"{progress.step} steps are done, and the run has {job.steps}: ask for as many at least")
    except ValueError as error:
        raise ValueError(f"the state of step {local.step} in {local.host}:{local.folder}: {error}") from error
    return True


def _require_all(chosen: LocalCheckpoint, folder: Path, everywhere: Iterable[LocalCheckpoint], done: int) -> None:
    stored = {item for local in everywhere for item in local.files.items()}
    files = _files(folder, chosen.state).items()
    missing = sorted(Path(name).name for name, entry in files if (name, entry["bytes"]) not in stored)
    if missing:
        raise ValueError(
            f"the state of step {chosen.step}, which {chosen.host} could not send, lacks {', '.join(missing)}: bring "
            f"the nodes back that have them, or remove {chosen.folder} on {chosen.host} to go on from step {done}"
        )
