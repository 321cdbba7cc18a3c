"""Every number in metrics.jsonl against torch.nn and numpy on the batches of a run; a key without one fails.

Losses by row come from `PolicyLoss`, FLOPs and rates of bytes from the plan: tests/policies and tests/data check these.
"""

import json

import numpy as np
import pytest
import torch
import yaml

import util
from tests import in_process
from tests.datasets import make_dataset
from tests.tiny import make_base
from util import NumpyToTorchCollate
from vla_finetuning.columns import ROW_COLUMNS
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.flow import sample_noise_and_time
from vla_finetuning.training import callbacks, feed, held_out
from vla_finetuning.training.feed import Collate, input_transforms
from vla_finetuning.training.model import build_model, make_prepare
from vla_finetuning.training.worker import Worker

BATCH, MICROS, STEPS, DRAWS = 4, 2, 5, 2
WINDOWS = ((0, 1), (2, 3), (4,))  # --log_freq 2; a held-out loss at the end of the last two
NONFINITE = 2
PEAK_LR, PEAK_FLOPS, WAIT_S, FORWARD_S, PAUSE_S, SPILLED = 1e-2, 1e9, 0.25, 0.125, 3.5, 7
SUCCESS = {"step": 1, "episodes": 4, "successes": 3, "interval": [0.3, 0.95]}
SUCCESS |= {"successes_at_end": 1, "interval_at_end": [0.05, 0.7]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Resolve a run of two robots, each with a held-out episode."""
    folder = tmp_path_factory.mktemp("metrics")
    make_dataset(folder / "gantry", episodes=(6, 5, 4), state_dim=6, action_dim=5)
    camera = {"observation.images.top": (48, 64)}
    make_dataset(folder / "arm", episodes=(5, 6, 3), cameras=camera, state_dim=4, action_dim=3, seed=1)
    base = make_base(folder / "base", load_metadata(folder / "gantry"), chunk_size=4, **in_process.TINY)
    members = [{"root": str(folder / name), "robot": name} for name in ("gantry", "arm")]
    (folder / "mix.yaml").write_text(yaml.safe_dump({"members": members}))
    options = {
        "dataset.root": None,
        "dataset.mixture": f"@{folder / 'mix.yaml'}",
        "dataset.missing_cameras": "mask",
        "dataset.eval_split": 0.3,
        "dataset.on_error": "skip",
        "batch_size": BATCH,
        "grad_accum": MICROS,
        "train.noise_draws": DRAWS,
        "lr": PEAK_LR,
        "warmup_frac": 0.4,
        "final_lr_frac": 0.1,
    }
    return in_process.resolved((folder, None, base), steps=STEPS, log_freq=2, eval_steps=4, **options)


class RecordedShard:
    """A shard that records batches: one row of the second is unreadable, one of step NONFINITE has a NaN.

    The first batch writes an evaluation.
    """

    def __init__(self, shard, evaluations):
        self.shard, self.batches, self.evaluations = shard, [], evaluations

    def iter_torch_batches(self, *, collate_fn, **options):
        def collate(columns):
            number = len(self.batches)
            if number == 0:
                self.evaluations.write_text(json.dumps(SUCCESS) + "\n")
            if number == 1:
                columns["is_read"] = np.arange(BATCH) > 0
            if number == NONFINITE * MICROS:
                columns["action"] = np.where(np.arange(BATCH)[:, None, None] > 0, columns["action"], np.nan)
            self.batches.append(collate_fn(columns))
            return self.batches[-1]

        return self.shard.iter_torch_batches(collate_fn=collate, **options)


class Pauses(in_process.NoCheckpoints):
    def paused_s(self):
        return PAUSE_S


@pytest.fixture(scope="module")
def logged(run):
    """Return lines of metrics.jsonl and batches; time passes only in waits for batches and in forwards."""
    time = in_process.GivenTime()
    forward = PI05Loss.forward

    def slow_forward(*args, **options):
        time.spend(FORWARD_S)
        return forward(*args, **options)

    def slow_batches(host_batches, *_):
        for batch in host_batches:
            time.spend(WAIT_S)
            yield batch

    shard = RecordedShard(in_process.RunRows(run), run.job.output_dir / "evaluations.jsonl")
    worker = Worker(torch.device("cpu"), shard)
    worker.spilled_bytes = lambda: SPILLED
    run.job.output_dir.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, in_process.tasks_here():
        for module in (util, held_out):
            patch.setattr(module, "time", time)
        patch.setattr(PI05Loss, "forward", slow_forward)
        patch.setattr(feed, "with_timeout", slow_batches)
        patch.setattr(callbacks, "peak_flops", lambda device: PEAK_FLOPS)
        in_process.train(run, worker=worker, make_checkpoints=Pauses, callbacks=[callbacks.SuccessInLoop()])
    lines = [json.loads(line) for line in (run.job.output_dir / "metrics.jsonl").read_text().splitlines()]
    return lines, shard.batches


def losses_of(loss, batch, noise, time):
    inputs = {key: value for key, value in batch.items() if key not in ROW_COLUMNS}
    return loss(inputs, noise, time, per_row=True)


def held_out_losses(run, loss):
    """Return loss, flow time, robot and task of each held-out row and draw, computed row by row."""
    source = run.rows.held_out()
    noise, time = sample_noise_and_time(run.policy.config, 64 * DRAWS, run.config.seed, -1, "cpu")
    prepare, losses, robots, tasks = make_prepare(run.policy, run.rows), [], [], []
    positions = run.rows.held_out_rows(0).positions
    loss.eval()
    for number, position in enumerate(positions.tolist()):
        (rows,) = source.read_rows([position], 1)
        columns = prepare(rows)
        batch = Collate(input_transforms(run.rows, run.policy), NumpyToTorchCollate(False))(columns)
        draws = slice(number * DRAWS, (number + 1) * DRAWS)
        with torch.no_grad():
            losses.append(losses_of(loss, batch, noise[draws], time[draws]))
        robots += DRAWS * columns["robot_index"].tolist()
        tasks += DRAWS * list(rows["task"])
    loss.train()
    return torch.cat(losses).numpy(), time[: len(robots)].numpy(), np.array(robots), np.array(tasks)


def mean(values):
    return values.mean() if len(values) else None


def expected_lines(run, batches):
    """Compute the lines by a loop of forwards, backwards, clipping and AdamW."""
    loss, autocast = build_model(run.policy, torch.device("cpu"))
    assert autocast is None
    params = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    config, names = run.policy.config, [robot.name for robot in run.robots]
    optimizer = torch.optim.AdamW(params, betas=(0.9, 0.95), eps=1e-8, weight_decay=config.optimizer_weight_decay)
    patches, expected = 16, []
    for window in WINDOWS:
        step_losses, by_robot, tokens, flops, skipped = [], {name: [] for name in names}, 0, 0, 0
        for step in window:
            noise, time = sample_noise_and_time(config, BATCH * MICROS * DRAWS, run.config.seed, step, "cpu")
            micros = []
            for batch in batches[step * MICROS : (step + 1) * MICROS]:
                place = batch["position"] - step * BATCH * MICROS
                draws = (place[:, None] * DRAWS + torch.arange(DRAWS)).flatten()
                row_losses = losses_of(loss, batch, noise[draws], time[draws])
                (row_losses.mean() / MICROS).backward()
                micros.append(row_losses.mean().item())
                read = batch["is_read"].repeat_interleave(DRAWS) & row_losses.isfinite()
                robot = batch["robot_index"].repeat_interleave(DRAWS)
                for number, name in enumerate(names):
                    by_robot[name] += row_losses[read & (robot == number)].tolist()
                prompt = batch["observation.language.tokens"].shape[1]
                tokens += BATCH * (2 * patches + prompt + DRAWS * config.chunk_size)
                flops += BATCH * run.policy.flops_by_prompt[prompt]
            norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in params if parameter.grad is not None))
            # Two steps of warm-up, then the cosine of the whole run.
            cosine = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * step / STEPS))
            lr = PEAK_LR * ((1 + step) / 3 if step < 2 else cosine)
            if norm.isfinite():
                torch.nn.utils.clip_grad_norm_(params, config.optimizer_grad_clip_norm)
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
                step_losses.append(np.mean(micros))
            else:
                skipped += 1
            optimizer.zero_grad()
        done, elapsed_s = step + 1, len(window) * MICROS * (WAIT_S + FORWARD_S)
        samples_per_s = len(window) * MICROS * BATCH / elapsed_s
        line = {
            "step": done,
            "epoch": round(done * MICROS * BATCH / sum(run.rows.per_dataset), 4),
            "samples": done * MICROS * BATCH,
            "lr": lr,
            "loss": np.mean(step_losses),
            "loss_by_robot": {name: np.mean(values) for name, values in by_robot.items()},
            "grad_norm": norm.item(),
            "nonfinite_steps": skipped,
            "samples_per_s": samples_per_s,
            "step_s": elapsed_s / len(window),
            "data_wait_s": MICROS * WAIT_S,
            "frames_per_s": 2 * samples_per_s,
            "decoded_bytes_per_s": run.rows.rates["decoded_bytes_per_s"] * samples_per_s,
            "tokens_per_s": tokens / elapsed_s,
            "flops_per_s": flops / elapsed_s,
            "mfu": flops / elapsed_s / PEAK_FLOPS,
            "peak_memory_bytes": None,
            "checkpoint_pause_s": PAUSE_S,
            "spilled_bytes": SPILLED,
        }
        if not expected:
            low, high = SUCCESS["interval"]
            line |= {"success": 0.75, "success_low": low, "success_high": high, "success_step": SUCCESS["step"]}
            low, high = SUCCESS["interval_at_end"]
            line |= {"success_at_end": 0.25, "success_at_end_low": low, "success_at_end_high": high}
        if done >= 4:
            losses, times, robots, tasks = held_out_losses(run, loss)
            line |= {
                "eval_loss": losses.mean(),
                "eval_loss_by_robot": {name: mean(losses[robots == n]) for n, name in enumerate(names)},
                "eval_loss_by_task": {task: mean(losses[tasks == task]) for task in np.unique(tasks)},
                "eval_loss_by_time": [mean(losses[(times * 10).astype(int) == part]) for part in range(10)],
                "eval_s": -(-len(losses) // (BATCH * DRAWS)) * FORWARD_S,
            }
        expected.append(line)
    return expected


def test_every_number_equals_plain_computation(run, logged):
    lines, batches = logged
    assert [line["step"] for line in lines] == [2, 4, 5]
    for line, expected in zip(lines, expected_lines(run, batches), strict=True):
        assert line.keys() == expected.keys(), "a key of metrics.jsonl without a plain computation, or one too many"
        for key, value in expected.items():
            assert line[key] == pytest.approx(value, rel=2e-4), (line["step"], key)
    assert [line["nonfinite_steps"] for line in lines] == [0, 1, 0]
    assert all(line["loss_by_robot"][name] > 0 for line in lines for name in ("gantry", "arm"))
