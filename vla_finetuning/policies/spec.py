"""Define `PolicySpec`, the policy of a run as a value: configuration, initial weights, processors, optimizer recipe.

The driver makes it; training workers call `PolicySpec.start` and `PolicySpec.processors`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline

from vla_finetuning.files import file_digest
from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import EmaOptions, TrainOptions
from vla_finetuning.policies.loading import WEIGHTS_FILE, fetch_pretrained, load_policy, new_policy
from vla_finetuning.policies.matching import FeatureMatch
from vla_finetuning.policies.optim import Recipe
from vla_finetuning.policies.pipelines import Stats, load_processors, make_processors
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.trainable import TrainableReport, with_float32_masters

Processors = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]


@dataclass(frozen=True)
class ValueSpec:
    """A value function: its bins of returns from -1 to 0, and the backbone's learning rate; None freezes that."""

    bins: int
    backbone_lr: float | None = None


@dataclass(frozen=True)
class TextDataset:
    """Dataset without actions, whose rows are prepared as those of a robot and train only their text.

    Attributes:
        number: `dataset_index` of its rows.
        cameras: its cameras, by the policy's names.
        state: whether it has the robot's state; if not, prompts leave the state out.
        opening: text before each of its instructions.
    """

    number: int
    cameras: frozenset[str]
    state: bool = False
    opening: str = ""


