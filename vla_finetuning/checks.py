"""Contradictions between options, without looking at any file.

What is wrong with one alone, its type and bounds say (options.py); what needs files, run/plan.py refuses.
"""

from __future__ import annotations

from vla_finetuning.bucket import place
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.job import MAX_SEED
from vla_finetuning.options.mixture import members, robots
from vla_finetuning.options.programs import Config, EvaluateConfig, GrpoConfig, RecordConfig, ValueConfig
from vla_finetuning.options.recap import RecapOptions
from vla_finetuning.options.scaling import WorkerOptions


def check_evaluate(config: EvaluateConfig) -> None:
    """Raises ValueError where options of an evaluation do not go together."""
    if config.policy_path is None:
        raise ValueError("which policy? give --policy.path FOLDER_OR_HUB_ID")
    if config.env_type is None:
        raise ValueError("in which environment? give --env.type two_bins")
    if config.output_dir is None:
        raise ValueError("where to? give --output_dir FOLDER or s3://BUCKET/FOLDER; given again, it goes on there")
    _check_output(config.output_dir)
    _check_recorded(config.record_dataset, "--eval.record_dataset")


def check_record(config: RecordConfig) -> None:
    """Raises ValueError where options of a recording do not go together."""
    if config.env_type is None or config.root is None:
        raise ValueError("what and where to? give --env.type metaworld --env.task reach-v3 --root FOLDER")
    if config.seed > MAX_SEED - config.episodes:
        raise ValueError(f"--seed={config.seed}: must be at most {MAX_SEED - config.episodes}, for as many episodes")


def check_grpo(config: GrpoConfig) -> None:
    """Raises ValueError where options of a run of `grpo.py` do not go together."""
    g, s = config.grpo, config.scaling
    _check_gpus(config.scaling)
    _check_recorded(g.record_dataset, "--grpo.record_dataset")
    if g.demonstrations is not None and g.method != "filtered":
        raise ValueError(
            f"--grpo.demonstrations={g.demonstrations} with --grpo.method={g.method}: only imitation takes them, "
            "--grpo.method=filtered"
        )
    if g.resample and g.method == "filtered":
        raise ValueError(
            f"--grpo.resample={g.resample} with --grpo.method=filtered, which learns from every success, also of "
            "groups whose returns are all equal: leave it out"
        )
    if g.kl and g.method == "filtered":
        raise ValueError(f"--grpo.kl={g.kl:g} with --grpo.method=filtered: imitation has no such term; leave it out")
    if config.train.compile:
        raise ValueError(
            "--train.compile=true: decisions come in batches of any size, and each size would be compiled; leave it out"
        )
    if config.lr is None:
        raise ValueError(
            "--lr=null: imitation's own rate is far too high for learning from success; give a number, as 5e-6"
        )
    if g.groups % s.num_workers:
        raise ValueError(
            f"--grpo.groups={g.groups} with --scaling.num_workers={s.num_workers}: workers play equally many groups; "
            f"give {-(-g.groups // s.num_workers) * s.num_workers}"
        )
    if s.min_workers is not None:
        raise ValueError(
            f"--scaling.num_workers {s.min_workers},{s.num_workers}: groups are shared out evenly among a fixed number "
            "of workers; give one number"
        )
    if s.strategy != "ddp":
        raise ValueError(
            f"--scaling.strategy={s.strategy}: a worker that holds a shard of the parameters cannot act by itself, and "
            "workers decide at different times; use --scaling.strategy=ddp with --train.mode=expert or heads"
        )
    if config.policy_path is None and config.preset != "demo":
        raise ValueError("which policy? give --policy.path FOLDER_OR_HUB_ID: what vla.py has trained by imitation")
    if config.env_type is None:
        raise ValueError("in which environment? give --env.type two_bins")
    if any(option.startswith("--type=") for option in config.policy_options):
        raise ValueError("--policy.type starts from random weights, which succeed at nothing; give --policy.path")
    _check_output(config.output_dir)


