"""Flow matching: the loss of policies that predict the velocity from actions to noise, and what it draws.

Legend: B batch, K draws of noise and time per row, T chunk, A action.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION
from torch import Tensor

from vla_finetuning.columns import ACTION_DIMS, ROBOT
from vla_finetuning.policies.family import MAX_DELAY, PolicyLoss
from vla_finetuning.policies.processors import DeviceHalf

# Columns of a batch that a row's loss is multiplied by.
ROW_FACTORS = frozenset({"row_weight", "is_read"})


class TimeDistribution(NamedTuple):
    """Of the time: `Beta(alpha, beta) * scale + offset`."""

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
    """Draw the flow matching noise and times of one optimizer step, for all its rows.

    They depend on (seed, step, global batch size) alone, so every worker draws them all and takes its rows. Drawn on
    the device, without a host sync; CPU and CUDA generators give different numbers.

    Args:
        config: the policy's; gives T, the padded action width and the distribution of the time, which is LeRobot's
            (`PI05Pytorch.sample_time`).
        global_batch_size: rows of the step, G.
        times: the distribution of the time, of a policy whose configuration says none.
    Returns:
        noise float32 (G, T, max_action_dim), standard normal; time float32 (G,). With MAX_DELAY in the configuration
        time is (G, T, 2), as `give_first_actions` makes it.
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
    """Draw how many first actions of each chunk are given, as those that a robot executes while it waits.

    Training-time real-time chunking (arXiv 2512.05964): uniform from 0 to `max_delay`, as LeRobot's main draws it
    (#4056). Given actions are at the clean end of the flow, time 0, and carry no loss.

    Args:
        time: float32 (G,), of all rows of an optimizer step.
    Returns:
        float32 (G, T, 2): the time of each action, and what its loss is multiplied by, 0 or a number by which the mean
        over the step's rows and actions, zeros included, is that over the actions that carry loss.
    """
    delays = torch.randint(max_delay + 1, (len(time), 1), generator=generator, device=time.device)
    predicted = torch.arange(chunk, device=time.device) >= delays
    return torch.stack([time[:, None] * predicted, predicted / predicted.to(time.dtype).mean()], dim=-1)


def time_without_given(time: Tensor) -> Tensor:
    """Return the times (B*K,) of chunks as if no action were given; a chunk's last one has the time of all others."""
    return time[:, -1, 0] if time.ndim == 3 else time


class FlowLoss(PolicyLoss):
    """The loss of a policy whose network is a velocity over what it sees: `prefix` once, `velocity` for every draw.

    Args:
        policy, images: as for `PolicyLoss`.
        mask_padding: leave padded action steps (`action_is_pad`) out of the loss. They become zeros and
            still count in the mean's denominator, so that the loss of a batch is the mean of its
            micro-batches' losses. Off: they count as any other step, as in LeRobot's PI0.5 and openpi.

    Of a mixture of robots, a row's loss is the mean over the dimensions of its own robot (`ACTION_DIMS`).
    """

    reaches_all = True  # `Family.parts` says what is unused, and that is frozen

    def __init__(self, policy: PreTrainedPolicy, *, images: DeviceHalf | None = None, mask_padding: bool = False):
        super().__init__(policy, images=images)
        self.mask_padding = mask_padding

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
            batch: as `Family.check_batch` describes it, on the device of the policy. For `mask_padding` also
                `action_is_pad` bool (B, T). Optional: `action_dims` bool (B, A), the dimensions that a row's robot has,
                one at least, whose mean its loss is; `row_weight` float32 (B,), what a row's loss is multiplied by,
                and `is_read` bool (B,), False where it is zero; the mean's denominator stays the number of rows.
            noise, time: rows of what `Family.draw` returns: float32 (B*K, T, max_action_dim) and float32 (B*K,) or, of
                chunks whose first actions are given, (B*K, T, 2) as of `give_first_actions`; the K draws of a row one
                after the other. Images and language are computed once for all K, whose mean the loss is.
            per_row: the loss of each draw of each row instead, float32 (B*K,), whose mean that is.
        Raises:
            ValueError: no noise or time, draws that are no multiple of the rows, or no camera in the batch.
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
        """Return the loss, by `reduce`; a policy that learns something else of the same prefix adds it here."""
        return self.reduce(losses, batch, draws, per_row)

    def prefix_of_flow(self, prefix: Any) -> Any:
        """Return what `velocity` gets of a prefix in training."""
        return prefix

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the policy computes with: floats in place of uint8 cameras."""
        return self.images(batch)

    def reduce(self, losses: Tensor, batch: Mapping[str, Tensor], draws: int, per_row: bool) -> Tensor:
        """The loss of a batch, or of each draw of each row, by those of action steps and dimensions (B*K, T, A)."""
        if self.mask_padding:
            losses = losses.masked_fill(repeat_rows(batch["action_is_pad"], draws).unsqueeze(-1), 0.0)
        losses = over_own_dims(losses, batch, draws)
        for factor in batch.keys() & ROW_FACTORS:
            losses = losses * repeat_rows(batch[factor], draws)[:, None, None]
        return losses.mean(dim=(1, 2)) if per_row else losses.mean()

    def prefix(self, batch: Mapping[str, Tensor]) -> Any:
        """Compute what `velocity` needs of a batch, whose images are floats as `images` makes them."""
        raise NotImplementedError

    def value_layers(self) -> list[tuple[int, int]]:
        """Key-value heads of each layer of the prefix, and their width."""
        raise NotImplementedError

    def value_inputs(self, prefix: Any) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Return what `value.ValueHead` takes of a prefix: keys and values of each layer, the bias of their tokens."""
        raise NotImplementedError

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: Any) -> Tensor:
        """Compute noise - actions at noisy actions float32 (B*K, T, max_action_dim) and time: the same shape.

        Args:
            time: float32 (B*K,); of a family with `delays` also (B*K, T), of each action.
        """
        raise NotImplementedError


