"""Numbers of data files: unpacked once per node, footers parsed once per process, rows from a checked copy."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets import datasource, make_dataset, make_layouts
from vla_finetuning.data import node_cache as lerobot_node_cache
from vla_finetuning.data import number_cache, safe_parquet
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.number_cache import numbers

ROOT = Path(__file__).resolve().parents[2]
STILL = "observation.images.still"
LENGTHS = (40, 12, 33, 25, 50, 7, 21)
WINDOWS = {"action": [i / 10 for i in range(8)]}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = make_layouts(tmp_path_factory.mktemp("layouts"), cameras={}, episodes=LENGTHS)
    converted, recorded = made["file"], made["episode"]
    per_file = {root: [pq.ParquetFile(p).num_row_groups for p in root.glob("data/*/*.parquet")] for root in
                (recorded, converted)}  # fmt: skip
    assert set(per_file[converted]) == {1} and max(per_file[recorded]) > 1 and len(per_file[recorded]) > 1
    return made


@pytest.fixture(params=["file", "episode"])
def root(request, originals, tmp_path):
    return Path(shutil.copytree(originals[request.param], tmp_path / "dataset"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the numbers are cached, with nothing in it; nothing of this process is remembered either."""
    monkeypatch.setattr(number_cache, "NUMBERS_DIR", str(tmp_path / "numbers"))
    monkeypatch.setattr(safe_parquet, "_footers", safe_parquet._Footers(2**20))
    lerobot_node_cache.node_cache.cache_clear()
    return tmp_path / "numbers"


@pytest.fixture
def work(monkeypatch):
    """Counts what is done: "footer" parsed, "rows" unpacked."""
    counts = Counter()
    footer, unpack = safe_parquet._parsed_footer, number_cache.read_columns

    def parsed(file):
        counts["footers"] += "/data/" in file.name
        return footer(file)

    def unpacked(*args, **kwargs):
        table = unpack(*args, **kwargs)
        counts["rows"] += len(table)
        return table

    monkeypatch.setattr(safe_parquet, "_parsed_footer", parsed)
    monkeypatch.setattr(number_cache, "read_columns", unpacked)
    return counts


def an_epoch(root, seed=0):
    """Every row, shuffled in small windows, by `index`."""
    source = datasource([load_metadata(root)], delta_timestamps=WINDOWS, shuffle_seed=seed, shuffle_window=16)
    batches = list(source.read_rows(range(sum(LENGTHS)), 16))
    order = np.argsort(np.concatenate([b["index"] for b in batches]))
    return {key: np.concatenate([b[key] for b in batches])[order] for key in batches[0]}


def assert_same(rows, others):
    assert rows.keys() == others.keys()
    for key, values in others.items():
        assert rows[key].dtype == values.dtype
        np.testing.assert_array_equal(rows[key], values, err_msg=key)


def unkept(root, monkeypatch):
    """The rows as they are without a copy."""
    from vla_finetuning.data import rows

    with monkeypatch.context() as patched:
        patched.setattr(rows, "file_identity", lambda *_: None)
        return an_epoch(root)


def test_what_was_unpacked_once_is_not_unpacked_again(root, work, monkeypatch):
    expected = unkept(root, monkeypatch)
    assert work["rows"] > 1.5 * sum(LENGTHS)  # windows share row groups
    work.clear()
    files = len(load_metadata(root).data_files)
    assert_same(an_epoch(root), expected)
    assert work == {"footers": files, "rows": sum(LENGTHS)}
    for seed in (1, 2):
        assert_same(an_epoch(root, seed), expected)
    assert work == {"footers": files, "rows": sum(LENGTHS)}
    # Another process of the node neither parses nor unpacks anything.
    monkeypatch.setattr(safe_parquet, "_footers", safe_parquet._Footers(2**20))
    lerobot_node_cache.node_cache.cache_clear()
    assert_same(an_epoch(root, 3), expected)
    assert work == {"footers": files, "rows": sum(LENGTHS)}


def test_images_beside_the_numbers_parse_a_footer_once(tmp_path, work):
    root = make_dataset(tmp_path / "images", cameras={}, image_cameras={STILL: (8, 8)}, episodes=LENGTHS)
    an_epoch(root)
    an_epoch(root, 1)
    assert work["footers"] == len(load_metadata(root).data_files)


