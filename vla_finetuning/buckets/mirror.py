"""Mirror folders in object stores as local folders: `as_path` returns this process's copy of an address.

The copy is an ordinary folder. `pull` fetches changes of other processes, `push` sends changes of this process, and
`keep_synced` does both every few seconds. The bucket holds the same files under the same names::

    s3://BUCKET/FOLDER/metrics.jsonl  <->  TMPDIR/vla-fine-tuning-UID/PROCESS/COPY/FOLDER/metrics.jsonl

Every file has one writer. A put is conditional on the object that the writer last put or pulled. If another process
changed it, the writer overwrites it while it is still the owner, and raises otherwise. Processes that append lines to
the same file each write their own (`file_of_process`). Heavy files are sent and fetched on request only (`is_heavy`).

All functions accept paths on a disk too, and then send and fetch nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import logging
import math
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import Any, Literal, NamedTuple

from vla_finetuning.buckets.store import PIECE_BYTES, ChangedError, Content, Store, in_parallel, split_address, within

logger = logging.getLogger(__name__)

# Interval of `keep_synced`.
SYNC_S = 3.0
# Time limit of a request in `sync`, which holds the mirror's lock.
SYNC_PATIENCE_S = 15.0
# Time limit of a request in the last push of a process.
FINAL_PATIENCE_S = 10.0
# Files that are fetched in parallel.
AT_ONCE = 8
# Files that mark others as complete: sent last and deleted first.
MARKS = ("config.json", "state.json", "tracking.json", "finished.json")
# Suffixes of SQLite's journals. SQLite applies one that it finds to the database, which may be newer.
JOURNALS = ("-journal", "-wal")
HEAVY_FOLDERS, HEAVY_SUFFIX = ("rows", "rollouts", "pretrained_model", "adapter"), ".safetensors"
# A folder on a disk gets this prefix before its files are deleted.
REMOVED = ".removed_"
# Files of other processes to pull: all, only those directly in the folder, or none.
Pulls = Literal["all", "top"] | None


class LocalCopy(PosixPath):
    """A path in a local copy; another process unpickles it as the path in its own copy."""

    def __reduce__(self) -> Any:
        located = mirror_of(self)
        return (PosixPath, self.parts) if located is None else (_copied_path, (located[0].url, located[1]))

    @property
    def url(self) -> str:
        return address(self)


def _copied_path(url: str, name: str) -> Path:
    return as_path(url) / name


def as_path(name: str | Path, is_of_file: bool = False) -> Path:
    """Return the path of `name`: the path in this process's nearest copy of an address, or else a path on a disk.

    A copy that was made for a file (`as_file`) holds no other path: a folder is synced with its whole copy. Raises
    ValueError for an address of an unsupported protocol.
    """
    text = str(name)
    if "://" not in text:
        return Path(text).expanduser() if not isinstance(name, LocalCopy) else name
    split_address(text)
    url = text.rstrip("/")
    with _mirrors_lock:
        above = [m for m in _mirrors if f"{url}/".startswith(f"{m.url}/") and (is_of_file or not m.is_of_file)]
        if not above:
            above = [Mirror(url, is_of_file)]
            _mirrors.extend(above)
    mirror = max(above, key=lambda mirror: len(mirror.url))
    return mirror.folder / url[len(mirror.url) :].lstrip("/")


def as_file(name: str | Path) -> Path:
    """Return the path of a file as `as_path`; the local copy of a file in a bucket is a copy of its folder."""
    folder, _, file = str(name).rstrip("/").rpartition("/")
    return as_path(folder, is_of_file=True) / file if "://" in folder else as_path(name)


def mirror_of(path: Path) -> tuple[Mirror, str] | None:
    """Return the mirror of a path and the path's name in it ("" for the root), or None on a disk."""
    for mirror in list(_mirrors):
        if path.is_relative_to(mirror.folder):
            return mirror, "/".join(path.relative_to(mirror.folder).parts)
    return None


def address(path: Path) -> str:
    """Return the address of a path in a local copy, or else the path, for users."""
    located = mirror_of(path)
    return str(path) if located is None else _joined(located[0].url, located[1])


def bucket_of(path: Path) -> tuple[Store, str]:
    """Return the bucket of a path in a local copy, and the path's key in it."""
    located = mirror_of(path)
    assert located is not None, f"{path} is on a disk"
    return located[0].store, located[0].key_of(located[1])


