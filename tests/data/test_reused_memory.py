"""Memory of earlier read tasks is reused, and never while it is referenced."""

import numpy as np

from vla_finetuning.data import reused_memory
from vla_finetuning.data.rows import column_to_numpy, to_table


def test_memory_is_reused_only_when_unreferenced():
    def address(array):
        return array.__array_interface__["data"][0]

    reused_memory._unused.clear()
    first = reused_memory.empty((4, 2**20), np.dtype(np.uint8))
    first[:] = 1
    where, row = address(first), first[2]
    table = to_table({"a": first[1:3]}).slice(1)  # what Ray Data, or its reader, still holds
    del first
    second = reused_memory.empty((4, 2**20), np.dtype(np.uint8))
    second[:] = 2
    assert address(second) != where
    at_second = address(second)
    assert (row == 1).all() and np.all(column_to_numpy(table.column("a")) == 1)
    del second, row
    assert len(reused_memory._unused) == 1
    del table
    third = reused_memory.empty((2**20,), np.dtype(np.float32))
    fourth = reused_memory.empty((3, 2**20), np.dtype(np.uint8))
    assert {address(third), address(fourth)} == {where, at_second} and not reused_memory._unused
    fifth = reused_memory.empty((2, 2**20), np.dtype(np.uint8))
    del third, fourth, fifth
    assert len(reused_memory._unused) == 3
    larger = reused_memory.empty((5, 2**20), np.dtype(np.uint8))  # too large for the rest, which is freed
    assert larger.shape == (5, 2**20) and not reused_memory._unused
