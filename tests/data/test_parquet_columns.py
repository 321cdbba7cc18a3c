"""Columns of data files are unpacked once per node, and equal those read without a copy."""

import contextlib
import os
import re
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from lerobot_datasource import LeRobotDatasource
from tests.datasets import an_epoch as epoch_of
from tests.datasets import assert_same_rows, datasource, make_dataset, make_layouts
from vla_finetuning.data import disk_cache, parquet_columns, rows, safe_parquet, videos
from vla_finetuning.data.decode import decode_image
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.options import Features
from vla_finetuning.data.parquet_columns import numbers

CAMERAS = {"observation.images.left": (16, 24), "observation.images.right": (8, 8)}
LENGTHS = (40, 12, 33, 25, 50, 7, 21)
ROWS = sum(LENGTHS)
TOP = "observation.images.top"
WINDOWS = {"action": [i / 10 for i in range(8)]}
EACH = ["numbers", *CAMERAS]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    options = {"cameras": {}, "image_cameras": CAMERAS, "episodes": LENGTHS, "data_files_size_in_mb": 0.03}
    roots = make_layouts(tmp_path_factory.mktemp("layouts"), **options)
    groups = {
        name: [pq.ParquetFile(path).num_row_groups for path in root.glob("data/*/*.parquet")]
        for name, root in roots.items()
    }
    assert set(groups["file"]) == {1} and max(groups["episode"]) > 1 and len(groups["episode"]) > 1
    return roots


@pytest.fixture(params=["file", "episode"])
def root(request, originals, tmp_path):
    return Path(shutil.copytree(originals[request.param], tmp_path / "dataset"))


