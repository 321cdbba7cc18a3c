"""A training process around its steps, without Ray: draws, stops, notices, errors, checkpoints, compiling."""

import gc
import json
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

import vla
from tests import in_process
from tests.datasets import make_dataset
from tests.tiny import make_base
from util import UNWATCHED, TimedIterator
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.evaluation import after_training
from vla_finetuning.files import open_lines, read_lines
from vla_finetuning.policies import compiling
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.flow import sample_noise_and_time, time_without_given
from vla_finetuning.policies.trainable import UNUSED
from vla_finetuning.run.checkpoint import Progress, checkpoints
from vla_finetuning.run.folder import STOP_NAME
from vla_finetuning.training import callbacks, checkpoint_writer, model, state
from vla_finetuning.training.callbacks import Checkpoints, NonfiniteSteps
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.feed import describe_batch
from vla_finetuning.training.model import build_model, build_optimizer
from vla_finetuning.training.state import TrainState, noise_for
from vla_finetuning.training.stream import RankSchedule
from vla_finetuning.training.worker import Worker

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    roots = [make_dataset(folder / name, episodes=(9, 7), seed=seed) for seed, name in enumerate(("first", "second"))]
    meta = load_metadata(roots[0])
    return folder, roots, make_base(folder / "base", meta, **in_process.TINY)


def resolved(setting, **changes):
    folder, roots, base = setting
    options = {"dataset.statistics": "stored", "batch_size": 4, "steps": 6, "train.mode": None, **changes}
    return in_process.resolved((folder, ",".join(map(str, roots)), base), **options)


def test_draws_of_a_row_do_not_depend_on_workers_and_accumulation(setting):
    def draws_by_row(world, accum):
        run = resolved(setting, **{"train.noise_draws": 3, "scaling.num_workers": world, "grad_accum": accum})
        run = replace(run, rows=replace(run.rows, order=replace(run.rows.order, block_rows=2)))
        by_row = {}
        for rank in range(world):
            schedule = RankSchedule(run.config.batch_size, run.rows.block_rows, rank, world, run.job.batches_per_step)
            draws = noise_for(run.policy, 5, schedule, CPU)
            for micro in range(accum):
                noise, time = draws(micro)
                assert len(noise) == len(time) == 3 * run.config.batch_size
                for place, row in enumerate(schedule.rows(micro).tolist()):
                    by_row[row] = noise[3 * place : 3 * place + 3], time[3 * place : 3 * place + 3]
        return by_row, sample_noise_and_time(run.policy.config, 3 * 8, run.config.seed, 5, CPU)

    for world, accum in ((1, 2), (2, 1)):
        by_row, (noise, time) = draws_by_row(world, accum)
        assert by_row.keys() == set(range(8)) and len(time.unique()) == 24
        for row, (noise_of_row, time_of_row) in by_row.items():
            assert torch.equal(noise_of_row, noise[3 * row : 3 * row + 3])
            assert torch.equal(time_of_row, time[3 * row : 3 * row + 3])


def rows_at(run, first, last):
    """Return dataset indices by root of rows in the run's stream, as they are read."""
    by_root = {root: set() for root in run.config.dataset.roots}
    source = run.rows.source(stream=(0, run.rows.last_row))
    for batch in source.read_rows(np.arange(first, last), 4):
        for dataset, index in zip(batch["dataset_index"], batch["index"], strict=True):
            by_root[run.config.dataset.roots[dataset]].add(int(index))
    return by_root


def rows_named_in(message):
    by_root = {}
    for part in message.split("by `index`: ")[1].split("; "):
        root, runs = part.rsplit(": ", 1)
        bounds = [tuple(map(int, run.split("-"))) for run in runs.split(", ")]
        by_root[root] = {row for bound in bounds for row in range(bound[0], bound[-1] + 1)}
    return by_root


def test_too_many_nonfinite_steps_are_an_error_that_names_the_rows(setting):
    run = resolved(setting, **{"train.max_nonfinite": 1, "log_freq": 2})
    line, callback = {"nonfinite_steps": 1}, NonfiniteSteps()
    state = SimpleNamespace(run=run, rows=32, by_rank={"samples": [16.0]})
    state.nonfinite_remedy = lambda: TrainState.nonfinite_remedy(state)
    callback.on_log(state, line)
    callback.on_log(state, {"nonfinite_steps": 0})
    # Counted over the whole run, as windows may be shorter than the limit.
    message = "2 steps had a loss .* not finite, 1 of them since the last log step .*nonfinite=1; they"
    with pytest.raises(FloatingPointError, match=message) as error:
        callback.on_log(state, line)

    expected = rows_at(run, 16, 32)  # the window's steps, the third and the fourth
    assert rows_named_in(str(error.value)) == expected and sum(map(len, expected.values())) == 16


