"""Encoded images of data files: a row group is unpacked once per node, and images are what the files hold."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lerobot_datasource import LeRobotDatasource
from tests.data.test_number_cache import assert_same
from tests.datasets import datasource, make_dataset, make_layouts
from vla_finetuning.data import node_cache as lerobot_node_cache
from vla_finetuning.data import number_cache, videos
from vla_finetuning.data.decode import decode_image
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.node_cache import NodeCache, Records
from vla_finetuning.data.options import Features

ROOT = Path(__file__).resolve().parents[2]
CAMERAS = {"observation.images.left": (16, 24), "observation.images.right": (8, 8)}
LENGTHS = (40, 12, 33, 25, 50, 7, 21)
ROWS = sum(LENGTHS)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    base = tmp_path_factory.mktemp("layouts")
    return make_layouts(base, cameras={}, image_cameras=CAMERAS, episodes=LENGTHS)


@pytest.fixture(params=["file", "episode"])
def root(request, originals, tmp_path):
    return Path(shutil.copytree(originals[request.param], tmp_path / "dataset"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where images are stored, with nothing in it."""
    monkeypatch.setattr(number_cache, "NUMBERS_DIR", str(tmp_path / "numbers"))
    lerobot_node_cache.node_cache.cache_clear()
    return tmp_path / "numbers/images"


@pytest.fixture
def unpacked(monkeypatch):
    """Rows of image columns that were unpacked so far, by column."""
    counts, unpack = Counter(), number_cache.read_columns

    def counting(file, columns, *args, **kwargs):
        table = unpack(file, columns, *args, **kwargs)
        counts.update({key: len(table) for key in columns if key in CAMERAS})
        return table

    monkeypatch.setattr(number_cache, "read_columns", counting)
    return counts


def an_epoch(root, seed=0, window=16):
    """Every row, shuffled in small windows (None: in stored order), by `index`."""
    source = datasource([load_metadata(root)], shuffle_seed=seed, shuffle_window=window)
    batches = list(source.read_rows(range(ROWS), window))
    order = np.argsort(np.concatenate([b["index"] for b in batches]))
    return {key: np.concatenate([b[key] for b in batches])[order] for key in batches[0]}


def unstored(root, monkeypatch):
    """The rows as they are without the store."""
    with monkeypatch.context() as patched:
        patched.setattr(videos, "file_identity", lambda *_: None)
        return an_epoch(root)


def files_of(folder):
    return list(folder.glob("*/*/*.data"))


def test_what_was_unpacked_once_is_not_unpacked_again(originals, unpacked, monkeypatch, folder):
    root = originals["file"]
    expected = unstored(root, monkeypatch)
    assert min(unpacked.values()) > 3 * ROWS and not files_of(folder)
    unpacked.clear()
    assert_same(an_epoch(root), expected)
    assert unpacked == dict.fromkeys(CAMERAS, ROWS)
    # Nor in later epochs, nor by another process of the node.
    lerobot_node_cache.node_cache.cache_clear()
    for seed in (1, 2):
        assert_same(an_epoch(root, seed), expected)
    assert unpacked == dict.fromkeys(CAMERAS, ROWS)


def test_row_groups_of_episodes(originals, unpacked, monkeypatch):
    root = originals["episode"]
    expected = unstored(root, monkeypatch)
    before = unpacked.copy()
    for seed in range(6):
        assert_same(an_epoch(root, seed), expected)
    assert all(unpacked[key] < 2.5 * before[key] for key in CAMERAS)  # of six epochs


def test_reads_in_stored_order_store_nothing_that_they_do_not_want(originals, unpacked, folder):
    an_epoch(originals["episode"], None, window=50)  # as the longest row group
    assert unpacked and not files_of(folder)
    unpacked.clear()
    an_epoch(originals["file"], None, window=16)
    assert max(unpacked.values()) < 2 * ROWS  # 2.9 without the store


def test_a_file_that_changed_is_unpacked_anew(root, folder, monkeypatch):
    an_epoch(root)
    before = len(files_of(folder))
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        for key in CAMERAS:
            table = table.set_column(table.schema.get_field_index(key), key, table[key].combine_chunks()[::-1])
        pq.write_table(table, path)
    assert_same(an_epoch(root), unstored(root, monkeypatch))
    # What was stored of the earlier content has given its space back.
    assert len(files_of(folder)) == before


