"""A run, resolved and checked on the driver before Ray starts: what it does, which policy, which rows.

`resolve` looks at files but starts nothing; `run/describe.py` says in words what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode
from lerobot.configs.policies import PreTrainedConfig

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.config import CACHE_DIR, PRESETS, Config
from vla_finetuning.data.dataset_files import fetch_dataset
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.data.per_frame import PerFrame
from vla_finetuning.data.reader import frame_of
from vla_finetuning.data.selection import of_each
from vla_finetuning.data.statistics import check_stats
from vla_finetuning.policies.augment import augmentation_of
from vla_finetuning.policies.counting import flops_by_prompt
from vla_finetuning.policies.loading import WEIGHTS_FILE, FeatureMatch, match_features
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.pipelines import check_prompts_differ
from vla_finetuning.policies.processors import normalization_mode, required_stats
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.remote_code import HOW_TO_TRUST, RemoteCodeError, brought_along
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.base_policy import check_policy, check_policy_options, resolve_policy
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.episodes import ChosenEpisodes, select
from vla_finetuning.run.folder import SKIPPED_NAME
from vla_finetuning.run.holes import check_holes
from vla_finetuning.run.job import Job
from vla_finetuning.run.labels import read_labels
from vla_finetuning.run.mixing import mixing_of
from vla_finetuning.run.mixture import Stats, check_alike, check_ranges, named_alike, names_of_first, ordered_alike
from vla_finetuning.run.preflight import (
    absolute,
    check_camera_keys,
    load_datasets,
    observations_renamed,
    with_absolute_paths,
)
from vla_finetuning.run.row_weights import row_weights
from vla_finetuning.run.rows import (
    Rows,
    check_global_shuffle,
    frame_cache_of,
    rows_per_block,
    sharding_of,
    with_shard_rows,
)
from vla_finetuning.run.statistics import (
    Names,
    computed_stats,
    decide,
    exact_needed,
    finished_stats,
    joint_stats,
    missing_stats,
    needed_stats,
    relative_actions,
)

Metas = Sequence[DatasetMetadata]


@dataclass(frozen=True)
class Run:
    """A run of `vla.py`: what it does, which policy, which rows.

    Attributes:
        config: the options, with what was decided of them ("auto", paths made absolute).
        match: how the dataset's features are the policy's.
        missing_stats: statistics still to be computed (`with_stats`), without which `policy` has none.
        statistics: which statistics these are, and how they describe the data, for the plan.
        notes: what differs from what was asked for, or from what it should be, for the plan.
    """

    config: Config
    job: Job
    policy: PolicySpec
    rows: Rows
    match: FeatureMatch
    missing_stats: Names = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Base:
    """The policy that a run starts from: its configuration, the folder of its weights if any, its identity."""

    config: PreTrainedConfig
    folder: Path | None
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        return f"policy {self.identity['path']}"


def resolve(config: Config, gpus_found: int, metas: Metas = ()) -> Run:
    """Find, read and check everything the run needs. Raises ValueError or FileNotFoundError saying what to do.

    Args:
        metas: of the datasets, where `preflight.examine` has just read it.
    """
    if config.scaling.use_gpu is None:
        config = replace(config, scaling=replace(config.scaling, use_gpu=gpus_found > 0))
    config, roots = with_absolute_paths(config)
    config, roots, policy_path = _fetched(config, roots)
    d = config.dataset
    metas = metas or load_datasets(config, roots)
    asked_names, config = config.rename_map, replace(config, rename_map=observations_renamed(config.rename_map))
    metas = named_alike(metas, config.rename_map)
    base = _base(config, policy_path)
    config = replace(config, policy_path=policy_path, policy_revision=base.identity["revision"])
    check_policy_options(config, base.config)
    recipe = make_recipe(config, base.config)
    match = _match(config, metas[0], names_of_first(metas, config.rename_map), base)
    metas = _alike(config, metas, match, base.config)
    parameters = check_policy(base.config, base.folder, config.train, config.peft)
    dropped = _dropped(config, base.config)
    weights = None if d.episode_weights is None else episode_weights(metas, roots, d.episode_weights, absolute)
    chosen = select(metas, roots, config, dropped, weights)
    holes = check_holes(config, roots, metas, chosen, match.camera_keys)
    trained = chosen.rows(metas, dropped)
    config, smaller = _fitting_batch(config, trained)
    steps = config.resolve_steps(trained)
    config, rows = _rows(config, metas, match, chosen, base.config, dropped, steps)
    rows = replace(rows, weights=row_weights(config, metas, base.config))
    rows = _with_labels(config, rows)
    needed = needed_stats(
        base.config, metas[0], match.camera_keys, match.dataset_keys, d.use_imagenet_stats, rows.any_held_out
    )
    relative = relative_actions(base.config)
    missing = missing_stats(metas, needed, () if relative is None else ("action",))
    for meta in metas if d.statistics != "exact" else ():
        check_stats(meta, {key: names for key, names in needed.items() if relative is None or key != "action"})
    decision = decide(config, metas, chosen.train, needed, missing, relative)
    if decision.described and not d.mixed_ranges:
        check_ranges(metas, match.dataset_keys)
    if decision.statistics == "exact":
        missing = exact_needed(metas[0].features, needed)
    config = replace(config, dataset=replace(config.dataset, statistics=decision.statistics))
    cameras, train, flops = len(match.camera_keys), config.train, {}
    family = family_of(base.config)
    prompts = family.prompt_lengths(base.config, cameras, train.trim_prompts)
    if prompts and family.from_config:
        flops = flops_by_prompt(base.config, cameras, train.mode, train.noise_draws, prompts, config.peft)
    spec = PolicySpec(
        config=base.config,
        folder=base.folder,
        base=base.identity,
        train=config.train,
        adapters=config.peft,
        recipe=recipe,
        cameras=cameras,
        stats={},
        seed=config.seed,
        image_transforms=config.dataset.image_transforms,
        rename_map=config.rename_map,
        trusted=config.policy_trust_remote_code,
        average=config.ema.decay if config.ema.enable else None,
        export_average=config.takes_average,
        parameters=parameters,
        prompts=prompts,
        flops_by_prompt=flops,
    )
    if not missing:
        joint = joint_stats(config, metas, rows.identity["rows_per_source"])
        spec = replace(spec, stats=_stats(config, base.config, rows, match, joint))
    else:
        needed = required_stats(base.config, {key: metas[0].features[key] for key in match.dataset_keys})
        stand_in = replace(spec, stats=_stand_in(needed, metas[0]))
    preprocessor, _ = (stand_in if missing else spec).processors()  # a tokenizer out of reach, or unfit, is reported
    if rows.positive is not None:
        check_prompts_differ(preprocessor, sorted(metas[0].tasks.values())[:1] or [""], base.name)
    job = make_job(config, spec, steps, rows.identity, spec.what_trains)
    config = replace(config, rename_map=asked_names)
    return Run(config, job, spec, rows, match, missing, decision.lines, (*chosen.notes, *holes, *smaller))


def with_config(run: Run, config: Config, steps: int | None = None) -> Run:
    """The run with other options: where it writes, how long it trains, in which batches, on which workers, how a step
    is computed. Datasets, episodes and the policy's weights stay.

    Args:
        steps: optimizer updates; as many as before when None.
    """
    rows = replace(
        run.rows,
        order=replace(
            run.rows.order,
            stream=_stream(config, run.job.steps if steps is None else steps),
            rows_multiple=config.rows_multiple,
        ),
        reading=replace(run.rows.reading, skip_log=config.folder / SKIPPED_NAME),
    )
    policy = replace(
        run.policy,
        train=config.train,
        adapters=config.peft,
        average=config.ema.decay if config.ema.enable else None,
        export_average=config.takes_average,
    )
    job = make_job(config, policy, run.job.steps if steps is None else steps, rows.identity, policy.what_trains)
    return replace(run, config=config, job=job, policy=policy, rows=rows)


def with_stats(run: Run) -> Run:
    """Compute the statistics that are missing, in a Ray Data pass, cached beside the run."""
    if not run.missing_stats:
        return run
    metas, joint = computed_stats(
        run.config,
        run.rows.metas,
        run.rows.train_episodes,
        run.missing_stats,
        relative_actions(run.policy.config),
        run.rows.identity["rows_per_source"],
        run.job.output_dir / "stats",
    )
    rows = replace(run.rows, metas=metas)
    policy = replace(run.policy, stats=_stats(run.config, run.policy.config, rows, run.match, joint))
    return replace(run, rows=rows, policy=policy, missing_stats={})


def make_job(
    config: Config,
    policy: PolicySpec,
    steps: int,
    identity: dict[str, Any],
    what_trains: str,
    global_batch_size: int | None = None,
) -> Job:
    """What a run of these options does.

    Args:
        identity: of what the run trains on. what_trains: in words. global_batch_size: the options' when None.
            A checkpoint with others does not resume.
    """
    weights = (policy.folder or config.folder) / WEIGHTS_FILE
    return Job(
        output_dir=config.folder,
        steps=steps,
        seed=config.seed,
        batch_size=config.batch_size,
        batches_per_step=config.grad_accum * config.scaling.num_workers,
        scaling=config.scaling,
        start=Progress(0, 0, identity, policy.base, what_trains, global_batch_size or config.global_batch_size),
        # There is one more checkpoint while an old one still exists.
        disk_bytes=2 * policy.checkpoint_bytes + (weights.stat().st_size if weights.is_file() else 0),
    )


def _stand_in(needed: Names, meta: DatasetMetadata) -> Stats:
    """Statistics with which processors can be made before the dataset's own are computed: 0 to 1."""
    low = {"min", "mean", "q01", "q10"}
    shapes = {key: (3, 1, 1) if key in meta.camera_keys else meta.features[key].shape for key in needed}
    return {
        key: {name: np.full(shapes[key], 0.0 if name in low else 1.0) for name in names}
        for key, names in needed.items()
    }


