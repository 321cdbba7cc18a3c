"""Find the family of a policy type. `FAMILIES` collects those of every file in families/, by LeRobot's type name."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.utils.import_utils import register_third_party_plugins

from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies import (
    families,
    tiny_pi05,  # noqa: F401  (registers the demo's policy type with LeRobot)
)
from vla_finetuning.policies.family import Family

# Attribute of a configuration that overrides its family. It is no dataclass field, so no file has it.
FAMILY_ATTRIBUTE = "_family"
# Packages whose policy types the tests compare with lerobot-train.
PROVEN = ("lerobot", "vla_finetuning")

_MODULES = [
    importlib.import_module(file.name) for file in pkgutil.iter_modules(families.__path__, f"{families.__name__}.")
]
FAMILIES: dict[str, Family] = {family.type: family for module in _MODULES for family in getattr(module, "FAMILIES", ())}
# By the name of an option (--train.*): the class of the families that it replaces, and the function that does so.
BY_OPTION = {option: pair for module in _MODULES for option, pair in getattr(module, "BY_OPTION", {}).items()}


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a configuration: the one set by `train_as`, else the one of its class."""
    return getattr(config, FAMILY_ATTRIBUTE, None) or family_of_class(type(config), config.type)


def train_as(config: PreTrainedConfig, family: Family) -> None:
    """Make `family_of` return `family` for a configuration and its copies. Saved files do not record it."""
    setattr(config, FAMILY_ATTRIBUTE, family)


def train_by_options(config: PreTrainedConfig, train: TrainOptions, folder: Path | None) -> None:
    """Make `family_of` return the family of a run with these options.

    Args:
        folder: folder of the policy that the run starts from; None for random weights.
    """
    for option, (replaced, make) in BY_OPTION.items():
        if getattr(train, option) and type(family := family_of(config)) is replaced:
            train_as(config, make(family, config, train, folder))


def supports(family: Family, option: str) -> bool:
    """Return whether a family trains with an option of `LOSS_OPTIONS` (--train.*)."""
    return option in family.train_options or (option in BY_OPTION and type(family) is BY_OPTION[option][0])


def family_of_class(config_class: type, policy_type: str) -> Family:
    """Return the family of a configuration's class or of its nearest base class; a plain `Family` if none has one.

    Base classes of a type from another package are ignored: its policy may have a forward of its own.
    """
    names = {cls: name for name, cls in PreTrainedConfig.get_known_choices().items()}
    bases = config_class.__mro__ if _package(config_class) in PROVEN else [config_class]
    candidates = (FAMILIES.get(names.get(base, "")) for base in bases)
    # An unknown type gets the defaults of lerobot-train: float32, and instructions as text.
    return next(filter(None, candidates), Family(policy_type, in_float32=True, reads_texts=True))


def types_that(condition: Callable[[Family], object]) -> str:
    """List the policy types whose family satisfies `condition`, for a message."""
    return ", ".join(name for name, family in FAMILIES.items() if condition(family))


def find_type(policy_type: Any) -> None:
    """Import LeRobot's installed plugins (lerobot_policy_*) if `policy_type` is not registered yet."""
    if policy_type not in PreTrainedConfig.get_known_choices():
        register_third_party_plugins()


def require_trained(policy_type: Any, source: str) -> None:
    """Refuse a type that does not exist or is not trained here, for a message about `source`, which names it.

    The name alone decides: some configurations ask the Hub when constructed.
    """
    if isinstance(policy_type, str):
        find_type(policy_type)
    classes = PreTrainedConfig.get_known_choices()
    if not isinstance(policy_type, str) or policy_type not in classes:
        raise ValueError(f"{source}: no policy is of type {policy_type!r}; LeRobot knows {', '.join(sorted(classes))}")
    family = family_of_class(classes[policy_type], policy_type)
    if family.refused:
        raise ValueError(
            f"{source}: a '{policy_type}' is not trained here: {family.refused}. Train it with lerobot-train"
        )


def refuse_update(config: PreTrainedConfig) -> None:
    """Raise ValueError for an installed policy with `update()`, which `lerobot-train` calls after each step."""
    if _package(type(config)) not in PROVEN and hasattr(get_policy_class(config.type), "update"):
        raise ValueError(
            f"a '{config.type}' is not trained here: lerobot-train calls its update() after each step, which this "
            "program does not. Train it with lerobot-train"
        )


def describe_unproven(config: PreTrainedConfig) -> str:
    """Return the plan's line for a type that no test compares with lerobot-train; "" for a tested type."""
    package = _package(type(config))
    if family_of_class(type(config), config.type).as_lerobot and package in PROVEN:
        return ""
    return f"unproven here: it is trained by its own forward, which no test compares with lerobot-train ({package})"


def _package(config_class: type) -> str:
    return config_class.__module__.partition(".")[0]