def is_heavy(name: str) -> bool:
    """Return whether the file `name` of a run's folder is sent and fetched on request only."""
    return name.endswith(HEAVY_SUFFIX) or name.partition("/")[0] in HEAVY_FOLDERS


# ---- a local copy -------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """The state of a file when it was last sent or fetched."""

    put_tag: str | None  # condition of the next put; None for no condition
    listed_tag: str | None  # tag in listings; None for a file of this process, which is not fetched
    stat: tuple[int, int] | None  # of the local file


class Mirror:
    """This process's copy of a folder in a bucket. Thread-safe.

    Methods take the name of a file or folder in it, or "" for the root. They raise StorageError, and FileNotFoundError
    for a missing bucket.
    """

    def __init__(self, url: str, is_of_file: bool = False):
        protocol, bucket, self._key = split_address(url)
        self.url, self.store, self.is_of_file = url, Store(protocol, bucket), is_of_file
        self.folder = LocalCopy(tempfile.mkdtemp(dir=_folder_of_process()), url.rpartition("/")[2])
        self.folder.mkdir()
        self.is_owner: Callable[[], bool] = lambda: True
        self._known: dict[str, _Known] = {}
        self._lock = threading.RLock()
        self._stop: threading.Event | None = None
        self._is_failing = False

    def key_of(self, name: str) -> str:
        return _joined(self._key, name)

    def objects(self, name: str, at_the_top: bool = False) -> dict[str, Content]:
        """List the object `name`, or the objects below it (`at_the_top`: directly below), by name in the mirror."""
        key = self.key_of(name)

        def list_folder() -> dict[str, Content]:
            below = self.store.names(key)[1] if at_the_top else self.store.below(key)
            return {_joined(name, inside): content for inside, content in below.items()}

        def list_file() -> dict[str, Content]:
            with contextlib.suppress(FileNotFoundError):
                return {name: self.store.head(key)} if name else {}
            return {}

        # Try the likelier case first, to save a request.
        if "." in name.rpartition("/")[2]:
            return list_file() or list_folder()
        return list_folder() or list_file()

    def pull(self, name: str, at_the_top: bool = False) -> None:
        """Fetch changes of other processes below `name`, except heavy files; keep files that this process changed.

        `at_the_top` fetches only files directly below.
        """
        with self._lock:
            listed = self.objects(name, at_the_top)
            objects = {entry: content for entry, content in listed.items() if not _is_hidden(entry)}
            changed = [entry for entry, content in objects.items() if self._is_changed_remotely(entry, content)]
            fetched = [entry for entry in changed if entry == name or not is_heavy(_below(entry, name))]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                in_parallel(lambda entry: self._fetch(entry, objects[entry]), fetched, pool)
            for entry, state in list(self._known.items()):
                is_listed = _is_in(entry, name) and not (at_the_top and "/" in _below(entry, name))
                is_gone = is_listed and entry not in objects and state.listed_tag is not None
                if is_gone and not self._is_changed(entry):
                    (self.folder / entry).unlink(missing_ok=True)
                    del self._known[entry]

    def push(
        self, name: str, is_wanted: Callable[[str], bool] = lambda name: True, *, only_if_unchanged: bool = False
    ) -> None:
        """Send files that this process changed. Only `remove` deletes objects; journals that are gone become empty.

        Raises ChangedError if another process wrote a file, and this process is not the owner, or `only_if_unchanged`.
        """
        with self._lock:
            changed = [entry for entry in self._local(name) if is_wanted(entry) and self._is_changed(entry)]
            ordered = sorted(changed, key=lambda entry: (_is_marker(entry), "/" not in entry, entry))
            # Read first the files that are sent last: a line arrives after the files that it refers to.
            early = [entry for entry in reversed(ordered) if _is_marker(entry) or "/" not in entry]
            read = {entry: _read(self.folder / entry) for entry in early}
            journals = [entry for entry, state in self._known.items() if entry.endswith(JOURNALS) and state.stat]
            for entry in filter(is_wanted, journals):
                if _is_in(entry, name) and not (self.folder / entry).exists():
                    self._send(entry, None, b"", only_if_unchanged)
            for entry in ordered:
                content = read[entry] if entry in read else _read(self.folder / entry)
                if content is not None:  # None: deleted since the listing
                    self._send(entry, *content, only_if_unchanged)

    def keep_unsent(self, name: str, folder: Path) -> None:
        """Copy files that this process changed below `name` into `folder`, and move tensors, which are not appended to.

        Their names are relative to `name`.
        """
        with self._lock:
            for entry in filter(self._is_changed, self._local(name)):
                target = folder / _below(entry, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                (os.replace if entry.endswith(HEAVY_SUFFIX) else shutil.copyfile)(self.folder / entry, target)

    def remove(self, name: str) -> None:
        """Delete a file or folder locally and in the bucket."""
        with self._lock:
            names = self.objects(name)
            for marks in (True, False):
                self.store.delete([self.key_of(entry) for entry in names if _is_marker(entry) == marks])
            self.release(name)

    def release(self, name: str) -> None:
        """Remove the local copy of a file or folder; the objects stay."""
        with self._lock:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            self.folder.mkdir(exist_ok=True)
            for entry in [entry for entry in self._known if _is_in(entry, name)]:
                del self._known[entry]

    def sync(self, pulls: Pulls) -> None:
        """Push and pull, except heavy files; log a failing store once as a warning."""
        try:
            with within(SYNC_PATIENCE_S):
                self.push("", lambda name: not is_heavy(name))
                if pulls is not None:
                    self.pull("", at_the_top=pulls == "top")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("%s: not synced; files stay on this node's disk until then: %s", self.url, error)
            self._is_failing = True

    def keep_synced(self, pulls: Pulls) -> None:
        """Sync every SYNC_S seconds in a thread, until `stop_syncing` or the process ends."""
        if self._stop is not None:
            return
        self._stop = stop = threading.Event()

        def run() -> None:
            while not stop.wait(SYNC_S):
                self.sync(pulls)

        threading.Thread(target=run, daemon=True, name="mirror").start()
        atexit.register(self.stop_syncing)

    def stop_syncing(self) -> None:
        """Push a last time, except heavy files, within FINAL_PATIENCE_S, and stop syncing."""
        atexit.unregister(self.stop_syncing)
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            with within(FINAL_PATIENCE_S), contextlib.suppress(OSError):
                self.push("", lambda name: not is_heavy(name))

    def _local(self, name: str) -> list[str]:
        """List local files, without those that are being written (`.name`)."""
        path = self.folder / name
        files = (
            [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        )
        names = (file.relative_to(self.folder).as_posix() for file in files)
        return [entry for entry in names if not _is_hidden(entry)]

    def _is_changed(self, name: str) -> bool:
        stat, state = _stat(self.folder / name), self._known.get(name)
        return stat is not None and (state is None or stat != state.stat)

    def _is_changed_remotely(self, name: str, content: Content) -> bool:
        state = self._known.get(name)
        is_here = name.endswith(JOURNALS) or (self.folder / name).exists()
        is_same = state is not None and state.listed_tag in (None, content.tag) and is_here
        return not (is_same or self._is_changed(name))

    def _fetch(self, name: str, content: Content) -> None:
        target = _inside(self.folder, name, self.url)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary, tag = target.with_name(f".{target.name}.{os.getpid()}"), None
        try:
            if content.size <= PIECE_BYTES:
                data, tag = self.store.get(self.key_of(name))
                temporary.write_bytes(data)
            else:
                self.store.download(self.key_of(name), content, temporary)
        except (FileNotFoundError, ChangedError):  # deleted or replaced since the listing: left to the next pull
            temporary.unlink(missing_ok=True)
            return
        os.replace(temporary, target)
        self._known[name] = _Known(tag, content.tag, _stat(target))

    def _send(self, name: str, stat: tuple[int, int] | None, data: bytes | None, only_if_unchanged: bool) -> None:
        state, tag = self._known.get(name), None
        if data is None:
            self.store.upload(self.folder / name, self.key_of(name))
        else:
            try:
                tag = self.store.put(self.key_of(name), data, "" if state is None else state.put_tag)
            except ChangedError:
                if only_if_unchanged or not self.is_owner():
                    raise
                tag = self.store.put(self.key_of(name), data)
        self._known[name] = _Known(tag, None, stat)


def _read(file: Path) -> tuple[tuple[int, int], bytes | None] | None:
    """Return the state of a file and its bytes, or None for the bytes of a large one; None without a file."""
    with contextlib.suppress(FileNotFoundError):
        stat = _stat(file)
        return stat and (stat, None if stat[1] > PIECE_BYTES else file.read_bytes())
    return None


def _stat(file: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size
    return None


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def _below(name: str, folder: str) -> str:
    return name.removeprefix(folder).lstrip("/")


def _is_in(name: str, folder: str) -> bool:
    return not folder or name == folder or name.startswith(f"{folder}/")


def _is_hidden(name: str) -> bool:
    """Return whether `name` is a lock or a file that is being written."""
    return any(part.startswith(".") for part in name.split("/"))


def _is_marker(name: str) -> bool:
    return name.rpartition("/")[2] in MARKS


_mirrors: list[Mirror] = []
_mirrors_lock = threading.Lock()


# ---- operations on paths, on a disk or in a bucket ----------------------------------------------------------------


def pull(path: Path, *, at_the_top: bool = False) -> None:
    """Fetch other processes' changes of a file or folder, as `Mirror.pull`."""
    if located := mirror_of(path):
        located[0].pull(located[1], at_the_top)


def read_stored(path: Path, span: tuple[int, int] | None = None) -> bytes:
    """Read the bytes [start, end) of a `span`, or a whole file, from its store, not the local copy.

    Raises FileNotFoundError, StorageError.
    """
    if located := mirror_of(path):
        store, key = located[0].store, located[0].key_of(located[1])
        return store.get(key)[0] if span is None else store.range(key, *span)
    start, end = span or (0, -1)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def keep_unsent(path: Path, folder: Path) -> None:
    """Keep files that this process changed and has not sent in a folder of this node, as `Mirror.keep_unsent`."""
    if located := mirror_of(path):
        located[0].keep_unsent(located[1], folder)


def abort_uploads(path: Path) -> None:
    """Abort uploads below a path that dead processes left incomplete."""
    if located := mirror_of(path):
        located[0].store.abort_uploads(located[0].key_of(located[1]))


def upload(folder: Path, names: Iterable[str], path: Path) -> None:
    """Send files of a folder of this node to a folder in a bucket; do nothing on a disk."""
    if located := mirror_of(path):
        mirror, inside = located
        for name in names:
            mirror.store.upload(folder / name, mirror.key_of(_joined(inside, name)))


def push(path: Path, *, only_if_unchanged: bool = False) -> None:
    """Send this process's changes of a file or folder. Raises ChangedError as `Mirror.push`."""
    if located := mirror_of(path):
        located[0].push(located[1], only_if_unchanged=only_if_unchanged)


def keep_synced(path: Path, is_owner: Callable[[], bool] = lambda: True, *, pulls: Pulls = "all") -> None:
    """Sync the local copy of a path until `stop_syncing`, or until this process ends.

    `is_owner` returns whether this process may still overwrite its files.
    """
    if located := mirror_of(path):
        located[0].is_owner = is_owner
        located[0].keep_synced(pulls)


@contextlib.contextmanager
def synced(path: Path, is_owner: Callable[[], bool] = lambda: True) -> Iterator[Path]:
    """Pull a path, and keep its local copy synced in the block. Raises StorageError if the last push fails."""
    pull(path)
    keep_synced(path, is_owner)
    try:
        yield path
        push(path)
    finally:
        if located := mirror_of(path):
            located[0].stop_syncing()


def remove(path: Path) -> None:
    """Delete a file or a whole folder; a folder on a disk disappears atomically."""
    if located := mirror_of(path):
        located[0].remove(located[1])
    elif path.is_dir():
        hidden = path.with_name(REMOVED + path.name)
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)


def release(path: Path) -> None:
    """Remove the local copy of pushed files; do nothing on a disk."""
    if located := mirror_of(path):
        located[0].release(located[1])


def sizes(path: Path) -> dict[str, int]:
    """Return the sizes in bytes of the files below a folder, by name relative to it."""
    if located := mirror_of(path):
        return {_below(name, located[1]): content.size for name, content in located[0].objects(located[1]).items()}
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in path.rglob("*") if file.is_file()}


def contents(path: Path) -> list[str]:
    """List the names of files and folders directly in a folder; [] without the folder."""
    if located := mirror_of(path):
        folders, objects = located[0].store.names(located[0].key_of(located[1]))
        return sorted({*folders, *objects})
    return sorted(file.name for file in path.iterdir()) if path.is_dir() else []


def free_bytes(path: Path) -> float:
    """Return the free bytes at a path; infinity for a bucket."""
    return math.inf if mirror_of(path) else shutil.disk_usage(path).free


def file_of_process(path: Path) -> Path:
    """Return the file to which this process appends lines, for a file that several processes share.

    On a disk it is the file itself. In a bucket each process has its own file, which `files_of_processes` finds.
    """
    if mirror_of(path) is None:
        return path
    # A container that starts again may have the same host and process id; the process's folder has a random suffix.
    unique = _folder_of_process().name.rpartition("-")[2]
    return path.with_stem(f"{path.stem}-{socket.gethostname()}-{os.getpid()}-{unique}")


def files_of_processes(path: Path) -> list[Path]:
    """List the files of all processes that append to `path` (`file_of_process`)."""
    return [*([path] if path.is_file() else []), *sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))]


