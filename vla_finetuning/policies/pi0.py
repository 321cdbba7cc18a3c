"""PI0 and PI0-FAST: their published weights have the keys of openpi, as PI0.5's do."""

from __future__ import annotations

from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from vla_finetuning.policies.family import Family
from vla_finetuning.policies.pi05 import PI05


class PI0(Family):
    """PI0, PI0-FAST and types that derive from them."""

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename keys as LeRobot's `from_pretrained` of these policies does; it is PI0.5's with other rules."""
        return PI05("pi05").own_keys(policy, weights)
