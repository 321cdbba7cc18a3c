"""The story of `grpo.py --preset demo`: a policy that imitates disobedient demonstrators, before and after.

Runs on the driver.
"""

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

# Fresh ones: the held-out list, which is looked at on the way, begins at the run's seed; groups' seeds are above 2^31.
# Where an environment has a list of initial states, fresh episodes begin in the held-out ones, with other noise.
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
    job, policy, env = run.job, run.policy, run.scene.env
    assert policy.folder is not None
    folder = fetched_for_good(job.output_dir / "pretrained_model")
    after = load_policy_config(folder)
    after.n_action_steps = policy.config.n_action_steps
    (robot,) = policy.robots
    options: dict[str, Any] = {"env": env, "opening": robot.opening, "device": "cuda" if job.use_gpu else "cpu"}
    options["trusted"] = policy.trusted
    started = copy.deepcopy(policy.config)
    sources = {
        "before": PolicySource(policy.folder, started, rename_map=robot.rename_map, **options),
        "after": PolicySource(folder, after, **options),  # in the environment's own names
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
    # A scene that only one of them could play has no pair.
    after_of = {(line["task"], line["episode"]): line for line in comparison.played("after")}
    pairs = [
        (line, after_of[line["task"], line["episode"]])
        for line in comparison.played("before")
        if (line["task"], line["episode"]) in after_of
    ]
    pairs.sort(key=lambda pair: pair[0]["success_once"] - pair[1]["success_once"])
    chosen = [(LABELS[line["condition"]], line) for pair in pairs[:PAIRS_SHOWN] for line in pair]
    return {name: comparison.score(name, LABELS[name]) for name in sources}, comparison.films(job.output_dir, chosen)


def success_lines(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a run ends with."""
    lines = ["Success in the loop on fresh scenes, by LeRobot's own sampler (95 % interval)"]
    lines += [f"  {name:7}  {share(score)}" for name, score in scores.items()]
    return "\n".join(lines)
