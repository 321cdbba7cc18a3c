"""What a run is, resolved and checked on the driver before Ray starts: data, policy, how they fit, how many steps.

`resolve` looks at files but starts nothing; `run/describe.py` says in words what it found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.relative_action_processor import RelativeActionsProcessorStep
from lerobot.utils.constants import IMAGENET_STATS

from lerobot_datasource import BLOCK_BYTES, LeRobotDatasource
from vla_finetuning.config import (
    CACHE_DIR,
    FRAMES_DIR,
    PRESETS,
    Config,
    MissingCameras,
    OnError,
    TrainMode,
)
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.frame_cache import FrameCache
from vla_finetuning.data.frames import Stretches
from vla_finetuning.data.metadata import (
    DatasetMetadata,
    fetch_dataset,
    how_drawn,
    load_metadata,
)
from vla_finetuning.data.node_cache import has_room
from vla_finetuning.data.reader import Decoding, frame_of
from vla_finetuning.data.relative_actions import RelativeActions, relative_action_stats
from vla_finetuning.data.selection import Choice, of_each, read_choice
from vla_finetuning.data.shards import Sharding
from vla_finetuning.data.statistics import check_stats, complete_stats
from vla_finetuning.data.storage import StoragePolicy
from vla_finetuning.data.videos import Frames
from vla_finetuning.policies import tiny_pi05  # noqa: F401  (registers the demo's policy type with LeRobot)
from vla_finetuning.policies.augment import augmentation_of
from vla_finetuning.policies.counting import flops_by_prompt
from vla_finetuning.policies.loading import WEIGHTS_FILE, FeatureMatch, match_features
from vla_finetuning.policies.optim import Recipe, make_recipe, require_shown
from vla_finetuning.policies.processors import (
    make_processors,
    normalization_mode,
    required_stats,
    with_imagenet_stats,
)
from vla_finetuning.policies.prompts import prompt_lengths
from vla_finetuning.policies.remote_code import HOW_TO_TRUST, RemoteCodeError, brought_along
from vla_finetuning.policies.trainable import TrainableReport
from vla_finetuning.run.base_policy import check_policy, check_policy_options, resolve_policy
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.episodes import select
from vla_finetuning.run.folder import CHECKPOINTS_NAME, SKIPPED_NAME
from vla_finetuning.run.mixing import Mixing, mixing_of
from vla_finetuning.run.mixture import (
    AGGREGATED,
    Stats,
    check_alike,
    check_ranges,
    join_stats,
    named_alike,
    names_of_first,
    ordered_alike,
)
from vla_finetuning.run.row_weights import row_weights


@dataclass(frozen=True)
class Run:
    """A resolved run. Pickled in flight to the training workers (without secrets; tokens stay in the environment).

    Attributes:
        train_episodes, eval_episodes: per dataset, int64 arrays; disjoint.
        policy_folder: a LeRobot pretrained folder, or None to start from random weights.
        parameters: how many there are and which train; None for policies other than PI0.5, which are not built here.
        prompts: lengths that the prompts of a micro-batch may have where they are computed with; PI0.5 only.
        flops_by_prompt: forward and backward of a row, counted, by the length of its prompt.
        base: which weights the run starts from (path, revision, digest).
        stats: normalisation statistics; `missing_stats` are still to be computed.
        rows_per_epoch: frames of the training episodes, on average where those have weights. steps: optimizer updates
            of the whole run.
        block_rows: rows of a block of training data. stream: identity of the run's stream of rows.
        decoded: of a row, by the names of their rates in metrics.jsonl: camera frames, and bytes out of the read task.
        notes: what is otherwise than asked for, or than it should be, for the plan.
        mixing: how well batches are mixed. stored_bytes: of a row, were its frames not fitted into another size; None
            where they are not, or differ among datasets.
        frame_cache: where nodes keep decoded frames, None for nowhere; kept_bytes: all there are of them.
        frames, frames_told: as `Selection`. epoch_ends: where epochs end in the stream, if not all are equally long.
        row_weights: of all frames of the dataset, float32; None where all weigh the same in the loss.
    """

    config: Config
    metas: tuple[DatasetMetadata, ...]
    train_episodes: tuple[np.ndarray, ...]
    eval_episodes: tuple[np.ndarray, ...]
    policy_config: PreTrainedConfig
    policy_folder: Path | None
    base: dict[str, Any]
    match: FeatureMatch
    stats: Stats
    missing_stats: dict[str, set[str]]
    rows_per_epoch: int
    steps: int
    parameters: TrainableReport | None = None
    prompts: tuple[int, ...] = ()
    flops_by_prompt: dict[int, int] = field(default_factory=dict)
    block_rows: int = 1
    stream: dict[str, Any] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    mixing: Mixing | None = None
    stored_bytes: int | None = None
    frame_cache: FrameCache | None = None
    kept_bytes: int = 0
    frames: tuple[Stretches, ...] = ()
    frames_told: tuple[tuple[str, ...], ...] = ()
    epoch_ends: tuple[int, ...] = ()
    row_weights: np.ndarray | None = None

    @property
    def image_size(self) -> list[int] | None:
        """(height, width) that frames are fitted into where they are decoded; None: as stored."""
        size = self.config.dataset.image_size
        return size if isinstance(size, list) else None

    @property
    def output_dir(self) -> Path:
        return self.config.folder

    @property
    def checkpoints_dir(self) -> Path:
        return self.output_dir / CHECKPOINTS_NAME

    @property
    def start(self) -> Progress:
        """The run before its first step: what it is a run of."""
        return Progress(0, 0, self.stream, self.base, self.what_trains, self.config.global_batch_size)

    @property
    def what_trains(self) -> str:
        """In words: the part of the policy (--train.mode), or the adapters in it."""
        peft = self.config.peft
        if not peft.enabled:
            return self.config.train.mode
        targets = "the policy type's own choice of layers" if peft.target_modules is None else peft.target_modules
        whole = f", and all of {peft.full_training_modules}" if peft.full_training_modules else ""
        return f"LoRA of rank {peft.r}, alpha {peft.lora_alpha or 8}, in {targets}{whole}"

    @property
    def disk_bytes(self) -> int:
        """The most that the run keeps in its folder."""
        weights = (self.policy_folder or self.output_dir) / WEIGHTS_FILE
        # A checkpoint is what trains, Adam's two moments and maybe an average, fp32; there is one more while an old one
        # is still there.
        checkpoint_bytes = (3 + self.config.ema.enable) * 4 * self.parameters.trainable if self.parameters else 0
        return 2 * checkpoint_bytes + (weights.stat().st_size if weights.is_file() else 0)

    @property
    def recipe(self) -> Recipe:
        """Optimizer and learning rate."""
        return make_recipe(self.config, self.policy_config)

    @property
    def drop_n_last_frames(self) -> int:
        """Of every training episode, so many are not trained on."""
        return _dropped(self.config, self.policy_config)

    @property
    def relative_actions(self) -> RelativeActions | None:
        """How predicted actions are relative to the state; None if they are absolute."""
        return relative_actions(self.policy_config)

    @property
    def drawn(self) -> dict[str, Any]:
        """How the pictures of the simulator that the datasets are from were drawn; nothing where it is not one way."""
        first, *others = map(how_drawn, self.metas)
        return first if all(other == first for other in others) else {}

    @property
    def rows_per_dataset(self) -> list[int]:
        """Frames that are trained on, of each dataset."""
        if self.frames:
            return [int(left.frames.sum()) for left in self.frames]
        return _rows(self.metas, self.train_episodes, self.drop_n_last_frames)

    @property
    def use_gpu(self) -> bool:
        return bool(self.config.scaling.use_gpu)

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of an optimizer step, of all workers together."""
        return self.config.grad_accum * self.config.scaling.num_workers

    @property
    def last_row(self) -> int:
        """Where the run's stream of rows ends: with its last step, filled up so that workers get equally many blocks.

        With a fixed number of workers they do anyway.
        """
        spare = self.config.scaling.num_workers * self.config.batch_size if self.config.scaling.min_workers else 0
        return self.steps * self.config.global_batch_size + spare

    def processors(
        self, config: PreTrainedConfig | None = None
    ) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
        """The policy's pre- and postprocessor, with the run's statistics. `config` stands in for `policy_config`."""
        return make_processors(
            self.policy_folder,
            config or self.policy_config,
            self.stats,
            self.config.rename_map,
            trusted=self.config.policy_trust_remote_code,
        )

    @property
    def sharding(self) -> Sharding | None:
        """How the training rows are divided among nodes."""
        d = self.config.dataset
        return None if d.shards == 1 or d.shard_rows is None else Sharding(d.shards, d.shard_rows)

    def reader(self) -> partial[LeRobotDatasource]:
        """The datasource of the training rows, but for `stream`: which positions of the run's stream.

        It does not look for files: `resolve` did, and where an error is told a store that hangs must not be asked.
        """
        return partial(
            LeRobotDatasource,
            self.metas,
            episodes=self.train_episodes,
            camera_keys=self.match.camera_keys,
            columns=self.match.dataset_keys,
            delta_timestamps=self.match.delta_timestamps,
            image_size=self.image_size,
            drop_n_last_frames=self.drop_n_last_frames,
            stretches=self.frames or None,
            weights=list(self.config.dataset.mixture.values()) or None,
            shuffle_seed=self.config.seed,
            shuffle_window=self.config.dataset.shuffle_window,
            window_segments=self.config.dataset.window_segments,
            at_key_frames=self.config.dataset.at_key_frames,
            global_shuffle=self.config.dataset.global_shuffle,
            sharding=self.sharding,
            rows_multiple=self.config.rows_multiple,
            block_rows=self.block_rows,
            tolerance_s=self.config.tolerance_s,
            num_cpus=self.config.scaling.cpus_per_read_task,
            on_error=cast(OnError, self.config.dataset.on_error),
            skip_log=self.output_dir / SKIPPED_NAME,
            look=False,
            frame_cache=self.frame_cache,
        )

    def frames_named(self) -> Frames | None:
        """Fills in the frames that the run's batches name, which they do on one node; None where none are kept."""
        cameras = {self.config.rename_map.get(key, key): key for key in self.match.camera_keys}
        decoding = Decoding(
            tolerance_s=self.config.tolerance_s,
            threads=max(1, round(self.config.scaling.cpus_per_read_task)),
            image_size=None if self.image_size is None else (self.image_size[0], self.image_size[1]),
            frame_cache=self.frame_cache,
        )
        return None if self.frame_cache is None else Frames(self.metas, cameras, decoding)

    def held_out(self, look: bool = False) -> LeRobotDatasource:
        """The held-out episodes, in stored order. `look`: whether to look that their files are there."""
        d = self.config.dataset
        return LeRobotDatasource(
            self.metas,
            episodes=[held_out.tolist() for held_out in self.eval_episodes],
            camera_keys=self.match.camera_keys,
            columns=self.match.dataset_keys,
            delta_timestamps=self.match.delta_timestamps,
            image_size=self.image_size,
            tolerance_s=self.config.tolerance_s,
            num_cpus=self.config.scaling.cpus_per_read_task,
            on_error=cast(OnError, d.on_error),
            look=look,
            frame_cache=self.frame_cache,
        )

    def epochs_of(self, positions: np.ndarray) -> np.ndarray:
        """The epochs that positions of the run's stream are of, int64."""
        if self.epoch_ends:
            return np.searchsorted(self.epoch_ends, positions, side="right")
        return positions // self.rows_per_epoch

    def rows_of_steps(self, first: int, last: int) -> dict[str, list[tuple[int, int]]]:
        """The rows of optimizer steps [first, last), of all ranks: by their dataset's root, runs of `index`, inclusive.

        Computed from the plan alone, which is what every batch was checked against.
        """
        batch = self.config.global_batch_size
        plan = self.reader()(stream=(first * batch, last * batch)).plan
        found: dict[int, set[int]] = {}
        for window in plan.slices(first * batch, last * batch):
            part, index = window.rows()
            datasets = plan.episodes.dataset_index[window.episode[part]]
            for dataset, row in zip(datasets.tolist(), index.tolist(), strict=True):
                found.setdefault(dataset, set()).add(row)
        runs = {}
        for dataset, rows in sorted(found.items()):
            index = np.array(sorted(rows))
            pieces = np.split(index, np.flatnonzero(np.diff(index) > 1) + 1)
            runs[self.metas[dataset].root] = [(int(piece[0]), int(piece[-1])) for piece in pieces]
        return runs


