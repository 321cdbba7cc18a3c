"""Evaluate the demo's policy in its environment on unseen scenes, with ablations of images and instructions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from vla_finetuning.buckets.mirror import fetched_for_good
from vla_finetuning.envs.configs import env_config, task_makers
from vla_finetuning.envs.two_bins_scene import INSTRUCTIONS
from vla_finetuning.evaluation.intervals import share
from vla_finetuning.evaluation.open_loop import other_instructions
from vla_finetuning.evaluation.side_by_side import SideBySide
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.options.programs import Config
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.policies.pipelines import saved_rename_map, saved_shapes
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.rollouts.episodes import Condition
from vla_finetuning.rollouts.player import PolicySource, check_fits
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
    return on_demo_dataset and not family_of(policy.config).remembers(policy.config)  # `check_fits` refuses these


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
        processors = policy.processors(untrained)
        sources["untrained"] = PolicySource(policy.folder, untrained, processors=processors, **options)
        conditions["untrained"] = Condition("untrained")
    check_fits(trained, env, saved_rename_map(exported), saved_shapes(exported, trained))
    if "untrained" in sources:
        check_fits(sources["untrained"].config, env, policy.robots[0].rename_map, policy.robots[0].match.shapes)
    comparison = SideBySide(
        conditions,
        sources,
        task_makers(env),
        EvalOptions(),
        count=SCENES,
        first_seed=FIRST_SEED,
        seed=policy.seed,
        use_gpu=job.use_gpu,
    )
    names = [name for name in LABELS if name in conditions]
    scores = {name: comparison.score(name, LABELS[name]) for name in names}
    reached = {name: [line for line in comparison.played(name) if line["info"]["reached"]] for name in names}
    went = [line for line in reached["other_instruction"] if not line["success_once"]]
    scores["other_instruction"]["went_where_told"] = len(went)
    scores["blindfolded"]["went_to_a_bin"] = len(reached["blindfolded"])
    chosen = _select_films([line for name in names for line in comparison.played(name)], names)
    return scores, comparison.films(job.output_dir, [(LABELS[line["condition"]], line) for line in chosen])


def _select_films(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Select the first scene of each instruction under every condition, then failures of the trained policy."""
    played = sorted(lines, key=lambda line: (line["seed"], names.index(line["condition"])))
    first = {line["instruction"]: line["seed"] for line in reversed(played)}
    compared = [line for line in played if line["seed"] in first.values()]
    failed = [line for line in played if line["condition"] == "trained" and not line["success_once"]]
    return compared + [line for line in failed if line not in compared][:FAILURES_SHOWN]


def success_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the scores as the demo's final table."""
    width = max(len(score["label"]) for score in scores.values())
    lines = [f"Success in the loop on {SCENES} scenes that are not in the dataset (95 % interval)"]
    for score in scores.values():
        lines.append(f"  {score['label']:{width}}  {share(score)}")
        if "went_where_told" in score:
            lines[-1] += f"; {score['went_where_told']} went to the bin that they were given"
        if "went_to_a_bin" in score:
            lines[-1] += f"; {score['went_to_a_bin']} went to a bin"
    return "\n".join(lines)
