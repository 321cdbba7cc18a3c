"""Augment images on the device, with parameters drawn for each row from the seed and the row's stream position.

A row's augmentation does not depend on worker, batch or restarts, and differs between epochs and cameras. A
counter-based integer generator draws the parameters on the images' device: CPU and CUDA draw the same values.

Runs in the training worker, on cameras as floats in [0, 1], before normalisation. Legend: B rows.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.transforms import ImageTransformConfig, ImageTransformsConfig, SharpnessJitter, make_transform_from_config
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from vla_finetuning.options.dataset import ImageTransformOptions

# Maximum number of draws for one camera of one row.
DRAWS = 256
# Limits of openpi's augmentation (`preprocessing_pytorch.py`; docs/recipe.md describes differences from its JAX code).
CROP, DEGREES, LEAST_DEGREES = 0.95, 5.0, 0.1
BRIGHTNESS, CONTRAST, SATURATION = (0.7, 1.3), (0.6, 1.4), (0.5, 1.5)
WRIST = "wrist"


@dataclass(frozen=True)
class Uniform:
    """Apply `function` with one uniform value (B,) for each range in `ranges`."""

    function: Callable[..., Tensor]
    ranges: Sequence[tuple[float, float]]

    @property
    def draws(self) -> int:
        return len(self.ranges)

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        values = [low + (high - low) * numbers[:, i] for i, (low, high) in enumerate(self.ranges)]
        return self.function(images, *values)


@dataclass(frozen=True)
class Sequential:
    """Apply all steps in order."""

    steps: Sequence[Step]

    @property
    def draws(self) -> int:
        return sum(step.draws for step in self.steps)

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        for step, chunk in zip(self.steps, numbers.split([step.draws for step in self.steps], dim=1), strict=True):
            images = step(images, chunk)
        return images


@dataclass(frozen=True)
class Subset:
    """Apply `count` steps to each row, drawn by weight without replacement, like LeRobot's `RandomSubsetApply`.

    Steps run in their order, or in the drawn order if `shuffled`. Rows draw different steps, which the host does not
    know: every step is computed for all rows, and `torch.where` keeps the rows that did not draw it.
    """

    steps: Sequence[Step]
    weights: Sequence[float]
    count: int
    shuffled: bool

    @property
    def draws(self) -> int:
        return len(self.steps) + sum(step.draws for step in self.steps)

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        race, *step_numbers = numbers.split([len(self.steps), *(step.draws for step in self.steps)], dim=1)
        # Sorting exponential arrival times with these rates gives draws without replacement.
        arrivals = torch.stack([-torch.log1p(-race[:, i]) / weight for i, weight in enumerate(self.weights)], dim=1)
        rank = (arrivals[:, :, None] > arrivals[:, None, :]).sum(dim=2)
        for turn in range(self.count) if self.shuffled else [None]:
            for i, step in enumerate(self.steps):
                applied = rank[:, i] == turn if turn is not None else rank[:, i] < self.count
                images = torch.where(applied[:, None, None, None], step(images, step_numbers[i]), images)
        return images


# A step maps images float32 (B, 3, H, W) and draws in [0, 1), float32 (B, step.draws), to images.
Step = Uniform | Sequential | Subset


# ---- random numbers -------------------------------------------------------------------------------------------------

# As int64.
_GOLDEN, _FIRST, _SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def draw_uniform(seed: int, position: Tensor, camera: int) -> Tensor:
    """Draw numbers in [0, 1), float32 (B, DRAWS), as a function of seed, row positions int64 (B,) and camera index.

    SplitMix64 (Steele, Lea and Flood 2014): its state is a counter, so any draw is computed directly.
    """
    key = int.from_bytes(hashlib.blake2b(struct.pack("<q", seed), digest_size=8).digest(), "little", signed=True)
    counters = (position[:, None] * 64 + camera) * DRAWS + torch.arange(DRAWS, device=position.device)
    bits = _splitmix64(counters * _GOLDEN + key)
    return _shift_right(bits, 40).to(torch.float32) / 2**24


def _splitmix64(state: Tensor) -> Tensor:
    """Compute SplitMix64's output for states, int64 of any shape. Products wrap around."""
    state = (state ^ _shift_right(state, 30)) * _FIRST
    state = (state ^ _shift_right(state, 27)) * _SECOND
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros (logical shift)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


