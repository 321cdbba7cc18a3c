"""Weights of episodes from columns of the metadata and from files."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.datasets import make_dataset, remove_episodes
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.metadata import load_metadata

QUALITY = [0.5, 1, 2, 0, 1, 3]
SUCCESS = [True, False, True, True, True, False]


@pytest.fixture(scope="module")
def metas(tmp_path_factory):
    """Two datasets of six episodes, the first with columns of weights."""
    folder = tmp_path_factory.mktemp("weights")
    roots = [make_dataset(folder / name, cameras={}) for name in ("a", "b")]
    for path in sorted(roots[0].glob("meta/episodes/*/*.parquet")):
        table = pq.read_table(path)
        number = table["episode_index"].to_pylist()
        # Stored in reverse: a row is found by its episode_index.
        table = table.append_column("quality", pa.array([QUALITY[i] for i in number]))
        table = table.append_column("success", pa.array([SUCCESS[i] for i in number]))
        table = table.append_column("holes", pa.array([None if i == 4 else 1 for i in number], pa.int64()))
        table = table.append_column("operator", pa.array(["Ann"] * len(number)))
        pq.write_table(table.take(list(range(len(number)))[::-1]), path)
    return [load_metadata(root) for root in roots]


def weights_of(metas, source):
    return [w.tolist() for w in episode_weights(metas, [meta.root for meta in metas], source)]


def write_weights(folder, content, table):
    """Write the same weights in each format; return the sources."""
    table = pa.table(table)
    (folder / "w.json").write_text(json.dumps(content))
    pa.csv.write_csv(table, folder / "w.csv")
    pq.write_table(table, folder / "w.parquet")
    return [f"@{folder / name}" for name in ("w.json", "w.csv", "w.parquet")]


def test_weights_are_read_from_metadata_column(metas):
    assert weights_of(metas[:1], "quality") == [QUALITY]
    assert weights_of(metas[:1], "success") == [[1, 0, 1, 1, 1, 0]]
    assert weights_of(metas[:1], "episode_index") == [[0, 1, 2, 3, 4, 5]]


def test_missing_episodes_have_weight_zero(metas, tmp_path):
    root = shutil.copytree(metas[0].root, tmp_path / "holes")
    remove_episodes(root, [0, 1, 4])
    assert weights_of([load_metadata(root)], "quality") == [[0, 0, QUALITY[2], QUALITY[3], 0, QUALITY[5]]]


def test_weights_file_overrides_default_of_one(metas, tmp_path):
    table = {"weight": [4, 0.25], "episode_index": [5, 1], "why": ["good", "blurred"]}
    for source in write_weights(tmp_path, {"1": 0.25, "5": 4}, table):
        assert weights_of(metas[:1], source) == [[1, 0.25, 1, 1, 1, 4]]


def test_weights_file_for_several_datasets(metas, tmp_path):
    a, b = (meta.root for meta in metas)
    content = {a: {"2": 0.5}, b: {"2": 7, "3": 0}}
    table = {"dataset": [b, a, b], "episode_index": [2, 2, 3], "weight": [7, 0.5, 0]}
    for source in write_weights(tmp_path, content, table):
        assert weights_of(metas, source) == [[1, 1, 0.5, 1, 1, 1], [1, 1, 7, 0, 1, 1]]
    (tmp_path / "w.json").write_text(json.dumps({b: {"2": 7}}))
    assert weights_of(metas, f"@{tmp_path / 'w.json'}") == [[1] * 6, [1, 1, 7, 1, 1, 1]]


def test_dataset_spellings_in_weights_file_are_merged(metas, tmp_path):
    a, roots = metas[0].root, [meta.root for meta in metas]
    table = {"dataset": [a, f"{a}/"], "episode_index": [2, 3], "weight": [0.5, 7]}
    for source in write_weights(tmp_path, {a: {"2": 0.5}, f"{a}/": {"3": 7}}, table):
        weights = episode_weights(metas, roots, source, lambda root: root.rstrip("/"))
        assert weights[0].tolist() == [1, 1, 0.5, 7, 1, 1]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("grade", r"dataset .*/a: .*=grade: meta/episodes/.*grade is not there, .*those are \[.*'quality', 'success'"),
        ("operator", "operator is of type string, expected a column of numbers"),
        ("holes", "the weight of episode 4 is nan, expected a number from 0 .* 1 of 6 episodes"),
    ],
)
def test_invalid_weight_columns_are_refused(metas, column, message):
    with pytest.raises(ValueError, match=message):
        weights_of(metas[:1], column)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("w.json", '{"6": 1}', "episode 6 is not in .*/a, which has 0..5"),
        ("w.json", '{"1": -1}', "the weight of episode 1 is -1, expected"),
        ("w.json", '{"1": 1001}', "the weight of episode 1 is 1001, expected a number from 0 .left out. to 1000"),
        ("w.json", '{"1": NaN}', "the weight of episode 1 is nan"),
        ("w.json", '{"1": "2"}', "column weight is of type string; .*takes a .csv or .parquet with the columns"),
        ("w.json", json.dumps(dict.fromkeys(range(6), 1e-4)), "0.0001 on average, .*: multiply them by 1e.04"),
        ("w.json", '{"one": 2}', "invalid literal"),
        ("w.json", f'{{"1": {10**20}}}', "too large .*takes a .csv"),
        ("w.json", "[1, 2]", "found a list"),
        ("w.json", '{"/x": {"1": 2}}', r"names \['/x'\], which are not among the datasets"),
        ("w.json", "", "takes a .csv"),
        ("w.csv", "episode_index,weight\n1,1\n1,2\n", "episode 1 of .* is there more than once"),
        ("w.csv", "episode_index,weight\n1,\n2,1\n", "the weight of episode 1 is nan or an empty cell"),
        ("w.csv", "episode,weight\n1,1\n", r"found the columns \['episode', 'weight'\]"),
        ("w.csv", "episode_index,weight\n1,good\n", "column weight is of type string"),
        ("w.csv", "episode_index,weight\n1.5,1\n", "an episode_index is no whole number"),
        ("w.txt", "", "unknown file type: expected .csv, .parquet or .json"),
        ("w.parquet", "no", "cannot be read as a parquet file"),
    ],
)
def test_invalid_weight_files_are_refused(metas, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        weights_of(metas[:1], f"@{tmp_path / name}")
    with pytest.raises(FileNotFoundError, match="nothing.csv: no such file"):
        weights_of(metas[:1], f"@{tmp_path / 'nothing.csv'}")


def test_weights_file_must_name_dataset_if_several(metas, tmp_path):
    (tmp_path / "w.json").write_text('{"1": 2}')
    with pytest.raises(ValueError, match="names no dataset for its episodes, and there are 2"):
        weights_of(metas, f"@{tmp_path / 'w.json'}")
    assert np.array_equal(weights_of(metas[:1], f"@{tmp_path / 'w.json'}"), [[1, 2, 1, 1, 1, 1]])
