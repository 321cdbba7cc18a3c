"""An option of a program: a dataclass field with its sentence for `--help`, its bounds, and how text becomes its value.

    batch_size: int = option(8, "Rows of a micro-batch on each worker.", min=1)
    eval_steps: int = option(0, "Steps between ...", requires={"dataset.eval_split": "no episode is held out"})

The field's type says which values there are: `Literal` for a choice, `int | None` where it may be absent. What an
option needs of another, or contradicts, is declared with it (`requires`, `conflicts`, `only_with`); what takes
arithmetic, or more than two options, is the method `check(config)` of the group that owns it, or of the program. Knows
no option, and needs no package.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import types
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Of numbers listed by ranges: more is a slip, and fills the memory.
MAX_NUMBERS = 10_000_000
NAMED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Option:
    """An option as it is typed.

    Attributes:
        name: its flag, without the dashes; None: no flag sets it by itself. `policy.*`: any flag of that group, of
            which LeRobot's own classes say what there is.
        path: the fields that lead to it, `dataset.root`. annotation: its type. default: its value where none is given.
        help: sentences for people. form: what is expected, where the type does not say it.
        min, above, max, below: bounds of a number; `above` and `below` are not among its values.
        section: of `--help`, one line.
        file: of a text that names a file, which a run makes absolute (plan/paths.py). path: always. name: where there
            is such a folder; else it is a name on the Hub. @: where it begins with an @.
        requires, conflicts: conditions that must hold, or must not, where the option is not at its default, and why;
            after a semicolon what to do, where that is not to give the condition, or leave one of the two out.
            A condition is another flag that is not at its default, "eval_steps", or one with a value,
            "dataset.on_error=skip"; a share holds above 0. Conditions on flags that a program lacks do not apply to it.
        only_with: the condition without which the option does nothing. A run that is resumed may have it all the same.
    """

    name: str | None
    path: str
    annotation: Any
    default: Any
    help: str
    section: str
    form: str | None = None
    file: Literal["path", "name", "@"] | None = None
    min: float | None = None
    above: float | None = None
    max: float | None = None
    below: float | None = None
    requires: Mapping[str, str] = field(default_factory=dict)
    conflicts: Mapping[str, str] = field(default_factory=dict)
    only_with: str | None = None

    def is_given(self, value: Any) -> bool:
        """Return whether a value is another than the default, and asks for something."""
        return value != self.default and value is not None and value is not False

    def shown(self, value: Any) -> str:
        """The flag with a value, as it is typed."""
        if self.name and self.is_group:
            return value[0].replace("--", f"--{self.name[:-1]}", 1) if value else f"--{self.name}"
        text = value if isinstance(value, str) else json.dumps(value)
        return f"--{self.name or self.path}={f'{value:.10g}' if isinstance(value, float) else text}"

    @property
    def is_group(self) -> bool:
        """Return whether it stands for all flags with its prefix."""
        return self.name is not None and self.name.endswith(".*")

    @property
    def is_bool(self) -> bool:
        return bool in (self.annotation, *get_args(self.annotation))

    @property
    def expected(self) -> str:
        """Return what its values are, in words."""
        words = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        bounds = " and ".join(f"{word} {bound:.10g}" for word, bound in words.items() if bound is not None)
        absent = ", or null" * (type(None) in get_args(self.annotation) and self.default is not None)
        return f"{self.form or form_of(self.annotation)}{f', {bounds}' if bounds else ''}{absent}"

    def decode(self, value: Any) -> Any:
        """A value of a JSON file as one of the option's. Raises ValueError if it is invalid."""
        with suppress(ValueError):
            return self._bounded(as_kind(self.annotation, value))
        raise ValueError(self._refused(json.dumps(value)))

    def read(self, text: str) -> Any:
        """The text of a flag as a value of the option. Raises ValueError if it is invalid."""
        for value in readings(text):
            with suppress(ValueError):
                return self._bounded(as_kind(self.annotation, value))
        raise ValueError(self._refused(text))

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, list):
            for item in value:
                self._bounded(item)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low = value >= (-math.inf if self.min is None else self.min) and (self.above is None or value > self.above)
            high = value <= (math.inf if self.max is None else self.max) and (self.below is None or value < self.below)
            if not (low and high and math.isfinite(value)):
                raise ValueError
        return value

    def _refused(self, text: str) -> str:
        annotations = (self.annotation, *get_args(self.annotation))
        choices = [choice for kind in annotations if get_origin(kind) is Literal for choice in get_args(kind)]
        return f"--{self.name or self.path}={text}: expected {self.expected}{did_you_mean(text, choices)}"


