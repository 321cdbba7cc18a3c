"""Action chunks of a run's rows as its policy learns them, for what a family fits to them and the plan says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import UnnormalizerProcessorStep
from lerobot.utils.constants import ACTION

from lerobot_datasource import LeRobotDatasource, read_source
from vla_finetuning.columns import ROBOT
from vla_finetuning.data.metadata import DatasetMetadata, dimension_names
from vla_finetuning.data.options import Features, Reading, Selection
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.plan.resolve import Run
from vla_finetuning.plan.rows import Rows
from vla_finetuning.plan.statistics import widen_ranges, with_placeholders
from vla_finetuning.policies.action_tokens import ActionTokenizer, fetch_tokenizer
from vla_finetuning.policies.families.insulation import VOCABULARY, describe_tokens
from vla_finetuning.policies.family import Chunks
from vla_finetuning.policies.processors import required_stats
from vla_finetuning.policies.registry import family_of, train_as
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.training.model import make_prepare
from vla_finetuning.training.stream import Columns, LazyPickle

# What a family learns of a run's rows, it learns of these: the first of the stream, which is shuffled.
FITTED_ROWS = 20_000
# What the plan says of them is of so many rows and episodes of each dataset.
LOOK_ROWS, LOOK_EPISODES = 2_000, 25
# Of a row without cameras, about.
ROW_BYTES = 16_384


def read_chunks(run: Run) -> list[Chunks]:
    """Return the first chunks of a run's stream, of each robot, in a Ray Data pass; always the same ones."""
    rows = _without_cameras(run.rows)
    prepare = LazyPickle(make_prepare(run.policy, rows))
    source = rows.source((0, min(FITTED_ROWS, rows.per_epoch, rows.last_row)), prepare, ROW_BYTES)
    batches = list(read_source(source).iter_batches(batch_size=None))
    columns = {key: np.concatenate([batch[key] for batch in batches]) for key in {ACTION, ROBOT} & batches[0].keys()}
    return _by_robot(run.policy, rows, columns)


def sample_chunks(run: Run) -> list[Chunks]:
    """Return chunks of a few episodes, of each robot, read in this process without Ray.

    Where statistics are yet to be computed, actions are normalised by those of the sample.
    """
    rows = _without_cameras(run.rows)
    some = tuple(episodes[evenly_spaced(len(episodes), LOOK_EPISODES)] for episodes in rows.train_episodes)
    source = replace(rows, train_episodes=some, eval_episodes=tuple(e[:0] for e in some)).in_stored_order()
    positions = evenly_spaced(source.plan.rows_per_epoch, LOOK_ROWS)
    (batch,) = source.read_rows(positions.tolist(), len(positions))

    def chunks(robots: Sequence[Robot]) -> list[Chunks]:
        policy = replace(run.policy, robots=tuple(robots))
        return _by_robot(policy, rows, make_prepare(policy, rows)(batch))

    sampled = chunks([with_placeholders(robot, rows.metas) for robot in run.robots])
    if not any(robot.missing_stats for robot in run.robots):
        return sampled
    return chunks([_estimated(robot, rows, own.actions) for robot, own in zip(run.robots, sampled, strict=True)])


def fit_to_rows(run: Run) -> Run:
    """Return the run with what its policy's family learns of its rows before training, in a Ray Data pass."""
    config = run.policy.config
    family = family_of(config).fit_to_rows(lambda: read_chunks(run), run.job.output_dir)
    if family is not family_of(config):
        for changed in (config, *(robot.config for robot in run.robots)):
            train_as(changed, family)
    return run


def describe_chunks(run: Run) -> list[str]:
    """Return the plan's lines of what the policy's family makes of action chunks, by a sample of the run's rows."""
    return family_of(run.policy.config).describe_chunks(lambda: sample_chunks(run))


def describe_tokens_of(meta: DatasetMetadata, name: str, chunk_size: int) -> list[str]:
    """Return lines on a dataset's action chunks as tokens (`name`: --train.action_tokenizer): of a few episodes."""
    windows = {ACTION: [step / meta.fps for step in range(chunk_size)]}
    features = Features(camera_keys=[], columns=[ACTION], delta_timestamps=windows)
    some = [evenly_spaced(meta.num_episodes, LOOK_EPISODES)]
    source = LeRobotDatasource([meta], Selection(episodes=some), features, reading=Reading(check_files=False))
    positions = evenly_spaced(source.plan.rows_per_epoch, LOOK_ROWS)
    (batch,) = source.read_rows(positions.tolist(), len(positions))
    low, high = np.quantile(batch[ACTION].astype(np.float64), (0.01, 0.99), axis=(0, 1))
    zero, half = (low + high) / 2, np.where(high > low, (high - low) / 2, 1)
    chunks = Chunks((batch[ACTION] - zero) / half, zero, zero + half, tuple(dimension_names(meta, ACTION)))
    if name == "fit":
        return describe_tokens(ActionTokenizer.fit(chunks.values, VOCABULARY), [chunks])
    return describe_tokens(ActionTokenizer.load(fetch_tokenizer(name)), [chunks])


def _without_cameras(rows: Rows) -> Rows:
    return replace(rows, features=replace(rows.features, camera_keys=()))


def _by_robot(policy: PolicySpec, rows: Rows, columns: Columns) -> list[Chunks]:
    chunks = columns[ACTION]
    robot_of_row = columns.get(ROBOT, np.zeros(len(chunks), np.int64))
    return [
        Chunks(
            chunks[robot_of_row == number],
            *_ends(policy.select_robot(robot), robot.widths[ACTION]),
            tuple(dimension_names(rows.metas[robot.datasets[0]], ACTION)),
            robot.label,
        )
        for number, robot in enumerate(policy.robots)
    ]


def _ends(policy: PolicySpec, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what 0 and 1 of a robot's normalised actions are in its own units, float64 (width,) each."""
    _, postprocessor = policy.processors()
    step = next(step for step in postprocessor.steps if isinstance(step, UnnormalizerProcessorStep))
    zero, one = (step({TransitionKey.ACTION: torch.full((width,), value)}) for value in (0.0, 1.0))
    return zero[TransitionKey.ACTION].double().numpy(), one[TransitionKey.ACTION].double().numpy()


def _estimated(robot: Robot, rows: Rows, actions: np.ndarray) -> Robot:
    """Return the robot with statistics of a sample of its actions, float64 (N, T, A), where it lacks any."""
    if not robot.missing_stats:
        return robot
    robot, values = with_placeholders(robot, rows.metas), actions.reshape(-1, actions.shape[-1])
    quantiles: Mapping[str, float] = {"min": 0, "q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99, "max": 1}
    stats = {name: np.quantile(values, share, axis=0) for name, share in quantiles.items()}
    stats |= {"mean": values.mean(axis=0), "std": values.std(axis=0)}
    needed = required_stats(robot.config, {ACTION: robot.config.output_features[ACTION]})
    return replace(robot, stats=widen_ranges(dict(robot.stats or {}) | {ACTION: stats}, needed))
