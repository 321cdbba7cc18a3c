"""Objectives of `grpo.py`: each value of --grpo.method is a module of this package that defines `METHOD`."""

from __future__ import annotations

from importlib import import_module

from vla_finetuning.options.grpo import Method
from vla_finetuning.rl.objectives.base import Objective


def objective_class(method: Method) -> type[Objective]:
    """Return the class that the module of a --grpo.method calls METHOD."""
    chosen: type[Objective] = import_module(f"{__name__}.{method}").METHOD
    return chosen
