"""Statistics that a dataset lacks: ground truth is what LeRobot's own writer stored."""

import json
import math
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets import make_dataset
from vla_finetuning.data import statistics as dataset_stats
from vla_finetuning.data.metadata import load_metadata, rename_features
from vla_finetuning.data.statistics import STATISTICS, complete_stats, compute_as_lerobot

# Of one frame, shorter and longer than each other, in several parquet files.
EPISODES = (12, 7, 15, 1, 10, 9)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A dataset with the stats.json that LeRobot wrote, never changed."""
    root = tmp_path_factory.mktemp("stats") / "original"
    return make_dataset(root, episodes=EPISODES, cameras={}, extra_features=True, true_quantiles=False)


@pytest.fixture
def root(original, tmp_path):
    """A copy to change; the data files are shared by links inside the copy's own folder."""
    copy = tmp_path / "dataset"
    for path in original.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(original)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return copy


def edit_stats(root, edit):
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    edit(stats)
    path.write_text(json.dumps(stats))


def drop_quantiles(stats):
    for values in stats.values():
        for name in ("q01", "q99"):
            del values[name]


def no_pass(*args):
    raise AssertionError("a pass over the data was started")


def test_equals_what_lerobot_wrote_bit_for_bit(original):
    meta = load_metadata(original)
    assert len(meta.data_files) > 1
    keys = ["action", "observation.state", "observation.counter", "next.reward"]
    computed = compute_as_lerobot(meta, keys, meta.episode_index)
    for key in keys:
        assert set(computed[key]) == set(STATISTICS) == set(meta.stats[key])
        for name in STATISTICS:
            np.testing.assert_array_equal(computed[key][name], meta.stats[key][name], err_msg=f"{key}/{name}")
            assert computed[key][name].shape == meta.stats[key][name].shape


def test_two_dimensional_features_equal_lerobots(tmp_path):
    root = make_dataset(
        tmp_path / "d", episodes=(5, 3, 8), cameras={}, extra_features=True, fps=30, true_quantiles=False
    )
    meta = load_metadata(root)
    computed = compute_as_lerobot(meta, ["observation.grid"], meta.episode_index)
    for name in STATISTICS:
        np.testing.assert_array_equal(computed["observation.grid"][name], meta.stats["observation.grid"][name])


