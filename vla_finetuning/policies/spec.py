"""The policy of a run as a value: its configuration, where its weights start, how it is prepared, how it learns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.processor import PolicyProcessorPipeline

from vla_finetuning.files import file_digest
from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.options.ema import EmaOptions
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies.action_tokens import ACTION_TOKENIZER_FOLDER
from vla_finetuning.policies.loading import WEIGHTS_FILE, fetch_pretrained, load_policy, new_policy
from vla_finetuning.policies.matching import FeatureMatch
from vla_finetuning.policies.optim import Recipe
from vla_finetuning.policies.pipelines import Stats, load_processors, make_processors
from vla_finetuning.policies.processors import TOKENIZER_FOLDER
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
    """One of the robots that a policy is trained on: its data, how they are the policy's, and its statistics.

    Rows of a run's only robot have the names of its dataset; of robots that differ, the policy's.

    Attributes:
        name: with the robot's control mode, if it has several; names the folder of its policy. Empty for the only one.
        config: LeRobot's, fitted to the robot: its cameras, its widths.
        match: how its features are the policy's, by its own names.
        rename_map: names that rows have -> the policy's.
        own_names: names that rows have -> the robot's own, where these differ.
        datasets: their numbers (`dataset_index`), ascending.
        stats: normalisation statistics by the names that rows have; None: those of the folder's own processors.
        missing_stats: names of the statistics still to be computed, by feature, without which `stats` is empty.
        statistics: which statistics these are, and how they describe the data, in words.
        opening: what its instructions begin with, where they name the robot.
    """

    name: str
    config: PreTrainedConfig
    match: FeatureMatch
    rename_map: dict[str, str]
    own_names: dict[str, str] = field(default_factory=dict)
    datasets: tuple[int, ...] = ()
    stats: Stats | None = None
    missing_stats: dict[str, set[str]] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    opening: str = ""

    @property
    def label(self) -> str:
        """Return what text about it begins with; nothing for the only robot."""
        return f"{self.name}: " if self.name else ""

    @property
    def match_of_rows(self) -> FeatureMatch:
        """The match by the names that rows have."""
        return self.match.renamed({dataset_key: name for name, dataset_key in self.own_names.items()})

    @property
    def cameras(self) -> tuple[str, ...]:
        """Return the cameras that it has, by the names that rows have."""
        return self.match_of_rows.camera_keys

    @property
    def widths(self) -> dict[str, int]:
        """Return the entries of its state and action, by the names that rows have."""
        match = self.match_of_rows
        shapes = {row.dataset_key: row.dataset_shape for row in match.rows}
        return {key: shape[0] for key, shape in shapes.items() if key and shape and key not in match.camera_keys}

    def by_own_names(self) -> Robot:
        """Return the robot as it is without the others: what rows have is called as in its datasets."""
        stats = self.stats and {self.own_names.get(key, key): values for key, values in self.stats.items()}
        rename_map = self.rename_map | {dataset_key: name for name, dataset_key in self.own_names.items()}
        return replace(self, stats=stats, rename_map=rename_map, own_names={})


@dataclass(frozen=True)
class PolicySpec:
    """The policy of a run. Pickled in flight to training workers.

    Attributes:
        config: LeRobot's, fitted to the datasets; of robots that differ with the cameras of all and the widest action.
        folder: a LeRobot pretrained folder of the driver's node, or None to start from random weights.
        base: identity of the weights that the run starts from (path, revision, digest).
        train, adapters, image_transforms, ema: what the run asks for. seed: of random weights, draws and augmentation.
        recipe: optimizer and learning rate.
        robots: at least one; each has its own processors.
        trusted: whether code that comes with the policy may run.
        parameters: how many there are and which train; None for policies that are not built on the driver.
        prompts: lengths of prompts that a micro-batch may have, ascending; empty where prompts are not cut.
        value: for a value function on what the policy sees, instead of the policy itself; None for a policy.
        flops_by_prompt: forward and backward of a row, counted, by the length of its prompt; empty where the policy is
            not built on the driver.
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
        """Return whether rows are of robots that differ."""
        return len(self.robots) > 1

    @property
    def robot_of(self) -> tuple[int, ...]:
        """Return the robot of each dataset, by its number."""
        pairs = [(dataset, number) for number, robot in enumerate(self.robots) for dataset in robot.datasets]
        return tuple(number for _, number in sorted(pairs))

    def select_robot(self, robot: Robot) -> PolicySpec:
        """Return the policy of one robot alone."""
        return replace(self, config=robot.config, robots=(robot,))

    @property
    def cameras(self) -> int:
        """Return the number of cameras in a batch."""
        return len({camera for robot in self.robots for camera in robot.cameras})

    @property
    def fewest_cameras(self) -> int:
        """Return the fewest cameras of a batch: all, unless a robot has fewer."""
        return min(len(robot.cameras) for robot in self.robots)

    @property
    def shared_folder(self) -> Path | None:
        """The folder, if all nodes must see it: a node fetches by itself what is on the Hub or in a bucket."""
        fetchable = self.base["revision"] is not None or "://" in str(self.base["path"])
        return None if fetchable else self.folder

    def folder_here(self) -> Path | None:
        """The folder on this node, fetched if it is not there."""
        # Of a place in a bucket it may be there because another process is fetching it.
        if self.folder is None or (self.folder.is_dir() and "://" not in str(self.base["path"])):
            return self.folder
        return fetch_pretrained(self.base["path"], self.base["revision"])[0]

    def start(self) -> PreTrainedPolicy:
        """The policy with the weights that the run starts from, on the CPU: pretrained, or random by the seed.

        What trains is float32.

        Raises:
            ValueError, OSError: as `load_policy`; the base is not what it was when the run was planned.
        """
        if (folder := self.folder_here()) is not None:
            self._require_base(folder)
            policy = load_policy(folder, self.config, trusted=self.trusted)
        else:
            torch.manual_seed(self.seed)
            policy = new_policy(self.config, trusted=self.trusted)
        return with_float32_masters(policy)

    def _require_base(self, folder: Path) -> None:
        """Refuse a folder that was written to since; what is on the Hub is pinned to a commit."""
        if self.base["revision"] is not None:
            return
        found = pretrained_digests(folder)
        was, now = ({"the weights": base["digest"], **base["files"]} for base in (self.base, found))
        if changed := sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name)):
            raise ValueError(
                f"policy {self.base['path']} is not what it was when this run was planned: {', '.join(changed[:5])} "
                "changed, came or went; put it back as it was, or start a new run"
            )

    def processors(self, config: PreTrainedConfig | None = None) -> Processors:
        """The first robot's pre- and postprocessor; `config` replaces its own."""
        robot, folder = self.robots[0], self.folder_here()
        config = config or robot.config
        if robot.stats is None:
            assert folder is not None
            return load_processors(folder, config, trusted=self.trusted)
        return make_processors(folder, config, robot.stats, robot.rename_map, trusted=self.trusted)

    @property
    def augments(self) -> bool:
        """Return whether frames that are trained on are changed."""
        return self.train.augmentation != "none" or self.image_transforms.enable

    @property
    def what_trains(self) -> str:
        """In words: what of the policy trains (--train.mode), or the adapters in it."""
        peft = self.adapters
        if self.value is not None:
            return "a value function" + (" and what it sees with" if self.value.backbone_lr else " on a frozen policy")
        if not peft.enabled:
            insulated, text = self.train.knowledge_insulation, self.train.text_targets
            return self.train.mode + ", insulated" * insulated + (f", writes {text}" if text else "")
        targets = "the policy type's own choice of layers" if peft.target_modules is None else peft.target_modules
        full_modules = f", and all of {peft.full_training_modules}" if peft.full_training_modules else ""
        return f"LoRA of rank {peft.r}, alpha {peft.lora_alpha or 8}, in {targets}{full_modules}"

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: what trains, Adam's two moments, and the average if there is one."""
        if self.parameters is None:
            return 0
        return 4 * (3 + self.ema.enable) * self.parameters.trainable


def weights_file(folder: Path) -> Path:
    """Return the file of a pretrained folder's weights, or the index of its shards; it need not be there."""
    return (sorted(folder.glob("*.safetensors.index.json")) or [folder / WEIGHTS_FILE])[0]


def pretrained_digests(folder: Path) -> dict[str, Any]:
    """Return digests of what loading a policy reads: of its weights (`digest`), and of all else (`files`), by name.

    All else is configuration, processors, tokenizer and shards.
    """
    weights, files = weights_file(folder), [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    files += [path for name in (TOKENIZER_FOLDER, ACTION_TOKENIZER_FOLDER) for path in (folder / name).rglob("*")]
    files = [path for path in sorted(files) if path.is_file() and path != weights]
    return {
        "digest": file_digest(weights),
        "files": {str(path.relative_to(folder)): file_digest(path) for path in files},
    }
