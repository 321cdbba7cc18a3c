"""A run, resolved and checked on the driver before Ray starts: what it does, which policy, which rows.

`resolve` looks at files but starts nothing; `plan/describe.py` says in words what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode
from lerobot.configs.policies import PreTrainedConfig

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.bucket import place
from vla_finetuning.data.dataset_files import fetch_dataset
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.data.per_frame import PerFrame
from vla_finetuning.data.reader import frame_of
from vla_finetuning.data.selection import of_each, tasks_of
from vla_finetuning.data.statistics import check_stats
from vla_finetuning.environment import CACHE_DIR, FRAME_CACHE_GB, Timeouts, cache_gb
from vla_finetuning.node_disk import node_folder
from vla_finetuning.options.mixture import members
from vla_finetuning.options.programs import PRESETS, Config
from vla_finetuning.options.train import Precision, TrainOptions
from vla_finetuning.plan import demo
from vla_finetuning.plan.base_policy import check_policy, check_policy_options, resolve_policy
from vla_finetuning.plan.episodes import ChosenEpisodes, choose, select
from vla_finetuning.plan.labels import read_labels
from vla_finetuning.plan.matching import Base, Matched, match_datasets, policy_data
from vla_finetuning.plan.missing_files import check_holes
from vla_finetuning.plan.mixture import Stats, check_ranges
from vla_finetuning.plan.overruled import overruled
from vla_finetuning.plan.preflight import absolute, load_datasets, with_absolute_paths
from vla_finetuning.plan.row_weights import row_weights
from vla_finetuning.plan.rows import (
    Rows,
    check_global_shuffle,
    frame_cache_of,
    rows_per_block,
    sharding_of,
    with_shard_rows,
)
from vla_finetuning.plan.shuffle_quality import mixing_of
from vla_finetuning.plan.statistics import (
    Mode,
    check_absolute_dimensions,
    computed_stats,
    decide,
    exact_needed,
    finished_stats,
    joint_stats,
    missing_stats,
    needed_stats,
    relative_actions,
)
from vla_finetuning.policies.augment import augmentation_of
from vla_finetuning.policies.counting import flops_by_prompt
from vla_finetuning.policies.loading import WEIGHTS_FILE
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.pipelines import check_prompts_differ
from vla_finetuning.policies.processors import normalization_mode, required_stats
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.remote_code import HOW_TO_TRUST, RemoteCodeError, brought_along
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.policies.texts import encode
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.folder import SKIPPED_NAME
from vla_finetuning.run.job import Job
from vla_finetuning.run.push import repositories

Metas = Sequence[DatasetMetadata]


@dataclass(frozen=True)
class Run:
    """A run of `vla.py`: what it does, which policy, which rows.

    Attributes:
        config: the options, with what was decided of them ("auto", paths made absolute).
        policy: its robots may lack statistics that are still to be computed (`with_stats`).
        notes: what differs from what was asked for, or from what it should be, for the plan.
    """

    config: Config
    job: Job
    policy: PolicySpec
    rows: Rows
    notes: tuple[str, ...] = ()

    @property
    def robots(self) -> tuple[Robot, ...]:
        """Return the robots that its datasets are of; at least one."""
        return self.policy.robots

    @property
    def drawn(self) -> dict[str, dict[str, Any]]:
        """How the simulator drew each robot's pictures (`Rows.drawn`), by the robot's name."""
        return {robot.name: self.rows.drawn(robot.datasets) for robot in self.robots}

    @property
    def repositories(self) -> dict[str, str]:
        """Where the policy of each robot is pushed to; nowhere unless that was asked for."""
        repo_id = self.config.hub_repo_id
        return {} if repo_id is None else repositories(repo_id, [robot.name for robot in self.robots])


def resolve(config: Config, gpus_found: int, metas: Metas = (), *, compare_base: bool = True) -> Run:
    """Find, read and check everything the run needs. Raises ValueError or FileNotFoundError saying what to do.

    Args:
        metas: of the datasets, where `preflight.examine` has just read it.
        compare_base: note which of the base's own options the run overrules.
    """
    config = replace(config, scaling=config.scaling.decided(gpus_found))
    config, roots = with_absolute_paths(config)
    config, roots = _located(config, roots)
    d = config.dataset
    metas = metas or load_datasets(config, roots)
    weights = None if d.episode_weights is None else episode_weights(metas, roots, d.episode_weights, absolute)
    policy_path = _policy_path(config, metas, roots, weights)
    base = _base(config, policy_path)
    config = replace(config, policy_path=policy_path, policy_revision=base.identity["revision"])
    check_policy_options(config, base.config)
    config = replace(config, train=replace(config.train, precision=_precision(config.train, base.config)))
    recipe = make_recipe(config, base.config)
    matched = match_datasets(config, metas, members(d.mixture), base, partial(_check_images, config))
    metas = matched.metas
    check_absolute_dimensions(config.policy_options, [robot.config for robot in matched.robots])
    parameters = check_policy(base.config, base.folder, config.train, config.peft)
    overruling = overruled(config, base.config, base.folder, parameters) if compare_base else ()
    dropped = _dropped(config, base.config, matched.window_steps)
    chosen = select(metas, roots, config, dropped, weights, matched.rename_map)
    holes = check_holes(config, roots, metas, chosen, matched.match.camera_keys)
    trained = chosen.rows(metas, dropped)
    config, smaller = _fitting_batch(config, trained)
    steps = config.resolve_steps(trained)
    config, rows = _rows(config, matched, chosen, dropped, steps)
    rows = replace(rows, weights=row_weights(config, metas, base.config))
    rows = _with_labels(config, rows)
    config, with_statistics = _statistics(config, rows, matched.robots)
    cameras, train, flops = len(rows.camera_keys), config.train, {}
    family = family_of(base.config)
    prompts = family.prompt_lengths(base.config, cameras)
    if prompts and family.from_config:
        features = train.feature_cache is not None
        flops = flops_by_prompt(base.config, cameras, train.mode, train.noise_draws, prompts, config.peft, features)
    spec = PolicySpec(
        config=base.config,
        folder=base.folder,
        base=base.identity,
        train=config.train,
        adapters=config.peft,
        recipe=recipe,
        robots=with_statistics,
        seed=config.seed,
        image_transforms=config.dataset.image_transforms,
        trusted=config.policy_trust_remote_code,
        ema=config.ema,
        parameters=parameters,
        prompts=prompts,
        flops_by_prompt=flops,
    )
    for robot in spec.robots:  # a tokenizer out of reach, or unfit, is reported
        preprocessor, _ = spec.select_robot(_with_stand_in(robot, metas)).processors()
    tasks = {task for meta, episodes in zip(metas, rows.episodes, strict=True) for task in tasks_of(meta, episodes)}
    if family.reads_texts:
        for task in tasks:
            encode(task)  # one that is too long is reported
    if rows.positive is not None:
        check_prompts_differ(preprocessor, sorted(tasks) or [""], base.name)
    job = make_job(config, spec, steps, rows.identity)
    return Run(config, job, spec, rows, (*overruling, *chosen.notes, *holes, *smaller))


def select_robot(run: Run, robot: Robot) -> Run:
    """Return the run as one of its robots sees it: its datasets, its policy; what they are trained with stays."""
    rows = run.rows.of_datasets(robot.datasets)
    policy = run.policy.select_robot(replace(robot, datasets=tuple(range(len(rows.metas)))))
    return replace(run, policy=policy, rows=rows)


def with_config(run: Run, config: Config, steps: int | None = None) -> Run:
    """The run with other options: where it writes, how long it trains, in which batches, on which workers, how a step
    is computed. Datasets, episodes and the policy's weights stay.

    Args:
        steps: optimizer updates; as many as before when None.
    """
    steps = run.job.steps if steps is None else steps
    rows = replace(
        run.rows,
        order=replace(run.rows.order, stream=_stream(config, steps), rows_multiple=config.rows_multiple),
        reading=replace(run.rows.reading, skip_log=config.folder / SKIPPED_NAME),
    )
    policy = replace(run.policy, train=config.train, adapters=config.peft, ema=config.ema)
    job = make_job(config, policy, steps, rows.identity)
    return replace(run, config=config, job=job, policy=policy, rows=rows)


def with_stats(run: Run) -> Run:
    """Compute the statistics that are missing, in a Ray Data pass, cached beside the run."""
    metas, robots, cache_dir = list(run.rows.metas), list(run.robots), node_folder(run.job.output_dir) / "stats"
    for number, robot in enumerate(robots):
        if not robot.missing_stats:
            continue
        rows, match = run.rows.of_datasets(robot.datasets), robot.match_of_rows
        relative = relative_actions(robot.config)
        computed, joint = computed_stats(run.config, rows, robot.missing_stats, relative, cache_dir)
        options, keys = run.config.dataset, match.dataset_keys
        stats = finished_stats(options, robot.config, computed, match.camera_keys, keys, joint)
        robots[number] = replace(robot, stats=stats, missing_stats={})
        for dataset, meta in zip(robot.datasets, computed, strict=True):
            metas[dataset] = meta
    return replace(run, rows=replace(run.rows, metas=tuple(metas)), policy=replace(run.policy, robots=tuple(robots)))


def make_job(
    config: Config,
    policy: PolicySpec,
    steps: int,
    identity: dict[str, Any],
    global_batch_size: int | None = None,
) -> Job:
    """What a run of these options does.

    Args:
        identity: of what the run trains on. global_batch_size: the options' when None.
            A checkpoint with others does not resume.
    """
    weights = (policy.folder or node_folder(config.folder)) / WEIGHTS_FILE
    return Job(
        output_dir=config.folder,
        steps=steps,
        batch_size=config.batch_size,
        batches_per_step=config.grad_accum * config.scaling.num_workers,
        scaling=config.scaling,
        start=Progress(0, 0, identity, policy.base, policy.what_trains, global_batch_size or config.global_batch_size),
        disk_bytes=config.most_checkpoints(steps) * policy.checkpoint_bytes
        + (weights.stat().st_size if weights.is_file() else 0),
        timeouts=Timeouts.from_environment(),
        feature_cache_gb=cache_gb(FRAME_CACHE_GB),
    )


# ---- where data and policy are -------------------------------------------------------------------------------------


def _located(config: Config, roots: list[str]) -> tuple[Config, list[str]]:
    """The options and the datasets' roots once what is on the Hub, or the demo's own, is here."""
    if config.dataset.repo_id:
        path, commit = fetch_dataset(
            config.dataset.repo_id,
            config.dataset.revision,
            episodes=of_each(config.dataset.episodes, [config.dataset.repo_id], "--dataset.episodes")[0],
            camera_keys=config.dataset.camera_keys,
        )
        return replace(config, dataset=replace(config.dataset, revision=commit)), [path]
    if config.preset != "demo":
        return config, roots
    return config, roots or [absolute(demo.prepare_dataset(CACHE_DIR / "demo"))]


def _policy_path(
    config: Config, metas: Metas, roots: Sequence[str], weights: Sequence[np.ndarray] | None
) -> str | None:
    """Where the policy is: that of the options, or of a demo that names none a tiny one, made for the run's data."""
    demos = Path(absolute(CACHE_DIR / "demo"))
    # A resumed demo names the policy that it was made, which is made again where the cache has gone.
    is_made = config.preset == "demo" and Path(config.policy_path or "").parent == demos
    if config.policy_path and not (is_made and not Path(config.policy_path).is_dir()):
        return absolute(config.policy_path) if Path(absolute(config.policy_path)).is_dir() else config.policy_path
    if config.preset != "demo" or config.policy_type:
        return None
    chosen = [episodes for episodes, _ in choose(metas, roots, config, weights)]
    data = policy_data(config, metas, members(config.dataset.mixture), chosen)
    labelled = config.recap.labels is not None
    return absolute(demo.prepare_base(CACHE_DIR / "demo", **vars(data), labelled=labelled))


