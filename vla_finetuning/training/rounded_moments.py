"""Adam's moments stored in bfloat16, half of their memory, and rounded at random so that no change of them is lost.

An update is computed in float32, by the kernel that updates with float32 moments. What is stored afterwards of a moment
is one of its two neighbours in bfloat16, drawn so that its expectation is the moment. The nearest neighbour alone would
lose changes of less than a 512th: with beta2 = 0.999, the second moment would not follow at all.

Draws are a function of (seed, step, parameter, place in the parameter): the same on every device, with any number of
workers, sharded or not, and after a resume. torchao's AdamW rounds weights at random, by the device's global generator,
and moments to the nearest (torchao/optim/adam.py, 2026).

Hash and rounding are some thirty operations that PyTorch runs one by one: about 240 bytes of memory traffic for each
element, where an update with float32 moments has 28.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from util import TrainableOptimizer, local_shard
from vla_finetuning.training.parallel import shard_of

# Elements that are updated at once: float32 moments, random bits and a temporary of 16 bytes an element, 256 MiB.
AT_ONCE = 2**24
# Elements; tensors begin at multiples of it, so that kernels load several elements at a time.
ALIGNMENT = 4
# Keeps these draws apart from others by the same seed and step.
STREAM = 5


class Stretch(NamedTuple):
    """Elements [start, end) of what this process holds of a parameter, as a chunk has them.

    Attributes:
        number: of the parameter. first: place of element `start` in the whole parameter. at: its place in the chunk.
    """

    number: int
    start: int
    end: int
    first: int
    at: int


@dataclass
class RoundedMoments(TrainableOptimizer):
    """A `TrainableOptimizer` that stores its moments in bfloat16. `seed`: of the rounding."""

    moments: ClassVar[torch.dtype] = torch.bfloat16

    seed: int = 0
    _chunks: list[tuple[dict[str, Any], list[Stretch]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        groups = self.optimizer.param_groups
        self._chunks = [(group, chunk) for group in groups for chunk in self._cut(group["params"])]

    @classmethod
    def of(cls, optimizer: TrainableOptimizer, seed: int) -> RoundedMoments:
        """An optimizer that has not made a step, with its moments in bfloat16.

        Raises:
            ValueError: a parameter is not contiguous.
        """
        for name, param in zip(optimizer.names, optimizer.params, strict=True):
            if not local_shard(param).is_contiguous():
                raise ValueError(f"--train.moments=bf16: parameter {name} is not contiguous; use --train.moments=fp32")
        return cls(**{of.name: getattr(optimizer, of.name) for of in fields(TrainableOptimizer)}, seed=seed)

    def _update(self, number: int, scale: Tensor | None, skipped: Tensor) -> None:
        if not self.optimizer.state:
            self.state()
        steps = [self.optimizer.state[param]["step"] for param in self.params if param.grad is not None]
        torch._foreach_add_(steps, 1)
        keys = keys_of(self.seed, number, len(self.params))
        for group, chunk in self._chunks:
            own = [stretch for stretch in chunk if self.params[stretch.number].grad is not None]
            if own:
                self._update_chunk(group, own, keys, scale, skipped)
        torch._foreach_sub_(steps, [skipped] * len(steps))

    def _cut(self, params: Sequence[nn.Parameter]) -> Iterator[list[Stretch]]:
        """All elements of these parameters, in chunks of at most AT_ONCE."""
        numbers = {id(param): number for number, param in enumerate(self.params)}
        chunk: list[Stretch] = []
        at = 0
        for param in params:
            held, offsets = shard_of(param)
            first, start = offsets[0] * math.prod(held.shape[1:]) if offsets else 0, 0
            while start < held.numel():
                end = min(held.numel(), start + AT_ONCE - at)
                chunk.append(Stretch(numbers[id(param)], start, end, first + start, at))
                at += -(-(end - start) // ALIGNMENT) * ALIGNMENT
                start = end
                if at >= AT_ONCE:
                    yield chunk
                    chunk, at = [], 0
        if chunk:
            yield chunk

    def _update_chunk(
        self,
        group: dict[str, Any],
        chunk: Sequence[Stretch],
        keys: np.ndarray,
        scale: Tensor | None,
        skipped: Tensor,
    ) -> None:
        params = [self.params[stretch.number] for stretch in chunk]
        states = [self.optimizer.state[param] for param in params]
        stored = [_held([state[name] for state in states], chunk) for name in ("exp_avg", "exp_avg_sq")]
        bits = random_bits(chunk, keys, stored[0][0].device)
        buffers = [torch.empty_like(bits, dtype=torch.float32) for _ in stored]
        exact = [_of_chunk(buffer, chunk) for buffer in buffers]
        for values, moments in zip(exact, stored, strict=True):
            torch._foreach_copy_(values, moments)
        beta1, beta2 = group["betas"]
        update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        update(
            _held(params, chunk),
            _held([param.grad for param in params], chunk),
            exact[0],
            exact[1],
            [],
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=skipped,
        )
        for buffer, shares in zip(buffers, (bits, bits >> 16), strict=True):
            round_stochastically(buffer, shares)
        for values, moments in zip(exact, stored, strict=True):
            torch._foreach_copy_(moments, values)


def keys_of(seed: int, step: int, parameters: int) -> np.ndarray:
    """int64 (parameters, 2), each below 2**32: what tells the draws for a step's parameters from all others."""
    return np.random.default_rng([STREAM, seed, step]).integers(2**32, size=(parameters, 2))


