"""The whole program, through Ray Data and Ray Train, against a plain loop over LeRobot's own code."""

import json
import shutil
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import vla
from diagnostics import check_rows
from tests import broken, in_process
from tests.broken import resumed_from, run_with, weights
from tests.datasets import edit_rows, make_dataset
from tests.planted import Fault
from tests.tiny import lerobots_training
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.flow import sample_noise_and_time
from vla_finetuning.run.progress import recorded_rows
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
    """A run of 4 steps by 2 workers, with accumulation; its frames are cached."""
    kept = setting[0] / "frames"
    assert vla.main(flags(setting, "finished", **{"dataset.frame_cache": kept})) == 0
    assert list(kept.glob("*/*/*/*"))
    return setting[0] / "finished"


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def apart(a, b, start):
    """How far two trained policies are from each other, against how far they went; the worst parameter.

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
    """What `lerobot-train` would compute for the same rows, noise and times: its dataset, processors and policy."""
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
def test_the_program_equals_a_plain_loop_over_lerobot(setting, finished):
    expected_losses, policy = lerobot_loop(setting)
    np.testing.assert_allclose(losses(finished), expected_losses, rtol=1e-5)
    start = load_file(setting[2] / "model.safetensors")
    expected = policy.state_dict()
    assert weights(finished).keys() == start.keys()
    # What is exported is their average (tests/training/test_export.py).
    trained = start | load_file(finished / "checkpoints" / "step_00000004" / "trainable.safetensors")
    assert trained.keys() == start.keys()
    differently = {n for n in start if torch.equal(trained[n], start[n]) != torch.equal(expected[n], start[n])}
    # LeRobot's AdamW decays these although nothing depends on them (trainable.choose_trainable).
    assert all("layers" in name and "q_proj" in name for name in differently), differently
    distance, name = apart(trained, expected, start)
    assert distance < 1e-3, name
    assert sum(not torch.equal(trained[n], start[n]) for n in start) > 30


@pytest.mark.ray
def test_two_workers_equal_one_with_twice_the_batch(setting, finished):
    """What two processes trained through Ray, against the same four steps in this one."""
    changes = {"scaling.num_workers": 1, "batch_size": 8, "grad_accum": 1, "train.deterministic": "false"}
    run = resolve(parse_args(flags(setting, "one_worker", **changes)), gpus_found=0)
    start = load_file(setting[2] / "model.safetensors")
    average = in_process.train(run, in_process.RunRows(run)).named_average()
    np.testing.assert_allclose(losses(run.job.output_dir), losses(finished), rtol=1e-5)
    found = {name.removeprefix("average."): value for name, value in average.items()}
    distance, name = apart(found, weights(finished), start)
    assert distance < 1e-3 and len(found) > 30, name


@pytest.mark.ray
@pytest.mark.faults
def test_four_steps_equal_two_and_a_resume_and_two_bit_for_bit(setting, finished):
    """Even when, after the resume, a worker is killed in the last step, and Ray Train starts the group anew."""
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
    found, expected = (
        load_file(f / "checkpoints" / "step_00000004" / "average.safetensors") for f in (folder, finished)
    )
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert [p.name for p in sorted((folder / "checkpoints").glob("step_*"))] == ["step_00000002", "step_00000004"]


@pytest.mark.slow  # a run of its own, in two attempts
@pytest.mark.ray
def test_the_best_by_the_held_out_loss_is_exported_in_averaged_weights(setting, ray_cluster, capsys):
    """By two workers that hold parts; the held-out rows are read by tasks of their own."""
    options = {"dataset.eval_split": 0.3, "eval_steps": 1, "save_freq": 1, "keep_checkpoints": 1, "export": "best"}
    options |= {"scaling.strategy": "fsdp2", "ema.decay": 0.5, "grad_accum": 1, "lr": 0.3}
    assert vla.main(flags(setting, "best", **options)) == 0
    folder = setting[0] / "best"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_loss = {line["eval_loss"]: line["step"] for line in lines}
    best = by_loss[min(by_loss)]
    assert len(by_loss) == STEPS and best != STEPS  # at this learning rate it gets worse
    checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert checkpoints == [f"step_{best:08d}", f"step_{STEPS:08d}"]
    printed = capsys.readouterr().out
    assert f": step {best} of {STEPS}, held-out loss {min(by_loss):.4g}, averaged weights" in printed
    assert f"held-out loss {lines[0]['eval_loss']:.4f}" in printed
    parts = sorted((folder / "checkpoints" / checkpoints[0]).glob("average-*.safetensors"))
    averaged = [load_file(path) for path in parts]
    exported = weights(folder)
    for name in ("model.action_out_proj.weight", "model.time_mlp_in.weight"):
        assert torch.equal(exported[name], torch.cat([part[f"average.{name}"] for part in averaged]))


@pytest.mark.ray
def test_nothing_in_a_runs_folder_is_pickled(finished):
    files = [path for path in finished.rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "state.json", "metrics.jsonl"} <= {path.name for path in files}
    for path in files:
        if path.suffix == ".safetensors":
            load_file(path)
        else:  # pickle's first byte since its second protocol; torch.save makes a zip
            assert not path.read_bytes().startswith((b"\x80", b"PK")), path


@pytest.mark.ray
@pytest.mark.faults
def test_check_rows_sees_what_is_missing_and_what_is_doubled(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "output_dir": str(folder)}))
    path = folder / "rows" / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    gone, kept = lines[0]["rows"].pop(), lines[1]["rows"][0]
    lines[0]["rows"].append(kept)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert check_rows.main([str(folder)]) == 1
    printed = capsys.readouterr().out
    assert f"1 missing, e.g. (dataset_index, index) [({gone[0]}, {gone[1]})]" in printed
    assert f"1 doubled, e.g. (dataset_index, index) [({kept[0]}, {kept[1]})]" in printed
    # A last line that a crash has cut off does not count, nor do lines that a later attempt has trained anew.
    path.write_text(path.read_text() + '{"attempt": 0, "ep')
    with open(folder / "attempts.jsonl", "a") as file:
        file.write('{"attempt": 1, "resumed_from_step": 2, "world_size": 2}\n')
    assert {line["step"] for line in recorded_rows(folder)} == {1, 2}


@pytest.mark.ray
def test_the_runs_folder_holds_what_is_promised(setting, finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert {"epoch", "loss", "lr", "grad_norm", "samples", "samples_per_s", "step_s", "data_wait_s"} <= line.keys()
        assert line["frames_per_s"] == pytest.approx(2 * line["samples_per_s"])  # two cameras
        assert line["decoded_bytes_per_s"] > 3 * (48 * 64 + 96 * 80) * line["samples_per_s"]
        assert line["mfu"] is None and line["spilled_bytes"] == 0  # a CPU has no peak rate here, and nothing spills
        assert line["tokens_per_s"] > 2 * 16 * line["samples_per_s"]  # two cameras of 16 patches, and language
    assert lines[-1]["samples"] == 32 and lines[-1]["epoch"] == pytest.approx(32 / 30, abs=1e-3)
    config = json.loads((finished / "config.json").read_text())
    assert config["policy_path"] == str(setting[2]) and config["steps"] == STEPS
    assert not list(finished.rglob("*.p*kl")) and not list(finished.rglob("*.pt")) and not list(finished.rglob("*.bin"))
    checkpoint = finished / "checkpoints" / "step_00000004"
    trainable = load_file(checkpoint / "trainable.safetensors")
    assert 0 < len(trainable) < len(weights(finished))


@pytest.mark.ray
@pytest.mark.slow  # another worker group
def test_a_mixture_of_cameras_of_different_sizes_trains_each_row_as_often_as_due(setting, ray_cluster, capsys):
    """Two epochs of 50 rows: a third of them from the dataset of 30 rows, the rest from that of 20, again and again."""
    folder, first, _ = setting
    cameras = {"observation.images.top": (64, 64), "observation.images.wrist": (32, 96)}
    second = make_dataset(folder / "second", episodes=(12, 8), cameras=cameras, seed=1)
    changes = {
        "dataset.root": "null",
        "dataset.mixture": json.dumps({str(first): 1, str(second): 2}),
        "dataset.image_size": "[56,56]",
        "run.record_rows": "true",
        "steps": 13,
        "save_freq": 13,
    }
    assert vla.main(flags(setting, "mixed", **changes)) == 0
    output = folder / "mixed"
    assert len(losses(output)) == 13 and np.isfinite(losses(output)).all()
    recorded = list(recorded_rows(output))
    rows = [(dataset, index) for line in recorded for dataset, index in line["rows"]]
    assert len(rows) == 13 * GLOBAL_BATCH
    of_epoch = Counter(line["epoch"] for line in recorded for _ in line["rows"])
    assert of_epoch[0] == of_epoch[1] == 50
    for epoch in (0, 1):
        found = Counter(dataset for line in recorded if line["epoch"] == epoch for dataset, _ in line["rows"])
        assert found == {0: 17, 1: 33}
    capsys.readouterr()
    assert check_rows.main([str(output)]) == 0
    assert "epoch 1: 50 of 50 rows trained, as often as due" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.slow  # another worker group
def test_what_idles_is_left_out_and_what_weighs_more_comes_more_often(setting, ray_cluster, capsys):
    """Of 12 frames, of which the last 9 are alike; of 8, one and a half times; of 10, every other time."""
    folder = setting[0]
    root = make_dataset(folder / "held", episodes=(12, 8, 10))
    for column in ("observation.state", "action"):
        edit_rows(root, column, lambda v, episode, frame: v.__setitem__((episode == 0) & (frame > 2), v[3]))
    (folder / "weights.csv").write_text("episode_index,weight\n1,1.5\n2,0.5\n")
    frames = {"index": np.arange(30), "episode_index": np.repeat([0, 1, 2], (12, 8, 10))}
    progress = np.random.default_rng(0).random(30)
    pq.write_table(pa.table({**frames, "progress_sparse": progress}), root / "sarm_progress.parquet")
    changes = {
        "dataset.root": root,
        "dataset.skip_idle": 0.5,
        "dataset.episode_weights": f"@{folder / 'weights.csv'}",
        "sample_weighting.type": "rabc",
        "steps": 13,
        "save_freq": 13,
    }
    assert vla.main(flags(setting, "chosen", **changes)) == 0
    assert np.isfinite(losses(folder / "chosen")).all()
    seen = Counter(index for line in recorded_rows(folder / "chosen") for _, index in line["rows"])
    assert seen.total() == 13 * GLOBAL_BATCH and seen.keys() == {*range(3), *range(12, 30)}
    capsys.readouterr()
    assert check_rows.main([str(folder / "chosen")]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(printed) >= 4 and all(line.endswith("as often as due") for line in printed)
    for index, count in seen.items():  # four to five epochs of 3 + 12 + 5 rows, the last one under way
        weight = 1 if index < 12 else 1.5 if index < 20 else 0.5
        assert (len(printed) - 1) * weight - 1 < count < len(printed) * weight + 1


@pytest.mark.ray
def test_a_second_run_does_not_touch_the_first(setting, finished, capsys):
    before = sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*"))
    assert vla.main(flags(setting, "finished")) == 2
    assert "is not empty: --resume goes on with the run it holds" in capsys.readouterr().err
    assert sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*")) == before


@pytest.mark.ray
def test_resuming_with_another_batch_or_other_data_is_refused(setting, finished, capsys):
    """Seen by the workers, whose message must come out."""
    assert vla.main([f"--output_dir={finished}", "--resume", "--batch_size=4"]) == 2
    assert "is 16, but the run was started with 8" in capsys.readouterr().err
    assert vla.main([f"--output_dir={finished}", "--resume", "--seed=3"]) == 2
    assert "seed: was 1000, is 3" in capsys.readouterr().err


@pytest.mark.ray
def test_a_cluster_that_is_too_small_is_said_and_not_waited_for(setting, finished, capsys):
    assert vla.main(flags(setting, "large", **{"scaling.num_workers": 6, "scaling.cpus_per_worker": 1})) == 1
    assert "needs 7 CPUs, 3 found" in capsys.readouterr().err
