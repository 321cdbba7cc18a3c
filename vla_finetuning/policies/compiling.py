"""Compile functions of a training step by `torch.compile`, and fall back to the plain functions where it fails.

Runs in the training worker. Functions are compiled, not modules, so parameters keep their names.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

# Oldest compute capability that Triton supports (Volta).
MIN_CAPABILITY = (7, 0)
# Most shapes that a function is compiled for: each prompt length (prompts.MAX_LENGTHS), with and without gradients, for
# action tokens and for text, with all cameras and with fewer.
MAX_SHAPES = 64
# Most characters of an error that a warning repeats; PyTorch's messages fill pages.
MAX_REASON = 500


def why_not(device: torch.device) -> str | None:
    """Return the reason not to try `torch.compile` on `device`, if any."""
    if device.type != "cuda":
        return f"the step runs on the {device.type.upper()}, and only GPUs gain from it"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        actual, needed = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {actual}, and Triton needs {needed}"
    if not has_triton():
        return "Triton, which it needs, is not installed or does not work here"
    return None


class Compiler:
    """Wraps functions with their compiled versions, until one of them fails to compile.

    The first call of a function tries it on its arguments, forward and backward. If that fails, the compiler logs one
    warning, and all its functions run uncompiled from then on. Later failures raise.

    Each shape is compiled once for all layers of a class. A function with more than `max_shapes` shapes also causes the
    warning and the fallback.

    Args:
        backend: as for `torch.compile`.
        max_shapes: most shapes of a function; sets the process's `torch._dynamo.config.recompile_limit`.
    Attributes:
        compilations: number of graphs compiled so far.
        calls: number of calls of compiled code so far. Dynamo silently skips a function under a `TorchDispatchMode`
            whose `ignore_compile_internals` is false, and keeps skipping it afterwards (torch 2.11).
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor", max_shapes: int = MAX_SHAPES):
        torch._dynamo.config.recompile_limit = max_shapes
        # Dynamo's DDP optimizer would split a layer into several graphs at the ends of DDP's buckets. It is meant for
        # models compiled as one graph, whose gradients would all become ready at once (torch 2.11).
        torch._dynamo.config.optimize_ddp = False
        self.backend = backend
        self.failed = False
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
        compiled = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
        tried = False

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal tried
            if not tried and not self.failed:
                tried = True
                self._try(compiled, arguments)
            try:
                return (function if self.failed else compiled)(*arguments)
            except FailOnRecompileLimitHit as error:
                self._give_up(error)
                return function(*arguments)

        return call

    def _try(self, compiled: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        # Detached: backward of the trial must not continue into the graph that computed the arguments.
        arguments = tree_map_only(
            Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), arguments
        )
        leaves = tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tensors += [parameter for leaf in leaves if isinstance(leaf, nn.Module) for parameter in leaf.parameters()]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        try:
            # Hides the trial from outer hooks on saved tensors, e.g. those of activation checkpointing.
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                outputs = [output for output in tree_leaves(compiled(*arguments)) if output.requires_grad]
                if outputs:
                    # `grad` stores no gradients and runs no hooks of DDP.
                    torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        logger.warning("torch.compile failed, the run goes on without it: %s", reason)