def random_bits(chunk: Sequence[Stretch], keys: np.ndarray, device: torch.device) -> Tensor:
    """int32, 32 random bits for each element of a chunk: a function of its parameter's keys and its place in it.

    That is `lowbias32` (C. Wellons, nullprogram.com/blog/2018/07/31) of the sum of place and first key, to which the
    second key is added half way.
    """
    bits = torch.arange(chunk[-1].at + chunk[-1].end - chunk[-1].start, dtype=torch.int32, device=device)
    spare, parts = torch.empty_like(bits), _of_chunk(bits, chunk)
    first, second = keys[[stretch.number for stretch in chunk]].T.tolist()
    places = [stretch.first - stretch.at for stretch in chunk]

    def add(numbers: Sequence[int]) -> None:
        torch._foreach_add_(parts, [_int32(number) for number in numbers])

    def fold(shift: int) -> None:
        # A shift of int32 fills up with the sign.
        torch.bitwise_right_shift(bits, shift, out=spare)
        bits.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))

    add([place + key for place, key in zip(places, first, strict=True)])
    fold(16)
    bits.mul_(_int32(0x7FEB352D))
    add(second)
    fold(15)
    bits.mul_(_int32(0x846CA68B))
    fold(16)
    return bits


def round_stochastically(values: Tensor, bits: Tensor) -> None:
    """Round float32 values in place to those that bfloat16 has: to a neighbour that is drawn by the lowest 16 bits.

    The distance to the neighbour nearer to zero, as a share of the distance between both, is the probability of the
    other one. Values that bfloat16 has stay. `bits`: int32, as many.
    """
    values.view(torch.int32).add_(bits & 0xFFFF).bitwise_and_(-0x10000)


def _held(tensors: Sequence[Any], chunk: Sequence[Stretch]) -> list[Tensor]:
    """A chunk's stretches of what this process holds of its parameters, or of what belongs to them."""
    return [
        local_shard(tensor).detach().view(-1)[stretch.start : stretch.end]
        for tensor, stretch in zip(tensors, chunk, strict=True)
    ]


def _of_chunk(buffer: Tensor, chunk: Sequence[Stretch]) -> list[Tensor]:
    return [buffer[stretch.at : stretch.at + stretch.end - stretch.start] for stretch in chunk]


def _int32(number: int) -> int:
    """The int32 with the same lowest 32 bits."""
    return (number + 2**31) % 2**32 - 2**31
