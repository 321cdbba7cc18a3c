"""The clock that `profile_step` has the training loop tell what it does: CUDA events at marks, PyTorch's profiler."""

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

    A callback of the training loop, which ends after `passes`, and the clock that its parts tell what they do. Passes
    change after `block_steps`. PyTorch's trace of the traced steps goes to `trace_path`, on the rank that has one.
    """

    def __init__(self, passes: Sequence[Pass], block_steps: int, device: torch.device, trace_path: Path | None = None):
        self._passes, self._block_steps = passes, block_steps
        self._device, self._trace_path = device, trace_path
        self._pass: Pass = "warmup"
        self._steps = 0  # begun
        self._started = 0.0  # the block of steps, or the first step
        self._marks: list[_Mark] = []
        self._marked: dict[Pass, list[list[_Mark]]] = {"timed": [], "synchronized": [], "checkpoint": []}
        self._profiled = contextlib.ExitStack()  # PyTorch's profiler, while it runs
        self._range = contextlib.ExitStack()  # the phase that it is told of
        self._communication: list[tuple[float, float]] = []
        self.block_step_s: dict[Pass, list[float]] = {}

    def on_step_begin(self, state: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """End the step before, and begin the phase `other` of this one: a step lasts until the next."""
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
        """Have the loop end with the last pass: the run is longer, so that its data keeps flowing as in training."""
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
        # In every step something travels. Gloo's threads say so when they get to it, on a busy machine too late.
        if (seen := travelling(profiler.events(), self._device))[0] > 0:
            self._communication.append(seen)

    def times(self, name: Pass) -> Times | None:
        """The phases of the steps of a pass; None if there were none."""
        steps = [_phases(marks) for marks in self._marked[name]]
        if not steps:
            return None
        phases = [phase for phase in get_args(Phase) if any(phase in exposed for exposed, _ in steps)]
        exposed, full = ({p: [step[i].get(p, 0.0) for step in steps] for p in phases} for i in (0, 1))
        return Times(exposed=exposed, full=full)

    def communication(self) -> Communication | None:
        """Return the communication of the steps in which the profiler saw it; None if there was none."""
        total_s, hidden_s = ([seconds[i] for seconds in self._communication] for i in (0, 1))
        return Communication(total_s=total_s, hidden_s=hidden_s) if total_s else None


def travelling(events: Iterable[Any], device: torch.device) -> tuple[float, float]:
    """Return the seconds in which collectives are under way, and of those, in which anything is computed.

    `events`: `torch.profiler.profile().events()` of a step on a device.
    """
    if device.type == "cuda":
        # The names that FSDP gives to parts of a step have times on the device too, where they are no work.
        events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        collectives = [event for event in events if "nccl" in event.name.lower()]
        others = [event for event in events if "nccl" not in event.name.lower()]
    else:
        events = list(events)
        collectives = [event for event in events if event.name.startswith("gloo:")]
        # What Gloo's own threads compute is part of the collective.
        threads = {event.thread for event in collectives}
        others = [event for event in events if event.name.startswith("aten::") and event.thread not in threads]
    total = _covered(collectives)
    hidden = total + _covered(others) - _covered([*collectives, *others])
    return 1e-6 * total, 1e-6 * max(0.0, hidden)


def _covered(events: Iterable[Any]) -> float:
    """Return the microseconds in which at least one of the events is under way."""
    spans = np.array([(event.time_range.start, event.time_range.end) for event in events], float).reshape(-1, 2)
    start, end = spans[np.argsort(spans[:, 0])].T
    end = np.maximum.accumulate(end)
    before = np.concatenate([start[:1], end[:-1]])
    return float(np.maximum(0, end - np.maximum(start, before)).sum())


def _phases(marks: Sequence[_Mark]) -> tuple[dict[Phase, float], dict[Phase, float]]:
    """Return a step's seconds by phase: exposed and full, see `Times`."""
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
