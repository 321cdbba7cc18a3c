"""Computed statistics against those that LeRobot's own writer stored."""

import json
import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets import edit_json, make_dataset
from vla_finetuning.data import statistics as dataset_stats
from vla_finetuning.data.metadata import load_metadata, rename_features
from vla_finetuning.data.statistics import STATISTICS, compute_as_lerobot

# Episodes of several parquet files, one of a single frame; with the stats.json that LeRobot wrote.
ORIGINAL = {"episodes": (12, 7, 15, 1, 10, 9), "cameras": {}, "extra_features": True, "true_quantiles": False}


def complete_stats(meta, required, cache_dir=None, episodes=None):
    chosen = meta.episode_index if episodes is None else np.array(episodes)
    return dataset_stats.complete_stats(meta, required, cache_dir=cache_dir, episodes=chosen)


def drop_quantiles(stats):
    for values in stats.values():
        for name in ("q01", "q99"):
            del values[name]


def test_statistics_equal_lerobots_bitwise(original, tmp_path):
    # LeRobot writes no grid if an episode has a single frame.
    with_grid = make_dataset(tmp_path / "d", **{**ORIGINAL, "episodes": (5, 3, 8)})
    keys = ["action", "observation.state", "observation.counter", "next.reward"]
    for root, names in ((original, keys), (with_grid, ["observation.grid"])):
        meta = load_metadata(root)
        computed = compute_as_lerobot(meta, names, meta.episode_index)
        for key in names:
            assert set(computed[key]) == set(STATISTICS) == set(meta.stats[key])
            for name in STATISTICS:
                np.testing.assert_array_equal(computed[key][name], meta.stats[key][name], err_msg=f"{key}/{name}")
                assert computed[key][name].shape == meta.stats[key][name].shape


def test_missing_statistics_are_computed_once(original, root, tmp_path, monkeypatch):
    edit_json(root / "meta/stats.json", drop_quantiles)
    expected, calls = load_metadata(original).stats, []
    monkeypatch.setattr(
        dataset_stats, "compute_as_lerobot", lambda *args: calls.append(args) or compute_as_lerobot(*args)
    )
    meta = load_metadata(root)
    for _ in range(2):
        stats = complete_stats(meta, {"action": {"q01", "q99"}, "observation.state": {"q99"}}, cache_dir=tmp_path)
        for key, name in (("action", "q01"), ("action", "q99"), ("observation.state", "q99"), ("action", "mean")):
            np.testing.assert_array_equal(stats[key][name], expected[key][name])
            assert stats[key][name].dtype == expected[key][name].dtype
    assert len(calls) == 1 and "q01" not in stats["observation.state"] and "q01" not in meta.stats["action"]
    complete_stats(meta, {"action": {"mean"}})
    assert len(calls) == 1, "nothing is missing"


def test_renamed_feature_keeps_its_statistics(root):
    """stats.json may have an older feature of the new name."""
    meta = load_metadata(root)
    stale = replace(meta, stats={**meta.stats, "joints": meta.stats["action"]})
    renamed = rename_features(stale, {"observation.state": "joints"})
    assert renamed.stats["joints"] is meta.stats["observation.state"]


def test_statistics_without_stats_json(original, root):
    (root / "meta/stats.json").unlink()
    meta = load_metadata(root)
    assert meta.stats == {}
    meta = rename_features(meta, {"observation.state": "observation.joints"})  # not so in its files
    stats = complete_stats(meta, {"action": set(STATISTICS), "observation.joints": {"mean"}})
    expected = load_metadata(original).stats
    for name in STATISTICS:
        np.testing.assert_array_equal(stats["action"][name], expected["action"][name])
    np.testing.assert_array_equal(stats["observation.joints"]["mean"], expected["observation.state"]["mean"])


