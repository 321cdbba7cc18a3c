"""Write, read, check and prune checkpoints, which hold trained tensors and the position in the stream of rows.

A checkpoint folder::

    state.json                             step, rows trained, the stream of rows, the base policy, sizes and checksums
    attempt-00003/trainable.safetensors    trained parameters, by their names in the policy
    attempt-00003/optimizer.safetensors    Adam's state, `exp_avg.<name>`, `exp_avg_sq.<name>`, `step.<name>`
    attempt-00003/average.safetensors      averages of trained parameters, `average.<name>`, with --ema.enable

With FSDP2, every process writes its shard: `trainable-00001-of-00008.safetensors` and so on. This is the layout of
torch.distributed.checkpoint's safetensors storage, whose reader loads it into any number of processes. (Its default
storage writes a pickle.)

Each attempt writes its own folder. A checkpoint exists when its `state.json` does, which is written last and names the
attempt. It never replaces the file of a later attempt. A checkpoint is void if a later attempt has resumed from an
earlier step.

torch is imported where tensors are read or written, because processes of Ray that only read progress need not load it.
Random generators have no state: noise, times and row order are functions of (seed, step) or of (seed, position).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from vla_finetuning.buckets.mirror import (
    REMOVED,
    abort_uploads,
    address,
    fetched,
    free_bytes,
    pull,
    push,
    read_stored,
    remove,
    sizes,
)
from vla_finetuning.buckets.store import ChangedError, StorageError
from vla_finetuning.files import file_digest, let_others_read, write_json
from vla_finetuning.options.grpo import CRITIC
from vla_finetuning.run.attempts import ATTEMPTS_NAME, attempts, resumed_at
from vla_finetuning.run.manifest import (
    ATTEMPT_FOLDER,
    AVERAGE,
    OPTIMIZER,
    STATE,
    TRAINABLE,
    Files,
    Progress,
    manifest,
    parsed,
    step_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)
# Limit of safetensors itself.
MAX_HEADER_BYTES = 100_000_000
# Shares of episodes that succeeded at any time, and at their end, which breaks ties.
Success = tuple[float, float]

DAMAGED = "damaged_"
# Space to leave on the disk after a checkpoint, for logs and other programs.
SPARE_BYTES = 256 * 2**20


class Piece(NamedTuple):
    """A shard of a tensor, and its offset in the whole for each dimension."""

    values: Tensor
    offsets: tuple[int, ...]


class Staging:
    """Host memory for the copies of all checkpoints of an attempt, pinned for tensors on a GPU.

    A thread allocates it while training begins. PyTorch's stager pins the exact bytes of a storage; `pin_memory` rounds
    each up to a power of two.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        from torch.distributed.checkpoint._state_dict_stager import StateDictStager  # torch 2.11's own `DefaultStager`

        self._gpu = self._gpu_of(tensors)
        self._stager = StateDictStager(pin_memory=self._gpu is not None)
        thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._made = thread.submit(self._make, tensors)
        thread.shutdown(wait=False)

    @staticmethod
    def _gpu_of(tensors: Mapping[str, Tensor]) -> torch.device | None:
        return next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)

    def _make(self, tensors: Mapping[str, Tensor]) -> None:
        import torch

        if self._gpu is not None:
            # A thread begins on device 0, where pinning makes a context: half a GiB for each other rank.
            torch.cuda.set_device(self._gpu)
            torch.cuda.set_stream(torch.cuda.Stream())  # its copies do not delay steps
        try:
            self._stage(tensors)
        except RuntimeError as error:
            if not self._stager.pin_memory:
                raise
            logger.warning("memory for checkpoints cannot be pinned (%s): each takes a while longer", error)
            self._stager.pin_memory = False
            self._stage(tensors)
        if self._gpu is not None:
            torch.cuda.current_stream().synchronize()

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies by name. Copies from a GPU are complete after a synchronization of the device."""
        self._made.result()
        return self._stage(tensors)

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._stager.stage({name: tensor.detach() for name, tensor in tensors.items()}, non_blocking=True)

    def close(self) -> None:
        """Free the memory, when no copies are referenced."""
        self._made.result()
        self._stager.close()


def write_pieces(
    folder: Path, pieces: Mapping[str, Mapping[str, Piece]], number: int = 0, count: int = 1, attempt: int = 0
) -> Files:
    """Write one process's files of the checkpoint `folder` to a disk, this node's for a bucket.

    `pieces` has tensors under TRAINABLE, OPTIMIZER and AVERAGE, by name. `number` is the index of this process among
    the `count` writers. Raises OSError for a full disk, and says how much was needed.
    """
    from safetensors.torch import save_file

    needed = sum(piece.values.nbytes for group in pieces.values() for piece in group.values())
    target = attempt_folder(folder, attempt)
    require_space_to_write(target, needed)
    files: Files = {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for group_name, group in pieces.items():
            path = target / _file_name(group_name, number, count)
            nonempty = {name: piece for name, piece in group.items() if piece.values.numel()}
            offsets = {name: {"saved_offsets": piece.offsets} for name, piece in nonempty.items()}
            save_file(
                {name: piece.values.detach().cpu().contiguous() for name, piece in nonempty.items()},
                path,
                metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)},
            )
            let_others_read(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
            _to_disk(path)
        _to_disk(target)
    except (OSError, SafetensorError) as error:
        raise OSError(f"checkpoint not written to {address(folder)} ({needed / 1e9:.2f} GB needed): {error}") from error
    return files


def commit(folder: Path, progress: Progress, files: Files, attempt: int) -> None:
    """Complete the checkpoint `folder` atomically, after all processes have sent their `files`.

    Raises RuntimeError: a checkpoint of a later attempt exists. StorageError: the store refuses or does not answer.
    """
    path, partial = folder / STATE, folder / f".{STATE}"
    pull(path)
    with contextlib.suppress(OSError, ValueError):
        if parsed(path.read_text())["attempt"] > attempt:
            raise superseded(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(partial, manifest(progress, files, attempt))
    _to_disk(partial)
    os.replace(partial, path)
    for parent in (folder, folder.parent):
        _to_disk(parent)
    try:
        push(path, only_if_unchanged=True)
    except StorageError as error:
        path.unlink(missing_ok=True)  # else a later sync would send it
        if isinstance(error, ChangedError):
            raise superseded(folder) from error
        raise


def superseded(folder: Path) -> RuntimeError:
    """Return the error of an attempt that is over and must not write the checkpoint `folder`."""
    url = address(folder.parent.parent)
    return RuntimeError(f"{url}: another process has taken over this run; {folder.name} is not written")


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Return the folder of an attempt's files of the checkpoint `folder`."""
    return folder / ATTEMPT_FOLDER.format(attempt)


