"""Every option, and its default. Its type and bounds say which values there are; what fits together, checks.py.

Knows neither Ray nor torch, nor how flags are read (flags.py).
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from vla_finetuning.bucket import place
from vla_finetuning.cards import OF_PRESET
from vla_finetuning.options import option

CONFIG_NAME = "config.json"
# Of a dataset recorded in a simulator (in meta/) and of policies trained on it: how its pictures were drawn.
ENVIRONMENT_NAME = "environment.json"
# Of policies whose instructions name the robot (--dataset.robot_in_prompt): what they begin with.
ROBOT_NAME = "robot.json"
TrainMode = Literal["heads", "expert", "full"]
MissingCameras = Literal["error", "mask"]
OnError = Literal["stop", "skip"]
Attention = Literal["eager", "sdpa"]
Strategy = Literal["ddp", "fsdp2", "fsdp2_reshard", "hsdp"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Precision = Literal["auto", "fp32", "bf16"]
Method = Literal["grpo", "ppo", "filtered"]
Reward = Literal["success", "return"]
# How the names of a critic's parameters begin in a checkpoint; it is not part of the policy.
CRITIC = "critic."
# What NumPy's seeds are bounded by; those of torch and Python take more.
MAX_SEED = 2**32 - 1
CACHE_DIR = Path(os.environ.get("VLA_CACHE", ".cache"))

# The very first request to an object store has less time than others (environment.py): a store that does not answer at
# all is more often a wrong name than an outage.
FIRST_ANSWER_TIMEOUT_S = 15.0
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "vla-fine-tuning"
FRAMES_DIR = os.environ.get("VLA_FRAMES_DIR") or str(_CACHE / "frames")
# Unpacked numbers of data files (data/number_cache.py), on every node's own disk: a hundredth of what the videos take.
# Beside them, up to as many bytes of images of data files, as they are encoded (data/image_cache.py).
# Where the home folder is a network drive, VLA_NUMBERS_DIR and VLA_FRAMES_DIR should name a local disk.
DEFAULT_NUMBERS_DIR = str(_CACHE / "numbers")
NUMBERS_DIR = os.environ.get("VLA_NUMBERS_DIR") or DEFAULT_NUMBERS_DIR
NUMBERS_GB = float(os.environ.get("VLA_NUMBERS_GB") or 20)


@dataclass
class ImageTransformOptions:
    """LeRobot's image transforms, for frames that are trained on; done on the device (policies/augment.py)."""

    enable: bool = option(False, "Change training frames by LeRobot's image transforms.")
    max_num_transforms: int = option(
        3, "Number of transforms applied to each camera of each row, drawn by their weights.", min=1
    )
    random_order: bool = option(False, "Apply transforms in the order in which they were drawn, not in that of `tfs`.")
    tfs: dict[str, Any] = option(
        {},
        "The transforms; LeRobot's own when empty.",
        form="""JSON, as '{"dark": {"weight": 1.0, "type": "ColorJitter", "kwargs": {"brightness": [0.5, 0.9]}}}'""",
    )


