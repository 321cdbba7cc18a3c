"""Resolve and check a run of `grpo.py` on the driver before Ray starts: the policy, the environment, how they fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lerobot.configs import FeatureType
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import env_to_policy_features
from lerobot.utils.constants import POLICY_PREPROCESSOR_DEFAULT_NAME

from vla_finetuning.buckets.mirror import address
from vla_finetuning.envs.configs import env_config, how_drawn, initial_state_counts, longest_episode, task_makers
from vla_finetuning.envs.protocol import Maker
from vla_finetuning.options.fields import decided
from vla_finetuning.options.grpo import GrpoOptions
from vla_finetuning.options.peft import PeftOptions
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.plan.base_policy import check_policy, resolve_policy
from vla_finetuning.plan.paths import with_absolute_paths
from vla_finetuning.plan.resolve import make_job
from vla_finetuning.plan.robot_facts import learned_files
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.counting import flops_by_prompt
from vla_finetuning.policies.matching import FeatureMatch
from vla_finetuning.policies.optim import make_recipe
from vla_finetuning.policies.pipelines import saved_rename_map
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.spec import PolicySpec, Robot
from vla_finetuning.rl.demonstrations import resolve_demonstrations
from vla_finetuning.rl.objectives import objective_class
from vla_finetuning.rl.sampler import FlowSDE
from vla_finetuning.rollouts.player import check_plays, opening_of
from vla_finetuning.run.job import Job
from vla_finetuning.terminal import escaped

# Options of GRPO that may change when a run is resumed: its length, options without effect on results, and paths. The
# rows behind the path of the demonstrations may not change.
FREE = (
    "demonstrations",
    "iterations",
    "eval_every",
    "env_actors",
    "envs_per_actor",
    "env_actor_cpus",
    "inference_batch",
    "record_dataset",
    "record_every",
)
# The file in the run's folder with the initial states of each task.
INITIAL_STATES_NAME = "initial_states.json"
# Steps of an episode that are assumed for an environment without a limit.
UNKNOWN_LENGTH = 300


@dataclass(frozen=True)
class InitialStates:
    """A task's list of `count` initial states. Episode k begins in state k modulo `count`, as in LeRobot's LIBERO.

    Only evaluation uses the last `reserved` ones; with 0, training and evaluation use all.
    """

    count: int
    reserved: int = 0

    @property
    def trained(self) -> range:
        return range(self.count - self.reserved)

    @property
    def evaluated(self) -> range:
        return range(self.count - self.reserved, self.count) if self.reserved else range(self.count)

    def number(self, states: range, nth: int) -> int:
        """Return `Episode.episode` of the n-th episode, from 0; episodes cycle through `states`."""
        turn, place = divmod(nth, len(states))
        return states[place] + turn * self.count


def reserve_last(counts: Mapping[str, int], reserved: int) -> dict[str, InitialStates]:
    """Reserve the last states of each task. Raises ValueError if a task would have no state for training."""
    for task, count in counts.items():
        if reserved >= count:
            raise ValueError(
                f"{task} has {count} initial states, and --grpo.reserved_states={reserved} of them are held out of "
                "training: give fewer; with 0, evaluation is on states that were trained"
            )
    return {task: InitialStates(count, reserved) for task, count in counts.items()}


@dataclass(frozen=True)
class Scene:
    """The environment in which a policy learns; groups rotate through its tasks.

    Attributes:
        makers: a maker of each task's environment. They are made on the driver, which has imported the packages of
            --env.discover_packages_path.
        cameras: the cameras that the policy sees, by its own keys.
        longest: maximum number of steps of an episode; None if unknown.
        states: initial states of each task that has a list of them. Those of other tasks are drawn from seeds, which
            differ between training and evaluation.
    """

    env: EnvConfig
    makers: Mapping[str, Maker]
    cameras: tuple[str, ...]
    longest: int | None
    states: Mapping[str, InitialStates] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.makers)

    def most_decisions(self, n_action_steps: int) -> int:
        """Return the maximum number of decisions of an episode, each of `n_action_steps` actions."""
        return math.ceil((self.longest or UNKNOWN_LENGTH) / n_action_steps)

    def train_number(self, task: str, nth: int) -> int:
        """Return `Episode.episode` of a task's n-th group, which chooses its initial state."""
        states = self.states.get(task)
        return nth if states is None else states.number(states.trained, nth)

    def eval_number(self, task: str, nth: int) -> int:
        """Return `Episode.episode` of a task's n-th evaluation episode."""
        states = self.states.get(task)
        return nth if states is None else states.number(states.evaluated, nth)


