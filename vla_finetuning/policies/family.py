"""What this project knows about a policy type beyond LeRobot's interface: a family.

`Family` itself is the plain one: LeRobot's own `forward` computes the loss, LeRobot's own code predicts. A family that
knows more overrides what is here, in a file of families/ that lists it in `FAMILIES`. Nothing outside
`policies/` names a policy: callers ask `registry.family_of(config)`.

Legend: B batch, K draws of noise and time per row, T chunk, A action, L language tokens.
"""

from __future__ import annotations

import math
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

# The part of parameters that no loss ever reaches; see `Family.parts`.
UNUSED = "unused in training"
# Options of `--train.*` that a family must know how to compute (`Family.train_options`).
TRAIN_OPTIONS = (
    *("mask_padding", "exact_mean", "noise_draws", "activation_checkpointing", "compile", "feature_cache"),
    "knowledge_insulation",
)
Columns = dict[str, np.ndarray]
# The option `--policy.rtc_training_max_delay` of LeRobot's main (#4056), and where it is in robot.json: LeRobot 0.6.1
# refuses a config.json with it.
MAX_DELAY = "rtc_training_max_delay"
# A batch's column, 0-d: what `PolicyLoss.count` is on average over the micro-batches of the whole step.
MEAN_COUNT = "mean_count"
# The embedding of words: a sixth of what trains of PI0.5 in full.
WORDS = r".*\.(language_model|text_model)\.embed_tokens"
# Of policies made of a PaliGemma, what they call as modules: the MLPs, most of a layer, and the vision tower's layers.
# LeRobot computes language models without calling their layers, whose hooks would never fire (0.6.1, #3767).
UNIT = (
    r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.mlp"
    r"|.*\.vision_model\.encoder\.layers\.\d+"
    rf"|{WORDS}"
)