def guided_chunk(
    loss: FlowLoss, conditional: Mapping[str, Tensor], plain: Mapping[str, Tensor], noise: Tensor, guidance: float
) -> Tensor:
    """Predict action chunks by LeRobot's sampler, led away from what another prompt gives (arXiv 2207.12598).

    The velocity is that of `plain` and `guidance` times the difference that `conditional` makes; 1 leaves `plain` out.

    Args:
        conditional, plain: B rows for the policy, which differ in language. noise: float32 (B, T, max_action_dim).
    Returns:
        float32 (B, T, A), normalised.
    """
    config: Any = loss.policy.config
    prefixes = [loss.prefix(loss.images(batch)) for batch in (conditional, plain)]
    x, steps = noise, config.num_inference_steps
    for step in range(steps):
        time = torch.full((len(x),), 1.0 - step / steps, device=x.device)
        with_label, without = (loss.velocity(x, time, prefix) for prefix in prefixes)
        x = x - (without + guidance * (with_label - without)) / steps
    return x[:, :, : config.output_features[ACTION].shape[0]]


@torch.no_grad()
def continue_chunk(loss: FlowLoss, batch: Mapping[str, Tensor], noise: Tensor, prefix: Tensor | None = None) -> Tensor:
    """Predict action chunks by LeRobot's sampler, their first actions given: of a policy trained with MAX_DELAY.

    Args:
        batch: B rows for the policy. noise: float32 (B, T, max_action_dim).
        prefix: the first actions, float32 (B, d, at most max_action_dim), normalised, d < T; None: none.
    Returns:
        float32 (B, T, A), normalised; its first d actions are the prefix.
    """
    config: Any = loss.policy.config
    steps, x, given = config.num_inference_steps, noise, 0
    if prefix is not None and (given := prefix.shape[1]):
        x = torch.cat([F.pad(prefix, (0, noise.shape[2] - prefix.shape[2])), noise[:, given:]], dim=1)
    seen, dt = loss.prefix(loss.images(batch)), -1.0 / steps
    for step in range(steps):
        time = torch.full(x.shape[: 2 if given else 1], 1.0 + step * dt, device=x.device)
        if given:
            time[:, :given] = 0.0
        change = dt * loss.velocity(x, time, seen).float()
        if given:
            change[:, :given] = 0.0
        x = x + change
    return x[:, :, : config.output_features[ACTION].shape[0]]


def over_own_dims(losses: Tensor, batch: Mapping[str, Tensor], draws: int) -> Tensor:
    """Losses (B*K, T, A) whose mean over A is that over the dimensions of the row's own robot, if others have more."""
    if ACTION_DIMS not in batch:
        return losses
    mask = repeat_rows(batch[ACTION_DIMS], draws)
    share = mask.shape[1] / mask.sum(dim=1, keepdim=True)
    return losses.masked_fill(~mask[:, None, :], 0.0) * share[:, :, None]


def add_by_robot(sums: Tensor, losses: Tensor, batch: Mapping[str, Tensor], draws: int) -> None:
    """Add losses by row (B*K,) to sums and counts by robot, (2, R): finite ones, of rows that could be read."""
    counts = losses.isfinite()
    if "is_read" in batch:
        counts = counts & repeat_rows(batch["is_read"], draws)
    pair = torch.stack([losses.masked_fill(~counts, 0.0), counts.to(losses.dtype)])
    sums.index_add_(1, repeat_rows(batch[ROBOT], draws), pair.to(sums.dtype))


def repeat_rows(rows: Tensor, times: int) -> Tensor:
    """Each row (of the first dimension) `times` times in a row; without a copy if that is once."""
    return rows.unsqueeze(1).expand(-1, times, *rows.shape[1:]).flatten(0, 1)
