"""What makes options wrong, as far as it can be told without looking at any file. What can, run/plan.py refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import get_args

from vla_finetuning.config import (
    MAX_SEED,
    PRECISIONS,
    Attention,
    Config,
    EvalOptions,
    EvaluateConfig,
    GrpoConfig,
    GrpoOptions,
    MissingCameras,
    OnError,
    RecordConfig,
    Strategy,
    TrackerName,
    TrainMode,
)


def validate_evaluate(config: EvaluateConfig) -> None:
    """Refuse what can be refused without looking at any file."""
    if config.policy_path is None:
        raise ValueError("which policy? give --policy.path FOLDER_OR_HUB_ID")
    if config.env_type is None:
        raise ValueError("in which environment? give --env.type two_bins")
    if config.output_dir is None:
        raise ValueError("where to? give --output_dir FOLDER; given again, it goes on there")
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"--seed={config.seed}: must be between 0 and {MAX_SEED}")
    _validate_eval(config.eval)


def _validate_eval(options: EvalOptions) -> None:
    for option in fields(EvalOptions):
        value = getattr(options, option.name)
        if option.name == "videos" and value >= 0:
            continue
        if option.name != "exact" and value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--eval.{option.name}={value}: must be positive")


def validate_grpo(config: GrpoConfig) -> None:
    """Refuse what can be refused without looking at any file."""
    g, s = config.grpo, config.scaling
    positive = {f"grpo.{f.name}": getattr(g, f.name) for f in fields(GrpoOptions) if _is_number(getattr(g, f.name))}
    _validate_eval(config.eval)
    for name in ("grpo.kl", "grpo.warmup"):
        if not 0 <= positive.pop(name) < math.inf:
            raise ValueError(f"--{name}={getattr(g, name.removeprefix('grpo.'))}: must be 0 or more")
    _check_values(
        config,
        positive,
        {
            "grpo.method": (g.method, ("grpo", "rloo", "filtered")),
            "grpo.reward": (g.reward, ("success", "return")),
            "grpo.random_steps": (g.random_steps, ("all", "one")),
        },
    )
    if g.group_size < 2:
        raise ValueError(
            f"--grpo.group_size={g.group_size}: an episode is compared with others of its group; at least 2"
        )
    if g.clip_low >= 1:
        raise ValueError(f"--grpo.clip_low={g.clip_low}: a ratio is never below 0, so below 1")
    if g.groups % s.num_workers:
        raise ValueError(
            f"--grpo.groups={g.groups} with --scaling.num_workers={s.num_workers}: workers play equally many groups; "
            f"give {-(-g.groups // s.num_workers) * s.num_workers}"
        )
    if s.min_workers is not None:
        raise ValueError(
            f"--scaling.num_workers {s.min_workers},{s.num_workers}: groups are shared out evenly among a fixed number"
        )
    if s.strategy != "ddp":
        raise ValueError(
            f"--scaling.strategy={s.strategy}: a worker that has parameters in parts cannot act by itself, and workers "
            "decide at different times; use --scaling.strategy=ddp with --train.mode=expert or heads, which fits more"
        )
    if config.policy_path is None and config.preset != "demo":
        raise ValueError("which policy? give --policy.path FOLDER_OR_HUB_ID: what vla.py has trained by imitation")
    if config.env_type is None:
        raise ValueError("in which environment? give --env.type two_bins")
    if config.policy_type is not None:
        raise ValueError("--policy.type starts from random weights, which succeed at nothing; give --policy.path")
    _check_output(config)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _validate_env(config: Config) -> None:
    if config.keep_best_by not in ("loss", "success"):
        raise ValueError(f"--keep_best_by={config.keep_best_by}: expected one of loss, success")
    if config.env_eval_freq < 0:
        raise ValueError(f"--env_eval_freq={config.env_eval_freq}: a number of steps, 0 for the last one only")
    if config.env_type is None:
        if config.env_options or config.keep_best_by == "success":
            given = config.env_options[0].replace("--", "--env.", 1) if config.env_options else "--keep_best_by=success"
            raise ValueError(f"{given}: in which environment? give --env.type two_bins")
        return
    if config.keep_best_by == "success" and config.export == "best":
        raise ValueError(
            "--export=best with --keep_best_by=success: the best to export has the lowest held-out loss, and may not "
            "be among those kept; leave one of them out"
        )
    if config.env_eval_freq % config.save_freq:
        raise ValueError(
            f"--env_eval_freq={config.env_eval_freq} with --save_freq={config.save_freq}: what plays are checkpoints; "
            "give a multiple of --save_freq, or 0 for the last one only"
        )


def validate_record(config: RecordConfig) -> None:
    """Refuse what can be refused without looking at any file."""
    if config.env_type is None or config.root is None:
        raise ValueError("what and where to? give --env.type metaworld --env.task reach-v3 --root FOLDER")
    if config.episodes < 1:
        raise ValueError(f"--episodes={config.episodes}: must be positive")
    if not 0 <= config.seed <= MAX_SEED - config.episodes:
        raise ValueError(f"--seed={config.seed}: must be between 0 and {MAX_SEED - config.episodes}")


def validate(config: Config) -> None:
    """Refuse what can be refused without looking at any file."""
    d, t, s = config.dataset, config.train, config.scaling
    demo = config.preset == "demo"
    _check_values(
        config,
        {
            "grad_accum": config.grad_accum,
            "steps": config.steps,
            "num_epochs": config.num_epochs,
            "log_freq": config.log_freq,
            "tolerance_s": config.tolerance_s,
            "dataset.skip_idle": d.skip_idle,
            "sample_weighting.epsilon": config.sample_weighting.epsilon,
            "dataset.shuffle_window": d.shuffle_window,
            "dataset.window_segments": d.window_segments,
            "dataset.read_timeout_s": d.read_timeout_s,
            "dataset.batch_timeout_s": d.batch_timeout_s,
            "dataset.cache_size_gb": d.cache_size_gb,
            "dataset.frame_cache_gb": d.frame_cache_gb,
            "dataset.shards": d.shards,
            "dataset.shard_rows": d.shard_rows,
            "train.noise_draws": t.noise_draws,
            "peft.r": config.peft.r,
            "peft.lora_alpha": config.peft.lora_alpha,
            "scaling.cpus_per_read_task": s.cpus_per_read_task,
            "scaling.resize_interval_s": s.resize_interval_s,
        },
        {
            "dataset.missing_cameras": (d.missing_cameras, get_args(MissingCameras)),
            "dataset.on_error": (d.on_error, get_args(OnError)),
            "dataset.mixture_stats": (d.mixture_stats, ("weights", "frames")),
            "train.augmentation": (t.augmentation, ("none", "openpi")),
            "sample_weighting.type": (config.sample_weighting.type or "uniform", ("rabc", "uniform")),
            "sample_weighting.head_mode": (config.sample_weighting.head_mode, ("sparse", "dense")),
            "export": (config.export, ("last", "best")),
        },
    )
    for name, share in {"warmup_frac": config.warmup_frac, "final_lr_frac": config.final_lr_frac}.items():
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"--{name}={share}: must be between 0 and 1")
    _validate_learning(config)
    _validate_adapters(config)
    if unknown := sorted(config.sample_weighting.extra_params.keys() - {"fallback_weight"}):
        raise ValueError(f"--sample_weighting.extra_params has {unknown}; RA-BC takes fallback_weight there")
    if config.push_to_hub and config.policy_repo_id is None:
        raise ValueError("--push_to_hub: to which repository? give --policy.repo_id USER/NAME")
    if not 0 < config.ema.decay < 1:
        raise ValueError(f"--ema.decay={config.ema.decay}: must be between 0 and 1, such as 0.999")
    _validate_eval(config.eval)
    _validate_env(config)
    _validate_held_out(config)
    if d.image_transforms.enable and t.augmentation != "none":
        raise ValueError("--dataset.image_transforms.enable and --train.augmentation: give one of them")
    if d.image_transforms.max_num_transforms < 1:
        raise ValueError(
            f"--dataset.image_transforms.max_num_transforms={d.image_transforms.max_num_transforms}: at least 1"
        )
    if d.drop_n_last_frames is not None and d.drop_n_last_frames < 0:
        raise ValueError(f"--dataset.drop_n_last_frames={d.drop_n_last_frames}: a number of frames, 0 for none")
    if not 0 <= d.max_skipped <= 1:
        raise ValueError(f"--dataset.max_skipped={d.max_skipped}: a share of the rows, between 0 and 1")
    if not 0 <= d.eval_split < 1:
        raise ValueError(f"--dataset.eval_split={d.eval_split}: a share of the episodes, at least 0 and below 1")
    known_size = len(d.image_size) == 2 and min(d.image_size) > 0 if isinstance(d.image_size, list) else None
    if not (d.image_size in ("auto", "stored") if known_size is None else known_size):
        raise ValueError(f"--dataset.image_size={d.image_size}: expected auto, stored, or [height, width] in pixels")
    if isinstance(d.exclude_episodes, str) and not d.exclude_episodes.startswith("@"):
        raise ValueError(f"--dataset.exclude_episodes={d.exclude_episodes}: expected episodes (3,7,20:30) or @FILE")
    for root, weight in d.mixture.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"--dataset.mixture: the weight of {root} is {weight}; must be positive, or leave it out")
    if sum(map(bool, (d.root, d.repo_id, d.mixture))) > 1:
        raise ValueError("--dataset.root, --dataset.repo_id and --dataset.mixture: give one of them")
    if d.revision is not None and d.repo_id is None:
        raise ValueError(f"--dataset.revision={d.revision} is of a dataset on the Hub: give --dataset.repo_id with it")
    if not demo and not (d.root or d.repo_id or d.mixture):
        raise ValueError("which data? give --dataset.root PATH_OR_URI or --dataset.repo_id ID, or use --preset demo")
    if config.policy_path and config.policy_type:
        raise ValueError("--policy.path and --policy.type: give one of them (the pretrained policy knows its type)")
    if not demo and not (config.policy_path or config.policy_type):
        raise ValueError("which policy? give --policy.path lerobot/pi05_base, a folder, or use --preset demo")
    if config.steps is not None and config.num_epochs is not None:
        raise ValueError("--steps and --num_epochs: give one of them")
    _check_output(config)
    if s.min_workers is not None:
        if not 0 < s.min_workers <= s.num_workers:
            raise ValueError(
                f"--scaling.num_workers {s.min_workers},{s.num_workers}: the least and the most, in that order"
            )
        if config.rows_multiple > 2**31:
            raise ValueError(
                f"--scaling.num_workers {s.min_workers},{s.num_workers}: too many different numbers of workers to "
                "share data evenly among any of them; choose a narrower range"
            )
    if s.strategy == "fsdp2_reshard" and s.min_workers is not None:
        raise ValueError(
            f"--scaling.strategy=fsdp2_reshard --scaling.num_workers {s.min_workers},{s.num_workers}: workers gather "
            "parameters together in every micro-batch, so none may have more of those than another; use a fixed number "
            "of workers, or --scaling.strategy=fsdp2"
        )
    if s.strategy == "hsdp" and s.min_workers is not None:
        raise ValueError(
            f"--scaling.strategy=hsdp --scaling.num_workers {s.min_workers},{s.num_workers}: every node must have as "
            "many workers as another, which a number that changes does not keep; use a fixed number of workers, or "
            "--scaling.strategy=fsdp2"
        )
    if s.shard_workers is not None and s.strategy != "hsdp":
        raise ValueError(
            f"--scaling.shard_workers={s.shard_workers} is for --scaling.strategy=hsdp; with {s.strategy} leave it out"
        )
    if s.shard_workers is not None and s.num_workers % s.shard_workers:
        raise ValueError(
            f"--scaling.shard_workers={s.shard_workers} --scaling.num_workers={s.num_workers}: so many workers do not "
            f"hold whole copies; give a divisor of {s.num_workers}"
        )


def _check_values(
    config: Config, positive: Mapping[str, float | None], choices: Mapping[str, tuple[str, Sequence[str]]]
) -> None:
    """What every program's options must be; `positive` and `choices` are its own besides."""
    t, s = config.train, config.scaling
    positive = {
        "batch_size": config.batch_size,
        "save_freq": config.save_freq,
        "save_every_s": config.save_every_s,
        "keep_checkpoints": config.keep_checkpoints,
        "price_per_gpu_hour": config.price_per_gpu_hour,
        "lr": config.lr,
        "train.clip_norm": t.clip_norm,
        "scaling.num_workers": s.num_workers,
        "scaling.shard_workers": s.shard_workers,
        "scaling.cpus_per_worker": s.cpus_per_worker,
        "scaling.nodes_timeout_s": s.nodes_timeout_s,
        "scaling.worker_timeout_s": s.worker_timeout_s,
        "scaling.collective_timeout_s": s.collective_timeout_s,
        "scaling.free_disk_gb": s.free_disk_gb,
        **positive,
    }
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--{name}={value}: must be positive")
    choices = {
        "train.mode": (t.mode, get_args(TrainMode)),
        "train.precision": (t.precision, PRECISIONS),
        "train.attention": (t.attention, get_args(Attention)),
        "scaling.strategy": (s.strategy, get_args(Strategy)),
        **choices,
    }
    for name, (found, known) in choices.items():
        if found not in known:
            raise ValueError(f"--{name}={found}: expected one of {', '.join(known)}")
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"--seed={config.seed}: must be between 0 and {MAX_SEED}")
    if config.track is not None and config.track not in get_args(TrackerName):
        raise ValueError(f"--track={config.track}: expected one of {', '.join(get_args(TrackerName))}")
    if config.keep_best < 0:
        raise ValueError(f"--keep_best={config.keep_best}: a number of checkpoints, 0 for none")
    if s.use_gpu is False and s.accelerator_type is not None:
        raise ValueError("--scaling.accelerator_type needs GPUs, but --scaling.use_gpu=false")


