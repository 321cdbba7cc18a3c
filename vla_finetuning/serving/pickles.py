"""Read the pickles of LeRobot's client without running them, and check arrays of any client.

A pickle is a program: its sender chooses the functions to call and their arguments. This reader only records calls, of
names in `KNOWN`, and afterwards makes the values itself.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

# As LeRobot 0.6.1 and numpy 2 name them.
KNOWN = {
    "lerobot.async_inference.helpers": {"TimedObservation", "RemotePolicyConfig"},
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
}
_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")


class Call:
    """A recorded call of a pickle: its arguments, and the state that the pickle sets afterwards."""

    name: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Call:
        call = super().__new__(cls)
        call.arguments, call.state = arguments, None
        return call


# The unpickler in Python: the one in C allocates memory by an index that the sender chooses (of the memo).
class _Reader(pickle._Unpickler):
    """Read a pickle into values of built-in types and `Call`s."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if name not in KNOWN.get(module, ()):
            raise ValueError(
                f"the message names {module}.{name}, which no message of LeRobot's robot_client needs: refused"
            )
        return type(name, (Call,), {"name": name})

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Call):
            raise ValueError(f"the message sets attributes of a {type(target).__name__}: refused")
        target.state = state

    dispatch[pickle.BUILD[0]] = _build  # type: ignore[misc]


def read_pickle(data: bytes, name: str) -> dict[str, Any]:
    """Return the fields of a pickled dataclass of LeRobot's, whose class is called `name`.

    Raises ValueError if the pickle is of another class, uses an unknown name, or is damaged.
    """
    try:
        call = _Reader(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # the instructions of a damaged pickle can raise anything
        raise ValueError(f"the message is no pickle of {name}: {error!r}") from error
    if not isinstance(call, Call) or call.name != name or not isinstance(call.state, dict):
        raise ValueError(f"the message is no {name} of LeRobot's")
    fields: dict[str, Any] = _value(call.state)
    return fields


def _value(value: Any, depth: int = 0) -> Any:
    """Replace recorded calls of numpy by arrays and scalars."""
    match value:
        case dict() if depth > 3:
            raise ValueError("the message is nested too deep")
        case dict():
            return {str(key): _value(entry, depth + 1) for key, entry in value.items()}
        case Call(name="scalar", arguments=(dtype, data)):
            return array_of(data, _code(dtype), ())[()]
        case Call(name="_frombuffer", arguments=(data, dtype, shape, order)):
            return array_of(data, _code(dtype), shape, order == "F")
        case Call(name="_reconstruct", state=(_, shape, dtype, fortran, data)):
            return array_of(data, _code(dtype), shape, bool(fortran))
        case Call():
            raise ValueError(f"the message calls {value.name} in a way that numpy does not pickle: refused")
    return value


def _code(dtype: Any) -> str | None:
    """Return a pickled dtype as `numpy.dtype.str`, or None if it is none."""
    match dtype:
        case Call(name="dtype", arguments=(code, *_), state=(_, order, *_)):
            return f"{order}{code}"
        case Call(name="dtype", arguments=(code, *_)):
            return f"|{code}"
    return None


def array_of(data: Any, dtype: Any, shape: Any, fortran: bool = False) -> np.ndarray:
    """Make an array of numbers from received bytes; `dtype` is as `numpy.dtype.str`, for example "<f4".

    Raises ValueError if `dtype` is not numeric, or `shape` does not fit the bytes.
    """
    if not isinstance(dtype, str) or not _NUMBERS.fullmatch(dtype):
        raise ValueError(f"an array is of type {dtype!r}: send numbers, as '<f4' or '|u1'")
    sizes = shape if isinstance(shape, (tuple, list)) and len(shape) <= 8 else [None]
    if not isinstance(data, (bytes, bytearray)) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"an array has the shape {str(shape)[:100]}: send whole numbers, and its bytes")
    expected = math.prod(sizes) * np.dtype(dtype).itemsize
    if expected != len(data):
        raise ValueError(f"an array of type {dtype} and shape {tuple(sizes)} has {expected} bytes, not {len(data)}")
    return np.frombuffer(data, np.dtype(dtype)).reshape(sizes, order="F" if fortran else "C")
