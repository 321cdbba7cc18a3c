"""Declare options as dataclass fields with help, bounds and rules; convert text into their values.

    batch_size: int = option(8, "Rows of a micro-batch on each worker.", min=1)
    eval_steps: int = option(0, "Steps between ...", requires={"dataset.eval_split": "no episode is held out"})

The field's type defines the values: `Literal` for a choice, `int | None` for an option that may be absent. Declare
rules between two options with the field (`requires`, `conflicts`, `only_with`). Write other rules as the method
`check(config)` of the group or the program. The module knows no option and imports no package.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import math
import types
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# A range such as 0:99999999999 is a mistake and would fill the memory.
MAX_NUMBERS = 10_000_000
NAMED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Option:
    """An option of a program.

    A condition is the name of a flag that is not at its default, "eval_steps", or a flag with a value,
    "dataset.on_error=skip". A float meets a condition if it is above 0. Conditions on flags that a program lacks are
    ignored.

    Attributes:
        name: flag without the dashes; None if no flag sets the option. `policy.*` stands for every flag of a group that
            LeRobot's own classes define.
        path: fields that lead to the option, `dataset.root`.
        annotation: type of the field.
        default: value if the flag is absent.
        help: sentences for `--help`.
        section: heading in `--help`, one line.
        form: expected values in words; None if the type describes them.
        file: kind of a text that names a file, which a run makes absolute (plan/paths.py). "path": always a file.
            "name": a folder if it exists, else a name on the Hub. "@": a file if the text begins with an @.
        min, max: inclusive bounds of a number.
        above, below: exclusive bounds of a number.
        requires: reasons by the condition that must hold if the option is given. Text after a semicolon replaces the
            default remedy.
        conflicts: reasons by the condition that must not hold if the option is given, as `requires`.
        only_with: condition without which the option has no effect; a resumed run may lack it.
        set_by: flag that sets this option besides its own.
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
    set_by: str | None = None

    def is_given(self, value: Any) -> bool:
        """Return whether a value differs from the default and is neither None nor False."""
        return value != self.default and value is not None and value is not False

    def shown(self, value: Any) -> str:
        """Return the flag with a value, as on a command line; without one for an option that another's flag sets."""
        if self.set_by:
            return f"--{self.set_by}"
        if self.name and self.is_group:
            return value[0].replace("--", f"--{self.name[:-1]}", 1) if value else f"--{self.name}"
        text = value if isinstance(value, str) else json.dumps(value)
        return f"--{self.name or self.path}={f'{value:.10g}' if isinstance(value, float) else text}"

    @property
    def is_group(self) -> bool:
        """Return whether the option stands for all flags with its prefix."""
        return self.name is not None and self.name.endswith(".*")

    @property
    def is_bool(self) -> bool:
        return bool in (self.annotation, *get_args(self.annotation))

    @property
    def expected(self) -> str:
        """Return a description of the expected values."""
        words = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        bounds = " and ".join(f"{word} {bound:.10g}" for word, bound in words.items() if bound is not None)
        absent = ", or null" * (type(None) in get_args(self.annotation) and self.default is not None)
        return f"{self.form or form_of(self.annotation)}{f', {bounds}' if bounds else ''}{absent}"

    def decode(self, value: Any) -> Any:
        """Convert a value of a JSON file into a value of the option. Raises ValueError if it is invalid."""
        if not (isinstance(value, str) and self._misspells_null(value)):
            with suppress(ValueError):
                return self._bounded(as_kind(self.annotation, value))
        raise ValueError(self._refused(json.dumps(value)))

    def read(self, text: str) -> Any:
        """Convert the text of a flag into a value of the option. Raises ValueError if it is invalid."""
        for value in readings(text) if text == "null" or not self._misspells_null(text) else ():
            with suppress(ValueError):
                return self._bounded(as_kind(self.annotation, value))
        raise ValueError(self._refused(text))

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, list):
            for item in value:
                self._bounded(item)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            low = (self.min is None or value >= self.min) and (self.above is None or value > self.above)
            high = (self.max is None or value <= self.max) and (self.below is None or value < self.below)
            if not (low and high and math.isfinite(value)):
                raise ValueError
        return value

    def _misspells_null(self, text: str) -> bool:
        return type(None) in get_args(self.annotation) and text.strip('"').lower() in ("null", "nul", "nil", "none")

    def _refused(self, text: str) -> str:
        annotations = (self.annotation, *get_args(self.annotation))
        choices = [choice for kind in annotations if get_origin(kind) is Literal for choice in get_args(kind)]
        hint = "; did you mean null?" if self._misspells_null(text) else did_you_mean(text, choices)
        return f"--{self.name or self.path}={text}: expected {self.expected}{hint}"


