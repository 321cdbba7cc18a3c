"""Build a policy without storage, to count parameters and to compare names and shapes."""

import contextlib
import copy

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy

from vla_finetuning.policies.registry import family_of


def meta_policy(config: PreTrainedConfig) -> PreTrainedPolicy:
    """Build the policy of a configuration on the meta device; raise ValueError if LeRobot cannot build it.

    Requires a family with `from_config` or `offline`: others may download their backbones.
    """
    config = family_of(config).without_downloads(copy.deepcopy(config))
    config.device = "meta"
    try:  # redirected, because LeRobot's SmolVLA prints its progress
        with torch.device("meta"), contextlib.redirect_stdout(None):
            return get_policy_class(config.type)(config)
    except Exception as error:  # LeRobot, torch and backbones raise many types for bad sizes and names
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(
            f"a '{config.type}' policy cannot be built from its configuration ({type(error).__name__}: {reason:.500}): "
            "change its options (--policy.*), or the config.json that they come from"
        ) from error
