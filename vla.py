"""Fine-tune a vision-language-action policy on LeRobot datasets, on one laptop or a cluster.

    python vla.py --preset demo
    python vla.py --preset l4 --dataset.root s3://bucket/my_robot --policy.path lerobot/pi05_base --output_dir out

The architecture, top to bottom: `main` resolves the run and starts it, `build_dataset` streams decoded, prepared rows
from CPUs anywhere in the cluster, `train_loop_per_worker` runs the training step on each GPU.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # help and errors come before seconds of imports
    from vla_finetuning.options.command_line import VLA, check_command_line

    CONFIG = check_command_line(VLA, then="checked")
    from vla_finetuning.plan.preflight import examine_or_exit

    EXAMINED = examine_or_exit(CONFIG)

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.train.torch import TorchTrainer

from util import Batch
from vla_finetuning.evaluation.after_training import evaluate_trained
from vla_finetuning.evaluation.during import Evaluator
from vla_finetuning.mirror import address
from vla_finetuning.options.command_line import VLA, parse_args
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.launch import on_cluster
from vla_finetuning.plan.look import look_at_rows
from vla_finetuning.plan.preflight import Examined, examine
from vla_finetuning.plan.record import record_run
from vla_finetuning.plan.resolve import Run, resolve
from vla_finetuning.plan.robot_facts import robot_facts
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.program import Work, run_program
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.run import cluster
from vla_finetuning.run.exported import POLICY_DIR, policy_problem, report_line
from vla_finetuning.run.folder import finish, own_folder, prepare_folder
from vla_finetuning.run.push import check_push, push_all
from vla_finetuning.terminal import print_safe, print_safe_text
from vla_finetuning.training import callbacks as attach
from vla_finetuning.training.capacity import check_memory, rows_that_fit
from vla_finetuning.training.coordinators import GroupedRanks
from vla_finetuning.training.export import describe_exported, export, exported_checkpoint, policy_at
from vla_finetuning.training.fitting import fit, worker_group
from vla_finetuning.training.held_out import HeldOut
from vla_finetuning.training.model import fit_to_rows, make_prepare
from vla_finetuning.training.state import Callback, LoopState, TrainState
from vla_finetuning.training.stream import LazyPickle, TrainingData
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
        prepare=LazyPickle(prepare),
        row_bytes=sum(column.nbytes for column in example.values()),
        checkpoints_dir=checkpoints_dir,
    )


# ---- training: one process per GPU --------------------------------------------------------------------------------


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[Run]]) -> None:
    """Train to the end of the run and export the policy. Runs in every training process."""
    run, worker = ray.get(loop_config["run"]), RayWorker()
    if train(run, worker).finished and worker.rank == 0:
        checkpoint = exported_checkpoint(run.job, best=run.config.export == "best")
        export(run.policy, checkpoint, run.job.output_dir, run.drawn, robot_facts(run))


def train(
    run: Any,
    worker: Worker,
    callbacks: Sequence[Callback] = (),
    *,
    state_class: type[LoopState] = TrainState,
    attached: Callable[[Any, Any], list[Callback]] | None = None,
    **options: Any,
) -> LoopState:
    """Train from the newest checkpoint to the end of the run, or until the run is asked to stop.

    Args:
        callbacks: attach besides the run's own, before them. state_class: what a step is. attached: the run's own
            callbacks; `callbacks_for` when None. options: fields of the state.
    """
    state = state_class.restore(run, worker, **options)
    run_callbacks: Callable[[Any, Any], list[Callback]] = attached or callbacks_for
    hooks = [*callbacks, *run_callbacks(run, state)]
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
    with contextlib.ExitStack() as ends:  # each of them, whatever another one raises
        for hook in reversed(hooks):
            ends.callback(hook.on_end, state)
    return state


def callbacks_for(run: Run, state: TrainState) -> list[Callback]:
    """List what the run attaches to its loop, in the order in which callbacks see a log step's metrics."""
    config, train = run.config, run.config.train
    return [
        attach.WorkDone(state),
        *([attach.RowLog(state)] if config.run.record_rows else []),
        *([CachedFeatures(state)] if train.feature_cache is not None else []),
        *([attach.ExactMean()] if train.averages_step else []),
        attach.StopFile(),
        attach.NonfiniteSteps(),
        *([HeldOut()] if config.eval_steps else []),
        *([attach.SkippedRows()] if config.dataset.on_error == "skip" else []),
        attach.Checkpoints(config),
        *([attach.Compile()] if train.compile else []),
        attach.CollectGarbage(),
        attach.MetricsLines(state),
    ]


# ---- the driver ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, examined: Examined | None = None) -> int:
    """Resolve, train, evaluate.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was asked to stop and can be resumed,
    4 the policy is trained but not pushed to the Hub, 5 it is trained but could not be evaluated.
    """
    return run_program(VLA, argv, partial(prepare, examined=examined))


def prepare(argv: list[str], stack: contextlib.ExitStack, examined: Examined | None = None) -> Work | None:
    """Resolve the run, print its plan, check what can be checked before Ray starts, and take its folder."""
    examined = examined or examine(parse_args(argv))
    config: Config = examined.config
    if examined.finished:
        return None
    require_tracker(config.track)
    run = resolve(config, cluster.gpus_found(config.scaling, config.preset), examined.datasets)
    config, job = run.config, run.job
    stack.enter_context(own_folder(config, job.start, job.steps, job.disk_bytes))
    evaluator = Evaluator(run, policy_at) if config.env_type else None
    print_safe_text(describe(run))
    print_safe(*look_at_rows(run, examined.datasets))
    gpu_bytes = check_memory(run)
    for repo_id in run.repositories.values():
        print_safe(f"Hub          {check_push(repo_id, config.policy_private, make=not config.dry_run)}")
    if config.dry_run:
        return None
    prepare_folder(config)
    stack.enter_context(track(job.output_dir, config.track, config.track_project))
    return partial(work, run, evaluator, gpu_bytes)


def work(run: Run, evaluator: Evaluator | None, gpu_bytes: int) -> int:
    """Train on the cluster, evaluate, push. Returns the exit status, see `main`."""
    config, job = run.config, run.job
    with contextlib.ExitStack() as stack:
        print_safe("Starting     Ray and the workers; the first step takes about a minute")
        run, data_options = on_cluster(run, gpu_bytes)
        run = fit_to_rows(run)
        from vla_finetuning.report.page import keep_report  # not above: training processes need no matplotlib

        record_run(job, run.policy, describe(run), ray.cluster_resources(), run.rows, config.dataset.repo_id)
        stack.enter_context(keep_report(job.output_dir))
        if evaluator is not None:
            stack.callback(evaluator.close)
        with evaluator.beside(run, data_options) if evaluator is not None else contextlib.nullcontext():
            steps_done = fit(job, lambda: make_trainer(run, data_options))
        if steps_done < job.steps:
            print_safe(f"Stopped      after step {steps_done} of {job.steps}; --resume goes on from there")
            return 3
        status = evaluate_trained(run, rows_that_fit) if run.rows.any_held_out else 0
        status = (evaluator.finish() if evaluator is not None else 0) or status
    exported = job.output_dir / POLICY_DIR
    if problem := policy_problem(exported, [robot.name for robot in run.robots]):
        raise FileNotFoundError(f"{problem}; --resume exports it again from the last checkpoint")
    print_safe(f"Policy       {address(exported)}{describe_exported(config, job)}", report_line(job.output_dir))
    status = push_all(job.output_dir, run.repositories) or status
    if not status:
        finish(job.output_dir, job.steps)
    return status


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
