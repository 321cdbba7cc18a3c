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
import gc
import logging
import time
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

from util import (
    UNWATCHED,
    Batch,
    Clock,
    NumpyToTorchCollate,
    TimedIterator,
    TrainableOptimizer,
    Window,
    cuda_prefetcher,
    train_step,
)
from vla_finetuning.config import Config
from vla_finetuning.data.feature_cache import FeatureCache
from vla_finetuning.environment import FRAME_CACHE_GB, cache_gb
from vla_finetuning.evaluation.demo_success import is_demo, success_table, try_demo
from vla_finetuning.evaluation.during import Evaluator
from vla_finetuning.evaluation.open_loop import error_table, evaluate_run
from vla_finetuning.files import write_json
from vla_finetuning.flags import VLA, parse_args
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.registry import family_of
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.program import Work, run_program
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import load_checkpoint, load_progress
from vla_finetuning.run.describe import describe
from vla_finetuning.run.exported import POLICY_DIR, policy_problem, report_line
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import (
    EVALUATION_NAME,
    check_start,
    finish,
    first_step_done,
    own_folder,
    prune_checkpoints,
    stop_requested,
)
from vla_finetuning.run.job import Job
from vla_finetuning.run.preflight import Examined, examine
from vla_finetuning.run.progress import MetricsLog, RowsLog, check_skipped
from vla_finetuning.run.push import check_push, push_policy, repositories
from vla_finetuning.run.record import record_run
from vla_finetuning.run.resolve import Run, resolve, with_stats
from vla_finetuning.run.rows import Rows
from vla_finetuning.run.statistics import hold_statistics
from vla_finetuning.terminal import tell, tell_error, tell_text
from vla_finetuning.training.attempt import begin
from vla_finetuning.training.batches import (
    OnBatch,
    WorkCounter,
    check_finite,
    collate_cut,
    ignore_batch,
    mfu,
    noise_for,
    policy_batches,
    record_rows,
    what_batch,
    with_mean_count,
)
from vla_finetuning.training.capacity import check_capacity, describe_memory, planned_memory, rows_that_fit
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.coordinators import GroupedRanks
from vla_finetuning.training.export import export, exported_checkpoint, policy_at
from vla_finetuning.training.fitting import fit, worker_group
from vla_finetuning.training.held_out import HeldOutLoss
from vla_finetuning.training.memory import GIB
from vla_finetuning.training.model import build_model, build_optimizer, check_attention, compile_all, make_prepare
from vla_finetuning.training.parallel import keeps_casts, replicas, spread
from vla_finetuning.training.stream import Columns, Dealt, Deferred, TrainingData, or_timeout, stream_batches
from vla_finetuning.training.vision_features import VisionFeatures
from vla_finetuning.training.worker import RayWorker, Worker

logger = logging.getLogger(__name__)


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
    if train(run, worker) is not None and worker.rank == 0:
        checkpoint = exported_checkpoint(run.job, best=run.config.export == "best")
        export(run.policy, checkpoint, run.job.output_dir, run.rows.drawn)