class PolicyLoss(nn.Module):
    """A policy's training loss as a module: what DDP wraps. Parameters are named `policy.` + LeRobot's names.

    This one is LeRobot's own: the first result of the policy's `forward`, which draws for itself. Runs in the training
    worker.

    Args:
        policy: in train mode or not, with what trains already chosen.
        images: makes floats of uint8 cameras; needed for policies that normalise images.
    Attributes:
        attention: the kernel of what `attentions` lists; may be changed to what `attention.choose_kernel` says.
        reaches_all: every parameter that trains gets a gradient in every step. LeRobot's own losses leave some out (of
            PI0 5 tensors): DDP looks for them in every step, as `lerobot-train` has it do.
        metrics: gets what the forwards of training steps compute besides the loss; None: not wanted.
        robots: names of a mixture's robots whose losses it is to get.
    """

    attention: Kernel = "eager"
    reaches_all: bool = False
    metrics: DeviceMetrics | None = None
    robots: tuple[str, ...] = ()

    def __init__(self, policy: PreTrainedPolicy, *, images: DeviceHalf | None = None):
        super().__init__()
        if images is None:
            if normalization_mode(policy.config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY:
                raise ValueError(f"this '{policy.config.type}' policy normalises images: give a DeviceHalf as `images`")
            images = DeviceHalf(None, policy.config)
        self.policy = policy
        self.images = images

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """Compute the mean loss of a batch as a 0-d float32 tensor on the device.

        Args:
            batch: as `Family.check_batch` describes it, on the device of the policy.
            noise, time: rows of `Family.draw`; None where the policy draws for itself.
        """
        loss, *rest = self.policy.forward(self.images(batch))
        self.note(rest[0] if rest else None)
        return loss

    def note(self, values: Mapping[str, Any] | None) -> None:
        """Add what a forward of a training step computed besides the loss to `metrics`, under LeRobot's names.

        Args:
            values: numbers, and tensors of one element; others, and names of `util.COMMON_METRICS`, are left out.
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
        """Return what the loss of a micro-batch is divided by, 0-d: valid action steps or tokens.

        A batch with MEAN_COUNT is divided by that instead, so that the mean of a step's losses is the mean over all its
        valid steps or tokens. For losses with the option `exact_mean`.
        """
        raise NotImplementedError(self.policy.config.type)

    def features(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the vision tower makes of the images of a batch (floats, as `images` makes them), by camera.

        (N, tokens, width), N being the camera's own number of rows. `forward` takes a camera's features in place of its
        images, and its result is then that of the images. For losses with the option `feature_cache`.
        """
        raise NotImplementedError(self.policy.config.type)

    def attentions(self, cameras: int, prompts: Iterable[int]) -> list[tuple[nn.Module, Shape]]:
        """The attentions that `attention` computes in steps with so many cameras and such prompts: layer and shape."""
        return []

    def make_units(self) -> list[nn.Module]:
        """The modules that FSDP2 gathers and gives up one at a time: each is called, and something in it trains."""
        return self._training_modules(UNIT)

    def _training_modules(self, names: str) -> list[nn.Module]:
        """List modules by a regular expression that train, and share no parameter, which FSDP2 would shard twice."""
        places: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            places.setdefault(parameter, []).append(name)
        return [
            module
            for name, module in self.named_modules()
            if re.fullmatch(names, name)
            and any(parameter.requires_grad for parameter in module.parameters())
            and all(place.startswith(f"{name}.") for weight in module.parameters() for place in places[weight])
        ]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Action chunks of a robot's rows.

    Attributes:
        values: as the policy learns them, normalised, float32 (N, T, A).
        zero, one: what 0 and 1 of them are in the units of the robot's action, float64 (R,); R <= A are its entries.
        names: of its entries. label: the robot's, empty for the only one.
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
    """A policy type, and types whose configuration derives from its configuration.

    Attributes:
        type: LeRobot's name of it.
        as_lerobot: tests/training/test_as_lerobot.py shows that steps here are lerobot-train's.
        refused: why it is not trained here, in words; empty where it is.
        chunk_draws: what its `predict_action_chunk` does about random numbers: takes the noise that it starts from,
            (N, chunk_size, max_action_dim); draws nothing; or draws for itself.
        tokenizer, or tokenizer_option, the policy's option that names it: see `tokenizer_name`.
        in_float32: LeRobot trains it in float32 on GPUs too, unless its `use_amp` is on.
        reads_texts: in the training worker it takes instructions as text: `task`, a list of strings.
        sized_by_images: its network, or what it checks of itself, follows from the image shapes in its configuration,
            so that a pretrained one keeps them.
        offline: LeRobot builds its network from its configuration and `without_downloads`, so that names and shapes of
            weights are known before training; so it is of all that are built `from_config`.

        own_loss: what `make_loss` makes where LeRobot's `forward` computes the loss.
        modes: the parts (`parts`) that train, by `--train.mode`; where empty, only `full` is known, and trains what the
            policy's own configuration leaves trainable.
        train_options: those of TRAIN_OPTIONS that its loss can compute.
        without_effect: options of the policy that change nothing here, and what does.
        row_losses: its loss takes explicit draws, `row_weight` and `per_row`, as `flow.FlowLoss` does.
        flow: its loss is a `flow.FlowLoss`, so that action chunks have a probability.
        delays: it can be trained on chunks whose first actions are given (`flow.FlowLoss`), with the option MAX_DELAY.
        writes: its loss can `write` texts, as `pi05.PI05Loss`.
        masks_cameras: it can do without some of its cameras.
        sorts_cameras: it takes cameras in the order of their names, whatever their order in its configuration.
        takes_any: it plays with any of its cameras, and masks the others, and pads or cuts a state of any length.
        pads_statistics: its processors pad vectors before they normalise them, and statistics too.
        image_options: options of the policy that say how images are made ready for its vision tower; with the option
            `feature_cache`.
        fits_images: before all else it fits images into its `image_resolution`, if it has one, centred, black around.
        own_processors: with a dataset's statistics LeRobot makes its processors anew, whatever a folder holds.
        no_adapters: why adapters (--peft.*) do not train, in words; empty where they do.
        from_config: LeRobot builds it from its configuration alone, and a folder has all of its weights: it is built
            without storage, to be counted, planned and compared with files, by the methods below that raise here.
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

    own_loss: ClassVar[LossClass] = PolicyLoss
    modes: ClassVar[Mapping[TrainMode, frozenset[str]]] = {}
    train_options: ClassVar[frozenset[str]] = frozenset()
    without_effect: ClassVar[Mapping[str, str]] = {}
    row_losses: ClassVar[bool] = False
    flow: ClassVar[bool] = False
    delays: ClassVar[bool] = False
    writes: ClassVar[bool] = False
    masks_cameras: ClassVar[bool] = False
    sorts_cameras: ClassVar[bool] = False
    takes_any: ClassVar[bool] = False
    pads_statistics: ClassVar[bool] = False
    image_options: ClassVar[tuple[str, ...]] = ()
    fits_images: ClassVar[bool] = False
    no_adapters: ClassVar[str] = ""
    own_processors: ClassVar[bool] = False
    from_config: ClassVar[bool] = False

    # ---- training ----------------------------------------------------------------------------------------------------

    def freezes(self, config: Any, training: Collection[str]) -> dict[str, bool]:
        """Return what options of the policy that freeze parts of it would say of a run.

        Args:
            training: parts (`parts`) of which something trains.
        """
        return {}

    def vision(self, policy: PreTrainedPolicy) -> list[nn.Module]:
        """The modules that `PolicyLoss.features` computes with; with the option `feature_cache`."""
        raise NotImplementedError(self.type)

    def feature_shapes(self, config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
        """Tokens and width of an image's features, by camera; with the option `feature_cache`."""
        raise NotImplementedError(self.type)

    def feature_bytes(self, config: PreTrainedConfig, cameras: Iterable[str], bf16: bool) -> dict[str, int]:
        """Return what the features of one frame of each of these cameras take, computed in bfloat16 or float32."""
        shapes = self.feature_shapes(config)
        return {key: math.prod(shapes[key]) * (2 if bf16 else 4) for key in cameras}

    def parts(self, policy: PreTrainedPolicy) -> Mapping[str, str]:
        """The part that each parameter belongs to, by the parameter's name; UNUSED for what no loss ever reaches."""
        return {}

    def make_loss(
        self,
        policy: PreTrainedPolicy,
        *,
        images: DeviceHalf | None = None,
        attention: Kernel = "eager",
        mask_padding: bool = False,
        checkpointing: bool = False,
        compile: Any = None,
    ) -> PolicyLoss:
        """Make the loss of a policy whose trainable parameters are chosen.

        Args:
            attention: asked of those attentions whose kernel can be chosen. The others as for `pi05.PI05Loss`.
        Raises:
            ValueError: the loss cannot compute one of them.
        """
        options = {"mask_padding": mask_padding, "checkpointing": checkpointing, "compile": compile is not None}
        if unknown := [name for name, enabled in options.items() if enabled]:
            raise ValueError(f"LeRobot's own loss of a '{policy.config.type}' has no {unknown[0]}: leave it out")
        return self.own_loss(policy, images=images)

    def training_state(self) -> dict[str, Tensor]:
        """Return what its loss adds to the policy's state, by name, to be read into: resumed, and not exported."""
        return {}

    def prepared(
        self, prepare: Callable[[Columns], Columns], config: PreTrainedConfig, tokenizer_step: Any
    ) -> Callable[[Columns], Columns]:
        """Return what prepares rows, of what its processors do: with the columns that its loss takes besides.

        Args:
            tokenizer_step: of its processors, which has `input_tokenizer`; None where they make no tokens.
        """
        return prepare

    def fit_to_rows(self, chunks: Callable[[], Sequence[Chunks]], folder: Path) -> Family:
        """Return the family with what it learns of a run's rows before training. Called on the driver, at each start.

        Args:
            chunks: reads some of the run's action chunks, of each robot; always the same ones.
            folder: of the run, for what was learned.
        """
        return self

    def describe_chunks(self, chunks: Callable[[], Sequence[Chunks]]) -> list[str]:
        """Return lines for the plan about what it makes of action chunks."""
        return []

    def save_fitted(self, folder: Path) -> None:
        """Write what it has learned of rows into the folder of an exported policy, in which later runs look for it."""

    def draw(self, config: PreTrainedConfig, rows: int, seed: int, step: int, device: torch.device | str) -> Draws:
        """Draw what the loss needs in a step of so many rows, a function of (seed, step, rows); None: it draws itself.

        Returns:
            noise and time, their first dimension being the rows.
        """
        return None, None

    def check_batch(self, batch: Mapping[str, Tensor], config: PreTrainedConfig) -> None:
        """Check the shapes of the first batch of a run as it is about to enter the loss.

        Raises:
            ValueError: there is no camera, or a chunk has another number of actions.
        """
        deltas = config.action_delta_indices
        shape = (len(batch[ACTION]), *([] if deltas is None else [len(deltas)]))
        if (found := tuple(batch[ACTION].shape[:-1])) != shape:
            raise ValueError(f"a chunk of actions is {found}, expected {shape}, and its dimensions")
        if config.image_features and not batch.keys() & config.image_features.keys():
            raise ValueError(
                f"the batch has none of the policy's cameras {list(config.image_features)}: {sorted(batch)}"
            )

    def prompt_lengths(self, config: PreTrainedConfig, cameras: int) -> tuple[int, ...]:
        """The lengths that prompts are cut to in batches with so many cameras, ascending; none: they stay as they are.

        All lengths where the policy has prompts padded to the longest of a batch, as `Prepare` pads to one.
        """
        longest = "longest" in (getattr(config, name, None) for name in ("pad_language_to", "tokenizer_padding"))
        return tuple(range(1, getattr(config, "tokenizer_max_length", 0) + 1)) if longest else ()

    # ---- prediction --------------------------------------------------------------------------------------------------

    def cannot_predict(self, config: PreTrainedConfig) -> str:
        """Why it predicts nothing as it is configured, in words, with the option; empty where it does."""
        return ""

    def remembers(self, config: PreTrainedConfig) -> str:
        """Return what its actions are made of besides the present observation, in words, with the option."""
        steps = getattr(config, "n_obs_steps", 1)
        return f"with n_obs_steps={steps} looks at past observations too" if steps != 1 else ""

    def predict_chunk(self, policy: PreTrainedPolicy, observation: dict[str, Any]) -> Tensor:
        """The actions from the present on by LeRobot's own code, (N, T, A), normalised.

        Args:
            observation: N rows as the preprocessor makes them, (N, ...), or (N, n_obs_steps, ...) where the policy has
                windows of observations.
        """
        return policy.predict_action_chunk(observation)

    def env_processors(self, config: PreTrainedConfig, env: Any, later_steps: Collection[str] = ()) -> tuple[Any, Any]:
        """Return what stands between an environment and the policy's own processors: of observations, and of actions.

        Args:
            env: LeRobot's configuration of it.
            later_steps: registered names of steps that observations pass afterwards: they pass none of them twice.
        """
        return env.get_env_processors()

    def env_features(
        self, config: PreTrainedConfig, env: Any, features: dict[str, PolicyFeature]
    ) -> dict[str, PolicyFeature]:
        """Return what `env_processors` show, and the actions that they take, by those of the environment itself."""
        return features

    # ---- processors and files ----------------------------------------------------------------------------------------

    def tokenizer_name(self, config: PreTrainedConfig) -> str | None:
        """The tokenizer of the processors that LeRobot makes anew, on the Hub; a derived type makes its own."""
        if config.type != self.type:
            return None
        return getattr(config, self.tokenizer_option) if self.tokenizer_option else self.tokenizer

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a pretrained folder under the keys of the policy's state."""
        return weights

    # ---- with from_config --------------------------------------------------------------------------------------------

    def without_downloads(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The configuration, changed in place so that LeRobot builds the policy without a backbone's weights."""
        if getattr(config, "pretrained_backbone_weights", None) is not None:
            config.pretrained_backbone_weights = None
        return config

    def with_cameras(self, config: PreTrainedConfig, cameras: int, prompt: int | None = None) -> PreTrainedConfig:
        """A copy of the configuration for so many cameras, with no options that recompute or compile.

        `prompt`: and for so many language tokens; as many as before when absent.
        """
        raise NotImplementedError(self.type)

    def empty_inputs(
        self, config: PreTrainedConfig, rows: int, draws: int, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return uninitialised inputs of the loss: a batch of B rows, and noise and time of B*K draws."""
        raise NotImplementedError(self.type)

    def tokens(self, config: PreTrainedConfig, cameras: int, draws: int = 1, prompt: int | None = None) -> int:
        """Positions that are computed for a row: of images, of language with its padding, of each draw.

        `prompt`: language tokens, padding included; as many as the tokenizer gives when absent.
        """
        raise NotImplementedError(self.type)


def parts_by_prefix(policy: PreTrainedPolicy, prefixes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the part of each parameter by its name, by (prefix, part): the first prefix that fits decides."""
    parts = {}
    for name, _ in policy.named_parameters():
        part = next((part for prefix, part in prefixes if name.startswith(prefix)), None)
        if part is None:
            raise ValueError(f"parameter {name!r} is in no known part of a '{policy.name}'; is this LeRobot 0.6.1?")
        parts[name] = part
    return parts
