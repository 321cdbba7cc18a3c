"""Metadata of LeRobot v3 datasets: what LeRobot reads is the ground truth, and bad input is named."""

import functools
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diagnostics import show_dataset
from lerobot_datasource import LeRobotDatasource, read_lerobot
from tests.datasets import edit_json, make_dataset, remove_episodes
from vla_finetuning.data.dataset import Feature, select_episodes
from vla_finetuning.data.dataset_files import check_files
from vla_finetuning.data.metadata import dimension_names, key_frame_rows, load_metadata
from vla_finetuning.data.options import Features, Selection
from vla_finetuning.data.selection import choose_episodes
from vla_finetuning.data.statistics import complete_stats

EPISODES = (6, 4, 9, 1, 5, 7, 3, 8, 2, 5, 4, 6)
TOP, WRIST, SIDE = "observation.images.top", "observation.images.wrist", "observation.images.side"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Several mp4 and parquet files per camera, two files of episode metadata; never changed."""
    root = tmp_path_factory.mktemp("metadata") / "original"
    make_dataset(root, episodes=EPISODES, image_cameras={SIDE: (40, 48)}, extra_features=True)
    meta = load_metadata(root)
    files_of_episodes = [meta.episode_data_file, meta.episode_video_file[TOP], meta.episode_video_file[WRIST]]
    assert len({tuple(files) for files in files_of_episodes if files.max() >= 2}) == 3
    assert "chunk-001" in str(meta.data_files) and len(list((root / "meta/episodes").rglob("*.parquet"))) > 1
    return root


def edit_info(root, **changes):
    edit_json(root / "meta/info.json", lambda info: info.update(changes))


def edit_feature(root, key, **changes):
    edit_json(root / "meta/info.json", lambda info: info["features"].setdefault(key, {}).update(changes))


def edit_parquet(path, edit):
    pq.write_table(edit(pq.read_table(path)), path)


def set_value(name, row, value, type=None):
    def edit(table):
        values = table[name].to_pylist()
        values[row] = value
        return table.set_column(
            table.column_names.index(name), name, pa.array(values, type or table.schema.field(name).type)
        )

    return edit


def episodes_file(root, number=0):
    return sorted((root / "meta/episodes").rglob("*.parquet"))[number]


def refuses(root, message, error=ValueError):
    """load_metadata raises, naming the dataset first and then what is wrong."""
    with pytest.raises(error, match=f"(?s)^dataset {re.escape(str(root))}:? .*{message}") as raised:
        load_metadata(root)
    assert "\n" not in str(raised.value)


# --- what is read ---------------------------------------------------------------------------------------


def test_metadata_equals_lerobots(original):
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata

    theirs = LeRobotDatasetMetadata("local/original", root=original)
    ours = load_metadata(original)
    assert ours.root == str(original)
    assert (ours.fps, ours.robot_type, ours.codebase_version) == (theirs.fps, theirs.robot_type, "v3.0")
    assert (ours.num_episodes, ours.total_frames) == (theirs.total_episodes, theirs.total_frames)
    assert ours.episode_length.tolist() == list(EPISODES)
    assert list(ours.features) == list(theirs.features)
    for key, feature in ours.features.items():
        assert feature.key == key
        assert (feature.dtype, feature.shape) == (theirs.features[key]["dtype"], theirs.features[key]["shape"])
        assert list(feature.names or ()) == (theirs.features[key]["names"] or [])
    assert ours.video_keys == theirs.video_keys
    assert [key for key, feature in ours.features.items() if feature.dtype == "image"] == theirs.image_keys == [SIDE]
    assert ours.camera_keys == theirs.camera_keys
    assert ours.tasks == {int(row.task_index): row.name for _, row in theirs.tasks.iterrows()}
    assert {key: set(values) for key, values in ours.stats.items()} == {
        key: set(values) for key, values in theirs.stats.items()
    }
    for key, values in theirs.stats.items():
        for name, value in values.items():
            np.testing.assert_array_equal(ours.stats[key][name], value)
            assert ours.stats[key][name].dtype == value.dtype
    for episode in range(ours.num_episodes):
        row = theirs.episodes[episode]
        assert ours.episode_start[episode] == row["dataset_from_index"]
        assert list(ours.episode_tasks[episode]) == row["tasks"]
        assert ours.data_files[ours.episode_data_file[episode]] == str(theirs.get_data_file_path(episode))
        for key in ours.video_keys:
            path = ours.video_files[key][ours.episode_video_file[key][episode]]
            assert path == str(theirs.get_video_file_path(episode, key))
            assert ours.episode_video_start_s[key][episode] == row[f"videos/{key}/from_timestamp"]
    for array, dtype in (
        (ours.episode_index, np.int64),
        (ours.episode_length, np.int64),
        (ours.episode_start, np.int64),
        (ours.episode_data_row, np.int64),
        (ours.episode_data_file, np.int32),
        (ours.episode_video_file[TOP], np.int32),
        (ours.episode_video_start_s[TOP], np.float64),
    ):
        assert (array.dtype, array.shape) == (dtype, (len(EPISODES),))
    # Equal instructions of millions of episodes are one object.
    assert len({id(tasks) for tasks in ours.episode_tasks}) == len(set(ours.episode_tasks)) < len(EPISODES)


@pytest.mark.parametrize("form", ["index named task", "unnamed index", "plain column"])
def test_tasks_table_forms_are_read(root, form):
    """LeRobot looks tasks up by their place in the file, which is wrong once rows are reordered."""
    import pandas as pd

    tasks = load_metadata(root).tasks
    indices = list(tasks)[::-1]
    texts = [tasks[index] for index in indices]
    if form == "plain column":
        frame = pd.DataFrame({"task_index": indices, "task": texts})
    else:
        name = "task" if form == "index named task" else None
        frame = pd.DataFrame({"task_index": indices}, index=pd.Index(texts, name=name))
    frame.to_parquet(root / "meta/tasks.parquet")
    if form == "unnamed index":
        assert "__index_level_0__" in pq.read_schema(root / "meta/tasks.parquet").names
    assert load_metadata(root).tasks == tasks


def test_stored_order_of_episodes_is_ignored(root):
    """Some tools count `dataset_from_index` from the start of each file."""
    before = load_metadata(root)
    for path in (root / "meta/episodes").rglob("*.parquet"):
        edit_parquet(path, lambda table: table.take(list(range(table.num_rows))[::-1]))
        edit_parquet(path, set_value("dataset_from_index", 0, 12345))
    after = load_metadata(root)
    assert after.episode_start.tolist() == (np.cumsum(EPISODES) - EPISODES).tolist()
    assert after.episode_length.tolist() == before.episode_length.tolist()
    assert after.episode_tasks == before.episode_tasks
    files = [[meta.data_files[file] for file in meta.episode_data_file] for meta in (before, after)]
    assert files[0] == files[1]
    assert after.episode_video_start_s[TOP].tolist() == before.episode_video_start_s[TOP].tolist()


def test_integers_stored_as_floats_are_read(root):
    edit_info(root, fps=10.0)
    for path in (root / "meta/episodes").rglob("*.parquet"):
        edit_parquet(path, lambda table: set_value("length", 0, float(table["length"][0].as_py()), pa.float64())(table))
    meta = load_metadata(root)
    assert meta.episode_length.tolist() == list(EPISODES)
    assert (meta.fps, type(meta.fps)) == (10, int)


def test_path_templates_by_episode_are_read(root):
    edit_info(
        root,
        data_path="data/{episode_chunk:02d}/episode-{episode_index:06d}.parquet",
        video_path="videos/{video_key}/{episode_index}.mp4",
        chunks_size=5,
    )
    meta = load_metadata(root)
    assert meta.data_files[7] == "data/01/episode-000007.parquet"
    assert meta.video_files[WRIST][11] == f"videos/{WRIST}/11.mp4"
    assert meta.episode_data_row.tolist() == [0] * len(EPISODES)


def test_depth_flag_forms_are_read(root):
    edit_feature(root, TOP, info={"is_depth_map": True})
    edit_feature(root, WRIST, info=None, video_info={"video.is_depth_map": True})
    features = load_metadata(root).features
    assert [features[key].is_depth for key in (TOP, WRIST, SIDE)] == [True, True, False]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (functools.reduce(lambda deep, _: [deep], range(400), ["a", "b", "c"]), ["a", "b", "c"]),
        ({"motors": {"a": 0, "b": 1, "c": 2}}, ["a", "b", "c"]),
        ([{"x": ["a", "b"]}, "c"], ["a", "b", "c"]),
        ([0, 1, 2], ["0", "1", "2"]),
        (None, ["action[0]", "action[1]", "action[2]"]),
        ([["a", "b", "c", "d"]], ["action[0]", "action[1]", "action[2]"]),
    ],
)
def test_dimension_names_forms_are_read(root, names, expected):
    edit_feature(root, "action", names=names)
    assert dimension_names(load_metadata(root), "action") == expected


@pytest.mark.parametrize(
    ("key", "feature", "told"),
    [
        # What a later LeRobot may write: a policy that does not need it is none the worse.
        ("observation.audio", {"dtype": "audio", "shape": [2], "info": []}, "dtype is 'audio', which is not read here"),
        ("robot.debug", {"dtype": "float32", "shape": [0]}, "shape is [0]"),
        *((name, {"dtype": "float32", "shape": [1]}, "its name is not printable") for name in ("a/b", "..", "a\0b")),
    ],
)
def test_unsupported_features_are_ignored_with_note(root, key, feature, told):
    before = load_metadata(root)
    edit_feature(root, key, **feature)
    edit_info(root, robot_type=["left", "right"])
    meta = load_metadata(root)
    assert meta.features == before.features and meta.robot_type is None
    of_feature, of_robot = meta.not_read
    assert f"feature {key!r}: {told}" in of_feature and "robot_type ['left', 'right']" in of_robot


@pytest.mark.parametrize(
    ("stated", "apart"),
    [((None, None), 2), ((1, 1), 1), ((1, 5), 5), ((4, None), 2), (("2", -3), 2), ((True, 10), 2), ((), 1)],
)
def test_key_frame_distance(stated, apart):
    videos = [Feature(str(n), "video", (4, 4, 3), None, False, {"video.g": g}) for n, g in enumerate(stated)]
    assert key_frame_rows([Feature("image", "image", (4, 4, 3), None, False, {}), *videos]) == apart


@pytest.mark.parametrize("as_url", [False, True])
def test_local_paths_and_urls(original, as_url):
    meta = load_metadata(f"file://{original}/" if as_url else f"{original}/")
    assert meta.root == (f"file://{original}" if as_url else str(original))
    assert meta.base == str(original)
    check_files(meta)


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("hf://datasets/user/name", "hf:// is not read: --dataset.repo_id USER/NAME downloads"),
        ("abfs://container@account.dfs.core.windows.net/arm", "abfs:// is not read: copy or mount the dataset"),
    ],
)
def test_unsupported_protocols_are_refused(root, message):
    with pytest.raises(
        ValueError, match=f"dataset {root}: {message}.*; expected a local folder, s3://, gs:// or az://"
    ):
        load_metadata(root)


# --- bad input: places and files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", "no such folder"),
        ("meta/info.json", "is a file"),
        ("data", r"not a LeRobot dataset: meta/info.json is missing \(found \[chunk-000"),
    ],
)
def test_paths_without_dataset_are_refused(root, place, message):
    refuses(root / place, message, FileNotFoundError)


@pytest.mark.parametrize("protocol", ["s3", "gs", "nope", "simplecache::s3"])
def test_credentials_in_url_are_not_printed(protocol, capsys, caplog):
    root = f"{protocol}://AKIA:canary/secret@bucket/arm"
    for call in (load_metadata, read_lerobot, lambda root: read_lerobot({root: 1.0})):
        with pytest.raises(ValueError, match="^dataset root: an address with credentials in it") as refused:
            call(root)
        assert "canary" not in repr(refused.value)
    assert show_dataset.main([root]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: dataset root: ") and "canary" not in out + err + caplog.text


def test_unreadable_folder_is_reported(root, monkeypatch):
    def refuse(self, path, **kwargs):
        raise PermissionError("Access Denied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.cat_file", refuse)
    refuses(root, "cannot be read: PermissionError: Access Denied; check its permissions", PermissionError)


@pytest.mark.parametrize("name", ["meta/tasks.parquet", "meta/episodes"])
def test_missing_metadata_file_is_reported(root, name):
    path = root / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    refuses(root, f"{name}.* is missing", FileNotFoundError)


@pytest.mark.parametrize("damage", ["empty", "truncated", "text", "middle"])
def test_corrupt_parquet_is_refused(root, damage):
    name = "meta/episodes/chunk-000/file-000.parquet"
    content = (root / name).read_bytes()
    damaged = {
        "empty": b"",
        "truncated": content[:-20],
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n",
        "middle": b"PAR1" + bytes(len(content) // 2) + content[len(content) // 2 + 4 :],
    }
    (root / name).write_bytes(damaged[damage])
    refuses(root, f"{name} {'is a Git LFS pointer' if damage == 'text' else 'cannot be read as a parquet file'}")


@pytest.mark.parametrize("name", ["meta/info.json", "meta/stats.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
    ],
    ids=["empty", "deep", "list"],
)
def test_corrupt_json_is_refused(root, name, content, message):
    (root / name).write_bytes(content)
    refuses(root, f"{name}.*{message}")


# --- bad input: contents --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fps": 0}, "fps is 0"),
        ({"fps": 29.97}, "fps is 29.97"),
        ({"fps": 10**9}, "fps is 10"),
        ({"features": {}}, r"features lacks \['timestamp'"),
        ({"total_episodes": 99}, "total_episodes is 99, but meta/episodes holds 12"),
        ({"total_frames": 61}, "total_frames is 61, but meta/episodes holds 60"),
        ({"data_path": None}, "data_path is None, expected a path template"),
        ({"video_path": "videos/{chunk_index}/{file_index}.mp4"}, "video_path .* gives two cameras the same file"),
        ({"data_path": "data/{chunk_index}.parquet"}, "data_path .* gives different files the same path"),
        ({"data_path": "{episode_chunk}", "chunks_size": 0}, "chunks_size is 0"),
        ({"codebase_version": None}, "codebase_version is None"),
    ],
)
def test_invalid_info_is_refused(root, changes, message):
    edit_info(root, **changes)
    refuses(root, f"meta/info.json: {message}")


def test_unknown_version_is_refused(root):
    edit_info(root, codebase_version="v4.0")
    refuses(root, "'v4.0'; v3.0, v2.1 and v2.0 are read")


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("action", {"dtype": ["float32"]}, "dtype is"),
        ("action", {"shape": [0]}, r"shape is \[0\]"),
        ("action", {"shape": [3.0]}, r"shape is \[3.0\]"),
        ("action", {"shape": 3}, "shape is 3"),
        ("action", {"names": 3}, "names is 3"),
        (TOP, {"shape": [48, 64]}, "expected three numbers for a camera"),
        (TOP, {"info": "h264"}, "info is 'h264'"),
    ],
)
def test_invalid_features_are_refused(root, key, changes, message):
    edit_feature(root, key, **changes)
    refuses(root, f"meta/info.json: feature {re.escape(repr(key))}.*{message}")


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("data_path", "/etc/passwd"),
        ("data_path", "../{chunk_index}/{file_index}"),
        ("video_path", "videos/../../{video_key}/{chunk_index}/{file_index}.mp4"),
        ("data_path", "data//{chunk_index}/{file_index}"),
        ("data_path", "s3://bucket/{chunk_index}/{file_index}"),
        ("data_path", "data\\{chunk_index}\\{file_index}"),
        ("data_path", "data/{chunk_index}/{file_index}\0.parquet"),
        ("data_path", "data/{chunk_index.__class__.__init__.__globals__}/{file_index}"),
        ("data_path", "data/{chunk_index[0]}/{file_index}"),
        ("data_path", "data/{chunk_index!r}/{file_index}"),
        ("data_path", "data/{chunk_index:0999999999d}/{file_index}"),
        ("data_path", "data/{chunk_index:{file_index}}/{file_index}"),
        ("video_path", "videos/{video_key:03d}/{chunk_index}/{file_index}.mp4"),
        ("data_path", "data/{}/{file_index}"),
        ("data_path", "data/{video_key}/{chunk_index}/{file_index}"),
        ("data_path", "data/{chunk_index}/file_index}"),
        ("data_path", 7),
    ],
)
def test_unsafe_path_templates_are_refused(root, name, template):
    edit_info(root, **{name: template})
    refuses(root, f"meta/info.json: {name}.*(not a path|expected a path template)")


@pytest.mark.parametrize("value", ["high", [[1.0], [1.0, 2.0]], [1.0, None], []])
def test_invalid_statistics_are_ignored_with_note(root, value):
    stats, before = json.loads((root / "meta/stats.json").read_text()), load_metadata(root).stats
    stats["action"]["mean"] = value
    stats["observation.state"] = [1, 2]
    (root / "meta/stats.json").write_text(json.dumps(stats))
    meta = load_metadata(root)
    assert "mean" not in meta.stats["action"] and "observation.state" not in meta.stats
    np.testing.assert_array_equal(meta.stats["action"]["std"], before["action"]["std"])
    told = "; ".join(meta.not_read)
    assert "meta/stats.json: 'mean' of 'action', which is" in told and "'observation.state', which is [1, 2]" in told


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"task": ["a", "b"]}, r"expected the columns task_index and task.*found \['task'\]"),
        ({"task_index": [0, 0], "task": ["a", "b"]}, "task_index 0 is both 'a' and 'b'"),
        ({"task_index": [0, -1], "task": ["a", "b"]}, "task_index is -1"),
        ({"task_index": [0, None], "task": ["a", "b"]}, "task_index has 1 empty values"),
        ({"task_index": [0.0, 0.5], "task": ["a", "b"]}, "task_index must hold whole numbers"),
        ({"task_index": ["0", "1"], "task": ["a", "b"]}, "task_index has type string"),
        ({"task_index": [0, 1], "task": [1, 2]}, "task has type int64"),
        ({"task_index": [0, 1], "task": ["a", "b\0c"]}, r"task 1 holds a NUL character"),
    ],
)
def test_invalid_tasks_are_refused(root, table, message):
    pq.write_table(pa.table(table), root / "meta/tasks.parquet")
    refuses(root, f"meta/tasks.parquet: .*{message}")


def test_duplicate_and_empty_tasks_are_ignored(root):
    tasks = load_metadata(root).tasks
    table = {"task_index": [*tasks, 0, 99], "task": [*tasks.values(), tasks[0], None]}
    pq.write_table(pa.table(table), root / "meta/tasks.parquet")
    assert load_metadata(root).tasks == tasks


def tasks_as(kind):
    """Change the column `tasks` of a table of episodes."""

    def change(table):
        at, lists = table.column_names.index("tasks"), table["tasks"].to_pylist()
        if kind == "absent":
            return table.drop_columns(["tasks"])
        changed = {
            "texts": [texts[0] for texts in lists],
            "null": [None] * len(lists),
            "nulls in lists": [[*texts, None] for texts in lists],
            "numbers": [1] * len(lists),
            "other words": [[*texts, "fold the shirt"] for texts in lists],
        }[kind]
        return table.set_column(at, "tasks", pa.array(changed))

    return change


@pytest.mark.parametrize("kind", ["absent", "null", "numbers", "texts", "nulls in lists", "other words"])
def test_episode_tasks_forms_are_read(root, kind):
    """LeRobot's `convert_image_to_video` writes none: rows have theirs by `task_index`."""
    before = load_metadata(root)
    for path in (root / "meta/episodes").rglob("*.parquet"):
        edit_parquet(path, tasks_as(kind))
    meta = load_metadata(root)
    lost = kind in ("absent", "null", "numbers")
    expected = {"texts": [texts[:1] for texts in before.episode_tasks]}.get(kind, before.episode_tasks)
    assert meta.episode_tasks == ([()] * len(EPISODES) if lost else expected)
    told = "; ".join(meta.not_read)
    assert ("tasks of 12 of 12 episodes" in told) == lost and ("'fold the shirt'" in told) == (kind == "other words")
    for whole, found in zip(read_all(before), read_all(meta), strict=True):
        np.testing.assert_array_equal(whole["task"], found["task"])
    if lost:
        with pytest.raises(ValueError, match="--dataset.tasks: the metadata names no task of any episode"):
            choose_episodes(meta, tasks=["*"])


