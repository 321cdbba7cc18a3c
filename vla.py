"""Fine-tune a vision-language-action policy on LeRobot v3 datasets, on one laptop or a cluster.

    python vla.py --preset demo
    python vla.py --preset l4 --dataset.root s3://bucket/my_robot --policy.path lerobot/pi05_base --output_dir out

The architecture, top to bottom: `main` resolves the run and starts it, `build_dataset` streams decoded, prepared rows
from CPUs anywhere in the cluster, `train_loop_per_worker` runs the training step on each GPU.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before seconds of imports
    from vla_finetuning.flags import print_help

    sys.exit(print_help())

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.train import TrainingFailedError
from ray.train.torch import TorchTrainer

from util import (
    UNWATCHED,
    Clock,
    NumpyToTorchCollate,
    TimedIterator,
    TrainableOptimizer,
    Window,
    cuda_prefetcher,
    train_step,
)
from vla_finetuning.config import Strategy
from vla_finetuning.evaluation.demo import is_demo, success_table, try_demo
from vla_finetuning.evaluation.during import Evaluator
from vla_finetuning.evaluation.open_loop import error_table, evaluate_run
from vla_finetuning.files import write_json
from vla_finetuning.flags import parse_args, print_help
from vla_finetuning.policies.pi05 import PolicyLoss
from vla_finetuning.report.tracking import require_tracker, track
from vla_finetuning.run import cluster
from vla_finetuning.run.checkpoint import load_checkpoint, load_progress
from vla_finetuning.run.describe import describe
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import (
    EVALUATION_NAME,
    check_place,
    first_step_done,
    own_folder,
    stop_requested,
)
from vla_finetuning.run.plan import Run, resolve, with_stats
from vla_finetuning.run.progress import MetricsLog, RowsLog, check_skipped
from vla_finetuning.run.push import check_push, push_policy
from vla_finetuning.run.record import record_run
from vla_finetuning.terminal import escape_warnings, tell, tell_error, tell_text
from vla_finetuning.training.coordinators import GroupedRanks
from vla_finetuning.training.fitting import fit, worker_group
from vla_finetuning.training.held_out import HeldOutLoss
from vla_finetuning.training.memory import GIB
from vla_finetuning.training.parallel import keeps_casts, spread
from vla_finetuning.training.room import check_room, describe_memory, planned_memory, rows_that_fit
from vla_finetuning.training.stream import Dealt, Deferred, TrainingData, or_timeout, stream_batches
from vla_finetuning.training.worker import (
    CheckpointWriter,
    Work,
    begin,
    build_model,
    build_optimizer,
    check_attention,
    check_finite,
    collate_cut,
    copies,
    export,
    exported_checkpoint,
    mfu,
    noise_for,
    policy_at,
    policy_batches,
    prepare_of,
    what_batch,
)

logger = logging.getLogger(__name__)


# ---- data: Ray Data tasks, on CPUs --------------------------------------------------------------------------------


def build_dataset(run: Run) -> TrainingData:
    """The rows still to be trained, as a function that Ray Train calls at every start of the worker group.

    Decoded frames are prepared (renamed, normalised, tokenised by LeRobot's own pipeline) in the same task that reads
    them, and stream to the workers under backpressure, uint8 and in the plan's order.
    """
    reader = run.reader()
    prepare = prepare_of(run)
    example = prepare(reader(stream=(0, run.last_row)).example())
    return TrainingData(
        read=reader,
        last_row=run.last_row,
        prepare=Deferred(prepare),
        row_bytes=sum(column.nbytes for column in example.values()),
        checkpoints_dir=run.checkpoints_dir,
    )


# ---- training: one process per GPU --------------------------------------------------------------------------------


def train_loop_per_worker(loop_config: dict[str, ray.ObjectRef[Run]]) -> None:
    """Train to the end of the run and export the policy. Runs in every training process."""
    run = ray.get(loop_config["run"])
    trained = train(run)
    if trained is not None and ray.train.get_context().get_world_rank() == 0:
        export(run)


def train(
    run: Run,
    clock: Clock = UNWATCHED,
    make_optimizer: Callable[[Run, PolicyLoss], TrainableOptimizer] = build_optimizer,
) -> TrainableOptimizer | None:
    """Train from the newest checkpoint to the end of the run; None if the run was asked to stop before.

    `clock` is told what happens when.
    """
    config, began = run.config, time.monotonic()
    attempt = begin(run)
    rank, world, device, progress = attempt.rank, attempt.world, attempt.device, attempt.progress
    dealt = Dealt(config.batch_size, run.block_rows, rank, world, run.batches_per_step, progress.step)
    rows_log = RowsLog(run.output_dir, rank, attempt.number) if config.run.record_rows else None
    # The first batch is read while the model is made.
    work = Work(run)
    batches = feed(run, dealt, progress.rows, device, NumpyToTorchCollate(run.use_gpu), rows_log, work, clock)

    policy_loss, autocast = build_model(run, device)
    check_attention(run, policy_loss, autocast, attempt)
    strategy = cast(Strategy, config.scaling.strategy)
    model = spread(
        policy_loss,
        strategy,
        device,
        world,
        copies=copies(run, device) if strategy == "hsdp" and world > 1 else None,
        autocast=autocast,
        # Of PI0.5, nothing that trains is ever without a gradient (trainable.choose_trainable).
        find_unused_parameters=config.scaling.find_unused_parameters,
    )
    optimizer = make_optimizer(run, policy_loss)
    if attempt.checkpoint is not None:
        load_checkpoint(attempt.checkpoint, optimizer.named(), optimizer.state(), optimizer.named_average() or None)
    log = None
    if rank == 0:
        log = MetricsLog(run.output_dir, config.global_batch_size, run.rows_per_epoch, progress.step, run.decoded)
    checkpoints = CheckpointWriter(run, optimizer, rank, attempt.number)
    held_out = HeldOutLoss(run, rank, world, device) if config.eval_steps else None

    gc.disable()  # collected at log steps: in between it would stall the host at random
    gc.collect()
    gc.freeze()  # nor does a log step look again through all that libraries and model are made of: half a second
    keep_casts = keeps_casts(strategy, config.grad_accum, config.train.activation_checkpointing)
    window, waited_before = Window(device), 0.0
    losses: list[float] = []
    nonfinite = 0
    stop = preempted = False
    for step in clock.steps(range(progress.step, run.steps), model):
        result = train_step(
            model,
            optimizer,
            batches,
            step=step,
            grad_accum=len(dealt.micros(step)),
            mean_over=run.batches_per_step / world,
            draws=noise_for(run, step, dealt, device),
            autocast=autocast,
            device=device,
            keep_casts=keep_casts,
            clock=clock,
        )
        clock.mark("metrics")
        window.add(result, samples=config.batch_size * len(dealt.micros(step)))
        done = step + 1
        if rank == 0 and step == dealt.first_step:
            first_step_done(run.output_dir, done, time.monotonic() - began)
        save = done == run.steps or done % config.save_freq == 0
        judge = held_out is not None and (done == run.steps or done % config.eval_steps == 0)
        judged: dict[str, Any] = {}
        if done == run.steps or done % config.log_freq == 0 or judge:
            # All that ranks must agree on rides on the one collective of a log step.
            asked = (stop_requested(run.output_dir), checkpoints.due()) if rank == 0 else (False, False)
            metrics, (stop, due) = window.gather(batches.waited_s - waited_before, *asked, work=work.take())
            window, waited_before = Window(device), batches.waited_s
            gc.collect()
            nonfinite += metrics["nonfinite_steps"]
            check_finite(run, metrics, nonfinite, done)
            losses.append(metrics["loss"])
            if held_out is not None and judge and not (stop and done < run.steps):
                clock.mark("evaluation")
                with optimizer.averaged() if config.takes_average else contextlib.nullcontext():
                    judged = held_out.evaluate(policy_loss, autocast)
                window = Window(device)  # no part of a step
            if log is not None:
                check_skipped(run, done)
                extra = {"mfu": mfu(metrics, world, device), "checkpoint_pause_s": checkpoints.paused_s()}
                log.write(done, optimizer.schedule(step), {**metrics, **extra, **judged})
            save |= stop or due
            # A node is about to be taken away; Ray Train starts the group anew when it is gone.
            if not preempted and (notice := ray.train.get_preemption_info()) is not None:
                preempted = save = True
                checkpoints.ends_at(notice.deadline_ms)
        if save:
            clock.mark("checkpoint")
            loss = sum(losses) / len(losses) if losses else None
            rows, eval_loss = done * config.global_batch_size, judged.get("eval_loss")
            progress = replace(progress, step=done, rows=rows, loss=loss, eval_loss=eval_loss)
            checkpoints.save(progress)
            losses.clear()
        if stop:
            break
    gc.unfreeze()
    gc.enable()
    checkpoints.close()
    return None if stop and progress.step < run.steps else optimizer


def feed(
    run: Run,
    dealt: Dealt,
    first_row: int,
    device: torch.device,
    collate: NumpyToTorchCollate,
    rows_log: RowsLog | None = None,
    work: Work | None = None,
    clock: Clock = UNWATCHED,
) -> TimedIterator:
    """This rank's micro-batches on its device, from a position of the stream to the run's end."""
    shard = ray.train.get_dataset_shard("train")
    fitted = partial(collate_cut, run, collate, weights=run.row_weights, frames=run.frames_named())
    host_batches = stream_batches(shard, dealt, first_row, run.steps, fitted)
    in_time = or_timeout(host_batches, run.config.dataset.batch_timeout_s, partial(what_batch, run, dealt))
    return TimedIterator(policy_batches(run, cuda_prefetcher(in_time, device, clock), dealt, rows_log, work))


# ---- the driver ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, resolve, train, evaluate.

    Returns the exit status: 0 done, 1 the run failed, 2 it could not start, 3 it was asked to stop and can be resumed,
    4 the policy is trained but not pushed to the Hub, 5 it is trained but could not be evaluated.
    """
    argv = sys.argv[1:] if argv is None else argv
    escape_warnings()
    if "--help" in argv or "-h" in argv:
        return print_help()
    with contextlib.ExitStack() as held:
        try:
            run = resolve(parse_args(argv), gpus_found=torch.cuda.device_count())
            tell_text(describe(run))
            needed = planned_memory(run) if run.use_gpu or run.config.dry_run else None
            if needed is not None:
                if run.config.dry_run:
                    tell_text(describe_memory(run, needed))
                check_room(run, needed, gpu_gib())
            check_place(run.output_dir)
            require_tracker(run.config.track)
            evaluator = Evaluator(run, policy_at) if run.config.env_type else None
            if repo_id := run.config.hub_repo_id:
                tell(f"Hub          {check_push(repo_id, run.config.policy_private, make=not run.config.dry_run)}")
            if run.config.dry_run:
                return 0
            held.enter_context(own_folder(run.config, run.start, run.steps, run.disk_bytes))
            held.enter_context(track(run.output_dir, run.config.track, run.config.track_project))
        except (ValueError, OSError) as error:
            tell_error(error)
            return 2
        try:
            if not ray.is_initialized():
                held.callback(ray.shutdown)
            tell("Starting     Ray and what the data and the training run in; the first step takes about a minute")
            run, data_options = on_cluster(run)
            from vla_finetuning.report.page import keep_report  # not above: training processes need no matplotlib

            record_run(run, describe(run), ray.cluster_resources())
            held.enter_context(keep_report(run.output_dir))
            if evaluator is not None:
                held.callback(evaluator.close)
            with evaluator.beside(run, data_options) if evaluator is not None else contextlib.nullcontext():
                steps_done = fit(run, lambda: make_trainer(run, data_options))
            if steps_done < run.steps:
                tell(f"Stopped      after step {steps_done} of {run.steps}; --resume goes on from there")
                return 3
            status = evaluate(run) if any(len(episodes) for episodes in run.eval_episodes) else 0
            status = (evaluator.finish() if evaluator is not None else 0) or status
        except (TrainingFailedError, RayError, ValueError, OSError) as error:
            tell_error(root_cause(error))
            return 1
    tell(f"Policy       {run.output_dir / 'pretrained_model'}{_exported(run)}")
    tell(f"Report       {run.output_dir / 'report.html'}")
    return (push(run.output_dir, run.config.hub_repo_id) if run.config.hub_repo_id else 0) or status


def _exported(run: Run) -> str:
    """Which weights the policy has, where that are not the last step's own."""
    average = ", averaged weights (--ema.enable)" if run.config.takes_average else ""
    if run.config.export == "last":
        return average
    best = load_progress(exported_checkpoint(run))
    told = "not measured" if best.eval_loss is None else f"{best.eval_loss:.4g}"
    return f": step {best.step} of {run.steps}, held-out loss {told}{average}"


def gpu_gib() -> float | None:
    """What CUDA reports of the first GPU of this machine, where there is one."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None


def on_cluster(run: Run) -> tuple[Run, ray.data.ExecutionOptions]:
    """Join or start the run's cluster, and wait until there is room: the run with all its statistics, and for its data.

    Statistics come first: nodes that an autoscaler brings for training should not stand idle meanwhile.
    """
    cluster.start(run)
    run = with_stats(run)
    return run, cluster.wait_for_room(run).execution_options()


def evaluate(run: Run) -> int:
    """Print what the trained policy predicts of held-out episodes, and how the demo fares. Returns the exit status."""
    remote = ray.remote(evaluate_run).options(num_cpus=1, num_gpus=1 if run.use_gpu else 0)
    try:
        errors = cluster.wait_for(remote.remote(run, rows_that_fit=rows_that_fit).future(), run)
        tell_text(error_table(errors["trained"], errors.get("untrained")))
        if is_demo(run):
            scores, films = try_demo(run)
            write_json(run.output_dir / EVALUATION_NAME, {**errors, "closed_loop": scores, "films": films})
            tell_text(success_table(scores))
        return 0
    except (RayError, RuntimeError, ValueError, OSError) as error:
        tell_error(f"the policy is trained, but could not be evaluated: {root_cause(error)}")
        return 5


def push(output_dir: Path, repo_id: str) -> int:
    """Push the trained policy, and say how to do it again when that fails. Returns the exit status."""
    try:
        tell(f"Pushed       {push_policy(output_dir, repo_id)}")
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
    scaling = run.config.scaling
    return worker_group(
        run,
        loop,
        loop_config,
        datasets={"train": data or build_dataset(run)},
        dataset_config=GroupedRanks(data_options, scaling.cpus_per_worker, scaling.cpus_per_read_task),
    )


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    import vla

    sys.exit(vla.main())
