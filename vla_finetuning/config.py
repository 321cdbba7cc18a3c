"""Every option, and its default. Knows neither Ray nor torch, nor flags (flags.py), nor what is wrong (checks.py)."""

from __future__ import annotations

import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

CONFIG_NAME = "config.json"
# Of a dataset recorded in a simulator (in meta/) and of policies trained on it: how its pictures were drawn.
ENVIRONMENT_NAME = "environment.json"
TrainMode = Literal["heads", "expert", "full"]
MissingCameras = Literal["error", "mask"]
OnError = Literal["stop", "skip"]
Attention = Literal["eager", "sdpa"]
Strategy = Literal["ddp", "fsdp2", "fsdp2_reshard", "hsdp"]
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
FRAMES_DIR = os.environ.get("VLA_FRAMES_DIR") or f"{tempfile.gettempdir()}/vla-fine-tuning-{os.getuid()}/frames"
# Numbers of data files as they were unpacked (data/table.py), on every node's own disk: a hundredth of what the videos
# take. The folder is of one user's; what VLA_NUMBERS_DIR names instead must be a local disk too.
NUMBERS_DIR = os.environ.get("VLA_NUMBERS_DIR") or f"{tempfile.gettempdir()}/vla-fine-tuning-{os.getuid()}/numbers"
NUMBERS_GB = 20.0


@dataclass
class ImageTransformOptions:
    """LeRobot's image transforms, for frames that are trained on; done on the device (policies/augment.py)."""

    enable: bool = False
    # Of the transforms below, so many for each camera of each row, drawn by their weights.
    max_num_transforms: int = 3
    # In the order in which they were drawn, instead of the order below.
    random_order: bool = False
    # {"name": {"weight": 1.0, "type": "ColorJitter", "kwargs": {"brightness": [0.8, 1.2]}}, ...}; LeRobot's when empty.
    tfs: dict[str, Any] = field(default_factory=dict)


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
    # Episodes to use; all when absent. Of several datasets: {"/data/a": [0, 1]}, and all of those not named.
    episodes: list[int] | dict[str, list[int]] | None = None
    # Episodes to leave out, written alike, or @FILE, a JSON file with either (`diagnostics.show_dataset` writes one).
    exclude_episodes: list[int] | dict[str, list[int]] | str | None = None
    # Use only episodes with a task that one of these patterns fits: "pick*", "*the red bin".
    tasks: list[str] | None = None
    # Share of the episodes held out for the open-loop error at the end of the run.
    eval_split: float = 0.0
    # Changes to frames that are trained on, as lerobot-train makes them: off, as there.
    image_transforms: ImageTransformOptions = field(default_factory=ImageTransformOptions)
    # Policies that normalise images: by ImageNet's mean and standard deviation, as lerobot-train does, in the place of
    # the dataset's own.
    use_imagenet_stats: bool = True
    # The last frames of each episode, so many, are not trained on; as many as the policy's type wants when absent
    # (diffusion: those whose action chunk would be mostly padding), as lerobot-train's sampler.
    drop_n_last_frames: int | None = None
    # Frames of training episodes in which nothing moves for longer than so many seconds are not trained on: no
    # dimension of state or action leaves a thousandth of its range (data/idle.py). Other frames' action chunks still
    # hold their actions. openpi's filter of DROID is 0.4.
    skip_idle: float | None = None
    # How often each training episode comes in an epoch, on average; 0 leaves it out: a column of numbers in the
    # dataset's own meta/episodes, or @FILE, of the forms in data/episode_weights.py. In a mixture they say it of an
    # epoch of their dataset, whose share of the mixture's is as ever.
    episode_weights: str | None = None
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
    # Segments begin at key frames of the videos, where they are as long as those are apart: what comes before need not
    # be decoded.
    at_key_frames: bool = True
    # Object stores (data/storage.py): seconds for one request with its retries; a folder on each node's own disk that
    # keeps what was read, and how much of it (worth it where a node's share of the dataset fits and is read twice).
    read_timeout_s: float = READ_TIMEOUT_S
    cache_dir: str | None = None
    cache_size_gb: float = CACHE_SIZE_GB
    # A folder on each node's own disk that keeps the frames decoded of videos, and how much of them: later epochs, and
    # runs on the same dataset, do not decode what is there. What does not fit is decoded every time. "auto": in
    # VLA_FRAMES_DIR (of one user, on a local disk), where a run reads its frames more than once and they fit the disk.
    frame_cache: str | None = None
    frame_cache_gb: float = FRAME_CACHE_GB
    # From the second epoch on, rows are drawn one by one from the whole dataset instead of in segments: better mixed,
    # and for free where all frames are kept. For runs on one node, or with a shard for each: others would decode single
    # frames until each node has them all.
    global_shuffle: bool = False
    # Divide the rows into so many equal shards, of which every batch has equally many rows: as many as there are nodes
    # with workers. Each node then reads one of them for its own workers, and finds in the second epoch all frames that
    # it kept in the first (docs/data_engine.md). And how many rows of a shard come in turn: those that the workers of a
    # node take at once when absent.
    shards: int = 1
    shard_rows: int | None = None
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
    # Changes to frames that are trained on. "openpi": a crop of 0.95 resized, a turn of up to 5 degrees, brightness,
    # contrast and saturation; of cameras with "wrist" in their name only the last three. The other way to have some is
    # --dataset.image_transforms.enable.
    augmentation: str = "none"
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
class SampleWeightingOptions:
    """Weights of rows in the loss, as lerobot-train has them (run/row_weights.py)."""

    # "rabc": by the progress that a reward model saw; any other option of these asks for it. "uniform": all alike, as
    # when absent.
    type: str | None = None
    # A parquet file of this machine, or hf://datasets/USER/NAME/FILE; the dataset's sarm_progress.parquet when absent.
    progress_path: str | None = None
    # Which column of it, progress_sparse or progress_dense.
    head_mode: str = "sparse"
    # What is gained in an action chunk above this weighs 1.
    kappa: float = 0.01
    epsilon: float = 1e-6
    # {"fallback_weight": 1.0}: of frames whose progress is not known.
    extra_params: dict[str, Any] = field(default_factory=dict)


