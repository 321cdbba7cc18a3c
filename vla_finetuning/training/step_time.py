"""How long a training step takes on a GPU, predicted from the operations of the step itself.

`memory.step_memory` runs the step on tensors without storage; an `Operations` watches, and `predict` adds up what each
operation would take on a card of `cards.py`. It is a model, not a measurement: its assumptions are the constants below,
and `assumptions` says them. `benchmarks.gpu` puts what is measured beside it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from util import Clock, Phase
from vla_finetuning.cards import Card
from vla_finetuning.training.parallel import bucket_mb

# Of the peak, what long products of full tiles reach: a card that multiplies without a pause lowers its clock.
PRODUCTS = 0.70
# How many times as many products in float8 a card computes (NVIDIA's data sheets of Ada, Hopper and Blackwell).
FLOAT8 = 2.0
# Results that a multiprocessor computes at a time, and how such a tile compares with the largest. Tiles fill the
# multiprocessors in waves, the last of which is seldom full.
TILES = {(128, 256): 1.0, (128, 128): 0.85, (64, 64): 0.5}
# Of the peak, what fused attention reaches with heads of 256 and a mask, forward and backward together.
ATTENTION = 0.30
# Of the memory's bandwidth, what operations reach that do nothing else; and what the smallest of them takes.
MEMORY = 0.75
KERNEL_S = 2.5e-6
# What the host takes to issue an operation of PyTorch's, with its share of autograd; and a kernel of compiled code.
EAGER_HOST_S, COMPILED_HOST_S = 7e-6, 4e-6
# Of what a link between cards carries in one direction, what collectives reach; and what the smallest of them takes.
LINK = 0.75
COLLECTIVE_S = 30e-6

Kind = Literal["products", "attention", "memory", "optimizer", "collective"]
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
_ATTENTION = "_scaled_dot_product"
_ALLOCATES = ("empty", "new_empty")
_OVERWRITES = {"copy_", "_foreach_copy_", "zero_", "fill_"}


@dataclass(frozen=True)
class Operation:
    """One that runs a kernel.

    Attributes:
        phase: of the step. flops: of products and attention.
        shape: of a product's result, as rows and columns. times: how many such products there are (`bmm`).
        reads, writes: bytes of memory by number of storage. starts_forward: it is the first of a micro-batch.
        float8: it multiplies in 8 bits.
    """

    name: str
    kind: Kind
    phase: Phase
    flops: int
    shape: tuple[int, int]
    times: int
    reads: dict[int, int]
    writes: dict[int, int]
    starts_forward: bool = False
    float8: bool = False

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


class Operations(TorchDispatchMode, Clock):
    """Notes the operations of a training step while it is active, and is its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self._phase: Phase = "other"
        self._starts = False
        self._numbers, self._next = WeakIdKeyDictionary(), itertools.count()

    def mark(self, phase: Phase) -> None:
        self._phase, self._starts = phase, phase == "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = func._schema.name.split("::")[-1]
        # What operators on DTensors do is not looked at: the step computes with what they hold.
        sharded = any(hasattr(tensor, "to_local") for tensor in (*given, *made))
        if self._phase != "other" and not sharded and not name.startswith(_ALLOCATES):
            self._note(func, name, args, kwargs, result, unwrapped(given), unwrapped(made))
        return result

    def _note(
        self, func: Any, name: str, args: Any, kwargs: Any, result: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        reads, results = self._bytes(given), self._bytes(made)
        written = _written(func, args, kwargs)
        changed = self._bytes(written)
        if name in _OVERWRITES or "out" in kwargs:  # and does not read what was there
            read = [id(tensor) for tensor in written]
            reads = self._bytes([tensor for tensor in given if id(tensor) not in read])
        writes = changed | {number: size for number, size in results.items() if number not in reads | changed}
        collective = func.namespace in ("c10d", "_c10d_functional")
        if not writes and not collective:  # a view
            return
        flops, shape, times = 0, (0, 0), 1
        float8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in given)
        if name in _PRODUCTS:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
            shape, times = _product_shape(made[0])
        elif name.startswith(_ATTENTION):
            flops = _attention_flops(name, args)
        kind: Kind = "memory"
        if collective:
            kind = "collective"
        elif flops:
            kind = "products" if name in _PRODUCTS else "attention"
        elif self._phase in ("clip", "optimizer", "zero_grad_schedule"):
            kind = "optimizer"
        self.found.append(Operation(name, kind, self._phase, flops, shape, times, reads, writes, self._starts, float8))
        self._starts = False

    def _bytes(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Of their storages, what the tensors span of each: a dimension without a stride is read once."""
        found: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._numbers:
                self._numbers[storage] = next(self._next)
            span = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
            number = self._numbers[storage]
            found[number] = max(found.get(number, 0), span * tensor.itemsize)
        return found


def unwrapped(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors themselves, and in place of each that only wraps others (torchao's, in float8), those."""
    found: list[Tensor] = []
    for tensor in tensors:
        names: list[str] = cast(Any, tensor).__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else []
        found += [getattr(tensor, name) for name in names] or [tensor]
    return found


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments that an operator writes to."""
    changed = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            changed += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return changed


def _product_shape(result: Tensor) -> tuple[tuple[int, int], int]:
    """Rows and columns of a result, and how many there are; of a convolution (N, C, H, W) positions and channels."""
    if result.ndim == 4:
        return (result.numel() // result.shape[1], result.shape[1]), 1
    return (result.shape[-2], result.shape[-1]), result.numel() // math.prod(result.shape[-2:])


def _attention_flops(name: str, args: Sequence[Any]) -> int:
    shapes = [arg.shape for arg in args[:4] if isinstance(arg, Tensor)]
    return sdpa_backward_flop_count(*shapes[:4]) if "backward" in name else sdpa_flop_count(*shapes[:3])


# ---- what they take -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of an optimizer step on one card, predicted.

    Attributes:
        compiled: whether operations between two products run as one.
        exposed: of communication, what no computation hides.
        host: what issuing all of it takes the host, which the card waits for if it is longer.
        operations: issued in a micro-batch. rows: of this card in a step. flops: of the model, per row.
    """

    compiled: bool
    products: float
    attention: float
    memory: float
    optimizer: float
    exposed: float
    host: float
    operations: int
    rows: int
    flops: float
    peak: float = field(repr=False)

    @property
    def step(self) -> float:
        device = self.products + self.attention + self.memory
        return max(device, self.host) + self.optimizer + self.exposed

    @property
    def rows_per_s(self) -> float:
        """Of each card."""
        return 1e3 * self.rows / self.step

    @property
    def mfu(self) -> float:
        return self.rows_per_s * self.flops / self.peak


def predict(
    operations: Sequence[Operation],
    card: Card,
    *,
    compiled: bool,
    rows: int,
    flops: float,
    grad_accum: int = 1,
    workers: int = 1,
    exchanged_bytes: int = 0,
) -> StepTime:
    """Add up what the operations of one micro-batch and of the optimizer take on a card.

    Args:
        compiled: each stretch of memory-bound operations between two products is one kernel, which reads what was there
            before and writes what is used later.
        rows: of a micro-batch. flops: of the model, per row. grad_accum: micro-batches in a step.
        workers: on one machine, one card each.
        exchanged_bytes: what DDP sums over the workers once per step; its collectives are not among the operations.
    """
    ms: dict[str, float] = defaultdict(float)
    timeline, launches, last_uses = _Timeline(card, workers), 0, _last_uses(operations)
    for last, stretch in _stretches(operations, compiled):
        first = stretch[0]
        if first.kind == "collective":
            timeline.exchange(first)
            continue
        seconds = _seconds(stretch, card, last_uses, last)
        ms[first.kind] += 1e3 * seconds
        if first.kind != "optimizer":
            timeline.compute(seconds, first.phase)
            launches += 1
    exposed = timeline.exposed_s(exchanged_bytes)
    times = grad_accum / max(1, sum(operation.starts_forward for operation in operations))
    return StepTime(
        compiled=compiled,
        products=ms["products"] * times,
        attention=ms["attention"] * times,
        memory=ms["memory"] * times,
        optimizer=ms["optimizer"],
        exposed=1e3 * exposed,
        host=1e3 * launches * times * (COMPILED_HOST_S if compiled else EAGER_HOST_S),
        operations=round(launches * times / grad_accum),
        rows=rows * grad_accum,
        flops=flops,
        peak=card.flops,
    )


class _Timeline:
    """When a card computes, and when it exchanges: parameters for what computes next, gradients of what has.

    A gather begins when what was gathered before is computed with; its results are waited for. What is summed travels
    behind computation to the end of backward.
    """

    def __init__(self, card: Card, workers: int):
        self._card, self._workers = card, workers
        self._now = self._free = self._began = self._computed = self._backward = 0.0

    def compute(self, seconds: float, phase: Phase) -> None:
        self._now += seconds
        self._computed += seconds
        self._backward += seconds if phase == "backward" else 0.0

    def exchange(self, operation: Operation) -> None:
        if self._workers == 1:
            return
        size = max([*operation.reads.values(), *operation.writes.values()], default=0)
        if "gather" in operation.name:
            self._free = max(self._free, self._began) + self._seconds(size)
            self._now = self._began = max(self._now, self._free)
        else:
            self._free = max(self._free, self._now) + self._seconds(size)

    def _seconds(self, size: float) -> float:
        assert self._card.link is not None
        return COLLECTIVE_S + (self._workers - 1) / self._workers * size / (LINK * self._card.link)

    def exposed_s(self, exchanged_bytes: int) -> float:
        """Seconds in which nothing is computed. `exchanged_bytes` in DDP's buckets, as backward fills them."""
        if self._workers > 1 and exchanged_bytes:
            buckets = max(1, round(exchanged_bytes / (bucket_mb(exchanged_bytes) * 2**20)))
            for bucket in range(1, buckets + 1):
                filled = self._now - self._backward * (1 - bucket / buckets)
                self._free = max(self._free, filled) + self._seconds(2 * exchanged_bytes / buckets)
        return max(self._now, self._free) - self._computed


def _stretches(operations: Sequence[Operation], compiled: bool) -> Iterator[tuple[int, list[Operation]]]:
    """What runs as one kernel, each with the number of its last operation."""
    stretch: list[Operation] = []
    for number, operation in enumerate(operations):
        if stretch and not (compiled and operation.kind == stretch[0].kind == "memory"):
            yield number - 1, stretch
            stretch = []
        stretch.append(operation)
    if stretch:
        yield len(operations) - 1, stretch


def _last_uses(operations: Sequence[Operation]) -> dict[int, int]:
    """The number of the last operation that reads each storage."""
    return {storage: number for number, operation in enumerate(operations) for storage in operation.reads}


def _seconds(stretch: list[Operation], card: Card, last_uses: dict[int, int], last: int) -> float:
    """What runs as one kernel, and ends with operation `last`."""
    first = stretch[0]
    assert card.bandwidth is not None
    if len(stretch) == 1:
        moved = first.bytes
    else:
        reads, writes = dict[int, int](), dict[int, int]()
        for operation in stretch:
            for storage, size in operation.reads.items():
                if storage not in writes:
                    reads[storage] = max(reads.get(storage, 0), size)
            for storage, size in operation.writes.items():
                writes[storage] = max(writes.get(storage, 0), size)
        kept = sum(size for storage, size in writes.items() if storage in reads or last_uses.get(storage, -1) > last)
        moved = sum(reads.values()) + kept
    through_memory = moved / (MEMORY * card.bandwidth)
    computed = 0.0
    if first.kind == "products":
        faster = FLOAT8 if first.float8 else 1.0
        computed = first.flops / (PRODUCTS * faster * card.flops * _tiling(first, card))
    elif first.kind == "attention":
        computed = first.flops / (ATTENTION * card.flops)
    return max(through_memory, computed, KERNEL_S)


def _tiling(product: Operation, card: Card) -> float:
    """The share of the time in which the card's multiprocessors multiply, by the tiles that suit a product best."""
    rows, columns = product.shape
    assert card.multiprocessors is not None
    best = 0.0
    for (high, wide), quality in TILES.items():
        whole = math.ceil(rows / high) * math.ceil(columns / wide) * product.times
        waves = math.ceil(whole / card.multiprocessors) * card.multiprocessors
        best = max(best, quality * rows * columns * product.times / (high * wide * waves))
    return best


# ---- in words -------------------------------------------------------------------------------------------------------


def assumptions() -> str:
    kernel, eager, compiled = (f"{1e6 * seconds:g} us" for seconds in (KERNEL_S, EAGER_HOST_S, COMPILED_HOST_S))
    return "\n".join(
        (
            "Predicted by a model of the step's own operations, not measured. Assumed:",
            f"products reach {PRODUCTS:.0%} of the card's peak where tiles fill its multiprocessors, attention "
            f"{ATTENTION:.0%}; products in float8 {FLOAT8:g} times as fast;",
            f"all else {MEMORY:.0%} of the memory's bandwidth, {kernel} a kernel at least;",
            f"the host issues an operation in {eager}, of compiled code in {compiled}; data never waits;",
            f"collectives reach {LINK:.0%} of a link within one machine, and slow no product;",
            "eager: norms are several operations, as on a CPU (CUDA has one);",
            "compiled: what is between two products is one kernel.",
        )
    )


def describe(times: Sequence[StepTime]) -> str:
    """A table: a column for each."""
    rows: list[tuple[str, list[str]]] = [
        ("ms of a step", ["compiled" if time.compiled else "eager" for time in times]),
        *(
            (label, [f"{getattr(time, name):.1f}" for time in times])
            for label, name in (
                ("matrix products", "products"),
                ("attention", "attention"),
                ("memory-bound", "memory"),
                ("host, if longer", "host"),
                ("optimizer", "optimizer"),
                ("exposed collectives", "exposed"),
                ("step", "step"),
            )
        ),
        ("operations", [f"{time.operations}" for time in times]),
        ("rows/s per card", [f"{time.rows_per_s:.1f}" for time in times]),
        ("MFU", [f"{time.mfu:.1%}" for time in times]),
    ]
    return "\n".join(f"{label:20}" + "".join(f"{cell:>12}" for cell in cells) for label, cells in rows)
