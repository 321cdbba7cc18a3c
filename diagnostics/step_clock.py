"""The clock that `profile_step` has the training loop tell what it does: when phases begin and how long they take."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch.autograd import DeviceType

from diagnostics.report import Record
from util import Clock, Phase
from vla_finetuning.training.state import Callback

# What a step of a profile is for.
Pass = Literal["warmup", "traced", "untouched", "timed", "synchronized", "communication", "checkpoint"]
MEASURED: tuple[Pass, ...] = ("untouched", "timed", "synchronized")


class Times(Record):
    """Seconds of each step by phase.

    Attributes:
        exposed: what the phase adds to the step; these sum to it. On CUDA, of the stream that computes.
        full: what the phase takes, hidden behind others or not: waiting for data, of the host; copies, of their stream.
    """

    exposed: dict[Phase, list[float]]
    full: dict[Phase, list[float]]


class Communication(Record):
    """Seconds per step that this rank's gradients and parameters travel; of those, the part in which it also computes.

    As PyTorch's profiler sees them, whatever the strategy: NCCL's kernels beside all others, Gloo's work beside the
    operations of all other threads.
    """

    total_s: list[float]
    hidden_s: list[float]


class _Mark(NamedTuple):
    """A phase begins (None: the step ends). `side`: an event on the current stream, where that does not compute."""

    phase: Phase | None
    host_s: float
    event: torch.cuda.Event | None
    side: torch.cuda.Event | None


class StepClock(Callback, Clock):
    """Notes when phases begin, in the steps that are for that; reads nothing from the device before the end.

    A callback of the training loop, and the clock that the loop's parts tell what they do.

    Args:
        passes: what each step is for; the loop ends after as many steps.
        block_steps: passes change after so many.
        device: which the steps are computed on.
        trace_path: where to write PyTorch's trace of the traced steps; None on the ranks that do not.
    """

    def __init__(self, passes: Sequence[Pass], block_steps: int, device: torch.device, trace_path: Path | None = None):
        self._passes = passes
        self._block_steps = block_steps
        self._device = device
        self._trace_path = trace_path
        self._pass: Pass = "warmup"
        self._steps = 0  # begun
        self._started = 0.0  # the block of steps, or the first step
        self._marks: list[_Mark] = []
        self._marked: dict[Pass, list[list[_Mark]]] = {"timed": [], "synchronized": [], "checkpoint": []}
        self._profiler: torch.profiler.profile | None = None
        self._ranges = contextlib.ExitStack()
        self._watch = contextlib.ExitStack()
        self._travelled: list[tuple[float, float]] = []
        self.block_step_s: dict[Pass, list[float]] = {}

    def on_step_begin(self, state: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """End the step before, and begin the phase `other` of this one: a step lasts until the next."""
        if self._steps:
            self._end_step()
        else:
            if self._device.type == "cuda":
                self._stream = torch.cuda.current_stream(self._device)
            self._started = time.perf_counter()
        self._pass = self._passes[self._steps]
        self._steps += 1
        self._trace(self._pass == "traced")
        if self._pass == "communication":
            self._watch.enter_context(self._watching_communication())
        self.mark("other")
        return batches

    def on_step_end(self, state: Any) -> None:
        """Have the loop end with the last pass: the run is longer, so that its data keeps flowing as in training."""
        state.stop = state.stop or self._steps == len(self._passes)

    def on_end(self, state: Any) -> None:
        self._end_step()

    def mark(self, phase: Phase) -> None:
        if self._pass in self._marked:
            self._note(phase)
        elif self._profiler is not None:
            self._ranges.close()
            self._ranges.enter_context(torch.profiler.record_function(phase))

    def _trace(self, wanted: bool) -> None:
        """Have PyTorch's profiler run, or end it and write what it saw."""
        if wanted and self._profiler is None and self._trace_path is not None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif not wanted and self._profiler is not None and self._trace_path is not None:
            self._profiler.stop()
            with tempfile.TemporaryDirectory(prefix="trace-") as folder:  # PyTorch writes to a disk alone
                written = Path(folder, "trace.json")
                self._profiler.export_chrome_trace(str(written))
                self._trace_path.write_bytes(written.read_bytes())
            self._profiler = None

    def _note(self, phase: Phase | None) -> None:
        event = side = None
        if self._device.type == "cuda":
            if self._pass == "timed":
                event = torch.cuda.Event(enable_timing=True)
                event.record(self._stream)
                current = torch.cuda.current_stream(self._device)
                if current != self._stream:
                    side = torch.cuda.Event(enable_timing=True)
                    side.record(current)
            else:
                torch.cuda.synchronize(self._device)
        self._marks.append(_Mark(phase, time.perf_counter(), event, side))

    def _end_step(self) -> None:
        if self._pass in self._marked:
            self._note(None)
            self._marked[self._pass].append(self._marks)
            self._marks = []
        self._ranges.close()
        self._watch.close()
        if self._steps % self._block_steps == 0:
            now = time.perf_counter()
            if self._pass in MEASURED:
                self.block_step_s.setdefault(self._pass, []).append((now - self._started) / self._block_steps)
            self._started = now

    @contextlib.contextmanager
    def _watching_communication(self) -> Iterator[None]:
        with torch.profiler.profile() as profiler:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        seen = travelling(profiler.events(), self._device)
        # In every step something travels. Gloo's threads say so when they get to it, on a busy machine too late.
        if seen[0] > 0:
            self._travelled.append(seen)

    def times(self, name: Pass) -> Times | None:
        """The phases of the steps of a pass; None if there were none."""
        steps = [_phases(marks) for marks in self._marked[name]]
        if not steps:
            return None
        exposed, full = zip(*steps, strict=True)
        phases = [phase for phase in get_args(Phase) if any(phase in step for step in exposed)]
        return Times(
            exposed={phase: [step.get(phase, 0.0) for step in exposed] for phase in phases},
            full={phase: [step.get(phase, 0.0) for step in full] for phase in phases},
        )

    def communication(self) -> Communication | None:
        """Return the communication of the steps in which the profiler saw it; None if there was none."""
        if not self._travelled:
            return None
        total, hidden = zip(*self._travelled, strict=True)
        return Communication(total_s=list(total), hidden_s=list(hidden))


