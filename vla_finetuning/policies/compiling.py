"""Compile functions of a training step by `torch.compile`.

Runs in the training worker. Functions are compiled, not modules, so parameters keep their names.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

# Most shapes that a function is compiled for; it raises for more: each prompt length (prompts.MAX_LENGTHS), with and
# without gradients, for action tokens and for text, with all cameras and with fewer.
MAX_SHAPES = 64


def why_not(device: torch.device) -> str | None:
    """Return the reason not to try `torch.compile` on `device`, if any."""
    if device.type != "cuda":
        return f"the step runs on the {device.type.upper()}, and only GPUs gain from it"
    return (
        None if has_triton() else f"Triton is not installed, or does not support {torch.cuda.get_device_name(device)}"
    )


class Compiler:
    """Wraps functions with their compiled versions. Each shape is compiled once for all layers of a class.

    Args:
        backend: as for `torch.compile`.
    Attributes:
        compilations: number of graphs compiled so far.
        calls: number of calls of compiled code so far. Dynamo silently skips a function under a `TorchDispatchMode`
            whose `ignore_compile_internals` is false, and keeps skipping it afterwards (torch 2.11).
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor"):
        torch._dynamo.config.recompile_limit = MAX_SHAPES
        # Dynamo's DDP optimizer would split a layer into several graphs at the ends of DDP's buckets. It is meant for
        # models compiled as one graph, whose gradients would all become ready at once (torch 2.11).
        torch._dynamo.config.optimize_ddp = False
        self.backend = backend
        self.compilations = self.calls = 0

    def _compile(self, name: str, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        """Compile a graph that Dynamo captured of the function `name`; the code counts its own calls."""
        backend = lookup_backend(self.backend) if isinstance(self.backend, str) else self.backend
        code = backend(graph, examples)
        self.compilations += 1
        logger.info("torch.compile: %s, compilation %d", name, self.compilations)

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return code(*arguments)

        return counted

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, to be compiled at its first call. Modules and tensors must come as arguments."""
        backend = functools.partial(self._compile, function.__name__)
        return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
