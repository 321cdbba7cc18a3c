"""Rows of each rank, checks of the stream, labels of rows, and the preprocessor's pickle."""

import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from vla_finetuning.columns import STREAM_POSITION
from vla_finetuning.training import stream as training_data
from vla_finetuning.training.stream import (
    LazyPickle,
    RankSchedule,
    WithAdvantage,
    WithPosition,
    stream_batches,
    uniform,
    with_timeout,
)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(("batch", "block"), [(4, 4), (4, 2), (6, 1), (6, 3)])
def test_each_row_goes_to_one_rank_and_batches_do_not_depend_on_world(world, batch, block):
    schedules = [RankSchedule(batch, block, rank, world, batches_per_step=world) for rank in range(world)]
    for micro in range(3):
        rows = np.concatenate([schedule.rows(micro) for schedule in schedules])
        assert sorted(rows) == list(range(micro * batch * world, (micro + 1) * batch * world))
    # Ray's split gives blocks of one size to ranks in turn.
    for rank, schedule in enumerate(schedules):
        assert all(int(row) // block % world == rank for micro in range(3) for row in schedule.rows(micro))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6])
def test_rows_of_a_step_do_not_depend_on_the_number_of_ranks(world):
    batch, per_step, first = 2, 6, 10
    schedules = [RankSchedule(batch, batch, rank, world, per_step, first) for rank in range(world)]
    next_micros = [0] * world
    for step in range(first, first + 7):
        rows = []
        for rank, schedule in enumerate(schedules):
            micros = schedule.micros(step)
            assert micros.start == next_micros[rank] and len(micros) >= 1
            next_micros[rank] = micros.stop
            for nth, micro in enumerate(micros):
                assert schedule.step_of(micro) == step
                rows_of_step = schedule.rows_of_step(step, nth)
                assert np.array_equal(rows_of_step + (step - first) * per_step * batch, schedule.rows(micro))
                rows += rows_of_step.tolist()
        assert sorted(rows) == list(range(per_step * batch))


@pytest.mark.parametrize(("per_step", "blocks"), [(4, 2), (2, 1)])
def test_steps_that_ranks_cannot_share_evenly_are_refused(per_step, blocks):
    message = f"{per_step} micro-batches of {blocks} blocks cannot be divided evenly among 3 ranks"
    with pytest.raises(ValueError, match=message):
        RankSchedule(batch_size=4, block_rows=4 // blocks, rank=0, world=3, batches_per_step=per_step)


class Shard:
    """Replaces Ray's iterator: executions, each a list of batches of stream positions."""

    def __init__(self, *executions):
        self.executions = iter(executions)

    def iter_torch_batches(self, **_):
        return ({"position": torch.tensor(rows)} for rows in next(self.executions, []))


def read(shard, first=10, steps=4):
    schedule = RankSchedule(batch_size=2, block_rows=2, rank=1, world=2, batches_per_step=2)
    return [b["position"].tolist() for b in stream_batches(shard, schedule, first, steps, collate=None)]


def test_batches_are_read_over_several_executions():
    assert read(Shard([[12, 13], [16, 17]], [[20, 21], [24, 25]])) == [[12, 13], [16, 17], [20, 21], [24, 25]]


UNEXPECTED = "rank 1: expected stream positions .* lost, repeated or reordered"


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([[10, 11]], UNEXPECTED),
        ([[12, 13], [12, 13]], UNEXPECTED),
        ([[13, 12]], UNEXPECTED),
        ([[12, 13], [20, 21]], UNEXPECTED),
        ([[12]], UNEXPECTED),
        ([[12, 13]], "the data ended after 1 of 4 micro-batches: a bug"),
    ],
    ids=["another rank's", "repeated", "reordered", "skipped", "short", "ended"],
)
def test_unexpected_rows_and_end_of_data_are_errors(batches, message):
    with pytest.raises(RuntimeError, match=message):
        read(Shard(batches))


def test_batch_that_does_not_arrive_is_an_error_that_names_it():
    hangs = threading.Event()

    def batches():
        yield {"position": 1}
        yield {"position": 2}
        hangs.wait()

    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no data for 0.5 s \(VLA_BATCH_TIMEOUT_S\): .*Waited for number 2$"):
        list(with_timeout(batches(), 0.5, "number {}".format))
    assert 0.4 < time.monotonic() - started < 20
    hangs.set()
    # Slow batches are passed on, and errors are raised unchanged.
    assert list(with_timeout(map(slowly, range(3)), 60, str)) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        list(with_timeout((1 / n for n in range(3)), 60, str))


def slowly(value):
    time.sleep(0.1)
    return value


def test_labels_are_dropped_at_random_from_training_rows_only():
    labels = np.arange(200) % 3 == 0
    words = {True: " good", False: " bad"}
    prepare = WithAdvantage(lambda batch: batch, lambda batch: labels[batch["index"]], words, dropout=0.3, seed=5)
    rows = {"index": np.arange(200), "task": np.array([f"task {n}" for n in range(200)], object)}
    labelled = [f"task {n}{words[label]}" for n, label in enumerate(labels.tolist())]
    assert prepare(rows)["task"].tolist() == labelled
    position = 1000 + np.arange(200)
    tasks = prepare(rows | {"position": position})["task"].tolist()
    without = [uniform(5, place) < 0.3 for place in position.tolist()]
    assert tasks == [f"task {n}" if bare else labelled[n] for n, bare in enumerate(without)] and 40 < sum(without) < 80
    placed = WithPosition(lambda batch: {"x": 2 * batch["index"]})
    assert set(placed(rows)) == {"x"}
    columns = placed(rows | {"position": position})
    assert columns["x"][3] == 6 and columns[STREAM_POSITION] is position


class Slow:
    loads = 0

    def __setstate__(self, state):
        Slow.loads += 1

    def __getstate__(self):
        return {"large": bytes(10**6)}

    def __call__(self, batch):
        return {"twice": batch["a"] * 2}


def test_lazy_pickle_is_loaded_once_at_first_call(monkeypatch):
    monkeypatch.setattr(training_data, "_opened", {})
    monkeypatch.setattr(Slow, "loads", 0)
    buffers = []
    data = pickle.dumps(LazyPickle(Slow()), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000  # Ray shares the rest, one buffer, between tasks
    first, second = (pickle.loads(data, buffers=buffers) for _ in range(2))
    assert Slow.loads == 0
    assert first({"a": np.arange(3)})["twice"].tolist() == [0, 2, 4]
    assert second({"a": np.arange(2)})["twice"].tolist() == [0, 2]
    assert Slow.loads == 1


def test_stream_module_imports_neither_lerobot_nor_torch():
    heavy = ("torch", "lerobot", "transformers")
    code = f"import vla_finetuning.training.stream, sys; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_stop_iteration_while_collating_is_an_error():
    """Ray's iterators would end the data."""

    class Shard:
        def iter_torch_batches(self, batch_size, collate_fn, **_):
            return map(collate_fn, [{"position": np.arange(batch_size)}])

    def collate(columns):
        return next(length for length in () if length)

    with pytest.raises(RuntimeError, match="rank 0: a batch could not be made of its rows"):
        list(stream_batches(Shard(), RankSchedule(2, 2, 0, 1, 1), 0, 1, collate))
