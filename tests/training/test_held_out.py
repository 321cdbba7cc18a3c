"""The held-out loss during training against LeRobot's forward on the same rows, noise and times, without Ray."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests import in_process
from tests.tiny import lerobots_training
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import with_config
from vla_finetuning.policies.flow import sample_noise_and_time
from vla_finetuning.run.checkpoint import load_progress
from vla_finetuning.run.folder import STOP_NAME
from vla_finetuning.training import callbacks
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import describe_exported, export_run
from vla_finetuning.training.held_out import DRAWN_TOGETHER, HeldOutLoss
from vla_finetuning.training.model import build_model
from vla_finetuning.training.worker import Worker

CPU = torch.device("cpu")
DRAWS = 2


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return in_process.make_setting(tmp_path_factory.mktemp("held_out"))


def resolved(setting, **changes):
    """Hold out the last two of the episodes of 6, 5 and 4 frames: one of each task."""
    options = {"dataset.eval_split": 0.3, "eval_steps": 2, "batch_size": 4, "grad_accum": 1, **changes}
    return in_process.resolved(setting, **options)


def measured(run):
    loss, autocast = build_model(run.policy, CPU)
    with in_process.tasks_here():
        return HeldOutLoss(run, Worker(CPU)).evaluate(loss, autocast)


@pytest.fixture(scope="module")
def expected(setting):
    return measured(resolved(setting))


def lerobots_losses(setting, run, index):
    """Compute losses by draw and row with LeRobot's dataset, processors and policy, and return flow times."""
    policy, dataset, preprocessor = lerobots_training(*setting[1:])
    config = policy.eval().config
    batch = preprocessor(torch.utils.data.default_collate([dataset[int(i)] for i in index]))
    noise, time = sample_noise_and_time(config, DRAWN_TOGETHER * DRAWS, run.config.seed, -1, "cpu")
    losses = []
    for draw in range(DRAWS):
        rows = slice(draw, DRAWS * len(index), DRAWS)
        policy.model.sample_noise = lambda *_, value=noise[rows]: value
        policy.model.sample_time = lambda *_, value=time[rows]: value
        with torch.no_grad():
            losses.append(policy.forward(batch, reduction="none")[0])
    return torch.stack(losses), time[: DRAWS * len(index)].view(-1, DRAWS).T


