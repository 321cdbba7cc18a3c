"""Describe the plan of a run as text, for `--dry_run` and the report."""

from __future__ import annotations

import numpy as np

from lerobot_datasource import SEGMENT_ROWS
from vla_finetuning.buckets.mirror import address
from vla_finetuning.data.disk_cache import describe_numbers
from vla_finetuning.data.shards import Plan
from vla_finetuning.options.dataset import describe_image_size
from vla_finetuning.options.environment import describe_trial
from vla_finetuning.options.policy import RELATIVE_PLAYED_BY
from vla_finetuning.options.programs import Config
from vla_finetuning.options.sample_weighting import describe_weights
from vla_finetuning.options.schedule import REHEARSAL_ROWS_PER_S
from vla_finetuning.plan.mixture_look import tabulate
from vla_finetuning.plan.names import own_names
from vla_finetuning.plan.resolve import Run
from vla_finetuning.plan.rows import Rows
from vla_finetuning.plan.statistics import absolute_dimensions, relative_actions
from vla_finetuning.policies.augment import WRIST
from vla_finetuning.policies.family import MAX_DELAY
from vla_finetuning.policies.own_names import describe_names
from vla_finetuning.policies.registry import describe_unproven
from vla_finetuning.policies.remote_code import code_source
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.terminal import escaped

# Number of batches over which episodes are counted.
BATCHES = 32


def describe(run: Run) -> str:
    """Return the plan as text: datasets, policy, mapping of features, batches and steps, checkpoints."""
    config, job, rows, policy = run.config, run.job, run.rows, run.policy
    cache, positive = rows.reading.frame_cache, rows.positive_share
    lines = [
        *_datasets(config, rows),
        *_indented("Mixture", _mixture(run)),
        *_indented("Statistics", [f"{robot.label}{line}" for robot in policy.robots for line in robot.statistics]),
        *_policy(config, policy),
        *_features(run),
        *(f"Note         {note}" for note in run.notes),
        *describe_image_size(rows.image_size, rows.rates["decoded_bytes_per_s"]),
        *config.train.describe_augmentation(
            config.dataset.image_transforms, [key for key in policy.config.image_features if WRIST in key]
        ),
        *config.dataset.describe_cached_frames(
            cache.folder if cache else None,
            rows.cached_bytes,
            "on every node" if rows.order.sharding is None else "on each node those of its shard",
            rows.last_row > rows.per_epoch,
        ),
        describe_numbers(),
        *_steps(config, job.steps, rows),
        *_indented("Learning", policy.recipe.describe(job.steps)),
        *_shuffling(config, rows),
        *([] if rows.weights is None else describe_weights(rows.weights)),
        *([] if positive is None else config.recap.describe(positive)),
        *config.ema.describe(),
        *_held_out(config, rows),
        config.describe_best(address(job.checkpoints_dir)),
        *describe_trial(config, config.eval, config.env_eval_freq),
        *config.scaling.describe(job.use_gpu, config.train.precision),
    ]
    return "\n".join(map(escaped, lines))


