"""Every option of a run, its default, and what makes it wrong. Knows neither Ray nor torch.

Flags that `lerobot-train` has keep its names and meaning and are parsed by the same library (draccus); what is Ray's
is under `--scaling.*`, what is ours under `--train.*`. A preset is a set of flags that come before the user's own.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import draccus

from vla_finetuning.lerobot_train import answer
from vla_finetuning.terminal import tell_text

CONFIG_NAME = "config.json"
TrainMode = Literal["heads", "expert", "full"]
MissingCameras = Literal["error", "mask"]
OnError = Literal["stop", "skip"]
Attention = Literal["eager", "sdpa"]
Strategy = Literal["ddp", "fsdp2", "fsdp2_reshard"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
PRECISIONS = ("auto", "fp32", "bf16")
# What NumPy's seeds are bounded by; those of torch and Python take more.
MAX_SEED = 2**32 - 1
CACHE_DIR = Path(os.environ.get("VLA_CACHE", ".cache"))

# Object stores: time for one request with its retries. Long enough to sit out an overload or a restart of the store
# (half a minute to a minute), short enough that a run whose store is gone says so while somebody is still looking.
READ_TIMEOUT_S = 120.0
# The very first request has less: a store that does not answer at all is more often a wrong name than an outage.
FIRST_ANSWER_TIMEOUT_S = 15.0
# A few of LeRobot's larger datasets, on the local disk that a cloud machine with a GPU usually has.
CACHE_SIZE_GB = 100.0
# Decoded frames are large (data/frame_cache.py): 16 GB for every hour of three cameras of 224x224 at 10 Hz.
FRAME_CACHE_GB = 200.0
# Numbers of data files as they were unpacked (data/table.py), on every node's own disk: a hundredth of what the videos
# take. The folder is of one user's; what VLA_NUMBERS_DIR names instead must be a local disk too.
NUMBERS_DIR = os.environ.get("VLA_NUMBERS_DIR") or f"{tempfile.gettempdir()}/vla-fine-tuning-{os.getuid()}/numbers"
NUMBERS_GB = 20.0


@dataclass
class DatasetOptions:
    """Where the episodes are and which of them are trained on."""

    # A LeRobot v3 dataset: a local folder, s3://..., gs://..., or several separated by commas.
    root: str | None = None
    # Instead of root, datasets and their weights: {"s3://bucket/a": 3, "/data/b": 1}. Each gives every epoch rows in
    # proportion to its weight, whatever its size; an epoch is as many rows as they hold together (data/plan.py).
    mixture: dict[str, float] = field(default_factory=dict)
    # Several datasets must mean the same by the same number. Dimensions are put into the first dataset's order by name;
    # where another dataset calls them otherwise, what the first calls them: {"action": {"shoulder": "joint_0", ...}}.
    dimension_map: dict[str, dict[str, str]] = field(default_factory=dict)
    # Accept datasets whose values reach more than 10 times as far as another's: other units, as a rule.
    mixed_ranges: bool = False
    # What a dataset of a mixture counts for in the normalisation statistics: its "weights", as in what is trained on,
    # or its "frames".
    mixture_stats: str = "weights"
    # A dataset on the Hugging Face Hub; its revision is pinned in the run's config.json.
    repo_id: str | None = None
    revision: str | None = None
    # Episodes to use; all when absent.
    episodes: list[int] | None = None
    # Share of the episodes held out for the open-loop error at the end of the run.
    eval_split: float = 0.0
    # Cameras to decode, by dataset key; those that the policy wants when absent.
    camera_keys: list[str] | None = None
    # A camera that the policy has and the dataset lacks: "error", or "mask" (the policy sees a masked image).
    missing_cameras: str = "error"
    # "auto": where the policy fits frames into one size anyway ([224, 224] for PI0.5) and that at least halves a row,
    # that is done where they are decoded, so that fewer bytes travel and a shuffle window has room for more rows.
    # [height, width]: so in any case. "stored": frames as they are, bit for bit as LeRobot reads them.
    image_size: list[int] | str | None = "auto"
    # An episode that cannot be read: "stop" the run, or "skip" it: its rows then keep their places in the batches but
    # do not count in the loss, and OUTPUT_DIR/skipped.jsonl names it.
    on_error: str = "stop"
    # With "skip": the share of rows that may be, of those trained on so far and at least of an epoch's. A run of which
    # more cannot be read ends: it would be trained on another dataset than the one it names.
    max_skipped: float = 0.01
    # Rows shuffled among themselves (bounded by memory); see data/plan.py.
    shuffle_window: int = 512
    # From at least so many places of the dataset (segments) a window takes its rows, whatever a row's size. More mix
    # better and cost decoding (docs/data_engine.md). null: segments of 16 rows, however few that makes.
    window_segments: int | None = 32
    # Object stores (data/storage.py): seconds for one request with its retries; a folder on each node's own disk that
    # keeps what was read, and how much of it (worth it where a node's share of the dataset fits and is read twice).
    read_timeout_s: float = READ_TIMEOUT_S
    cache_dir: str | None = None
    cache_size_gb: float = CACHE_SIZE_GB
    # A folder on each node's own disk that keeps the frames decoded of videos, and how much of them: later epochs, and
    # runs on the same dataset, do not decode what is there. What does not fit is decoded every time.
    frame_cache: str | None = None
    frame_cache_gb: float = FRAME_CACHE_GB
    # A training process that has waited so long for its next batch ends the attempt with an error that names its rows:
    # a read that hangs is noticed by nobody else. Longer than several requests that each take all of read_timeout_s,
    # shorter than collective_timeout_s, after which the other ranks could only say that this one is missing.
    batch_timeout_s: float = 600.0


@dataclass
class TrainOptions:
    """How a step is computed."""

    # What is updated: the action projections, the whole action expert, or everything that the loss can reach.
    mode: str = "expert"
    # auto: bf16 autocast on GPUs that have it, otherwise fp32. Weights that train are fp32 always.
    precision: str = "auto"
    # Leave padded action steps out of the loss. LeRobot's PI0.5 and openpi count them, so the default does.
    mask_padding: bool = False
    # PI0.5: draws of noise and time per row. More than one is another estimator of the same loss: images and language
    # are computed once for all of them, so each costs little and lowers the variance, but rows are still batch_size.
    noise_draws: int = 1
    # PI0.5: how attention is computed. "sdpa": PyTorch's fused kernels; "eager": as LeRobot writes it, the same up to
    # rounding, with the attention weights in memory.
    attention: str = "sdpa"
    # PI0.5: keep only what enters each layer and compute the layer again in backward. Same result, less memory, slower.
    activation_checkpointing: bool = False
    # PI0.5: cut the padding of a micro-batch's prompts down to its longest one, rounded up. The same up to rounding.
    trim_prompts: bool = True
    # PI0.5: torch.compile the layers, on GPUs where that works. The same up to rounding; the first step compiles.
    compile: bool = False
    # Bitwise repeatable: deterministic kernels only.
    deterministic: bool = False
    # End the run when more steps than this had a loss or gradient that is not finite (such steps are skipped).
    max_nonfinite: int = 10
    # Gradient norm above which gradients are scaled down; the policy's own when absent.
    clip_norm: float | None = None


@dataclass
class ScalingOptions:
    """What the run may use of the cluster."""

    # Training processes, one GPU each where there are GPUs. `--scaling.num_workers 2,8`: as many as there is room for,
    # at least 2 and at most 8; a step's rows stay those of 8 workers.
    num_workers: int = 1
    min_workers: int | None = None
    # How often to look whether there is room for more workers.
    resize_interval_s: float = 60.0
    # Absent: as found.
    use_gpu: bool | None = None
    # Ray's name of a GPU type that workers need, e.g. "L4".
    accelerator_type: str | None = None
    # How what trains is spread over workers. ddp: a copy on each, the fastest where it fits. fsdp2: a part of
    # parameters, gradients and Adam's moments on each; parameters are whole during a step (as ZeRO-2). fsdp2_reshard:
    # they are whole only where they are computed with (as ZeRO-3). --resume may change it.
    strategy: str = "ddp"
    # For policies of which a batch may leave something that trains without a gradient: DDP then searches, every step.
    # `python -m diagnostics.find_unused_params` tells whether there is any; PI0.5 has none.
    find_unused_parameters: bool = False
    # CPUs that each training process holds; what is left of a node decodes.
    cpus_per_worker: float = 1.0
    # CPUs (and decoder threads) of a read task.
    cpus_per_read_task: float = 1.0
    # Free disk that every node must have under Ray's temporary directory (logs; objects that overflow memory).
    free_disk_gb: float = 5.0
    # Worker groups started anew after failures before the run gives up. Preempted nodes do not count.
    max_failures: int = 3
    # How long to wait for room for the workers. Longer than an autoscaler usually takes to bring a node, and a spot
    # instance or a machine that restarts to come back; what still runs is paid for meanwhile.
    nodes_timeout_s: float = 3600.0
    # A training process that has not answered for so long is taken for dead. Longer than any pause that is not a
    # fault: compiling kernels and loading weights keep it from answering for tens of seconds.
    worker_timeout_s: float = 300.0
    # A collective that takes so long ends with an error: a rank is stuck. Longer than the slowest batch or checkpoint
    # that the other ranks may have to wait for.
    collective_timeout_s: float = 900.0


@dataclass
class RunOptions:
    """What a run writes down about itself."""

    # Write which rows each micro-batch held, for `python -m diagnostics.check_rows OUTPUT_DIR`.
    record_rows: bool = False


@dataclass
class EvalOptions:
    """How a policy is tried in an environment (evaluation/closed_loop.py). None of it changes what comes out."""

    # Episodes to play.
    n_episodes: int = 50
    # Rows that a policy decides for at once, at most.
    batch_size: int = 32
    # How long who waits for a decision waits for company, while others are still simulating.
    wait_ms: float = 20.0
    # Fill every batch up to batch_size: rounding then does not depend on how many episodes happen to wait either.
    exact: bool = False
    # Processes that simulate, half a CPU each; as many as there is room for when absent. And processes that decide, a
    # CPU and (where there are GPUs) a GPU each.
    env_actors: int | None = None
    policy_actors: int = 1
    # A step or a reset that takes longer is taken for hanging: its process ends, and its episodes are played again.
    step_limit_s: float = 60.0


@dataclass
class EvaluateConfig:
    """One evaluation in the loop (`evaluate.py`). Flags that `lerobot-eval` has keep its names and meaning."""

    eval: EvalOptions = field(default_factory=EvalOptions)
    # The policy, a folder or a Hub id (--policy.path), and its own options (--policy.n_action_steps=5 and so on).
    policy_path: str | None = None
    policy_revision: str | None = None
    policy_options: list[str] = field(default_factory=list)
    # As Config.policy_trust_remote_code.
    policy_trust_remote_code: bool = False
    # The environment (--env.type) and its own options (--env.episode_length=30 and so on).
    env_type: str | None = None
    env_options: list[str] = field(default_factory=list)
    # Of the first episode's scene, the next one's is one more; and of the policy's noise.
    seed: int = 1000
    # Where episodes.jsonl is written. There already: go on with it.
    output_dir: str | None = None
    # Absent: GPUs if there are any.
    use_gpu: bool | None = None
    # {"observation.images.front": "observation.images.base_0_rgb"}: environment key -> policy key.
    rename_map: dict[str, str] = field(default_factory=dict)


@dataclass
class Config:
    """A run. Nested options are `--dataset.root`, `--train.mode`, `--scaling.num_workers` and so on."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    run: RunOptions = field(default_factory=RunOptions)

    # A pretrained policy: a folder or a Hub id (--policy.path), or a type to start from random weights (--policy.type).
    policy_path: str | None = None
    policy_type: str | None = None
    policy_revision: str | None = None
    # The policy's own options, as given: --policy.chunk_size=20 and so on.
    policy_options: list[str] = field(default_factory=list)
    # Run code that comes with the policy (--policy.trust_remote_code), for types that need it. What runs is named.
    # Only ever as this start's command line says: who can write a run's folder must not be able to ask for it.
    policy_trust_remote_code: bool = False

    preset: str | None = None
    output_dir: str | None = None
    # Go on with the run in output_dir. `--resume auto`: if there is one, else start it, as a job that is retried wants.
    resume: bool = False
    dry_run: bool = False
    seed: int = 1000
    # Rows per worker per micro-batch; a step sees batch_size x grad_accum x num_workers rows.
    batch_size: int = 8
    grad_accum: int = 1
    # Optimizer updates. num_epochs is the other way to say it; MAX_TRAIN_STEPS in the environment caps both.
    steps: int | None = None
    num_epochs: float | None = None
    # Peak learning rate; the policy's own when absent. Linear warm-up over warmup_frac of the steps, then a cosine
    # down to final_lr_frac of the peak.
    lr: float | None = None
    warmup_frac: float = 0.033
    final_lr_frac: float = 0.1
    log_freq: int = 50
    # Checkpoints: every so many steps, and at the first log step so many seconds after the last one. Kept are the
    # newest, and as many more as asked for of those with the lowest training loss since the one before.
    save_freq: int = 1000
    save_every_s: float | None = None
    keep_checkpoints: int = 2
    keep_best: int = 0
    # Besides metrics.jsonl: draw the curves in a tracker (report/tracking.py), filed under a project.
    track: str | None = None
    track_project: str = "vla-fine-tuning"
    # Push the trained policy to the Hugging Face Hub (data/hub.py), with lerobot-train's flags: --policy.push_to_hub,
    # --policy.repo_id USER/NAME and --policy.private. To name the repository is to ask for it.
    push_to_hub: bool | None = None
    policy_repo_id: str | None = None
    policy_private: bool | None = None
    # What a GPU costs per hour, in any currency: the report then says what 1000 samples cost.
    price_per_gpu_hour: float | None = None
    # {"observation.images.front": "observation.images.base_0_rgb"}: dataset key -> policy key. With several datasets it
    # may name features of any of them.
    rename_map: dict[str, str] = field(default_factory=dict)
    # How far a video frame may lie from its row's timestamp, in seconds.
    tolerance_s: float = 1e-4

    @property
    def roots(self) -> list[str]:
        listed = [part.strip() for part in (self.dataset.root or "").split(",")]
        return list(self.dataset.mixture) or [root for root in listed if root]

    @property
    def folder(self) -> Path:
        """The run's own folder, `output_dir`."""
        return Path(self.output_dir or "")

    @property
    def hub_repo_id(self) -> str | None:
        """Where the trained policy is pushed to; None: it is not."""
        return None if self.push_to_hub is False else self.policy_repo_id

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.grad_accum * self.scaling.num_workers

    @property
    def rows_multiple(self) -> int:
        """Rows that any number of workers this run may have can share evenly, in whole micro-batches."""
        most = self.scaling.num_workers
        return self.batch_size * math.lcm(*range(self.scaling.min_workers or most, most + 1))

    def resolve_steps(self, rows_per_epoch: int) -> int:
        """Optimizer steps of the run: `steps`, or `num_epochs` of the data; capped by MAX_TRAIN_STEPS."""
        if self.steps is not None:
            steps = self.steps
        else:
            steps = math.ceil((self.num_epochs or 1.0) * rows_per_epoch / self.global_batch_size)
        cap = os.environ.get("MAX_TRAIN_STEPS")
        if cap is not None:
            if not cap.isdigit() or int(cap) < 1:
                raise ValueError(f"MAX_TRAIN_STEPS={cap!r} in the environment: expected a positive number")
            steps = min(steps, int(cap))
        return steps

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# Nested options, by the word before their flags' dot.
GROUPS = {"dataset": DatasetOptions, "train": TrainOptions, "scaling": ScalingOptions, "run": RunOptions}

