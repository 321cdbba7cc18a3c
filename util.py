"""Run the training step: batches to the device, forward and backward, optimizer, metrics. Independent of the policy.

Between two log steps nothing here reads a value from the device. Losses, gradient norms and the count of skipped
steps stay device tensors until `DeviceMetrics.gather` fetches all of them in one collective and one read.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adam import adam

from vla_finetuning.cards import CARDS
from vla_finetuning.columns import HOST_COLUMNS

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]

# Phases of a training process, one at a time. `other` is everything between named phases, such as drawing noise.
Phase = Literal[
    "data_wait",
    "copy",
    "forward",
    "backward",
    "clip",
    "optimizer",
    "zero_grad_schedule",
    "metrics",
    "evaluation",
    "checkpoint",
    "other",
]
# Names in metrics.jsonl that do not depend on the policy. Other names are means that a policy's own forward computes.
COMMON_METRICS = frozenset(
    (
        *("step", "epoch", "lr", "loss", "grad_norm", "nonfinite_steps", "samples", "samples_per_s", "step_s"),
        *("data_wait_s", "peak_memory_bytes", "tokens_per_s", "flops_per_s", "mfu", "checkpoint_pause_s"),
        *("spilled_bytes", "frames_per_s", "decoded_bytes_per_s", "eval_loss", "eval_skipped", "eval_s"),
        *("success", "success_low", "success_high", "success_errors", "success_step"),
        *("loss_by_robot", "eval_loss_by_robot", "eval_loss_by_task", "eval_loss_by_time"),
    )
)
# Maximum number of unlabelled means in a window. Beyond it, only the alphabetically first are kept.
MOST_MEANS = 32


class Clock:
    """A hook that is called at each phase of a training process. The base class ignores it."""

    def mark(self, phase: Phase) -> None:
        """Begin a phase, which lasts until the next call."""


UNWATCHED = Clock()


class NumpyToTorchCollate:
    """Convert a batch's numpy columns to CPU tensors, pinned if they will be copied to a GPU.

    Runs in Ray Data's prefetching thread. PyTorch's caching host allocator reuses a pinned buffer only after the copies
    from it are done, so nothing here waits.
    """

    def __init__(self, pin_memory: bool):
        self.pin_memory = pin_memory and _can_pin()

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Copy numeric columns (B, ...) to tensors of equal dtype and shape. Raise ValueError for object columns."""
        tensors = {}
        for key, values in batch.items():
            if values.dtype == object:
                raise ValueError(f"column {key!r} holds Python objects ({type(values.flat[0]).__name__}), not numbers")
            pinned = self.pin_memory and key not in HOST_COLUMNS and values.nbytes > 0
            dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
            target = torch.empty(values.shape, dtype=dtype, pin_memory=pinned)
            np.copyto(target.numpy(), values)
            tensors[key] = target
        return tensors


def _can_pin() -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        logger.warning("memory cannot be pinned (%s): copies to the GPU will block the host", error)
        return False
    return True


def cuda_prefetcher(batches: Iterable[Batch], device: torch.device, clock: Clock = UNWATCHED) -> Iterator[Batch]:
    """Yield batches on a GPU, copying the next one on a side stream. `HOST_COLUMNS`, and batches for a CPU, stay."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    source = iter(batches)

    def fetch() -> Batch | None:
        batch = next(source, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            clock.mark("copy")
            copied = {k: v if k in HOST_COLUMNS else v.to(device, non_blocking=True) for k, v in batch.items()}
            clock.mark("copy")  # the copy ends here on the side stream; the compute stream may have to wait for it
        return copied

    upcoming = fetch()
    while upcoming is not None:
        current_stream = torch.cuda.current_stream(device)
        current_stream.wait_stream(stream)
        for tensor in upcoming.values():
            if tensor.is_cuda:
                # The side stream allocated the memory, and must not reuse it before the compute stream is done.
                tensor.record_stream(current_stream)
        current, upcoming = upcoming, None
        yield current
        upcoming = fetch()


class TimedIterator:
    """Iterate over `then(batches)`, and sum the seconds spent waiting for `batches` in `waited_s`."""

    def __init__(self, batches: Iterable[Batch], then: Callable[[Iterator[Batch]], Iterator[Batch]] = iter):
        self.waited_s = 0.0
        self._batches = then(self._timed(iter(batches)))

    def __iter__(self) -> TimedIterator:
        return self

    def peek(self) -> Batch:
        """Return the next batch without consuming it."""
        batch = next(self)
        self._batches = itertools.chain([batch], self._batches)
        return batch

    def __next__(self) -> Batch:
        return next(self._batches)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches, None)
            finally:
                self.waited_s += time.perf_counter() - start
            if batch is None:
                return
            yield batch


def enable_gpu_perf_flags(deterministic: bool = False) -> None:
    """Enable TF32 matrix products and cuDNN autotuning; if `deterministic`, only kernels that repeat bit for bit."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


