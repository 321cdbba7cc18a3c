"""Checkpoints in a bucket.

A checkpoint is there when its `state.json` is, which is put last, and is not believed otherwise::

    checkpoints/step_00000200/state.json               names the files below, with sizes and checksums
    checkpoints/.parts/step_00000200-00003/...         the files, of attempt 3; of each attempt in its own folder

An attempt that is over cannot commit: `state.json` replaces none of a later attempt, and says which attempt wrote it.
One that an attempt wrote after a later attempt had resumed from an earlier step is void, as its lines are, whenever it
came in. Files that no `state.json` names are removed when an attempt starts.

A folder of a checkpoint from a disk (`state.json` and its files) that was copied to `checkpoints/` is one, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from vla_finetuning.bucket import BucketPath
from vla_finetuning.files import write_json
from vla_finetuning.lines import waiting_lines
from vla_finetuning.node_disk import on_disk, scratch
from vla_finetuning.run.attempts import attempts, resumed_at
from vla_finetuning.run.manifest import PARTIAL, PREFIX, STATE, Files, Progress, file_digest, manifest, parsed, step_of
from vla_finetuning.store import ChangedError

logger = logging.getLogger(__name__)

PARTS = ".parts"
LINES_PREFIX = "lines-"


def disk_of(folder: BucketPath) -> Path:
    """This node's folder for files of checkpoints that are to be sent."""
    return scratch(folder.parent) / "checkpoints"


def send(folder: BucketPath, disk: Path, files: Iterable[str], attempt: int) -> None:
    """Put files of a checkpoint that `commit` will make appear at `folder`.

    Args:
        disk: where they are on this node. attempt: whose they are.
    Raises:
        StorageError: the store refuses, or does not answer.
    """
    for name in files:
        (_parts(folder, attempt) / name).upload(disk / name)


def keep(folder: BucketPath, disk: Path, progress: Progress, files: Files, attempt: int) -> None:
    """Leave a checkpoint that cannot be sent on nodes' disks, for `kept.bring_in`. On rank 0."""
    write_json(disk / STATE, manifest(progress, files, attempt=attempt))


def keep_lines(folder: BucketPath, disk: Path, rank: int) -> None:
    """Beside the files of a checkpoint that cannot be sent: the lines that this process has yet to write."""
    disk.mkdir(parents=True, exist_ok=True)
    write_json(disk / f"{LINES_PREFIX}{rank}.json", waiting_lines(folder.parent.parent))


def staged(checkpoints: BucketPath) -> dict[int, Path]:
    """This node's folders with files of checkpoints, by their steps; not copies by other names."""
    found = disk_of(checkpoints / PREFIX).glob(f"{PARTIAL}*")
    return {step: path for path in found if (step := step_of(path.name.removeprefix(PARTIAL))) is not None}


def forget(checkpoints: BucketPath, before: float = math.inf) -> None:
    """Remove what this node has of checkpoints, kept or not; of steps before that one."""
    for step, disk in staged(checkpoints).items():
        if step < before:
            shutil.rmtree(disk, ignore_errors=True)


def commit(folder: BucketPath, progress: Progress, files: Files, attempt: int) -> None:
    """Have a checkpoint appear whose files are all sent.

    Raises:
        RuntimeError: a later attempt goes on with the run.
        StorageError: the store refuses, or does not answer.
    """
    parts = _parts(folder, attempt).name
    data = json.dumps(manifest(progress, files, attempt=attempt, parts=parts), indent=2).encode() + b"\n"
    output_dir, path = folder.parent.parent, folder / STATE
    over = RuntimeError(f"{output_dir}: another process goes on with this run; {folder.name} is not written")
    tag = ""
    with contextlib.suppress(FileNotFoundError):
        found, tag = path.read_tagged()
        with contextlib.suppress(ValueError):
            if parsed(found).get("attempt", -1) > attempt:
                raise over
    if len(attempts(output_dir)) != attempt + 1:
        raise over
    try:
        path.put(data, tag=tag)
    except ChangedError as error:
        raise over from error


