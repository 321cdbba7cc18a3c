"""Select the episodes of a dataset by number, exclusion, task and weight."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vla_finetuning.data.dataset import DatasetMetadata, select_episodes
from vla_finetuning.files import read_foreign_json

# Episode numbers; {root: numbers} with several datasets; None for no choice.
Choice = Sequence[int] | Mapping[str, Sequence[int]] | None


def read_choice(path: str | Path) -> Choice:
    """Read episode numbers from a JSON file: [3, 17], or {"/data/a": [3], "s3://bucket/b": [17]}."""
    try:
        choice = read_foreign_json(Path(path).expanduser())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; expected a JSON list of episodes") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not a JSON list of episodes: {error}") from error
    lists = list(choice.values()) if isinstance(choice, dict) else [choice]
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in lists):
        raise ValueError(f"{path}: expected a list of episodes, [3, 17], or one for each dataset, {{ROOT: [3, 17]}}")
    return choice


def of_each(choice: Choice, roots: Sequence[str], flag: str) -> list[Sequence[int] | None]:
    """Split `choice` by dataset; None for a dataset that it does not name."""
    if isinstance(choice, Mapping):
        if unknown := sorted(choice.keys() - set(roots)):
            raise ValueError(f"{flag} names {unknown}, which are not among the datasets {list(roots)}")
        return [choice.get(root) for root in roots]
    if choice is not None and len(roots) > 1:
        example = json.dumps({roots[0]: np.asarray(list(choice)[:3]).tolist()})
        raise ValueError(f"{flag} with several datasets must name the dataset: {flag}='{example}'")
    return [choice] * len(roots)


def choose_episodes(
    meta: DatasetMetadata,
    episodes: Sequence[int] | None = None,
    exclude: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    weight: np.ndarray | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Select episodes of a dataset, and return notes on the other episodes.

    Raises ValueError if an episode is not in the dataset, a pattern matches no task, or no episode is left.

    Args:
        episodes: candidates; None for all.
        tasks: shell patterns (*, ?, [...], case ignored); keep episodes with a matching or equal instruction.
        weight: weights of all episodes of the dataset; leave out episodes with weight 0.
    Returns:
        Episode numbers, int64, ascending, and the notes.
    """
    candidates = chosen = select_episodes(meta, episodes)
    if tasks is not None and not any(meta.episode_tasks):
        raise ValueError(f"{meta.root}: --dataset.tasks: the metadata names no task of any episode; leave it out")
    left_out = []
    if exclude is not None and len(exclude):
        chosen = np.setdiff1d(chosen, select_episodes(meta, exclude))
        left_out.append(f"{len(candidates) - len(chosen)} are left out by --dataset.exclude_episodes")
    if weight is not None and not weight[chosen].all():
        left_out.append(f"{len(chosen) - np.count_nonzero(weight[chosen])} have weight 0 by --dataset.episode_weights")
        chosen = chosen[weight[chosen] > 0]
    notes = []
    if tasks is not None:
        fitting = _fitting(meta, tasks, chosen)
        fits = set().union(*fitting.values())
        matching = [episode for episode in chosen.tolist() if fits.intersection(meta.episode_tasks[episode])]
        counts = (
            f"{pattern!r} {sum(bool(texts.intersection(meta.episode_tasks[e])) for e in matching)}"
            for pattern, texts in fitting.items()
        )
        by_pattern = f" (episodes by pattern: {', '.join(counts)})" if len(fitting) > 1 else ""
        left_out.append(f"{len(chosen) - len(matching)} have no task that --dataset.tasks names{by_pattern}")
        chosen = np.asarray(matching, np.int64)
        if mixed := [episode for episode in matching if not fits.issuperset(meta.episode_tasks[episode])]:
            notes.append(
                f"{meta.root}: {len(mixed)} of the episodes that --dataset.tasks chooses have other tasks too (episode "
                f"{mixed[0]}: {list(meta.episode_tasks[mixed[0]])}), and are trained on as a whole"
            )
    if not len(chosen):
        raise ValueError(f"{meta.root}: no episode is left of {len(candidates)}: {'; '.join(left_out)}")
    if left_out:
        notes.insert(0, f"{meta.root}: {len(chosen)} of {meta.total_episodes} episodes are used: {'; '.join(left_out)}")
    return chosen, notes


def tasks_of(meta: DatasetMetadata, episodes: Sequence[int] | np.ndarray) -> list[str]:
    """Return the instructions of `episodes`, sorted, or all of the dataset if one of the episodes lists none."""
    listed = [meta.episode_tasks[int(episode)] for episode in episodes]
    return sorted({task for tasks in listed for task in tasks} if all(listed) else set(meta.tasks.values()))


def _fitting(meta: DatasetMetadata, patterns: Sequence[str], episodes: np.ndarray) -> dict[str, set[str]]:
    """Return the instructions that each pattern matches; each must match one of `episodes`."""
    if not patterns:
        raise ValueError(f"{meta.root}: --dataset.tasks names no pattern; leave it out for all tasks")
    all_tasks = sorted({task for tasks in meta.episode_tasks for task in tasks})
    available = {task for episode in episodes.tolist() for task in meta.episode_tasks[episode]}
    fitting: dict[str, set[str]] = {}
    for pattern in patterns:
        like = pattern.lower()
        matches = {task for task in all_tasks if like == task.lower() or fnmatch.fnmatchcase(task.lower(), like)}
        if not matches:
            close = difflib.get_close_matches(pattern, all_tasks, n=3, cutoff=0.0)
            raise ValueError(
                f"{meta.root}: no task is like --dataset.tasks {pattern!r}; it has {len(all_tasks)}, for example "
                f"{', '.join(map(repr, close))}"
            )
        if not matches & available:
            raise ValueError(
                f"{meta.root}: no episode is left with a task like --dataset.tasks {pattern!r}: none of the "
                f"{len(episodes)} that the other options choose has {sorted(matches)[0]!r}; leave the pattern out, or "
                "choose others too"
            )
        fitting[pattern] = matches
    return fitting