def block_rows(config: Config, row_bytes: int) -> int:
    """The most rows that divide a micro-batch and stay within BLOCK_BYTES: workers then get whole blocks in turn.

    Where workers come and go, all of it: any number of workers can then be dealt any number of them.
    """
    size = config.batch_size
    if config.scaling.min_workers is not None:
        return size
    return max([n for n in range(1, size + 1) if size % n == 0 and n * row_bytes <= BLOCK_BYTES], default=1)


def resolve(config: Config, gpus_found: int) -> Run:
    """Find, read and check everything the run needs. Raises ValueError or FileNotFoundError saying what to do."""
    if config.scaling.use_gpu is None:
        config = replace(config, scaling=replace(config.scaling, use_gpu=gpus_found > 0))
    # Workers, and whoever resumes the run, have other working directories.
    roots = [_absolute(root) for root in config.roots]
    mixture = dict(zip(roots, config.dataset.mixture.values(), strict=False))
    if len(mixture) < len(config.dataset.mixture):
        raise ValueError(f"--dataset.mixture names a dataset twice: {list(config.dataset.mixture)}")
    out = config.dataset.exclude_episodes
    excluded = read_choice(out.removeprefix("@")) if isinstance(out, str) else out  # what the file says now is kept
    progress = config.sample_weighting.progress_path
    config = replace(
        config,
        output_dir=_absolute(config.output_dir or ""),
        sample_weighting=replace(config.sample_weighting, progress_path=_absolute(progress) if progress else None),
        dataset=replace(
            config.dataset,
            root=None if mixture else ",".join(roots) or None,
            mixture=mixture,
            episodes=_of_absolute(config.dataset.episodes),
            exclude_episodes=_of_absolute(excluded),
            episode_weights=_absolute_file(config.dataset.episode_weights),
        ),
    )
    if config.dataset.repo_id:
        path, commit = fetch_dataset(
            config.dataset.repo_id,
            config.dataset.revision,
            episodes=of_each(config.dataset.episodes, [config.dataset.repo_id], "--dataset.episodes")[0],
            camera_keys=config.dataset.camera_keys,
        )
        config = replace(config, dataset=replace(config.dataset, revision=commit))
        roots = [path]
    path_given = config.policy_path
    if path_given and Path(_absolute(path_given)).is_dir():
        path_given = _absolute(path_given)
    if config.preset == "demo":
        from vla_finetuning.demo import prepare_demo

        root, base = prepare_demo(CACHE_DIR / "demo", roots[0] if roots else None)
        roots = roots or [_absolute(root)]
        if not (path_given or config.policy_type):
            path_given = _absolute(base)
    d = config.dataset
    policy = StoragePolicy(d.read_timeout_s, _absolute(d.cache_dir) if d.cache_dir else None, d.cache_size_gb)
    metas = named_alike([load_metadata(root, storage_policy=policy) for root in roots], config.rename_map)

    policy_config, folder, base_info = resolve_policy(config, path_given)
    if (brought := brought_along(policy_config)) and not config.policy_trust_remote_code:
        raise RemoteCodeError(
            f"policy {base_info['path']}: a '{policy_config.type}' runs code that comes with {brought}: {HOW_TO_TRUST}"
        )
    if hasattr(get_policy_class(policy_config.type), "update"):
        raise ValueError(
            f"policy {base_info['path']}: a '{policy_config.type}' changes after every step otherwise than by its "
            "gradients, which is not done here: train it with lerobot-train"
        )
    if config.dataset.on_error == "skip" and not isinstance(policy_config, PI05Config):
        raise ValueError(
            f"policy {base_info['path']}: --dataset.on_error=skip needs a loss that can leave rows out, as PI0.5's "
            f"can; this is a '{policy_config.type}': use --dataset.on_error=stop"
        )
    require_shown(policy_config, f"policy {base_info['path']}")
    config = replace(config, policy_path=path_given, policy_revision=base_info["revision"])
    check_policy_options(config, policy_config)
    make_recipe(config, policy_config)  # refuses options that it cannot have
    try:
        match = match_features(
            policy_config,
            _selected_features(metas[0], config.dataset.camera_keys),
            names_of_first(metas, config.rename_map),
            missing_cameras=cast(MissingCameras, config.dataset.missing_cameras),
            fps=metas[0].fps,
            left_out=sorted(set(metas[0].camera_keys) - set(config.dataset.camera_keys or metas[0].camera_keys)),
        )
    except ValueError as error:
        raise ValueError(f"dataset {metas[0].root} and policy {base_info['path']}: {error}") from error
    if config.augments:
        augmentation_of(config, list(policy_config.image_features))  # what it would refuse
    if isinstance(config.dataset.image_size, list):
        _check_image_size(policy_config, config.dataset.image_size)
    check_alike(metas, match.dataset_keys, config.rename_map)
    metas = ordered_alike(metas, match.dataset_keys, config.dataset.dimension_map)
    relative = relative_actions(policy_config)
    for meta in metas:
        if relative is not None and any(meta.features[key].order is not None for key in match.dataset_keys):
            raise ValueError(
                f"dataset {meta.root}: its dimensions are in another order than the first dataset's, in which "
                "statistics of relative actions cannot be joined: convert it to that order, or train with absolute "
                "actions, --policy.use_relative_actions=false"
            )
    parameters = check_policy(policy_config, folder, config.train, config.peft)
    dropped = _dropped(config, policy_config)
    by, weights = config.dataset.episode_weights, None
    if by is not None:
        weights = episode_weights(metas, roots, by, _absolute)
    chosen = select(metas, roots, config, dropped, weights)
    rows = sum(_rows(metas, chosen.train, dropped))
    if chosen.frames:
        rows = max(1, round(sum(left.rows for left in chosen.frames)))
    config, smaller = _fitting_batch(config, rows)
    if config.global_batch_size > rows:
        raise ValueError(
            f"a global batch of {config.global_batch_size} rows (batch_size {config.batch_size} x grad_accum "
            f"{config.grad_accum} x {config.scaling.num_workers} workers) is more than the {rows} training frames: a "
            "step would see frames twice; lower --batch_size or --grad_accum, or add episodes"
        )
    needed = required_stats(policy_config, {k: metas[0].features[k] for k in match.dataset_keys})
    if config.dataset.use_imagenet_stats:
        own = {k: names - IMAGENET_STATS.keys() if k in match.camera_keys else names for k, names in needed.items()}
        needed = {key: names for key, names in own.items() if names}
    if any(len(episodes) for episodes in chosen.held_out):
        # The mean action is what a policy must beat on held-out episodes (evaluation/open_loop.py).
        needed["action"] = needed.get("action", set()) | {"mean"}
    missing = _missing_stats(metas, needed, () if relative is None else ("action",))
    for meta in metas:
        check_stats(meta, {key: names for key, names in needed.items() if relative is None or key != "action"})
    run = Run(
        config=config,
        metas=metas,
        train_episodes=chosen.train,
        eval_episodes=chosen.held_out,
        policy_config=policy_config,
        policy_folder=folder,
        base=base_info,
        match=match,
        stats={},
        missing_stats=missing,
        rows_per_epoch=rows,
        steps=config.resolve_steps(rows),
        parameters=parameters,
        notes=(*chosen.notes, *smaller),
        frames=chosen.frames,
        frames_told=chosen.told,
        row_weights=row_weights(config, metas, policy_config),
    )
    run, stored_bytes = _with_image_size(run)
    run = _with_shard_rows(run)
    if isinstance(policy_config, PI05Config):
        cameras, train_mode = len(match.camera_keys), cast(TrainMode, config.train.mode)
        prompts = prompt_lengths(policy_config, cameras, config.train.trim_prompts)
        flops = flops_by_prompt(policy_config, cameras, train_mode, config.train.noise_draws, prompts, config.peft)
        run = replace(run, prompts=prompts, flops_by_prompt=flops)
    # Checks that all files are there and that the datasets agree.
    source = run.reader()(stream=(0, run.last_row), look=True)
    if config.eval_steps:
        run.held_out(look=True)
    if not missing:
        run = replace(run, stats=_stats(run, source.plan.rows_per_source))
        run.processors()  # a tokenizer out of reach is told now
    frame_cache, kept_bytes = _frame_cache(run, source), source.decoded_bytes()
    _check_global_shuffle(config, frame_cache, kept_bytes)
    return replace(
        run,
        block_rows=block_rows(config, source.row_bytes()),
        stream=source.plan.identity(),
        rows_per_epoch=source.plan.rows_per_epoch,
        epoch_ends=() if weights is None else tuple(source.plan.epoch_ends(run.last_row)),
        decoded={"frames_per_s": source.row_frames(), "decoded_bytes_per_s": source.row_bytes()},
        mixing=mixing_of(config, source),
        stored_bytes=stored_bytes,
        frame_cache=frame_cache,
        kept_bytes=kept_bytes,
    )


