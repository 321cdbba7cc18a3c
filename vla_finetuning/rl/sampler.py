"""A flow's sampler made random, so that an action chunk has a probability: what learning from rewards needs of it.

LeRobot's sampler walks from noise (t = 1) to actions (t = 0) in K steps of dt = 1/K along the velocity v that the
network predicts. The walk with noise added in every step, and the drift that makes up for it, leads to the same
distribution at every t (the marginals of the ODE and the SDE are the same), and each of its steps is a Gaussian with
known mean and standard deviation (Flow-GRPO, arXiv 2505.05470; for VLAs pi-RL, arXiv 2510.25889):

    sigma(t) = a sqrt(t / (1 - t))                     at t = 1, where that is infinite, with 1 - t of the next step
    mean     = x - v dt - sigma^2 dt / (2 t) (x + (1 - t) v)
    std      = sigma sqrt(dt)

Only the real dimensions of an action are random; what pads them to the policy's width follows the ODE. All arithmetic
but the network's own is float32.

Given x, a step's Gaussian is independent over positions of the chunk and dimensions of an action, so the density of the
first E positions of a step, those that are executed and scored, is the product over these alone. In the last step
nothing is lost by that. In earlier steps the other positions change, by the network's attention, what is executed;
leaving out their factors there too is an approximation, as in pi-RL's code.

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
    """All random numbers of B decisions.

    Attributes:
        start: float32 (B, T, W), standard normal: where the walk begins.
        noise: float32 (B, K, T, A), standard normal.
        which: int64 (B, S), the random steps of each row, ascending.
    """

    start: Tensor
    noise: Tensor
    which: Tensor


class Walk(NamedTuple):
    """A decision's random steps, recorded to score them again.

    Attributes:
        x: float32 (B, S, T, W), before the step. after: float32 (B, S, E, A), after it: what is scored.
        which: int64 (B, S), the number of the step, from 0.
    """

    x: Tensor
    after: Tensor
    which: Tensor

    def executed(self, steps: int) -> Walk:
        """The same with E = `steps`: to score only the first actions of the chunk."""
        return self._replace(after=self.after[:, :, :steps])


@dataclass(frozen=True)
class FlowSDE:
    """The walk: K steps, all random or one.

    Attributes:
        steps: K. noise_level: the `a` above. one: in each decision one step is random, and the others follow the ODE.
    """

    steps: int
    noise_level: float
    one: bool = False

    def draw(self, generators: Sequence[np.random.Generator], shape: tuple[int, int, int]) -> Draws:
        """The random numbers of decisions, each from its own generator. shape: (T, W, A)."""
        chunk, width, actions = shape
        start = [g.standard_normal((chunk, width), np.float32) for g in generators]
        noise = [g.standard_normal((self.steps, chunk, actions), np.float32) for g in generators]
        steps = [[int(g.integers(self.steps))] if self.one else range(self.steps) for g in generators]
        return Draws(
            torch.from_numpy(np.stack(start)), torch.from_numpy(np.stack(noise)), torch.from_numpy(np.array(steps))
        )

    def times(self, device: torch.device) -> Tensor:
        """float32 (K,): t before each step, as LeRobot computes it."""
        return torch.tensor([1.0 + number * (-1.0 / self.steps) for number in range(self.steps)], device=device)

    def transition(self, x: Tensor, velocity: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """A random step's mean (N, T, ...) and standard deviation (N, 1, 1), from x and v (N, T, ...) at t (N,)."""
        dt, t = 1.0 / self.steps, time[:, None, None]
        remaining = torch.where(t > 1.0 - 0.5 * dt, torch.full_like(t, dt), 1.0 - t)
        variance = self.noise_level**2 * t / remaining
        mean = x - velocity * dt - variance * dt / (2.0 * t) * (x + (1.0 - t) * velocity)
        return mean, (variance * dt).sqrt()


def log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Logarithm of the density of `value` (N, E, A) under independent Gaussians, (N,); std (N, 1, 1)."""
    squares = ((value - mean) / std).square().sum((1, 2))
    return -0.5 * squares - value[0].numel() * (std[:, 0, 0].log() + 0.5 * LOG_TWO_PI)


@torch.no_grad()
def sample(loss: FlowLoss, batch: Batch, sde: FlowSDE, draws: Draws) -> tuple[Tensor, Walk]:
    """Walk at random: normalised chunks float32 (B, T, A), and the recorded walk, with E = T.

    Images and language are computed once for a decision, however many steps there are.
    """
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
            sampled = torch.where((draws.which == number)[:, :, None], sampled, follows[..., :width])
        before.append(x)
        after.append(sampled)
        x = torch.cat([sampled, follows[..., width:]], dim=-1)
    step_index = draws.which[:, :, None, None]
    recorded = [torch.stack(part, dim=1) for part in (before, after)]
    recorded = [part.gather(1, step_index.expand(-1, -1, *part.shape[2:])) for part in recorded]
    return x[..., :width], Walk(recorded[0], recorded[1], draws.which)


def score(loss: FlowLoss, batch: Batch, sde: FlowSDE, walk: Walk, prefix: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities (B, S) of recorded steps under the weights as they are; their means (B, S, E, A), stds (B, S).

    `prefix`: of the batch, if it is computed already. Gradients flow. All steps of a row are draws of one suffix.
    """
    rows, steps = walk.which.shape
    executed, width = walk.after.shape[2:]
    x, time = walk.x.flatten(0, 1), sde.times(walk.x.device)[walk.which.flatten()]
    velocity = loss.velocity(x, time, prefix or loss.prefix(loss.images(batch))).float()
    mean, std = sde.transition(x[:, :executed, :width], velocity[:, :executed, :width], time)
    log_probs = log_prob(walk.after.flatten(0, 1), mean, std)
    return log_probs.view(rows, steps), mean.unflatten(0, (rows, steps)), std.view(rows, steps)