def _base(config: Config, path: str | None) -> Base:
    """The policy that the run starts from."""
    base = Base(*resolve_policy(config, path))
    kind = base.config.type
    if (brought := brought_along(base.config)) and not config.policy_trust_remote_code:
        raise RemoteCodeError(f"{base.name}: a '{kind}' runs code that comes with {brought}: {HOW_TO_TRUST}")
    if config.dataset.on_error == "skip" and not family_of(base.config).row_losses:
        raise ValueError(
            f"{base.name}: --dataset.on_error=skip needs a loss that can leave rows out, as that of "
            f"{types_that(lambda family: family.row_losses)}; this is a '{kind}': use --dataset.on_error=stop"
        )
    return base


# ---- rows ----------------------------------------------------------------------------------------------------------


def _rows(config: Config, matched: Matched, chosen: ChosenEpisodes, dropped: int, steps: int) -> tuple[Config, Rows]:
    """The options with what "auto" became in them, and the run's rows."""
    metas, match = matched.metas, matched.match
    selection = Selection(
        episodes=chosen.train,
        drop_n_last_frames=dropped,
        stretches=chosen.frames or None,
        weights=[member.weight for member in members(config.dataset.mixture)] or None,
    )
    stream = _stream(config, steps)
    features = Features(
        camera_keys=match.camera_keys,
        columns=match.dataset_keys,
        delta_timestamps=match.delta_timestamps,
        tolerance_s=config.tolerance_s,
        padded=len(matched.robots) > 1,
        window_steps=matched.window_steps,
    )

    def row_bytes(features: Features) -> int:
        order = Order(shuffle_seed=config.seed, stream=stream)
        reading = Reading(on_error=config.dataset.on_error, check_files=False)
        return LeRobotDatasource(metas, Selection(episodes=chosen.train), features, order, reading).row_bytes()

    config, features, stored_bytes = _with_image_size(config, metas, features, matched.config, row_bytes)
    size = row_bytes(features)
    config = with_shard_rows(config, size)
    d = config.dataset
    order = Order(
        shuffle_seed=config.seed,
        shuffle_window=d.shuffle_window,
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
    identity = source.plan.identity()
    if features.padded:
        of_dataset = {number: robot.name for robot in matched.robots for number in robot.datasets}
        identity["robots"] = [of_dataset[number] for number in range(len(metas))]
    if matched.window_steps is not None:
        identity["window_steps"] = list(matched.window_steps)
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
        identity=identity,
        rates={"frames_per_s": source.row_frames(), "decoded_bytes_per_s": source.row_bytes()},
        mixing=mixing_of(config, source),
        stored_bytes=stored_bytes,
        cached_bytes=decoded_bytes,
        distinct_frames=source.distinct_frames,
        epoch_ends=() if d.episode_weights is None else tuple(source.plan.epoch_ends(stream[1])),
        rename_map=matched.rename_map,
        described=chosen.described,
    )
    return config, rows


