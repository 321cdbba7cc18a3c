"""A run, resolved and checked on the driver before Ray starts: what it does, which policy, which rows.

`resolve` looks at files but starts nothing; `run/describe.py` says in words what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lerobot.configs import FeatureType, NormalizationMode
from lerobot.configs.policies import PreTrainedConfig

from lerobot_datasource import LeRobotDatasource
from vla_finetuning import demo
from vla_finetuning.bucket import place
from vla_finetuning.data.dataset_files import fetch_dataset
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.data.per_frame import PerFrame
from vla_finetuning.data.reader import frame_of
from vla_finetuning.data.selection import of_each, tasks_of
from vla_finetuning.data.statistics import check_stats
from vla_finetuning.environment import CACHE_DIR, Timeouts
from vla_finetuning.node_disk import node_folder
from vla_finetuning.options.mixture import members, robots
from vla_finetuning.options.programs import PRESETS, Config
from vla_finetuning.options.train import Precision, TrainOptions
from vla_finetuning.policies.augment import augmentation_of
from vla_finetuning.policies.counting import flops_by_prompt
from vla_finetuning.policies.loading import WEIGHTS_FILE, FeatureMatch
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.pipelines import check_prompts_differ
from vla_finetuning.policies.processors import normalization_mode, required_stats
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.remote_code import HOW_TO_TRUST, RemoteCodeError, brought_along
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.policies.texts import encode
from vla_finetuning.run.base_policy import check_policy, check_policy_options, resolve_policy
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.episodes import ChosenEpisodes, choose, select
from vla_finetuning.run.folder import SKIPPED_NAME
from vla_finetuning.run.holes import check_holes
from vla_finetuning.run.job import Job
from vla_finetuning.run.labels import read_labels
from vla_finetuning.run.matching import Base, Matched, RobotData, match_datasets, policy_data
from vla_finetuning.run.mixing import mixing_of
from vla_finetuning.run.mixture import Stats, check_ranges
from vla_finetuning.run.overruled import overruled
from vla_finetuning.run.preflight import absolute, load_datasets, with_absolute_paths
from vla_finetuning.run.push import repositories
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
    Mode,
    Names,
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
        robots: those that differ, each with its own statistics (`of_robot`); none where there is one.
    """

    config: Config
    job: Job
    policy: PolicySpec
    rows: Rows
    match: FeatureMatch
    missing_stats: Names = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    robots: tuple[RobotData, ...] = ()

    @property
    def repositories(self) -> dict[str, str]:
        """Where the policy of each robot is pushed to; nowhere unless that was asked for."""
        repo_id = self.config.hub_repo_id
        return {} if repo_id is None else repositories(repo_id, [robot.name for robot in self.robots])


