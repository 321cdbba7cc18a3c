"""The plan of a run as text: what `--dry_run` prints, and what a report shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lerobot_datasource import SEGMENT_ROWS
from vla_finetuning.data.node_cache import has_capacity
from vla_finetuning.data.number_cache import numbers_gb
from vla_finetuning.environment import FRAME_CACHE_GB, FRAMES_DIR, NUMBERS_DIR, NUMBERS_GB, cache_gb
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.mixture import members
from vla_finetuning.options.programs import Config
from vla_finetuning.options.schedule import REHEARSAL_ROWS_PER_S
from vla_finetuning.policies.augment import WRIST
from vla_finetuning.policies.loading import aligned
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.remote_code import brought_along
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.job import Job
from vla_finetuning.run.resolve import Run
from vla_finetuning.run.rows import Rows
from vla_finetuning.run.statistics import absolute_dimensions, relative_actions
from vla_finetuning.terminal import escaped

VECTORS = ("observation.state", "action")


def describe(run: Run) -> str:
    """The plan, as text: datasets, policy, how features map, batch arithmetic, cadence."""
    config, job, rows, policy = run.config, run.job, run.rows, run.policy
    lines = [
        *_datasets(config, rows),
        *_indented("Mixture", _mixture(run)),
        *_indented("Statistics", [f"{robot.label}{line}" for robot in policy.robots for line in robot.statistics]),
        *_policy(config, policy),
        *_features(run),
        *(f"Note         {note}" for note in run.notes),
        *_frames(rows),
        *_augmentation(config, list(policy.config.image_features)),
        *_cached_frames(config.dataset, rows),
        *_cached_features(config, policy, rows),
        _cached_numbers(),
        *_steps(config, job.steps, rows),
        *_indented("Learning", policy.recipe.describe(job.steps)),
        *_shuffling(config.dataset, rows),
        *_weighted(rows),
        *_labelled(config, rows),
        *_average(config),
        *_held_out(config, rows),
        *_checkpoints(config, job),
        *_environment(config),
        f"Hardware     {_workers(config)} {'GPU' if job.use_gpu else 'CPU'} workers, "
        f"{config.scaling.strategy}, {config.train.precision} precision",
    ]
    return "\n".join(map(escaped, lines))


def _datasets(config: Config, rows: Rows) -> list[str]:
    lines, dropped = [], rows.selection.drop_n_last_frames
    for number, meta in enumerate(rows.metas):
        lines += [
            f"Dataset      {config.dataset.repo_id or meta.root}" + _at(config.dataset.revision),
            f"             {meta.num_episodes} episodes, {meta.total_frames} frames at {meta.fps} fps"
            + (f", robot {meta.robot_type}" if meta.robot_type else ""),
            f"             trains on {len(rows.train_episodes[number])} episodes, {rows.per_dataset[number]} frames; "
            f"{len(rows.eval_episodes[number])} held out",
            *([f"             but for the last {dropped} frames of each"] if dropped else []),
            *([f"             {line}" for line in rows.described[number]] if rows.described else []),
            *([_share(config, rows, number)] if config.dataset.mixture else []),
            f"             {len(meta.tasks)} tasks: "
            + "; ".join(repr(t) for t in list(meta.tasks.values())[:4])
            + (" ..." if len(meta.tasks) > 4 else ""),
        ]
        for key, feature in meta.features.items():
            if feature.order is not None:
                lines.append(f"             {key}: dimensions reordered as in the first dataset, by their names")
        for key in meta.camera_keys:
            feature = meta.features[key]
            used = "" if key in rows.camera_keys else "  (not used)"
            kind = "depth " if feature.is_depth else ""
            lines.append(f"             camera {key} {_size(feature.shape)} {kind}{feature.dtype}{used}")
        texts = [key for key, feature in meta.features.items() if feature.dtype in ("string", "language")]
        lines += [f"             not read: {what}" for what in (*([", ".join(texts)] if texts else []), *meta.not_read)]
    return lines


def _mixture(run: Run) -> list[str]:
    """A line for each dataset of a mixture: what it holds, and what this run takes of it."""
    rows, of_mixture = run.rows, members(run.config.dataset.mixture)
    if not of_mixture:
        return []
    counts = rows.identity["rows_per_source"]
    epochs = run.job.steps * run.job.rows_per_step / rows.per_epoch
    steps = rows.features.window_steps or (1,) * len(of_mixture)
    head = "dataset robot frames weight share epochs actions/s cameras state action"
    cells: list[tuple[str, ...]] = [tuple(head.split())]
    for member, meta, frames, count, step in zip(of_mixture, rows.metas, rows.per_dataset, counts, steps, strict=True):
        cells.append(
            (
                meta.root.rstrip("/").rpartition("/")[2],
                member.robot or "-",
                f"{frames:,}",
                f"{member.weight:g}",
                f"{count / rows.per_epoch:.1%}",
                f"{epochs * count / frames:.2f}",
                f"{meta.fps // step}" if meta.fps % step == 0 else f"{meta.fps / step:g}",
                str(sum(key in meta.features for key in rows.camera_keys)),
                *("x".join(map(str, meta.features[key].shape)) if key in meta.features else "-" for key in VECTORS),
            )
        )
    return aligned(cells)


def _features(run: Run) -> list[str]:
    """How features are the policy's, of each robot."""
    lines = []
    for robot in run.policy.robots:
        lines += [
            f"Features     {robot.name or 'dataset'} -> policy",
            *(f"             {line}" for line in robot.match.table()),
        ]
    if not run.policy.mixes_robots:
        return lines
    widest, own = run.policy.config.output_features["action"].shape[0], run.policy.train.pad_loss == "own"
    what = "its own dimensions" if own else f"all {widest} dimensions, as the policy counts padding"
    lines += [
        f"             rows have {len(run.rows.camera_keys)} cameras and {widest} dimensions of action; cameras that a",
        f"             row lacks are masked, and its loss is over {what} (--train.pad_loss)",
    ]
    if run.config.dataset.robot_in_prompt:
        lines.append("             instructions begin with the robot's name (--dataset.robot_in_prompt)")
    return lines


