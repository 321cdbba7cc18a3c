"""Decide the size to which read tasks resize frames, and check image options against the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lerobot.configs import FeatureType, NormalizationMode
from lerobot.configs.policies import PreTrainedConfig

from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.options import Features
from vla_finetuning.data.reader import frame_spec
from vla_finetuning.options.fields import decided
from vla_finetuning.options.programs import Config
from vla_finetuning.policies.augment import make_augmentation
from vla_finetuning.policies.processors import normalization_mode
from vla_finetuning.policies.registry import family_of


def with_image_size(
    config: Config,
    metas: Sequence[DatasetMetadata],
    features: Features,
    policy_config: PreTrainedConfig,
    row_bytes: Callable[[Features], int],
) -> tuple[Config, Features]:
    """Decide --dataset.image_size=auto.

    Frames are resized to the policy's size if datasets have different sizes, or if that at least halves `row_bytes`,
    the bytes of a decoded row. LeRobot's image transforms need stored frames: LeRobot resizes after them.
    Return the options and the features with the size.
    """

    def sized(image_size: list[int] | None) -> tuple[Config, Features]:
        return decided(config, {"dataset.image_size": image_size or "stored"}), replace(features, image_size=image_size)

    requested, stored = config.dataset.image_size, sized(None)
    size = _policy_size(policy_config)[0] if requested == "auto" else requested
    if not isinstance(size, list):
        return stored
    fitted = sized(size)
    sizes = [
        {frame_spec(meta.features[key], None)[0] for meta in metas if key in meta.features}
        for key in features.camera_keys or ()
    ]
    if any(len(camera_sizes) > 1 for camera_sizes in sizes):
        return fitted
    keeps_size = config.dataset.image_transforms.enable or row_bytes(stored[1]) < 2 * row_bytes(fitted[1])
    return stored if requested == "auto" and keeps_size else fitted


def check_images(config: Config, policy_config: PreTrainedConfig) -> None:
    """Refuse an augmentation or an image size that does not fit the policy's cameras."""
    if config.augments:
        keys = list(policy_config.image_features)
        make_augmentation(config.train.augmentation, config.dataset.image_transforms, config.seed, keys)
    if isinstance(requested := config.dataset.image_size, list):
        size, why_not = _policy_size(policy_config)
        if size != requested:
            raise ValueError(f"--dataset.image_size={requested}: {why_not}")


def _policy_size(policy_config: PreTrainedConfig) -> tuple[list[int] | None, str]:
    """Return the [height, width] to which the policy itself resizes frames first, and why another size is refused.

    PI0 and related policies resize images in [0, 1] to `image_resolution`, and do nothing to images of that size. The
    size is None if the policy does not resize first.
    """
    size = getattr(policy_config, "image_resolution", None)
    if size is None or not family_of(policy_config).fits_images:
        return None, (
            f"a {policy_config.type} policy fits no images into a size as PI0.5 does (centred, black around), so it "
            "would be trained on others than it gets on the robot; leave it out"
        )
    if normalization_mode(policy_config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY:
        return None, "the policy normalises images before it resizes them, not in the other order; leave it out"
    return list(size), f"the policy sees {list(size)}; give that, or leave it out"