def _with_shard_rows(run: Run) -> Run:
    """The run with how many rows of a shard come in turn decided: a block for each of a node's workers.

    A run that is resumed keeps what it was started with, whatever its workers.
    """
    d, workers = run.config.dataset, run.config.scaling.num_workers
    if d.shards == 1 or d.shard_rows is not None:
        return run
    if workers % d.shards:
        raise ValueError(
            f"--dataset.shards={d.shards} with --scaling.num_workers={workers}: shards are for nodes with equally many "
            "workers each; give the number of nodes that the workers run on"
        )
    rows = workers // d.shards * block_rows(run.config, run.reader()(stream=(0, run.last_row)).row_bytes())
    return replace(run, config=replace(run.config, dataset=replace(d, shard_rows=rows)))


def _frame_cache(run: Run, source: LeRobotDatasource) -> FrameCache | None:
    """Where decoded frames are kept; "auto" is for runs that read them again, and all of which fit this node's disk."""
    d = run.config.dataset
    if d.frame_cache != "auto":
        return FrameCache(_absolute(d.frame_cache), d.frame_cache_gb) if d.frame_cache else None
    size = source.decoded_bytes()
    again = run.last_row > run.rows_per_epoch
    if again and 0 < size <= d.frame_cache_gb * 1e9 and has_room(Path(FRAMES_DIR), size):
        return FrameCache(FRAMES_DIR, d.frame_cache_gb)
    return None


