"""Checkpoints that a run in a bucket left on nodes' disks while the store was away: sent when the run goes on.

Each rank's files of such a checkpoint, and the lines that it had yet to write, are on the disk of its node, in
`bucket_checkpoint.disk_of`; `state.json` is beside rank 0's.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from vla_finetuning.bucket import BucketPath
from vla_finetuning.lines import write_waiting
from vla_finetuning.run import bucket_checkpoint
from vla_finetuning.run.attempts import attempts
from vla_finetuning.run.bucket_checkpoint import LINES_PREFIX
from vla_finetuning.run.checkpoint import check_resumable, latest_checkpoint, load_progress, partial_folder
from vla_finetuning.run.job import Job
from vla_finetuning.run.manifest import PREFIX, STATE, Progress, file_digest, parsed
from vla_finetuning.store import within
from vla_finetuning.terminal import tell

logger = logging.getLogger(__name__)


class Kept(NamedTuple):
    """What a node has of a checkpoint: its files with their bytes, and what `state.json` says where that is, too."""

    host: str
    disk: str
    step: int
    files: dict[str, int]
    state: dict[str, Any] | None


# Runs a function on each of some nodes, by their ids.
OnNodes = Callable[[Mapping[str, Callable[[], Any]]], dict[str, Any]]


def bring_in(job: Job, nodes: Iterable[str], on_nodes: OnNodes) -> int | None:
    """Have the newest checkpoint that nodes have kept appear in the run's bucket; its step, None where there is none.

    Runs on the driver, joined to the run's cluster, before the worker group starts.

    Raises:
        ValueError: files of it are on nodes that are not there, or have changed; it is of another run.
        StorageError: the store does not answer.
    """
    checkpoints = job.checkpoints_dir
    assert isinstance(checkpoints, BucketPath)
    found = on_nodes({node: partial(look, checkpoints) for node in nodes})
    newest = latest_checkpoint(checkpoints)
    done = 0 if newest is None else load_progress(newest).step
    whole = [kept for of_node in found.values() for kept in of_node if kept.state is not None]
    kept = max((one for one in whole if _goes_on(one, job, done)), key=lambda one: one.step, default=None)
    step = None
    if kept is not None and kept.state is not None:
        step, state = kept.step, kept.state
        parts = {node: [one for one in of_node if one.step == step] for node, of_node in found.items()}
        parts = {node: own for node, own in parts.items() if own}
        _require_all(kept, [one for own in parts.values() for one in own], done)
        folder = checkpoints / f"{PREFIX}{step:08d}"
        sending = partial(send_here, folder, state, job.timeouts.store)
        on_nodes({node: sending for node in parts})
        bucket_checkpoint.commit(folder, Progress(**state["progress"]), state["files"], state["attempt"])
        tell(f"Kept         the state of step {step}, from the disk of {kept.host}, is in the bucket now")
    if whole:
        on_nodes({node: partial(bucket_checkpoint.forget, checkpoints) for node in found})
    return step


def look(checkpoints: BucketPath) -> list[Kept]:
    """Return what this node has of checkpoints of a run."""
    found = []
    for step, disk in sorted(bucket_checkpoint.staged(checkpoints).items()):
        state = None
        try:
            state = parsed((disk / STATE).read_text())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("%s on %s cannot be read: %s", disk / STATE, socket.gethostname(), error)
        files = {file.name: file.stat().st_size for file in disk.iterdir() if file.name != STATE}
        found.append(Kept(socket.gethostname(), str(disk), step, files, state))
    return found


def send_here(folder: BucketPath, state: Mapping[str, Any], timeout_s: float) -> None:
    """Send what this node has of a checkpoint, and the lines that its ranks had yet to write.

    Raises:
        ValueError: a file is not what was written. StorageError: the store does not answer.
    """
    disk = partial_folder(folder)
    names = [name for name in state["files"] if (disk / name).is_file()]
    for name in names:
        if file_digest(disk / name) != state["files"][name]["sha256"]:
            raise ValueError(f"{socket.gethostname()}:{disk / name} has changed since it was written")
    with within(timeout_s):
        for lines in sorted(disk.glob(f"{LINES_PREFIX}*")):
            write_waiting(folder.parent.parent, json.loads(lines.read_text()))
        bucket_checkpoint.send(folder, disk, names, state["attempt"])


def _goes_on(kept: Kept, job: Job, done: int) -> bool:
    """Return whether the run can go on from it: newer than what is in the bucket, and nobody went on without it."""
    assert kept.state is not None
    progress = Progress(**kept.state["progress"])
    if progress.step <= done or len(attempts(job.output_dir)) != kept.state.get("attempt", -1) + 1:
        return False
    try:
        check_resumable(progress, job.start)
    except ValueError as error:
        raise ValueError(f"the state of step {kept.step}, kept in {kept.host}:{kept.disk}: {error}") from error
    return True


def _require_all(kept: Kept, parts: Iterable[Kept], done: int) -> None:
    assert kept.state is not None
    sizes = [(name, size) for part in parts for name, size in part.files.items()]
    missing = sorted(name for name, of in kept.state["files"].items() if (name, of["bytes"]) not in sizes)
    if missing:
        raise ValueError(
            f"the state of step {kept.step}, kept on {kept.host} while the store was away, lacks {', '.join(missing)}: "
            f"bring the nodes back that have them, or remove {kept.disk} on {kept.host} to go on from step {done}"
        )
