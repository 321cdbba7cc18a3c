"""Let a policy act in the process that trains it: with noise, recording its decisions, or by its deterministic sampler.

Legend: N rows, T chunk, A action, S random steps of a decision, H W C image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor

from util import Batch
from vla_finetuning.envs.protocol import Observation
from vla_finetuning.policies.flow import FlowLoss, continue_chunk
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.rl.sampler import FlowSDE, sample
from vla_finetuning.rollouts.episodes import Episode, noise
from vla_finetuning.rollouts.player import Player
from vla_finetuning.rollouts.scheduler import Decide
from vla_finetuning.rollouts.stage import Decision

# Takes N rows on the host and their decisions; returns normalised chunks (N, T, A).
Sample = Callable[[Batch, Sequence[Decision]], Tensor]
PROMPT = (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)


class Actor:
    """A policy with its current weights, and the processors between it and an environment.

    Args:
        prompts: lengths to which prompts are cut.
        inference_batch: maximum number of rows per forward pass.

    Attributes:
        busy_s: seconds spent on decisions; callers may reset it.
        n_action_steps: number of actions of a chunk that are executed.
        shape: length of a chunk, padded width and real width of an action.
    """

    def __init__(
        self,
        loss: FlowLoss,
        player: Player,
        *,
        prompts: tuple[int, ...],
        inference_batch: int,
        autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.loss, self.device, self.autocast = loss, device, autocast
        self._player, self._prompts, self._inference_batch = player, prompts, inference_batch
        self._checked = False
        self.busy_s = 0.0
        config = loss.policy.config
        self.n_action_steps: int = config.n_action_steps
        self.shape = (config.chunk_size, config.max_action_dim, config.output_features[ACTION].shape[0])

    def observe(self, observation: Observation, instructions: Sequence[str]) -> Batch:
        """Prepare N observations on the host: cameras uint8 (N, H, W, 3), tokens and their mask."""
        prepared = self._player.prepare(observation, instructions)
        cameras = [key for key in self.loss.policy.config.image_features if key in prepared]
        columns = {key: _to_uint8(key, prepared[key], check=not self._checked) for key in cameras}
        self._checked = True
        tokens, mask = (prepared[key].cpu() for key in PROMPT)
        return columns | {OBS_LANGUAGE_TOKENS: tokens, OBS_LANGUAGE_ATTENTION_MASK: mask.bool()}

    def on_device(self, columns: Mapping[str, Tensor]) -> Batch:
        """Copy a micro-batch to the device, with prompts cut to the length that the longest one needs."""
        cut = cut_prompts({key: columns[key].numpy() for key in PROMPT}, self._prompts)
        columns = {**columns, **{key: torch.from_numpy(value) for key, value in cut.items()}}
        if self.device.type != "cuda":
            return columns
        return {key: value.pin_memory().to(self.device, non_blocking=True) for key, value in columns.items()}

    def computing(self) -> torch.autocast:
        """Return the autocast context in which the network computes."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def act(self, observation: Observation, decisions: Sequence[Decision], sample: Sample) -> np.ndarray:
        """Sample chunks in batches; return the actions to execute, float32 (N, n_action_steps, A)."""
        started = time.perf_counter()
        columns = self.observe(observation, [decision.instruction for decision in decisions])
        chunks = []
        for first in range(0, len(decisions), self._inference_batch):
            rows = slice(first, first + self._inference_batch)
            chunks.append(sample({key: value[rows] for key, value in columns.items()}, decisions[rows]))
        # All rows at once: the step that makes relative actions absolute holds the states of all of them.
        actions = self._player.to_env(torch.cat(chunks))
        self.busy_s += time.perf_counter() - started
        return actions


def _to_uint8(key: str, image: Tensor, check: bool) -> Tensor:
    """Convert images from float (N, 3, H, W) in [0, 1] to uint8 (N, H, W, 3), without loss, to save memory."""
    levels = (image * 255.0).round()
    if check and not torch.allclose(levels / 255.0, image, rtol=0.0, atol=1e-4):
        raise ValueError(
            f"what the policy sees of '{key}' is not an image of 256 levels in [0, 1], and rollouts keep images as "
            "such: the policy normalises images, or the environment's processors change them, which is not done here"
        )
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()


class StochasticActor:
    """Sample actions with noise and record them for learning. Called as `scheduler.Decide`.

    The random numbers of a decision are a function of (seed, iteration, episode, decision).
    """

    def __init__(self, actor: Actor, sde: FlowSDE, seed: int, iteration: int) -> None:
        self._actor, self._sde, self.seed, self.iteration = actor, sde, seed, iteration
        self._recorded: list[dict[str, Tensor]] = []
        self._rows: dict[tuple[int, int], int] = {}

    def __call__(self, observation: Observation, decisions: Sequence[Decision]) -> np.ndarray:
        return self._actor.act(observation, decisions, self._sample)

    def _sample(self, columns: Batch, decisions: Sequence[Decision]) -> Tensor:
        actor = self._actor
        keys = [[self.seed, self.iteration, decision.number, decision.decision] for decision in decisions]
        draws = self._sde.draw([np.random.default_rng(key) for key in keys], actor.shape)
        draws = type(draws)(*(value.to(actor.device) for value in draws))
        with actor.computing():
            chunk, walk = sample(actor.loss, actor.on_device(columns), self._sde, draws)
        walk = walk.executed(actor.n_action_steps)
        recorded = {"x": walk.x, "after": walk.after, "step_numbers": walk.step_numbers, ACTION: chunk}
        self._recorded.append(columns | {key: value.cpu() for key, value in recorded.items()})
        for decision in decisions:
            self._rows[decision.number, decision.decision] = len(self._rows)
        return chunk

    def rows(self, episodes: np.ndarray, decisions: np.ndarray) -> list[int]:
        """Return the rows of `columns` that hold these decisions of these episodes."""
        return [self._rows[key] for key in zip(episodes.tolist(), decisions.tolist(), strict=True)]

    def columns(self) -> dict[str, Tensor]:
        """Return the records on the host, one row per decision in order, and forget them."""
        # Each record is freed when it is copied, so that memory does not double.
        recorded, self._recorded = self._recorded, []
        columns = {}
        for key in list(recorded[0]) if recorded else ():
            count, first = sum(len(part[key]) for part in recorded), 0
            columns[key] = torch.empty((count, *recorded[0][key].shape[1:]), dtype=recorded[0][key].dtype)
            for part in recorded:
                values = part.pop(key)
                columns[key][first : first + len(values)] = values
                first += len(values)
        return columns


def deterministic(actor: Actor, seed: int, episodes: Mapping[int, Episode]) -> Decide:
    """Return a sampler of actions like LeRobot's, which starts from the noise that `evaluate.py` draws."""

    def sampled(columns: Batch, decisions: Sequence[Decision]) -> Tensor:
        played = [(episodes[decision.number], decision.decision) for decision in decisions]
        names = [(seed, episode.task, episode.episode, number) for episode, number in played]
        start = torch.from_numpy(np.stack([noise(*name, shape=actor.shape[:2]) for name in names])).to(actor.device)
        with actor.computing():
            return continue_chunk(actor.loss, actor.on_device(columns), start)

    return lambda observation, decisions: actor.act(observation, decisions, sampled)
