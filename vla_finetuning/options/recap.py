"""Options of advantages in prompts, and of the value function that labels frames (docs/recap.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vla_finetuning.options.dataset import DatasetOptions
from vla_finetuning.options.fields import option
from vla_finetuning.options.mixture import members, robots
from vla_finetuning.options.train import StepOptions

# Endings of an instruction that state whether an action is better than most (RECAP, arXiv 2511.14759).
ADVANTAGE = {True: ", Advantage: positive", False: ", Advantage: negative"}
# Share of rows without a label in RECAP; guidance (--policy.guidance) needs predictions without one.
LABEL_DROPOUT = 0.3
_LABELS = re.compile(rf"({'|'.join(map(re.escape, ADVANTAGE.values()))})+\Z")


def without_label(instruction: str) -> str:
    """Remove the labels at the end of an instruction, as a recording robot may have received it."""
    return _LABELS.sub("", instruction)


@dataclass
class RecapOptions:
    """Advantages in the prompt (docs/recap.md)."""

    labels: str | None = option(
        None,
        "labels.parquet of a run of value.py. Prompts end with `Advantage: positive` or `Advantage: negative`. "
        "evaluate.py --policy.advantage positive asks for the better behaviour.",
        file="path",
    )

    def describe(self, positive_share: float) -> list[str]:
        """Return the plan's lines on labels."""
        return [
            f"Advantages   in prompts, of {self.labels}: {positive_share:.0%} of the training frames positive; "
            f"{LABEL_DROPOUT:.0%} of the rows get no label"
        ]


@dataclass
class OutcomeOptions:
    """Outcomes of episodes, and corrections by a person."""

    success: str = option(
        "next.success",
        "A column of the frames: an episode succeeded if it reaches --outcome.threshold in any frame. @FILE: outcomes "
        "by episode.",
        form="a column of the frames, as next.success, or @FILE (.csv, .parquet, .json: episode_index, success)",
        file="@",
    )
    threshold: float = option(1.0, "Least value of that column in a successful episode; true counts as 1.", above=0)
    intervention: str | None = option(
        None,
        "A column of the frames, true where a person corrected the robot. Corrected frames are positive. Default: "
        "LeRobot's `intervention` or `is_intervention`, if a dataset has it.",
        form="a column of the frames, as intervention",
    )


@dataclass
class ValueDatasetOptions(DatasetOptions):
    """Datasets and episodes."""

    eval_split: float = option(
        0.2,
        "Share of the episodes of each outcome, in each dataset, that is held out to judge the value function.",
        min=0,
        below=1,
    )


@dataclass
class ValueOptions:
    """The value function of value.py, and the labels that it gives (docs/recap.md). Defaults are RECAP's."""

    bins: int = option(201, "Number of bins of the distribution of returns, from -1 to 0.", min=2)
    backbone: bool = option(
        False, "Train the policy's vision and language model with the value function. Otherwise they are frozen."
    )
    backbone_lr: float = option(
        2.5e-5, "Peak learning rate of the backbone; --lr is the head's.", above=0, only_with="value.backbone=true"
    )
    failure_penalty: float = option(
        1.0, "Penalty at the end of a failed episode, in lengths of the longest episode of its task.", min=0
    )
    horizon: int = option(50, "Number of frames over which an advantage compares values.", min=1)
    positive: float = option(
        0.3, "Share of the frames of each task with a positive label, besides corrections.", above=0, max=1
    )

    def check(self, config: Any) -> None:
        if config.policy_path is None:
            raise ValueError(
                "the value function uses a policy's vision and language model: give --policy.path FOLDER_OR_HUB_ID"
            )
        if config.train.mode != StepOptions.mode:
            raise ValueError(f"--train.mode={config.train.mode}: --value.backbone says what trains here; leave it out")
        if config.scaling.strategy != "ddp":
            raise ValueError(
                f"--scaling.strategy={config.scaling.strategy}: value functions are not sharded; use "
                "--scaling.strategy=ddp"
            )
        if len(robots(members(config.dataset.mixture))) > 1:
            raise ValueError("--dataset.mixture: a value function learns from datasets of one robot; name those of one")
        if config.dataset.on_error == "skip":
            raise ValueError(
                "--dataset.on_error=skip: a frame that cannot be read has no value, and no label; leave its episode "
                "out by --dataset.exclude_episodes"
            )
