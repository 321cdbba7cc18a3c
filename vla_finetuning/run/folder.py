"""Check, lock, prepare and read a run's folder, on a path that all nodes share or in a bucket.

Files of `OUTPUT_DIR`::

    config.json           the run's options; `--resume` reads them
    run.json              description of the run: datasets, policy, hardware, versions, the plan
    statistics.json       statistics of normalisation: {"ROBOT/FEATURE": {"q01": [...], ...}}; one robot has no name
    .lock                 lock of the process that drives the run
    attempts.jsonl        see run/attempts.py
    metrics.jsonl         a line per log step
    run.log               warnings of the training processes
    skipped.jsonl         with --dataset.on_error=skip, a line for each episode that a read task skipped
    rows/rank<r>.jsonl    with --run.record_rows, a line per micro-batch and epoch:
                          {"attempt": 0, "epoch": 0, "step": 12, "rows": [[dataset_index, index], ...]}
    checkpoints/          see run/checkpoint.py
    evaluations.jsonl     a line per checkpoint that has played in an environment (--env.type):
                          {"step": 200, "attempt": 0, "successes": 31, "episodes": 50, "errors": 0,
                          "interval": [0.48, 0.74], "successes_at_end": 30, "interval_at_end": [0.46, 0.72],
                          "seconds": 80.2}
                          (`evaluation.intervals.score`)
    evaluations/step_<n>/ its episodes
    evaluation.json       held-out errors, and closed-loop success of the demo
    labels.parquet        of value.py: see plan/labels.py
    films/                images of episodes in evaluation.json
    pretrained_model/     the trained policy for LeRobot
    last_checkpoint.json  the newest checkpoint that was written, and by which attempt: {"step": 200, "attempt": 0}
    finished.json         the run is complete: {"step": 200, "max_train_steps": null}
    stop                  made by a user: the run writes a checkpoint and ends at its next log step

Lines of an attempt after the step that the next one resumed from are void. A run in a bucket has the same files there,
and each process works on its own copy (mirror.py). Each process has its own file for logs of several processes
(`run-HOST-PROCESS.log`), and `.lock` is a lease (run/lease.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vla_finetuning.buckets.mirror import (
    REMOVED,
    address,
    bucket_of,
    contents,
    files_of_processes,
    mirror_of,
    pull,
    push,
    remove,
    synced,
)
from vla_finetuning.buckets.store import ChangedError, StorageError, limit_retries
from vla_finetuning.files import append_line, read_json, read_json_lines, read_lines, write_json
from vla_finetuning.options.fields import idle_options, leaves, options_of
from vla_finetuning.options.job import CONFIG_NAME, PER_START, JobOptions
from vla_finetuning.options.programs import GRPO_PRESETS, PRESETS, Config, GrpoConfig
from vla_finetuning.run.attempts import attempts, resumed_at, trained_by
from vla_finetuning.run.checkpoint import (
    Progress,
    check_resumable,
    checkpoint_sizes,
    latest_checkpoint,
    load_progress,
    prune,
    require_space,
)
from vla_finetuning.run.lease import LOCK_NAME, drive, is_lost
from vla_finetuning.run.manifest import checkpoint_name
from vla_finetuning.terminal import print_safe

METRICS_NAME, LOG_NAME, ROWS_NAME = "metrics.jsonl", "run.log", "rows"
STOP_NAME, SKIPPED_NAME, RUN_NAME = "stop", "skipped.jsonl", "run.json"
FINISHED_NAME, LAST_CHECKPOINT_NAME = "finished.json", "last_checkpoint.json"
STATISTICS_NAME = "statistics.json"
EVALUATION_NAME, CHECKPOINTS_NAME = "evaluation.json", "checkpoints"
FILMS, FILMS_INDEX = "films", "films.json"
EVALUATIONS_NAME, EVALUATIONS = "evaluations.jsonl", "evaluations"
# Options that determine the learning rate of every step.
SCHEDULE = ("steps", "num_epochs", "lr", "warmup_frac", "final_lr_frac", "optimizer_options", "scheduler_options")
# Options that choose the statistics by which the policy is normalised.
NORMALISATION = ("dataset.statistics", "dataset.mixture_stats", "dataset.use_imagenet_stats")
# Begins the names of files and folders that test the storage.
PROBE = ".storage-"
# Names of files and folders of a process that was killed while it wrote them.
LEFTOVER = re.compile(rf"{re.escape(PROBE)}.*|{re.escape(REMOVED)}.*|\..*\.[0-9]+")
# Options that choose the episodes that checkpoints play.
EVALUATION_OPTIONS = ("env_type", "env_options", "eval.n_episodes")
# Options that change what the loss of a checkpoint is computed from.
MEASURED = ("max_eval_samples", "train.noise_draws", "train.flow_weight", "train.mask_padding", "ema.enable")
RAY_TRAIN_SNAPSHOT = "checkpoint_manager_snapshot.json"


def check_folder(config: JobOptions) -> None:
    """Check that a run can use its folder, without changes to the folder.

    Raises OSError: the folder cannot be made or written, another run is going on in it, or it is not empty.
    """
    folder = config.folder
    check_place(folder)
    if (folder / LOCK_NAME).is_file():
        _lock(folder).release()
    _check_free(config)
    if config.resume:
        pull(folder)


def is_finished(config: JobOptions) -> bool:
    """Return whether the resumed run is complete with the same options."""
    if not config.resume:
        return False
    pull(config.folder)
    finished = read_json(config.folder / FINISHED_NAME)
    is_capped_alike = finished.get("max_train_steps") == (os.environ.get("MAX_TRAIN_STEPS") or None)
    return bool(finished) and is_capped_alike and not changed_options(config)


def finish(output_dir: Path, step: int) -> None:
    """Record that the run is complete."""
    finished = {"step": step, "max_train_steps": os.environ.get("MAX_TRAIN_STEPS") or None}
    write_json(output_dir / FINISHED_NAME, finished)


def checkpoint_to_resume(output_dir: Path) -> Path | None:
    """Return the newest usable checkpoint, or None if none was written yet and the run begins at step 0.

    Raises ValueError: a checkpoint was written, but none is usable.
    """
    newest = latest_checkpoint(output_dir / CHECKPOINTS_NAME)
    if newest is None and (step := _last_written(output_dir)):
        reason = ""
        try:
            load_progress(output_dir / CHECKPOINTS_NAME / checkpoint_name(step))
        except ValueError as error:
            reason = f", {error}"
        raise ValueError(
            f"--resume: {address(output_dir / CHECKPOINTS_NAME)} has no checkpoint that can be used, but that of step "
            f"{step} was written ({LAST_CHECKPOINT_NAME}{reason}). The run would begin at step 0 and replace what was "
            "trained: copy a checkpoint back into it, or begin anew in another --output_dir, or in this one after "
            f"{address(output_dir)} is moved or removed"
        )
    return newest


def resumption(output_dir: Path) -> str:
    """Describe where a resumed run continues. Raises ValueError as `checkpoint_to_resume`."""
    newest = checkpoint_to_resume(output_dir)
    step = 0 if newest is None else load_progress(newest).step
    text = f"from step {step}" + (": no checkpoint has been written yet" if newest is None else "")
    if (written := _last_written(output_dir)) > step:
        text += f"; the checkpoint of step {written} was written, and cannot be used any more"
    logged = max((line["step"] for line in read_json_lines(output_dir / METRICS_NAME)), default=0)
    return text + (f"; steps to {logged} were logged, and those after {step} are done again" if logged > step else "")


def checkpoint_written(output_dir: Path, step: int, attempt: int) -> None:
    """Record a committed checkpoint. Called by the process that committed it."""
    write_json(output_dir / LAST_CHECKPOINT_NAME, {"step": step, "attempt": attempt})


def _last_written(output_dir: Path) -> int:
    """Return the last valid step that was written to a checkpoint, or 0."""
    saved = read_json(output_dir / LAST_CHECKPOINT_NAME)
    if not saved:
        return 0
    counts = resumed_at(attempts(output_dir), saved["attempt"])
    return saved["step"] if counts is None else min(saved["step"], counts)


def check_place(folder: Path, flag: str = "--output_dir") -> None:
    """Raise OSError, which names the flag, if the folder cannot be made or written. Does not make it."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # a name too long, or below a file
        raise OSError(f"{flag}={folder}: no folder can be there ({error.strerror}); choose another") from error
    if not existing.is_dir():
        raise NotADirectoryError(f"{flag}={folder}: {existing} is a file; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{flag}={folder}: {existing} cannot be written to; choose another folder")
    contents(folder)  # the bucket must be there


