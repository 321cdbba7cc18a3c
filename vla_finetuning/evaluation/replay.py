"""Films of evaluated episodes: made by replays in Ray tasks, and listed for the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from vla_finetuning.envs.film import film
from vla_finetuning.evaluation.closed_loop import STAGE_CPUS
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import FILMS

# For all pictures of an evaluation together: they are no reason to wait for ever.
LIMIT_S = 300.0


def make_films(
    folder: Path,
    makers: Mapping[str, Callable[[], Any]],
    chosen: Sequence[tuple[str, Mapping[str, Any], np.ndarray]],
    limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:
    """Pictures of episodes, in `folder`/films: what a page shows (`report.loop`).

    Runs on the driver, joined to a cluster. An episode that cannot be shown says why, and costs nothing else.

    Args:
        makers: of each task's environment, as a process is to make it. chosen: (title, line, actions) of each.
    Returns:
        For each: `{"title", "file": in it, "instruction", "seed", "success", "steps", "problem": None or why
        there is no file}`.
    """
    (folder / FILMS).mkdir(parents=True, exist_ok=True)
    task = ray.remote(num_cpus=STAGE_CPUS, max_retries=0)(film)
    tasks = [task.remote(makers[line["task"]], dict(line), actions) for _, line, actions in chosen]
    deadline, films = time.monotonic() + limit_s, []
    for made, (title, line, _) in zip(tasks, chosen, strict=True):
        file, problem = f"{'-'.join(_words(title, line['task'], line['seed']))}.webp", None
        if not ray.wait([made], timeout=max(0.0, deadline - time.monotonic()))[0]:
            ray.cancel(made, force=True)
            problem = f"playing it again took more than {limit_s:g} s"
        else:
            try:
                (folder / FILMS / file).write_bytes(ray.get(made))
            except Exception as error:  # whatever an environment may end with
                problem = root_cause(error)
        films.append(
            {
                **{"title": title, "file": None if problem else file, "problem": problem},
                **{key: line[key] for key in ("instruction", "seed", "steps")},
                "success": line["success_once"],
            }
        )
    return films


def _words(*names: Any) -> Iterator[str]:
    """What is left of names in a file's name."""
    for name in names:
        yield "".join(c if c.isalnum() else "_" for c in str(name))[:60]
