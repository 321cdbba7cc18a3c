"""Statistics of a run against numpy and LeRobot, in normalization and in the export."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.compute_stats import aggregate_stats
from lerobot.policies.factory import make_pre_post_processors

import vla
from tests import in_process
from tests.data.test_quantiles import assert_numpys, rows_of
from tests.datasets import edit_json, edit_rows, make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.relative_actions import RelativeActions, relative_chunks
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan import statistics
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.mixture import AGGREGATED, join_stats
from vla_finetuning.plan.resolve import resolve, with_stats
from vla_finetuning.plan.statistics import CONSTANT_RANGE, check_run_statistics, widen_ranges
from vla_finetuning.policies.saving import save_pretrained

VECTORS = ("action", "observation.state")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Make a dataset with exact quantiles, and `averaged` with LeRobot's averages."""
    setting = in_process.make_setting(tmp_path_factory.mktemp("statistics"), episodes=(12, 9, 14, 11))
    make_dataset(setting[0] / "averaged", episodes=(12, 9, 14, 11), true_quantiles=False)
    return setting


def averaged(setting):
    folder, _, base = setting
    return folder, folder / "averaged", base


def test_stored_statistics_are_used_if_accurate(setting):
    run = in_process.resolved(setting)
    assert run.config.dataset.statistics == "stored" and not run.robots[0].missing_stats
    stored = load_metadata(setting[1]).stats
    for key in VECTORS:
        np.testing.assert_array_equal(run.robots[0].stats[key]["q99"], stored[key]["q99"])
    plan = describe(run)
    assert "Statistics   those in meta/stats.json\n" in plan and "46 rows of 4 of the 4 training episodes" in plan
    assert "action: of the values, 0.0% lie outside q01..q99 of meta/stats.json" in plan


def test_inaccurate_stored_statistics_are_replaced_by_exact(setting):
    run = in_process.resolved(averaged(setting))
    assert run.config.dataset.statistics == "exact" and run.robots[0].missing_stats.keys() == set(VECTORS)
    plan = describe(run)
    assert "those stored do not describe" in plan and "LeRobot averages the episodes' quantiles" in plan
    assert "--dataset.statistics=stored trains with them" in plan
    meta = load_metadata(averaged(setting)[1])
    rows = rows_of(meta, "action", range(4))
    share = ((rows < meta.stats["action"]["q01"]) | (rows > meta.stats["action"]["q99"])).mean(0)
    assert share.max() > 0.05
    assert f"action: of the values, {share.mean():.1%} lie outside" in plan
    run = with_stats(run)
    for key in VECTORS:
        assert_numpys(run.robots[0].stats[key], rows_of(meta, key, range(4)))


def test_requested_inaccurate_statistics_are_used_with_warning(setting):
    stored = load_metadata(averaged(setting)[1]).stats
    for choice in ("stored", "lerobot"):
        run = in_process.resolved(averaged(setting), **{"dataset.statistics": choice})
        assert not run.robots[0].missing_stats and run.config.dataset.statistics == choice
        for key in VECTORS:
            np.testing.assert_equal(dict(run.robots[0].stats[key]), stored[key])
    assert "WARNING: they do not describe" in describe(run) and "--dataset.statistics=exact" in describe(run)


def test_invalid_stored_statistics_are_ignored_if_exact(setting, tmp_path):
    root = shutil.copytree(setting[1], tmp_path / "copy")
    edit_json(root / "meta/stats.json", lambda stats: stats["action"].update(q99=[float("nan")]))
    changed = (setting[0], root, setting[2])
    with pytest.raises(ValueError, match="statistic 'q99' of 'action' is not finite"):
        in_process.resolved(changed)
    run = with_stats(in_process.resolved(changed, **{"dataset.statistics": "exact"}))
    assert_numpys(run.robots[0].stats["action"], rows_of(load_metadata(root), "action", range(4)))


