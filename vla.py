"""Fine-tune a vision-language-action policy on LeRobot datasets, on one laptop or a cluster.

    python vla.py --preset demo
    python vla.py --preset l4 --dataset.root s3://bucket/my_robot --policy.path lerobot/pi05_base --output_dir out

The architecture, top to bottom: `main` resolves the run and starts it, `build_dataset` streams decoded, prepared rows
from CPUs anywhere in the cluster, `train_loop_per_worker` runs the training step on each GPU.
"""

from __future__ import annotations

from vla_finetuning.options.command_line import VLA

if __name__ == "__main__":  # help and errors come before imports that take seconds
    from vla_finetuning.start import launch

    launch(VLA)

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.train.torch import TorchTrainer

from vla_finetuning.evaluation.after_training import evaluate_trained
from vla_finetuning.evaluation.during import Evaluator
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.preflight import Examined
from vla_finetuning.plan.resolve import Run, resolve
from vla_finetuning.program import Work, deliver, reported, run_training
from vla_finetuning.training import callbacks as attach
from vla_finetuning.training.coordinators import GroupedRanks
from vla_finetuning.training.export import describe_exported, export_run, policy_at
from vla_finetuning.training.fitting import fit, on_cluster, worker_group
from vla_finetuning.training.held_out import HeldOut
from vla_finetuning.training.model import make_prepare
from vla_finetuning.training.plan import show_plan
from vla_finetuning.training.state import Callback, LoopState, TrainState
from vla_finetuning.training.stream import LazyPickle, TrainingData
from vla_finetuning.training.worker import RayWorker, Worker

# ---- data: Ray Data tasks, on CPUs --------------------------------------------------------------------------------


def build_dataset(run: Run) -> TrainingData:
    """Return the remaining training rows, as a factory that Ray Train calls at every start of the worker group.

    One task reads, decodes and prepares rows (LeRobot's own pipeline renames, normalises and tokenises). Rows stream to
    the workers under backpressure, with uint8 frames, in the plan's order.
    """
    prepare = make_prepare(run.policy, run.rows)
    example = prepare(run.rows.source().example())
    return TrainingData(
        read=run.rows.reader,
        last_row=run.rows.last_row,
        prepare=LazyPickle(prepare),
        row_bytes=sum(column.nbytes for column in example.values()),
        checkpoints_dir=run.job.checkpoints_dir,
    )


# ---- training: one process per GPU --------------------------------------------------------------------------------


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[Run]]) -> None:
    """Train to the end of the run and export the policy. Runs in every training process."""
    run, worker = ray.get(loop_config["run"]), RayWorker()
    if train(run, worker).finished and worker.rank == 0:
        export_run(run)


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
        callbacks: further callbacks, called before the run's own.
        state_class: class of the loop's state, which defines a step.
        attached: returns the run's own callbacks; None for `callbacks_for`.
        options: fields of the state.
    """
    state = state_class.restore(run, worker, **options)
    run_callbacks: Callable[[Any, Any], list[Callback]] = attached or callbacks_for
    hooks = [*callbacks, *run_callbacks(run, state)]
    state.open_batches(hooks)
    state.build()
    for hook in hooks:
        hook.on_start(state)
    while not (state.finished or state.stop):
        batches = state.batches
        for hook in hooks:
            batches = hook.on_step_begin(state, batches)
        state.take_step(batches)  # util.train_step
        state.step += 1
        for hook in hooks:
            hook.on_step_end(state)
        state.save = state.every(run.config.save_freq)
        if any([state.every(state.log_freq), *(hook.wants_log(state) for hook in hooks)]):
            line = state.gather(hooks)  # the only collective, and the only read from the device
            for hook in hooks:
                hook.on_log(state, line)
        if state.save:
            for hook in hooks:
                hook.on_save(state)
    with contextlib.ExitStack() as ends:  # calls every on_end, even if another one raises
        for hook in reversed(hooks):
            ends.callback(hook.on_end, state)
    return state


def callbacks_for(run: Run, state: TrainState) -> list[Callback]:
    """List the run's callbacks, in the order in which they see a log step's metrics."""
    config, train = run.config, run.config.train
    return [
        attach.WorkDone(state),
        *([attach.RowLog(state)] if config.run.record_rows else []),
        *([attach.ExactMean()] if train.averages_step else []),
        attach.StopFile(),
        attach.NonfiniteSteps(),
        *([attach.SuccessInLoop()] if config.env_type is not None else []),
        *([HeldOut()] if config.eval_steps else []),
        *([attach.SkippedRows(state)] if config.dataset.on_error == "skip" else []),
        attach.Checkpoints(config),
        *([attach.Compile()] if train.compile else []),
        attach.CollectGarbage(),
        attach.MetricsLines(state),
    ]


# ---- the driver ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, examined: Examined | None = None) -> int:
    """Resolve, train, evaluate.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was stopped and can be resumed, 4 the
    policy is trained but not pushed to the Hub, 5 the policy is trained but could not be evaluated.
    """
    return run_training(VLA, argv, examined, lambda found, _: resolve(found.config, datasets=found.datasets), plan)


def plan(run: Run) -> Work:
    """Print the run's plan, do the remaining checks that need no Ray, and return the work."""
    evaluator = Evaluator(run, policy_at)
    planned = show_plan(run)
    return lambda: work(planned, evaluator)


def work(run: Run, evaluator: Evaluator) -> int:
    """Train on the cluster, evaluate, push. Returns the exit status, see `main`."""
    run, data_options = on_cluster(run)
    config, job = run.config, run.job
    with reported(job, run.policy, describe(run), run.rows, config.dataset.repo_id), contextlib.closing(evaluator):
        with evaluator.beside(run, data_options):
            if not fit(job, lambda: make_trainer(run, data_options)):
                return 3
        status = max(evaluate_trained(run), evaluator.finish())
    names = [robot.name for robot in run.robots]
    weights = describe_exported(config, job)
    return deliver(job, status, robots=names, weights=weights, repositories=run.repositories)


def make_trainer(
    run: Run,
    data_options: ray.data.ExecutionOptions,
    loop: Callable[[dict[str, Any]], None] = train_loop_per_worker,
    data: TrainingData | None = None,
    **loop_config: Any,
) -> TorchTrainer:
    """Return the worker group and its data. Every worker calls `loop` with `loop_config` and the run."""
    scaling = run.job.scaling
    return worker_group(
        run.job,
        loop,
        {"run": ray.put(run), **loop_config},  # a reference, which the controller need not deserialise
        datasets={"train": data or build_dataset(run)},
        dataset_config=GroupedRanks(data_options, scaling.cpus_per_worker, scaling.cpus_per_read_task),
    )