@dataclass
class DatasetOptions:
    """Where the episodes are, and which of them are trained on."""

    root: str | None = option(
        None,
        "A LeRobot dataset (v3.0, v2.1 or v2.0): a local folder, s3://..., gs://..., or several separated by commas.",
    )
    repo_id: str | None = option(
        None, "A dataset on the Hugging Face Hub; its revision is pinned in the run's config.json."
    )
    revision: str | None = option(None, "Branch, tag or commit of --dataset.repo_id; the newest when absent.")
    mixture: dict[str, float | dict[str, Any]] | str = option(
        {},
        "Datasets and their weights, instead of root. Each gives every epoch rows in proportion to its weight, "
        "whatever its size; an epoch is as many rows as the datasets hold together. @FILE: a YAML file, whose members "
        "may be of robots that differ (docs/robots.md).",
        form="""JSON, as '{"s3://bucket/a": 3, "/data/b": 1}', or @FILE""",
    )
    # Several datasets must mean the same by the same number.
    dimension_map: dict[str, dict[str, str]] = option(
        {},
        "Names of a mixture's state and action dimensions that differ from the first dataset's, and the first "
        "dataset's names for them. Dimensions are ordered by name, as in the first dataset.",
        form="""JSON, as '{"action": {"shoulder": "joint_0"}}'""",
    )
    mixed_ranges: bool = option(
        False, "Accept datasets whose values reach more than 10 times as far as another's: other units, as a rule."
    )
    mixture_stats: Literal["weights", "frames"] = option(
        "weights",
        "How datasets of a mixture count in the normalisation statistics: by their weights, as in what is trained on, "
        "or by their frames.",
    )
    robot_in_prompt: bool = option(
        False,
        "Of robots that differ in one run: begin each instruction with the name of its robot. On the robot they must "
        "begin alike (docs/robots.md).",
    )
    statistics: Literal["auto", "exact", "stored", "lerobot"] = option(
        "auto",
        "Normalisation statistics (docs/statistics.md). exact: computed over all frames of the training episodes, with "
        "true quantiles. stored: those in meta/stats.json. lerobot: the same, and missing ones as LeRobot computes "
        "them, which averages the quantiles of episodes. auto: stored where they describe the data, otherwise exact.",
    )
    episodes: list[int] | dict[str, list[int]] | None = option(
        None,
        "Episodes to use; all when absent. Of several datasets, JSON by root; a root without an entry gives all.",
        form="""episode numbers, as 3,7,20:30 (20 to 29), or JSON, as '{"/data/a": [0, 1]}'""",
    )
    exclude_episodes: list[int] | dict[str, list[int]] | str | None = option(
        None,
        "Episodes to leave out, or @FILE, a JSON file with them (`python -m diagnostics.show_dataset` writes one).",
        form="""episode numbers, as 3,7,20:30 (20 to 29), or JSON, as '{"/data/a": [0, 1]}', or @FILE""",
    )
    tasks: list[str] | None = option(
        None,
        "Use only episodes with a task that one of these patterns fits.",
        form="patterns, as 'pick*,*the red bin'",
    )
    eval_split: float = option(
        0.0, "Share of the episodes held out for the open-loop error at the end of the run.", min=0, below=1
    )
    # Off, as in lerobot-train.
    image_transforms: ImageTransformOptions = field(default_factory=ImageTransformOptions)
    use_imagenet_stats: bool = option(
        True,
        "Normalise images by ImageNet's mean and standard deviation, as lerobot-train does, instead of the dataset's; "
        "for policies that normalise images.",
    )
    drop_n_last_frames: int | None = option(
        None,
        "Number of frames at the end of each episode that are not trained on; the policy type's own when absent "
        "(diffusion: those whose action chunk would be mostly padding).",
        min=0,
    )
    # No dimension of state or action leaves a thousandth of its range (data/idle.py). openpi's filter of DROID is 0.4.
    skip_idle: float | None = option(
        None,
        "Leave out training frames in which nothing moves for longer than this many seconds. Action chunks of other "
        "frames still hold their actions.",
        above=0,
    )
    # Forms: data/episode_weights.py. In a mixture they speak of an epoch of their dataset, whose share stays.
    episode_weights: str | None = option(
        None,
        "How often each training episode comes in an epoch, on average; 0 leaves it out.",
        form="a column of the dataset's meta/episodes, or @FILE",
    )
    state_features: list[str] | None = option(
        None,
        "Features, by the dataset's names, that are joined into observation.state in this order, as float32.",
        form="dataset keys, as joint_position,gripper_position",
    )
    camera_keys: list[str] | None = option(
        None,
        "Cameras to decode; those that the policy wants when absent.",
        form="dataset keys, as observation.images.top,observation.images.wrist",
    )
    missing_cameras: MissingCameras = option(
        "error", "A camera that the policy has and the dataset lacks: an error, or a masked image."
    )
    # auto: that at least halves a row, so fewer bytes travel and a shuffle window has capacity for more rows.
    image_size: list[int] | Literal["auto", "stored"] = option(
        "auto",
        "Size of frames as they leave the decoder. auto: the policy's own, where it fits frames into one size anyway "
        "and that at least halves a row. stored: as they are, bit for bit as LeRobot reads them.",
        form="auto, stored, or [height, width] in pixels",
    )
    on_error: OnError = option(
        "stop",
        "An episode that cannot be read: stop the run, or skip it: its rows keep their places in the batches but do "
        "not count in the loss, and OUTPUT_DIR/skipped.jsonl names it.",
    )
    # A run that skips more would be trained on another dataset than the one that it names.
    max_skipped: float = option(
        0.01,
        "With --dataset.on_error skip: the share of rows that may be skipped, of those trained on so far and at least "
        "of an epoch's. A run that skips more ends.",
        min=0,
        max=1,
    )
    shuffle_window: int = option(512, "Rows shuffled among themselves, bounded by memory (docs/data_engine.md).", min=1)
    # Worth it where a node's share of the dataset fits and is read twice.
    cache_dir: str | None = option(
        None, "A folder on each node's own disk that caches what is read from an object store."
    )
    frame_cache: str | None = option(
        None,
        "A folder on each node's own disk that caches decoded frames, for later epochs and runs on the same dataset. "
        "auto: in VLA_FRAMES_DIR, where a run reads its frames more than once and they fit the disk.",
    )
    # For free where all frames are cached. For runs on one node, or with a shard for each node: other runs would decode
    # single frames until each node has cached all of them.
    global_shuffle: bool = option(
        False, "From the second epoch on, draw rows one by one from the whole dataset instead of in segments."
    )
    # Each node reads one shard for its own workers, and finds in the second epoch all frames that it cached in the
    # first (docs/data_engine.md).
    shards: int = option(
        1,
        "Divide the rows into this many equal shards, with equally many rows of each in every batch: as many as there "
        "are nodes with workers.",
        min=1,
    )
    shard_rows: int | None = option(
        None,
        "Rows of a shard that come in turn; those that the workers of a node take at once when absent.",
        flag=None,
        min=1,
    )