# What runs did before these options were there: a run that is resumed keeps its rows, their order and their scale.
BEFORE_OPTIONS = {
    "dataset.image_size": "stored",
    "dataset.window_segments": "null",
    "dataset.mixture_stats": "frames",
    "dataset.mixed_ranges": "true",
}

# What each preset sets; any flag overrides. The GPU ones are sized by what --dry_run plans for PI0.5 with 3 cameras: a
# global batch of 64 in the fewest micro-steps, with 4 GiB to spare on every GPU (tests/training/test_room.py). They are
# planned, not measured.
GPU = {"scaling.use_gpu": "true", "steps": "30000"}
FULL = {**GPU, "train.mode": "full", "batch_size": "8", "grad_accum": "1", "scaling.num_workers": "8"}
PRESETS: dict[str, dict[str, str]] = {
    "demo": {
        "output_dir": "outputs/demo",
        "train.mode": "full",
        "scaling.num_workers": "2",
        "scaling.cpus_per_worker": "0.5",
        "batch_size": "32",
        "steps": "300",
        "lr": "1e-3",
        "warmup_frac": "0.05",
        "log_freq": "20",
        "save_freq": "100",
        "dataset.eval_split": "0.1",
    },
    # 16 rows at once would need 19 GiB of 22.
    "l4": {**GPU, "train.mode": "expert", "batch_size": "8", "grad_accum": "2", "scaling.num_workers": "4"},
    # What activations take would not fit beside the parts of what trains: computed again.
    "a100_40": {**FULL, "scaling.strategy": "fsdp2", "train.activation_checkpointing": "true"},
    # Copies of what trains, 48 GiB with gradients and Adam's moments, would not fit beside activations.
    "a100": {**FULL, "scaling.strategy": "fsdp2"},
    "h100": {**FULL, "scaling.strategy": "fsdp2"},
    # Here they do, and need not be gathered.
    "h200": FULL,
    "b200": FULL,
}


