"""Plan the memory of a training process by running its step on tensors without storage.

`parallel.spread` and `util.train_step` run on PyTorch's fake tensors and a fake process group, while `Alive` adds up
the bytes of live storages. The constants below cover the rest of a GPU's memory. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from lerobot.configs import PreTrainedConfig
from lerobot.utils.constants import OBS_LANGUAGE_TOKENS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from util import local_shard, take_optimizer, train_step
from vla_finetuning.options.programs import Config
from vla_finetuning.policies.attention import Shape
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.processors import DeviceHalf
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import build_loss
from vla_finetuning.training.parallel import gathered_bytes, hold_gradients, is_sharded, spread, units

GIB = 2**30
# Memory of a GPU besides tensors of the step: estimates, not measurements.
# CUDA's context with the kernels that PyTorch loads, about half a GiB; workspaces of cuBLAS and cuDNN.
CONTEXT_BYTES = GIB
# NCCL's buffers, a few MiB for each channel and neighbour.
COLLECTIVES_BYTES = GIB
# Blocks of the caching allocator are larger than requested; little is lost, because shapes repeat.
FRAGMENTATION = 0.04
# Fused attention's backward sums the gradients of queries, keys and values in float32, beside those it returns.
ATTENTION_WORKSPACE_TENSORS = 3


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device of one training process in the worst case, of its own shards."""

    weights: int  # parameters, their average with --ema.enable, and buffers
    gradients: int
    optimizer: int  # state of the optimizer, Adam's moments or momentum
    saved: int  # what a micro-batch's forward saves for its backward, gathered parameters included
    peak: int  # most bytes alive at one time, temporary tensors included
    beside: int  # the prefetcher's next batch, workspaces, contexts, fragmentation

    @property
    def needed(self) -> int:
        """Return the bytes that a GPU must have."""
        return self.peak + self.beside

    def __str__(self) -> str:
        return (
            f"{self.needed / GIB:.2f} GiB planned: {self.peak / GIB:.2f} at the worst moment (weights "
            f"{self.weights / GIB:.2f}, the optimizer's state {self.optimizer / GIB:.2f}, gradients "
            f"{self.gradients / GIB:.2f}, activations {self.saved / GIB:.2f}), {self.beside / GIB:.2f} for CUDA, "
            "NCCL, workspaces and the next batch"
        )