def _check_global_shuffle(config: Config, kept: FrameCache | None, size: int) -> None:
    """Single frames are drawn only where they need not be decoded: of `size` bytes of frames, all are `kept`."""
    if not config.dataset.global_shuffle or not size:
        return
    if kept is None or size > kept.gb * 1e9:
        where = "no frames are kept" if kept is None else f"--dataset.frame_cache_gb={kept.gb:g} of them are kept"
        raise ValueError(
            f"--dataset.global_shuffle draws single frames of {size / 1e9:.3g} GB, and {where}: a video would be "
            "sought through for each. Keep them all (--dataset.frame_cache DIR, --dataset.frame_cache_gb), or leave it "
            "out"
        )


def with_stats(run: Run) -> Run:
    """Compute the statistics that are missing, in a Ray Data pass, cached beside the run."""
    if not run.missing_stats:
        return run
    cache_dir, relative, missing = run.output_dir / "stats", run.relative_actions, dict(run.missing_stats)
    of_relative = {"action": missing.pop("action")} if relative is not None else {}
    completed = []
    for meta in run.metas:
        stats = complete_stats(meta, missing, cache_dir=cache_dir)[0]
        if relative is not None:
            stats["action"] = relative_action_stats(meta, relative, cache_dir=cache_dir)
            check_stats(replace(meta, stats=stats), of_relative)
        completed.append(stats)
    metas = tuple(replace(meta, stats=stats) for meta, stats in zip(run.metas, completed, strict=True))
    rows = run.stream["rows_per_source"]
    return replace(run, stats=_stats(replace(run, metas=metas), rows), missing_stats={})