def _policy(config: Config, policy: PolicySpec) -> list[str]:
    lines = [f"Policy       {policy.config.type}, {policy.base['path']}" + _at(policy.base["revision"])]
    for robot in policy.robots:
        if (relative := relative_actions(robot.config)) is not None:
            relatively = f"{sum(relative.dimensions)} of {len(relative.dimensions)} dimensions of an action relative"
            lines.append(f"             {robot.label}predicts {relatively} to the state")
            lines += [
                f"             {robot.label}relative_exclude_joints: {joint!r} "
                + (f"leaves {', '.join(dimensions)} absolute" if dimensions else "is in no name of a dimension")
                for joint, dimensions in absolute_dimensions(robot.config).items()
            ]
    if policy.parameters is not None:
        lines.append(
            f"             {policy.parameters.total:,} parameters, {policy.parameters.trainable:,} of them train "
            f"({_what_trains(config, policy)})" + _flops(policy)
        )
        lines += [f"             {line}" for line in policy.parameters.adapted]
    if policy.trusted and (brought := brought_along(policy.config)):
        lines.append(f"             runs code that comes with {brought}, as --policy.trust_remote_code says")
    return lines


def _what_trains(config: Config, policy: PolicySpec) -> str:
    named = config.peft.enabled or policy.value is not None
    return policy.what_trains if named else f"--train.mode {config.train.mode}"


def _steps(config: Config, steps: int, rows: Rows) -> list[str]:
    batch = config.global_batch_size
    lines = [
        f"Batch        {config.batch_size} rows x {config.grad_accum} micro-steps x {config.scaling.num_workers} "
        f"workers = {batch} per step" + (", with fewer workers too" if config.scaling.min_workers else ""),
        f"Steps        {steps} ({steps * batch / rows.per_epoch:.2f} epochs of {rows.per_epoch} rows"
        f"{' on average' if rows.epoch_ends else ''}, {rows.per_epoch / batch:.1f} steps each); a line every "
        f"{config.log_freq}",
    ]
    if config.is_rehearsal:
        minutes = steps * batch / REHEARSAL_ROWS_PER_S / 60
        lines.append(
            f"             about {minutes:.0f} minutes at the {REHEARSAL_ROWS_PER_S} rows/s of 2 CPUs and a 480x640 "
            "camera; each line says what is left"
        )
    lines += _padded(rows)
    text = "             epochs follow each other without a gap"
    if rows.epoch_ends:
        return [*lines, f"{text}; a weight of 0.5 is every other epoch, so they are not equally long"]
    rest = rows.per_epoch % batch
    return [*lines, f"{text}: the last {rest} rows of one share a step with the first of the next"]


def _padded(rows: Rows) -> list[str]:
    """How much of the action chunks lies after the ends of episodes, where episodes are shorter than a chunk."""
    length = np.concatenate([meta.episode_length[of] for meta, of in zip(rows.metas, rows.train_episodes, strict=True)])
    chunk = 1 + round(max(rows.features.delta_timestamps.get("action", (0.0,))) * rows.metas[0].fps)
    short = int((length < chunk).sum())
    if not short:
        return []
    beyond = np.minimum(length, chunk)  # frames of an episode whose chunk does not fit, and how far beyond it reaches
    padded = beyond * (chunk - beyond) + beyond * (beyond - 1) // 2
    return [
        f"             an action chunk spans {chunk} frames, and {short} of {len(length)} episodes are shorter: "
        f"{padded.sum() / (length.sum() * chunk):.0%} of the steps of all chunks are padding"
    ]


