"""Metadata of LeRobot v3 datasets against LeRobot's own reader; invalid metadata is refused by name."""

import functools
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diagnostics import show_dataset
from lerobot_datasource import LeRobotDatasource, read_lerobot
from tests.datasets import edit_json, remove_episodes
from vla_finetuning.data.dataset import Feature, select_episodes
from vla_finetuning.data.dataset_files import check_files
from vla_finetuning.data.metadata import dimension_names, key_frame_rows, load_metadata
from vla_finetuning.data.options import Features, Selection
from vla_finetuning.data.selection import choose_episodes
from vla_finetuning.data.statistics import complete_stats

EPISODES = (6, 4, 9, 1, 5, 7, 3, 8, 2, 5, 4, 6)
TOP, WRIST, SIDE = "observation.images.top", "observation.images.wrist", "observation.images.side"
# Several mp4 and parquet files per camera, and two files of episode metadata.
ORIGINAL = {"episodes": EPISODES, "image_cameras": {SIDE: (40, 48)}, "extra_features": True}


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
    """Check that load_metadata names the dataset first and then the fault."""
    with pytest.raises(error, match=f"(?s)^dataset {re.escape(str(root))}:? .*{message}") as raised:
        load_metadata(root)
    assert "\n" not in str(raised.value)


def test_metadata_equals_lerobots(original):
    from lerobot.datasets.lerobot_dataset import LeRobotDatasetMetadata

    theirs = LeRobotDatasetMetadata("local/original", root=original)
    ours = load_metadata(original)
    assert "chunk-001" in str(ours.data_files) and len(list((original / "meta/episodes").rglob("*.parquet"))) > 1
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
    assert ours.stats.keys() == theirs.stats.keys()
    for key, values in theirs.stats.items():
        assert ours.stats[key].keys() == values.keys()
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
    # Equal instructions of millions of episodes are one object.
    assert len({id(tasks) for tasks in ours.episode_tasks}) == len(set(ours.episode_tasks)) < len(EPISODES)


@pytest.mark.parametrize("form", ["task", None, "plain column"])
def test_tasks_table_forms_are_read(root, form):
    """LeRobot looks tasks up by their place in the file, which is wrong once rows are reordered."""
    import pandas as pd

    tasks = load_metadata(root).tasks
    indices = list(tasks)[::-1]
    texts = [tasks[index] for index in indices]
    if form == "plain column":
        frame = pd.DataFrame({"task_index": indices, "task": texts})
    else:
        frame = pd.DataFrame({"task_index": indices}, index=pd.Index(texts, name=form))
    frame.to_parquet(root / "meta/tasks.parquet")
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
    ("key", "feature", "note"),
    [
        # What a later LeRobot may write.
        ("observation.audio", {"dtype": "audio", "shape": [2], "info": []}, "dtype is 'audio', which is not read here"),
        ("robot.debug", {"dtype": "float32", "shape": [0]}, "shape is [0]"),
        *((name, {"dtype": "float32", "shape": [1]}, "its name is not printable") for name in ("a/b", "..", "a\0b")),
    ],
)
def test_unsupported_features_are_ignored_with_note(root, key, feature, note):
    before = load_metadata(root)
    edit_feature(root, key, **feature)
    edit_info(root, robot_type=["left", "right"])
    meta = load_metadata(root)
    assert meta.features == before.features and meta.robot_type is None
    (feature_note,) = meta.not_read
    assert f"feature {key!r}: {note}" in feature_note


@pytest.mark.parametrize(
    ("stated", "distance"),
    [((None, None), 2), ((1, 1), 1), ((1, 5), 5), ((4, None), 2), (("2", -3), 2), ((True, 10), 2), ((), 1)],
)
def test_key_frame_distance(stated, distance):
    videos = [Feature(str(n), "video", (4, 4, 3), None, False, {"video.g": g}) for n, g in enumerate(stated)]
    assert key_frame_rows([Feature("image", "image", (4, 4, 3), None, False, {}), *videos]) == distance


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
    refuses(root, f"{message}.*; expected a local folder, s3://, gs:// or az://")


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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "no such folder"),
        ("meta/info.json", "is a file"),
        ("data", r"not a LeRobot dataset: meta/info.json is missing \(found \[chunk-000"),
    ],
)
def test_paths_without_dataset_are_refused(root, path, message):
    refuses(root / path, message, FileNotFoundError)