def step_memory(
    policy: PreTrainedConfig,
    options: Config,
    *,
    cameras: int,
    frames: Sequence[tuple[int, int]] = (),
    shard_workers: int | None = None,
) -> StepMemory:
    """Run a step of a run without storage, with the optimizer's state in place, and return its memory.

    Args:
        policy: configuration, with prompts of the longest length, of a family that is built `from_config`.
        frames: (height, width) of each camera's uint8 frames, if they differ from the policy's.
        shard_workers: for hsdp, number of workers that share a replica; all when None.
    """
    train, batch_size, strategy = options.train, options.batch_size, options.scaling.strategy
    workers = options.scaling.min_workers or options.scaling.num_workers
    # Fewer workers of an elastic group take more micro-batches each, for the same step.
    grad_accum = -(-options.grad_accum * options.scaling.num_workers // workers)
    bf16, draws = options.planned_in_bf16, train.noise_draws
    checkpointing = train.activation_checkpointing or getattr(policy, "gradient_checkpointing", False)
    family, cpu, recipe = family_of(policy), torch.device("cpu"), make_recipe(options, policy)
    config = family.with_cameras(policy, cameras)
    sharded = workers > 1 and strategy != "ddp"
    autocast = torch.bfloat16 if bf16 else None
    # On the meta device, because PEFT moves adapters between devices, which fake tensors do not support.
    loss = build_loss(
        meta_policy(config),
        train.mode,
        adapters=options.peft,
        autocast=autocast,
        images=DeviceHalf(None, config),
        attention=train.attention,
        checkpointing=checkpointing,
    )
    # The CPU's autocast and fused attention stand in for CUDA's: autograd runs fake tensors on no other device.
    pretended = _pretended_group(workers) if sharded else contextlib.nullcontext()
    with _without_collector(), pretended, FakeTensorMode():
        _give_storage(loss, cpu)
        # CUDA gathers the next unit while one computes; the CPU runs both in sequence.
        ahead = max((gathered_bytes(unit, autocast) for unit in units(loss)), default=0) if sharded else 0
        model: nn.Module = loss
        if sharded:
            with unset_fake_temporarily():  # a device mesh needs real tensors
                shard_size = shard_workers or workers
                copies = [list(range(first, first + shard_size)) for first in range(0, workers, shard_size)]
                model = spread(loss, strategy, cpu, workers, replicas=copies, autocast=autocast)
        elif workers > 1 and loss.reaches_all:
            hold_gradients(loss)  # stand in for the buckets of DDP, which takes no fake tensors
        optimizer = take_optimizer(
            loss.policy,
            recipe.build(loss.policy),
            schedule=lambda step: 0.0,
            clip_norm=recipe.clip_norm,
            decay=options.ema.decay if options.ema.enable else None,
        )
        micros = min(grad_accum, 2)
        # Later micro-batches begin with gradients: make them first, and run one micro-batch. But FSDP2 keeps whole
        # gradients in its own storage until the last one.
        if micros == 2 and not (sharded and strategy != "fsdp2_reshard"):
            hold_gradients(loss)
            micros = 1
        batch, noise, time = family.empty_inputs(config, batch_size, draws, cpu)
        for key, size in zip(config.image_features, frames, strict=False):
            batch[key] = torch.empty(batch_size, *size, 3, dtype=torch.uint8)
        inputs = [*batch.values(), noise, time]
        weights = [local_shard(tensor) for tensor in (*loss.parameters(), *loss.buffers(), *optimizer.average)]
        alive = Alive([*weights, *(local_shard(p.grad) for p in optimizer.params if p.grad is not None), *inputs])
        before, saved = 0, 0

        def note_before(*_: Any) -> None:
            nonlocal before
            before = alive.bytes

        def note_saved(*_: Any) -> None:
            nonlocal saved
            saved = alive.bytes - before

        loss.register_forward_pre_hook(note_before)
        loss.register_forward_hook(note_saved)
        gradients = _bytes([local_shard(param) for param in optimizer.params])
        with alive:
            state = [local_shard(tensor) for tensor in optimizer.state().values()]
            alive.peak = alive.bytes
            # DDP rebuilds its buckets before the second step, in the order of backward, and copies the old ones.
            rebuilt = alive.bytes + gradients if optimizer.keeps_gradients else 0
            train_step(
                model,
                optimizer,
                itertools.repeat(batch),
                step=0,
                grad_accum=micros,
                mean_over=grad_accum,
                draws=lambda micro: (noise, time),
                autocast=autocast,
                device=cpu,
            )
        # Without kept gradients, DDP's buckets are separate copies.
        buckets = gradients if workers > 1 and not sharded and not optimizer.keeps_gradients else 0
        peak = max(alive.peak + buckets, rebuilt)
        # The prefetcher's next batch, and all batches of the step if they are fetched together.
        waiting = grad_accum if train.averages_step else 1
        batches = _bytes(inputs) + _bytes([*batch.values()]) * (waiting - 1)
        extra_bytes = CONTEXT_BYTES + round(FRAGMENTATION * peak) + batches + 2 * ahead
        extra_bytes += COLLECTIVES_BYTES if workers > 1 else 0
        if train.attention == "sdpa":
            extra_bytes += _attention_workspace(loss, cameras, batch[OBS_LANGUAGE_TOKENS].shape[1], batch_size * draws)
        return StepMemory(_bytes(weights), gradients, _bytes(state), saved, peak, beside=extra_bytes)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection in the block: a scan of all imported objects takes seconds."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _pretended_group(workers: int) -> Iterator[None]:
    """Make a fake process group of `workers` ranks in the block, with this process as rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend (torch 2.11)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _attention_workspace(loss: PolicyLoss, cameras: int, prompt: int, rows: int) -> int:
    """Return the workspace bytes of the attention that needs most for `rows`."""
    attentions: list[tuple[Any, Shape]] = loss.attentions(cameras, [prompt])
    keys = [shape.keys * layer.head_dim * layer.config.num_attention_heads for layer, shape in attentions]
    return ATTENTION_WORKSPACE_TENSORS * rows * max(keys, default=0) * 4


def _give_storage(module: nn.Module, device: torch.device) -> None:
    """Replace tensors on the meta device. `Module.to_empty` fails under a FakeTensorMode."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad
                )
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _bytes(tensors: list[Any]) -> int:
    return sum({id(s): s.nbytes() for s in [tensor.untyped_storage() for tensor in tensors]}.values())


class Alive(TorchDispatchMode):
    """Count the bytes of live storages: of `tensors`, and of tensors made while the mode is active."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes = WeakIdKeyDictionary()
        for tensor in tensors:
            self._add(tensor)

    def __enter__(self) -> Alive:
        resize = self._resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage in self._sizes:
                self._set(self._sizes[storage], size)
            return result

        torch.UntypedStorage.resize_ = noted  # type: ignore[assignment,method-assign]  # not dispatched
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not called inside an operator on DTensors, which runs on whole tensors without memory to find shapes.
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:  # autograd calls it for every gradient
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    # `local_shard` would dispatch another operator.
                    self._add(cast(Any, leaf)._local_tensor if is_sharded(leaf) else leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._sizes:
            size = self._sizes[storage] = [0]
            self._set(size, storage.nbytes())
            weakref.finalize(storage, self._set, size, 0).atexit = False

    def _set(self, size: list[int], now: int) -> None:
        self.bytes += now - size[0]
        self.peak = max(self.peak, self.bytes)
        size[0] = now
