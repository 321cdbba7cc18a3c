"""Allocate large arrays in memory that freed arrays of this process leave.

Pages that are fresh from the operating system cost several times as much as the copy of a frame into them.
"""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np

# Memory of arrays that were garbage collected.
_unused: list[memoryview] = []
_taking = threading.Lock()
_WORTH_KEEPING_BYTES = 2**20


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array as `np.empty`. Large ones reuse memory of arrays of which no view is left."""
    size = math.prod(shape) * dtype.itemsize
    if size < _WORTH_KEEPING_BYTES or dtype.hasobject:
        return np.empty(shape, dtype)
    with _taking:
        fitting = [i for i, memory in enumerate(_unused) if memory.nbytes >= size]
        if fitting:
            memory = _unused.pop(min(fitting, key=lambda i: _unused[i].nbytes))
        else:
            _unused.clear()
            memory = np.empty(size, np.uint8).data
    # Views by NumPy and Arrow keep this array alive, so it is finalized after the last of them.
    array = np.frombuffer(memory, dtype, math.prod(shape))
    weakref.finalize(array, _unused.append, memory).atexit = False
    return array.reshape(shape)


def copy_reusing(values: np.ndarray) -> np.ndarray:
    copy = empty(values.shape, values.dtype)
    copy[...] = values
    return copy
