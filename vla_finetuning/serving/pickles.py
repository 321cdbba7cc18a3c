"""Read what LeRobot's client pickles, without running any of it, and arrays of any client.

A pickle is a program: whoever sends one chooses what is called, and with what. Here a call is only written down, and
only of a name in `KNOWN`; the values are made afterwards, by this module.
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
    """A call that a pickle asks for: its arguments, and the state that it sets afterwards."""

    name: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Call:
        call = super().__new__(cls)
        call.arguments, call.state = arguments, None
        return call


# The one that is written in Python: C's allocates as much as an index into its memo says.
class _Reader(pickle._Unpickler):
    """Reads a pickle into values of Python's own types and `Call`s."""

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
    """Read the fields of a pickled dataclass of LeRobot's, by the name of its class.

    Raises:
        ValueError: it is of another class, names one that is not known, or is damaged.
    """
    try:
        call = _Reader(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # of a damaged pickle, whatever its instructions run into
        raise ValueError(f"the message is no pickle of {name}: {error!r}") from error
    if not isinstance(call, Call) or call.name != name or not isinstance(call.state, dict):
        raise ValueError(f"the message is no {name} of LeRobot's")
    fields: dict[str, Any] = _value(call.state)
    return fields


def _value(value: Any, depth: int = 0) -> Any:
    """Return a value with arrays and scalars where numpy is to make them."""
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
    """Return a pickled type as `numpy.dtype.str`."""
    match dtype:
        case Call(name="dtype", arguments=(code, *_), state=(_, order, *_)):
            return f"{order}{code}"
        case Call(name="dtype", arguments=(code, *_)):
            return f"|{code}"
    return None


def array_of(data: Any, dtype: Any, shape: Any, fortran: bool = False) -> np.ndarray:
    """Make an array of numbers of bytes from the network.

    Args:
        dtype: as `numpy.dtype.str`, "<f4".
    Raises:
        ValueError: no type of numbers, or a shape that the bytes do not have.
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
