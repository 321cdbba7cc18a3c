"""Augment the frames that a page shows, with the augmentation of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vla_finetuning.options.dataset import ImageTransformOptions
from vla_finetuning.report.dataset_look import Moment

# Number of augmented copies below each frame, one per epoch.
EPOCHS_SHOWN = 3


def augmented(sheet: Sequence[Moment], saved: Mapping[str, Any]) -> list[Moment]:
    """Return the moments with EPOCHS_SHOWN augmented copies below each frame: uint8 ((1 + EPOCHS_SHOWN) * H, W, 3).

    The copies are examples: training augments at its own resolution and with its own numbers of cameras. Without
    augmentation in `saved`, the content of config.json, the moments are returned as they are. Raises ValueError for a
    transform that is unknown.
    """
    name = saved.get("train", {}).get("augmentation", "none")
    transforms = ImageTransformOptions(**saved.get("dataset", {}).get("image_transforms", {}))
    if name == "none" and not transforms.enable:
        return list(sheet)
    import torch  # not above: looking at a dataset needs neither torch nor policies

    from vla_finetuning.policies.augment import make_augmentation

    cameras = sorted({key for moment in sheet for key in moment.images})
    augmentation = make_augmentation(name, transforms, saved.get("seed", 0), cameras)
    if augmentation is None:
        return list(sheet)
    moments = []
    for number, moment in enumerate(sheet):
        pictures = {}
        for key, frame in moment.images.items():
            copies = torch.from_numpy(frame.copy()).movedim(-1, 0).float().div(255).expand(EPOCHS_SHOWN, -1, -1, -1)
            places = torch.arange(EPOCHS_SHOWN) * len(sheet) + number
            changed = augmentation(key, copies, places).mul(255).round().clamp(0, 255)
            pictures[key] = np.concatenate([frame, *changed.to(torch.uint8).movedim(1, -1).numpy()])
        moments.append(replace(moment, images=pictures, is_augmented=True))
    return moments
