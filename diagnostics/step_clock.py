"""Time the phases of training steps for `profile_step`, by CUDA events at marks and by PyTorch's profiler."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from diagnostics.report import Record
from util import Clock, Phase
from vla_finetuning.training.state import Callback

# Purpose of a step in a profile.
Pass = Literal["warmup", "traced", "untouched", "timed", "synchronized", "communication", "checkpoint"]
MEASURED: tuple[Pass, ...] = ("untouched", "timed", "synchronized")


class Times(Record):
    """Seconds of each step by phase.

    Attributes:
        exposed: seconds that the phase adds to the step, which is their sum; on CUDA, on the compute stream.
        full: seconds that the phase takes, overlapped or not; copies are timed on their stream, waits on the host.
    """

    exposed: dict[Phase, list[float]]
    full: dict[Phase, list[float]]


class Communication(Record):
    """Seconds per step of this rank's collectives, in total and overlapped by computation (`hidden_s`).

    PyTorch's profiler measures NCCL's kernels beside all others, or Gloo's work beside other threads' operations.
    """

    total_s: list[float]
    hidden_s: list[float]


class _Mark(NamedTuple):
    """Begin of a phase, or end of a step if `phase` is None. `side`: event on a stream that does not compute."""

    phase: Phase | None
    host_s: float
    event: torch.cuda.Event | None
    side: torch.cuda.Event | None


class StepClock(Callback, Clock):
    """Record the begin of phases without reading from the device before the end of the run.

    The object is a callback of the training loop, which it stops after `passes`, and the clock that the loop marks.
    Passes alternate in blocks of `block_steps`. PyTorch's trace of the traced steps is written to `trace_path`.
    """

    def __init__(self, passes: Sequence[Pass], block_steps: int, device: torch.device, trace_path: Path | None = None):
        self._passes, self._block_steps = passes, block_steps
        self._device, self._trace_path = device, trace_path
        self._pass: Pass = "warmup"
        self._steps = 0  # number of steps begun
        self._started = 0.0  # begin of the current block
        self._marks: list[_Mark] = []
        self._marked: dict[Pass, list[list[_Mark]]] = {"timed": [], "synchronized": [], "checkpoint": []}
        self._profiled = contextlib.ExitStack()  # the running profiler
        self._range = contextlib.ExitStack()  # its range of the current phase
        self._communication: list[tuple[float, float]] = []
        self.block_step_s: dict[Pass, list[float]] = {}

    def on_step_begin(self, state: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """End the previous step, and begin this step with the phase `other`."""
        if self._steps:
            self._end_step()
        else:
            if self._device.type == "cuda":
                self._stream = torch.cuda.current_stream(self._device)
            self._started = time.perf_counter()
        before, self._pass = self._pass, self._passes[self._steps]
        self._steps += 1
        if before == "traced" != self._pass:
            self._profiled.close()
        if self._pass == "traced" != before and self._trace_path is not None:
            self._profiled.enter_context(profile(on_trace_ready=self._write_trace))
        if self._pass == "communication":
            self._profiled.enter_context(profile(on_trace_ready=self._see_communication))
        self.mark("other")
        return batches

    def on_step_end(self, state: Any) -> None:
        """Stop the loop after the last pass; the run has more steps, so that data keeps flowing until then."""
        state.stop = state.stop or self._steps == len(self._passes)

    def on_end(self, state: Any) -> None:
        self._end_step()

    def mark(self, phase: Phase) -> None:
        if self._pass in self._marked:
            self._note(phase)
        elif self._pass == "traced":
            self._range.close()
            self._range.enter_context(record_function(phase))

    def _note(self, phase: Phase | None) -> None:
        event = side = None
        if self._device.type == "cuda":
            if self._pass == "timed":
                current = torch.cuda.current_stream(self._device)
                event = self._stream.record_event(torch.cuda.Event(enable_timing=True))
                side = None if current == self._stream else current.record_event(torch.cuda.Event(enable_timing=True))
            else:
                torch.cuda.synchronize(self._device)
        self._marks.append(_Mark(phase, time.perf_counter(), event, side))

    def _end_step(self) -> None:
        if self._pass in self._marked:
            self._note(None)
            self._marked[self._pass].append(self._marks)
            self._marks = []
        self._range.close()
        if self._pass == "communication":
            self._profiled.close()
        if self._steps % self._block_steps == 0:
            now = time.perf_counter()
            if self._pass in MEASURED:
                self.block_step_s.setdefault(self._pass, []).append((now - self._started) / self._block_steps)
            self._started = now

    def _write_trace(self, profiler: profile) -> None:
        assert self._trace_path is not None
        profiler.export_chrome_trace(str(self._trace_path))

    def _see_communication(self, profiler: profile) -> None:
        # Every step has collectives, but on a busy machine Gloo's threads may report them too late.
        if (seconds := communication_times(profiler.events(), self._device))[0] > 0:
            self._communication.append(seconds)

    def times(self, name: Pass) -> Times | None:
        """Return the phases of the steps of a pass; None if there were no such steps."""
        steps = [_phases(marks) for marks in self._marked[name]]
        if not steps:
            return None
        phases = [phase for phase in get_args(Phase) if any(phase in exposed for exposed, _ in steps)]
        exposed, full = ({p: [step[i].get(p, 0.0) for step in steps] for p in phases} for i in (0, 1))
        return Times(exposed=exposed, full=full)

    def communication(self) -> Communication | None:
        """Return the communication that the profiler recorded; None if there was none."""
        total_s, hidden_s = ([seconds[i] for seconds in self._communication] for i in (0, 1))
        return Communication(total_s=total_s, hidden_s=hidden_s) if total_s else None


def communication_times(events: Iterable[Any], device: torch.device) -> tuple[float, float]:
    """Return the seconds of collectives, and the part of them that computation overlaps.

    `events` are `torch.profiler.profile().events()` of a step on `device`.
    """
    if device.type == "cuda":
        # FSDP's annotations have times on the device too, but are no work.
        events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        collectives = [event for event in events if "nccl" in event.name.lower()]
        others = [event for event in events if "nccl" not in event.name.lower()]
    else:
        events = list(events)
        collectives = [event for event in events if event.name.startswith("gloo:")]
        # Computation in Gloo's own threads is part of the collective.
        threads = {event.thread for event in collectives}
        others = [event for event in events if event.name.startswith("aten::") and event.thread not in threads]
    total = _covered(collectives)
    hidden = total + _covered(others) - _covered([*collectives, *others])
    return 1e-6 * total, 1e-6 * max(0.0, hidden)


def _covered(events: Iterable[Any]) -> float:
    """Return the microseconds that at least one of the events covers."""
    spans = np.array([(event.time_range.start, event.time_range.end) for event in events], float).reshape(-1, 2)
    start, end = spans[np.argsort(spans[:, 0])].T
    end = np.maximum.accumulate(end)
    before = np.concatenate([start[:1], end[:-1]])
    return float(np.maximum(0, end - np.maximum(start, before)).sum())


def _phases(marks: Sequence[_Mark]) -> tuple[dict[Phase, float], dict[Phase, float]]:
    """Return a step's exposed and full seconds by phase (`Times`)."""
    exposed: dict[Phase, float] = defaultdict(float)
    elsewhere: dict[Phase, float] = defaultdict(float)  # on the host, or on another stream
    for mark, following in itertools.pairwise(marks):
        assert mark.phase is not None
        on_host = following.host_s - mark.host_s
        exposed[mark.phase] += _between(mark.event, following.event, on_host)
        elsewhere[mark.phase] += _between(mark.side, following.side, on_host if mark.phase == "data_wait" else 0.0)
    return dict(exposed), {phase: max(seconds, elsewhere[phase]) for phase, seconds in exposed.items()}


def _between(start: torch.cuda.Event | None, end: torch.cuda.Event | None, without_events: float) -> float:
    return without_events if start is None or end is None else 1e-3 * start.elapsed_time(end)
