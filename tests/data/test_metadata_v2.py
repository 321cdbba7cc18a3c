"""LeRobot v2.0 and v2.1 datasets against LeRobot's own converter and `LeRobotDataset`."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from lerobot.scripts.convert_dataset_v21_to_v30 import convert_dataset

from tests.data.test_datasource import lerobot
from tests.datasets import datasource, edit_json, make_dataset
from vla_finetuning.data import metadata_v2
from vla_finetuning.data.dataset_files import check_files
from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.episode_weights import episode_weights
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.metadata_v2 import EPISODES_PATH, STATS_PATH, TASKS_PATH

LENGTHS = (12, 7, 15, 1)
ROWS = sum(LENGTHS)
REAL = Path(__file__).resolve().parents[3] / "shared/real/g1_inspire_v21"
CAMERAS = {"observation.images.top": (48, 64), "observation.images.wrist": (96, 80)}


def as_v2(v3, root, version="v2.1", chunks_size=3):
    """Write a v3.0 dataset with a file per episode in the layout of an older version."""
    meta = load_metadata(v3)
    info = json.loads((v3 / "meta/info.json").read_text())
    info |= {"codebase_version": version, "chunks_size": chunks_size, "total_chunks": 1, "total_videos": 0}
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    number = {text: index for index, text in meta.tasks.items()}
    write_lines(root / TASKS_PATH, [{"task_index": index, "task": text} for text, index in number.items()])
    of_episodes = pq.read_table(v3 / "meta/episodes").to_pylist()
    lines, stats = [], []
    for row in sorted(of_episodes, key=lambda row: row["episode_index"]):
        episode = row["episode_index"]
        lines.append({name: row[name] for name in ("episode_index", "tasks", "length")} | {"quality": 0.5 + episode})
        episode_stats = {}
        for name, value in row.items():
            if name.startswith("stats/") and name.rpartition("/")[2] in ("min", "max", "mean", "std", "count"):
                episode_stats.setdefault(name.split("/")[1], {})[name.rpartition("/")[2]] = value
        stats.append({"episode_index": episode, "stats": episode_stats})
        chunk = f"chunk-{episode // chunks_size:03d}"
        data = meta.data_files[meta.episode_data_file[episode]]
        copy(v3 / data, root / f"data/{chunk}/episode_{episode:06d}.parquet")
        for key in meta.video_keys:
            video = meta.video_files[key][meta.episode_video_file[key][episode]]
            copy(v3 / video, root / f"videos/{chunk}/{key}/episode_{episode:06d}.mp4")
    write_lines(root / EPISODES_PATH, lines)
    if version == "v2.1":
        write_lines(root / STATS_PATH, stats)
    else:
        shutil.copy(v3 / "meta/stats.json", root / "meta/stats.json")
    return root


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    root = tmp_path_factory.mktemp("v2") / "v3"
    return make_dataset(
        root, episodes=LENGTHS, cameras=CAMERAS, data_files_size_in_mb=1e-6, video_files_size_in_mb=1e-6,
        true_quantiles=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def v21(v3):
    return as_v2(v3, v3.parent / "v21")


@pytest.fixture(scope="module")
def converted(v21):
    """Convert by LeRobot: v3.0, several episodes in a file."""
    return convert(v21, v21.parent / "converted")


def convert(source, root):
    shutil.copytree(source, root, copy_function=shutil.copyfile)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755)  # shared/real is read-only
    logging.disable()
    try:
        convert_dataset(f"local/{root.name}", root=root, push_to_hub=False)
    finally:
        logging.disable(logging.NOTSET)
    return root


@pytest.fixture
def copied(v21, tmp_path):
    return shutil.copytree(v21, tmp_path / "copied")


WINDOWS = {"action": [0.0, 0.1, 0.2], "observation.state": [-0.1, 0.0], "observation.images.top": [-0.1, 0.0]}


def assert_rows(rows, dataset, keys):
    """Compare all rows, instructions and frames with LeRobot's `dataset`."""
    assert len(dataset) == len(rows["index"]) == ROWS
    for i in range(len(dataset)):
        row = dataset[i]
        assert rows["task"][i] == row["task"]
        for key in ("action", "observation.state", "timestamp", "episode_index", "index", *keys):
            np.testing.assert_array_equal(rows[key][i], row[key].numpy())
        for key in CAMERAS:
            np.testing.assert_array_equal(rows[key][i], np.moveaxis(row[key].numpy(), -3, -1))


@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["plain", "windows"])
def test_rows_equal_lerobots_conversion(v21, converted, windows):
    meta = load_metadata(v21)
    check_files(meta)
    (rows,) = datasource([meta], delta_timestamps=windows).read_rows(range(ROWS), ROWS)
    assert_rows(rows, lerobot(converted, delta_timestamps=windows), ["frame_index"])


