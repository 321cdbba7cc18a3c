"""Compare the policy before and after a run of `grpo.py` on the same fresh scenes. Runs on the driver."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from vla_finetuning.buckets.mirror import fetched_for_good
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.rl.resolve import GrpoRun
from vla_finetuning.rollouts.episodes import Condition, episode_list
from vla_finetuning.rollouts.player import PolicySource
from vla_finetuning.rollouts.replay import make_films
from vla_finetuning.rollouts.servers import play_all

# Seeds of fresh episodes are neither those of held-out episodes, which start at the run's seed, nor those of groups,
# which are above 2^31. With a list of initial states, fresh episodes begin in the held-out states, with other noise.
FRESH_SEED, FRESH_EPISODES = 1_000_000, 200
# Number of scenes that are filmed before and after.
PAIRS_SHOWN = 4
LABELS = {"before": "before", "after": "after learning from success"}


def before_and_after(run: GrpoRun) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Play the policy that the run started from and the trained one on the same fresh scenes, by LeRobot's sampler.

    Returns `{"before": {"successes": n, "episodes": m, "label", "interval"}, "after": ...}`, with `errors` if episodes
    failed; and the films of some scenes, those that the policy has learned first.
    """
    job, policy, env = run.job, run.policy, run.scene.env
    assert policy.folder is not None
    folder = fetched_for_good(job.output_dir / "pretrained_model")
    (robot,) = policy.robots
    options: dict[str, Any] = {"env": env, "opening": robot.opening, "trusted": policy.trusted}
    options["device"] = "cuda" if job.use_gpu else "cpu"
    sources = {
        "before": PolicySource(policy.folder, copy.deepcopy(policy.config), rename_map=robot.rename_map, **options),
        "after": PolicySource(folder, load_policy_config(folder), **options),  # the export has the environment's names
    }
    makers, evaluated = run.scene.makers, run.config.eval.n_episodes
    count = -(-FRESH_EPISODES // len(makers))
    fresh = episode_list(LABELS, makers, count, FRESH_SEED, lambda task, i: run.scene.eval_number(task, evaluated + i))
    conditions = {name: Condition(name) for name in LABELS}
    played = play_all(fresh, conditions, sources, makers, run.config.eval, seed=policy.seed)
    scores = {
        name: {"label": label, **score([line for line, _ in played if line["condition"] == name])}
        for name, label in LABELS.items()
    }
    # The list has each scene before and after. Scenes that failed with either policy are left out.
    pairs = [pair for pair in itertools.batched(played, 2) if all(actions is not None for _, actions in pair)]
    pairs.sort(key=lambda pair: pair[0][0]["success_once"] - pair[1][0]["success_once"])
    chosen = [
        (LABELS[line["condition"]], line, own) for pair in pairs[:PAIRS_SHOWN] for line, own in pair if own is not None
    ]
    return scores, make_films(job.output_dir, makers, chosen)


def success_lines(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the lines about success that a run ends with."""
    lines = [f"  {name:7}  {share(score)}" for name, score in scores.items()]
    return "\n".join(["Success in the loop on fresh scenes, by LeRobot's own sampler (95 % interval)", *lines])
