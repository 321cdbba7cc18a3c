"""Evaluate a run's checkpoints in its environment (`--env.type`), in processes beside the training.

Runs on the driver, in a thread; the training never waits. `OUTPUT_DIR/evaluations.jsonl` has a line for each evaluated
checkpoint, and the folder beside it the episodes. Checkpoints are kept until they are evaluated
(`run.folder.prune_checkpoints`). Evaluations that a run has missed, because it was killed or the cluster had no
capacity, are made after it is resumed, at the latest at its end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import ray
from lerobot.policies.pretrained import PreTrainedPolicy
from ray.data import ExecutionOptions, ExecutionResources

from vla_finetuning.buckets.mirror import address
from vla_finetuning.data.metadata import how_drawn
from vla_finetuning.envs.configs import check_drawn, check_rate, env_config, task_makers
from vla_finetuning.evaluation.episodes import EvaluationFolder, read_evaluation
from vla_finetuning.evaluation.intervals import score, share
from vla_finetuning.evaluation.trial import score_rows
from vla_finetuning.files import append_line, drop_half_line, read_json_lines, write_whole
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.plan.resolve import Run
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.rollouts.episodes import Condition, episode_list
from vla_finetuning.rollouts.player import Packed, PolicySource, check_fits, packed, robot_shown
from vla_finetuning.rollouts.scheduler import NoCapacityError
from vla_finetuning.rollouts.servers import SERVER_CPUS, STAGE_CPUS, play
from vla_finetuning.run.attempts import attempts, trained_by
from vla_finetuning.run.checkpoint import checkpoints, load_progress
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import EVALUATIONS, EVALUATIONS_NAME, METRICS_NAME, evaluations, prune_checkpoints
from vla_finetuning.run.manifest import checkpoint_name
from vla_finetuning.run.progress import print_above_bar, success_of
from vla_finetuning.terminal import print_safe

logger = logging.getLogger(__name__)
POLL_S = 1.0
# Share of the cluster's spare CPUs for simulation; the rest decodes.
SPARE_SHARE = 0.25
# Function that loads the policy of a checkpoint on the CPU.
PolicyAt = Callable[[PolicySpec, Path], PreTrainedPolicy]


class Evaluator:
    """The evaluations of one run in its environment, one at a time; none without `--env.type`.

    Raises:
        ValueError: there is no such environment, the policy cannot play in it, or its datasets were rendered otherwise.
    """

    def __init__(self, run: Run, policy_at: PolicyAt) -> None:
        self._run, self._policy_at, self._failed = run, policy_at, dict[int, str]()
        self._stop, self._training = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if run.config.env_type is None:
            return
        self._env = env_config(run.config.env_type, run.config.env_options)
        self._makers = task_makers(self._env)
        self._robot = 0
        if run.policy.mixes_robots:
            shown = robot_shown(self._env, {robot.name: (robot.config, robot.rename_map) for robot in run.robots})
            self._robot = [robot.name for robot in run.robots].index(shown)
        self._run = run = self._select_robot(run)
        (robot,) = run.robots
        for number in robot.datasets:
            meta, step = run.rows.metas[number], run.rows.window_step(number)
            check_drawn(how_drawn(meta), self._env, meta.root)
            check_rate(meta.fps / step, step, self._env, meta.root)
        check_fits(robot.config, self._env, robot.rename_map, robot.match.shapes)  # named as the processors do

    @contextlib.contextmanager
    def beside(self, run: Run, data: ExecutionOptions) -> Iterator[None]:
        """Evaluate checkpoints as they become due while the block trains, if the cluster has capacity.

        `run` has all statistics. The resources of the evaluation are excluded from `data`, the run's data execution.
        """
        if run.config.env_type is None:
            yield
            return
        self._run = self._select_robot(run)
        stages, missing = capacity_beside(run.job.scaling, run.config.eval, ray.cluster_resources())
        if missing is not None:
            if run.config.env_eval_freq:
                print_safe(f"Evaluation   after the training: beside it, it {missing}")
            yield
            return
        playing = ExecutionResources(cpu=SERVER_CPUS + stages * STAGE_CPUS, gpu=int(run.job.use_gpu))
        data.exclude_resources = data.exclude_resources.add(playing)
        self._training.set()
        options = replace(run.config.eval, env_actors=stages, policy_actors=1)
        self._thread = threading.Thread(target=self._follow, args=(options,), daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._training.clear()

    def _select_robot(self, run: Run) -> Run:
        """Return the run with the policy of the environment's robot."""
        return replace(run, policy=run.policy.select_robot(run.robots[self._robot]))

    def close(self) -> None:
        """Stop the evaluations; a resumed run finishes them."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> int:
        """Evaluate all remaining checkpoints, print all results, and return the exit status. Call it after training."""
        run = self._run
        if run.config.env_type is None:
            return 0
        if self._thread is not None:
            self._thread.join()
        self._failed.clear()
        while (step := self._next_due(run.job.steps)) is not None:
            self._try_evaluate(step, run.config.eval)
        prune_checkpoints(run.config, run.job.steps)
        _add_last_success(run.job.output_dir)
        done = {line["step"]: line for line in evaluations(run.job.output_dir)}
        print_safe(*(f"Success      step {step}: {share(line)}" for step, line in done.items()))
        freq = run.config.env_eval_freq
        due = range(freq, run.job.steps, freq) if freq else ()
        if gone := [str(step) for step in due if step not in done and step not in self._failed]:
            print_safe(
                f"             step {', '.join(gone)} was not evaluated: its checkpoint is deleted", file=sys.stderr
            )
        for step, problem in self._failed.items():
            print_safe(f"             step {step} was not evaluated: {problem}; --resume tries again", file=sys.stderr)
        return 5 if self._failed else 0

    def _follow(self, options: EvalOptions) -> None:
        """Evaluate due checkpoints until the training ends; leave the last one to `finish`, when capacity is free."""
        while self._training.is_set() and not self._stop.is_set():
            step = self._next_due(self._run.job.steps - 1)
            if step is None:
                self._stop.wait(POLL_S)
            elif not self._try_evaluate(step, options):
                return

    def _next_due(self, most: int) -> int | None:
        """Return the step of the oldest due checkpoint up to step `most`, or None."""
        run = self._run
        played = {line["step"] for line in evaluations(run.job.output_dir)} | self._failed.keys()
        saved_steps = checkpoints(run.job.checkpoints_dir)
        due = (step for step in saved_steps if step <= most and run.config.is_evaluated(step, run.job.steps))
        return min((step for step in due if step not in played), default=None)

    def _try_evaluate(self, step: int, options: EvalOptions) -> bool:
        """Evaluate a checkpoint and print the result or the error; return whether to go on beside the training."""
        try:
            self._evaluate(step, options)
        except NoCapacityError as error:
            if self._training.is_set():
                print_above_bar(f"evaluation   after the training: {error}")
                return False
            self._failed[step] = str(error)
        except Exception as error:  # an environment may raise anything, and the training goes on
            if self._stop.is_set():
                return False
            self._failed[step] = root_cause(error)
            logger.warning("step %d could not be evaluated: %s", step, self._failed[step])
        return True

    def _evaluate(self, step: int, options: EvalOptions) -> None:
        run, started = self._run, time.monotonic()
        checkpoint = run.job.checkpoints_dir / checkpoint_name(step)
        load_progress(checkpoint)
        episodes = episode_list(["plain"], self._makers, options.n_episodes, run.policy.seed)
        environment = {"type": run.config.env_type, "options": run.config.env_options}
        attempt = trained_by(attempts(run.job.output_dir), step)
        policy = {"path": address(run.job.output_dir), "step": step, **({"attempt": attempt} if attempt else {})}
        about = {"policy": policy, "environment": environment, "seed": run.policy.seed}
        folder = run.job.output_dir / EVALUATIONS / checkpoint.name
        # Another one is of weights that have been trained anew since, or with other options.
        stored = EvaluationFolder(folder, about, episodes, replaces=True)
        if stored.pending:
            play(
                stored.pending,
                {"plain": Condition()},
                {"policy": self._source(checkpoint)},
                self._makers,
                options,
                seed=run.policy.seed,
                on_end=lambda line, _: stored.write(line),
                stopped=self._stop.is_set,
            )
        if self._stop.is_set():
            return
        _, lines = read_evaluation(folder)
        if all(line["error"] is not None for line in lines):
            reason = lines[0]["error"]
            raise RuntimeError(f"none of {len(lines)} episodes could be played, the first because of {reason}")
        seconds = round(time.monotonic() - started, 1)
        line = {"step": step, "attempt": attempt, "errors": 0, **score(lines), "seconds": seconds}
        if len(self._makers) > 1:
            line["by_task"] = score_rows(lines)[1:]
        drop_half_line(run.job.output_dir / EVALUATIONS_NAME)
        append_line(run.job.output_dir / EVALUATIONS_NAME, json.dumps(line))
        if self._training.is_set():
            print_above_bar(f"evaluated    step {step}: {share(line)}")

    def _source(self, checkpoint: Path) -> PolicySource:
        """Return the policy of a checkpoint; a Ray task puts its weights into the object store."""
        run, config = self._run, self._run.policy.exported_config()
        return PolicySource(
            checkpoint,
            config,
            env=self._env,
            rename_map=run.robots[0].rename_map,
            processors=run.policy.processors(config),
            device="cuda" if run.job.use_gpu else "cpu",
            trusted=run.policy.trusted,
            opening=run.robots[0].opening,
            advantage=None if run.rows.positive is None else "positive",
            weights=ray.remote(num_cpus=0)(_weights).remote(self._policy_at, run.policy, checkpoint),
        )


def _weights(policy_at: PolicyAt, spec: PolicySpec, checkpoint: Path) -> Packed:
    """Load the weights of a checkpoint's policy. Runs in a Ray task."""
    return packed(policy_at(spec, checkpoint).state_dict())