def _with_labels(config: Config, rows: Rows) -> Rows:
    """The rows with the advantages that their prompts name (--recap.labels)."""
    if config.recap.labels is None:
        return rows
    labels, digest = read_labels(place(config.recap.labels), rows.metas, rows.episodes)
    identity = {**rows.identity, "labels": digest, "label_dropout": config.recap.dropout}
    return replace(rows, positive=PerFrame(labels), label_dropout=config.recap.dropout, identity=identity)


def _statistics(config: Config, rows: Rows, robots: Sequence[Robot]) -> tuple[Config, tuple[Robot, ...]]:
    """The robots with their statistics, as far as these are known; and the options with what "auto" became."""
    views = [(rows.of_datasets(robot.datasets), robot) for robot in robots]
    found, modes = zip(*(_with_statistics(config, *view) for view in views), strict=True)
    mode: Mode = "exact" if "exact" in modes else modes[0]
    config = replace(config, dataset=replace(config.dataset, statistics=mode))
    again = zip(found, modes, views, strict=True)
    return config, tuple(of if own == mode else _with_statistics(config, *view)[0] for of, own, view in again)


def _with_statistics(config: Config, rows: Rows, robot: Robot) -> tuple[Robot, Mode]:
    d, metas, match, policy_config = config.dataset, rows.metas, robot.match_of_rows, robot.config
    keys, cameras = match.dataset_keys, match.camera_keys
    needed = needed_stats(policy_config, metas[0], cameras, keys, d.use_imagenet_stats, rows.any_held_out)
    relative = relative_actions(policy_config)
    missing = missing_stats(metas, needed, () if relative is None else ("action",))
    for meta in metas if d.statistics != "exact" else ():
        check_stats(meta, {key: names for key, names in needed.items() if relative is None or key != "action"})
    decision = decide(config, metas, rows.train_episodes, needed, missing, relative, rows.rename_map)
    if decision.described and not d.mixed_ranges:
        check_ranges(metas, keys)
    if decision.statistics == "exact":
        missing = exact_needed(metas[0].features, needed)
    stats: Stats = {}
    if not missing:
        joint = joint_stats(config, metas, rows.identity["rows_per_source"])
        d = replace(d, statistics=decision.statistics)
        stats = finished_stats(d, policy_config, metas, cameras, keys, joint)
    return replace(robot, stats=stats, missing_stats=missing, statistics=decision.lines), decision.statistics


