"""Files that the chosen episodes need: missing, empty and truncated ones are reported with their episodes."""

import os
import re
import shutil
import struct

import numpy as np
import pytest

from tests.buckets import MemoryBucket
from tests.data.test_metadata import ORIGINAL, SIDE, TOP, WRIST, refuses  # noqa: F401  (ORIGINAL is read by the fixture)
from vla_finetuning.data import storage
from vla_finetuning.data.dataset import select_episodes
from vla_finetuning.data.dataset_files import check_files, find_missing_files
from vla_finetuning.data.metadata import load_metadata


@pytest.mark.parametrize(
    ("episodes", "expected"),
    [(None, [*range(12)]), ([5, 0, 3], [0, 3, 5]), (np.array([2], np.int32), [2]), (range(4), [0, 1, 2, 3])],
)
def test_select_episodes(original, episodes, expected):
    selected = select_episodes(load_metadata(original), episodes)
    assert selected.tolist() == expected and selected.dtype == np.int64


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([], "none chosen"),
        ([12], r"\[12\] not in the dataset, which has 0..11"),
        ([-1, 3], r"\[-1\] not in the dataset"),
        ([1, 2, 1], r"\[1\] chosen more than once"),
        ([True, False], "expected a list of whole numbers"),
        ([[1]], "expected a list of whole numbers"),
    ],
)
def test_select_episodes_refuses_invalid_numbers(original, episodes, message):
    with pytest.raises(ValueError, match=f"dataset {original}: episodes: .*{message}"):
        select_episodes(load_metadata(original), episodes)


@pytest.mark.parametrize("what", ["is missing", "is empty"])
@pytest.mark.parametrize("kind", ["mp4", "parquet"])
def test_check_files_names_the_file_and_its_episodes(root, kind, what):
    meta = load_metadata(root)
    if kind == "mp4":
        path, users = meta.video_files[WRIST][1], np.flatnonzero(meta.episode_video_file[WRIST] == 1)
    else:
        path, users = meta.data_files[1], np.flatnonzero(meta.episode_data_file == 1)
    (root / path).unlink() if what == "is missing" else os.truncate(root / path, 0)
    message = f"dataset {root}: {path} {what} (needed by episodes {users.tolist()})"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        check_files(meta)
    others = np.setdiff1d(meta.episode_index, users)
    check_files(meta, episodes=others)
    with pytest.raises(FileNotFoundError, match=re.escape(path)):
        check_files(meta, episodes=users[:1])
    if kind == "mp4":
        check_files(meta, camera_keys=[TOP, SIDE])
    else:
        with pytest.raises(FileNotFoundError, match=re.escape(path)):
            check_files(meta, camera_keys=[])


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "header"])
@pytest.mark.parametrize("kind", ["mp4", "parquet"])
def test_truncated_files_are_found(root, kind, damage):
    meta = load_metadata(root)
    path = root / (meta.video_files[TOP][0] if kind == "mp4" else meta.data_files[0])
    content = path.read_bytes()
    damaged = {"truncated": content[: int(0.9 * len(content))], "header": content[:6]}
    path.write_bytes(damaged.get(damage, b"x" * len(content)))
    users = np.flatnonzero((meta.episode_video_file[TOP] if kind == "mp4" else meta.episode_data_file) == 0)
    holes = find_missing_files(meta)
    assert holes.episodes.tolist() == users.tolist()
    size = path.stat().st_size
    assert f"cut short at {size} bytes, or no {kind} file: a copy or a recording ended early (needed by" in str(holes)
    assert holes.cameras == ((TOP,) if kind == "mp4" else ()) and not holes.without_folder


def test_mp4_box_variants_are_accepted(root):
    """Boxes with 64-bit sizes, a last one up to the end of the file, and unknown kinds."""
    path = root / load_metadata(root).video_files[TOP][0]
    content = path.read_bytes()
    last = content.index(b"mdat") - 4
    assert int.from_bytes(content[last : last + 4], "big") == len(content) - last
    path.write_bytes(
        struct.pack(">I4sQ", 1, b"free", 20) + b"1234" + content[:last] + struct.pack(">I", 0) + content[last + 4 :]
    )
    assert not find_missing_files(load_metadata(root))


def test_check_files_reports_missing_video_folder(root):
    shutil.rmtree(root / "videos")
    with pytest.raises(FileNotFoundError, match=r"mp4 is missing.*and \d+ more files"):
        check_files(load_metadata(root))


def test_check_files_lists_each_folder_once(original, monkeypatch):
    meta = load_metadata(original)
    listed, find = [], type(meta.fs).find
    monkeypatch.setattr(type(meta.fs), "find", lambda self, path, **kw: listed.append(path) or find(self, path, **kw))
    monkeypatch.setattr(type(meta.fs), "exists", None)
    check_files(meta)
    needed = [*meta.data_files, *(path for key in meta.video_keys for path in meta.video_files[key])]
    assert sorted(listed) == sorted({f"{meta.base}/{path.rpartition('/')[0]}" for path in needed})


def as_hub_cache(dataset, cache):
    """Lay a dataset out as huggingface_hub's cache does: links to blobs of the same repository."""
    repo = cache / "datasets--user--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in dataset.rglob("*") if p.is_file())):
        blob = repo / "blobs" / f"{number:064x}"
        shutil.copy(path, blob)
        link = snapshot / path.relative_to(dataset)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_hub_cache_links_are_followed(original, tmp_path):
    snapshot = as_hub_cache(original, tmp_path)
    meta = load_metadata(snapshot)
    check_files(meta)
    link = snapshot / meta.video_files[TOP][0]
    os.truncate(link.resolve(), 0)
    with pytest.raises(FileNotFoundError, match=f"{meta.video_files[TOP][0]} is empty"):
        check_files(meta)
    link.resolve().unlink()
    with pytest.raises(FileNotFoundError, match=f"{meta.video_files[TOP][0]} is (missing|empty)"):
        check_files(meta)


def test_hub_cache_link_to_another_repository_is_refused(original, tmp_path):
    snapshot = as_hub_cache(original, tmp_path)
    other = tmp_path / "datasets--user--other" / "blobs" / "1"
    other.parent.mkdir(parents=True)
    shutil.copy(original / "meta/stats.json", other)
    (snapshot / "meta/stats.json").unlink()
    (snapshot / "meta/stats.json").symlink_to(other)
    refuses(snapshot, "meta/stats.json is a link to .*, outside the dataset")


def test_check_files_in_object_storage(original, monkeypatch):
    """A bucket has no folders and no links."""
    memory = MemoryBucket()
    monkeypatch.setattr(storage, "Store", lambda *_: memory)
    for path in original.rglob("*"):
        if path.is_file():
            memory.put(f"dataset/{path.relative_to(original).as_posix()}", path.read_bytes())
    meta = load_metadata("s3://memory/dataset")
    assert meta.root == "s3://memory/dataset"
    assert meta.data_files == load_metadata(original).data_files
    check_files(meta)
    memory.delete([f"dataset/{meta.video_files[TOP][1]}"])
    with pytest.raises(FileNotFoundError, match=f"s3://memory/dataset: .*{meta.video_files[TOP][1]} is missing"):
        check_files(meta)
    memory.delete(list(memory.below("")))
    with pytest.raises(FileNotFoundError, match="s3://memory/dataset: no such folder"):
        load_metadata("s3://memory/dataset")
