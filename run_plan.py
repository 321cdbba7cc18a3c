"""What a run is, resolved and checked on the driver before Ray starts: data, policy, how they fit, how many steps.

`resolve` looks at files but starts nothing; `describe` is what `--dry_run` prints.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import draccus
import numpy as np
from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.compute_stats import aggregate_stats

import tiny_pi05  # noqa: F401  (registers the demo's policy type with LeRobot)
from checkpoint import file_digest
from config import CACHE_DIR, Config, MissingCameras
from dataset_stats import complete_stats
from lerobot_datasource import BLOCK_BYTES, LeRobotDatasource
from lerobot_metadata import DatasetMetadata, fetch_dataset, load_metadata, select_episodes
from policy import FeatureMatch, fetch_pretrained, match_features
from processors import required_stats

Stats = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Run:
    """A resolved run. Pickled in flight to the training workers (without secrets; tokens stay in the environment).

    Attributes:
        train_episodes, eval_episodes: per dataset, int64 arrays; disjoint.
        policy_folder: a LeRobot pretrained folder, or None to start from random weights.
        base: which weights the run starts from (path, revision, digest).
        stats: normalisation statistics; `missing_stats` are still to be computed.
        rows_per_epoch: frames of the training episodes. steps: optimizer updates of the whole run.
        block_rows: rows of a block of training data. stream: identity of the run's stream of rows.
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
    block_rows: int = 1
    stream: dict[str, Any] = field(default_factory=dict)

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir or "")

    @property
    def checkpoints_dir(self) -> Path:
        return self.output_dir / "checkpoints"

    @property
    def use_gpu(self) -> bool:
        return bool(self.config.scaling.use_gpu)

    @property
    def last_row(self) -> int:
        """Where the run's stream of rows ends."""
        return self.steps * self.config.global_batch_size

    def reader(self) -> partial[LeRobotDatasource]:
        """The datasource of the training rows, but for `stream`: which positions of the run's stream."""
        return partial(
            LeRobotDatasource,
            self.metas,
            episodes=[e.tolist() for e in self.train_episodes],
            camera_keys=self.match.camera_keys,
            delta_timestamps=self.match.delta_timestamps,
            shuffle_seed=self.config.seed,
            shuffle_window=self.config.dataset.shuffle_window,
            rows_multiple=self.config.global_batch_size,
            block_rows=self.block_rows,
            tolerance_s=self.config.tolerance_s,
            num_cpus=self.config.scaling.cpus_per_read_task,
        )


def block_rows(batch_size: int, row_bytes: int) -> int:
    """The most rows that divide a micro-batch and stay within BLOCK_BYTES: workers then get whole blocks in turn."""
    return max([n for n in range(1, batch_size + 1) if batch_size % n == 0 and n * row_bytes <= BLOCK_BYTES], default=1)


def resolve(config: Config, gpus_found: int) -> Run:
    """Find, read and check everything the run needs. Raises ValueError or FileNotFoundError saying what to do."""
    if config.scaling.use_gpu is None:
        config = replace(config, scaling=replace(config.scaling, use_gpu=gpus_found > 0))
    # Workers have other working directories.
    config = replace(config, output_dir=str(Path(config.output_dir or "").absolute()))
    roots = config.roots
    if config.dataset.repo_id:
        path, commit = fetch_dataset(
            config.dataset.repo_id,
            config.dataset.revision,
            episodes=config.dataset.episodes,
            camera_keys=config.dataset.camera_keys,
        )
        config = replace(config, dataset=replace(config.dataset, revision=commit))
        roots = [path]
    path_given = config.policy_path
    if config.preset == "demo":
        from demo import prepare_demo

        root, base = prepare_demo(CACHE_DIR / "demo", roots[0] if roots else None)
        roots = roots or [str(root)]
        if not (path_given or config.policy_type):
            path_given = str(base)
    metas = tuple(load_metadata(root) for root in roots)

    policy_config, folder, base_info = _resolve_policy(config, path_given)
    config = replace(config, policy_path=path_given, policy_revision=base_info["revision"])
    match = match_features(
        policy_config,
        _selected_features(metas[0], config.dataset.camera_keys),
        config.rename_map,
        missing_cameras=cast(MissingCameras, config.dataset.missing_cameras),
        fps=metas[0].fps,
    )
    train, held_out = zip(*(_split_episodes(meta, config) for meta in metas), strict=True)
    rows = sum(int(meta.episode_length[e].sum()) for meta, e in zip(metas, train, strict=True))
    if config.global_batch_size > rows:
        raise ValueError(
            f"a global batch of {config.global_batch_size} rows (batch_size {config.batch_size} x grad_accum "
            f"{config.grad_accum} x {config.scaling.num_workers} workers) is more than the {rows} training frames: a "
            "step would see frames twice; lower --batch_size or --grad_accum, or add episodes"
        )
    stats = metas[0].stats if len(metas) == 1 else aggregate_stats([meta.stats for meta in metas if meta.stats])
    needed = required_stats(policy_config, {k: metas[0].features[k] for k in match.dataset_keys})
    if any(len(episodes) for episodes in held_out):
        # The mean action is what a policy must beat on held-out episodes (evaluate.py).
        needed["action"] = needed.get("action", set()) | {"mean"}
    missing = {k: {s for s in names if s not in stats.get(k, {})} for k, names in needed.items()}
    run = Run(
        config=config,
        metas=metas,
        train_episodes=train,
        eval_episodes=held_out,
        policy_config=policy_config,
        policy_folder=folder,
        base=base_info,
        match=match,
        stats=stats,
        missing_stats={k: names for k, names in missing.items() if names},
        rows_per_epoch=rows,
        steps=config.resolve_steps(rows),
    )
    source = run.reader()(stream=(0, run.last_row))  # checks that all files are there and that the datasets agree
    return replace(run, block_rows=block_rows(config.batch_size, source.row_bytes()), stream=source.plan.identity())


