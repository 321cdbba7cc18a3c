"""Find missing files of datasets; the error names them, and the flag that trains without their episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_finetuning.data.dataset_files import MissingFiles, find_missing_files
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.datasets import Datasets
from vla_finetuning.plan.episodes import ChosenEpisodes, exclusion

# Most characters of a flag that a user would paste.
_MAX_FLAG = 2_000


def check_files(config: Config, datasets: Datasets, chosen: ChosenEpisodes, camera_keys: Sequence[str]) -> list[str]:
    """Check that the files of all training and held-out episodes exist (`find_missing_files`).

    Return notes on the episodes whose rows --dataset.on_error=skip skips. Raises FileNotFoundError with the flags that
    train without files that are missing, empty or truncated.
    """
    metas = datasets.metas
    episodes = [np.union1d(*split) for split in zip(chosen.train, chosen.held_out, strict=True)]
    missing = [
        find_missing_files(meta, episodes=numbers, camera_keys=[key for key in camera_keys if key in meta.camera_keys])
        for meta, numbers in zip(metas, episodes, strict=True)
    ]
    affected = [(meta, files) for meta, files in zip(metas, missing, strict=True) if files]
    if not affected:
        return []
    lost = sum(int(meta.episode_length[files.episodes].sum()) for meta, files in affected)
    share = lost / sum(int(meta.episode_length[numbers].sum()) for meta, numbers in zip(metas, episodes, strict=True))
    d, not_skipped = config.dataset, ""
    if d.on_error == "skip":
        if absent := [path for _, files in affected for path in files.without_folder]:
            not_skipped = (
                f" (--dataset.on_error=skip is for folders that lack some files, not all, as that of {absent[0]})"
            )
        elif share > d.max_skipped:
            not_skipped = f" (--dataset.max_skipped={d.max_skipped:g} is less than their {share:.0%} of the frames)"
        else:
            return [
                f"{meta.root}: the rows of {len(files.episodes)} episodes are skipped, by --dataset.on_error: {files}"
                for meta, files in affected
            ]
    raise FileNotFoundError(
        f"{'; '.join(f'dataset {meta.root}: {files}' for meta, files in affected)}. Copy or download the dataset "
        f"again, or {_remedy(config, datasets, missing, episodes, share)}{not_skipped}"
    )


def _remedy(
    config: Config, datasets: Datasets, missing: Sequence[MissingFiles], episodes: Sequence[np.ndarray], share: float
) -> str:
    if any(files and len(files.episodes) == len(numbers) for files, numbers in zip(missing, episodes, strict=True)):
        return (
            "use another dataset, or cameras whose files are there (--dataset.camera_keys) if only videos are missing: "
            "every episode needs such files"
        )
    incomplete = {number: files.episodes.tolist() for number, files in enumerate(missing) if files}
    flag = exclusion(config, datasets.members, incomplete)
    if len(flag) > _MAX_FLAG:
        flag = f"--dataset.on_error=skip --dataset.max_skipped={min(1, np.ceil(share * 100) / 100):g}"
    count = sum(len(files.episodes) for files in missing)
    remaining = sum(map(len, episodes)) - count
    return f"go on with {remaining} episodes, without the {count} that need such files: {flag}"
