"""Stream training rows to the ranks: the dataset of Ray Train, the ranks' schedule, and their micro-batches.

Ray Train calls `TrainingData` at every start of the worker group. Ray's controller and data coordinators unpickle it
too, and importing LeRobot takes ten seconds. Functions that need LeRobot are therefore unpickled at the first row of a
read task (`LazyPickle`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import xxhash

from lerobot_datasource import LeRobotDatasource, read_source
from vla_finetuning.columns import STREAM_POSITION
from vla_finetuning.plan.rows import PerFrame
from vla_finetuning.run.checkpoint import load_progress, set_aside_damaged

if TYPE_CHECKING:
    from util import Batch

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class TrainingData:
    """Make the dataset of rows after the newest usable checkpoint. Ray Train calls it again after a failure."""

    read: Callable[..., LeRobotDatasource]  # makes the datasource of stream positions `stream`
    last_row: int  # end of the run's stream
    prepare: LazyPickle  # CPU half of the policy's preprocessor
    row_bytes: int  # of a prepared row
    checkpoints_dir: Path

    def __call__(self) -> ray.data.Dataset:
        newest = set_aside_damaged(self.checkpoints_dir)
        first_row = load_progress(newest).rows if newest else 0
        stream = (first_row, self.last_row)
        # Read tasks prepare rows, so that frames cross the object store once. `map_batches` would cut blocks of
        # prepared rows by the size of rows that were read.
        rows = read_source(self.read(stream=stream, prepare=self.prepare, prepared_bytes=self.row_bytes))
        rows.context.enable_progress_bars = False
        # Training may pause for long, as for held-out rows; `with_timeout` limits its waits for batches.
        rows.context.execution_no_progress_timeout_s = -1
        return rows


class LazyPickle:
    """Wrap a function that is unpickled at its first call in a process: it may hold a tokenizer of 17 MB."""

    def __init__(self, function: Callable[[Columns], Columns]):
        # Ray shares the memory of an array instead of copying it into every task. Never written to a disk.
        self._payload = np.frombuffer(pickle.dumps(function, protocol=5), np.uint8)
        self._digest = hashlib.sha256(self._payload).hexdigest()

    def __call__(self, batch: Columns) -> Columns:
        function: Any = _opened.get(self._digest)
        if function is None:
            # A task has about one CPU: a thread pool per tokenizer would only contend.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            function = _opened[self._digest] = pickle.loads(self._payload)
        return function(batch)


_opened: dict[str, Any] = {}


@dataclass(frozen=True)
class WithPosition:
    """Prepare rows, and add their stream positions as a column for the device."""

    prepare: Callable[[Columns], Columns]

    def __call__(self, batch: Columns) -> Columns:
        columns = self.prepare(batch)
        return columns | {STREAM_POSITION: batch["position"]} if "position" in batch else columns


@dataclass(frozen=True)
class WithAdvantage:
    """Append words on the frame's advantage to each instruction, and prepare the rows.

    Training rows lack the words at random, by seed and stream position; held-out rows always have them.
    """

    prepare: Callable[[Columns], Columns]
    positive: PerFrame  # label of each frame
    words: Mapping[bool, str]  # end of an instruction, by the label
    dropout: float  # share of training rows without a label
    seed: int

    def __call__(self, batch: Columns) -> Columns:
        positive = self.positive(batch).tolist()
        texts = [self.words[label] for label in positive]
        if "position" in batch:
            draws = [uniform(self.seed, position) for position in batch["position"].tolist()]
            texts = [words if at_random >= self.dropout else "" for words, at_random in zip(texts, draws, strict=True)]
        task = np.array([f"{text}{words}" for text, words in zip(batch["task"], texts, strict=True)], object)
        return self.prepare({**batch, "task": task})


def uniform(seed: int, position: int) -> float:
    """Return a number from [0, 1) that `seed` and `position` determine."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, position)) / 2**64


