"""What a training process does around its steps: the model and optimizer it starts from, the noise each step needs, and
what it leaves behind. `vla.train_loop_per_worker` is the loop that calls these.
"""

from __future__ import annotations

import datetime
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray.train
import ray.train.collective
import torch
import torch.distributed as dist
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_LANGUAGE_TOKENS
from ray.train import CheckpointUploadMode
from ray.train.torch import get_device
from torch import Tensor

from util import Batch, Draws, TrainableOptimizer, enable_gpu_perf_flags, peak_flops, take_optimizer
from vla_finetuning.config import ENVIRONMENT_NAME, Attention, TrainMode
from vla_finetuning.data.columns import ROW_COLUMNS
from vla_finetuning.data.videos import Frames
from vla_finetuning.files import write_json
from vla_finetuning.policies.attention import choose_kernel
from vla_finetuning.policies.augment import augmentation_of
from vla_finetuning.policies.compiling import Compiler, why_not
from vla_finetuning.policies.counting import tokens_per_sample
from vla_finetuning.policies.loading import load_policy, new_policy, save_adapters, save_pretrained
from vla_finetuning.policies.lora import add_adapters, merge
from vla_finetuning.policies.pi05 import PolicyLoss, check_batch, sample_noise_and_time
from vla_finetuning.policies.processors import DeviceHalf, Prepare
from vla_finetuning.policies.prompts import cut_prompts
from vla_finetuning.policies.trainable import autocast_of, cast_frozen, choose_trainable, leave_off_unused
from vla_finetuning.run.checkpoint import (
    AVERAGE,
    OPTIMIZER,
    TRAINABLE,
    Files,
    Piece,
    Progress,
    Staging,
    best_checkpoint,
    check_resumable,
    checkpoint_names,
    commit,
    discard,
    latest_checkpoint,
    load_checkpoint,
    load_progress,
    write_pieces,
)
from vla_finetuning.run.folder import attempts, prune_checkpoints, start_attempt
from vla_finetuning.run.plan import Run
from vla_finetuning.run.progress import RowsLog, log_to
from vla_finetuning.run.record import record_attention
from vla_finetuning.run.row_weights import of_batch
from vla_finetuning.training.parallel import copies_on, first_copy, is_part, nodes_of_ranks, part
from vla_finetuning.training.stream import Columns, Dealt, Placed

logger = logging.getLogger(__name__)
# With less time than this, a checkpoint of the little that was trained meanwhile would hardly be whole in time.
SHORTEST_NOTICE_S = 10.0

# ---- what a run starts from ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """A start of the worker group, as one of its processes sees it."""

    rank: int
    world: int
    device: torch.device
    number: int  # how many starts there were before
    progress: Progress  # how far the run is
    checkpoint: Path | None  # the newest sound one, which says so; None where there is none yet


def begin(run: Run) -> Attempt:
    """Log to the run's folder, set PyTorch up, and find where the run goes on. All ranks must ask."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    log_to(run.output_dir)
    enable_gpu_perf_flags(run.config.train.deterministic)
    progress, checkpoint = saved_progress(run)
    # Rank 0 counts for all: the others need not see its files.
    number = ray.train.collective.broadcast_from_rank_zero(
        start_attempt(run.output_dir, progress.step, world) if rank == 0 else None
    )
    return Attempt(rank, world, get_device(), number, progress, checkpoint)


def build_model(run: Run, device: torch.device) -> tuple[PolicyLoss, torch.dtype | None]:
    """The policy with its loss on `device`, what trains chosen; and the autocast dtype (None: fp32 throughout).

    Of PI0.5 without what training never uses: `export` has it from the base, which it reads anew.
    """
    policy, train = start_policy(run), run.config.train
    choose_trainable(policy, cast(TrainMode, train.mode), run.config.peft, run.config.seed)
    leave_off_unused(policy)
    autocast = autocast_of(train.precision, device)
    if autocast is not None:
        cast_frozen(policy, autocast)
    preprocessor, _ = run.processors()
    # Its device half: uint8 images become what the policy expects, on the device.
    augmentation = augmentation_of(run.config, list(run.policy_config.image_features))
    images = DeviceHalf(preprocessor, run.policy_config, augmentation)
    compiler = None
    if train.compile:
        if reason := why_not(device):
            logger.warning("--train.compile does nothing: %s", reason)
        else:
            compiler = Compiler()
    loss = PolicyLoss(
        policy,
        images=images,
        mask_padding=train.mask_padding,
        attention=cast(Attention, train.attention),
        checkpointing=train.activation_checkpointing,
        compile=compiler,
    ).to(device)
    loss.train()
    return loss, autocast


def check_attention(run: Run, loss: PolicyLoss, autocast: torch.dtype | None, attempt: Attempt) -> None:
    """Have PI0.5's loss use a kernel that is right on this device, at the shapes of the run, and write down which."""
    if not isinstance(run.policy_config, PI05Config):
        return
    shapes = loss.attentions(len(run.match.camera_keys), run.prompts)
    choice = choose_kernel(loss.attention, shapes, attempt.device, autocast or torch.float32)
    loss.attention = choice.kernel
    if attempt.rank == 0:
        record_attention(run.output_dir, asdict(choice))


