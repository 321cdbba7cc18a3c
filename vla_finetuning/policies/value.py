"""Value functions: a small head on the keys and values of a policy's prefix, its loss, and advantage estimates.

Legend: B rows, H key-value heads, P tokens, D head width, O outputs, K bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vla_finetuning.columns import RETURN
from vla_finetuning.policies.attention import Kernel, Shape
from vla_finetuning.policies.compiling import Compiler
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.flow import ROW_FACTORS, FlowLoss
from vla_finetuning.policies.registry import family_of

HIDDEN = 256


class ValueHead(nn.Module):
    """Attention of one learned query per layer and head to the prefix tokens, followed by an MLP.

    The outputs are zero before the first update.

    Args:
        layers: (H, D) of each layer, from `FlowLoss.value_layers`.
        outputs: O, 1 for a scalar value.
        detach: whether to stop gradients into the policy.
    """

    def __init__(self, layers: Sequence[tuple[int, int]], outputs: int = 1, detach: bool = True):
        super().__init__()
        self._detach = detach
        self.queries = nn.ParameterList(nn.Parameter(torch.randn(heads, 1, width)) for heads, width in layers)
        features = sum(heads * width for heads, width in layers)
        self.norm, self.hidden = nn.LayerNorm(features), nn.Linear(features, HIDDEN)
        self.output = nn.Linear(HIDDEN, outputs)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, prefix: Any) -> Tensor:
        """Compute values float32 (B, O) from a `pi05.Prefix`, also under autocast: differences of values are small."""
        read, bias = [], prefix.bias
        with torch.autocast(bias.device.type, enabled=False):
            for query, (key, value) in zip(self.queries, prefix.keys_values, strict=True):
                key, value = (tensor.detach() if self._detach else tensor for tensor in (key, value))
                key, value = key.float(), value.float()
                heads = F.scaled_dot_product_attention(query.expand(len(key), -1, -1, -1), key, value, attn_mask=bias)
                read.append(heads.flatten(1))
            return self.output(F.silu(self.hidden(self.norm(torch.cat(read, dim=1)))))


def make_value_head(layers: Sequence[tuple[int, int]], seed: int, outputs: int = 1, detach: bool = True) -> ValueHead:
    """Make a head whose initial weights depend only on `seed`, without a change of the process's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ValueHead(layers, outputs, detach)


class ValueLoss(PolicyLoss):
    """Cross-entropy of a predicted distribution over returns from -1 to 0.

    The target distribution has the return as its mean and lies on the two nearest bins (arXiv 1707.06887). The head's
    parameters are named `critic.`.

    Args:
        policy_loss: loss of the policy, which computes the prefix.
        bins: K.
        backbone: also train the parts that only the mode `full` trains; all other parameters of the policy are frozen.
    """

    reaches_all = True
    centres: Tensor

    def __init__(self, policy_loss: FlowLoss, bins: int, seed: int, backbone: bool = False):
        super().__init__(policy_loss.policy, images=policy_loss.images)
        family = family_of(policy_loss.policy.config)
        parts, trains = family.parts(policy_loss.policy), family.modes["full"] - family.modes["expert"]
        for name, parameter in policy_loss.policy.named_parameters():
            parameter.requires_grad_(backbone and parts[name] in trains)
        self._backbone = backbone
        # A list hides the module, so that the policy's parameters have only one name.
        self._policy_loss = [policy_loss]
        self.critic = make_value_head(policy_loss.value_layers(), seed, bins, detach=not backbone)
        self.register_buffer("centres", torch.linspace(-1.0, 0.0, bins), persistent=False)

    def attentions(self, cameras: int, prompts: Iterable[int]) -> list[tuple[nn.Module, Shape]]:
        attentions = self._policy_loss[0].attentions(cameras, prompts)
        return [(layer, shape) for layer, shape in attentions if shape.name == "prefix"]

    @property
    def compiler(self) -> Compiler | None:
        return getattr(self._policy_loss[0], "compiler", None)

    @property
    def attention(self) -> Kernel:  # type: ignore[override]
        return self._policy_loss[0].attention

    @attention.setter
    def attention(self, kernel: Kernel) -> None:
        self._policy_loss[0].attention = kernel

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
            batch: the inputs of the policy's loss, and RETURN float32 (B,). `noise` and `time` are not used.
            per_row: return the loss of each row, float32 (B,), instead of the mean.
        """
        losses = -(two_bins(batch[RETURN], len(self.centres)) * self.logits(batch).log_softmax(dim=1)).sum(dim=1)
        for factor in batch.keys() & ROW_FACTORS:
            losses = losses * batch[factor]
        return losses if per_row else losses.mean()

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the distribution's logits, float32 (B, K)."""
        policy_loss = self._policy_loss[0]
        with torch.set_grad_enabled(self._backbone and torch.is_grad_enabled()):
            prefix = policy_loss.prefix(self.images(batch))
        return self.critic(prefix)

    def value(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean of the distribution, float32 (B,)."""
        return (self.logits(batch).softmax(dim=1) * self.centres).sum(dim=1)  # autocast would cast a matrix product


def two_bins(returns: Tensor, bins: int) -> Tensor:
    """Return distributions float32 (B, K) on the two nearest bins, whose means are returns (B,) clamped to -1 and 0."""
    place = (returns.clamp(-1.0, 0.0) + 1.0) * (bins - 1)
    low = place.floor().clamp(max=bins - 2)
    upper = place - low
    target = torch.zeros(len(returns), bins, device=returns.device)
    target.scatter_(1, low.long()[:, None], 1.0 - upper[:, None])
    return target.scatter_(1, low.long()[:, None] + 1, upper[:, None])


def advantages_and_targets(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float, after: float = 0.0
) -> tuple[list[float], list[float]]:
    """Estimate generalized advantages of the decisions of one episode (arXiv 1506.02438), and targets of values.

    Args:
        values: value of the state before each decision.
        after: value of the state after the last decision; 0 for a terminal state.
    """
    following, advantage, advantages = after, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * gae_lambda * advantage
        advantages.append(advantage)
        following = value
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]
