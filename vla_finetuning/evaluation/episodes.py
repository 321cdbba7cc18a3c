"""What an evaluation in the loop is: a list of episodes fixed beforehand, and what became of each. Knows no Ray.

A score is over exactly the list. An episode is a function of its own numbers: its seed fixes the scene, and the noise
of its n-th decision is drawn from (seed, task, episode, n), so that neither batches nor the order in which things
happen change it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_finetuning.bucket import place
from vla_finetuning.envs.stage import Ended
from vla_finetuning.files import read_json, read_lines, write_json, write_whole
from vla_finetuning.lines import append_line

EPISODES_NAME, EVALUATED_NAME, ACTIONS_NAME = "episodes.jsonl", "evaluated.json", "actions.jsonl"


@dataclass(frozen=True)
class Condition:
    """Under what an episode is played.

    Attributes:
        policy: which of the policies that take part.
        instructions: what the policy gets in place of an instruction; itself where there is no entry.
        blindfolded: the policy sees black images.
    """

    policy: str = "policy"
    instructions: Mapping[str, str] = field(default_factory=dict)
    blindfolded: bool = False


@dataclass(frozen=True)
class Episode:
    """One of the list. `seed` is the environment's; `condition` names one of the evaluation's conditions.

    Where an environment has a list of states to start from, `episode` modulo its length is the place in it, as in
    `lerobot-eval`.
    """

    condition: str
    task: str
    episode: int
    seed: int


def episode_list(
    conditions: Iterable[str],
    tasks: Iterable[str],
    count: int,
    seed: int,
    number: Callable[[str, int], int] = lambda _, i: i,
) -> list[Episode]:
    """`count` episodes of each task for each condition, the same ones: seeds from `seed` on, as in `lerobot-eval`.

    Args:
        number: `Episode.episode` of a task's i-th.
    """
    names = list(conditions)
    return [Episode(name, task, number(task, i), seed + i) for task in tasks for i in range(count) for name in names]


def noise(seed: int, task: str, episode: int, decision: int, shape: tuple[int, ...]) -> np.ndarray:
    """What a policy's sampling starts from: standard normal, float32, a function of the four names."""
    return generator(seed, task, episode, decision).standard_normal(shape, np.float32)


def generator(seed: int, task: str, episode: int, decision: int) -> np.random.Generator:
    """Of all random numbers of a decision, whatever the condition: conditions are compared on the same draws."""
    return np.random.default_rng([seed, zlib.crc32(task.encode()), episode, decision])


# ---- what became of them --------------------------------------------------------------------------------------------


def line_of(episode: Episode, ended: Ended | None, error: str | None, decisions: int) -> dict[str, Any]:
    """An episode's line. One that could not be played to its end has an `error`, and null for what is not known."""
    known = asdict(ended) if ended is not None else dict.fromkeys(Ended.__dataclass_fields__)
    known.pop("number")
    return {**asdict(episode), **known, "decisions": decisions, "error": error}


class Book:
    """`episodes.jsonl` in a folder, and beside it what it is about and what was done in them. One process writes.

    Args:
        folder: made if it is not there.
        about: JSON: policy, environment, what else decides results. An evaluation that is there already must be about
            the same, and goes on where it was: `done` are the lines of episodes that came to an end without error.
    Raises:
        ValueError: the folder holds another evaluation.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], episodes: Sequence[Episode]) -> None:
        self._path = place(folder) / EPISODES_NAME
        about = json.loads(json.dumps({**about, "episodes": [asdict(episode) for episode in episodes]}))
        folder.mkdir(parents=True, exist_ok=True)
        found = read_json(folder / EVALUATED_NAME)
        if found and found != about:
            differ = sorted(key for key in found.keys() | about.keys() if found.get(key) != about.get(key))
            raise ValueError(
                f"{folder} holds another evaluation: it differs in {', '.join(differ)}. Choose another --output_dir, "
                "or give the same flags to go on with it"
            )
        if not found and self._path.exists():
            raise ValueError(f"{self._path} is there without {EVALUATED_NAME}: choose another --output_dir")
        write_json(folder / EVALUATED_NAME, about)
        lines = [json.loads(line) for line in read_lines(self._path)]
        self.done = {_key(line): line for line in lines if line["error"] is None}
        # Without a last line that was cut off, and without those that are to be done again.
        write_whole(self._path, "".join(f"{json.dumps(line)}\n" for line in self.done.values()))

    def write(self, line: Mapping[str, Any]) -> None:
        append_line(self._path, json.dumps(line), after=self._path.parent / ACTIONS_NAME)

    def write_actions(self, line: Mapping[str, Any], actions: np.ndarray) -> None:
        """What was executed in an episode, (steps, A), to the bit: it can be played again. Before its line."""
        done = {name: line[name] for name in Episode.__dataclass_fields__}
        append_line(self._path.parent / ACTIONS_NAME, json.dumps({**done, **pack_actions(actions)}))

    def is_done(self, episode: Episode) -> bool:
        return _key(asdict(episode)) in self.done


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in Episode.__dataclass_fields__)


def pack_actions(actions: np.ndarray) -> dict[str, Any]:
    """Actions (steps, A) as JSON has them, to the bit."""
    coded = base64.b64encode(actions.tobytes()).decode()
    return {"dtype": actions.dtype.str, "shape": actions.shape, "base64": coded}


def unpack_actions(line: Mapping[str, Any]) -> np.ndarray:
    """What `pack_actions` was given."""
    return np.frombuffer(base64.b64decode(line["base64"]), line["dtype"]).reshape(line["shape"])


def read_actions(folder: Path) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """The actions of each episode, (steps, A), after what names it; of one that was played twice, both times."""
    for text in read_lines(folder / ACTIONS_NAME):
        line = json.loads(text)
        yield {name: line[name] for name in Episode.__dataclass_fields__}, unpack_actions(line)


def read_evaluation(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What an evaluation is about, and its lines in the list's order.

    Raises:
        ValueError, FileNotFoundError: no evaluation is there, or episodes of its list are missing.
    """
    folder = place(folder)
    about = read_json(folder / EVALUATED_NAME)
    if not about:
        raise FileNotFoundError(
            f"{folder} holds no evaluation: no {EVALUATED_NAME} (evaluate.py --output_dir writes it)"
        )
    lines = {_key(line): line for line in map(json.loads, read_lines(folder / EPISODES_NAME))}
    missing = [episode for episode in about["episodes"] if _key(episode) not in lines]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(about['episodes'])} episodes are not done; give evaluate.py the same "
            "flags again to go on"
        )
    return about, [lines[_key(episode)] for episode in about["episodes"]]