def _file_name(group_name: str, number: int, count: int) -> str:
    return f"{group_name}.safetensors" if count == 1 else f"{group_name}-{number + 1:05d}-of-{count:05d}.safetensors"


def load_progress(folder: Path) -> Progress:
    """Read `state.json`. Raises ValueError if it is missing or damaged, or a file has the wrong size."""
    return Progress(**_state(folder)["progress"])


def load_checkpoint(
    folder: Path,
    trainable: Mapping[str, Tensor] | None,
    optimizer: Mapping[str, Tensor] | None = None,
    average: Mapping[str, Tensor] | None = None,
) -> Progress:
    """Read a checkpoint into existing tensors or DTensors, by their names.

    Each process reads its own shards, for any number of processes that wrote the checkpoint. Kinds that are None are
    skipped. Raises ValueError if files are damaged or missing, or names or shapes differ from the checkpoint's, and
    OSError if the disk cannot be read.
    """
    kinds = {TRAINABLE: trainable, OPTIMIZER: optimizer, AVERAGE: average}
    requested = {group_name: tensors for group_name, tensors in kinds.items() if tensors is not None}
    state = _state(folder)
    stored = attempt_folder(folder, state["attempt"])
    files = {name: written for name, written in state["files"].items() if name.startswith(tuple(requested))}

    def check(target: Path) -> None:
        for name, written in files.items():
            if file_digest(target / name) != written["sha256"]:
                raise ValueError(
                    f"checkpoint {address(folder)}: {name} has changed since it was written; "
                    "remove the folder to go on from the one before"
                )

    with fetched(stored, files.__contains__, check) as local:
        _load(folder, local, files, requested)
    return Progress(**state["progress"])


