"""Exact statistics against NumPy over all rows."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.datasets import all_rows, edit_rows, make_dataset
from tests.plan import test_frames as idling
from vla_finetuning.buckets.store import StorageError
from vla_finetuning.data import quantiles, statistics
from vla_finetuning.data.idle import Movement
from vla_finetuning.data.metadata import load_metadata, reorder_dimensions
from vla_finetuning.data.quantiles import QUANTILES, Source, exact_stats, outside, sample_rows
from vla_finetuning.data.relative_actions import RelativeActions, relative_chunks
from vla_finetuning.data.statistics import STATISTICS

EPISODES = (12, 7, 15, 2, 10, 9)
KEYS = ["action", "observation.state", "observation.counter", "next.reward", "observation.grid"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantiles")
    root = make_dataset(folder / "d", episodes=EPISODES, cameras={}, extra_features=True, true_quantiles=False)

    def spread(values, episode, frame):
        values *= np.float32(10) ** (episode[:, None] - 3)
        values[frame % 2 == 0, 0] = -0.0
        values[frame % 2 == 1, 0] = 0.0
        values[:, 1] = 0.1

    edit_rows(root, "observation.state", spread)
    return root


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantiles")
    return make_dataset(folder / "second", episodes=(30, 41), cameras={}, extra_features=True, seed=1)


@pytest.fixture(params=["one pass", "two passes"])
def ways(request, monkeypatch):
    """Count in one or two passes; return the recorded passes and their expected number."""
    passes, in_threads = [], quantiles.in_threads
    monkeypatch.setattr(quantiles, "in_threads", lambda *args: passes.append(args[0].root) or in_threads(*args))
    if request.param == "two passes":
        monkeypatch.setattr(quantiles, "ONE_PASS_VALUES", 0)
    return passes, 1 + (request.param == "two passes")


def numpys(rows, weights=None):
    """Compute weighted statistics of rows (N, ...) by NumPy."""
    rows = rows.reshape(len(rows), -1)
    mean = np.average(rows, axis=0, weights=weights)
    # NumPy divides weights by their sum in float64, and then looks the quantile up.
    quantiles_of_rows = {
        name: np.array([np.quantile(column, q, weights=weights, method="inverted_cdf") for column in rows.T])
        for name, q in QUANTILES.items()
    }
    return quantiles_of_rows | {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": mean,
        "std": np.sqrt(np.average((rows - mean) ** 2, axis=0, weights=weights)),
    }


def assert_numpys(actual, rows, weights=None):
    for name, expected in numpys(rows, weights).items():
        values = np.ravel(actual[name])
        if name in ("mean", "std"):
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-9, err_msg=name)
        else:
            np.testing.assert_array_equal(values, expected, err_msg=name)


def rows_of(meta, key, episodes):
    rows = all_rows(Path(meta.root), [key])[key]
    return np.concatenate([rows[meta.episode_start[e] :][: meta.episode_length[e]] for e in episodes])


@pytest.mark.parametrize("chosen", [range(6), (0, 2, 5)])
def test_exact_statistics_equal_numpys(root, ways, chosen):
    meta = load_metadata(root)
    assert len(meta.data_files) > 1
    joint, (single,) = exact_stats([Source(meta, np.array(chosen))], KEYS, cache_dir=None)
    assert len(ways[0]) == ways[1]
    for key in KEYS:
        assert set(joint[key]) == set(STATISTICS) and joint[key]["q01"].shape == meta.features[key].shape
        assert_numpys(joint[key], rows_of(meta, key, chosen))
        assert joint[key]["count"].tolist() == [sum(EPISODES[e] for e in chosen)]
        assert {name: values.tolist() for name, values in single[key].items()} == {
            name: values.tolist() for name, values in joint[key].items()
        }
    state = joint["observation.state"]
    assert state["std"][1] == 0 and state["q01"][1] == state["q99"][1] == np.float32(0.1)  # a joint that never moves


def test_mixture_statistics_equal_weighted_numpys(root, second, ways):
    """Datasets together, with dimensions in another order in the second one's files."""
    first, other = load_metadata(root), load_metadata(second)
    other = reorder_dimensions(other, {"action": (2, 0, 1)}, first)
    sources = [Source(first, np.arange(6), 22 / 55), Source(other, np.array([1]), 44 / 41)]
    joint, each = exact_stats(sources, KEYS, cache_dir=None)
    for key in KEYS:
        rows = [rows_of(first, key, range(6)), rows_of(other, key, [1])]
        if key == "action":
            rows[1] = rows[1][:, [2, 0, 1]]
        weights = np.repeat([22 / 55, 44 / 41], [55, 41])
        assert_numpys(joint[key], np.concatenate(rows), weights)
        assert joint[key]["count"].tolist() == [66]
        for single, dataset_rows in zip(each, rows, strict=True):
            assert_numpys(single[key], dataset_rows)


