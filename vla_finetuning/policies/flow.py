"""Flow matching: losses, random draws and samplers of policies that predict the velocity from actions to noise.

A policy overrides `prefix`, `velocity` and `layers` of `FlowLoss`, and computes its network layer by layer. The
function of a layer can be compiled, be recomputed in backward, and run with weights gathered by FSDP2.

Legend: B batch, K draws of noise and time per row, T chunk, A action.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vla_finetuning.columns import ACTION_DIMS, ROBOT
from vla_finetuning.policies.attention import Kernel
from vla_finetuning.policies.family import MAX_DELAY, WORD_EMBEDDINGS, PolicyLoss
from vla_finetuning.policies.layers import Unit
from vla_finetuning.policies.processors import DeviceHalf

# Columns of a batch that multiply a row's loss.
ROW_FACTORS = frozenset({"row_weight", "is_read"})


class TimeDistribution(NamedTuple):
    """Distribution of times: `Beta(alpha, beta) * scale + offset`."""

    alpha: float
    beta: float
    scale: float
    offset: float


def sample_noise_and_time(
    config: PreTrainedConfig,
    global_batch_size: int,
    seed: int,
    step: int,
    device: torch.device | str,
    times: TimeDistribution | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the flow matching noise and times of all rows of one optimizer step.

    The draws depend only on (seed, step, global_batch_size = G), so each worker draws all and takes its own rows.
    Runs on the device without a host sync. CPU and CUDA generators give different numbers.

    Args:
        times: time distribution; None: that of the configuration, as in `PI05Pytorch.sample_time`.
    Returns:
        noise float32 (G, T, max_action_dim), standard normal; time float32 (G,). With MAX_DELAY in the configuration
        time is (G, T, 2), as `give_first_actions` returns it.
    """
    flow: Any = config
    generator = torch.Generator(device=device)
    digest = hashlib.blake2b(struct.pack("<qq", seed, step), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    noise = torch.randn((global_batch_size, flow.chunk_size, flow.max_action_dim), **options)
    if times is None:
        times = TimeDistribution(
            *(flow.time_sampling_beta_alpha, flow.time_sampling_beta_beta),
            *(flow.time_sampling_scale, flow.time_sampling_offset),
        )
    alpha, beta, scale, offset = times
    if beta == 1.0:
        fraction = torch.rand((global_batch_size,), **options) ** (1.0 / alpha)  # the inverse of its CDF, x**alpha
    else:
        concentration = torch.empty((global_batch_size, 2), device=device)
        concentration[:, 0].fill_(alpha)
        concentration[:, 1].fill_(beta)
        fraction = torch._sample_dirichlet(concentration, generator=generator)[:, 0]
    time = fraction * scale + offset
    if max_delay := getattr(config, MAX_DELAY, 0):
        time = give_first_actions(time, flow.chunk_size, max_delay, generator)
    return noise, time


def give_first_actions(time: Tensor, chunk: int, max_delay: int, generator: torch.Generator) -> Tensor:
    """Draw for each chunk how many of its first actions are given, and return the time and loss weight of each action.

    Training-time real-time chunking (arXiv 2512.05964): given actions stand for those that the robot executes during
    inference. Their number is uniform from 0 to `max_delay`, as on LeRobot's main branch (#4056). Given actions have
    time 0, the clean end of the flow, and no loss.

    Returns:
        float32 (G, T, 2), from `time` (G,): the time and the loss weight of each action. The weight is 0 for given
        actions. It is scaled so that the mean over all actions of the step equals the mean over its predicted actions.
    """
    delays = torch.randint(max_delay + 1, (len(time), 1), generator=generator, device=time.device)
    predicted = torch.arange(chunk, device=time.device) >= delays
    return torch.stack([time[:, None] * predicted, predicted / predicted.to(time.dtype).mean()], dim=-1)


def time_without_given(time: Tensor) -> Tensor:
    """Return the times (B*K,) of chunks as if no action were given: the time of each chunk's last action."""
    return time[:, -1, 0] if time.ndim == 3 else time


class FlowLoss(PolicyLoss):
    """Flow matching loss: computes `prefix` once for each row and `velocity` for each of its draws.

    With a mixture of robots, a row's loss is the mean over the action dimensions of the row's robot (`ACTION_DIMS`).

    Args:
        mask_padding: set the loss of padded action steps (`action_is_pad`) to zero. Padded steps still count in the
            mean's denominator, so that a batch's loss is the mean of its micro-batches' losses. If False, padded steps
            have a loss like any other step, as in LeRobot's PI0.5 and openpi.
        attention: kernel of the language model and the expert. "eager" is LeRobot's code; the others are equal up to
            rounding and store no attention weights. May be set later, e.g. to the result of `attention.choose_kernel`.
        checkpointing: save only the inputs of each layer and recompute the layer in backward. Saves memory and gives
            the same numbers.
        compile: wrapper of each layer's function, e.g. a `compiling.Compiler`; stored as `compiler`.
    """

    reaches_all = True  # parameters that `Family.parts` marks as unused are frozen

    def __init__(
        self,
        policy: PreTrainedPolicy,
        *,
        images: DeviceHalf | None = None,
        mask_padding: bool = False,
        attention: Kernel = "eager",
        checkpointing: bool = False,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ):
        super().__init__(policy, images=images)
        self.mask_padding, self.attention, self.compiler = mask_padding, attention, compile
        self._checkpointing = checkpointing
        self._units: dict[nn.Module, Unit] = {}

    def forward(
        self,
        batch: Mapping[str, Tensor],
        noise: Tensor | None = None,
        time: Tensor | None = None,
        *,
        per_row: bool = False,
    ) -> Tensor:
        """Compute the mean loss of a batch as a 0-d float32 tensor on the device.

        Args:
            batch: columns as in `Family.check_batch`, on the policy's device. `mask_padding` needs `action_is_pad` bool
                (B, T). Optional columns: `action_dims` bool (B, A), the dimensions of a row's robot, at least one;
                `row_weight` float32 (B,), a factor of the row's loss; `is_read` bool (B,), False for rows with loss 0.
                The mean's denominator is always the number of rows.
            noise: float32 (B*K, T, max_action_dim), rows of the noise of `Family.draw`; a row's K draws are adjacent.
            time: float32 (B*K,), or (B*K, T, 2) as `give_first_actions` returns it.
            per_row: return the loss of each draw, float32 (B*K,), in place of their mean.
        Raises:
            ValueError: noise or time is missing, the number of draws is no multiple of the number of rows, or the batch
                has no camera.
        """
        batch = self.inputs(batch)
        if noise is None or time is None:
            raise ValueError(f"the loss of a '{self.policy.config.type}' needs noise and time; Family.draw draws them")
        actions = self.policy.prepare_action(batch)
        draws, rest = divmod(len(time), len(actions))
        if rest or not draws:
            raise ValueError(f"{len(time)} draws of noise and time for {len(actions)} rows: not the same for each row")
        actions = repeat_rows(actions, draws)
        weight = None
        if time.ndim == 3:
            time, weight = time.unbind(-1)
        mix = time[..., None] if time.ndim == 2 else time[:, None, None]
        noisy_actions = mix * noise + (1 - mix) * actions
        prefix = self.prefix(batch)
        velocity = self.velocity(noisy_actions, time, self.prefix_of_flow(prefix))
        losses = F.mse_loss(noise - actions, velocity, reduction="none")
        losses = losses[:, :, : self.policy.config.output_features[ACTION].shape[0]]
        if weight is not None:
            losses = losses * weight[..., None]
        if self.metrics is not None and self.robots and not per_row:
            by_row = self.reduce(losses.detach(), batch, draws, per_row=True)
            add_by_robot(self.metrics.sums("loss_by_robot", self.robots), by_row, batch, draws)
        return self.combine(losses, prefix, batch, draws, per_row)

    def combine(self, losses: Tensor, prefix: Any, batch: Mapping[str, Tensor], draws: int, per_row: bool) -> Tensor:
        """Return the total loss: `reduce`, and in subclasses other losses that use the same prefix."""
        return self.reduce(losses, batch, draws, per_row)

    def prefix_of_flow(self, prefix: Any) -> Any:
        """Return the prefix for `velocity` in training."""
        return prefix

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with images as floats instead of uint8."""
        return self.images(batch)

    def reduce(self, losses: Tensor, batch: Mapping[str, Tensor], draws: int, per_row: bool) -> Tensor:
        """Reduce losses (B*K, T, A) to the loss of the batch, or with `per_row` to the loss of each draw (B*K,)."""
        if self.mask_padding:
            losses = losses.masked_fill(repeat_rows(batch["action_is_pad"], draws).unsqueeze(-1), 0.0)
        losses = scale_to_robot_dims(losses, batch, draws)
        for factor in batch.keys() & ROW_FACTORS:
            losses = losses * repeat_rows(batch[factor], draws)[:, None, None]
        return losses.mean(dim=(1, 2)) if per_row else losses.mean()

    def prefix(self, batch: Mapping[str, Tensor]) -> Any:
        """Compute the part of the network that does not depend on actions, from a batch with images as floats."""
        raise NotImplementedError

    def value_layers(self) -> list[tuple[int, int]]:
        """Return (key-value heads, head width) of each layer of the prefix."""
        raise NotImplementedError

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: Any) -> Tensor:
        """Predict noise - actions, in the shape of `noisy_actions`.

        Args:
            noisy_actions: float32 (B*K, T, max_action_dim).
            time: float32 (B*K,), or with `delays` also (B*K, T), the time of each action.
        """
        raise NotImplementedError

    def layers(self) -> Iterable[nn.Module]:
        """Return the layers that are computed completely."""
        raise NotImplementedError

    def make_units(self) -> list[nn.Module]:
        """Run each trained layer through a `Unit` that holds its matrices; return these units and word embeddings.

        FSDP2 gathers and frees parameters in hooks around a unit. Hooks of the layers themselves never fire, because
        neither this class nor LeRobot calls a layer as a module (0.6.1, #3767). Hooks of modules inside a layer would
        fire within compiled code. Parameters keep their names.
        """
        if not self._units:
            for layer in self.layers():
                if any(parameter.requires_grad for parameter in layer.parameters()):
                    self._units[layer] = Unit(module for module in layer.modules() if isinstance(module, nn.Linear))
            self.units = nn.ModuleList(self._units.values())
        return [*self._units.values(), *self._training_modules(WORD_EMBEDDINGS)]

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.compiler(function) if self.compiler else function

    def _run(self, function: Any, layer: nn.Module, *arguments: Any) -> Any:
        """Call the function of a layer; with checkpointing, save only the arguments and call it again in backward."""
        if self._checkpointing and torch.is_grad_enabled():
            function = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        return self._call(function, layer, *arguments)

    def _call(self, function: Any, layer: nn.Module, *arguments: Any) -> Any:
        """Call the function of a layer, through the layer's unit if it has one."""
        unit = self._units.get(layer)
        return unit(function, layer, *arguments) if unit else function(layer, *arguments)


@torch.no_grad()
def continue_chunk(
    loss: FlowLoss,
    batch: Mapping[str, Tensor],
    noise: Tensor,
    prefix: Tensor | None = None,
    *,
    plain: Mapping[str, Tensor] | None = None,
    guidance: float = 1.0,
) -> Tensor:
    """Predict normalised action chunks (B, T, A) by LeRobot's sampler.

    Args:
        noise: float32 (B, T, max_action_dim).
        prefix: given first actions of a policy that was trained with MAX_DELAY, float32 (B, d, at most max_action_dim),
            normalised, d < T; the first d actions of the result equal them.
        plain: batch without the condition of classifier-free guidance (arXiv 2207.12598), which differs from `batch` in
            the prompts. The velocity is v(plain) + guidance * (v(batch) - v(plain)).
    """
    config: Any = loss.policy.config
    steps, x, given = config.num_inference_steps, noise, 0
    if prefix is not None and (given := prefix.shape[1]):
        x = torch.cat([F.pad(prefix, (0, noise.shape[2] - prefix.shape[2])), noise[:, given:]], dim=1)
    contexts = [loss.prefix(loss.images(inputs)) for inputs in (batch, plain) if inputs is not None]
    dt = -1.0 / steps
    for step in range(steps):
        time = torch.full(x.shape[: 2 if given else 1], 1.0 + step * dt, device=x.device)
        if given:
            time[:, :given] = 0.0
        velocity, *unguided = [loss.velocity(x, time, context).float() for context in contexts]
        if unguided:
            velocity = torch.lerp(unguided[0], velocity, guidance)
        change = dt * velocity
        if given:
            change[:, :given] = 0.0
        x = x + change
    return x[:, :, : config.output_features[ACTION].shape[0]]


def scale_to_robot_dims(losses: Tensor, batch: Mapping[str, Tensor], draws: int) -> Tensor:
    """Scale losses (B*K, T, A) so that their mean over A is the mean over the dimensions of the row's robot."""
    if ACTION_DIMS not in batch:
        return losses
    mask = repeat_rows(batch[ACTION_DIMS], draws)
    share = mask.shape[1] / mask.sum(dim=1, keepdim=True)
    return losses.masked_fill(~mask[:, None, :], 0.0) * share[:, :, None]


def add_by_robot(sums: Tensor, losses: Tensor, batch: Mapping[str, Tensor], draws: int) -> None:
    """Add finite losses (B*K,) of readable rows, and their counts, to the sums and counts of each robot, (2, R)."""
    counts = losses.isfinite()
    if "is_read" in batch:
        counts = counts & repeat_rows(batch["is_read"], draws)
    pair = torch.stack([losses.masked_fill(~counts, 0.0), counts.to(losses.dtype)])
    sums.index_add_(1, repeat_rows(batch[ROBOT], draws), pair.to(sums.dtype))


def repeat_rows(rows: Tensor, times: int) -> Tensor:
    """Repeat each row (of the first dimension) `times` times, without a copy for `times` 1."""
    return rows.unsqueeze(1).expand(-1, times, *rows.shape[1:]).flatten(0, 1)