def _validate_held_out(config: Config) -> None:
    for name, count in {"eval_steps": config.eval_steps, "max_eval_samples": config.max_eval_samples}.items():
        if count < 0:
            raise ValueError(f"--{name}={count}: a number, 0 for {'never' if name == 'eval_steps' else 'all'}")
    if config.max_eval_samples and not config.eval_steps:
        raise ValueError(f"--max_eval_samples={config.max_eval_samples} is of the held-out loss: give --eval_steps too")
    if config.eval_steps and not config.dataset.eval_split:
        raise ValueError(
            f"--eval_steps={config.eval_steps}: no episode is held out to compute a loss on; give --dataset.eval_split"
        )
    if config.export == "best" and not config.eval_steps:
        raise ValueError("--export=best: the best by the held-out loss, which is not measured; give --eval_steps")
    if config.eval_steps and config.best_kept and config.save_freq % config.eval_steps:
        raise ValueError(
            f"--save_freq={config.save_freq} with --eval_steps={config.eval_steps}: checkpoints at steps without a "
            "held-out loss cannot be told from the best; give a --save_freq that is a multiple of --eval_steps"
        )


def _check_output(config: Config) -> None:
    if config.output_dir is None:
        raise ValueError("where to? give --output_dir FOLDER (on a cluster: a path that all nodes share)")
    if "://" in config.output_dir:
        raise ValueError(
            f"--output_dir={config.output_dir}: must be a path (on a cluster, a mounted one that all nodes share)"
        )