def forget(monkeypatch):
    """Empty the caches of this process, as if another process of the node began."""
    monkeypatch.setattr(safe_parquet, "_footers", {})
    for name in ("_mapped", "_group_starts"):
        monkeypatch.setattr(parquet_columns, name, {})
    disk_cache.disk_cache.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder for copies."""
    monkeypatch.setattr(disk_cache, "NUMBERS_DIR", str(tmp_path / "numbers"))
    forget(monkeypatch)
    return tmp_path / "numbers"


@pytest.fixture
def work(monkeypatch):
    """Counts of "footers" parsed, and of rows unpacked of "numbers" and of each camera."""
    counts, lock = Counter(), threading.Lock()
    footer, unpack = safe_parquet._parsed_footer, parquet_columns.read_columns

    def parsed(file):
        counts["footers"] += "/data/" in file.name
        return footer(file)

    def unpacked(file, columns, *args, **kwargs):
        table = unpack(file, columns, *args, **kwargs)
        with lock:
            counts[columns[0] if columns[0] in CAMERAS else "numbers"] += len(table)
        return table

    monkeypatch.setattr(safe_parquet, "_parsed_footer", parsed)
    monkeypatch.setattr(parquet_columns, "read_columns", unpacked)
    return counts


def an_epoch(root, seed=0, window=16):
    """Return every row by `index`, read shuffled in small windows (None: in stored order)."""
    return epoch_of(root, window, delta_timestamps=WINDOWS, shuffle_seed=seed)


def without_copies(root, monkeypatch):
    """Return the rows read without copies."""
    with monkeypatch.context() as patched:
        for module in (rows, videos):
            patched.setattr(module, "file_identity", lambda *_: None)
        return an_epoch(root)


def copies(folder):
    """Return the files of copied numbers and of copied images."""
    patterns = [folder.glob("*/*/*/*"), folder.glob("images/*/*/*/*")]
    return [[path for path in paths if path.is_file() and path.suffix != ".lock"] for paths in patterns]


def test_columns_are_unpacked_once_per_node(originals, work, monkeypatch):
    root = originals["file"]
    expected = without_copies(root, monkeypatch)
    assert min(work[key] for key in EACH) > 1.5 * ROWS  # windows share row groups
    work.clear()
    files = len(load_metadata(root).data_files)
    for seed in (0, 1, 2):
        assert_same_rows(an_epoch(root, seed), expected)
        assert work == {"footers": files} | dict.fromkeys(EACH, ROWS)
    # Another process of the node unpacks nothing.
    forget(monkeypatch)
    assert_same_rows(an_epoch(root, 3), expected)
    assert work == {"footers": 2 * files} | dict.fromkeys(EACH, ROWS)


def test_row_groups_per_episode_are_unpacked_once(originals, work, monkeypatch):
    root = originals["episode"]
    expected = without_copies(root, monkeypatch)
    before = work.copy()
    work.clear()
    for seed in range(6):
        assert_same_rows(an_epoch(root, seed), expected)
    assert work["numbers"] == ROWS
    assert all(work[key] < 2.5 * before[key] for key in CAMERAS)  # of six epochs


def test_sequential_reads_copy_no_unneeded_images(originals, work, folder):
    an_epoch(originals["episode"], None, window=50)  # as the longest row group
    assert min(work[key] for key in CAMERAS) >= ROWS and not copies(folder)[1]
    work.clear()
    an_epoch(originals["file"], None, window=16)
    assert max(work[key] for key in CAMERAS) <= 2 * ROWS  # 6 without copies


def test_footer_cache_is_bounded(originals, monkeypatch):
    path = next(originals["episode"].glob("data/*/*.parquet"))
    size = pq.ParquetFile(path).metadata.serialized_size
    for most, left in ((0, "j"), (3 * size + 9, "hij")):
        monkeypatch.setattr(safe_parquet, "KEPT_FOOTER_BYTES", most)
        monkeypatch.setattr(safe_parquet, "_footers", {})
        for identity in "abcdefhgighij":
            with safe_parquet.open_parquet(LocalFileSystem(), str(path), identity=identity):
                pass
        assert list(safe_parquet._footers) == list(left)


def test_changed_file_is_unpacked_again(root, folder, monkeypatch):
    an_epoch(root)
    before = list(map(len, copies(folder)))
    path = root / load_metadata(root).data_files[0]
    table, stat = pq.read_table(path), path.stat()
    action = np.stack(table["action"].to_numpy()) + 1
    for key, values in {"action": list(action), **{key: table[key].combine_chunks()[::-1] for key in CAMERAS}}.items():
        at = table.schema.get_field_index(key)
        table = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
    pq.write_table(table, path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    rows_read = an_epoch(root)
    np.testing.assert_array_equal(rows_read["action"][np.isin(rows_read["index"], table["index"])][:, 0], action)
    assert_same_rows(rows_read, without_copies(root, monkeypatch))
    # Copies of the earlier content are removed.
    assert [len(after) <= at_first for after, at_first in zip(copies(folder), before, strict=True)] == [True, True]


def test_damaged_row_group_affects_only_its_rows(originals, tmp_path, work):
    """Intact episodes are read, though the file cannot be copied."""
    root = Path(shutil.copytree(originals["episode"], tmp_path / "dataset"))
    path = root / load_metadata(root).data_files[0]
    expected = an_epoch(root, None, 1)
    metadata = pq.ParquetFile(path).metadata
    chunks = map(metadata.row_group(1).column, range(metadata.num_columns))
    chunk = next(chunk for chunk in chunks if chunk.path_in_schema.startswith("action"))
    with open(path, "r+b") as file:
        file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        file.write(b"\xff" * 20)
    source = datasource([load_metadata(root)], camera_keys=[])
    for _ in range(2):
        (first,) = source.read_rows(range(LENGTHS[0]), LENGTHS[0])
        np.testing.assert_array_equal(first["action"], expected["action"][: LENGTHS[0], 0])
    with pytest.raises(ValueError, match="cannot be read as a parquet file"):
        list(source.read_rows(range(LENGTHS[0], LENGTHS[0] + 5), 5))
    assert work["numbers"] < 4 * ROWS


def test_concurrent_readers_unpack_each_row_once(originals, work, monkeypatch):
    unpack = parquet_columns.read_columns
    monkeypatch.setattr(
        parquet_columns, "read_columns", lambda *args, **options: time.sleep(0.05) or unpack(*args, **options)
    )
    with ThreadPoolExecutor(2) as pool:
        assert_same_rows(*pool.map(an_epoch, [originals["file"]] * 2))
    assert [work[key] for key in EACH] == [ROWS] * len(EACH)


@pytest.mark.parametrize("fault", ["numbers fit", "nothing fits"])
def test_full_numbers_folder_is_warned_about(originals, folder, work, monkeypatch, caplog, fault):
    root = originals["file"]
    expected = without_copies(root, monkeypatch)
    without = work.copy()
    work.clear()
    monkeypatch.setenv("VLA_NUMBERS_GB", "18e-6" if fault == "numbers fit" else "1e-7")
    for seed in (0, 1):
        assert_same_rows(an_epoch(root, seed), expected)
    for key in EACH:
        copied = key == "numbers" and fault == "numbers fit"
        # A copy that did not fit is not made again at once.
        assert work[key] == ROWS if copied else 1.5 * without[key] < work[key] <= 2.5 * without[key]
    warnings = [record.message for record in caplog.records if str(folder) in record.message]
    assert len(warnings) == 1 + (fault != "numbers fit") and all("VLA_NUMBERS_DIR" in warning for warning in warnings)


def test_default_numbers_folder_in_memory_is_not_used(root, folder, work, monkeypatch):
    monkeypatch.setattr(disk_cache, "is_in_memory", lambda folder: True)
    assert disk_cache.numbers_gb() == 20  # somebody chose it
    monkeypatch.setattr(disk_cache, "DEFAULT_NUMBERS_DIR", str(folder))
    assert disk_cache.numbers_gb() == 0
    source = datasource([load_metadata(root)], delta_timestamps=WINDOWS)
    for _ in range(2):
        list(source.read_rows(range(8), 8))
        assert work.pop("numbers") and not folder.exists()


def test_invalid_numbers_size_is_refused(monkeypatch):
    for text in ("20GB", "nan", "-1"):
        monkeypatch.setenv("VLA_NUMBERS_GB", text)
        with pytest.raises(ValueError, match=f"VLA_NUMBERS_GB='{text}' in the environment: expected a number above 0"):
            disk_cache.describe_numbers()
    monkeypatch.setenv("VLA_NUMBERS_GB", "0")
    assert "VLA_NUMBERS_GB=0" in disk_cache.describe_numbers()


FLOATS = pa.list_(pa.float32())


def cast(values, type_, shape, dtype=np.float32):
    return numbers(pa.chunked_array([pa.array(values, type_)]), dtype, shape, "data: column x")


@pytest.mark.parametrize(
    ("values", "type_", "shape", "dtype", "message"),
    [
        ([[1, 2, 3], [4]], FLOATS, (2,), np.float32, r"lists of \[1, 3\] values, expected shape \(2,\)"),
        ([[1, 2], [3, 4]], FLOATS, (4,), np.float32, r"values of shape \(2,\), expected \(4,\)"),
        ([2**63], pa.uint64(), (1,), np.int64, "holds uint64 that cannot be int64"),
        ([0.5], pa.float64(), (1,), np.int64, "holds double that cannot be int64, as meta/info"),
        ([0, 2], pa.int64(), (1,), np.bool_, "holds int64 that cannot be bool"),
        (["a"], pa.string(), (1,), np.int64, "holds string, expected numbers"),
    ],
)
def test_values_of_wrong_type_or_shape_are_refused(values, type_, shape, dtype, message):
    with pytest.raises(ValueError, match=f"data: column x: {message}"):
        cast(values, type_, shape, dtype)


def test_values_of_compatible_types_are_cast():
    assert cast([[1], [2]], pa.list_(pa.float64()), (1,)).tolist() == [1, 2]
    assert cast([0, 1], pa.int8(), (1,), np.bool_).tolist() == [False, True]
    assert cast([0.0, 1.0], pa.float64(), (1,), np.int64).dtype == np.int64
    assert cast([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int16())), (1, 2), np.int64).shape == (2, 1, 2)
    assert cast([], pa.list_(pa.float32()), (3,)).shape == (0, 3)


@pytest.fixture
def one_camera(tmp_path):
    """A dataset with one camera, whose images are in its data file; returns the file's path and table."""
    root = make_dataset(tmp_path / "d", cameras={}, image_cameras={TOP: (16, 24)}, episodes=(4, 3))
    (file,) = load_metadata(root).data_files
    return root, root / file, pq.read_table(root / file)