def test_missing_stored_quantile_is_computed_or_refused(setting, tmp_path):
    root = shutil.copytree(setting[1], tmp_path / "copy")
    edit_json(root / "meta/stats.json", lambda stats: stats["action"].pop("q99"))
    changed = (setting[0], root, setting[2])
    run = in_process.resolved(changed)
    assert run.config.dataset.statistics == "exact" and "meta/stats.json lacks action: q99" in describe(run)
    with pytest.raises(
        ValueError, match=f"statistics=stored.* not in meta/stats.json of the dataset {root}: action: q99"
    ):
        in_process.resolved(changed, **{"dataset.statistics": "stored"})


@pytest.mark.parametrize(("damage", "relative"), [("file", True), ("NaN", False)])
def test_lerobot_statistics_survive_unreadable_excluded_episode(setting, tmp_path, damage, relative):
    folder, _, base = setting
    root = make_dataset(tmp_path / "d", episodes=(12, 13, 14), true_quantiles=False, data_files_size_in_mb=1e-6)
    edit_json(root / "meta/stats.json", lambda stats: [stats[key].pop("q01") for key in VECTORS])
    flags = {"dataset.statistics": "lerobot", "policy.use_relative_actions": str(relative).lower()}
    without_1, without_0 = (
        in_process.resolved((folder, root, base), **flags | {"dataset.exclude_episodes": number}) for number in (1, 0)
    )

    def computed(run):
        stats = with_stats(run).robots[0].stats["action"]
        return np.concatenate([stats["mean"], stats["q01"]])

    of_all = computed(without_1)
    np.testing.assert_array_equal(computed(without_0), of_all)
    if damage == "file":
        (root / without_1.rows.metas[0].data_files[1]).write_bytes(b"not parquet")
    else:
        edit_rows(root, "action", lambda values, episode, frame: values.__setitem__(episode == 1, np.nan))
    assert not np.array_equal(computed(without_1), of_all)
    with pytest.raises(ValueError, match="holds NaN" if damage == "NaN" else "cannot be read as a parquet file"):
        computed(without_0)


def test_changed_statistics_are_refused_after_first_checkpoint(setting, tmp_path, monkeypatch):
    run = in_process.resolved(setting, output_dir=tmp_path)

    def recorded(**changes):
        stats = {key: dict(values) for key, values in run.robots[0].stats.items()}
        for name, change in changes.items():
            stats["action"][name] = stats["action"][name] * change
        check_run_statistics(run.job, run.policy.select_robot(replace(run.robots[0], stats=stats)))
        return json.loads((tmp_path / "statistics.json").read_text())

    first = recorded()
    assert first["action"]["q99"] == run.robots[0].stats["action"]["q99"].tolist()
    assert recorded(q99=2.0) != first  # nothing was trained yet
    recorded()
    monkeypatch.setattr(statistics, "latest_checkpoint", lambda folder: folder / "step_00000003")
    assert recorded(q01=1 + 1e-6, q99=1 - 1e-6) == first  # files come in another order
    with pytest.raises(ValueError, match=r"statistics.json: the run has been normalised by other statistics of action"):
        recorded(q99=1.1)
    assert recorded() == first


def test_statistics_of_mixture_match_weighted_numpy(setting):
    _, root, base = setting
    second = make_dataset(setting[0] / "other", episodes=(30, 11, 9, 41), seed=1)
    flags = [f"--policy.path={base}", f"--output_dir={setting[0] / 'mixed'}", "--batch_size=2", "--steps=3"]
    mixture = json.dumps({str(root): 1, str(second): 2})
    run = resolve(parse_args([*flags, f"--dataset.mixture={mixture}", "--dataset.eval_split=0.3"]), gpus_found=0)
    assert run.config.dataset.statistics == "exact" and "quantiles of several datasets" in describe(run)
    assert all(len(held_out) for held_out in run.rows.eval_episodes)
    metas = [load_metadata(root), load_metadata(second)]
    completed = with_stats(run)
    for key in VECTORS:
        rows = [rows_of(meta, key, episodes) for meta, episodes in zip(metas, run.rows.train_episodes, strict=True)]
        counts = run.rows.identity["rows_per_source"]
        weights = np.repeat([count / len(part) for count, part in zip(counts, rows, strict=True)], list(map(len, rows)))
        assert_numpys(completed.robots[0].stats[key], np.concatenate(rows), weights)
    by_frames = resolve(
        parse_args([*flags, f"--dataset.mixture={mixture}", "--dataset.mixture_stats=frames"]), gpus_found=0
    )
    for run in (by_frames, resolve(parse_args([*flags, f"--dataset.root={root},{second}"]), gpus_found=0)):
        rows = [rows_of(meta, "action", meta.episode_index) for meta in metas]
        assert_numpys(with_stats(run).robots[0].stats["action"], np.concatenate(rows))


