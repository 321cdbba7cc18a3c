"""Run training on a cluster: start the worker group by Ray Train, and follow it from the driver to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
import ray.train
from ray.data import ExecutionOptions
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from vla_finetuning.buckets.mirror import mirror_of, push
from vla_finetuning.buckets.store import StoreAwayError, limit_retries
from vla_finetuning.plan.resolve import Run, with_stats
from vla_finetuning.plan.statistics import check_run_statistics
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import load_progress
from vla_finetuning.run.failures import NEARLY_NONE_S, StopRetrying, cause_of
from vla_finetuning.run.folder import checkpoint_to_resume, stopping_on_signals
from vla_finetuning.run.job import Job
from vla_finetuning.run.progress import Line, follow_progress, step_line
from vla_finetuning.run.recovery import recover_local_checkpoints
from vla_finetuning.terminal import print_safe
from vla_finetuning.training.chunks import fit_to_rows

RESIZE_INTERVAL_S = 60.0


class Trainer(TorchTrainer):
    """`TorchTrainer` without Ray Train's placement group cleaner.

    In Ray Train 2.60 it removes the workers' placement group when the State API does not list the controller. While
    that API starts, it kills a healthy attempt. Without it, Ray removes the group with the driver's job.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]  # mypy sees the trainer of Ray 1
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]


def on_cluster(run: Run) -> tuple[Run, ExecutionOptions]:
    """Join or start the run's cluster, complete the run, and wait for capacity. Return the options of Ray Data too.

    Missing statistics come first, so that nodes that an autoscaler adds for training do not stand idle.
    """
    print_safe("Starting     Ray and the workers; the first step takes about a minute")
    job, roots = run.job, [meta.root for meta in run.rows.metas]
    needs = cluster.node_needs(job.scaling, roots, run.policy.shared_folder, run.gpu_bytes)
    cluster.start(job.scaling, needs, job.output_dir)
    run = with_stats(run)
    data_options = cluster.wait_for_capacity(job.scaling, needs, job.output_dir).execution_options()
    recover(job)  # first, as a checkpoint fixes the statistics
    check_run_statistics(job, run.policy)
    return fit_to_rows(run), data_options


def recover(job: Job) -> None:
    """Send the newest checkpoint that nodes could not upload to the run's bucket. Call it before `fit`."""
    if mirror_of(job.output_dir):
        recover_local_checkpoints(job, [node["NodeID"] for node in cluster.alive_nodes()], cluster.on_nodes)


def worker_group(job: Job, loop: Callable[[dict[str, Any]], None], loop_config: Any, **data: Any) -> TorchTrainer:
    """Return the trainer that runs `loop` in each process of the job. `data`: arguments of `TorchTrainer`."""
    scaling = job.scaling
    workers: dict[str, Any] = {"num_workers": scaling.num_workers}
    if scaling.min_workers:
        workers["num_workers"] = (scaling.min_workers, scaling.num_workers)
        workers["elastic_resize_monitor_interval_s"] = RESIZE_INTERVAL_S
    resources = {"CPU": scaling.cpus_per_worker, **({"GPU": 1.0} if job.use_gpu else {})}
    return Trainer(
        loop,
        train_loop_config=loop_config,
        **data,
        torch_config=TorchConfig(timeout_s=round(job.timeouts.collective)),
        scaling_config=ray.train.ScalingConfig(
            **workers, use_gpu=job.use_gpu, resources_per_worker=resources, accelerator_type=scaling.accelerator_type
        ),
        run_config=ray.train.RunConfig(
            name=job.checkpoints_dir.name,
            # Ray Train writes its own list of checkpoints there, on each node's disk for a run in a bucket.
            storage_path=str(job.output_dir),
            failure_config=ray.train.FailureConfig(max_failures=scaling.max_failures),
            callbacks=[StopRetrying(job.output_dir)],  # type: ignore[list-item]  # mypy sees the RunConfig of Ray 1
        ),
    )


def fit(job: Job, make_trainer: Callable[[], TorchTrainer], line: Line = step_line, *, unit: str = "step") -> bool:
    """Train until the last step, or until a checkpoint after SIGTERM or Ctrl-C. Return whether all steps are done."""
    push(job.output_dir)
    trained: Future[Any] = Future()

    def work() -> None:
        try:
            trained.set_result(make_trainer().fit())
        except BaseException as error:
            trained.set_exception(error)

    with follow_progress(job.output_dir, job.steps, line), stopping_on_signals(job.output_dir):
        # In the main thread, Ray Train would handle Ctrl-C itself and lose steps. A second signal does not wait for a
        # daemon thread.
        threading.Thread(target=work, daemon=True).start()
        try:
            cluster.wait_for(trained, job.scaling)
        except Exception as error:
            if isinstance(cause_of(error), StoreAwayError):
                limit_retries(NEARLY_NONE_S)  # the report would wait for the store again
            raise
    done = steps_done(job)
    if done < job.steps:
        print_safe(f"Stopped      after {unit} {done} of {job.steps}; --resume goes on from there")
    return done >= job.steps


def steps_done(job: Job) -> int:
    """Return the step of the newest checkpoint, or 0 without one."""
    newest = checkpoint_to_resume(job.output_dir)
    return load_progress(newest).step if newest is not None else 0
