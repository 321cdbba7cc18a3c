"""Objectives by the names of --grpo.method: each is a module of this package that defines `METHOD`."""

from __future__ import annotations

from importlib import import_module

from vla_finetuning.options.grpo import Method
from vla_finetuning.rl.objectives.base import Objective


def objective_class(method: Method) -> type[Objective]:
    """Return the objective of --grpo.method: the class that its module calls METHOD."""
    chosen: type[Objective] = import_module(f"{__name__}.{method}").METHOD
    return chosen
