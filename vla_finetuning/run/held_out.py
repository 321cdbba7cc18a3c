"""Which of the held-out rows a run computes its held-out loss over. A function of the metadata alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_finetuning.data.plan import evenly_spaced
from vla_finetuning.run.plan import Run


@dataclass(frozen=True)
class HeldOutRows:
    """Rows of the held-out episodes, by their places in stored order (`Run.held_out`).

    Attributes:
        positions: int64 (N,), ascending. task: int64 (N,), of each a place in `tasks`. tasks: the instructions that
            the held-out episodes have, each episode its first.
        held_out: all rows there are.
    """

    positions: np.ndarray
    task: np.ndarray
    tasks: tuple[str, ...]
    held_out: int


def held_out_rows(run: Run) -> HeldOutRows:
    """All of them, or as many of every task as --max_eval_samples leaves to it, at least one: evenly spaced.

    `lerobot-train` (0.6.1) takes as many from the front of each task, which may all be of one episode's beginning.
    """
    tasks: dict[str, int] = {}
    of_episode, lengths = [], []
    for meta, episodes in zip(run.metas, run.eval_episodes, strict=True):
        for episode in episodes.tolist():
            of_episode.append(tasks.setdefault((meta.episode_tasks[episode] or ("",))[0], len(tasks)))
            lengths.append(int(meta.episode_length[episode]))
    task = np.repeat(np.array(of_episode, np.int64), lengths)
    positions = np.arange(len(task))
    if limit := run.config.max_eval_samples:
        of_each = [np.flatnonzero(task == number) for number in range(len(tasks))]
        chosen = [rows[evenly_spaced(len(rows), max(1, limit // len(tasks)))] for rows in of_each]
        positions = np.sort(np.concatenate(chosen))
    return HeldOutRows(positions, task[positions], tuple(tasks), len(task))