def _with_stand_in(robot: Robot, metas: Metas) -> Robot:
    """The robot, with statistics of 0 to 1 in the place of missing ones, for its processors to be tried."""
    if not robot.missing_stats:
        return robot
    low, meta = {"min", "mean", "q01", "q10"}, metas[robot.datasets[0]]
    needed = required_stats(robot.config, {key: meta.features[key] for key in robot.match_of_rows.dataset_keys})
    shapes = {key: (3, 1, 1) if key in meta.camera_keys else meta.features[key].shape for key in needed}
    stats = {
        key: {name: np.full(shapes[key], 0.0 if name in low else 1.0) for name in names}
        for key, names in needed.items()
    }
    return replace(robot, stats=stats)


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
    sizes = [
        {frame_of(meta.features[key], None)[0] for meta in metas if key in meta.features}
        for key in features.camera_keys or ()
    ]
    if any(len(of_camera) > 1 for of_camera in sizes):
        return *fitted, None
    stored_bytes = row_bytes(stored[1])
    if asked == "auto" and stored_bytes < 2 * row_bytes(fitted[1]):
        return *stored, None
    return *fitted, stored_bytes


def _own_size(policy_config: PreTrainedConfig) -> list[int] | None:
    """[height, width] that the policy itself fits frames into before it does anything else with them, if it does."""
    own = getattr(policy_config, "image_resolution", None)
    fits = family_of(policy_config).fits_images
    normalised = normalization_mode(policy_config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY
    return None if own is None or not fits or normalised else list(own)


def _check_images(config: Config, policy_config: PreTrainedConfig) -> None:
    """Refuse what cannot be done with the frames of the policy's cameras."""
    if config.augments:
        keys = list(policy_config.image_features)
        augmentation_of(config.train.augmentation, config.dataset.image_transforms, config.seed, keys)
    if isinstance(config.dataset.image_size, list):
        _check_image_size(policy_config, config.dataset.image_size)


def _check_image_size(policy_config: PreTrainedConfig, image_size: list[int]) -> None:
    """Refuse a size at which the policy would see other pixels than after its own resizing.

    PI0 and its kin fit images, in [0, 1], into `image_resolution`, and leave those alone that have that size.
    """
    own = getattr(policy_config, "image_resolution", None)
    if own is None or not family_of(policy_config).fits_images:
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


def _dropped(config: Config, policy_config: PreTrainedConfig, steps: Sequence[int] | None) -> int:
    """Frames at the end of each training episode that are left out: as LeRobot's sampler does for some policies.

    Raises:
        ValueError: the policy's number is of frames that are one action apart, and some dataset has others.
    """
    asked = config.dataset.drop_n_last_frames
    if asked is not None:
        return asked
    own = getattr(policy_config, "drop_n_last_frames", 0)
    if own and steps is not None and max(steps) > 1:
        raise ValueError(
            f"--dataset.mixture: a '{policy_config.type}' leaves out the last {own} frames of each episode, whose "
            f"actions lie up to {max(steps)} frames apart by the members' fps: say how many frames of all of them, "
            f"--dataset.drop_n_last_frames={own * max(steps)}"
        )
    return own


def _precision(train: TrainOptions, policy: PreTrainedConfig) -> Precision:
    """--train.precision; of a policy that LeRobot trains in float32 on GPUs too, auto is that."""
    if train.precision == "auto" and family_of(policy).in_float32 and not policy.use_amp:
        return "fp32"
    return train.precision


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