def test_relative_action_statistics_equal_numpys(root, ways):
    meta = load_metadata(root)
    how = RelativeActions(6, (True, False, True))
    stats, _ = exact_stats([Source(meta, np.arange(1, 6))], ["action", "next.reward"], cache_dir=None, relative=how)
    rows = [
        relative_chunks(*(rows_of(meta, key, [e]).astype(np.float32) for key in ("action", "observation.state")), how)
        for e in range(1, 6)
    ]
    assert_numpys(stats["action"], np.concatenate(rows).astype(np.float64))
    assert_numpys(stats["next.reward"], rows_of(meta, "next.reward", range(1, 6)))
    # Other features need no chunk.
    exact_stats([Source(meta, np.array([3]))], ["next.reward"], cache_dir=None, relative=how)
    # If nothing moves, no chunk begins.
    still = Movement((meta.features["action"],), (np.full(3, np.inf),), 1)
    with pytest.raises(ValueError, match=r"of \['action'\]: .* no whole action chunk begins at a frame that"):
        exact_stats([Source(meta, np.arange(6), movement=still)], ["action"], cache_dir=None, relative=how)


def test_coarse_counts_are_small():
    """Workers return groups of values of a file, not values."""
    values = np.random.default_rng(0).normal(size=(100_000, 1)).astype(np.float32)
    coarse = quantiles.count_values(values, coarse=True)
    assert len(coarse.code) < 5_000 and coarse.number.sum() == len(values)
    np.testing.assert_allclose(coarse.sum.sum(), values.sum(dtype=np.float64))


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """A dataset with frames in which nothing moves, the frames that are left, and what movement is measured by."""
    folder = tmp_path_factory.mktemp("quantiles") / "still"
    root = make_dataset(folder, episodes=idling.EPISODES, cameras={}, extra_features=True)
    for key in ("observation.state", "action"):
        edit_rows(root, key, idling.hold)
    meta = load_metadata(root)
    left = np.concatenate([meta.episode_start[episode] + frames for episode, frames in idling.LEFT.items()])
    return meta, left, Movement.from_metadata(meta, ["observation.state", "action"], 0.5)


def test_idle_frames_are_excluded_from_statistics(still, root, ways):
    """Also for features that do not measure movement."""
    meta, left, movement = still
    source = Source(meta, np.arange(5), movement=movement)
    rows = all_rows(Path(meta.root), KEYS)
    joint, (single,) = exact_stats([source], KEYS, cache_dir=None)
    for key in KEYS:
        assert_numpys(joint[key], rows[key][left])
        assert single[key]["count"].tolist() == [len(left)] and len(left) < meta.total_frames / 2
    alone, _ = exact_stats([source], ["next.reward"], cache_dir=None)
    assert_numpys(alone["next.reward"], rows["next.reward"][left])

    first = load_metadata(root)
    both, _ = exact_stats([Source(first, np.arange(6), 0.5), replace(source, weight=2.0)], ["action"], cache_dir=None)
    of_first = rows_of(first, "action", range(6))
    weights = np.repeat([0.5, 2.0], [len(of_first), len(left)])
    assert_numpys(both["action"], np.concatenate([of_first, rows["action"][left]]), weights)

    how = RelativeActions(4, (True, False, True))
    stats, _ = exact_stats([source], ["action"], cache_dir=None, relative=how)
    chunks = []
    for episode, frames in idling.LEFT.items():
        of_episode = (rows_of(meta, key, [episode]).astype(np.float32) for key in ("action", "observation.state"))
        begun = relative_chunks(*of_episode, how).reshape(-1, 4, 3)
        chunks += [begun[frame] for frame in frames if frame < len(begun)]
    assert_numpys(stats["action"], np.concatenate(chunks).astype(np.float64))

    sampled, episodes = sample_rows(meta, np.arange(5), ["next.reward"], movement)
    assert episodes == 5
    np.testing.assert_array_equal(sampled["next.reward"].ravel(), rows["next.reward"][left])


