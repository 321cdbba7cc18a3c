"""The training loop in this process, or by ranks of several, on a run's own rows: no Ray."""

import contextlib
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import numpy as np
import ray
import torch
import torch.distributed as dist

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


class RunRows:
    """Stands in for Ray's shard of the dataset: a rank's own rows, in the plan's order, prepared as they would be."""

    def __init__(self, run, rank=0, world=1, first_step=0):
        self._run, self._data = run, vla.build_dataset(run)
        self._dealt, self._first = schedule(run, rank, world), first_step

    def iter_torch_batches(self, *, batch_size, collate_fn, **_):
        source = self._data.read(stream=(0, self._run.rows.last_row))
        micros = range(self._first, self._run.rows.last_row // (batch_size * self._dealt.world))
        positions = np.concatenate([self._dealt.rows(micro) for micro in micros])
        for micro, rows in zip(micros, source.read_rows(positions.tolist(), batch_size), strict=True):
            yield collate_fn({**self._data.prepare(rows), "position": self._dealt.rows(micro)})


def schedule(run, rank, world):
    return RankSchedule(run.job.batch_size, run.rows.block_rows, rank, world, run.job.batches_per_step)


class Rank(Worker):
    """A worker of the process group of `in_ranks`, or alone.

    A checkpoint is written by `thread`, as Ray Train does, whose errors come to `errors`.
    """

    def __init__(self, rank=0, world=1, shard=None):
        super().__init__(CPU, shard)
        self.rank, self.world, self.errors, self.thread = rank, world, SimpleQueue(), None

    def broadcast(self, value):
        values = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(values)
        return values[0]

    def report(self, metrics, checkpoint=None, checkpoint_dir_name=None, checkpoint_upload_fn=None, **_):
        def upload():
            try:
                checkpoint_upload_fn(checkpoint, checkpoint_dir_name)
            except Exception as error:
                self.errors.put(error)

        if checkpoint_upload_fn is not None:
            self.thread = threading.Thread(target=upload)
            self.thread.start()


def alone(run, first_step=0):
    """Return a worker that trains a run by itself, on its own rows, and writes its checkpoints."""
    return Rank(shard=RunRows(run, first_step=first_step))


def in_ranks(function, *args, world):
    """Call `function(rank, world, *args)` in each of `world` processes of a process group; return what JSON keeps.

    The processes are forked from one that has imported all modules that call this one.
    """
    tests = [name for name in sys.modules if name.startswith("tests.")]
    callers = [name for name in tests if hasattr(sys.modules[name], "in_ranks")]
    multiprocessing.set_forkserver_preload([*callers, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        options = {"nprocs": world, "start_method": "forkserver"}
        torch.multiprocessing.start_processes(_rank, (world, folder, function, args), **options)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]


def _rank(rank, world, folder, function, args):
    torch.set_num_threads(1)
    # LeRobot's accelerate looks there, and joins the group that it finds.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    Path(folder, f"{rank}.json").write_text(json.dumps(function(rank, world, *args)))
    dist.destroy_process_group()


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

    def preempted_at(self, deadline_ms):
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
