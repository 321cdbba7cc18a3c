"""The processes that compute, on Ray Serve: each has all robots' policies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import serve

from vla_finetuning.envs.protocol import Observation
from vla_finetuning.rollouts.player import Key, Player, PolicySource
from vla_finetuning.rollouts.scheduler import concatenate
from vla_finetuning.run.failures import root_cause


@dataclass(frozen=True)
class Request:
    """A decision to be made: by which robot's policy, on one row, with the draws of a key."""

    robot: str
    observation: Observation
    instruction: str
    key: Key


@dataclass(frozen=True)
class Answer:
    """A chunk of actions, float32 (T, A); how many rows were computed with it, and in how many seconds."""

    actions: np.ndarray
    rows: int
    seconds: float


def load_players(sources: Mapping[str, PolicySource], threads: int) -> dict[str, Player]:
    """Load the policies of all robots; those that an export wrote together share the memory of their weights.

    Args:
        sources: by robot.
    """
    players: dict[str, Player] = {}
    for robot, source in sources.items():
        player = source.load(threads)
        if players:
            player.share_weights(next(iter(players.values())))
        players[robot] = player
    return players


def compute(players: Mapping[str, Player], requests: Sequence[Request]) -> list[Answer | str]:
    """Answer all requests, those of one robot with images of the same sizes at once; with a text what goes wrong."""
    groups: dict[Any, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault((request.robot, _shapes(request.observation)), []).append(i)
    answers: dict[int, Answer | str] = {}
    for (robot, _), rows in groups.items():
        group, started = [requests[i] for i in rows], time.perf_counter()
        try:
            chunks = players[robot](
                concatenate([request.observation for request in group]),
                [request.instruction for request in group],
                [request.key for request in group],
            )
            seconds = time.perf_counter() - started
            answers |= {i: Answer(chunk, len(group), seconds) for i, chunk in zip(rows, chunks, strict=True)}
        except Exception as error:  # of this group alone
            answers |= dict.fromkeys(rows, root_cause(error))
    return [answers[i] for i in range(len(requests))]


def _shapes(observation: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((k, _shapes(v) if isinstance(v, Mapping) else v.shape) for k, v in sorted(observation.items()))


@serve.deployment
class Replica:
    """Holds the policies, and computes one batch after the other."""

    def __init__(self, sources: Mapping[str, PolicySource], threads: int) -> None:
        self._players = load_players(sources, threads)

    def predict(self, requests: Sequence[Request]) -> list[Answer | str]:
        return compute(self._players, requests)
