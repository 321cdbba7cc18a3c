"""List the operations between two log steps that make the host wait for the device, and the lines that cause them.

    python -m diagnostics.audit_syncs --preset demo

The tool takes the flags of `vla.py` and runs its training loop, `vla.train`, on synthetic batches without Ray. With
CUDA, PyTorch reports synchronisations (`torch.cuda.set_sync_debug_mode`). Without CUDA, the loop runs on CUDA tensors
without storage, and a dispatch mode inspects every operation; the backward runs on the meta device, because autograd
needs a driver. Exit status: 0 nothing found, 1 something found, 2 the audit could not run.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from ray.experimental import tqdm_ray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import vla
from diagnostics.report import format_table
from diagnostics.tool import with_stub_stats
from util import Batch, DeviceMetrics, NumpyToTorchCollate
from vla_finetuning.options.command_line import VLA, parse_args
from vla_finetuning.options.train import Precision
from vla_finetuning.plan.resolve import Run, resolve, with_config
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.meta import meta_policy
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run import cluster
from vla_finetuning.terminal import print_safe_error, print_safe_text
from vla_finetuning.training import callbacks, feed, state
from vla_finetuning.training.model import build_model
from vla_finetuning.training.stream import RankSchedule
from vla_finetuning.training.worker import Worker

aten = torch.ops.aten

ROOT = Path(__file__).resolve().parent.parent
# Files that cannot cause an operation: the cause is the innermost line outside them. Ray Data replaces Python's `print`
# by tqdm_ray's.
EXCLUDED_FILES = (f"{Path(torch.__file__).parent}{os.sep}", __file__, warnings.__file__, tqdm_ray.__file__)
# Text of the warning (c10/cuda/CUDAFunctions.cpp); the warning that the debug mode is a prototype differs.
CUDA_WARNING = "called a synchronizing CUDA operation"
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
MASKS = (torch.bool, torch.uint8)
# PyTorch's tags of operations whose result, or shape of the result, the host reads from the device.
VALUES_NEEDED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

# Optimizer steps of a log window. The loop runs two windows: one to warm up, one to audit.
WINDOW_STEPS = 2


class Line(NamedTuple):
    """A line of code: absolute path, line number, qualified name of the function."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        if "site-packages" in path.parts:
            path = Path(*path.parts[path.parts.index("site-packages") + 1 :])
        elif path.is_relative_to(ROOT):
            path = path.relative_to(ROOT)
        return f"{path}:{self.number}" if self.number else self.file

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.number).strip()


# The cause if only autograd is on the stack.
AUTOGRAD = Line("autograd", 0, "backward")


class Sync(NamedTuple):
    """An operation that waits for the device, its cause, and its number of occurrences in the audited steps."""

    operation: str
    where: Line
    times: int


@dataclass(frozen=True)
class Audit:
    """Synchronisations in `steps` steps, most frequent first; `seen` and `unseen` describe the scope in words."""

    syncs: list[Sync]
    steps: int
    micro_steps: int
    seen: str
    unseen: str

    def table(self) -> str:
        window = f"in {self.steps} steps of {self.micro_steps} micro-batches between two log steps"
        lines = [f"Looked at  {self.seen}", f"Not seen   {self.unseen}", ""]
        if not self.syncs:
            return "\n".join([*lines, f"Nothing waits for the device {window}."])
        rows = [("times", "line", "function", "what", "source")]
        rows += [(str(s.times), str(s.where), s.where.function, s.operation, s.where.source) for s in self.syncs]
        total = sum(sync.times for sync in self.syncs)
        return "\n".join([*lines, *format_table(rows, 5), "", f"The host waits for the device {total} times {window}."])


def audit(run: Run) -> Audit:
    """Run the training loop of a resolved run, on CUDA if available, and list the operations that wait for the device.

    The loop has one worker and at least two micro-batches a step. Nothing is written to the run's folder. Raises
    RuntimeError or NotImplementedError if PyTorch cannot run the policy without CUDA.
    """
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        run = _shortened(run, folder)
        if torch.cuda.is_available() and run.job.use_gpu:
            return _audit_on(run, torch.device("cuda", torch.cuda.current_device()))
        return _audit_without_cuda(run)