def _stats(config: Config, policy_config: PreTrainedConfig, rows: Rows, match: FeatureMatch, joint: Stats) -> Stats:
    return finished_stats(config.dataset, policy_config, rows.metas, match.camera_keys, match.dataset_keys, joint)


# ---- where data and policy are -------------------------------------------------------------------------------------


def _fetched(config: Config, roots: list[str]) -> tuple[Config, list[str], str | None]:
    """The options, the datasets' roots and the policy's path once what is on the Hub, or the demo's own, is here."""
    if config.dataset.repo_id:
        path, commit = fetch_dataset(
            config.dataset.repo_id,
            config.dataset.revision,
            episodes=of_each(config.dataset.episodes, [config.dataset.repo_id], "--dataset.episodes")[0],
            camera_keys=config.dataset.camera_keys,
        )
        config = replace(config, dataset=replace(config.dataset, revision=commit))
        roots = [path]
    policy_path = config.policy_path
    if policy_path and Path(absolute(policy_path)).is_dir():
        policy_path = absolute(policy_path)
    if config.preset == "demo":
        from vla_finetuning.demo import prepare_demo

        root, base = prepare_demo(CACHE_DIR / "demo", roots[0] if roots else None, config.recap.labels is not None)
        roots = roots or [absolute(root)]
        if not (policy_path or config.policy_type):
            policy_path = absolute(base)
    return config, roots, policy_path


