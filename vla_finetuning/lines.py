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
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_finetuning.bucket import BucketPath
from vla_finetuning.store import within

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
        self._new: list[str | None] = []  # after None comes what stands instead of all that is there
        self._text = ""  # of the object that is written anew
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self.after: _Appender | None = None  # its lines of before are in the bucket before these
        self.failing = False

    def append(self, line: str) -> None:
        with self._changing:
            self._new.append(line)

    def replace(self, text: str) -> None:
        """These lines, instead of all that are there."""
        with self._changing:
            self._new += [None, *_lines(text)]

    @property
    def waits(self) -> bool:
        return bool(self._new)

    def flush(self) -> None:
        """Return when all lines are in the bucket."""
        with self._writing:
            with self._changing:
                new = list(self._new)
            if not new:
                return
            if self.after is not None:
                self.after.flush()
            if None in new:
                self._put_instead(_text(new))
            else:
                if self._order is None:
                    self._order = _order_after(self._path.below())
                self._put(self._text + _text(new))
            with self._changing:
                del self._new[: len(new)]

    def _put_instead(self, text: str) -> None:
        before = list(self._path.below())
        self._order, self._number, self._is_all = _order_after(before), 0, True
        self._put(text)
        self._number, self._text = 1, ""
        self._path.store.delete([f"{self._path.key}/{name}" for name in before])

    def _put(self, text: str) -> None:
        assert self._order is not None
        name = _object_name(self._order, self._writer, self._number, self._is_all)
        (self._path / name).put(text.encode())
        self._text = text
        if len(text) > LINES_BYTES:
            self._number, self._text = self._number + 1, ""

    def waiting(self, folder: BucketPath) -> dict[str, Any]:
        """The object that `flush` would write, as JSON."""
        with self._changing:
            new = list(self._new)
        instead = None in new
        return {
            "path": self._path.relative_to(folder).as_posix(),
            "writer": self._writer,
            "order": None if instead else self._order,
            "number": 0 if instead else self._number,
            "all": instead or self._is_all,
            "text": _text(new) if instead else self._text + _text(new),
        }


def _object_name(order: int, writer: str, number: int, is_all: bool) -> str:
    return f"{order:08d}-{writer}-{number:06d}{ALL * (is_all and not number)}.jsonl"


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def _text(new: Sequence[str | None]) -> str:
    start = max((i + 1 for i, line in enumerate(new) if line is None), default=0)
    return "".join(f"{line}\n" for line in new[start:])


def _order_after(names: Collection[str]) -> int:
    return 1 + max((int(name[:8]) for name in names if name[:8].isdigit()), default=-1)


_appenders: dict[BucketPath, _Appender] = {}
_appenders_lock = threading.Lock()


def _appender(path: BucketPath) -> _Appender:
    with _appenders_lock:
        _start_flushing()
        return _appenders.setdefault(path, _Appender(path))


@functools.cache
def _start_flushing() -> None:
    """Start this process's thread that writes what was appended."""
    threading.Thread(target=_keep_flushing, daemon=True, name="bucket-lines").start()
    atexit.register(_flush_at_the_end)


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


def append_line(path: Path, line: str, *, now: bool = False, after: Path | None = None) -> None:
    """Add a line to a file. In a bucket it is there FLUSH_S later, or with `now` when this returns.

    Args:
        after: a file whose lines that were added before are in the bucket before this one is.
    Raises:
        OSError: the disk is full; with `now`, the store does not answer.
    """
    if not isinstance(path, BucketPath):
        with open(path, "a") as file:
            file.write(f"{line}\n")
        return
    appender = _appender(path)
    if isinstance(after, BucketPath):
        appender.after = _appender(after)
    appender.append(line)
    if now:
        appender.flush()


def drop_half_line(path: Path) -> None:
    """Remove what a full disk or a power cut left after a file's last whole line, which the next would be joined to.

    Of a file on a disk whose only writer the caller is.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        whole = file.seek(0, os.SEEK_END)
        while whole:
            first = max(0, whole - 2**16)
            file.seek(first)
            newline = file.read(whole - first).rfind(b"\n")
            whole = first + newline + 1
            if newline >= 0:
                break
        file.truncate(whole)


def line_writer(path: Path) -> Callable[[str], None]:
    """Return a function that adds a line to a file, whose only writer this is: on a disk the line is there when it
    returns.
    """
    if isinstance(path, BucketPath):
        return functools.partial(append_line, path)
    path.parent.mkdir(exist_ok=True)
    drop_half_line(path)
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


def replace_lines(path: BucketPath, text: str, *, now: bool = True) -> None:
    """Have a file hold these lines and no others, at once. What this process appends comes after them.

    They are in the bucket when this returns; without `now` as `append_line` says.
    """
    appender = _appender(path)
    appender.replace(text)
    if now:
        appender.flush()


def waiting_lines(folder: BucketPath) -> list[dict[str, Any]]:
    """Return the lines of files below that this process has yet to write, as JSON for `write_waiting`."""
    inside = [appender for path, appender in list(_appenders.items()) if path.is_relative_to(folder)]
    return [appender.waiting(folder) for appender in inside if appender.waits]


def write_waiting(folder: BucketPath, waiting: Sequence[Mapping[str, Any]]) -> None:
    """Write what `waiting_lines` found in a process that has ended since. Done again, it changes nothing."""
    for one in waiting:
        path, mine = folder / one["path"], f"-{one['writer']}-{one['number']:06d}"
        there = sorted(path.below())
        found = [name for name in there if name[8:].startswith(mine)]
        order = _order_after(there) if one["order"] is None else one["order"]
        name = found[-1] if found else _object_name(order, one["writer"], one["number"], one["all"])
        # It may have come in after all, and with lines of later.
        if not found or len((path / name).read_bytes()) < len(one["text"].encode()):
            (path / name).put(one["text"].encode())


def _counting(sizes: Mapping[str, int]) -> list[str]:
    """Return the objects of a folder of lines that are read, in order: each of a writer's once.

    What a process had yet to write may come in a second time under another order, when `write_waiting` and an answer
    that was lost cross: one of both is the beginning of the other, or equal to it.
    """
    names = sorted(sizes)
    names = names[max((i for i, name in enumerate(names) if ALL in name), default=0) :]
    longest: dict[str, str] = {}
    for name in names:
        mine = name[8:].replace(ALL, "")
        before = longest.get(mine)
        if before is None or sizes[name] > sizes[before]:
            longest[mine] = name
    return [name for name in names if name[8:9] != "-" or longest[name[8:].replace(ALL, "")] == name]


def text_of_lines(path: BucketPath) -> str:
    """Return all lines, those that this process has yet to write included; nothing when there are none."""
    mine = _appenders.get(path)
    if mine is not None and mine.waits:
        mine.flush()
    found = path.below()
    texts = []
    for name in _counting({name: of.size for name, of in found.items()}):
        seen = (str(path), name, found[name].tag)
        if seen not in _segments:
            try:
                data = (path / name).read_bytes()
            except FileNotFoundError:
                continue  # replaced since it was listed; what is in its place is in the next reading
            for other in [key for key in list(_segments) if key[:2] == seen[:2]]:
                _segments.pop(other, None)
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
        _start_renewing()
        known = _recent[ask, path] = _Recent(functools.partial(ask, path), before)
    known.asked = time.monotonic()
    return known.value


@functools.cache
def _start_renewing() -> None:
    """Start this process's thread that asks again."""
    threading.Thread(target=_keep_recent, daemon=True, name="bucket-recent").start()


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
