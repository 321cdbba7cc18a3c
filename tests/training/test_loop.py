"""What a training process does around its steps, without Ray."""

import gc
import logging
import threading
from dataclasses import replace
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
from vla_finetuning.policies import compiling
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.flow import sample_noise_and_time, time_without_given
from vla_finetuning.policies.trainable import UNUSED
from vla_finetuning.run.checkpoint import Progress
from vla_finetuning.run.folder import STOP_NAME
from vla_finetuning.training import callbacks, checkpoint_writer, model, state
from vla_finetuning.training.callbacks import Checkpoints, NonfiniteSteps
from vla_finetuning.training.feed import describe_batch
from vla_finetuning.training.model import build_model, build_optimizer
from vla_finetuning.training.state import TrainState, noise_for
from vla_finetuning.training.stream import RankSchedule
from vla_finetuning.training.worker import Worker

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Two datasets and a tiny base policy for them."""
    folder = tmp_path_factory.mktemp("worker")
    roots = [make_dataset(folder / name, episodes=(9, 7), seed=seed) for seed, name in enumerate(("first", "second"))]
    meta = load_metadata(roots[0])
    return folder, roots, make_base(folder / "base", meta, **in_process.TINY)


def resolved(setting, **changes):
    folder, roots, base = setting
    options = {"dataset.statistics": "stored", "batch_size": 4, "steps": 6, "train.mode": None, **changes}
    return in_process.resolved((folder, ",".join(map(str, roots)), base), **options)


def test_a_rows_draws_do_not_depend_on_who_computes_it(setting):
    """Noise and time by a row's place in the global batch: one worker with accumulation, or two."""

    def by_row(world, accum):
        run = resolved(setting, **{"train.noise_draws": 3, "scaling.num_workers": world, "grad_accum": accum})
        run = replace(run, rows=replace(run.rows, order=replace(run.rows.order, block_rows=2)))
        found = {}
        for rank in range(world):
            dealt = RankSchedule(run.config.batch_size, run.rows.block_rows, rank, world, run.job.batches_per_step)
            draws = noise_for(run.policy, 5, dealt, CPU)
            for micro in range(accum):
                noise, time = draws(micro)
                assert len(noise) == len(time) == 3 * run.config.batch_size
                for place, row in enumerate(dealt.rows(micro).tolist()):
                    found[row] = noise[3 * place : 3 * place + 3], time[3 * place : 3 * place + 3]
        return found, sample_noise_and_time(run.policy.config, 3 * 8, run.config.seed, 5, CPU)

    one, (noise, time) = by_row(1, 2)
    two, _ = by_row(2, 1)
    assert one.keys() == two.keys() == set(range(8))
    for row in range(8):
        for found in (one, two):
            assert torch.equal(found[row][0], noise[3 * row : 3 * row + 3])
            assert torch.equal(found[row][1], time[3 * row : 3 * row + 3])
    assert len(time.unique()) == 24


def test_too_many_steps_that_are_not_finite_name_the_rows(setting):
    run = resolved(setting, **{"train.max_nonfinite": 1, "log_freq": 2})
    line, callback = {"nonfinite_steps": 1}, NonfiniteSteps()
    state = SimpleNamespace(run=run, rows=32, by_rank={"samples": [16.0]})
    state.nonfinite_remedy = lambda: TrainState.nonfinite_remedy(state)
    callback.on_log(state, line)
    callback.on_log(state, {"nonfinite_steps": 0})
    # Of the whole run: windows may be shorter than the limit.
    message = "2 steps had a loss .* not finite, 1 of them since the last log step .*nonfinite=1; they"
    with pytest.raises(FloatingPointError, match=message) as error:
        callback.on_log(state, line)

    # What the window's steps, the third and the fourth, were really fed.
    source = run.rows.source(stream=(0, run.rows.last_row))
    fed = list(source.read_rows(np.arange(16, 32), 4))
    expected = {
        root: {int(i) for batch in fed for d, i in zip(batch["dataset_index"], batch["index"], strict=True) if d == n}
        for n, root in enumerate(run.config.dataset.roots)
    }
    assert named_rows(str(error.value)) == expected and sum(map(len, expected.values())) == 16


@pytest.mark.parametrize("steps", [2, 3])
def test_a_stop_that_comes_with_the_last_step_stops_nothing(setting, steps):
    """Asked at the only log step: what is trained to the end is exported, what is not can be resumed."""
    run = resolved(setting, **{"steps": steps, "log_freq": 2})
    run.job.output_dir.mkdir(exist_ok=True)
    (run.job.output_dir / STOP_NAME).touch()
    try:
        trained = in_process.train(run)
    finally:
        (run.job.output_dir / STOP_NAME).unlink()
    assert (trained is not None) == (steps == 2)