@dataclass
class StepOptions:
    """How a step is computed."""

    mode: TrainMode = option(
        "expert",
        "What trains: the action projections (heads), the whole action expert, or everything that the loss can reach "
        "(full).",
    )
    precision: Precision = option(
        "auto",
        "auto: bf16 autocast on GPUs that have it, otherwise fp32; of act, diffusion, vqbet and multi_task_dit fp32 as "
        "in LeRobot, unless --policy.use_amp. Weights that train are fp32 always.",
    )
    attention: Attention = option(
        "sdpa",
        "Attention of PI0.5, PI0 and SmolVLA: PyTorch's fused kernels (sdpa), or as LeRobot writes it (eager): the "
        "same up to rounding, with the attention weights in memory.",
    )
    activation_checkpointing: bool = option(
        False,
        "PI0.5, PI0, SmolVLA: keep only what enters each layer, and compute the layer again in backward. Same result, "
        "less memory, slower.",
    )
    compile: bool = option(
        False,
        "PI0.5, PI0, SmolVLA: torch.compile the layers, on GPUs where that works. Same up to rounding; they are "
        "compiled before the first step, for every length of prompts.",
    )
    deterministic: bool = option(False, "Use deterministic kernels only: runs repeat bit by bit.")
    max_nonfinite: int = option(
        10,
        "End the run when more steps than this had a loss or gradient that is not finite; such steps are skipped.",
        min=0,
    )


@dataclass
class TrainOptions(StepOptions):
    """How a step is computed, and on what changes of a row."""

    # "openpi": a crop of 0.95 resized, a turn of up to 5 degrees, brightness, contrast and saturation.
    augmentation: Literal["none", "openpi"] = option(
        "none",
        "Change training frames as openpi does: crop, rotation and colours; cameras with `wrist` in their name: "
        "colours only. --dataset.image_transforms.enable is the other way.",
    )
    # LeRobot's PI0.5 and openpi count them, so the default does.
    mask_padding: bool = option(False, "Leave padded action steps out of the loss.")
    pad_loss: Literal["own", "lerobot"] = option(
        "own",
        "Of robots that differ in one run. own: a row's loss is the mean over the dimensions of its own robot's "
        "action. lerobot: over those of the widest one, as the policy itself counts padding.",
    )
    # Two workers then equal one with twice the batch, where the policy draws by row.
    exact_mean: bool = option(
        False,
        "ACT, SmolVLA, PI0-FAST: divide the loss by the valid action steps or tokens of the whole step; without, as "
        "lerobot-train, each worker's micro-batch by its own. A step's micro-batches are then in memory at once.",
    )
    # Another estimator of the same loss, with less variance: images and language are computed once for all draws.
    noise_draws: int = option(
        1,
        "PI0.5, PI0, SmolVLA: draws of noise and time for each row. Images and language are computed once for all "
        "draws; rows are still batch_size.",
        min=1,
    )
    # Its vision tower is four fifths of a step.
    feature_cache: str | None = option(
        None,
        "SmolVLA, where its vision does not train: a folder on each node's own disk that caches what its vision tower "
        "makes of each frame, for later epochs and for runs from the same weights.",
    )


@dataclass
class SampleWeightingOptions:
    """Weights of rows in the loss, as lerobot-train has them (run/row_weights.py)."""

    type: Literal["rabc", "uniform"] | None = option(
        None,
        "rabc: weigh rows by the progress that a reward model saw; any other option of this group asks for it. "
        "uniform: all alike, as when absent.",
    )
    progress_path: str | None = option(
        None,
        "A parquet file of this machine, or hf://datasets/USER/NAME/FILE; the dataset's sarm_progress.parquet when "
        "absent.",
    )
    head_mode: Literal["sparse", "dense"] = option("sparse", "Column of that file: progress_sparse or progress_dense.")
    kappa: float = option(0.01, "Progress within an action chunk above which the row weighs 1.")
    epsilon: float = option(1e-6, "Added to what weights are divided by.", above=0)
    extra_params: dict[str, Any] = option(
        {},
        "Weight of frames whose progress is not known.",
        form="""JSON, as '{"fallback_weight": 1.0}'""",
    )


@dataclass
class RecapOptions:
    """Advantages as text in the prompt (docs/recap.md)."""

    labels: str | None = option(
        None,
        "The labels.parquet of a run of value.py: prompts say `Advantage: positive` or `Advantage: negative` of each "
        "frame. evaluate.py --policy.advantage positive asks for the better behaviour.",
    )
    # RECAP's; what is trained without a label is what guidance (--policy.guidance) starts from.
    dropout: float = option(
        0.3, "Share of rows whose prompt has no label, drawn by seed and place in the stream.", min=0, max=1
    )


@dataclass
class EmaOptions:
    """An exponential moving average of the weights that train, fp32 (lerobot-train has none; openpi does)."""

    enable: bool = option(False, "Average the weights that train; any option of the average asks for it.")
    # openpi's default; its LIBERO recipe has 0.999.
    decay: float = option(
        0.99, "Share of the average that stays at every step: 0.99 averages about the last 100 steps.", above=0, below=1
    )
    export: bool = option(True, "Measure and export the average; false: the weights themselves.")


