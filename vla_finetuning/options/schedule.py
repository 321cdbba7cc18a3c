"""Options of length, batch, optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vla_finetuning.options.fields import option
from vla_finetuning.options.scaling import WorkerOptions


@dataclass
class LearningOptions:
    """Batch and learning rate."""

    batch_size: int = option(
        8, "Rows of a micro-batch on each worker. A step has batch_size x grad_accum x num_workers rows.", min=1
    )
    lr: float | None = option(
        None,
        "Peak learning rate. Default: the policy's own. Parameter groups with another rate are scaled by the same "
        "factor.",
        above=0,
    )


@dataclass
class LengthOptions(LearningOptions):
    """Length, batch and learning rate."""

    steps: int | None = option(
        None,
        "Number of optimizer updates. The environment variable MAX_TRAIN_STEPS caps it.",
        min=1,
        conflicts={"num_epochs": ""},
    )
    num_epochs: float | None = option(
        None,
        "Length of the run in passes over the data, instead of --steps. Default: 1; with --preset demo 900 steps, or "
        "on your own dataset 2 passes, within 300 to 1,000 steps.",
        above=0,
    )
    grad_accum: int = option(1, "Number of micro-batches of a step on each worker.", min=1)

    def describe_steps(
        self, workers: WorkerOptions, steps: int, rows_per_epoch: int, log_freq: int, equal_epochs: bool
    ) -> list[str]:
        """Return the plan's lines on batches and steps. `equal_epochs`: every epoch has `rows_per_epoch` rows."""
        batch = self.batch_size * self.grad_accum * workers.num_workers
        return [
            f"Batch        {self.batch_size} rows x {self.grad_accum} micro-steps x {workers.num_workers} workers = "
            f"{batch} per step" + (", also while fewer workers run" if workers.min_workers else ""),
            f"Steps        {steps} ({steps * batch / rows_per_epoch:.2f} epochs of {rows_per_epoch} rows"
            f"{'' if equal_epochs else ' on average'}, {rows_per_epoch / batch:.1f} steps each); a line every "
            f"{log_freq}",
        ]


@dataclass
class ScheduleOptions(LengthOptions):
    """Optimizer and schedule."""

    use_policy_training_preset: bool = option(
        True,
        "Use the policy's own optimizer, parameter groups and learning rate schedule, as lerobot-train does. false: "
        "one parameter group, with --optimizer.type and --scheduler.type.",
    )
    # With the policy's preset, these replace single options of it.
    optimizer_options: list[str] = option(
        [], "An option of LeRobot's optimizer, such as --optimizer.betas '[0.9, 0.99]'.", flag="optimizer.*"
    )
    scheduler_options: list[str] = option(
        [], "An option of LeRobot's schedule, such as --scheduler.num_warmup_steps 500.", flag="scheduler.*"
    )
    # Either option selects a linear warm-up and a cosine over all steps; the other defaults to the constants below.
    warmup_frac: float | None = option(
        None,
        "Share of the steps with a rising learning rate, before a cosine over all steps. Replaces the policy's own "
        "schedule.",
        min=0,
        max=1,
    )
    final_lr_frac: float | None = option(
        None,
        "Final learning rate of this cosine as a share of the peak. Replaces the policy's own schedule.",
        min=0,
        max=1,
    )

    def check(self, config: Any) -> None:
        """Refuse two flags for the same setting, and an incomplete replacement of the policy's preset."""
        optimizer, scheduler = (
            {option.removeprefix("--").partition("=")[0] for option in options}
            for options in (self.optimizer_options, self.scheduler_options)
        )
        short = [f"--{name}" for name in ("warmup_frac", "final_lr_frac") if getattr(self, name) is not None]
        if short and scheduler:
            raise ValueError(f"{short[0]} and --scheduler.{min(scheduler)}: give one of them")
        if self.lr is not None and "lr" in optimizer:
            raise ValueError("--lr and --optimizer.lr: give one of them")
        if not self.use_policy_training_preset:
            if "type" not in optimizer:
                raise ValueError(
                    "--use_policy_training_preset=false: with which optimizer? give --optimizer.type adamw"
                )
            if not short and "type" not in scheduler:
                raise ValueError(
                    "--use_policy_training_preset=false: with which schedule? give --scheduler.type "
                    "cosine_decay_with_warmup, or --warmup_frac"
                )


# Defaults of --warmup_frac and --final_lr_frac if only the other one is given.
WARMUP_FRAC, FINAL_LR_FRAC = 0.033, 0.1
# Length of the demo. After 300 steps the gripper reaches its bin as often, but leaves it again in one of eight scenes.
DEMO_STEPS = 900
# Length of a rehearsal. On held-out episodes of a Unitree G1 it beats the mean action with 5 training episodes (300
# steps are 13 epochs; longer runs raise the held-out loss) and with 83 (1,000 steps are 2 epochs).
REHEARSAL_STEPS, REHEARSAL_EPOCHS = (300, 1_000), 2.0
# Rows per second of a rehearsal with one camera of 480x640 on 2 CPUs, for the plan's estimate of its duration.
REHEARSAL_ROWS_PER_S = 150
