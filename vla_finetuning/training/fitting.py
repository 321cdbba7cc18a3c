"""A worker group on Ray Train, followed from the driver to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from vla_finetuning.mirror import mirror_of, push
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import load_progress
from vla_finetuning.run.failures import NEARLY_NONE_S, StopRetrying, cause_of
from vla_finetuning.run.folder import checkpoint_to_resume, stopping_on_signals
from vla_finetuning.run.job import Job
from vla_finetuning.run.progress import Line, follow_progress, step_line
from vla_finetuning.run.recovery import recover_local_checkpoints
from vla_finetuning.store import StoreAwayError, limit_retries

# Between looks at whether there is capacity for more workers of an elastic group.
RESIZE_INTERVAL_S = 60.0


class Trainer(TorchTrainer):
    """A `TorchTrainer` whose workers nothing ends but the run itself.

    Ray Train 2.60 has an actor remove the workers' placement group when the State API does not list the controller.
    While that API starts, it does not list controllers that are alive, and a healthy attempt is killed. Without that
    actor, the placement group is removed with the driver's job.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]  # mypy sees the trainer of Ray 1
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]


def worker_group(job: Job, loop: Callable[[dict[str, Any]], None], loop_config: Any, **data: Any) -> TorchTrainer:
    """Training processes as the job asks for them. `loop` runs in each, with `loop_config`.

    Args:
        data: what `TorchTrainer` takes of datasets.
    """
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
            **workers,
            use_gpu=job.use_gpu,
            resources_per_worker=resources,
            accelerator_type=scaling.accelerator_type,
        ),
        run_config=ray.train.RunConfig(
            name=job.checkpoints_dir.name,
            # Ray Train's list of checkpoints, which nothing here reads. Of a run in a bucket it is on each node's disk:
            # an outage of the store is none of Ray Train's.
            storage_path=str(job.output_dir),
            failure_config=ray.train.FailureConfig(max_failures=scaling.max_failures),
            callbacks=[StopRetrying(job.output_dir)],  # type: ignore[list-item]  # mypy sees the RunConfig of Ray 1
        ),
    )


def fit(job: Job, make_trainer: Callable[[], TorchTrainer], line: Line = step_line) -> int:
    """Train; on SIGTERM or Ctrl-C until a checkpoint is taken. Returns the steps that are done.

    Args:
        line: formats a line of `metrics.jsonl` for the terminal.
    """
    if mirror_of(job.output_dir):
        recover_local_checkpoints(job, [node["NodeID"] for node in cluster.alive_nodes()], cluster.on_nodes)
        push(job.output_dir)
    trained: Future[Any] = Future()

    def work() -> None:
        try:
            trained.set_result(make_trainer().fit())
        except BaseException as error:
            trained.set_exception(error)

    with follow_progress(job.output_dir, job.steps, line), stopping_on_signals(job.output_dir):
        # Not in the main thread, where Ray Train takes Ctrl-C for itself and loses what is done; and in a thread that a
        # second signal need not wait for.
        threading.Thread(target=work, daemon=True).start()
        try:
            cluster.wait_for(trained, job.scaling)
        except Exception as error:
            if isinstance(cause_of(error), StoreAwayError):
                limit_retries(NEARLY_NONE_S)  # the report and all else would each wait for the store once more
            raise
    newest = checkpoint_to_resume(job.output_dir)
    return load_progress(newest).step if newest is not None else 0