@pytest.mark.parametrize("damage", ["zeros", "noise", "cut", "marks"])
def test_images_that_the_disk_lost_are_unpacked_again(originals, folder, unpacked, damage):
    root = originals["file"]
    expected = an_epoch(root)
    unpacked.clear()
    for path in folder.glob("*/*/*.marks" if damage == "marks" else "*/*/*.data"):
        size = path.stat().st_size
        content = bytearray(path.read_bytes())
        half = size // 2 + 3
        content[half:] = {"zeros": bytes(size - half), "cut": b""}.get(damage, os.urandom(size - half))
        path.write_bytes(content)
    assert_same(an_epoch(root), expected)
    assert unpacked and max(unpacked.values()) < 1.5 * ROWS
    unpacked.clear()
    assert_same(an_epoch(root), expected)
    assert not unpacked


READ_AND_DIE = textwrap.dedent("""
    import os, signal, sys
    from tests.data.test_image_cache import an_epoch
    from vla_finetuning.data import number_cache
    number_cache.NUMBERS_DIR = sys.argv[2]
    left, pwrite = [20], os.pwrite
    def dying(descriptor, data, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".data"):
            left[0] -= 1
            if not left[0]:
                pwrite(descriptor, bytes(data)[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(descriptor, data, offset)
    os.pwrite = dying
    an_epoch(sys.argv[1])
""")


def test_a_reader_killed_while_it_writes(originals, folder, unpacked, monkeypatch):
    root = originals["file"]
    expected = unstored(root, monkeypatch)
    unpacked.clear()
    process = subprocess.run([sys.executable, "-c", READ_AND_DIE, root, folder.parent], cwd=ROOT)
    assert process.returncode == -signal.SIGKILL
    assert files_of(folder)
    assert_same(an_epoch(root), expected)
    assert max(unpacked.values()) < 1.5 * ROWS


def test_two_processes_at_once_unpack_each_row_once(originals, folder):
    script = textwrap.dedent("""
        import sys
        from tests.data.test_image_cache import CAMERAS, an_epoch
        from vla_finetuning.data import number_cache
        number_cache.NUMBERS_DIR, unpack, rows = sys.argv[2], number_cache.read_columns, []
        def counting(file, columns, *args, **kwargs):
            found = unpack(file, columns, *args, **kwargs)
            rows.append(len(found) * len(CAMERAS.keys() & set(columns)))
            return found
        number_cache.read_columns = counting
        found = an_epoch(sys.argv[1])
        print(sum(rows), sum(int(found[key].sum()) for key in CAMERAS))
    """)
    command = [sys.executable, "-c", script, originals["file"], folder.parent]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate()[0].split() for process in running]
    assert sum(int(rows) for rows, _ in results) == ROWS * len(CAMERAS)
    found = an_epoch(originals["file"])
    assert {total for _, total in results} == {str(sum(int(found[key].sum()) for key in CAMERAS))}


@pytest.mark.parametrize("fault", ["full disk", "folder is a file", "folder of another user", "limit"])
def test_a_folder_that_fails_costs_a_warning(originals, folder, unpacked, monkeypatch, caplog, fault):
    root = originals["file"]
    expected = unstored(root, monkeypatch)
    unpacked.clear()
    if fault == "full disk":
        pwrite = os.pwrite

        def full(descriptor, data, offset):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".data"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
    elif fault == "folder is a file":
        folder.parent.mkdir(exist_ok=True)
        folder.write_text("")
    elif fault == "folder of another user":
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(number_cache, "NUMBERS_GB", 100_000 / 1e9)  # the numbers fit
    assert_same(an_epoch(root), expected)
    assert_same(an_epoch(root, 1), expected)
    assert min(unpacked.values()) > 2 * ROWS
    (warning,) = (record.message for record in caplog.records if str(folder) in record.message)
    assert "VLA_NUMBERS_DIR" in warning
    assert not [record for record in caplog.records if f"{folder.parent} " in record.message]  # of the numbers


def test_nothing_is_stored_where_numbers_are_not(originals, folder, unpacked, monkeypatch):
    monkeypatch.setattr(number_cache, "NUMBERS_GB", 0)
    an_epoch(originals["file"])
    assert min(unpacked.values()) > 2 * ROWS and not folder.exists()


