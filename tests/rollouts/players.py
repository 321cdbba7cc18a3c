"""A player without weights, its plain loop, and an environment that fails on purpose."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np

from vla_finetuning.envs import two_bins
from vla_finetuning.envs.protocol import stack
from vla_finetuning.envs.two_bins import TwoBins
from vla_finetuning.envs.two_bins_scene import BINS, EPISODE_LENGTH, INSTRUCTIONS
from vla_finetuning.rollouts.episodes import Acted, LeftOver, noise

EXECUTED = 3  # actions of a late chunk


@dataclass
class Seeing:
    """A source of a player that looks where the bins are and goes to one of them, more or less.

    Attributes:
        scatter_cm: standard deviation of where it goes; every decision draws anew.
        notes: a folder in which it notes the size of each batch.
        dies: a file; where there is none, the player makes it and ends its process. "always": no such file is made.
        dies_after: only once an episode in its batch has had so many decisions.
        writes: a text at each decision, the episode's number and the decision's.
    """

    scatter_cm: float = 11.0
    notes: str | None = None
    dies: str | None = None
    dies_after: int = 0
    writes: bool = False
    device: str = "cpu"

    weights_bytes, predicts_rows_alone = 0, False

    def load(self, threads, other=None):
        return self

    def __call__(self, observation, instructions, keys):
        if self.dies and not Path(self.dies).exists() and max(key[3] for key in keys) >= self.dies_after:
            if self.dies != "always":
                Path(self.dies).touch()
            os._exit(1)
        if self.notes:
            with open(self.notes, "a") as file:
                file.write(f"{len(keys)}\n")
        chunks = []
        for image, position, instruction, key in zip(
            observation["pixels"]["top"], observation["agent_pos"], instructions, keys, strict=True
        ):
            bin_left = image[16, 14].astype(int)
            red_left = bin_left[0] > bin_left[2]
            goal = np.array(BINS["left" if (instruction == INSTRUCTIONS["red"]) == red_left else "right"])
            goal = goal + self.scatter_cm * noise(*key, (3,))
            chunks.append(position + (goal - position) * np.linspace(0.2, 1, 5)[:, None])
        return np.array(chunks, np.float32)

    def act(self, observation, instructions, keys, delay, left):
        acted = []
        for chunk, key, last in zip(self(observation, instructions, keys), keys, left, strict=True):
            text = f"{key[2]} {key[3]}" if self.writes else None
            old = chunk[:0] if last is None else last.actions
            late = np.concatenate([old, chunk[len(old) : EXECUTED]]), LeftOver(chunk[EXECUTED:][:delay], None)
            acted.append(Acted(*(late if delay else (chunk, None)), text))
        return acted


def plain_loop(seed, key, replaced=(), delay=None, **options):
    """One episode alone, by gymnasium and `Seeing`, `key` being (seed of the noise, task, number).

    delay: steps after which a chunk arrives; one is requested every EXECUTED steps.
    """
    with gymnasium.make(f"{two_bins.__name__}:{two_bins.GYM_ID}", **options) as env:
        observation, _ = env.reset(seed=seed)
        initial_state, instruction = env.unwrapped.state_hash(), env.unwrapped.task_description
        over, steps, decisions, queue, arriving = False, 0, 0, [], {}
        while not over:
            if steps % (5 if delay is None else EXECUTED) == 0:
                spoken = dict(replaced).get(instruction, instruction)
                (chunk,) = Seeing()(stack([observation]), [spoken], [(*key, decisions)])
                late = delay or 0 if decisions else 0  # the robot waits for the first
                arriving[steps + late] = list(chunk)[late:]
                decisions += 1
            queue = arriving.pop(steps, None) or queue
            observation, _, terminated, truncated, info = env.step(queue.pop(0))
            steps += 1
            over = terminated or truncated
    return instruction, info["is_success"], steps, decisions, initial_state, info["reached"]


class Faulty(TwoBins):
    """`TwoBins`; the episode of one seed fails in its sixth step.

    Args:
        how: "dies", "hangs", or "raises".
        marker: a file; where there is one it goes well. Made as it goes wrong, unless it is None.
    """

    def __init__(self, seed, how, marker=None, **options):
        super().__init__(**options)
        self._faulty, self._how, self._marker = seed, how, marker

    def step(self, action):
        is_done = self._marker and Path(self._marker).exists()
        if self.np_random_seed == self._faulty and self._frame == 5 and not is_done:
            if self._marker:
                Path(self._marker).touch()
            if self._how == "dies":
                os._exit(1)
            if self._how == "hangs":
                time.sleep(600)
            raise ArithmeticError("the simulation diverged")
        return super().step(action)


FAULTY_ID = "Faulty-v0"
gymnasium.register(FAULTY_ID, entry_point=f"{__name__}:Faulty", max_episode_steps=EPISODE_LENGTH)
