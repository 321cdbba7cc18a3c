"""Predict the time of an iteration and the memory of a worker, for `--dry_run`, before Ray starts."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace

import gymnasium
import numpy as np
from lerobot.configs import FeatureType
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import env_to_policy_features

from vla_finetuning.cards import PLANNED
from vla_finetuning.envs.configs import task_makers
from vla_finetuning.envs.protocol import choose_gl, look_on_demand
from vla_finetuning.policies.counting import flops_per_sample
from vla_finetuning.rl.objectives import objective_class
from vla_finetuning.rl.resolve import GrpoRun
from vla_finetuning.training.capacity import card_of, planned_memory
from vla_finetuning.training.memory import StepMemory

# Assumed share of a GPU's peak that the network reaches.
SHARE_OF_PEAK = 0.35
MEASURED_STEPS = 20


@dataclass(frozen=True)
class Simulated:
    """Seconds of a reset, of a step, and of rendering in a step, in one process."""

    reset_s: float
    step_s: float
    render_s: float


def measure_environment(env_config: EnvConfig) -> Simulated:
    """Make the first task's environment in this process, and measure random steps. Raises as the cluster would."""
    choose_gl()
    with contextlib.closing(next(iter(task_makers(env_config).values()))()) as env:
        env.action_space.seed(0)
        started = time.perf_counter()
        env.reset(seed=0)
        reset_s = time.perf_counter() - started
        with_rendering, without = _step_s(env, True), _step_s(env, False)
        return Simulated(reset_s, without, max(0.0, with_rendering - without))


def _step_s(env: gymnasium.Env, renders: bool) -> float:
    look_on_demand(env, renders)
    spent = []
    for _ in range(MEASURED_STEPS):
        started = time.perf_counter()
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        spent.append(time.perf_counter() - started)
        if terminated or truncated:
            env.reset()
    return float(np.median(spent))


def worker_memory(run: GrpoRun) -> StepMemory | None:
    """Return the GPU memory that each worker needs for a micro-batch of decisions with all their random steps."""
    draws = 1 if run.sde.one else run.sde.steps
    features = env_to_policy_features(run.scene.env).values()
    frames = [feature.shape[1:] for feature in features if feature.type is FeatureType.VISUAL]
    config = run.config.training()
    memory = planned_memory(run.policy, frames)(replace(config, train=replace(config.train, noise_draws=draws)))
    if memory is None or not run.options.kl:
        return memory
    # --grpo.kl holds the policy that the run started from too.
    return replace(memory, weights=2 * memory.weights, peak=memory.peak + memory.weights)


def expected_times(run: GrpoRun, simulated: Simulated) -> list[str]:
    """Return the plan's lines about the time of an iteration whose episodes all reach the time limit."""
    config, g, policy = run.config, run.options, run.policy
    episodes = run.episodes // config.scaling.num_workers
    decisions = episodes * run.scene.most_decisions(policy.config.n_action_steps)
    steps = decisions * policy.config.n_action_steps
    simulation_s = episodes * simulated.reset_s + steps * simulated.step_s + decisions * simulated.render_s
    processes = min(g.env_actors, episodes)  # a process without an episode is idle
    simulation_s /= processes
    digits = 0 if simulation_s > 10 else 2
    lines = [
        f"Expected     simulation {simulation_s:.{digits}f} s an iteration, on {processes} processes per worker: a "
        f"step {1e3 * simulated.step_s:.1f} ms, rendering {1e3 * simulated.render_s:.1f} ms (measured here, in one "
        "process)"
    ]
    # `flops_per_sample` of "full" is a forward and a backward pass, which is twice the forward.
    forward = flops_per_sample(policy.config, policy.cameras, "full", g.flow_steps, policy.prompts[-1]) / 3
    acting, scoring = decisions * forward, decisions * forward * objective_class(g.method).scores
    updating = g.epochs * decisions * policy.flops_by_prompt[policy.prompts[-1]]
    counted = f"acting {acting / 1e12:,.1f} TFLOP, updates at most {(scoring + updating) / 1e12:,.1f} per worker"
    card = card_of(config.training(), None)
    if card is None or card[0] not in PLANNED:
        return [*lines, f"             {counted}"]
    acting_s, updating_s = (flops / (SHARE_OF_PEAK * PLANNED[card[0]].flops) for flops in (acting, scoring + updating))
    whole_s = max(simulation_s, acting_s) + updating_s
    if simulation_s > acting_s:
        enough = math.ceil(processes * simulation_s / acting_s)
        remedy = f"--grpo.env_actors {enough} would be as fast as the policy"
        if enough > episodes:
            remedy = f"--grpo.env_actors {episodes}, one for each episode of a worker, is the most that helps"
        lines.append(f"             the simulation is the bottleneck: {remedy}")
    device = f"{card[0]} at {SHARE_OF_PEAK:.0%} of its peak (assumed)"
    return [
        *lines,
        f"             {counted}: {acting_s:.0f} and {updating_s:.0f} s on a {device}",
        f"             an iteration {whole_s:.0f} s, the run {whole_s * g.iterations / 3600:.1f} h without held-out "
        "episodes, where simulation and acting overlap and every episode lasts as long as it may",
    ]