@dataclass
class WorkerOptions:
    """What the run may use of the cluster."""

    num_workers: int = option(
        1,
        "Training processes, one GPU each where there are GPUs. 2,8: as many as there is capacity for, at least 2 and "
        "at most 8; a step's rows stay those of 8 workers.",
        form="a whole number, or the least and the most, as 2,8",
        min=1,
    )
    min_workers: int | None = option(
        None, "The least number of workers; --scaling.num_workers 2,8 sets it.", flag=None, min=1
    )
    use_gpu: bool | None = option(
        None, "Train on GPUs. When absent: as found, and needed where a cluster is joined from a machine without."
    )
    accelerator_type: str | None = option(
        None,
        "Ray's name of the GPU type that workers need, e.g. L4 or H100. Ray calls both sizes A100; A100-40G and "
        "A100-80G are of nodes that were started with these names.",
    )
    strategy: Strategy = option(
        "ddp",
        "How what trains is spread over workers. ddp: a replica on each. fsdp2: a shard of "
        "parameters, gradients and Adam's moments on each; parameters are whole during a step (as ZeRO-2). "
        "fsdp2_reshard: parameters are whole only where they are computed with (as ZeRO-3). hsdp: as fsdp2 among the "
        "workers of a node, with a replica on every node, so that nothing but gradients travels between nodes. "
        "--resume may change it.",
    )
    shard_workers: int | None = option(
        None, "hsdp: how many workers hold a replica together; those of a node when absent.", min=1
    )
    cpus_per_worker: float = option(
        1.0, "CPUs that each training process holds; the other CPUs of a node decode.", above=0
    )
    max_failures: int = option(
        3,
        "Number of times that the worker group is started anew after failures before the run gives up; -1: no limit. "
        "Preempted nodes do not count.",
        min=-1,
    )

    def decided(self, gpus_found: int) -> Self:
        """With `use_gpu` decided where it is absent: true if a type of GPU is asked for, or there are any."""
        if self.use_gpu is not None:
            return self
        return replace(self, use_gpu=self.accelerator_type is not None or gpus_found > 0)


@dataclass
class ScalingOptions(WorkerOptions):
    """What the run may use of the cluster, to train and to decode."""

    # `python -m diagnostics.find_unused_params` tells whether there is any; PI0.5 has none.
    find_unused_parameters: bool = option(
        False,
        "Let DDP search, every step, for parameters without a gradient, where PI0.5 is changed to leave out some of "
        "what trains. Other policies are searched in any case.",
    )
    cpus_per_read_task: float = option(1.0, "CPUs (and decoder threads) of a read task.", above=0)


@dataclass
class PeftOptions:
    """Adapters, which train instead of the policy's own weights (policies/lora.py); lerobot-train's flags."""

    method_type: str | None = option(
        None, "Train adapters of this kind. Any other option of this group asks for lora as well.", form="lora"
    )
    target_modules: list[str] | str | None = option(
        None,
        "Linear layers that have adapters; the policy type's own choice when absent (PI0.5: the action expert's q_proj "
        "and v_proj, and the projections of actions).",
        form="""suffixes of names, as '["q_proj", "v_proj"]', or a regular expression for whole names""",
    )
    full_training_modules: list[str] | None = option(None, "Layers that train whole, besides.")
    # In both ways the policy starts as it was. Others change its own weights, which are taken from where the run began.
    init_type: Literal["gaussian"] | None = option(None, "How adapters start: PEFT's own way when absent.")
    r: int = option(16, "Rank of the adapters.", min=1)
    lora_alpha: int | None = option(
        None, "Adapters are multiplied by lora_alpha / r; PEFT's own, 8, when absent.", min=1
    )
    export: Literal["merged", "adapter"] = option(
        "merged",
        "merged: OUTPUT_DIR/pretrained_model has the adapters in the policy's weights, as robots run it. adapter: "
        "besides, OUTPUT_DIR/adapter has them alone, for LeRobot and PEFT to put onto the policy that the run started "
        "from.",
    )

    @property
    def enabled(self) -> bool:
        return self.method_type is not None


@dataclass
class RunOptions:
    """What a run writes down about itself."""

    record_rows: bool = option(
        False, "Write which rows each micro-batch held, for `python -m diagnostics.check_rows OUTPUT_DIR`."
    )


@dataclass
class EvalOptions:
    """How a policy is tried in an environment (evaluation/closed_loop.py). None of it changes what comes out."""

    n_episodes: int = option(50, "Episodes to play, of each task.", min=1)
    batch_size: int = option(32, "Rows that a policy decides for at once, at most.", min=1)
    wait_ms: float = option(
        20.0,
        "Milliseconds that an episode waits for others before the policy decides, while others still simulate.",
        flag=None,
        above=0,
    )
    exact: bool = option(
        False,
        "Fill every batch up to batch_size, and compute it in one thread on CPUs: rounding then depends neither on how "
        "many episodes happen to wait nor on the machine's cores.",
    )
    env_actors: int | None = option(
        None, "Processes that simulate, half a CPU each; as many as there is capacity for when absent.", min=1
    )
    policy_actors: int | None = option(
        None,
        "Processes that decide, half a CPU each and a GPU where there are any; when absent one on a GPU, or up to four "
        "on CPUs.",
        min=1,
    )
    videos: int = option(
        10, "Failed episodes that the page shows at most, and half as many of the others; 0: none.", min=0
    )


@dataclass
class OutcomeOptions:
    """Which episodes succeeded, and which frames a person corrected."""

    success: str = option(
        "next.success",
        "Which episodes succeeded: those in which this column reaches --outcome.threshold in any frame, or @FILE.",
        form="a column of the frames, as next.success, or @FILE (.csv, .parquet, .json: episode_index, success)",
    )
    threshold: float = option(
        1.0, "The value of that column from which on an episode is a success; true counts as 1.", above=0
    )
    intervention: str = option(
        "is_intervention",
        "A column of the frames, true where a person corrected the robot; those frames are positive. It may be absent.",
    )