def option(default: Any, help: str, *, flag: str | None = "", **attributes: Any) -> Any:
    """Return a dataclass field that declares an option with `attributes` of `Option`, from `form` on.

    `flag` is the name of the flag; "" for the field's name, None for an option without a flag.
    """
    metadata = {"help": help, "flag": flag, **attributes}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(cls: type) -> tuple[Option, ...]:
    """Return all options of a configuration, including the options of its groups."""
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
    """Refuse options that contradict each other, by the method `check(config)` of every class and by declared rules."""
    listed = options_of(type(config))
    options = {option.name or option.path: option for option in listed}
    for group in _groups(config):
        for cls in type(group).__mro__:
            if "check" in vars(cls):
                vars(cls)["check"](group, config)
    idle = idle_options(config)
    for option in listed:
        if option.is_given(value := get_option(config, option.path)):
            flag = option.shown(value)
            _check_rules(config, option, flag, options)
            if option in idle and not config.resume:
                raise ValueError(f"{flag} does nothing without --{option.only_with}: give both, or neither")


def idle_options(config: Any) -> list[Option]:
    """Return the options without an effect, because the condition that they need (`only_with`) is not met."""
    listed = options_of(type(config))
    options = {option.name or option.path: option for option in listed}
    return [o for o in listed if o.only_with and not _holds(config, o.only_with, options, absent=True)]


def _groups(config: Any) -> Iterator[Any]:
    """Yield a configuration and the groups of options within it."""
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


def _holds(config: Any, condition: str, options: Mapping[str, Option], absent: bool) -> bool:
    """Return whether a condition holds; return `absent` if the program has no such flag."""
    name, equals, text = condition.partition("=")
    if name not in options:
        return absent
    option = options[name]
    value = get_option(config, option.path)
    if equals:
        return value == option.read(text)
    return value > 0 if isinstance(value, float) else option.is_given(value)


def get_option(config: Any, path: str) -> Any:
    """Return the value at a path of fields, `dataset.root`."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def set_option(config: Any, path: str, value: Any) -> None:
    """Set the option at a path of fields, `dataset.root`."""
    *groups, name = path.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, name, value)


def decided[C](config: C, values: Mapping[str, Any]) -> C:
    """Return the options with `values` by path, as a plan decides them; `config.given` keeps what was given instead."""
    config = copy.deepcopy(config)
    settings: Any = config
    for path, value in values.items():
        if (given := get_option(config, path)) != value:
            settings.given = {path: given, **settings.given}
            set_option(config, path, value)
    return config


def leaves(saved: Any, paths: Container[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each option in a config.json; `paths` holds the paths of all options."""
    for name, value in saved.items():
        if prefix + name not in paths and isinstance(value, dict):
            yield from leaves(value, paths, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def as_kind(annotation: Any, value: Any) -> Any:
    """Convert a value into a type, as strictly as JSON: only int to float is converted. Raises ValueError."""
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
    """Yield the possible values of a text; an option takes the first value of its type."""
    with suppress(ValueError):
        yield json.loads(text)
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    with suppress(ValueError, OverflowError):  # 1e4 is an int too
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


def whole_numbers(text: str) -> list[int]:
    """Parse `0,1,5:8` into 0, 1, 5, 6, 7. Raises ValueError, also for an empty range."""
    numbers: list[int] = []
    for part in text.split(","):
        first, colon, last = part.strip().partition(":")
        if not (first.isdigit() and (last.isdigit() if colon else True)):
            raise ValueError
        values = range(int(first), int(last) if colon else int(first) + 1)
        if not 0 < len(values) <= MAX_NUMBERS:
            raise ValueError
        numbers += values
    return numbers


def form_of(annotation: Any) -> str:
    """Return a description of the values of a type."""
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
    """Return the name in `names` that a wrong name may stand for: equal in another group, or spelt alike."""
    by_last = {word.rpartition(".")[2]: word for word in sorted(names, key=lambda word: -word.count("."))}
    if (last := name.rpartition(".")[2]) in by_last:
        return by_last[last]
    close = difflib.get_close_matches(name, [*by_last, *names], n=1, cutoff=0.75)
    return by_last.get(close[0], close[0]) if close else None


def did_you_mean(name: str, names: Sequence[str], prefix: str = "") -> str:
    """Return the suggestion that ends an error message on an unknown name."""
    close = nearest(name, names)
    return f"; did you mean {prefix}{close}?" if close else ""
