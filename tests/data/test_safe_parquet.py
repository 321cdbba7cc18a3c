"""Foreign parquet files run no code when opened, and are unpacked within a budget of memory."""

import errno
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.data.test_metadata import refuses
from vla_finetuning.data import safe_parquet
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.data.storage import StorageError

ORIGINAL = {"episodes": (2, 3), "cameras": {}}


def test_extension_types_are_not_deserialised(root):
    """Arrow calls a registered type's deserialiser on opening a file; ours must never get that far."""
    calls = []

    class Spy(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.int64(), "test.spy")

        def __arrow_ext_serialize__(self):
            return b"x"

        @classmethod
        def __arrow_ext_deserialize__(cls, storage_type, serialized):
            calls.append(serialized)
            return cls()

    path, tasks = root / "meta/tasks.parquet", load_metadata(root).tasks
    plain = pa.table({"task_index": list(tasks), "task": list(tasks.values())})
    number = pa.ExtensionArray.from_storage(Spy(), pa.array(range(len(tasks)), pa.int64()))
    nested = pa.ListArray.from_arrays(pa.array(range(len(tasks) + 1), pa.int32()), number)
    pa.register_extension_type(Spy())
    try:
        for extra in (number, nested, pa.StructArray.from_arrays([number], ["inner"])):
            pq.write_table(plain.append_column("extra", extra), path)
            assert load_metadata(root).tasks == tasks
            with open_parquet(LocalFileSystem(), str(path)) as file:
                column = read_columns(file, ["extra"], Budget("rows", 10_000))["extra"]
            assert "test.spy" not in str(column.type) and len(column) == len(tasks)
            assert calls == []
            pq.read_schema(path)
            assert calls, "the control: plain pyarrow does call it"
            calls.clear()
    finally:
        pa.unregister_extension_type("test.spy")


def test_disk_error_is_not_reported_as_damaged_file(root, monkeypatch):
    def refused(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(safe_parquet, "_read_footer", refused)
    with pytest.raises(StorageError, match="tasks.parquet: .*Input/output error"):
        load_metadata(root)


FORMS = {
    "text": ["go", "go", None, "stop", "go"],
    "a.dotted.name": ["x"] * 5,
    "list": [["go"], [], None, ["go", "stop"], ["go"]],
    "image": [{"bytes": b"\xff" * 9, "path": None}] * 5,
    "language": [[{"role": "user", "content": {"text": "go"}}], [], None, [], []],
    "numbers": [[1.0, 2.0]] * 5,
}


def write_forms(path):
    """Texts wherever LeRobot has them, in row groups of two."""
    json_texts = pa.ListArray.from_arrays([0, 1, 1, 1, 2, 2], pa.array(["{}", "[]"]).cast(pa.json_()))
    table = pa.table({**FORMS, "events": json_texts, "large": pa.array(FORMS["text"], pa.large_string())})
    pq.write_table(table, path, row_group_size=2)
    return {**FORMS, "events": [["{}"], [], [], ["[]"], []], "large": FORMS["text"]}


def read(path, columns, budget, **options):
    with open_parquet(LocalFileSystem(), str(path), name="a file") as file:
        return read_columns(file, columns, budget, **options)


def test_text_columns_round_trip(tmp_path):
    expected = write_forms(tmp_path / "forms.parquet")
    table = read(tmp_path / "forms.parquet", list(reversed(expected)), Budget("rows", 10_000))
    assert table.column_names == list(reversed(expected))
    assert table.to_pydict() == expected
    assert table.schema.field("text").type == pa.string()
    some = read(tmp_path / "forms.parquet", ["text"], Budget("rows", 10_000), groups=[0, 2])
    assert some["text"].to_pylist() == ["go", "go", "go"]


def test_column_with_prefix_name_is_read_alone(tmp_path):
    """DROID has `action` and `action.original`."""
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.random.default_rng(0).random(4000)), 8)
    pq.write_table(pa.table({"action.original": values, "action": values}), tmp_path / "data.parquet")
    budget = Budget("rows", 2**30)
    assert read(tmp_path / "data.parquet", ["action"], budget).column_names == ["action"]
    assert budget.taken < 1.5 * values.nbytes