def _weighted(rows: Rows) -> list[str]:
    weights = rows.weights
    if weights is None:
        return []
    return [
        f"Weighted     rows in the loss, by RA-BC: of {len(weights)} frames {int((weights == 0).sum())} weigh 0 and "
        f"{int((weights == 1).sum())} weigh 1; each micro-batch for itself, as lerobot-train"
    ]


def _labelled(config: Config, rows: Rows) -> list[str]:
    if (positive := rows.positive_share) is None:
        return []
    return [
        f"Advantages   in prompts, of {config.recap.labels}: {positive:.0%} of the training frames positive; "
        f"{rows.label_dropout:.0%} of the rows without"
    ]


def _average(config: Config) -> list[str]:
    if not config.ema.enable:
        return []
    what = "it is measured and exported" if config.ema.export else "in checkpoints; the weights are exported"
    return [f"Average      of the weights that train, about the last {1 / (1 - config.ema.decay):.0f} steps: {what}"]


def _held_out(config: Config, rows: Rows) -> list[str]:
    if not config.eval_steps:
        return []
    measured = rows.held_out_rows(config.max_eval_samples)
    many, spaced = len(measured.positions), len(measured.positions) < measured.held_out
    return [
        f"Held out     the loss on {many} of {measured.held_out} held-out frames of {len(measured.tasks)} tasks, every "
        f"{config.eval_steps} steps and at the end; always with the same noise and times"
    ] + ["             evenly spaced in each task (lerobot-train takes each task's first frames)"] * spaced


def _checkpoints(config: Config, job: Job) -> list[str]:
    exported = "; the best one is exported" if config.export == "best" else ""
    return [
        f"Checkpoints  every {config.save_freq} steps and at the end, keeping the last {config.keep_checkpoints}"
        f"{_best(config)}, in {job.checkpoints_dir}{exported}"
    ]


def _best(config: Config) -> str:
    best, by = config.best_kept, "held-out loss" if config.eval_steps else "training loss"
    return f" and the {best} best by {'success' if config.keep_best_by == 'success' else by}" if best else ""


def _environment(config: Config) -> list[str]:
    if config.env_type is None:
        return []
    every = f"every {config.env_eval_freq} steps and at the end" if config.env_eval_freq else "at the end"
    return [
        f"Environment  {' '.join([config.env_type, *config.env_options])}: checkpoints play {config.eval.n_episodes} "
        f"episodes of each task, {every}, beside the training",
    ]


def _indented(title: str, lines: list[str]) -> list[str]:
    return [f"{title if not number else '':13}{line}" for number, line in enumerate(lines)]


def _augmentation(config: Config, keys: list[str]) -> list[str]:
    transforms = config.dataset.image_transforms
    each = "drawn for each camera of each row anew in every epoch, on the device"
    if transforms.enable:
        names = ", ".join(transforms.tfs) or "LeRobot's"
        return [f"Augmented    by {transforms.max_num_transforms} of the transforms {names}; {each}"]
    if config.train.augmentation == "openpi":
        wrist = ", ".join(key for key in keys if WRIST in key)
        only = f"; only the colours of {wrist}" if wrist else "; no camera has 'wrist' in its name"
        return [f"Augmented    as in openpi: crop, turn, brightness, contrast, saturation{only}; {each}"]
    return ["             not augmented, as in lerobot-train (--dataset.image_transforms.enable, --train.augmentation)"]


def _frames(rows: Rows) -> list[str]:
    if rows.image_size is None:
        return ["Images       as stored, bit for bit as LeRobot reads them"]
    smaller = f"; rows of {rows.rates['decoded_bytes_per_s'] / 1e6:.2f} MB"
    if rows.stored_bytes:
        smaller += f" instead of {rows.stored_bytes / 1e6:.2f}"
    return [
        f"Images       fitted into {_size(rows.image_size)} where they are decoded{smaller}",
        "             what the policy would do itself, within one level of uint8 (--dataset.image_size=stored leaves "
        "it to the policy)",
    ]


def _cached_frames(d: DatasetOptions, rows: Rows) -> list[str]:
    asked, cache, size = d.frame_cache, rows.reading.frame_cache, f"{rows.cached_bytes / 1e9:.1f} GB"
    if asked is None:
        return []
    if cache is not None:
        where = "on every node" if rows.order.sharding is None else "on each node those of its shard"
        return [f"             decoded once: {size} of frames are cached in {cache.folder}, {where}"]
    if not rows.cached_bytes:
        return ["             none are cached (--dataset.frame_cache=auto): there is no camera"]
    if rows.last_row <= rows.per_epoch:
        return ["             none are cached (--dataset.frame_cache=auto): none are read twice"]
    return [
        f"             decoded in every epoch: {size} of frames are more than VLA_CACHE_GB="
        f"{cache_gb(FRAME_CACHE_GB):g}, or than fits the disk of {FRAMES_DIR} with a margin, or that is memory "
        "(--dataset.frame_cache=DIR keeps what fits)"
    ]


