"""Parquet files of strangers: what Arrow would run on opening them is refused before that."""

import errno
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets import make_dataset
from vla_finetuning.data import safe_parquet
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.safe_parquet import open_parquet
from vla_finetuning.data.storage import StorageError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("parquet") / "original", episodes=(2, 3), cameras={})


@pytest.fixture
def root(original, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(original, tmp_path / "dataset"))


def refuses(root, message):
    with pytest.raises(ValueError, match=f"(?s)^dataset {re.escape(str(root))}:? .*{message}"):
        load_metadata(root)


def write_with_extension(path, name, *, nested=False, registered=False):
    """A tasks.parquet with one more column of an Arrow extension type."""
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": "x"}
    if nested:
        inner = pa.field("inner", pa.int64(), metadata=metadata)
        field = pa.field("extra", pa.list_(pa.struct([inner])))
        column = pa.array([[{"inner": 1}], []], field.type)
    else:
        field = pa.field("extra", pa.int64(), metadata=metadata)
        column = pa.array([1, 2])
    schema = pa.schema([pa.field("task_index", pa.int64()), pa.field("task", pa.string()), field])
    table = pa.table([[0, 1], ["go to the red bin", "go to the blue bin"], column], schema=schema)
    pq.write_table(table, path)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["ray.data.arrow_tensor_v2", "arrow.py_extension_type", "arrow.uuid", ""])
def test_arrow_extension_types(root, name, nested):
    write_with_extension(root / "meta/tasks.parquet", name, nested=nested)
    refuses(root, f"meta/tasks.parquet holds the Arrow extension type {re.escape(repr(name))}")


def test_extension_types_are_refused_before_arrow_deserialises_them(root):
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

    pa.register_extension_type(Spy())
    try:
        path = root / "meta/tasks.parquet"
        write_with_extension(path, "test.spy")
        refuses(root, "holds the Arrow extension type 'test.spy'")
        assert calls == []
        pq.read_schema(path)
        assert calls, "the control: plain pyarrow does call it"
    finally:
        pa.unregister_extension_type("test.spy")


def extension_names(path):
    with open(path, "rb") as file:
        return list(safe_parquet._extension_names_in_footer(safe_parquet._read_footer(file)))


def test_what_lerobot_itself_writes_is_allowed(tmp_path):
    root = make_dataset(tmp_path / "d", episodes=(2, 3), cameras={}, extra_features=True)
    meta = load_metadata(root)
    assert extension_names(root / meta.data_files[0]) == ["datasets.features.features.Array2DExtensionType"]
    with open_parquet(meta.fs, f"{meta.base}/{meta.data_files[0]}") as file:
        assert file.read().num_rows == 5
    # The language columns of LeRobot 0.6 hold JSON texts in lists of structs.
    texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", "[]"]))
    path = tmp_path / "language.parquet"
    pq.write_table(pa.table({"language_events": pa.ListArray.from_arrays([0, 1, 2], texts)}), path)
    assert extension_names(path) == ["arrow.json"]
    with open_parquet(meta.fs, str(path)) as file:
        assert file.read().num_rows == 2


def test_a_disk_that_does_not_answer_is_no_damaged_file(root, monkeypatch):
    def refused(file):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(safe_parquet, "_read_footer", refused)
    with pytest.raises(StorageError, match="tasks.parquet: .*Input/output error"):
        load_metadata(root)


def test_an_arrow_schema_in_an_unusual_encoding_is_refused(root):
    """Thrift has two ways to write the same field; Arrow's own writers use one, and only that one is read."""
    path = root / "meta/tasks.parquet"
    key = b"ARROW:schema"
    path.write_bytes(path.read_bytes().replace(key + b"\x18", key + b"\x08"))
    refuses(root, "meta/tasks.parquet cannot be read as a parquet file .*Arrow schema is damaged: unknown encoding")


def test_every_byte_of_the_embedded_schema_may_be_wrong(root):
    """Damaged schemas end in an error that names the file, or in an unharmed read; in nothing else."""
    path = root / "meta/tasks.parquet"
    content = path.read_bytes()
    start = content.index(b"ARROW:schema")
    rng = np.random.default_rng(0)
    outcomes = set()
    for at in range(start, start + 700, 3):
        damaged = bytearray(content)
        damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_metadata(root)
            outcomes.add("read")
        except ValueError as error:
            assert "meta/tasks.parquet" in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