@contextlib.contextmanager
def own_folder(config: JobOptions, start: Progress, steps: int, disk_bytes: int) -> Iterator[None]:
    """Lock the run's folder in the block, after `check_folder`, and print changed options of a resumed run.

    `start`, `steps` and `disk_bytes` are as in `Job`. Raises OSError if another process holds the folder, it is unfit,
    or the disk is too small. Raises ValueError if the newest checkpoint belongs to another run, or to other statistics,
    or has more steps, or no checkpoint is usable.
    """
    with claim_folder(config.folder, lease=config.lease, dry_run=config.dry_run):
        is_trained = _check_state(config, start, steps, disk_bytes) is not None
        is_ranked = getattr(config, "best_kept", 0) and getattr(config, "keep_best_by", "loss") == "loss"
        for changed in changed_options(config):
            if is_trained and changed.startswith(NORMALISATION):
                raise ValueError(f"--{changed}: a run keeps its statistics; give what it was, or another --output_dir")
            is_playing = getattr(config, "env_type", None) is not None
            if is_playing and changed.startswith(EVALUATION_OPTIONS) and evaluations(config.folder):
                raise ValueError(
                    f"{changed}: {EVALUATIONS_NAME} has the success of checkpoints as it was; give what it was, or "
                    f"remove {EVALUATIONS_NAME}, and the checkpoints that are left play again"
                )
            if is_trained and is_ranked and changed.startswith(MEASURED):
                raise ValueError(
                    f"--{changed}: the best checkpoint has the lowest loss, and losses before and after the change do "
                    "not compare; give what it was, or --keep_best 0 and --export last"
                )
            print_safe(f"Changed      {changed}")
        yield