@dataclass
class ValueOptions:
    """The value function of value.py, and the labels that it gives (docs/recap.md). Defaults are RECAP's."""

    bins: int = option(201, "Bins of the distribution of returns, from -1 to 0.", min=2)
    backbone: bool = option(
        False, "Train the policy's vision and language model with the value function; otherwise they stay as they are."
    )
    backbone_lr: float = option(2.5e-5, "Peak learning rate of these; --lr is the head's.", above=0)
    failure_penalty: float = option(
        1.0, "What a failed episode ends with, in lengths of the longest episode of its task.", min=0
    )
    horizon: int = option(50, "Frames after which an advantage asks the value function again.", min=1)
    positive: float = option(
        0.3, "Share of the frames of each task that are positive, besides corrections.", above=0, max=1
    )


@dataclass
class GrpoOptions:
    """How a policy learns from success alone (docs/grpo.md). Sampler and clip are by default RLinf's for PI0.5."""

    method: Method = option(
        "grpo",
        "grpo: clipped policy gradient, returns compared within a group. ppo: clipped policy gradient, decisions "
        "compared with a critic that learns beside the policy. filtered: imitation of the episodes that succeeded, "
        "which has no stop by divergence. All on the same episodes.",
    )
    demonstrations: str | None = option(
        None,
        "A LeRobot dataset, whose rows are half of each minibatch of --grpo.method filtered: a policy that imitates "
        "its own samples alone loses precision.",
    )
    iterations: int = option(100, "Iterations: groups x group_size episodes each, then updates.", min=1)
    groups: int = option(16, "Groups of an iteration.", min=1)
    group_size: int = option(8, "Episodes of a group, all from the same initial state.", min=2)
    resample: int = option(
        0,
        "Times that groups whose returns are all equal are replaced by groups that begin elsewhere (dynamic sampling). "
        "The episodes count.",
        min=0,
    )
    reward: Reward = option(
        "success", "What an episode is worth: success (1 or 0), or its return (the sum of its rewards)."
    )
    flow_steps: int = option(5, "Steps of the random sampler from noise to actions (rl/flow_sde.py).", min=1)
    noise_level: float = option(0.5, "How much noise the random sampler adds (a).", above=0)
    random_steps: Literal["all", "one"] = option("all", "Steps of each decision that are random.")
    epochs: int = option(2, "Passes over an iteration's decisions.", min=1)
    minibatch: int = option(
        64, "Decisions of a minibatch over all workers, evenly cut; the presets of GPUs have 2048.", min=1
    )
    clip_low: float = option(0.2, "The ratio of probabilities is clipped at 1 - clip_low below.", above=0, below=1)
    clip_high: float = option(0.2, "The ratio of probabilities is clipped at 1 + clip_high above.", above=0)
    dual_clip: float | None = option(3.0, "Bound of a bad episode's loss; null: none.", above=0)
    normalise: bool = option(True, "Divide advantages by the group's standard deviation.")
    gamma: float = option(0.99, "Discount of rewards per decision, with --grpo.method ppo.", above=0, max=1)
    gae_lambda: float = option(
        0.95, "Weight of later decisions in an advantage (GAE), with --grpo.method ppo.", min=0, max=1
    )
    value_lr: float = option(1e-3, "Learning rate of the critic of --grpo.method ppo.", above=0)
    value_clip: float | None = option(
        0.2, "An update moves a value by at most so much; null: no bound. With --grpo.method ppo.", above=0
    )
    target_kl: float | None = option(
        0.001,
        "Divergence from the policy that acted at which an iteration's updates end, per executed dimension: of each of "
        "the n_action_steps x action dimensions of a step; null: they never end early.",
        above=0,
    )
    kl: float = option(
        0.0,
        "Weight of the divergence from the policy that the run started from. Above 0 a second replica is held.",
        min=0,
    )
    warmup: int = option(3, "Iterations over which the learning rate rises; after that it stays.", min=0)
    eval_every: int = option(
        10,
        "Iterations between evaluations: --eval.n_episodes held-out episodes by the deterministic sampler.",
        min=1,
    )
    reserved_states: int = option(
        10,
        "Initial states of each task that only evaluation uses, the last ones, where the environment has a list of "
        "them (LIBERO: 50 a task).",
        min=0,
    )
    env_actors: int = option(
        2,
        "Processes of each training worker that simulate, in two halves that take turns with inference.",
        min=1,
    )
    envs_per_actor: int = option(8, "Environments of each of these processes.", min=1)
    env_actor_cpus: float = option(1.0, "CPUs that each of these processes holds.", above=0)
    inference_batch: int = option(64, "Decisions that the policy makes at once, at most.", min=1)
    record_dataset: str | None = option(
        None,
        "Write the episodes that were learned from, failures included, as a LeRobot dataset with next.success, "
        "next.reward and next.done when the run is done: a new folder; on a cluster a path that all nodes share.",
    )
    record_every: int = option(1, "Iterations from one recorded one to the next, with --grpo.record_dataset.", min=1)


# ---- groups whose flags have no dot; programs are made of them ----------------------------------------------------


