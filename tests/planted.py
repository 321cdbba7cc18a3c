"""Faults planted into a training process: the program's own loop, with something terrible at a chosen step."""

import os
import signal
from dataclasses import dataclass

import ray
import ray.train
import torch

import checkpoint
import vla
from pi05_loss import PolicyLoss
from run_folder import attempts


@dataclass(frozen=True)
class Fault:
    """`action` of `rank` in the `attempt`-th start of the worker group, before optimizer step `step` (from 0).

    kill, freeze: SIGKILL, SIGSTOP to the training process itself. nan: its loss is NaN in that step.
    die_at_commit: from then on, the process that drives the run and this one die when a checkpoint is put in its place.
    """

    action: str
    step: int
    rank: int = 1
    attempt: int = 0
    driver_pid: int = 0


def loop(loop_config, *, faults):
    """In place of `vla.train_loop_per_worker`; runs it."""
    run = ray.get(loop_config["run"])
    rank = ray.train.get_context().get_world_rank()
    train_step, forward, rename = vla.train_step, PolicyLoss.forward, os.rename
    now: list[str] = []

    def step_with_faults(*args, step, **options):
        attempt = len(attempts(run.output_dir)) - 1
        now[:] = [f.action for f in faults if (f.step, f.rank, f.attempt) == (step, rank, attempt)]
        if "kill" in now:
            os.kill(os.getpid(), signal.SIGKILL)
        if "freeze" in now:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "die_at_commit" in now:
            checkpoint.os.rename = die
        return train_step(*args, step=step, **options)

    def forward_with_faults(self, *args):
        loss = forward(self, *args)
        return loss * torch.nan if "nan" in now else loss

    def die(*paths):
        for fault in faults:
            os.kill(fault.driver_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    vla.train_step, PolicyLoss.forward = step_with_faults, forward_with_faults
    try:
        vla.train_loop_per_worker(loop_config)
    finally:
        vla.train_step, PolicyLoss.forward, os.rename = train_step, forward, rename