# Under --policy., but not the policy's own options. The first three lerobot-train counts to the policy; a base policy
# brings its own along, where it was once pushed to: not ours.
POLICY_FLAGS = {
    "policy.push_to_hub": "push_to_hub",
    "policy.repo_id": "policy_repo_id",
    "policy.private": "policy_private",
    "policy.trust_remote_code": "policy_trust_remote_code",
}
# Options of one start, not of the run: what config.json says of them does not count.
OF_A_START = ("resume", "dry_run", "policy_trust_remote_code")


def parse_args(argv: Sequence[str]) -> Config:
    """Command line to a validated `Config`. Raises ValueError naming the flag, what was found and what to do."""
    for before, arg in zip(["", *argv], argv, strict=False):  # first of all: every other error may repeat them
        name = re.match(r"--[\w.]+(?==)", arg) or re.match(r"--[\w.]+$", before)
        refuse_credentials(arg, name[0] if name else "command line")
    given = _normalise(argv, flag_names(), ("policy.path", "policy.type", *POLICY_FLAGS))
    given = [(name, _resume(value, dict(given)) if name == "resume" else value) for name, value in given]
    names = dict(given)
    preset = names.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"--preset {preset}: expected one of {', '.join(PRESETS)}")
    config_path = names.get("config_path")
    if names.get("resume") == "true":
        # What the run was started with stands; only flags given now change it.
        config_path, preset = str(_saved_config(names)), None
    defaults = dict(PRESETS.get(preset or "", {}))
    if names.get("resume") == "true":
        defaults |= _not_yet_options(Path(str(config_path)))
    # Two ways to say how long, of which the user's own replaces the other.
    for chosen, other in (("steps", "num_epochs"), ("num_epochs", "steps")):
        if chosen in names and other not in names:
            defaults[other] = "null"
    flags = [*defaults.items(), *given]
    flags = [pair for name, value in flags for pair in _workers(name, value)]
    flags = [(POLICY_FLAGS.get(name, name), value) for name, value in flags]
    policy = {k.removeprefix("policy."): v for k, v in flags if k.startswith("policy.")}
    rest = [f"--{k}={v}" for k, v in flags if not k.startswith("policy.") and k != "config_path"]
    try:
        if config_path:
            refuse_credentials(Path(config_path).read_text(), config_path)
        with draccus.config_type("json"):
            config = draccus.parse(Config, config_path=config_path, args=rest)
    except (draccus.utils.DraccusException, json.JSONDecodeError, OSError) as error:
        told = " ".join(str(error).split())
        hint = """; lists and maps are written as JSON: --dataset.camera_keys='["observation.images.top"]'"""
        raise ValueError(
            f"command line{f' or {config_path}' if config_path else ''}: {told}"
            + (hint if re.search(r"\b(list|dict)\[", told) else "")
        ) from error
    if config.dataset.image_size is None:  # how runs were saved before there was "auto"
        config.dataset.image_size = "stored"
    named = {POLICY_FLAGS.get(name, name) for name in names}
    for option in OF_A_START:
        setattr(config, option, getattr(config, option) and option in named)
    config.policy_path = policy.pop("path", config.policy_path)
    config.policy_type = policy.pop("type", config.policy_type)
    config.policy_revision = policy.pop("pretrained_revision", config.policy_revision)
    config.policy_options = config.policy_options + [f"--{k}={v}" for k, v in policy.items()]
    validate(config)
    return config