def resolve(config: Config, gpus_found: int, metas: Metas = ()) -> Run:
    """Find, read and check everything the run needs. Raises ValueError or FileNotFoundError saying what to do.

    Args:
        metas: of the datasets, where `preflight.examine` has just read it.
    """
    config = replace(config, scaling=config.scaling.decided(gpus_found))
    config, roots = with_absolute_paths(config)
    config, roots = _located(config, roots)
    d = config.dataset
    metas = metas or load_datasets(config, roots)
    asked_names, of_mixture = config.rename_map, members(d.mixture)
    weights = None if d.episode_weights is None else episode_weights(metas, roots, d.episode_weights, absolute)
    policy_path = _policy_path(config, metas, roots, weights)
    base = _base(config, policy_path)
    config = replace(config, policy_path=policy_path, policy_revision=base.identity["revision"])
    check_policy_options(config, base.config)
    config = replace(config, train=replace(config.train, precision=_precision(config.train, base.config)))
    recipe = make_recipe(config, base.config)
    matched = match_datasets(config, metas, of_mixture, robots(of_mixture), base, partial(_check_images, config))
    metas, match = matched.metas, matched.match
    check_absolute_dimensions(config.policy_options, [robot.config for robot in matched.robots] or [matched.config])
    config = replace(config, rename_map=matched.rename_map)
    parameters = check_policy(base.config, base.folder, config.train, config.peft)
    overruling = overruled(config, base.config, base.folder, parameters)
    dropped = _dropped(config, base.config, matched.window_steps)
    chosen = select(metas, roots, config, dropped, weights)
    holes = check_holes(config, roots, metas, chosen, match.camera_keys)
    trained = chosen.rows(metas, dropped)
    config, smaller = _fitting_batch(config, trained)
    steps = config.resolve_steps(trained)
    config, rows = _rows(config, matched, chosen, dropped, steps)
    rows = replace(rows, weights=row_weights(config, metas, base.config))
    rows = _with_labels(config, rows)
    config, found = _statistics(config, rows, matched)
    cameras, train, flops = len(match.camera_keys), config.train, {}
    family = family_of(base.config)
    prompts = family.prompt_lengths(base.config, cameras)
    if prompts and family.from_config:
        features = train.feature_cache is not None
        flops = flops_by_prompt(base.config, cameras, train.mode, train.noise_draws, prompts, config.peft, features)
    differing = tuple(
        _robot(robot, rows, of.stats, config.dataset.robot_in_prompt)
        for robot, of in zip(matched.robots, found, strict=False)
    )
    spec = PolicySpec(
        config=base.config,
        folder=base.folder,
        base=base.identity,
        train=config.train,
        adapters=config.peft,
        recipe=recipe,
        cameras=cameras,
        stats={} if differing else found[0].stats,
        seed=config.seed,
        image_transforms=config.dataset.image_transforms,
        rename_map=config.rename_map,
        trusted=config.policy_trust_remote_code,
        average=config.ema.decay if config.ema.enable else None,
        export_average=config.takes_average,
        parameters=parameters,
        prompts=prompts,
        flops_by_prompt=flops,
        robots=differing,
    )
    for one in [spec.of_robot(robot) for robot in differing] or [spec]:
        preprocessor, _ = one.processors()  # a tokenizer out of reach, or unfit, is reported
    tasks = {task for meta, episodes in zip(metas, rows.episodes, strict=True) for task in tasks_of(meta, episodes)}
    if family.reads_texts:
        for task in tasks:
            encode(task)  # one that is too long is reported
    stats = [{} if of.missing else of.stats for of in found]
    differing = tuple(replace(robot, stats=own) for robot, own in zip(differing, stats, strict=False))
    spec = replace(spec, robots=differing, stats={} if differing else stats[0])
    if rows.positive is not None:
        check_prompts_differ(preprocessor, sorted(tasks) or [""], base.name)
    job = make_job(config, spec, steps, rows.identity, spec.what_trains)
    config = replace(config, rename_map=asked_names)
    robots_data = tuple(
        replace(robot, missing_stats=of.missing, statistics=of.lines)
        for robot, of in zip(matched.robots, found, strict=False)
    )
    lines = tuple(f"{one.name}: {line}" for one in robots_data for line in one.statistics) or found[0].lines
    notes = (*overruling, *chosen.notes, *holes, *smaller)
    missing = {} if differing else found[0].missing
    return Run(config, job, spec, rows, match, missing, lines, notes, robots_data)


def of_robot(run: Run, name: str) -> Run:
    """The run as one of its robots sees it: its datasets, its policy; what they are trained with stays.

    `run.robots` has the names.
    """
    number = [robot.name for robot in run.robots].index(name)
    data, rows = run.robots[number], run.rows.of_datasets(run.robots[number].datasets)
    policy = run.policy.of_robot(run.policy.robots[number], renamed=True)
    return replace(
        run,
        policy=policy,
        rows=rows,
        match=data.match_by_policy,
        missing_stats=data.missing_stats,
        statistics=data.statistics,
        robots=(),
    )


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
    if run.robots:
        return _with_stats_of_robots(run)
    if not run.missing_stats:
        return run
    relative, cache_dir = relative_actions(run.policy.config), node_folder(run.job.output_dir) / "stats"
    metas, joint = computed_stats(run.config, run.rows, run.missing_stats, relative, cache_dir)
    rows, match = replace(run.rows, metas=metas), run.match
    stats = finished_stats(run.config.dataset, run.policy.config, metas, match.camera_keys, match.dataset_keys, joint)
    return replace(run, rows=rows, policy=replace(run.policy, stats=stats), missing_stats={})


def _with_stats_of_robots(run: Run) -> Run:
    parts = [with_stats(of_robot(run, data.name)) for data in run.robots]
    metas = list(run.rows.metas)
    for data, part in zip(run.robots, parts, strict=True):
        for number, meta in zip(data.datasets, part.rows.metas, strict=True):
            metas[number] = meta
    differing = tuple(
        replace(robot, stats=part.policy.stats or {}) for robot, part in zip(run.policy.robots, parts, strict=True)
    )
    complete = tuple(replace(robot, missing_stats={}) for robot in run.robots)
    return replace(
        run, rows=replace(run.rows, metas=tuple(metas)), policy=replace(run.policy, robots=differing), robots=complete
    )


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
    weights = (policy.folder or node_folder(config.folder)) / WEIGHTS_FILE
    return Job(
        output_dir=config.folder,
        steps=steps,
        seed=config.seed,
        batch_size=config.batch_size,
        batches_per_step=config.grad_accum * config.scaling.num_workers,
        scaling=config.scaling,
        start=Progress(0, 0, identity, policy.base, what_trains, global_batch_size or config.global_batch_size),
        disk_bytes=config.most_checkpoints(steps) * policy.checkpoint_bytes
        + (weights.stat().st_size if weights.is_file() else 0),
        timeouts=Timeouts.from_environment(),
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
    if config.policy_path:
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
        padded=bool(matched.robots),
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
    if matched.robots:
        identity["robots"] = [matched.robots[number].name for number in matched.robot_of]
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
        rename_map=config.rename_map,
        described=chosen.described,
        robots=tuple(robot.name for robot in matched.robots),
        robot_of=matched.robot_of,
    )
    return config, rows


