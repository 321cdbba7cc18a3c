"""Read demonstrations, the rows of a dataset that are half of each minibatch of filtered imitation.

The rows are a stream in the plan's shuffled order, each once per epoch of the dataset. An update reads as many rows as
it has decisions; checkpoints store the position in the stream (`Progress.rows`).

Legend: T chunk, A action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vla_finetuning.columns import ROW_COLUMNS
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.training.held_out import fetch_ahead, read_task
from vla_finetuning.training.model import make_prepare
from vla_finetuning.training.stream import Columns

# Takes the stream positions of micro-batches; yields the rows of each, prepared for the policy.
Read = Callable[[Sequence[np.ndarray]], Iterator[Columns]]


def resolve_demonstrations(config: GrpoConfig, root: str) -> Rows:
    """Find the dataset. Raises ValueError or FileNotFoundError if it is missing or does not fit the policy."""
    training = config.training()
    # The policy's own processors and statistics apply, so the dataset's statistics need not be exact.
    training.dataset = DatasetOptions(root=root, statistics="lerobot", missing_cameras="mask")
    features = load_metadata(root).features  # of which the environment's names may be none
    training.rename_map = {key: name for key, name in config.rename_map.items() if key in features}
    training.steps = training.batch_size = training.scaling.num_workers = 1  # the decisions decide how many are read
    return resolve(training, gpus_found=0).rows


def task_reader(rows: Rows, policy: PolicySpec, timeout_s: float) -> Read:
    """Return a reader in Ray tasks, which hold no CPU: idle simulators hold all of them while the policy learns."""
    read = read_task(rows.source(), make_prepare(policy, rows), num_cpus=0)
    return lambda micros: fetch_ahead(map(read, micros), timeout_s, "rows of --grpo.demonstrations", ahead=2)


def split_positions(first: int, count: int, *, rank: int, ranks: int, micro_rows: int) -> list[np.ndarray]:
    """Return this rank's share of stream rows `first` to `first + count`, as positions of each micro-batch.

    All ranks have equally many micro-batches; the last ones may be empty.
    """
    largest = -(-count // ranks)
    return np.array_split(np.arange(first + rank, first + count, ranks), -(-largest // micro_rows))


def as_batch(columns: Columns) -> dict[str, Tensor]:
    """Convert prepared rows to the loss's batch; `action_is_pad`, bool (N, T), is false: padded steps count."""
    batch = {key: torch.from_numpy(np.ascontiguousarray(v)) for key, v in columns.items() if key not in ROW_COLUMNS}
    batch["action_is_pad"] = torch.zeros(batch["action"].shape[:2], dtype=torch.bool)
    return batch
