"""Read and write an evaluation's folder: the fixed list of its episodes, their lines and their actions.

A score covers exactly this list. Does not use Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.buckets.mirror import address, pull, push, remove
from vla_finetuning.files import append_line, drop_half_line, read_json, read_json_lines, write_json, write_whole
from vla_finetuning.rollouts.episodes import Episode, episode_key, pack_actions, unpack_actions

EPISODES_NAME, EVALUATED_NAME, ACTIONS_NAME = "episodes.jsonl", "evaluated.json", "actions.jsonl"


class EvaluationFolder:
    """The writer of an evaluation's folder; resumes an evaluation with equal `about` and `episodes`.

    One process writes to it. `about` is all that decides results, as JSON. Raises ValueError if the folder holds
    another evaluation, unless this one `replaces` it.

    Attributes:
        pending: episodes of the list that are still to play; those that ended in an error are played again.
    """

    def __init__(
        self, folder: Path, about: Mapping[str, Any], episodes: Sequence[Episode], replaces: bool = False
    ) -> None:
        self._path = folder / EPISODES_NAME
        about = json.loads(json.dumps({**about, "episodes": [asdict(episode) for episode in episodes]}))
        folder.mkdir(parents=True, exist_ok=True)
        pull(folder)
        stored = read_json(folder / EVALUATED_NAME)
        if stored and stored != about and replaces:
            remove(folder)
            folder.mkdir(exist_ok=True)
        elif stored and stored != about:
            differ = sorted(key for key in stored.keys() | about.keys() if stored.get(key) != about.get(key))
            raise ValueError(
                f"{address(folder)} holds another evaluation: it differs in {', '.join(differ)}. Choose another "
                "--output_dir, or give the same flags to go on with it"
            )
        elif not stored and self._path.exists():
            raise ValueError(f"{address(self._path)} is there without {EVALUATED_NAME}: choose another --output_dir")
        write_json(folder / EVALUATED_NAME, about)
        push(folder / EVALUATED_NAME)  # before episodes.jsonl, which is refused without it
        lines = read_json_lines(self._path)
        done = {episode_key(line): line for line in lines if line["error"] is None}
        self.pending = [episode for episode in episodes if episode_key(vars(episode)) not in done]
        drop_half_line(folder / ACTIONS_NAME)
        # Drop an incomplete last line, and failed episodes, which are played again.
        write_whole(self._path, "".join(f"{json.dumps(line)}\n" for line in done.values()))

    def write(self, line: Mapping[str, Any], actions: np.ndarray | None = None) -> None:
        """Append an episode's actions, (steps, A), without loss, and then its line."""
        if actions is not None:
            named = {name: line[name] for name in Episode.__dataclass_fields__}
            append_line(self._path.parent / ACTIONS_NAME, json.dumps({**named, **pack_actions(actions)}))
        append_line(self._path, json.dumps(line))


def read_actions(folder: Path) -> dict[tuple[Any, ...], np.ndarray]:
    """Return the executed actions, (steps, A), of each played episode by `episode_key`."""
    return {episode_key(line): unpack_actions(line) for line in read_json_lines(folder / ACTIONS_NAME)}


def read_evaluation(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the `about` of an evaluation, and its lines in the order of its list, none of which may be missing."""
    pull(folder)
    about = read_json(folder / EVALUATED_NAME)
    if not about:
        raise FileNotFoundError(
            f"{address(folder)} holds no evaluation: no {EVALUATED_NAME} (evaluate.py --output_dir writes it)"
        )
    lines = {episode_key(line): line for line in read_json_lines(folder / EPISODES_NAME)}
    missing = [episode for episode in about["episodes"] if episode_key(episode) not in lines]
    if missing:
        raise ValueError(
            f"{address(folder)}: {len(missing)} of {len(about['episodes'])} episodes are not done; give evaluate.py "
            "the same flags again to go on"
        )
    return about, [lines[episode_key(episode)] for episode in about["episodes"]]
