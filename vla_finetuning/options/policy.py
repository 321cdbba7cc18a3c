"""Options of the policy: its source, its own options, how it acts, and where it is published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vla_finetuning.options.fields import option

# File with the robot's facts in an exported policy.
ROBOT_NAME = "robot.json"
# Its key for the column of texts that the policy writes (--train.text_targets).
WRITES = "writes"
# Tools of LeRobot 0.6.1 that play relative actions correctly. Its processors add the last observed state; no registered
# step can keep a chunk's first state, because the policy owns the queue and its reset reaches no processor.
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
    # Flags without the prefix, such as --chunk_size=20.
    policy_options: list[str] = option([], "An option of the policy, such as --policy.chunk_size 20.", flag="policy.*")
    # Read from the command line only: write access to a run's folder must not enable it.
    policy_trust_remote_code: bool = option(
        False,
        "Run code that comes with the policy, for types that need it. The plan names the code.",
        flag="policy.trust_remote_code",
    )
    rename_map: dict[str, str] = option(
        {},
        "The policy's names for features of a dataset or of the environment. A dataset's own features may get any "
        'name: {"state": "observation.state", "actions": "action"}.',
        form="""JSON, as '{"observation.images.front": "observation.images.base_0_rgb"}'""",
    )

    @property
    def policy_option_names(self) -> set[str]:
        """Return the names of the given `policy_options`; of a field of an option, the option's."""
        return {option.removeprefix("--").partition("=")[0].partition(".")[0] for option in self.policy_options}


@dataclass
class RunPolicyOptions(PolicyOptions):
    """Policy and names of features."""

    policy_type: str | None = option(
        None,
        "A policy type to train from random weights, instead of --policy.path.",
        flag="policy.type",
        conflicts={
            "policy.path": "the pretrained policy knows its type",
            "peft.method_type": "adapters beside random weights learn next to nothing; start from a pretrained "
            "policy, --policy.path",
        },
    )
    tolerance_s: float = option(
        1e-4, "Maximum distance in seconds between a row's timestamp and its video frame.", above=0
    )


@dataclass
class ActingOptions:
    """How the policy acts."""

    advantage: Literal["positive", "negative"] | None = option(
        None,
        "Label at the end of instructions, for a policy that was trained with --recap.labels: positive.",
        flag="policy.advantage",
    )
    # v = v(without) + guidance (v(with) - v(without)), with velocities v with and without the label.
    guidance: float = option(
        1.0,
        "With --policy.advantage: scale of classifier-free guidance, from predictions without the label to those with "
        "it. 1: none.",
        flag="policy.guidance",
        min=0,
    )
    subtask: bool = option(
        False,
        "For a policy that was trained with --train.text_targets: write the text at each decision, and act on the "
        "instruction with it.",
        flag="policy.subtask",
    )
    use_gpu: bool | None = option(
        None, "Run the policy on GPUs. Default: if there are any; required when a machine without GPUs joins a cluster."
    )


@dataclass
class PushOptions:
    """Publishing on the Hub."""

    # A base policy's config.json has its own values of these options, which are ignored.
    push_to_hub: bool | None = option(
        None,
        "Push the trained policy to the Hugging Face Hub. --policy.repo_id implies it.",
        flag="policy.push_to_hub",
        requires={"policy.repo_id": "to which repository?"},
    )
    policy_repo_id: str | None = option(None, "Repository for the trained policy: USER/NAME.", flag="policy.repo_id")
    policy_private: bool | None = option(
        None,
        "Make the repository private.",
        flag="policy.private",
        only_with="policy.repo_id",
    )