# What comes before the @ of scheme://USER:SECRET@place. Keys of object stores have slashes in them, so a secret may
# reach past the first one; after a colon there may be a port instead, and a bucket may go by an ARN.
_CREDENTIALS = re.compile(r"""://(?:[^/@,\s"']*@|(?!arn:)[^/@:,\s"']*:(?!\d{1,5}(?:[/,\s"']|$))[^@\s"']*@)""")
# Where a name before the @ is a part of the address: Azure's containers.
_NAMED = re.compile(r"""\b(?:abfss?|wasbs?)://[\w$-]+@""")


def refuse_credentials(text: str, where: str) -> None:
    """Raises ValueError when an address with credentials is in `text`, naming only `where`: it must not be shown.

    What is given as a root is printed, saved in the run's folder, sent to trackers and named in errors.
    """
    if _CREDENTIALS.search(_NAMED.sub("", text)):
        raise ValueError(
            f"{where}: an address with credentials in it (SCHEME://KEY:SECRET@...) is refused, and not repeated here, "
            "because addresses are shown, logged and saved; give SCHEME://BUCKET/PATH, and the credentials in the "
            "environment or the store's own configuration files, on every node (S3: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials; Google: GOOGLE_APPLICATION_CREDENTIALS)"
        )


def parse_evaluate(argv: Sequence[str]) -> EvaluateConfig:
    """Command line of `evaluate.py` to a validated `EvaluateConfig`. Raises ValueError naming the flag."""
    names = {"policy.path": "policy_path", "policy.pretrained_revision": "policy_revision", "env.type": "env_type"}
    names["policy.trust_remote_code"] = "policy_trust_remote_code"
    flags = {f"eval.{option.name}": "bool" in str(option.type) for option in fields(EvalOptions)}
    flags |= {"seed": False, "output_dir": False, "use_gpu": True, "rename_map": False}
    own: dict[str, list[str]] = {"policy": [], "env": []}
    args = []
    for name, value in _normalise(argv, flags, tuple(names), ("policy.", "env."), lambda _: None):
        refuse_credentials(value, f"--{name}")
        group, _, option = name.partition(".")
        if name in flags or name in names:
            args.append(f"--{names.get(name, name)}={value}")
        else:
            own[group].append(f"--{option}={value}")
    try:
        with draccus.config_type("json"):
            config = draccus.parse(EvaluateConfig, args=args)
    except draccus.utils.DraccusException as error:
        raise ValueError(f"command line: {' '.join(str(error).split())}") from error
    config.policy_options, config.env_options = own["policy"], own["env"]
    validate_evaluate(config)
    return config


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
    for option in fields(EvalOptions):
        value = getattr(config.eval, option.name)
        if option.name != "exact" and value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--eval.{option.name}={value}: must be positive")


