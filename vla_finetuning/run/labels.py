"""Labels of frames, beside the datasets that they are of: `value.py` writes them, `vla.py --recap.labels` reads them.

A parquet file with a row for each frame: `dataset` (its root), `episode_index`, `frame_index`, what was found of it
(`success` of its episode, `intervention`, `return`, `value`, `advantage`), and `positive`, which is the label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.data.limits import MAX_DATA_BYTES
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.number_cache import numbers
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.run.checkpoint import file_digest

LABELS_NAME = "labels.parquet"
FLAG = "--recap.labels"
COLUMNS = ("dataset", "episode_index", "frame_index", "positive")


def write_labels(
    path: Path,
    metas: Sequence[DatasetMetadata],
    episodes: Sequence[np.ndarray],
    columns: Mapping[str, np.ndarray],
) -> None:
    """Write a row for each frame of some episodes, whole or not at all.

    Args:
        episodes: int64, by dataset. columns: of their frames in that order, (F,) each; `positive` among them.
    """
    root, episode, frame = [], [], []
    for number, (meta, own) in enumerate(zip(metas, episodes, strict=True)):
        length = meta.episode_length[own]
        root.append(np.full(length.sum(), number, np.int32))
        episode.append(np.repeat(own, length))
        frame.append(np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length))
    names = pa.DictionaryArray.from_arrays(np.concatenate(root), pa.array([meta.root for meta in metas]))
    known = {"dataset": names, "episode_index": np.concatenate(episode), "frame_index": np.concatenate(frame)}
    partial = path.with_suffix(".partial")
    pq.write_table(pa.table({**known, **columns}), partial)
    partial.replace(path)


def read_labels(
    path: Path, metas: Sequence[DatasetMetadata], episodes: Sequence[np.ndarray]
) -> tuple[tuple[np.ndarray, ...], str]:
    """Which frames are positive, by dataset: bool (F,), False of episodes that are not asked for; the file's digest.

    Args:
        episodes: int64, by dataset: those whose frames must all have a label. The file may have others.
    Raises:
        ValueError: no such file as `write_labels` makes, or it lacks a dataset or a frame. FileNotFoundError: no file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{FLAG}={path}: no such file; python value.py writes it into its --output_dir")
    with open_parquet(LocalFileSystem(), str(path)) as file:
        if lacking := [name for name in COLUMNS if name not in file.schema_arrow.names]:
            raise ValueError(f"{FLAG}={path} lacks the columns {lacking}; give the {LABELS_NAME} of a run of value.py")
        rows = read_columns(file, list(COLUMNS), Budget("frames", None, MAX_DATA_BYTES), name=str(path))
    known = rows["dataset"].unique().to_pylist()
    found = []
    for meta, own in zip(metas, episodes, strict=True):
        # One dataset may have been moved since; of several, only their names tell which is which.
        root = known[0] if len(known) == len(metas) == 1 else meta.root
        if root not in known:
            raise ValueError(f"{FLAG}={path} has labels of {known}, and none of {meta.root}")
        of_it = rows.filter(pc.equal(rows["dataset"].cast(pa.string()), root))
        episode, frame = (
            numbers(of_it[name], np.int64, (1,), f"{path}: column {name}").reshape(-1) for name in COLUMNS[1:3]
        )
        there = (episode >= 0) & (episode < meta.num_episodes) & (frame >= 0)
        there[there] = frame[there] < meta.episode_length[episode[there]]
        if not there.all():
            wrong = int(np.flatnonzero(~there)[0])
            raise ValueError(
                f"{FLAG}={path}: episode {episode[wrong]} of {meta.root} has no frame {frame[wrong]}: the labels are "
                "of another dataset, or of an earlier version of it"
            )
        index = (np.cumsum(meta.episode_length) - meta.episode_length)[episode] + frame
        labelled, positive = np.zeros(meta.total_frames, bool), np.zeros(meta.total_frames, bool)
        labelled[index] = True
        positive[index] = of_it["positive"].to_numpy()
        wanted = np.zeros(meta.num_episodes, bool)
        wanted[own] = True
        without = np.repeat(wanted, meta.episode_length) & ~labelled
        if without.any():
            number = int(np.repeat(meta.episode_index, meta.episode_length)[without][0])
            raise ValueError(
                f"{FLAG}={path}: {without.sum()} frames have no label, the first in episode {number} of {meta.root}: "
                "give value.py the same episodes"
            )
        found.append(positive)
    return tuple(found), file_digest(path)