def without_column(root, name):
    edit_json(root / "meta/info.json", lambda info: info["features"].pop(name))
    for path in root.glob("data/*/*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns([name]).replace_schema_metadata(None), path)
    return root


def test_missing_frame_index_column_is_derived(v3, tmp_path):
    """GR00T's format has no such column."""
    lacking = without_column(shutil.copytree(v3, tmp_path / "lacking"), "frame_index")
    v20 = as_v2(lacking, tmp_path / "v20", "v2.0")
    windows = WINDOWS | {"frame_index": [-0.1, 0.0]}
    (rows,) = datasource([load_metadata(v20)], delta_timestamps=windows).read_rows(range(ROWS), ROWS)
    assert_rows(rows, lerobot(lacking, delta_timestamps=WINDOWS), [])
    expected = np.concatenate([np.arange(length) for length in LENGTHS])
    assert rows["frame_index"].tolist() == np.stack([np.maximum(expected - 1, 0), expected], 1).tolist()
    # Also in a mixture with a dataset that has it, and without `index`.
    metas = [load_metadata(v3), load_metadata(without_column(v20, "index"))]
    batches = list(datasource(metas).read_rows(range(2 * ROWS), 2 * ROWS))
    index, frame_index = (np.concatenate([batch[key] for batch in batches]) for key in ("index", "frame_index"))
    assert index.tolist() == [*range(ROWS)] * 2 and frame_index.tolist() == expected.tolist() * 2


def test_missing_frame_index_needs_ordered_rows(v3, tmp_path):
    lacking = without_column(shutil.copytree(v3, tmp_path / "lacking"), "frame_index")
    path = lacking / load_metadata(lacking).data_files[0]
    table = pq.read_table(path)
    pq.write_table(table.take([0, 2, 1, *range(3, len(table))]), path)
    with pytest.raises(ValueError, match="expected episode 0 frame 1 at row 1, found episode 0 frame 2"):
        next(datasource([load_metadata(lacking)], camera_keys=[]).read_rows(range(12), 12))
    with pytest.raises(ValueError, match=r"meta/info.json: features lacks \['task_index'\], by which"):
        load_metadata(without_column(lacking, "task_index"))


def test_statistics_equal_lerobots_conversion(v21, converted):
    actual, expected = load_metadata(v21).stats, load_metadata(converted).stats
    for key in ("action", "observation.state", "timestamp", "observation.images.top"):
        assert actual[key].keys() == {"min", "max", "mean", "std", "count"}  # v2.1 has no quantiles
        for name, values in actual[key].items():
            np.testing.assert_allclose(values, expected[key][name], rtol=1e-12, atol=1e-15)


def test_episode_table_equals_v30(v3, v21):
    meta, expected = load_metadata(v21), load_metadata(v3)
    assert (meta.codebase_version, meta.fps, meta.tasks) == ("v2.1", expected.fps, expected.tasks)
    assert meta.episode_tasks == expected.episode_tasks
    for name in ("episode_index", "episode_length", "episode_start", "episode_data_row"):
        np.testing.assert_array_equal(getattr(meta, name), getattr(expected, name))
    assert meta.data_files[3] == "data/chunk-001/episode_000003.parquet"
    (weights,) = episode_weights([meta], [str(v21)], "quality")
    assert weights.tolist() == [0.5, 1.5, 2.5, 3.5]


def test_versions_are_mixed_with_shared_frame_cache(v3, v21, tmp_path):
    v20 = as_v2(v3, tmp_path / "v20", "v2.0")
    metas = [load_metadata(v20), load_metadata(v3), load_metadata(v21)]
    np.testing.assert_array_equal(metas[0].stats["action"]["q99"], metas[1].stats["action"]["q99"])
    cache = FrameCache(str(tmp_path / "frames"), 1.0)
    source = datasource(metas, frame_cache=cache, weights=[1.0, 1.0, 1.0], shuffle_seed=0)
    rows, cached = (next(source.read_rows(range(3 * ROWS), 3 * ROWS)) for _ in range(2))
    top = "observation.images.top"
    np.testing.assert_array_equal(rows[top], cached[top])
    contents = {}
    for index, frame, action in zip(rows["index"].tolist(), rows[top], rows["action"], strict=True):
        contents.setdefault(index, []).append(frame.tobytes() + action.tobytes())
    assert len(contents) == ROWS
    assert all(len(copies) == 3 and len(set(copies)) == 1 for copies in contents.values())


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (EPISODES_PATH, lambda lines: lines[1].update(length=0), r"episodes.jsonl, line 2: length is 0, expected"),
        (EPISODES_PATH, lambda lines: lines[1].update(length=8), r"total_frames is 35, but meta/episodes holds 36"),
        (EPISODES_PATH, lambda lines: lines[1].update(episode_index=0), "episode 0 is there twice"),
        (EPISODES_PATH, lambda lines: lines.pop(), "total_episodes is 4, but meta/episodes holds 3"),
        (EPISODES_PATH, lambda lines: lines.__setitem__(2, 3), "line 3: expected a JSON object, found int"),
        (TASKS_PATH, lambda lines: lines[1].update(task_index=0), "task_index 0 is both"),
        (TASKS_PATH, lambda lines: lines[1].update(task=7), "task is 7, expected a text"),
        (STATS_PATH, lambda lines: lines[1].update(stats=[]), r"stats is \[\], expected an object"),
    ],
)
def test_invalid_jsonl_lines_are_refused(copied, path, change, message):
    lines = read_lines(copied / path)
    change(lines)
    write_lines(copied / path, lines)
    with pytest.raises(ValueError, match=message) as refused:
        load_metadata(copied)
    assert str(copied) in str(refused.value)


