"""Compute a trained value function on every frame of a run's datasets, in a pass of Ray Data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from lerobot_datasource import read_source
from util import NumpyToTorchCollate
from vla_finetuning.columns import ROW_COLUMNS
from vla_finetuning.plan.resolve import Run
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.policies.value import ValueLoss
from vla_finetuning.run.checkpoint import load_checkpoint
from vla_finetuning.training.model import build_model, check_attention, make_prepare
from vla_finetuning.training.stream import LazyPickle

Columns = dict[str, np.ndarray]


class Judge:
    """A Ray Data actor that holds the value function of a checkpoint.

    It computes batches of `rows` rows, fills up the last one, and pads prompts to one length. The values of a block are
    then bit for bit the same in every process.
    """

    def __init__(self, spec: PolicySpec, checkpoint: Path, rows: int, use_gpu: bool):
        torch.set_num_threads(1)
        device = torch.device("cuda" if use_gpu else "cpu")
        loss, self._autocast = build_model(spec, device)
        assert isinstance(loss, ValueLoss)
        check_attention(spec, loss, device, self._autocast)
        load_checkpoint(checkpoint, {name: p for name, p in loss.named_parameters() if p.requires_grad})
        self._loss, self._device, self._rows, self._prompts = loss.eval(), device, rows, spec.prompts[-1:]
        self._collate = NumpyToTorchCollate(use_gpu)

    def __call__(self, block: Columns) -> Columns:
        count = len(block["index"])
        columns = {key: value for key, value in block.items() if key not in ROW_COLUMNS}
        if self._prompts:
            columns = cut_prompts(columns, self._prompts)
        values = []
        for first in range(0, count, self._rows):
            places = np.minimum(np.arange(first, first + self._rows), count - 1)
            values.append(self._values({key: value[places] for key, value in columns.items()}))
        places = {key: block[key] for key in ("dataset_index", "index")}
        return {**places, "value": np.concatenate(values)[:count]}

    def _values(self, columns: Columns) -> np.ndarray:
        inputs = {key: value.to(self._device, non_blocking=True) for key, value in self._collate(columns).items()}
        with torch.no_grad(), torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            return self._loss.value(inputs).float().cpu().numpy()


def judge_frames(run: Run, checkpoint: Path) -> list[np.ndarray]:
    """Return the value of each frame, float32 (F,) for each dataset, NaN in episodes that the run leaves out."""
    rows, scaling = run.rows, run.job.scaling
    prepare = make_prepare(run.policy, rows)
    row_bytes = sum(column.nbytes for column in prepare(rows.source().example()).values())
    source = rows.in_stored_order(LazyPickle(prepare), row_bytes)
    resources: dict[str, Any] = {"num_gpus": 1} if run.job.use_gpu else {"num_cpus": scaling.cpus_per_worker}
    judged = read_source(source).map_batches(
        Judge,
        fn_constructor_args=(run.policy, checkpoint, run.job.batch_size, run.job.use_gpu),
        batch_size=None,  # blocks as the source cuts them, so that the number of processes changes nothing
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=scaling.num_workers),
        **resources,
    )
    judged.context.enable_progress_bars = False
    values = [np.full(meta.total_frames, np.nan, np.float32) for meta in rows.metas]
    for batch in judged.iter_batches(batch_size=None, batch_format="numpy"):
        for number in np.unique(batch["dataset_index"]).tolist():
            in_dataset = batch["dataset_index"] == number
            values[number][batch["index"][in_dataset]] = batch["value"][in_dataset]
    return values