def test_records_of_any_length(tmp_path):
    cache = NodeCache(tmp_path / "cache", 100_000, "make room")
    records = Records(cache, cache.content("dataset", "file", "content"), 20_000)
    given = {0: b"a" * 20_000, 7: b"b", 8: b"", 9: b"c" * 20_001, 2: os.urandom(5000)}
    records.put([(number, memoryview(record)) for number, record in given.items()])
    found = {number: records.get(number) for number in range(10)}
    assert found == {n: given[n] if n in (0, 7, 2) else None for n in range(10)}
    # What is reserved is what they take, not the most that they could.
    stored = int((cache.folder / lerobot_node_cache.LEDGER).read_bytes()[:20])
    taken = sum(path.stat().st_blocks * 512 for path in cache.folder.glob("*/*/*.data"))
    assert taken <= stored <= taken + 200
    # All or none.
    records.put([(number, memoryview(bytes(20_000))) for number in range(20, 24)])
    assert records.get(20) is None and records.get(2) == given[2]


@pytest.mark.parametrize(
    "form", ["bytes", "large bytes", "paths", "paths beside", "structures of paths", "some of each"]
)
def test_every_form_that_datasets_image_reads(tmp_path, form):
    """Rows equal those of the same images as LeRobot embeds them; what the form means is said by `datasets.Image`."""
    root = make_dataset(tmp_path / "d", cameras={}, image_cameras={"observation.images.top": (16, 24)}, episodes=(4, 3))
    key, meta = "observation.images.top", load_metadata(root)
    expected = [frames_of(meta, key)]
    for file in meta.data_files:
        table = pq.read_table(root / file)
        images = [image["bytes"] for image in table[key].to_pylist()]
        folder = (root / file).parent if form == "paths beside" else root
        paths = [f"images/{file.replace('/', '_')}_{n}.png" for n in range(len(images))]
        (folder / "images").mkdir(exist_ok=True)
        for path, data in zip(paths, images, strict=True):
            (folder / path).write_bytes(data)
        column = {
            "bytes": pa.array(images, pa.binary()),
            "large bytes": pa.array(images, pa.large_binary()),
            "paths": pa.array(paths),
            "paths beside": pa.array(paths),
            "structures of paths": pa.array([{"path": path} for path in paths]),
            "some of each": pa.array(
                [{"bytes": None if n % 2 else data, "path": paths[n]} for n, data in enumerate(images)]
            ),
        }[form]
        pq.write_table(table.set_column(table.column_names.index(key), key, column), root / file)
        if folder == root:
            with contextlib.chdir(root):  # `datasets` takes paths from the working directory
                decoded = [datasets.Image().decode_example(as_example(value)) for value in column.to_pylist()]
            plain = [decode_image(data, name="", height=16, width=24) for data in images]
            np.testing.assert_array_equal(np.stack(decoded), plain)
    expected.append(frames_of(load_metadata(root), key))
    np.testing.assert_array_equal(*expected)


def as_example(value):
    if isinstance(value, dict):
        return {"bytes": value.get("bytes"), "path": value["path"]}
    return {"bytes": value, "path": None} if isinstance(value, bytes) else {"bytes": None, "path": value}


def frames_of(meta, key):
    source = LeRobotDatasource([meta], features=Features(camera_keys=[key]))
    (rows,) = source.read_rows(range(meta.total_frames), meta.total_frames)
    return rows[key]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["/etc/hostname"] * 7, "outside of the dataset"),
        (["../x.png"] * 7, "outside of the dataset"),
        (["s3://bucket/x.png"] * 7, "outside of the dataset"),
        (["gone.png"] * 7, "its file 'gone.png' is not below the dataset's folder: copy the images too"),
        ([None] * 7, "the image is not embedded in the parquet file"),
        ([1.5] * 7, "observation.images.top has type double, and images are stored as bytes, as paths, or"),
    ],
)
def test_images_that_are_elsewhere_or_none(tmp_path, column, message):
    root = make_dataset(tmp_path / "d", cameras={}, image_cameras={"observation.images.top": (16, 24)}, episodes=(4, 3))
    key, (file,) = "observation.images.top", load_metadata(root).data_files
    table, values = pq.read_table(root / file), pa.array(column, pa.string() if column[0] is None else None)
    pq.write_table(table.set_column(table.column_names.index(key), key, values), root / file)
    with pytest.raises(ValueError, match=f"{file}.*{re.escape(message)}"):
        frames_of(load_metadata(root), key)
