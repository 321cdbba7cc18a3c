"""Recover checkpoints that nodes could not upload to the run's bucket, when the run is resumed.

Each rank keeps its files of such a checkpoint, and other files that it has not sent, on its node's disk in
`checkpoint.partial_folder`. Rank 0's folder has `state.json`.
"""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vla_finetuning.buckets.mirror import keep_unsent, sizes, upload
from vla_finetuning.buckets.store import within
from vla_finetuning.files import file_digest, write_json
from vla_finetuning.run.attempts import is_newest
from vla_finetuning.run.checkpoint import (
    check_resumable,
    commit,
    forget_unsent,
    latest_checkpoint,
    load_progress,
    partial_folder,
    send,
    unsent,
)
from vla_finetuning.run.job import Job
from vla_finetuning.run.manifest import PREFIX, STATE, Files, Progress, manifest, parsed
from vla_finetuning.terminal import print_safe

logger = logging.getLogger(__name__)

SMALL_FILES = "unsent-{}"


class LocalCheckpoint(NamedTuple):
    """A node's files of a checkpoint with their sizes, and `state.json`, empty but on the node of rank 0."""

    host: str
    folder: str
    step: int
    files: dict[str, int]
    state: dict[str, Any]


# Runs functions on nodes by their ids, and returns the results.
OnNodes = Callable[[Mapping[str, Callable[[], Any]]], dict[str, Any]]


def keep_manifest(folder: Path, progress: Progress, files: Files, attempt: int) -> None:
    """Write `state.json` of an unsent checkpoint to the disk, for `recover_local_checkpoints`. Called by rank 0."""
    disk = partial_folder(folder)
    disk.mkdir(parents=True, exist_ok=True)
    write_json(disk / STATE, manifest(progress, files, attempt=attempt))


def keep_small_files(folder: Path, rank: int) -> None:
    """Copy this rank's other unsent files next to its files of an unsent checkpoint."""
    target = partial_folder(folder) / SMALL_FILES.format(rank)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    keep_unsent(folder.parent.parent, target)


def recover_local_checkpoints(job: Job, nodes: Iterable[str], on_nodes: OnNodes) -> int | None:
    """Send the newest unsent checkpoint of the nodes to the run's bucket. Return its step, or None without one.

    Runs on the driver, joined to the run's cluster, before the worker group starts. Raises ValueError if files are
    missing or have changed, or the checkpoint belongs to another run, and StorageError if the store does not answer.
    """
    checkpoints = job.checkpoints_dir
    by_node = on_nodes({node: partial(local_checkpoints, checkpoints) for node in nodes})
    newest = latest_checkpoint(checkpoints)
    done = 0 if newest is None else load_progress(newest).step
    candidates = [local for saved in by_node.values() for local in saved if local.state]
    usable = [local for local in candidates if _goes_on(local, job, done)]
    chosen = max(usable, key=lambda local: local.step, default=None)
    if chosen is not None:
        folder, state = checkpoints / f"{PREFIX}{chosen.step:08d}", chosen.state
        having = {node: [local for local in saved if local.step == chosen.step] for node, saved in by_node.items()}
        _require_all(chosen, [local for saved in having.values() for local in saved], done)
        sending = partial(send_local_checkpoint, folder, state, job.timeouts.store)
        on_nodes({node: sending for node, saved in having.items() if saved})
        commit(folder, Progress(**state["progress"]), state["files"], state["attempt"])
        print_safe(
            f"Recovered    the state of step {chosen.step}, from the disk of {chosen.host}, is in the bucket now"
        )
    if candidates:
        on_nodes({node: partial(forget_unsent, checkpoints) for node in by_node})
    return None if chosen is None else chosen.step


def local_checkpoints(checkpoints: Path) -> list[LocalCheckpoint]:
    """Return this node's files of unsent checkpoints."""
    stored = []
    for step, disk in sorted(unsent(checkpoints).items()):
        state: dict[str, Any] = {}
        try:
            if (disk / STATE).exists():
                state = parsed((disk / STATE).read_text())
        except (OSError, ValueError) as error:
            logger.warning("%s on %s cannot be read: %s", disk / STATE, socket.gethostname(), error)
        files = {file.name: file.stat().st_size for file in disk.iterdir() if file.is_file() and file.name != STATE}
        stored.append(LocalCheckpoint(socket.gethostname(), str(disk), step, files, state))
    return stored


def send_local_checkpoint(folder: Path, state: Mapping[str, Any], timeout_s: float) -> None:
    """Send this node's files of a checkpoint, and other unsent files of its ranks.

    Raises ValueError: a file has changed since it was written. StorageError: the store does not answer.
    """
    disk = partial_folder(folder)
    names = [name for name in state["files"] if (disk / name).is_file()]
    for name in names:
        if file_digest(disk / name) != state["files"][name]["sha256"]:
            raise ValueError(f"{socket.gethostname()}:{disk / name} has changed since it was written")
    with within(timeout_s):
        for small in sorted(disk.glob(SMALL_FILES.format("*"))):
            upload(small, sorted(sizes(small)), folder.parent.parent)
        send(folder, names, state["attempt"])


def _goes_on(local: LocalCheckpoint, job: Job, done: int) -> bool:
    """Return whether a checkpoint is newer than step `done` in the bucket, and belongs to the newest attempt."""
    progress = Progress(**local.state["progress"])
    if progress.step <= done or not is_newest(job.output_dir, local.state.get("attempt", -1)):
        return False
    try:
        check_resumable(progress, job.start)
    except ValueError as error:
        raise ValueError(f"the state of step {local.step} in {local.host}:{local.folder}: {error}") from error
    return True


def _require_all(chosen: LocalCheckpoint, everywhere: Iterable[LocalCheckpoint], done: int) -> None:
    stored = {item for local in everywhere for item in local.files.items()}
    missing = sorted(name for name, entry in chosen.state["files"].items() if (name, entry["bytes"]) not in stored)
    if missing:
        raise ValueError(
            f"the state of step {chosen.step}, which {chosen.host} could not send, lacks {', '.join(missing)}: bring "
            f"the nodes back that have them, or remove {chosen.folder} on {chosen.host} to go on from step {done}"
        )
