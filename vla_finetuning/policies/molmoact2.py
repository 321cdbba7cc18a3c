"""MolmoAct2: its processors leave a gripper as it is where the dataset's names tell which entry that is."""

from __future__ import annotations

from typing import Any

from vla_finetuning.policies.family import Family


class MolmoAct2(Family):
    """MolmoAct2 and types that derive from it."""

    # LeRobot 0.6.1 has names for the steps that normalise which those that replace statistics do not know.
    own_processors = True

    def cannot_predict(self, config: Any) -> str:
        if config.inference_action_mode is not None:
            return ""
        return "it has two ways to predict, give one: --policy.inference_action_mode continuous, or discrete"
