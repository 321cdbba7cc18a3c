"""Find or download the files that the episodes of a dataset need."""

from __future__ import annotations

import contextlib
import glob
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.data.dataset import DatasetMetadata, select_episodes, shorten
from vla_finetuning.data.hub import download_snapshot, resolve_commit
from vla_finetuning.data.metadata import load_metadata, unreachable
from vla_finetuning.data.mp4 import boxes
from vla_finetuning.files import LFS_POINTER

# Most local files whose ends are checked; a larger dataset is sampled evenly.
MAX_OPENED = 5_000
_MOST_NAMED = 5
# Most boxes of an mp4 to check: fragmented recordings have many.
_MAX_BOXES = 10_000


@dataclass(frozen=True, eq=False)
class MissingFiles:
    """Files that are missing, empty or cut short: `{path: problem}`, and the paths whose folder is missing or empty.

    `episodes` are the numbers of the episodes that need one of these files, int64, ascending.
    """

    problems: dict[str, str]
    episodes: np.ndarray
    cameras: tuple[str, ...]
    without_folder: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.problems)

    def __str__(self) -> str:
        named = [f"{path} {problem}" for path, problem in list(self.problems.items())[:_MOST_NAMED]]
        more = f"; and {len(self.problems) - _MOST_NAMED} more files" if len(self.problems) > _MOST_NAMED else ""
        return "; ".join(named) + more


