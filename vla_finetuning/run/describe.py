"""The plan of a run as text: what `--dry_run` prints, and what a report shows."""

from __future__ import annotations

from lerobot_datasource import SEGMENT_ROWS
from vla_finetuning.config import FRAMES_DIR, Config
from vla_finetuning.policies.augment import WRIST
from vla_finetuning.policies.remote_code import brought_along
from vla_finetuning.run.held_out import held_out_rows
from vla_finetuning.run.plan import Run
from vla_finetuning.terminal import escaped


def describe(run: Run) -> str:
    """The plan, as text: datasets, policy, how features map, batch arithmetic, cadence."""
    config, dropped = run.config, run.drop_n_last_frames
    lines = []
    for number, (meta, train, held_out) in enumerate(
        zip(run.metas, run.train_episodes, run.eval_episodes, strict=True)
    ):
        lines += [
            f"Dataset      {config.dataset.repo_id or meta.root}" + _at(config.dataset.revision),
            f"             {meta.num_episodes} episodes, {meta.total_frames} frames at {meta.fps} fps"
            + (f", robot {meta.robot_type}" if meta.robot_type else ""),
            f"             trains on {len(train)} episodes, {run.rows_per_dataset[number]} frames; "
            f"{len(held_out)} held out",
            *([f"             but for the last {dropped} frames of each"] if dropped else []),
            *([f"             {line}" for line in run.frames_told[number]] if run.frames_told else []),
            *([_share(run, number)] if config.dataset.mixture else []),
            f"             {len(meta.tasks)} tasks: "
            + "; ".join(repr(t) for t in list(meta.tasks.values())[:4])
            + (" ..." if len(meta.tasks) > 4 else ""),
        ]
        for key, feature in meta.features.items():
            if feature.order is not None:
                lines.append(f"             {key}: dimensions reordered as in the first dataset, by their names")
        for key in meta.camera_keys:
            feature = meta.features[key]
            used = "" if key in run.match.camera_keys else "  (not used)"
            lines.append(f"             camera {key} {_size(feature.shape)} {feature.dtype}{used}")
    missing = "; ".join(f"{k}: {', '.join(sorted(v))}" for k, v in run.missing_stats.items())
    lines.append(
        f"Statistics   {'to be computed from the dataset: ' + missing if missing else 'all that is needed is present'}"
    )
    lines.append(f"Policy       {run.policy_config.type}, {run.base['path']}" + _at(run.base["revision"]))
    if (relative := run.relative_actions) is not None:
        lines.append(
            f"             predicts {sum(relative.dimensions)} of {len(relative.dimensions)} dimensions of an action "
            "relative to the state"
        )
    if run.parameters is not None:
        lines.append(
            f"             {run.parameters.total:,} parameters, {run.parameters.trainable:,} of them train "
            f"({run.what_trains if config.peft.enabled else f'--train.mode {config.train.mode}'})" + _flops(run)
        )
    if config.policy_trust_remote_code and (brought := brought_along(run.policy_config)):
        lines.append(f"             runs code that comes with {brought}, as --policy.trust_remote_code says")
    lines.append("Features     dataset -> policy")
    lines += [f"             {line}" for line in run.match.table()]
    lines += [f"Note         {note}" for note in run.notes]
    lines += [*_images(run), *_kept_frames(run)]
    batch = config.global_batch_size
    lines += [
        f"Batch        {config.batch_size} rows x {config.grad_accum} micro-steps x {config.scaling.num_workers} "
        f"workers = {batch} per step" + (", with fewer workers too" if config.scaling.min_workers else ""),
        f"Steps        {run.steps} ({run.steps * batch / run.rows_per_epoch:.2f} epochs of {run.rows_per_epoch} rows"
        f"{' on average' if run.epoch_ends else ''}, {run.rows_per_epoch / batch:.1f} steps each); a line every "
        f"{config.log_freq}",
        *_between_epochs(run),
        *_indented("Learning", run.recipe.describe(run.steps)),
        *_shuffling(run),
        *_weighted(run),
        *_average(config),
        *_held_out(run),
        f"Checkpoints  every {config.save_freq} steps and at the end, the last {config.keep_checkpoints}{_best(run)} "
        f"kept, in {run.checkpoints_dir}" + ("; the best one is exported" if config.export == "best" else ""),
        *_environment(run),
        f"Hardware     {_workers(config)} {'GPU' if run.use_gpu else 'CPU'} workers, "
        f"{config.scaling.strategy}, {config.train.precision} precision",
    ]
    return "\n".join(map(escaped, lines))