def read(folder: BucketPath) -> dict[str, Any]:
    """Return what `state.json` says, of a checkpoint that counts and whose files have the sizes written.

    Raises:
        ValueError: it is missing, damaged or void, or files are. StorageError: the store does not answer.
    """
    try:
        state = parsed((folder / STATE).read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"checkpoint {folder}: {STATE} is missing or damaged ({error})") from error
    if (counts := _void_after(state, attempts(folder.parent.parent))) is not None:
        raise ValueError(f"checkpoint {folder}: void, a later attempt went on from step {counts} without it")
    found = _files(folder, state).below()
    for name, written in state["files"].items():
        if name not in found or found[name].size != written["bytes"]:
            raise ValueError(f"checkpoint {folder}: {name} is missing or truncated")
    return state


def unusable(checkpoints: BucketPath) -> list[str]:
    """Names of checkpoints that were whole once and cannot be read now; not of void ones."""
    starts, names = attempts(checkpoints.parent), list[str]()
    for folder in sorted(checkpoints.glob(f"{PREFIX}*")):
        if step_of(folder.name) is None:
            continue
        try:
            read(folder)
        except ValueError:
            with contextlib.suppress(FileNotFoundError, ValueError):
                if _void_after(parsed((folder / STATE).read_bytes()), starts) is not None:
                    continue
            names.append(folder.name)
    return names


def _void_after(state: dict[str, Any], starts: list[dict[str, int]]) -> int | None:
    """The step that a later attempt went on from without this checkpoint; None where it counts."""
    counts = resumed_at(starts, state["attempt"]) if "attempt" in state else None
    return counts if counts is not None and state["progress"]["step"] > counts else None


def on_this_node(folder: Path, kinds: Collection[str]) -> contextlib.AbstractContextManager[Path]:
    """While the block runs: a checkpoint in a folder on a disk, itself or of all files those of `kinds`.

    Raises:
        ValueError: it is not what was written. StorageError: the store does not answer.
    """

    def fetch(target: Path) -> None:
        assert isinstance(folder, BucketPath)
        state = read(folder)
        source = _files(folder, state)
        files = {name: of for name, of in state["files"].items() if name.startswith(tuple(kinds))}
        found = source.below()
        needed, free = sum(of["bytes"] for of in files.values()), shutil.disk_usage(target).free
        if free < needed:
            raise OSError(
                f"no space for {folder} in {target}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free; free some "
                "or set TMPDIR to a larger disk on every node"
            )
        for name, written in files.items():
            (source / name).download(target / name, found[name])
            if file_digest(target / name) != written["sha256"]:
                raise ValueError(f"checkpoint {folder}: {name} has changed since it was written")
        write_json(target / STATE, manifest(Progress(**state["progress"]), files))

    return on_disk(folder, fetch, "-".join(["fetched", *sorted(kinds)]))


def delete(folder: BucketPath) -> None:
    """Remove a checkpoint: `state.json` first, so that there never is half of one."""
    try:
        files = _files(folder, parsed((folder / STATE).read_bytes()))
    except (FileNotFoundError, ValueError):
        files = folder
    (folder / STATE).unlink(missing_ok=True)
    files.remove_tree()


def sweep(checkpoints: BucketPath) -> None:
    """Remove what attempts left that died while they wrote, and what is void. Call it in one process."""
    starts = attempts(checkpoints.parent)
    named, unknown = set(), set()
    for folder in checkpoints.glob(f"{PREFIX}*"):
        try:
            state = parsed((folder / STATE).read_bytes())
        except (FileNotFoundError, ValueError):
            unknown.add(folder.name)  # a person may want to look at it
            continue
        if _void_after(state, starts) is not None:
            delete(folder)
        elif "parts" in state:
            named.add(state["parts"])
    for parts in (checkpoints / PARTS).iterdir():
        if parts.name not in named and parts.name.partition("-")[0] not in unknown:
            parts.remove_tree()
    checkpoints.store.abort_uploads(checkpoints.key)


def _parts(folder: BucketPath, attempt: int) -> BucketPath:
    return folder.parent / PARTS / f"{folder.name}-{attempt:05d}"


def _files(folder: BucketPath, state: dict[str, Any]) -> BucketPath:
    """Return the folder of a checkpoint's files."""
    return folder.parent / PARTS / state["parts"] if "parts" in state else folder