def help_text() -> str:
    """What `--help` prints: draccus' account of the options, under the names that the command line has for them."""
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
        draccus.parse(Config, args=["--help"])
    text = re.sub(r"\Ausage:.*?\n\n", "usage: vla.py [--FLAG VALUE ...]\n\n", told.getvalue(), flags=re.DOTALL)
    text = re.sub(rf"^ *--({'|'.join(GROUPS)}) str .*\n", "", text, flags=re.MULTILINE)
    names = {"policy_options list[str]": "policy.OPTION VALUE", "policy_revision": "policy.pretrained_revision"}
    names |= {ours: theirs for theirs, ours in POLICY_FLAGS.items()}
    names |= {"policy_path": "policy.path", "policy_type": "policy.type"}
    for ours, theirs in names.items():
        text = text.replace(f"  --{ours} ", f"  --{theirs} ").replace(f"  --{ours}\n", f"  --{theirs}\n")
    return text


def print_help() -> int:
    tell_text(help_text())
    return 0


def validate(config: Config) -> None:
    """Refuse what can be refused without looking at any file."""
    d, t, s = config.dataset, config.train, config.scaling
    demo = config.preset == "demo"
    positive: dict[str, float | None] = {
        "batch_size": config.batch_size,
        "grad_accum": config.grad_accum,
        "steps": config.steps,
        "num_epochs": config.num_epochs,
        "log_freq": config.log_freq,
        "save_freq": config.save_freq,
        "save_every_s": config.save_every_s,
        "keep_checkpoints": config.keep_checkpoints,
        "price_per_gpu_hour": config.price_per_gpu_hour,
        "lr": config.lr,
        "tolerance_s": config.tolerance_s,
        "dataset.shuffle_window": d.shuffle_window,
        "dataset.window_segments": d.window_segments,
        "dataset.read_timeout_s": d.read_timeout_s,
        "dataset.batch_timeout_s": d.batch_timeout_s,
        "dataset.cache_size_gb": d.cache_size_gb,
        "dataset.frame_cache_gb": d.frame_cache_gb,
        "train.clip_norm": t.clip_norm,
        "train.noise_draws": t.noise_draws,
        "scaling.num_workers": s.num_workers,
        "scaling.cpus_per_worker": s.cpus_per_worker,
        "scaling.cpus_per_read_task": s.cpus_per_read_task,
        "scaling.resize_interval_s": s.resize_interval_s,
        "scaling.nodes_timeout_s": s.nodes_timeout_s,
        "scaling.worker_timeout_s": s.worker_timeout_s,
        "scaling.collective_timeout_s": s.collective_timeout_s,
        "scaling.free_disk_gb": s.free_disk_gb,
    }
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--{name}={value}: must be positive")
    choices: dict[str, tuple[str, Sequence[str]]] = {
        "train.mode": (t.mode, get_args(TrainMode)),
        "train.precision": (t.precision, PRECISIONS),
        "train.attention": (t.attention, get_args(Attention)),
        "scaling.strategy": (s.strategy, get_args(Strategy)),
        "dataset.missing_cameras": (d.missing_cameras, get_args(MissingCameras)),
        "dataset.on_error": (d.on_error, get_args(OnError)),
        "dataset.mixture_stats": (d.mixture_stats, ("weights", "frames")),
    }
    for name, (found, known) in choices.items():
        if found not in known:
            raise ValueError(f"--{name}={found}: expected one of {', '.join(known)}")
    if not 0 <= config.seed <= MAX_SEED:
        raise ValueError(f"--seed={config.seed}: must be between 0 and {MAX_SEED}")
    for name, share in {"warmup_frac": config.warmup_frac, "final_lr_frac": config.final_lr_frac}.items():
        if not 0 <= share <= 1:
            raise ValueError(f"--{name}={share}: must be between 0 and 1")
    if config.track is not None and config.track not in get_args(TrackerName):
        raise ValueError(f"--track={config.track}: expected one of {', '.join(get_args(TrackerName))}")
    if config.push_to_hub and config.policy_repo_id is None:
        raise ValueError("--push_to_hub: to which repository? give --policy.repo_id USER/NAME")
    if config.keep_best < 0:
        raise ValueError(f"--keep_best={config.keep_best}: a number of checkpoints, 0 for none")
    if not 0 <= d.max_skipped <= 1:
        raise ValueError(f"--dataset.max_skipped={d.max_skipped}: a share of the rows, between 0 and 1")
    if not 0 <= d.eval_split < 1:
        raise ValueError(f"--dataset.eval_split={d.eval_split}: a share of the episodes, at least 0 and below 1")
    known_size = len(d.image_size) == 2 and min(d.image_size) > 0 if isinstance(d.image_size, list) else None
    if not (d.image_size in ("auto", "stored") if known_size is None else known_size):
        raise ValueError(f"--dataset.image_size={d.image_size}: expected auto, stored, or [height, width] in pixels")
    if d.episodes is not None and len(config.roots) > 1:
        raise ValueError("--dataset.episodes with several roots: whose episodes? Give one root, or leave it out")
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
    if config.output_dir is None:
        raise ValueError("where to? give --output_dir FOLDER (on a cluster: a path that all nodes share)")
    if "://" in config.output_dir:
        raise ValueError(
            f"--output_dir={config.output_dir}: must be a path (on a cluster, a mounted one that all nodes share)"
        )
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
    if s.strategy != "ddp" and t.compile:
        raise ValueError(
            f"--scaling.strategy={s.strategy} gathers parameters in the middle of layers, so that these cannot be "
            "compiled: leave --train.compile out, or use --scaling.strategy=ddp"
        )
    if s.strategy == "fsdp2_reshard" and s.min_workers is not None:
        raise ValueError(
            f"--scaling.strategy=fsdp2_reshard --scaling.num_workers {s.min_workers},{s.num_workers}: workers gather "
            "parameters together in every micro-batch, so none may have more of those than another; use a fixed number "
            "of workers, or --scaling.strategy=fsdp2"
        )
    if s.use_gpu is False and s.accelerator_type is not None:
        raise ValueError("--scaling.accelerator_type needs GPUs, but --scaling.use_gpu=false")