def _stats(run: Run, rows_per_source: Sequence[int]) -> Stats:
    """The run's normalisation statistics, of all its datasets together."""
    d = run.config.dataset
    if not d.mixed_ranges:
        check_ranges(run.metas, run.match.dataset_keys)
    stats = join_stats(run.metas, rows_per_source if d.mixture and d.mixture_stats == "weights" else None)
    return with_imagenet_stats(stats, run.match.camera_keys) if d.use_imagenet_stats else stats


def _dropped(config: Config, policy_config: PreTrainedConfig) -> int:
    """Frames at the end of each training episode that are left out: as LeRobot's sampler does for some policies."""
    asked = config.dataset.drop_n_last_frames
    return getattr(policy_config, "drop_n_last_frames", 0) if asked is None else asked


def _rows(metas: Sequence[DatasetMetadata], episodes: Sequence[np.ndarray], dropped: int) -> list[int]:
    return [int((meta.episode_length[e] - dropped).sum()) for meta, e in zip(metas, episodes, strict=True)]


def _absolute(path: str | Path) -> str:
    """Local paths made absolute, `~` being home; URIs as they are."""
    return str(path) if "://" in str(path) else str(Path(os.path.expanduser(path)).absolute())


def relative_actions(policy_config: PreTrainedConfig) -> RelativeActions | None:
    """How the actions that the policy predicts are relative to the state; None if they are not."""
    if not getattr(policy_config, "use_relative_actions", False):
        return None
    names = getattr(policy_config, "action_feature_names", None)
    step = RelativeActionsProcessorStep(True, getattr(policy_config, "relative_exclude_joints", []), names)
    dimensions = step._build_mask(policy_config.output_features["action"].shape[0])
    return RelativeActions(len(policy_config.action_delta_indices or [0]), tuple(dimensions))