def train(
    run: Run,
    worker: Worker,
    clock: Clock = UNWATCHED,
    make_optimizer: Callable[[PolicySpec, PolicyLoss, int], TrainableOptimizer] = build_optimizer,
    make_checkpoints: Callable[..., CheckpointWriter] = CheckpointWriter,
) -> TrainableOptimizer | None:
    """Train from the newest checkpoint to the end of the run; None if the run was asked to stop before.

    `clock` is notified of what happens when.
    """
    config, job, rows, policy, began = run.config, run.job, run.rows, run.policy, time.monotonic()
    rank, world, device = worker.rank, worker.world, worker.device
    attempt = begin(job, worker, config.train.deterministic)
    progress = attempt.progress
    dealt = Dealt(job.batch_size, rows.block_rows, rank, world, job.batches_per_step, progress.step)
    work = WorkCounter(policy)
    log_rows = None
    if config.run.record_rows:
        log_rows = partial(record_rows, RowsLog(job.output_dir, rank, attempt.number), rows, dealt)

    def on_batch(number: int, columns: Batch, inputs: Batch) -> None:
        work.add(inputs)
        if log_rows is not None:
            log_rows(number, columns)

    features = None
    if config.train.feature_cache is not None:
        features = VisionFeatures(rows, FeatureCache(config.train.feature_cache, cache_gb(FRAME_CACHE_GB)))

    # The first batch is read while the model is made.
    batches = feed(
        rows,
        policy,
        worker,
        dealt,
        progress.rows,
        job.steps,
        timeout_s=job.timeouts.batch,
        epsilon=config.sample_weighting.epsilon,
        features=features,
        on_batch=on_batch,
        clock=clock,
    )

    policy_loss, autocast = build_model(policy, device)
    if features is not None:
        features.start(policy_loss, autocast)
    robots = rows.robots if policy.value is None else ()
    if robots:
        policy_loss.by_robot = torch.zeros(2, len(robots), device=device)
    check_attention(policy, policy_loss, device, autocast, job.output_dir if rank == 0 else None)
    strategy = job.scaling.strategy
    model = spread(
        policy_loss,
        strategy,
        device,
        world,
        replicas=replicas(worker, job.scaling.shard_workers) if strategy == "hsdp" and world > 1 else None,
        autocast=autocast,
        # Where its family says what is unused, nothing that trains is without a gradient (trainable.choose_trainable).
        find_unused_parameters=job.scaling.find_unused_parameters,
    )
    optimizer = make_optimizer(policy, policy_loss, job.steps)
    if attempt.checkpoint is not None:
        load_checkpoint(attempt.checkpoint, optimizer.named(), optimizer.state(), optimizer.named_average() or None)
    log = None
    if rank == 0:
        log = MetricsLog(job.output_dir, job.rows_per_step, rows.per_epoch, progress.step, rows.rates)
    prune = partial(prune_checkpoints, config, job.steps)
    checkpoints = make_checkpoints(job, optimizer, worker, attempt.number, config.save_every_s, prune)
    held_out = None
    if config.eval_steps:
        held_out = HeldOutLoss(
            rows,
            policy,
            worker,
            batch_size=job.batch_size,
            limit=config.max_eval_samples,
            timeout_s=job.timeouts.batch,
        )

    if config.train.compile and progress.step < job.steps:
        draws = noise_for(policy, progress.step, dealt, device)(0)
        evaluates = held_out is not None
        compile_all(policy, policy_loss, model, optimizer, batches.peek(), draws, autocast, evaluates=evaluates)

    gc.disable()  # collected at log steps: in between it would stall the host at random
    gc.collect()
    gc.freeze()  # nor does a log step look again through all that libraries and model are made of: half a second
    keep_casts = keeps_casts(strategy, config.grad_accum, config.train.activation_checkpointing)
    begin_window = partial(Window, device, robots, policy_loss.by_robot)
    window, waited_before = begin_window(), 0.0
    losses: list[float] = []
    nonfinite = 0
    stop = preempted = False
    for step in clock.steps(range(progress.step, job.steps), model):
        micros = len(dealt.micros(step))
        of_step: Iterator[Batch] = batches
        if config.train.exact_mean:
            clock.mark("data_wait")
            of_step = with_mean_count(of_step, policy_loss, micros, job.batches_per_step, world)
        result = train_step(
            model,
            optimizer,
            of_step,
            step=step,
            grad_accum=micros,
            mean_over=job.batches_per_step / world,
            draws=noise_for(policy, step, dealt, device),
            autocast=autocast,
            device=device,
            keep_casts=keep_casts,
            clock=clock,
        )
        clock.mark("metrics")
        window.add(result, samples=job.batch_size * micros)
        done = step + 1
        if rank == 0 and step == dealt.first_step:
            first_step_done(job.output_dir, done, time.monotonic() - began)
        save = done == job.steps or done % config.save_freq == 0
        judge = held_out is not None and (done == job.steps or done % config.eval_steps == 0)
        judged: dict[str, Any] = {}
        if done == job.steps or done % config.log_freq == 0 or judge:
            # All that ranks must agree on rides on the one collective of a log step.
            asked = (stop_requested(job.output_dir), checkpoints.due()) if rank == 0 else (False, False)
            metrics, (stop, due) = window.gather(batches.waited_s - waited_before, *asked, work=work.take())
            window, waited_before = begin_window(), batches.waited_s
            gc.collect()
            nonfinite += metrics["nonfinite_steps"]
            check_finite(rows, job.rows_per_step, config.train.max_nonfinite, metrics, nonfinite, done)
            losses.append(metrics["loss"])
            if held_out is not None and judge and not (stop and done < job.steps):
                clock.mark("evaluation")
                with optimizer.averaged() if config.takes_average else contextlib.nullcontext():
                    judged = held_out.evaluate(policy_loss, autocast)
                window = begin_window()  # no part of a step
            if log is not None:
                if config.dataset.on_error == "skip":
                    trained = done * job.rows_per_step
                    check_skipped(job.output_dir, config.dataset.max_skipped, trained, rows.per_epoch)
                extra = {"mfu": mfu(metrics, world, device), "checkpoint_pause_s": checkpoints.paused_s()}
                extra["spilled_bytes"] = worker.spilled_bytes()
                log.write(done, optimizer.schedule(step), {**metrics, **extra, **judged})
            save |= stop or due
            # A node is about to be taken away; Ray Train starts the group anew when it is gone.
            if not preempted and (deadline_ms := worker.preemption_deadline_ms()) is not None:
                preempted = save = True
                checkpoints.ends_at(deadline_ms)
        if save:
            clock.mark("checkpoint")
            loss = sum(losses) / len(losses) if losses else None
            # What is not over all held-out rows does not decide which checkpoint is best.
            eval_loss = None if judged.get("eval_skipped") else judged.get("eval_loss")
            progress = replace(progress, step=done, rows=done * job.rows_per_step, loss=loss, eval_loss=eval_loss)
            checkpoints.save(progress)
            losses.clear()
        if stop:
            break
    gc.unfreeze()
    gc.enable()
    checkpoints.close()
    if features is not None:
        features.close()
    return None if stop and progress.step < job.steps else optimizer