def check_run(config: Config) -> None:
    """Raises ValueError where options of a run of `vla.py` do not go together."""
    demo = config.preset == "demo"
    _check_gpus(config.scaling)
    _check_dataset(config.dataset, demo)
    _check_learning(config)
    _check_adapters(config)
    _check_feature_cache(config)
    _check_given_alone(config)
    _check_env(config)
    _check_held_out(config)
    _check_output(config.output_dir)
    _check_workers(config)
    if config.train.exact_mean and config.sample_weighting.type == "rabc":
        raise ValueError(
            "--train.exact_mean=true has no effect with --sample_weighting.type=rabc: losses are then means over rows; "
            "leave one of them out"
        )
    if unknown := sorted(config.sample_weighting.extra_params.keys() - {"fallback_weight"}):
        raise ValueError(f"--sample_weighting.extra_params has {unknown}; RA-BC takes fallback_weight there")
    if config.push_to_hub and config.policy_repo_id is None:
        raise ValueError("--policy.push_to_hub: to which repository? give --policy.repo_id USER/NAME")
    if config.dataset.image_transforms.enable and config.train.augmentation != "none":
        raise ValueError("--dataset.image_transforms.enable and --train.augmentation: give one of them")
    if config.policy_path and config.policy_type:
        raise ValueError("--policy.path and --policy.type: give one of them (the pretrained policy knows its type)")
    if not demo and not (config.policy_path or config.policy_type):
        raise ValueError("which policy? give --policy.path lerobot/pi05_base, a folder, or use --preset demo")
    if config.steps is not None and config.num_epochs is not None:
        raise ValueError("--steps and --num_epochs: give one of them")


def check_value(config: ValueConfig) -> None:
    """Raises ValueError where options of a run of `value.py` do not go together."""
    if config.policy_path is None:
        raise ValueError("what is the value function to see with? give --policy.path FOLDER_OR_HUB_ID")
    if config.scaling.strategy != "ddp":
        raise ValueError(
            f"--scaling.strategy={config.scaling.strategy}: value functions are not sharded; use --scaling.strategy=ddp"
        )
    if len(robots(members(config.dataset.mixture))) > 1:
        raise ValueError("--dataset.mixture: a value function learns from datasets of one robot; name those of one")
    if config.dataset.on_error == "skip":
        raise ValueError(
            "--dataset.on_error=skip: a frame that cannot be read has no value, and no label; leave its episode out by "
            "--dataset.exclude_episodes"
        )
    check_run(config.training())


def _check_dataset(d: DatasetOptions, demo: bool) -> None:
    if isinstance(d.image_size, list) and not (len(d.image_size) == 2 and min(d.image_size) > 0):
        raise ValueError(f"--dataset.image_size={d.image_size}: expected auto, stored, or [height, width] in pixels")
    if isinstance(d.exclude_episodes, str) and not d.exclude_episodes.startswith("@"):
        raise ValueError(f"--dataset.exclude_episodes={d.exclude_episodes}: expected episodes (3,7,20:30) or @FILE")
    found = members(d.mixture)
    robots(found)
    for flag, given, listed in (
        ("episodes", d.episodes, [member.root for member in found if member.episodes is not None]),
        ("exclude_episodes", d.exclude_episodes, [member.root for member in found if member.exclude_episodes]),
    ):
        if given is not None and listed:
            raise ValueError(f"--dataset.{flag}, and {flag} of {listed[0]} in --dataset.mixture: give one of them")
    if sum(map(bool, (d.root, d.repo_id, d.mixture))) > 1:
        raise ValueError("--dataset.root, --dataset.repo_id and --dataset.mixture: give one of them")
    if d.revision is not None and d.repo_id is None:
        raise ValueError(f"--dataset.revision={d.revision} is of a dataset on the Hub: give --dataset.repo_id with it")
    if not demo and not (d.root or d.repo_id or d.mixture):
        raise ValueError("which data? give --dataset.root PATH_OR_URI or --dataset.repo_id ID, or use --preset demo")


def _check_gpus(scaling: WorkerOptions) -> None:
    if scaling.use_gpu is False and scaling.accelerator_type is not None:
        raise ValueError("--scaling.accelerator_type needs GPUs, but --scaling.use_gpu=false")