@pytest.mark.parametrize("name", ["meta/tasks.parquet", "meta/episodes"])
def test_missing_metadata_file_is_reported(root, name):
    (root / name).rename(root / "away")
    refuses(root, f"{name}.* is missing", FileNotFoundError)


def test_unreadable_folder_is_reported(root, monkeypatch):
    def refuse(self, path, *mode):
        raise PermissionError("Access Denied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", refuse)
    refuses(root, "cannot be read: PermissionError: Access Denied; check its permissions", PermissionError)


@pytest.mark.parametrize("damage", ["empty", "truncated", "middle", "LFS"])
def test_corrupt_parquet_is_refused(root, damage):
    path = episodes_file(root)
    content = path.read_bytes()
    damaged = {
        "empty": b"",
        "truncated": content[:-20],
        "middle": b"PAR1" + bytes(len(content) // 2) + content[len(content) // 2 + 4 :],
        "LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n",
    }
    path.write_bytes(damaged[damage])
    message = "is a Git LFS pointer" if damage == "LFS" else "cannot be read as a parquet file"
    refuses(root, f"{path.relative_to(root)} {message}")


@pytest.mark.parametrize("name", ["meta/info.json", "meta/stats.json"])
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]"], ids=["empty", "deep", "list"])
def test_corrupt_json_is_refused(root, name, content):
    (root / name).write_bytes(content)
    refuses(root, f"{name}.*{'expected a JSON object, found list' if content == b'[]' else 'is not valid JSON'}")


def info(message, **changes):
    return lambda root: edit_info(root, **changes), f"meta/info.json: {message}"


def feature(message, key="action", **changes):
    message = f"meta/info.json: feature {re.escape(repr(key))}.*{message}"
    return lambda root: edit_feature(root, key, **changes), message


def tasks(message, task_index=(0, 1), task=("a", "b"), drop=()):
    table = pa.table({"task_index": task_index, "task": task}).drop_columns(drop)
    return lambda root: pq.write_table(table, root / "meta/tasks.parquet"), f"meta/tasks.parquet: .*{message}"


def episode(message, column, value):
    return lambda root: edit_parquet(episodes_file(root), set_value(column, 2, value)), f"meta/episodes.*{message}"


def without_column(column):
    message = rf"meta/episodes/\S+ lacks the columns \[{re.escape(column)}\]|: lacks the columns \[{column}\]"
    return lambda root: edit_parquet(episodes_file(root), lambda table: table.drop_columns([column])), message


