"""Damaged files are named in an error, or only their episodes are skipped."""

import json
import os
import shutil
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from ray.data import DataContext

from lerobot_datasource import SHARE
from tests.data.test_datasource import (
    FPS,
    STILL,
    TOP,
    WINDOWS,
    WRIST,
    assert_same_row,
    lerobot,
    read_directly,
    rewrite_data,
    without_ray,
)
from tests.datasets import datasource, make_dataset
from vla_finetuning.buckets.store import StorageError
from vla_finetuning.data import decode as lerobot_decode
from vla_finetuning.data import rows as rows_module
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.read_tasks import BlockShare
from vla_finetuning.data.statistics import compute_as_lerobot

ORIGINAL = {"image_cameras": {STILL: (16, 24)}}


def videos(root, key=TOP):
    return sorted((root / "videos" / key).rglob("*.mp4"))


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def rewrite(root, change):
    """Rewrite the first data file's table with `change(columns)`."""

    def changed(number, table):
        columns = {n: table.column(n).to_pylist() for n in table.column_names}
        change(columns)
        return pa.table(columns, schema=table.schema) if number == 0 else table

    rewrite_data(root, changed)


def shorten_video(root):
    by_size = sorted(videos(root), key=lambda path: path.stat().st_size)
    shutil.copy(by_size[0], by_size[-1])


def set_row(key, row, value):
    return lambda root: rewrite(root, lambda columns: columns[key].__setitem__(row, value))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: cut(videos(root)[0]), f"{TOP}.*(truncated|damaged)"),
        (shorten_video, "no frame at .* the video ends at|truncated or the metadata is wrong"),
        (lambda root: shutil.copy(videos(root, WRIST)[0], videos(root)[0]), "frames are .* the metadata .* says"),
        (
            lambda root: rewrite(root, lambda c: c.update(timestamp=[t + 0.03 for t in c["timestamp"]])),
            r"farther than the tolerance.*--tolerance_s",
        ),
        (set_row("episode_index", 3, 2), "expected episode 0 frame 3.*found episode 2"),
        (set_row("task_index", 3, 77), r"episode 0: task_index 77 has no entry in meta/tasks \(it has"),
        (
            lambda root: rewrite_data(root, lambda number, table: table.slice(0, None if number else 5)),
            "the file has 5 rows",
        ),
        (set_row(STILL, 2, {"bytes": b"\x89PNG\r\n\x1a\nnope", "path": None}), r"episode 0\), row 2: damaged image"),
    ],
    ids=["cut", "shorter", "another size", "timestamps", "another episode", "no task", "rows missing", "image"],
)
def test_damaged_file_is_named_in_error(root, damage, message):
    damage(root)
    with pytest.raises(ValueError, match=message):
        read_directly(datasource([load_metadata(root)], check_files=False))


@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["plain", "windows"])
def test_on_error_skip_skips_only_unreadable_episodes(tmp_path, windows, monkeypatch):
    root = make_dataset(tmp_path / "damaged")
    meta, log = load_metadata(root), tmp_path / "skipped.jsonl"
    intact = next(datasource([meta], delta_timestamps=windows).read_rows(range(54), 54))
    number = meta.episode_video_file[TOP][2]
    cut(root / meta.video_files[TOP][number])
    skipped = np.isin(intact["episode_index"], np.flatnonzero(meta.episode_video_file[TOP] == number))
    assert 0 < skipped.sum() < 54

    def fail(path):
        raise StorageError(f"{path}: the store of the run's folder does not answer")

    def logged_positions():
        return sorted(p for line in log.read_text().splitlines() for p in json.loads(line)["positions"])

    monkeypatch.setattr(rows_module, "push", fail)
    source = partial(datasource, [meta], delta_timestamps=windows, on_error="skip", skip_log=log)
    rows = next(source().read_rows(range(54), 54))
    assert rows.keys() == intact.keys() | {"is_skipped"}
    np.testing.assert_array_equal(rows["is_skipped"], skipped)
    for key, expected in intact.items():
        assert rows[key].dtype == expected.dtype and rows[key].shape == expected.shape, key
        np.testing.assert_array_equal(rows[key][~skipped], expected[~skipped], err_msg=key)
    np.testing.assert_array_equal(rows["index"], intact["index"])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["episode_index"] for line in lines} == set(intact["episode_index"][skipped].tolist())
    assert all("again" in line["error"] and line["root"] == str(root) for line in lines)
    assert logged_positions() == np.flatnonzero(skipped).tolist()

    # In a share of a stream, too.
    log.unlink()
    without_ray(monkeypatch)
    context = DataContext()
    context.set_config(SHARE, BlockShare(1, 2, 2))
    (task,) = source(stream=(0, 54), block_rows=3).get_read_tasks(1, data_context=context)
    assert len(list(task())) == 9
    in_share = np.arange(54) // 3 % 2 == 1
    assert logged_positions() == np.flatnonzero(skipped & in_share).tolist()

    with pytest.raises(FileNotFoundError, match="cut short"):
        datasource([meta], delta_timestamps=windows)
    with pytest.raises(ValueError, match="again"):
        next(datasource([meta], delta_timestamps=windows, check_files=False).read_rows(range(54), 54))
    # As `select_columns`, without the columns that name the rows.
    actions = next(source().apply_projection({"action": "action"}).read_rows(range(54), 54))["action"]
    np.testing.assert_array_equal(actions[~skipped], intact["action"][~skipped])


