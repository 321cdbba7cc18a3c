"""`value.py` as a whole: trained through Ray, resumed, and its labels, whatever computes them."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import value
from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.config import ValueConfig
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.flags import parse_value
from vla_finetuning.report.page import write_report
from vla_finetuning.rl.judging import judge_frames
from vla_finetuning.rl.returns import advantages, episode_returns, label_positive
from vla_finetuning.rl.values import describe_value, resolve_value
from vla_finetuning.run.checkpoint import TRAINABLE, checkpoint_names, latest_checkpoint
from vla_finetuning.run.labels import LABELS_NAME
from vla_finetuning.training.model import build_model, build_optimizer

EPISODES, SUCCESS = (6, 5, 9, 3, 7, 4), (1, 0, 1, 0, 1, 0)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    root = make_dataset(folder / "dataset", episodes=EPISODES, cameras={"observation.images.top": (32, 40)})
    (folder / "outcomes.json").write_text(json.dumps(dict(enumerate(SUCCESS))))
    return folder, root, make_base(folder / "base", load_metadata(root), chunk_size=4)


def flags(setting, name="run", **changes):
    folder, root, base = setting
    options = {
        "dataset.root": root,
        "dataset.eval_split": 0.3,
        "policy.path": base,
        "outcome.success": f"@{folder / 'outcomes.json'}",
        "output_dir": folder / name,
        "scaling.num_workers": 2,
        "scaling.cpus_per_worker": 0.5,
        "scaling.max_failures": 0,
        "scaling.use_gpu": "false",
        "batch_size": 2,
        "steps": 4,
        "log_freq": 1,
        "save_freq": 2,
        "eval_steps": 2,
        "value.horizon": 3,
        **changes,
    }
    return [f"--{key}={value}" for key, value in options.items()]


def resolved(setting, **changes):
    return resolve_value(parse_value(flags(setting, **changes)), gpus_found=0)


@pytest.fixture(scope="module")
def finished(setting, ray_cluster):
    assert value.main(flags(setting)) == 0
    return setting[0] / "run"


def test_a_checkpoint_holds_the_head_alone(finished):
    names = checkpoint_names(latest_checkpoint(finished / "checkpoints"), TRAINABLE)
    assert names and all(name.startswith("critic.") for name in names)
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"eval_loss", "eval_loss_by_task"} <= lines[1].keys() and "eval_loss_by_time" not in lines[1]


def test_labels_are_what_plain_numpy_makes_of_the_values(finished, setting):
    rows = pq.read_table(finished / LABELS_NAME).to_pydict()
    length, success = np.array(EPISODES), np.array(SUCCESS, bool)
    tasks = load_metadata(setting[1]).episode_tasks
    task = np.array([sorted({t for of in tasks for t in of}).index(of[0]) for of in tasks])
    longest = np.array([max(length[task == number]) for number in task])
    returns = episode_returns(length, success, longest, 1.0)
    advantage = advantages(returns, np.array(rows["value"], np.float32), length, 3)
    np.testing.assert_allclose(rows["return"], returns, rtol=1e-6)
    np.testing.assert_allclose(rows["advantage"], advantage, rtol=1e-6)
    frames = np.repeat(task, length)
    assert rows["positive"] == label_positive(advantage, frames, np.zeros(len(frames), bool), 0.3).tolist()
    assert rows["success"] == np.repeat(success, length).tolist()
    assert sum(rows["held_out"]) > 0
    assert not np.isnan(rows["value"]).any()


def test_values_do_not_depend_on_workers_blocks_or_restarts(finished, setting, ray_cluster):
    checkpoint = latest_checkpoint(finished / "checkpoints")
    (expected,) = judge_frames(resolved(setting).training, checkpoint)
    one = resolved(setting, **{"scaling.num_workers": 1}).training
    (found,) = judge_frames(one, checkpoint)
    np.testing.assert_array_equal(found, expected)
    rows = pq.read_table(finished / LABELS_NAME)
    np.testing.assert_array_equal(rows["value"].to_numpy(), expected)


def test_a_finished_run_labels_anew_by_other_options(finished, setting, ray_cluster):
    before = pq.read_table(finished / LABELS_NAME)
    assert value.main([*flags(setting), "--resume=true", "--value.positive=0.8"]) == 0
    after = pq.read_table(finished / LABELS_NAME)
    assert before["value"] == after["value"]
    assert np.mean(after["positive"]) > np.mean(before["positive"])


def test_the_report_shows_curves_beside_frames(finished):
    text = write_report(finished).read_text()
    assert "Values and labels" in text and "AUROC" in text
    assert text.count("data:image/webp") == 6  # three episodes of each outcome
    assert "episode 5, failure" in text


def test_another_outcome_is_another_run(setting):
    run = resolved(setting)
    assert "3 of 6 episodes succeeded" in describe_value(run) and "a value function" in describe_value(run)
    (setting[0] / "other.json").write_text(json.dumps(dict.fromkeys(range(5), 1) | {5: 0}))
    other = resolved(setting, **{"outcome.success": f"@{setting[0] / 'other.json'}"})
    assert other.training.job.start.stream != run.training.job.start.stream


@pytest.mark.parametrize("backbone", ["false", "true"])
def test_what_the_plan_counts_is_what_is_built_and_its_rates(setting, backbone):
    run = resolved(setting, **{"value.backbone": backbone, "value.backbone_lr": 1e-4}).training
    loss, _ = build_model(run.policy, torch.device("cpu"))
    trained = {name: p.numel() for name, p in loss.named_parameters() if p.requires_grad}
    assert run.policy.parameters.trainable == sum(trained.values())
    optimizer = build_optimizer(run.policy, loss, steps=10)
    assert set(optimizer.names) == trained.keys()
    rates = [group.get("lr_scale", 1.0) for group in optimizer.optimizer.param_groups]
    assert rates == ([1.0, 0.1] if backbone == "true" else [1.0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outcome.success": "next.success"}, "next.success, and its columns are"),
        ({"scaling.strategy": "fsdp2"}, "only a small head trains"),
        ({"dataset.episodes": "0,2"}, "all 2 episodes succeeded, so that there is nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(setting, changes, said):
    with pytest.raises(ValueError, match=said):
        resolved(setting, **changes)


def test_options_that_a_value_function_has_not_are_no_flags():
    with pytest.raises(ValueError, match="unknown flag --ema.enable"):
        parse_value(["--ema.enable", "true"])
    assert replace(ValueConfig(), seed=3).training().seed == 3
