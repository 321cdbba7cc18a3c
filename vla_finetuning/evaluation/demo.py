"""What the demo ends with: its policy in the loop on unseen scenes, and what it owes to its eyes and ears."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

from vla_finetuning.config import EvalOptions
from vla_finetuning.envs.configs import env_config, gym_call
from vla_finetuning.envs.two_bins_scene import INSTRUCTIONS
from vla_finetuning.evaluation.closed_loop import play
from vla_finetuning.evaluation.episodes import Condition, episode_list
from vla_finetuning.evaluation.intervals import share
from vla_finetuning.evaluation.open_loop import other_instructions
from vla_finetuning.evaluation.player import PolicySource, check_fits
from vla_finetuning.run.plan import Run

ENV_TYPE = "two_bins"
SCENES, FIRST_SEED = 60, 1000
LABELS = {
    "trained": "trained",
    "untrained": "before training",
    "other_instruction": "trained, told the other instruction",
    "blindfolded": "trained, blindfolded",
}


def is_demo(run: Run) -> bool:
    """Whether a run on the demo's own dataset, whose scene the environment is, with a policy that can play in it."""
    own = run.config.preset == "demo" and not run.config.roots and not run.config.dataset.repo_id
    return own and getattr(run.policy_config, "n_obs_steps", 1) == 1  # more: player.check_fits


def try_demo(run: Run) -> dict[str, Any]:
    """Play the trained policy, and what it is compared with, on the same unseen scenes.

    Runs on the driver, joined to the run's cluster.

    Returns:
        `{"trained": {"successes": n, "episodes": m}, "untrained": ..., "other_instruction": ..., "blindfolded": ...}`.
        Success is that of the scene's own instruction, also where the policy was told the other one;
        `other_instruction` says besides in how many episodes it `went_where_told`. `errors`, where there are any, is
        how many more episodes could not be played to their end. Without the untrained policy if the run had no weights
        to start from.
    Raises:
        ValueError: a policy that cannot play.
    """
    env = env_config(ENV_TYPE)
    # An exported configuration names no device, which LeRobot would warn of.
    trained = PreTrainedConfig.from_pretrained(run.output_dir / "pretrained_model", cli_overrides=["--device=cpu"])
    options: dict[str, Any] = {"env": env, "trusted": run.config.policy_trust_remote_code}
    options["device"] = "cuda" if run.use_gpu else "cpu"
    sources = {"trained": PolicySource(run.output_dir / "pretrained_model", trained, **options)}
    conditions = {
        "trained": Condition("trained"),
        "other_instruction": Condition("trained", told=other_instructions(INSTRUCTIONS.values())),
        "blindfolded": Condition("trained", blindfolded=True),
    }
    if run.policy_folder is not None:
        untrained = copy.deepcopy(run.policy_config)
        processors = run.processors(untrained)
        sources["untrained"] = PolicySource(run.policy_folder, untrained, processors=processors, **options)
        conditions["untrained"] = Condition("untrained")
    for source in sources.values():
        check_fits(source.config, env, run.config.rename_map)  # by which the processors rename
    lines: list[dict[str, Any]] = []
    episodes = episode_list(conditions, ENV_TYPE, SCENES, FIRST_SEED)
    play(
        episodes,
        conditions,
        sources,
        gym_call(env),
        EvalOptions(),
        seed=run.config.seed,
        use_gpu=run.use_gpu,
        written=lines.append,
    )
    return {
        name: _score([line for line in lines if line["condition"] == name], name)
        for name in LABELS
        if name in conditions
    }


def _score(lines: Sequence[Mapping[str, Any]], condition: str) -> dict[str, int]:
    played = [line for line in lines if line["error"] is None]
    score = {"successes": sum(line["success_once"] for line in played), "episodes": len(played)}
    if len(played) < len(lines):
        score["errors"] = len(lines) - len(played)
    if condition == "other_instruction":
        score["went_where_told"] = sum(bool(line["info"]["reached"]) and not line["success_once"] for line in played)
    return score


def success_table(scores: Mapping[str, Mapping[str, int]]) -> str:
    """The table that the demo ends with."""
    width = max(len(label) for label in LABELS.values())
    lines = [f"Success in the loop on {SCENES} scenes that are not in the dataset (95 % interval)"]
    for name, label in LABELS.items():
        if name not in scores:
            continue
        score = scores[name]
        told = f"  {label:{width}}  {share(score['successes'], score['episodes'])}"
        if "went_where_told" in score:
            told += f"; {score['went_where_told']} went to the bin they were told"
        if "errors" in score:
            told += f"; {score['errors']} more ended in an error"
        lines.append(told)
    return "\n".join(lines)
