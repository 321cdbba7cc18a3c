"""Map the episodes of a LeRobot dataset to files, and check that the files lie inside the dataset.

Path templates and links are not trusted: the fields of templates are checked before formatting, and every path must
stay below the root. Layout: LeRobot 0.6.1, `lerobot/datasets/dataset_metadata.py`.
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
MAX_INDEX = 10**9  # of files and chunks; bounds the width of numbers in paths
# LeRobot's defaults for info.json.
DEFAULT_TEMPLATES = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
DEFAULT_CHUNKS_SIZE = 1000


def assign_files(
    info: Mapping[str, Any], episodes: Mapping[str, np.ndarray], video_key: str | None = None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Assign every episode to its parquet file, or to its mp4 file of the camera `video_key`.

    `episodes` has the columns `episode_index` and, below `data/` or `videos/{video_key}/`, `chunk_index` and
    `file_index`: checked integers (E,), sorted by episode. Return the distinct paths in order of first use, and the
    index of each episode's path, int32 (E,).

    Raises ValueError if the template is invalid, leads out of the dataset, or gives several files the same path.
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
        _check_path(label, path)
    if len(set(paths)) != len(paths):
        raise ValueError(
            f"{label} {template!r:.200} gives different files the same path; it must hold {{chunk_index}} and "
            "{file_index}"
        )
    return tuple(paths), rank[inverse].astype(np.int32)


def first_row_in_file(file: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return the first row of each episode in its file, int64 (E,); a file holds episodes in ascending order."""
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
        with contextlib.suppress(OSError):  # reading a missing file raises
            if not stat.S_ISREG(os.stat(real).st_mode):
                raise ValueError(f"{path} is not a regular file; copy the dataset again")
        if not any(real.startswith(folder.rstrip("/") + "/") for folder in allowed):
            raise ValueError(
                f"{path} is a link to {real}, outside the dataset; copy the file into the dataset's folder, "
                "or give the folder the link leads to"
            )


def read_whole(fs: fsspec.AbstractFileSystem, base: str, path: str, most_bytes: int) -> bytes:
    """Read a file of metadata. Raises ValueError if it is larger than `most_bytes`, or a link out of the dataset."""
    return b"".join(read_lines(fs, base, path, most_bytes, most_bytes))


def read_lines(
    fs: fsspec.AbstractFileSystem, base: str, path: str, most_bytes: int | None, line_bytes: int
) -> Iterator[bytes]:
    """Yield the lines of a file of metadata, with at most 1 MiB and one line in memory.

    `most_bytes` is the limit of the file's size, `line_bytes` that of a line. Raises ValueError as `read_whole`.
    """
    check_inside(fs, base, [path])
    why = "that it may have: it is damaged or made to exhaust the memory; restore the file"
    try:
        with naming_file(path), fs.open(f"{base}/{path}", "rb") as opened:
            if most_bytes is not None and opened.size > most_bytes:
                size, most = opened.size / 2**20, most_bytes / 2**20
                raise ValueError(f"{path} has {size:,.1f} MiB, more than the {most:,.0f} MiB {why}")
            file = io.BufferedReader(opened, 2**20)
            for number, line in enumerate(iter(lambda: file.readline(line_bytes + 1), b""), 1):
                if len(line) > line_bytes:
                    raise ValueError(f"{path}, line {number} has more than the {line_bytes / 2**20:,.0f} MiB {why}")
                if number == 1:
                    refuse_pointer(path, line)
                yield line
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; copy the dataset again") from None


def _fields(label: str, template: Any, *, allow_video_key: bool) -> set[str]:
    """Return the fields of a path template; only numbers with a width and `video_key` are allowed."""
    numbers = r"(?:chunk_index|file_index|episode_index|episode_chunk)(?::0[1-9]d)?"
    field = rf"{numbers}|video_key" if allow_video_key else numbers
    if not isinstance(template, str) or not re.fullmatch(rf"(?:[^{{}}]|\{{(?:{field})\}})*", template):
        raise ValueError(
            f"{label} is {template!r:.200}, expected a path template such as "
            f"{DEFAULT_TEMPLATES['video_path' if allow_video_key else 'data_path']!r}, with no other fields than "
            "chunk_index, file_index, episode_index and episode_chunk"
        )
    return set(re.findall(r"\{(\w+)", template))


def _check_path(label: str, path: str) -> None:
    steps = path.split("/")
    if not path.isprintable() or "\\" in path or ":" in path or any(step in ("", ".", "..") for step in steps):
        raise ValueError(f"{label} leads to {path!r:.200}, which is not a path inside the dataset")