def test_batch_is_described_by_rows_of_its_step_without_reading_storage(setting, monkeypatch):
    """Storage may be what hangs."""
    run = resolved(setting, **{"scaling.num_workers": 2, "grad_accum": 1})
    schedule = RankSchedule(run.config.batch_size, run.rows.block_rows, 1, 2, run.job.batches_per_step, first_step=1)
    with monkeypatch.context() as patch:
        for name in ("lerobot_datasource.check_files", "vla_finetuning.plan.missing_files.find_missing_files"):
            patch.setattr(name, lambda *_, **__: pytest.fail("storage was read"))
        text = describe_batch(run.rows, schedule, 2)
    assert text.startswith("a batch of step 4 on rank 1; ")
    assert rows_named_in(text) == {root: rows for root, rows in rows_at(run, 24, 32).items() if rows}


@pytest.mark.parametrize("steps", [2, 3])
def test_stop_at_last_step_is_ignored(setting, steps):
    """The stop comes at the only log step: a finished run is exported, an unfinished one can be resumed."""
    run = resolved(setting, **{"steps": steps, "log_freq": 2})
    run.job.output_dir.mkdir(exist_ok=True)
    (run.job.output_dir / STOP_NAME).touch()
    try:
        trained = in_process.train(run)
    finally:
        (run.job.output_dir / STOP_NAME).unlink()
    assert (trained is not None) == (steps == 2)


@pytest.mark.parametrize(
    ("notice_s", "saved_at"), [(120, [0, 60, 90, 105, 113]), (30, [0, 15, 23]), (8, [0]), (None, [0])]
)
def test_preemption_notice_saves_checkpoints_each_half_of_remaining_time(setting, monkeypatch, notice_s, saved_at):
    now, saved = [1000.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0] + 1e9)
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    run = resolved(setting)

    def report(*_, **__):
        saved.append(now[0] - 1000)
        writer._idle.set()  # as after writing

    second = SimpleNamespace(rank=1, world=1, storage="/tmp", report=report)
    writer = checkpoint_writer.CheckpointWriter(run.job, SimpleNamespace(params=[]), second, attempt=0)
    writer.save(run.job.start)
    writer.preempted_at(0 if notice_s is None else round((now[0] + 1e9 + notice_s) * 1000))
    for _ in range(150):
        now[0] += 1
        if writer.due():
            writer.save(run.job.start)
    assert saved == saved_at


def test_each_preemption_notice_saves_once_also_if_deadline_follows(setting):
    """Notices by step: none, one without a deadline, its deadline, none, and another."""
    run = resolved(setting, steps=6, log_freq=1, save_freq=100, output_dir=setting[0] / "noticed")
    saved, ends, deadlines = [], [], iter([None, 0, 5000, None, 7000, 7000])

    class Noticed(Worker):
        def preemption_deadline_ms(self):
            return next(deadlines)

    class Writer(in_process.NoCheckpoints):
        def save(self, progress):
            saved.append(progress.step)

        def preempted_at(self, deadline_ms):
            ends.append(deadline_ms)

    in_process.train(run, worker=Noticed(CPU, in_process.Shard(run)), make_checkpoints=Writer)
    assert saved == [2, 5, 6] and ends == [0, 5000, 7000, 7000]


