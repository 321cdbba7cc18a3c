"""Options of grpo.py: method, episodes, sampler, losses, evaluations and recordings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vla_finetuning.options.environment import check_recorded
from vla_finetuning.options.fields import option

# Modules of rl/objectives/ by name.
Method = Literal["grpo", "ppo", "filtered"]
Reward = Literal["success", "return"]
# Prefix of the critic's parameters in a checkpoint; the critic is not part of the policy.
CRITIC = "critic."


@dataclass
class GrpoOptions:
    """Learning from success alone (docs/grpo.md). Sampler and clip are by default RLinf's for PI0.5."""

    method: Method = option(
        "grpo",
        "grpo: clipped policy gradient, returns compared within a group. ppo: clipped policy gradient, decisions "
        "compared with a critic that learns beside the policy. filtered: imitation of the episodes that succeeded, "
        "which has no stop by divergence. All on the same episodes.",
    )
    demonstrations: str | None = option(
        None,
        "A LeRobot dataset, whose rows are half of each minibatch of --grpo.method filtered: a policy that imitates "
        "its own samples alone loses precision.",
        file="path",
        requires={"grpo.method=filtered": "only imitation takes them"},
    )
    iterations: int = option(100, "Iterations: groups x group_size episodes each, then updates.", min=1)
    groups: int = option(16, "Groups of an iteration.", min=1)
    group_size: int = option(8, "Episodes of a group, all from the same initial state.", min=2)
    resample: int = option(
        0,
        "Times that groups whose returns are all equal are replaced by groups that begin elsewhere (dynamic sampling). "
        "The episodes count.",
        min=0,
        conflicts={
            "grpo.method=filtered": "it learns from every success, also of groups whose returns are all equal; "
            "leave it out",
        },
    )
    reward: Reward = option(
        "success", "What an episode is worth: success (1 or 0), or its return (the sum of its rewards)."
    )
    flow_steps: int = option(5, "Steps of the random sampler from noise to actions (rl/sampler.py).", min=1)
    noise_level: float = option(0.5, "How much noise the random sampler adds (a).", above=0)
    random_steps: Literal["all", "one"] = option("all", "Steps of each decision that are random.")
    epochs: int = option(2, "Passes over an iteration's decisions.", min=1)
    minibatch: int = option(
        64, "Decisions of a minibatch over all workers, evenly cut; the presets of GPUs have 2048.", min=1
    )
    clip_low: float = option(0.2, "The ratio of probabilities is clipped at 1 - clip_low below.", above=0, below=1)
    clip_high: float = option(0.2, "The ratio of probabilities is clipped at 1 + clip_high above.", above=0)
    dual_clip: float | None = option(3.0, "Bound of a bad episode's loss; null: none.", above=0)
    normalise: bool = option(True, "Divide advantages by the group's standard deviation.")
    gamma: float = option(0.99, "Discount of rewards per decision, with --grpo.method ppo.", above=0, max=1)
    gae_lambda: float = option(
        0.95, "Weight of later decisions in an advantage (GAE), with --grpo.method ppo.", min=0, max=1
    )
    bootstrap_time_limit: bool = option(
        False,
        "Add the critic's value of the last state to the reward of an episode that ends because its time is over, with "
        "--grpo.method ppo: for dense rewards, which would have gone on.",
        requires={"grpo.method=ppo": "only a critic knows what a state is worth"},
    )
    value_lr: float = option(1e-3, "Learning rate of the critic of --grpo.method ppo.", above=0)
    value_clip: float | None = option(
        0.2,
        "Bound of the change of a value in an iteration, as a clipped loss; null: no bound. With --grpo.method ppo.",
        above=0,
    )
    target_kl: float | None = option(
        0.001,
        "Divergence from the policy that acted at which an iteration's updates end, per executed dimension: of each of "
        "the n_action_steps x action dimensions of a step; null: they never end early.",
        above=0,
    )
    kl: float = option(
        0.0,
        "Weight of the divergence from the policy that the run started from. Above 0 a second replica is held.",
        min=0,
        conflicts={"grpo.method=filtered": "imitation has no such term; leave it out"},
    )
    warmup: int = option(3, "Iterations over which the learning rate rises; after that it stays.", min=0)
    eval_every: int = option(
        10,
        "Iterations between evaluations: --eval.n_episodes held-out episodes by the deterministic sampler.",
        min=1,
    )
    reserved_states: int = option(
        10,
        "Initial states of each task that only evaluation uses, the last ones, where the environment has a list of "
        "them (LIBERO: 50 a task).",
        min=0,
    )
    env_actors: int = option(
        2,
        "Processes of each training worker that simulate, in two halves that take turns with inference.",
        min=1,
    )
    envs_per_actor: int = option(8, "Environments of each of these processes.", min=1)
    env_actor_cpus: float = option(1.0, "CPUs that each of these processes holds.", above=0)
    inference_batch: int = option(64, "Decisions that the policy makes at once, at most.", min=1)
    record_dataset: str | None = option(
        None,
        "Write the episodes that were played to learn from, failures included, as a LeRobot dataset with next.success, "
        "next.reward and next.done when the run is done: a new folder; on a cluster a path that all nodes share.",
        file="path",
    )
    record_every: int = option(1, "Iterations from one recorded one to the next, with --grpo.record_dataset.", min=1)

    def check(self, config: Any) -> None:
        check_recorded(self.record_dataset, "--grpo.record_dataset")
        workers, strategy = config.scaling, config.scaling.strategy
        if config.train.compile:
            raise ValueError(
                "--train.compile=true: decisions come in batches of any size, and each size would be compiled; leave "
                "it out"
            )
        if config.lr is None:
            raise ValueError(
                "--lr=null: imitation's own rate is far too high for learning from success; give a number, as 5e-6"
            )
        if workers.min_workers is not None:
            raise ValueError(
                f"--scaling.num_workers {workers.min_workers},{workers.num_workers}: groups are shared out evenly "
                "among a fixed number of workers; give one number"
            )
        if self.groups % workers.num_workers:
            raise ValueError(
                f"--grpo.groups={self.groups} with --scaling.num_workers={workers.num_workers}: workers play equally "
                f"many groups; give {-(-self.groups // workers.num_workers) * workers.num_workers}"
            )
        if strategy != "ddp":
            raise ValueError(
                f"--scaling.strategy={strategy}: a worker that holds a shard of the parameters cannot act by itself, "
                "and workers decide at different times; use --scaling.strategy=ddp with --train.mode=expert or heads"
            )

    def describe_recording(self, episodes: int) -> list[str]:
        """Return the plan's lines on the recorded dataset. `episodes` is the number of episodes in an iteration."""
        if self.record_dataset is None:
            return []
        count = -(-self.iterations // self.record_every) * episodes * (1 + self.resample)
        most = "at most " if self.resample else ""
        return [f"Dataset      {most}{count:,} episodes that were played, in {self.record_dataset}, at the end"]

    def describe_resampling(self, episodes: int) -> list[str]:
        """Return the plan's lines on replaced groups. `episodes` is the number of episodes in an iteration."""
        if not self.resample:
            return []
        most = self.iterations * episodes * (1 + self.resample)
        return [f"             groups all alike are replaced, {self.resample} times at most: at most {most:,} episodes"]