class Augmentation:
    """Augmentation of a run's cameras, with a step for each of the policy's camera keys."""

    def __init__(self, seed: int, steps: dict[str, Step]):
        self._seed, self._steps = seed, steps
        self._numbers = {key: number for number, key in enumerate(sorted(steps))}

    @torch.no_grad()
    def __call__(self, key: str, images: Tensor, position: Tensor) -> Tensor:
        """Augment one camera: float32 (B, 3, H, W) in [0, 1], or (B, T, 3, H, W) with a window; positions int64 (B,).

        All frames of a row's window get the same parameters.
        """
        step = self._steps[key]
        numbers = draw_uniform(self._seed, position, self._numbers[key])[:, : step.draws]
        frames = images if images.ndim == 4 else images.flatten(0, 1)
        device_type = images.device.type if torch.amp.is_autocast_available(images.device.type) else "cpu"
        with torch.autocast(device_type, enabled=False):  # pixel coordinates need float32
            frames = step(frames, numbers.repeat_interleave(len(frames) // len(numbers), dim=0))
        return frames.view_as(images)


# ---- transforms ---------------------------------------------------------------------------------------------------


def make_augmentation(
    name: str, transforms: ImageTransformOptions, seed: int, keys: Sequence[str]
) -> Augmentation | None:
    """Make the augmentation of the cameras `keys`; return None if a run has none. Raises as `lerobot_step`.

    `name` is the value of --train.augmentation, `transforms` are the options --dataset.image_transforms.
    """
    if name == "openpi":
        return Augmentation(seed, {key: openpi_step(wrist=WRIST in key) for key in keys})
    return Augmentation(seed, dict.fromkeys(keys, lerobot_step(transforms))) if transforms.enable else None


def openpi_step(wrist: bool) -> Step:
    """Make openpi's PyTorch augmentation of a camera. Parameters are drawn by row, not by batch as in openpi."""
    color = [
        Uniform(lambda images, factor: images * _per_image(factor), [BRIGHTNESS]),
        Uniform(_openpi_contrast, [CONTRAST]),
        Uniform(_openpi_saturation, [SATURATION]),
        Uniform(lambda images: images.clamp(0, 1), []),
    ]
    geometry = [Uniform(_openpi_crop, [(0, 1), (0, 1)]), Uniform(_openpi_rotate, [(-DEGREES, DEGREES)])]
    return Sequential(color if wrist else [*geometry, *color])


def lerobot_step(options: ImageTransformOptions) -> Step:
    """Make the step of `--dataset.image_transforms`, parsed by LeRobot's own classes.

    Raises ValueError for an unknown or unsupported type or option, and if all weights are 0.
    """
    transforms: dict[str, Any] = dict(options.tfs) or ImageTransformsConfig().tfs
    steps, weights = [], []
    for name, entry in transforms.items():
        flag = f"--dataset.image_transforms.tfs: {name!r}"
        try:
            config = entry if isinstance(entry, ImageTransformConfig) else ImageTransformConfig(**entry)
            transform = make_transform_from_config(config)
            weight = float(config.weight)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{flag}: {error}") from error
        if weight > 0:
            steps.append(_lerobot_transform(flag, transform))
            weights.append(weight)
    if not steps:
        raise ValueError(
            f"--dataset.image_transforms.tfs: {', '.join(transforms)} have weight 0, and no frame would change: give "
            "one a weight, or leave --dataset.image_transforms.enable out"
        )
    count = min(len(steps), options.max_num_transforms)
    chosen = Subset(steps, weights, count, options.random_order)
    if chosen.draws > DRAWS:
        raise ValueError(f"--dataset.image_transforms.tfs: {len(steps)} transforms are too many; choose fewer")
    return chosen


def _lerobot_transform(flag: str, transform: Any) -> Step:
    from kornia import enhance  # takes seconds to import

    if isinstance(transform, v2.ColorJitter):
        functions = {
            "brightness": enhance.adjust_brightness_accumulative,
            "contrast": enhance.adjust_contrast_with_mean_subtraction,
            "saturation": enhance.adjust_saturation_with_gray_subtraction,
            "hue": lambda images, turn: enhance.adjust_hue(images, 2 * math.pi * turn),
        }
        intervals = {name: getattr(transform, name) for name in functions}
        steps = [Uniform(functions[name], [tuple(limits)]) for name, limits in intervals.items() if limits is not None]
        if not steps:
            raise ValueError(f"{flag}: this ColorJitter changes nothing; leave it out")
        # torchvision draws their order for each image.
        return steps[0] if len(steps) == 1 else Subset(steps, [1.0] * len(steps), len(steps), shuffled=True)
    if isinstance(transform, SharpnessJitter):
        return Uniform(enhance.sharpness, [transform.sharpness])
    if isinstance(transform, v2.RandomAffine):
        if transform.center is not None or any(transform._fill.values()):
            raise ValueError(
                f"{flag}: RandomAffine always rotates about the centre and fills with black: leave center and fill out"
            )
        dx, dy = transform.translate or (0.0, 0.0)
        shear = [*(transform.shear or ()), 0.0, 0.0, 0.0, 0.0]
        ranges = [tuple(transform.degrees), (-dx, dx), (-dy, dy), tuple(transform.scale or (1.0, 1.0))]
        mode = "bilinear" if transform.interpolation is InterpolationMode.BILINEAR else "nearest"
        return Uniform(partial(_affine, mode=mode), [*ranges, (shear[0], shear[1]), (shear[2], shear[3])])
    raise ValueError(
        f"{flag}: {type(transform).__name__} is not supported, because parameters are drawn by row on the device; "
        "choose from ColorJitter, SharpnessJitter and RandomAffine, which lerobot-train's defaults consist of"
    )


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _affine(
    images: Tensor, angle: Tensor, dx: Tensor, dy: Tensor, scale: Tensor, shear_x: Tensor, shear_y: Tensor, *, mode: str
) -> Tensor:
    """Apply torchvision's `affine` with one matrix per image: translations as shares of the size, angles in degrees.

    The inverse is in closed form, because `torch.linalg.inv` makes the host wait for the device.
    """
    height, width = images.shape[-2:]
    angle, shear_x, shear_y = (torch.deg2rad(value) for value in (angle, shear_x, shear_y))
    a, c = torch.cos(angle - shear_y) / torch.cos(shear_y), torch.sin(angle - shear_y) / torch.cos(shear_y)
    b, d = -a * torch.tan(shear_x) - torch.sin(angle), -c * torch.tan(shear_x) + torch.cos(angle)
    offset_x, offset_y = torch.round(dx * width), torch.round(dy * height)
    inverse = torch.stack([d, -b, -c, a]).div(scale)[:, :, None, None]
    grid_x = torch.linspace((1 - width) / 2, (width - 1) / 2, width, device=images.device)[None, None, :]
    grid_y = torch.linspace((1 - height) / 2, (height - 1) / 2, height, device=images.device)[None, :, None]
    grid_x, grid_y = grid_x - offset_x[:, None, None], grid_y - offset_y[:, None, None]
    source_x = (inverse[0] * grid_x + inverse[1] * grid_y) / (width / 2)
    source_y = (inverse[2] * grid_x + inverse[3] * grid_y) / (height / 2)
    grid = torch.stack([source_x, source_y], dim=-1)
    if mode == "nearest":
        return F.grid_sample(images, grid, mode=mode, align_corners=False)
    # torchvision multiplies pixels at the border by their coverage twice: once in the sample, once by the mask.
    sampled = F.grid_sample(F.pad(images, (0, 0, 0, 0, 0, 1), value=1.0), grid, align_corners=False)
    return sampled[:, :3] * sampled[:, 3:]


def _openpi_crop(images: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Crop each image and resize it bilinearly; `top` and `left` are shares of the largest offset."""

    def source_coordinates(size: int, share: Tensor) -> Tensor:
        """Return source coordinates of `size` pixels for `grid_sample`, (B, size)."""
        cropped = int(size * CROP)
        start = torch.floor(share * (size - cropped + 1)).clamp(max=size - cropped)[:, None]
        offsets = (torch.arange(size, device=images.device) + 0.5) * (cropped / size) - 0.5
        return 2 * (offsets.clamp(0, cropped - 1) + start + 0.5) / size - 1

    height, width = images.shape[-2:]
    rows, columns = source_coordinates(height, top), source_coordinates(width, left)
    grid = torch.stack([columns[:, None, :].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)], dim=-1)
    return F.grid_sample(images, grid, align_corners=False)


def _openpi_rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate about the centre, on openpi's grid from -1 to 1 at the corner pixels; skip angles up to LEAST_DEGREES."""
    height, width = images.shape[-2:]
    angle = torch.deg2rad(degrees)[:, None, None]
    x = torch.linspace(-1, 1, width, device=images.device)[None, None, :]
    y = torch.linspace(-1, 1, height, device=images.device)[None, :, None]
    cos, sin = torch.cos(angle), torch.sin(angle)
    rotated = F.grid_sample(images, torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1), align_corners=False)
    return torch.where(_per_image(degrees.abs() > LEAST_DEGREES), rotated, images)


def _openpi_contrast(images: Tensor, factor: Tensor) -> Tensor:
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images - mean) * _per_image(factor) + mean


def _openpi_saturation(images: Tensor, factor: Tensor) -> Tensor:
    gray = images.mean(dim=1, keepdim=True)
    return gray + (images - gray) * _per_image(factor)
