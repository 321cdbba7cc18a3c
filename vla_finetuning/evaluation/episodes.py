"""Read and write an evaluation's folder: the fixed list of its episodes, their lines and their actions.

A score covers exactly this list. Does not use Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.buckets.mirror import address, pull
from vla_finetuning.files import append_line, drop_half_line, read_json, read_lines, write_json, write_whole
from vla_finetuning.rollouts.episodes import Episode, episode_key, pack_actions, unpack_actions

EPISODES_NAME, EVALUATED_NAME, ACTIONS_NAME = "episodes.jsonl", "evaluated.json", "actions.jsonl"


class OtherEvaluationError(ValueError):
    """The folder holds an evaluation with another `about`."""


class EvaluationFolder:
    """The writer of an evaluation's folder; resumes an evaluation with equal `about` and `episodes`.

    One process writes to it. `about` is all that decides results, as JSON.

    Attributes:
        done: lines of episodes that ended without an error, by `episode_key`.
    Raises:
        OtherEvaluationError: the folder holds another evaluation.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], episodes: Sequence[Episode]) -> None:
        self._path = folder / EPISODES_NAME
        about = json.loads(json.dumps({**about, "episodes": [asdict(episode) for episode in episodes]}))
        folder.mkdir(parents=True, exist_ok=True)
        pull(folder)
        stored = read_json(folder / EVALUATED_NAME)
        if stored and stored != about:
            differ = sorted(key for key in stored.keys() | about.keys() if stored.get(key) != about.get(key))
            raise OtherEvaluationError(
                f"{address(folder)} holds another evaluation: it differs in {', '.join(differ)}. Choose another "
                "--output_dir, or give the same flags to go on with it"
            )
        if not stored and self._path.exists():
            raise ValueError(f"{address(self._path)} is there without {EVALUATED_NAME}: choose another --output_dir")
        write_json(folder / EVALUATED_NAME, about)
        lines = [json.loads(line) for line in read_lines(self._path)]
        self.done = {episode_key(line): line for line in lines if line["error"] is None}
        drop_half_line(folder / ACTIONS_NAME)
        # Drop an incomplete last line, and failed episodes, which are played again.
        write_whole(self._path, "".join(f"{json.dumps(line)}\n" for line in self.done.values()))

    def write(self, line: Mapping[str, Any], actions: np.ndarray | None = None) -> None:
        """Append an episode's actions, (steps, A), without loss, and then its line."""
        if actions is not None:
            named = {name: line[name] for name in Episode.__dataclass_fields__}
            append_line(self._path.parent / ACTIONS_NAME, json.dumps({**named, **pack_actions(actions)}))
        append_line(self._path, json.dumps(line))

    def is_done(self, episode: Episode) -> bool:
        return episode_key(asdict(episode)) in self.done


def read_actions(folder: Path) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield the key fields and actions, (steps, A), of each played episode; a repeated episode occurs twice."""
    for text in read_lines(folder / ACTIONS_NAME):
        line = json.loads(text)
        yield {name: line[name] for name in Episode.__dataclass_fields__}, unpack_actions(line)


def read_evaluation(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the `about` of an evaluation, and its lines in the order of its list, none of which may be missing."""
    pull(folder)
    about = read_json(folder / EVALUATED_NAME)
    if not about:
        raise FileNotFoundError(
            f"{address(folder)} holds no evaluation: no {EVALUATED_NAME} (evaluate.py --output_dir writes it)"
        )
    lines = {episode_key(line): line for line in map(json.loads, read_lines(folder / EPISODES_NAME))}
    missing = [episode for episode in about["episodes"] if episode_key(episode) not in lines]
    if missing:
        raise ValueError(
            f"{address(folder)}: {len(missing)} of {len(about['episodes'])} episodes are not done; give evaluate.py "
            "the same flags again to go on"
        )
    return about, [lines[episode_key(episode)] for episode in about["episodes"]]
