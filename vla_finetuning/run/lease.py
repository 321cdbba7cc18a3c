"""Hold a lease on a run in a bucket, so that one driver runs it at a time.

`OUTPUT_DIR/.lock` names the driver, which replaces the object every RENEW_S by conditional writes. Another process that
wants the run watches the object. If it changes, the driver is alive, and the process is refused. If it does not change
for LEASE_S, the driver is dead or cut off, and the process takes the lease over by a conditional write. Clocks of
different machines are never compared.

A driver that has lost its lease exits. Its training processes cannot commit checkpoints any more, because the attempt
of the new driver makes theirs void (run/checkpoint.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from vla_finetuning.buckets.mirror import address, bucket_of
from vla_finetuning.buckets.store import ChangedError, within
from vla_finetuning.terminal import print_safe, print_safe_error

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
LEASE_S, RENEW_S, LOOK_S = 60.0, 15.0, 1.0
ANSWER_S = 15.0

_lost: set[Path] = set()


def is_lost(folder: Path) -> bool:
    """Return whether another process has taken over the run from this one."""
    return folder in _lost


@contextlib.contextmanager
def drive(folder: Path, when_lost: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGTERM)) -> Iterator[None]:
    """Hold the lease of a run in a bucket in the block. Raises FileExistsError if another process holds it."""
    lease = _Lease(folder)
    lease.take()
    stop = threading.Event()

    def keep() -> None:
        while not stop.wait(RENEW_S):
            if not lease.renew():
                _lost.add(folder)
                print_safe_error(
                    f"{address(folder)}: another process drives this run now ({lease.holder()}); this one ends"
                )
                when_lost()
                return

    thread = threading.Thread(target=keep, daemon=True, name="lease")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=ANSWER_S)
        if not is_lost(folder):
            lease.release()


class _Lease:
    def __init__(self, folder: Path):
        self._folder, (self._store, self._key) = folder, bucket_of(folder / LOCK_NAME)
        self._id, self._renewals, self._tag = uuid.uuid4().hex, 0, ""
        _lost.discard(folder)

    def take(self) -> None:
        try:
            self._put(self._free_tag())
        except ChangedError as error:
            raise self._busy() from error

    def _free_tag(self) -> str:
        """Return the tag of a lease that is free or expired. Raises FileExistsError if its driver is alive."""
        state, tag = self._read()
        if not state or state.get("released"):
            return tag
        print_safe(
            f"Waiting      at most {LEASE_S:.0f} s for a sign of life of the run's last driver ({_holder_of(state)}), "
            "which did not release its lease"
        )
        deadline = time.monotonic() + LEASE_S
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            now, newer = self._read()
            if newer != tag:
                if not now or now.get("released"):
                    return newer
                raise self._busy()
        return tag

    def renew(self) -> bool:
        """Renew the lease. Return False if another process holds it; True also if the store does not answer."""
        try:
            self._put(self._tag)
        except ChangedError:
            with contextlib.suppress(OSError):
                state, tag = self._read()
                if state.get("id") != self._id:
                    return False
                self._tag = tag  # this process's own write, whose answer was lost
        except OSError as error:
            logger.warning("the lease of %s is not renewed: %s", address(self._folder), error)
        return True

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self._put(self._tag, released=True)

    def holder(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return _holder_of(self._read()[0])
        return "unknown"

    def _busy(self) -> FileExistsError:
        return FileExistsError(
            f"--output_dir={address(self._folder)}: a run is going on there, driven by {self.holder()}; wait until it "
            "ends, or choose another folder"
        )

    def _put(self, tag: str, released: bool = False) -> None:
        self._renewals += 1
        state = {"host": socket.gethostname(), "process": os.getpid(), "id": self._id}
        state |= {"renewals": self._renewals, "lease_s": LEASE_S, "released": released}
        with within(ANSWER_S):
            self._tag = self._store.put(self._key, json.dumps(state, indent=2).encode(), tag)

    def _read(self) -> tuple[dict[str, object], str]:
        try:
            data, tag = self._store.get(self._key)
        except FileNotFoundError:
            return {}, ""
        with contextlib.suppress(ValueError):
            state = json.loads(data)
            if isinstance(state, dict):
                return state, tag
        return {"host": "unknown"}, tag


def _holder_of(state: dict[str, object]) -> str:
    return f"process {state.get('process')} on {state.get('host')}"