def test_unneeded_invalid_values_are_ignored(copied):
    """Lengths as floats, tasks as texts or null, statistics that are null, a gap in the numbering."""
    complete = load_metadata(copied)
    lines = read_lines(copied / EPISODES_PATH)
    for line, tasks in zip(lines, ("fly", None, lines[2]["tasks"][0], 7), strict=True):
        line.update(length=float(line["length"]), tasks=tasks)
    write_lines(copied / EPISODES_PATH, lines)
    stats = read_lines(copied / STATS_PATH)
    stats[1]["stats"]["action"]["mean"] = [None, 1.0]
    stats[2]["stats"]["observation.state"]["mean"] = [1.0]
    write_lines(copied / STATS_PATH, stats)
    meta = load_metadata(copied)
    assert meta.episode_length.tolist() == list(LENGTHS)
    assert meta.episode_tasks == [(), (), (lines[2]["tasks"],), ()]
    assert meta.stats.keys() == complete.stats.keys() - {"action", "observation.state"}
    write_lines(copied / EPISODES_PATH, [lines[0], *lines[2:]])
    meta = load_metadata(copied)
    with pytest.raises(ValueError, match="episode 1 is in no file of meta/episodes"):
        datasource([meta])
    sources = [datasource([m], episodes=[np.array([0, 2, 3])]) for m in (complete, meta)]
    expected, rows = (next(source.read_rows(range(20), 20)) for source in sources)
    for key in ("action", "observation.images.top", "frame_index"):
        np.testing.assert_array_equal(rows[key], expected[key])


def test_invalid_episodes_file_is_refused(copied, monkeypatch):
    (copied / EPISODES_PATH).write_text("[" * 200_000 + "\n")
    with pytest.raises(ValueError, match="episodes.jsonl, line 1 is not valid JSON"):
        load_metadata(copied)
    monkeypatch.setattr("vla_finetuning.data.metadata_v2.MAX_EPISODES_BYTES", 100)
    with pytest.raises(ValueError, match=r"episodes.jsonl has .* MiB, more than the 0 MiB"):
        load_metadata(copied)
    (copied / EPISODES_PATH).unlink()
    with pytest.raises(FileNotFoundError, match="episodes.jsonl is missing"):
        load_metadata(copied)
    (copied / EPISODES_PATH).symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="outside the dataset"):
        load_metadata(copied)


def test_statistics_are_aggregated_in_batches(copied, monkeypatch):
    expected = load_metadata(copied).stats
    text = (copied / STATS_PATH).read_text()
    (copied / STATS_PATH).write_text(text.replace("\n", "\r\n").rstrip())
    monkeypatch.setattr(metadata_v2, "JOINED_EPISODES", 2)
    actual = load_metadata(copied).stats
    for key, values in expected.items():
        assert actual[key].keys() == values.keys()
        for name, value in values.items():
            assert actual[key][name].dtype == value.dtype
            np.testing.assert_allclose(actual[key][name], value, rtol=1e-12, atol=1e-15)
    monkeypatch.setattr(metadata_v2, "MAX_LINE_BYTES", max(map(len, text.splitlines())) - 1)
    with pytest.raises(ValueError, match=r"episodes_stats.jsonl, line \d has more than the 0 MiB"):
        load_metadata(copied)


@pytest.mark.skipif(not REAL.exists(), reason="shared/real is not there")
def test_real_g1_dataset_equals_lerobots_conversion(tmp_path):
    """A Unitree G1's, 26 joints, one camera."""
    root = convert(REAL, tmp_path / "g1")
    dataset, meta = lerobot(root), load_metadata(REAL)
    chosen, camera = [0, 392, 393, 1000, 1870], "observation.images.cam_high"
    (rows,) = datasource([meta]).read_rows(chosen, len(chosen))
    for at, i in enumerate(chosen):
        row = dataset[i]
        assert rows["task"][at] == row["task"]
        for key in ("action", "observation.state", "timestamp", "index"):
            np.testing.assert_array_equal(rows[key][at], row[key].numpy())
        np.testing.assert_array_equal(rows[camera][at], np.moveaxis(row[camera].numpy(), -3, -1))
    expected = load_metadata(root).stats["action"]
    np.testing.assert_allclose(meta.stats["action"]["std"], expected["std"], rtol=1e-9)


def test_absent_episode_numbers_list_no_files(copied):
    """A part of a large dataset keeps its numbers."""
    line = read_lines(copied / EPISODES_PATH)[0]
    write_lines(copied / EPISODES_PATH, [line | {"episode_index": 400_000}])
    edit_json(copied / "meta/info.json", lambda info: info.update(total_episodes=1, total_frames=line["length"]))
    meta = load_metadata(copied)
    assert meta.data_files == ("data/chunk-133333/episode_400000.parquet",)
    assert (meta.total_episodes, meta.num_episodes, meta.first_episode) == (1, 400_001, 400_000)