def test_unused_features_may_differ_in_width(setting):
    meta = load_metadata(setting[1])
    effort = [{name: np.ones(width) for name in AGGREGATED} for width in (6, 7)]
    metas = [replace(meta, stats={**meta.stats, "observation.effort": values}) for values in effort]
    assert join_stats(metas, None, VECTORS).keys() == set(VECTORS)


def test_image_statistics_without_height_and_width_are_joined(setting):
    meta = load_metadata(setting[1])
    key = meta.camera_keys[0]
    flat = {name: value if name == "count" else value.reshape(3) for name, value in meta.stats[key].items()}
    joined = join_stats([replace(meta, stats={**meta.stats, key: flat}), meta], None, [key])
    assert joined.keys() == {key}
    for name, value in aggregate_stats([{key: meta.stats[key]}] * 2)[key].items():
        np.testing.assert_array_equal(joined[key][name], value)


def test_missing_statistics_of_one_dataset_match_lerobot_aggregate(setting, tmp_path):
    second = make_dataset(tmp_path / "second", episodes=(5, 8), seed=1, true_quantiles=False)
    expected = aggregate_stats([load_metadata(setting[1]).stats, load_metadata(second).stats])
    (second / "meta/stats.json").unlink()
    run = in_process.resolved(
        setting, **{"dataset.root": f"{setting[1]},{second}", "dataset.statistics": "lerobot", "output_dir": tmp_path}
    )
    assert run.robots[0].missing_stats.keys() == set(VECTORS)
    completed = with_stats(run).robots[0]
    assert not completed.missing_stats
    for key in VECTORS:
        for name in ("q01", "q99"):
            np.testing.assert_allclose(completed.stats[key][name], expected[key][name], rtol=1e-6)


def test_different_units_are_refused_once_statistics_are_computed(setting):
    metres = make_dataset(setting[0] / "metres", episodes=(30, 41), seed=1, true_quantiles=False)
    edit_rows(metres, "action", lambda values, *_: np.multiply(values, 1000, out=values))
    flags = [f"--policy.path={setting[2]}", f"--output_dir={setting[0] / 'units'}", "--batch_size=2", "--steps=3"]
    run = resolve(parse_args([*flags, f"--dataset.root={setting[1]},{metres}"]), gpus_found=0)
    with pytest.raises(ValueError, match="seem to be in different units: 'motor_"):
        with_stats(run)


def test_relative_action_statistics_match_numpy(setting):
    flags = {"policy.use_relative_actions": "true", "policy.chunk_size": 6, "policy.n_action_steps": 2}
    run = with_stats(in_process.resolved(setting, **flags))
    meta = load_metadata(setting[1])
    rows = [
        relative_chunks(
            *(rows_of(meta, key, [e]).astype(np.float32) for key in VECTORS), RelativeActions(6, (True, True, True))
        )
        for e in range(4)
    ]
    assert_numpys(run.robots[0].stats["action"], np.concatenate(rows).astype(np.float64))


