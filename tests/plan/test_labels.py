"""Labels beside a dataset: round trip and mismatches."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets import make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.safe_parquet import Budget
from vla_finetuning.plan import labels as plan_labels
from vla_finetuning.plan.labels import read_labels, write_labels

EPISODES = (4, 3, 5)


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    return load_metadata(make_dataset(tmp_path_factory.mktemp("labels") / "data", episodes=EPISODES, cameras={}))


def random_labels(frames, seed=0):
    return np.random.default_rng(seed).random(frames) < 0.5


def test_labels_round_trip_by_episode_and_frame(meta, tmp_path):
    path, positive = tmp_path / "labels.parquet", random_labels(9)
    write_labels(path, [meta], [np.array([0, 2])], {"positive": positive, "value": np.zeros(9, np.float32)})
    rows = pq.read_table(path).to_pylist()
    assert [(row["episode_index"], row["frame_index"]) for row in rows] == [
        (episode, frame) for episode in (0, 2) for frame in range(EPISODES[episode])
    ]
    assert {row["dataset"] for row in rows} == {meta.root}
    # In any order of rows.
    pq.write_table(pq.read_table(path).take(np.random.default_rng(1).permutation(9)), path)
    (labels,), digest = read_labels(path, [meta], [np.array([0, 2])])
    assert labels.tolist() == [*positive[:4], False, False, False, *positive[4:]]
    write_labels(path, [meta], [np.array([0, 2])], {"positive": ~positive})
    assert digest != read_labels(path, [meta], [np.array([0, 2])])[1]


def test_labels_of_a_hundred_million_frames_fit_the_budget(meta, tmp_path, monkeypatch):
    """DROID has 27 million frames; roots in buckets are long."""
    meta, budgets, frames = replace(meta, root="s3://" + 95 * "b"), [], 12
    monkeypatch.setattr(plan_labels, "Budget", lambda *limit: budgets.append(Budget(*limit)) or budgets[0])
    write_labels(tmp_path / "labels.parquet", [meta], [np.arange(3)], {"positive": random_labels(frames)})
    read_labels(tmp_path / "labels.parquet", [meta], [np.arange(3)])
    assert budgets[0].taken / frames * 1e8 < budgets[0].bytes


def test_labels_of_moved_dataset_are_read_if_only_one(meta, tmp_path):
    path, moved = tmp_path / "labels.parquet", replace(meta, root="/elsewhere")
    everything = np.arange(3)
    write_labels(path, [meta], [everything], {"positive": random_labels(12)})
    (labels,), _ = read_labels(path, [moved], [everything])
    assert labels.tolist() == random_labels(12).tolist()
    with pytest.raises(ValueError, match="has labels of .* and none of /elsewhere"):
        read_labels(path, [meta, moved], [everything, everything])
    both = np.concatenate([random_labels(12), random_labels(12, 1)])
    write_labels(path, [meta, moved], [everything, everything], {"positive": both})
    (second, first), _ = read_labels(path, [moved, meta], [everything, everything])
    assert [*first, *second] == both.tolist()


def test_labels_and_frames_must_match(meta, tmp_path):
    path = tmp_path / "labels.parquet"
    write_labels(path, [meta], [np.array([0])], {"positive": random_labels(4)})
    with pytest.raises(ValueError, match="5 frames have no label, the first in episode 2"):
        read_labels(path, [meta], [np.array([0, 2])])
    longer = replace(meta, episode_length=np.array([6, 3, 3]))
    write_labels(path, [longer], [np.arange(3)], {"positive": random_labels(12)})
    with pytest.raises(ValueError, match="episode 0 of .* has no frame 4: the labels are of another dataset"):
        read_labels(path, [meta], [np.arange(3)])


def test_missing_or_invalid_label_file_is_refused(meta, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file; python value\.py writes it"):
        read_labels(tmp_path / "none.parquet", [meta], [np.arange(3)])
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"index": [0, 1]}), path)
    with pytest.raises(ValueError, match="lacks the columns"):
        read_labels(path, [meta], [np.arange(3)])
