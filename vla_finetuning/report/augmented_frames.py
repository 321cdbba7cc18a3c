"""Augment the frames that a page shows, with the augmentation of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.options.programs import Config
from vla_finetuning.report.dataset_look import Moment

# Number of augmented copies below each frame, one per epoch.
EPOCHS_SHOWN = 3


def config_of(saved: Mapping[str, Any]) -> Config:
    """Return a config with the augmentation options of a run's config.json."""
    config = Config(seed=saved.get("seed", 0), rename_map=saved.get("rename_map") or {})
    config.train.augmentation = saved.get("train", {}).get("augmentation", config.train.augmentation)
    transforms = saved.get("dataset", {}).get("image_transforms", {})
    config.dataset.image_transforms = ImageTransformOptions(**transforms)
    return config


def augmented(sheet: Sequence[Moment], config: Config) -> list[Moment]:
    """Return the moments with EPOCHS_SHOWN augmented copies below each frame: uint8 ((1 + EPOCHS_SHOWN) * H, W, 3).

    The copies are examples: training augments at its own resolution and with its own numbers of cameras. Without
    augmentation in `config` the moments are returned as they are. Raises ValueError for a transform that is unknown.
    """
    if not config.augments:
        return list(sheet)
    import torch  # not above: looking at a dataset needs neither torch nor policies

    from vla_finetuning.policies.augment import make_augmentation

    names = {key: config.rename_map.get(key, key) for moment in sheet for key in moment.images}
    augmentation = make_augmentation(
        config.train.augmentation, config.dataset.image_transforms, config.seed, sorted(names.values())
    )
    if augmentation is None:
        return list(sheet)
    moments = []
    for number, moment in enumerate(sheet):
        pictures = {}
        for key, frame in moment.images.items():
            copies = torch.from_numpy(frame.copy()).movedim(-1, 0).float().div(255).expand(EPOCHS_SHOWN, -1, -1, -1)
            places = torch.arange(EPOCHS_SHOWN) * len(sheet) + number
            changed = augmentation(names[key], copies, places).mul(255).round().clamp(0, 255)
            pictures[key] = np.concatenate([frame, *changed.to(torch.uint8).movedim(1, -1).numpy()])
        moments.append(replace(moment, images=pictures, is_augmented=True))
    return moments