@pytest.mark.parametrize("gone", ["", "data", f"videos/{TOP}"])
@pytest.mark.parametrize("unmounted", [True, False])
def test_on_error_skip_raises_if_dataset_folder_vanishes(root, gone, unmounted):
    source = datasource([load_metadata(root)], on_error="skip")
    shutil.rmtree(root / gone)
    if unmounted:
        (root / gone).mkdir()
    with pytest.raises(OSError, match=f"{root}: .* is gone, or empty: .*mounted.*--resume"):
        next(source.read_rows(range(54), 54))


def test_windows_of_index_columns_equal_lerobots(tmp_path):
    """Also of unreadable rows."""
    root = make_dataset(tmp_path / "windows", episodes=(3, 5), cameras={}, data_files_size_in_mb=1e-6)
    windows = {key: [-1 / FPS, 0.0, 1 / FPS] for key in ("index", "frame_index")}
    items, meta = lerobot(root, delta_timestamps=windows), load_metadata(root)
    source = datasource([meta], delta_timestamps=windows, on_error="skip")
    (rows,) = source.read_rows(range(8), 8)
    for i in range(8):
        assert_same_row({k: v[i] for k, v in rows.items() if k != "is_skipped"}, items[i], meta)
    (root / meta.data_files[0]).unlink()
    (damaged,) = source.read_rows(range(8), 8)
    assert damaged["is_skipped"].tolist() == [True] * 3 + [False] * 5
    np.testing.assert_array_equal(damaged["index"], rows["index"])


def test_on_error_skip_raises_if_store_does_not_answer(original, monkeypatch):
    meta = load_metadata(original)

    def refuses(*_):
        raise ConnectionError("503")

    monkeypatch.setattr(lerobot_decode.VideoReader, "read", refuses)
    with pytest.raises(OSError, match="503"):
        next(datasource([meta], on_error="skip").read_rows(range(9), 9))


def test_null_value_invalidates_only_its_episode(tmp_path):
    """Other episodes of its row group, which may be the complete file, are read."""
    root = make_dataset(tmp_path / "one_file", cameras={}, data_files_size_in_mb=100)

    def empty(number, table):
        rows = zip(table["episode_index"].to_pylist(), table["action"].to_pylist(), strict=True)
        values = pa.array([None if episode == 2 else action for episode, action in rows], table["action"].type)
        return table.set_column(table.column_names.index("action"), "action", values)

    rewrite_data(root, empty)
    meta, others = load_metadata(root), np.array([0, 1, 3, 4, 5])
    assert len(meta.data_files) == 1
    frames = int(meta.episode_length.sum())
    (rows,) = datasource([meta], on_error="skip").read_rows(range(frames), frames)
    np.testing.assert_array_equal(rows["is_skipped"], np.repeat(np.arange(6), meta.episode_length) == 2)
    read_directly(datasource([meta], episodes=[others]))
    with pytest.raises(ValueError, match=r"file-000.parquet: episode 2: column action: \d+ empty values"):
        read_directly(datasource([meta]))
    assert compute_as_lerobot(meta, ["action"], others)["action"]["count"] == frames - meta.episode_length[2]