def copies(run: Run, device: torch.device) -> list[list[int]]:
    """For hsdp, the ranks that hold each copy of the model together. All ranks must ask.

    Raises:
        ValueError: workers are not on nodes as --scaling.shard_workers needs them.
    """
    context = ray.train.get_context()
    nodes = nodes_of_ranks(context.get_node_rank(), context.get_world_size(), device)
    return copies_on(nodes, run.config.scaling.shard_workers)


def start_policy(run: Run) -> PreTrainedPolicy:
    """The policy as the run starts from it, on the CPU: pretrained, or seeded random weights if that was asked for."""
    if run.policy_folder is not None:
        return load_policy(run.policy_folder, run.policy_config, trusted=run.config.policy_trust_remote_code)
    torch.manual_seed(run.config.seed)
    return new_policy(run.policy_config, trusted=run.config.policy_trust_remote_code)


def prepare_of(run: Run) -> Callable[[Columns], Columns]:
    """The CPU half of the policy's preprocessor, for the tasks that read rows."""
    preprocessor, _ = run.processors()
    prepare = Prepare(
        preprocessor,
        run.match.camera_keys,
        run.config.rename_map,
        run.policy_config,
        trusted=run.config.policy_trust_remote_code,
    )
    return Placed(prepare) if run.config.augments else prepare


def build_optimizer(run: Run, loss: PolicyLoss) -> TrainableOptimizer:
    """The policy's own optimizer (LeRobot's preset) and learning rate, with what the run's options replace."""
    recipe, policy = run.recipe, loss.policy
    return take_optimizer(
        policy,
        recipe.build(policy),
        schedule=recipe.schedule(run.steps),
        clip_norm=recipe.clip_norm,
        decay=run.config.ema.decay if run.config.ema.enable else None,
    )


def saved_progress(run: Run) -> tuple[Progress, Path | None]:
    """How far the run is, and the newest sound checkpoint, which says so; None where there is none yet.

    Rank 0 looks which one that is: where the folder is on a network, the others may see it late.
    """
    is_first = ray.train.get_context().get_world_rank() == 0
    newest = ray.train.collective.broadcast_from_rank_zero(latest_checkpoint(run.checkpoints_dir) if is_first else None)
    if newest is None:
        return run.start, None
    progress = load_progress(newest)
    check_resumable(progress, run.start)
    return progress, newest


# ---- what a step needs ---------------------------------------------------------------------------------------------


def collate_cut(
    run: Run,
    collate: Callable[[Columns], Batch],
    batch: Columns,
    weights: np.ndarray | None = None,
    frames: Frames | None = None,
) -> Batch:
    """Collate a micro-batch with PI0.5's prompts cut to what the longest needs; on the host, in Ray Data's thread.

    `weights`: of all frames, by which the rows' losses are weighed (`run.row_weights`); rows that could not be read
    weigh nothing. `frames`: fills in those that the batch names.
    """
    if frames is not None:
        batch = frames(batch)
    if weights is not None:
        weight = weights[batch["index"]] * batch.get("row_weight", np.float32(1))
        batch = {**batch, "row_weight": of_batch(weight, run.config.sample_weighting.epsilon)}
    return collate(cut_prompts(batch, run.prompts) if run.prompts else batch)


class Work:
    """What this rank's micro-batches amount to, by their shapes, which the host knows without asking the device."""

    def __init__(self, run: Run):
        self._run = run
        self._tokens = self._flops = 0.0

    def add(self, batch: Batch) -> None:
        if self._run.prompts:
            rows, prompt = batch[OBS_LANGUAGE_TOKENS].shape
            config, cameras = self._run.policy_config, len(self._run.match.camera_keys)
            tokens = tokens_per_sample(config, cameras, self._run.config.train.noise_draws, prompt)
            self._tokens += rows * cast(int, tokens)
            self._flops += rows * self._run.flops_by_prompt[prompt]

    def take(self) -> tuple[float, float]:
        """Positions and FLOPs since this was last asked; zeros where the policy is not known."""
        taken, self._tokens, self._flops = (self._tokens, self._flops), 0.0, 0.0
        return taken


