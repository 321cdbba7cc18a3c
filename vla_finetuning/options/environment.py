"""Options of the environment, and of evaluations in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_finetuning.options.fields import option

# File in meta/ of a simulated dataset, and in policies that were trained on it: how the simulator rendered images.
ENVIRONMENT_NAME = "environment.json"


@dataclass
class EnvironmentOptions:
    """The environment."""

    env_type: str | None = option(
        None,
        "An environment by LeRobot's name, such as two_bins or metaworld. gym: any environment registered with "
        "gymnasium.",
        flag="env.type",
    )
    env_options: list[str] = option(
        [],
        "An option of the environment, such as --env.task reach-v3. --env.discover_packages_path PACKAGE registers "
        "environments of your own (docs/simulators.md).",
        flag="env.*",
        requires={"env.type": "in which environment?"},
    )


@dataclass
class EvalOptions:
    """Evaluation in an environment. Only n_episodes, and exact by rounding, change its result."""

    n_episodes: int = option(50, "Number of episodes to play in each task.", min=1)
    batch_size: int = option(32, "Maximum number of rows in a batch of the policy.", min=1)
    exact: bool = option(
        False,
        "Fill every batch up to batch_size, and compute it in one thread on CPUs. Rounding then depends neither on "
        "the number of waiting episodes nor on the machine's cores.",
    )
    env_actors: int | None = option(
        None, "Number of simulation processes, with half a CPU each. Default: as many as the capacity allows.", min=1
    )
    policy_actors: int | None = option(
        None,
        "Number of policy processes, with half a CPU each, and a GPU if there are any. Default: one on a GPU, or up "
        "to four on CPUs.",
        min=1,
    )


def describe_trial(environment: EnvironmentOptions, options: EvalOptions, every: int) -> list[str]:
    """Return the plan's lines on evaluations during training, `every` so many steps; 0 for the last step only."""
    if environment.env_type is None:
        return []
    when = f"every {every} steps and at the end" if every else "at the end"
    return [
        f"Environment  {' '.join([environment.env_type, *environment.env_options])}: checkpoints play "
        f"{options.n_episodes} episodes of each task, {when}, beside the training",
    ]


def check_recorded(root: str | None, flag: str, output_dir: str | None = None) -> None:
    """Refuse an address of an object store, or a folder that holds `output_dir`, as that of a recorded dataset."""
    if root is not None and "://" in root:
        raise ValueError(
            f"{flag}={root}: datasets are written to a disk; give a path (on a cluster, one that all nodes share), and "
            "copy the folder to the bucket when it is done"
        )
    inner, outer = (Path(folder or "").expanduser().resolve() for folder in (output_dir, root))
    if root and output_dir and inner.is_relative_to(outer):
        raise ValueError(f"{flag}={root} would hold the --output_dir {output_dir}: give another folder")