def read_all(meta):
    source = LeRobotDatasource([meta], features=Features(camera_keys=[]))
    return list(source.read_rows(range(meta.total_frames), meta.total_frames))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("length", -5, "length is -5"),
        ("length", None, "length has 1 empty values"),
        ("episode_index", 1, "episode 1 is there twice"),
        ("episode_index", 10**8, "an episode has the number 100,000,000"),
    ],
)
def test_invalid_episode_values_are_refused(root, column, value, message):
    edit_parquet(episodes_file(root), set_value(column, 2, value))
    refuses(root, f"meta/episodes.*{message}")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("data/file_index", -1, "has -1 as data/file_index"),
        ("data/chunk_index", None, "has empty as data/chunk_index"),
        (f"videos/{TOP}/file_index", None, "has empty as videos/observation.images.top/file_index"),
        (f"videos/{TOP}/from_timestamp", -0.5, "has -0.5 as videos/observation.images.top/from_timestamp"),
        (f"videos/{TOP}/from_timestamp", float("nan"), "has nan as videos/observation.images.top/from_timestamp"),
    ],
)
def test_invalid_episode_location_can_be_left_out(root, column, value, message):
    """Also by choosing others, and by cameras that are not its own; rows are those of the whole dataset."""
    whole = load_metadata(root)
    edit_parquet(episodes_file(root), set_value(column, 2, value))
    meta = load_metadata(root)
    with pytest.raises(ValueError, match=f"episode 2 {re.escape(message)}.*choose `episodes` without \\[2\\]"):
        LeRobotDatasource([meta])
    others = [episode for episode in range(len(EPISODES)) if episode != 2]
    cameras = Features(camera_keys=[WRIST])
    sources = [LeRobotDatasource([m], Selection(episodes=[np.array(others)]), cameras) for m in (whole, meta)]
    rows = [list(source.read_rows(range(9, 20), 11))[0] for source in sources]
    for key, values in rows[0].items():
        np.testing.assert_array_equal(values, rows[1][key])
    if column.startswith(f"videos/{TOP}"):
        LeRobotDatasource([meta], features=cameras)