@pytest.mark.parametrize("limit, index", [(0, range(6, 15)), (4, (6, 10, 11, 14))])
def test_held_out_loss_equals_mean_of_lerobots_forward(setting, limit, index):
    """Over all rows, with a last batch that is not full, or over some rows of each task."""
    run = resolved(setting, **{"train.noise_draws": DRAWS, "max_eval_samples": limit})
    actual = measured(run)
    losses, times = lerobots_losses(setting, run, index)
    assert actual["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    second = torch.tensor([i < 11 for i in index])  # of the dataset's second task
    by_task = dict(zip(run.rows.metas[0].tasks.values(), (losses[:, ~second], losses[:, second]), strict=True))
    assert actual["eval_loss_by_task"] == pytest.approx({k: v.mean().item() for k, v in by_task.items()}, rel=1e-5)
    for number, at_time in enumerate(actual["eval_loss_by_time"]):
        expected = losses[(times * 10).long() == number]
        assert at_time == (pytest.approx(expected.mean().item(), rel=1e-5) if len(expected) else None)


def test_draws_of_a_row_do_not_depend_on_the_batch(setting, expected):
    small = measured(resolved(setting, batch_size=2, grad_accum=2))
    assert small["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("options", [{"policy.rtc_training_max_delay": 3}, {"train.augmentation": "openpi"}])
def test_held_out_rows_have_neither_action_prefixes_nor_augmentation(setting, expected, options):
    assert {**measured(resolved(setting, **options)), "eval_s": 0} == {**expected, "eval_s": 0}


def test_each_task_has_at_least_one_held_out_row(setting):
    rows = resolved(setting, max_eval_samples=1).rows.held_out_rows(1)
    assert rows.positions.tolist() == [0, 5] and rows.task.tolist() == [0, 1] and rows.held_out == 9


def test_other_policies_draw_repeatably_and_restore_random_state(setting):
    small = {"pretrained_backbone_weights": "null", "dim_model": 32, "n_heads": 2, "n_encoder_layers": 1}
    options = {f"policy.{name}": value for name, value in small.items()}
    run = resolved(setting, **{"policy.path": None, "policy.type": "act", **options})
    state = torch.get_rng_state()
    loss, autocast = build_model(run.policy, CPU)
    with in_process.tasks_here():
        held_out = HeldOutLoss(run, Worker(CPU))
        torch.set_rng_state(state)
        first, second = (held_out.evaluate(loss, autocast) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first["eval_loss"] == second["eval_loss"] > 0 and "eval_loss_by_time" not in first


def trained(run, writer=in_process.NoCheckpoints):
    """Return log lines and weights."""
    lines = []
    with in_process.tasks_here(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "append_line", lambda _, text: lines.append(json.loads(text)))
        optimizer = in_process.train(run, make_checkpoints=writer)
    return lines, optimizer and {name: value.clone() for name, value in optimizer.named().items()}


@pytest.fixture
def recorder():
    """Return a checkpoint writer that records steps and held-out losses in its list `saved`."""

    class Recorder(in_process.NoCheckpoints):
        saved = []

        def save(self, progress):
            self.saved.append((progress.step, progress.eval_loss))

    return Recorder


def test_held_out_loss_is_logged_and_saved_without_changing_training(setting, recorder):
    """It is measured every other step and at the end."""
    run = resolved(setting, steps=5, log_freq=5, save_freq=4)
    lines, weights = trained(run, recorder)
    plain, expected = trained(with_config(run, replace(run.config, eval_steps=0)))
    assert [(line["step"], "eval_loss" in line) for line in lines] == [(2, True), (4, True), (5, True)]
    assert [(line["step"], "eval_loss" in line) for line in plain] == [(4, False), (5, False)]
    assert lines[0]["loss"] + lines[1]["loss"] == pytest.approx(2 * plain[0]["loss"])
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert len({line["eval_loss"] for line in lines}) == 3
    assert recorder.saved == [(4, lines[1]["eval_loss"]), (5, lines[2]["eval_loss"])]


def test_held_out_loss_with_unreadable_rows_is_logged_and_not_saved(setting, recorder, monkeypatch):
    summary = HeldOutLoss._summary

    def with_unreadable_row(self, losses, counted, times):
        counted[: self._per_row] = 0
        return summary(self, losses, counted, times)

    run = resolved(setting, steps=2, log_freq=1, save_freq=2, eval_steps=2)
    monkeypatch.setattr(HeldOutLoss, "_summary", with_unreadable_row)
    lines, _ = trained(run, recorder)
    assert lines[-1]["eval_skipped"] == 1 and lines[-1]["eval_loss"] > 0
    assert recorder.saved == [(2, None)]


def test_averaged_weights_are_measured_without_changing_training(setting):
    options = {"steps": 4, "log_freq": 2, "ema.enable": "true", "ema.decay": 0.5}
    run = resolved(setting, **options)
    lines, weights = trained(run)
    with in_process.tasks_here():
        optimizer = in_process.train(with_config(run, replace(run.config, eval_steps=0)))
    assert all(torch.equal(weights[name], value) for name, value in optimizer.named().items())
    loss, autocast = build_model(run.policy, CPU)
    averaged = dict(zip(optimizer.names, optimizer.average, strict=True))
    loss.policy.load_state_dict(averaged, strict=False)
    with in_process.tasks_here():
        expected = HeldOutLoss(run, Worker(CPU)).evaluate(loss, autocast)
    assert lines[-1]["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


def test_best_checkpoint_is_exported_with_averaged_weights(setting):
    options = {"steps": 4, "log_freq": 1, "eval_steps": 1, "save_freq": 1, "keep_checkpoints": 1, "export": "best"}
    options |= {"ema.enable": "true", "ema.decay": 0.5, "lr": 0.3, "warmup_frac": 0}
    run = resolved(setting, output_dir=setting[0] / "best", **options)
    with in_process.tasks_here():
        in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
    lines = [json.loads(line) for line in (run.job.output_dir / "metrics.jsonl").read_text().splitlines()]
    least, best = min((line["eval_loss"], line["step"]) for line in lines)
    assert best != 4  # the loss rises at this learning rate
    checkpoints = sorted(run.job.checkpoints_dir.glob("step_*"))
    assert [path.name for path in checkpoints] == [f"step_{best:08d}", "step_00000004"]
    assert describe_exported(run.config, run.job) == (
        f": step {best} of 4, held-out loss {least:.4g}, averaged weights (--ema.enable)"
    )
    (run.job.output_dir / "evaluation.json").write_text("{}")
    export_run(run)
    assert not (run.job.output_dir / "evaluation.json").exists()  # it was of another policy
    assert json.loads((run.job.output_dir / "pretrained_model" / "robot.json").read_text())["step"] == best
    exported = load_file(run.job.output_dir / "pretrained_model" / "model.safetensors")
    averages = load_file(checkpoints[0] / "attempt-00000" / "average.safetensors")
    assert averages and all(torch.equal(exported[name.removeprefix("average.")], averages[name]) for name in averages)


def test_best_checkpoints_have_a_training_loss_whatever_the_log_freq(setting):
    best = {"steps": 4, "save_freq": 2, "log_freq": 100, "keep_best": 1, "keep_checkpoints": 1}
    run = in_process.resolved(setting, **best, output_dir=setting[0] / "ranked")
    in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
    saved = [load_progress(path) for path in sorted(run.job.checkpoints_dir.glob("step_*"))]
    assert [progress.step for progress in saved] == [2, 4] and all(progress.loss for progress in saved)


def test_stopped_run_does_not_measure_held_out_loss(setting):
    run = resolved(setting, steps=5, output_dir=setting[0] / "stopped")
    run.job.output_dir.mkdir()
    (run.job.output_dir / STOP_NAME).touch()
    lines, weights = trained(run)
    assert weights is None and [line["step"] for line in lines] == [2] and "eval_loss" not in lines[0]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"max_eval_samples": 5}, "it limits the held-out loss, .*; give --eval_steps"),
        ({"export": "best"}, "and none is measured; give --eval_steps"),
    ],
)
def test_invalid_held_out_options_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(["--preset=demo", *(f"--{name}={value}" for name, value in flags.items())])
