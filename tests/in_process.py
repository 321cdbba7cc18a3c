"""The training loop in this process, on a run's own rows, for the tests of what watches it: no Ray."""

import contextlib
import gc
import logging
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import ray
import torch

import vla
from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.training.stream import RankSchedule
from vla_finetuning.training.worker import Worker

CPU = torch.device("cpu")
TINY = {"width": 32, "depth": 2, "mlp_dim": 32, "head_dim": 8, "vision_width": 32, "vision_mlp_dim": 32}


def make_setting(folder, episodes=(6, 5, 4)):
    """A folder, a dataset and a tiny base policy for it."""
    root = make_dataset(folder / "dataset", episodes=episodes)
    meta = load_metadata(root)
    base = make_base(folder / "base", meta, **TINY)
    return folder, root, base


def flags(setting, **changes):
    """A command line, changed; None takes a flag away."""
    folder, root, base = setting
    options = {
        "dataset.root": root,
        "policy.path": base,
        "output_dir": folder / "run",
        "batch_size": 2,
        "grad_accum": 2,
        "steps": 3,
        "train.mode": "full",
        "scaling.use_gpu": "false",
        **changes,
    }
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def resolved(setting, **changes):
    return resolve(parse_args(flags(setting, **changes)), gpus_found=0)


class Shard:
    """Stands in for Ray's shard of the dataset: the run's own columns, one row over and over, in the plan's order.

    `before_batch` is called before each batch; `batch_columns(micro, rows)` adds columns to it.
    """

    def __init__(self, run, before_batch=lambda: None, batch_columns=lambda micro, rows: {}):
        data = vla.build_dataset(run)
        self._row = data.prepare(data.read(stream=(0, run.rows.last_row)).example())
        self._run, self._before_batch, self._batch_columns = run, before_batch, batch_columns

    def iter_torch_batches(self, *, batch_size, collate_fn, **_):
        dealt = RankSchedule(batch_size, self._run.rows.block_rows, 0, 1, 1)
        for micro in range(self._run.rows.last_row // batch_size):
            self._before_batch()
            rows = {key: np.repeat(value, batch_size, axis=0) for key, value in self._row.items()}
            position = dealt.rows(micro)
            yield collate_fn({**rows, "position": position, **self._batch_columns(micro, len(position))})


class GivenTime:
    """Stands in for the module `time`: all its clocks are one, and only `spend` moves it."""

    def __init__(self):
        self._now_s = 1000.0

    def spend(self, seconds):
        self._now_s += seconds

    def time(self):
        return self._now_s

    perf_counter = monotonic = process_time = time


class NoCheckpoints:
    """Stands in for `CheckpointWriter`."""

    def __init__(self, *_):
        pass

    def due(self):
        return False

    def ends_at(self, deadline_ms):
        pass

    def paused_s(self):
        return 0.0

    def save(self, progress):
        pass

    def close(self):
        pass


def train(run, shard=None, *, device=CPU, worker=None, make_checkpoints=NoCheckpoints, by=None, **options):
    """Run `vla.train` (or `by`) by a worker in this process, the only one unless `worker` is given.

    Checkpoints are not written, or by `make_checkpoints`.

    Returns:
        What `by` returns, or the optimizer of a run that `vla.train` finished, and None of one that was stopped.
    """
    run.job.output_dir.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(gc, "collect", lambda *_: 0):  # takes longer than everything else
        try:
            worker = worker or Worker(device, shard or Shard(run))
            if by is not None:
                return by(run, worker, make_checkpoints=make_checkpoints, **options)
            state = vla.train(run, worker, make_checkpoints=make_checkpoints, **options)
            return state.optimizer if state.finished or not any(state.by_rank.get("stop", ())) else None
        finally:
            gc.enable()  # the loop turns it off
            for handler in list(logging.getLogger().handlers):
                if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == run.job.output_dir:
                    logging.getLogger().removeHandler(handler)
                    handler.close()


def remote_here(function):
    """In place of `ray.remote`: a task is computed where it is asked for."""
    return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=function))


TASKS_HERE = (
    (ray, "remote", remote_here),
    (ray, "get", lambda reference, timeout=None: reference),
    (ray, "put", lambda value: value),
    (ray, "cluster_resources", lambda: {"CPU": 2.0, "memory": 1e9, "object_store_memory": 1e9}),
)


@contextlib.contextmanager
def tasks_here():
    """Ray's tasks and objects are functions and values of this process."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in TASKS_HERE:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
