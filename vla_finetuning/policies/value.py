"""The value of what a policy sees, by a small head on keys and values that its prefix computes anyway.

Legend: B rows, H key-value heads, P tokens, D head width, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

HIDDEN = 256


class ValueHead(nn.Module):
    """Attention of one learned query per layer and head to the prefix's tokens, then a perceptron.

    No gradient reaches the policy. The outputs are zero before the first update.

    Args:
        layers: (H, D) of each layer's keys and values, as `FlowLoss.value_inputs` gives them.
        outputs: O, 1 for a scalar value.
    """

    def __init__(self, layers: Sequence[tuple[int, int]], outputs: int = 1):
        super().__init__()
        self.queries = nn.ParameterList(nn.Parameter(torch.randn(heads, 1, width)) for heads, width in layers)
        features = sum(heads * width for heads, width in layers)
        self.norm, self.hidden = nn.LayerNorm(features), nn.Linear(features, HIDDEN)
        self.output = nn.Linear(HIDDEN, outputs)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, keys_values: Sequence[tuple[Tensor, Tensor]], bias: Tensor) -> Tensor:
        """Compute values float32 (B, O).

        Args:
            keys_values: of each layer, (B, H, P, D) each, of any dtype.
            bias: float32 (B, 1, 1, P), added to the attention scores.
        """
        read = []
        for query, (key, value) in zip(self.queries, keys_values, strict=True):
            key, value = key.detach().float(), value.detach().float()
            found = F.scaled_dot_product_attention(query.expand(len(key), -1, -1, -1), key, value, attn_mask=bias)
            read.append(found.flatten(1))
        return self.output(F.silu(self.hidden(self.norm(torch.cat(read, dim=1)))))


def make_value_head(layers: Sequence[tuple[int, int]], seed: int, outputs: int = 1) -> ValueHead:
    """A head whose first parameters depend on the seed alone; the generators of the process are left as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ValueHead(layers, outputs)


def advantages_and_targets(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Generalized advantage estimation over the decisions of one episode (arXiv 1506.02438).

    Nothing follows the last decision: an episode that ran out of time is worth what it had reached.

    Args:
        rewards: of each decision. values: before each decision.
    Returns:
        The advantages, and the value targets: advantage + value.
    """
    following, advantage, advantages = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * gae_lambda * advantage
        advantages.append(advantage)
        following = value
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]
