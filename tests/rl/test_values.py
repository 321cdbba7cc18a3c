"""`value.py`: training through Ray, labels, scores and report, against plain numpy."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import value
from tests.buckets import forget, runs_bucket
from tests.datasets import edit_json, make_dataset
from tests.in_process import RunRows, tasks_here, train
from tests.tiny import make_base
from vla_finetuning.buckets import mirror
from vla_finetuning.buckets.mirror import address, as_file, as_path, push
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args, parse_value
from vla_finetuning.plan.labels import read_labels
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.report import figures
from vla_finetuning.report import values as section
from vla_finetuning.report.page import write_report
from vla_finetuning.rl import values
from vla_finetuning.rl.judging import Judge
from vla_finetuning.rl.returns import advantages, episode_returns, label_positive
from vla_finetuning.rl.values import describe_value, label_frames, resolve_value, score_labels
from vla_finetuning.run.checkpoint import TRAINABLE, checkpoint_names, latest_checkpoint
from vla_finetuning.run.exported import LABELS_NAME
from vla_finetuning.training.model import build_model, build_optimizer, make_prepare

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
        "dataset.eval_split": 0.4,
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


def resolved(setting, name="run", **changes):
    return resolve_value(parse_value(flags(setting, name, **changes)), gpus_found=0)


@pytest.fixture(scope="module")
def finished(setting, ray_cluster):
    assert value.main(flags(setting, eval_steps=0)) == 0
    return setting[0] / "run"


def log_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_checkpoint_contains_only_value_head(finished):
    names = checkpoint_names(latest_checkpoint(finished / "checkpoints"), TRAINABLE)
    assert names and all(name.startswith("critic.") for name in names)
    assert [line["step"] for line in log_of(finished)] == [1, 2, 3, 4]


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3, 4, 5), (0, 1, 3, 4)])
def test_labels_scores_and_curves_equal_plain_numpy(setting, chosen, tmp_path, monkeypatch):
    """All columns, scores and curves of drawn values, for all episodes and for some."""
    options = {"dataset.episodes": ",".join(map(str, chosen)), "eval_steps": 0}
    run = resolved(setting, output_dir=tmp_path / "run", **options)
    drawn = np.random.default_rng(0).normal(size=sum(EPISODES)).astype(np.float32)
    used = np.repeat(np.isin(np.arange(6), chosen), EPISODES)
    judged = drawn[used]
    monkeypatch.setattr(values, "judge_frames", lambda *_: [np.where(used, drawn, np.nan)])
    (tmp_path / "run").mkdir()
    text = label_frames(run, run.training, tmp_path)
    assert ("in-sample" in text) == ("held out: raise --dataset.eval_split" in text) == (len(chosen) == 4)
    table = pq.read_table(tmp_path / "run" / LABELS_NAME)
    columns, meta = {name: np.array(table[name].to_pylist()) for name in table.column_names}, run.training.rows.metas[0]
    length, success = np.array(EPISODES)[list(chosen)], np.array(SUCCESS, bool)[list(chosen)]
    instruction = [meta.episode_tasks[e][0] for e in chosen]
    longest = np.array([max(n for n, t in zip(length, instruction, strict=True) if t == task) for task in instruction])
    returns = episode_returns(length, success, longest, 1.0)
    advantage = advantages(returns, judged, length, 3)
    (held_out,) = run.training.rows.eval_episodes
    # Of either outcome 40 % of three are one, and of two none.
    assert held_out.tolist() == ([4, 5] if len(chosen) == 6 else [])
    np.testing.assert_allclose(columns["return"], returns, rtol=1e-6)
    np.testing.assert_allclose(columns["advantage"], advantage, rtol=1e-6)
    np.testing.assert_array_equal(columns["value"], judged)
    np.testing.assert_array_equal(columns["success"], np.repeat(success, length))
    np.testing.assert_array_equal(columns["held_out"], np.repeat(np.isin(chosen, held_out), length))
    task = np.repeat(np.unique(instruction, return_inverse=True)[1], length)
    positive = label_positive(advantage, task, np.zeros(len(task), bool), 0.3)
    np.testing.assert_array_equal(columns["positive"], positive)

    axes_drawn, strips = [], []
    monkeypatch.setattr(figures, "to_svg", lambda figure, label: axes_drawn.extend(figure.axes) or "")
    monkeypatch.setattr(figures, "to_data_uri", lambda strip, width: strips.append(strip) or "")
    shown = section.values_section(tmp_path / "run")
    assert shown["problem"] is None
    scores, of_success = json.loads(table.schema.metadata[b"scores"]), np.repeat(success, length)
    assert scores["frames"] == len(positive) and scores["positive"] == pytest.approx(positive.mean())
    assert scores["positive_of_successes"] == pytest.approx(positive[of_success].mean())
    assert scores["positive_of_failures"] == pytest.approx(positive[~of_success].mean())
    last, trained = judged[np.cumsum(length) - 1], ~np.isin(chosen, held_out)
    for name, part in (("in_sample", trained), ("held_out", ~trained)):
        pairs = [last[i] < last[j] for i in np.flatnonzero(part & ~success) for j in np.flatnonzero(part & success)]
        assert scores[f"auroc_last_{name}"] == (pytest.approx(np.mean(pairs)) if pairs else None)
    # Failures first, of each outcome those held out first, and at most three.
    order = sorted(range(len(chosen)), key=lambda n: (success[n], chosen[n] not in held_out))
    outcomes = {n: "success" if success[n] else "failure" for n in order}
    assert [(episode["title"], episode["instruction"]) for episode in shown["episodes"]] == [
        (f"episode {chosen[n]}, {outcomes[n]}", instruction[n]) for n in order
    ]
    for axes, strip, n in zip(axes_drawn[:-1], strips, order, strict=True):  # then that of all advantages
        frames = slice(length[:n].sum(), length[: n + 1].sum())
        for line, name in zip(axes.lines, ("value", "return"), strict=True):
            np.testing.assert_array_equal(line.get_ydata(), columns[name][frames], err_msg=name)
            np.testing.assert_allclose(line.get_xdata(), np.arange(length[n]) / meta.fps)
        assert strip.shape == (32, 40 * min(section.SHOWN_FRAMES, length[n]), 3)


def test_longest_episode_of_task_spans_datasets_and_used_episodes():
    """A task is an instruction, in any dataset; that of an episode with several is its first."""
    tasks = [[("open",), ("close", "open"), ("open",)], [("close",), (), ("close",)]]
    lengths, used = [[5, 9, 30], [12, 4, 40]], [np.array([0, 1])] * 2
    metas = [SimpleNamespace(episode_tasks=t, episode_length=np.array(n)) for t, n in zip(tasks, lengths, strict=True)]
    numbers = values._task_numbers(metas)
    assert [each.tolist() for each in numbers] == [[0, 1, 0], [1, 2, 1]]
    assert values._longest(metas, used, numbers).tolist() == [5, 12, 4]


def test_frames_without_value_are_refused(setting, tmp_path, monkeypatch):
    run = resolved(setting, output_dir=tmp_path / "run")
    monkeypatch.setattr(values, "judge_frames", lambda *_: [np.where(np.arange(sum(EPISODES)) == 7, np.nan, 0.0)])
    with pytest.raises(RuntimeError, match="1 frames of .* were not judged"):
        label_frames(run, run.training, tmp_path)


def test_values_do_not_depend_on_workers_order_or_restarts(finished, setting):
    """Two processes of Ray Data judged the blocks; here it is one, in another order."""
    judge, rows = judge_here(setting, finished), np.arange(sum(EPISODES))
    judged = [judge(block) for block in np.split(rows, len(rows) // 2)[::-1]][::-1]
    expected = pq.read_table(finished / LABELS_NAME)["value"].to_numpy()
    np.testing.assert_array_equal(np.concatenate(judged), expected)
    # In batches of other rows they are the same but for rounding.
    shuffled = np.random.default_rng(0).permutation(rows)
    np.testing.assert_allclose(judge(shuffled), expected[shuffled], rtol=1e-5)


def judge_here(setting, finished):
    """Judges rows in this process."""
    run = resolved(setting).training
    judge = Judge(run.policy, latest_checkpoint(finished / "checkpoints"), run.job.batch_size, use_gpu=False)
    prepare, source = make_prepare(run.policy, run.rows), run.rows.in_stored_order()

    def values(rows):
        (block,) = source.read_rows(rows.tolist(), len(rows))
        return judge(prepare(block))["value"]

    return values


def test_two_workers_equal_one_with_twice_the_batch(finished, setting):
    """The head that two processes trained through Ray, and the same four steps here, with a measured loss."""
    run = resolved(setting, "one", **{"scaling.num_workers": 1, "grad_accum": 2}).training
    with tasks_here():
        one_worker = train(run, RunRows(run)).named()
    line = log_of(run.job.output_dir)[1]
    assert {"eval_loss", "eval_loss_by_task"} <= line.keys() and "eval_loss_by_time" not in line
    stored = latest_checkpoint(finished / "checkpoints").rglob(f"{TRAINABLE}.safetensors")
    two_workers = load_file(next(stored))
    start, _ = build_model(run.policy, torch.device("cpu"))
    assert one_worker.keys() == two_workers.keys()
    for name, weights in one_worker.items():
        torch.testing.assert_close(weights.detach(), two_workers[name], rtol=1e-3, atol=1e-5)
    assert not torch.equal(start.state_dict()["critic.output.weight"], two_workers["critic.output.weight"])


def test_finished_run_is_relabelled_without_training(finished, setting, monkeypatch):
    before, judge = pq.read_table(finished / LABELS_NAME), judge_here(setting, finished)
    monkeypatch.setattr(value, "fit", lambda *_: pytest.fail("it trained again"))
    monkeypatch.setattr(values, "judge_frames", lambda run, checkpoint: [judge(np.arange(sum(EPISODES)))])
    assert value.main([*flags(setting, eval_steps=0), "--resume=true", "--value.positive=0.8"]) == 0
    after = pq.read_table(finished / LABELS_NAME)
    assert before["value"] == after["value"]
    assert np.mean(after["positive"]) > np.mean(before["positive"])


def test_labels_in_bucket_equal_disk(finished, setting, tmp_path, monkeypatch):
    """A run that learns from them reads them there."""
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path))
    judge = judge_here(setting, finished)
    monkeypatch.setattr(values, "judge_frames", lambda run, checkpoint: [judge(np.arange(sum(EPISODES)))])
    on_disk = resolved(setting, output_dir=tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    label_frames(on_disk, on_disk.training, finished)
    with runs_bucket():
        run = resolved(setting, output_dir="s3://runs/value")
        label_frames(run, run.training, finished)
        push(as_path("s3://runs/value"))
        forget()
        path = as_file(f"s3://runs/value/{LABELS_NAME}")
        meta, everything = run.training.rows.metas[0], np.arange(len(EPISODES))
        (positive,), _ = read_labels(path, [meta], [everything])
        assert positive.tolist() == pq.read_table(tmp_path / "disk" / LABELS_NAME)["positive"].to_pylist()
        words = [*meta.tasks.values(), "Advantage: positive", "Advantage: negative"]
        base = make_base(tmp_path / "base", meta, chunk_size=4, tasks=words)
        options = {"dataset.root": setting[1], "policy.path": base, "recap.labels": address(path)}
        options |= {"output_dir": tmp_path / "learned", "steps": 1, "scaling.use_gpu": "false"}
        learner = resolve(parse_args([f"--{key}={value}" for key, value in options.items()]), gpus_found=0)
        frames = {"dataset_index": np.zeros(len(positive), np.int64), "index": np.arange(len(positive))}
        np.testing.assert_array_equal(learner.rows.positive(frames), positive)
        with pytest.raises(FileNotFoundError, match="s3://runs/none/labels.parquet: no such file; python value.py"):
            read_labels(as_file("s3://runs/none/labels.parquet"), [meta], [everything])


def test_report_shows_value_curves_and_frames(finished, tmp_path):
    text = write_report(finished).read_text()
    assert "Values and labels" in text and "auroc_last_held_out" in text
    assert text.count('class="film" src="data:image/jpeg') == 6  # three episodes of each outcome
    assert "episode 5, failure" in text
    # Labels of an earlier version have no scores.
    pq.write_table(pq.read_table(finished / LABELS_NAME).replace_schema_metadata(None), tmp_path / LABELS_NAME)
    shown = section.values_section(tmp_path)
    assert shown["labels"] == [] and len(shown["episodes"]) == 6


def test_auroc_excludes_advantages_that_include_outcome():
    """Frames within the horizon of an episode's end; the AUROC of values is of the last frames."""
    rng, length = np.random.default_rng(0), np.array([4, 6, 5, 3])
    to_come, failed = np.repeat(np.cumsum(length), length) - np.arange(18) - 1, np.repeat([True, False] * 2, length)
    held_out = np.repeat([True, True, False, False], length)
    columns = {"success": ~failed, "held_out": held_out, "positive": rng.random(18) < 0.5}
    columns |= {"advantage": rng.normal(size=18), "value": rng.normal(size=18)}
    scores = score_labels(columns, to_come, 3)
    negative = -columns["advantage"]
    assert scores["auroc_held_out"] == np.mean([negative[0] > negative[j] for j in (4, 5, 6)])
    assert scores["auroc_in_sample"] is None and scores["horizon"] == 3  # the success is as short as the horizon
    assert scores["auroc_last_held_out"] == (columns["value"][3] < columns["value"][9])
    assert scores["auroc_last_in_sample"] == (columns["value"][14] < columns["value"][17])
    # The frames of one episode count as one episode.
    assert (scores["auroc_low"], scores["auroc_high"]) == values.auroc_interval(scores["auroc_held_out"], 1, 1)
    unknown = score_labels(columns, to_come, 50)
    text = values.labels_text(unknown)
    assert unknown["auroc_held_out"] is None and "unknown of advantages over 50 frames" in text and "BELOW" not in text


