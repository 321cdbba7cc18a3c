"""Image augmentation on the device: parameters drawn by row, from the seed and the row's place in the stream.

So a row's augmentation depends on no worker, batch or restart, and is another one in every epoch and for each camera.
Parameters are drawn where the frames are, by a counter-based generator in whole numbers: CPU and CUDA draw the same.

Runs in the training worker, on cameras as floats in [0, 1], before a policy normalises them. Legend: B rows.
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

# Numbers that one camera of one row may draw.
DRAWS = 256
# What openpi does with a camera, at most (its `preprocessing_pytorch.py`; docs/recipe.md says where its JAX differs).
CROP, DEGREES, LEAST_DEGREES = 0.95, 5.0, 0.1
BRIGHTNESS, CONTRAST, SATURATION = (0.7, 1.3), (0.6, 1.4), (0.5, 1.5)
WRIST = "wrist"


@dataclass(frozen=True)
class Uniform:
    """A function of values that are uniform in `ranges`: images and a (B,) tensor for each range to images."""

    function: Callable[..., Tensor]
    ranges: Sequence[tuple[float, float]]

    @property
    def draws(self) -> int:
        return len(self.ranges)

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        values = [low + (high - low) * numbers[:, i] for i, (low, high) in enumerate(self.ranges)]
        return self.function(images, *values)


@dataclass(frozen=True)
class InTurn:
    """One step after the other."""

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
    """`count` of the steps for each row, without replacement by their weights: LeRobot's `RandomSubsetApply`.

    In their order, or if `shuffled` in the order in which they were drawn. Rows differ in what they get, and the host
    does not know which: every step is computed for all rows, and where it is not wanted, the row stays as it was.
    """

    steps: Sequence[Step]
    weights: Sequence[float]
    count: int
    shuffled: bool

    @property
    def draws(self) -> int:
        return len(self.steps) + sum(step.draws for step in self.steps)

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        racing, *step_numbers = numbers.split([len(self.steps), *(step.draws for step in self.steps)], dim=1)
        # Arrivals at these rates come in the order of draws without replacement.
        arrivals = torch.stack([-torch.log1p(-racing[:, i]) / weight for i, weight in enumerate(self.weights)], dim=1)
        rank = (arrivals[:, :, None] > arrivals[:, None, :]).sum(dim=2)
        for turn in range(self.count) if self.shuffled else [None]:
            for i, step in enumerate(self.steps):
                applied = rank[:, i] == turn if turn is not None else rank[:, i] < self.count
                images = torch.where(applied[:, None, None, None], step(images, step_numbers[i]), images)
        return images


# Part of an augmentation: images float32 (B, 3, H, W) and `draws` numbers (B, draws) from [0, 1) to images.
Step = Uniform | InTurn | Subset


# ---- what is drawn --------------------------------------------------------------------------------------------------

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def drawn(seed: int, position: Tensor, camera: int) -> Tensor:
    """Numbers in [0, 1), float32 (B, DRAWS): of the seed, each row's position int64 (B,), and the camera's number.

    SplitMix64 (Steele, Lea and Flood 2014), whose state is a counter: any number is computed without those before it.
    """
    key = int.from_bytes(hashlib.blake2b(struct.pack("<q", seed), digest_size=8).digest(), "little", signed=True)
    counters = (position[:, None] * 64 + camera) * DRAWS + torch.arange(DRAWS, device=position.device)
    bits = _mixed(counters * _signed(_GOLDEN) + key)
    return _shifted(bits, 40).to(torch.float32) / 2**24


def _mixed(state: Tensor) -> Tensor:
    """The output of SplitMix64 for a state, int64 of any shape; products wrap around."""
    state = (state ^ _shifted(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(_SECOND)
    return state ^ _shifted(state, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """To the right, filled up with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