def option(default: Any, help: str, *, flag: str | None = "", **attributes: Any) -> Any:
    """Return a dataclass field that is an option.

    Args:
        flag: its name where that is not the field's. attributes: of `Option`, from `form` on.
    """
    metadata = {"help": help, "flag": flag, **attributes}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(cls: type) -> tuple[Option, ...]:
    """Return all options of a configuration, those of its groups among them."""
    return _options_once(cls)  # type: ignore[arg-type]  # mypy asks the instances whether a type is hashable


@functools.cache
def _options_once(cls: type) -> tuple[Option, ...]:
    return tuple(_options(cls, "", None))


def _options(cls: type, prefix: str, section: str | None) -> Iterator[Option]:
    hints, defaults = get_type_hints(cls), cls()
    for attribute in fields(cls):
        path = prefix + attribute.name
        if is_dataclass(hints[attribute.name]):
            group = hints[attribute.name]
            yield from _options(group, f"{path}.", section or f"--{path}.*: {_title(group)}")
        else:
            owner = next(
                (base for base in cls.__bases__ if attribute.name in getattr(base, "__dataclass_fields__", {})), cls
            )
            metadata = dict(attribute.metadata)
            flag = metadata.pop("flag")
            yield Option(
                name=(prefix + flag if flag else path) if flag is not None else None,
                path=path,
                annotation=hints[attribute.name],
                default=getattr(defaults, attribute.name),
                section=section or _title(owner),
                **metadata,
            )


def _title(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0].removesuffix(".")


def check(config: Any) -> None:
    """Refuse options that contradict each other. Raises ValueError naming them, why, and what to do.

    Each group is checked by its own `check(config)`, and by those of the groups that it inherits from.
    """
    listed = options_of(type(config))
    options = {option.name or option.path: option for option in listed}
    for group in _groups(config):
        for cls in type(group).__mro__:
            if "check" in vars(cls):
                vars(cls)["check"](group, config)
    for option in listed:
        if option.is_given(value := get_option(config, option.path)):
            _check_rules(config, option, option.shown(value), options)


def _groups(config: Any) -> Iterator[Any]:
    """A configuration, and the groups of options within it."""
    yield config
    for attribute in fields(config):
        if is_dataclass(group := getattr(config, attribute.name)):
            yield from _groups(group)


def _check_rules(config: Any, option: Option, flag: str, options: Mapping[str, Option]) -> None:
    for condition, why in option.requires.items():
        if not _holds(config, condition, options, absent=True):
            name, equals, _ = condition.partition("=")
            current = f" with {options[name].shown(get_option(config, options[name].path))}" if equals else ""
            remedy = "" if ";" in why else f"{' ' if why.endswith('?') else '; '}give --{condition}"
            raise ValueError(f"{flag}{current}: {why}{remedy}")
    for condition, why in option.conflicts.items():
        if _holds(config, condition, options, absent=False):
            other = options[condition.partition("=")[0]]
            reason = why if ";" in why else f"{why}; leave one of them out" if why else "give one of them"
            raise ValueError(f"{flag} with {other.shown(get_option(config, other.path))}: {reason}")
    if option.only_with and not config.resume and not _holds(config, option.only_with, options, absent=True):
        raise ValueError(f"{flag} does nothing without --{option.only_with}: give both, or neither")


