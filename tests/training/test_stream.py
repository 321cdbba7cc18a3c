"""Which rank gets which rows, and what it costs to send the preprocessor around."""

import itertools
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
def test_every_row_goes_to_one_rank_and_global_batches_are_the_same_for_any_world(world, batch, block):
    dealt = [RankSchedule(batch, block, rank, world, batches_per_step=world) for rank in range(world)]
    for micro in range(3):
        together = np.concatenate([d.rows(micro) for d in dealt])
        assert sorted(together) == list(range(micro * batch * world, (micro + 1) * batch * world))
    # Whole blocks, dealt in turn: what Ray's split does with blocks of one size.
    blocks = itertools.cycle(range(world))
    owner = {first // block: next(blocks) for first in range(0, 3 * batch * world, block)}
    for rank, d in enumerate(dealt):
        assert all(owner[int(row) // block] == rank for micro in range(3) for row in d.rows(micro))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6])
def test_a_step_has_the_same_rows_however_many_ranks_share_it(world):
    batch, per_step, first = 2, 6, 10
    dealt = [RankSchedule(batch, batch, rank, world, per_step, first) for rank in range(world)]
    taken = [0] * world
    for step in range(first, first + 7):
        rows = []
        for rank, d in enumerate(dealt):
            micros = d.micros(step)
            assert micros.start == taken[rank] and len(micros) >= 1
            taken[rank] = micros.stop
            for nth, micro in enumerate(micros):
                assert d.step_of(micro) == step
                inside = d.rows_of_step(step, nth)
                assert np.array_equal(inside + (step - first) * per_step * batch, d.rows(micro))
                rows += inside.tolist()
        assert sorted(rows) == list(range(per_step * batch))


def test_what_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match="4 micro-batches of 2 blocks cannot be divided evenly among 3 ranks"):
        RankSchedule(batch_size=4, block_rows=2, rank=0, world=3, batches_per_step=4)
    with pytest.raises(ValueError, match="2 micro-batches of 1 blocks cannot be divided evenly among 3 ranks"):
        RankSchedule(batch_size=4, block_rows=4, rank=0, world=3, batches_per_step=2)


class Shard:
    """Stands in for Ray's iterator: executions, each a list of batches of stream positions."""

    def __init__(self, *executions):
        self.executions = iter(executions)

    def iter_torch_batches(self, **_):
        return ({"position": torch.tensor(rows)} for rows in next(self.executions, []))


def read(shard, first=10, steps=4):
    dealt = RankSchedule(batch_size=2, block_rows=2, rank=1, world=2, batches_per_step=2)
    return [b["position"].tolist() for b in stream_batches(shard, dealt, first, steps, collate=None)]


def test_batches_are_checked_against_the_plan_over_several_executions():
    assert read(Shard([[12, 13], [16, 17]], [[20, 21], [24, 25]])) == [[12, 13], [16, 17], [20, 21], [24, 25]]


@pytest.mark.parametrize(
    "batches",
    [[[10, 11]], [[12, 13], [12, 13]], [[13, 12]], [[12, 13], [20, 21]], [[12]]],
    ids=["another rank's", "repeated", "reordered", "skipped", "short"],
)
def test_rows_that_the_plan_does_not_say_end_the_run(batches):
    with pytest.raises(RuntimeError, match="rank 1: expected stream positions .* lost, repeated or reordered"):
        read(Shard(batches))


def test_data_that_ends_too_soon_is_no_hang():
    with pytest.raises(RuntimeError, match="the data ended after 1 of 4 micro-batches: a bug"):
        read(Shard([[12, 13]]))


def test_a_batch_that_does_not_come_is_an_error_that_names_it():
    hangs = threading.Event()

    def batches():
        yield {"position": 1}
        yield {"position": 2}
        hangs.wait()

    taken = []
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no data for 0.5 s \(VLA_BATCH_TIMEOUT_S\): .*Waited for number 2$"):
        taken += with_timeout(batches(), 0.5, "number {}".format)
    assert 0.4 < time.monotonic() - started < 20
    hangs.set()
    # What is slow, but comes, is passed on; what goes wrong while fetching comes out as it is.
    assert list(with_timeout(map(slowly, range(3)), 60, str)) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        list(with_timeout((1 / n for n in range(3)), 60, str))


def slowly(value):
    time.sleep(0.1)
    return value


def test_training_rows_are_without_a_label_at_random_and_others_never():
    labels = np.arange(200) % 3 == 0
    words = {True: " good", False: " bad"}
    made = WithAdvantage(lambda batch: batch, lambda batch: labels[batch["index"]], words, dropout=0.3, seed=5)
    rows = {"index": np.arange(200), "task": np.array([f"task {n}" for n in range(200)], object)}
    labelled = [f"task {n}{words[label]}" for n, label in enumerate(labels.tolist())]
    assert made(rows)["task"].tolist() == labelled
    position = 1000 + np.arange(200)
    found = made(rows | {"position": position})["task"].tolist()
    without = [uniform(5, place) < 0.3 for place in position.tolist()]
    assert found == [f"task {n}" if bare else labelled[n] for n, bare in enumerate(without)] and 40 < sum(without) < 80
    # Where a row is in the stream comes along.
    placed = WithPosition(lambda batch: {"x": 2 * batch["index"]})
    assert set(placed(rows)) == {"x"}
    found = placed(rows | {"position": position})
    assert found["x"][3] == 6 and found[STREAM_POSITION] is position


class Slow:
    opened = 0

    def __setstate__(self, state):
        Slow.opened += 1

    def __getstate__(self):
        return {"large": bytes(10**6)}

    def __call__(self, batch):
        return {"twice": batch["a"] * 2}


def test_a_deferred_function_is_opened_at_its_first_call_and_once(monkeypatch):
    monkeypatch.setattr(training_data, "_opened", {})
    monkeypatch.setattr(Slow, "opened", 0)
    buffers = []
    data = pickle.dumps(LazyPickle(Slow()), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000  # the rest is one buffer, which Ray shares between tasks
    first, second = (pickle.loads(data, buffers=buffers) for _ in range(2))
    assert Slow.opened == 0
    assert first({"a": np.arange(3)})["twice"].tolist() == [0, 2, 4]
    assert second({"a": np.arange(2)})["twice"].tolist() == [0, 2]
    assert Slow.opened == 1


def test_rays_own_processes_need_not_import_lerobot_or_torch():
    heavy = ("torch", "lerobot", "transformers")
    code = f"import vla_finetuning.training.stream, sys; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_batch_that_cannot_be_made_does_not_end_the_data_silently():
    """Ray's iterators take a StopIteration for the end."""

    class Shard:
        def iter_torch_batches(self, batch_size, collate_fn, **_):
            return map(collate_fn, [{"position": np.arange(batch_size)}])

    def collate(columns):
        return next(length for length in () if length)

    with pytest.raises(RuntimeError, match="rank 0: a batch could not be made of its rows"):
        list(stream_batches(Shard(), RankSchedule(2, 2, 0, 1, 1), 0, 1, collate))
