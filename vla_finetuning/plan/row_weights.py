"""Weigh rows in the loss by reward-aligned behaviour cloning (RA-BC), as `lerobot-train --sample_weighting.*`.

A reward model has estimated each frame's progress in its task (LeRobot's `rewards/sarm`). A row's weight depends on the
progress until the end of its action chunk: 1 above kappa, 0 for a loss of progress, and in between linear within two
standard deviations of the mean. Follows LeRobot 0.6.1 (`RABCWeights`, `update_policy`), per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from lerobot.configs.policies import PreTrainedConfig

from vla_finetuning.data.hub import explaining_errors
from vla_finetuning.data.limits import MAX_DATA_BYTES
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.parquet_columns import numbers
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.files import file_digest
from vla_finetuning.options.programs import Config
from vla_finetuning.options.sample_weighting import SampleWeightingOptions
from vla_finetuning.policies.registry import family_of, types_that

# Name of the file that LeRobot's reward model writes into a dataset's folder.
PROGRESS_NAME = "sarm_progress.parquet"
HUB = "hf://datasets/"
# LeRobot adds this to the sum of a batch's weights before it divides by the sum.
EPSILON = 1e-6


def row_weights(
    config: Config, metas: Sequence[DatasetMetadata], policy_config: PreTrainedConfig, step: int
) -> tuple[np.ndarray, str] | None:
    """Return each frame's weight before normalisation over its micro-batch, float32 (frames,), and the file's digest.

    `step` is the number of frames between two actions of a chunk. None for equal weights. Raises ValueError if the
    policy's loss is not per row, there are several datasets, or the file is of another form.
    """
    options = config.sample_weighting
    if options.type in (None, "uniform"):
        return None
    if not family_of(policy_config).row_losses:
        raise ValueError(
            f"--sample_weighting.type={options.type} needs a loss by rows, which "
            f"{types_that(lambda family: family.row_losses)} have; the policy is of type {policy_config.type}. "
            "--dataset.episode_weights weighs episodes for every policy"
        )
    if len(metas) > 1:
        raise ValueError(
            f"--sample_weighting.type={options.type}: its file knows frames by their index in one dataset, and there "
            f"are {len(metas)}; name one dataset, or weigh episodes of all by --dataset.episode_weights"
        )
    path = _progress_file(config, metas[0])
    budget, column = Budget("frames", MAX_DATA_BYTES), f"progress_{options.head_mode}"
    with open_parquet(LocalFileSystem(), str(path)) as file:
        names = ["index", "episode_index", column]
        if missing := sorted(set(names) - set(file.schema_arrow.names)):
            raise ValueError(f"{path} lacks the columns {missing}; it has {file.schema_arrow.names!s:.300}")
        rows = read_columns(file, names, budget)
    index, episode = (numbers(rows[n], np.int64, (1,), f"{path}: column {n}").reshape(-1) for n in names[:2])
    frames = metas[0].total_frames
    if len(index) and not 0 <= index.min() <= index.max() < frames:
        raise ValueError(f"{path}: frame {index.max()} is not in {metas[0].root}, which has {frames}: of another one?")
    progress = rows[column].cast("float64").to_numpy()
    if (infinite := np.isinf(progress)).any():
        raise ValueError(
            f"{path}: {column} of frame {index[infinite.argmax()]} is infinite, expected a number, or NaN if it is "
            "unknown; write the file again"
        )
    weights = rabc_weights(index, episode, progress, frames, policy_config.chunk_size * step, options)
    return weights, file_digest(path)


def _progress_file(config: Config, meta: DatasetMetadata) -> Path:
    """Return the file with the progress of every frame, by lerobot-train's default if no flag names it."""
    path, repo_id = config.sample_weighting.progress_path, config.dataset.repo_id
    if path is None:
        path = f"{HUB}{repo_id}/{PROGRESS_NAME}" if repo_id else f"{meta.root}/{PROGRESS_NAME}"
    if path.startswith(HUB) and path.removeprefix(HUB).count("/") >= 2:
        user, name, file = path.removeprefix(HUB).split("/", 2)
        revision = config.dataset.revision if f"{user}/{name}" == repo_id else None
        with explaining_errors(f"{user}/{name}", revision, "dataset"), suppress(RemoteEntryNotFoundError):
            return Path(hf_hub_download(f"{user}/{name}", file, repo_type="dataset", revision=revision))
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path}: no such file; --sample_weighting.progress_path names a parquet file of this machine or "
            f"{HUB}USER/NAME/FILE, which LeRobot's `python -m lerobot.rewards.sarm.compute_rabc_weights` writes"
        )
    return Path(path)


def rabc_weights(
    index: np.ndarray,
    episode: np.ndarray,
    progress: np.ndarray,
    frames: int,
    reach: int,
    options: SampleWeightingOptions,
) -> np.ndarray:
    """Compute the weights of all frames of a dataset from the progress of N frames.

    Args:
        index, episode: int64 (N,), frame in the dataset and episode.
        progress: float64 (N,), NaN if unknown.
        reach: progress is compared with the frame this much later, or with the episode's last one in `index`.
    """
    frame_progress, ahead = np.full(frames, np.nan), np.zeros(frames, np.int64)
    frame_progress[index] = progress
    _, inverse = np.unique(episode, return_inverse=True)
    last = np.zeros(len(index), np.int64)
    np.maximum.at(last, inverse, index)
    ahead[index] = np.minimum(index + reach, last[inverse])
    gained = frame_progress[ahead] - frame_progress
    finite = ~np.isnan(gained)
    mean = max(float(gained[finite].mean()), 0.0) if finite.any() else 0.0
    deviation = max(float(gained[finite].std()), options.epsilon) if finite.any() else options.epsilon
    gained = gained.astype(np.float32)
    soft = np.clip((gained - (mean - 2 * deviation)) / (4 * deviation + options.epsilon), 0, 1)
    weights = np.where(gained > options.kappa, 1, np.where(gained >= 0, soft, 0))
    return np.where(finite, weights, options.extra_params.get("fallback_weight", 1.0)).astype(np.float32)


def loss_factors(weights: np.ndarray, epsilon: float) -> np.ndarray:
    """Return factors for the losses of a batch, float32 (B,), that make its mean weighted by `weights`, (B,)."""
    sum_to_rows = weights * np.float32(len(weights)) / (weights.sum() + np.float32(epsilon))
    return sum_to_rows * np.float32(len(weights)) / (sum_to_rows.sum() + np.float32(EPSILON))