def _normalise(
    argv: Sequence[str],
    flags: Mapping[str, bool],
    named: Sequence[str],
    groups: tuple[str, ...] = ("policy.",),
    answered: Callable[[str], str | None] = answer,
) -> list[tuple[str, str]]:
    """`--a b`, `--a=b` and a bare `--a` (true, of options that are true or false) to pairs.

    Args:
        flags: those that there are, and whether they are true or false. named: some of `groups`, to suggest.
        groups: what a flag may begin with whose options are not ours.
        answered: what to say of a flag that is none here.
    """
    given: list[tuple[str, str | None]] = []
    for arg in argv:
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")
            given.append((name, text if equals else None))
        elif given and given[-1][1] is None:
            given[-1] = given[-1][0], arg
        else:
            raise ValueError(f"command line: {arg!r} belongs to no flag; flags look like --batch_size 8")
    pairs = []
    for name, value in given:
        if value is not None and not value.strip():
            raise ValueError(f"command line: --{name} is empty (an unset variable?): give a value, or leave it out")
        if name not in flags and (said := answered(name)):
            raise ValueError(f"command line: lerobot-train has --{name}; here: {said}")
        if name not in flags and not name.startswith(groups):
            raise ValueError(f"command line: unknown flag --{name}{_meant(name, [*flags, *named])}")
        if value is None and not flags.get(name, True):
            raise ValueError(f"command line: --{name} needs a value")
        pairs.append((name, "true" if value is None else _as_json(name, value)))
    return pairs