def test_footers_are_remembered_within_a_bound(root):
    footers = safe_parquet._Footers(3000)
    metadata = pq.ParquetFile(next(root.glob("data/*/*.parquet"))).metadata
    assert 1000 < metadata.serialized_size < 1_000_000
    for name in "abcdefghij":
        footers.keep(name, metadata)
        assert footers.get(name) is metadata  # the newest, however large
    held = [name for name in "abcdefghij" if footers.get(name) is not None]
    assert len(held) == max(1, 3000 // metadata.serialized_size)


def test_a_file_that_changed_is_unpacked_anew(root, folder, work):
    an_epoch(root)
    path = root / load_metadata(root).data_files[0]
    table, before = pq.read_table(path), path.stat()
    action = np.stack(table["action"].to_numpy()) + 1
    at = table.schema.get_field_index("action")
    pq.write_table(table.set_column(at, "action", [list(action)]).cast(table.schema), path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = an_epoch(root)
    changed = np.isin(found["index"], table["index"])
    np.testing.assert_array_equal(found["action"][changed][:, 0], action)
    # What was unpacked of the earlier content has given its space back.
    assert len(list(folder.glob("*/*/*.data"))) == len(load_metadata(root).data_files)


@pytest.mark.parametrize("damage", ["zeros", "noise", "cut", "emptied"])
def test_rows_that_the_disk_lost_are_unpacked_again(root, folder, work, damage):
    expected = an_epoch(root)
    work.clear()
    for path in folder.glob("*/*/*.data"):
        content = bytearray(path.read_bytes())
        half = len(content) // 2 + 3  # in the middle of a row
        content[half:] = {
            "zeros": bytes(len(content) - half),
            "noise": os.urandom(len(content) - half),
            "cut": b"",
            "emptied": b"",
        }[damage]
        path.write_bytes(content if damage != "emptied" else b"")
    assert_same(an_epoch(root), expected)
    assert 0 < work["rows"] <= sum(LENGTHS)
    work.clear()
    assert_same(an_epoch(root), expected)
    assert not work["rows"]


READ_AND_DIE = textwrap.dedent("""
    import os, signal, sys
    from tests.data.test_number_cache import an_epoch
    from vla_finetuning.data import number_cache
    number_cache.NUMBERS_DIR = sys.argv[2]
    left, pwrite = [int(sys.argv[3])], os.pwrite
    def dying(descriptor, data, offset):
        left[0] -= len(data)
        if left[0] < 0 and len(data) > 20:
            pwrite(descriptor, bytes(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(descriptor, data, offset)
    os.pwrite = dying
    an_epoch(sys.argv[1])
""")


@pytest.mark.parametrize("root", ["file"], indirect=True)
def test_a_reader_killed_while_it_writes(root, folder, monkeypatch):
    expected = unkept(root, monkeypatch)
    process = subprocess.run([sys.executable, "-c", READ_AND_DIE, root, folder, "3000"], cwd=ROOT)
    assert process.returncode == -signal.SIGKILL
    assert list(folder.glob("*/*/*.data"))
    assert_same(an_epoch(root), expected)


def test_two_processes_at_once_unpack_each_row_once(originals, tmp_path, folder):
    script = textwrap.dedent("""
        import sys
        from tests.data.test_number_cache import an_epoch
        from vla_finetuning.data import number_cache
        number_cache.NUMBERS_DIR, unpack, rows = sys.argv[2], number_cache.read_columns, []
        def counting(*args, **kwargs):
            rows.append(len(found := unpack(*args, **kwargs)))
            return found
        number_cache.read_columns = counting
        action = an_epoch(sys.argv[1])["action"]
        print(sum(rows), action.sum())
    """)
    command = [sys.executable, "-c", script, originals["file"], folder]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate()[0].split() for process in running]
    assert sum(int(rows) for rows, _ in results) == sum(LENGTHS)
    assert {total for _, total in results} == {str(an_epoch(originals["file"])["action"].sum())}


@pytest.mark.parametrize("fault", ["full disk", "folder is a file", "folder of another user", "limit"])
def test_a_folder_that_fails_costs_a_warning(root, folder, work, monkeypatch, caplog, fault):
    expected = unkept(root, monkeypatch)
    work.clear()
    if fault == "full disk":
        pwrite = os.pwrite

        def full(descriptor, data, offset):
            if len(data) > 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
    elif fault == "folder is a file":
        folder.write_text("")
    elif fault == "folder of another user":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(number_cache, "NUMBERS_GB", 100 / 1e9)
    assert_same(an_epoch(root), expected)
    assert_same(an_epoch(root, 1), expected)
    assert work["rows"] > 2 * sum(LENGTHS)
    warnings = [record.message for record in caplog.records if str(folder) in record.message]
    assert len(warnings) == 1 and "VLA_NUMBERS_DIR" in warnings[0]


def test_the_default_folder_is_not_used_where_it_is_memory(root, folder, work, monkeypatch):
    monkeypatch.setattr(number_cache, "is_in_memory", lambda folder: True)
    assert number_cache.numbers_gb() == number_cache.NUMBERS_GB > 0  # somebody chose it
    monkeypatch.setattr(number_cache, "DEFAULT_NUMBERS_DIR", str(folder))
    assert number_cache.numbers_gb() == 0
    source = datasource([load_metadata(root)], delta_timestamps=WINDOWS)
    for _ in range(2):
        list(source.read_rows(range(8), 8))
        assert work.pop("rows") and not list(folder.glob("*/*/*"))


def arrow(values, type_, shape, dtype=np.float32):
    return numbers(pa.chunked_array([pa.array(values, type_)]), dtype, shape, "data: column x")


@pytest.mark.parametrize(
    "values, type_, shape, dtype, message",
    [
        (
            [[1, 2, 3], [4]],
            pa.list_(pa.float32()),
            (2,),
            np.float32,
            r"lists of \[1, 3\] values, expected shape \(2,\)",
        ),
        ([[1, 2], [3, 4]], pa.list_(pa.float32()), (4,), np.float32, r"values of shape \(2,\), expected \(4,\)"),
        ([2**63], pa.uint64(), (1,), np.int64, "holds uint64 that cannot be int64"),
        ([0, 2], pa.int64(), (1,), np.bool_, "holds int64 that cannot be bool"),
        (["a"], pa.string(), (1,), np.int64, "holds string, expected numbers"),
    ],
)
def test_values_that_are_not_the_declared_ones(values, type_, shape, dtype, message):
    with pytest.raises(ValueError, match=f"data: column x: {message}"):
        arrow(values, type_, shape, dtype)


def test_values_that_are():
    assert arrow([[1], [2]], pa.list_(pa.float64()), (1,)).tolist() == [1, 2]
    assert arrow([0, 1], pa.int8(), (1,), np.bool_).tolist() == [False, True]
    assert arrow([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int16())), (1, 2), np.int64).shape == (2, 1, 2)
    assert arrow([], pa.list_(pa.float32()), (3,)).shape == (0, 3)
