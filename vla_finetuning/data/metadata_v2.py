"""Read the tables of LeRobot's formats v2.0 and v2.1: one file per episode, and JSON lines in `meta/`.

    meta/tasks.jsonl            {"task_index": 0, "task": "pick up the bottle"}
    meta/episodes.jsonl         {"episode_index": 0, "tasks": ["pick up the bottle"], "length": 393}
    meta/episodes_stats.jsonl   v2.1: {"episode_index": 0, "stats": {"action": {"min": [...], ..., "count": [393]}}}
    meta/stats.json             v2.0: statistics of all rows

The results have the form of `metadata_v3`. Layout: LeRobot 0.3, `lerobot/datasets/utils.py`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np

from vla_finetuning.data.episode_table import EpisodeTable, check_instruction
from vla_finetuning.data.limits import MAX_EPISODES_BYTES, MAX_LINE_BYTES, MAX_TASKS_BYTES
from vla_finetuning.data.paths import MAX_INDEX, read_lines

VERSIONS = ("v2.0", "v2.1")
TASKS_PATH, EPISODES_PATH, STATS_PATH = "meta/tasks.jsonl", "meta/episodes.jsonl", "meta/episodes_stats.jsonl"
# Defaults for info.json.
TEMPLATES = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
Stats = dict[str, dict[str, np.ndarray]]
# Episodes whose statistics are joined in one batch.
JOINED_EPISODES = 64
# Limit of the joined statistics of all features.
JOINED_STATS_BYTES = 16 * 2**20


def read_tasks(fs: fsspec.AbstractFileSystem, base: str) -> dict[int, str]:
    """Read the instructions, by `task_index`. Raises ValueError, FileNotFoundError."""
    tasks: dict[int, str] = {}
    for label, line in _lines(fs, base, TASKS_PATH, MAX_TASKS_BYTES):
        index = _whole_number(label, line, "task_index", 0)
        text = line.get("task")
        if not isinstance(text, str):
            raise ValueError(f"{label}: task is {text!r:.100}, expected a text")
        check_instruction(f"{label}: task {index}", text)
        if tasks.setdefault(index, text) != text:
            raise ValueError(f"{label}: task_index {index} is both {tasks[index]!r:.100} and {text!r:.100}")
    return tasks


def read_episodes(fs: fsspec.AbstractFileSystem, base: str, video_keys: Sequence[str]) -> EpisodeTable:
    """Read `meta/episodes.jsonl`. Every episode has its own files and begins at row 0."""
    index, length, tasks = [], [], []
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    for label, line in _lines(fs, base, EPISODES_PATH, MAX_EPISODES_BYTES):
        index.append(_whole_number(label, line, "episode_index", 0))
        length.append(_whole_number(label, line, "length", 1))
        listed = line.get("tasks")
        listed = [listed] if isinstance(listed, str) else listed if isinstance(listed, list) else []
        texts = tuple(text for text in listed if isinstance(text, str))
        tasks.append(same.setdefault(texts, texts))
    columns: dict[str, np.ndarray] = {"episode_index": np.array(index, np.int64), "length": np.array(length, np.int64)}
    for prefix in ("data", *(f"videos/{key}" for key in video_keys)):
        # Paths are made of the episode's number (`TEMPLATES`).
        columns[f"{prefix}/chunk_index"] = np.zeros(len(index), np.int32)
        columns[f"{prefix}/file_index"] = columns["episode_index"].astype(np.int32)
    for key in video_keys:
        columns[f"videos/{key}/from_timestamp"] = np.zeros(len(index))
    return EpisodeTable(columns, tasks)


def read_stats(fs: fsspec.AbstractFileSystem, base: str, parsed: Any, not_read: list[str]) -> Stats:
    """Join the statistics of the episodes to statistics of all rows, as LeRobot's `aggregate_stats` does.

    Skip features that some episode lacks or has in another shape, and append a line for each to `not_read`. `parsed`
    makes arrays of the JSON of an episode's statistics, given its location too.
    """
    joined: Stats = {}
    counts: Counter[str] = Counter()
    episodes = 0

    def by_episode() -> Iterator[Mapping[str, dict[str, np.ndarray]]]:
        for label, line in _lines(fs, base, STATS_PATH, None):
            if not isinstance(stats := line.get("stats"), dict):
                raise ValueError(f"{label}: stats is {stats!r:.50}, expected an object")
            yield parsed(stats, label)

    # Batches bound memory: a dataset may have a gigabyte of statistics.
    for batch in itertools.batched(by_episode(), JOINED_EPISODES):
        episodes += len(batch)
        # Joined statistics have the form of an episode's, with a larger count.
        group = {key: [values] for key, values in joined.items()}
        for episode_stats in batch:
            for key, values in episode_stats.items():
                if {"min", "max", "mean", "std", "count"} <= values.keys() and counts[key] >= 0:
                    group.setdefault(key, []).append(values)
                    counts[key] += 1
        for key, values_of_episodes in group.items():
            try:
                joined[key] = _joined(key, values_of_episodes)
            except ValueError as error:
                not_read.append(str(error))
                joined.pop(key, None)
                counts[key] = -1
        if sum(array.nbytes for values in joined.values() for array in values.values()) > JOINED_STATS_BYTES:
            raise ValueError(
                f"{STATS_PATH}: statistics of {len(joined):,} features, more than the "
                f"{JOINED_STATS_BYTES / 2**20:,.0f} MiB that they may have together: the file is damaged; restore it, "
                "or remove it to have them computed again"
            )
    for key in [key for key in joined if counts[key] < episodes]:
        not_read.append(f"{STATS_PATH}: statistics of {key!r:.100}, which not all of {episodes} episodes have")
        del joined[key]
    return joined


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


def _joined(key: str, episode_stats: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Combine the statistics of episodes: extremes, and mean and variance by the parallel formula."""
    names = ("min", "max", "mean", "std")
    try:
        low, high, mean, std = (np.stack([stats[name] for stats in episode_stats]) for name in names)
        count = np.stack([stats["count"] for stats in episode_stats]).astype(np.float64)
        weight = (count / count.sum(0)).reshape(-1, *[1] * (mean.ndim - 1))
    except ValueError as error:
        raise ValueError(f"{STATS_PATH}: the statistics of {key!r:.100} differ in shape between episodes") from error
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