@pytest.mark.parametrize(
    ("notice_s", "taken_at"), [(120, [0, 60, 90, 105, 113]), (30, [0, 15, 23]), (8, [0]), (None, [0])]
)
def test_before_a_node_is_taken_away_less_and_less_would_be_lost(setting, monkeypatch, notice_s, taken_at):
    """A checkpoint at the notice, and each time that half of what was left has gone; looked at every second."""
    now, saved = [1000.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0] + 1e9)
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    run = resolved(setting)

    def report(*_, **__):
        saved.append(now[0] - 1000)
        writer._idle.set()  # as when it is written

    second = SimpleNamespace(rank=1, world=1, storage="/tmp", report=report)
    writer = checkpoint_writer.CheckpointWriter(run.job, SimpleNamespace(params=[]), second, attempt=0)
    writer.save(run.job.start)
    writer.preempted_at(0 if notice_s is None else round((now[0] + 1e9 + notice_s) * 1000))
    for _ in range(150):
        now[0] += 1
        if writer.due():
            writer.save(run.job.start)
    assert saved == taken_at


def test_a_deadline_that_is_known_later_is_heard_and_each_notice_saves_once(setting):
    """No notice, one without a deadline, then with it, none, and another."""
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


def test_every_callback_ends_whatever_another_raises(setting):
    run = resolved(setting, steps=1, output_dir=setting[0] / "ends")
    closed = []

    class Broken(state.Callback):
        def on_end(self, of_loop):
            raise OSError("the disk is full")

    class Writer(in_process.NoCheckpoints):
        def close(self):
            closed.append("checkpoints")

    with pytest.raises(OSError, match="the disk is full"):
        in_process.train(run, make_checkpoints=Writer, callbacks=[Broken()])
    assert closed == ["checkpoints"] and gc.isenabled()


def test_the_data_come_while_the_model_is_made(setting, monkeypatch):
    run = resolved(setting, grad_accum=1, steps=2, output_dir=setting[0] / "meanwhile")
    asked = threading.Event()
    build_model = state.build_model

    def slow_to_build(*args):
        assert asked.wait(60), "no batch was asked for"
        return build_model(*args)

    monkeypatch.setattr(state, "build_model", slow_to_build)
    assert in_process.train(run, in_process.Shard(run, before_batch=asked.set)) is not None


def test_a_policy_that_is_trained_is_not_lost_with_its_evaluation(setting, monkeypatch, capsys):
    def fails(*_, **__):
        raise ValueError("none of the held-out episodes can be read")

    monkeypatch.setattr(after_training.cluster, "run_remote", fails)
    run = resolved(setting)
    monkeypatch.setattr(type(run.rows), "any_held_out", True)
    assert after_training.evaluate_trained(run) == 5
    assert "the policy is trained, but could not be evaluated: none of the" in capsys.readouterr().err


def named_rows(message):
    named = {}
    for part in message.split("by `index`: ")[1].split("; "):
        root, runs = part.rsplit(": ", 1)
        bounds = [tuple(map(int, run.split("-"))) for run in runs.split(", ")]
        named[root] = {row for bound in bounds for row in range(bound[0], bound[-1] + 1)}
    return named


def test_a_batch_is_named_by_its_steps_rows_without_asking_the_storage(setting, monkeypatch):
    run = resolved(setting, **{"scaling.num_workers": 2, "grad_accum": 1})
    dealt = RankSchedule(run.config.batch_size, run.rows.block_rows, 1, 2, run.job.batches_per_step, first_step=1)
    with monkeypatch.context() as patch:  # it may be what hangs
        for name in ("lerobot_datasource.check_files", "vla_finetuning.plan.missing_files.find_missing_files"):
            patch.setattr(name, lambda *_, **__: pytest.fail("it was asked"))
        text = describe_batch(run.rows, dealt, 2)
    assert text.startswith("a batch of step 4 on rank 1; ")
    fed = list(run.rows.source(stream=(0, run.rows.last_row)).read_rows(np.arange(24, 32), 4))
    rows = {(d, i) for batch in fed for d, i in zip(batch["dataset_index"], batch["index"], strict=True)}
    assert {
        (run.config.dataset.roots.index(root), i) for root, named in named_rows(text).items() for i in named
    } == rows


def test_compiling_is_refused_with_a_reason_and_training_goes_on(setting, caplog, monkeypatch):
    run = resolved(setting, **{"train.compile": "true"})
    made = []
    monkeypatch.setattr(model, "Compiler", lambda: made.append(1) or compiling.Compiler("eager"))
    with caplog.at_level(logging.WARNING):
        loss, autocast = build_model(run.policy, CPU)
    assert autocast is None and not made
    assert [record.getMessage() for record in caplog.records if record.name == "vla_finetuning.training.model"] == [
        "--train.compile does nothing: the step runs on the CPU, and only GPUs gain from it"
    ]
    monkeypatch.setattr(model, "why_not", lambda device: None)
    loss, _ = build_model(run.policy, CPU)
    assert made == [1] and callbacks.Compile in map(type, vla.callbacks_for(run, MagicMock()))

    def fails(*_):
        raise TorchDynamoException("no code\ngenerator")

    monkeypatch.setattr(callbacks.Compile, "_compile", fails)
    with pytest.raises(ValueError, match=r"--train.compile: torch.compile failed, leave it out \(no code generator\)"):
        callbacks.Compile().on_start(SimpleNamespace(finished=False, loss=loss))