def enable_expandable_segments() -> None:
    """Enable expandable segments of PyTorch's allocator, for prompts of several lengths; the environment overrides."""
    if torch.cuda.is_available() and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # PyTorch reads the environment variables only once, before code in Ray Train's workers runs (torch 2.11).
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def peak_flops(device: torch.device) -> float | None:
    """Return the peak dense bf16 FLOP/s of a GPU; None for unknown GPUs and the CPU."""
    if device.type != "cuda":
        return None
    # "A100-SXM4-80GB" is an A100; "RTX A1000" is not, nor is an "L40" an L4.
    words = set(re.split(r"[\s-]", torch.cuda.get_device_name(device)))
    return next((card.flops for card in CARDS if words >= set(card.words.split())), None)


@dataclass
class TrainableOptimizer:
    """An optimizer over the trainable parameters, with clipping, a learning rate schedule and an optional average.

    A step with non-finite gradients changes nothing: the kernel reads a device flag.

    Attributes:
        optimizer: optimizer whose step changes nothing if `found_inf` is 1.0, like torch's fused kernels; Adam or AdamW
            if parameters are sharded. A parameter group may have an `lr_scale`, a factor of the schedule's rate.
        buffers: those to save in checkpoints, by name.
        schedule: learning rate by the number of optimizer steps done before.
        keeps_gradients: whether gradients stay in memory (DDP's buckets) and are zeroed in place, not freed.
        average: exponential moving average of `params` with `decay`, fp32, sharded like them; empty if disabled.
    """

    optimizer: torch.optim.Optimizer
    names: list[str]
    params: list[nn.Parameter]
    buffers: dict[str, Tensor]
    schedule: Callable[[int], float]
    clip_norm: float
    keeps_gradients: bool = False
    average: list[Tensor] = field(default_factory=list)
    decay: float = 0.0

    def named(self) -> dict[str, Tensor]:
        """Return the trainable parameters and the saved buffers, by name."""
        return {name: param.detach() for name, param in zip(self.names, self.params, strict=True)} | self.buffers

    def step(self, number: int, clock: Clock = UNWATCHED) -> tuple[Tensor, Tensor]:
        """Clip gradients, update parameters and average, and clear gradients. `number` steps were done before.

        Return the norm before clipping, and 1.0 if the step was skipped; both 0-d float32 on the device.
        """
        clock.mark("clip")
        gradients = [param.grad for param in self.params if param.grad is not None]
        sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
        if sharded:
            norm = norm_of_shards(gradients)
            # The divisor of `clip_grads_with_norm_`; the optimizer's kernel divides, which saves a pass.
            scale = ((norm + 1e-6) / self.clip_norm).clamp(min=1.0)
        else:
            norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
            torch.nn.utils.clip_grads_with_norm_(self.params, self.clip_norm, norm, foreach=True)
        skipped = (~torch.isfinite(norm)).to(torch.float32)
        clock.mark("zero_grad_schedule")
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(number) * group.get("lr_scale", 1.0)
        clock.mark("optimizer")
        if sharded:
            self._update_shards(scale, skipped)
        else:
            # The protocol that torch.amp.GradScaler uses with fused optimizers.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        self._update_average(skipped)
        clock.mark("zero_grad_schedule")
        self.clear_gradients()
        return norm.detach(), skipped

    @torch.no_grad()
    def _update_shards(self, scale: Tensor, skipped: Tensor) -> None:
        """Run `optimizer.step`'s kernel on local shards directly, in a quarter of the host time with DTensors."""
        if not self.optimizer.state:
            self.state()
        for group in self.optimizer.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            states = [self.optimizer.state[param] for param in params]
            beta1, beta2 = group["betas"]
            adam(
                [local_shard(param) for param in params],
                [local_shard(cast(Tensor, param.grad)) for param in params],
                [local_shard(state["exp_avg"]) for state in states],
                [local_shard(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=scale,
                found_inf=skipped,
                decoupled_weight_decay=group["decoupled_weight_decay"],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def named_average(self) -> dict[str, Tensor]:
        """Return the average by `average.<name>`."""
        return {f"average.{name}": tensor for name, tensor in zip(self.names, self.average, strict=False)}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the average's values into the parameters during the block, and the exact old values back after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _update_average(self, skipped: Tensor) -> None:
        """Update the average: decay x average + (1 - decay) x parameters, unless the step was skipped."""
        if not self.average:
            return
        share = (1 - self.decay) * (1 - skipped)
        for average, param in zip(self.average, self.params, strict=True):
            local_shard(average).lerp_(local_shard(param), share)

    @torch.no_grad()
    def _swap(self) -> None:
        for average, param in zip(self.average, self.params if self.average else (), strict=True):
            current = local_shard(param).clone()
            local_shard(param).copy_(local_shard(average))
            local_shard(average).copy_(current)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state tensors, to save or to write into: `exp_avg.<name>` and so on.

        Before the first step, this method creates the state as zeros, like the optimizer.
        """
        groups = {id(param): group for group in self.optimizer.param_groups for param in group["params"]}
        flat: dict[str, Tensor] = {}
        for name, param in zip(self.names, self.params, strict=True):
            state = self.optimizer.state[param]
            if not state:
                group = groups[id(param)]
                adam = "betas" in group
                # torch's Muon keeps its buffer with any momentum, SGD only with one.
                momentum = ["momentum_buffer"] if "ns_steps" in group or group.get("momentum") else []
                if adam:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                for key in ["exp_avg", "exp_avg_sq"] if adam else momentum:
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
            flat |= {f"{key}.{name}": value for key, value in state.items() if value is not None}
        return flat


def make_trainable_optimizer(
    module: nn.Module, *, schedule: Callable[[int], float], clip_norm: float, decay: float | None = None, **adamw: Any
) -> TrainableOptimizer:
    """Make fused AdamW over the trainable parameters of `module`, with options `adamw`; see `take_optimizer`."""
    optimizer = torch.optim.AdamW(trainable_parameters(module).values(), lr=schedule(0), fused=True, **adamw)
    return take_optimizer(module, optimizer, schedule=schedule, clip_norm=clip_norm, decay=decay)


def take_optimizer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    schedule: Callable[[int], float],
    clip_norm: float,
    decay: float | None = None,
) -> TrainableOptimizer:
    """Wrap an optimizer over `trainable_parameters(module)`. `decay` enables the average of parameters."""
    named = trainable_parameters(module)
    keeps_gradients = all(param.grad is not None for param in named.values())
    return TrainableOptimizer(
        optimizer,
        list(named),
        list(named.values()),
        saved_buffers(module),
        schedule,
        clip_norm,
        keeps_gradients,
        average=[] if decay is None else [param.detach().clone() for param in named.values()],
        decay=decay or 0.0,
    )


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by name, e.g. batch norm statistics and codebooks; PI0.5 has none."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in parameters}


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` that require gradients, by name.

    Raises ValueError without one, or if one is not float32 (Adam in bf16 does not learn: OpenTau #181).
    """
    named = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if not named:
        raise ValueError("no parameter requires a gradient: nothing would be trained")
    low = [name for name, param in named.items() if param.dtype != torch.float32]
    if low:
        raise ValueError(f"{len(low)} trainable parameters are not float32, e.g. {low[0]}; master weights must be")
    return named


def warmup_cosine(peak: float, final: float, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """Return the learning rate by steps done before, as of LeRobot's `CosineDecayWithWarmupSchedulerConfig`.

    Linear from peak / (warmup_steps + 1), then a cosine whose period begins at step 0; openpi's begins after the
    warm-up.
    """

    def schedule(step: int) -> float:
        if step < warmup_steps:
            first = peak / (warmup_steps + 1)
            return first + (peak - first) * step / warmup_steps
        decay = 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
        return final + (peak - final) * decay

    return schedule


@contextlib.contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally during the block; the first backward after it exchanges them.

    fsdp2_reshard exchanges gradients in every backward, so that each process only holds its shards.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif is_sharded(model) and cast(Any, model).whole_between_micro_batches:
        sharded: Any = model
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)
            sharded.set_reshard_after_backward(True)
    else:
        yield


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards the parameters. Looks at methods, because importing FSDP2 takes half a second."""
    return hasattr(model, "set_requires_gradient_sync")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor; other tensors unchanged."""
    sharded: Any = tensor
    return sharded.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def norm_of_shards(tensors: list[Tensor]) -> Tensor:
    """Compute the norm of DTensors of one mesh, 0-d float32, by a collective over the mesh's last dimension."""
    norms = torch._foreach_norm([local_shard(tensor) for tensor in tensors])
    squares = torch.stack(norms).square().sum()
    mesh = cast(Any, tensors[0]).device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    return all_reduce(squares, "sum", group).sqrt()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor on all processes, all of which must call this; other tensors unchanged. No host read."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class StepResult(NamedTuple):
    """Result of an optimizer step, on the device: this rank's share of the loss, gradient norm, 1.0 if skipped."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


Draws = tuple[Tensor | None, Tensor | None]


def train_step(
    model: nn.Module,
    optimizer: TrainableOptimizer,
    batches: Iterator[Batch],
    *,
    step: int,
    grad_accum: int,
    mean_over: float,
    draws: Callable[[int], Draws],
    autocast: torch.dtype | None,
    device: torch.device,
    clock: Clock = UNWATCHED,
) -> StepResult:
    """Run an optimizer step: `grad_accum` forwards and backwards, clip, update. Nothing is read from the device.

    Args:
        model: module that returns a micro-batch's mean loss, 0-d, for (batch, noise, time).
        batches: iterator of this rank's micro-batches on `device`.
        step: optimizer steps done before.
        mean_over: divisor of the loss: micro-batches of all ranks, divided by the number of ranks. Differs from
            `grad_accum`, the micro-batches of this rank, if ranks have unequal numbers.
        draws: function of the micro-step that returns (noise, time) for its rows.
        autocast: torch.bfloat16, or None for fp32.
    """
    total = torch.zeros((), device=device)
    casting = partial(torch.autocast, device.type, autocast)
    for micro in range(grad_accum):
        clock.mark("data_wait")
        batch = next(batches)
        clock.mark("forward")
        noise, flow_time = draws(micro)
        # Exchange gradients between workers once per step, in the backward of the last micro-batch.
        with accumulating(model) if micro + 1 < grad_accum else contextlib.nullcontext():
            # Autocast drops its casts of weights after each forward: with casts kept for the next micro-batch, its
            # backward would hold every gradient in bf16 until the last one.
            with casting(enabled=autocast is not None):
                loss = model(batch, noise, flow_time)
            clock.mark("backward")
            with casting(enabled=False):
                (loss / mean_over).backward()
        total += loss.detach()
    grad_norm, skipped = optimizer.step(step, clock)
    return StepResult(total / mean_over, grad_norm, skipped)


class DeviceMetrics:
    """Sums over a window of steps, on the device. All ranks' sums are fetched in one collective and one read."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._labels: dict[str, tuple[str, ...]] = {}
        self.restart()

    def restart(self) -> None:
        """Begin a window: reset its time and all sums."""
        self.steps = self.samples = 0
        self._started = time.perf_counter()
        self._step_sums = torch.zeros(2, device=self.device)  # losses, skipped steps
        self._grad_norm = torch.zeros((), device=self.device)
        for sums in self._sums.values():
            sums.zero_()

    def add_step(self, result: StepResult, samples: int) -> None:
        """Add an optimizer step of this rank with `samples` rows."""
        self.steps += 1
        self.samples += samples
        # A skipped step's loss may be NaN and must not hide the other losses.
        loss = torch.where(result.skipped > 0, torch.zeros_like(result.loss), result.loss)
        self._step_sums += torch.stack([loss, result.skipped])
        self._grad_norm = result.grad_norm

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a 0-d value to the mean `name`. Values that are not finite are ignored."""
        sums = self.sums(name)
        if isinstance(value, Tensor):
            finite = value.isfinite()
            sums[0, 0] += torch.where(finite, value, torch.zeros_like(value))
            sums[1, 0] += finite
        elif math.isfinite(value):
            sums[0, 0] += value
            sums[1, 0] += 1

    def sums(self, name: str, labels: Sequence[str] = ()) -> Tensor:
        """Return a mean's sums and counts, float32 (2, labels or 1), to add to in place. All ranks use equal labels."""
        if name not in self._sums:
            self._labels[name] = tuple(labels)
            self._sums[name] = torch.zeros(2, max(len(labels), 1), device=self.device)
        return self._sums[name]

    def gather(self, host: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Fetch the window of all ranks, without resetting it. Every rank must call it.

        Args:
            host: numbers of this rank by name; the same names on all ranks; `waited_s` is required.
        Returns:
            Metrics for a line of metrics.jsonl, with means by name; and numbers by name, each with one entry per rank.
        """
        counts = {
            "steps": self.steps,
            "samples": self.samples,
            "elapsed_s": time.perf_counter() - self._started,
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0,
        }
        labelled = [name for name, labels in self._labels.items() if labels]
        unlabelled = sorted(self._labels.keys() - set(labelled))[:MOST_MEANS]
        # A policy's own names may differ between ranks, so all ranks send MOST_MEANS sums and a digest of the names.
        numbers = {**counts, **host, "digest": zlib.crc32(repr(unlabelled).encode())}
        names = ["loss", "skipped", "grad_norm", *numbers]
        sums = [self._sums[name].flatten() for name in (*labelled, *unlabelled)]
        sums.append(torch.zeros(2 * (MOST_MEANS - len(unlabelled)), device=self.device))
        on_host = torch.tensor(list(numbers.values()), dtype=torch.float64).to(self.device)
        on_device = [part.double() for part in (self._step_sums, self._grad_norm[None])]
        local = torch.cat([*on_device, on_host, *(part.double() for part in sums)])
        if dist.is_initialized():
            gathered = torch.empty(dist.get_world_size() * len(local), dtype=local.dtype, device=self.device)
            dist.all_gather_into_tensor(gathered, local)
        else:
            gathered = local
        ranks = gathered.view(-1, len(local)).tolist()
        by_rank = {name: [rank[number] for rank in ranks] for number, name in enumerate(names)}
        common = labelled + (unlabelled if len(set(by_rank["digest"])) == 1 else [])
        return {**self._means(common, [rank[len(names) :] for rank in ranks]), **self._summary(by_rank)}, by_rank

    def _summary(self, by_rank: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        samples, elapsed_s = sum(by_rank["samples"]), max(by_rank["elapsed_s"])
        trained = sum(by_rank["steps"]) - sum(by_rank["skipped"])
        return {
            "loss": sum(by_rank["loss"]) / trained if trained else float("nan"),
            "grad_norm": sum(by_rank["grad_norm"]) / len(by_rank["grad_norm"]),
            "nonfinite_steps": int(max(by_rank["skipped"])),
            "samples": int(samples),
            "samples_per_s": samples / elapsed_s,
            "step_s": elapsed_s / max(self.steps, 1),
            "data_wait_s": max(by_rank["waited_s"]) / max(self.steps, 1),
            "peak_memory_bytes": int(max(by_rank["peak_bytes"])) or None,
        }

    def _means(self, names: Sequence[str], ranks: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Compute means by name, or by name and label; None for labels without values."""
        total = [sum(column) for column in zip(*ranks, strict=True)]
        means: dict[str, Any] = {}
        for name in names:
            labels = self._labels[name]
            size = max(len(labels), 1)
            sums, counts, total = total[:size], total[size : 2 * size], total[2 * size :]
            values = [value / count if count else None for value, count in zip(sums, counts, strict=True)]
            if labels:
                means[name] = dict(zip(labels, values, strict=True))
            elif values[0] is not None:
                means[name] = values[0]
        return means