def _with_labels(config: Config, rows: Rows) -> Rows:
    """The rows with the advantages that their prompts name (--recap.labels)."""
    if config.recap.labels is None:
        return rows
    labels, digest = read_labels(place(config.recap.labels), rows.metas, rows.episodes)
    identity = {**rows.identity, "labels": digest, "label_dropout": config.recap.dropout}
    return replace(rows, positive=PerFrame(labels), label_dropout=config.recap.dropout, identity=identity)


class _Found(NamedTuple):
    """Statistics of a robot: what is to be computed, in words what they are, and their values.

    Values from 0 to 1 while some are missing, for processors to be tried with.
    """

    missing: Names
    lines: tuple[str, ...]
    stats: Stats
    mode: Mode


def _statistics(config: Config, rows: Rows, matched: Matched) -> tuple[Config, list[_Found]]:
    """The statistics of each robot, or of the only one; and the options with what "auto" became."""
    views: list[tuple[Rows, FeatureMatch, PreTrainedConfig]] = [(rows, matched.match, matched.config)]
    if matched.robots:
        views = [(rows.of_datasets(one.datasets), one.match_by_policy, one.config) for one in matched.robots]
    found = [_statistics_of(config, *view) for view in views]
    mode = "exact" if any(of.mode == "exact" for of in found) else found[0].mode
    config = replace(config, dataset=replace(config.dataset, statistics=mode))
    pairs = zip(found, views, strict=True)
    return config, [of if of.mode == mode else _statistics_of(config, *view) for of, view in pairs]


def _statistics_of(config: Config, rows: Rows, match: FeatureMatch, policy_config: PreTrainedConfig) -> _Found:
    d, metas, keys = config.dataset, rows.metas, match.dataset_keys
    needed = needed_stats(policy_config, metas[0], match.camera_keys, keys, d.use_imagenet_stats, rows.any_held_out)
    relative = relative_actions(policy_config)
    missing = missing_stats(metas, needed, () if relative is None else ("action",))
    for meta in metas if d.statistics != "exact" else ():
        check_stats(meta, {key: names for key, names in needed.items() if relative is None or key != "action"})
    decision = decide(config, metas, rows.train_episodes, needed, missing, relative)
    if decision.described and not d.mixed_ranges:
        check_ranges(metas, keys)
    if decision.statistics == "exact":
        missing = exact_needed(metas[0].features, needed)
    d = replace(d, statistics=decision.statistics)
    if missing:
        required = required_stats(policy_config, {key: metas[0].features[key] for key in keys})
        stats = _stand_in(required, metas[0])
    else:
        joint = joint_stats(config, metas, rows.identity["rows_per_source"])
        stats = finished_stats(d, policy_config, metas, match.camera_keys, keys, joint)
    return _Found(missing, decision.lines, stats, decision.statistics)


def _stand_in(needed: Names, meta: DatasetMetadata) -> Stats:
    """Statistics with which processors can be made before the dataset's own are computed: 0 to 1."""
    low = {"min", "mean", "q01", "q10"}
    shapes = {key: (3, 1, 1) if key in meta.camera_keys else meta.features[key].shape for key in needed}
    return {
        key: {name: np.full(shapes[key], 0.0 if name in low else 1.0) for name in names}
        for key, names in needed.items()
    }


def _robot(data: RobotData, rows: Rows, stats: Stats, in_prompt: bool) -> Robot:
    """What of the policy is a robot's."""
    features, match = rows.metas[data.datasets[0]].features, data.match_by_policy
    vectors = [key for key in match.dataset_keys if key not in match.camera_keys]
    return Robot(
        name=data.name,
        config=data.config,
        stats=stats,
        rename_map=data.rename_map,
        widths={key: features[key].shape[0] for key in vectors},
        cameras=match.camera_keys,
        opening=f"{data.name}: " if in_prompt else "",
    )


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
