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
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

# The oldest GPUs that Triton makes code for (Volta).
MIN_CAPABILITY = (7, 0)
# Characters of a failure's message that a warning repeats; PyTorch's go on for pages.
MAX_REASON = 500


def why_not(device: torch.device) -> str | None:
    """Why `torch.compile` is not even tried on `device`, in words; None if nothing speaks against it."""
    if device.type != "cuda":
        return f"the step runs on the {device.type.upper()}, and only GPUs gain from it"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {found}, and Triton needs {needed}"
    if not has_triton():
        return "Triton, which it needs, is not installed or does not work here"
    return None


class Compiler:
    """Makes compiled functions of functions, for as long as every one of them compiles and runs.

    Before its first use a function is tried on its own arguments, forward and backward. When that fails, one warning
    says why, and from then on all functions of this compiler run as they are written: what the failed try computed is
    used for nothing. Later failures are errors like any other.

    Shapes are compiled in as they are found. Layers of one class share the code, so it is compiled once for all.

    Args:
        backend: `torch.compile`'s.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor"):
        self.backend = backend
        self.failed = False

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled at its first call. Its modules and tensors must come as arguments."""
        compiled = torch.compile(function, backend=self.backend, dynamic=False, fullgraph=True)
        tried = False

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal tried
            if not tried and not self.failed:
                tried = True
                self._try(compiled, arguments)
            return (function if self.failed else compiled)(*arguments)

        return call

    def _try(self, compiled: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
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
            self.failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
            logger.warning("torch.compile failed, the run goes on without it: %s", reason)
