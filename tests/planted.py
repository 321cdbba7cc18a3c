"""Faults planted into a run: the program's own loop, with something terrible at a chosen step.

Those of its data are in `planted_data`.
"""

import os
import resource
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

import vla
from tests.planted_data import DataFault, FaultyPrepare, attempt_of, note
from vla_finetuning.buckets.mirror import pull
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.run import checkpoint
from vla_finetuning.training import state

# File of a run's folder, which a test writes when it has killed the processes that a training process waits for.
KILLED = "killed"


@dataclass(frozen=True)
class Fault:
    """`action` of `rank` in the `attempt`-th start of the worker group, before optimizer step `step` (from 0).

    kill, freeze: SIGKILL, SIGSTOP to the training process itself. wait: for ten minutes. await_kill: until KILLED
    exists in the run's folder. nan: its loss is NaN then.
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


def make_trainer(run, data_options, faults=(), **options):
    """In place of `vla.make_trainer`."""
    data = vla.build_dataset(run)
    of_data = [fault for fault in faults if isinstance(fault, DataFault)]
    if of_data:
        data = replace(data, prepare=FaultyPrepare(data.prepare, of_data, run.job.output_dir))
    of_training = [fault for fault in faults if isinstance(fault, Fault)]
    in_training = partial(loop, faults=of_training, driver_pid=os.getpid())
    return _make_trainer(run, data_options, loop=in_training, data=data, **options)


_make_trainer = vla.make_trainer


def loop(loop_config: dict[str, Any], *, faults, driver_pid=None):
    """In place of `vla.train_loop_per_worker`; runs it."""
    run = ray.get(loop_config["run"])
    rank = ray.train.get_context().get_world_rank()
    train_step, forward, replace_file = state.train_step, FlowLoss.forward, os.replace
    now: list[str] = []

    def step_with_faults(*args, step, **options):
        attempt = attempt_of(run.job.output_dir)
        due = [f for f in faults if (f.step, f.rank, f.attempt) == (step, rank, attempt)]
        now[:] = [f.action for f in due]
        newest = run.job.checkpoints_dir / f"step_{step // run.config.save_freq * run.config.save_freq:08d}"
        while any(f.settled for f in due) and step >= run.config.save_freq and not (newest / checkpoint.STATE).exists():
            time.sleep(0.01)
            pull(run.job.checkpoints_dir)
        if now and now != ["await_kill"]:
            note(run.job.output_dir, "fault")
        if "kill" in now:
            os.kill(os.getpid(), signal.SIGKILL)
        if "freeze" in now:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "wait" in now:
            time.sleep(600)
        while "await_kill" in now and not (run.job.output_dir / KILLED).exists():
            time.sleep(0.01)
        if "bad_input" in now:
            raise ValueError("planted: this row is bad")
        if "bug" in now:
            raise RuntimeError(f"planted: process {os.getpid()} is broken")
        if "full_disk" in now:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        if "die_at_commit" in now:
            checkpoint.os.replace = die_at_commit
        result = train_step(*args, step=step, **options)
        if rank == 0:
            note(run.job.output_dir, "step")
        return result

    def forward_with_faults(self, *args, **options):
        loss = forward(self, *args, **options)
        return loss * torch.nan if "nan" in now else loss

    def die_at_commit(source, target):
        if Path(target).name != checkpoint.STATE:
            return replace_file(source, target)
        os.kill(driver_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    state.train_step, FlowLoss.forward = step_with_faults, forward_with_faults
    try:
        vla.train_loop_per_worker(loop_config)
    finally:
        state.train_step, FlowLoss.forward, os.replace = train_step, forward, replace_file
