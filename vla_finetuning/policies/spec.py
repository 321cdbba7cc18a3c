"""The policy of a run as a value: its configuration, where its weights start, how it is prepared, how it learns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline

from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies.loading import fetch_pretrained, load_policy, new_policy
from vla_finetuning.policies.optim import Recipe
from vla_finetuning.policies.pipelines import Stats, load_processors, make_processors
from vla_finetuning.policies.trainable import TrainableReport, with_float32_masters

Processors = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]


@dataclass(frozen=True)
class ValueSpec:
    """A value function.

    Attributes:
        bins: of its distribution of returns, from -1 to 0.
        backbone_lr: rate of what the policy sees with, which trains too; None: it stays as it is.
    """

    bins: int
    backbone_lr: float | None = None


@dataclass(frozen=True)
class Robot:
    """What of a policy belongs to one of the robots that it is trained on.

    Attributes:
        name: with the robot's control mode, if it has several; names the folder of its policy.
        config: LeRobot's, fitted to the robot: its cameras, its widths.
        stats: its normalisation statistics, by the policy's keys.
        rename_map: its own key -> policy key.
        widths: of its state and action, by the policy's keys.
        cameras: those that it has, by the policy's keys.
        opening: what its instructions begin with.
    """

    name: str
    config: PreTrainedConfig
    stats: Stats
    rename_map: dict[str, str]
    widths: dict[str, int]
    cameras: tuple[str, ...]
    opening: str = ""


@dataclass(frozen=True)
class PolicySpec:
    """The policy of a run. Pickled in flight to training workers.

    Attributes:
        config: LeRobot's, fitted to the dataset.
        folder: a LeRobot pretrained folder of the driver's node, or None to start from random weights.
        base: identity of the weights that the run starts from (path, revision, digest).
        train, adapters, image_transforms: what the run asks for. seed: of random weights, draws and augmentation.
        recipe: optimizer and learning rate.
        cameras: number of cameras in a batch.
        stats: normalisation statistics by dataset key; None: those of the folder's own processors.
        rename_map: dataset (or environment) key -> policy key.
        trusted: whether code that comes with the policy may run.
        average: decay of the average of what trains; None for no average.
        export_average: whether the average is what is evaluated and exported.
        parameters: how many there are and which train; None for policies that are not built on the driver.
        prompts: lengths of prompts that a micro-batch may have, ascending; empty where prompts are not cut.
        value: for a value function on what the policy sees, instead of the policy itself; None for a policy.
        flops_by_prompt: forward and backward of a row, counted, by the length of its prompt; empty where the policy is
            not built on the driver.
        opening: what instructions begin with, where they name the robot.
        robots: of a mixture of several; none where the dataset's is the only one. `config` then has the cameras of all
            and the widest action, and each robot its own processors (`of_robot`).
    """

    config: PreTrainedConfig
    folder: Path | None
    base: dict[str, Any]
    train: TrainOptions
    adapters: PeftOptions
    recipe: Recipe
    cameras: int
    stats: Stats | None
    seed: int
    image_transforms: ImageTransformOptions = field(default_factory=ImageTransformOptions)
    rename_map: dict[str, str] = field(default_factory=dict)
    trusted: bool = False
    average: float | None = None
    export_average: bool = False
    parameters: TrainableReport | None = None
    prompts: tuple[int, ...] = ()
    flops_by_prompt: dict[int, int] = field(default_factory=dict)
    value: ValueSpec | None = None
    opening: str = ""
    robots: tuple[Robot, ...] = ()

    def of_robot(self, robot: Robot, renamed: bool = False) -> PolicySpec:
        """The policy for one of its robots alone. `renamed`: for rows whose features have the policy's names."""
        own = replace(self, config=robot.config, opening=robot.opening, robots=())
        if renamed:
            return replace(own, stats=robot.stats, rename_map={})
        names = {name: key for key, name in robot.rename_map.items()}
        stats = {names.get(key, key): values for key, values in robot.stats.items()}
        return replace(own, stats=stats, rename_map=robot.rename_map)

    @property
    def fewest_cameras(self) -> int:
        """Of a batch: all, unless a robot has fewer."""
        return min((len(robot.cameras) for robot in self.robots), default=self.cameras)

    @property
    def shared_folder(self) -> Path | None:
        """The folder, if all nodes must see it: a node fetches by itself what is on the Hub or in a bucket."""
        fetchable = self.base["revision"] is not None or "://" in str(self.base["path"])
        return None if fetchable else self.folder

    def folder_here(self) -> Path | None:
        """The folder on this node, fetched if it is not there.

        Of a place in a bucket it may be there because another process is fetching it.
        """
        if self.folder is None or (self.folder.is_dir() and "://" not in str(self.base["path"])):
            return self.folder
        return fetch_pretrained(self.base["path"], self.base["revision"])[0]

    def start(self) -> PreTrainedPolicy:
        """The policy with the weights that the run starts from, on the CPU: pretrained, or random by the seed.

        What trains is float32.
        """
        if (folder := self.folder_here()) is not None:
            policy = load_policy(folder, self.config, trusted=self.trusted)
        else:
            torch.manual_seed(self.seed)
            policy = new_policy(self.config, trusted=self.trusted)
        return with_float32_masters(policy)

    def processors(self, config: PreTrainedConfig | None = None) -> Processors:
        """The policy's pre- and postprocessor; of several robots, one's. `config` replaces the policy's own."""
        if self.robots:
            return self.of_robot(self.robots[0], renamed=True).processors(config)
        config, folder = config or self.config, self.folder_here()
        if self.stats is None:
            assert folder is not None
            return load_processors(folder, config, trusted=self.trusted)
        return make_processors(folder, config, self.stats, self.rename_map, trusted=self.trusted)

    @property
    def augments(self) -> bool:
        """Whether frames that are trained on are changed."""
        return self.train.augmentation != "none" or self.image_transforms.enable

    @property
    def what_trains(self) -> str:
        """In words: what of the policy trains (--train.mode), or the adapters in it."""
        peft = self.adapters
        if self.value is not None:
            return "a value function" + (" and what it sees with" if self.value.backbone_lr else " on a frozen policy")
        if not peft.enabled:
            return self.train.mode
        targets = "the policy type's own choice of layers" if peft.target_modules is None else peft.target_modules
        whole = f", and all of {peft.full_training_modules}" if peft.full_training_modules else ""
        return f"LoRA of rank {peft.r}, alpha {peft.lora_alpha or 8}, in {targets}{whole}"

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: what trains, Adam's two moments, and the average if there is one."""
        if self.parameters is None:
            return 0
        return 4 * (3 + (self.average is not None)) * self.parameters.trainable