def _missing_stats(
    metas: Sequence[DatasetMetadata], needed: dict[str, set[str]], others: Sequence[str] = ()
) -> dict[str, set[str]]:
    """What has to be computed, `{feature: statistics}`: with several datasets, all must have what is joined.

    Of `others` always, whatever the datasets have.
    """
    if len(metas) > 1:
        needed = {key: names | AGGREGATED for key, names in needed.items()}
    missing = {
        key: {name for name in names if key in others or any(name not in meta.stats.get(key, {}) for meta in metas)}
        for key, names in needed.items()
    }
    missing = {key: names for key, names in missing.items() if names}
    if cameras := sorted(missing.keys() & set(metas[0].camera_keys)):
        raise ValueError(
            f"dataset {', '.join(meta.root for meta in metas)}: the policy normalises images, and meta/stats.json "
            f"lacks {', '.join(f'{sorted(missing[key])} of {key}' for key in cameras)}. These are not computed here, "
            "since every video would have to be decoded; have LeRobot write them with "
            "`python -m lerobot.scripts.augment_dataset_quantile_stats`"
        )
    return missing


def _with_image_size(run: Run) -> tuple[Run, int | None]:
    """The run with "auto" decided; and the bytes of a row as stored, where frames are fitted into another size.

    Fitted into the policy's own size where that at least halves a row, or is what makes datasets go together.
    """

    def sized(image_size: list[int] | str) -> Run:
        return replace(run, config=replace(run.config, dataset=replace(run.config.dataset, image_size=image_size)))

    def row_bytes(run: Run) -> int:
        return run.reader()(stream=(0, run.last_row)).row_bytes()

    asked = run.config.dataset.image_size
    own = _own_size(run.policy_config) if asked == "auto" else asked
    if not isinstance(own, list):
        return sized("stored"), None
    stored, fitted = sized("stored"), sized(own)
    keys = run.match.camera_keys
    if any(
        frame_of(meta.features[k], None) != frame_of(run.metas[0].features[k], None) for k in keys for meta in run.metas
    ):
        return fitted, None
    stored_bytes = row_bytes(stored)
    if asked == "auto" and stored_bytes < 2 * row_bytes(fitted):
        return stored, None
    return fitted, stored_bytes