def claim_folder(folder: Path, *, lease: bool = True, dry_run: bool = False) -> contextlib.AbstractContextManager[None]:
    """Hold a folder in the block. Raises FileExistsError if a process on any machine holds it.

    `lease` is as in `JobOptions`. `dry_run` only checks the store.
    """
    if mirror_of(folder):
        return _leased(folder, lease, dry_run)
    return contextlib.nullcontext() if dry_run else locked(folder)


@contextlib.contextmanager
def _leased(folder: Path, lease: bool, dry_run: bool) -> Iterator[None]:
    if lease:
        _try_conditions(folder)
    else:
        print_safe("Lease        none (--lease=false): two processes with this --output_dir would destroy the run")
    if dry_run:
        yield
        return
    limit_retries()  # an earlier run in this process may have limited them
    with drive(folder) if lease else contextlib.nullcontext(), synced(folder, lambda: not is_lost(folder)):
        yield
    with contextlib.suppress(StorageError):  # the run's own error is more useful
        if not _contents(folder):
            remove(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder on a disk in the block, and make it. Raises FileExistsError if another process holds it."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--output_dir={folder}: cannot be made ({error.strerror}); choose another") from error
    lock = _lock(folder)
    try:
        _try_storage(folder)
        yield
    finally:
        lock.release()
        if not _contents(folder):  # a refused run leaves no files
            (folder / LOCK_NAME).unlink(missing_ok=True)
            for path in created:
                with contextlib.suppress(OSError):
                    path.rmdir()


def _try_storage(folder: Path) -> None:
    """Append to a file, replace it, and rename a folder, as a run does. Raises OSError if the storage fails."""
    try:
        with tempfile.TemporaryDirectory(prefix=PROBE, dir=folder) as scratch:
            log, subfolder = Path(scratch, "log"), Path(scratch, "made")
            append_line(log, "first")
            append_line(log, "second")
            write_json(log, {})
            subfolder.mkdir()
            os.rename(subfolder, subfolder.with_name("renamed"))
    except OSError as error:
        raise _unfit(folder, error) from error