@dataclass(frozen=True)
class RankSchedule:
    """Assignment of the stream's rows to a rank: blocks are assigned to the ranks in turn.

    An optimizer step takes the next `batches_per_step x batch_size` rows of the stream for any number of ranks. Its
    micro-batches need not be a multiple of the ranks if a block is a micro-batch.
    """

    batch_size: int  # rows of a micro-batch
    block_rows: int  # divides `batch_size`
    rank: int
    world: int
    batches_per_step: int  # micro-batches over all ranks; at least `world`
    first_step: int = 0  # steps before the ranks started; rows and micro-batches are counted from there

    def __post_init__(self) -> None:
        even = self.batches_per_step % self.world == 0
        if self.batches_per_step < self.world or not (even or self.block_rows == self.batch_size):
            raise ValueError(
                f"{self.batches_per_step} micro-batches of {self.batch_size // self.block_rows} blocks cannot be "
                f"divided evenly among {self.world} ranks"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step over all ranks: the global batch size."""
        return self.batches_per_step * self.batch_size

    def micros(self, step: int) -> range:
        """Return the numbers of this rank's micro-batches of optimizer step `step`, from 0."""
        start = (step - self.first_step) * self.batches_per_step - self.rank
        return range(-(-start // self.world), -(-(start + self.batches_per_step) // self.world))

    def step_of(self, micro: int) -> int:
        """Return the optimizer step of this rank's `micro`-th batch."""
        return self.first_step + (micro * self.world + self.rank) // self.batches_per_step

    def block_starts(self, micro: int) -> np.ndarray:
        """Return the first row of each block of this rank's `micro`-th batch: int64 (blocks per batch,)."""
        blocks = self.batch_size // self.block_rows
        return ((micro * blocks + np.arange(blocks)) * self.world + self.rank) * self.block_rows

    def rows(self, micro: int) -> np.ndarray:
        """Return the rows of this rank's `micro`-th batch: int64 (batch_size,)."""
        return (self.block_starts(micro)[:, None] + np.arange(self.block_rows)).ravel()

    def rows_of_step(self, step: int, nth: int) -> np.ndarray:
        """Return the rows of this rank's `nth` micro-batch of a step, relative to the step: int64 (batch_size,)."""
        before = (step - self.first_step) * self.rows_per_step
        return self.rows(self.micros(step)[nth]) - before


def stream_batches(
    shard: ray.data.DataIterator,
    schedule: RankSchedule,
    first_row: int,
    steps: int,
    collate: Callable[[Columns], Batch],
) -> Iterator[Batch]:
    """Yield this rank's micro-batches in CPU memory, from stream position `first_row` up to step `steps` of the run.

    Raises RuntimeError: rows are lost, repeated or out of order, or `collate` raised StopIteration.
    """
    rank, count = schedule.rank, schedule.micros(steps - 1).stop
    micro = 0

    def collated(columns: Columns) -> Batch:
        try:
            return collate(columns)
        except StopIteration as error:  # Ray's iterators would end the data
            raise RuntimeError(f"rank {rank}: a batch could not be made of its rows") from error

    while micro < count:  # a long stream takes several executions (`LeRobotDatasource.execution`)
        executed = micro
        for batch in shard.iter_torch_batches(
            batch_size=schedule.batch_size, collate_fn=collated, device="cpu", prefetch_batches=2
        ):
            actual, expected = batch["position"].numpy(), first_row + schedule.rows(micro)
            if not np.array_equal(actual, expected):
                raise RuntimeError(
                    f"rank {rank}: expected stream positions {expected[0]}..{expected[-1]}, found {actual.min()}"
                    f"..{actual.max()} ({len(actual)} rows): rows were lost, repeated or reordered on the way"
                )
            micro += 1
            yield batch
            if micro == count:
                return  # later rows only pad the ranks to equal shares
        if micro == executed:
            raise RuntimeError(
                f"rank {rank}: the data ended after {micro} of {count} micro-batches: a bug; please report it"
            )


def with_timeout(batches: Iterator[Batch], limit_s: float, waited_for: Callable[[int], str]) -> Iterator[Batch]:
    """Yield batches that a thread waits for, because a wait inside Ray has no timeout. Fetching begins at once.

    Raises TimeoutError if a batch does not arrive in time; `waited_for` describes the n-th batch, from 0.
    """

    def fetch() -> Future[Batch | None]:
        pending: Future[Batch | None] = Future()

        def receive() -> None:
            try:
                pending.set_result(next(batches, None))
            except BaseException as error:
                pending.set_exception(error)

        threading.Thread(target=receive, name="batches", daemon=True).start()
        return pending

    def watched(pending: Future[Batch | None]) -> Iterator[Batch]:
        for number in itertools.count():
            if not wait([pending], limit_s).done:
                raise TimeoutError(
                    f"no data for {limit_s:g} s (VLA_BATCH_TIMEOUT_S): a read task hangs, or the cluster has no CPU "
                    f"left for it (`ray list tasks` and `ray status` tell). Waited for {waited_for(number)}"
                )
            batch = pending.result()
            if batch is None:
                return
            yield batch
            pending = fetch()

    return watched(fetch())
