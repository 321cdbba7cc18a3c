"""Paths in object stores, for what a run writes: `place` gives a `Path`, whose objects are read and written whole.

An object that must not exist yet, or must still be the one that was read, is put under that condition, and the store
refuses it otherwise. Lines are appended by lines.py; requests are store.py's.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Generator, Iterator
from pathlib import Path, PosixPath
from typing import Any

from vla_finetuning.store import MOST_BYTES, Content, Store, split_address


def place(name: str | Path) -> Path:
    """Return the path that a name stands for, on a disk or in a bucket; `~` is home.

    Raises:
        ValueError: an address of no store that is known here.
    """
    text = str(name)
    if "://" not in text:
        return Path(text).expanduser()
    split_address(text)
    return BucketPath(text)


class BucketPath(PosixPath):
    """A path in a bucket. What `Path` does and this does not (renaming, locking, `open`) raises TypeError.

    All methods raise FileNotFoundError for what is not there, and `StorageError`.
    """

    def __str__(self) -> str:
        protocol, *rest = self.parts or (".",)
        return f"{protocol}//{'/'.join(rest)}" if protocol.endswith(":") else "/".join(self.parts) or "."

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in a bucket, and was used as a path on a disk")

    def __bytes__(self) -> bytes:
        return str(self).encode()

    @property
    def key(self) -> str:
        """The name in its bucket; empty for the bucket itself."""
        return "/".join(self.parts[2:])

    @property
    def store(self) -> Store:
        return _store(self.parts[0].removesuffix(":"), self.parts[1])

    def absolute(self) -> BucketPath:
        return self

    def expanduser(self) -> BucketPath:
        return self

    def is_absolute(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False

    def content(self) -> Content:
        return self.store.head(self.key)

    def exists(self, **_: Any) -> bool:
        if self.key:
            return self.is_file() or self.is_dir()
        with contextlib.suppress(FileNotFoundError):
            self.store.is_folder("")
            return True  # an empty bucket, too
        return False

    def is_file(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.content()
            return True
        return False

    def is_dir(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.store.is_folder(self.key)
        return False

    def iterdir(self) -> Generator[BucketPath]:
        with contextlib.suppress(FileNotFoundError):
            folders, objects = self.store.names(self.key)
            yield from [self / name for name in sorted({*folders, *objects})]

    def glob(self, pattern: str, **_: Any) -> Iterator[BucketPath]:  # type: ignore[override]
        if "/" in pattern or "**" in pattern:
            raise TypeError(f"{self}: folders in folders are not searched")
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def below(self) -> dict[str, Content]:
        """Return all objects below, by their names from here."""
        with contextlib.suppress(FileNotFoundError):
            return self.store.below(self.key)
        return {}

    def read_bytes(self, most_bytes: int = MOST_BYTES) -> bytes:
        return self.store.get(self.key, most_bytes)[0]

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def read_tagged(self) -> tuple[bytes, str]:
        """Return what is there, and the tag that `put` takes."""
        return self.store.get(self.key)

    def put(self, data: bytes, *, tag: str | None = None, patience_s: float | None = None) -> str:
        """Write an object; returns its tag.

        Args:
            tag: of what must still be there; "" where nothing may be.
        Raises:
            ChangedError: something else is there.
        """
        return self.store.put(self.key, data, tag, patience_s)

    def write_bytes(self, data: Any) -> int:
        self.put(bytes(data))
        return len(data)

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

    def touch(self, mode: int = 0o666, exist_ok: bool = True) -> None:
        self.put(b"")

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Folders need not be made."""

    def unlink(self, missing_ok: bool = False) -> None:
        self.store.delete([self.key])

    def remove_tree(self) -> None:
        """Delete all objects below, and the one of this name."""
        self.store.delete([self.key, *(f"{self.key}/{name}" for name in self.below())])

    def upload(self, file: Path) -> None:
        """Write a file of this machine, however large."""
        self.store.upload(file, self.key)

    def download(self, file: Path, content: Content) -> None:
        """Write into a file of this machine what was listed here."""
        self.store.download(self.key, content, file)


@functools.cache
def _store(protocol: str, bucket: str) -> Store:
    """Return this process's client of a bucket."""
    return Store(protocol, bucket)