@pytest.mark.parametrize("gone", [[0, 1], [3, 7, 8], [11]])
def test_missing_episode_numbers_are_skipped(root, gone):
    """Rows of what is there are those of the whole dataset; a beginning that is not 0 needs no flag."""
    whole = load_metadata(root)
    remove_episodes(root, gone)
    meta = load_metadata(root)
    others = [episode for episode in range(len(EPISODES)) if episode not in gone]
    if gone not in ([0, 1], [11]):
        with pytest.raises(ValueError, match=f"episode {gone[0]} is in no file of meta/episodes"):
            LeRobotDatasource([meta])
    assert select_episodes(meta, None).tolist() == (others if gone in ([0, 1], [11]) else list(range(12)))
    assert [meta.episode_tasks[e] for e in others] == [whole.episode_tasks[e] for e in others]
    assert meta.episode_length[others].tolist() == whole.episode_length[others].tolist()
    for key in whole.video_keys:
        files = [[m.video_files[key][m.episode_video_file[key][e]] for e in others] for m in (whole, meta)]
        assert files[0] == files[1]
    # As --dataset.statistics lerobot computes what stats.json lacks, of the episodes that there are.
    found, expected = (
        complete_stats(replace(m, stats={}), {"action": {"mean", "q01"}}, cache_dir=None, episodes=np.array(others))
        for m in (meta, whole)
    )
    for name in ("mean", "q01"):
        np.testing.assert_array_equal(found["action"][name], expected["action"][name])


@pytest.mark.parametrize("column", ["length", f"videos/{WRIST}/from_timestamp"])
def test_missing_episode_columns_are_refused(root, column):
    edit_parquet(episodes_file(root), lambda table: table.drop_columns([column]))
    refuses(root, rf"meta/episodes/\S+ lacks the columns \[{re.escape(column)}\]|: lacks the columns \[{column}\]")


def test_missing_episodes_file_is_refused(root):
    episodes_file(root, 1).unlink()
    refuses(root, "total_episodes is 12, but meta/episodes holds")


def test_empty_dataset_is_refused(root):
    for path in (root / "meta/episodes").rglob("*.parquet"):
        edit_parquet(path, lambda table: table.slice(0, 0))
    refuses(root, "holds no episode")


# --- links and parquet types ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.parquet", "data/chunk-000"])
def test_links_out_of_dataset_are_refused(root, original, name):
    path = root / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(original / name)
    refuses(root, f"{name}.*is a link to .*, outside the dataset")