def drop_all_episodes(root):
    for path in (root / "meta/episodes").rglob("*.parquet"):
        edit_parquet(path, lambda table: table.slice(0, 0))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        info("fps is 0", fps=0),
        info("fps is 29.97", fps=29.97),
        info("fps is 10", fps=10**9),
        info(r"features lacks \['timestamp'", features={}),
        info("total_episodes is 99, but meta/episodes holds 12", total_episodes=99),
        info("total_frames is 61, but meta/episodes holds 60", total_frames=61),
        info("data_path is None, expected a path template", data_path=None),
        info("video_path .* gives two cameras the same file", video_path="videos/{chunk_index}/{file_index}.mp4"),
        info("data_path .* gives different files the same path", data_path="data/{chunk_index}.parquet"),
        info("chunks_size is 0", data_path="{episode_chunk}", chunks_size=0),
        info("codebase_version is None", codebase_version=None),
        (lambda root: edit_info(root, codebase_version="v4.0"), "'v4.0'; .* read here: convert an older"),
        feature("dtype is", dtype=["float32"]),
        feature(r"shape is \[0\]", shape=[0]),
        feature(r"shape is \[3.0\]", shape=[3.0]),
        feature("shape is 3", shape=3),
        feature("names is 3", names=3),
        feature("expected three numbers for a camera", TOP, shape=[48, 64]),
        feature("dtype is string, .*expected numbers", "timestamp", dtype="string"),
        feature(r"shape is \[2\], expected numbers", "index", shape=[2]),
        feature("info is 'h264'", TOP, info="h264"),
        tasks(r"expected the columns task_index and task.*found \['task'\]", drop=["task_index"]),
        tasks("task_index 0 is both 'a' and 'b'", task_index=[0, 0]),
        tasks("task_index is -1", task_index=[0, -1]),
        tasks("task_index has 1 empty values", task_index=[0, None]),
        tasks("task_index must hold whole numbers", task_index=[0.0, 0.5]),
        tasks("task_index has type string", task_index=["0", "1"]),
        tasks("task has type int64", task=[1, 2]),
        tasks("task_index 1 holds a NUL character", task=["a", "b\0c"]),
        episode("length is -5", "length", -5),
        episode("length has 1 empty values", "length", None),
        episode("episode 1 is there twice", "episode_index", 1),
        episode("episode number 100,000,000 is above the limit", "episode_index", 10**8),
        without_column("length"),
        without_column(f"videos/{WRIST}/from_timestamp"),
        (lambda root: episodes_file(root, 1).unlink(), "total_episodes is 12, but meta/episodes holds"),
        (drop_all_episodes, "holds no episode"),
    ],
)
def test_invalid_metadata_is_refused(root, edit, message):
    edit(root)
    refuses(root, message)


@pytest.mark.parametrize(
    "template",
    [
        "/etc/passwd",
        "../{chunk_index}/{file_index}",
        "videos/../../{video_key}/{chunk_index}/{file_index}.mp4",
        "data//{chunk_index}/{file_index}",
        "s3://bucket/{chunk_index}/{file_index}",
        "data\\{chunk_index}\\{file_index}",
        "data/{chunk_index}/{file_index}\0.parquet",
        "data/{chunk_index.__class__.__init__.__globals__}/{file_index}",
        "data/{chunk_index[0]}/{file_index}",
        "data/{chunk_index!r}/{file_index}",
        "data/{chunk_index:0999999999d}/{file_index}",
        "data/{chunk_index:{file_index}}/{file_index}",
        "videos/{video_key:03d}/{chunk_index}/{file_index}.mp4",
        "data/{}/{file_index}",
        "data/{video_key}/{chunk_index}/{file_index}",
        "data/{chunk_index}/file_index}",
        7,
    ],
)
def test_unsafe_path_templates_are_refused(root, template):
    name = "video_path" if str(template).startswith("videos") else "data_path"
    edit_info(root, **{name: template})
    refuses(root, f"meta/info.json: {name}.*(not a path|expected a path template)")


@pytest.mark.parametrize("value", ["high", [[1.0], [1.0, 2.0]], [1.0, None], []])
def test_invalid_statistics_count_as_missing(root, value):
    stats, before = json.loads((root / "meta/stats.json").read_text()), load_metadata(root).stats
    stats["action"]["mean"] = value
    stats["observation.state"] = [1, 2]
    (root / "meta/stats.json").write_text(json.dumps(stats))
    meta = load_metadata(root)
    assert "mean" not in meta.stats["action"] and "observation.state" not in meta.stats
    np.testing.assert_array_equal(meta.stats["action"]["std"], before["action"]["std"])


def test_duplicate_and_empty_tasks_are_ignored(root):
    tasks = load_metadata(root).tasks
    table = {"task_index": [*tasks, 0, 99], "task": [*tasks.values(), tasks[0], None]}
    pq.write_table(pa.table(table), root / "meta/tasks.parquet")
    assert load_metadata(root).tasks == tasks


EPISODE_TASKS = {
    "absent": lambda texts: None,
    "null": lambda texts: None,
    "numbers": lambda texts: 1,
    "texts": lambda texts: texts[0],
    "nulls in lists": lambda texts: [*texts, None],
    "other words": lambda texts: [*texts, "fold the shirt"],
}