def _load(folder: Path, local: Path, files: Iterable[str], requested: Mapping[str, Mapping[str, Tensor]]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        for group_name, tensors in requested.items():
            saved = _names(local, files, group_name)
            if group_name == AVERAGE and not saved:
                raise ValueError("it was written without an average of the weights: start without --ema.enable")
            if group_name == TRAINABLE and not any(name.startswith(CRITIC) for name in tensors):
                saved = {name for name in saved if not name.startswith(CRITIC)}  # only the policy's tensors are loaded
            if saved != tensors.keys():
                differing = sorted(saved ^ tensors.keys())[:5]
                raise ValueError(f"it holds another {group_name} state, e.g. {differing}; give its run's options")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each process loads by itself
            everything = {name: tensor for tensors in requested.values() for name, tensor in tensors.items()}
            load(everything, storage_reader=HuggingFaceStorageReader(str(local)), no_dist=True)
    except (OSError, SafetensorError, ValueError, CheckpointException) as error:
        reason: BaseException = error
        if isinstance(error, CheckpointException):  # has an error and a traceback by rank
            reason = next(iter(error.failures.values()))[0]
        # The next attempt may read the disk, but the content of a damaged file stays.
        raised = OSError if isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError) else ValueError
        raise raised(f"checkpoint {address(folder)}: cannot be read: {reason}") from error


def checkpoint_names(folder: Path, group_name: str) -> set[str]:
    """Return the names of tensors under TRAINABLE, OPTIMIZER or AVERAGE. Raises ValueError for a damaged checkpoint."""
    state = _state(folder)
    try:
        return _names(attempt_folder(folder, state["attempt"]), state["files"], group_name)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {address(folder)}: cannot be read: {error}") from error


