"""Sample action chunks from a flow with noise, so that each chunk has a known probability.

LeRobot's sampler walks from noise (t = 1) to actions (t = 0) in K steps of dt = 1/K along the velocity v that the
network predicts. This sampler adds noise in every step, and a drift that compensates it: the distribution at every t
stays the same (ODE and SDE have the same marginals). Each step is a Gaussian with known mean and standard deviation
(Flow-GRPO, arXiv 2505.05470; for VLAs pi-RL, arXiv 2510.25889):

    sigma(t) = a sqrt(t / (1 - t))                     at t = 1, where that is infinite, with 1 - t of the next step
    mean     = x - v dt - sigma^2 dt / (2 t) (x + (1 - t) v)
    std      = sigma sqrt(dt)

Only the real dimensions of an action are random; padding dimensions follow the ODE. All arithmetic outside the network
is float32.

Given x, a step's Gaussian is independent over positions of the chunk and dimensions of an action. Only the E executed
positions are scored: their density is the product over these positions. In the last step this is exact. In earlier
steps the other positions affect the executed ones through the network's attention; leaving out their factors is an
approximation, as in pi-RL's code.

Legend: B rows, K steps of the walk, S of them random and recorded, T chunk, E of it executed, A action, W the padded
action width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from util import Batch
from vla_finetuning.policies.flow import FlowLoss

LOG_TWO_PI = math.log(2 * math.pi)


class Draws(NamedTuple):
    """The random numbers of B decisions.

    Attributes:
        start: float32 (B, T, W), standard normal: the start of the walk.
        noise: float32 (B, K, T, A), standard normal.
        step_numbers: int64 (B, S), the random steps of each row, ascending.
    """

    start: Tensor
    noise: Tensor
    step_numbers: Tensor


class Walk(NamedTuple):
    """The recorded random steps of B decisions.

    Attributes:
        x: float32 (B, S, T, W), before the step.
        after: float32 (B, S, E, A), the executed positions after the step, which are scored.
        step_numbers: int64 (B, S), the number of the step, from 0.
    """

    x: Tensor
    after: Tensor
    step_numbers: Tensor

    def executed(self, steps: int) -> Walk:
        """Return the walk with E = `steps`, to score only the first actions of the chunk."""
        return self._replace(after=self.after[:, :, :steps])


@dataclass(frozen=True)
class FlowSDE:
    """The random sampler of K `steps`. With `one`, a single step of each decision is random; others follow the ODE."""

    steps: int
    noise_level: float  # `a` in the module's formulas
    one: bool = False

    def draw(self, generators: Sequence[np.random.Generator], shape: tuple[int, int, int]) -> Draws:
        """Draw the random numbers of decisions, each from its own generator, for chunks of `shape` (T, W, A)."""
        chunk, width, actions = shape
        start = [g.standard_normal((chunk, width), np.float32) for g in generators]
        noise = [g.standard_normal((self.steps, chunk, actions), np.float32) for g in generators]
        steps = [[int(g.integers(self.steps))] if self.one else range(self.steps) for g in generators]
        return Draws(
            torch.from_numpy(np.stack(start)), torch.from_numpy(np.stack(noise)), torch.from_numpy(np.array(steps))
        )

    def times(self, device: torch.device) -> Tensor:
        """Return t before each step, float32 (K,), as LeRobot computes it."""
        return torch.tensor([1.0 + number * (-1.0 / self.steps) for number in range(self.steps)], device=device)

    def transition(self, x: Tensor, velocity: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return a step's mean (N, T, ...) and standard deviation (N, 1, 1), given x and v (N, T, ...) at t (N,)."""
        dt, t = 1.0 / self.steps, time[:, None, None]
        remaining = torch.where(t > 1.0 - 0.5 * dt, torch.full_like(t, dt), 1.0 - t)
        variance = self.noise_level**2 * t / remaining
        mean = x - velocity * dt - variance * dt / (2.0 * t) * (x + (1.0 - t) * velocity)
        return mean, (variance * dt).sqrt()


def log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density (N,) of `value` (N, E, A) under independent Gaussians; `std` is (N, 1, 1)."""
    squares = ((value - mean) / std).square().sum((1, 2))
    return -0.5 * squares - value[0].numel() * (std[:, 0, 0].log() + 0.5 * LOG_TWO_PI)


@torch.no_grad()
def sample(loss: FlowLoss, batch: Batch, sde: FlowSDE, draws: Draws) -> tuple[Tensor, Walk]:
    """Sample normalised chunks, float32 (B, T, A), and return them with the recorded walk, where E = T."""
    width = draws.noise.shape[-1]
    prefix, times = loss.prefix(loss.images(batch)), sde.times(draws.start.device)
    x, before, after = draws.start, [], []
    for number in range(sde.steps):
        time = times[number].expand(len(x))
        velocity = loss.velocity(x, time, prefix).float()
        follows = x - velocity / sde.steps
        mean, std = sde.transition(x[..., :width], velocity[..., :width], time)
        sampled = mean + std * draws.noise[:, number]
        if sde.one:
            sampled = torch.where((draws.step_numbers == number)[:, :, None], sampled, follows[..., :width])
        before.append(x)
        after.append(sampled)
        x = torch.cat([sampled, follows[..., width:]], dim=-1)
    step_index = draws.step_numbers[:, :, None, None]
    stacked = (torch.stack(part, dim=1) for part in (before, after))
    x_before, x_after = (part.gather(1, step_index.expand(-1, -1, *part.shape[2:])) for part in stacked)
    return x[..., :width], Walk(x_before, x_after, draws.step_numbers)


def score(loss: FlowLoss, batch: Batch, sde: FlowSDE, walk: Walk, prefix: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities (B, S) of recorded steps under the current weights, means (B, S, E, A), stds (B, S).

    Differentiable. All steps of a row share one prefix, the result of `loss.prefix`, as draws of one suffix.
    """
    rows, steps = walk.step_numbers.shape
    executed, width = walk.after.shape[2:]
    x, time = walk.x.flatten(0, 1), sde.times(walk.x.device)[walk.step_numbers.flatten()]
    velocity = loss.velocity(x, time, prefix or loss.prefix(loss.images(batch))).float()
    mean, std = sde.transition(x[:, :executed, :width], velocity[:, :executed, :width], time)
    log_probs = log_prob(walk.after.flatten(0, 1), mean, std)
    return log_probs.view(rows, steps), mean.unflatten(0, (rows, steps)), std.view(rows, steps)