def test_cache_key_has_episodes_weights_and_order(root, tmp_path, ways):
    meta, passes = load_metadata(root), ways[0]

    def computed(*args, **options):
        before = len(passes)
        exact_stats(*args, cache_dir=tmp_path, **options)
        return len(passes) > before

    sources = [Source(meta, meta.episode_index), Source(meta, meta.episode_index, 2.0)]
    assert computed(sources, ["action"]) and not computed(sources, ["action"])
    assert computed(sources[:1], ["action"])
    assert computed([replace(sources[0], episodes=np.arange(3))], ["action"])
    assert computed([sources[0], replace(sources[1], weight=3.0)], ["action"])
    assert computed([replace(sources[0], meta=reorder_dimensions(meta, {"action": (1, 0, 2)}, meta))], ["action"])
    assert computed(sources[:1], ["action"], relative=RelativeActions(6, (True,) * 3))
    moving = [replace(sources[0], movement=Movement.from_metadata(meta, ["action"], seconds)) for seconds in (0.2, 0.4)]
    assert all(computed([source], ["action"]) and not computed([source], ["action"]) for source in moving)


def test_unreadable_file_is_skipped_only_if_damaged(root, tmp_path, ways, caplog, monkeypatch):
    copy = shutil.copytree(root, tmp_path / "copy")
    meta = load_metadata(copy)
    (copy / meta.data_files[0]).write_bytes(b"not parquet")
    source = Source(meta, meta.episode_index)
    with pytest.raises(ValueError, match=meta.data_files[0]):
        exact_stats([source], ["action"], cache_dir=None)
    stats, _ = exact_stats([source], ["action"], cache_dir=None, skip_unreadable=True)
    left = np.flatnonzero(meta.episode_data_file != 0)
    assert_numpys(stats["action"], rows_of(load_metadata(root), "action", left))
    assert f"computed without {meta.base}/{meta.data_files[0]}" in caplog.text
    lost = Source(meta, np.flatnonzero(meta.episode_data_file == 0))
    for sources in ([lost], [source, lost]):
        with pytest.raises(ValueError, match="no file could be read"):
            exact_stats(sources, ["action"], cache_dir=None, skip_unreadable=True)
    # A store that does not answer, and a disk that is gone, say nothing of the data.
    real = quantiles.episode_arrays
    for error in (StorageError("no answer"), OSError(5, "Input/output error")):

        def silent(fs, path, error=error, **file):
            if path.endswith(meta.data_files[-1]):
                raise error
            return real(fs, path=path, **file)

        monkeypatch.setattr(quantiles, "episode_arrays", silent)
        with pytest.raises(OSError, match="no answer|Input/output"):
            exact_stats([source], ["action"], cache_dir=tmp_path / "cache", skip_unreadable=True)
    monkeypatch.setattr(quantiles, "episode_arrays", real)
    rows, read = sample_rows(meta, meta.episode_index, ["action"])  # a look is not a check
    assert read == len(left) and len(rows["action"]) == meta.episode_length[left].sum()


def test_sample_reads_few_episodes_of_few_files(root, second, monkeypatch):
    meta = load_metadata(root)
    rows, read = sample_rows(meta, meta.episode_index, ["action", "observation.state"])
    order = np.arange(meta.num_episodes)
    assert read == meta.num_episodes
    np.testing.assert_array_equal(rows["action"], rows_of(meta, "action", order))
    opened = []
    real = statistics.read_numbers
    monkeypatch.setattr(statistics, "read_numbers", lambda *args: opened.append(args[2]) or real(*args))
    monkeypatch.setattr(quantiles, "SAMPLE_FILES", 2)
    monkeypatch.setattr(quantiles, "SAMPLE_FILE_EPISODES", 1)
    rows, read = sample_rows(meta, np.arange(1, 6), ["action"])
    assert read == len(opened) == 2 and [len(spans) for spans in opened] == [1, 1]
    reordered = reorder_dimensions(meta, {"action": (2, 0, 1)}, meta)
    np.testing.assert_array_equal(
        sample_rows(reordered, np.arange(1, 6), ["action"])[0]["action"], rows["action"][:, [2, 0, 1]]
    )


def test_outside_counts_values_beyond_range():
    values = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 2.0]])
    low, high = np.array([1.0, 1 + 1e-9]), np.array([3.0, 1 + 1e-9])
    assert outside(values, low, high).tolist() == [0.25, 0.25]
    assert outside(values, low - 1, high + 1).tolist() == [0, 0]
    # A thousandth of the range is spared, and a millionth of the larger end.
    for low, high, spare in ((10.0, 20.0, 0.01 + 2e-5), (-2000.0, -1999.999, 1e-6 + 2e-3), (0.0, 1.0, 1e-3 + 1e-6)):
        for beyond, expected in ((1 - 1e-4, 0), (1 + 1e-4, 1)):
            at = np.array([[low - beyond * spare], [high + beyond * spare]])
            assert outside(at, np.array(low), np.array(high)).tolist() == [expected]
    assert outside(np.array([[1.0], [3.0], [4.0]]), np.array([2.0]), np.array([5.0])).tolist() == [1 / 3]
