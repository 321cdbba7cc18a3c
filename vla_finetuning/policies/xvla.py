"""X-VLA: its published weights have the keys of the Florence-2 that Microsoft's code made."""

from __future__ import annotations

from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from vla_finetuning.policies.family import Family


class XVLA(Family):
    """X-VLA and types that derive from it."""

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename keys as LeRobot's `XVLAPolicy.from_pretrained` does."""
        # Here: most runs do without Florence-2, which takes a second to import.
        from lerobot.policies.xvla import modeling_xvla

        if not modeling_xvla._is_vendored_florence_state_dict(weights):
            return weights
        return modeling_xvla._remap_vendored_florence_state_dict(weights)
