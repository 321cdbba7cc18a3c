"""Compose the options of each program from groups, and define the presets."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vla_finetuning.cards import OF_PRESET
from vla_finetuning.options.checkpoints import BestCheckpointOptions, CheckpointOptions, LogOptions
from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.environment import EnvironmentOptions, EvalOptions, check_recorded
from vla_finetuning.options.fields import option
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.options.job import MAX_SEED, JobOptions, RunOptions, check_output
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.policy import ActingOptions, PolicyOptions, PushOptions, RunPolicyOptions
from vla_finetuning.options.recap import OutcomeOptions, RecapOptions, ValueDatasetOptions, ValueOptions
from vla_finetuning.options.sample_weighting import SampleWeightingOptions
from vla_finetuning.options.scaling import ScalingOptions, WorkerOptions
from vla_finetuning.options.schedule import (
    DEMO_STEPS,
    REHEARSAL_EPOCHS,
    REHEARSAL_STEPS,
    WARMUP_FRAC,
    LearningOptions,
    LengthOptions,
    ScheduleOptions,
)
from vla_finetuning.options.serve import ServeOptions
from vla_finetuning.options.train import EmaOptions, StepOptions, TrainOptions


@dataclass
class EvaluateConfig(EnvironmentOptions, ActingOptions, PolicyOptions):
    """The evaluation.

    Flags that `lerobot-eval` has keep its names and meaning.
    """

    eval: EvalOptions = field(default_factory=EvalOptions)
    seed: int = option(
        1000,
        "Seed of the policy's noise and of the first episode's scene; each later episode adds one.",
        min=0,
        max=MAX_SEED,
    )
    output_dir: str | None = option(
        None,
        "Folder for episodes.jsonl: a path, s3://, gs:// or az://. An existing evaluation continues there.",
    )
    lease: bool = option(
        True,
        "Let the store of output_dir refuse a second process that evaluates there. false: for a store without "
        "conditional writes; you must then prevent a second process.",
    )
    controller: Literal["chunk", "select_action", "rtc"] = option(
        "chunk",
        "chunk: add the state at the start of a chunk to relative actions, as PolicyServer does. select_action: add "
        "the current state, as lerobot-eval does. rtc: real-time chunking, as lerobot-rollout with "
        "inference.type=rtc. The first two differ only for relative actions.",
        flag="eval.controller",
    )
    latency_s: list[float] = option(
        [],
        "Seconds from an observation to the arrival of its chunk, at the environment's --env.fps. Until then the "
        "robot executes the last chunk. Several values, as 0,0.1,0.2, play the same episodes.",
        flag="eval.latency_s",
        min=0,
        conflicts={
            "eval.controller=select_action": "a loop over select_action stands still until its chunk is there; give "
            "--eval.controller=chunk or rtc"
        },
    )
    videos: int = option(
        10,
        "Maximum number of failed episodes with a film in the report; half as many successful ones have one. 0: none.",
        flag="eval.videos",
        min=0,
    )
    record_dataset: str | None = option(
        None,
        "Write the episodes, including failures, as a LeRobot dataset with next.success, next.reward and next.done. A "
        "new folder, on a cluster on a path that all nodes share.",
        flag="eval.record_dataset",
    )

    def check(self, config: Any) -> None:
        if self.policy_path is None:
            raise ValueError("which policy? give --policy.path FOLDER_OR_HUB_ID")
        if self.env_type is None:
            raise ValueError("in which environment? give --env.type two_bins")
        if self.output_dir is None:
            raise ValueError("where to? give --output_dir FOLDER or s3://BUCKET/FOLDER; given again, it goes on there")
        check_output(self.output_dir)
        check_recorded(self.record_dataset, "--eval.record_dataset", self.output_dir)
        if self.controller == "select_action" and (self.eval.policy_actors or 1) > 1:
            raise ValueError(
                f"--eval.policy_actors={self.eval.policy_actors}: with --eval.controller=select_action one process "
                "decides, which remembers the chunks; leave it out"
            )
        latencies = [f"{seconds:g}" for seconds in self.latency_s]  # as they are printed
        if len(set(latencies)) < len(latencies):
            raise ValueError(f"--eval.latency_s={','.join(latencies)}: give each one once")


@dataclass
class ServeConfig(ActingOptions, PolicyOptions):
    """Serving (serve.py)."""

    serve: ServeOptions = field(default_factory=ServeOptions)
    seed: int = option(1000, "Seed of the policy's noise.", min=0, max=MAX_SEED)

    def check(self, config: Any) -> None:
        if self.policy_path is None:
            raise ValueError("which policy? give --policy.path FOLDER_OR_HUB_ID")


@dataclass
class RecordConfig(EnvironmentOptions):
    """Recording demonstrations (record.py)."""

    episodes: int = option(50, "Number of episodes to play in each task.", min=1)
    # Far from the default seeds of evaluations, so that those are held out.
    seed: int = option(100_000, "Seed of the first episode; each later episode adds one.", min=0)
    root: str | None = option(None, "Folder of the dataset, on a cluster on a path that all nodes share.")

    def check(self, config: Any) -> None:
        if self.env_type is None or self.root is None:
            raise ValueError("give --env.type and --root, as --env.type metaworld --env.task reach-v3 --root FOLDER")
        check_recorded(self.root, "--root")
        if self.seed > MAX_SEED - self.episodes:
            raise ValueError(f"--seed={self.seed}: must be at most {MAX_SEED - self.episodes}, for as many episodes")


# `--help` lists the bases from last to first.
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

    def check(self, config: Any) -> None:
        if self.preset != "demo" and not (self.policy_path or self.policy_type):
            raise ValueError("which policy? give --policy.path lerobot/pi05_base, a folder, or use --preset demo")

    @property
    def hub_repo_id(self) -> str | None:
        """Return the Hub repository to push the trained policy to; None if it is not pushed."""
        return None if self.push_to_hub is False else self.policy_repo_id

    def is_evaluated(self, step: int, steps: int) -> bool:
        """Return whether the checkpoint of `step` is evaluated in the environment, in a run of `steps` steps."""
        if self.env_type is None:
            return False
        return step == steps or (self.env_eval_freq > 0 and step % self.env_eval_freq == 0)

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.grad_accum * self.scaling.num_workers

    @property
    def augments(self) -> bool:
        """Return whether training frames are augmented."""
        return self.train.augmentation != "none" or self.dataset.image_transforms.enable

    @property
    def planned_in_bf16(self) -> bool:
        """Return whether the plan assumes bfloat16, which every GPU that can hold a VLA supports."""
        return self.train.precision == "bf16" or (self.train.precision == "auto" and bool(self.scaling.use_gpu))

    def most_checkpoints(self, steps: int) -> int:
        """Return the largest number of checkpoints on disk, without those that wait for an evaluation.

        An old checkpoint is deleted after the next one is written.
        """
        count = self.keep_checkpoints + self.best_kept + 1
        return count if self.save_every_s is not None else min(count, math.ceil(steps / self.save_freq) + 1)

    @property
    def rows_multiple(self) -> int:
        """Return the number of rows that any allowed number of workers divides into whole micro-batches."""
        return self.batch_size * self.scaling.common_multiple

    @property
    def is_rehearsal(self) -> bool:
        """Return whether the run uses the demo's preset with a dataset of the user."""
        return self.preset == "demo" and bool(self.dataset.roots or self.dataset.repo_id)

    def resolve_steps(self, rows_per_epoch: int) -> int:
        """Return the optimizer steps: `steps`, or epochs of the data, capped by MAX_TRAIN_STEPS."""
        if self.steps is not None:
            steps = self.steps
        elif self.preset == "demo" and self.num_epochs is None:
            least, most = REHEARSAL_STEPS if self.is_rehearsal else (DEMO_STEPS, DEMO_STEPS)
            steps = max(least, min(most, math.ceil(REHEARSAL_EPOCHS * rows_per_epoch / self.global_batch_size)))
        else:
            steps = math.ceil((self.num_epochs or 1.0) * rows_per_epoch / self.global_batch_size)
        if cap := os.environ.get("MAX_TRAIN_STEPS"):
            if not cap.isdigit() or int(cap) < 1:
                raise ValueError(f"MAX_TRAIN_STEPS={cap!r} in the environment: expected a positive number")
            steps = min(steps, int(cap))
        return steps


