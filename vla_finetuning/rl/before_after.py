"""Compare the policy before and after a run of `grpo.py` on the same fresh scenes. Runs on the driver."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vla_finetuning.buckets.mirror import fetched_for_good
from vla_finetuning.envs.configs import task_makers
from vla_finetuning.evaluation.intervals import share
from vla_finetuning.evaluation.side_by_side import SideBySide
from vla_finetuning.policies.loading import load_policy_config
from vla_finetuning.rl.resolve import GrpoRun
from vla_finetuning.rollouts.episodes import Condition
from vla_finetuning.rollouts.player import PolicySource

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
    makers = task_makers(env)
    comparison = SideBySide(
        {name: Condition(name) for name in sources},
        sources,
        makers,
        run.config.eval,
        count=-(-FRESH_EPISODES // len(makers)),
        first_seed=FRESH_SEED,
        seed=policy.seed,
        use_gpu=job.use_gpu,
        number=lambda task, i: run.scene.eval_number(task, run.config.eval.n_episodes + i),
    )
    # Scenes that failed with either policy are left out.
    after_lines = {(line["task"], line["episode"]): line for line in comparison.played("after")}
    pairs = [
        (line, after_lines[line["task"], line["episode"]])
        for line in comparison.played("before")
        if (line["task"], line["episode"]) in after_lines
    ]
    pairs.sort(key=lambda pair: pair[0]["success_once"] - pair[1]["success_once"])
    chosen = [(LABELS[line["condition"]], line) for pair in pairs[:PAIRS_SHOWN] for line in pair]
    return {name: comparison.score(name, LABELS[name]) for name in sources}, comparison.films(job.output_dir, chosen)


def success_lines(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the lines about success that a run ends with."""
    lines = [f"  {name:7}  {share(score)}" for name, score in scores.items()]
    return "\n".join(["Success in the loop on fresh scenes, by LeRobot's own sampler (95 % interval)", *lines])
