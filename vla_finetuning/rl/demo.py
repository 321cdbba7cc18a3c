"""The story of `grpo.py --preset demo`: a policy that imitates disobedient demonstrators, before and after.

Runs on the driver.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from lerobot.configs.policies import PreTrainedConfig

from vla_finetuning.config import GrpoConfig
from vla_finetuning.envs.configs import task_makers
from vla_finetuning.evaluation.closed_loop import play
from vla_finetuning.evaluation.episodes import Condition, episode_list
from vla_finetuning.evaluation.intervals import share, wilson
from vla_finetuning.evaluation.player import PolicySource
from vla_finetuning.evaluation.replay import make_films
from vla_finetuning.rl.plan import GrpoRun

# Fresh ones: the held-out list, which is looked at on the way, begins at the run's seed; groups' seeds are above 2^31.
FRESH_SEED, FRESH_EPISODES = 1_000_000, 200
# Pairs of episodes that are shown: the same scene before and after.
PAIRS_SHOWN = 4
LABELS = {"before": "before", "after": "after learning from success"}


def before_and_after(run: GrpoRun) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Play the policy that the run started from, and what it has become, on the same fresh scenes.

    By LeRobot's own sampler. Runs on the driver, joined to the run's cluster.

    Returns:
        `{"before": {"successes": n, "episodes": m, "label", "interval"}, "after": ...}`, `errors` where some could not
        be played; and what `make_films` says of some scenes, first of those that were learned.
    """
    assert run.env is not None and run.policy_folder is not None
    folder = run.output_dir / "pretrained_model"
    # An exported configuration names no device, which LeRobot would warn of.
    after = PreTrainedConfig.from_pretrained(folder, cli_overrides=["--device=cpu"])
    after.n_action_steps = run.policy_config.n_action_steps
    options: dict[str, Any] = {"env": run.env, "rename_map": run.config.rename_map}
    options["device"] = "cuda" if run.use_gpu else "cpu"
    sources = {
        "before": PolicySource(run.policy_folder, copy.deepcopy(run.policy_config), **options),
        "after": PolicySource(folder, after, **options),
    }
    conditions, makers = {name: Condition(name) for name in sources}, task_makers(run.env)
    each = -(-FRESH_EPISODES // len(makers))
    lines: dict[tuple[str, str, int], dict[str, Any]] = {}
    actions: dict[tuple[str, str, int], np.ndarray] = {}

    def written(line: dict[str, Any]) -> None:
        lines[line["condition"], line["task"], line["episode"]] = line

    def acted(line: dict[str, Any], executed: np.ndarray) -> None:
        actions[line["condition"], line["task"], line["episode"]] = executed

    play(
        episode_list(conditions, makers, each, FRESH_SEED),
        conditions,
        sources,
        makers,
        cast(GrpoConfig, run.config).eval,
        seed=run.config.seed,
        use_gpu=run.use_gpu,
        written=written,
        acted=acted,
    )
    scores: dict[str, Any] = {}
    for name in conditions:
        own = [line for line in lines.values() if line["condition"] == name]
        played = [line for line in own if line["error"] is None]
        successes = sum(line["success_once"] for line in played)
        scores[name] = {"successes": successes, "episodes": len(played)}
        scores[name] |= {"label": LABELS[name], "interval": list(wilson(successes, len(played)))}
        if len(played) < len(own):
            scores[name]["errors"] = len(own) - len(played)
    pairs = [[("before", *key[1:]), key] for key in sorted(actions) if key[0] == "after"]
    pairs = [pair for pair in pairs if pair[0] in actions]
    pairs.sort(key=lambda pair: lines[pair[0]]["success_once"] - lines[pair[1]]["success_once"])
    chosen = [(LABELS[key[0]], lines[key], actions[key]) for pair in pairs[:PAIRS_SHOWN] for key in pair]
    return scores, make_films(run.output_dir, makers, chosen)


def success_lines(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """What a run ends with."""
    told = ["Success in the loop on fresh scenes, by LeRobot's own sampler (95 % interval)"]
    for name, score in scores.items():
        errors = f"; {score['errors']} more ended in an error" if "errors" in score else ""
        told.append(f"  {name:7}  {share(score['successes'], score['episodes'])}{errors}")
    return "\n".join(told)
