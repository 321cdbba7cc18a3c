"""Prepare labels of frames for a page: their distribution, and the values of some episodes beside their frames."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from vla_finetuning.data.limits import MAX_LABELS_BYTES
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.options.recap import without_label
from vla_finetuning.report import figures
from vla_finetuning.report.dataset_look import EpisodeReader
from vla_finetuning.report.figures import plain
from vla_finetuning.run.exported import LABELS_NAME

# Episodes of each outcome, frames of each of them, and the width of their strip in pixels; bins of advantages.
SHOWN, SHOWN_FRAMES, STRIP_WIDTH, BINS = 3, 8, 960, 40
COLUMNS = ["dataset", "episode_index", "frame_index", "success", "held_out", "value", "return", "advantage"]


def values_section(folder: Path) -> dict[str, Any] | None:
    """Return the template's values for a run's labels (`plan.labels`), or None if there are none."""
    if not (folder / LABELS_NAME).is_file():
        return None
    with open_parquet(LocalFileSystem(), str(folder / LABELS_NAME)) as file:
        scores = json.loads((file.schema_arrow.metadata or {}).get(b"scores", "{}"))  # earlier versions wrote none
        table = read_columns(file, COLUMNS, Budget("frames", MAX_LABELS_BYTES))
    columns = {name: table[name].to_numpy() for name in COLUMNS[1:]}
    episodes: list[dict[str, Any]] = []
    problem = None
    try:
        episodes.extend(_episodes(table["dataset"], columns))
    except (ValueError, OSError) as error:
        problem = f"Not all episodes could be shown: {error}"
    return {
        "labels": [[key, f"{value:.4g}"] for key, value in scores.items() if value is not None],
        "histogram": advantages_chart(columns["advantage"], columns["success"]),
        "episodes": episodes,
        "problem": problem,
    }


def advantages_chart(advantage: np.ndarray, success: np.ndarray) -> str:
    """Draw the distribution of the frames' advantages, (F,), for each outcome of their episodes, bool (F,), as SVG."""
    edges = np.histogram_bin_edges(advantage, BINS)
    lines = {}
    for name, mask in (("successful episodes", success), ("failed episodes", ~success)):
        counts = np.histogram(advantage[mask], edges)[0]
        lines[name] = ((edges[:-1] + edges[1:]) / 2, 100 * counts / max(1, counts.sum()))
    chart = figures.line_chart(lines, xlabel="advantage", ylabel="frames / %", from_zero=True)
    return figures.to_svg(chart, "Distribution of advantages of successful and of failed episodes")


def _episodes(root: pa.ChunkedArray, columns: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Draw SHOWN episodes of each outcome, failures and held-out episodes first."""
    first, dataset = np.flatnonzero(columns["frame_index"] == 0), cache(load_metadata)
    order = np.lexsort([~columns["held_out"][first], columns["success"][first]])
    shown = [n for outcome in (False, True) for n in order[columns["success"][first[order]] == outcome][:SHOWN]]
    for start, end in zip(first[shown], np.append(first[1:], len(columns["value"]))[shown], strict=True):
        episode, meta = int(columns["episode_index"][start]), dataset(root[int(start)].as_py())
        seconds = np.arange(end - start) / meta.fps
        title = f"episode {episode}, {'success' if columns['success'][start] else 'failure'}"
        lines = {name: (seconds, columns[name][start:end]) for name in ("value", "return")}
        chart = figures.line_chart(lines, xlabel="time in the episode / s", ylabel="value")
        cameras = [key for key in meta.camera_keys if not meta.features[key].is_depth][:1]
        batch = EpisodeReader(meta, cameras).read(episode, evenly_spaced(end - start, SHOWN_FRAMES))
        strips = [figures.to_data_uri(np.concatenate(list(batch[key]), axis=1), STRIP_WIDTH) for key in cameras]
        yield {
            "title": title,
            "instruction": plain(without_label((meta.episode_tasks[episode] or ("",))[0]), 120),
            "svg": figures.to_svg(chart, f"{title}: value and return over time"),
            "uri": strips[0] if strips else None,
        }