def _base(config: Config, path: str | None) -> _Base:
    """The policy that the run starts from."""
    base = _Base(*resolve_policy(config, path))
    kind = base.config.type
    if (brought := brought_along(base.config)) and not config.policy_trust_remote_code:
        raise RemoteCodeError(f"{base.name}: a '{kind}' runs code that comes with {brought}: {HOW_TO_TRUST}")
    if config.dataset.on_error == "skip" and not family_of(base.config).row_losses:
        raise ValueError(
            f"{base.name}: --dataset.on_error=skip needs a loss that can leave rows out, as that of "
            f"{types_that(lambda family: family.row_losses)}; this is a '{kind}': use --dataset.on_error=stop"
        )
    return base


# ---- how they fit --------------------------------------------------------------------------------------------------


def _match(config: Config, meta: DatasetMetadata, rename_map: dict[str, str], base: _Base) -> FeatureMatch:
    """How the (first) dataset's features are the policy's; what the policy cannot take is refused."""
    d = config.dataset
    check_camera_keys(meta, d.camera_keys)
    try:
        match = match_features(
            base.config,
            _selected_features(meta, d.camera_keys),
            rename_map,
            missing_cameras=d.missing_cameras,
            fps=meta.fps,
            left_out=sorted(set(meta.camera_keys) - set(d.camera_keys or meta.camera_keys)),
        )
    except ValueError as error:
        not_read = f" (not read of the dataset: {'; '.join(meta.not_read)})" if meta.not_read else ""
        raise ValueError(f"dataset {meta.root} and {base.name}: {error}{not_read}") from error
    if config.augments:
        keys = list(base.config.image_features)
        augmentation_of(config.train.augmentation, d.image_transforms, config.seed, keys)  # what it would refuse
    if isinstance(d.image_size, list):
        _check_image_size(base.config, d.image_size)
    return match


