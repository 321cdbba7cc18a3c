"""Split LeRobot's preprocessor between Ray Data's CPUs and the training worker.

`Prepare` runs all steps but images in Ray Data tasks: it normalises, discretises and tokenises. `DeviceHalf` converts
and normalises the uint8 images in the training worker. Both halves together equal the whole pipeline. `pipelines`
makes the pipelines; `PrepareRobots` prepares blocks with rows of several robots.

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

# Prefix of PI0.5's `empty_cameras`, inputs that no dataset has.
EMPTY_CAMERA = f"{OBS_IMAGES}.empty_camera_"
# Columns that identify a row, for messages.
ROW_KEYS = ("dataset_index", "episode_index", "frame_index", "index")
# Folder in an export with a copy of the tokenizer that LeRobot's processor fetches from the Hub by name.
TOKENIZER_FOLDER = "tokenizer"

# Names of a mode's statistics: mean and std, or the values that become -1 and 1.
NORMALIZATION_STATS: dict[NormalizationMode, tuple[str, ...]] = {
    NormalizationMode.IDENTITY: (),
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}
# XVLA's step that normalises images. The step before it leaves images in [0, 1] unchanged.
IMAGENET_STEP = "xvla_imagenet_normalize"
# Steps of EO1 and MolmoAct2 that process images with texts and pad to the longest of a batch: they need whole batches.
BATCH_STEPS = frozenset({"eo1_conversation_template_processor", "eo1_qwen_processor", "molmoact2_pack_inputs"})


class DatasetFeature(Protocol):
    """A feature in a dataset's info.json. Images are (H, W, 3), or (3, H, W) if `names` starts with the channel."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def names(self) -> Any: ...


def policy_feature(key: str, feature: DatasetFeature) -> PolicyFeature | None:
    """Return LeRobot's type and channel-first shape of a dataset feature; None if policies cannot use it.

    Raises:
        ValueError: the feature is a camera that is not RGB.
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
    """Return LeRobot's normalisation mode for a feature type."""
    return NormalizationMode(config.normalization_mapping.get(feature_type.value, NormalizationMode.IDENTITY))


def required_stats(
    config: PreTrainedConfig, features: Mapping[str, PolicyFeature | DatasetFeature]
) -> dict[str, set[str]]:
    """Return the names of statistics that LeRobot's normaliser needs, by normalised feature."""
    needed = {}
    for key, feature in features.items():
        typed = feature if isinstance(feature, PolicyFeature) else policy_feature(key, feature)
        if typed is not None and (names := NORMALIZATION_STATS[normalization_mode(config, typed.type)]):
            needed[key] = set(names)
    return needed


