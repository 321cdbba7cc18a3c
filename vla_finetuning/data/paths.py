"""Which file of a LeRobot v3 dataset holds which episode, and that it lies inside the dataset.

Path templates and links are not trusted: templates are parsed and not `.format`-ted, and every path stays below
the root. Layout: LeRobot 0.6.1, `lerobot/datasets/dataset_metadata.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.data.dataset import naming_file
from vla_finetuning.files import refuse_pointer

INFO_PATH = "meta/info.json"
MAX_INDEX = 10**9  # of files and their chunks, and therefore the widest number in a path
# LeRobot's values for an info.json that does not state them.
DEFAULT_TEMPLATES = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
DEFAULT_CHUNKS_SIZE = 1000


def assign_files(
    info: Mapping[str, Any], episodes: Mapping[str, np.ndarray], video_key: str | None = None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Give every episode its parquet file, or its mp4 file of a camera.

    Args:
        info: what info.json says.
        episodes: in the order of `episode_index`, that, and of `data/` or `videos/{video_key}/` the `chunk_index` and
            `file_index`: integers (E,), checked.
        video_key: the camera; None for the parquet files.
    Returns:
        The distinct paths in order of first use, and int32 (E,) into them.
    Raises:
        ValueError: the template is none, leads out of the dataset, or gives different files one path.
    """
    name, prefix = ("data_path", "data") if video_key is None else ("video_path", f"videos/{video_key}")
    template = info.get(name, DEFAULT_TEMPLATES[name])
    label = f"{INFO_PATH}: {name}"
    used = _fields(label, template, allow_video_key=video_key is not None)
    columns = {"episode_index": episodes["episode_index"]}
    columns |= {field: episodes[f"{prefix}/{field}"] for field in ("chunk_index", "file_index")}
    if "episode_chunk" in used:
        chunks_size = info.get("chunks_size", DEFAULT_CHUNKS_SIZE)
        if type(chunks_size) is not int or chunks_size < 1:
            raise ValueError(f"{INFO_PATH}: chunks_size is {chunks_size!r:.50}, expected a positive whole number")
        columns["episode_chunk"] = columns["episode_index"] // chunks_size

    if used & {"episode_index", "episode_chunk"}:
        identity = columns["episode_index"]
    else:
        identity = columns["chunk_index"].astype(np.int64) * MAX_INDEX + columns["file_index"]
    _, first, inverse = np.unique(identity, return_index=True, return_inverse=True)
    by_first_use = np.argsort(first)
    rank = np.empty_like(by_first_use)
    rank[by_first_use] = np.arange(len(first))
    paths = [
        template.format(video_key=video_key, **{field: int(column[episode]) for field, column in columns.items()})
        for episode in first[by_first_use].tolist()
    ]
    for path in paths:
        _check_inside(label, path)
    if len(set(paths)) != len(paths):
        raise ValueError(
            f"{label} {template!r:.200} gives different files the same path; it must hold {{chunk_index}} and "
            "{file_index}"
        )
    return tuple(paths), rank[inverse].astype(np.int32)


def first_row_in_file(file: np.ndarray, length: np.ndarray) -> np.ndarray:
    """First row of each episode in its file, where episodes stand in the order of their index: int64 (E,)."""
    order = np.argsort(file, kind="stable")
    before = np.cumsum(length[order]) - length[order]
    first_of_file = np.r_[True, np.diff(file[order]) > 0]
    before -= np.maximum.accumulate(np.where(first_of_file, before, 0))
    rows = np.empty_like(before)
    rows[order] = before
    return rows