@dataclass(frozen=True)
class Robot:
    """A robot that the policy is trained on: its datasets, their match with the policy, and its statistics.

    Attributes:
        name: name with the control mode, if it has several; also its policy's folder. Empty for the only robot.
        match: match of the robot's features with the policy's.
        own_names: the policy's names -> the robot's own names, where they differ.
        datasets: values of `dataset_index`, ascending.
        stats: normalisation statistics; None to use the folder's own processors.
        missing_stats: names of statistics still to compute, by feature; `stats` is empty until then.
        statistics: lines that describe the statistics' source and how well they fit the data.
        opening: prefix of its instructions that names the robot; may be empty.
        texts: datasets without actions whose rows are prepared as its rows.
        files: contents of the JSON files beside the weights of its exported policy, by name (`plan.robot_facts`).
    """

    name: str
    config: PreTrainedConfig
    match: FeatureMatch
    own_names: dict[str, str] = field(default_factory=dict)
    datasets: tuple[int, ...] = ()
    stats: Stats | None = None
    missing_stats: dict[str, set[str]] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    opening: str = ""
    texts: tuple[TextDataset, ...] = ()
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the prefix of messages about the robot; empty for the only robot."""
        return f"{self.name}: " if self.name else ""

    @property
    def rename_map(self) -> dict[str, str]:
        """Return the map from the robot's own names to the policy's."""
        return {key: name for name, key in self.own_names.items()}

    @property
    def cameras(self) -> tuple[str, ...]:
        return self.match.camera_keys

    @property
    def widths(self) -> dict[str, int]:
        """Return the widths of state and action."""
        return {key: shape[0] for key, shape in self.match.shapes.items() if key not in self.match.camera_keys}


@dataclass(frozen=True)
class PolicySpec:
    """The policy of a run. Pickled in flight to training workers.

    Attributes:
        config: LeRobot's configuration, fitted to the datasets; with several robots, all cameras and the widest action.
        folder: LeRobot pretrained folder on the driver's node, or None to start from random weights.
        base: identity of the initial weights (path, revision, digests).
        robots: one or more robots; each has its own processors.
        trusted: whether code that comes with the policy may run.
        parameters: counts of parameters; None if the policy is not built on the driver.
        prompts: allowed prompt lengths of a micro-batch, ascending; empty if prompts are not cut.
        flops_by_prompt: FLOPs of a row's forward and backward by prompt length; empty like `parameters`.
        value: value function to train on the policy's backbone; None to train the policy itself.
    """

    config: PreTrainedConfig
    folder: Path | None
    base: dict[str, Any]
    train: TrainOptions
    adapters: PeftOptions
    recipe: Recipe
    robots: tuple[Robot, ...]
    seed: int
    image_transforms: ImageTransformOptions = field(default_factory=ImageTransformOptions)
    trusted: bool = False
    ema: EmaOptions = field(default_factory=EmaOptions)
    parameters: TrainableReport | None = None
    prompts: tuple[int, ...] = ()
    flops_by_prompt: dict[int, int] = field(default_factory=dict)
    value: ValueSpec | None = None

    @property
    def mixes_robots(self) -> bool:
        return len(self.robots) > 1

    def select_robot(self, robot: Robot) -> PolicySpec:
        return replace(self, config=robot.config, robots=(replace(robot, texts=()),))

    @property
    def cameras(self) -> int:
        """Return the number of cameras in a batch, over all robots."""
        return len({camera for robot in self.robots for camera in robot.cameras})

    @property
    def shared_folder(self) -> Path | None:
        """Return `folder` if all nodes must share it; None if each node fetches it from the Hub or a bucket."""
        fetchable = self.base["revision"] is not None or "://" in str(self.base["path"])
        return None if fetchable else self.folder

    def folder_here(self) -> Path | None:
        """Return the folder on this node; fetch from the Hub or a bucket what is missing of it."""
        if self.folder is None or self.shared_folder is not None:
            return self.folder
        return fetch_pretrained(self.base["path"], self.base["revision"])[0]

    def start(self) -> PreTrainedPolicy:
        """Build the policy on the CPU with its initial weights; trainable parameters are float32.

        Raises ValueError or OSError as `load_policy`, or if the base changed since the run was planned.
        """
        if (folder := self.folder_here()) is not None:
            self._require_base(folder)
            policy = load_policy(folder, self.config, trusted=self.trusted)
        else:
            torch.manual_seed(self.seed)
            policy = new_policy(self.config, trusted=self.trusted)
        return with_float32_masters(policy)

    def _require_base(self, folder: Path) -> None:
        """Refuse a folder that changed since the run was planned. Hub folders are pinned to a commit."""
        if self.base["revision"] is not None:
            return
        digests = pretrained_digests(folder)
        before, after = ({"the weights": base["digest"], **base["files"]} for base in (self.base, digests))
        if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            raise ValueError(
                f"policy {self.base['path']} has changed since this run was planned: {', '.join(changed[:5])} changed, "
                "appeared or disappeared; restore it, or start a new run"
            )

    def processors(self, config: PreTrainedConfig | None = None) -> Processors:
        """Return the first robot's pre- and postprocessor; `config` replaces the robot's configuration."""
        robot, folder = self.robots[0], self.folder_here()
        config = config or robot.config
        if robot.stats is None:
            assert folder is not None
            return load_processors(folder, config, trusted=self.trusted)
        return make_processors(folder, config, robot.stats, trusted=self.trusted)

    def exported_config(self) -> PreTrainedConfig:
        """Return LeRobot's configuration of a robot's policy, with the options that the run replaces.

        `optimizer_*` and `scheduler_*` stay, as with `lerobot-train`.
        """
        config = copy.deepcopy(self.config)
        partly_frozen = self.train.mode != "full" and not self.adapters.enabled
        replaced = {
            "train_expert_only": partly_frozen,
            "freeze_vision_encoder": partly_frozen,
            "compile_model": False,  # a setting of the process, not of the policy
            "gradient_checkpointing": False,
        }
        for name in replaced.keys() & family_of(config).ignored_options.keys():
            setattr(config, name, replaced[name])
        config.use_peft = False
        if self.train.precision == "fp32":  # LeRobot would act in float16, which nothing trained
            config.use_amp = False
        return config

    @property
    def augments(self) -> bool:
        return self.train.augmentation != "none" or self.image_transforms.enable

    @property
    def trained_part(self) -> str:
        """Describe the trainable part of the policy (--train.mode), or its adapters."""
        peft = self.adapters
        if self.value is not None:
            return "a value function" + (" and what it sees with" if self.value.backbone_lr else " on a frozen policy")
        if not peft.enabled:
            return self.train.mode + self.train.insulation
        targets = "the policy type's own choice of layers" if peft.target_modules is None else peft.target_modules
        full_modules = f", and all of {peft.full_training_modules}" if peft.full_training_modules else ""
        return f"LoRA of rank {peft.r}, alpha {peft.lora_alpha or 8}, in {targets}{full_modules}{self.train.insulation}"

    @property
    def checkpoint_bytes(self) -> int:
        """Return the most bytes of a checkpoint: trainable parameters, the optimizer's state, and any average."""
        if self.parameters is None:
            return 0
        state = min(2, max(len(kinds - {"step"}) for kinds in self.recipe.state_kinds))  # Muon's matrices have one
        return 4 * (1 + state + self.ema.enable) * self.parameters.trainable


def weights_file(folder: Path) -> Path:
    """Return the path of a pretrained folder's weights, or of the index of its shards. The file may not exist."""
    return (sorted(folder.glob("*.safetensors.index.json")) or [folder / WEIGHTS_FILE])[0]


def pretrained_digests(folder: Path) -> dict[str, Any]:
    """Return `digest` of a policy's weights file, and `files`: those of others that loading reads, by name."""
    weights, files = weights_file(folder), [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    files += folder.glob("*tokenizer/**/*")
    files = [path for path in sorted(files) if path.is_file() and path != weights]
    return {
        "digest": file_digest(weights),
        "files": {str(path.relative_to(folder)): file_digest(path) for path in files},
    }
