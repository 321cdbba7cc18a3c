"""Policies that remember: what they predict from is in queues, which LeRobot's `select_action` fills step by step."""

from __future__ import annotations

from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.policies.utils import populate_queues
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from torch import Tensor

from vla_finetuning.policies.family import Family


class Queued(Family):
    """Policies whose `predict_action_chunk` reads queues of the last `n_obs_steps` states and images."""

    def remembers(self, config: Any) -> str:
        """With one step too: its queues are filled here from windows alone."""
        return super().remembers(config) or f"with n_obs_steps={config.n_obs_steps} predicts from a queue of past steps"

    def predict_chunk(self, policy: PreTrainedPolicy, observation: dict[str, Any], **options: Any) -> Tensor:
        """Show the policy the window, one step after the other, as an episode's steps, and have it predict."""
        owner: Any = policy
        owner.reset()
        # LeRobot's pipelines leave an action of None, which would be read from its empty queue.
        observation = {key: value for key, value in observation.items() if key != ACTION}
        seen = {key: observation[key] for key in owner._queues if key in observation}
        if cameras := list(policy.config.image_features):
            seen[OBS_IMAGES] = torch.stack([observation[key] for key in cameras], dim=-4)
        for step in range(observation[OBS_STATE].shape[1]):
            owner._queues = populate_queues(owner._queues, {key: window[:, step] for key, window in seen.items()})
        return owner.predict_action_chunk({**observation, **seen}, **options)
