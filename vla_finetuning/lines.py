"""Files that lines are added to, on a disk or in a bucket, and what a training loop looks at without waiting for it.

In a bucket `metrics.jsonl` is a folder of objects of whole lines, which are read in the order of their names,
`<order>-<writer>-<number>.jsonl`. A process that appends writes its newest object anew while that is short, every
FLUSH_S: lines can be read while the run goes on. An object whose name ends in ALL makes those before it void. A line
that one process at most may write, as an attempt's, is an object of its own, `<order>.jsonl`, put where nothing is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vla_finetuning.bucket import BucketPath, within

logger = logging.getLogger(__name__)

# Lines are written so often; an object of lines is closed when it is so long.
FLUSH_S, LINES_BYTES = 2.0, 2**20
# A process that ends writes what it has for so long at most.
PATIENCE_AT_THE_END_S = 10.0
# What is only looked at now and then (`recently`) is this old at most; what nobody asked for so long is forgotten.
RECENT_S, FORGOTTEN_S = 4.0, 1800.0
# How names of such files end.
LINES = (".jsonl", ".log")
ALL = "-all"


class _Appender:
    """What this process appends to one file of lines. Any thread may use it."""

    def __init__(self, path: BucketPath):
        self._path, self._writer = path, uuid.uuid4().hex[:8]
        self._order: int | None = None
        self._number, self._is_all = 0, False
        self._new: list[str] = []
        self._text = ""  # of the object that is written anew
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self.failing = False

    def append(self, line: str) -> None:
        with self._changing:
            self._new.append(line)

    @property
    def waits(self) -> bool:
        return bool(self._new)

    def flush(self) -> None:
        """Return when all lines are in the bucket."""
        with self._writing:
            with self._changing:
                count, text = len(self._new), "".join(f"{line}\n" for line in self._new)
            if not text:
                return
            if self._order is None:
                self._order = _next_order(self._path)
            self._put(self._text + text)
            with self._changing:
                del self._new[:count]

    def replace(self, text: str) -> None:
        """These lines, instead of all that are there."""
        with self._writing:
            with self._changing:
                self._new.clear()
            before = list(self._path.below())
            self._order, self._number, self._is_all, self._text = _order_after(before), 0, True, ""
            self._put(text)
            self._path.store.delete([f"{self._path.key}/{name}" for name in before])

    def _put(self, text: str) -> None:
        name = f"{self._order:08d}-{self._writer}-{self._number:06d}{ALL * (self._is_all and not self._number)}.jsonl"
        (self._path / name).put(text.encode())
        self._text = text
        if len(text) > LINES_BYTES:
            self._number, self._text = self._number + 1, ""


def _order_after(names: Collection[str]) -> int:
    return 1 + max((int(name[:8]) for name in names if name[:8].isdigit()), default=-1)


def _next_order(path: BucketPath) -> int:
    return _order_after(path.below())


_appenders: dict[BucketPath, _Appender] = {}
_appenders_lock = threading.Lock()


def _appender(path: BucketPath) -> _Appender:
    with _appenders_lock:
        if not _appenders:
            threading.Thread(target=_keep_flushing, daemon=True, name="bucket-lines").start()
            atexit.register(_flush_at_the_end)
        return _appenders.setdefault(path, _Appender(path))


def _keep_flushing() -> None:
    while True:
        time.sleep(FLUSH_S)
        for path, appender in list(_appenders.items()):
            if appender.waits:
                try:
                    appender.flush()
                    appender.failing = False
                except OSError as error:
                    if not appender.failing:
                        logger.warning("%s: lines wait in memory: %s", path, error)
                    appender.failing = True


def _flush_at_the_end() -> None:
    with within(PATIENCE_AT_THE_END_S):
        for appender in _appenders.values():
            with contextlib.suppress(OSError):
                appender.flush()


def append_line(path: Path, line: str, *, now: bool = False) -> None:
    """Add a line to a file. In a bucket it is there FLUSH_S later, or with `now` when this returns.

    Raises:
        OSError: the disk is full; with `now`, the store does not answer.
    """
    if not isinstance(path, BucketPath):
        with open(path, "a") as file:
            file.write(f"{line}\n")
        return
    appender = _appender(path)
    appender.append(line)
    if now:
        appender.flush()


def line_writer(path: Path) -> Callable[[str], None]:
    """What adds lines to a file, many of them: on a disk each is in the file when the call returns."""
    if isinstance(path, BucketPath):
        return functools.partial(append_line, path)
    path.parent.mkdir(exist_ok=True)
    file = open(path, "a", buffering=1)  # noqa: SIM115  (as long as the process)

    def write(line: str) -> None:
        file.write(f"{line}\n")

    return write


def flush_lines() -> None:
    """Return when all lines that this process has appended are in their buckets. Raises StorageError."""
    for appender in list(_appenders.values()):
        appender.flush()


def claim_line(path: BucketPath, number: int, line: str) -> None:
    """Add line `number` of a file in which each line is added by one process at most. Raises ChangedError.

    The line must be no other process's: after an answer that was lost, what is there is compared with it.
    """
    (path / f"{number:08d}.jsonl").put(f"{line}\n".encode(), tag="")


_segments: dict[tuple[str, str, str], str] = {}


def replace_lines(path: BucketPath, text: str) -> None:
    """Have a file hold these lines and no others, at once. What this process appends comes after them."""
    _appender(path).replace(text)


def text_of_lines(path: BucketPath) -> str:
    """All lines, those that this process has yet to write included; nothing when there are none."""
    mine = _appenders.get(path)
    if mine is not None and mine.waits:
        mine.flush()
    found = path.below()
    names = sorted(found)
    start = max((i for i, name in enumerate(names) if ALL in name), default=0)
    texts = []
    for name in names[start:]:
        seen = (str(path), name, found[name].tag)
        if seen not in _segments:
            try:
                data, tag = path.store.get(f"{path.key}/{name}")
            except FileNotFoundError:
                continue  # replaced since it was listed; what is in its place is in the next reading
            for other in [key for key in list(_segments) if key[:2] == seen[:2]]:
                _segments.pop(other, None)
            seen = (*seen[:2], tag)
            _segments[seen] = data.decode(errors="replace")
        texts.append(_segments[seen])
    return "".join(texts)


# ---- beside a loop that must not wait -----------------------------------------------------------------------------


class _Recent:
    """The newest answer to a question that takes a request."""

    def __init__(self, ask: Callable[[], Any], value: Any):
        self._ask, self.value, self.asked = ask, value, time.monotonic()

    def renew(self) -> None:
        """Ask again, unless nobody wants to know any more."""
        if time.monotonic() - self.asked < FORGOTTEN_S:
            with contextlib.suppress(OSError):
                self.value = self._ask()


def is_there(path: Path) -> bool:
    return path.exists()


_recent: dict[tuple[Any, BucketPath], _Recent] = {}


def recently[T](ask: Callable[[Path], T], path: Path, before: T) -> T:
    """`ask(path)`; in a bucket as it was RECENT_S ago at most while the store answers, and at first `before`.

    Never waits for a store, so that a training step may call it. `ask` is a function of a module or class.
    """
    if not isinstance(path, BucketPath):
        return ask(path)
    known = _recent.get((ask, path))
    if known is None:
        if not _recent:
            threading.Thread(target=_keep_recent, daemon=True, name="bucket-recent").start()
        known = _recent[ask, path] = _Recent(functools.partial(ask, path), before)
    known.asked = time.monotonic()
    return known.value


def _keep_recent() -> None:
    while True:
        for known in list(_recent.values()):
            known.renew()
        time.sleep(RECENT_S)


def write_beside(path: Path, write: Callable[[Path], None]) -> None:
    """`write(path)`; in a bucket by a thread. What the store refuses is a warning."""
    if not isinstance(path, BucketPath):
        return write(path)

    def attempt() -> None:
        try:
            write(path)
        except OSError as error:
            logger.warning("%s is not written: %s", path, error)

    threading.Thread(target=attempt, daemon=True).start()