def _alike(
    config: Config, metas: Metas, match: FeatureMatch, policy_config: PreTrainedConfig
) -> tuple[DatasetMetadata, ...]:
    """The datasets with their dimensions in one order."""
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
    return tuple(metas)


# ---- rows ----------------------------------------------------------------------------------------------------------


def _rows(
    config: Config,
    metas: Metas,
    match: FeatureMatch,
    chosen: ChosenEpisodes,
    policy_config: PreTrainedConfig,
    dropped: int,
    steps: int,
) -> tuple[Config, Rows]:
    """The options with what "auto" became in them, and the run's rows."""
    selection = Selection(
        episodes=chosen.train,
        drop_n_last_frames=dropped,
        stretches=chosen.frames or None,
        weights=list(config.dataset.mixture.values()) or None,
    )
    stream = _stream(config, steps)
    features = Features(
        camera_keys=match.camera_keys,
        columns=match.dataset_keys,
        delta_timestamps=match.delta_timestamps,
        tolerance_s=config.tolerance_s,
    )

    def row_bytes(features: Features) -> int:
        order = Order(shuffle_seed=config.seed, stream=stream)
        reading = Reading(on_error=config.dataset.on_error, check_files=False)
        return LeRobotDatasource(metas, Selection(episodes=chosen.train), features, order, reading).row_bytes()

    config, features, stored_bytes = _with_image_size(config, metas, features, policy_config, row_bytes)
    size = row_bytes(features)
    config = with_shard_rows(config, size)
    d = config.dataset
    order = Order(
        shuffle_seed=config.seed,
        shuffle_window=d.shuffle_window,
        window_segments=d.window_segments,
        at_key_frames=d.at_key_frames,
        global_shuffle=d.global_shuffle,
        sharding=sharding_of(d),
        stream=stream,
        rows_multiple=config.rows_multiple,
        block_rows=rows_per_block(config, size),
    )
    reading = Reading(
        num_cpus=config.scaling.cpus_per_read_task,
        on_error=d.on_error,
        skip_log=config.folder / SKIPPED_NAME,
        check_files=False,
    )
    source = LeRobotDatasource(metas, selection, features, order, reading)
    per_epoch, decoded_bytes = source.plan.rows_per_epoch, source.decoded_bytes()
    cache = frame_cache_of(d, decoded_bytes, reads_again=stream[1] > per_epoch)
    check_global_shuffle(d, cache, decoded_bytes)
    rows = Rows(
        metas=tuple(metas),
        train_episodes=chosen.train,
        eval_episodes=chosen.held_out,
        selection=selection,
        features=features,
        order=order,
        reading=replace(reading, frame_cache=cache),
        per_epoch=per_epoch,
        per_dataset=chosen.rows_per_dataset(metas, dropped),
        identity=source.plan.identity(),
        rates={"frames_per_s": source.row_frames(), "decoded_bytes_per_s": source.row_bytes()},
        mixing=mixing_of(config, source),
        stored_bytes=stored_bytes,
        cached_bytes=decoded_bytes,
        epoch_ends=() if d.episode_weights is None else tuple(source.plan.epoch_ends(stream[1])),
        rename_map=config.rename_map,
        described=chosen.described,
    )
    return config, rows


