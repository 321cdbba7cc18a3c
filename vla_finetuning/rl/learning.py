"""The optimizer of `grpo.py`, and the times and metrics of an iteration."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from util import StepResult, TrainableOptimizer, make_trainable_optimizer
from vla_finetuning.options.grpo import CRITIC
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.rl.actor import Actor
from vla_finetuning.rl.batches import RolloutBatch, RolloutGroup, equal_returns, stack_ranks
from vla_finetuning.rl.objectives.base import Objective, sum_means
from vla_finetuning.rollouts.scheduler import Scheduler


def build_grpo_optimizer(config: GrpoConfig, objective: Objective) -> TrainableOptimizer:
    """Build AdamW with the policy's constants, without weight decay, which would pull the policy from its start.

    The critic of ppo is a parameter group with a learning rate of its own; its names begin with `critic.`.
    """
    policy, critic = objective.loss.policy, objective.critic
    preset = policy.config.get_optimizer_preset()
    peak, warmup = config.lr, config.grpo.warmup
    optimizer = make_trainable_optimizer(
        policy,
        schedule=lambda iteration: peak * min(1.0, (iteration + 1) / (warmup + 1)),
        betas=preset.betas,
        eps=preset.eps,
        weight_decay=0.0,
        clip_norm=preset.grad_clip_norm,
    )
    if critic is None:
        return optimizer
    params = {f"{CRITIC}{name}": param for name, param in critic.named_parameters()}
    optimizer.optimizer.add_param_group({"params": list(params.values()), "lr_scale": config.grpo.value_lr / peak})
    return replace(optimizer, names=[*optimizer.names, *params], params=[*optimizer.params, *params.values()])


class Times:
    """The seconds of an iteration by phase."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._spent = dict.fromkeys(("play", "score", "update", "held_out", "between"), 0.0)

    def mark(self, name: str) -> None:
        """Add the time since the last mark to phase `name`."""
        now = time.perf_counter()
        self._spent[name] += now - self._last
        self._last = now

    def gather(self, rollouts: Scheduler, actor: Actor) -> dict[str, float]:
        """Return means over ranks, and sums over processes for simulation and rendering. Every rank must call it.

        Means of the phases add up to the iteration; maxima would not, because a fast rank waits in the next phase.
        """
        mine = {**self._spent, "step": time.perf_counter() - self._start, "inference": actor.busy_s}
        mine["simulation"], mine["rendering"] = rollouts.take_seconds()
        del mine["between"]
        actor.busy_s = 0.0
        ranks = stack_ranks(torch.tensor(list(mine.values()), dtype=torch.float64).to(actor.device)).cpu()
        seconds = dict(zip(mine, ranks.mean(dim=0).tolist(), strict=True))
        seconds |= {name: len(ranks) * seconds[name] for name in ("simulation", "rendering")}
        seconds["waiting"] = max(0.0, seconds["play"] + seconds["held_out"] - seconds["inference"])
        return {f"{name}_s": round(value, 4) for name, value in seconds.items()}


def metrics_of(
    played: RolloutGroup, rollouts: RolloutBatch, objective: Objective, results: Sequence[StepResult]
) -> dict[str, Any]:
    """Return an iteration's entries of metrics.jsonl, equal on all ranks. Every rank must call it.

    The policy learned from the groups `played`; success and costs are counted over replaced groups too.
    """
    means = sum_means(stack_ranks(objective.sums))
    ended = [line for _, line in sorted(played.lines.items()) if line["error"] is None]

    def mean(name: str) -> float:
        return float(torch.tensor([float(line[name]) for line in ended]).mean())

    norms = [float(result.grad_norm) for result in results]
    return {
        "episodes_failed": len(played.lines) - len(ended),
        "success": mean("success_once"),
        "return": mean(played.worth),
        "mixed_groups": 1.0 - float(equal_returns(played.returns).float().mean()),
        "resampled_groups": (len(played.lines) - played.numbers.size) // played.numbers.shape[1],
        "decisions": sum(len(line["rewards"]) for line in ended),
        "used": rollouts.rows,
        "demonstrated": rollouts.demonstrated,
        "env_steps": sum(line["steps"] for line in ended),
        "updates": len(results),
        "nonfinite_steps": int(sum(float(result.skipped) for result in results)),
        **objective.metrics(rollouts, means),
        "grad_norm": float(np.mean(norms)) if norms else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def iteration_line(line: Mapping[str, Any]) -> str:
    """Return the terminal's line about an iteration."""
    text = f"success {line['success']:.1%} while exploring, {line['mixed_groups']:.0%} of the groups mixed"
    if line.get("held_out_episodes"):
        text += f"; held out {line['held_out_successes']} of {line['held_out_episodes']}"
    if line["episodes_failed"]:
        text += f"; {line['episodes_failed']} episodes could not be played"
    shares = {"waiting": line["waiting_s"], "inference": line["inference_s"], "updates": line["update_s"]}
    return f"{text}; {line['step_s']:.1f} s, " + ", ".join(f"{k} {v:.1f}" for k, v in shares.items())