def replace_images(table, path, column):
    pq.write_table(table.set_column(table.column_names.index(TOP), TOP, column), path)


@pytest.mark.parametrize(
    "form", ["bytes", "large bytes", "paths", "paths beside", "structures of paths", "some of each"]
)
def test_image_column_forms_equal_datasets_image(one_camera, form):
    """Rows equal those of the same images embedded by LeRobot; `datasets.Image` defines the forms."""
    root, file, table = one_camera
    expected = frames_of(root)
    images = [image["bytes"] for image in table[TOP].to_pylist()]
    folder = file.parent if form == "paths beside" else root
    paths = [f"images/{n}.png" for n in range(len(images))]
    (folder / "images").mkdir(exist_ok=True)
    for path, data in zip(paths, images, strict=True):
        (folder / path).write_bytes(data)
    either = [{"bytes": None if n % 2 else data, "path": paths[n]} for n, data in enumerate(images)]
    column = {
        "bytes": pa.array(images, pa.binary()),
        "large bytes": pa.array(images, pa.large_binary()),
        "paths": pa.array(paths),
        "paths beside": pa.array(paths),
        "structures of paths": pa.array([{"path": path} for path in paths]),
        "some of each": pa.array(either),
    }[form]
    replace_images(table, file, column)
    if folder == root:
        with contextlib.chdir(root):  # `datasets` takes paths from the working directory
            decoded = [datasets.Image().decode_example(as_example(value)) for value in column.to_pylist()]
        plain = [decode_image(data, name="", height=16, width=24) for data in images]
        np.testing.assert_array_equal(np.stack(decoded), plain)
    np.testing.assert_array_equal(frames_of(root), expected)


