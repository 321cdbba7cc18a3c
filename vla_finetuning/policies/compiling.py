"""`torch.compile` for the parts of a step: only where it works, and where it does not, the step goes on without.

Runs in the training worker. Functions are compiled, not modules, so the names of parameters stay what they are.
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

# The oldest GPUs that Triton makes code for (Volta).
MIN_CAPABILITY = (7, 0)
# Most shapes that a function is compiled for: each prompt length (prompts.MAX_LENGTHS), with and without gradients, for
# action tokens and for text, with all cameras and with fewer.
MOST_SHAPES = 64
# Characters of a failure's message that a warning repeats; PyTorch's go on for pages.
MAX_REASON = 500


def why_not(device: torch.device) -> str | None:
    """Why `torch.compile` is not even tried on `device`, in words; None if nothing speaks against it."""
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
    """Makes compiled functions of functions, for as long as every one of them compiles and runs.

    Before its first use a function is tried on its own arguments, forward and backward. When that fails, one warning
    says why, and from then on all functions of this compiler run as they are written. Later failures are errors.

    Each shape is compiled, and logged, once for all layers of a class. Where a function would be compiled for more than
    `most` shapes, one warning says so and the run goes on without.

    Args:
        backend: `torch.compile`'s.
        most: becomes this process's limit (`torch._dynamo.config.recompile_limit`).
    Attributes:
        compilations: so far, of all functions.
        calls: of compiled code, so far. A function that Dynamo skips runs as written and nothing is raised: under a
            `TorchDispatchMode` whose `ignore_compile_internals` is false, and from then on for good (torch 2.11).
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor", most: int = MOST_SHAPES):
        torch._dynamo.config.recompile_limit = most
        # Else Dynamo cuts what is called inside of DDP at the ends of DDP's buckets, a layer into several graphs: for
        # models compiled as a whole, whose one graph would have all gradients ready at once (torch 2.11).
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
        # Cut off from what made them: backward would go on there, where the same layer has been called before.
        arguments = tree_map_only(
            Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), arguments
        )
        leaves = tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tensors += [parameter for leaf in leaves if isinstance(leaf, nn.Module) for parameter in leaf.parameters()]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        try:
            # Whoever counts saved tensors outside (activation checkpointing does) does not see this.
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                outputs = [output for output in tree_leaves(compiled(*arguments)) if output.requires_grad]
                if outputs:
                    # Of these inputs only: no gradient is stored, and no hook of DDP's runs.
                    torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        logger.warning("torch.compile failed, the run goes on without it: %s", reason)