def _datasets(config: Config, rows: Rows) -> list[str]:
    lines, dropped = [], rows.dropped
    for number, meta in enumerate(rows.metas):
        lines += [
            f"Dataset      {config.dataset.repo_id or meta.root}" + _revision(config.dataset.revision),
            f"             {meta.total_episodes} episodes, {meta.total_frames} frames at {meta.fps} fps"
            + (f", robot {meta.robot_type}" if meta.robot_type else ""),
            f"             trains on {len(rows.train_episodes[number])} episodes, {rows.per_dataset[number]} frames; "
            f"{len(rows.eval_episodes[number])} held out",
            *(
                [f"             the last {dropped} frames of each training episode are not trained on"]
                if dropped
                else []
            ),
            *([f"             {line}" for line in rows.described[number]] if rows.described else []),
            f"             {len(meta.tasks)} tasks: "
            + "; ".join(repr(t) for t in list(meta.tasks.values())[:4])
            + (" ..." if len(meta.tasks) > 4 else ""),
        ]
        for key, feature in meta.features.items():
            if feature.order is not None:
                lines.append(f"             {key}: dimensions reordered as in the first dataset, by their names")
        for key in meta.camera_keys:
            feature, name = meta.features[key], own_names(meta).get(key, key)
            used = "" if key in rows.camera_keys else "  (not used)"
            depth = "depth " if feature.is_depth else ""
            lines.append(f"             camera {name} {_size(feature.shape)} {depth}{feature.dtype}{used}")
        texts = [key for key, feature in meta.features.items() if feature.dtype in ("string", "language")]
        texts = [key for key in texts if key not in (rows.features.columns or ())]
        lines += [f"             not read: {line}" for line in (*([", ".join(texts)] if texts else []), *meta.not_read)]
    return lines


def _mixture(run: Run) -> list[str]:
    """Tabulate the datasets of a mixture: size, weight, share of rows, epochs and shapes."""
    rows = run.rows
    if not run.config.dataset.mixture:
        return []
    counts = rows.identity["rows_per_source"]
    epochs = run.job.steps * run.job.rows_per_step / rows.per_epoch
    steps = rows.features.window_steps or (1,) * len(rows.metas)
    cells = [
        (
            f"{frames:,}",
            f"{member.weight:g}",
            f"{count / rows.per_epoch:.1%}",
            f"{epochs * count / frames:.2f}",
            f"{meta.fps / step:g}",
            str(sum(key in meta.features for key in rows.camera_keys)),
        )
        for member, meta, frames, count, step in zip(
            rows.members, rows.metas, rows.per_dataset, counts, steps, strict=True
        )
    ]
    return tabulate("frames weight share epochs actions/s cameras", rows.members, rows.metas, cells)


def _features(run: Run) -> list[str]:
    """Return the mapping of dataset features to policy features for each robot."""
    lines = []
    for robot in run.policy.robots:
        lines += [
            f"Features     {robot.name or 'dataset'} -> policy",
            *(f"             {line}" for line in robot.match.table()),
        ]
        if names_line := describe_names(robot.config, robot.rename_map):
            lines.append(f"             {names_line}")
    if not run.policy.mixes_robots:
        return lines
    widest, unpadded = run.policy.config.output_features["action"].shape[0], run.policy.train.pad_loss == "own"
    dimensions = "its own dimensions" if unpadded else f"all {widest} dimensions, as the policy counts padding"
    lines += [
        f"             rows have {len(run.rows.camera_keys)} cameras and {widest} dimensions of action; cameras that a",
        f"             row lacks are masked, and its loss is over {dimensions} (--train.pad_loss)",
    ]
    return lines


def _policy(config: Config, policy: PolicySpec) -> list[str]:
    lines = [f"Policy       {policy.config.type}, {policy.base['path']}" + _revision(policy.base["revision"])]
    if unproven := describe_unproven(policy.config):
        lines.append(f"             {unproven}")
    for robot in policy.robots:
        if (relative := relative_actions(robot.config)) is not None:
            relatively = f"{sum(relative.dimensions)} of {len(relative.dimensions)} dimensions of an action relative"
            lines.append(f"             {robot.label}predicts {relatively} to the state")
            lines.append(f"             {robot.label}which is played by {RELATIVE_PLAYED_BY}")
            lines += [
                f"             {robot.label}relative_exclude_joints: {joint!r} "
                + (f"leaves {', '.join(dimensions)} absolute" if dimensions else "is in no name of a dimension")
                for joint, dimensions in absolute_dimensions(robot.config).items()
            ]
    if policy.parameters is not None:
        is_named = config.peft.enabled or policy.value is not None
        what_trains = policy.trained_part if is_named else f"--train.mode {policy.trained_part}"
        lines.append(
            f"             {policy.parameters.total:,} parameters, {policy.parameters.trainable:,} of them train "
            f"({what_trains})" + _flops(policy)
        )
        lines += [f"             {line}" for line in policy.parameters.adapted]
    if delay := getattr(policy.config, MAX_DELAY, 0):
        lines.append(
            f"             the first 0 to {delay} actions of a chunk are given and have no loss (--policy.{MAX_DELAY})"
        )
    if policy.trusted and (foreign_code := code_source(policy.config)):
        lines.append(f"             runs code that comes with {foreign_code}, as --policy.trust_remote_code says")
    return lines


