"""Make LeRobot's configurations of policies, environments and optimizers from options and saved JSON.

LeRobot's own parser opens files named by `--config_path`, by a group's name, or by a value that begins with `include`,
so that a run's config.json could have any file read. Here a name is a field, and a value is a value.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from typing import Any

from draccus.parsers.decoding import decode
from draccus.utils import DraccusException

from vla_finetuning.options.fields import did_you_mean


def make_config(
    cls: type, group: str, options: Sequence[str] = (), saved: Mapping[str, Any] | None = None, source: str = ""
) -> Any:
    """Make a configuration of class `cls` from saved fields, overridden by options.

    Args:
        group: first part of the options' flags, as "policy"; options are as "--chunk_size=20".
        saved: fields of a configuration in LeRobot's JSON, called `source` in error messages; None for the defaults.
    Raises:
        ValueError: unknown option, invalid value, or values that contradict each other.
    """
    raw = json.loads(json.dumps(saved or {}))
    for name, text in (option.removeprefix("--").split("=", 1) for option in options):
        *groups, last = path = _path(cls, group, name)
        group_fields = raw
        for parent in groups:
            group_fields[parent] = group_fields.get(parent) or {}
            group_fields = group_fields[parent]
        group_fields[last] = _parse_value(_type_of(cls, path), f"--{group}.{name}", text)
    try:
        return decode(cls, raw)
    except Exception as error:  # LeRobot's checks raise any exception
        if unknown := sorted(set(saved or {}) - {field.name for field in fields(cls)}):
            raise ValueError(
                f"{source} has {', '.join(unknown)}, which {cls.__name__} of this LeRobot ({version('lerobot')}) does "
                "not know: it was saved by a newer one, or is no such configuration; remove those that have their "
                "default value"
            ) from error
        flags = ", ".join(f"--{group}.{option.removeprefix('--')}" for option in options)
        source = " with ".join(filter(None, [source, flags]))
        reason = "; ".join(" ".join(str(e).split()) for e in (error, error.__cause__) if e)
        raise ValueError(f"{source}: {reason}") from error


def read_options(cls: type, group: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return options as values of the fields of `cls`. Raises ValueError as `make_config`."""
    hints = {name: _type_of(cls, _path(cls, group, name)) for name in options}
    return {
        name: decode(hints[name], _parse_value(hints[name], f"--{group}.{name}", text))
        for name, text in options.items()
    }


def _path(cls: type, group: str, name: str) -> list[str]:
    """Split an option's name into field names, as `a.b` for a nested configuration; raise ValueError if unknown."""
    path = name.split(".")
    for depth, field_name in enumerate(path):
        within = _configuration(_type_of(cls, path[:depth]))
        names = sorted(field.name for field in fields(within) if field.init) if within else []
        if field_name not in names:
            close = did_you_mean(field_name, names, f"--{'.'.join([group, *path[:depth]])}.")
            expected = f"its options are {', '.join(names)}" if names else "it is one value"
            raise ValueError(f"--{group}.{name}: no option of {cls.__name__}{close}; {expected}")
    return path


def _type_of(hint: Any, path: Sequence[str]) -> Any:
    for name in path:
        hint = typing.get_type_hints(_configuration(hint))[name]
    return hint


def _configuration(hint: Any) -> Any:
    """Return the dataclass in a field's type, which may be optional; None if there is none."""
    return next((candidate for candidate in (hint, *typing.get_args(hint)) if is_dataclass(candidate)), None)


def _parse_value(hint: Any, flag: str, text: str) -> Any:
    """Return an option's text parsed as JSON if that is a value of its type, or else the text itself."""
    values = [text]
    with suppress(ValueError):
        value = json.loads(text.lower() if text in ("True", "False") else text)
        # draccus converts any number to a string: "1e3" would become "1000.0".
        kinds = (hint, *typing.get_args(hint))
        if not isinstance(value, (int, float)) or str not in kinds or type(value) in kinds:
            values.insert(0, value)
    failed: list[Exception] = []
    for value in values:
        try:
            decode(hint, value)
            return value
        except (DraccusException, ValueError, TypeError, AttributeError, KeyError) as error:
            failed.append(error)
    raise ValueError(f"{flag}={text}: {' '.join(str(failed[0]).split())}") from failed[0]