def with_imagenet_stats(stats: Stats, camera_keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Replace mean and std of cameras by ImageNet's, as LeRobot's `make_dataset` does."""
    imagenet = {name: np.array(values, dtype=np.float32) for name, values in IMAGENET_STATS.items()}
    return {key: dict(values) for key, values in stats.items()} | {
        key: {**stats.get(key, {}), **imagenet} for key in camera_keys
    }


class Prepare:
    """The preprocessor without its image steps, for blocks of rows in Ray Data tasks.

    LeRobot's own pipeline runs on the block without cameras, which pass through. Rows have the policy's names, so
    that its step that renames is left out. The object pickles, but is large (PaliGemma's tokenizer is 17 MB): see
    `training.stream.LazyPickle`.

    Args:
        camera_keys: cameras in the block.
        trusted: whether the policy's own code may run, also in processes that unpickle this object.
        texts: whether to keep the instructions, as the pipeline returns them.
    Raises:
        ValueError: the split differs from the whole pipeline on a synthetic row.
    """

    def __init__(
        self,
        preprocessor: PolicyProcessorPipeline,
        camera_keys: Sequence[str],
        config: PreTrainedConfig,
        *,
        trusted: bool = False,
        texts: bool = False,
    ):
        self._trusted, self._texts = trusted, texts
        features = {**config.input_features, **config.output_features}
        self._cameras = tuple(camera_keys)
        self._features = {key for key, feature in features.items() if feature.type is not FeatureType.VISUAL}
        steps = [step for step in preprocessor.steps if not isinstance(step, RenameObservationsProcessorStep)]
        full_pipeline = with_steps(preprocessor, [_pad_to_max_length(copy.copy(step)) for step in steps])
        self._pipeline = with_steps(full_pipeline, [step for step in full_pipeline.steps if not _needs_batch(step)])
        self._check_split(full_pipeline, config)
        for step in self._pipeline.steps:
            step._current_transition = None  # drop the synthetic row
            step.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank_prepare, (self._trusted,), self.__dict__

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Prepare a block of frame rows for the policy.

        Args:
            batch: columns of N rows: cameras uint8 (N, H, W, 3), `observation.state` float32 (N, S), `action` float32
                (N, T, A), `action_is_pad` bool (N, T), `task` strings (N,), and others.
        Returns:
            Numeric columns of fixed shape for the same rows: cameras, without a copy; the policy's other features,
            normalised, and their `_is_pad`; what the pipeline adds, as
            `observation.language.tokens` int64 (N, L) and `observation.language.attention_mask` bool (N, L);
            `task_bytes` if `texts` is set; ROW_COLUMNS of the block; with `is_skipped`, also its opposite `is_read`.
        Raises:
            ValueError: a camera is missing or not uint8 (..., H, W, 3); an instruction is not a string; a state or
                action of a row that is not skipped is not finite.
        """
        cameras = {key: _camera_column(batch, key) for key in self._cameras}
        return cameras | self.without_cameras(batch) | _row_columns(batch)

    def without_cameras(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run LeRobot's pipeline on a block without its cameras. Raises as `__call__`."""
        inputs = {key: value for key, value in batch.items() if key not in self._cameras}
        rows = len(next(iter(batch.values())))
        # The tokenizer refuses empty input, so an empty block runs with a blank row to learn its columns.
        prepared = self._run(inputs if rows else {key: _blank_row(value) for key, value in inputs.items()})
        columns = {key: value[:rows] for key, value in prepared.items()}
        self._check_finite(batch, columns)
        return columns

    def _check_finite(self, batch: Mapping[str, np.ndarray], prepared: Mapping[str, np.ndarray]) -> None:
        """Refuse NaN and infinity: in a state they become words of PI0.5's prompt, in an action the loss of a step."""
        for key in self._features & prepared.keys():
            invalid = ~np.isfinite(prepared[key]).all(axis=tuple(range(1, prepared[key].ndim)))
            invalid &= ~batch.get("is_skipped", np.zeros_like(invalid))
            if invalid.any():
                place = ", ".join(f"{name} {batch[name][invalid.argmax()]}" for name in ROW_KEYS if name in batch)
                raise ValueError(
                    f"'{key}' holds NaN or infinity at {place}, or later in its window: repair the dataset, or leave "
                    "the episode out with --dataset.episodes"
                )

    def _run(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        data: dict[str, Any] = {}
        for key, value in columns.items():
            if key == "task":
                data[key] = list(value)
                if not all(isinstance(instruction, str) for instruction in value):
                    raise ValueError(f"'task' holds values that are not strings: {data[key][:5]}")
            elif value.dtype.kind in "biuf":
                if value.dtype.kind != "f" and key in self._features:
                    # LeRobot's normaliser casts its statistics to the input's dtype: in int64, 0.49 would become 0.
                    value = value.astype(np.float32)
                # Blocks are read-only views of shared memory, which torch does not support.
                data[key] = torch.from_numpy(value if value.flags.writeable else value.copy())
        processed = self._pipeline(data)
        keys = {key for key in processed if key in self._features or key not in columns}
        keys |= {f"{key}_is_pad" for key in keys}
        arrays = {key: value.numpy() for key, value in processed.items() if key in keys and isinstance(value, Tensor)}
        return arrays | ({TASK_BYTES: as_bytes(processed[TASK])} if self._texts else {})

    def _check_split(self, preprocessor: PolicyProcessorPipeline, config: PreTrainedConfig) -> None:
        """Compare the split with the whole pipeline on a synthetic row, to find steps that need images."""
        normalizer = _normalizer(self._pipeline)
        rng = np.random.default_rng(0)
        row: dict[str, np.ndarray] = {"task": np.array([""], dtype=object)}
        for key in sorted(self._features):
            # Pretrained policies declare a padded state; the statistics have the dataset's shape.
            stats = normalizer._tensor_stats.get(key, {}) if normalizer else {}
            declared = {**config.input_features, **config.output_features}[key].shape
            shape = next((tuple(value.shape) for name, value in stats.items() if name != "count"), declared)
            deltas = config.action_delta_indices if key == ACTION else config.observation_delta_indices
            row[key] = rng.random((1, *_window(deltas), *shape), dtype=np.float32)
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
                    f"the preprocessor returns another '{key}' when images are processed separately: one of its "
                    f"steps {names} cannot be split"
                )


def _window(deltas: Sequence[int] | None) -> tuple[int, ...]:
    return () if deltas is None else (len(deltas),)


@dataclass(frozen=True)
class PreparedRobot:
    """Preparation of the rows of some datasets: one robot's, or datasets without actions.

    Attributes:
        cameras: their cameras.
        widths: widths of vectors, which a block pads with zeros.
        opening: prefix of their instructions.
        datasets: values of `dataset_index`.
        robot: index of the robot.
    """

    prepare: Prepare
    cameras: frozenset[str]
    widths: Mapping[str, int]
    opening: str = ""
    datasets: tuple[int, ...] = ()
    robot: int = 0


class PrepareRobots:
    """`Prepare` for blocks with rows of several robots: each row runs through its robot's pipeline at its width.

    With one robot alone, the result is exactly that of its `Prepare`.

    Args:
        robots: robots, and datasets without actions.
        cameras: all cameras in a block.
        per_robot_dims: whether each row's loss covers only its robot's action dimensions.
    """

    def __init__(self, robots: Sequence[PreparedRobot], cameras: Sequence[str], per_robot_dims: bool):
        self._robots, self._cameras, self._per_robot_dims = tuple(robots), tuple(cameras), per_robot_dims
        pairs = [(dataset, number) for number, robot in enumerate(robots) for dataset in robot.datasets]
        self._robot_of = np.array([number for _, number in sorted(pairs)], np.int64)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Prepare a block as `Prepare` does, with vectors padded to the widest robot.

        With several robots, there are three more kinds of columns: `CAMERA_is_present` bool (N,) for each camera,
        `robot_index` int64 (N,), and with `per_robot_dims` `action_dims` bool (N, A), True for dimensions of the row's
        robot.
        """
        if len(self._robots) == 1:
            return self._robots[0].prepare(batch)
        robot = self._robot_of[batch["dataset_index"]]
        columns = {key: _camera_column(batch, key) for key in self._cameras}
        rest = {key: value for key, value in batch.items() if key not in self._cameras}
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
        columns |= {**prepared, ROBOT: np.array([layout.robot for layout in self._robots])[robot]}
        for key in self._cameras:
            columns[key + IS_PRESENT] = np.array([key in layout.cameras for layout in self._robots])[robot]
        if self._per_robot_dims:
            widths = np.array([layout.widths[ACTION] for layout in self._robots])[robot]
            columns[ACTION_DIMS] = np.arange(batch[ACTION].shape[-1]) < widths[:, None]
        return columns | _row_columns(batch)


def _row_columns(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    read = {"is_read": ~batch["is_skipped"]} if "is_skipped" in batch else {}
    return read | {key: batch[key] for key in ROW_COLUMNS if key in batch}


def _camera_column(batch: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    """Return a camera's column. Raise ValueError unless it is uint8 (N, ..., H, W, 3)."""
    if key not in batch:
        raise ValueError(f"the block has no camera '{key}'; its columns are {sorted(batch)}")
    images = batch[key]
    if images.dtype != np.uint8 or images.ndim < 4 or images.shape[-1] != 3:
        raise ValueError(f"camera '{key}' is {images.dtype} {images.shape}, expected uint8 (N, H, W, 3)")
    return images


def _pad_to_max_length(step: ProcessorStep) -> ProcessorStep:
    """Make a tokenizer pad to `max_length`, not to a block's longest prompt: a batch has rows of several blocks."""
    if isinstance(step, TokenizerProcessorStep) and step.padding == "longest":
        step.padding = "max_length"
    return step


def _blank_prepare(trusted: bool) -> Prepare:
    """Make an empty `Prepare` before unpickling restores attributes, whose classes may be the policy's own code."""
    if trusted:
        from transformers.dynamic_module_utils import init_hf_modules

        init_hf_modules()  # makes transformers' cache of such code importable
    return Prepare.__new__(Prepare)


def _blank_row(column: np.ndarray) -> np.ndarray:
    fill: Any = "" if column.dtype.kind in "OU" else 0
    return np.full((1, *column.shape[1:]), fill, dtype=column.dtype)


def with_steps(pipeline: PolicyProcessorPipeline, steps: list[ProcessorStep]) -> PolicyProcessorPipeline:
    """Return a copy of a pipeline with other steps."""
    changed = copy.copy(pipeline)
    changed.steps = steps
    return changed


def _needs_batch(step: ProcessorStep) -> bool:
    return getattr(step, "_registry_name", None) in BATCH_STEPS


def _normalizer(preprocessor: PolicyProcessorPipeline) -> NormalizerProcessorStep | None:
    return next((step for step in preprocessor.steps if isinstance(step, NormalizerProcessorStep)), None)


def saved_names(preprocessor: PolicyProcessorPipeline) -> dict[str, str]:
    """Return the map of the preprocessor's rename step."""
    return next((s.rename_map for s in preprocessor.steps if isinstance(s, RenameObservationsProcessorStep)), {})


class DeviceHalf(nn.Module):
    """The preprocessor's image steps, on the training worker's device: uint8 to normalised float32.

    Values equal those of `LeRobotDataset` and LeRobot's normaliser bit for bit, on CPU and CUDA. The host does not wait
    for the device, except for policies with BATCH_STEPS.

    Args:
        preprocessor: pipeline from `pipelines.make_processors`; None if the policy does not normalise images.
        augment: function of (camera key, images in [0, 1], stream positions) that returns images; training only.
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
        # A tensor, because CUDA divides by a Python number via its reciprocal, which may differ in the last bit.
        self.register_buffer("divisor", torch.tensor(255.0), persistent=False)
        self._keys = tuple(config.image_features)
        self._scales: dict[str, tuple[NormalizationMode, str, str]] = {}
        self._batch_pipeline: PolicyProcessorPipeline | None = None
        if preprocessor is None:
            return
        if steps := [step for step in preprocessor.steps if _needs_batch(step)]:
            self._batch_pipeline = with_steps(preprocessor, steps)
        if any(getattr(step, "_registry_name", None) == IMAGENET_STEP for step in preprocessor.steps):
            mean, std = (torch.tensor(IMAGENET_STATS[name]).reshape(3, 1, 1) for name in ("mean", "std"))
            for number, key in enumerate(self._keys):
                self._register(number, key, NormalizationMode.MEAN_STD, mean, std)
        normalizer = _normalizer(preprocessor)
        if normalizer is None:
            return
        mode = normalizer.norm_map.get(FeatureType.VISUAL, NormalizationMode.IDENTITY)
        keys = normalizer.normalize_observation_keys
        for number, key in enumerate(self._keys):
            stats = normalizer._tensor_stats.get(key, {})
            if mode is NormalizationMode.IDENTITY or not stats or (keys is not None and key not in keys):
                continue
            if mode is NormalizationMode.MEAN_STD:
                shift, scale = stats["mean"], stats["std"] + normalizer.eps
            else:
                low, high = NORMALIZATION_STATS[mode]
                shift, scale = stats[low], stats[high] - stats[low]
                scale = torch.where(scale == 0, torch.tensor(normalizer.eps, dtype=scale.dtype), scale)
            self._register(number, key, mode, shift, scale)

    def _register(self, number: int, key: str, mode: NormalizationMode, shift: Tensor, scale: Tensor) -> None:
        self.register_buffer(f"shift_{number}", shift.clone(), persistent=False)
        self.register_buffer(f"scale_{number}", scale.clone(), persistent=False)
        self._scales[key] = (mode, f"shift_{number}", f"scale_{number}")

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert cameras from uint8 (B, H, W, 3) to float32 (B, 3, H, W); keep other columns and float cameras.

        Images are in [0, 1], then augmented in train mode, then normalised if the policy does. Cameras with a window
        of observations are (B, T, H, W, 3).
        """
        converted = dict(batch)
        positions = converted.pop(STREAM_POSITION, None)
        for key in self._keys:
            if key not in batch or batch[key].dtype != torch.uint8:
                continue
            image = to_float(batch[key], self.divisor)
            if self._augment is not None and self.training:
                assert positions is not None
                image = self._augment(key, image, positions)
            if key in self._scales:
                mode, shift, scale = self._scales[key]
                image = image - getattr(self, shift)
                if mode is NormalizationMode.MEAN_STD:
                    image = image / getattr(self, scale)
                else:
                    image = 2 * image / getattr(self, scale) - 1
            converted[key] = image
        return converted if self._batch_pipeline is None else self._run_on_host(self._batch_pipeline, converted)

    def _run_on_host(self, pipeline: PolicyProcessorPipeline, batch: dict[str, Any]) -> dict[str, Any]:
        """Run BATCH_STEPS on the host, which waits for the device."""
        device = self.divisor.device
        on_host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
        changed = {key: value for key, value in pipeline(on_host).items() if value is not on_host.get(key)}
        return batch | {key: value.to(device) if isinstance(value, Tensor) else value for key, value in changed.items()}


def to_float(image: Tensor, divisor: Tensor | float = 255.0) -> Tensor:
    """Convert uint8 (..., H, W, 3) to contiguous float32 (..., 3, H, W) in [0, 1], as `LeRobotDataset` does."""
    planes = image.movedim(-1, -3).to(torch.float32, memory_format=torch.contiguous_format)
    return planes.div_(divisor)
