"""X-VLA: its published weights have the keys of the Florence-2 that Microsoft's code made."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor

from vla_finetuning.policies.family import Family

# Of an arm or of two: position, six numbers of a rotation, gripper.
ROTATED = (10, 20)


class XVLA(Family):
    """X-VLA and types that derive from it."""

    takes_any = True
    without_effect = {"domain_feature_key": "the domain_id of the step xvla_add_domain_id in its preprocessor"}

    def env_processors(self, config: PreTrainedConfig, env: Any, own: Collection[str] = ()) -> tuple[Any, Any]:
        """Of LIBERO those that LeRobot has for end-effector actions with rotations of six numbers.

        LeRobot 0.6.1 takes them for every environment and every action, and normalises images a second time where the
        policy's own preprocessor does so too, which then refuses them.
        """
        if not self._rotates(config, env):
            return super().env_processors(config, env, own)
        # Here: most runs play in no environment.
        from lerobot.envs import make_env_pre_post_processors

        before, after = make_env_pre_post_processors(env, config)
        before.steps = [step for step in before.steps if getattr(step, "_registry_name", None) not in own]
        return before, after

    def env_features(
        self, config: PreTrainedConfig, env: Any, features: dict[str, PolicyFeature]
    ) -> dict[str, PolicyFeature]:
        if not self._rotates(config, env):
            return features
        return {**features, OBS_STATE: PolicyFeature(FeatureType.STATE, (ROTATED[-1],)), **config.output_features}

    def _rotates(self, config: PreTrainedConfig, env: Any) -> bool:
        """Whether actions are those that LeRobot's processors make LIBERO's of."""
        from lerobot.envs.configs import LiberoEnv

        return isinstance(env, LiberoEnv) and config.output_features[ACTION].shape[0] in ROTATED

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename keys as LeRobot's `XVLAPolicy.from_pretrained` does."""
        # Here: most runs do without Florence-2, which takes a second to import.
        from lerobot.policies.xvla import modeling_xvla

        if not modeling_xvla._is_vendored_florence_state_dict(weights):
            return weights
        return modeling_xvla._remap_vendored_florence_state_dict(weights)