def _shortened(run: Run, folder: str) -> Run:
    """Return the run with one worker, two log windows and another folder."""
    train = replace(run.config.train, max_nonfinite=sys.maxsize)
    scaling, accum = replace(run.config.scaling, num_workers=1), max(2, run.config.grad_accum)
    changes: dict[str, Any] = {"log_freq": WINDOW_STEPS, "save_freq": 2 * WINDOW_STEPS, "eval_steps": 0}
    config = replace(run.config, output_dir=folder, train=train, scaling=scaling, grad_accum=accum, **changes)
    return with_config(with_stub_stats(run), config, 2 * WINDOW_STEPS)


class _Watch(TorchDispatchMode):
    """Count the operations that wait for the device by their cause."""

    ignore_compile_internals = classmethod(lambda cls: True)  # else Dynamo permanently disables compiled code

    def __init__(self, device_type: str):
        super().__init__()
        self.device_type = device_type
        self.recording = False
        self._counts: Counter[tuple[str, Line]] = Counter()

    def record(self, operation: str) -> None:
        if self.recording:
            self._counts[operation, _cause()] += 1

    def syncs(self) -> list[Sync]:
        return [Sync(operation, where, count) for (operation, where), count in self._counts.most_common()]

    def on_device(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device_type

    def is_pinned(self, host: Tensor) -> bool:
        return host.is_pinned()

    def why(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Return the reason why an operation waits for the device; None if it does not."""
        if func in COPIES:
            return self._why_copy(*self.copy_ends(func, args, kwargs))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(self.on_device(leaf) for leaf in leaves):
            return None
        name, writes = func.overloadpacket, len(args) > 2
        if func is aten._local_scalar_dense.default:
            return "a value is read"
        if name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            masks = sum(index.dtype in MASKS for index in indices)
            # PyTorch turns a write of one host value through one mask into a masked fill.
            fills = writes and len(indices) == 1 and args[2].numel() == 1 and not self.on_device(args[2])
            if masks and not fills:
                return "the true values of a mask are counted"
            if fills:
                return None
        elif VALUES_NEEDED & set(func.tags):
            return f"{name}: its result depends on values"
        # Kernels take a host scalar as an argument, but these operations copy it to the device first.
        copied = name is aten.where or (name in INDEXING and writes)
        if any(leaf.device.type == "cpu" and (leaf.ndim or copied) for leaf in leaves):
            return f"{name}: a tensor of the host's is copied to the device"
        return None

    def copy_ends(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any, bool]:
        """Return a copy's source, its target (or the target's device), and whether it is non-blocking."""
        if func is aten.copy_.default:
            return args[1], args[0], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return args[0], torch.device(kwargs.get("device") or args[0].device), bool(kwargs.get("non_blocking"))

    def _why_copy(self, source: Tensor, target: Any, asynchronous: bool) -> str | None:
        device = getattr(target, "device", target)
        if self.on_device(source) and device.type == "cpu":
            # `.to("cpu", non_blocking=True)` allocates pinned memory.
            waits = not asynchronous or (isinstance(target, Tensor) and not self.is_pinned(target))
            return "a copy from the device" if waits else None
        if source.device.type == "cpu" and device.type == self.device_type:
            if not self.is_pinned(source):
                return "a copy to the device from memory that is not pinned"
            return None if asynchronous else "a blocking copy to the device"
        return None


def _cause() -> Line:
    """Return the innermost line on the stack outside PyTorch and this module."""
    # A thread of autograd has no such line; search the main thread, which waits for it.
    for start in (sys._getframe(), sys._current_frames().get(threading.main_thread().ident or 0)):
        frame: FrameType | None = start
        while frame is not None:
            if frame.f_code is _backward_on_meta.__code__:
                return AUTOGRAD
            if not frame.f_code.co_filename.startswith(EXCLUDED_FILES):
                return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
            frame = frame.f_back
    return Line("unknown", 0, "unknown")


class _SyntheticShard:
    """Replace Ray's dataset shard by one row of the run's columns, shapes and dtypes, repeated."""

    def __init__(self, run: Run):
        data = vla.build_dataset(run)
        self._row = data.prepare(data.read(stream=(0, run.rows.last_row)).example())
        self._batches = run.job.steps * run.config.grad_accum
        self._block_rows = run.rows.block_rows

    def iter_torch_batches(self, *, batch_size: int, collate_fn: Callable[..., Batch], **_: Any) -> Iterator[Batch]:
        schedule = RankSchedule(batch_size, self._block_rows, 0, 1, 1)
        for micro in range(self._batches):
            rows = {key: np.repeat(value, batch_size, axis=0) for key, value in self._row.items()}
            yield collate_fn({**rows, "position": schedule.rows(micro)})


def _run_loop(
    run: Run,
    device: torch.device,
    watch: _Watch,
    shard: _SyntheticShard,
    *modes: contextlib.AbstractContextManager[Any],
    stand_ins: Sequence[tuple[Any, str, Any]] = (),
) -> None:
    """Run the worker's loop on `device` in `modes`; `watch` records from the first log step to the second.

    `stand_ins` are (owner, name, value) of attributes to replace, such as functions that need a driver.
    """
    gather, windows = DeviceMetrics.gather, 0

    def gather_unrecorded(metrics: DeviceMetrics, host: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
        nonlocal windows
        watch.recording = False
        line, by_rank = gather(metrics, host)
        windows += 1
        watch.recording = windows == 1
        # Values read from tensors without storage are no requests to stop or save.
        return line, {**by_rank, "stop": [0.0], "save": [0.0]}

    replaced = (
        (feed, "with_timeout", lambda batches, *_: batches),  # keep all operations in this thread
        (state, "log_to", lambda folder: None),
        (state, "enable_gpu_perf_flags", lambda *_: None),  # they outlive the audit
        (callbacks, "keep_metrics", lambda *_: None),
        (state, "check_attention", lambda *_: None),  # it reads values before the first step
        (DeviceMetrics, "gather", gather_unrecorded),
        *stand_ins,
    )
    with _patched(replaced) as stack:
        for mode in (*modes, watch):
            stack.enter_context(mode)
        if gc.isenabled():
            stack.callback(gc.enable)  # the loop disables it
        checkpoints = mock.Mock(due=lambda: False, paused_s=lambda: 0.0)
        vla.train(run, Worker(device, shard), make_checkpoints=lambda *_: checkpoints)
    if windows != 2:
        raise RuntimeError(f"the loop came to {windows} log steps instead of 2: the audit does not fit vla.py any more")


@contextlib.contextmanager
def _patched(stand_ins: Iterable[tuple[Any, str, Any]]) -> Iterator[contextlib.ExitStack]:
    """Replace attributes (owner, name, value) in the block; yield an exit stack that ends with it."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack


class _CudaWatch(_Watch):
    """Count PyTorch's synchronisation warnings, named after the last operation.

    A non-blocking copy from memory that is not pinned waits without a warning, and is counted too.
    """

    _last = "the host waits"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        why = self.why(func, args, kwargs)
        self._last = why or f"{func.overloadpacket}: the host waits"
        if why is not None and func in COPIES and self.copy_ends(func, args, kwargs)[2]:
            self.record(why)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record PyTorch's synchronisation warnings of all threads; pass on other warnings."""

        def intercept(message: Any, *rest: Any, **options: Any) -> None:
            if CUDA_WARNING in str(message):
                self.record(self._last)
            else:
                show(message, *rest, **options)

        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=CUDA_WARNING)
            show, warnings.showwarning = warnings.showwarning, intercept
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that waits without a warning, so that its calls are counted."""

        def wait(*args: Any, **kwargs: Any) -> Any:
            self.record("the host waits")
            return function(*args, **kwargs)

        return wait


def _audit_on(run: Run, device: torch.device) -> Audit:
    watch = _CudaWatch(device.type)
    waits = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"))
    with watch.listening():
        stand_ins = [(owner, name, watch.recorded(getattr(owner, name))) for owner, name in waits]
        _run_loop(run, device, watch, _SyntheticShard(run), stand_ins=stand_ins)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device
    step = "data to the device, noise, forward, backward, clipping, optimizer, log window"
    unseen = "collectives between workers; kernels that wait without telling PyTorch"
    return Audit(watch.syncs(), WINDOW_STEPS, run.config.grad_accum, f"the whole step on {name}: {step}", unseen)


class _FakeWatch(_Watch):
    """Run operations on the device without storage, under a FakeTensorMode or on meta, and all others as usual.

    Reads of the device by the host return ones.
    """

    def __init__(self, device_type: str):
        super().__init__(device_type)
        # Keep references to the storages, because an address may be reused.
        self._pinned: dict[int, torch.UntypedStorage] = {}
        # Line that last read a synthetic value.
        self.fake_read: Line | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        targets_device = device is not None and torch.device(device).type in ("cuda", self.device_type)
        if targets_device:
            kwargs["device"] = torch.device(self.device_type)
        if not targets_device and not any(self.on_device(leaf) for leaf in tree_leaves((args, kwargs))):
            with unset_fake_temporarily():
                return self._run_on_host(func, args, kwargs)
        why = self.why(func, args, kwargs)
        if why is not None:
            self.record(why)
        if func in COPIES:
            source, target, _ = self.copy_ends(func, args, kwargs)
            if self.on_device(source) and getattr(target, "device", target).type == "cpu":
                return self._run_on_ones(func, args, kwargs)
        elif why is not None and VALUES_NEEDED & set(func.tags):
            empty = partial(torch.empty, device=self.device_type)
            result = self._run_on_ones(func, args, kwargs)
            return tree_map(lambda t: empty(t.shape, dtype=t.dtype) if isinstance(t, Tensor) else t, result)
        # A generator of the host replaces the device's, which these operations cannot take.
        args, kwargs = tree_map(lambda leaf: None if isinstance(leaf, torch._C.Generator) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    def _run_on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run as usual, but only record memory as pinned: pinning needs a driver."""
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            result = args[0].clone()
        elif kwargs.get("pin_memory"):
            result = func(*args, **{**kwargs, "pin_memory": False})
        else:
            return func(*args, **kwargs)
        self._pinned[result.untyped_storage()._cdata] = result.untyped_storage()
        return result

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage()._cdata in self._pinned

    def _run_on_ones(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run on the host, with ones in place of the device's tensors, and zeros in place of indices."""
        self.fake_read = _cause()

        def values(leaf: Any) -> Any:
            if not self.on_device(leaf):
                return leaf
            is_index = func.overloadpacket in INDEXING and leaf.dtype is torch.int64
            return torch.full(leaf.shape, 0 if is_index else 1, dtype=leaf.dtype)

        with unset_fake_temporarily():
            args, kwargs = tree_map(values, (args, kwargs))
            return func(*args, **kwargs)

    def stand_ins(self) -> list[tuple[Any, str, Any]]:
        """Return replacements for the parts of PyTorch that need a driver."""
        host_generator = torch.Generator

        def show(tensor: Tensor, **_: Any) -> str:
            if self.on_device(tensor):
                self.record("values are printed")
            return f"tensor(..., device='{tensor.device}')"

        class Idle:
            """A stream or event without work."""

            def do_nothing(self, *_: Any, **__: Any) -> None:
                pass

            __init__ = __enter__ = __exit__ = do_nothing  # type: ignore[assignment]
            record = record_event = wait = wait_event = wait_stream = do_nothing

            def synchronize(self_) -> None:  # noqa: N805
                self.record("the host waits")

        return [
            (torch, "Generator", lambda device="cpu": host_generator()),
            *((torch.cuda, name, Idle) for name in ("Stream", "Event", "stream", "current_stream")),
            (torch.cuda, "synchronize", lambda device=None: self.record("the host waits")),
            (torch.cuda, "is_bf16_supported", lambda *_: True),
            (torch.cuda, "get_device_name", lambda *_: "pretended"),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (FakeTensor, "record_stream", lambda *_: None),
            # FakeTensor's own methods read nothing, or value by value.
            (FakeTensor, "__repr__", show),
            (FakeTensor, "__format__", lambda t, spec: format(t if t.ndim else t.item(), spec)),
            (FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),
        ]


def _audit_without_cuda(run: Run) -> Audit:
    train = run.config.train
    # On recent GPUs `auto` selects bf16.
    precision: Precision = "fp32" if train.precision == "fp32" else "bf16"
    scaling = replace(run.config.scaling, use_gpu=True)
    run = with_config(run, replace(run.config, train=replace(train, precision=precision), scaling=scaling))
    built = _build_without_storage(run.policy)
    loss = built[0]
    watch = _FakeWatch("cuda")

    def backward(_: Tensor) -> None:
        for parameter in loss.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        _replace_tensors(loss, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
    stand_ins = [*watch.stand_ins(), (state, "build_model", lambda *_: built), (Tensor, "backward", backward)]
    shard = _SyntheticShard(run)
    try:
        _run_loop(run, torch.device("cuda", 0), watch, shard, fake, stand_ins=stand_ins)
    except RuntimeError as error:
        if (read := watch.fake_read) is None:
            raise
        raise RuntimeError(
            f"{error}\nThe loop last read a value from the device at {read}, `{read.source}`, and "
            "got one that is made up: if that misled it, this is a line that waits for the device"
        ) from error
    times = WINDOW_STEPS * run.config.grad_accum
    syncs = [*watch.syncs(), *(s._replace(times=s.times * times) for s in _backward_on_meta(run, shard))]
    step = "data to the device, noise, forward, clipping, optimizer and log window, on CUDA tensors without storage"
    seen = f"{step};\n           the operations of one backward, on the meta device and in float32"
    unseen = "the backward on CUDA; what kernels do inside; collectives between workers (run this where there is a GPU)"
    return Audit(syncs, WINDOW_STEPS, run.config.grad_accum, seen, unseen)


def _build_without_storage(spec: PolicySpec) -> tuple[PolicyLoss, torch.dtype | None]:
    """Build the model on the meta device, or on the CPU if building the policy may load a backbone."""
    if not family_of(spec.config).from_config:
        return build_model(spec, torch.device("cpu"))
    with mock.patch.object(PolicySpec, "start", lambda spec: meta_policy(spec.config)):
        return build_model(spec, torch.device("meta"))


def _replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's parameters and buffers; shared tensors stay shared."""
    replacements: dict[Tensor, Tensor] = {}
    for child in module.modules():
        for tensors in cast(list[dict[str, Any]], [child._parameters, child._buffers]):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in replacements:
                    is_parameter, new = isinstance(tensor, nn.Parameter), make(tensor)
                    replacements[tensor] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                tensors[name] = tensor if tensor is None else replacements[tensor]


def _backward_on_meta(run: Run, shard: _SyntheticShard) -> list[Sync]:
    """Return the synchronisations of one backward on the meta device, where autograd needs no driver."""
    device = torch.device("meta")
    loss, _ = _build_without_storage(replace(run.policy, train=replace(run.policy.train, precision="fp32")))
    loss.to(device)
    watch = _FakeWatch(device.type)
    collate = NumpyToTorchCollate(pin_memory=False)
    host = next(shard.iter_torch_batches(batch_size=run.config.batch_size, collate_fn=collate))
    with _patched(watch.stand_ins()), FakeTensorMode(allow_non_fake_inputs=True), watch:
        on_meta = {key: value.to(device) for key, value in host.items()}
        schedule = RankSchedule(run.config.batch_size, run.rows.block_rows, 0, 1, run.job.batches_per_step)
        batch = next(feed.policy_batches([on_meta], run.policy.config))
        draws = state.noise_for(run.policy, 0, schedule, device)
        result = loss(batch, *draws(0))
        watch.recording = True
        result.backward()
    return watch.syncs()


def main(argv: Sequence[str] | None = None) -> int:
    """Audit the run that the flags describe, print the result and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_safe_text(f"{__doc__}\n{VLA.help()}")
        return 0
    try:
        config = parse_args(argv)
        result = audit(resolve(config, cluster.gpus_found(config.scaling, config.preset)))
    except (ValueError, OSError) as error:
        print_safe_error(error)
        return 2
    except (RuntimeError, NotImplementedError):
        print_safe_error(f"the audit could not run this policy\n{traceback.format_exc()}")
        return 2
    print_safe_text(result.table())
    return 1 if result.syncs else 0


if __name__ == "__main__":
    sys.exit(main())
