"""Evaluate the demo's policy in its environment on unseen scenes, with ablations of images and instructions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from vla_finetuning.buckets.mirror import fetched_for_good
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.two_bins_scene import INSTRUCTIONS
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.evaluation.open_loop import other_instructions
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.options.programs import Config
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.rollouts.episodes import Condition, PlayedEpisode, episode_list
from vla_finetuning.rollouts.player import PolicySource
from vla_finetuning.rollouts.replay import make_films
from vla_finetuning.rollouts.servers import play_all
from vla_finetuning.run.job import Job

SCENES, FIRST_SEED = 60, 1000
LABELS = {
    "trained": "trained",
    "untrained": "before training",
    "other_instruction": "trained, with the other instruction",
    "blindfolded": "trained, blindfolded",
}
# Films of episodes in which the trained policy fails.
FAILURES_SHOWN = 4


def is_demo(config: Config, policy: PolicySpec) -> bool:
    """Return whether a run trains on the demo's dataset a policy that can play in its environment."""
    on_demo_dataset = config.preset == "demo" and not config.is_rehearsal
    return on_demo_dataset and not family_of(policy.config).remembers(policy.config)  # `check_acts` refuses these


def try_demo(job: Job, policy: PolicySpec) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Play the trained policy under all conditions, and the base policy, on the same unseen scenes.

    Returns:
        `{"trained", "untrained" (if the run had weights to start from), "other_instruction", "blindfolded"}`, each a
        `score` with its `label`; success always means the scene's own instruction. `went_where_told` counts episodes
        that followed the other instruction, and `went_to_a_bin` blindfolded episodes that reached a bin. And the
        result of `make_films`: one scene per instruction under all conditions, and some failures.
    """
    exported = fetched_for_good(job.output_dir / "pretrained_model")
    # Episodes go on after success, so that the table says whether the gripper stays.
    env, trained = env_config("two_bins", ["--terminates=false"]), load_policy_config(exported)
    device = "cuda" if job.use_gpu else "cpu"
    options: Any = {"env": env, "trusted": policy.trusted, "opening": policy.robots[0].opening, "device": device}
    sources = {"trained": PolicySource(exported, trained, **options)}
    conditions = {
        "trained": Condition("trained"),
        "other_instruction": Condition("trained", instructions=other_instructions(INSTRUCTIONS.values())),
        "blindfolded": Condition("trained", blindfolded=True),
    }
    if policy.folder is not None:
        untrained = copy.deepcopy(policy.config)
        options |= {"processors": policy.processors(untrained), "rename_map": policy.robots[0].rename_map}
        sources["untrained"] = PolicySource(policy.folder, untrained, **options)
        conditions["untrained"] = Condition("untrained")
    makers, names = task_makers(env), [name for name in LABELS if name in conditions]
    episodes = episode_list(names, makers, SCENES, FIRST_SEED)
    played = play_all(episodes, conditions, sources, makers, EvalOptions(), seed=policy.seed)
    lines = {name: [line for line, _ in played if line["condition"] == name] for name in names}
    scores = {name: {"label": LABELS[name], **score(own)} for name, own in lines.items()}
    reached = {name: [line for line in own if line["info"] and line["info"]["reached"]] for name, own in lines.items()}
    went = [line for line in reached["other_instruction"] if not line["success_once"]]
    scores["other_instruction"]["went_where_told"] = len(went)
    scores["blindfolded"]["went_to_a_bin"] = len(reached["blindfolded"])
    chosen = _select_films([(line, actions) for line, actions in played if actions is not None])
    return scores, make_films(job.output_dir, makers, [(LABELS[line["condition"]], line, own) for line, own in chosen])


def _select_films(played: Sequence[PlayedEpisode]) -> list[PlayedEpisode]:
    """Select the first scene of each instruction under every condition, then failures of the trained policy."""
    played = sorted(played, key=lambda one: one[0]["seed"])
    first = {line["instruction"]: line["seed"] for line, _ in reversed(played)}.values()
    failed = [one for one in played if one[0]["condition"] == "trained" and not one[0]["success_once"]]
    others = [one for one in failed if one[0]["seed"] not in first]
    return [one for one in played if one[0]["seed"] in first] + others[:FAILURES_SHOWN]


def success_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the scores as the demo's final table."""
    width = max(len(result["label"]) for result in scores.values())
    lines = [f"Success in the loop on {SCENES} scenes that are not in the dataset (95 % interval)"]
    for result in scores.values():
        lines.append(f"  {result['label']:{width}}  {share(result)}")
        if "went_where_told" in result:
            lines[-1] += f"; {result['went_where_told']} went to the bin that they were given"
        if "went_to_a_bin" in result:
            lines[-1] += f"; {result['went_to_a_bin']} went to a bin"
    return "\n".join(lines)
