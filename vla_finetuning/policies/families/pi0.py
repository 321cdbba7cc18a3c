"""PI0 and PI0-FAST as families.

PI0 differs from PI0.5 (`pi05.PI05Loss`) in the suffix. The state is its first token, not a part of the prompt, and
attends to the prefix and itself but to no action. An MLP adds the time to the action tokens, not the expert's norms.

Legend: B batch, K draws of noise and time per row, T chunk, P prefix tokens, S state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION_TOKEN_MASK, OBS_STATE, OPENPI_ATTENTION_MASK_VALUE
from torch import Tensor

from vla_finetuning.policies.families.pi05 import PI05, PI05Loss, Prefix
from vla_finetuning.policies.family import MEAN_COUNT, Family, LossClass, PolicyLoss
from vla_finetuning.policies.flow import repeat_rows

# Size for which LeRobot 0.6.1 builds PI0-FAST's vision tower, whatever its `image_resolution` is.
IMAGE_SIZE = (224, 224)


class PI0Loss(PI05Loss):
    """PI0's loss; equals `PI0Policy.forward` with the same noise and time, gradients included.

    Args: as for `PI05Loss`; batches also have `observation.state`, float32 (B, S).
    """

    before_actions = 1

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        return replace(super().prefix(batch), state=self.policy.prepare_state(batch))

    def _suffix_tokens(self, noisy_actions: Tensor, embedded_time: Tensor, prefix: Prefix) -> tuple[Tensor, None]:
        core = self.policy.model
        actions = core.action_in_proj(noisy_actions)
        with_time = torch.cat([actions, embedded_time[:, None, :].expand_as(actions)], dim=2)
        actions = core.action_time_mlp_out(F.silu(core.action_time_mlp_in(with_time)))
        assert prefix.state is not None
        state = repeat_rows(core.state_proj(prefix.state), len(actions) // len(prefix.state))
        return torch.cat([state[:, None, :], actions], dim=1), None

    def _suffix_bias(self, prefix: Prefix, tokens: int) -> Tensor:
        """Return the bias (B, 1, 1 + T, P + 1 + T) in which the state token does not see the actions."""
        bias = F.pad(prefix.bias, (0, tokens)).repeat(1, 1, tokens, 1)
        bias[:, :, 0, 1 - tokens :] = OPENPI_ATTENTION_MASK_VALUE
        return bias


class PI0(PI05):
    loss_class: ClassVar[LossClass] = PI0Loss
    heads = ("action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out", "state_proj")
    before_actions = 1
    # Chunk likelihoods, values and guidance would also need the state as an input.
    flow = False

    def empty_inputs(
        self, config: Any, rows: int, draws: int, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        batch, noise, time = super().empty_inputs(config, rows, draws, device)
        batch[OBS_STATE] = torch.empty(rows, config.max_state_dim, device=device)
        return batch, noise, time


class PI0FASTLoss(PolicyLoss):
    """LeRobot's loss: a mean over each row's action tokens after the first; with MEAN_COUNT, over the whole step."""

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        loss = super().forward(batch)
        return loss * self.count(batch) / batch[MEAN_COUNT] if MEAN_COUNT in batch else loss

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch[ACTION_TOKEN_MASK][:, 1:].sum()


class PI0FAST(Family):
    loss_class = PI0FASTLoss
    fits_images = True
    train_options = frozenset({"exact_mean"})

    def check_plan(self, config: Any, columns: Collection[str], folder: Path | None, forwards: int) -> list[str]:
        if (size := tuple(config.image_resolution)) != IMAGE_SIZE:
            raise ValueError(
                f"--policy.image_resolution={list(size)}: a '{self.type}' takes {list(IMAGE_SIZE)} alone; give that"
            )
        return []

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename keys as LeRobot's `from_pretrained` does: by PI0.5's code with the policy's own rules."""
        return PI05("pi05").own_keys(policy, weights)


FAMILIES = (
    PI0("pi0", as_lerobot=True, chunk_draws="noise", tokenizer="google/paligemma-3b-pt-224"),
    PI0FAST("pi0_fast", as_lerobot=True, tokenizer_option="text_tokenizer_name"),
)