def _names(stored: Path, files: Iterable[str], group_name: str) -> set[str]:
    """Read the headers of safetensors files: their length in 8 bytes, and JSON."""
    names: set[str] = set()
    for file in (name for name in files if name.startswith(group_name)):
        length = int.from_bytes(read_stored(stored / file, (0, 8)), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file}: its header has {length} bytes")
        names |= json.loads(read_stored(stored / file, (8, 8 + length))).keys() - {"__metadata__"}
    return names


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder` with all its files, or None. Reads no weights."""
    for path in _newest_first(folder):
        try:
            _state(path)
            return path
        except ValueError as error:
            logger.warning("%s; the one before is taken, if there is one", error)
    return None


def set_aside_damaged(folder: Path) -> Path | None:
    """Return the newest usable checkpoint, or None. Call it in one process, while no process writes.

    Void checkpoints, and files that no `state.json` names, are removed. A checkpoint on a disk with a wrong checksum is
    renamed to `damaged_...`, so that later searches do not read it; those of a bucket are compared when they are read.
    """
    _sweep(folder)
    while (newest := latest_checkpoint(folder)) is not None:
        state = _state(newest)
        files = {attempt_folder(newest, state["attempt"]) / name: file for name, file in state["files"].items()}
        changed = [path.name for path, file in files.items() if path.is_file() and file_digest(path) != file["sha256"]]
        if not changed:
            break
        aside = folder / (DAMAGED + newest.name)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(newest, aside)
        logger.warning(
            "checkpoint %s: %s has changed since it was written; it is set aside as %s", newest, changed[0], aside.name
        )
    return newest


def _sweep(folder: Path) -> None:
    """Remove void checkpoints, files that no `state.json` names, and incomplete uploads."""
    pull(folder)
    stored: dict[Path, set[str]] = {}
    for name in sizes(folder):
        step, _, inside = name.partition("/")
        if step_of(step) is not None:
            stored.setdefault(folder / step, set()).add(inside.partition("/")[0])
    for path, names in stored.items():
        try:
            state = parsed((path / STATE).read_text()) if STATE in names else None
        except (OSError, ValueError):  # kept for the user to inspect
            continue
        if state is None or _void_after(state, path) is not None:
            _remove_old(path)
            continue
        for name in names - {STATE, ATTEMPT_FOLDER.format(state["attempt"])}:
            if name.startswith("attempt-"):
                _remove_old(path / name)
    for hidden in folder.rglob(f"{REMOVED}*"):
        shutil.rmtree(hidden, ignore_errors=True)
    abort_uploads(folder)


def _remove_old(path: Path) -> None:
    """Remove a checkpoint or files of one; log a failure, which must not end training."""
    try:
        remove(path)
    except OSError as error:
        logger.warning("old checkpoint %s could not be deleted (%s); training goes on", address(path), error)


def _void_after(state: Mapping[str, Any], path: Path) -> int | None:
    """Return the earlier step that a later attempt resumed from, which makes the checkpoint void; else None."""
    output_dir = path.parent.parent
    pull(output_dir / ATTEMPTS_NAME)
    counts = resumed_at(attempts(output_dir), state["attempt"])
    return counts if counts is not None and state["progress"]["step"] > counts else None


def prune(
    folder: Path,
    keep: int,
    keep_best: int,
    *,
    success: Mapping[int, tuple[Success, Success]] | None = None,
    waiting: Callable[[int], bool] = lambda step: False,
) -> None:
    """Delete all but the newest `keep` checkpoints and the `keep_best` with the best score (`Progress.score`).

    Unreadable checkpoints stay for the user to inspect. A failed deletion is logged. If `success` is given (its bounds
    by step, equal without errors of the evaluation), success at any time ranks checkpoints, then success at the end,
    then the loss. A checkpoint that is still to be evaluated (`waiting`), or whose upper bound reaches the worst of the
    best, stays while the disk has space for two more of its size.
    """
    readable = _scores(folder)
    scores = {path: score for path, score in list(readable.items())[keep:] if not _may_wait(path, waiting)}
    unplayed: Success = (-1.0, -1.0)
    bounds = {path: (success or {}).get(_step(path), (unplayed, unplayed)) for path in scores}
    ranked = sorted(scores, key=lambda path: (*(-share for share in bounds[path][0]), scores[path]))
    threshold = bounds[ranked[keep_best - 1]][0] if 0 < keep_best < len(ranked) else (math.inf, math.inf)
    undecided = {_step(path) for path, (least, most) in bounds.items() if least < most and most >= threshold}
    for path in ranked[keep_best:]:
        if not _may_wait(path, undecided.__contains__):
            _remove_old(path)


def checkpoint_sizes(folder: Path) -> list[int]:
    """Return the bytes of each checkpoint in a folder."""
    return [_size(path) for path in _newest_first(folder)]


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the best score, the newest of equal ones, or None."""
    scores = _scores(folder)
    return min(scores, key=lambda path: scores[path], default=None)


def _scores(folder: Path) -> dict[Path, tuple[float, float]]:
    """Return the scores of readable checkpoints, the newest first."""
    scores = {}
    for path in _newest_first(folder):
        with contextlib.suppress(ValueError):
            scores[path] = load_progress(path).score
    return scores


def _may_wait(path: Path, waiting: Callable[[int], bool]) -> bool:
    """Return whether a checkpoint is still to be evaluated and the disk has space for two more of its size."""
    if not waiting(_step(path)):
        return False
    if free_bytes(path) >= 2 * _size(path) + SPARE_BYTES:
        return True
    logger.warning("%s is deleted before its evaluation is complete: the disk is nearly full", path)
    return False


def _size(path: Path) -> int:
    return sum(sizes(path).values())


def _step(path: Path) -> int:
    step = step_of(path.name)
    assert step is not None  # guaranteed by `checkpoints`
    return step


def check_resumable(saved: Progress, run: Progress) -> None:
    """Raise ValueError if the checkpoint's progress belongs to another run than `run`."""
    if saved.global_batch_size != run.global_batch_size:
        raise ValueError(
            f"a step has {run.global_batch_size} rows, but the run was started with {saved.global_batch_size}: its "
            "steps and learning rates would mean something else; choose a batch_size x grad_accum x num_workers, or "
            "for grpo.py a minibatch, of as many rows"
        )
    if saved.mode != run.mode:
        raise ValueError(
            f"what trains is {run.mode}, but the run was started with {saved.mode}: give the options of its start, or "
            "start a new run"
        )
    check_base(saved, run.base)
    keys = dict.fromkeys((*run.stream, *saved.stream))
    differing = [key for key in keys if saved.stream.get(key) != run.stream.get(key)]
    if differing:
        changes = "; ".join(f"{k}: was {saved.stream.get(k)}, is {run.stream.get(k)}" for k in differing)
        raise ValueError(
            f"the data is not what the run was started with ({changes}), so the rows that are left are unknown; "
            "start a new run, with --policy.path set to what this one exports at its end if it is to go on with that"
        )


def check_base(saved: Progress, base: Mapping[str, Any]) -> None:
    """Raise ValueError if `base` has other weights or files than the checkpoint's base policy."""
    if saved.base.get("digest") != base.get("digest"):
        raise ValueError(
            f"the base policy is not the one the run was started from: {base.get('path')} has digest "
            f"{base.get('digest')}, the checkpoint expects {saved.base.get('digest')} ({saved.base.get('path')})"
        )
    was, now = saved.base.get("files") or {}, base.get("files") or {}
    if was != now:
        changed = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
        raise ValueError(
            f"the base policy is not the one the run was started from: in {base.get('path')}, {', '.join(changed[:5])} "
            "changed, came or went; put it back as it was, or start a new run"
        )


def require_space_to_write(folder: Path, needed_bytes: int) -> None:
    """Raise OSError if the disk to which a checkpoint is written, this node's for a bucket, lacks `needed_bytes`."""
    other = "--output_dir, or TMPDIR on this node for a run in a bucket"
    require_space(folder, needed_bytes, "a checkpoint", other, lambda existing: shutil.disk_usage(existing).free)


def require_space(
    folder: Path,
    needed_bytes: int,
    purpose: str,
    other: str = "--output_dir",
    free_at: Callable[[Path], float] = free_bytes,
) -> None:
    """Raise OSError if the disk of `folder` has no space for `needed_bytes`. `other`: options that choose the disk."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = free_at(existing)
    if free < needed_bytes + SPARE_BYTES:
        raise OSError(
            f"no space for {purpose} in {folder}: {needed_bytes / 1e9:.2f} GB needed (and {SPARE_BYTES / 1e9:.2f} GB "
            f"spare), {free / 1e9:.2f} GB free; free some or choose another {other}"
        )


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return checkpoints by step, the oldest first, readable or not."""
    folders = ((step_of(path.parent.name), path.parent) for path in folder.glob(f"*/{STATE}"))
    return dict(sorted((step, path) for step, path in folders if step is not None))


def _newest_first(folder: Path) -> list[Path]:
    pull(folder)
    return list(reversed(checkpoints(folder).values()))


def _state(folder: Path) -> dict[str, Any]:
    pull(folder / STATE)
    url = address(folder)
    try:
        state = parsed((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {url}: {STATE} is missing or damaged ({error})") from error
    if (counts := _void_after(state, folder)) is not None:
        raise ValueError(f"checkpoint {url}: not used, as the run was continued later from step {counts}, before it")
    files = sizes(attempt_folder(folder, state["attempt"]))
    for name, written in state["files"].items():
        if files.get(name) != written["bytes"]:
            raise ValueError(f"checkpoint {url}: {name} is missing or truncated")
    # torch's reader opens every safetensors file of the folder.
    if foreign := sorted({name for name in files if re.fullmatch(r"[^/]*\.safetensors", name)} - state["files"].keys()):
        raise ValueError(f"checkpoint {url}: {foreign} are not of this checkpoint; remove them")
    return state


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
