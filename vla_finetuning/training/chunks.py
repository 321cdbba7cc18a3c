"""Read normalised action chunks of a run, to fit a tokenizer of actions and to describe tokens in the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import UnnormalizerProcessorStep
from lerobot.utils.constants import ACTION

from lerobot_datasource import LeRobotDatasource, read_source
from vla_finetuning.columns import IS_SKIPPED
from vla_finetuning.data.dataset import known_episodes
from vla_finetuning.data.metadata import DatasetMetadata, dimension_names
from vla_finetuning.data.options import Features, Reading, Selection
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.plan.resolve import Run
from vla_finetuning.plan.rows import Rows
from vla_finetuning.plan.statistics import with_placeholders
from vla_finetuning.policies.action_tokens import VOCABULARY, ActionTokenizer, describe_tokens, fetch_tokenizer
from vla_finetuning.policies.family import Chunks, Family
from vla_finetuning.policies.registry import family_of, train_as
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.checkpoint import latest_checkpoint
from vla_finetuning.training.model import make_prepare
from vla_finetuning.training.stream import Columns, LazyPickle

# Rows that a family is fitted to: the first of the shuffled stream.
FITTED_ROWS = 20_000
# Rows of the sample in the plan, and episodes of each dataset.
LOOK_ROWS, LOOK_EPISODES = 2_000, 25
ROW_BYTES = 16_384


def read_chunks(run: Run) -> list[Chunks]:
    """Read the first chunks of a run's stream, which may end before them, by Ray Data, and return them by robot."""
    rows = _without_cameras(run.rows)
    prepare = LazyPickle(make_prepare(run.policy, rows))
    source = rows.source((0, min(FITTED_ROWS, rows.per_epoch)), prepare, ROW_BYTES)
    batches = list(read_source(source).iter_batches(batch_size=None))
    keys = {ACTION, "dataset_index", IS_SKIPPED} & batches[0].keys()
    return _by_robot(run.policy, rows, {key: np.concatenate([batch[key] for batch in batches]) for key in keys})


def sample_chunks(run: Run) -> list[Chunks]:
    """Read chunks of a few episodes in this process without Ray, and return them by robot.

    Chunks of a robot without statistics are scaled by quantiles of the sample.
    """
    rows = _without_cameras(run.rows)
    some = tuple(episodes[evenly_spaced(len(episodes), LOOK_EPISODES)] for episodes in rows.train_episodes)
    source = replace(rows, train_episodes=some, eval_episodes=tuple(e[:0] for e in some)).in_stored_order()
    positions = evenly_spaced(source.plan.rows_per_epoch, LOOK_ROWS)
    (batch,) = source.read_rows(positions.tolist(), len(positions))

    policy = replace(run.policy, robots=tuple(with_placeholders(robot, rows.metas) for robot in run.robots))
    sampled = _by_robot(policy, rows, make_prepare(policy, rows)(batch))
    return [
        _scaled(chunks) if robot.missing_stats and len(chunks.values) else chunks
        for robot, chunks in zip(run.robots, sampled, strict=True)
    ]


def fitted(run: Run, read: Callable[[Run], list[Chunks]]) -> Family:
    """Return the policy's family fitted to chunks that `read` returns, or to those of an earlier start."""
    # Before the first checkpoint, options and rows may change.
    started = latest_checkpoint(run.job.checkpoints_dir) is not None
    return family_of(run.policy.config).fit_to_rows(lambda: read(run), run.job.output_dir if started else None)


def fit_to_rows(run: Run) -> Run:
    """Fit the policy's family to the run's rows in a Ray Data pass, and return the run."""
    config, family = run.policy.config, fitted(run, read_chunks)
    if family is not family_of(config):
        family.save_fitted(run.job.output_dir)
        for changed in (config, *(robot.config for robot in run.robots)):
            train_as(changed, family)
    return run


def describe_tokens_of(meta: DatasetMetadata, name: str, chunk_size: int) -> list[str]:
    """Return lines on tokens of a few episodes of a dataset, by the tokenizer `name` (--train.action_tokenizer)."""
    windows = {ACTION: [step / meta.fps for step in range(chunk_size)]}
    features = Features(camera_keys=[], columns=[ACTION], delta_timestamps=windows)
    known = known_episodes(meta)
    some = Selection(episodes=[known[evenly_spaced(len(known), LOOK_EPISODES)]])
    source = LeRobotDatasource([meta], some, features, reading=Reading(check_files=False))
    positions = evenly_spaced(source.plan.rows_per_epoch, LOOK_ROWS)
    (batch,) = source.read_rows(positions.tolist(), len(positions))
    names, width = tuple(dimension_names(meta, ACTION)), batch[ACTION].shape[-1]
    chunks = _scaled(Chunks(batch[ACTION], np.zeros(width), np.ones(width), names))
    if name == "fit":
        return describe_tokens(ActionTokenizer.fit(chunks.values, VOCABULARY), [chunks])
    return describe_tokens(ActionTokenizer.load(fetch_tokenizer(name)), [chunks])


def _without_cameras(rows: Rows) -> Rows:
    features = replace(rows.features, camera_keys=())
    # Rows without cameras have other positions in the stream: none may be logged as skipped by the run.
    return replace(rows, features=features, reading=replace(rows.reading, skip_log=None))


def _by_robot(policy: PolicySpec, rows: Rows, columns: Columns) -> list[Chunks]:
    chunks = columns[ACTION]
    is_read = ~columns.get(IS_SKIPPED, np.zeros(len(chunks), bool))
    return [
        Chunks(
            chunks[is_read & np.isin(columns["dataset_index"], robot.datasets)],
            *_ends(policy.select_robot(robot), robot.widths[ACTION]),
            tuple(dimension_names(rows.metas[robot.datasets[0]], ACTION)),
            robot.label,
        )
        for robot in policy.robots
    ]


def _ends(policy: PolicySpec, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Unnormalise 0 and 1 to a robot's units, float64 (width,) each."""
    _, postprocessor = policy.processors()
    step = next(step for step in postprocessor.steps if isinstance(step, UnnormalizerProcessorStep))
    zero, one = (step({TransitionKey.ACTION: torch.full((width,), value)}) for value in (0.0, 1.0))
    return zero[TransitionKey.ACTION].double().numpy(), one[TransitionKey.ACTION].double().numpy()


def _scaled(chunks: Chunks) -> Chunks:
    """Scale chunks so that quantiles of 1 and 99 % of the actions are -1 and 1; entries of padding become 0."""
    actions, values = chunks.actions, np.zeros(chunks.values.shape, np.float32)
    low, high = np.quantile(actions, (0.01, 0.99), axis=(0, 1))
    zero, half = (low + high) / 2, np.where(high > low, (high - low) / 2, 1)
    values[..., : len(zero)] = (actions - zero) / half
    return replace(chunks, values=values, zero=zero, one=zero + half)