def _validate_learning(config: Config) -> None:
    """Refuse two ways to say the same, and half of what stands in for the policy's preset."""
    optimizer, scheduler = (
        {option.removeprefix("--").partition("=")[0] for option in options}
        for options in (config.optimizer_options, config.scheduler_options)
    )
    short = [f"--{name}" for name in ("warmup_frac", "final_lr_frac") if getattr(config, name) is not None]
    if short and scheduler:
        raise ValueError(f"{short[0]} and --scheduler.{min(scheduler)}: give one of them")
    if config.lr is not None and "lr" in optimizer:
        raise ValueError("--lr and --optimizer.lr: give one of them")
    if config.train.clip_norm is not None and "grad_clip_norm" in optimizer:
        raise ValueError("--train.clip_norm and --optimizer.grad_clip_norm: give one of them")
    if not config.use_policy_training_preset:
        if "type" not in optimizer:
            raise ValueError("--use_policy_training_preset=false: with which optimizer? give --optimizer.type adamw")
        if not short and "type" not in scheduler:
            raise ValueError(
                "--use_policy_training_preset=false: with which schedule? give --scheduler.type "
                "cosine_decay_with_warmup, or --warmup_frac"
            )


def _validate_adapters(config: Config) -> None:
    peft = config.peft
    if peft.method_type is not None and peft.method_type.lower() != "lora":
        raise ValueError(f"--peft.method_type={peft.method_type}: expected lora; of PEFT's other methods none is tried")
    if peft.init_type not in (None, "gaussian"):
        raise ValueError(
            f"--peft.init_type={peft.init_type}: expected gaussian, or none for PEFT's own; others change the policy's "
            "own weights, which are taken from where the run started"
        )
    if peft.export not in ("merged", "adapter"):
        raise ValueError(f"--peft.export={peft.export}: expected merged or adapter")
    if peft.enabled and config.policy_type is not None:
        raise ValueError(
            f"--policy.type={config.policy_type} with --peft: adapters beside random weights learn next to nothing; "
            "start from a pretrained policy, --policy.path"
        )