def _try_conditions(folder: Path) -> None:
    """Check that the store refuses conditional writes of a wrong tag, which a lease needs. Raises OSError if not."""
    (store, probe), url = bucket_of(folder / f"{PROBE}{uuid.uuid4().hex}"), address(folder)
    try:
        tag = store.put(probe, b"1", tag="")
        for wrong in ("", tag):
            if wrong:
                store.put(probe, b"2", tag=tag)  # changes its tag
            with contextlib.suppress(ChangedError):
                store.put(probe, b"3", tag=wrong)
                raise OSError(
                    f"--output_dir={url}: this store overwrites what it was asked not to (no conditional writes): "
                    "two processes could destroy each other's run; choose another store or a folder on a disk, or give "
                    "--lease=false and see to it yourself that no other process has this --output_dir"
                )
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--output_dir={url}: nothing can be written there ({error})") from error
    finally:
        with contextlib.suppress(OSError):
            store.delete([probe])


def _lock(folder: Path) -> FileLock:
    """Lock a folder on a disk. Raises FileExistsError if another process holds it."""
    lock = FileLock(folder / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FileExistsError(
            f"--output_dir={folder}: a run is going on there; wait until it ends, or choose another folder"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise _unfit(folder, error) from error
    return lock


def _unfit(folder: Path, error: Exception) -> OSError:
    return OSError(
        f"--output_dir={folder}: its storage, perhaps a mounted bucket, cannot lock a file, append to it, replace it "
        f"and rename a folder ({error}); choose a folder on a disk or a network file system"
    )


def prepare_folder(config: JobOptions) -> None:
    """Write the run's options into its locked folder. A run that does not resume empties the folder first."""
    folder, checkpoints = config.folder, config.folder / CHECKPOINTS_NAME
    if not config.resume:
        empty(folder)
    for name in filter(LEFTOVER.fullmatch, contents(folder)):
        with contextlib.suppress(OSError):  # a bucket without the right to delete
            remove(folder / name)
    # The folder's checkpoints count, not the list of an earlier process of Ray Train.
    for path in (folder / STOP_NAME, folder / FINISHED_NAME, checkpoints / RAY_TRAIN_SNAPSHOT):
        if path.is_file():
            remove(path)
    write_json(folder / CONFIG_NAME, config.to_json())  # first, as a folder without it holds no run
    checkpoints.mkdir(exist_ok=True)
    push(folder)


def empty(folder: Path) -> None:
    """Remove the files of a run."""
    for name in _contents(folder):
        remove(folder / name)


def changed_options(config: JobOptions) -> list[str]:
    """Describe options of a resumed run that differ from its start and have an effect. Call before `prepare_folder`."""
    path = config.folder / CONFIG_NAME
    if not (config.resume and path.is_file()):
        return []
    defaults = {option.path: option.default for option in options_of(type(config))}
    idle = [option.path for option in idle_options(config)]
    saved, now = (dict(leaves(options, defaults)) for options in (json.loads(path.read_text()), config.to_json()))
    was = defaults | saved  # an earlier version wrote fewer options
    changed = [name for name, value in now.items() if name not in (*PER_START, "given", *idle) and value != was[name]]
    follows = "; the learning rate of the steps that are left changes with it"
    return [f"{name} was {was[name]}, is {now[name]}" + follows * (name in SCHEDULE) for name in changed]


def _check_state(config: JobOptions, start: Progress, steps: int, disk_bytes: int) -> Path | None:
    """Check that a run can begin or continue in its folder, as `own_folder`. Return the checkpoint that it resumes."""
    _check_free(config)
    newest = checkpoint_to_resume(config.folder) if config.resume else None
    if newest is not None:
        progress = load_progress(newest)
        check_resumable(progress, start)
        if progress.step > steps:
            raise ValueError(
                f"{progress.step} steps are done, and {config.length_flags} says {steps}: ask for as many at "
                "least, or start a new run, from the policy that this one exports at its end if it is to go on with it"
            )
    stored = checkpoint_sizes(config.folder / CHECKPOINTS_NAME) if config.resume else []
    # No checkpoint that the run keeps is deleted before the next one is written.
    needed = max(disk_bytes - sum(stored), max(stored, default=0))
    require_space(config.folder, needed, "the checkpoints (--keep_checkpoints, --keep_best) and the trained policy")
    return newest


def _check_free(config: JobOptions) -> None:
    names = _contents(config.folder)
    if not names or config.resume:
        return
    presets = {Config: PRESETS, GrpoConfig: GRPO_PRESETS}.get(type(config))
    if presets and config.preset == "demo" and config.folder == Path(presets["demo"]["output_dir"]).absolute():
        for name, value in leaves(config.to_json(), ("dataset.mixture",)):
            paths = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, dict) else []
            inside = [path for path in paths if Path(path.removeprefix("@")).absolute().is_relative_to(config.folder)]
            if inside and name != "output_dir":
                raise FileExistsError(
                    f"--output_dir={address(config.folder)}: the demo empties this folder, and {name}={inside[0]} is "
                    "in it; choose another --output_dir"
                )
    else:
        run = "--resume goes on with the run it holds; otherwise choose another"
        remedy = run if CONFIG_NAME in names else "it holds no run; choose another"
        raise FileExistsError(f"--output_dir={address(config.folder)} is not empty: {remedy}")


def _contents(folder: Path) -> list[str]:
    return [name for name in contents(folder) if name != LOCK_NAME and not LEFTOVER.fullmatch(name)]


def skipped_episodes(output_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `skipped.jsonl`, oldest first."""
    return [line for path in files_of_processes(output_dir / SKIPPED_NAME) for line in skipped_in(path)]


def skipped_in(path: Path) -> list[dict[str, Any]]:
    """Return the lines of one process's `skipped.jsonl`."""
    episodes = []
    for line in read_lines(path):
        # A network drive may mix lines that are written at the same time: skip them.
        with contextlib.suppress(json.JSONDecodeError):
            episodes.append(json.loads(line))
    return episodes


def evaluations(output_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `evaluations.jsonl` by step: results of checkpoints in the run's environment."""
    lines, starts = read_json_lines(output_dir / EVALUATIONS_NAME), attempts(output_dir)
    # Earlier versions wrote no attempt.
    valid = {line["step"]: line for line in lines if line.get("attempt") in (None, trained_by(starts, line["step"]))}
    return [line for _, line in sorted(valid.items())]


def prune_checkpoints(config: Config, steps: int) -> None:
    """Delete checkpoints that a run of `steps` does not keep. Called by the process that writes them."""
    lines = evaluations(config.folder)
    success = {line["step"]: _success_bounds(line) for line in lines}
    played = {line["step"] for line in lines}
    prune(
        config.folder / CHECKPOINTS_NAME,
        config.keep_checkpoints,
        config.best_kept,
        success=success if config.keep_best_by == "success" else None,
        waiting=lambda step: config.is_evaluated(step, steps) and step not in played,
    )


def _success_bounds(line: Mapping[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bounds of success, at any time and at the end, where episodes with errors may be either."""
    errors = line.get("errors", 0)
    listed = max(line["episodes"] + errors, 1)
    once, at_end = line["successes"], line["successes_at_end"]
    return (once / listed, at_end / listed), ((once + errors) / listed, (at_end + errors) / listed)


@contextlib.contextmanager
def stopping_on_signals(output_dir: Path) -> Iterator[None]:
    """In the block, request a stop at the first SIGTERM or Ctrl-C, and exit at the second. Runs in the main thread."""
    stopping = False

    def ask(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping or is_lost(output_dir):
            raise SystemExit(128 + number)
        stopping = True
        (output_dir / STOP_NAME).touch()
        # Not by print: the signal may interrupt one, and Python's streams are not reentrant.
        os.write(2, b"stopping: a checkpoint is taken at the next log step; once more to end now\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
