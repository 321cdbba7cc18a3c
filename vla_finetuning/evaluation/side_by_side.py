"""Play several policies, or one policy under several conditions, on the same scenes; score and film them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.envs.protocol import Maker
from vla_finetuning.evaluation.intervals import score
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.rollouts.episodes import Condition, Line, episode_key, episode_list
from vla_finetuning.rollouts.player import PolicySource
from vla_finetuning.rollouts.replay import make_films
from vla_finetuning.rollouts.servers import play


class SideBySide:
    """The results of the same episodes under each condition. The constructor plays them, as `servers.play`.

    Args:
        sources: policies by the names in `Condition.policy`.
        count: episodes per task.
        first_seed: seed of a task's first episode; the others count up.
        seed: seed of the policies' noise.
        number: as for `episode_list`.
    """

    def __init__(
        self,
        conditions: Mapping[str, Condition],
        sources: Mapping[str, PolicySource],
        makers: Mapping[str, Maker],
        options: EvalOptions,
        *,
        count: int,
        first_seed: int,
        seed: int,
        use_gpu: bool,
        number: Callable[[str, int], int] = lambda _, i: i,
    ):
        self._makers = makers
        self._lines: dict[tuple[Any, ...], Line] = {}
        self._actions: dict[tuple[Any, ...], np.ndarray] = {}

        def on_end(line: Line, actions: np.ndarray | None) -> None:
            self._lines[episode_key(line)] = line
            if actions is not None:
                self._actions[episode_key(line)] = actions

        play(
            episode_list(conditions, makers, count, first_seed, number),
            conditions,
            {name: source.shared() for name, source in sources.items()},
            makers,
            options,
            seed=seed,
            use_gpu=use_gpu,
            on_end=on_end,
        )

    def played(self, condition: str) -> list[Line]:
        """Return the lines of a condition's episodes without an error, in the same order for all conditions."""
        lines = (line for key, line in sorted(self._lines.items()) if key[0] == condition)
        return [line for line in lines if line["error"] is None]

    def score(self, condition: str, label: str) -> dict[str, Any]:
        """Return `intervals.score` of a condition's episodes, and `label`."""
        return {"label": label, **score([line for key, line in self._lines.items() if key[0] == condition])}

    def films(self, folder: Path, chosen: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Make films of the chosen (label, line) pairs, as `make_films`."""
        return make_films(
            folder, self._makers, [(label, line, self._actions[episode_key(line)]) for label, line in chosen]
        )