def _between_epochs(run: Run) -> list[str]:
    text = "             epochs follow each other without a gap"
    if run.epoch_ends:
        return [f"{text}; a weight of 0.5 is every other epoch, so they are not equally long"]
    rest = run.rows_per_epoch % run.config.global_batch_size
    return [f"{text}: the last {rest} rows of one share a step with the first of the next"]


def _weighted(run: Run) -> list[str]:
    weights = run.row_weights
    if weights is None:
        return []
    return [
        f"Weighted     rows in the loss, by RA-BC: of {len(weights)} frames {int((weights == 0).sum())} weigh 0 and "
        f"{int((weights == 1).sum())} weigh 1; each micro-batch for itself, as lerobot-train"
    ]


def _average(config: Config) -> list[str]:
    if not config.ema.enable:
        return []
    what = "it is measured and exported" if config.ema.export else "in checkpoints; the weights are exported"
    return [f"Average      of the weights that train, about the last {1 / (1 - config.ema.decay):.0f} steps: {what}"]


def _held_out(run: Run) -> list[str]:
    config = run.config
    if not config.eval_steps:
        return []
    rows = held_out_rows(run)
    many, spaced = len(rows.positions), len(rows.positions) < rows.held_out
    return [
        f"Held out     the loss on {many} of {rows.held_out} held-out frames of {len(rows.tasks)} tasks, every "
        f"{config.eval_steps} steps and at the end; always with the same noise and times"
    ] + ["             evenly spaced in each task (lerobot-train takes each task's first frames)"] * spaced


def _best(run: Run) -> str:
    best, by = run.config.best_kept, "held-out loss" if run.config.eval_steps else "training loss"
    return f" and the {best} best by {'success' if run.config.keep_best_by == 'success' else by}" if best else ""


def _environment(run: Run) -> list[str]:
    config = run.config
    if config.env_type is None:
        return []
    every = f"every {config.env_eval_freq} steps and at the end" if config.env_eval_freq else "at the end"
    return [
        f"Environment  {' '.join([config.env_type, *config.env_options])}: checkpoints play {config.eval.n_episodes} "
        f"episodes of each task, {every}, beside the training",
    ]


def _indented(title: str, lines: list[str]) -> list[str]:
    return [f"{title if not number else '':13}{line}" for number, line in enumerate(lines)]


def _images(run: Run) -> list[str]:
    return [*_frames(run), *_augmentation(run)]


def _augmentation(run: Run) -> list[str]:
    transforms, keys = run.config.dataset.image_transforms, list(run.policy_config.image_features)
    each = "drawn for each camera of each row anew in every epoch, on the device"
    if transforms.enable:
        names = ", ".join(transforms.tfs) or "LeRobot's"
        return [f"Augmented    by {transforms.max_num_transforms} of the transforms {names}; {each}"]
    if run.config.train.augmentation == "openpi":
        wrist = ", ".join(key for key in keys if WRIST in key)
        only = f"; only the colours of {wrist}" if wrist else "; no camera has 'wrist' in its name"
        return [f"Augmented    as in openpi: crop, turn, brightness, contrast, saturation{only}; {each}"]
    return ["             not augmented, as in lerobot-train (--dataset.image_transforms.enable, --train.augmentation)"]