@dataclass
class PolicyOptions:
    """The policy."""

    policy_path: str | None = option(None, "A pretrained policy: a folder or a Hub id.", flag="policy.path")
    policy_revision: str | None = option(
        None, "Branch, tag or commit of a --policy.path on the Hub.", flag="policy.pretrained_revision"
    )
    # As given: --chunk_size=20 and so on.
    policy_options: list[str] = option([], "An option of the policy itself: --policy.chunk_size 20.", flag="policy.*")
    # Only from this start's command line: write access to a run's folder must not enable it.
    policy_trust_remote_code: bool = option(
        False,
        "Run code that comes with the policy, for types that need it. What runs is named.",
        flag="policy.trust_remote_code",
    )
    rename_map: dict[str, str] = option(
        {},
        "Names of the policy for features of the dataset (of any of several), or of the environment; of the dataset's "
        'own features any, as {"state": "observation.state", "actions": "action"}.',
        form="""JSON, as '{"observation.images.front": "observation.images.base_0_rgb"}'""",
    )


@dataclass
class EnvironmentOptions:
    """The environment."""

    env_type: str | None = option(None, "An environment, as LeRobot names it: two_bins, metaworld.", flag="env.type")
    env_options: list[str] = option([], "An option of the environment itself: --env.task reach-v3.", flag="env.*")


