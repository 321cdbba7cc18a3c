"""Folders and files that only this user, or root, can have made or changed.

What a cache holds is read as if it were the dataset. So another user of the machine must not be able to put a file
there, to put a folder or a link in its place, or to have this user write through a link.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a folder, for this user alone where it is not there, and check it and everything that leads to it.

    No other user can change what passed: only owners may rename or remove a component of the path.

    Raises:
        PermissionError: a part of the path belongs to another user, or others may write there. OSError.
    """
    folder = Path(os.path.abspath(folder))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (folder, Path(os.path.realpath(folder))):  # as it is named, and where links lead
        for part in (path, *path.parents):
            _check(part, os.lstat(part))


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a file of this user's, made with mode 0600; a link is not followed.

    Raises:
        PermissionError: it is another user's, or no regular file. OSError: as `os.open`.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "belongs to another user, or is no file", str(path))
    return descriptor


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    # Where the sticky bit is set, as in /tmp, only its owner removes or renames an entry. A link has no mode.
    writable = stat.S_IWOTH & found.st_mode and not (found.st_mode & stat.S_ISVTX or stat.S_ISLNK(found.st_mode))
    if writable:
        raise PermissionError(errno.EPERM, "anybody may write there", str(path))