def test_resumed_run_logs_the_same_lines_and_deletes_old_checkpoints(setting, monkeypatch):
    """Killed after a checkpoint between two log steps, then between the last commit and the deletion."""
    options = {"steps": 6, "grad_accum": 1, "save_freq": 3, "log_freq": 2, "keep_checkpoints": 1}
    files = []
    monkeypatch.setattr(callbacks, "open_lines", lambda path: files.append(open_lines(path)) or files[-1])

    class Killed(state.Callback):
        def on_step_begin(self, loop, batches):
            if loop.step == 5:
                raise KeyboardInterrupt
            return batches

    def lines(name, kill):
        run = resolved(setting, **options, output_dir=setting[0] / name, **{"run.record_rows": "true"})
        with monkeypatch.context() as patch:
            patch.setattr(callbacks, "prune_checkpoints", lambda *_: None)
            train = partial(in_process.train, run, make_checkpoints=CheckpointWriter)
            if kill:
                with pytest.raises(KeyboardInterrupt):
                    train(worker=in_process.alone(run), callbacks=[Killed()])
            train(worker=in_process.alone(run, first_step=3 * kill))
        written = map(json.loads, read_lines(run.job.output_dir / "metrics.jsonl"))
        keys = ("step", "epoch", "loss", "lr", "grad_norm", "samples")
        return run, [[line[key] for key in keys] for line in written]

    _, expected = lines("whole", False)
    run, resumed = lines("killed", True)
    assert resumed == expected and len(expected) == 4
    assert len(checkpoints(run.job.checkpoints_dir)) == 2
    in_process.train(run, worker=in_process.alone(run, first_step=6), make_checkpoints=CheckpointWriter)
    assert [*checkpoints(run.job.checkpoints_dir)] == [6]
    assert [file.closed for file in files] == [True, False, True, True]


def test_callbacks_end_if_another_raises(setting):
    run = resolved(setting, steps=1, output_dir=setting[0] / "ends")
    closed = []

    class Broken(state.Callback):
        def on_end(self, loop):
            raise OSError("the disk is full")

    class Writer(in_process.NoCheckpoints):
        def close(self):
            closed.append("checkpoints")

    with pytest.raises(OSError, match="the disk is full"):
        in_process.train(run, make_checkpoints=Writer, callbacks=[Broken()])
    assert closed == ["checkpoints"] and gc.isenabled()


def test_data_are_read_while_model_is_built(setting, monkeypatch):
    run = resolved(setting, grad_accum=1, steps=2, output_dir=setting[0] / "meanwhile")
    reading = threading.Event()
    build_model = state.build_model

    def slow_to_build(*args):
        assert reading.wait(60), "no batch was requested"
        return build_model(*args)

    monkeypatch.setattr(state, "build_model", slow_to_build)
    assert in_process.train(run, in_process.Shard(run, before_batch=reading.set)) is not None


def test_failed_evaluation_does_not_lose_trained_policy(setting, monkeypatch, capsys):
    def fails(*_, **__):
        raise ValueError("none of the held-out episodes can be read")

    monkeypatch.setattr(after_training.cluster, "run_remote", fails)
    run = resolved(setting)
    monkeypatch.setattr(type(run.rows), "any_held_out", True)
    assert after_training.evaluate_trained(run) == 5
    assert "the policy is trained, but could not be evaluated: none of the" in capsys.readouterr().err


def test_compiling_is_skipped_on_cpu_and_its_failure_is_reported(setting, caplog, monkeypatch):
    run = resolved(setting, **{"train.compile": "true"})
    monkeypatch.setattr(model, "Compiler", lambda: compiling.Compiler("eager"))
    loss, autocast = build_model(run.policy, CPU)
    assert autocast is None and loss.compiler is None
    assert "--train.compile does nothing: the step runs on the CPU, and only GPUs gain from it" in caplog.messages
    monkeypatch.setattr(model, "why_not", lambda device: None)
    loss, _ = build_model(run.policy, CPU)
    assert loss.compiler is not None and callbacks.Compile in map(type, vla.callbacks_for(run, MagicMock()))

    def fails(*_):
        raise TorchDynamoException("no code\ngenerator")

    monkeypatch.setattr(callbacks.Compile, "_compile", fails)
    with pytest.raises(ValueError, match=r"--train.compile: torch.compile failed, leave it out \(no code generator\)"):
        callbacks.Compile().on_start(SimpleNamespace(finished=False, loss=loss))