@pytest.mark.gate
@pytest.mark.parametrize("max_delay", [0, 2])
def test_all_lengths_of_prompts_are_compiled_before_the_first_step(setting, monkeypatch, max_delay):
    """As held-out losses need them too; and nothing of it is left: the loop's losses are those without."""
    run = resolved(
        setting, **{"train.compile": "true", "train.mode": "full", "policy.rtc_training_max_delay": max_delay}
    )
    run = replace(run, policy=replace(run.policy, prompts=(16, 24)), config=replace(run.config, eval_steps=1))
    dealt = RankSchedule(run.config.batch_size, run.rows.block_rows, 0, 1, run.job.batches_per_step)
    data = vla.build_dataset(run)
    row = data.prepare(data.read(stream=(0, run.rows.last_row)).example())
    columns = {key: np.repeat(value, run.config.batch_size, axis=0) for key, value in row.items()}
    batch = {key: torch.from_numpy(value) for key, value in columns.items()}
    draws = noise_for(run.policy, 0, dealt, CPU)(0)
    monkeypatch.setattr(model, "why_not", lambda device: None)
    monkeypatch.setattr(model, "Compiler", lambda: compiling.Compiler("eager"))
    torch._dynamo.reset()
    config = torch._dynamo.config
    with config.patch(recompile_limit=config.recompile_limit, optimize_ddp=config.optimize_ddp):
        loss, _ = build_model(run.policy, CPU)
        optimizer = build_optimizer(run.policy, loss, 2)
        before = {name: value.clone() for name, value in loss.state_dict().items()}
        batches = TimedIterator([batch])
        of_loop = SimpleNamespace(run=run, loss=loss, model=loss, optimizer=optimizer, batches=batches)
        vars(of_loop).update(step=0, schedule=dealt, worker=Worker(CPU), autocast=None, finished=False)
        callbacks.Compile().on_start(of_loop)
        assert next(batches) is batch  # the first step trains on it
        assert all(param.grad is None for param in loss.parameters())
        assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())
        made = loss.compiler.compilations
        assert made == 2 * (1 + 3 * len(run.policy.prompts))  # the vision tower knows no prompts
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in run.policy.prompts:
                cut = {key: value[:, :length] if ".language." in key else value for key, value in batch.items()}
                loss(cut, *draws).backward()
                loss.eval()
                with torch.no_grad():
                    loss(cut, draws[0], time_without_given(draws[1]), per_row=True)
                loss.train()
    torch._dynamo.reset()


def test_what_training_never_uses_is_not_on_the_device(setting):
    run = resolved(setting)
    loss, _ = build_model(run.policy, CPU)
    report = run.policy.parameters
    held = sum(parameter.numel() for parameter in loss.policy.parameters())
    assert held == report.total - report.frozen[UNUSED] < report.total


def test_a_checkpoints_loss_is_without_log_steps_that_were_skipped():
    start = Progress(step=0, rows=0, stream={}, base={}, mode="full", global_batch_size=4)
    worker = SimpleNamespace(preemption_deadline_ms=lambda: None)
    of_loop = SimpleNamespace(worker=worker, attempt=SimpleNamespace(progress=start), step=3, rows=12, clock=UNWATCHED)
    hook, saves = Checkpoints(None), []
    hook._writer = SimpleNamespace(paused_s=lambda: 0.0, save=saves.append)
    hook.on_save(of_loop)
    for loss in (1.0, float("nan"), 3.0):
        hook.on_log(of_loop, {"loss": loss})
    hook.on_save(of_loop)
    assert [progress.loss for progress in saves] == [None, 2.0]


def test_attention_is_compared_before_the_first_step(setting, monkeypatch, caplog):
    """With another kernel where the usual one is wrong, which every step then uses."""
    run = resolved(setting, steps=1, grad_accum=1, output_dir=setting[0] / "attention")
    fused, used = torch.nn.functional.scaled_dot_product_attention, []

    def wrong(*args, **options):
        used.append(torch.backends.cuda.flash_sdp_enabled() and len(args) > 3)  # of the vision tower's there is no mask
        return fused(*args, **options) * (1.5 if used[-1] else 1.0)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)

    def started(*args):
        used.clear()
        return build_optimizer(*args)

    in_process.train(run, make_optimizer=started)
    assert "FLASH_ATTENTION computes a wrong result at prefix" in caplog.text and "uses 'math'" in caplog.text
    assert used and not any(used)


def test_a_step_computes_what_its_prompts_need(setting, monkeypatch):
    run = resolved(setting, steps=2, output_dir=setting[0] / "prompts", **{"policy.tokenizer_max_length": 96})
    assert run.policy.prompts == (40, 64, 96)
    shapes, watched = [], PI05Loss.forward

    def forward(loss, batch, *draws):
        shapes.append(batch["observation.language.tokens"].shape)
        return watched(loss, batch, *draws)

    monkeypatch.setattr(PI05Loss, "forward", forward)
    in_process.train(run)
    assert shapes == 4 * [(4, 40)]
