"""LeRobot's processors for a training run, split between Ray Data's CPUs and the training worker.

`pipelines` makes LeRobot's own pipelines. Of the preprocessor, `Prepare` runs everything but images in Ray Data tasks
(normalise, discretise, tokenise; strings end there, but for policies that read them), and `DeviceHalf` makes floats of
the uint8 images in the training worker. Together they give what the whole pipeline gives.

Legend: N rows of a block, B batch, T chunk, A action, S state, L tokens, H W C image.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from lerobot.processor import (
    NormalizerProcessorStep,
    PolicyProcessorPipeline,
    ProcessorStep,
    RenameObservationsProcessorStep,
    TokenizerProcessorStep,
)
from lerobot.utils.constants import ACTION, IMAGENET_STATS, OBS_IMAGES
from lerobot.utils.feature_utils import dataset_to_policy_features
from torch import Tensor, nn

from vla_finetuning.columns import ACTION_DIMS, IS_PRESENT, ROBOT, ROW_COLUMNS, STREAM_POSITION, TASK_BYTES
from vla_finetuning.policies.texts import TASK, as_bytes, with_texts

Stats = Mapping[str, Mapping[str, Any]]

# PI0.5's `empty_cameras` are inputs that no dataset has.
EMPTY_CAMERA = f"{OBS_IMAGES}.empty_camera_"
# Which row of which dataset, for messages.
PLACE = ("dataset_index", "episode_index", "frame_index", "index")
# Beside LeRobot's own files: the tokenizer that its processor would otherwise fetch from the Hub by name.
TOKENIZER_FOLDER = "tokenizer"

NORMALIZATION_STATS = {
    NormalizationMode.IDENTITY: frozenset[str](),
    NormalizationMode.MEAN_STD: frozenset({"mean", "std"}),
    NormalizationMode.MIN_MAX: frozenset({"min", "max"}),
    NormalizationMode.QUANTILES: frozenset({"q01", "q99"}),
    NormalizationMode.QUANTILE10: frozenset({"q10", "q90"}),
}


# XVLA's own step for images, and one before it that leaves those alone that are in [0, 1].
IMAGENET_STEP = "xvla_imagenet_normalize"
# A language model's own processor of images with texts, which pads to the longest of its batch: EO1's and MolmoAct2's.
BATCH_STEPS = frozenset({"eo1_conversation_template_processor", "eo1_qwen_processor", "molmoact2_pack_inputs"})


class DatasetFeature(Protocol):
    """A feature as a dataset's info.json describes it; images (H, W, 3), or (3, H, W) if `names` says so."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def names(self) -> Any: ...


def policy_feature(key: str, feature: DatasetFeature) -> PolicyFeature | None:
    """LeRobot's view of a dataset feature: its type, and its shape channel-first; None if it has none.

    Raises:
        ValueError: a camera that is not RGB.
    """
    shape, names = tuple(feature.shape), feature.names
    if feature.dtype in ("image", "video"):
        if len(shape) == 3 and names and str(list(names)[0]).startswith("channel"):
            shape = (*shape[1:], shape[0])
        if len(shape) != 3 or shape[2] != 3:
            raise ValueError(
                f"camera '{key}' has the shape {tuple(feature.shape)}; policies see RGB, (height, width, 3): "
                "leave it out with --dataset.camera_keys"
            )
        names = ["height", "width", "channels"]
    elif feature.dtype in ("string", "language"):
        return None
    description = {"dtype": feature.dtype, "shape": shape, "names": names}
    return dataset_to_policy_features({key: description}).get(key)


def normalization_mode(config: PreTrainedConfig, feature_type: FeatureType) -> NormalizationMode:
    """Return how LeRobot normalises features of a type."""
    return NormalizationMode(config.normalization_mapping.get(feature_type.value, NormalizationMode.IDENTITY))


def required_stats(
    config: PreTrainedConfig, features: Mapping[str, PolicyFeature | DatasetFeature]
) -> dict[str, set[str]]:
    """The statistics LeRobot's normaliser needs for each feature; features it leaves alone are not listed."""
    needed = {}
    for key, feature in features.items():
        typed = feature if isinstance(feature, PolicyFeature) else policy_feature(key, feature)
        if typed is not None and (names := NORMALIZATION_STATS[normalization_mode(config, typed.type)]):
            needed[key] = set(names)
    return needed