@dataclass
class EmaOptions:
    """An exponential moving average of the weights that train, fp32 (lerobot-train has none; openpi does)."""

    enable: bool = False
    # Of the average at every step. openpi's default, an average of about the last 100 steps; its LIBERO recipe: 0.999.
    decay: float = 0.99
    # The average is what is measured on held-out episodes and exported; false: the weights themselves are.
    export: bool = True


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
    # they are whole only where they are computed with (as ZeRO-3). hsdp: as fsdp2 among the workers of a node, with a
    # copy on every node, so that nothing but gradients travels between nodes. --resume may change it.
    strategy: str = "ddp"
    # hsdp: how many workers hold a copy together; those of a node when absent.
    shard_workers: int | None = None
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
class PeftOptions:
    """Adapters, which train in the place of the policy's own weights (policies/lora.py); lerobot-train's flags."""

    # "lora". Any other of these options asks for it as well.
    method_type: str | None = None
    # Which linear layers have adapters: suffixes of their names, or a regular expression for all of a name; the policy
    # type's own choice when absent (PI0.5: the action expert's q_proj and v_proj, and the projections of actions).
    target_modules: list[str] | str | None = None
    # Layers that train whole, besides.
    full_training_modules: list[str] | None = None
    # How adapters start: PEFT's own way when absent, or "gaussian". In both the policy starts as it was.
    init_type: str | None = None
    # Rank of the adapters; what they amount to is multiplied by lora_alpha / r (PEFT's alpha, 8, when absent).
    r: int = 16
    lora_alpha: int | None = None
    # OUTPUT_DIR/pretrained_model has them "merged" into the policy's weights, as robots run it. "adapter": besides,
    # OUTPUT_DIR/adapter has them alone, which LeRobot and PEFT put onto the policy that the run started from.
    export: str = "merged"

    @property
    def enabled(self) -> bool:
        return self.method_type is not None


@dataclass
class RunOptions:
    """What a run writes down about itself."""

    # Write which rows each micro-batch held, for `python -m diagnostics.check_rows OUTPUT_DIR`.
    record_rows: bool = False


@dataclass
class EvalOptions:
    """How a policy is tried in an environment (evaluation/closed_loop.py). None of it changes what comes out."""

    # Episodes to play, of each task.
    n_episodes: int = 50
    # Rows that a policy decides for at once, at most.
    batch_size: int = 32
    # How long who waits for a decision waits for company, while others are still simulating.
    wait_ms: float = 20.0
    # Fill every batch up to batch_size, and compute it in one thread where that is on CPUs: rounding then does not
    # depend on how many episodes happen to wait, or on the machine's cores, either.
    exact: bool = False
    # Processes that simulate, and that decide, half a CPU each; those that decide also a GPU, where there are any. When
    # absent, one decides on a GPU and up to four on CPUs, and as many simulate as there is room for.
    env_actors: int | None = None
    policy_actors: int | None = None
    # A step or a reset that takes longer is taken for hanging: its process ends, and its episodes are played again.
    step_limit_s: float = 60.0
    # How long to wait for room for the first of these processes.
    room_timeout_s: float = 600.0
    # Of the episodes that failed, so many are shown on the page at most, and of the others half as many; 0: none.
    videos: int = 10


