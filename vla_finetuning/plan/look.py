"""Check a sample of a run's data on the driver, with the run's own reader and limits.

Reads the numeric columns of some episodes, and of a few episodes the first and last frame of every camera. Finds what
would end a read task: frames that cannot be decoded or do not match their timestamps, images of another format, rows in
another order, unknown tasks. Also finds values that are not finite, as no loss can be computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from lerobot_datasource import LeRobotDatasource
from vla_finetuning.data.metadata import NUMERIC_DTYPES, DatasetMetadata
from vla_finetuning.data.options import Features, Order, Reading, Selection
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.plan.episodes import exclusion
from vla_finetuning.plan.resolve import Run

# Most rows and episodes that are read of a dataset, and most episodes whose frames are decoded. A mixture divides the
# numbers of episodes among its datasets. An object store gets a quarter of them, as each episode takes requests.
LOOK_ROWS, LOOK_EPISODES, FRAME_EPISODES = 20_000, 100, 8


@dataclass(frozen=True)
class Look:
    """The result of `look_at`: numbers of rows, of their episodes, and of rows whose cameras were decoded."""

    rows: int
    episodes: int
    frames: int
    problems: dict[int, str]  # error message by episode, for episodes that would end a run

    def __str__(self) -> str:
        return f"read {self.rows:,} rows of {self.episodes:,} episodes, {self.frames} of them with all cameras"


def look_at(meta: DatasetMetadata, episodes: np.ndarray, features: Features, share: float = 1.0) -> Look:
    """Read a sample of a dataset's rows, of these episodes, as a run with these features would.

    `share` is a factor of the limits on episodes. Raises OSError if a store or a disk does not answer.
    """
    length = meta.episode_length
    share *= 1.0 if isinstance(meta.fs, LocalFileSystem) else 0.25
    most_episodes, most_frames = max(4, round(share * LOOK_EPISODES)), max(2, round(share * FRAME_EPISODES))
    chosen = episodes[evenly_spaced(len(episodes), most_episodes)]
    while len(chosen) > most_frames and length[chosen].sum() > LOOK_ROWS:
        chosen = chosen[evenly_spaced(len(chosen), len(chosen) * 3 // 4)]
    numbers = [
        key
        for key in (meta.features if features.columns is None else features.columns)
        if key in meta.features and meta.features[key].dtype in NUMERIC_DTYPES
    ]
    sources = [
        LeRobotDatasource([meta], Selection(episodes=[chosen]), f, Order(), Reading(check_files=False))
        for f in (replace(features, camera_keys=[], columns=numbers, delta_timestamps={}), features)
    ]
    cameras = meta.camera_keys if features.camera_keys is None else features.camera_keys
    with_frames = set(chosen[evenly_spaced(len(chosen), most_frames)].tolist()) if len(cameras) else set()
    problems: dict[int, str] = {}
    rows = frames = first = 0
    for episode in chosen.tolist():
        count = min(int(length[episode]), LOOK_ROWS)
        try:
            (batch,) = sources[0].read_rows(range(first, first + count), count)
            rows += count
            _check_finite(batch, numbers, meta, episode)
            frame_indices = {0, int(length[episode]) - 1} if episode in with_frames else set()
            lateness = np.abs(batch["timestamp"] - np.arange(count) / meta.fps)
            if len(cameras) and lateness.max() > features.tolerance_s:
                frame_indices.add(int(lateness.argmax()))
            for row in sorted(frame_indices):
                list(sources[1].read_rows([first + row], 1))
                frames += 1
        except (ValueError, FileNotFoundError) as error:
            problems[episode] = str(error)
        first += int(length[episode])
    return Look(rows, len(chosen), frames, problems)


def _check_finite(batch: dict[str, np.ndarray], numbers: Sequence[str], meta: DatasetMetadata, episode: int) -> None:
    for key in numbers:
        values = batch[key].reshape(len(batch[key]), -1)
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            row, entry = bad[0].tolist()
            name = f"{key}[{entry}]" if values.shape[1] > 1 else key
            raise ValueError(
                f"{meta.root}: episode {episode}, frame {row}: {name} is {values[row, entry]}, of which no loss can "
                f"be computed ({len(bad)} values of the episode are not finite): repair the recording, or leave it out"
            )


def look_at_rows(run: Run) -> list[str]:
    """Read a sample of each dataset of a run; return the plan's lines on what was read and will be skipped.

    Raises ValueError with the problem that would end the run, and the option that excludes its episodes.
    """
    lines: list[str] = []
    config, rows = run.config, run.rows
    for number, meta in enumerate(rows.metas):
        dataset_rows = rows.select_datasets([number])
        (episodes,) = dataset_rows.episodes
        look = look_at(meta, episodes, replace(dataset_rows.features, image_size=None), 1 / len(rows.metas))
        lines.append(f"Looked at    {meta.root}: {look}")
        if not look.problems:
            continue
        bad_episodes, texts = sorted(look.problems), list(look.problems.values())
        # --dataset.on_error=skip does not skip values that are not finite, so they come first.
        example = next((text for text in texts if "not finite" in text), texts[0])
        if config.dataset.on_error == "skip" and "not finite" not in example and len(bad_episodes) < look.episodes:
            lines.append(f"             {len(bad_episodes)} of them will be skipped, by --dataset.on_error: {example}")
            continue
        if len(bad_episodes) == look.episodes:
            raise ValueError(f"{example} (all {look.episodes} checked episodes have this or a similar fault)")
        raise ValueError(
            f"{example}. Of {len(episodes)} episodes {look.episodes} were checked, and {len(bad_episodes)} have "
            f"this or a similar fault; to go on without them: {exclusion(config, rows.members, {number: bad_episodes})}"
        )
    return lines