def test_statistics_errors_name_dataset_and_episode(root):
    (root / "meta/stats.json").unlink()
    meta = load_metadata(root)
    os.remove(root / meta.data_files[1])
    with pytest.raises(FileNotFoundError, match=f"{root}.*{meta.data_files[1]} is missing"):
        complete_stats(meta, {"action": {"q01"}})
    # A faulty merge left another file's episodes in this one.
    (root / meta.data_files[1]).write_bytes((root / meta.data_files[0]).read_bytes())
    with pytest.raises(ValueError, match=f"{root}.*should be episode {meta.episode_data_file.tolist().index(1)}"):
        complete_stats(meta, {"action": {"q01"}})


def test_changed_dataset_invalidates_statistics_cache(root, tmp_path, monkeypatch):
    (root / "meta/stats.json").unlink()
    passes = []
    monkeypatch.setattr(
        dataset_stats, "compute_as_lerobot", lambda *args: passes.append(args) or compute_as_lerobot(*args)
    )

    def count_passes(name="q01", episodes=None):
        complete_stats(load_metadata(root), {"action": {name}}, cache_dir=tmp_path / "cache", episodes=episodes)
        return len(passes)

    assert count_passes() == count_passes("q99") == 1
    assert count_passes(episodes=[0, 1]) == 2
    os.utime(root / load_metadata(root).data_files[0], (1, 1))
    assert count_passes() == 3


@pytest.mark.parametrize("damage", ["", '{"action": {"q01": "x"}}', '{"action": 1}'])
def test_damaged_statistics_cache_is_recomputed(root, tmp_path, damage):
    (root / "meta/stats.json").unlink()
    meta = load_metadata(root)
    first = complete_stats(meta, {"action": {"q01"}}, cache_dir=tmp_path)
    (path,) = tmp_path.glob("stats-*.json")
    path.write_text(damage)
    second = complete_stats(meta, {"action": {"q01"}}, cache_dir=tmp_path)
    np.testing.assert_array_equal(first["action"]["q01"], second["action"]["q01"])
    assert json.loads(path.read_text())["action"]["q01"] == first["action"]["q01"].tolist()


def test_stored_statistic_of_wrong_shape_is_refused(root):
    edit_json(root / "meta/stats.json", lambda stats: stats["action"]["q99"].pop())
    with pytest.raises(ValueError, match=r"'q99' of 'action' has shape \(2,\), expected \(3,\)"):
        complete_stats(load_metadata(root), {"action": {"q99"}})


def rewrite_column(root, meta, key, values):
    path = root / meta.data_files[0]
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(key), key, values(table[key])), path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda c: nan_at(c, 5), "action of episode 0, frame 5 holds NaN or infinity"),
        (lambda c: pa.array([[1.0, 2.0, 3.0]] * (len(c) - 1) + [None]), "column action: 1 empty values"),
        (lambda c: pa.array([1.0] * len(c)), r"column action: values of shape \(\), expected \(3,\)"),
        (lambda c: pa.array([["a", "b", "c"]] * len(c)), "column action: holds string, expected numbers"),
    ],
)
def test_statistics_of_invalid_data_are_refused(root, values, message):
    meta = load_metadata(root)
    rewrite_column(root, meta, "action", values)
    with pytest.raises(ValueError, match=f"{meta.data_files[0]}.*{message}"):
        compute_as_lerobot(meta, ["action"], meta.episode_index)


def nan_at(column, row):
    values = np.array(column.to_pylist(), dtype=np.float32)
    values[row, 1] = np.nan
    return pa.array(values.tolist())


def test_matrices_of_episodes_of_one_frame_are_refused_by_name(tmp_path):
    meta = load_metadata(make_dataset(tmp_path / "grid", episodes=(3, 2), extra_features=True))
    meta = replace(meta, episode_length=np.array([3, 1]))
    with pytest.raises(ValueError, match=r"grid: .*\['observation.grid'\] .* one frame, as \[1\].*leave --data"):
        compute_as_lerobot(meta, ["observation.grid"], meta.episode_index)