def travelling(events: Iterable[Any], device: torch.device) -> tuple[float, float]:
    """Seconds in which collectives are under way, and of those, in which anything is computed.

    Args:
        events: `torch.profiler.profile().events()` of a step.
        device: which the step was computed on.
    """
    if device.type == "cuda":
        # The names that FSDP gives to parts of a step have times on the device too, where they are no work.
        on_device = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        work = [(event, "nccl" in event.name.lower()) for event in on_device]
        gloos_threads = set()
    else:
        work = [
            (event, event.name.startswith("gloo:")) for event in events if event.name.startswith(("aten::", "gloo:"))
        ]
        # What Gloo's own threads compute is part of the collective.
        gloos_threads = {event.thread for event, is_collective in work if is_collective}
    collectives = _spans(event for event, is_collective in work if is_collective)
    others = _spans(event for event, is_collective in work if not is_collective and event.thread not in gloos_threads)
    total = _covered(collectives)
    hidden = total + _covered(others) - _covered(np.concatenate([collectives, others]))
    return 1e-6 * total, 1e-6 * max(0.0, hidden)


def _spans(events: Iterable[Any]) -> np.ndarray:
    """(n, 2), microseconds."""
    return np.array([(event.time_range.start, event.time_range.end) for event in events], float).reshape(-1, 2)


def _covered(spans: np.ndarray) -> float:
    """Return how much of the line is in at least one of the intervals, (n, 2)."""
    start, end = spans[np.argsort(spans[:, 0])].T
    end = np.maximum.accumulate(end)
    before = np.concatenate([start[:1], end[:-1]])
    return float(np.maximum(0, end - np.maximum(start, before)).sum())


def _phases(marks: Sequence[_Mark]) -> tuple[dict[Phase, float], dict[Phase, float]]:
    """A step's seconds by phase: exposed and full, see `Times`."""
    exposed: dict[Phase, float] = defaultdict(float)
    elsewhere: dict[Phase, float] = defaultdict(float)  # on the host, or on another stream
    for mark, following in zip(marks[:-1], marks[1:], strict=True):
        assert mark.phase is not None
        on_host = following.host_s - mark.host_s
        if mark.event is not None and following.event is not None:
            exposed[mark.phase] += 1e-3 * mark.event.elapsed_time(following.event)
        else:
            exposed[mark.phase] += on_host
        if mark.side is not None and following.side is not None:
            elsewhere[mark.phase] += 1e-3 * mark.side.elapsed_time(following.side)
        elif mark.phase == "data_wait":
            elsewhere[mark.phase] += on_host
    return dict(exposed), {phase: max(seconds, elsewhere[phase]) for phase, seconds in exposed.items()}
