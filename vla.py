"""Fine-tune a vision-language-action policy on LeRobot datasets, on one laptop or a cluster.

    python vla.py --preset demo
    python vla.py --preset l4 --dataset.root s3://bucket/my_robot --policy.path lerobot/pi05_base --output_dir out

The architecture, top to bottom: `main` resolves the run and starts it, `build_dataset` streams decoded, prepared rows
from CPUs anywhere in the cluster, `train_loop_per_worker` runs the training step on each GPU.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # help and errors come before seconds of imports
    from vla_finetuning.flags import VLA, check_command_line

    CONFIG = check_command_line(VLA, then="checked")
    from vla_finetuning.run.preflight import check_start_of

    EXAMINED = check_start_of(CONFIG)

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer

from util import Batch
from vla_finetuning.config import Config
from vla_finetuning.evaluation.demo_success import is_demo, success_table, try_demo
from vla_finetuning.evaluation.during import Evaluator
from vla_finetuning.evaluation.open_loop import error_table, evaluate_run
from vla_finetuning.files import write_json
from vla_finetuning.flags import VLA, parse_args
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.program import Work, run_program
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import load_progress
from vla_finetuning.run.describe import describe
from vla_finetuning.run.exported import POLICY_DIR, policy_problem, report_line
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import EVALUATION_NAME, check_start, finish, own_folder
from vla_finetuning.run.job import Job
from vla_finetuning.run.preflight import Examined, examine
from vla_finetuning.run.push import check_push, push_policy, repositories
from vla_finetuning.run.record import record_run
from vla_finetuning.run.resolve import Run, resolve, with_stats
from vla_finetuning.run.rows import Rows
from vla_finetuning.run.statistics import hold_statistics
from vla_finetuning.terminal import tell, tell_error, tell_text
from vla_finetuning.training.callbacks import (
    Checkpoints,
    CollectGarbage,
    Compile,
    ExactMean,
    MetricsLines,
    NonfiniteSteps,
    RowLog,
    SkippedRows,
    StopFile,
    WorkDone,
)
from vla_finetuning.training.capacity import check_capacity, describe_memory, planned_memory, rows_that_fit
from vla_finetuning.training.coordinators import GroupedRanks
from vla_finetuning.training.export import export, exported_checkpoint, policy_at
from vla_finetuning.training.fitting import fit, worker_group
from vla_finetuning.training.held_out import HeldOut
from vla_finetuning.training.memory import GIB
from vla_finetuning.training.model import make_prepare
from vla_finetuning.training.state import Callback, LoopState, TrainState
from vla_finetuning.training.stream import Deferred, TrainingData
from vla_finetuning.training.vision_features import CachedFeatures
from vla_finetuning.training.worker import RayWorker, Worker

# ---- data: Ray Data tasks, on CPUs --------------------------------------------------------------------------------


def build_dataset(rows: Rows, policy: PolicySpec, checkpoints_dir: Path) -> TrainingData:
    """The rows still to be trained, as a function that Ray Train calls at every start of the worker group.

    Decoded frames are prepared (renamed, normalised, tokenised by LeRobot's own pipeline) in the same task that reads
    them, and stream to the workers under backpressure, uint8 and in the plan's order.
    """
    prepare = make_prepare(policy, rows)
    example = prepare(rows.source().example())
    return TrainingData(
        read=replace(rows, weights=None).source,  # read tasks need no weights of the loss
        last_row=rows.last_row,
        prepare=Deferred(prepare),
        row_bytes=sum(column.nbytes for column in example.values()),
        checkpoints_dir=checkpoints_dir,
    )


# ---- training: one process per GPU --------------------------------------------------------------------------------


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[Run]]) -> None:
    """Train to the end of the run and export the policy. Runs in every training process."""
    run, worker = ray.get(loop_config["run"]), RayWorker()
    if train(run, worker).finished and worker.rank == 0:
        checkpoint = exported_checkpoint(run.job, best=run.config.export == "best")
        export(run.policy, checkpoint, run.job.output_dir, run.rows.drawn)


def train(
    run: Any,
    worker: Worker,
    callbacks: Sequence[Callback] = (),
    *,
    kind: type[LoopState] = TrainState,
    attached: Callable[[Any, Any], list[Callback]] | None = None,
    **options: Any,
) -> LoopState:
    """Train from the newest checkpoint to the end of the run, or until the run is asked to stop.

    Args:
        callbacks: attach besides the run's own, before them. kind: what a step is. attached: the run's own callbacks;
            `callbacks_for` when None. options: fields of the state.
    """
    state = kind.restore(run, worker, **options)
    hooks = [*callbacks, *(attached or callbacks_for)(run, state)]
    state.open_batches(hooks)
    state.build()
    for hook in hooks:
        hook.on_start(state)
    while not (state.finished or state.stop):
        batches: Iterator[Batch] = state.batches
        for hook in hooks:
            batches = hook.on_step_begin(state, batches)
        state.take_step(batches)  # util.train_step
        state.step += 1
        for hook in hooks:
            hook.on_step_end(state)
        state.save = state.every(run.config.save_freq)
        if any([state.every(state.log_freq), *(hook.wants_log(state) for hook in hooks)]):
            line = state.gather(hooks)  # the one collective, and the one read from the device
            for hook in hooks:
                hook.on_log(state, line)
        if state.save:
            for hook in hooks:
                hook.on_save(state)
    for hook in hooks:
        hook.on_end(state)
    return state


def callbacks_for(run: Run, state: TrainState) -> list[Callback]:
    """List what the run attaches to its loop, in the order in which callbacks see a log step's metrics."""
    config, train = run.config, run.config.train
    return [
        WorkDone(state),
        *([RowLog(state)] if config.run.record_rows else []),
        *([CachedFeatures(state)] if train.feature_cache is not None else []),
        *([ExactMean()] if train.exact_mean else []),
        StopFile(),
        NonfiniteSteps(),
        *([HeldOut()] if config.eval_steps else []),
        *([SkippedRows()] if config.dataset.on_error == "skip" else []),
        Checkpoints(config),
        *([Compile()] if train.compile else []),
        CollectGarbage(),
        MetricsLines(state),
    ]


# ---- the driver ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, examined: Examined | None = None) -> int:
    """Resolve, train, evaluate.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was asked to stop and can be resumed,
    4 the policy is trained but not pushed to the Hub, 5 it is trained but could not be evaluated.
    """
    return run_program(VLA, argv, partial(prepare, examined=examined))


def prepare(argv: list[str], held: contextlib.ExitStack, examined: Examined | None = None) -> Work | None:
    """Resolve the run, print its plan, check what can be checked before Ray starts, and take its folder."""
    config = parse_args(argv)
    examined = examined or examine(config)
    if examined.finished:
        return None
    require_tracker(config.track)
    run = resolve(config, cluster.gpus_found(config.scaling, config.preset), examined.metas)
    config, job = run.config, run.job
    check_start(config, job.start, job.steps, job.disk_bytes)
    evaluator = Evaluator(run, policy_at) if config.env_type else None
    tell_text(describe(run))
    memory = planned_memory(run.policy, run.rows.frames)
    needed = memory(config) if job.use_gpu or config.dry_run else None
    if needed is not None:
        if config.dry_run:
            tell_text(describe_memory(config, needed, run.policy.checkpoint_bytes))
        check_capacity(config, needed, memory, gpu_gib() if cluster.is_local() else None)
    for repo_id in _repositories(run).values():
        tell(f"Hub          {check_push(repo_id, config.policy_private, make=not config.dry_run)}")
    if config.dry_run:
        return None
    held.enter_context(own_folder(config, job.start, job.steps, job.disk_bytes))
    held.enter_context(track(job.output_dir, config.track, config.track_project))
    return partial(work, run, evaluator, 0 if needed is None else needed.needed)


def work(run: Run, evaluator: Evaluator | None, gpu_bytes: int) -> int:
    """Train on the cluster, evaluate, push. Returns the exit status, see `main`."""
    config, job = run.config, run.job
    with contextlib.ExitStack() as beside:
        tell("Starting     Ray and the workers; the first step takes about a minute")
        run, data_options = on_cluster(run, gpu_bytes)
        from vla_finetuning.report.page import keep_report  # not above: training processes need no matplotlib

        record_run(job, run.policy, describe(run), ray.cluster_resources(), run.rows, config.dataset.repo_id)
        beside.enter_context(keep_report(job.output_dir))
        if evaluator is not None:
            beside.callback(evaluator.close)
        with evaluator.beside(run, data_options) if evaluator is not None else contextlib.nullcontext():
            steps_done = fit(job, lambda: make_trainer(run, data_options))
        if steps_done < job.steps:
            tell(f"Stopped      after step {steps_done} of {job.steps}; --resume goes on from there")
            return 3
        status = evaluate(run) if run.rows.any_held_out else 0
        status = (evaluator.finish() if evaluator is not None else 0) or status
    exported = job.output_dir / POLICY_DIR
    if problem := policy_problem(exported, [robot.name for robot in run.robots]):
        raise FileNotFoundError(f"{problem}; --resume exports it again from the last checkpoint")
    tell(f"Policy       {exported}{_exported(config, job)}", report_line(job.output_dir))
    pushed = [push(job.output_dir, repo_id, robot) for robot, repo_id in _repositories(run).items()]
    status = max(pushed, default=0) or status
    if not status:
        finish(job.output_dir, job.steps)
    return status


def _exported(config: Config, job: Job) -> str:
    """Which weights were exported, if not the last step's."""
    average = ", averaged weights (--ema.enable)" if config.takes_average else ""
    if config.export == "last":
        return average
    best = load_progress(exported_checkpoint(job, best=True))
    measured = "not measured over all held-out rows" if best.eval_loss is None else f"{best.eval_loss:.4g}"
    return f": step {best.step} of {job.steps}, held-out loss {measured}{average}"


def gpu_gib() -> float | None:
    """What CUDA reports of the first GPU of this machine, where there is one."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None


def on_cluster(run: Run, gpu_bytes: int = 0) -> tuple[Run, ray.data.ExecutionOptions]:
    """Join or start the run's cluster, and wait for capacity: the run with all its statistics, and for its data.

    Statistics come first: nodes that an autoscaler brings for training should not stand idle meanwhile.

    Args:
        gpu_bytes: what a worker needs of its GPU, as planned; 0 where that is not known.
    """
    job, needs = run.job, join_cluster(run, gpu_bytes)
    run = with_stats(run)
    hold_statistics(job, run.policy)
    return run, cluster.wait_for_capacity(job.scaling, needs, job.output_dir).execution_options()


def join_cluster(run: Run, gpu_bytes: int = 0) -> cluster.Needs:
    """Join or start the run's cluster; what the run needs on every node, which the nodes have."""
    job = run.job
    roots = [meta.root for meta in run.rows.metas]
    needs = cluster.node_needs(job.scaling, roots, run.policy.shared_folder, gpu_bytes)
    cluster.start(job.scaling, needs, job.output_dir)
    return needs


def evaluate(run: Run) -> int:
    """Print what the trained policy predicts of held-out episodes, and how the demo fares. Returns the exit status."""
    if reason := family_of(run.policy.config).cannot_predict(run.policy.config):
        tell(f"Open loop    not measured of a '{run.policy.config.type}', {reason}")
        return 0
    try:
        errors = cluster.call_there(evaluate_run, run, rows_that_fit=rows_that_fit, scaling=run.job.scaling)
        for name, of in errors["robots"].items() if run.robots else [("", errors)]:
            tell_text(f"{name}{': ' if name else ''}{error_table(of['trained'], of.get('untrained'))}")
        if is_demo(run.config, run.policy):
            scores, films = try_demo(run.job, run.policy)
            write_json(run.job.output_dir / EVALUATION_NAME, {**errors, "closed_loop": scores, "films": films})
            tell_text(success_table(scores))
        return 0
    except (RayError, RuntimeError, ValueError, OSError) as error:
        tell_error(f"the policy is trained, but could not be evaluated: {root_cause(error)}")
        return 5


def _repositories(run: Run) -> dict[str, str]:
    """Where the policy of each robot is pushed to; nowhere unless that was asked for."""
    repo_id = run.config.hub_repo_id
    return {} if repo_id is None else repositories(repo_id, [robot.name for robot in run.robots])


def push(output_dir: Path, repo_id: str, robot: str = "") -> int:
    """Push the trained policy, and say how to do it again when that fails. Returns the exit status."""
    try:
        tell(f"Pushed       {push_policy(output_dir, repo_id, robot)}")
        return 0
    except Exception as error:  # whatever an upload may end with, the policy is there
        tell_error(root_cause(error))
        tell(
            f"the policy is trained; `python -m vla_finetuning.run.push {output_dir}` tries again to push it",
            file=sys.stderr,
        )
        return 4


def make_trainer(
    run: Run,
    data_options: ray.data.ExecutionOptions,
    loop: Callable[[dict[str, Any]], None] = train_loop_per_worker,
    data: TrainingData | None = None,
    **loop_config: Any,
) -> TorchTrainer:
    """The worker group and the data that it pulls. `loop` runs in every worker, with `loop_config` and the run."""
    scaling = run.job.scaling
    return worker_group(
        run.job,
        loop,
        {"run": ray.put(run), **loop_config},  # a reference: the controller need not open it
        datasets={"train": data or build_dataset(run.rows, run.policy, run.job.checkpoints_dir)},
        dataset_config=GroupedRanks(data_options, scaling.cpus_per_worker, scaling.cpus_per_read_task),
    )


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    import vla

    sys.exit(vla.main(examined=EXAMINED))
