"""Read the tables of LeRobot's formats v2.0 and v2.1: one file per episode, and JSON lines in `meta/`.

    meta/tasks.jsonl            {"task_index": 0, "task": "pick up the bottle"}
    meta/episodes.jsonl         {"episode_index": 0, "tasks": ["pick up the bottle"], "length": 393}
    meta/episodes_stats.jsonl   v2.1: {"episode_index": 0, "stats": {"action": {"min": [...], ..., "count": [393]}}}
    meta/stats.json             v2.0: statistics of all rows

The results have the form of `metadata_v3`. Layout: LeRobot 0.3, `lerobot/datasets/utils.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np

from vla_finetuning.data.dataset import Stats, parse_stats
from vla_finetuning.data.episode_table import EpisodeTable, task_texts, texts_by_index
from vla_finetuning.data.limits import MAX_EPISODES_BYTES, MAX_LINE_BYTES, MAX_TASKS_BYTES
from vla_finetuning.data.paths import MAX_INDEX, read_lines

VERSIONS = ("v2.0", "v2.1")
TASKS_PATH, EPISODES_PATH, STATS_PATH = "meta/tasks.jsonl", "meta/episodes.jsonl", "meta/episodes_stats.jsonl"
# Defaults for info.json.
TEMPLATES = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
# Episodes whose statistics are joined in one batch.
JOINED_EPISODES = 64


def read_tasks(fs: fsspec.AbstractFileSystem, base: str) -> dict[int, str]:
    """Read the instructions, by `task_index`. Raises ValueError, FileNotFoundError."""
    rows = []
    for label, line in _lines(fs, base, TASKS_PATH, MAX_TASKS_BYTES):
        if not isinstance(text := line.get("task"), str):
            raise ValueError(f"{label}: task is {text!r:.100}, expected a text")
        rows.append((f"{label}: task_index", _whole_number(label, line, "task_index", 0), text))
    return texts_by_index(rows)


def read_episodes(fs: fsspec.AbstractFileSystem, base: str, video_keys: Sequence[str]) -> EpisodeTable:
    """Read `meta/episodes.jsonl`. Every episode has its own files and begins at row 0."""
    index, length, tasks = [], [], []
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    for label, line in _lines(fs, base, EPISODES_PATH, MAX_EPISODES_BYTES):
        index.append(_whole_number(label, line, "episode_index", 0))
        length.append(_whole_number(label, line, "length", 1))
        tasks.append(task_texts(line.get("tasks"), same))
    columns: dict[str, np.ndarray] = {"episode_index": np.array(index, np.int64), "length": np.array(length, np.int64)}
    for prefix in ("data", *(f"videos/{key}" for key in video_keys)):
        # Paths are made of the episode's number (`TEMPLATES`).
        columns[f"{prefix}/chunk_index"] = np.zeros(len(index), np.int32)
        columns[f"{prefix}/file_index"] = columns["episode_index"].astype(np.int32)
    for key in video_keys:
        columns[f"videos/{key}/from_timestamp"] = np.zeros(len(index))
    return EpisodeTable(columns, tasks)


def read_stats(fs: fsspec.AbstractFileSystem, base: str) -> Stats:
    """Join the statistics of the episodes to statistics of all rows, as LeRobot's `aggregate_stats` does.

    Features have none that some episode lacks or has in another shape.
    """

    def by_episode() -> Iterator[Stats]:
        for label, line in _lines(fs, base, STATS_PATH, None):
            if not isinstance(stats := line.get("stats"), dict):
                raise ValueError(f"{label}: stats is {stats!r:.50}, expected an object")
            yield parse_stats(stats)

    joined: list[Stats] = []
    # Batches bound memory: a dataset may have a gigabyte of statistics.
    for batch in itertools.batched(by_episode(), JOINED_EPISODES):
        parts = [*joined, *batch]  # joined statistics have the form of an episode's, with a larger count
        joined = [{}]
        for key in parts[0]:
            with contextlib.suppress(ValueError, KeyError):
                joined[0][key] = _joined([part[key] for part in parts])
    return joined[0] if joined else {}


def read_column(fs: fsspec.AbstractFileSystem, base: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the episode numbers, int64 (N,), and the values of the key `name`, float64 (N,), in meta/episodes.jsonl."""
    index, values = [], []
    for label, line in _lines(fs, base, EPISODES_PATH, MAX_EPISODES_BYTES):
        value = line.get(name)
        if not isinstance(value, (int, float)):
            usable = sorted(key for key, entry in line.items() if isinstance(entry, (int, float)))
            raise ValueError(f"{label}: {name} is {value!r:.50}, expected a number; those are {usable!s:.300}")
        index.append(_whole_number(label, line, "episode_index", 0))
        values.append(float(value))
    return np.array(index, np.int64), np.array(values)


def _joined(episode_stats: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Combine the statistics of episodes: extremes, and mean and variance by the parallel formula.

    Raises KeyError if an episode lacks one, and ValueError if shapes differ.
    """
    names = ("min", "max", "mean", "std", "count")
    low, high, mean, std, count = (np.stack([stats[name] for stats in episode_stats]) for name in names)
    count = count.astype(np.float64)
    weight = (count / count.sum(0)).reshape(-1, *[1] * (mean.ndim - 1))
    mean_of_all = (mean * weight).sum(0)
    variance = ((std**2 + (mean - mean_of_all) ** 2) * weight).sum(0)
    joined = {"min": low.min(0), "max": high.max(0), "mean": mean_of_all, "std": np.sqrt(variance)}
    return joined | {"count": count.sum(0).astype(np.int64)}


def _lines(
    fs: fsspec.AbstractFileSystem, base: str, path: str, most_bytes: int | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each with its label for errors."""
    for number, line in enumerate(read_lines(fs, base, path, most_bytes, MAX_LINE_BYTES), 1):
        label = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{label} is not valid JSON ({error}); restore the file") from error
        if not isinstance(value, dict):
            raise ValueError(f"{label}: expected a JSON object, found {type(value).__name__}")
        yield label, value


def _whole_number(label: str, line: Mapping[str, Any], name: str, least: int) -> int:
    value = line.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value < MAX_INDEX:
        raise ValueError(f"{label}: {name} is {value!r:.50}, expected a whole number from {least} to {MAX_INDEX - 1}")
    return value