def capacity_beside(scaling: ScalingOptions, options: EvalOptions, cluster: dict[str, float]) -> tuple[int, str | None]:
    """Return the number of stages beside a run's workers and one read task, and a text of missing resources or None."""
    cpus = cluster.get("CPU", 0) - scaling.num_workers * scaling.cpus_per_worker - scaling.cpus_per_read_task
    gpus = cluster.get("GPU", 0) - scaling.num_workers
    stages = options.env_actors or max(2, int(cpus * SPARE_SHARE / STAGE_CPUS))
    stages = min(stages, int((cpus - SERVER_CPUS) / STAGE_CPUS))
    missing_parts = []
    if stages < 1:
        missing_parts.append(f"{SERVER_CPUS + STAGE_CPUS:g} CPU, {max(0, cpus):g} of the cluster's are to spare")
    if scaling.use_gpu and gpus < 1:
        missing_parts.append(f"1 GPU, {max(0, gpus):g} of the cluster's are to spare")
    return stages, f"needs {'; '.join(missing_parts)}" if missing_parts else None


def _add_last_success(output_dir: Path) -> None:
    """Add the last evaluation to the last line of `metrics.jsonl`; only after training, which appends to it."""
    path, played = output_dir / METRICS_NAME, evaluations(output_dir)
    lines = read_json_lines(path)
    if played and lines:
        lines[-1] |= success_of(played[-1])
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