def _steps(config: Config, steps: int, rows: Rows) -> list[str]:
    lines = config.describe_steps(config.scaling, steps, rows.per_epoch, config.log_freq, not rows.epoch_ends)
    if config.is_rehearsal:
        minutes = steps * config.global_batch_size / REHEARSAL_ROWS_PER_S / 60
        lines.append(
            f"             about {minutes:.0f} minutes at the {REHEARSAL_ROWS_PER_S} rows/s of 2 CPUs and a 480x640 "
            "camera; each line says what is left"
        )
    chunk, short, episodes, share = rows.padding()
    if short:
        lines.append(
            f"             an action chunk has {chunk} steps, and {short} of {episodes} episodes are shorter: "
            f"{share:.0%} of the steps of all chunks are padding"
        )
    return lines


def _shuffling(config: Config, rows: Rows) -> list[str]:
    """Return the plan's lines about shuffling: windows, segments, and the episodes of a global batch."""
    source, options = rows.source(), config.dataset
    plan = source.plan
    episodes = episodes_in_a_batch(plan, config.global_batch_size)
    is_limited = plan.window_rows <= options.shuffle_window - SEGMENT_ROWS
    return [
        f"Shuffling    windows of {plan.window_rows} rows"
        + (f" ({options.shuffle_window} requested; limited by memory)" if is_limited else "")
        + f", {plan.window_rows * source.row_bytes() / 2**20:.0f} MiB; segments of at most {plan.segment_rows}",
        f"             a global batch has rows of about {episodes:.1f} episodes",
    ]


def episodes_in_a_batch(plan: Plan, batch_rows: int) -> float:
    """Return the mean number of episodes in a batch of consecutive rows, over the first batches of an epoch."""
    batches = max(1, min(BATCHES, plan.rows_per_epoch // batch_rows))
    episodes = plan.episodes
    numbers = episodes.dataset_index * (episodes.episode_index.max() + 1) + episodes.episode_index
    row_episode = [numbers[s.episode[s.rows()[0]]] for s in plan.slices(0, batches * batch_rows)]
    return float(np.mean([len(np.unique(batch)) for batch in np.concatenate(row_episode).reshape(batches, -1)]))


def _held_out(config: Config, rows: Rows) -> list[str]:
    if not config.eval_steps:
        return []
    measured = rows.held_out_rows(config.max_eval_samples)
    return config.describe_held_out(len(measured.positions), measured.held_out, len(measured.tasks))


def _indented(title: str, lines: list[str]) -> list[str]:
    return [f"{title if not number else '':13}{line}" for number, line in enumerate(lines)]


def _flops(policy: PolicySpec) -> str:
    if not policy.flops_by_prompt:
        return ""
    (short, least), (long, most) = min(policy.flops_by_prompt.items()), max(policy.flops_by_prompt.items())
    unit = "GFLOP per sample and step"
    if short == long:
        return f", {most / 1e9:,.1f} {unit}"
    prompts = f"prompts of {short} to {long} tokens, by the longest of a micro-batch"
    return f", {least / 1e9:,.1f} to {most / 1e9:,.1f} {unit} ({prompts})"


def _size(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape or ()))


def _revision(revision: str | None) -> str:
    return f" @ {revision[:12]}" if revision else ""
