"""Describe a policy type beyond LeRobot's interface: `Family`, and `PolicyLoss`, its training loss.

The base class `Family` trains with LeRobot's own `forward` and predicts with LeRobot's own code. A file in families/
subclasses it for one policy type and lists the instance in `FAMILIES`. Code outside `policies/` names no policy: it
calls `registry.family_of(config)`.

Legend: B batch, K draws of noise and time per row, T chunk, A action, L language tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION
from torch import Tensor, nn

from util import COMMON_METRICS, DeviceMetrics, Draws
from vla_finetuning.options.train import TrainMode
from vla_finetuning.policies.attention import Kernel, Shape
from vla_finetuning.policies.processors import DeviceHalf, normalization_mode

# Part of the parameters that never get a gradient; see `Family.parts`.
UNUSED = "unused in training"
Columns = dict[str, np.ndarray]
# Option of LeRobot's main branch (#4056). It is stored in robot.json: LeRobot 0.6.1 refuses a config.json that has it.
MAX_DELAY = "rtc_training_max_delay"
# 0-d column of a batch: the mean of `PolicyLoss.count` over all micro-batches of the step.
MEAN_COUNT = "mean_count"
# Word embeddings: a sixth of PI0.5's trainable parameters in mode `full`.
WORD_EMBEDDINGS = r".*\.(language_model|text_model)\.embed_tokens"
# FSDP2 units of policies with a PaliGemma: the language model's MLPs and the vision tower's layers. The language
# model's layers are no units: LeRobot 0.6.1 never calls them, so their hooks would not fire (#3767).
UNIT_NAMES = (
    r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.mlp"
    r"|.*\.vision_model\.encoder\.layers\.\d+"
    rf"|{WORD_EMBEDDINGS}"
)


class PolicyLoss(nn.Module):
    """A policy's training loss as a module, wrapped by DDP. Parameters are named `policy.` + LeRobot's names.

    The base class returns the first result of the policy's own `forward`, which draws its own noise. Runs in the
    training worker.

    Args:
        policy: policy with `requires_grad` already set.
        images: converter of uint8 cameras to float; required for policies that normalise images.
        attention: unused, because LeRobot's losses choose their own kernels.
        options: options of `flow.FlowLoss`. Raises ValueError for an enabled one, which LeRobot's losses lack.
    Attributes:
        attention: kernel of the modules that `attentions` lists; `attention.choose_kernel` may replace it.
        reaches_all: whether every trainable parameter gets a gradient in every step. LeRobot's own losses leave some
            out (5 tensors of PI0): DDP then searches for unused ones in every step, as under `lerobot-train`.
        metrics: receiver of values that training forwards compute besides the loss; None to drop them.
        robots: names of a mixture's robots whose losses `metrics` gets.
    """

    attention: Kernel = "eager"
    reaches_all: bool = False
    metrics: DeviceMetrics | None = None
    robots: tuple[str, ...] = ()

    def __init__(
        self, policy: PreTrainedPolicy, *, images: DeviceHalf | None = None, attention: Kernel = "eager", **options: Any
    ):
        super().__init__()
        if unknown := [name for name, value in options.items() if value]:
            raise ValueError(f"LeRobot's own loss of a '{policy.config.type}' has no {unknown[0]}: leave it out")
        if images is None:
            if normalization_mode(policy.config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY:
                raise ValueError(f"this '{policy.config.type}' policy normalises images: give a DeviceHalf as `images`")
            images = DeviceHalf(None, policy.config)
        self.policy = policy
        self.images = images

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """Compute the mean loss of a batch as a 0-d float32 tensor on the device.

        Args:
            batch: columns that `Family.check_batch` accepts, on the policy's device.
            noise, time: rows of `Family.draw`; None if the policy draws them itself.
        """
        loss, *extra = self.policy.forward(self.images(batch))
        self.add_metrics(extra[0] if extra else None)
        return loss

    def add_metrics(self, values: Mapping[str, Any] | None) -> None:
        """Add numbers and one-element tensors that a training forward returned besides the loss to `metrics`.

        Names in `util.COMMON_METRICS` and other types are skipped.
        """
        if self.metrics is None or not self.training or not isinstance(values, Mapping):
            return
        for name, value in values.items():
            if name in COMMON_METRICS:
                continue
            if isinstance(value, Tensor) and value.numel() == 1:
                self.metrics.add(name, value.detach().reshape(()))
            elif isinstance(value, (int, float)):
                self.metrics.add(name, value)

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the divisor of a micro-batch's loss, 0-d: the number of valid action steps or tokens.

        If the batch has MEAN_COUNT, the loss is divided by MEAN_COUNT instead: the mean over micro-batches is then the
        mean over all valid action steps or tokens of the step. Implemented by losses with the option `exact_mean`.
        """
        raise NotImplementedError(self.policy.config.type)

    def attentions(self, cameras: int, prompts: Iterable[int]) -> list[tuple[nn.Module, Shape]]:
        """List the attention layers that use `attention`, each with its shape for each prompt length."""
        return []

    def make_units(self) -> list[nn.Module]:
        """List the modules that FSDP2 gathers and frees one at a time: each is called and has trainable parameters."""
        return self._training_modules(UNIT_NAMES)

    def _training_modules(self, names: str) -> list[nn.Module]:
        """List trainable modules whose names match a regular expression, without shared parameters (sharded twice)."""
        paths: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            paths.setdefault(parameter, []).append(name)
        return [
            module
            for name, module in self.named_modules()
            if re.fullmatch(names, name)
            and any(parameter.requires_grad for parameter in module.parameters())
            and all(path.startswith(f"{name}.") for weight in module.parameters() for path in paths[weight])
        ]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Action chunks of one robot's rows.

    Attributes:
        values: normalised actions as the policy learns them, float32 (N, T, A).
        zero, one: normalised 0 and 1 in the robot's action units, float64 (R,) with R <= A.
        names: names of the R entries.
        label: label of the robot; empty if the run has one robot.
    """

    values: np.ndarray
    zero: np.ndarray
    one: np.ndarray
    names: tuple[str, ...]
    label: str = ""

    @property
    def actions(self) -> np.ndarray:
        """Return the chunks in units of the action, float64 (N, T, R)."""
        return self.zero + self.values[..., : len(self.zero)] * (self.one - self.zero)


LossClass = type[PolicyLoss]


@dataclass(frozen=True)
class Family:
    """A policy type, and the types whose configuration class derives from its configuration class.

    Attributes:
        type: LeRobot's name of the type.
        as_lerobot: whether tests/training/test_as_lerobot.py proves that training steps equal lerobot-train's.
        refused: why this library does not train the type; empty if it does.
        chunk_draws: random numbers of `predict_action_chunk`: "noise" if it takes the noise as an argument,
            (N, chunk_size, max_action_dim); "nothing" if it is deterministic; "its own" if it draws them itself.
        tokenizer, tokenizer_option: Hub id of the tokenizer, or option of the policy that names it (`tokenizer_name`).
        in_float32: whether LeRobot trains the type in float32 on GPUs too, unless the option `use_amp` is on.
        reads_texts: whether the forward takes instructions as text: the column `task`, a list of strings.
        sized_by_images: whether the network or its validation depends on the configured image shapes; a pretrained
            policy then keeps these shapes.
        offline: whether LeRobot builds the network without downloads from `without_downloads(config)`, so that names
            and shapes of weights are known before training; asked for types without `from_config`.

        modes: trainable parts (`parts`) by `--train.mode`. If empty, only `full` exists, and trains the parameters that
            the policy's configuration leaves trainable.
        train_options: those of `LOSS_OPTIONS` (--train.*) that the loss supports.
        ignored_options: options of the policy without effect here, each with a description of its replacement.
        row_losses: whether the loss takes explicit draws, `row_weight` and `per_row`, as `flow.FlowLoss` does.
        flow: whether the loss is a `pi05.PI05Loss`, which gives action chunks a probability, trains with the option
            MAX_DELAY on chunks whose first actions are given, and can `write` texts.
        masks_cameras: whether the policy runs without some of its cameras.
        sorts_cameras: whether the policy takes cameras in alphabetical order, whatever their configured order.
        any_inputs: whether the policy plays with any subset of its cameras and pads or cuts a state of any length.
        pads_statistics: whether the processors pad vectors and statistics before they normalise.
        fits_images: whether the policy first fits images into its `image_resolution`, if set, padded with black.
        rebuilds_processors: whether LeRobot makes new processors for a dataset and ignores the saved ones.
        from_config: whether LeRobot needs only the configuration to build the policy, and a folder has all weights. The
            policy can then be built on the meta device, and the family implements the methods that raise here.
    """

    type: str
    as_lerobot: bool = False
    refused: str = ""
    chunk_draws: Literal["noise", "nothing", "its own"] = "its own"
    tokenizer: str | None = None
    tokenizer_option: str | None = None
    reads_texts: bool = False
    in_float32: bool = False
    sized_by_images: bool = False
    offline: bool = False

    loss_class: ClassVar[LossClass] = PolicyLoss
    modes: ClassVar[Mapping[TrainMode, frozenset[str]]] = {}
    train_options: ClassVar[frozenset[str]] = frozenset()
    ignored_options: ClassVar[Mapping[str, str]] = {}
    row_losses: ClassVar[bool] = False
    flow: ClassVar[bool] = False
    masks_cameras: ClassVar[bool] = False
    sorts_cameras: ClassVar[bool] = False
    any_inputs: ClassVar[bool] = False
    pads_statistics: ClassVar[bool] = False
    fits_images: ClassVar[bool] = False
    rebuilds_processors: ClassVar[bool] = False
    from_config: ClassVar[bool] = False

    # ---- training ----------------------------------------------------------------------------------------------------

    def check_run(self, options: Any) -> None:
        """Refuse options of a run of vla.py with which the type cannot be trained."""

    def check_plan(self, config: Any, columns: Collection[str], folder: Path | None, forwards: int) -> list[str]:
        """Return notes for the plan of a run. Raise ValueError for a policy that cannot be trained or used as planned.

        Args:
            config: configuration with the run's features.
            columns: features of the run's datasets, by the policy's names.
            folder: folder of the policy that the run starts from; None for random weights.
            forwards: number of micro-batches of a worker in the whole run.
        """
        return []

    def freezes(self, config: Any, training: Collection[str]) -> dict[str, bool]:
        """Return the policy's own freezing options as they describe a run in which the parts in `training` train."""
        return {}

    def parts(self, policy: PreTrainedPolicy) -> Mapping[str, str]:
        """Return the part of each parameter by the parameter's name; UNUSED for parameters without gradients."""
        return {}

    def make_loss(self, policy: PreTrainedPolicy, **options: Any) -> PolicyLoss:
        """Make the loss of a policy whose `requires_grad` flags are set, with options of `flow.FlowLoss`."""
        return self.loss_class(policy, **options)

    def training_state(self) -> dict[str, Tensor]:
        """Return tensors that the loss adds to checkpoints, but not to exports, by name. Resuming writes to them."""
        return {}

    def prepared(
        self,
        prepare: Callable[[Columns], Columns],
        config: PreTrainedConfig,
        tokenizer_step: Any,
        without_actions: Sequence[int] = (),
    ) -> Callable[[Columns], Columns]:
        """Return `prepare`, extended by the columns that the loss needs besides the processors' output.

        Args:
            tokenizer_step: step of the processors; None if they make no tokens.
            without_actions: `dataset_index` of datasets whose rows have no actions.
        """
        return prepare

    def micro_batch(self, columns: Columns) -> Columns:
        """Return a micro-batch's columns, extended on the host in the training worker by what the loss needs."""
        return columns

    def fit_to_rows(self, chunks: Callable[[], Sequence[Chunks]], folder: Path | None) -> Family:
        """Return the family fitted to a run's rows, and print how it encodes them. Called on the driver at each start.

        Args:
            chunks: function that reads a fixed sample of the run's action chunks, by robot.
            folder: folder with the fitted state that checkpoints were trained with (`save_fitted`), None without one.
        """
        return self

    def save_fitted(self, folder: Path) -> None:
        """Write state from `fit_to_rows` into the folder of a run, or of an exported policy for later runs from it."""

    def draw(self, config: PreTrainedConfig, rows: int, seed: int, step: int, device: torch.device | str) -> Draws:
        """Draw noise and time of a step, (rows, ...), by (seed, step, rows); None if the policy draws them itself."""
        return None, None

    def check_batch(self, batch: Mapping[str, Tensor], config: PreTrainedConfig) -> None:
        """Refuse a run's first batch if it has no camera, or its chunks have another length than the policy's."""
        deltas = config.action_delta_indices
        shape = (len(batch[ACTION]), *([] if deltas is None else [len(deltas)]))
        if (actual := tuple(batch[ACTION].shape[:-1])) != shape:
            raise ValueError(f"a chunk of actions has the shape {actual} before its dimensions, expected {shape}")
        if config.image_features and not batch.keys() & config.image_features.keys():
            raise ValueError(
                f"the batch has none of the policy's cameras {list(config.image_features)}: {sorted(batch)}"
            )

    def prompt_lengths(self, config: PreTrainedConfig, cameras: int) -> tuple[int, ...]:
        """Return the lengths to which prompts of a batch may be cut, ascending; empty if prompts are never cut."""
        # Every length is allowed if the policy pads to the longest prompt of a batch: `Prepare` pads to a fixed length.
        longest = "longest" in (getattr(config, name, None) for name in ("pad_language_to", "tokenizer_padding"))
        return tuple(range(1, getattr(config, "tokenizer_max_length", 0) + 1)) if longest else ()

    # ---- prediction --------------------------------------------------------------------------------------------------

    def cannot_predict(self, config: PreTrainedConfig) -> str:
        """Explain, naming the option, why the configured policy cannot predict; return "" if it can."""
        return ""

    def remembers(self, config: PreTrainedConfig) -> str:
        """Describe, naming the option, the past inputs of the policy's actions; return "" if they have none."""
        steps = getattr(config, "n_obs_steps", 1)
        return f"with n_obs_steps={steps} looks at past observations too" if steps != 1 else ""

    def predict_chunk(self, policy: PreTrainedPolicy, observation: dict[str, Any], **conditions: Any) -> Tensor:
        """Predict normalised actions (N, T, A) from the present on, by LeRobot's own code.

        Args:
            observation: N preprocessed rows, (N, ...), or (N, n_obs_steps, ...) for policies with observation windows.
            conditions: further arguments of `predict_action_chunk`.
        """
        config, policy.config = policy.config, copy.copy(policy.config)
        # LeRobot's MolmoAct2 cuts chunks to n_action_steps, and its PI0-FAST decodes them as if they were so short.
        vars(policy.config)["n_action_steps"] = len(config.action_delta_indices or [0])
        try:
            return policy.predict_action_chunk(observation, **conditions)
        finally:
            policy.config = config

    def env_processors(self, config: PreTrainedConfig, env: Any, later_steps: Collection[str] = ()) -> tuple[Any, Any]:
        """Return the observation and action processors between an environment and the policy's own processors.

        Args:
            later_steps: registered names of steps that run on observations afterwards and must not run twice.
        """
        return env.get_env_processors()

    def env_features(
        self, config: PreTrainedConfig, env: Any, features: dict[str, PolicyFeature]
    ) -> dict[str, PolicyFeature]:
        """Return an environment's features after `env_processors`, from its own `features`."""
        return features

    # ---- features, processors and files ------------------------------------------------------------------------------

    def keeps_size(self, config: Any) -> bool:
        """Return whether the network neither resizes nor pads images, so that all must have the configured sizes."""
        return False

    def tokenizer_name(self, config: PreTrainedConfig) -> str | None:
        """Return the Hub id of the tokenizer in processors that LeRobot makes anew; None for derived types."""
        if config.type != self.type:
            return None
        return getattr(config, self.tokenizer_option) if self.tokenizer_option else self.tokenizer

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the weights of a pretrained folder to the keys of the policy's state dict."""
        return weights

    # ---- with from_config --------------------------------------------------------------------------------------------

    def without_downloads(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Change the configuration in place so that LeRobot builds the policy without downloading a backbone."""
        if getattr(config, "pretrained_backbone_weights", None) is not None:
            config.pretrained_backbone_weights = None
        return config

    def with_cameras(self, config: PreTrainedConfig, cameras: int, prompt: int | None = None) -> PreTrainedConfig:
        """Copy the configuration for so many cameras and, unless None, language tokens; never recompute or compile."""
        raise NotImplementedError(self.type)

    def empty_inputs(
        self, config: PreTrainedConfig, rows: int, draws: int, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return uninitialised inputs of the loss: a batch of B rows, and noise and time of B*K draws."""
        raise NotImplementedError(self.type)

    def tokens(self, config: PreTrainedConfig, cameras: int, draws: int = 1, prompt: int | None = None) -> int:
        """Count the token positions of a row: images, `prompt` language tokens with padding, and every draw."""
        raise NotImplementedError(self.type)


def parts_by_prefix(policy: PreTrainedPolicy, prefixes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the part of each parameter by its name, from the first pair (prefix, part) whose prefix matches."""
    parts = {}
    for name, _ in policy.named_parameters():
        part = next((part for prefix, part in prefixes if name.startswith(prefix)), None)
        if part is None:
            raise ValueError(f"parameter {name!r} of a '{policy.name}' is not known here: LeRobot 0.6.1 is supported")
        parts[name] = part
    return parts
