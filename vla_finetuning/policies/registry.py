"""The families of policies by LeRobot's name of the type. A new one is a file in families/ with its `FAMILIES`."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.utils.import_utils import register_third_party_plugins

from vla_finetuning.policies import (
    families,
    tiny_pi05,  # noqa: F401  (registers the demo's policy type with LeRobot)
)
from vla_finetuning.policies.family import Family

# An attribute of a configuration that is no option of the policy, and in no file.
CHOSEN = "_family"
# Packages whose types tests compare with lerobot-train.
PROVEN = ("lerobot", "vla_finetuning")

FAMILIES: dict[str, Family] = {
    family.type: family
    for file in pkgutil.iter_modules(families.__path__, f"{families.__name__}.")
    for family in importlib.import_module(file.name).FAMILIES
}


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a policy by its configuration, or of what its configuration derives from; else a plain one.

    Of a run that `train_as` has chosen one for, that one.
    """
    return getattr(config, CHOSEN, None) or family_of_class(type(config), config.type)


def train_as(config: PreTrainedConfig, family: Family) -> None:
    """Have `family_of` return a family for a configuration and its copies; files of it do not say so."""
    setattr(config, CHOSEN, family)


def family_of_class(config_class: type, policy_type: str) -> Family:
    """Return the family of a policy by its configuration's class and the name of its type.

    A type of another package is of no family of what it derives from: its policy may have a forward of its own.
    """
    names = {cls: name for name, cls in PreTrainedConfig.get_known_choices().items()}
    bases = config_class.__mro__ if _package(config_class) in PROVEN else [config_class]
    candidates = (FAMILIES.get(names.get(base, "")) for base in bases)
    # A type that is unknown here gets what lerobot-train gives every type: float32, and instructions as text.
    return next(filter(None, candidates), Family(policy_type, in_float32=True, reads_texts=True))


def types_that(can: Callable[[Family], object]) -> str:
    """The policy types that satisfy a condition, for a message."""
    return ", ".join(name for name, family in FAMILIES.items() if can(family))


def find_type(policy_type: Any) -> None:
    """Import LeRobot's installed plugins (lerobot_policy_*) where no policy of a type is known yet."""
    if policy_type not in PreTrainedConfig.get_known_choices():
        register_third_party_plugins()


def require_trained(policy_type: Any, source: str) -> None:
    """Refuse a type that is not trained here, by its name alone: making a configuration of some asks the Hub.

    Raises:
        ValueError: there is no such type; it is not trained here, and why. Names `source`, where it was asked for.
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


def describe_unproven(config: PreTrainedConfig) -> str:
    """Say, for the plan, that no test compares a type with lerobot-train, and what trains it; "" where one does."""
    package = _package(type(config))
    if family_of_class(type(config), config.type).as_lerobot and package in PROVEN:
        return ""
    return f"unproven here: it is trained by its own forward, which no test compares with lerobot-train ({package})"


def _package(config_class: type) -> str:
    return config_class.__module__.partition(".")[0]
