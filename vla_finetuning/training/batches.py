"""What a training step is given, and what its window of steps amounts to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lerobot.configs.policies import PreTrainedConfig
from lerobot.utils.constants import OBS_LANGUAGE_TOKENS

from util import Batch, Draws, peak_flops
from vla_finetuning.data.columns import IS_PRESENT, RETURN, ROW_COLUMNS
from vla_finetuning.data.per_frame import PerFrame
from vla_finetuning.data.videos import Frames
from vla_finetuning.policies.family import MEAN_COUNT, PolicyLoss
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.policies.texts import with_texts
from vla_finetuning.run.progress import RowsLog
from vla_finetuning.run.row_weights import of_batch
from vla_finetuning.run.rows import Rows
from vla_finetuning.training.stream import Columns, Dealt

# Called with each micro-batch's number, row columns and inputs as it is taken.
OnBatch = Callable[[int, Batch, Batch], None]


def ignore_batch(number: int, rows: Batch, inputs: Batch) -> None:
    """An `OnBatch` that does nothing."""


def collate_cut(
    collate: Callable[[Columns], Batch],
    prompts: tuple[int, ...],
    batch: Columns,
    *,
    weights: np.ndarray | None = None,
    epsilon: float = 0.0,
    returns: PerFrame | None = None,
    features: Callable[[Columns], Columns] | None = None,
    frames: Frames | None = None,
    drop_absent: bool = True,
) -> Batch:
    """Collate a micro-batch with its prompts cut to what the longest needs; on the host, in Ray Data's thread.

    Args:
        prompts: lengths that prompts may have; empty: not cut.
        weights: of all frames, by which the rows' losses are weighed (`Rows.weights`); rows that could not be read
            weigh nothing. epsilon: see `row_weights.of_batch`.
        returns: of all frames, for a value function; a column RETURN.
        features: puts features in place of frames where it has them. frames: fills in those that the batch names.
        drop_absent: leave out cameras that none of the rows has, so that nothing sees them; else they are masked.
    """
    if drop_absent:
        batch = _without_absent(batch)
    if features is not None:
        batch = features(batch)
    if frames is not None:
        batch = frames(batch)
    if weights is not None:
        weight = weights[batch["index"]] * batch.get("is_read", True)
        batch = {**batch, "row_weight": of_batch(weight, epsilon)}
    if returns is not None:
        batch = {**batch, RETURN: returns(batch)}
    return collate(cut_prompts(batch, prompts) if prompts else batch)


def _without_absent(batch: Columns) -> Columns:
    """Without the cameras that no row has; those that all have need no mask (`PrepareRobots`)."""
    masks = {key.removesuffix(IS_PRESENT): key for key in batch if key.endswith(IS_PRESENT)}
    if not masks:
        return batch
    absent = {key for key, mask in masks.items() if not batch[mask].any()}
    whole = {mask for mask in masks.values() if batch[mask].all()}
    dropped = absent | {masks[key] for key in absent} | whole
    return {key: values for key, values in batch.items() if key not in dropped}


class WorkCounter:
    """What this rank's micro-batches amount to, by their shapes, which the host knows without asking the device."""

    def __init__(self, spec: PolicySpec):
        self._spec = spec
        self._tokens = self._flops = 0.0

    def add(self, batch: Batch) -> None:
        spec = self._spec
        if spec.flops_by_prompt:
            rows, prompt = batch[OBS_LANGUAGE_TOKENS].shape
            tokens = family_of(spec.config).tokens(spec.config, spec.cameras, spec.train.noise_draws, prompt)
            self._tokens += rows * tokens
            self._flops += rows * spec.flops_by_prompt[prompt]

    def take(self) -> tuple[float, float]:
        """Positions and FLOPs since this was last asked; zeros where the policy is not known."""
        taken, self._tokens, self._flops = (self._tokens, self._flops), 0.0, 0.0
        return taken


def policy_batches(
    batches: Iterable[Batch],
    policy_config: PreTrainedConfig,
    on_batch: OnBatch = ignore_batch,
) -> Iterator[Batch]:
    """What the policy sees: no row columns, which would cost a copy to the GPU; texts as strings. Checks the first."""
    for number, batch in enumerate(batches):
        rows = {key: value for key, value in batch.items() if key in ROW_COLUMNS}
        inputs = with_texts({key: value for key, value in batch.items() if key not in ROW_COLUMNS})
        if number == 0:
            family_of(policy_config).check_batch(inputs, policy_config)
        on_batch(number, rows, inputs)
        yield inputs