@pytest.mark.gate
@pytest.mark.parametrize("max_delay", [0, 2])
def test_all_prompt_lengths_are_compiled_before_first_step(setting, monkeypatch, max_delay):
    options = {"train.compile": "true", "train.mode": "full", "policy.rtc_training_max_delay": max_delay}
    run = resolved(setting, **options)
    run = replace(run, policy=replace(run.policy, prompts=(16, 24)), config=replace(run.config, eval_steps=1))
    schedule = RankSchedule(run.config.batch_size, run.rows.block_rows, 0, 1, run.job.batches_per_step)
    data = vla.build_dataset(run)
    row = data.prepare(data.read(stream=(0, run.rows.last_row)).example())
    batch = {key: torch.from_numpy(np.repeat(value, run.config.batch_size, axis=0)) for key, value in row.items()}
    draws = noise_for(run.policy, 0, schedule, CPU)(0)
    monkeypatch.setattr(model, "why_not", lambda device: None)
    monkeypatch.setattr(model, "Compiler", lambda: compiling.Compiler("eager"))
    torch._dynamo.reset()
    config = torch._dynamo.config
    with config.patch(recompile_limit=config.recompile_limit, optimize_ddp=config.optimize_ddp):
        loss, _ = build_model(run.policy, CPU)
        optimizer = build_optimizer(run.policy, loss, 2)
        before = {name: value.clone() for name, value in loss.state_dict().items()}
        batches = TimedIterator([batch])
        loop = SimpleNamespace(run=run, loss=loss, model=loss, optimizer=optimizer, batches=batches)
        vars(loop).update(step=0, schedule=schedule, worker=Worker(CPU), autocast=None, finished=False)
        callbacks.Compile().on_start(loop)
        assert next(batches) is batch  # the first step trains on it
        assert all(param.grad is None for param in loss.parameters())
        assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())
        # The vision tower has no prompts.
        assert loss.compiler.compilations == 2 * (1 + 3 * len(run.policy.prompts))
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in run.policy.prompts:
                cut = {key: value[:, :length] if ".language." in key else value for key, value in batch.items()}
                loss(cut, *draws).backward()
                loss.eval()
                with torch.no_grad():
                    loss(cut, draws[0], time_without_given(draws[1]), per_row=True)
                loss.train()
    torch._dynamo.reset()


def test_unused_parameters_are_not_on_the_device(setting):
    run = resolved(setting)
    loss, _ = build_model(run.policy, CPU)
    report = run.policy.parameters
    loaded = sum(parameter.numel() for parameter in loss.policy.parameters())
    assert loaded == report.total - report.frozen[UNUSED] < report.total


def test_loss_of_checkpoint_leaves_out_nonfinite_log_steps():
    start = Progress(step=0, rows=0, stream={}, base={}, mode="full", global_batch_size=4)
    worker = SimpleNamespace(preemption_deadline_ms=lambda: None)
    loop = SimpleNamespace(worker=worker, attempt=SimpleNamespace(progress=start), step=3, rows=12, clock=UNWATCHED)
    loop.loss_of = lambda line: line["loss"]
    hook, saves = Checkpoints(None), []
    hook._writer = SimpleNamespace(paused_s=lambda: 0.0, save=saves.append)
    hook.on_save(loop)
    for loss in (1.0, float("nan"), 3.0):
        hook.on_log(loop, {"loss": loss})
    hook.on_save(loop)
    assert [progress.loss for progress in saves] == [None, 2.0]


def test_wrong_attention_kernel_is_replaced_before_first_step(setting, monkeypatch, caplog):
    run = resolved(setting, steps=1, grad_accum=1, output_dir=setting[0] / "attention")
    fused, used = torch.nn.functional.scaled_dot_product_attention, []

    def wrong(*args, **options):
        used.append(torch.backends.cuda.flash_sdp_enabled() and len(args) > 3)  # the vision tower has no mask
        return fused(*args, **options) * (1.5 if used[-1] else 1.0)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)

    def started(*args):
        used.clear()
        return build_optimizer(*args)

    in_process.train(run, make_optimizer=started)
    assert "FLASH_ATTENTION computes a wrong result at prefix" in caplog.text and "uses 'math'" in caplog.text
    assert used and not any(used)


def test_prompts_are_cut_to_the_needed_length(setting, monkeypatch):
    run = resolved(setting, steps=2, output_dir=setting[0] / "prompts", **{"policy.tokenizer_max_length": 96})
    assert run.policy.prompts == (40, 64, 96)
    shapes, original = [], PI05Loss.forward

    def forward(loss, batch, *draws):
        shapes.append(batch["observation.language.tokens"].shape)
        return original(loss, batch, *draws)

    monkeypatch.setattr(PI05Loss, "forward", forward)
    in_process.train(run)
    assert shapes == 4 * [(4, 40)]
