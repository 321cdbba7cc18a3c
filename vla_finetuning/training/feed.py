"""A rank's micro-batches on their way from the stream of rows to the policy.

On the host, in Ray Data's prefetching thread, a list of transforms changes the numpy columns of a micro-batch, which
then become tensors. They are copied to the device, where the policy gets its inputs without the columns about rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from lerobot.configs.policies import PreTrainedConfig

from util import UNWATCHED, Batch, Clock, NumpyToTorchCollate, TimedIterator, cuda_prefetcher
from vla_finetuning.columns import IS_PRESENT, RETURN, ROW_COLUMNS
from vla_finetuning.data.per_frame import PerFrame
from vla_finetuning.plan.resolve import Run
from vla_finetuning.plan.row_weights import loss_factors
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.policies.texts import with_texts
from vla_finetuning.training.stream import Columns, RankSchedule, stream_batches, with_timeout
from vla_finetuning.training.worker import Worker

# Changes the numpy columns of a micro-batch, on the host; several threads may call it.
HostTransform = Callable[[Columns], Columns]


def feed(
    run: Run,
    worker: Worker,
    dealt: RankSchedule,
    first_row: int,
    *,
    hooks: Sequence[Any] = (),
    to_tensors: NumpyToTorchCollate | None = None,
    clock: Clock = UNWATCHED,
) -> TimedIterator:
    """Return this rank's micro-batches on its device, from a position of the stream to the run's end.

    The first one is fetched at once.

    Args:
        hooks: callbacks of the loop (`state.Callback`).
        to_tensors: `NumpyToTorchCollate` when None.
    Raises:
        TimeoutError: a batch does not come within VLA_BATCH_TIMEOUT_S.
    """
    rows, policy = run.rows, run.policy
    on_host = [hook.on_host_batch for hook in hooks]
    transforms = [*input_transforms(rows, policy), *on_host, *training_transforms(run)]
    collate = Collate(transforms, to_tensors or NumpyToTorchCollate(worker.device.type == "cuda"))
    host_batches = stream_batches(worker.shard, dealt, first_row, run.job.steps, collate)
    in_time = with_timeout(host_batches, run.job.timeouts.batch, partial(describe_batch, rows, dealt))

    def to_policy(batches: Iterator[Batch]) -> Iterator[Batch]:
        for hook in hooks:
            batches = hook.on_device_batches(batches)
        return policy_batches(batches, policy.config, hooks)

    return TimedIterator(cuda_prefetcher(in_time, worker.device, clock), then=to_policy)


@dataclass(frozen=True)
class Collate:
    """Make CPU tensors of a micro-batch's numpy columns, after transforms, one after the other."""

    transforms: Sequence[HostTransform]
    to_tensors: Callable[[Columns], Batch]

    def __call__(self, columns: Columns) -> Batch:
        for transform in self.transforms:
            columns = transform(columns)
        return self.to_tensors(columns)


def input_transforms(rows: Rows, policy: PolicySpec) -> list[HostTransform]:
    """List what makes prepared rows the inputs of a loss, of training rows and of held-out ones."""
    transforms: list[HostTransform] = []
    if not policy.train.compile:  # which would compile anew for each combination of cameras
        transforms.append(drop_absent_cameras)
    if rows.returns is not None:
        transforms.append(partial(add_returns, returns=rows.returns))
    if policy.prompts:
        transforms.append(partial(cut_prompts, lengths=policy.prompts))
    return transforms


def training_transforms(run: Run) -> list[HostTransform]:
    """List what rows of the run's stream need besides: what their losses are multiplied by."""
    weights, epsilon = run.rows.weights, run.config.sample_weighting.epsilon
    return [] if weights is None else [partial(weigh_rows, weights=weights, epsilon=epsilon)]


def drop_absent_cameras(batch: Columns) -> Columns:
    """Leave out the cameras that no row has; those that all rows have need no mask (`PrepareRobots`)."""
    masks = {key.removesuffix(IS_PRESENT): key for key in batch if key.endswith(IS_PRESENT)}
    if not masks:
        return batch
    absent = {key for key, mask in masks.items() if not batch[mask].any()}
    complete = {mask for mask in masks.values() if batch[mask].all()}
    dropped = absent | {masks[key] for key in absent} | complete
    return {key: values for key, values in batch.items() if key not in dropped}


def add_returns(batch: Columns, returns: PerFrame) -> Columns:
    """Add the return of each row's frame, for a value function to learn."""
    return {**batch, RETURN: returns(batch)}


def weigh_rows(batch: Columns, weights: np.ndarray, epsilon: float) -> Columns:
    """Add the factor of each row's loss (`row_weights.loss_factors`); rows that could not be read weigh nothing."""
    return {**batch, "row_weight": loss_factors(weights[batch["index"]] * batch.get("is_read", True), epsilon)}


def policy_batches(
    batches: Iterable[Batch], policy_config: PreTrainedConfig, hooks: Sequence[Any] = ()
) -> Iterator[Batch]:
    """Yield what the policy sees: no columns about rows, texts as strings. Raises as `Family.check_batch`."""
    for number, batch in enumerate(batches):
        rows = {key: value for key, value in batch.items() if key in ROW_COLUMNS}
        inputs = with_texts({key: value for key, value in batch.items() if key not in ROW_COLUMNS})
        if number == 0:
            family_of(policy_config).check_batch(inputs, policy_config)
        for hook in hooks:
            hook.on_batch(number, rows, inputs)
        yield inputs


def describe_batch(rows: Rows, dealt: RankSchedule, number: int) -> str:
    """Name a rank's `number`-th micro-batch since its start: its step, and the rows of all ranks in that step."""
    step, size = dealt.step_of(number), dealt.rows_per_step
    listed = rows.in_words(step * size, (step + 1) * size)
    return f"a batch of step {step + 1} on rank {dealt.rank}; rows by `index`: {listed}"
