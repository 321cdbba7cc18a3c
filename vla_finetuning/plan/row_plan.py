"""Plan the rows of a run: selection, order, sizes, caches, weights and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from lerobot.configs.policies import PreTrainedConfig

from lerobot_datasource import BLOCK_BYTES, LeRobotDatasource
from vla_finetuning.buckets.mirror import as_file
from vla_finetuning.data.disk_cache import FrameCache, has_capacity, is_in_memory
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.data.shards import Sharding, epoch_ends
from vla_finetuning.environment import FRAME_CACHE_GB, FRAMES_DIR, cache_gb
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.fields import decided
from vla_finetuning.options.programs import PRESETS, Config
from vla_finetuning.options.recap import LABEL_DROPOUT
from vla_finetuning.plan.datasets import Datasets
from vla_finetuning.plan.episodes import ChosenEpisodes
from vla_finetuning.plan.images import with_image_size
from vla_finetuning.plan.labels import read_labels
from vla_finetuning.plan.matching import Matched
from vla_finetuning.plan.row_weights import row_weights
from vla_finetuning.plan.rows import PerFrame, Rows
from vla_finetuning.run.folder import SKIPPED_NAME


def plan_rows(
    config: Config, datasets: Datasets, matched: Matched, chosen: ChosenEpisodes, dropped: int, steps: int
) -> tuple[Config, Rows]:
    """Decide the rows of a run of `steps` optimizer updates. Raises ValueError for an option that does not fit them.

    `datasets` have the metadata of `matched`; `chosen` leaves out the last `dropped` frames of episodes.

    Returns:
        The options with the image size and the rows of a shard; the rows with their weights and labels.
    """
    metas, match = datasets.metas, matched.match
    selection = Selection(
        frame_ranges=chosen.frames,
        weights=[member.weight for member in datasets.members] if config.dataset.mixture else None,
    )
    stream = stream_of(config, steps)
    features = Features(
        camera_keys=match.camera_keys,
        columns=[*match.keys, *text_columns(config, metas)],
        delta_timestamps=match.delta_timestamps,
        tolerance_s=config.tolerance_s,
        padded=len(matched.robots) > 1 or any(meta.without_actions for meta in metas),
        window_steps=matched.window_steps,
    )

    def row_bytes(features: Features) -> int:
        order = Order(shuffle_seed=config.seed, stream=stream)
        reading = Reading(on_error=config.dataset.on_error, check_files=False)
        return LeRobotDatasource(metas, selection, features, order, reading).row_bytes()

    config, features = with_image_size(config, metas, features, matched.config, row_bytes)
    size = row_bytes(features)
    block_rows = _rows_per_block(config, size)
    config = _with_shard_rows(config, block_rows)
    d = config.dataset
    order = Order(
        shuffle_seed=config.seed,
        shuffle_window=d.shuffle_window,
        global_shuffle=d.global_shuffle,
        sharding=None if d.shards == 1 or d.shard_rows is None else Sharding(d.shards, d.shard_rows),
        stream=stream,
        rows_multiple=config.rows_multiple,
        block_rows=block_rows,
    )
    reading = Reading(
        num_cpus=config.scaling.cpus_per_read_task,
        on_error=d.on_error,
        skip_log=config.folder / SKIPPED_NAME,
        check_files=False,
    )
    source = LeRobotDatasource(metas, selection, features, order, reading)
    per_epoch, decoded_bytes = source.plan.rows_per_epoch, source.decoded_bytes()
    cache = _frame_cache(d, decoded_bytes, reads_again=stream[1] > per_epoch)
    identity = source.plan.identity()
    if features.padded:
        robot_names = {number: robot.name for robot in matched.robots for number in robot.datasets}
        identity["robots"] = [robot_names.get(number) for number in range(len(metas))]  # None: without actions
    if matched.window_steps is not None:
        identity["window_steps"] = list(matched.window_steps)
    weights, digest = row_weights(config, metas, matched.config, (matched.window_steps or (1,))[0]) or (None, None)
    if digest is not None:
        identity["row_weights"] = digest
    positive = None
    if config.recap.labels is not None:
        used = [np.union1d(*pair) for pair in zip(chosen.train, chosen.held_out, strict=True)]
        labels, digest = read_labels(as_file(config.recap.labels), metas, used)
        identity |= {"labels": digest, "label_dropout": LABEL_DROPOUT}
        positive = PerFrame(labels)
    rows = Rows(
        metas=metas,
        members=datasets.members,
        train_episodes=chosen.train,
        eval_episodes=chosen.held_out,
        selection=selection,
        features=features,
        order=order,
        reading=replace(reading, frame_cache=cache),
        per_epoch=per_epoch,
        per_dataset=chosen.rows_per_dataset,
        dropped=dropped,
        identity=identity,
        rates={"frames_per_s": source.row_frames(), "decoded_bytes_per_s": source.row_bytes()},
        cached_bytes=decoded_bytes,
        epoch_ends=() if d.episode_weights is None else tuple(epoch_ends(source.plan, stream[1])),
        weights=weights,
        positive=positive,
        described=chosen.described,
    )
    return config, rows


def text_columns(config: Config, metas: Sequence[DatasetMetadata]) -> list[str]:
    """Return the text columns to read (--train.text_targets); raise ValueError if a dataset lacks one."""
    column = config.train.text_targets
    for meta in metas if column else ():
        texts = sorted(key for key, feature in meta.features.items() if feature.dtype == "string")
        if column not in texts:
            raise ValueError(
                f"--train.text_targets={column}: dataset {meta.root} has no such column of texts; it has {texts}"
                f"{''.join(f'; not read of it: {line}' for line in meta.not_read)}"
            )
    return [column] if column else []


def stream_of(config: Config, steps: int) -> tuple[int, int]:
    """Return the first position and the end of the run's stream of rows."""
    # With a variable number of workers, spare rows give each worker an equal number of blocks.
    spare = config.scaling.num_workers * config.batch_size if config.scaling.min_workers else 0
    return 0, steps * config.global_batch_size + spare