def with_stats(run: Run) -> Run:
    """Compute the statistics that are missing, in a Ray Data pass, cached beside the run."""
    if not run.missing_stats:
        return run
    completed = [complete_stats(meta, run.missing_stats, cache_dir=run.output_dir / "stats")[0] for meta in run.metas]
    stats = completed[0] if len(completed) == 1 else aggregate_stats(completed)
    return replace(run, stats=stats, missing_stats={})


def _resolve_policy(config: Config, path: str | None) -> tuple[PreTrainedConfig, Path | None, dict[str, Any]]:
    known = PreTrainedConfig.get_known_choices()
    if path is None:
        if config.policy_type not in known:
            raise ValueError(f"--policy.type={config.policy_type}: LeRobot knows {', '.join(sorted(known))}")
        choice = PreTrainedConfig.get_choice_class(config.policy_type)
        policy_config = draccus.parse(choice, args=[*config.policy_options, "--device=cpu"])
        return (
            policy_config,
            None,
            {"path": f"{config.policy_type} from random weights", "revision": None, "digest": None},
        )
    folder, revision = fetch_pretrained(path, config.policy_revision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy_config = PreTrainedConfig.from_pretrained(folder, cli_overrides=[*config.policy_options, "--device=cpu"])
    folder = folder.absolute()
    policy_config.pretrained_path = folder
    weights = sorted(folder.glob("*.safetensors.index.json")) or [folder / "model.safetensors"]
    digest = file_digest(weights[0]) if weights[0].is_file() else None
    return policy_config, folder, {"path": path, "revision": revision, "digest": digest}


def _selected_features(meta: DatasetMetadata, camera_keys: list[str] | None) -> dict[str, Any]:
    dropped = set(meta.camera_keys) - set(camera_keys) if camera_keys is not None else set()
    return {k: f for k, f in meta.features.items() if k not in dropped and not f.is_depth}


def _split_episodes(meta: DatasetMetadata, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out episodes: the last ceil(n x eval_split) of each task are held out, as in LeRobot."""
    chosen = select_episodes(meta, config.dataset.episodes)
    share = config.dataset.eval_split
    by_task: dict[str, list[int]] = {}
    for episode in chosen.tolist():
        by_task.setdefault((meta.episode_tasks[episode] or ("",))[0], []).append(episode)
    held_out = sorted(e for group in by_task.values() for e in group[len(group) - math.ceil(len(group) * share) :])
    train = np.setdiff1d(chosen, held_out)
    if not len(train):
        raise ValueError(
            f"{meta.root}: --dataset.eval_split={share} leaves no episode to train on ({len(chosen)} episodes, "
            f"{len(by_task)} tasks, at least one held out of each); lower it or add episodes"
        )
    return train, np.asarray(held_out, np.int64)


# ---- for people -------------------------------------------------------------------------------------------------


def describe(run: Run, trainable: Any | None = None) -> str:
    """The plan, as text: datasets, policy, how features map, batch arithmetic, cadence."""
    config = run.config
    lines = []
    for meta, train, held_out in zip(run.metas, run.train_episodes, run.eval_episodes, strict=True):
        lines += [
            f"Dataset      {meta.root}" + (f" @ {config.dataset.revision[:12]}" if config.dataset.revision else ""),
            f"             {meta.num_episodes} episodes, {meta.total_frames} frames at {meta.fps} fps"
            + (f", robot {meta.robot_type}" if meta.robot_type else ""),
            f"             trains on {len(train)} episodes, {int(meta.episode_length[train].sum())} frames; "
            f"{len(held_out)} held out",
            f"             {len(meta.tasks)} tasks: "
            + "; ".join(repr(t) for t in list(meta.tasks.values())[:4])
            + (" ..." if len(meta.tasks) > 4 else ""),
        ]
        for key in meta.camera_keys:
            feature = meta.features[key]
            used = "" if key in run.match.camera_keys else "  (not used)"
            lines.append(f"             camera {key} {_size(feature.shape)} {feature.dtype}{used}")
    missing = "; ".join(f"{k}: {', '.join(sorted(v))}" for k, v in run.missing_stats.items())
    lines.append(
        f"Statistics   {'to be computed from the dataset: ' + missing if missing else 'all that is needed is present'}"
    )
    lines.append(f"Policy       {run.policy_config.type}, {run.base['path']}" + _at(run.base["revision"]))
    if trainable is not None:
        lines.append(
            f"             {trainable.total:,} parameters, {trainable.trainable:,} trained (mode {config.train.mode})"
        )
    lines.append("Features     dataset -> policy")
    lines += [f"             {line}" for line in run.match.table()]
    batch = config.global_batch_size
    lines += [
        f"Batch        {config.batch_size} rows x {config.grad_accum} micro-steps x {config.scaling.num_workers} "
        f"workers = {batch} per step",
        f"Steps        {run.steps} ({run.steps * batch / run.rows_per_epoch:.2f} epochs of {run.rows_per_epoch} rows, "
        f"{run.rows_per_epoch / batch:.1f} steps each); a line every {config.log_freq}",
        f"Checkpoints  every {config.save_freq} steps and at the end, the last {config.keep_checkpoints} kept, in "
        f"{run.checkpoints_dir}",
        f"Hardware     {config.scaling.num_workers} {'GPU' if run.use_gpu else 'CPU'} workers, "
        f"{config.scaling.strategy}, {config.train.precision} precision",
    ]
    return "\n".join(lines)


def _size(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape or ()))


def _at(revision: str | None) -> str:
    return f" @ {revision[:12]}" if revision else ""