@dataclass
class GrpoConfig(CheckpointOptions, LearningOptions, EnvironmentOptions, PolicyOptions, JobOptions):
    """Options with other defaults than those of `vla.py`."""

    length_flags = "--grpo.iterations"
    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    train: StepOptions = field(default_factory=StepOptions)
    scaling: WorkerOptions = field(default_factory=WorkerOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)

    # The published rate for PI0.5; the rate of imitation is several times higher.
    lr: float = option(5e-6, "Learning rate after the warm-up.", above=0)
    save_freq: int = option(10, "Iterations between checkpoints.", min=1)

    def check(self, config: Any) -> None:
        if self.policy_path is None and self.preset != "demo":
            raise ValueError("which policy? give --policy.path FOLDER_OR_HUB_ID: what vla.py has trained by imitation")
        if self.env_type is None:
            raise ValueError("in which environment? give --env.type two_bins")
        if "type" in self.policy_option_names:
            raise ValueError("--policy.type starts from random weights, which succeed at nothing; give --policy.path")

    def training(self) -> Config:
        """Return the options that `training/` reads, with defaults for options that grpo.py lacks.

        The environment is left out, because the workers evaluate by themselves (--grpo.eval_every).
        """
        shared = _shared(self, CheckpointOptions, LearningOptions, PolicyOptions, JobOptions)
        return Config(**shared, scaling=ScalingOptions(**vars(self.scaling), cpus_per_read_task=0), eval=self.eval)