def with_mean_count(
    batches: Iterator[Batch], loss: PolicyLoss, micros: int, micros_of_all: int, world: int
) -> Iterator[Batch]:
    """This rank's micro-batches of a step, each told what their loss is divided by on average, over all ranks.

    Reads nothing from the device. Every rank must call it, once for each step.

    Args:
        micros: of this rank in this step. micros_of_all: of all ranks.
    """
    of_step = list(itertools.islice(batches, micros))
    count = torch.stack([loss.count(batch) for batch in of_step]).sum().to(torch.float32)
    if world > 1:
        dist.all_reduce(count)
    mean = count.clamp_min(1) / micros_of_all
    return ({**batch, MEAN_COUNT: mean} for batch in of_step)


def record_rows(log: RowsLog, rows: Rows, dealt: Dealt, number: int, columns: Batch) -> None:
    """Write the rows of a rank's `number`-th micro-batch into its log."""
    found = {key: column.numpy() for key, column in columns.items()}
    skipped = found.get("is_skipped", np.zeros(len(found["index"]), bool))
    epochs = rows.epochs_of(found["position"])
    log.write(dealt.step_of(number) + 1, epochs, found["dataset_index"], found["index"], skipped)


def noise_for(spec: PolicySpec, step: int, dealt: Dealt, device: torch.device) -> Callable[[int], Draws]:
    """Noise and time for this rank's rows of each micro-step.

    Drawn for the whole global batch and indexed by a row's place in it, so the trajectory of a run does not depend on
    how many workers share its batch. A row's draws follow each other.
    """
    per_row, seed = spec.train.noise_draws, spec.seed
    rows = dealt.rows_per_step * per_row
    noise, time = family_of(spec.config).draw(spec.config, rows, seed, step, device)
    if noise is None or time is None:
        # Other policies draw their own, from the default generators.
        torch.manual_seed(seed * 1_000_003 + step * dealt.world + dealt.rank)
        return lambda micro: (None, None)

    def draws(nth: int) -> Draws:
        # Block by block: indexing with a list of rows would have the host wait for the device.
        starts = dealt.rows_of_step(step, nth)[:: dealt.block_rows].tolist()
        blocks = [slice(start * per_row, (start + dealt.block_rows) * per_row) for start in starts]
        return torch.cat([noise[block] for block in blocks]), torch.cat([time[block] for block in blocks])

    return draws


def mfu(metrics: Mapping[str, Any], world: int, device: torch.device) -> float | None:
    """Model FLOP utilisation of a log window; None where the policy or the hardware is not known."""
    flops_per_s, peak = metrics["flops_per_s"], peak_flops(device)
    return flops_per_s / (world * peak) if flops_per_s and peak else None


def check_finite(
    rows: Rows, rows_per_step: int, limit: int, metrics: Mapping[str, Any], nonfinite: int, done: int
) -> None:
    """End a run that keeps producing losses or gradients that are not finite, and name the rows it was trained on.

    Args:
        limit: --train.max_nonfinite. metrics: of the window of steps that ends with the `done`-th.
        nonfinite: such steps since the worker group was started, this window's among them.
    """
    if nonfinite <= limit or not metrics["nonfinite_steps"]:
        return
    steps = metrics["samples"] // rows_per_step
    window = rows.in_words((done - steps) * rows_per_step, done * rows_per_step)
    raise FloatingPointError(
        f"{nonfinite} steps had a loss or gradient that is not finite, {metrics['nonfinite_steps']} of them among the "
        f"last {steps} (more than --train.max_nonfinite={limit}; they were skipped): lower --lr, or look for bad "
        f"values in the state and action columns of the rows of these steps, by `index`: {window}"
    )


def what_batch(rows: Rows, dealt: Dealt, number: int) -> str:
    """A rank's `number`-th micro-batch since its start, in words: its step, and the rows of all ranks in that step."""
    step, size = dealt.step_of(number), dealt.rows_per_step
    found = rows.in_words(step * size, (step + 1) * size)
    return f"a batch of step {step + 1} on rank {dealt.rank}; rows by `index`: {found}"