def frames_dropped(config: Config, policy_config: PreTrainedConfig, steps: Sequence[int] | None) -> int:
    """Return the number of frames to leave out at the end of each training episode, as LeRobot's sampler does.

    `steps` are the frames between two actions of a chunk, per dataset; None if 1 for all. Raises ValueError if the
    policy's own number assumes one frame per action, and a dataset has more.
    """
    if config.dataset.drop_n_last_frames is not None:
        return config.dataset.drop_n_last_frames
    dropped: int = getattr(policy_config, "drop_n_last_frames", 0)
    if dropped and steps is not None and max(steps) > 1:
        raise ValueError(
            f"--dataset.mixture: a '{policy_config.type}' leaves out the last {dropped} frames of each episode, whose "
            f"actions lie up to {max(steps)} frames apart by the members' fps: say how many frames of all of them, "
            f"--dataset.drop_n_last_frames={dropped * max(steps)}"
        )
    return dropped


def with_fitting_batch(config: Config, rows: int) -> tuple[Config, list[str]]:
    """Lower a rehearsal's batch size from the preset's if the dataset is smaller than a global batch, with a note.

    Raises ValueError for a global batch of more rows than there are training frames.
    """
    preset, notes = int(PRESETS["demo"]["batch_size"]), []
    if config.preset == "demo" and config.batch_size == preset and config.global_batch_size > rows:
        batch_size = max(1, rows * config.batch_size // config.global_batch_size)
        config = decided(config, {"batch_size": batch_size})
        notes = [
            f"--batch_size is {config.batch_size} instead of the preset's {preset}: there are {rows} training frames"
        ]
    if config.global_batch_size > rows:
        raise ValueError(
            f"a global batch of {config.global_batch_size} rows (batch_size {config.batch_size} x grad_accum "
            f"{config.grad_accum} x {config.scaling.num_workers} workers) is more than the {rows} training frames: a "
            "step would see frames twice; lower --batch_size or --grad_accum, or add episodes"
        )
    return config, notes


def _rows_per_block(config: Config, row_bytes: int) -> int:
    """Return the largest divisor of a micro-batch within BLOCK_BYTES, so that workers get whole blocks."""
    size = config.batch_size
    if config.scaling.min_workers is not None:
        return size  # any number of workers can then share the blocks
    return max([n for n in range(1, size + 1) if size % n == 0 and n * row_bytes <= BLOCK_BYTES], default=1)


def _with_shard_rows(config: Config, block_rows: int) -> Config:
    """Set the number of consecutive rows from one shard: a block for each worker of a node."""
    d, workers = config.dataset, config.scaling.num_workers
    if d.shards == 1 or d.shard_rows is not None:  # a resumed run keeps its number
        return config
    if workers % d.shards:
        raise ValueError(
            f"--dataset.shards={d.shards} with --scaling.num_workers={workers}: shards are for nodes with equally many "
            "workers each; give the number of nodes that the workers run on"
        )
    return decided(config, {"dataset.shard_rows": workers // d.shards * block_rows})


def _frame_cache(d: DatasetOptions, decoded_bytes: int, reads_again: bool) -> FrameCache | None:
    """Return the cache of decoded frames; refuse --dataset.global_shuffle unless all frames are cached.

    "auto" caches frames if the run reads them more than once (`reads_again`) and all of them fit this node's disk,
    which must not be a RAM disk.
    """
    gb, cache = cache_gb(FRAME_CACHE_GB), None
    if d.frame_cache == "auto":
        fits = 0 < decoded_bytes <= gb * 1e9 and has_capacity(Path(FRAMES_DIR), decoded_bytes)
        if reads_again and fits and not is_in_memory(Path(FRAMES_DIR)):
            cache = FrameCache(FRAMES_DIR, gb)
    elif d.frame_cache:
        cache = FrameCache(d.frame_cache, gb)
    if d.global_shuffle and decoded_bytes and (cache is None or decoded_bytes > gb * 1e9):
        state = "no frames are cached" if cache is None else f"VLA_CACHE_GB={gb:g} of them are cached"
        raise ValueError(
            f"--dataset.global_shuffle draws single frames of {decoded_bytes / 1e9:.3g} GB, and {state}: each would be "
            "searched for in its file. Cache them all (--dataset.frame_cache DIR, VLA_CACHE_GB), or leave "
            "--dataset.global_shuffle out"
        )
    return cache