def _with_labels(config: Config, rows: Rows) -> Rows:
    """The rows with the advantages that their prompts name (--recap.labels)."""
    if config.recap.labels is None:
        return rows
    labels, digest = read_labels(Path(config.recap.labels), rows.metas, rows.episodes)
    identity = {**rows.identity, "labels": digest, "label_dropout": config.recap.dropout}
    return replace(rows, positive=PerFrame(labels), label_dropout=config.recap.dropout, identity=identity)


def _stream(config: Config, steps: int) -> tuple[int, int]:
    """Where the run's stream of rows begins and ends."""
    # Filled up so that workers get equally many blocks; with a fixed number of workers they do anyway.
    spare = config.scaling.num_workers * config.batch_size if config.scaling.min_workers else 0
    return 0, steps * config.global_batch_size + spare


def _with_image_size(
    config: Config,
    metas: Metas,
    features: Features,
    policy_config: PreTrainedConfig,
    row_bytes: Callable[[Features], int],
) -> tuple[Config, Features, int | None]:
    """Decide "auto"; and the bytes of a row as stored, where frames are fitted into another size.

    Frames are fitted into the policy's own size where that at least halves a row, or makes datasets go together.
    """

    def sized(image_size: list[int] | None) -> tuple[Config, Features]:
        d = replace(config.dataset, image_size=image_size or "stored")
        return replace(config, dataset=d), replace(features, image_size=image_size)

    asked, stored = config.dataset.image_size, sized(None)
    own = _own_size(policy_config) if asked == "auto" else asked
    if not isinstance(own, list):
        return *stored, None
    fitted = sized(own)
    if any(
        frame_of(meta.features[key], None) != frame_of(metas[0].features[key], None)
        for key in features.camera_keys or ()
        for meta in metas
    ):
        return *fitted, None
    stored_bytes = row_bytes(stored[1])
    if asked == "auto" and stored_bytes < 2 * row_bytes(fitted[1]):
        return *stored, None
    return *fitted, stored_bytes


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


def _dropped(config: Config, policy_config: PreTrainedConfig) -> int:
    """Frames at the end of each training episode that are left out: as LeRobot's sampler does for some policies."""
    asked = config.dataset.drop_n_last_frames
    return getattr(policy_config, "drop_n_last_frames", 0) if asked is None else asked


def _selected_features(meta: DatasetMetadata, camera_keys: list[str] | None) -> dict[str, Any]:
    dropped = set(meta.camera_keys) - set(camera_keys) if camera_keys is not None else set()
    return {k: f for k, f in meta.features.items() if k not in dropped and not f.is_depth}


def _fitting_batch(config: Config, rows: int) -> tuple[Config, list[str]]:
    """Lower a rehearsal's batch to a small dataset, unless the user chose the batch; and a note when it was lowered.

    Raises:
        ValueError: a global batch has more rows than there are training frames.
    """
    own, notes = int(PRESETS["demo"]["batch_size"]), []
    if config.preset == "demo" and config.batch_size == own and config.global_batch_size > rows:
        config = replace(config, batch_size=max(1, rows * config.batch_size // config.global_batch_size))
        notes = [f"--batch_size is {config.batch_size} instead of the preset's {own}: there are {rows} training frames"]
    if config.global_batch_size > rows:
        raise ValueError(
            f"a global batch of {config.global_batch_size} rows (batch_size {config.batch_size} x grad_accum "
            f"{config.grad_accum} x {config.scaling.num_workers} workers) is more than the {rows} training frames: a "
            "step would see frames twice; lower --batch_size or --grad_accum, or add episodes"
        )
    return config, notes