def test_low_auroc_is_reported_with_remedy():
    scores = dict.fromkeys(("positive", "positive_of_successes", "positive_of_failures"), 0.5)
    for score, least, remedy in ((0.8, 0.8, "more --steps"), (0.6, 0.4, "chance: add episodes"), (0.95, 0.95, "")):
        scores |= {f"auroc{kind}": score for kind in ("_held_out", "_low", "_high", "_last_held_out")}
        scores |= {"frames": 9, "horizon": 3, "auroc_last_low": score, "auroc_last_high": score, "auroc_low": least}
        text = values.labels_text(scores)
        assert ("BELOW 0.9" in text) == bool(remedy) and remedy in text
        assert f"{score:.3f} ({least:.3f} to {score:.3f}, on held-out episodes) of advantages" in text


def test_changed_outcome_changes_run_identity(setting):
    run = resolved(setting)
    assert "3 of 6 episodes succeeded" in describe_value(run) and "a value function" in describe_value(run)
    (setting[0] / "other.json").write_text(json.dumps(dict.fromkeys(range(5), 1) | {5: 0}))
    other = resolved(setting, **{"outcome.success": f"@{setting[0] / 'other.json'}"})
    assert other.training.job.start.stream != run.training.job.start.stream


@pytest.mark.parametrize("backbone", ["false", "true"])
def test_plan_counts_trainable_parameters_and_learning_rates(setting, backbone):
    rate = {"value.backbone_lr": 1e-4} if backbone == "true" else {}
    run = resolved(setting, **{"value.backbone": backbone, **rate}).training
    loss, _ = build_model(run.policy, torch.device("cpu"))
    trained = {name: p.numel() for name, p in loss.named_parameters() if p.requires_grad}
    assert run.policy.parameters.trainable == sum(trained.values())
    optimizer = build_optimizer(run.policy, loss, steps=10)
    assert set(optimizer.names) == trained.keys()
    rates = [group.get("lr_scale", 1.0) for group in optimizer.optimizer.param_groups]
    assert rates == ([1.0, 0.1] if backbone == "true" else [1.0])


def test_saved_config_contains_resolved_options(setting):
    run = resolved(setting)
    saved = run.config.to_json()
    assert saved["dataset"]["statistics"] == run.training.config.dataset.statistics != "auto"
    assert saved["scaling"]["use_gpu"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling.strategy": "fsdp2"}, "value functions are not sharded"),
        ({"dataset.episodes": "0,2"}, "all 2 episodes succeeded, which leaves nothing to compare"),
        ({"dataset.on_error": "skip"}, "has no value, and no label"),
        ({"dataset.eval_split": 0.3}, "eval_split=0.3 holds out no episode to compute a loss on"),
    ],
)
def test_invalid_value_options_are_refused(setting, changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, **changes)


def test_datasets_of_different_rates_are_refused(setting, tmp_path):
    """Also where the actions of a chunk are equally far apart."""
    faster = shutil.copytree(setting[1], tmp_path / "faster")
    edit_json(faster / "meta/info.json", lambda info: info.update(fps=20))
    mixture = json.dumps({str(setting[1]): {}, str(faster): {"fps": 10}})
    with pytest.raises(ValueError, match="have 10 and 20 frames per second, .*--value.horizon count frames: give"):
        resolved(setting, **{"dataset.root": "null", "dataset.mixture": mixture})
