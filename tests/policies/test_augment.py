"""Augmentation on the device, against LeRobot's own objects and openpi's formula on the same parameters."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.transforms import ImageTransformConfig, make_transform_from_config
from torchvision.transforms import InterpolationMode

from tests.tiny import make_config
from vla_finetuning.columns import STREAM_POSITION
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.options.programs import Config
from vla_finetuning.options.train import TrainOptions
from vla_finetuning.policies import augment
from vla_finetuning.policies.augment import Subset, Uniform, draw_uniform, make_augmentation, openpi_step
from vla_finetuning.policies.processors import DeviceHalf

ROWS, HEIGHT, WIDTH = 6, 40, 56


def images(rows=ROWS, seed=0):
    """Make smooth images with edges, not square."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(rows, 3, 5, 7, generator=generator)
    smooth = F.interpolate(small, (HEIGHT, WIDTH), mode="bilinear")
    smooth[:, :, 10:20, 15:40] = torch.rand(rows, 3, 1, 1, generator=generator)
    return smooth


def augmentation(policy, name="none", enable=True, **transforms):
    options = ImageTransformOptions(enable=enable, tfs=transforms)
    return make_augmentation(name, options, Config().seed, list(policy.image_features))


def test_uniform_draws_are_splitmix64():
    """Compare outputs for a published seed; a row's numbers do not depend on its batch."""
    actual = [value % 2**64 for value in augment._splitmix64(1234567 + torch.arange(1, 4) * augment._GOLDEN).tolist()]
    assert actual == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    position = torch.tensor([7, 2**40, 0, 3])
    numbers = draw_uniform(11, position, 2)
    assert torch.equal(draw_uniform(11, position[[2, 0]], 2), numbers[[2, 0]])
    assert not torch.equal(draw_uniform(12, position, 2), numbers) and not torch.equal(
        draw_uniform(11, position, 1), numbers
    )
    many = draw_uniform(0, torch.arange(2000), 0).double()
    assert many.min() >= 0 and many.max() < 1
    assert many.mean().item() == pytest.approx(0.5, abs=0.003) and many.var().item() == pytest.approx(1 / 12, abs=0.001)
    # Neighbouring rows and numbers are uncorrelated.
    for a, b in ((many[1:], many[:-1]), (many[:, 1:], many[:, :-1])):
        assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 0.01


COLORS = ["brightness", "contrast", "saturation", "hue"]


def color(name):
    def params_of(values):
        factors = {f"{part}_factor": values[0] if part == name else None for part in COLORS}
        return {"fn_idx": torch.tensor([COLORS.index(name)]), **factors}

    return params_of


def affine(values):
    return {
        "angle": values[0],
        "translate": (round(values[1] * WIDTH), round(values[2] * HEIGHT)),
        "scale": values[3],
        "shear": (values[4], values[5]),
    }


LEROBOTS = {
    "brightness": ("ColorJitter", {"brightness": [0.5, 1.8]}, color("brightness")),
    "contrast": ("ColorJitter", {"contrast": [0.5, 1.8]}, color("contrast")),
    "saturation": ("ColorJitter", {"saturation": [0.2, 2.0]}, color("saturation")),
    "hue": ("ColorJitter", {"hue": [-0.4, 0.4]}, color("hue")),
    "sharpness": ("SharpnessJitter", {"sharpness": [0.0, 3.0]}, lambda values: {"sharpness_factor": values[0]}),
    "affine": ("RandomAffine", {"degrees": [-30, 30], "translate": [0.1, 0.2]}, affine),
    "sheared": (
        "RandomAffine",
        {"degrees": 5, "scale": [0.7, 1.3], "shear": [-20, 20, -10, 10], "interpolation": InterpolationMode.BILINEAR},
        affine,
    ),
}


@pytest.mark.parametrize("name", LEROBOTS)
def test_transform_equals_lerobot_on_same_parameters(name):
    kind, kwargs, params_of = LEROBOTS[name]
    transform = make_transform_from_config(ImageTransformConfig(type=kind, kwargs=kwargs))
    step = augment._lerobot_transform("here", transform)
    before, numbers = images(), draw_uniform(3, torch.arange(ROWS), 0)[:, : step.draws]
    actual = step(before, numbers)
    values = [low + (high - low) * numbers[:, i].double() for i, (low, high) in enumerate(step.ranges)]
    expected = torch.stack(
        [transform.transform(before[row], params_of([v[row].item() for v in values])) for row in range(ROWS)]
    )
    error = (actual - expected).abs().amax(dim=1)
    # Where a coordinate falls between two pixels, the nearest is either.
    deviating = (error > 2e-4).float().mean().item()
    assert deviating <= (0.002 if name == "affine" else 0), error.max()
    assert (actual - before).abs().mean() > 0.005


def openpis(image, top, left, degrees, brightness, contrast, saturation, wrist):
    """Apply the formulas of openpi's `preprocess_observation_pytorch` in training to one image (3, H, W)."""
    image = image[None]
    if not wrist:
        height, width = int(HEIGHT * 0.95), int(WIDTH * 0.95)
        part = image[:, :, top : top + height, left : left + width]
        image = F.interpolate(part, (HEIGHT, WIDTH), mode="bilinear", align_corners=False)
        if abs(degrees) > 0.1:
            turn = torch.tensor(degrees) * torch.pi / 180
            y, x = torch.meshgrid(torch.linspace(-1, 1, HEIGHT), torch.linspace(-1, 1, WIDTH), indexing="ij")
            turned = torch.stack([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()], dim=-1)
            image = F.grid_sample(image, turned[None], mode="bilinear", padding_mode="zeros", align_corners=False)
    image = image * brightness
    image = (image - image.mean()) * contrast + image.mean()
    gray = image.mean(dim=1, keepdim=True)
    return (gray + (image - gray) * saturation).clamp(0, 1)[0]


