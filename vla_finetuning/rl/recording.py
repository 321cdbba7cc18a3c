"""Record the episodes of `grpo.py` as a LeRobot dataset (`--grpo.record_dataset`).

Each training process writes a file per iteration with its episodes' lines and executed actions. A resumed run replaces
the files of iterations that it plays again. When the run is done, tasks of the cluster replay the actions with
rendering on, and write the dataset (`rollouts/recording.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vla_finetuning.buckets.mirror import address, contents, pull, remove
from vla_finetuning.files import read_lines, write_whole
from vla_finetuning.rl.resolve import GrpoRun
from vla_finetuning.rollouts.episodes import PlayedEpisode, pack_actions, unpack_actions
from vla_finetuning.rollouts.player import Eyes
from vla_finetuning.rollouts.recording import is_recorded, record_played
from vla_finetuning.training.worker import Worker

FOLDER, FLAG = "rollouts", "--grpo.record_dataset"


def is_iteration_recorded(run: GrpoRun, iteration: int) -> bool:
    """Return whether the episodes of an iteration, counted from 0, are to be recorded."""
    return run.options.record_dataset is not None and iteration % run.options.record_every == 0


def remove_episodes(output_dir: Path, first: int) -> None:
    """Remove the files of iterations from `first` on: an earlier attempt may have had more ranks. Runs on rank 0."""
    for name in contents(output_dir / FOLDER):
        if name.endswith(".jsonl") and int(name.partition("-")[0]) >= first:
            remove(output_dir / FOLDER / name)


def write_episodes(output_dir: Path, iteration: int, worker: Worker, episodes: Iterable[PlayedEpisode]) -> None:
    """Write a process's episodes of an iteration atomically; in a bucket, before the next checkpoint."""
    path = output_dir / FOLDER / f"{iteration:06d}-{worker.rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = (json.dumps({**line, **pack_actions(actions)}) + "\n" for line, actions in episodes)
    write_whole(path, "".join(lines))


def read_episodes(run: GrpoRun) -> Iterator[PlayedEpisode]:
    """Yield the episodes of the iterations to record, in order; an earlier attempt may have recorded more."""
    folder = run.job.output_dir / FOLDER
    pull(folder)
    for path in sorted(folder.glob("*.jsonl")):
        for text in read_lines(path) if is_iteration_recorded(run, int(path.name.partition("-")[0])) else ():
            line = json.loads(text)
            yield line, unpack_actions(line)


def pending_dataset(run: GrpoRun) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and description of the dataset to write; None if there is none, or it is written already."""
    if run.options.record_dataset is None:
        return None
    root = Path(run.options.record_dataset)
    about = {
        "policy": run.policy.base,
        "environment": {"type": run.config.env_type, "options": run.config.env_options},
        "learning": {"run": run.job.start.stream, "iterations": run.job.steps, "every": run.options.record_every},
    }
    return None if is_recorded(root, about, FLAG) else (root, about)


def check_episodes(run: GrpoRun, iterations: int) -> None:
    """Raise ValueError if an iteration before `iterations` is to be recorded and its episodes are not on disk."""
    expected = {i for i in range(iterations) if is_iteration_recorded(run, i)}
    recorded = {int(name.partition("-")[0]) for name in contents(run.job.output_dir / FOLDER)}
    if missing := len(expected - recorded):
        raise ValueError(
            f"{address(run.job.output_dir)} lacks the episodes of {missing} of {len(expected)} iterations, which "
            f"were played without {FLAG}, or with a larger --grpo.record_every: both must be given from the first "
            "iteration on"
        )


def record_rollouts(run: GrpoRun) -> None:
    """Write the dataset, unless it exists. Runs on the driver, connected to the run's cluster."""
    if (destination := pending_dataset(run)) is None:
        return
    check_episodes(run, run.job.steps)
    (root, about), episodes = destination, list(read_episodes(run))
    record_played(root, run.scene.makers, Eyes(run.scene.env, run.policy.config), episodes, about)
