"""The whole program, through Ray Data and Ray Train, against a plain loop over LeRobot's own code."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vla
from diagnostics import check_rows
from tests import broken, in_process
from tests.broken import resumed_from, run_with, weights
from tests.planted import Fault
from tests.tiny import lerobots_training
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.flow import sample_noise_and_time
from vla_finetuning.training.model import build_model, build_optimizer

STEPS, GLOBAL_BATCH = 4, 8  # all of 30 frames, and two once more


flags = partial(
    broken.flags,
    **{"batch_size": 2, "grad_accum": 2, "steps": STEPS, "save_freq": 2, "ema.enable": "true"},
)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return broken.make_setting(tmp_path_factory.mktemp("vla"), episodes=(6, 5, 9, 1, 5, 4))


@pytest.fixture(scope="module")
def finished(setting, ray_cluster):
    """A run of 4 steps by 2 workers, with accumulation and a frame cache."""
    cache = setting[0] / "frames"
    assert vla.main(flags(setting, "finished", **{"dataset.frame_cache": cache})) == 0
    assert list(cache.glob("*/*/*/*"))
    return setting[0] / "finished"


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def apart(a, b, start):
    """Return the largest distance of two trained policies relative to the update, and its parameter.

    Adam divides by the square root of tiny second moments, so single bits of a gradient may matter: whole tensors are
    compared. Biases of keys are left out: attention does not depend on them, so their gradient is rounding alone.
    """
    worst = (0.0, "")
    for name, value in a.items():
        went = (value - start[name]).norm().item()
        if went and not name.endswith("k_proj.bias"):
            worst = max(worst, ((value - b[name]).norm().item() / went, name))
    return worst


def lerobot_loop(setting):
    """Train LeRobot's policy on its own dataset and processors with the same rows, noise and times."""
    run = resolve(parse_args(flags(setting, "unused")), gpus_found=0)
    policy, dataset, preprocessor = lerobots_training(*setting[1:])
    config = policy.train().config
    optimizer = config.get_optimizer_preset().build(policy.parameters())
    plan = run.rows.source(stream=(0, run.rows.last_row)).plan
    schedule = build_optimizer(run.policy, build_model(run.policy, torch.device("cpu"))[0], run.job.steps).schedule
    results = []
    for step in range(STEPS):
        noise, time = sample_noise_and_time(config, GLOBAL_BATCH, run.config.seed, step, "cpu")
        policy.model.sample_noise = lambda *_, value=noise: value
        policy.model.sample_time = lambda *_, value=time: value
        index = np.concatenate([s.rows()[1] for s in plan.slices(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)])
        batch = torch.utils.data.default_collate([dataset[int(i)] for i in index])
        loss, _ = policy.forward(preprocessor(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optimizer_grad_clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results, policy


@pytest.mark.ray
def test_run_equals_a_plain_loop_over_lerobot(setting, finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["spilled_bytes"], line["mfu"]) for line in lines] == [
        (n, 0, None) for n in (1, 2, 3, 4)
    ]
    expected_losses, policy = lerobot_loop(setting)
    np.testing.assert_allclose(losses(finished), expected_losses, rtol=1e-5)
    start = load_file(setting[2] / "model.safetensors")
    expected = policy.state_dict()
    assert weights(finished).keys() == start.keys()
    # What is exported is their average (tests/training/test_export.py).
    trained = start | load_file(next((finished / "checkpoints" / "step_00000004").rglob("trainable.safetensors")))
    assert trained.keys() == start.keys()
    differently = {n for n in start if torch.equal(trained[n], start[n]) != torch.equal(expected[n], start[n])}
    # LeRobot's AdamW decays these although nothing depends on them (trainable.choose_trainable).
    assert all("layers" in name and "q_proj" in name for name in differently), differently
    distance, name = apart(trained, expected, start)
    assert distance < 1e-3, name
    assert sum(not torch.equal(trained[n], start[n]) for n in start) > 30


@pytest.mark.ray
def test_two_workers_equal_one_with_twice_the_batch(setting, finished):
    """Two processes through Ray, against the same four steps in this one."""
    changes = {"scaling.num_workers": 1, "batch_size": 8, "grad_accum": 1, "train.deterministic": "false"}
    run = resolve(parse_args(flags(setting, "one_worker", **changes)), gpus_found=0)
    start = load_file(setting[2] / "model.safetensors")
    average = in_process.train(run, in_process.RunRows(run)).named_average()
    np.testing.assert_allclose(losses(run.job.output_dir), losses(finished), rtol=1e-5)
    averaged = {name.removeprefix("average."): value for name, value in average.items()}
    distance, name = apart(averaged, weights(finished), start)
    assert distance < 1e-3 and len(averaged) > 30, name


@pytest.mark.ray
@pytest.mark.faults
def test_killed_and_resumed_run_is_bitwise_equal(setting, finished):
    """A worker is killed in the last step after the resume, and Ray Train restarts the group."""
    folder = setting[0] / "resumed"
    shutil.copytree(finished, folder)
    # As if the run had died after its first checkpoint, having logged one step more.
    shutil.rmtree(folder / "pretrained_model")
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    (folder / "checkpoints" / "checkpoint_manager_snapshot.json").unlink()
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(metrics[:3]))

    argv = [f"--output_dir={folder}", "--resume", "--scaling.max_failures=1"]
    assert run_with(argv, Fault("kill", step=3, attempt=1)) == 0
    assert resumed_from(folder) == [0, 2, 2]
    assert check_rows.main([str(folder)]) == 0
    expected = weights(finished)
    for key, value in weights(folder).items():
        assert torch.equal(value, expected[key]), key
    assert losses(folder) == losses(finished)
    actual, expected = (
        load_file(next((f / "checkpoints" / "step_00000004").rglob("average.safetensors"))) for f in (folder, finished)
    )
    assert all(torch.equal(actual[key], value) for key, value in expected.items())
    assert [p.name for p in sorted((folder / "checkpoints").glob("step_*"))] == ["step_00000002", "step_00000004"]


@pytest.mark.ray
def test_run_folder_contains_no_pickles(finished):
    files = [path for path in finished.rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "state.json", "metrics.jsonl"} <= {path.name for path in files}
    for path in files:
        if path.suffix == ".safetensors":
            load_file(path)
        else:  # pickle's first byte since its second protocol; torch.save makes a zip
            assert not path.read_bytes().startswith((b"\x80", b"PK")), path


@pytest.mark.ray
def test_too_small_local_cluster_is_an_error(setting, finished, capsys):
    assert vla.main(flags(setting, "large", **{"scaling.num_workers": 6, "scaling.cpus_per_worker": 1})) == 1
    assert "needs 7 CPUs, 3 found" in capsys.readouterr().err