def _own_size(policy_config: PreTrainedConfig) -> list[int] | None:
    """[height, width] that the policy itself fits frames into before it does anything else with them, if it does."""
    own = getattr(policy_config, "image_resolution", None)
    normalised = normalization_mode(policy_config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY
    return None if own is None or normalised else list(own)


def _check_image_size(policy_config: PreTrainedConfig, image_size: list[int]) -> None:
    """Refuse a size at which the policy would see other pixels than after its own resizing.

    PI0 and its kin fit images, in [0, 1], into `image_resolution`, and leave those alone that have that size.
    """
    own = getattr(policy_config, "image_resolution", None)
    if own is None:
        raise ValueError(
            f"--dataset.image_size={image_size}: a {policy_config.type} policy fits no images into a size as PI0.5 "
            "does (centred, black around), so it would be trained on others than it gets on the robot; leave it out"
        )
    if tuple(image_size) != tuple(own):
        raise ValueError(f"--dataset.image_size={image_size}: the policy sees {list(own)}; give that, or leave it out")
    if normalization_mode(policy_config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY:
        raise ValueError(
            f"--dataset.image_size={image_size}: the policy normalises images before it resizes them, which cannot be "
            "had in the other order; leave it out"
        )


def _selected_features(meta: DatasetMetadata, camera_keys: list[str] | None) -> dict[str, Any]:
    if unknown := sorted(set(camera_keys or ()) - set(meta.camera_keys)):
        raise ValueError(f"--dataset.camera_keys names {unknown}, and the cameras are {meta.camera_keys}")
    dropped = set(meta.camera_keys) - set(camera_keys) if camera_keys is not None else set()
    return {k: f for k, f in meta.features.items() if k not in dropped and not f.is_depth}


def _fitting_batch(config: Config, rows: int) -> tuple[Config, list[str]]:
    """A rehearsal's batch, made to fit a small dataset unless the user chose it; and a note when it was."""
    own = int(PRESETS["demo"]["batch_size"])
    if config.preset != "demo" or config.batch_size != own or config.global_batch_size <= rows:
        return config, []
    size = max(1, rows * config.batch_size // config.global_batch_size)
    note = f"--batch_size is {size} instead of the preset's {own}: there are {rows} training frames"
    return replace(config, batch_size=size), [note]


def _absolute_file(source: str | None) -> str | None:
    """@FILE by a path that is the same from any folder."""
    return f"@{_absolute(source.removeprefix('@'))}" if source is not None and source.startswith("@") else source


def _of_absolute(choice: Choice) -> Any:
    """Episodes by the roots as `resolve` knows them."""
    return {_absolute(root): numbers for root, numbers in choice.items()} if isinstance(choice, Mapping) else choice