def with_imagenet_stats(stats: Stats, camera_keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The statistics with ImageNet's mean and standard deviation of cameras, as LeRobot's `make_dataset` has them."""
    imagenet = {name: np.array(values, dtype=np.float32) for name, values in IMAGENET_STATS.items()}
    return {key: dict(values) for key, values in stats.items()} | {
        key: {**stats.get(key, {}), **imagenet} for key in camera_keys
    }


class Prepare:
    """The preprocessor for blocks of rows, in Ray Data tasks on CPUs: all of it but images.

    LeRobot's own pipeline object runs on the block without its cameras, which pass through under the policy's names.
    It can be pickled, but is not small (PaliGemma's tokenizer is 17 MB): see `training.stream.LazyPickle`.

    Args:
        preprocessor: from `pipelines.make_processors`.
        camera_keys: cameras in the block, by their names in the dataset.
        rename_map: dataset key to policy key.
        config: the policy's configuration.
        trusted: whether code that comes with the policy may run, in the processes that this is unpickled in too.
        texts: whether instructions are handed on, as the pipeline leaves them.
    Raises:
        ValueError: the pipeline does not split into this and `DeviceHalf`, which is tried with a made-up row.
    """

    def __init__(
        self,
        preprocessor: PolicyProcessorPipeline,
        camera_keys: Sequence[str],
        rename_map: Mapping[str, str],
        config: PreTrainedConfig,
        *,
        trusted: bool = False,
        texts: bool = False,
    ):
        self._trusted, self._texts = trusted, texts
        features = {**config.input_features, **config.output_features}
        self._cameras = {key: rename_map.get(key, key) for key in camera_keys}
        self._features = {key for key, feature in features.items() if feature.type is not FeatureType.VISUAL}
        full_pipeline = _with_steps(preprocessor, [_fixed_shape(copy.copy(step)) for step in preprocessor.steps])
        self._pipeline = _with_steps(full_pipeline, [step for step in full_pipeline.steps if not _of_batch(step)])
        self._renamed = _rename_map(self._pipeline)
        self._check_split(full_pipeline, config)
        for step in self._pipeline.steps:
            step._current_transition = None  # what it remembers of the made-up row
            step.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank_prepare, (self._trusted,), self.__dict__

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Prepare a block of frame rows for the policy.

        Args:
            batch: columns of N rows: cameras uint8 (N, H, W, 3), `observation.state`
                float32 (N, S), `action` float32 (N, T, A), `action_is_pad` bool (N, T), `task` (N,)
                strings, and others.
        Returns:
            The same rows, numbers of fixed shape only: cameras, the same memory under the policy's names;
            the policy's other features, normalised, and their `_is_pad`; what the pipeline added
            (`observation.language.tokens` int64 (N, L), `observation.language.attention_mask` bool (N, L)); with
            `texts`, `task_bytes` (`texts.as_bytes`); ROW_COLUMNS, where the block has them; with `is_skipped`, also
            `is_read` bool (N,), its opposite.
        Raises:
            ValueError: a camera is missing or not uint8 (..., H, W, 3); an instruction is not a string; a state or
                action is not finite, where the row counts.
        """
        cameras = {name: _pictures(batch, key) for key, name in self._cameras.items()}
        return cameras | self.without_cameras(batch) | _handed_on(batch)

    def without_cameras(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what LeRobot's pipeline makes of a block but for its cameras; raises as `__call__`."""
        rest = {key: value for key, value in batch.items() if key not in self._cameras}
        rows = len(next(iter(batch.values())))
        # The tokenizer refuses to do nothing, so an empty block borrows a row to learn its columns.
        prepared = self._run(rest if rows else {key: _blank_row(value) for key, value in rest.items()})
        columns = {key: value[:rows] for key, value in prepared.items()}
        self._check_finite(batch, columns)
        return columns

    def _check_finite(self, batch: Mapping[str, np.ndarray], prepared: Mapping[str, np.ndarray]) -> None:
        """NaN in a state becomes an ordinary word of PI0.5's prompt, and in an action the loss of a whole step."""
        for key in self._features & prepared.keys():
            bad = ~np.isfinite(prepared[key]).all(axis=tuple(range(1, prepared[key].ndim)))
            bad &= ~batch.get("is_skipped", np.zeros_like(bad))
            if bad.any():
                place = ", ".join(f"{name} {batch[name][bad.argmax()]}" for name in PLACE if name in batch)
                raise ValueError(
                    f"'{key}' holds NaN or infinity, or what follows it in its window does, at {place}: repair the "
                    "dataset, or leave the episode out with --dataset.episodes"
                )

    def _run(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        data: dict[str, Any] = {}
        for key, value in columns.items():
            if key == "task":
                data[key] = list(value)
                if not all(isinstance(instruction, str) for instruction in value):
                    raise ValueError(f"'task' holds values that are not strings: {data[key][:5]}")
            elif value.dtype.kind in "biuf":
                if value.dtype.kind != "f" and self._renamed.get(key, key) in self._features:
                    # LeRobot's normaliser casts its statistics to what it is given: 0.49 would become 0.
                    value = value.astype(np.float32)
                # Blocks are read-only views of shared memory, which torch cannot express.
                data[key] = torch.from_numpy(value if value.flags.writeable else value.copy())
        processed = self._pipeline(data)
        keys = {key for key in processed if key in self._features or key not in columns}
        keys |= {f"{key}_is_pad" for key in keys}
        arrays = {key: value.numpy() for key, value in processed.items() if key in keys and isinstance(value, Tensor)}
        return arrays | ({TASK_BYTES: as_bytes(processed[TASK])} if self._texts else {})

    def _check_split(self, preprocessor: PolicyProcessorPipeline, config: PreTrainedConfig) -> None:
        """Compare with the whole pipeline on a made-up row: a step that needs images must not go unseen."""
        normalizer = _normalizer(self._pipeline)
        originals = {name: key for key, name in self._renamed.items()}
        rng = np.random.default_rng(0)
        row: dict[str, np.ndarray] = {"task": np.array([""], dtype=object)}
        for key in sorted(self._features):
            # Pretrained policies declare a padded state; its statistics have the dataset's shape.
            stats = normalizer._tensor_stats.get(key, {}) if normalizer else {}
            declared = {**config.input_features, **config.output_features}[key].shape
            shape = next((tuple(value.shape) for name, value in stats.items() if name != "count"), declared)
            deltas = config.action_delta_indices if key == ACTION else config.observation_delta_indices
            row[originals.get(key, key)] = rng.random((1, *_window(deltas), *shape), dtype=np.float32)
        for key in self._cameras:
            row[key] = rng.integers(0, 256, (1, *_window(config.observation_delta_indices), 8, 8, 3), dtype=np.uint8)

        prepared = with_texts({key: torch.from_numpy(value) for key, value in self(row).items()})
        split = DeviceHalf(preprocessor, config)(prepared)
        numbers = {key: torch.from_numpy(value) for key, value in row.items() if key != "task"}
        images = {key: to_float(numbers[key]) for key in self._cameras}
        expected = preprocessor({**numbers, **images, "task": [""]})
        for key, value in split.items():
            same = torch.equal if isinstance(value, Tensor) else operator.eq
            if key not in expected or not same(value, expected[key]):
                names = [getattr(step, "_registry_name", type(step).__name__) for step in preprocessor.steps]
                raise ValueError(
                    f"the preprocessor makes something else of '{key}' when images are processed apart; one of its "
                    f"steps {names} cannot be split"
                )


def _window(deltas: Sequence[int] | None) -> tuple[int, ...]:
    return () if deltas is None else (len(deltas),)


@dataclass(frozen=True)
class PreparedRobot:
    """How blocks of a mixture are prepared for one of its robots.

    Attributes:
        prepare: with the robot's own statistics, for blocks whose features have the policy's names.
        cameras: those that it has, by the policy's names.
        widths: entries of its vectors in a block, by their names; zeros follow them.
        opening: what its instructions begin with.
    """

    prepare: Prepare
    cameras: frozenset[str]
    widths: Mapping[str, int]
    opening: str = ""


class PrepareRobots:
    """`Prepare` for blocks of a run's rows: each row by its own robot's pipeline, at its own width.

    Rows of a run's only robot get no columns besides those of its pipeline.

    Args:
        robots: in any order. robot_of: the robot of each dataset, by its number in `robots`.
        cameras: all cameras in a block, by the policy's names.
        own_widths: whether each row's loss is over the dimensions that its robot has.
    """

    def __init__(
        self, robots: Sequence[PreparedRobot], robot_of: Sequence[int], cameras: Sequence[str], own_widths: bool
    ):
        self._robots, self._robot_of, self._cameras = tuple(robots), np.asarray(robot_of), tuple(cameras)
        self._own_widths = own_widths

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Prepare a block of frame rows.

        Args:
            batch: as for `Prepare`; vectors of all rows are as long as the longest.
        Returns:
            As `Prepare`; of several robots, with vectors of the same length, zeros after a robot's own. These also have
            `CAMERA_is_present` bool (N,) of each camera, `action_dims` bool (N, A), the dimensions of a row's robot,
            and its number `robot_index` int64 (N,).
        """
        if len(self._robots) == 1:
            return self._robots[0].prepare(batch)
        robot = self._robot_of[batch["dataset_index"]]
        columns = {key: _pictures(batch, key) for key in self._cameras}
        rest = {key: value for key, value in batch.items() if key not in columns}
        prepared: dict[str, np.ndarray] = {}
        for number in np.unique(robot) if len(robot) else (0,):
            layout, rows = self._robots[number], np.flatnonzero(robot == number)
            block = {key: value[rows] for key, value in rest.items()}
            block |= {key: block[key][..., :width] for key, width in layout.widths.items()}
            if layout.opening:
                block["task"] = np.array([f"{layout.opening}{text}" for text in block["task"]], object)
            for key, value in layout.prepare.without_cameras(block).items():
                width = batch[key].shape[-1] if key in layout.widths else value.shape[-1]
                shape = (*value.shape[1:-1], width) if value.ndim > 1 else ()
                out = prepared.setdefault(key, np.zeros((len(robot), *shape), value.dtype))
                if key in layout.widths:
                    out = out[..., : value.shape[-1]]
                out[rows] = value
        columns |= {**prepared, ROBOT: robot.astype(np.int64)}
        for key in self._cameras:
            columns[key + IS_PRESENT] = np.array([key in layout.cameras for layout in self._robots])[robot]
        if self._own_widths:
            widths = np.array([layout.widths[ACTION] for layout in self._robots])[robot]
            columns[ACTION_DIMS] = np.arange(batch[ACTION].shape[-1]) < widths[:, None]
        return columns | _handed_on(batch)


def _handed_on(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what no pipeline makes: which row it is, and whether it was read."""
    read = {"is_read": ~batch["is_skipped"]} if "is_skipped" in batch else {}
    return read | {key: batch[key] for key in ROW_COLUMNS if key in batch}


def _pictures(batch: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """A camera of a block. Raises ValueError unless it is uint8 (N, ..., H, W, 3)."""
    if key not in batch:
        raise ValueError(f"the block has no camera '{key}'; its columns are {sorted(batch)}")
    images = batch[key]
    if images.dtype != np.uint8 or images.ndim < 4 or images.shape[-1] != 3:
        raise ValueError(f"camera '{key}' is {images.dtype} {images.shape}, expected uint8 (N, H, W, 3)")
    return images


def _fixed_shape(step: ProcessorStep) -> ProcessorStep:
    """Have a tokenizer pad to its longest prompt, not to a block's: a batch's rows come from several blocks."""
    if isinstance(step, TokenizerProcessorStep) and step.padding == "longest":
        step.padding = "max_length"
    return step


def _blank_prepare(trusted: bool) -> Prepare:
    """Called before the rest of a pickle is opened, which may hold objects of classes that came with a policy."""
    if trusted:
        from transformers.dynamic_module_utils import init_hf_modules

        init_hf_modules()  # where transformers keeps such code becomes a place to import from
    return Prepare.__new__(Prepare)


def _blank_row(column: np.ndarray) -> np.ndarray:
    fill: Any = "" if column.dtype.kind in "OU" else 0
    return np.full((1, *column.shape[1:]), fill, dtype=column.dtype)


def _with_steps(pipeline: PolicyProcessorPipeline, steps: list[ProcessorStep]) -> PolicyProcessorPipeline:
    changed = copy.copy(pipeline)
    changed.steps = steps
    return changed


def _of_batch(step: ProcessorStep) -> bool:
    return getattr(step, "_registry_name", None) in BATCH_STEPS


def _normalizer(preprocessor: PolicyProcessorPipeline) -> NormalizerProcessorStep | None:
    return next((step for step in preprocessor.steps if isinstance(step, NormalizerProcessorStep)), None)


def _rename_map(preprocessor: PolicyProcessorPipeline) -> dict[str, str]:
    return next((s.rename_map for s in preprocessor.steps if isinstance(s, RenameObservationsProcessorStep)), {})


class DeviceHalf(nn.Module):
    """The preprocessor's images, on the training worker's device: uint8 to what LeRobot's policies expect.

    The values are those of `LeRobotDataset` and the normaliser, to the bit, on CPU and CUDA. No host sync, but for
    policies whose images go through a language model's own processor (BATCH_STEPS).

    Args:
        preprocessor: from `pipelines.make_processors`; None if the policy does not normalise images.
        config: the policy's configuration.
        augment: what becomes of a camera in training, while it is in [0, 1]: (its key, images, places in the stream)
            to images.
    """

    divisor: Tensor

    def __init__(
        self,
        preprocessor: PolicyProcessorPipeline | None,
        config: PreTrainedConfig,
        augment: Callable[[str, Tensor, Tensor], Tensor] | None = None,
    ):
        super().__init__()
        self._augment = augment
        # A tensor: dividing by a number, CUDA multiplies by its reciprocal, which is one bit off at times.
        self.register_buffer("divisor", torch.tensor(255.0), persistent=False)
        self._keys = tuple(config.image_features)
        self._scales: dict[str, tuple[NormalizationMode, str, str]] = {}
        self._of_batch: PolicyProcessorPipeline | None = None
        if preprocessor is None:
            return
        if steps := [step for step in preprocessor.steps if _of_batch(step)]:
            self._of_batch = _with_steps(preprocessor, steps)
        if any(getattr(step, "_registry_name", None) == IMAGENET_STEP for step in preprocessor.steps):
            for number, key in enumerate(self._keys):
                mean, std = (torch.tensor(IMAGENET_STATS[name]).reshape(3, 1, 1) for name in ("mean", "std"))
                self._register(number, key, NormalizationMode.MEAN_STD, mean, std)
        normalizer = _normalizer(preprocessor)
        if normalizer is None:
            return
        mode = normalizer.norm_map.get(FeatureType.VISUAL, NormalizationMode.IDENTITY)
        chosen = normalizer.normalize_observation_keys
        for number, key in enumerate(self._keys):
            stats = normalizer._tensor_stats.get(key, {})
            if mode is NormalizationMode.IDENTITY or not stats or (chosen is not None and key not in chosen):
                continue
            if mode is NormalizationMode.MEAN_STD:
                shift, scale = stats["mean"], stats["std"] + normalizer.eps
            else:
                low, high = sorted(NORMALIZATION_STATS[mode], key=("min", "q01", "q10", "max", "q99", "q90").index)
                shift, scale = stats[low], stats[high] - stats[low]
                scale = torch.where(scale == 0, torch.tensor(normalizer.eps, dtype=scale.dtype), scale)
            self._register(number, key, mode, shift, scale)

    def _register(self, number: int, key: str, mode: NormalizationMode, shift: Tensor, scale: Tensor) -> None:
        self.register_buffer(f"shift_{number}", shift.clone(), persistent=False)
        self.register_buffer(f"scale_{number}", scale.clone(), persistent=False)
        self._scales[key] = (mode, f"shift_{number}", f"scale_{number}")

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace cameras uint8 (B, H, W, 3) by float32 (B, 3, H, W); the rest stays.

        In [0, 1], or as the policy normalises images; in train mode augmented before, where that was asked for. With a
        window of observations, (B, T, H, W, 3). Cameras that are float already stay as they are.
        """
        converted = dict(batch)
        places = converted.pop(STREAM_POSITION, None)
        for key in self._keys:
            if key not in batch or batch[key].dtype != torch.uint8:
                continue
            image = to_float(batch[key], self.divisor)
            if self._augment is not None and self.training:
                assert places is not None
                image = self._augment(key, image, places)
            if key in self._scales:
                mode, shift, scale = self._scales[key]
                image = image - getattr(self, shift)
                if mode is NormalizationMode.MEAN_STD:
                    image = image / getattr(self, scale)
                else:
                    image = 2 * image / getattr(self, scale) - 1
            converted[key] = image
        return converted if self._of_batch is None else self._processed(self._of_batch, converted)

    def _processed(self, pipeline: PolicyProcessorPipeline, batch: dict[str, Any]) -> dict[str, Any]:
        """Run the steps of a language model's own processor, which works on the host: waits for the device."""
        device = self.divisor.device
        on_host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
        changed = {key: value for key, value in pipeline(on_host).items() if value is not on_host.get(key)}
        return batch | {key: value.to(device) if isinstance(value, Tensor) else value for key, value in changed.items()}


def to_float(image: Tensor, divisor: Tensor | float = 255.0) -> Tensor:
    """Convert uint8 (..., H, W, 3) to contiguous float32 (..., 3, H, W) in [0, 1], as `LeRobotDataset` does."""
    planes = image.movedim(-1, -3).to(torch.float32, memory_format=torch.contiguous_format)
    return planes.div_(divisor)