def _as_json(name: str, value: str) -> str:
    """What people write for some options, in the form that draccus reads: 1e4 for 10000, 0,1,5:8 for [0,1,5,6,7]."""
    kind = _kinds().get(name, "")
    if kind.startswith("int") and re.fullmatch(r"\d+(\.\d*)?e\+?\d+", value, re.IGNORECASE):
        return str(int(float(value))) if float(value).is_integer() else value
    if kind.startswith("list[") and value.strip()[:1] not in ("[", "@") and value not in ("null", "auto", "stored"):
        parts = [part.strip() for part in value.split(",")]
        if kind.startswith("list[str"):
            return json.dumps(parts)
        numbers: list[int] = []
        for part in parts:
            first, colon, last = part.partition(":")
            if not (first.isdigit() and (last.isdigit() if colon else True)):
                return value
            numbers += range(int(first), int(last)) if colon else [int(first)]
        return json.dumps(numbers)
    return value


def _meant(name: str, known: Sequence[str]) -> str:
    """Which flag a wrong one may stand for: the same in another group, or one that is spelt alike."""
    last = {flag: flag.rpartition(".")[2] for flag in known}
    close = [flag for flag in known if last[flag] == name.rpartition(".")[2]]
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    close = close or [flag for flag in known if difflib.get_close_matches(name, [last[flag]], cutoff=0.75)]
    return f"; did you mean --{close[0]}?" if close else "; --help lists them"