def _holds(config: Any, condition: str, options: Mapping[str, Option], absent: bool) -> bool:
    """Return whether a condition holds; `absent` where the program has no such flag."""
    name, equals, text = condition.partition("=")
    if name not in options:
        return absent
    option = options[name]
    value = get_option(config, option.path)
    if equals:
        return value == option.read(text)
    return value > 0 if isinstance(value, float) else option.is_given(value)


def get_option(config: Any, path: str) -> Any:
    """The value at a path of fields, `dataset.root`."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def set_option(config: Any, path: str, value: Any) -> None:
    """Set the option at a path of fields, `dataset.root`."""
    *groups, name = path.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, name, value)


def leaves(saved: Any, paths: Container[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a config.json, groups within groups, by their paths; `paths`: of those that there are."""
    for name, value in saved.items():
        if prefix + name not in paths and isinstance(value, dict):
            yield from leaves(value, paths, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def as_kind(annotation: Any, value: Any) -> Any:
    """A value as one of a type, as strict as JSON: only a whole number becomes a float. Raises ValueError."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        for member in args:
            with suppress(ValueError):
                return as_kind(member, value)
    elif origin is Literal:
        if isinstance(value, str) and value in args:
            return value
    elif origin is list:
        if isinstance(value, list):
            return [as_kind(args[0], item) for item in value]
    elif origin is dict:
        if isinstance(value, dict):
            return {as_kind(args[0], key): as_kind(args[1], item) for key, item in value.items()}
    elif annotation is float and type(value) is int:
        return float(value)
    elif type(value) is annotation:
        return value
    raise ValueError(f"{value!r} is not {form_of(annotation)}")


def readings(text: str) -> Iterator[Any]:
    """Yield what a text may stand for; an option takes the first that is of its type."""
    with suppress(ValueError):
        yield json.loads(text)
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    with suppress(ValueError, OverflowError):  # 1e4 is a whole number, too
        number = float(text)
        if number == int(number):
            yield int(number)
        yield number
    with suppress(ValueError):
        yield whole_numbers(text)
    with suppress(ValueError):
        yield json.loads(f"[{text}]")
    yield text
    if text.strip()[:1] not in ("[", "{"):  # invalid JSON is not guessed at
        yield [part.strip() for part in text.split(",")]


def refuse_address(flag: str, folder: str | None) -> None:
    """Refuse an address of an object store where a folder of each node's own disk is meant."""
    if folder is not None and "://" in folder:
        raise ValueError(f"{flag}={folder}: expected a folder on each node's own disk")


def whole_numbers(text: str) -> list[int]:
    """`0,1,5:8` is 0, 1, 5, 6, 7. Raises ValueError, for a range without a number too."""
    numbers: list[int] = []
    for part in text.split(","):
        first, colon, last = part.strip().partition(":")
        if not (first.isdigit() and (last.isdigit() if colon else True)):
            raise ValueError
        some = range(int(first), int(last) if colon else int(first) + 1)
        if not 0 < len(some) <= MAX_NUMBERS:
            raise ValueError
        numbers += some
    return numbers


def form_of(annotation: Any) -> str:
    """Return what the values of a type are, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(form_of(member) for member in args if member is not type(None))
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is list:
        return {int: "numbers, as 3,7,20:30", float: "numbers, as 0,0.1"}.get(args[0], "names, as A,B")
    if origin is dict:
        return """JSON, as '{"a": ...}'"""
    return NAMED.get(annotation, "a value")


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The name that a wrong one may stand for: the same in another group, or one that is spelt alike."""
    by_last = {word.rpartition(".")[2]: word for word in sorted(names, key=lambda word: -word.count("."))}
    if (last := name.rpartition(".")[2]) in by_last:
        return by_last[last]
    close = difflib.get_close_matches(name, [*by_last, *names], n=1, cutoff=0.75)
    return by_last.get(close[0], close[0]) if close else None


def did_you_mean(name: str, names: Sequence[str], prefix: str = "") -> str:
    """The end of a message about a wrong name."""
    close = nearest(name, names)
    return f"; did you mean {prefix}{close}?" if close else ""