class Augmentation:
    """What becomes of each camera.

    Args:
        steps: by the policy's camera key.
    """

    def __init__(self, seed: int, steps: dict[str, Step]):
        self._seed, self._steps = seed, steps
        self._numbers = {key: number for number, key in enumerate(sorted(steps))}

    @torch.no_grad()
    def __call__(self, key: str, images: Tensor, position: Tensor) -> Tensor:
        """Augment one camera: float32 (B, 3, H, W) in [0, 1], or with a window (B, T, 3, H, W), to the same.

        All frames of a row's window get the same. position: int64 (B,).
        """
        step = self._steps.get(key)
        if step is None:
            return images
        numbers = drawn(self._seed, position, self._numbers[key])[:, : step.draws]
        frames = images if images.ndim == 4 else images.flatten(0, 1)
        device_type = images.device.type if torch.amp.is_autocast_available(images.device.type) else "cpu"
        with torch.autocast(device_type, enabled=False):  # products of coordinates need float32
            frames = step(frames, numbers.repeat_interleave(len(frames) // len(numbers), dim=0))
        return frames.view_as(images)


# ---- what is done -------------------------------------------------------------------------------------------------


def augmentation_of(
    name: str, transforms: ImageTransformOptions, seed: int, keys: Sequence[str]
) -> Augmentation | None:
    """Return what a run asks for, for its policy's cameras by their keys; None for nothing.

    Args:
        name: --train.augmentation. transforms: --dataset.image_transforms.
    Raises:
        ValueError: a transform that is unknown, or not supported here.
    """
    if name == "openpi":
        return Augmentation(seed, {key: openpi_step(wrist=WRIST in key) for key in keys})
    if transforms.enable:
        step = lerobot_step(transforms)
        return Augmentation(seed, dict.fromkeys(keys, step)) if step is not None else None
    return None


def openpi_step(wrist: bool) -> Step:
    """Augment a camera as openpi's PyTorch does in training, with parameters drawn by row, and not by batch."""
    color = [
        Uniform(lambda images, factor: images * _each(factor), [BRIGHTNESS]),
        Uniform(_openpi_contrast, [CONTRAST]),
        Uniform(_openpi_saturation, [SATURATION]),
        Uniform(lambda images: images.clamp(0, 1), []),
    ]
    geometry = [Uniform(_openpi_crop, [(0, 1), (0, 1)]), Uniform(_openpi_rotate, [(-DEGREES, DEGREES)])]
    return InTurn(color if wrist else [*geometry, *color])


def lerobot_step(options: ImageTransformOptions) -> Step | None:
    """`--dataset.image_transforms`, which LeRobot's own classes read; None if no transform has a weight.

    Raises:
        ValueError: a type or an option that LeRobot does not know, or that is not done here.
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
    return chosen if count else None


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
        parts = [Uniform(functions[name], [tuple(limits)]) for name, limits in intervals.items() if limits is not None]
        if not parts:
            raise ValueError(f"{flag}: this ColorJitter changes nothing; leave it out")
        # In an order that torchvision draws each time.
        return parts[0] if len(parts) == 1 else Subset(parts, [1.0] * len(parts), len(parts), shuffled=True)
    if isinstance(transform, SharpnessJitter):
        return Uniform(enhance.sharpness, [transform.sharpness])
    if isinstance(transform, v2.RandomAffine):
        if transform.center is not None or any(transform._fill.values()):
            raise ValueError(
                f"{flag}: RandomAffine turns about the middle here, and fills up with black; leave center and fill out"
            )
        wide, high = transform.translate or (0.0, 0.0)
        shear = [*(transform.shear or ()), 0.0, 0.0, 0.0, 0.0]
        ranges = [tuple(transform.degrees), (-wide, wide), (-high, high), tuple(transform.scale or (1.0, 1.0))]
        mode = "bilinear" if transform.interpolation is InterpolationMode.BILINEAR else "nearest"
        return Uniform(partial(_affine, mode=mode), [*ranges, (shear[0], shear[1]), (shear[2], shear[3])])
    raise ValueError(
        f"{flag}: {type(transform).__name__} is not done here, where parameters are drawn by row on the device; there "
        "are ColorJitter, SharpnessJitter and RandomAffine, which lerobot-train's defaults are made of"
    )


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _affine(
    images: Tensor, degrees: Tensor, wide: Tensor, high: Tensor, scale: Tensor, x: Tensor, y: Tensor, *, mode: str
) -> Tensor:
    """torchvision's `affine`, a matrix for each image; translations in shares of width and height, to whole pixels.

    The matrix is inverted on paper: `torch.linalg.inv` would have the host wait for the device.
    """
    height, width = images.shape[-2:]
    turn, x, y = (torch.deg2rad(angle) for angle in (degrees, x, y))
    a, c = torch.cos(turn - y) / torch.cos(y), torch.sin(turn - y) / torch.cos(y)
    b, d = -a * torch.tan(x) - torch.sin(turn), -c * torch.tan(x) + torch.cos(turn)
    moved_x, moved_y = torch.round(wide * width), torch.round(high * height)
    inverse = torch.stack([d, -b, -c, a]).div(scale)[:, :, None, None]
    grid_x = torch.linspace((1 - width) / 2, (width - 1) / 2, width, device=images.device)[None, None, :]
    grid_y = torch.linspace((1 - height) / 2, (height - 1) / 2, height, device=images.device)[None, :, None]
    grid_x, grid_y = grid_x - moved_x[:, None, None], grid_y - moved_y[:, None, None]
    from_x = (inverse[0] * grid_x + inverse[1] * grid_y) / (width / 2)
    from_y = (inverse[2] * grid_x + inverse[3] * grid_y) / (height / 2)
    grid = torch.stack([from_x, from_y], dim=-1)
    if mode == "nearest":
        return F.grid_sample(images, grid, mode=mode, align_corners=False)
    # Where only a part of a pixel is of the image, torchvision takes that share of it twice.
    sampled = F.grid_sample(F.pad(images, (0, 0, 0, 0, 0, 1), value=1.0), grid, align_corners=False)
    return sampled[:, :3] * sampled[:, 3:]


def _openpi_crop(images: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """A part of the image, resized bilinearly to all of it. top, left: shares of the places where it may begin."""

    def places(size: int, share: Tensor) -> Tensor:
        """Return where each of `size` pixels comes from, (B, size), in the coordinates of `grid_sample`."""
        part = int(size * CROP)
        start = torch.floor(share * (size - part + 1)).clamp(max=size - part)[:, None]
        within = (torch.arange(size, device=images.device) + 0.5) * (part / size) - 0.5
        return 2 * (within.clamp(0, part - 1) + start + 0.5) / size - 1

    height, width = images.shape[-2:]
    rows, columns = places(height, top), places(width, left)
    grid = torch.stack([columns[:, None, :].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)], dim=-1)
    return F.grid_sample(images, grid, align_corners=False)


def _openpi_rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """About the centre of openpi's grid, whose corners are the image's; small angles leave it as it is."""
    height, width = images.shape[-2:]
    turn = torch.deg2rad(degrees)[:, None, None]
    x = torch.linspace(-1, 1, width, device=images.device)[None, None, :]
    y = torch.linspace(-1, 1, height, device=images.device)[None, :, None]
    cos, sin = torch.cos(turn), torch.sin(turn)
    turned = F.grid_sample(images, torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1), align_corners=False)
    return torch.where(_each(degrees.abs() > LEAST_DEGREES), turned, images)


def _openpi_contrast(images: Tensor, factor: Tensor) -> Tensor:
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images - mean) * _each(factor) + mean


def _openpi_saturation(images: Tensor, factor: Tensor) -> Tensor:
    gray = images.mean(dim=1, keepdim=True)
    return gray + (images - gray) * _each(factor)