@dataclass
class JobOptions:
    """The run and its folder."""

    preset: str | None = option(None, "A set of flags that come before those given; see Presets.")
    output_dir: str | None = option(
        None,
        "The run's folder: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a path that all nodes share.",
    )
    resume: bool = option(
        False,
        "Go on with the run in output_dir. auto: if there is one, else start it, as a job that is retried wants.",
        form="true, false or auto",
    )
    dry_run: bool = option(False, "Check everything and print the plan; train nothing.")
    seed: int = option(1000, "Seed of everything that is drawn at random.", min=0, max=MAX_SEED)
    track: TrackerName | None = option(None, "Draw the curves in a tracker, besides metrics.jsonl.")
    track_project: str = option("vla-fine-tuning", "The tracker's project.")
    price_per_gpu_hour: float | None = option(
        None, "What a GPU costs per hour, in any currency: the report then says what 1000 samples cost.", above=0
    )

    @property
    def folder(self) -> Path:
        """The run's own folder, `output_dir`, on a disk or in a bucket."""
        return place(self.output_dir or "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class LearningOptions:
    """How much and how fast the policy learns."""

    batch_size: int = option(
        8, "Rows of a micro-batch on each worker; a step sees batch_size x grad_accum x num_workers rows.", min=1
    )
    lr: float | None = option(
        None,
        "Peak learning rate; the policy's own when absent. Parameter groups with a rate of their own keep their share "
        "of it.",
        above=0,
    )


@dataclass
class CheckpointOptions:
    """Checkpoints."""

    save_freq: int = option(1000, "Steps between checkpoints.", min=1)
    save_every_s: float | None = option(
        None, "Besides, take a checkpoint at the first log step this many seconds after the last one.", above=0
    )
    keep_checkpoints: int = option(2, "Number of newest checkpoints to keep.", min=1)
    keep_best: int = option(
        0, "Number of best checkpoints to keep besides the newest: those with the most success while training.", min=0
    )


@dataclass
class EvaluateConfig(EnvironmentOptions, PolicyOptions):
    """The evaluation.

    Flags that `lerobot-eval` has keep its names and meaning.
    """

    eval: EvalOptions = field(default_factory=EvalOptions)
    seed: int = option(
        1000,
        "Seed of the first episode's scene, the next one's is one more; and of the policy's noise.",
        min=0,
        max=MAX_SEED,
    )
    output_dir: str | None = option(
        None, "Where episodes.jsonl is written: a path, s3:// or gs://. Given again, the evaluation goes on there."
    )
    record_dataset: str | None = option(
        None,
        "Write what the policy did, failures included, as a LeRobot dataset with next.success, next.reward and "
        "next.done: a new folder; on a cluster a path that all nodes share.",
        flag="eval.record_dataset",
    )
    advantage: Literal["positive", "negative"] | None = option(
        None,
        "What instructions end with, for a policy that was trained with --recap.labels: positive.",
        flag="policy.advantage",
    )
    # v = v(without) + guidance (v(with) - v(without)), of the velocities with and without the label.
    guidance: float = option(
        1.0,
        "With --policy.advantage: how far predictions go beyond those without it (classifier-free guidance); 1: not.",
        flag="policy.guidance",
        min=0,
    )
    use_gpu: bool | None = option(
        None, "Decide on GPUs. When absent: as found, and needed where a cluster is joined from a machine without."
    )


@dataclass
class RecordConfig(EnvironmentOptions):
    """The recording: demonstrations to write as a dataset (record.py)."""

    episodes: int = option(50, "Episodes to play, of each task.", min=1)
    # Far from the default seeds of evaluations, so that those are held out.
    seed: int = option(100_000, "The first episode's seed, the next one's is one more.", min=0)
    root: str | None = option(None, "The dataset's folder; on a cluster a path that all nodes share.")


@dataclass
class RunPolicyOptions(PolicyOptions):
    """The policy, and how data meets it."""

    policy_type: str | None = option(
        None, "A policy type to start from random weights, instead of --policy.path.", flag="policy.type"
    )
    tolerance_s: float = option(1e-4, "Seconds that a video frame may lie from its row's timestamp.", above=0)


@dataclass
class LengthOptions(LearningOptions):
    """How long and how fast the policy learns."""

    steps: int | None = option(None, "Optimizer updates; MAX_TRAIN_STEPS in the environment caps them.", min=1)
    num_epochs: float | None = option(
        None,
        "Length of the run in passes over the data, instead of --steps; 1 when both are absent, and with --preset demo "
        "on your own dataset 2, within 300 to 1,000 steps.",
        above=0,
    )
    grad_accum: int = option(1, "Micro-batches of a step on each worker.", min=1)


@dataclass
class ScheduleOptions(LengthOptions):
    """By which optimizer, and at which rate."""

    use_policy_training_preset: bool = option(
        True,
        "Take the policy's own optimizer, parameter groups and learning rate schedule, as lerobot-train. false: one "
        "group of all that trains, and what --optimizer.type and --scheduler.type name.",
    )
    # With the preset they replace only what they name.
    optimizer_options: list[str] = option(
        [], "An option of LeRobot's optimizer: --optimizer.betas '[0.9, 0.99]'.", flag="optimizer.*"
    )
    scheduler_options: list[str] = option(
        [], "An option of LeRobot's schedule: --scheduler.num_warmup_steps 500.", flag="scheduler.*"
    )
    # Either of these: a linear warm-up, then a cosine over all steps; where one is absent, WARMUP_FRAC, FINAL_LR_FRAC.
    warmup_frac: float | None = option(
        None,
        "Share of the steps in which the learning rate rises, before a cosine over all steps; instead of the policy's "
        "own schedule.",
        min=0,
        max=1,
    )
    final_lr_frac: float | None = option(
        None, "Share of the peak that this cosine ends at; instead of the policy's own schedule.", min=0, max=1
    )


@dataclass
class LogOptions(CheckpointOptions):
    """Logs and checkpoints."""

    keep_best: int = option(
        0,
        "Number of best checkpoints to keep besides the newest: with the lowest held-out loss (--eval_steps; else "
        "training loss).",
        min=0,
    )
    log_freq: int = option(50, "Steps between lines of metrics.jsonl.", min=1)
    eval_steps: int = option(
        0, "Steps between measurements of the loss on held-out episodes (--dataset.eval_split); 0: never.", min=0
    )
    # Shared among the tasks and evenly spaced in each.
    max_eval_samples: int = option(0, "Rows that the held-out loss is measured on, at most; 0: all.", min=0)


@dataclass
class BestCheckpointOptions(LogOptions):
    """How good checkpoints are."""

    # By processes beside the training, which does not wait for them (evaluation/during.py).
    env_eval_freq: int = option(
        20_000,
        "Steps between checkpoints that play --eval.n_episodes in --env.type, beside the training; the last one always "
        "does. 0: the last one only.",
        min=0,
    )
    # Where neither is measured, the lowest training loss since the checkpoint before counts.
    keep_best: int = option(
        0,
        "Number of best checkpoints to keep besides the newest: with the lowest held-out loss (--eval_steps; else "
        "training loss), or 2,success: with the most success in --env.type.",
        form="a whole number, or one with what is best, as 2,loss or 2,success",
        min=0,
    )
    keep_best_by: Literal["loss", "success"] = option(
        "loss", "What the best checkpoints are best by; --keep_best 2,success sets it.", flag=None
    )
    export: Literal["last", "best"] = option(
        "last",
        "What becomes of OUTPUT_DIR/pretrained_model: the last step, or the best checkpoint by the held-out loss.",
    )


@dataclass
class PushOptions:
    """Where the trained policy is published."""

    # data/hub.py. A base policy brings its own along, where it was once pushed to: not ours.
    push_to_hub: bool | None = option(
        None,
        "Push the trained policy to the Hugging Face Hub; --policy.repo_id asks for it.",
        flag="policy.push_to_hub",
    )
    policy_repo_id: str | None = option(None, "Where the trained policy is pushed: USER/NAME.", flag="policy.repo_id")
    policy_private: bool | None = option(None, "Make a private repository there.", flag="policy.private")


# `--help` lists the bases from the last one on.
@dataclass
class Config(PushOptions, BestCheckpointOptions, ScheduleOptions, EnvironmentOptions, RunPolicyOptions, JobOptions):
    """A run of `vla.py`."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    ema: EmaOptions = field(default_factory=EmaOptions)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    run: RunOptions = field(default_factory=RunOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    peft: PeftOptions = field(default_factory=PeftOptions)
    sample_weighting: SampleWeightingOptions = field(default_factory=SampleWeightingOptions)
    recap: RecapOptions = field(default_factory=RecapOptions)

    @property
    def roots(self) -> list[str]:
        listed = [part.strip() for part in (self.dataset.root or "").split(",")]
        return list(self.dataset.mixture or ()) or [root for root in listed if root]

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
    def planned_in_bf16(self) -> bool:
        """Whether steps are planned to compute in bfloat16: every GPU that can hold a VLA knows it."""
        return self.train.precision == "bf16" or (self.train.precision == "auto" and bool(self.scaling.use_gpu))

    @property
    def takes_average(self) -> bool:
        """Whether the averaged weights are what is measured and exported."""
        return self.ema.enable and self.ema.export

    @property
    def best_kept(self) -> int:
        """Checkpoints to keep for their loss, besides the newest: the best one also if it is to be exported."""
        return max(self.keep_best, int(self.export == "best"))

    def most_checkpoints(self, steps: int) -> int:
        """Checkpoints that a run of so many steps has at once: an old one is deleted when the next one is there.

        Those of --save_freq, and one where the run is stopped; not those that are yet to play.
        """
        kept = self.keep_checkpoints + self.best_kept + 1
        return kept if self.save_every_s is not None else min(kept, math.ceil(steps / self.save_freq) + 1)

    @property
    def rows_multiple(self) -> int:
        """Rows that any number of workers this run may have can share evenly, in whole micro-batches."""
        most = self.scaling.num_workers
        return self.batch_size * math.lcm(*range(self.scaling.min_workers or most, most + 1))

    @property
    def is_rehearsal(self) -> bool:
        """Whether the run is the demo's on a dataset of the user's."""
        return self.preset == "demo" and bool(self.roots or self.dataset.repo_id)

    def resolve_steps(self, rows_per_epoch: int) -> int:
        """Optimizer steps of the run: `steps`, or `num_epochs` of the data; capped by MAX_TRAIN_STEPS.

        Of a rehearsal on one's own dataset that says neither: REHEARSAL_EPOCHS, within REHEARSAL_STEPS.
        """
        if self.steps is not None:
            steps = self.steps
        elif self.is_rehearsal and self.num_epochs is None:
            least, most = REHEARSAL_STEPS
            steps = max(least, min(most, math.ceil(REHEARSAL_EPOCHS * rows_per_epoch / self.global_batch_size)))
        else:
            steps = math.ceil((self.num_epochs or 1.0) * rows_per_epoch / self.global_batch_size)
        cap = os.environ.get("MAX_TRAIN_STEPS")
        if cap is not None:
            if not cap.isdigit() or int(cap) < 1:
                raise ValueError(f"MAX_TRAIN_STEPS={cap!r} in the environment: expected a positive number")
            steps = min(steps, int(cap))
        return steps


@dataclass
class GrpoConfig(CheckpointOptions, LearningOptions, EnvironmentOptions, PolicyOptions, JobOptions):
    """What `grpo.py` has otherwise than `vla.py`."""

    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    train: StepOptions = field(default_factory=StepOptions)
    scaling: WorkerOptions = field(default_factory=WorkerOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)

    # What is published for PI0.5; imitation's is several times that.
    lr: float | None = option(5e-6, "Learning rate after the warm-up.", above=0)
    save_freq: int = option(10, "Iterations between checkpoints.", min=1)

    def training(self) -> Config:
        """The options that `training/` reads: these, and defaults of those that GRPO does not have.

        Without the environment: the workers play in it themselves (--grpo.eval_every).
        """
        bases = (CheckpointOptions, LearningOptions, PolicyOptions, JobOptions)
        shared = {of.name: getattr(self, of.name) for base in bases for of in fields(base)}
        train, scaling = TrainOptions(**vars(self.train)), ScalingOptions(**vars(self.scaling))
        return Config(**shared, train=train, scaling=scaling, eval=self.eval)


@dataclass
class ValueConfig(LogOptions, LengthOptions, RunPolicyOptions, JobOptions):
    """What `value.py` has otherwise than `vla.py`."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    outcome: OutcomeOptions = field(default_factory=OutcomeOptions)
    value: ValueOptions = field(default_factory=ValueOptions)
    train: StepOptions = field(default_factory=StepOptions)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)

    # Of a small head on features that stay.
    lr: float | None = option(1e-3, "Peak learning rate.", above=0)

    def training(self) -> Config:
        """The options that training reads: these, and defaults of those that a value function does not have."""
        bases = (LogOptions, LengthOptions, RunPolicyOptions, JobOptions)
        shared = {of.name: getattr(self, of.name) for base in bases for of in fields(base)}
        train = TrainOptions(**vars(self.train))
        return Config(**shared, dataset=self.dataset, scaling=self.scaling, train=train, warmup_frac=WARMUP_FRAC)