def as_example(value):
    if isinstance(value, dict):
        return {"bytes": value.get("bytes"), "path": value["path"]}
    return {"bytes": value, "path": None} if isinstance(value, bytes) else {"bytes": None, "path": value}


def frames_of(root):
    meta = load_metadata(root)
    source = LeRobotDatasource([meta], features=Features(camera_keys=[TOP]))
    (rows,) = source.read_rows(range(meta.total_frames), meta.total_frames)
    return rows[TOP]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/etc/hostname", "outside of the dataset"),
        ("../x.png", "outside of the dataset"),
        ("s3://bucket/x.png", "outside of the dataset"),
        ("gone.png", "its file 'gone.png' is not below the dataset's folder: copy the images too"),
        (None, "the image is not embedded in the parquet file"),
        (1.5, "observation.images.top has type double, and images are stored as bytes, as paths, or"),
    ],
)
def test_invalid_image_values_are_refused(one_camera, value, message):
    root, file, table = one_camera
    replace_images(table, file, pa.array([value] * 7, pa.string() if value is None else None))
    with pytest.raises(ValueError, match=f"{file.relative_to(root)}.*{re.escape(message)}"):
        frames_of(root)


def test_images_are_read_by_row_group_and_camera(tmp_path, monkeypatch):
    """LeRobot writes a row group per episode: a window has rows of many, and a minute of three cameras is gigabytes."""
    cameras = {f"observation.images.{name}": (96, 128) for name in "abc"}
    root = make_dataset(
        tmp_path / "png", cameras={}, image_cameras=cameras, episodes=(6, 9, 4), data_files_size_in_mb=100
    )
    meta = load_metadata(root)
    (expected,) = datasource([meta]).read_rows(range(19), 19)
    (path,) = root.glob("data/*/*.parquet")
    file = pq.ParquetFile(path).metadata
    groups = [file.row_group(number) for number in range(file.num_row_groups)]
    columns = [[group.column(i) for i in range(group.num_columns)] for group in groups]
    images = [[c.total_uncompressed_size for c in of if c.path_in_schema.endswith(".bytes")] for of in columns]
    assert len(groups) == 3 and all(len(sizes) == 3 for sizes in images)
    monkeypatch.setattr(parquet_columns, "MAX_DATA_BYTES", 2 * max(map(max, images)))
    (rows,) = datasource([meta]).read_rows(range(19), 19)
    for key in cameras:
        np.testing.assert_array_equal(rows[key], expected[key])
    monkeypatch.setattr(parquet_columns, "MAX_DATA_BYTES", max(map(max, images)) // 2)
    with pytest.raises(ValueError, match="exhaust the memory"):
        next(datasource([meta]).read_rows(range(19), 19))