@dataclass
class GrpoOptions:
    """How a policy learns from success alone (`grpo.py`, docs/grpo.md). Defaults are those published for PI0.5."""

    # "grpo": clipped policy gradient, returns compared within a group; "rloo": REINFORCE with the mean of the others as
    # its baseline; "filtered": imitation of the episodes that succeeded. All on the same episodes.
    method: str = "grpo"
    # An iteration: groups x group_size episodes, those of a group from the same initial state, then updates.
    iterations: int = 100
    groups: int = 16
    group_size: int = 8
    # What an episode is worth: "success" (1 or 0), or its "return" (the sum of its rewards).
    reward: str = "success"
    # The random sampler (rl/flow_sde.py): steps from noise to actions, how much noise (a), and whether "all" of the
    # steps are random or "one" of each decision.
    flow_steps: int = 5
    noise_level: float = 0.5
    random_steps: str = "all"
    # Passes over an iteration's decisions, in minibatches of so many over all workers, evenly cut.
    epochs: int = 2
    minibatch: int = 64
    # The ratio of probabilities is clipped to [1 - clip_low, 1 + clip_high]; dual_clip bounds a bad episode's loss.
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    # Divide advantages by the group's standard deviation.
    normalise: bool = True
    # An iteration's updates end when the policy has moved so far from the one that acted; null: they never do.
    target_kl: float | None = 0.05
    # Weight of the divergence from the policy that the run started from. Keeps a second copy of the policy.
    kl: float = 0.0
    # Iterations over which the learning rate rises; after that it stays.
    warmup: int = 3
    # Every so many iterations the policy plays --eval.n_episodes held-out episodes by the deterministic sampler.
    eval_every: int = 10
    # Processes of each training worker that simulate, in two halves that take turns with inference; environments in
    # each of them, and the CPUs that it holds.
    env_actors: int = 2
    envs_per_actor: int = 8
    env_actor_cpus: float = 1.0
    # Decisions that the policy makes at once, at most.
    inference_batch: int = 64


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
class RecordConfig:
    """Demonstrations to write as a dataset (envs/record.py)."""

    # The environment (--env.type) and its own options, as in EvaluateConfig.
    env_type: str | None = None
    env_options: list[str] = field(default_factory=list)
    # Episodes to play, of each task; the first one's seed, the next one's is one more. Far from those that are
    # evaluated unless told otherwise, so that these are held out.
    episodes: int = 50
    seed: int = 100_000
    # The dataset's folder; on a cluster a path that all nodes share.
    root: str | None = None