@pytest.mark.parametrize("form", EPISODE_TASKS)
def test_episode_tasks_forms_are_read(root, form):
    """LeRobot's `convert_image_to_video` writes none: rows have theirs by `task_index`."""
    before = load_metadata(root)
    for path in (root / "meta/episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        at, lists = table.column_names.index("tasks"), table["tasks"].to_pylist()
        changed = table.set_column(at, "tasks", pa.array(list(map(EPISODE_TASKS[form], lists))))
        pq.write_table(changed.drop_columns(["tasks"]) if form == "absent" else changed, path)
    meta = load_metadata(root)
    unusable = form in ("absent", "null", "numbers")
    expected = {"texts": [texts[:1] for texts in before.episode_tasks]}.get(form, before.episode_tasks)
    assert meta.episode_tasks == ([()] * len(EPISODES) if unusable else expected)
    for original, changed in zip(read_all(before), read_all(meta), strict=True):
        np.testing.assert_array_equal(original["task"], changed["task"])
    if unusable:
        with pytest.raises(ValueError, match="--dataset.tasks: the metadata names no task of any episode"):
            choose_episodes(meta, tasks=["*"])


def read_all(meta):
    source = LeRobotDatasource([meta], features=Features(camera_keys=[]))
    return list(source.read_rows(range(meta.total_frames), meta.total_frames))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("data/file_index", -1),
        ("data/chunk_index", None),
        (f"videos/{TOP}/file_index", None),
        (f"videos/{TOP}/from_timestamp", -0.5),
        (f"videos/{TOP}/from_timestamp", float("nan")),
    ],
)
def test_invalid_episode_location_can_be_left_out(root, column, value):
    """By choosing other episodes, or cameras other than its own."""
    complete = load_metadata(root)
    edit_parquet(episodes_file(root), set_value(column, 2, value))
    meta = load_metadata(root)
    message = re.escape(f"episode 2 has {'empty' if value is None else value} as {column}")
    with pytest.raises(ValueError, match=f"{message}.*choose `episodes` without \\[2\\]"):
        LeRobotDatasource([meta])
    others, cameras = np.setdiff1d(np.arange(len(EPISODES)), 2), Features(camera_keys=[WRIST])
    sources = [LeRobotDatasource([m], Selection(episodes=[others]), cameras) for m in (complete, meta)]
    expected, rows = (next(source.read_rows(range(9, 20), 11)) for source in sources)
    for key, values in expected.items():
        np.testing.assert_array_equal(rows[key], values)
    if column.startswith(f"videos/{TOP}"):
        LeRobotDatasource([meta], features=cameras)


@pytest.mark.parametrize("gone", [[0, 1], [3, 7, 8], [11]])
def test_missing_episode_numbers_are_skipped(root, gone):
    """Only a gap in the middle needs a choice of episodes."""
    complete, at_an_end = load_metadata(root), gone != [3, 7, 8]
    remove_episodes(root, gone)
    meta = load_metadata(root)
    others = [episode for episode in range(len(EPISODES)) if episode not in gone]
    if not at_an_end:
        with pytest.raises(ValueError, match=f"episode {gone[0]} is in no file of meta/episodes"):
            LeRobotDatasource([meta])
    assert select_episodes(meta, None).tolist() == (others if at_an_end else list(range(12)))
    assert [meta.episode_tasks[e] for e in others] == [complete.episode_tasks[e] for e in others]
    assert meta.episode_length[others].tolist() == complete.episode_length[others].tolist()
    for key in complete.video_keys:
        files = [[m.video_files[key][m.episode_video_file[key][e]] for e in others] for m in (complete, meta)]
        assert files[0] == files[1]
    # --dataset.statistics lerobot
    actual, expected = (
        complete_stats(replace(m, stats={}), {"action": {"mean", "q01"}}, cache_dir=None, episodes=np.array(others))
        for m in (meta, complete)
    )
    for name in ("mean", "q01"):
        np.testing.assert_array_equal(actual["action"][name], expected["action"][name])


@pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.parquet", "data/chunk-000"])
def test_links_out_of_dataset_are_refused(root, original, name):
    (root / name).rename(root / "away")
    (root / name).symlink_to(original / name)
    refuses(root, f"{name}.*is a link to .*, outside the dataset")
