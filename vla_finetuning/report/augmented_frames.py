"""What training would make of the frames that a page shows, by the augmentation that training itself uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.options.programs import Config
from vla_finetuning.report.dataset_look import Moment

# Below each frame, as many epochs would make of it.
EPOCHS_SHOWN = 3


def config_of(saved: Mapping[str, Any]) -> Config:
    """Return what decides about augmentation of a run's options, from its config.json."""
    config = Config(seed=saved.get("seed", 0), rename_map=saved.get("rename_map") or {})
    config.train.augmentation = saved.get("train", {}).get("augmentation", config.train.augmentation)
    transforms = saved.get("dataset", {}).get("image_transforms", {})
    config.dataset.image_transforms = ImageTransformOptions(**transforms)
    return config


def augmented(sheet: Sequence[Moment], config: Config) -> list[Moment]:
    """The same moments, under each frame what three epochs would make of it: uint8 ((1 + EPOCHS_SHOWN) * H, W, 3).

    Shown as the page has them; training does it at the resolution at which its frames reach the device, and numbers its
    own cameras, so that these are examples of the same and not the very ones. Frames stay alone where `config` asks for
    nothing.

    Raises:
        ValueError: a transform that is unknown, or that is not done here.
    """
    if not config.augments:
        return list(sheet)
    import torch  # only here: looking at a dataset needs neither

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
