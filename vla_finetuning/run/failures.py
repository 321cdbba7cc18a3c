"""Find the first cause of errors of training processes, and decide whether another attempt could help."""

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

# Errors of this program's own checks: bad input, a missing file, a run that does not learn, an unreachable store.
# Libraries raise ValueError for invalid arguments, which another attempt would repeat.
FINAL = (ValueError, FileNotFoundError, FloatingPointError, StoreAwayError)
# Limit of further requests to a store that has been unreachable for too long.
NEARLY_NONE_S = 2.0


class StopRetrying(ray.train.UserCallback):
    """End the run at an error that another attempt would repeat, regardless of `--scaling.max_failures`.

    Ray Train 2.60 restarts the worker group after any error of a worker, unless this callback raises. It raises errors
    of the program's own checks, and errors that occur a second time from the same checkpoint. It never raises for a
    process or node that died. It writes every failure to the run's log.
    """

    def __init__(self, output_dir: Path):
        self._output_dir = output_dir
        self._last: tuple[Any, ...] | None = None
        self._shutdown_shortened = False

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        if self._shutdown_shortened:  # the group has recovered
            del os.environ[TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S]
            self._shutdown_shortened = False

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        # Ray Train waits 30 s for ranks to leave their process group before it kills them, but frozen ranks, or ranks
        # that wait for a failed one, never leave. It reads this variable in the controller, where this callback runs.
        if TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S not in os.environ:
            os.environ[TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S] = "1"
            self._shutdown_shortened = True
        causes = {rank: unwrapped(error) for rank, error in worker_exceptions.items()}
        error = first_cause(causes.values())
        resumed_from: list[int] = []
        patience_s = NEARLY_NONE_S if isinstance(error, StoreAwayError) else PATIENCE_S
        with within(patience_s), contextlib.suppress(StorageError):
            pull(self._output_dir / ATTEMPTS_NAME)
            resumed_from = [line["resumed_from_step"] for line in attempts(self._output_dir)[-1:]]
        # Ignore addresses, sizes and process ids, which change.
        failure = (type(error), re.sub(r"\d+", "", str(error)), resumed_from)
        # After the death of a process, the other ranks only report that it is missing.
        if any(map(is_rays_own, causes.values())) or is_consequence(error):
            final = False
        else:
            final, self._last = isinstance(error, FINAL) or failure == self._last, failure
        ranks = ", ".join(str(rank) for rank, cause in causes.items() if cause is error)
        message = root_cause(error).strip().splitlines()[0]
        with within(patience_s), contextlib.suppress(OSError):
            failed = f"WARNING attempt from step {(resumed_from or [0])[0]} failed on rank {ranks}: {escaped(message)}"
            log = file_of_process(self._output_dir / LOG_NAME)
            append_line(log, failed)
            push(log)
        if final:
            raise error


def root_cause(error: BaseException) -> str:
    """Return the message of the first error, without Ray's wrappers."""
    error = cause_of(error)
    # Ray Data 2.60 appends its number of attempts to the message.
    message = re.split(r"\nFailed to .+ after \d+/\d+ attempts", str(error))[0]
    # Messages of this program are sentences; other errors may have no message.
    ours = isinstance(error, (*FINAL, OSError)) and message.strip()
    return message if ours else f"{type(error).__name__}: {message}"


def cause_of(error: BaseException) -> BaseException:
    """Return the first error, without Ray's wrappers."""
    failures = getattr(error, "worker_failures", None)
    return first_cause(failures.values()) if failures else unwrapped(error)


def first_cause(errors: Iterable[BaseException]) -> BaseException:
    """Return the first error that is not a consequence of another rank's."""
    return min(map(unwrapped, errors), key=is_consequence)


def is_consequence(error: BaseException) -> bool:
    """Return whether the error only says that other ranks are missing from a collective."""
    message = f"{type(error).__name__}: {error}".lower()
    return not isinstance(error, FINAL) and any(word in message for word in ("gloo", "nccl", "collective"))


def unwrapped(error: BaseException) -> BaseException:
    """Return the error inside Ray's wrappers."""
    while is_rays_own(error):
        inside = (getattr(error, name, None) for name in ("cause", "controller_failure", "health_check_failure"))
        inner = next((e for e in (*inside, error.__cause__) if isinstance(e, BaseException) and e is not error), None)
        if inner is None:
            break
        error = inner
    return error


def is_rays_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("ray.")