def find_missing_files(
    meta: DatasetMetadata,
    *,
    episodes: Sequence[int] | np.ndarray | None = None,
    camera_keys: Sequence[str] | None = None,
) -> MissingFiles:
    """Find missing parquet and mp4 files of the chosen episodes and cameras. Run on the driver.

    List each folder once, which is cheap on object stores too. Open local files to check that they are complete.

    Raises:
        ValueError: an episode or a camera that the dataset does not have.
    """
    chosen = select_episodes(meta, episodes)
    needed = _needed_files(meta, chosen, camera_keys)
    sizes: dict[str, dict[str, int]] = {}
    problems: dict[str, str] = {}
    local = isinstance(meta.fs, LocalFileSystem)
    opened = set(list(needed)[:: -(-len(needed) // MAX_OPENED)] if local and needed else ())
    for path, used_by in needed.items():
        folder, _, name = path.rpartition("/")
        if folder not in sizes:
            sizes[folder] = _list_sizes(meta, folder)
        size = sizes[folder].get(name)
        try:
            complete = not size or path not in opened or _is_whole(Path(meta.base) / path, size)
        except OSError as error:
            raise unreachable(meta.root, error) from error
        if not size:
            problem = "is missing" if size is None else "is empty"
        elif not complete:
            suffix = path.rpartition(".")[2]
            problem = f"is cut short at {size} bytes, or no {suffix} file: a copy or a recording ended early"
            with contextlib.suppress(OSError), open(Path(meta.base) / path, "rb") as file:
                if file.read(len(LFS_POINTER)) == LFS_POINTER:
                    problem = "is a Git LFS pointer (run `git lfs pull` in the repository)"
        else:
            continue
        problems[path] = f"{problem} (needed by episodes {shorten(used_by.tolist())})"
    lost = [needed[path] for path in problems]
    cameras = (key for key in meta.video_keys if not problems.keys().isdisjoint(meta.video_files[key]))
    return MissingFiles(
        problems=problems,
        episodes=np.unique(np.concatenate(lost)) if lost else np.empty(0, np.int64),
        cameras=tuple(cameras),
        without_folder=tuple(path for path in problems if not any(sizes[path.rpartition("/")[0]].values())),
    )


def check_files(
    meta: DatasetMetadata,
    *,
    episodes: Sequence[int] | np.ndarray | None = None,
    camera_keys: Sequence[str] | None = None,
    skip: bool = False,
) -> None:
    """Raise FileNotFoundError if `find_missing_files` finds some, with their names and episodes.

    `skip` allows missing files, except for all files of a folder: the dataset is elsewhere then.
    """
    holes = find_missing_files(meta, episodes=episodes, camera_keys=camera_keys)
    if holes and (holes.without_folder or not skip):
        raise FileNotFoundError(
            f"dataset {meta.root}: {holes}. Copy or download the dataset again, or leave these episodes out"
        )


def fetch_dataset(
    repo_id: str,
    revision: str | None = None,
    *,
    episodes: Sequence[int] | None = None,
    camera_keys: Sequence[str] | None = None,
) -> tuple[str, str]:
    """Download a dataset, or the files of the chosen episodes and cameras, from the Hub; return its folder and commit.

    Run on the driver. `revision` is a branch, tag or commit; None is the tag `v3.0`, as in LeRobot, or else the default
    branch. The files are in LeRobot's own cache of Hub datasets, so that nothing is downloaded twice.

    Raises:
        ValueError: no such repository, revision, episode or camera, no access, or not a LeRobot dataset.
        OSError: the Hub cannot be reached.
    """
    from lerobot.utils.constants import HF_LEROBOT_HUB_CACHE

    place: Any = {"repo_type": "dataset", "cache_dir": HF_LEROBOT_HUB_CACHE}
    commit = resolve_commit(repo_id, revision, default_revision="v3.0", **place)
    folder = download_snapshot(repo_id, commit, allow_patterns=["meta/*"], **place)
    meta = load_metadata(folder)
    needed = _needed_files(meta, select_episodes(meta, episodes), camera_keys)
    if episodes is None and camera_keys is None:
        # The hub client matches every file with every pattern: name folders where that is enough.
        patterns = sorted({f"{glob.escape(path.split('/')[0])}/*" for path in needed})
    else:
        patterns = [glob.escape(path) for path in needed]
    if any(feature.dtype == "image" for feature in meta.features.values()):
        patterns.append("images/*")  # files that rows may refer to by path
    download_snapshot(repo_id, commit, allow_patterns=patterns, **place)
    return folder, commit


def _needed_files(
    meta: DatasetMetadata, episodes: np.ndarray, camera_keys: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Return `{path: episodes that need it}` of the files that `episodes` and `camera_keys` need."""
    unknown = sorted(set(camera_keys or ()) - set(meta.camera_keys))
    if unknown:
        raise ValueError(f"dataset {meta.root}: no camera {unknown}; it has {meta.camera_keys}")
    uses = [(meta.data_files, meta.episode_data_file)]
    for key in meta.video_keys:
        if camera_keys is None or key in camera_keys:
            uses.append((meta.video_files[key], meta.episode_video_file[key]))
    needed: dict[str, np.ndarray] = {}
    for files, episode_file in uses:
        # No loop over episodes: there may be 100,000.
        order = np.argsort(episode_file[episodes], kind="stable")
        numbers, first = np.unique(episode_file[episodes][order], return_index=True)
        for number, used_by in zip(numbers, np.split(episodes[order], first[1:]), strict=False):
            needed[files[number]] = used_by
    return needed


def _list_sizes(meta: DatasetMetadata, folder: str) -> dict[str, int]:
    """Return the sizes in bytes of the files in a folder of the dataset; {} without the folder."""
    path = f"{meta.base}/{folder}".rstrip("/")
    meta.fs.invalidate_cache(path)
    try:
        entries = meta.fs.find(path, maxdepth=1, detail=True)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreachable(meta.root, error) from error
    return {name.rpartition("/")[2]: int(entry.get("size") or 0) for name, entry in entries.items()}


def _is_whole(path: Path, size: int) -> bool:
    """Return whether a parquet or mp4 file has a valid end and index; True for other files."""
    with open(path, "rb") as file:
        if path.suffix == ".parquet":
            file.seek(max(0, size - 4))
            return size >= 12 and file.read(4) == b"PAR1"
        found = list(itertools.islice(boxes(file, 0, size if path.suffix == ".mp4" else 0), _MAX_BOXES))
    if path.suffix != ".mp4" or len(found) == _MAX_BOXES:
        return True
    return bool(found) and size - 8 < found[-1][-1] <= size and any(box_type == b"moov" for box_type, *_ in found)
