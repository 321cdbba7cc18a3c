"""Publishing on the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from vla_finetuning.options.fields import option


@dataclass
class PushOptions:
    """Publishing on the Hub."""

    # data/hub.py. A base policy brings its own along, where it was once pushed to: not ours.
    push_to_hub: bool | None = option(
        None,
        "Push the trained policy to the Hugging Face Hub; --policy.repo_id asks for it.",
        flag="policy.push_to_hub",
        requires={"policy.repo_id": "to which repository?"},
    )
    policy_repo_id: str | None = option(None, "Where the trained policy is pushed: USER/NAME.", flag="policy.repo_id")
    policy_private: bool | None = option(None, "Make a private repository there.", flag="policy.private")
