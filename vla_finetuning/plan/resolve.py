"""Plan a run on the driver before Ray starts: datasets, policy, rows, statistics. Reads files and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vla_finetuning.data.selection import tasks_of
from vla_finetuning.environment import Timeouts
from vla_finetuning.options.fields import decided
from vla_finetuning.options.mixture import Member
from vla_finetuning.options.programs import Config
from vla_finetuning.plan import demo
from vla_finetuning.plan.base_policy import check_decided_options, check_policy, find_base
from vla_finetuning.plan.datasets import Datasets, find_datasets
from vla_finetuning.plan.episodes import choose, select
from vla_finetuning.plan.matching import match_datasets, policy_data
from vla_finetuning.plan.missing_files import check_files
from vla_finetuning.plan.paths import absolute
from vla_finetuning.plan.robot_facts import trained_files
from vla_finetuning.plan.row_plan import frames_dropped, plan_rows, stream_of, with_fitting_batch
from vla_finetuning.plan.rows import Rows
from vla_finetuning.plan.statistics import (
    check_absolute_dimensions,
    compute_stats,
    with_placeholders,
    with_statistics,
)
from vla_finetuning.policies.counting import flops_by_prompt
from vla_finetuning.policies.loading import WEIGHTS_FILE
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.pipelines import check_prompts_differ
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.policies.texts import encode
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import AVERAGE, OPTIMIZER, Progress, checkpoint_names, latest_checkpoint
from vla_finetuning.run.folder import CHECKPOINTS_NAME, SKIPPED_NAME
from vla_finetuning.run.job import Job
from vla_finetuning.run.push import repositories


@dataclass(frozen=True)
class Run:
    """A planned run of `vla.py`. Its options have absolute paths, and decided values in place of "auto"."""

    config: Config
    job: Job
    policy: PolicySpec  # its robots may lack statistics (`with_stats`)
    rows: Rows
    notes: tuple[str, ...] = ()  # of the plan, on changed options and data that is left out
    gpu_bytes: int = 0  # predicted memory of a worker; 0 if unknown

    @property
    def robots(self) -> tuple[Robot, ...]:
        """Return the robots of the datasets; at least one."""
        return self.policy.robots

    @property
    def repositories(self) -> dict[str, str]:
        """Return the repository for each robot's policy; empty without --policy.repo_id."""
        repo_id = self.config.hub_repo_id
        return {} if repo_id is None else repositories(repo_id, [robot.name for robot in self.robots])


def resolve(
    config: Config, gpus_found: int | None = None, datasets: Datasets | None = None, *, freezes_by_mode: bool = True
) -> Run:
    """Plan a run. Raises ValueError or OSError saying what to do.

    `gpus_found` is the number of GPUs, which decides absent options of the workers; None asks CUDA or the cluster.
    `datasets` is the result of `find_datasets`; None finds them. `freezes_by_mode` is False for a value function, for
    which --train.mode does not decide what trains.
    """
    if gpus_found is None:
        gpus_found = cluster.gpus_found(config.scaling, config.preset)
    config = decided(config, {"scaling.use_gpu": config.scaling.on_gpus(gpus_found)})
    if datasets is None:
        config, datasets = find_datasets(config)

    config, base = find_base(config, _policy_path(config, datasets))
    recipe = make_recipe(config, base.config)
    matched = match_datasets(config, datasets, base)
    datasets = replace(datasets, metas=matched.metas)
    check_absolute_dimensions(config.policy_option_names, [robot.config for robot in matched.robots])
    parameters = check_policy(base.config, base.folder, config.train, config.peft)
    check_decided_options(config, base.config, parameters if freezes_by_mode else None)

    dropped = frames_dropped(config, base.config, matched.window_steps)
    # Before --dataset.skip_idle, which reads the data files.
    with_idle = select(replace(config, dataset=replace(config.dataset, skip_idle=None)), datasets, dropped)
    skipped = check_files(config, datasets, with_idle, matched.match.camera_keys)
    chosen = select(config, datasets, dropped)
    datasets = replace(datasets, members=tuple(map(Member.weighted, datasets.members, chosen.rows_per_dataset)))
    frames = chosen.rows
    config, smaller = with_fitting_batch(config, frames)
    steps = config.resolve_steps(frames)
    columns = {key for meta in datasets.metas for key in meta.features}
    planned = family_of(base.config).check_plan(base.config, columns, base.folder, steps * config.grad_accum)
    config, rows = plan_rows(config, datasets, matched, chosen, dropped, steps)
    config, robots = with_statistics(config, rows, matched.robots)
    robots = tuple(replace(robot, files=trained_files(config, rows, robot)) for robot in robots)

    spec = PolicySpec(
        config=base.config,
        folder=base.folder,
        base=base.identity,
        train=config.train,
        adapters=config.peft,
        recipe=recipe,
        robots=robots,
        seed=config.seed,
        image_transforms=config.dataset.image_transforms,
        trusted=config.policy_trust_remote_code,
        ema=config.ema,
        parameters=parameters,
        prompts=family_of(base.config).prompt_lengths(base.config, len(rows.camera_keys)),
    )
    spec = replace(spec, flops_by_prompt=_flops(config, spec))
    _try_processors(spec, rows)
    if config.resume:
        _check_checkpoint(config, spec)
    job = make_job(config, spec, steps, rows.identity)
    return Run(config, job, spec, rows, (*chosen.notes, *skipped, *smaller, *planned))