@pytest.mark.parametrize("column", ["text", "image", "language"])
def test_repeated_texts_count_towards_budget(tmp_path, column):
    """The file stores the text of 1000 letters, which 900 rows have, once."""
    write_forms(tmp_path / "forms.parquet")
    long = pa.array(["x" * 1000]).dictionary_encode().take(pa.array(np.zeros(900, np.int32)))
    every = pa.array(range(901), pa.int32())
    values = {
        "text": long,
        "image": pa.StructArray.from_arrays([long, long.slice(0, 900)], ["bytes", "path"]),
        "language": pa.ListArray.from_arrays(every, pa.StructArray.from_arrays([long], ["content"])),
    }
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({column: values[column]}), path)
    assert path.stat().st_size < 20_000
    assert read(path, [column], Budget("texts", 2**21)).num_rows == 900
    with pytest.raises(ValueError, match="a file: its texts need 1 MiB or more in memory, above the limit of 1 MiB"):
        read(path, [column], Budget("texts", 800_000))


def test_repeated_texts_in_one_row_stay_within_budget(tmp_path):
    """One row of a file of a few kB has a text of 1000 letters 20,000 times."""
    long = pa.array(["x" * 1000]).dictionary_encode().take(pa.array(np.zeros(20_000, np.int32)))
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"tasks": pa.ListArray.from_arrays(pa.array([0, 20_000], pa.int32()), long)}), path)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(ValueError, match="a file: its texts need 19 MiB or more"):
            read(path, ["tasks"], Budget("texts", 2**20))
    finally:
        pa.set_memory_pool(before)
    assert path.stat().st_size < 10_000 and pool.max_memory() < 5 * 2**20


def test_repeated_numbers_count_towards_budget(tmp_path):
    """A million zeros take a few bytes in the file, also by its footer."""
    path = tmp_path / "zeros.parquet"
    pq.write_table(pa.table({"zero": np.zeros(10**6)}), path)
    with pq.ParquetFile(path) as file:
        assert file.metadata.row_group(0).column(0).total_uncompressed_size < 10_000
    budget = Budget("rows", 12 * 2**20)  # of all files together
    read(path, ["zero"], budget)
    with pytest.raises(ValueError, match="a file: its rows need 15 MiB or more in memory, above the limit of 12 MiB"):
        read(path, ["zero"], budget)


def test_inconsistent_footer_is_refused():
    """Negative sizes would hide others; a row group may lack columns of the schema."""

    def declared(num_columns=1, **changes):
        chunk = SimpleNamespace(**{"num_values": 5, "total_uncompressed_size": 40, **changes})
        group = SimpleNamespace(num_rows=5, num_columns=num_columns, column=lambda i: chunk)
        schema = SimpleNamespace(column=lambda i: SimpleNamespace(physical_type="DOUBLE", length=0))
        metadata = SimpleNamespace(num_columns=1, row_group=lambda number: group, schema=schema)
        return safe_parquet._declared_bytes(metadata, 0, [0])

    assert declared() == 40
    with pytest.raises(OSError, match="row group 0 has a negative size"):
        declared(total_uncompressed_size=-(10**12))
    with pytest.raises(OSError, match="row group 0 has 0 columns, its schema 1"):
        declared(num_columns=0)


def test_duplicate_column_is_refused(root):
    path = root / "meta/tasks.parquet"
    table = pq.read_table(path)
    index = table["task_index"]
    pq.write_table(pa.Table.from_arrays([index, index, table.column(1)], ["task_index", "task_index", "task"]), path)
    refuses(root, r"meta/tasks.parquet: columns \['task_index'\] must be there once")