# ---- this node's disk ---------------------------------------------------------------------------------------------


def scratch(path: Path) -> Path:
    """Return this node's folder for data of an address, shared by all processes of this user."""
    folder = _folder_of_user() / hashlib.sha256(address(path).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def fetched(
    path: Path,
    is_wanted: Callable[[str], bool] = lambda name: True,
    check: Callable[[Path], None] = lambda folder: None,
) -> Iterator[Path]:
    """Yield a folder of this node with the wanted files below `path`; on a disk, `path` itself.

    Processes of a node that want the same objects share the folder. The last one removes it; after a kill, the next
    process that starts does.

    `is_wanted` selects files by name relative to `path`. `check` is called once with the filled folder, to which it may
    add files. Raises OSError if this node's disk is too small, and ValueError if a name leads out of the folder.
    """
    located = mirror_of(path)
    if located is None:
        yield path
        return
    mirror, name = located
    objects = {entry: content for entry, content in mirror.objects(name).items() if is_wanted(_below(entry, name))}
    hashed = hashlib.sha256(repr(sorted(objects.items())).encode()).hexdigest()[:8]
    folder = scratch(path) / f"fetched-{hashed}" / (path.name or "folder")

    def fetch() -> None:
        needed, free = sum(content.size for content in objects.values()), shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(
                f"no space for {address(path)} in {folder}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free; "
                "free some or set TMPDIR to a larger disk on every node"
            )
        for entry, content in objects.items():
            target = _inside(folder, _below(entry, name), address(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            mirror.store.download(mirror.key_of(entry), content, target)
        check(folder)

    with _shared(folder, fetch):
        yield folder


def _inside(folder: Path, name: str, url: str) -> Path:
    """Return the path of `name` in a folder. Raises ValueError if it leads out of the folder."""
    if not (target := Path(os.path.abspath(folder / name))).is_relative_to(folder):
        raise ValueError(f"{url}: {name!r} leads out of it")
    return target


@contextlib.contextmanager
def _shared(folder: Path, fill: Callable[[], None]) -> Iterator[None]:
    """Share a folder inside the block: the first process of this node fills it, and the last one removes it."""
    marker = folder.with_name(f"{folder.name}.whole")
    folder.parent.mkdir(exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        while True:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if marker.exists():
                break
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not marker.exists():  # no other process filled it meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                try:
                    fill()
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)  # else a full disk would stay full
                    raise
                marker.touch()
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                marker.unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)


def fetched_for_good(path: Path) -> Path:
    """Fetch a folder as `fetched`, and keep it until this process ends."""
    return _until_the_end.enter_context(fetched(path))


_until_the_end = contextlib.ExitStack()
atexit.register(_until_the_end.close)


def _folder_of_user() -> Path:
    root = Path(tempfile.gettempdir(), f"vla-fine-tuning-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user; set TMPDIR to a folder of your own")
    return root


@functools.cache
def _folder_of_process() -> Path:
    """Create this process's folder for local copies; remove the folders and fetched files of dead processes."""
    with open(_folder_of_user() / ".sweep", "w") as sweep:
        fcntl.flock(sweep, fcntl.LOCK_EX)
        for lock in _folder_of_user().glob("process-*/.lock"):
            with contextlib.suppress(OSError), open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        for lock in _folder_of_user().glob("*/fetched-*/*.lock"):  # the lock stays: others may wait for it
            with contextlib.suppress(OSError), open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.with_suffix(".whole").unlink(missing_ok=True)
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"process-{os.getpid()}-", dir=_folder_of_user()))
        alive = open(folder / ".lock", "w")  # noqa: SIM115  (locked until the process ends)
        fcntl.flock(alive, fcntl.LOCK_EX)
    atexit.register(_remove_folder, os.getpid(), folder, alive)
    return folder


def _remove_folder(process: int, folder: Path, alive: Any) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)
        alive.close()
