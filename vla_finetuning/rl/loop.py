"""The loop of `grpo.py`, whose steps are iterations: play groups of episodes, score them, update the policy."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from util import Batch, StepResult, train_step
from vla_finetuning.policies.flow import FlowLoss
from vla_finetuning.rl.actor import Actor, StochasticActor
from vla_finetuning.rl.batches import RolloutBatch, stack_ranks
from vla_finetuning.rl.demonstrations import task_reader
from vla_finetuning.rl.groups import check_first, held_out, make_rollouts, play_iteration
from vla_finetuning.rl.learning import Times, build_grpo_optimizer, metrics_of
from vla_finetuning.rl.objectives import objective_class
from vla_finetuning.rl.objectives.base import Objective, sum_means
from vla_finetuning.rl.recording import is_iteration_recorded, remove_episodes, write_episodes
from vla_finetuning.rl.resolve import GrpoRun
from vla_finetuning.rollouts.player import Acting, Player
from vla_finetuning.rollouts.scheduler import Scheduler
from vla_finetuning.run.checkpoint import load_checkpoint
from vla_finetuning.training.callbacks import Checkpoints, MetricsLines, NonfiniteSteps, StopFile
from vla_finetuning.training.model import build_model, check_attention
from vla_finetuning.training.parallel import spread
from vla_finetuning.training.state import Callback, LoopState


def callbacks_for(run: GrpoRun, state: GrpoState) -> list[Callback]:
    """List the callbacks of the run, in the order in which they see an iteration's metrics."""
    return [StopFile(), NonfiniteSteps(), Checkpoints(run.config.training()), IterationLines(state)]


