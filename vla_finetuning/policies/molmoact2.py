"""MolmoAct2: its processors leave a gripper as it is where the dataset's names tell which entry that is."""

from __future__ import annotations

from vla_finetuning.policies.family import Family


class MolmoAct2(Family):
    """MolmoAct2 and types that derive from it."""

    # LeRobot 0.6.1 has names for the steps that normalise which those that replace statistics do not know.
    own_processors = True
