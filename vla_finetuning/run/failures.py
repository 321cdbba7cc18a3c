"""What an error of a training process means: what went wrong first, and whether trying again could help."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.train.constants import TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S

from vla_finetuning.buckets.mirror import file_of_process, pull, push
from vla_finetuning.buckets.store import PATIENCE_S, StorageError, StoreAwayError, within
from vla_finetuning.files import append_line
from vla_finetuning.run.attempts import ATTEMPTS_NAME, attempts
from vla_finetuning.run.folder import LOG_NAME
from vla_finetuning.terminal import escaped

# What this program's own checks raise: bad input, a file that is gone, a run that does not learn, a store that is away
# for good. Libraries raise the first for arguments that make no sense, which another attempt would give them again.
FINAL = (ValueError, FileNotFoundError, FloatingPointError, StoreAwayError)
# How long a store is asked that has been away for too long already.
NEARLY_NONE_S = 2.0


class StopRetrying(ray.train.UserCallback):
    """Ends the run at an error that another attempt would only repeat, whatever `--scaling.max_failures` allows.

    Ray Train 2.60 starts the worker group anew after any error of a worker, unless an error is raised here: one of the
    program's own checks, and any other that comes a second time from the same checkpoint. A process or node that died
    is always tried again. Every failure goes to the run's log.
    """

    def __init__(self, output_dir: Path):
        self._output_dir = output_dir
        self._last: tuple[Any, ...] | None = None
        self._hurries = False

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        if self._hurries:  # the group works again
            del os.environ[TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S]
            self._hurries = False

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        # A rank that is frozen, or waits for one that failed, does not leave its process group, however long (30 s) Ray
        # Train waits for that before it kills them all. It reads this each time, in the controller, where this runs.
        if TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S not in os.environ:
            os.environ[TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S] = "1"
            self._hurries = True
        causes = {rank: unwrapped(error) for rank, error in worker_exceptions.items()}
        error = first_cause(causes.values())
        resumed_from: list[int] = []
        patience_s = NEARLY_NONE_S if isinstance(error, StoreAwayError) else PATIENCE_S
        with within(patience_s), contextlib.suppress(StorageError):
            pull(self._output_dir / ATTEMPTS_NAME)
            resumed_from = [line["resumed_from_step"] for line in attempts(self._output_dir)[-1:]]
        # Addresses, sizes and process ids are never the same twice.
        failure = (type(error), re.sub(r"\d+", "", str(error)), resumed_from)
        # When a process died, all that the other ranks can say is that they miss it.
        if any(map(is_rays_own, causes.values())) or is_consequence(error):
            final = False
        else:
            final, self._last = isinstance(error, FINAL) or failure == self._last, failure
        ranks = ", ".join(str(rank) for rank, cause in causes.items() if cause is error)
        message = root_cause(error).strip().splitlines()[0]
        # It may be the disk that is full.
        with within(patience_s), contextlib.suppress(OSError):
            failed = f"WARNING attempt from step {(resumed_from or [0])[0]} failed on rank {ranks}: {escaped(message)}"
            log = file_of_process(self._output_dir / LOG_NAME)
            append_line(log, failed)
            push(log)
        if final:
            raise error


def root_cause(error: BaseException) -> str:
    """The message of what went wrong first, without Ray's layers around it."""
    error = cause_of(error)
    # Ray Data 2.60 writes how often it tried, and how to change that, into the message.
    message = re.split(r"\nFailed to .+ after \d+/\d+ attempts", str(error))[0]
    # Ours are sentences for the user; of the others the type may be all there is.
    ours = isinstance(error, (*FINAL, OSError)) and message.strip()
    return message if ours else f"{type(error).__name__}: {message}"


def cause_of(error: BaseException) -> BaseException:
    """Return the error that came first."""
    failures = getattr(error, "worker_failures", None)
    return first_cause(failures.values()) if failures else unwrapped(error)


def first_cause(errors: Iterable[BaseException]) -> BaseException:
    """Return the ranks' first error that is no consequence of another rank's."""
    return min(map(unwrapped, errors), key=is_consequence)


def is_consequence(error: BaseException) -> bool:
    """Return whether it says no more than that other ranks did not come to a collective."""
    message = f"{type(error).__name__}: {error}".lower()
    return not isinstance(error, FINAL) and any(word in message for word in ("gloo", "nccl", "collective"))


def unwrapped(error: BaseException) -> BaseException:
    """The error that Ray has wrapped in its own, maybe several times."""
    while is_rays_own(error):
        inside = (getattr(error, name, None) for name in ("cause", "controller_failure", "health_check_failure"))
        inner = next((e for e in (*inside, error.__cause__) if isinstance(e, BaseException) and e is not error), None)
        if inner is None:
            break
        error = inner
    return error


def is_rays_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("ray.")