def _check_workers(config: Config) -> None:
    s = config.scaling
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
            f"--scaling.shard_workers={s.shard_workers} --scaling.num_workers={s.num_workers}: the workers do not "
            f"divide into replicas; give a divisor of {s.num_workers}"
        )


def _check_env(config: Config) -> None:
    if config.env_type is None:
        if config.env_options or config.keep_best_by == "success":
            given = config.env_options[0].replace("--", "--env.", 1) if config.env_options else "--keep_best=N,success"
            raise ValueError(f"{given}: in which environment? give --env.type two_bins")
        return
    if config.keep_best_by == "success" and config.export == "best":
        raise ValueError(
            "--export=best with --keep_best=N,success: the best to export has the lowest held-out loss, and may not "
            "be among the checkpoints; leave one of them out"
        )
    if config.env_eval_freq % config.save_freq:
        raise ValueError(
            f"--env_eval_freq={config.env_eval_freq} with --save_freq={config.save_freq}: what plays are checkpoints; "
            "give a multiple of --save_freq, or 0 for the last one only"
        )


def _check_held_out(config: Config) -> None:
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
            "held-out loss cannot be compared with the best; give a --save_freq that is a multiple of --eval_steps"
        )


def _check_output(output_dir: str | None) -> None:
    if output_dir is None:
        raise ValueError(
            "where to? give --output_dir s3://BUCKET/FOLDER, or a path (on a cluster, one that all nodes share)"
        )
    try:
        place(output_dir)
    except ValueError as error:
        raise ValueError(f"--output_dir={error}") from None


def _check_recorded(root: str | None, flag: str) -> None:
    if root is not None and "://" in root:
        raise ValueError(
            f"{flag}={root}: datasets are written to a disk; give a path (on a cluster, one that all nodes share), and "
            "copy the folder to the bucket when it is done"
        )


def _check_learning(config: Config) -> None:
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
    if not config.use_policy_training_preset:
        if "type" not in optimizer:
            raise ValueError("--use_policy_training_preset=false: with which optimizer? give --optimizer.type adamw")
        if not short and "type" not in scheduler:
            raise ValueError(
                "--use_policy_training_preset=false: with which schedule? give --scheduler.type "
                "cosine_decay_with_warmup, or --warmup_frac"
            )


def _check_given_alone(config: Config) -> None:
    """Refuse options that do nothing without another. A run that was started with some goes on."""
    data, recap = config.dataset, config.recap
    for flag, given, other, there in (
        (
            "--dataset.max_skipped",
            data.max_skipped != DatasetOptions.max_skipped,
            "--dataset.on_error skip",
            data.on_error == "skip",
        ),
        (
            "--dataset.image_transforms.tfs",
            bool(data.image_transforms.tfs),
            "--dataset.image_transforms.enable",
            data.image_transforms.enable,
        ),
        ("--recap.dropout", recap.dropout != RecapOptions.dropout, "--recap.labels", recap.labels),
    ):
        if given and not there and not config.resume:
            raise ValueError(f"{flag} does nothing without {other}: give both, or neither")


def _check_feature_cache(config: Config) -> None:
    transforms, augmentation = config.dataset.image_transforms.enable, config.train.augmentation
    if config.train.feature_cache is not None and (transforms or augmentation != "none"):
        flag = "--dataset.image_transforms.enable" if transforms else f"--train.augmentation={augmentation}"
        raise ValueError(
            f"--train.feature_cache with {flag}: frames then differ in every epoch, and so do their features; leave "
            "one of them out"
        )


def _check_adapters(config: Config) -> None:
    peft = config.peft
    if peft.method_type is not None and peft.method_type.lower() != "lora":
        raise ValueError(f"--peft.method_type={peft.method_type}: expected lora; of PEFT's other methods none is tried")
    if peft.enabled and config.policy_type is not None:
        raise ValueError(
            f"--policy.type={config.policy_type} with --peft: adapters beside random weights learn next to nothing; "
            "start from a pretrained policy, --policy.path"
        )
