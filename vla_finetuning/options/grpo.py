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
PPO = "grpo.method=ppo"
NO_RATIO = {"grpo.method=filtered": "imitation compares no policies; leave it out"}


@dataclass
class GrpoOptions:
    """Learning from success alone (docs/grpo.md). Sampler and clip are by default RLinf's for PI0.5."""

    method: Method = option(
        "grpo",
        "grpo: clipped policy gradient that compares returns within a group. ppo: clipped policy gradient that "
        "compares decisions through a learned critic. filtered: imitation of the successful episodes, without a stop "
        "by divergence. All play the same episodes.",
    )
    demonstrations: str | None = option(
        None,
        "With --grpo.method filtered: a LeRobot dataset whose rows are half of each minibatch. A policy that imitates "
        "only its own samples loses precision.",
        file="path",
        requires={"grpo.method=filtered": "only imitation takes them"},
    )
    iterations: int = option(
        100, "Number of iterations. Each plays groups x group_size episodes and then updates the policy.", min=1
    )
    groups: int = option(16, "Number of groups in an iteration.", min=1)
    group_size: int = option(8, "Number of episodes in a group. They share an initial state.", min=2)
    resample: int = option(
        0,
        "Maximum number of times to replace groups with equal returns by groups from other initial states (dynamic "
        "sampling). Counts of episodes include replaced ones.",
        min=0,
        conflicts={
            "grpo.method=filtered": "it learns from every success, also of groups whose returns are all equal; "
            "leave it out",
        },
    )
    reward: Reward = option("success", "Return of an episode: success (1 or 0), or return, the sum of its rewards.")
    flow_steps: int = option(5, "Number of the random sampler's steps from noise to actions (rl/sampler.py).", min=1)
    noise_level: float = option(0.5, "Noise of the random sampler (a in docs/grpo.md).", above=0)
    random_steps: Literal["all", "one"] = option("all", "Sampler steps of each decision that add noise: all, or one.")
    epochs: int = option(2, "Number of passes over an iteration's decisions.", min=1)
    minibatch: int = option(
        64,
        "Number of decisions in a minibatch over all workers. An iteration is cut into equal minibatches. The presets "
        "of GPUs have 2048.",
        min=1,
    )
    clip_low: float = option(0.2, "Lower bound of probability ratios: 1 - this.", above=0, below=1, conflicts=NO_RATIO)
    clip_high: float = option(0.2, "Upper bound of probability ratios: 1 + this.", above=0, conflicts=NO_RATIO)
    dual_clip: float | None = option(
        3.0, "Bound of the loss for negative advantages (dual clip). null: no bound.", above=0, conflicts=NO_RATIO
    )
    normalise: bool = option(True, "grpo: divide advantages by the group's standard deviation.")
    gamma: float = option(0.99, "ppo: discount of rewards per decision.", above=0, max=1, only_with=PPO)
    gae_lambda: float = option(0.95, "ppo: weight of later decisions in advantages.", min=0, max=1, only_with=PPO)
    bootstrap_time_limit: bool = option(
        False,
        "ppo: add the critic's value of the last state to the last reward of an episode that ends at its time limit. "
        "For dense rewards.",
        requires={PPO: "only a critic knows what a state is worth"},
    )
    value_lr: float = option(1e-3, "ppo: learning rate of the critic.", above=0, only_with=PPO)
    value_clip: float | None = option(
        0.2, "ppo: bound of a value's change in an iteration (clipped loss). null: none.", above=0, only_with=PPO
    )
    target_kl: float | None = option(
        0.001,
        "End an iteration's updates when the divergence from the acting policy exceeds this, per executed dimension "
        "(n_action_steps x action dimensions). null: never.",
        above=0,
    )
    kl: float = option(
        0.0,
        "Weight of the divergence from the initial policy. A value above 0 needs a second replica in memory.",
        min=0,
        conflicts=NO_RATIO,
    )
    warmup: int = option(3, "Number of iterations over which the learning rate rises to its constant value.", min=0)
    eval_every: int = option(
        10,
        "Iterations between evaluations of --eval.n_episodes held-out episodes with the deterministic sampler.",
        min=1,
    )
    reserved_states: int = option(
        10,
        "Number of initial states of each task that only evaluation uses, from the end of the environment's list "
        "(LIBERO has 50 per task).",
        min=0,
    )
    env_actors: int = option(
        2,
        "Number of simulation processes of each training worker, in two halves that alternate with inference.",
        min=1,
    )
    envs_per_actor: int = option(8, "Number of environments in each simulation process.", min=1)
    env_actor_cpus: float = option(1.0, "CPUs of each simulation process.", above=0)
    inference_batch: int = option(64, "Maximum number of decisions in a batch of the policy.", min=1)
    record_dataset: str | None = option(
        None,
        "Write the training episodes, including failures, as a LeRobot dataset with next.success, next.reward and "
        "next.done at the end of the run. A new folder, on a cluster on a path that all nodes share.",
        file="path",
    )
    record_every: int = option(1, "Record every n-th iteration.", min=1, only_with="grpo.record_dataset")

    def check(self, config: Any) -> None:
        check_recorded(self.record_dataset, "--grpo.record_dataset", config.output_dir)
        workers, strategy = config.scaling, config.scaling.strategy
        if not (self.normalise or self.method == "grpo"):
            raise ValueError(f"--grpo.normalise=false with --grpo.method={self.method}: only grpo has it; leave it out")
        if config.train.compile:
            raise ValueError(
                "--train.compile=true: decisions come in batches of any size, and each size would be compiled; leave "
                "it out"
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
        most, times = self.iterations * episodes * (1 + self.resample), self.resample
        return [f"             groups of equal returns are replaced, at most {times} times: at most {most:,} episodes"]
