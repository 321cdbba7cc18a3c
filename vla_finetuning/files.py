"""Read and write small files: atomic writes, line files, JSON from untrusted sources, permissions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

# Limit for JSON files from elsewhere, as configurations and indices of weights. Python objects take up to 25 times the
# bytes of the text.
MAX_JSON_BYTES = 16 * 2**20

# First bytes of a Git LFS pointer, which a clone without LFS has in place of a large file.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_pointer(name: str, begin: bytes) -> None:
    """Raise ValueError if `begin`, the first bytes of the file `name`, are of a Git LFS pointer."""
    if begin.startswith(LFS_POINTER):
        raise ValueError(
            f"{name} is a Git LFS pointer and not the file itself: run `git lfs pull` in its repository, or download "
            "it with `hf download`"
        )


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: readers see the old file or the new one."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old file or the new one. Lone surrogates become question marks."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8", errors="replace")
    os.replace(scratch, path)


@contextlib.contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a path beside `folder` for the block to create, and rename it to `folder` when the block succeeds.

    A reader never sees a half-written folder. Without `replace`, the first of two concurrent writers wins: an existing
    folder stays and the new one is dropped.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield workspace / "new"
        if replace and folder.exists():
            os.rename(folder, workspace / "old")
        try:
            os.rename(workspace / "new", folder)
        except OSError:
            if replace or not folder.is_dir():
                raise
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file. Raises OSError when the disk is full."""
    with open(path, "a") as file:
        file.write(f"{line}\n")


def drop_half_line(path: Path) -> None:
    """Truncate a file of which the caller is the only writer after its last whole line.

    A full disk or a power cut may leave half a line.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            first = max(0, end - 2**16)
            file.seek(first)
            newline = file.read(end - first).rfind(b"\n")
            end = first + newline + 1
            if newline >= 0:
                break
        file.truncate(end)


def open_lines(path: Path) -> TextIO:
    """Open a file to append lines, each of which is flushed. The caller must be the file's only writer."""
    path.parent.mkdir(exist_ok=True)
    drop_half_line(path)
    return open(path, "a", buffering=1)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a file from an untrusted source.

    Raises ValueError for a file larger than `most_bytes`, and for devices and pipes, which could block for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):  # checked here, as `open` would name the descriptor instead of the path
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    with open(descriptor, "rb") as file:
        if status.st_size > most_bytes:
            size, most = status.st_size / 2**20, most_bytes / 2**20
            raise ValueError(f"{path} has {size:,.0f} MiB, more than the {most:,.0f} MiB that it may have")
        return file.read(most_bytes)


def read_foreign_json(path: Path, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file from an untrusted source. Raises OSError or ValueError if that cannot be done."""
    text = read_regular(path, most_bytes)
    refuse_pointer(str(path), text)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of the run's folder; return {} if it does not exist. Raises ValueError for a damaged one."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        name = getattr(path, "url", path)  # of a bucket's local copy (`mirror.LocalCopy`)
        raise ValueError(f"{name}: cannot be read as JSON ({error}); put it back as it was, or remove it") from error


def read_lines(path: Path) -> list[str]:
    """Return the whole lines of a file, without a last one that is still being written; replace bytes of no text."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    return text[: text.rfind("\n") + 1].splitlines()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Parse the whole lines of a file; return [] if it does not exist. Raises ValueError for a damaged line."""
    parsed: list[dict[str, Any]] = []
    try:
        for line in read_lines(path):
            parsed.append(json.loads(line))
    except ValueError as error:
        name = getattr(path, "url", path)
        raise ValueError(f"{name}: line {len(parsed) + 1} cannot be read as JSON ({error}); delete it") from error
    return parsed


def let_others_read(path: Path) -> None:
    """Give a file its folder's read and write permissions, which follow the process's umask.

    safetensors 0.8.0 makes files for their owner only (github.com/safetensors/safetensors/issues/782), so that another
    user could not read a policy. Remove this when safetensors follows the umask again.
    """
    mode = path.stat().st_mode
    usual = mode | path.parent.stat().st_mode & 0o666
    if usual != mode:  # chmod fails on network drives with fixed permissions
        path.chmod(usual)