def policy_batches(
    run: Run,
    batches: Iterable[Batch],
    dealt: Dealt,
    rows_log: RowsLog | None = None,
    work: Work | None = None,
) -> Iterator[Batch]:
    """What the policy sees: no row columns, which would cost a copy to the GPU. Checks the run's first batch.

    `rows_log` is told the rows of each batch as it is taken, and `work` its shapes.
    """
    for number, batch in enumerate(batches):
        if rows_log is not None:
            rows = {key: batch[key].numpy() for key in ROW_COLUMNS if key in batch}
            skipped = rows.get("is_skipped", np.zeros(len(rows["index"]), bool))
            epochs = run.epochs_of(rows["position"])
            rows_log.write(dealt.step_of(number) + 1, epochs, rows["dataset_index"], rows["index"], skipped)
        inputs = {key: value for key, value in batch.items() if key not in ROW_COLUMNS}
        if number == 0:
            check_batch(inputs, run.policy_config)
        if work is not None:
            work.add(inputs)
        yield inputs


def noise_for(run: Run, step: int, dealt: Dealt, device: torch.device) -> Callable[[int], Draws]:
    """Noise and time for this rank's rows of each micro-step.

    Drawn for the whole global batch and indexed by a row's place in it, so the trajectory of a run does not depend on
    how many workers share its batch. A row's draws follow each other.
    """
    config, per_row = run.config, run.config.train.noise_draws
    rows = config.global_batch_size * per_row
    noise, time = sample_noise_and_time(run.policy_config, rows, config.seed, step, device)
    if noise is None or time is None:
        # Other policies draw their own, from the default generators.
        torch.manual_seed(config.seed * 1_000_003 + step * dealt.world + dealt.rank)
        return lambda micro: (None, None)

    def draws(nth: int) -> Draws:
        # Block by block: indexing with a list of rows would have the host wait for the device.
        starts = dealt.rows_of_step(step, nth)[:: dealt.block_rows].tolist()
        blocks = [slice(start * per_row, (start + dealt.block_rows) * per_row) for start in starts]
        return torch.cat([noise[block] for block in blocks]), torch.cat([time[block] for block in blocks])

    return draws


def mfu(metrics: Mapping[str, Any], world: int, device: torch.device) -> float | None:
    """Model FLOP utilisation of a log window; None where the policy or the hardware is not known."""
    flops_per_s, peak = metrics["flops_per_s"], peak_flops(device)
    return flops_per_s / (world * peak) if flops_per_s and peak else None


def check_finite(run: Run, metrics: dict, nonfinite: int, done: int) -> None:
    """End a run that keeps producing losses or gradients that are not finite, and say what it was trained on.

    Args:
        metrics: of the window of steps that ends with the `done`-th.
        nonfinite: such steps since the worker group was started, this window's among them.
    """
    if nonfinite <= run.config.train.max_nonfinite or not metrics["nonfinite_steps"]:
        return
    steps = metrics["samples"] // run.config.global_batch_size
    raise FloatingPointError(
        f"{nonfinite} steps had a loss or gradient that is not finite, {metrics['nonfinite_steps']} of them among the "
        f"last {steps} (more than --train.max_nonfinite={run.config.train.max_nonfinite}; they were skipped): lower "
        f"--lr, or look for bad values in the state and action columns of what these were trained on, by `index`: "
        f"{_rows_in_words(run, done - steps, done)}"
    )


def what_batch(run: Run, dealt: Dealt, number: int) -> str:
    """A rank's `number`-th micro-batch since its start, in words: its step, and the rows of all ranks in that step."""
    step = dealt.step_of(number)
    return f"a batch of step {step + 1} on rank {dealt.rank}; rows by `index`: {_rows_in_words(run, step, step + 1)}"


def _rows_in_words(run: Run, first: int, last: int) -> str:
    return "; ".join(
        f"{root}: " + ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
        for root, runs in run.rows_of_steps(first, last).items()
    )


# ---- what a run leaves behind -------------------------------------------------------------------------------------


