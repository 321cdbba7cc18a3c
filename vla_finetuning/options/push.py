"""Options of publishing the trained policy on the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from vla_finetuning.options.fields import option


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
    policy_private: bool | None = option(None, "Make the repository private.", flag="policy.private")
