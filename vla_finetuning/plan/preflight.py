"""Check a run's folder and datasets within a second, before a program imports PyTorch, LeRobot and Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vla_finetuning.buckets.mirror import address
from vla_finetuning.options.fields import decided
from vla_finetuning.options.job import JobOptions
from vla_finetuning.options.programs import Config, ValueConfig
from vla_finetuning.plan.datasets import Datasets, find_datasets
from vla_finetuning.plan.episodes import choose
from vla_finetuning.plan.paths import with_absolute_paths
from vla_finetuning.run.checkpoint import latest_checkpoint
from vla_finetuning.run.exported import result_of, result_problem
from vla_finetuning.run.folder import CHECKPOINTS_NAME, check_folder, is_finished, resumption
from vla_finetuning.terminal import print_safe


@dataclass(frozen=True)
class Examined:
    """The result of `examine`: the options with absolute paths, and datasets but of grpo.py and a finished run."""

    config: Any
    datasets: Datasets | None = None
    finished: bool = False

    def __str__(self) -> str:
        return "flags and folder" + (f"; {self.datasets}" if self.datasets else "")


def examine(config: JobOptions) -> Examined:
    """Check the folder and the datasets of a run. Raises OSError or ValueError saying what to do."""
    config = with_absolute_paths(config)
    check_folder(config)
    if nothing_left(config):
        return Examined(config, finished=True)
    if config.resume:
        print_safe(f"Resuming     {resumption(config.folder)}")
    if isinstance(config, ValueConfig):
        training, datasets = find_datasets(config.training())
        return Examined(decided(config, {"dataset.revision": training.dataset.revision}), datasets)
    if not isinstance(config, Config):
        return Examined(config)
    config, datasets = find_datasets(config)
    choose(config, datasets)
    return Examined(config, datasets)


def nothing_left(config: JobOptions) -> bool:
    """Return whether the resumed run is finished and its result complete; print so, or that it is written again."""
    if not is_finished(config):
        return False
    done, (name, path) = f"Finished     the run in {address(config.folder)} did all of its steps", result_of(config)
    if problem := result_problem(config):
        print_safe(f"{done}, but {problem}: it is written again")
        return False
    more = f"--resume with a larger {config.length_flags}"
    if latest_checkpoint(config.folder / CHECKPOINTS_NAME) is None:
        more = "a new run, because no checkpoint of this one can be used"
    print_safe(f"{done}: its {name}, {address(path)}; nothing is left to do. More steps: {more}")
    return True