# Where only the other one is given.
WARMUP_FRAC, FINAL_LR_FRAC = 0.033, 0.1

# A rehearsal's length: with these, the error on held-out episodes of a Unitree G1 is below that of the mean action, on
# five of its episodes (300 steps are 13 epochs; with more the held-out loss rises) as on 83 (1,000 are two).
REHEARSAL_STEPS, REHEARSAL_EPOCHS = (300, 1_000), 2.0
# Rows per second of a rehearsal, by which its plan says about how long it takes: one camera of 480x640, 2 CPUs.
REHEARSAL_ROWS_PER_S = 150

# What each preset sets; any flag overrides. Those of GPUs are in cards.py.
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
    **{preset: dict(card.flags) for preset, card in OF_PRESET.items()},
}
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
        "grpo.target_kl": "0.0016667",  # 0.05 for the 10 x 3 executed dimensions together
        "grpo.env_actors": "2",
        "grpo.envs_per_actor": "32",
        "grpo.env_actor_cpus": "0.25",
    },
    **{preset: dict(card.grpo_flags) for preset, card in OF_PRESET.items()},
}
VALUE_PRESETS: dict[str, dict[str, str]] = {
    "demo": {
        "scaling.num_workers": "2",
        "scaling.cpus_per_worker": "0.5",
        "batch_size": "32",
        # After 200 the AUROC is between 0.74 and 1, by seed; after 600 it is 1.
        "steps": "600",
        "log_freq": "20",
        "save_freq": "100",
        "dataset.eval_split": "0.1",
        # What the tiny policy sees does not tell the bin that was named from the other until its backbone trains too.
        "value.backbone": "true",
        "value.backbone_lr": "3e-4",
    },
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
