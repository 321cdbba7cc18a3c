"""PI0 as a family: PI0.5's loss with the state as a token of the action expert; PI0-FAST's keys.

In PI0 the state is no part of the prompt but the first token of the suffix, and the time enters with the actions by a
perceptron, not by the norms of the expert. The state's token sees images, language and itself, and no action. All else
is PI0.5's (`pi05.PI05Loss`): the prefix runs alone, without autograd where nothing in it trains.

Legend: B batch, K draws of noise and time per row, T chunk, P prefix tokens, S state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION_TOKEN_MASK, OBS_STATE, OPENPI_ATTENTION_MASK_VALUE
from torch import Tensor

from vla_finetuning.policies.families.pi05 import PI05, PI05Loss, Prefix
from vla_finetuning.policies.family import MEAN_COUNT, Family, LossClass, PolicyLoss
from vla_finetuning.policies.flow import repeat_rows


class PI0Loss(PI05Loss):
    """PI0's loss; loss and gradients are those of `PI0Policy.forward` with the same noise and time.

    Args: as for `PI05Loss`; a batch has `observation.state` too, float32 (B, S).
    """

    before_actions = 1

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Compute what the action expert needs of images and language; the state goes along."""
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
        """(B, 1, 1 + T, P + 1 + T): the state's token does not see the actions."""
        bias = F.pad(prefix.bias, (0, tokens)).repeat(1, 1, tokens, 1)
        bias[:, :, 0, 1 - tokens :] = OPENPI_ATTENTION_MASK_VALUE
        return bias


class PI0(PI05):
    """PI0 and types that derive from it."""

    loss_class: ClassVar[LossClass] = PI0Loss
    heads = ("action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out", "state_proj")
    before_actions = 1
    # An action chunk's probability, values and guidance would need the state beside images and prompt.
    flow = delays = writes = False
    train_options = PI05.train_options - {"knowledge_insulation"}

    def empty_inputs(
        self, config: Any, rows: int, draws: int, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        batch, noise, time = super().empty_inputs(config, rows, draws, device)
        batch[OBS_STATE] = torch.empty(rows, config.max_state_dim, device=device)
        return batch, noise, time


class PI0FASTLoss(PolicyLoss):
    """LeRobot's loss, a mean over action tokens but each row's first; with MEAN_COUNT, over those of the whole step."""

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        loss = super().forward(batch)
        return loss * self.count(batch) / batch[MEAN_COUNT] if MEAN_COUNT in batch else loss

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch[ACTION_TOKEN_MASK][:, 1:].sum()


class PI0FAST(Family):
    """PI0-FAST and types that derive from it."""

    loss_class = PI0FASTLoss
    fits_images = True
    train_options = frozenset({"exact_mean"})

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename keys as LeRobot's `from_pretrained` of these policies does; it is PI0.5's with other rules."""
        return PI05("pi05").own_keys(policy, weights)


FAMILIES = (
    PI0("pi0", as_lerobot=True, chunk_draws="noise", tokenizer="google/paligemma-3b-pt-224"),
    PI0FAST("pi0_fast", as_lerobot=True, tokenizer_option="text_tokenizer_name"),
)