def feed(
    rows: Rows,
    policy: PolicySpec,
    worker: Worker,
    dealt: Dealt,
    first_row: int,
    steps: int,
    *,
    timeout_s: float,
    epsilon: float = 0.0,
    collate: Callable[[Columns], Batch] | None = None,
    features: VisionFeatures | None = None,
    on_batch: OnBatch = ignore_batch,
    clock: Clock = UNWATCHED,
) -> TimedIterator:
    """This rank's micro-batches on its device, from a position of the stream to the run's end.

    Args:
        timeout_s: how long to wait for a batch, in seconds. epsilon: see `row_weights.of_batch`.
        collate: numpy columns of a batch to CPU tensors; `NumpyToTorchCollate` when None.
        features: takes the place of frames.
    """
    fitted = partial(
        collate_cut,
        collate or NumpyToTorchCollate(worker.device.type == "cuda"),
        policy.prompts,
        weights=rows.weights,
        epsilon=epsilon,
        returns=rows.returns,
        features=None if features is None else features.find,
        frames=rows.fill_frames(),
        drop_absent=not policy.train.compile,
    )
    host_batches = stream_batches(worker.shard, dealt, first_row, steps, fitted)
    in_time = or_timeout(host_batches, timeout_s, partial(what_batch, rows, dealt))

    def passed_on(batches: Iterator[Batch]) -> Iterator[Batch]:
        filled = batches if features is None else features.fill(batches, clock)
        return policy_batches(filled, policy.config, on_batch)

    return TimedIterator(cuda_prefetcher(in_time, worker.device, clock), then=passed_on)


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