def test_plan_refuses_relative_actions_that_dataset_cannot_have(setting, tmp_path):
    folder, _, base = setting
    narrow, relative = make_dataset(tmp_path / "narrow", state_dim=2), {"policy.use_relative_actions": "true"}
    with pytest.raises(ValueError, match="as many dimensions as 'action' has, 3; found 2"):
        in_process.resolved((folder, narrow, base), **relative)
    with pytest.raises(ValueError, match="chunks of 12 frames, and the longest episode has 11; lower --policy.chunk_s"):
        in_process.resolved(setting, **relative, **{"policy.chunk_size": 12, "dataset.episodes": "1,3"})
    in_process.resolved(setting, **relative, **{"policy.chunk_size": 12, "dataset.episodes": "0,1"})


def test_export_carries_trained_statistics(setting, tmp_path):
    run = with_stats(in_process.resolved(averaged(setting)))
    data = vla.build_dataset(run)
    rows = next(data.read(stream=(0, run.rows.last_row)).read_rows(np.arange(4), 4))
    save_pretrained(run.policy.start(), *run.policy.processors(), tmp_path)
    config = PreTrainedConfig.from_pretrained(tmp_path, cli_overrides=["--device=cpu"])
    pre, post = make_pre_post_processors(config, pretrained_path=str(tmp_path))
    low, high = (
        np.quantile(rows_of(run.rows.metas[0], "action", range(4)), q, 0, method="inverted_cdf") for q in (0.01, 0.99)
    )
    expected = 2 * (rows["action"] - low) / (high - low) - 1
    np.testing.assert_allclose(data.prepare(rows)["action"], expected, atol=1e-5)
    np.testing.assert_allclose(post(torch.from_numpy(expected).float()), rows["action"], atol=1e-5)
    batch = {key: torch.from_numpy(np.array(rows[key])) for key in VECTORS}
    np.testing.assert_allclose(pre({**batch, "task": ["go"] * 4})["action"], expected, atol=1e-5)


def test_constant_dimensions_are_normalized_to_bounded_range(setting, tmp_path):
    root = shutil.copytree(setting[1], tmp_path / "copy")

    def hold(values, episode, frame):
        values[:, 0] = 0.3  # a waist
        values[:, 1] = np.where((episode == 0) & (frame == 4), 7.0, 2.0)  # a button that is hardly ever pressed

    for key in VECTORS:
        edit_rows(root, key, hold)
    changed = (tmp_path, root, setting[2])
    run = with_stats(in_process.resolved(changed, **{"dataset.statistics": "exact"}))
    for key in VECTORS:
        ranges = run.robots[0].stats[key]
        np.testing.assert_allclose(ranges["q01"][:2], [0.3 - CONSTANT_RANGE, 2.0], rtol=1e-6)
        np.testing.assert_allclose(ranges["q99"][:2], [0.3 + CONSTANT_RANGE, 7.0], rtol=1e-6)
    data = vla.build_dataset(run)
    rows = next(data.read(stream=(0, run.rows.last_row)).read_rows(np.arange(46), 46))
    actions = data.prepare(rows)["action"]
    assert np.abs(actions).max() < 10
    np.testing.assert_allclose(actions[..., 0], 0, atol=1e-4)
    assert set(actions[..., 1].round(4).ravel()) == {-1, 1}


def test_widen_ranges_changes_only_zero_ranges_in_use():
    stats = {
        "a": {"mean": np.array([2.0, 300.0, 0.0]), "std": np.array([1.0, 0.0, 0.0]), "q50": np.zeros(3)},
        "b": {"min": np.array([0.0, 5.0]), "max": np.array([1.0, 5.0]), "q01": np.zeros(2), "q99": np.zeros(2)},
    }
    widened = widen_ranges(stats, {"a": {"mean", "std"}, "b": {"min", "max"}, "c": {"q01"}})
    assert widened["a"]["std"].tolist() == [1, 3, 0.01] and widened["a"]["mean"] is stats["a"]["mean"]
    assert widened["b"]["min"].tolist() == [0, 4.95] and widened["b"]["max"].tolist() == [1, 5.05]
    assert widened["b"]["q99"].tolist() == [0, 0]  # nothing is normalised by it
    assert stats["a"]["std"].tolist() == [1, 0, 0]
