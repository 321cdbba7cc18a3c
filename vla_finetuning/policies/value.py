"""The value of what a policy sees, by a small head on keys and values that its prefix computes anyway.

Legend: B rows, H key-value heads, P tokens, D head width, O outputs, K bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    """Attention of one learned query per layer and head to the prefix's tokens, then a perceptron.

    The outputs are zero before the first update.

    Args:
        layers: (H, D) of each layer's keys and values, as `FlowLoss.value_inputs` gives them.
        outputs: O, 1 for a scalar value.
        detach: no gradient reaches the policy.
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

    def forward(self, keys_values: Sequence[tuple[Tensor, Tensor]], bias: Tensor) -> Tensor:
        """Compute values float32 (B, O), also under autocast: what they are compared by is small.

        Args:
            keys_values: of each layer, (B, H, P, D) each, of any dtype.
            bias: float32 (B, 1, 1, P), added to the attention scores.
        """
        read = []
        with torch.autocast(bias.device.type, enabled=False):
            for query, (key, value) in zip(self.queries, keys_values, strict=True):
                key, value = (tensor.detach() if self._detach else tensor for tensor in (key, value))
                key, value = key.float(), value.float()
                heads = F.scaled_dot_product_attention(query.expand(len(key), -1, -1, -1), key, value, attn_mask=bias)
                read.append(heads.flatten(1))
            return self.output(F.silu(self.hidden(self.norm(torch.cat(read, dim=1)))))


def make_value_head(layers: Sequence[tuple[int, int]], seed: int, outputs: int = 1, detach: bool = True) -> ValueHead:
    """A head whose first parameters depend on the seed alone; the generators of the process are left as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ValueHead(layers, outputs, detach)


class ValueLoss(PolicyLoss):
    """Cross-entropy of a distribution over returns from -1 to 0, predicted of what a policy sees.

    A return lies between the centres of two bins and counts in both, by how near they are (arXiv 1707.06887): the mean
    of that target is the return. The head's parameters are named `critic.`.

    Args:
        seen: of the policy, none of whose other weights train. bins: K. seed: of the head's first weights.
        backbone: what the policy sees with trains too, where `choose_trainable` has chosen it.
    """

    reaches_all = True
    centres: Tensor

    def __init__(self, seen: FlowLoss, bins: int, seed: int, backbone: bool = False):
        super().__init__(seen.policy, images=seen.images)
        family = family_of(seen.policy.config)
        parts, trains = family.parts(seen.policy), family.modes["full"] - family.modes["expert"]
        for name, parameter in seen.policy.named_parameters():
            parameter.requires_grad_(backbone and parts[name] in trains)
        self._backbone = backbone
        # In a list, so that the policy's weights have one name.
        self._seen = [seen]
        self.critic = make_value_head(seen.value_layers(), seed, bins, detach=not backbone)
        self.register_buffer("centres", torch.linspace(-1.0, 0.0, bins), persistent=False)

    def attentions(self, cameras: int, prompts: Iterable[int]) -> list[tuple[nn.Module, Shape]]:
        return [attention for attention in self._seen[0].attentions(cameras, prompts) if attention[1].part == "prefix"]

    @property
    def compiler(self) -> Compiler | None:
        """Return what compiles the policy's layers; None where nothing does."""
        return getattr(self._seen[0], "compiler", None)

    @property
    def attention(self) -> Kernel:  # type: ignore[override]
        return self._seen[0].attention

    @attention.setter
    def attention(self, kernel: Kernel) -> None:
        self._seen[0].attention = kernel

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
            batch: what the policy's loss takes, and RETURN float32 (B,). noise, time: not used.
            per_row: the loss of each row instead, float32 (B,).
        """
        losses = -(two_bins(batch[RETURN], len(self.centres)) * self.logits(batch).log_softmax(dim=1)).sum(dim=1)
        for factor in batch.keys() & ROW_FACTORS:
            losses = losses * batch[factor]
        return losses if per_row else losses.mean()

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the distribution's logits, float32 (B, K)."""
        seen = self._seen[0]
        with torch.set_grad_enabled(self._backbone and torch.is_grad_enabled()):
            keys_values, bias = seen.value_inputs(seen.prefix(self.images(batch)))
        return self.critic(keys_values, bias)

    def value(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean of the distribution, float32 (B,)."""
        return (self.logits(batch).softmax(dim=1) * self.centres).sum(dim=1)  # a product would be cast by autocast


def two_bins(returns: Tensor, bins: int) -> Tensor:
    """The distribution over bins whose mean is the return, on the two nearest centres: float32 (B, K).

    Args:
        returns: float32 (B,); beyond -1 and 0 they count as these.
    """
    place = (returns.clamp(-1.0, 0.0) + 1.0) * (bins - 1)
    low = place.floor().clamp(max=bins - 2)
    upper = place - low
    target = torch.zeros(len(returns), bins, device=returns.device)
    target.scatter_(1, low.long()[:, None], 1.0 - upper[:, None])
    return target.scatter_(1, low.long()[:, None] + 1, upper[:, None])


def advantages_and_targets(
    rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float, after: float = 0.0
) -> tuple[list[float], list[float]]:
    """Generalized advantage estimation over the decisions of one episode (arXiv 1506.02438).

    Args:
        rewards: of each decision. values: before each decision. after: of the state after the last one; 0: nothing
            follows it.
    Returns:
        The advantages, and the value targets: advantage + value.
    """
    following, advantage, advantages = after, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * gae_lambda * advantage
        advantages.append(advantage)
        following = value
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]
