"""The policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vla_finetuning.options.fields import option

# Of policies whose instructions name the robot (--dataset.robot_in_prompt): what they begin with.
ROBOT_NAME = "robot.json"
# There: the column of texts that the policy has learned to write (--train.text_targets).
WRITES = "writes"
# What plays relative actions of LeRobot 0.6.1, whose processors add the state that was observed last. No step of
# LeRobot's registry could remember a chunk's first state: the queue is the policy's, whose reset reaches no processor.
RELATIVE_PLAYED_BY = (
    "lerobot-rollout --inference.type=rtc and PolicyServer; a loop over select_action (lerobot-eval) adds the current "
    "state to each action of a chunk: another motion"
)


@dataclass
class PolicyOptions:
    """The policy."""

    policy_path: str | None = option(
        None, "A pretrained policy: a folder or a Hub id.", flag="policy.path", file="name"
    )
    policy_revision: str | None = option(
        None, "Branch, tag or commit of a --policy.path on the Hub.", flag="policy.pretrained_revision"
    )
    # As given: --chunk_size=20 and so on.
    policy_options: list[str] = option([], "An option of the policy itself: --policy.chunk_size 20.", flag="policy.*")
    # Only from this start's command line: write access to a run's folder must not enable it.
    policy_trust_remote_code: bool = option(
        False,
        "Run code that comes with the policy, for types that need it. What runs is named.",
        flag="policy.trust_remote_code",
    )
    rename_map: dict[str, str] = option(
        {},
        "Names of the policy for features of the dataset (of any of several), or of the environment; of the dataset's "
        'own features any, as {"state": "observation.state", "actions": "action"}.',
        form="""JSON, as '{"observation.images.front": "observation.images.base_0_rgb"}'""",
    )


@dataclass
class RunPolicyOptions(PolicyOptions):
    """Policy and names of features."""

    policy_type: str | None = option(
        None,
        "A policy type to start from random weights, instead of --policy.path.",
        flag="policy.type",
        conflicts={
            "policy.path": "the pretrained policy knows its type",
            "peft.method_type": "adapters beside random weights learn next to nothing; start from a pretrained "
            "policy, --policy.path",
        },
    )
    tolerance_s: float = option(1e-4, "Seconds that a video frame may lie from its row's timestamp.", above=0)


@dataclass
class ActingOptions:
    """How the policy acts."""

    advantage: Literal["positive", "negative"] | None = option(
        None,
        "What instructions end with, for a policy that was trained with --recap.labels: positive.",
        flag="policy.advantage",
    )
    # v = v(without) + guidance (v(with) - v(without)), of the velocities with and without the label.
    guidance: float = option(
        1.0,
        "With --policy.advantage: how far predictions go beyond those without it (classifier-free guidance); 1: not.",
        flag="policy.guidance",
        min=0,
    )
    subtask: bool = option(
        False,
        "Of a policy that was trained with --train.text_targets: write the text at each decision, and act on the "
        "instruction with it.",
        flag="policy.subtask",
    )
    use_gpu: bool | None = option(
        None, "Decide on GPUs. When absent: as found, and needed where a cluster is joined from a machine without."
    )