def _cached_features(config: Config, policy: PolicySpec, rows: Rows) -> list[str]:
    train = config.train
    if train.feature_cache is None:
        return []
    bf16 = config.planned_in_bf16
    sizes = family_of(policy.config).feature_bytes(policy.config, rows.cameras, bf16)
    size, gb = rows.distinct_frames * sum(sizes.values()), cache_gb(FRAME_CACHE_GB)
    where = "on every node" if rows.order.sharding is None else "on each node those of its shard"
    each = f"{max(sizes.values()) / 1e3:.0f} kB a camera and frame, {'bf16' if bf16 else 'fp32'}"
    lines = [
        f"Features     of the vision tower, which sees each frame once: {size / 1e9:.1f} GB ({each})",
        f"             are cached in {train.feature_cache}, {where}; the frames are {rows.cached_bytes / 1e9:.1f} GB",
    ]
    if size > gb * 1e9 or not has_capacity(Path(train.feature_cache), size):
        lines.append(
            f"             TOO MANY for VLA_CACHE_GB={gb:g}, or for its disk with a "
            "margin: what does not fit is computed in every epoch"
        )
    if rows.last_row <= rows.per_epoch:
        lines.append("             none are used twice in this run, but by later ones that start from the same weights")
    return lines


def _cached_numbers() -> str:
    if size := numbers_gb():
        return (
            f"Numbers      at most {size:g} GB on each node, unpacked once, in {NUMBERS_DIR}, and as much of encoded "
            "images of data files (VLA_NUMBERS_GB=0: none)"
        )
    why = f"{NUMBERS_DIR} is memory (tmpfs); VLA_NUMBERS_DIR names another folder" if NUMBERS_GB else "VLA_NUMBERS_GB=0"
    return f"Numbers      unpacked whenever rows of them are wanted, as images of data files are, on this node: {why}"


def _shuffling(d: DatasetOptions, rows: Rows) -> list[str]:
    mixing, sharding, asked = rows.mixing, rows.order.sharding, d.shuffle_window
    bounded = mixing.window_rows <= asked - SEGMENT_ROWS
    lines = [
        f"Shuffling    windows of {mixing.window_rows} rows"
        + (f" (of {asked} asked for, as many as memory is meant for)" if bounded else "")
        + f", {mixing.window_bytes / 2**20:.0f} MiB; segments of at most {mixing.segment_rows}",
        f"             a global batch has rows of about {mixing.episodes:.1f} episodes; of "
        f"{mixing.episodes_at_random:.1f} if all rows were shuffled",
    ]
    if sharding is not None:
        lines.append(
            f"             {sharding.count} shards, equally many rows of each in a batch: each node reads one, "
            "for its own workers"
        )
    if d.global_shuffle:
        lines.append("             from the second epoch on, all rows are shuffled (--dataset.global_shuffle)")
    if mixing.advice:
        lines.append(f"             POORLY MIXED: {mixing.advice}")
    return lines


def _flops(policy: PolicySpec) -> str:
    if not policy.flops_by_prompt:
        return ""
    seen = "" if policy.train.feature_cache is None else " without the vision tower"
    (short, least), (long, most) = min(policy.flops_by_prompt.items()), max(policy.flops_by_prompt.items())
    if short == long:
        return f", {most / 1e9:,.1f} GFLOP per sample and step{seen}"
    return (
        f", {least / 1e9:,.1f} to {most / 1e9:,.1f} GFLOP per sample and step{seen} (prompts of {short} to {long} "
        "tokens, by the longest of a micro-batch)"
    )


def _workers(config: Config) -> str:
    least, most = config.scaling.min_workers, config.scaling.num_workers
    return f"{least} to {most}" if least else str(most)


def _share(config: Config, rows: Rows, number: int) -> str:
    """What a mixture takes of a dataset."""
    weights = [member.weight for member in members(config.dataset.mixture)]
    drawn = rows.identity["rows_per_source"][number]
    own = rows.per_dataset[number]
    return (
        f"             weight {weights[number]:g} of {sum(weights):g}: {drawn} of an epoch's {rows.per_epoch} rows, "
        f"{drawn / own:.2f} times its frames"
    )


def _size(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape or ()))


def _at(revision: str | None) -> str:
    return f" @ {revision[:12]}" if revision else ""
