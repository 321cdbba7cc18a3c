"""Feed a rank's micro-batches from the stream of rows to the policy.

On the host, transforms change the numpy columns of a micro-batch in Ray Data's prefetching thread. The columns become
tensors and are copied to the device. The policy gets them without the columns that identify rows.
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
from vla_finetuning.plan.resolve import Run
from vla_finetuning.plan.row_weights import loss_factors
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.policies.texts import with_texts
from vla_finetuning.training.stream import Columns, RankSchedule, stream_batches, with_timeout
from vla_finetuning.training.worker import Worker

# Changes the numpy columns of a micro-batch on the host. Several threads may call it.
HostTransform = Callable[[Columns], Columns]


def feed(
    run: Run,
    worker: Worker,
    schedule: RankSchedule,
    first_row: int,
    *,
    hooks: Sequence[Any] = (),
    to_tensors: NumpyToTorchCollate | None = None,
    clock: Clock = UNWATCHED,
) -> TimedIterator:
    """Return this rank's micro-batches on its device, from stream position `first_row` to the run's end.

    Fetching begins immediately. `hooks` are callbacks of the loop (`state.Callback`). The batches raise TimeoutError
    when none arrives within VLA_BATCH_TIMEOUT_S.
    """
    rows, policy = run.rows, run.policy
    transforms = [*input_transforms(rows, policy), *training_transforms(run)]
    collate = Collate(transforms, to_tensors or NumpyToTorchCollate(worker.device.type == "cuda"))
    host_batches = stream_batches(worker.shard, schedule, first_row, run.job.steps, collate)
    in_time = with_timeout(host_batches, run.job.timeouts.batch, partial(describe_batch, rows, schedule))
    to_policy = partial(policy_batches, policy_config=policy.config, hooks=hooks)
    return TimedIterator(cuda_prefetcher(in_time, worker.device, clock), then=to_policy)


@dataclass(frozen=True)
class Collate:
    """Apply `transforms` in order to a micro-batch's numpy columns, and make CPU tensors of them."""

    transforms: Sequence[HostTransform]
    to_tensors: Callable[[Columns], Batch]

    def __call__(self, columns: Columns) -> Batch:
        for transform in self.transforms:
            columns = transform(columns)
        return self.to_tensors(columns)


def input_transforms(rows: Rows, policy: PolicySpec) -> list[HostTransform]:
    """Return the transforms from prepared rows to inputs of a loss, for training rows and held-out rows."""
    transforms: list[HostTransform] = []
    if not policy.train.compile:  # each combination of cameras would be compiled
        transforms.append(drop_absent_cameras)
    if (returns := rows.returns) is not None:  # the target of a value function
        transforms.append(lambda batch: {**batch, RETURN: returns(batch)})
    if policy.prompts:
        transforms.append(partial(cut_prompts, lengths=policy.prompts))
    return [*transforms, family_of(policy.config).micro_batch]


def training_transforms(run: Run) -> list[HostTransform]:
    """Return the further transforms of training rows, which add the weights of their losses."""
    weights, epsilon = run.rows.weights, run.config.sample_weighting.epsilon
    return [] if weights is None else [partial(weigh_rows, weights=weights, epsilon=epsilon)]


def drop_absent_cameras(batch: Columns) -> Columns:
    """Remove cameras that no row has, and masks of cameras that all rows have (`PrepareRobots`)."""
    masks = {key.removesuffix(IS_PRESENT): key for key in batch if key.endswith(IS_PRESENT)}
    if not masks:
        return batch
    absent = {key for key, mask in masks.items() if not batch[mask].any()}
    complete = {mask for mask in masks.values() if batch[mask].all()}
    dropped = absent | {masks[key] for key in absent} | complete
    return {key: values for key, values in batch.items() if key not in dropped}


def weigh_rows(batch: Columns, weights: np.ndarray, epsilon: float) -> Columns:
    """Add the weight of each row's loss (`row_weights.loss_factors`); 0 for rows that could not be read."""
    return {**batch, "row_weight": loss_factors(weights[batch["index"]] * batch.get("is_read", True), epsilon)}


def policy_batches(
    batches: Iterable[Batch], policy_config: PreTrainedConfig, hooks: Sequence[Any] = ()
) -> Iterator[Batch]:
    """Yield the policy's inputs: no columns that identify rows, texts as strings. Raises as `Family.check_batch`."""
    for number, batch in enumerate(batches):
        rows = {key: value for key, value in batch.items() if key in ROW_COLUMNS}
        inputs = with_texts({key: value for key, value in batch.items() if key not in ROW_COLUMNS})
        if number == 0:
            family_of(policy_config).check_batch(inputs, policy_config)
        for hook in hooks:
            hook.on_batch(number, rows, inputs)
        yield inputs


def describe_batch(rows: Rows, schedule: RankSchedule, number: int) -> str:
    """Describe a rank's `number`-th micro-batch since its start: its step, and the rows of all ranks in that step."""
    step, size = schedule.step_of(number), schedule.rows_per_step
    listed = rows.in_words(step * size, (step + 1) * size)
    return f"a batch of step {step + 1} on rank {schedule.rank}; rows by `index`: {listed}"
