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
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import draccus
import ray
import ray.train
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from ray.exceptions import RayError
from ray.train import TrainingFailedError
from ray.train.torch import TorchTrainer, get_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint import (
    Checkpoint,
    Progress,
    check_resumable,
    latest_checkpoint,
    load_checkpoint,
    load_progress,
    require_space,
    save_checkpoint,
    write_json,
)
from config import CONFIG_NAME, PRESETS, Config, TrainMode, parse_args
from evaluate import error_table, evaluate_run
from pi05_loss import PolicyLoss, cast_frozen, check_batch, choose_trainable, sample_noise_and_time
from policy import load_policy, new_policy, save_pretrained
from processors import DeviceHalf, Prepare, make_processors
from progress import MetricsLog, follow_progress, log_to
from run_plan import Run, describe, resolve, with_stats
from training_data import Dealt, Deferred, TrainingData, stream_batches
from util import (
    ROW_COLUMNS,
    Batch,
    Draws,
    NumpyToTorchCollate,
    TimedIterator,
    TrainableOptimizer,
    Window,
    cuda_prefetcher,
    enable_gpu_perf_flags,
    make_trainable_optimizer,
    peak_flops,
    train_step,
    warmup_cosine,
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
    """Train from the newest checkpoint to the end of the run. Runs in every training process."""
    run = ray.get(loop_config["run"])
    config = run.config
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    device = get_device()
    log_to(run.output_dir)
    enable_gpu_perf_flags(config.train.deterministic)

    loss, autocast = build_model(run, device)
    optimizer = build_optimizer(run, loss)
    progress = restore(run, optimizer)
    model: nn.Module = loss
    if world > 1:
        # Nothing that trains is ever without a gradient (pi05_loss.choose_trainable), so DDP need not search.
        model = DistributedDataParallel(
            loss,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # constants
        )
    log = None
    if rank == 0:
        per_sample = {"mfu": flops_share(run, world, device), **run.decoded}
        log = MetricsLog(run.output_dir, config.global_batch_size, run.rows_per_epoch, progress.step, per_sample)

    shard = ray.train.get_dataset_shard("train")
    dealt = Dealt(config.batch_size, run.block_rows, rank, world)
    host_batches = stream_batches(shard, dealt, progress.rows, run.last_row, NumpyToTorchCollate(run.use_gpu))
    batches = TimedIterator(policy_batches(run, cuda_prefetcher(host_batches, device)))
    gc.disable()  # collected at log steps: in between it would stall the host at random
    window, waited_before = Window(device), 0.0
    for step in range(progress.step, run.steps):
        result = train_step(
            model,
            optimizer,
            batches,
            step=step,
            grad_accum=config.grad_accum,
            draws=noise_for(run, step, dealt, device),
            autocast=autocast,
            device=device,
        )
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
            progress = replace(progress, step=done, rows=done * config.global_batch_size)
            report_checkpoint(run, optimizer, progress, rank)
    gc.enable()
    if rank == 0:
        export(run, optimizer)


def build_model(run: Run, device: torch.device) -> tuple[PolicyLoss, torch.dtype | None]:
    """The policy with its loss on `device`, what trains chosen; and the autocast dtype (None: fp32 throughout)."""
    policy = start_policy(run)
    choose_trainable(policy, cast(TrainMode, run.config.train.mode))
    wanted = run.config.train.precision
    bf16 = wanted == "bf16" or (wanted == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())
    if bf16:
        cast_frozen(policy, torch.bfloat16)
    preprocessor, _ = make_processors(run.policy_folder, run.policy_config, run.stats, run.config.rename_map)
    # Its device half: uint8 images become what the policy expects, on the device.
    images = DeviceHalf(preprocessor, run.policy_config)
    loss = PolicyLoss(policy, images=images, mask_padding=run.config.train.mask_padding).to(device)
    loss.train()
    return loss, torch.bfloat16 if bf16 else None


def start_policy(run: Run) -> PreTrainedPolicy:
    """The policy as the run starts from it, on the CPU: pretrained, or seeded random weights if that was asked for."""
    if run.policy_folder is not None:
        return load_policy(run.policy_folder, run.policy_config)
    torch.manual_seed(run.config.seed)
    return new_policy(run.policy_config)


def build_optimizer(run: Run, loss: PolicyLoss) -> TrainableOptimizer:
    """AdamW with the policy's own constants (LeRobot's preset) and the run's learning rate."""
    config, preset = run.config, run.policy_config.get_optimizer_preset()
    peak = config.lr or preset.lr
    return make_trainable_optimizer(
        loss.policy,
        schedule=warmup_cosine(peak, peak * config.final_lr_frac, round(config.warmup_frac * run.steps), run.steps),
        betas=preset.betas,
        eps=preset.eps,
        weight_decay=preset.weight_decay,
        clip_norm=config.train.clip_norm or preset.grad_clip_norm,
    )


def restore(run: Run, optimizer: TrainableOptimizer) -> Progress:
    """Load the newest sound checkpoint into the model and optimizer; a fresh start when there is none."""
    newest = latest_checkpoint(run.checkpoints_dir)
    if newest is None:
        return Progress(0, 0, run.stream, run.base, run.config.train.mode, run.config.global_batch_size)
    saved = load_checkpoint(newest)
    check_same_run(run, saved.progress)
    params = optimizer.named()
    if params.keys() != saved.trainable.keys():
        odd = sorted(params.keys() ^ saved.trainable.keys())[:5]
        raise ValueError(f"checkpoint {newest} holds other parameters than what trains now, e.g. {odd}")
    with torch.no_grad():
        for name, value in saved.trainable.items():
            params[name].copy_(value)
    optimizer.load_state(saved.optimizer)
    return saved.progress


def check_same_run(run: Run, saved: Progress) -> None:
    """Refuse to go on from a checkpoint of other data, another base policy or another global batch."""
    check_resumable(saved, run.stream, run.base, run.config.train.mode, run.config.global_batch_size)


def policy_batches(run: Run, batches: Iterable[Batch]) -> Iterator[Batch]:
    """What the policy sees: no row columns, which would cost a copy to the GPU. Checks the run's first batch."""
    for number, batch in enumerate(batches):
        inputs = {key: value for key, value in batch.items() if key not in ROW_COLUMNS}
        if number == 0:
            check_batch(inputs, run.policy_config)
        yield inputs


def noise_for(run: Run, step: int, dealt: Dealt, device: torch.device) -> Callable[[int], Draws]:
    """Noise and time for this rank's rows of each micro-step.

    Drawn for the whole global batch and indexed by a row's place in it, so the trajectory of a run does not depend on
    how many workers share its batch.
    """
    config = run.config
    noise, time = sample_noise_and_time(run.policy_config, config.global_batch_size, config.seed, step, device)
    if noise is None or time is None:
        # Other policies draw their own, from the default generators.
        torch.manual_seed(config.seed * 1_000_003 + step * dealt.world + dealt.rank)
        return lambda micro: (None, None)

    def draws(micro: int) -> Draws:
        blocks = [slice(a, a + dealt.block_rows) for a in dealt.block_starts(micro).tolist()]
        return torch.cat([noise[rows] for rows in blocks]), torch.cat([time[rows] for rows in blocks])

    return draws


def flops_share(run: Run, world: int, device: torch.device) -> float | None:
    """Model FLOP utilisation per sample/s of the whole run; None where the policy or the hardware is not known."""
    peak = peak_flops(device)
    return run.flops_per_sample / (world * peak) if run.flops_per_sample and peak else None


def check_finite(run: Run, metrics: dict) -> None:
    """End a run that keeps producing losses or gradients that are not finite."""
    if metrics["nonfinite_steps"] > run.config.train.max_nonfinite:
        raise RuntimeError(
            f"{metrics['nonfinite_steps']} of the last {run.config.log_freq} steps had a loss or gradient that is not "
            f"finite (more than --train.max_nonfinite={run.config.train.max_nonfinite}; they were skipped): lower "
            "--lr, or look for bad values in the dataset's state and action columns"
        )


# ---- what a run leaves behind -------------------------------------------------------------------------------------


def report_checkpoint(run: Run, optimizer: TrainableOptimizer, progress: Progress, rank: int) -> None:
    """Rank 0 writes a checkpoint and hands it to Ray Train, which makes it visible and deletes old ones."""
    name = f"step_{progress.step:08d}"
    if rank != 0:
        ray.train.report({"step": progress.step}, checkpoint_dir_name=name)
        return
    run.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=run.output_dir) as scratch:
        folder = Path(scratch) / name
        save_checkpoint(folder, Checkpoint(progress, optimizer.named(), optimizer.state()))
        ray.train.report(
            {"step": progress.step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_dir_name=name,
        )


def export(run: Run, optimizer: TrainableOptimizer) -> None:
    """`OUTPUT_DIR/pretrained_model`, as LeRobot loads it: the base with what trained put in, processors included.

    The base is read anew, because what is frozen may have been rounded to bf16 for training.
    """
    policy = start_policy(run)
    params = dict(policy.named_parameters())
    with torch.no_grad():
        for name, value in optimizer.named().items():
            params[name].copy_(value)
    pre, post = make_processors(run.policy_folder, run.policy_config, run.stats, run.config.rename_map)
    save_pretrained(policy, pre, post, run.output_dir / "pretrained_model")


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


def make_trainer(run: Run) -> TorchTrainer:
    scaling = run.config.scaling
    resources = {"CPU": scaling.cpus_per_worker, **({"GPU": 1.0} if run.use_gpu else {})}
    return TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"run": ray.put(run)},  # a reference: the controller need not open it
        datasets={"train": build_dataset(run)},
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