def test_some_episodes_only(original):
    """Plain numpy over the chosen episodes' rows is the judge."""
    meta = load_metadata(original)
    rows = np.concatenate([pq.read_table(original / f)["action"].combine_chunks().values for f in meta.data_files])
    rows = rows.reshape(-1, 3)
    chosen = np.concatenate([rows[meta.episode_start[e] :][: EPISODES[e]] for e in (1, 4)]).astype(np.float64)
    computed = compute_as_lerobot(meta, ["action"], np.array([1, 4]))["action"]
    np.testing.assert_allclose(computed["mean"], chosen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(computed["std"], chosen.std(0), rtol=1e-4)
    np.testing.assert_array_equal(computed["max"], chosen.max(0))
    assert computed["count"].tolist() == [17]


def test_whoever_may_read_the_run_may_read_them(root, tmp_path, assert_usual_permissions):
    edit_stats(root, drop_quantiles)
    complete_stats(load_metadata(root), {"action": {"q01"}}, cache_dir=tmp_path / "stats")
    assert len(list((tmp_path / "stats").iterdir())) == 1
    assert_usual_permissions(tmp_path / "stats")


def test_nothing_missing_starts_no_pass(original, monkeypatch):
    monkeypatch.setattr(dataset_stats, "compute_as_lerobot", no_pass)
    meta = load_metadata(original)
    stats, computed = complete_stats(meta, {"action": {"q01", "q99"}, "observation.state": {"mean"}}, cache_dir=None)
    assert computed == []
    assert stats == meta.stats


def test_missing_quantiles_come_back(original, root, tmp_path, monkeypatch):
    edit_stats(root, drop_quantiles)
    wanted = load_metadata(original).stats
    required = {"action": {"q01", "q99", "mean"}, "observation.state": {"q99"}}
    meta = load_metadata(root)
    stats, computed = complete_stats(meta, required, cache_dir=tmp_path / "cache")
    assert computed == ["action/q01", "action/q99", "observation.state/q99"]
    for key, name in (entry.rsplit("/", 1) for entry in computed):
        np.testing.assert_array_equal(stats[key][name], wanted[key][name])
    assert "q01" not in stats["observation.state"], "only what was asked for is added"
    assert "q01" not in meta.stats["action"], "the metadata stays as it was read"
    np.testing.assert_array_equal(stats["action"]["mean"], wanted["action"]["mean"])

    monkeypatch.setattr(dataset_stats, "compute_as_lerobot", no_pass)
    again, computed_again = complete_stats(load_metadata(root), required, cache_dir=tmp_path / "cache")
    assert computed_again == computed
    np.testing.assert_array_equal(again["action"]["q99"], stats["action"]["q99"])
    assert again["action"]["q99"].dtype == stats["action"]["q99"].dtype


def test_without_stats_json(original, root):
    (root / "meta/stats.json").unlink()
    meta = load_metadata(root)
    assert meta.stats == {}
    meta = rename_features(meta, {"observation.state": "observation.joints"})  # not so in its files
    required = {"action": set(STATISTICS), "observation.joints": {"mean"}}
    stats, computed = complete_stats(meta, required, cache_dir=None)
    assert computed == [*sorted(f"action/{name}" for name in STATISTICS), "observation.joints/mean"]
    wanted = load_metadata(original).stats
    for name in STATISTICS:
        np.testing.assert_array_equal(stats["action"][name], wanted["action"][name])
    np.testing.assert_array_equal(stats["observation.joints"]["mean"], wanted["observation.state"]["mean"])


def test_errors_name_dataset_and_episode(root):
    (root / "meta/stats.json").unlink()
    meta = load_metadata(root)
    os.remove(root / meta.data_files[1])
    with pytest.raises(FileNotFoundError, match=f"{root}.*{meta.data_files[1]} is missing"):
        complete_stats(meta, {"action": {"q01"}}, cache_dir=None)
    # As after a faulty merge: this file holds another's episodes.
    (root / meta.data_files[1]).write_bytes((root / meta.data_files[0]).read_bytes())
    with pytest.raises(ValueError, match=f"{root}.*should be episode {meta.episode_data_file.tolist().index(1)}"):
        complete_stats(meta, {"action": {"q01"}}, cache_dir=None)


def test_the_cache_knows_another_dataset_at_the_same_place(root, tmp_path, monkeypatch):
    (root / "meta/stats.json").unlink()
    passes = []

    def compute(meta, keys, episodes):
        passes.append((keys, episodes.tolist()))
        return compute_as_lerobot(meta, keys, episodes)

    monkeypatch.setattr(dataset_stats, "compute_as_lerobot", compute)
    cache = tmp_path / "cache"
    complete_stats(load_metadata(root), {"action": {"q01"}}, cache_dir=cache)
    complete_stats(load_metadata(root), {"action": {"q99"}}, cache_dir=cache)
    assert len(passes) == 1
    complete_stats(load_metadata(root), {"action": {"q01"}}, cache_dir=cache, episodes=[0, 1])
    assert len(passes) == 2
    file = root / load_metadata(root).data_files[0]
    os.utime(file, (1, 1))
    complete_stats(load_metadata(root), {"action": {"q01"}}, cache_dir=cache)
    assert len(passes) == 3


@pytest.mark.parametrize("damage", ["", "[]", '{"action": {"q01": "x"}}', '{"action": 1}'])
def test_a_damaged_cache_is_computed_again(root, tmp_path, damage):
    (root / "meta/stats.json").unlink()
    meta = load_metadata(root)
    first, _ = complete_stats(meta, {"action": {"q01"}}, cache_dir=tmp_path)
    (path,) = tmp_path.glob("stats-*.json")
    path.write_text(damage)
    second, _ = complete_stats(meta, {"action": {"q01"}}, cache_dir=tmp_path)
    np.testing.assert_array_equal(first["action"]["q01"], second["action"]["q01"])
    assert json.loads(path.read_text())["action"]["q01"] == first["action"]["q01"].tolist()
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_cameras_are_refused(tmp_path):
    meta = load_metadata(make_dataset(tmp_path / "d", episodes=(3,)))
    with pytest.raises(ValueError, match=r"\['q02'\] of 'observation.images.top': unknown"):
        complete_stats(meta, {"observation.images.top": {"q02"}}, cache_dir=None)
    assert complete_stats(meta, {"observation.images.top": {"mean"}}, cache_dir=None)[1] == []
    del meta.stats["observation.images.top"]
    with pytest.raises(ValueError, match="observation.images.top.*cameras are not computed.*IDENTITY"):
        complete_stats(meta, {"observation.images.top": {"mean"}}, cache_dir=None)


def test_unknown_feature(original):
    with pytest.raises(ValueError, match=r"'mean'.*'actoin'.*no such feature; it has \['action'"):
        complete_stats(load_metadata(original), {"actoin": {"mean"}}, cache_dir=None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_statistics_that_are_not_finite(root, value):
    edit_stats(root, lambda stats: stats["action"]["q99"].__setitem__(1, value))
    meta = load_metadata(root)
    assert complete_stats(meta, {"action": {"mean"}}, cache_dir=None)[1] == []
    with pytest.raises(ValueError, match=f"{root}: statistic 'q99' of 'action' is not finite"):
        complete_stats(meta, {"action": {"mean", "q99"}}, cache_dir=None)


def test_statistics_of_another_shape(root):
    edit_stats(root, lambda stats: stats["action"]["q99"].pop())
    with pytest.raises(ValueError, match=r"'q99' of 'action' has shape \(2,\), expected \(3,\)"):
        complete_stats(load_metadata(root), {"action": {"q99"}}, cache_dir=None)


def rewrite_column(root, meta, key, values):
    path = root / meta.data_files[0]
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(key), key, values(table[key])), path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda c: nan_at(c, 5), "action of episode 0, frame 5 holds NaN or infinity"),
        (lambda c: pa.array([[1.0, 2.0, 3.0]] * (len(c) - 1) + [None]), "column action: 1 empty values"),
        (lambda c: pa.array([[1.0, 2.0, None]] * len(c)), r"column action: \d+ empty values"),
        (
            lambda c: pa.array([[1.0, 2.0], [1.0] * 4] * (len(c) // 2) + [[1.0] * 3] * (len(c) % 2)),
            "lists of .* values, expected shape",
        ),
        (lambda c: pa.array([1.0] * len(c)), r"column action: values of shape \(\), expected \(3,\)"),
        (lambda c: pa.array([["a", "b", "c"]] * len(c)), "column action: holds string, expected numbers"),
    ],
)
def test_data_that_is_not_what_the_metadata_says(root, values, message):
    meta = load_metadata(root)
    rewrite_column(root, meta, "action", values)
    with pytest.raises(ValueError, match=f"{meta.data_files[0]}.*{message}"):
        compute_as_lerobot(meta, ["action"], meta.episode_index)


def nan_at(column, row):
    values = np.array(column.to_pylist(), dtype=np.float32)
    values[row, 1] = np.nan
    return pa.array(values.tolist())