@pytest.mark.parametrize("wrist", [False, True])
def test_openpi_augmentation_equals_openpi_formula(wrist):
    step, before = openpi_step(wrist), images()
    numbers = draw_uniform(5, torch.arange(ROWS), 1)[:, : step.draws]
    if not wrist:
        numbers[0, 2], numbers[1, :2] = 0.505, 0.9999999  # rotation below the threshold; largest crop offset
    actual = step(before, numbers)
    for row in range(ROWS):
        top, left, turn = (0, 0, 0) if wrist else numbers[row, :3].tolist()
        places = [int(share * (size - int(size * 0.95) + 1)) for share, size in ((top, HEIGHT), (left, WIDTH))]
        colors = [low + (high - low) * u for (low, high), u in zip(FACTORS, numbers[row, -3:].tolist(), strict=True)]
        expected = openpis(before[row], *places, -5 + 10 * turn, *colors, wrist)
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=2e-5)


FACTORS = ((0.7, 1.3), (0.6, 1.4), (0.5, 1.5))


def test_transform_subset_frequencies_follow_weights():
    """Compare the frequency of pairs with `torch.multinomial` without replacement."""
    digits = [Uniform(lambda x, digit=digit: 10 * x + digit, []) for digit in (1, 2, 3)]
    weights, rows = [1.0, 2.0, 5.0], 20_000
    numbers = draw_uniform(1, torch.arange(rows), 0)[:, :3]
    nothing = torch.zeros(rows, 1, 1, 1)
    for shuffled in (False, True):
        actual = Subset(digits, weights, 2, shuffled)(nothing, numbers).flatten().int().tolist()
        for first in range(3):
            for second in range(3):
                if first == second:
                    continue
                chance = weights[first] / 8 * weights[second] / (8 - weights[first])
                if not shuffled:
                    chance += weights[second] / 8 * weights[first] / (8 - weights[second])
                    chance *= first < second
                share = actual.count(10 * (first + 1) + second + 1) / rows
                assert share == pytest.approx(chance, abs=0.01)
    assert set(Subset(digits, weights, 3, False)(nothing, numbers).flatten().tolist()) == {123}


def test_augmented_rows_are_independent_of_their_batch():
    policy = make_config(2)
    augmented = augmentation(policy)
    before, position = images(), torch.arange(100, 100 + ROWS)
    key, other = policy.image_features
    actual = augmented(key, before, position)
    assert actual.shape == before.shape and (actual != before).flatten(1).any(dim=1).all()
    assert torch.equal(augmented(key, before[[3, 1]], position[[3, 1]]), actual[[3, 1]])
    assert not torch.equal(augmented(other, before, position), actual)
    assert not torch.equal(augmented(key, before, position + 1), actual)
    windowed = augmented(key, torch.stack([before, before], dim=1), position)
    assert torch.equal(windowed[:, 0], actual) and torch.equal(windowed[:, 1], actual)


def test_augmentation_applies_only_in_training():
    policy = make_config(1)
    (key,) = policy.image_features
    half = DeviceHalf(None, policy, augmentation(policy, "openpi", enable=False))
    batch = {key: (images() * 255).to(torch.uint8).movedim(1, -1), STREAM_POSITION: torch.arange(ROWS)}
    half.train()
    trained = half(batch)
    assert STREAM_POSITION not in trained and trained[key].min() >= 0 and trained[key].max() <= 1
    half.eval()
    plain = DeviceHalf(None, policy)(batch)
    assert torch.equal(half(batch)[key], plain[key]) and not torch.equal(trained[key], plain[key])
    assert augmentation(policy, enable=False) is None


@pytest.mark.parametrize(
    "transforms, message",
    [
        ({"blur": {"type": "MotionBlur"}}, "'blur': MotionBlur is not supported.*ColorJitter, SharpnessJitter and"),
        ({"none": {"type": "ColorJitter", "kwargs": {"brightness": 0}}}, "'none': this ColorJitter changes nothing"),
        ({"odd": {"type": "Nothing"}}, "'odd': Transform 'Nothing' is not valid"),
        ({"odd": {"kind": "ColorJitter"}}, "'odd': .*unexpected keyword argument 'kind'"),
        ({"turn": {"type": "RandomAffine", "kwargs": {"degrees": 5, "fill": 1}}}, "'turn': .*center and fill out"),
    ],
)
def test_unsupported_transforms_are_refused(transforms, message):
    with pytest.raises(ValueError, match=f"--dataset.image_transforms.tfs: {message}"):
        augmentation(make_config(1), **transforms)


def test_augmentation_flags_have_lerobot_names():
    dark = {"type": "ColorJitter", "kwargs": {"brightness": [0.1, 0.2]}}
    tfs = {"dark": {"weight": 2.0, **dark}, "unused": {"weight": 0, **dark}, "plain": dark}
    option_values = {"enable": "true", "max_num_transforms": "2", "random_order": "true", "tfs": json.dumps(tfs)}
    flags = [f"--dataset.image_transforms.{name}={value}" for name, value in option_values.items()]
    options = parse_args(["--preset=demo", *flags]).dataset.image_transforms
    assert vars(options) == {"enable": True, "max_num_transforms": 2, "random_order": True, "tfs": tfs}
    (line,) = TrainOptions().describe_augmentation(options, [])
    assert "by 2 of the transforms dark, plain; drawn" in line
    with pytest.raises(ValueError, match="give one of them"):
        parse_args(["--preset=demo", flags[0], "--train.augmentation=openpi"])