@dataclass(frozen=True)
class GrpoRun:
    """A resolved run of `grpo.py`; its steps are iterations. `demonstrations`: rows that the policy imitates too."""

    config: GrpoConfig
    job: Job
    policy: PolicySpec
    scene: Scene
    demonstrations: Rows | None = None

    @property
    def options(self) -> GrpoOptions:
        return self.config.grpo

    @property
    def sde(self) -> FlowSDE:
        return FlowSDE(self.options.flow_steps, self.options.noise_level, self.options.random_steps == "one")

    @property
    def episodes(self) -> int:
        return self.options.groups * self.options.group_size


def decision_bytes(env: EnvConfig, config: Any, sde: FlowSDE) -> int:
    """Return the bytes of a recorded decision: its images, its tokens, and the walk of its action chunk."""
    features = env_to_policy_features(env).values()
    images = sum(math.prod(feature.shape) for feature in features if feature.type is FeatureType.VISUAL)
    width, actions = config.max_action_dim, config.output_features["action"].shape[0]
    steps = 1 if sde.one else sde.steps
    walk = 4 * (config.chunk_size * (steps * width + actions) + steps * config.n_action_steps * actions)
    return images + 9 * config.tokenizer_max_length + walk


def resolve_grpo(config: GrpoConfig, gpus_found: int) -> GrpoRun:
    """Find and check the policy and the environment. Raises ValueError or FileNotFoundError, which name the remedy."""
    config = with_absolute_paths(decided(config, {"scaling.use_gpu": config.scaling.on_gpus(gpus_found)}))
    env = env_config(config.env_type or "", config.env_options)
    makers = task_makers(env)
    states = reserve_last(initial_state_counts(env), config.grpo.reserved_states)
    policy_config, folder, base = resolve_policy(config.training(), config.policy_path)
    assert folder is not None  # --policy.path is required
    if not family_of(policy_config).flow:
        raise ValueError(
            f"policy {base['path']} is of type '{policy_config.type}': to learn from rewards, action chunks must have "
            f"a probability, which is known here for the flow matching of {types_that(lambda family: family.flow)}; "
            "train one with vla.py"
        )
    check_plays(folder, policy_config, env, config.rename_map)
    if (opening := opening_of(folder)) and config.grpo.demonstrations is not None:
        raise ValueError(
            f"--grpo.demonstrations: instructions of policy {base['path']} begin with {opening!r}, which the dataset's "
            "rows are not given here; leave the demonstrations out"
        )
    if not (folder / f"{POLICY_PREPROCESSOR_DEFAULT_NAME}.json").is_file():
        raise FileNotFoundError(
            f"policy {base['path']} has no {POLICY_PREPROCESSOR_DEFAULT_NAME}.json: how it was trained to see is not "
            "known; give the pretrained_model that vla.py has written"
        )
    renamed = {**saved_rename_map(folder), **config.rename_map}
    env_keys = {renamed.get(key, key) for key in env_to_policy_features(env)}
    cameras = tuple(key for key in policy_config.image_features if key in env_keys)
    prompts = family_of(policy_config).prompt_lengths(policy_config, len(cameras))
    steps = 1 if config.grpo.random_steps == "one" else config.grpo.flow_steps
    fixed = {name: value for name, value in asdict(config.grpo).items() if name not in FREE}
    config = decided(config, {"policy_revision": base["revision"]})
    training = config.training()
    names = {name: key for key, name in config.rename_map.items()}
    files = learned_files(folder, policy_config, names, how_drawn(env))
    robot = Robot("", policy_config, FeatureMatch(cameras, (), {}), names, opening=opening, files=files)
    policy = PolicySpec(
        config=policy_config,
        folder=folder,
        base=base,
        train=training.train,
        adapters=PeftOptions(),
        recipe=make_recipe(training, policy_config),
        robots=(robot,),
        seed=config.seed,
        trusted=config.policy_trust_remote_code,
        parameters=check_policy(policy_config, folder, training.train),
        prompts=prompts,
        flops_by_prompt=flops_by_prompt(policy_config, len(cameras), config.train.mode, steps, prompts),
    )
    policy.processors()
    identity = {"environment": config.env_type, "env_options": config.env_options, "seed": config.seed, **fixed}
    demonstrations = None
    if config.grpo.demonstrations is not None:
        demonstrations = resolve_demonstrations(config, config.grpo.demonstrations)
        identity["demonstrations"] = demonstrations.identity
    if states:
        identity["reserved"] = {task: list(split.evaluated) if split.reserved else [] for task, split in states.items()}
    job = make_job(training, policy, config.grpo.iterations, identity, config.grpo.minibatch)
    return GrpoRun(config, job, policy, Scene(env, makers, cameras, longest_episode(env), states), demonstrations)


