"""Write and read labels of frames: `value.py` writes them, `vla.py --recap.labels` reads them.

A parquet file has one row per frame: `dataset` (its root), `episode_index`, `frame_index`, `success` of the episode,
`intervention`, `return`, `value`, `advantage`, and the label `positive`; and, as JSON in its metadata, `scores`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.buckets.mirror import address, pull
from vla_finetuning.data.limits import MAX_LABELS_BYTES
from vla_finetuning.data.metadata import DatasetMetadata
from vla_finetuning.data.parquet_columns import numbers
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.files import file_digest
from vla_finetuning.options.recap import without_label
from vla_finetuning.run.exported import LABELS_NAME

FLAG = "--recap.labels"
COLUMNS = ("dataset", "episode_index", "frame_index", "positive")
SHOWN = ("advantage", "success")


def write_labels(
    path: Path,
    metas: Sequence[DatasetMetadata],
    episodes: Sequence[np.ndarray],
    columns: Mapping[str, np.ndarray],
    scores: Mapping[str, float | None] | None = None,
) -> None:
    """Write one row for each frame of `episodes` per dataset, atomically; `columns` are (F,), with `positive`."""
    root, episode, frame = [], [], []
    for number, (meta, chosen) in enumerate(zip(metas, episodes, strict=True)):
        length = meta.episode_length[chosen]
        root.append(np.full(length.sum(), number, np.int32))
        episode.append(np.repeat(chosen, length))
        frame.append(np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length))
    names = pa.DictionaryArray.from_arrays(np.concatenate(root), pa.array([meta.root for meta in metas]))
    index_columns = {"dataset": names, "episode_index": np.concatenate(episode), "frame_index": np.concatenate(frame)}
    table = pa.table({**index_columns, **columns}, metadata={"scores": json.dumps(scores or {})})
    partial = path.with_name(f".{path.name}")
    pq.write_table(table, partial)
    partial.replace(path)


def read_labels(
    path: Path, metas: Sequence[DatasetMetadata], episodes: Sequence[np.ndarray]
) -> tuple[tuple[np.ndarray, ...], str]:
    """Read which frames are positive: bool (F,) per dataset, False for frames without a label; and the file's digest.

    Raises ValueError if the file was not written by `write_labels`, or lacks a dataset or a frame of `episodes`.
    """
    rows, digest = _read_table(path, COLUMNS), file_digest(path)
    labels = []
    for meta, chosen in zip(metas, episodes, strict=True):
        index, dataset_rows = _select_rows(rows, path, meta, alone=len(metas) == 1)
        labelled, positive = np.zeros(meta.total_frames, bool), np.zeros(meta.total_frames, bool)
        labelled[index] = True
        positive[index] = dataset_rows["positive"].to_numpy()
        required = np.zeros(meta.num_episodes, bool)
        required[chosen] = True
        without = np.repeat(required, meta.episode_length) & ~labelled
        if without.any():
            number = int(np.repeat(meta.episode_index, meta.episode_length)[without][0])
            raise ValueError(
                f"{FLAG}={path}: {without.sum()} frames have no label, the first in episode {number} of {meta.root}: "
                "give value.py the same episodes"
            )
        labels.append(positive)
    return tuple(labels), digest


def show_labels(path: Path, meta: DatasetMetadata) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return a table of a dataset's labels, over all frames and by task; advantage and success of each frame, (F,).

    Errors are those of `read_labels`, but episodes without labels are allowed.
    """
    index, rows = _select_rows(_read_table(path, (*COLUMNS, *SHOWN)), path, meta, alone=True)
    advantage, success, positive = (rows[name].to_numpy() for name in (*SHOWN, "positive"))
    texts = np.array([without_label(texts[0]) if texts else "" for texts in meta.episode_tasks])
    task = np.repeat(texts, meta.episode_length)[index]
    width = "{:>9} {:>9} {:>13} {:>12} {:>26}  {}"
    heads = ("frames", "positive", "of successes", "of failures", "5 % to 95 % of advantages", "task")
    lines = [width.format(*heads)]
    for name in (None, *dict.fromkeys(task.tolist())):
        mask = np.ones(len(task), bool) if name is None else task == name
        shares = (f"{positive[m].mean():.1%}" if m.any() else "" for m in (mask, mask & success, mask & ~success))
        low, high = np.quantile(advantage[mask], [0.05, 0.95])
        lines.append(
            width.format(f"{mask.sum():,}", *shares, f"{low:.3f} to {high:.3f}", "all" if name is None else name)
        )
    return lines, advantage, success


def _read_table(path: Path, columns: Sequence[str]) -> pa.Table:
    pull(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{FLAG}={address(path)}: no such file; python value.py writes it into its --output_dir"
        )
    with open_parquet(LocalFileSystem(), str(path), name=address(path)) as file:
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise ValueError(f"{FLAG}={path} lacks the columns {missing}; give the {LABELS_NAME} of a run of value.py")
        return read_columns(file, list(columns), Budget("frames", MAX_LABELS_BYTES))


def _select_rows(rows: pa.Table, path: Path, meta: DatasetMetadata, alone: bool) -> tuple[np.ndarray, pa.Table]:
    """Select the rows of a dataset; return the index of each row's frame in the dataset, int64 (N,), and the rows.

    If the dataset is `alone`, its root may differ from the file's.
    """
    roots = rows["dataset"].unique().to_pylist()
    root = roots[0] if len(roots) == 1 and alone else meta.root  # the dataset may have been moved
    if root not in roots:
        raise ValueError(f"{FLAG}={path} has labels of {roots}, and none of {meta.root}")
    dataset_rows = rows.filter(pc.equal(rows["dataset"].cast(pa.string()), root))
    episode, frame = (
        numbers(dataset_rows[name], np.int64, (1,), f"{path}: column {name}").reshape(-1) for name in COLUMNS[1:3]
    )
    exists = (episode >= 0) & (episode < meta.num_episodes) & (frame >= 0)
    exists[exists] = frame[exists] < meta.episode_length[episode[exists]]
    if not exists.all():
        wrong = int(np.flatnonzero(~exists)[0])
        raise ValueError(
            f"{FLAG}={path}: episode {episode[wrong]} of {meta.root} has no frame {frame[wrong]}: the labels are "
            "of another dataset, or of an earlier version of it"
        )
    return (np.cumsum(meta.episode_length) - meta.episode_length)[episode] + frame, dataset_rows