class CheckpointWriter:
    """Takes checkpoints while training goes on: the step waits for a copy in host memory, not for the disk.

    Rank 0, or where parameters are in parts every rank of the first copy, copies what it holds; a thread of Ray Train's
    then writes that into the run's folder. When all have, rank 0 has the checkpoint appear there, and it is reported.
    One is in flight at a time: the next one waits for it, so host memory holds one copy (12 bytes for each parameter
    that trains), in memory made once. All ranks make their writers together.

    Args:
        attempt: number of this start of the worker group. A writer whose attempt is over refuses to write.
    """

    def __init__(self, run: Run, optimizer: TrainableOptimizer, rank: int, attempt: int):
        self._run, self._optimizer, self._rank, self._attempt = run, optimizer, rank, attempt
        self._writers = max((first_copy(param) for param in optimizer.params), key=len, default=[0])
        self._group = None
        if len(self._writers) > 1:
            # Of its own: threads must not disturb each other's collectives. On the host, as the files are.
            timeout = datetime.timedelta(seconds=run.config.scaling.collective_timeout_s)
            self._group = dist.new_group(self._writers, backend="gloo", timeout=timeout)
        self._staging: Staging | None = None
        if self._rank in self._writers:
            mine = [self._mine(tensors) for tensors in self._state().values()]
            self._staging = Staging({name: part(tensor)[0] for tensors in mine for name, tensor in tensors.items()})
        self._idle = threading.Event()
        self._idle.set()
        self._last = time.monotonic()
        self._ends = math.inf
        self._paused_s = 0.0

    def due(self) -> bool:
        """Whether one is, by this rank's clock.

        It is when --save_every_s has gone by since the last one. And when a node is about to be taken away, whenever
        half of the time has gone that was left when the last one was taken: what is trained after that is lost.
        """
        every_s, now = self._run.config.save_every_s, time.monotonic()
        left = self._ends - self._last
        return (every_s is not None and now - self._last >= every_s) or (
            left > SHORTEST_NOTICE_S and now - self._last >= left / 2
        )

    def ends_at(self, deadline_ms: int | None) -> None:
        """A node is taken away then (UNIX time, as of `ray.train.get_preemption_info`), if that is known."""
        if deadline_ms is not None:
            self._ends = time.monotonic() + deadline_ms / 1000 - time.time()

    def paused_s(self) -> float:
        """Seconds that training has waited for checkpoints since this was last asked."""
        paused_s, self._paused_s = self._paused_s, 0.0
        return paused_s

    def save(self, progress: Progress) -> None:
        """Take a checkpoint of this moment. Every rank must call it."""
        started = time.monotonic()
        name = f"step_{progress.step:08d}"
        if self._rank not in self._writers:
            ray.train.report({"step": progress.step}, checkpoint_dir_name=name)
        else:
            self.wait()
            self._idle.clear()
            taken = {kind: self._copied(tensors) for kind, tensors in self._state().items()}
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ray.train.report(
                {"step": progress.step},
                # Not what is uploaded: `_write` makes that from memory, straight in its place.
                checkpoint=ray.train.Checkpoint.from_directory(self._run.checkpoints_dir),
                checkpoint_dir_name=name,
                checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
                checkpoint_upload_fn=partial(self._write, taken, progress),
                delete_local_checkpoint_after_upload=False,
            )
        self._last = time.monotonic()
        self._paused_s += self._last - started

    def wait(self) -> None:
        """Until nothing is being written. An error while writing ends the attempt by way of Ray Train."""
        self._idle.wait()

    def close(self) -> None:
        """Wait until nothing is being written, and give the memory back."""
        self.wait()
        if self._staging is not None:
            self._staging.close()

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, by kind and name, on the device."""
        own = self._optimizer
        kinds = {TRAINABLE: own.named(), OPTIMIZER: own.state(), AVERAGE: own.named_average()}
        return {kind: tensors for kind, tensors in kinds.items() if tensors}

    def _mine(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that this rank writes: of parts its own, of the rest rank 0's."""
        return {name: tensor for name, tensor in tensors.items() if self._rank == 0 or is_part(tensor)}

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """Copies in host memory, where further steps do not change them."""
        assert self._staging is not None
        pieces = {}
        for name, tensor in self._mine(tensors).items():
            held, offsets = part(tensor)
            pieces[name] = Piece(self._staging.copied(name, held), offsets)
        return pieces

    def _write(
        self, taken: dict[str, dict[str, Piece]], progress: Progress, _: ray.train.Checkpoint, name: str
    ) -> ray.train.Checkpoint:
        run, folder = self._run, self._run.checkpoints_dir / name
        try:
            files = self._write_pieces(folder, taken)
            if self._rank == 0:
                commit(folder, progress, files)
                prune_checkpoints(run.config, run.steps)
        except OSError:
            if self._rank == 0:
                discard(folder)
            raise
        finally:
            self._idle.set()
        return ray.train.Checkpoint.from_directory(folder)

    def _write_pieces(self, folder: Path, taken: dict[str, dict[str, Piece]]) -> Files:
        """Write this rank's pieces. Returns this rank's files; on rank 0 all ranks', when all have written theirs."""
        written: Files | Exception
        try:
            if len(attempts(self._run.output_dir)) != self._attempt + 1:
                raise RuntimeError(
                    f"{self._run.output_dir}: another process goes on with this run; {folder.name} is not written"
                )
            written = write_pieces(folder, taken, self._writers.index(self._rank), len(self._writers))
        except Exception as error:
            written = error
        everyones: list[Any] = [written]
        if self._group is not None:
            everyones = [None] * len(self._writers) if self._rank == 0 else []
            dist.gather_object(written, everyones or None, group=self._group)
        for of_rank in [written, *everyones]:
            if isinstance(of_rank, Exception):
                raise of_rank
        return {name: file for files in everyones for name, file in files.items()}


