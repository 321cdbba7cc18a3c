"""Faults planted into a run: the program's own loop and data, with something terrible at a chosen step or row.

What happens when goes to `OUTPUT_DIR/planted.jsonl`, `{"event": "fault" or "step", "attempt": 0, "time": seconds}`, so
that it can be told how long the run took to train again.
"""

import json
import os
import resource
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch

import checkpoint
import vla
from pi05_loss import PolicyLoss
from run_folder import attempts, read_lines
from training_data import Deferred

EVENTS_NAME = "planted.jsonl"
GREED_BYTES = 10 * 2**30


@dataclass(frozen=True)
class Fault:
    """`action` of `rank` in the `attempt`-th start of the worker group, before optimizer step `step` (from 0).

    kill, freeze: SIGKILL, SIGSTOP to the training process itself. nan: its loss is NaN in that step.
    bad_input, bug: a ValueError, an error of another kind. full_disk: from then on, no file of more than 100 kB can be
    written. die_at_commit: from then on, the process that drives the run and this one die when a checkpoint is put in
    its place.

    It waits for the newest checkpoint to be written, so that what is lost is known; unless `settled` is false.
    """

    action: str
    step: int
    rank: int = 1
    attempt: int = 0
    settled: bool = True


@dataclass(frozen=True)
class DataFault:
    """`action` of the task that reads stream position `position`, the first time that one does.

    hang: it never ends. greed: it takes GREED_BYTES of memory.
    """

    action: str
    position: int


def make_trainer(run, data_options, faults=(), **options):
    """In place of `vla.make_trainer`."""
    data = vla.build_dataset(run)
    of_data = [fault for fault in faults if isinstance(fault, DataFault)]
    if of_data:
        data = replace(data, prepare=FaultyPrepare(data.prepare, of_data, run.output_dir))
    of_training = [fault for fault in faults if isinstance(fault, Fault)]
    in_training = partial(loop, faults=of_training, driver_pid=os.getpid())
    return _make_trainer(run, data_options, loop=in_training, data=data, **options)


_make_trainer = vla.make_trainer


def note(output_dir: Path, event: str) -> None:
    line = {"event": event, "attempt": len(attempts(output_dir)) - 1, "time": time.time()}
    with open(output_dir / EVENTS_NAME, "a") as file:
        file.write(json.dumps(line) + "\n")


def recovered_s(output_dir: Path) -> list[float]:
    """For each fault, the seconds until a step was done that it did not prevent."""
    events = [json.loads(line) for line in read_lines(output_dir / EVENTS_NAME)]
    steps = [event for event in events if event["event"] == "step"]
    found = []
    for fault in (event for event in events if event["event"] == "fault"):
        later = [step for step in steps if step["time"] > fault["time"]]
        # Another attempt, where there is one: what the failing one still did is void.
        after = [step for step in later if step["attempt"] > fault["attempt"]] or later
        found += [round(min(step["time"] for step in after) - fault["time"], 1)] if after else []
    return found


@dataclass
class FaultyPrepare:
    """In place of `TrainingData.prepare`, in the read task."""

    prepare: Deferred
    faults: list[DataFault]
    output_dir: Path

    def __call__(self, batch):
        for fault in self.faults:
            done = self.output_dir / f"{fault.action}_done"
            if fault.position in batch["position"] and not done.exists():
                done.touch()
                note(self.output_dir, "fault")
                hoard = []
                while fault.action == "greed" and len(hoard) < GREED_BYTES // 2**28:
                    hoard.append(np.ones(2**28, np.uint8))
                    time.sleep(0.05)
                time.sleep(10**6)
        return self.prepare(batch)


def loop(loop_config: dict[str, Any], *, faults, driver_pid=None):
    """In place of `vla.train_loop_per_worker`; runs it."""
    run = ray.get(loop_config["run"])
    rank = ray.train.get_context().get_world_rank()
    train_step, forward, rename = vla.train_step, PolicyLoss.forward, os.rename
    now: list[str] = []

    def step_with_faults(*args, step, **options):
        attempt = len(attempts(run.output_dir)) - 1
        due = [f for f in faults if (f.step, f.rank, f.attempt) == (step, rank, attempt)]
        now[:] = [f.action for f in due]
        newest = run.checkpoints_dir / f"step_{step // run.config.save_freq * run.config.save_freq:08d}"
        while any(f.settled for f in due) and step >= run.config.save_freq and not newest.exists():
            time.sleep(0.01)
        if now:
            note(run.output_dir, "fault")
        if "kill" in now:
            os.kill(os.getpid(), signal.SIGKILL)
        if "freeze" in now:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "bad_input" in now:
            raise ValueError("planted: this row is bad")
        if "bug" in now:
            raise RuntimeError(f"planted: process {os.getpid()} is broken")
        if "full_disk" in now:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        if "die_at_commit" in now:
            checkpoint.os.rename = die
        result = train_step(*args, step=step, **options)
        if rank == 0:
            note(run.output_dir, "step")
        return result

    def forward_with_faults(self, *args):
        loss = forward(self, *args)
        return loss * torch.nan if "nan" in now else loss

    def die(*paths):
        os.kill(driver_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    vla.train_step, PolicyLoss.forward = step_with_faults, forward_with_faults
    try:
        vla.train_loop_per_worker(loop_config)
    finally:
        vla.train_step, PolicyLoss.forward, os.rename = train_step, forward, rename
