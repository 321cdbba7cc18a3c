"""Fine-tune a vision-language-action policy on LeRobot v3 datasets, on one laptop or a cluster.

    python vla.py --preset demo
    python vla.py --preset l4 --dataset.root s3://bucket/my_robot --policy.path lerobot/pi05_base --output_dir out

The architecture, top to bottom: `main` resolves the run and starts it, `build_dataset` streams decoded, prepared rows
from CPUs anywhere in the cluster, `train_loop_per_worker` runs the training step on each GPU.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import draccus
import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.train import TrainingFailedError
from ray.train.torch import TorchTrainer, get_device

from checkpoint import latest_checkpoint, load_progress, require_space, write_json
from config import CONFIG_NAME, PRESETS, Config, parse_args
from evaluate import error_table, evaluate_run
from parallel import spread
from pi05_loss import PolicyLoss
from processors import Prepare, make_processors
from progress import MetricsLog, follow_progress, log_to
from run_plan import Run, describe, resolve, with_stats
from training_data import Dealt, Deferred, TrainingData, stream_batches
from util import (
    UNWATCHED,
    Clock,
    NumpyToTorchCollate,
    TimedIterator,
    TrainableOptimizer,
    Window,
    cuda_prefetcher,
    enable_gpu_perf_flags,
    train_step,
)
from worker import (
    build_model,
    build_optimizer,
    check_finite,
    check_same_run,
    export,
    flops_share,
    noise_for,
    policy_batches,
    report_checkpoint,
    restore,
)

logger = logging.getLogger(__name__)


# ---- data: Ray Data tasks, on CPUs --------------------------------------------------------------------------------


def build_dataset(run: Run) -> TrainingData:
    """The rows still to be trained, as a function that Ray Train calls at every start of the worker group.

    Decoded frames are prepared (renamed, normalised, tokenised by LeRobot's own pipeline) in the same task that reads
    them, and stream to the workers under backpressure, uint8 and in the plan's order.
    """
    reader = run.reader()
    preprocessor, _ = make_processors(run.policy_folder, run.policy_config, run.stats, run.config.rename_map)
    prepare = Prepare(preprocessor, run.match.camera_keys, run.config.rename_map, run.policy_config)
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
    optimizer = train(run)
    if ray.train.get_context().get_world_rank() == 0:
        export(run, optimizer)


def train(
    run: Run,
    clock: Clock = UNWATCHED,
    make_optimizer: Callable[[Run, PolicyLoss], TrainableOptimizer] = build_optimizer,
) -> TrainableOptimizer:
    """Train from the newest checkpoint to the end of the run; `clock` is told what happens when."""
    config = run.config
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    device = get_device()
    log_to(run.output_dir)
    enable_gpu_perf_flags(config.train.deterministic)

    loss, autocast = build_model(run, device)
    # Of PI0.5, nothing that trains is ever without a gradient (pi05_loss.choose_trainable).
    model = spread(loss, "ddp", device, world, config.scaling.find_unused_parameters)
    optimizer = make_optimizer(run, loss)
    progress = restore(run, optimizer)
    log = None
    if rank == 0:
        log = MetricsLog(
            run.output_dir, config.global_batch_size, run.rows_per_epoch, progress.step, flops_share(run, world, device)
        )

    dealt = Dealt(config.batch_size, run.block_rows, rank, world)
    batches = feed(run, dealt, progress.rows, device, NumpyToTorchCollate(run.use_gpu), clock)
    gc.disable()  # collected at log steps: in between it would stall the host at random
    gc.collect()
    gc.freeze()  # nor does a log step look again through all that libraries and model are made of: half a second
    window, waited_before = Window(device), 0.0
    for step in clock.steps(range(progress.step, run.steps), model):
        result = train_step(
            model,
            optimizer,
            batches,
            step=step,
            grad_accum=config.grad_accum,
            draws=noise_for(run, step, dealt, device),
            autocast=autocast,
            device=device,
            clock=clock,
        )
        clock.mark("metrics")
        window.add(result, samples=config.batch_size * config.grad_accum)
        done = step + 1
        if done % config.log_freq == 0 or done == run.steps:
            metrics = window.gather(batches.waited_s - waited_before)
            window, waited_before = Window(device), batches.waited_s
            gc.collect()
            check_finite(run, metrics)
            if log is not None:
                log.write(done, optimizer.schedule(step), metrics)
        if done % config.save_freq == 0 or done == run.steps:
            clock.mark("checkpoint")
            progress = replace(progress, step=done, rows=done * config.global_batch_size)
            report_checkpoint(run, optimizer, progress, rank)
    gc.unfreeze()
    gc.enable()
    return optimizer


def feed(
    run: Run, dealt: Dealt, first_row: int, device: torch.device, collate: NumpyToTorchCollate, clock: Clock = UNWATCHED
) -> TimedIterator:
    """This rank's micro-batches on its device, from a position of the stream to the run's end."""
    host_batches = stream_batches(ray.train.get_dataset_shard("train"), dealt, first_row, run.last_row, collate)
    return TimedIterator(policy_batches(run, cuda_prefetcher(host_batches, device, clock)))


# ---- the driver ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, resolve, train, evaluate. Returns the exit status: 0 done, 1 the run failed, 2 it could not start."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help()
        return 0
    try:
        run = resolve(parse_args(argv), gpus_found=torch.cuda.device_count())
        print(describe(run), flush=True)
        if run.config.dry_run:
            return 0
        prepare_folder(run)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started_ray = not ray.is_initialized()
    try:
        start_ray(run)
        run = with_stats(run)
        with follow_progress(run.output_dir, run.steps):
            make_trainer(run).fit()
        if any(len(episodes) for episodes in run.eval_episodes):
            remote = ray.remote(evaluate_run).options(num_cpus=1, num_gpus=1 if run.use_gpu else 0)
            errors = ray.get(remote.remote(run))
            print(error_table(errors["trained"], errors.get("untrained")), flush=True)
    except (TrainingFailedError, RayError, ValueError, OSError) as error:
        print(f"error: {root_cause(error)}", file=sys.stderr)
        return 1
    finally:
        if started_ray:
            ray.shutdown()
    print(f"Policy       {run.output_dir / 'pretrained_model'}")
    return 0


def prepare_folder(run: Run) -> None:
    """Make the run's folder, or refuse one that holds another run. The demo's own folder is simply started over."""
    folder, config = run.output_dir, run.config
    if folder.exists() and not config.resume:
        is_demo = config.preset == "demo" and folder == Path(PRESETS["demo"]["output_dir"]).absolute()
        if not is_demo:
            raise FileExistsError(
                f"--output_dir={folder} exists: --resume goes on with the run it holds; otherwise choose another"
            )
        shutil.rmtree(folder)
    newest = latest_checkpoint(run.checkpoints_dir)
    if newest is not None:
        check_same_run(run, load_progress(newest))
    weights = (run.policy_folder or folder) / "model.safetensors"
    # A checkpoint is what trains and Adam's two moments, fp32; it is written, then copied to where Ray keeps it.
    checkpoint_bytes = 3 * 4 * run.parameters.trainable if run.parameters else 0
    export_bytes = weights.stat().st_size if weights.is_file() else 0
    require_space(folder, 2 * checkpoint_bytes + export_bytes, "a checkpoint and the trained policy")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG_NAME, config.to_json())


def start_ray(run: Run) -> None:
    """Join the cluster that RAY_ADDRESS or a head node on this machine names, or start one here."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    if not ray.is_initialized():
        # What workers have to say goes to the run's own log, which `follow_progress` shows.
        ray.init(logging_level=logging.WARNING, log_to_driver=False, include_dashboard=False)
    scaling, found = run.config.scaling, ray.cluster_resources()
    wanted = {"CPU": scaling.num_workers * scaling.cpus_per_worker + scaling.cpus_per_read_task}
    if run.use_gpu:
        wanted["GPU"] = scaling.num_workers
    lacking = [f"{n:g} {kind}s, {found.get(kind, 0):g} found" for kind, n in wanted.items() if found.get(kind, 0) < n]
    if lacking:
        # Ray would wait for them without a word.
        raise ValueError(
            f"the cluster is too small for {scaling.num_workers} workers and one read task: needs "
            f"{'; '.join(lacking)}; lower --scaling.num_workers, --scaling.cpus_per_worker or "
            "--scaling.cpus_per_read_task, or add nodes first"
        )


def make_trainer(
    run: Run,
    loop: Callable[[dict[str, Any]], None] = train_loop_per_worker,
    data: TrainingData | None = None,
    **loop_config: Any,
) -> TorchTrainer:
    """The worker group and the data that it pulls. `loop` runs in every worker, with `loop_config` and the run."""
    scaling = run.config.scaling
    resources = {"CPU": scaling.cpus_per_worker, **({"GPU": 1.0} if run.use_gpu else {})}
    return TorchTrainer(
        loop,
        train_loop_config={"run": ray.put(run), **loop_config},  # a reference: the controller need not open it
        datasets={"train": data or build_dataset(run)},
        # The plan's order is kept all the way: batches repeat exactly, and a position says which rows are done.
        dataset_config=ray.train.DataConfig(execution_options=ray.data.ExecutionOptions(preserve_order=True)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=run.use_gpu,
            resources_per_worker=resources,
            accelerator_type=scaling.accelerator_type,
        ),
        run_config=ray.train.RunConfig(
            name=run.checkpoints_dir.name,
            storage_path=str(run.output_dir),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=run.config.keep_checkpoints),
            failure_config=ray.train.FailureConfig(max_failures=scaling.max_failures),
        ),
    )


def root_cause(error: BaseException) -> str:
    """The message of what went wrong first, without Ray's layers around it."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        # A rank that fails leaves the others in a collective; what they then say is not the cause.
        error = min(failures.values(), key=lambda e: "collective" in str(e).lower() or "gloo" in str(e).lower())
    while isinstance(error, RayError | TrainingFailedError):
        inner = getattr(error, "cause", None) or getattr(error, "controller_failure", None) or error.__cause__
        if not isinstance(inner, BaseException) or inner is error:
            break
        error = inner
    # Ray Data 2.60 writes how often it tried, and how to change that, into the message.
    message = re.split(r"\nFailed to .+ after \d+/\d+ attempts", str(error))[0]
    # Ours are sentences for the user; of the others the type may be all there is.
    return message if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {message}"


def print_help() -> None:
    with contextlib.suppress(SystemExit):
        draccus.parse(Config, args=["--help"])


if __name__ == "__main__":
    # Ray ships functions of `__main__` by value and those of modules by reference: run the module.
    import vla

    sys.exit(vla.main())