def _frames(run: Run) -> list[str]:
    if run.image_size is None:
        return ["Images       as stored, bit for bit as LeRobot reads them"]
    smaller = f"; rows of {run.decoded['decoded_bytes_per_s'] / 1e6:.2f} MB"
    if run.stored_bytes:
        smaller += f" instead of {run.stored_bytes / 1e6:.2f}"
    return [
        f"Images       fitted into {_size(tuple(run.image_size))} where they are decoded{smaller}",
        "             what the policy would do itself, within one level of uint8 (--dataset.image_size=stored leaves "
        "it to the policy)",
    ]


def _kept_frames(run: Run) -> list[str]:
    asked, size = run.config.dataset.frame_cache, f"{run.kept_bytes / 1e9:.1f} GB"
    if asked is None:
        return []
    if run.frame_cache is not None:
        where = "on every node" if run.sharding is None else "on each node those of its shard"
        return [f"             decoded once: {size} of frames are kept in {run.frame_cache.folder}, {where}"]
    if not run.kept_bytes:
        return ["             none are kept (--dataset.frame_cache=auto): no camera is a video"]
    if run.last_row <= run.rows_per_epoch:
        return ["             none are kept (--dataset.frame_cache=auto): none are read twice"]
    return [
        f"             decoded in every epoch: {size} of frames are more than --dataset.frame_cache_gb="
        f"{run.config.dataset.frame_cache_gb:g}, or than fits the disk of {FRAMES_DIR} with a margin "
        "(--dataset.frame_cache=DIR keeps what fits)"
    ]


def _shuffling(run: Run) -> list[str]:
    mixing = run.mixing
    assert mixing is not None
    asked = run.config.dataset.shuffle_window
    bounded = mixing.window_rows <= asked - SEGMENT_ROWS
    lines = [
        f"Shuffling    windows of {mixing.window_rows} rows"
        + (f" (of {asked} asked for, as many as memory is meant for)" if bounded else "")
        + f", {mixing.window_bytes / 2**20:.0f} MiB; segments of at most {mixing.segment_rows}",
        f"             a global batch has rows of about {mixing.episodes:.1f} episodes; of "
        f"{mixing.episodes_at_random:.1f} if all rows were shuffled",
    ]
    if run.sharding is not None:
        lines.append(
            f"             {run.sharding.count} shards, equally many rows of each in a batch: each node reads one, "
            "for its own workers"
        )
    if run.config.dataset.global_shuffle:
        lines.append("             from the second epoch on, all rows are shuffled (--dataset.global_shuffle)")
    if mixing.advice:
        lines.append(f"             POORLY MIXED: {mixing.advice}")
    return lines


def _flops(run: Run) -> str:
    if not run.flops_by_prompt:
        return ""
    (short, least), (long, most) = min(run.flops_by_prompt.items()), max(run.flops_by_prompt.items())
    if short == long:
        return f", {most / 1e9:,.1f} GFLOP per sample and step"
    return (
        f", {least / 1e9:,.1f} to {most / 1e9:,.1f} GFLOP per sample and step (prompts of {short} to {long} tokens, by "
        "the longest of a micro-batch)"
    )


def _workers(config: Config) -> str:
    least, most = config.scaling.min_workers, config.scaling.num_workers
    return f"{least} to {most}" if least else str(most)


def _share(run: Run, number: int) -> str:
    """What a mixture takes of a dataset."""
    weights, rows = list(run.config.dataset.mixture.values()), run.stream["rows_per_source"][number]
    own = run.rows_per_dataset[number]
    return (
        f"             weight {weights[number]:g} of {sum(weights):g}: {rows} of an epoch's {run.rows_per_epoch} rows, "
        f"{rows / own:.2f} times its frames"
    )


def _size(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape or ()))


def _at(revision: str | None) -> str:
    return f" @ {revision[:12]}" if revision else ""