def check_inside(fs: fsspec.AbstractFileSystem, base: str, paths: Sequence[str]) -> None:
    """Refuse local files that symbolic links put outside the dataset.

    The Hub's cache is made of links: `datasets--USER--NAME/snapshots/COMMIT/…` to `../../blobs/…` of the same
    repository folder; those are allowed.
    """
    if not isinstance(fs, LocalFileSystem):
        return
    real_root = os.path.realpath(base)
    allowed = [real_root]
    for folder in [Path(real_root), *Path(real_root).parents]:
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("datasets--"):
            allowed.append(str(folder.parent.parent / "blobs"))
    for path in paths:
        real = os.path.realpath(os.path.join(base, path))
        with contextlib.suppress(OSError):  # what is not there is said where it is read
            if not stat.S_ISREG(os.stat(real).st_mode):
                raise ValueError(f"{path} is not a regular file; copy the dataset again")
        if not any(real.startswith(folder.rstrip("/") + "/") for folder in allowed):
            raise ValueError(
                f"{path} is a link to {real}, outside the dataset; copy the file into the dataset's folder, "
                "or give the folder the link leads to"
            )


def read_whole(fs: fsspec.AbstractFileSystem, base: str, path: str, most_bytes: int) -> bytes:
    """A file of metadata.

    Raises:
        FileNotFoundError: it is not there. ValueError: it is larger, or a link to outside of the dataset.
        StorageError: the object store does not answer.
    """
    with _naming_metadata(fs, base, path):
        size = fs.size(f"{base}/{path}")
        text: bytes = fs.cat_file(f"{base}/{path}") if size <= most_bytes else b""
    _check_bytes(path, size, most_bytes)
    refuse_pointer(path, text)
    return text


def read_lines(
    fs: fsspec.AbstractFileSystem, base: str, path: str, most_bytes: int | None, line_bytes: int
) -> Iterator[bytes]:
    """The lines of a file of metadata, read in pieces: no more than a piece and a line is in memory.

    Args:
        most_bytes: of the file; None: any number. line_bytes: the most that a line may have.
    Raises:
        As `read_whole`; ValueError: a line is longer.
    """
    with _naming_metadata(fs, base, path):
        size = fs.size(f"{base}/{path}")
        _check_bytes(path, size, size if most_bytes is None else most_bytes)
        with fs.open(f"{base}/{path}", "rb") as opened:
            file = io.BufferedReader(opened, 2**20)
            for number, line in enumerate(iter(lambda: file.readline(line_bytes + 1), b""), 1):
                if len(line) > line_bytes:
                    raise ValueError(
                        f"{path}, line {number} has more than the {line_bytes / 2**20:,.0f} MiB that it may have: it "
                        "is damaged or made to exhaust the memory; restore the file"
                    )
                if number == 1:
                    refuse_pointer(path, line)
                yield line


@contextlib.contextmanager
def _naming_metadata(fs: fsspec.AbstractFileSystem, base: str, path: str) -> Iterator[None]:
    check_inside(fs, base, [path])
    try:
        with naming_file(path):
            yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; copy the dataset again") from None


def _check_bytes(path: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise ValueError(
            f"{path} has {size / 2**20:,.1f} MiB, more than the {most_bytes / 2**20:,.0f} MiB that it may have: it is "
            "damaged or made to exhaust the memory; restore the file"
        )


def _fields(label: str, template: Any, *, allow_video_key: bool) -> set[str]:
    """Return the fields of a path template that `str.format` may fill in: numbers with a width, no attributes."""
    numbers = r"(?:chunk_index|file_index|episode_index|episode_chunk)(?::0[1-9]d)?"
    field = rf"{numbers}|video_key" if allow_video_key else numbers
    if not isinstance(template, str) or not re.fullmatch(rf"(?:[^{{}}]|\{{(?:{field})\}})*", template):
        raise ValueError(
            f"{label} is {template!r:.200}, expected a path template such as "
            f"{DEFAULT_TEMPLATES['video_path' if allow_video_key else 'data_path']!r}, with no other fields than "
            "chunk_index, file_index, episode_index and episode_chunk"
        )
    return set(re.findall(r"\{(\w+)", template))


def _check_inside(label: str, path: str) -> None:
    steps = path.split("/")
    if not path.isprintable() or "\\" in path or ":" in path or any(step in ("", ".", "..") for step in steps):
        raise ValueError(f"{label} leads to {path!r:.200}, which is not a path inside the dataset")