@dataclass
class Config:
    """A run. Nested options are `--dataset.root`, `--train.mode`, `--scaling.num_workers` and so on."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    ema: EmaOptions = field(default_factory=EmaOptions)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    run: RunOptions = field(default_factory=RunOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    peft: PeftOptions = field(default_factory=PeftOptions)
    sample_weighting: SampleWeightingOptions = field(default_factory=SampleWeightingOptions)

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
    # The policy's own optimizer, parameter groups and learning rate schedule, as lerobot-train. False: one group of all
    # that trains, and what --optimizer.type and --scheduler.type name.
    use_policy_training_preset: bool = True
    # LeRobot's options of both, as given: --optimizer.betas='[0.9, 0.99]', --scheduler.num_warmup_steps=500 and so on.
    # With the preset they replace only what they name.
    optimizer_options: list[str] = field(default_factory=list)
    scheduler_options: list[str] = field(default_factory=list)
    # The short way. Peak learning rate; the policy's own when absent. What has a rate of its own among the policy's
    # parameter groups keeps its share of it.
    lr: float | None = None
    # Either of these: linear warm-up over a share of the steps (WARMUP_FRAC), then a cosine over all of them down to a
    # share of the peak (FINAL_LR_FRAC), in the place of the policy's own schedule.
    warmup_frac: float | None = None
    final_lr_frac: float | None = None
    log_freq: int = 50
    # Checkpoints: every so many steps, and at the first log step so many seconds after the last one. Kept are the
    # newest, and as many more as asked for of those with the lowest held-out loss (eval_steps), or where that is not
    # measured, the lowest training loss since the one before: by "loss"; or by "success", the most in the loop.
    save_freq: int = 1000
    save_every_s: float | None = None
    keep_checkpoints: int = 2
    keep_best: int = 0
    keep_best_by: str = "loss"
    # The loss on held-out episodes (--dataset.eval_split), every so many steps and at the end; 0: never. Over at most
    # so many of their rows, shared among the tasks and evenly spaced in each; 0: over all. Where it is measured, it
    # decides which checkpoints are the best.
    eval_steps: int = 0
    max_eval_samples: int = 0
    # What becomes of OUTPUT_DIR/pretrained_model: the "last" step, or the "best" checkpoint by the held-out loss.
    export: str = "last"
    # An environment (--env.type) and its own options (--env.task=... and so on): checkpoints play --eval.n_episodes in
    # it, by processes beside the training, which does not wait for them (evaluation/during.py): those at every multiple
    # of so many steps, and the last one; 0: the last one only.
    env_type: str | None = None
    env_options: list[str] = field(default_factory=list)
    env_eval_freq: int = 20_000
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

    def is_evaluated(self, step: int, steps: int) -> bool:
        """Whether the checkpoint of a step is to play in the environment, in a run of so many steps."""
        if self.env_type is None:
            return False
        return step == steps or (self.env_eval_freq > 0 and step % self.env_eval_freq == 0)

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.grad_accum * self.scaling.num_workers

    @property
    def augments(self) -> bool:
        """Whether frames that are trained on are changed."""
        return self.train.augmentation != "none" or self.dataset.image_transforms.enable

    @property
    def takes_average(self) -> bool:
        """Whether the averaged weights are what is measured and exported."""
        return self.ema.enable and self.ema.export

    @property
    def best_kept(self) -> int:
        """Checkpoints kept for their loss, besides the newest: the best one also if it is to be exported."""
        return max(self.keep_best, int(self.export == "best"))

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


@dataclass
class GrpoConfig(Config):
    """A run of `grpo.py`: of a `Config`, what is not about data. `flags.NOT_IN_GRPO` has no flags there."""

    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    # What is published for PI0.5; imitation's is several times that.
    lr: float | None = 5e-6
    log_freq: int = 1
    save_freq: int = 10

    def is_evaluated(self, step: int, steps: int) -> bool:
        return False  # its workers play themselves (--grpo.eval_every)

    @property
    def global_batch_size(self) -> int:
        return self.grpo.minibatch


# Where only the other one is given.
WARMUP_FRAC, FINAL_LR_FRAC = 0.033, 0.1

# Nested options, by the word before their flags' dot.
GROUPS = {
    "dataset": DatasetOptions,
    "train": TrainOptions,
    "ema": EmaOptions,
    "scaling": ScalingOptions,
    "run": RunOptions,
    "peft": PeftOptions,
    "sample_weighting": SampleWeightingOptions,
    "grpo": GrpoOptions,
    "eval": EvalOptions,
}

# What runs did before these options were there: a run that is resumed keeps its rows, their order, their scale and how
# it learns.
BEFORE_OPTIONS = {
    "dataset.image_size": "stored",
    "dataset.window_segments": "null",
    "dataset.at_key_frames": "false",
    "dataset.mixture_stats": "frames",
    "dataset.mixed_ranges": "true",
    "dataset.use_imagenet_stats": "false",
    "dataset.drop_n_last_frames": "0",
    "optimizer.type": "adamw",
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
# What is published of PI0.5 trains the action expert; presets differ in nothing but how many rows at once fit.
GRPO_GPU = {"scaling.use_gpu": "true", "scaling.num_workers": "8", "train.mode": "expert", "batch_size": "8"}
GRPO_PRESETS: dict[str, dict[str, str]] = {
    # benchmarks/results/ has five seeds of it.
    "demo": {
        "output_dir": "outputs/grpo",
        "env.type": "two_bins",
        "env.episode_length": "30",
        "eval.n_episodes": "100",
        "train.mode": "full",
        "scaling.num_workers": "2",
        "scaling.cpus_per_worker": "0.5",
        "batch_size": "32",
        "lr": "1e-4",
        "grpo.iterations": "60",
        "grpo.noise_level": "0.6",
        "grpo.dual_clip": "null",
        "grpo.env_actors": "2",
        "grpo.envs_per_actor": "32",
        "grpo.env_actor_cpus": "0.25",
    },
    # Four rows, of five random steps each, would need 19.8 GiB of 22.
    "l4": {**GRPO_GPU, "scaling.num_workers": "4", "batch_size": "2"},
    **dict.fromkeys(("a100_40", "a100", "h100", "h200", "b200"), GRPO_GPU),
}
# Options of one start, not of the run: what config.json says of them does not count.
OF_A_START = ("resume", "dry_run", "policy_trust_remote_code")


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
