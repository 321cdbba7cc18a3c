"""Options of checkpoints, of logs and of the held-out loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vla_finetuning.options.fields import option


@dataclass
class CheckpointOptions:
    """Checkpoints."""

    save_freq: int = option(1000, "Steps between checkpoints.", min=1)
    save_every_s: float | None = option(
        None, "Also save a checkpoint at the first log step this many seconds after the last one.", above=0
    )
    keep_checkpoints: int = option(2, "Number of newest checkpoints to keep.", min=1)
    keep_best: int = option(
        0,
        "Number of best checkpoints to keep besides the newest: those with the lowest held-out loss (training loss "
        "without --eval_steps); of grpo.py those with the most success in training, on average since the checkpoint "
        "before.",
        min=0,
    )

    @property
    def best_kept(self) -> int:
        """Return the number of best checkpoints to keep besides the newest."""
        return self.keep_best

    def describe_checkpoints(self, folder: str, unit: str, measure: str) -> str:
        """Return the plan's line on checkpoints, every so many of a `unit`; `measure` ranks the best."""
        best = f" and the {self.best_kept} best by {measure}" if self.best_kept else ""
        seconds = "" if self.save_every_s is None else f", after {self.save_every_s:g} s,"
        return (
            f"Checkpoints  every {self.save_freq} {unit}{seconds} and at the end, keeping the last "
            f"{self.keep_checkpoints}{best}, in {folder}"
        )


@dataclass
class LogOptions(CheckpointOptions):
    """Logs and checkpoints."""

    log_freq: int = option(50, "Steps between two lines of metrics.jsonl. Each checkpoint has a line, too.", min=1)
    eval_steps: int = option(
        0,
        "Steps between measurements of the loss on held-out episodes (--dataset.eval_split). 0: never.",
        min=0,
        requires={"dataset.eval_split": "no episode is held out to compute a loss on"},
    )
    # The rows are divided among the tasks and evenly spaced within each task.
    max_eval_samples: int = option(
        0,
        "Maximum number of rows for the held-out loss, at least one of each task. 0: all rows.",
        min=0,
        requires={"eval_steps": "it limits the held-out loss, and none is measured"},
    )

    def describe_held_out(self, rows: int, held_out: int, tasks: int) -> list[str]:
        """Return the plan's lines on the held-out loss, which is measured on `rows` of the `held_out` rows."""
        return [
            f"Held out     the loss on {rows} of {held_out} held-out frames of {tasks} tasks, every {self.eval_steps} "
            "steps and at the end, with the same random numbers every time"
        ]

    def check(self, config: Any) -> None:
        by_loss = self.best_kept and getattr(config, "keep_best_by", "loss") == "loss"
        if self.eval_steps and by_loss and self.save_freq % self.eval_steps:
            raise ValueError(
                f"--save_freq={self.save_freq} with --eval_steps={self.eval_steps}: checkpoints at steps without a "
                "held-out loss cannot be compared with the best; give a --save_freq that is a multiple of --eval_steps"
            )


@dataclass
class BestCheckpointOptions(LogOptions):
    """Held-out loss and the best checkpoint."""

    # Other processes evaluate, and training does not wait for them (evaluation/during.py).
    env_eval_freq: int = option(
        20_000,
        "Steps between checkpoints that are evaluated beside the training, on --eval.n_episodes in --env.type. The "
        "last checkpoint always is. 0: only the last one.",
        min=0,
    )
    # Without a measured score, the lowest training loss since the previous checkpoint ranks a checkpoint.
    keep_best: int = option(
        0,
        "Number of best checkpoints to keep besides the newest: those with the lowest held-out loss (training loss "
        "without --eval_steps), or with 2,success those with the most success in --env.type.",
        form="a whole number, or one with what is best, as 2,loss or 2,success",
        min=0,
    )
    keep_best_by: Literal["loss", "success"] = option(
        "loss", "Measure of the best checkpoints; --keep_best 2,success sets it.", flag=None, set_by="keep_best"
    )
    export: Literal["last", "best"] = option(
        "last",
        "Source of OUTPUT_DIR/pretrained_model: the last step, or the checkpoint with the lowest held-out loss.",
        requires={"eval_steps": "the best checkpoint has the lowest held-out loss, and none is measured"},
    )

    def describe_best(self, folder: str) -> str:
        """Return the plan's line on checkpoints."""
        loss = "held-out loss" if self.eval_steps else "training loss"
        line = self.describe_checkpoints(folder, "steps", "success" if self.keep_best_by == "success" else loss)
        return line + "; the best one is exported" * (self.export == "best")

    @property
    def best_kept(self) -> int:
        """Return the number of best checkpoints to keep besides the newest; --export best needs at least one."""
        return max(self.keep_best, int(self.export == "best"))

    def check(self, config: Any) -> None:
        if config.env_type is None:
            if self.keep_best_by == "success":
                raise ValueError("--keep_best=N,success: in which environment? give --env.type two_bins")
            return
        if self.keep_best_by == "success" and self.export == "best":
            raise ValueError(
                "--export=best with --keep_best=N,success: the best to export has the lowest held-out loss, and may "
                "not be among the checkpoints; leave one of them out"
            )
        if self.env_eval_freq % self.save_freq:
            raise ValueError(
                f"--env_eval_freq={self.env_eval_freq} with --save_freq={self.save_freq}: only checkpoints are "
                "evaluated; give a multiple of --save_freq, or 0 for the last one only"
            )