def _workers(name: str, value: str) -> list[tuple[str, str]]:
    """`--scaling.num_workers 2,8` to the two options that it is."""
    if name != "scaling.num_workers":
        return [(name, value)]
    least, comma, most = value.rpartition(",")
    return [("scaling.num_workers", most), ("scaling.min_workers", least if comma else "null")]


def flag_names() -> dict[str, bool]:
    """All flags but the policy's own, and whether they are true or false."""
    return {name: "bool" in kind for name, kind in _kinds().items()}


def _kinds() -> dict[str, str]:
    """The types of all flags but the policy's own, as written."""
    kinds = {"config_path": "str"}
    for option in fields(Config):
        if option.name in GROUPS:
            kinds |= {f"{option.name}.{f.name}": str(f.type) for f in fields(GROUPS[option.name])}
        elif not option.name.startswith("policy_"):
            kinds[option.name] = str(option.type)
    return kinds


def _resume(value: str, names: Mapping[str, str]) -> str:
    """--resume as "true" or "false": "auto" goes on with a run that is there."""
    if value.lower() not in ("true", "false", "auto"):
        raise ValueError(f"--resume {value}: expected true, false, or auto (to go on where there is a run, else start)")
    return str(_config_of_run(names).is_file()).lower() if value.lower() == "auto" else value.lower()


def _saved_config(names: Mapping[str, str]) -> Path:
    """The configuration of the run to go on with."""
    path = _config_of_run(names)
    if not path.is_file():
        raise FileNotFoundError(
            f"--resume: {path} does not exist, so {path.parent} holds no run; start one without --resume, or let "
            "--resume auto see"
        )
    return path


def _not_yet_options(path: Path) -> dict[str, str]:
    """What an earlier version, which wrote the configuration at `path`, did where there are options now."""
    try:
        saved = json.loads(path.read_text())["dataset"]
        return {name: value for name, value in BEFORE_OPTIONS.items() if name.removeprefix("dataset.") not in saved}
    except (ValueError, KeyError, TypeError):
        return {}  # whoever parses it says what is wrong with it


def _config_of_run(names: Mapping[str, str]) -> Path:
    folder = names.get("output_dir") or PRESETS.get(names.get("preset", ""), {}).get("output_dir")
    if folder is None:
        raise ValueError("--resume: say which run, --output_dir FOLDER")
    return Path(folder).expanduser() / CONFIG_NAME
