"""Columns of a read task: numbers of the declared type and shape, and memory that is used again."""

import numpy as np
import pyarrow as pa
import pytest

from vla_finetuning.data import rows as lerobot_rows
from vla_finetuning.data.rows import _array, _to_table
from vla_finetuning.data.table import numbers


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
    assert arrow([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int16(), 2)), (1, 2), np.int64).shape == (2, 1, 2)
    assert arrow([], pa.list_(pa.float32()), (3,)).shape == (0, 3)


def test_memory_is_used_again_once_nobody_looks_at_it():
    def address(array):
        return array.__array_interface__["data"][0]

    lerobot_rows._unused.clear()
    first = _array((4, 2**20), np.dtype(np.uint8))
    first[:] = 1
    where, row = address(first), first[2]
    table = _to_table({"a": first}, ["a"], 1, 3).slice(1)  # what Ray Data, or who reads, still holds
    del first
    second = _array((4, 2**20), np.dtype(np.uint8))
    second[:] = 2
    assert address(second) != where
    at_second = address(second)
    assert (row == 1).all() and np.all(lerobot_rows.column_to_numpy(table.column("a")) == 1)
    del second, row
    assert len(lerobot_rows._unused) == 1
    del table
    third = _array((2**20,), np.dtype(np.float32))
    fourth = _array((3, 2**20), np.dtype(np.uint8))
    assert {address(third), address(fourth)} == {where, at_second} and not lerobot_rows._unused
    fifth = _array((2, 2**20), np.dtype(np.uint8))
    del third, fourth, fifth
    assert len(lerobot_rows._unused) == 3
    larger = _array((5, 2**20), np.dtype(np.uint8))  # nothing kept is large enough, so nothing is worth keeping
    assert larger.shape == (5, 2**20) and not lerobot_rows._unused