def select_robot(run: Run, robot: Robot) -> Run:
    """Return the run with the datasets and the policy of one robot; training options stay."""
    rows = run.rows.select_datasets(robot.datasets)
    policy = run.policy.select_robot(replace(robot, datasets=tuple(range(len(rows.metas)))))
    return replace(run, policy=policy, rows=rows)


def with_config(run: Run, config: Config, steps: int | None = None) -> Run:
    """Return the run with other options of output folder, length, batches, workers and training step.

    Datasets, episodes and the policy's weights stay; without `steps` its optimizer updates, too.
    """
    steps = run.job.steps if steps is None else steps
    rows = replace(
        run.rows,
        order=replace(run.rows.order, stream=stream_of(config, steps), rows_multiple=config.rows_multiple),
        reading=replace(run.rows.reading, skip_log=config.folder / SKIPPED_NAME),
    )
    policy = replace(run.policy, train=config.train, adapters=config.peft, ema=config.ema)
    job = make_job(config, policy, steps, rows.identity)
    return replace(run, config=config, job=job, policy=policy, rows=rows)


def with_stats(run: Run) -> Run:
    """Compute missing statistics, and cache them in the run's folder."""
    metas, robots, cache_dir = list(run.rows.metas), list(run.robots), run.job.output_dir / "stats"
    for number, robot in enumerate(robots):
        if not robot.missing_stats:
            continue
        rows = run.rows.select_datasets(robot.datasets)
        computed, stats = compute_stats(run.config, rows, robot, cache_dir)
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
    """Return the job of a run. A checkpoint with another `identity` of rows or `global_batch_size` does not resume."""
    weights = (policy.folder or config.folder) / WEIGHTS_FILE
    return Job(
        output_dir=config.folder,
        steps=steps,
        batch_size=config.batch_size,
        batches_per_step=config.grad_accum * config.scaling.num_workers,
        scaling=config.scaling,
        start=Progress(0, 0, identity, policy.base, policy.trained_part, global_batch_size or config.global_batch_size),
        disk_bytes=config.most_checkpoints(steps) * policy.checkpoint_bytes
        + (weights.stat().st_size if weights.is_file() else 0),
        timeouts=Timeouts.from_environment(),
    )


def _policy_path(config: Config, datasets: Datasets) -> str | None:
    """Return --policy.path; make a tiny policy for a demo without one."""
    if config.preset != "demo" or config.policy_path or config.policy_type:
        return config.policy_path
    data = policy_data(config, datasets, [episodes for episodes, _ in choose(config, datasets)])
    labelled, words = config.recap.labels is not None, config.train.spare_words
    return absolute(demo.prepare_base(demo.DEMO_CACHE, **data, labelled=labelled, spare_words=words))


def _check_checkpoint(config: Config, spec: PolicySpec) -> None:
    """Refuse a checkpoint with the state of another optimizer, or without the average of weights that the run needs."""
    newest = latest_checkpoint(config.folder / CHECKPOINTS_NAME)
    if newest is None:
        return
    if spec.ema.enable and not checkpoint_names(newest, AVERAGE):
        raise ValueError(f"--ema.enable: {newest} was written without an average of the weights: leave it out")
    kinds = {name.partition(".")[0] for name in checkpoint_names(newest, OPTIMIZER)}
    if kinds and kinds not in spec.recipe.state_kinds:
        raise ValueError(
            f"--optimizer.type={spec.recipe.optimizer.type}: {newest} has the state of another optimizer "
            f"({', '.join(sorted(kinds))}): give that of the run, or start a new one from its policy"
        )


def _flops(config: Config, spec: PolicySpec) -> dict[int, int]:
    """Return the FLOPs per row by length of the prompt; empty if they cannot be counted."""
    if not spec.prompts or not family_of(spec.config).from_config:
        return {}
    train = config.train
    return flops_by_prompt(spec.config, spec.cameras, train.mode, train.noise_draws, spec.prompts, config.peft)


def _try_processors(spec: PolicySpec, rows: Rows) -> None:
    """Build the processors and encode all instructions, so that a missing tokenizer or a long text ends the plan."""
    for robot in spec.robots:
        preprocessor, _ = spec.select_robot(with_placeholders(robot, rows.metas)).processors()
    tasks = {
        task for meta, episodes in zip(rows.metas, rows.episodes, strict=True) for task in tasks_of(meta, episodes)
    }
    if family_of(spec.config).reads_texts:
        for task in tasks:
            encode(task)
    if rows.positive is not None:
        check_prompts_differ(preprocessor, sorted(tasks) or [""], f"policy {spec.base['path']}")
