"""Build a policy without storage: to count, and to compare names and shapes."""

import contextlib
import copy

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_finetuning.policies.registry import family_of


def meta_policy(config: PreTrainedConfig) -> PreTrainedPolicy:
    """Build a policy on the meta device, as LeRobot does for its configuration.

    Only of a family that is built `from_config`: others may download their backbones.
    """
    config = family_of(config).without_downloads(copy.deepcopy(config))
    config.device = "meta"
    # LeRobot's SmolVLA prints what it does.
    with torch.device("meta"), contextlib.redirect_stdout(None):
        return get_policy_class(config.type)(config)