def policy_at(run: Run, checkpoint: Path) -> PreTrainedPolicy:
    """The policy of a checkpoint, on the CPU, as it is exported and as it plays: the base with what trained put in.

    Runs in any process. The base is read anew, because what is frozen may have been rounded to bf16 for training. With
    --ema.enable it is the average of what trained, unless --ema.export=false. Adapters are merged into it.

    Raises:
        ValueError, OSError: the checkpoint cannot be read, or is of another policy.
    """
    policy, adapted = _trained_policy(run, checkpoint)
    if adapted is not None:
        merge(adapted)
    return policy


def _trained_policy(run: Run, checkpoint: Path) -> tuple[PreTrainedPolicy, Any]:
    """`policy_at`, with the run's adapters still beside its weights; and PEFT's model of it, None without any."""
    policy, peft = start_policy(run), run.config.peft
    adapted = add_adapters(policy, peft, run.config.seed) if peft.enabled else None
    tensors = policy.state_dict()

    def held(kind: str, prefix: str = "") -> dict[str, Tensor]:
        names = checkpoint_names(checkpoint, kind)
        if foreign := sorted(name for name in names if name.removeprefix(prefix) not in tensors):
            raise ValueError(f"checkpoint {checkpoint}: it is of another policy, and holds {foreign[:5]}")
        return {name: tensors[name.removeprefix(prefix)] for name in names}

    load_checkpoint(checkpoint, held(TRAINABLE))
    if run.config.takes_average:  # of parameters; buffers are as they were
        load_checkpoint(checkpoint, None, average=held(AVERAGE, "average."))
    return policy, adapted


def export(run: Run) -> None:
    """`OUTPUT_DIR/pretrained_model`, as LeRobot loads it: the base with what trained put in, processors included.

    Of the checkpoint that `exported_checkpoint` names, where all of what trained is, however it was spread. Adapters
    are merged into the weights beside them, after they are written to `OUTPUT_DIR/adapter` if that was asked for.

    Raises:
        RuntimeError: the run's last checkpoint was not written.
    """
    policy, adapted = _trained_policy(run, exported_checkpoint(run))
    pre, post = run.processors()
    if adapted is not None:
        if run.config.peft.export == "adapter":
            save_adapters(adapted, run.base["path"], run.base["revision"], pre, post, run.output_dir / "adapter")
        merge(adapted)
    folder = run.output_dir / "pretrained_model"
    save_pretrained(policy, pre, post, folder)
    if drawn := run.drawn:
        # Whoever evaluates it in the simulator is to show it the same pictures.
        write_json(folder / ENVIRONMENT_NAME, {"drawn": drawn})


def exported_checkpoint(run: Run) -> Path:
    """What a finished run exports: its last checkpoint, or the best one if that was asked for (--export best).

    Raises:
        RuntimeError: the run's last checkpoint was not written.
    """
    newest = latest_checkpoint(run.checkpoints_dir)
    if newest is None or load_progress(newest).step != run.steps:
        raise RuntimeError(f"{run.checkpoints_dir}: no checkpoint of the last step, {run.steps}: nothing to export")
    return (best_checkpoint(run.checkpoints_dir) if run.config.export == "best" else None) or newest