@dataclass
class ValueConfig(LogOptions, LengthOptions, RunPolicyOptions, JobOptions):
    """Options with other defaults than those of `vla.py`."""

    dataset: ValueDatasetOptions = field(default_factory=ValueDatasetOptions)
    outcome: OutcomeOptions = field(default_factory=OutcomeOptions)
    value: ValueOptions = field(default_factory=ValueOptions)
    train: StepOptions = field(default_factory=StepOptions)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)

    # A small head trains on fixed features.
    lr: float = option(1e-3, "Peak learning rate.", above=0)

    def training(self) -> Config:
        """Return the options that `training/` reads, with defaults for options that value.py lacks."""
        shared = _shared(self, LogOptions, LengthOptions, RunPolicyOptions, JobOptions)
        return Config(**shared, dataset=self.dataset, scaling=self.scaling, warmup_frac=WARMUP_FRAC)


def _shared(config: GrpoConfig | ValueConfig, *bases: type) -> dict[str, Any]:
    """Return the options of a program that it shares with vla.py by its base classes, and those of the step."""
    names = [attribute.name for base in bases for attribute in fields(base)]
    return {**{name: getattr(config, name) for name in names}, "train": TrainOptions(**vars(config.train))}


ON_A_LAPTOP = {
    "scaling.num_workers": "2",
    "scaling.use_gpu": "false",
    "scaling.cpus_per_worker": "0.5",
    "batch_size": "32",
}
# Flags of each preset, which the user's flags override. cards.py has the presets of GPUs.
PRESETS: dict[str, dict[str, str]] = {
    "demo": {
        "output_dir": "outputs/demo",
        "train.mode": "full",
        **ON_A_LAPTOP,
        "lr": "1e-3",
        "warmup_frac": "0.05",
        "log_freq": "20",
        "save_freq": "100",
        "dataset.eval_split": "0.1",
    },
    **{preset: dict(card.flags) for preset, card in OF_PRESET.items()},
}
GRPO_PRESETS: dict[str, dict[str, str]] = {
    # benchmarks/results/ has five seeds of this preset.
    "demo": {
        "output_dir": "outputs/grpo",
        "env.type": "two_bins",
        "env.episode_length": "30",
        "eval.n_episodes": "100",
        "train.mode": "full",
        **ON_A_LAPTOP,
        "lr": "1e-4",
        "grpo.iterations": "60",
        "grpo.noise_level": "0.6",
        "grpo.dual_clip": "null",
        "grpo.target_kl": "0.0016667",  # 0.05 for all 10 x 3 executed dimensions
        "grpo.env_actors": "2",
        "grpo.envs_per_actor": "32",
        "grpo.env_actor_cpus": "0.25",
    },
    **{preset: dict(card.grpo_flags) for preset, card in OF_PRESET.items()},
}
VALUE_PRESETS: dict[str, dict[str, str]] = {
    "demo": {
        **ON_A_LAPTOP,
        # After 200 the AUROC is between 0.74 and 1, by seed; after 600 it is 1.
        "steps": "600",
        "log_freq": "20",
        "save_freq": "100",
        "dataset.eval_split": "0.1",
        # With a frozen backbone the tiny policy's features do not distinguish the named bin from the other.
        "value.backbone": "true",
        "value.backbone_lr": "3e-4",
    },
}
