"""Options of the environment, and of evaluations in it."""

from __future__ import annotations

from dataclasses import dataclass

from vla_finetuning.options.fields import option

# File in meta/ of a simulated dataset, and in policies that were trained on it: how the simulator rendered images.
ENVIRONMENT_NAME = "environment.json"


@dataclass
class EnvironmentOptions:
    """The environment."""

    env_type: str | None = option(
        None,
        "An environment, as LeRobot names it: two_bins, metaworld; gym: any that gymnasium registers.",
        flag="env.type",
    )
    env_options: list[str] = option(
        [],
        "An option of the environment itself: --env.task reach-v3. --env.discover_packages_path PACKAGE registers "
        "environments of your own (docs/simulators.md).",
        flag="env.*",
        requires={"env.type": "in which environment?"},
    )


@dataclass
class EvalOptions:
    """Evaluation in an environment. None of it changes what comes out."""

    n_episodes: int = option(50, "Episodes to play, of each task.", min=1)
    batch_size: int = option(32, "Rows that a policy decides for at once, at most.", min=1)
    exact: bool = option(
        False,
        "Fill every batch up to batch_size, and compute it in one thread on CPUs: rounding then depends neither on how "
        "many episodes happen to wait nor on the machine's cores.",
    )
    env_actors: int | None = option(
        None, "Processes that simulate, half a CPU each; as many as there is capacity for when absent.", min=1
    )
    policy_actors: int | None = option(
        None,
        "Processes that decide, half a CPU each and a GPU where there are any; when absent one on a GPU, or up to four "
        "on CPUs.",
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


def check_recorded(root: str | None, flag: str) -> None:
    """Refuse an address of an object store as the folder of a recorded dataset."""
    if root is not None and "://" in root:
        raise ValueError(
            f"{flag}={root}: datasets are written to a disk; give a path (on a cluster, one that all nodes share), and "
            "copy the folder to the bucket when it is done"
        )