def describe_grpo(run: GrpoRun) -> str:
    config, g, job, policy, scene = run.config, run.options, run.job, run.policy, run.scene
    assert policy.parameters is not None
    decisions = scene.most_decisions(policy.config.n_action_steps) + g.bootstrap_time_limit
    size = decision_bytes(scene.env, policy.config, run.sde)
    workers, per_worker = config.scaling.num_workers, run.episodes // config.scaling.num_workers
    # The maximum: every group is replaced in every round, and replaced groups stay in memory.
    per_worker *= 1 + g.resample
    host_bytes = per_worker * decisions * size
    tasks = len(scene.tasks)
    lines = [
        f"Policy       {policy.config.type}, {policy.base['path']}",
        f"             {policy.parameters.total:,} parameters, {policy.parameters.trainable:,} of them train "
        f"(--train.mode {config.train.mode}); executes {policy.config.n_action_steps} of "
        f"{policy.config.chunk_size} actions",
        f"Environment  {config.env_type} {' '.join(config.env_options)}".rstrip()
        + (f", {tasks} tasks in turns" if tasks > 1 else "")
        + (f", at most {scene.longest} steps an episode" if scene.longest else ""),
        f"             {workers} x {g.env_actors} processes of {g.envs_per_actor} environments, {g.env_actor_cpus:g} "
        f"CPUs each; cameras {', '.join(scene.cameras)}",
        f"Iteration    {g.groups} groups x {g.group_size} episodes = {run.episodes}, by their {g.reward}; "
        f"{g.iterations} iterations, {g.iterations * run.episodes:,} episodes",
        *g.describe_resampling(run.episodes),
        f"Sampler      {g.flow_steps} steps, {g.random_steps} of them random, noise level {g.noise_level:g}",
        f"Learning     {g.method}: {objective_class(g.method).describe(g)}",
        f"             {g.epochs} epochs in minibatches of {g.minibatch} decisions, at most {config.batch_size} at "
        f"once per worker; rate {config.lr:g}, after {g.warmup} iterations of warm-up; AdamW",
        f"Rollouts     at most {host_bytes / 2**30:.2f} GiB of host memory per worker: {per_worker * decisions:,} "
        f"decisions of {size / 1e6:.2f} MB",
        f"Held out     {config.eval.n_episodes * tasks} episodes before the first iteration and every {g.eval_every}, "
        "by the deterministic sampler",
        *_describe_states(g, scene),
        *g.describe_recording(run.episodes),
        config.describe_checkpoints(address(job.checkpoints_dir), "iterations", "success in training"),
        *config.scaling.describe(job.use_gpu, config.train.precision),
    ]
    return "\n".join(map(escaped, lines))


def _describe_states(options: GrpoOptions, scene: Scene) -> list[str]:
    states = scene.states.values()
    if not states:
        return []
    trained, evaluated = sum(len(split.trained) for split in states), sum(len(split.evaluated) for split in states)
    per_state = options.iterations * options.groups / len(scene.tasks)
    per_state /= min(len(split.trained) for split in states)
    held_out = "none is held out: evaluation is on states that were trained"
    if options.reserved_states:
        held_out = f"{evaluated} are held out of training, for evaluation: the last {options.reserved_states} per task"
        held_out += f" ({INITIAL_STATES_NAME})"
    return [
        f"States       {sum(split.count for split in states)} initial states in {len(states)} lists, one per task: "
        f"{trained} train, {per_state:.1f} groups begin in each",
        f"             {held_out}",
    ]