@dataclass
class GrpoState(LoopState):
    """The state of a training process between two iterations.

    Attributes:
        episodes, first_row: numbers of episodes played and of demonstration rows used, of all ranks.
    """

    episodes: int = field(default=0, init=False)
    first_row: int = field(default=0, init=False)
    rollouts: Scheduler = field(init=False)
    actor: Actor = field(init=False)
    objective: Objective = field(init=False)
    model: nn.Module = field(init=False)
    times: Times = field(init=False)
    _line: dict[str, Any] = field(default_factory=dict, init=False)

    def open_batches(self, hooks: Sequence[Callback]) -> None:
        """Start the environments' processes, which get ready while the model is built."""
        run, progress = self.run, self.attempt.progress
        self.first_row = progress.rows
        # With demonstrations, checkpoints count their rows, and every iteration has equally many episodes.
        self.episodes = progress.rows if run.demonstrations is None else self.step * run.episodes
        self.rollouts = make_rollouts(run)

    def build(self) -> None:
        run, worker, options, policy = self.run, self.worker, self.run.options, self.run.policy
        device, job = worker.device, run.job
        loss, self._autocast = build_model(policy, device)
        assert isinstance(loss, FlowLoss)  # `resolve_grpo` refuses others
        check_attention(policy, loss, device, self._autocast)
        (preprocessor, postprocessor), (robot,) = policy.processors(), policy.robots
        acting = Acting(env=run.scene.env, rename_map=robot.rename_map, trusted=policy.trusted, opening=robot.opening)
        self.actor = Actor(
            loss,
            Player(loss.policy, preprocessor, postprocessor, acting),
            prompts=policy.prompts,
            inference_batch=options.inference_batch,
            autocast=self._autocast,
            device=device,
        )
        rows = run.demonstrations
        self._demonstrations = None if rows is None else task_reader(rows, policy, job.timeouts.batch)
        self.objective = objective_class(options.method)(loss, run.sde, options, run.config.seed).to(device)
        self._start_objective = copy.deepcopy(self.objective).requires_grad_(False) if options.kl else None
        self.model = spread(self.objective, job.scaling.strategy, device, worker.world, autocast=self._autocast)
        self.optimizer = build_grpo_optimizer(run.config, self.objective)
        if self.attempt.checkpoint is not None:
            load_checkpoint(self.attempt.checkpoint, self.optimizer.named(), self.optimizer.state())
        if worker.rank == 0:
            remove_episodes(job.output_dir, self.step)

    @property
    def log_freq(self) -> int:
        return 1

    @property
    def rows(self) -> int:
        return self.episodes if self.run.demonstrations is None else self.first_row

    def take_step(self, batches: Iterator[Batch]) -> None:
        run, worker, options, iteration = self.run, self.worker, self.run.options, self.step
        gc.collect()  # free the images of the previous iteration before this one's are added
        self.times = Times()
        explorer = StochasticActor(self.actor, run.sde, run.config.seed, iteration)
        played = play_iteration(run, self.rollouts, explorer, worker)
        if is_iteration_recorded(run, iteration):
            write_episodes(run.job.output_dir, iteration, worker, played.episodes)
        self.episodes += len(played.lines)
        used = self.objective.select_episodes(played)
        check_first(options, iteration, played, used)
        self.times.mark("play")
        rollouts = RolloutBatch(
            run.config,
            self.actor,
            explorer,
            played,
            used,
            worker=worker,
            demonstrations=self._demonstrations,
            first_row=self.first_row,
        )
        self.objective.prepare(rollouts, played, self._start_objective)
        self.times.mark("score")
        results = self._learn(rollouts)
        self.first_row += rollouts.demonstrated
        self.times.mark("update")
        self._line = metrics_of(played, rollouts, self.objective, results)

    def nonfinite_remedy(self) -> str:
        return "lower --lr, or raise --grpo.warmup"

    def loss_of(self, line: dict[str, Any]) -> float:
        return -line["success"]

    def _learn(self, rollouts: RolloutBatch) -> list[StepResult]:
        """Take an iteration's updates; stop when the divergence exceeds --grpo.target_kl."""
        options, results = self.run.options, list[StepResult]()
        self.objective.sums.zero_()
        for epoch in range(options.epochs):
            for rows, count, micros in rollouts.epoch(epoch):
                before = self.objective.sums.clone()
                result = train_step(
                    self.model,
                    self.optimizer,
                    micros,
                    step=self.step,
                    grad_accum=count,
                    mean_over=rows / self.worker.world,
                    draws=lambda micro: (None, None),  # random numbers are in the batch
                    autocast=self._autocast,
                    device=self.worker.device,
                )
                results.append(result)
                # The only value of an update that is read from the device. `not <=` also stops at NaN.
                moved = self.objective.sums - before
                if options.target_kl and not sum_means(stack_ranks(moved))["kl"] <= options.target_kl:
                    return results
        return results

    def gather(self, hooks: Sequence[Callback]) -> dict[str, Any]:
        host: dict[str, float] = {}
        for hook in hooks:
            host |= hook.host_metrics(self)
        numbers = torch.tensor(list(host.values()), dtype=torch.float64).to(self.worker.device)
        self.heed(dict(zip(host, stack_ranks(numbers).T.tolist(), strict=True)))
        return {"episodes": self.episodes, "lr": self.optimizer.schedule(self.step - 1), **self._line}


class IterationLines(MetricsLines):
    """Write metrics.jsonl with seconds, and with line 0 before the first iteration.

    Line 0, and a line every --grpo.eval_every iterations, have the success in the held-out episodes, which it plays.
    """

    def on_start(self, state: GrpoState) -> None:
        if state.step == 0:
            state.times = Times()
            self._write(state, held_out(state.run, state.rollouts, state.actor, state.worker))

    def on_log(self, state: GrpoState, line: dict[str, Any]) -> None:
        state.times.mark("between")
        if state.every(state.run.options.eval_every):
            line |= held_out(state.run, state.rollouts, state.actor, state.worker)
        self._write(state, line)

    def _write(self, state: GrpoState, line: dict[str, Any]) -> None:
        state.times.mark("held_out")
        super().on_log(state, line | state.times.gather(state.rollouts, state.actor))  # a collective

    def on_end(self, state: GrpoState) -> None:
        state.rollouts.close()
