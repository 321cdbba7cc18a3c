"""Datasets as Ray's and LeRobot's own tests build them, and as LeRobot's tools change them: rows are LeRobotDataset's.

The table of what is read and what differs by design is in docs/datasets.md.
"""

import json

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot.datasets import dataset_tools
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from lerobot_datasource import LeRobotDatasource
from tests.datasets import draw_frame, make_dataset
from vla_finetuning.data.dataset import select_episodes
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.options import Selection
from vla_finetuning.data.selection import choose_episodes
from vla_finetuning.envs.writing import writing_videos

FPS, TOP = 10, "observation.images.top"


def rows_of(root, episodes=None):
    """All rows that are read here, by column."""
    meta = load_metadata(root)
    chosen = select_episodes(meta, episodes)
    source = LeRobotDatasource([meta], Selection(episodes=[chosen]))
    count = int(meta.episode_length[chosen].sum())
    (rows,) = source.read_rows(range(count), count)
    return rows


# ---- as Ray's tests build one ---------------------------------------------------------------------------------------


def as_rays(root, lengths=(5, 7, 4), size=(4, 4), with_tasks=False):
    """Videos by OpenCV's writer (MPEG-4 part 2), numbers of one entry, a table of episodes without tasks."""
    names = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}
    features = {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in names.items()}
    features |= {"task_index": {"dtype": "int64", "shape": [1], "names": None}}
    features |= {name: {"dtype": "float32", "shape": [2], "names": None} for name in ("observation.state", "action")}
    features[TOP] = {"dtype": "video", "shape": [*size, 3], "names": ["height", "width", "channels"]}
    info = {"codebase_version": "v3.0", "fps": FPS, "features": features, "robot_type": None}
    info |= {"total_episodes": len(lengths), "total_frames": sum(lengths), "total_tasks": 2}
    for folder in ("meta/episodes/chunk-000", "data/chunk-000", f"videos/{TOP}/chunk-000"):
        (root / folder).mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["pick", "place"]}), root / "meta/tasks.parquet")
    table, rows, start = [], [], 0
    for episode, length in enumerate(lengths):
        path = root / f"videos/{TOP}/chunk-000/file-{episode:03d}.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), FPS, size[::-1])
        for frame in range(length):
            writer.write(cv2.resize(draw_frame(start + frame, (48, 64)), size[::-1]))
            row = {"timestamp": np.float32(frame / FPS), "frame_index": frame, "episode_index": episode}
            row |= {"index": start + frame, "task_index": episode % 2, "action": [frame, episode]}
            rows.append({**row, "observation.state": [start, frame]})
        writer.release()
        at = {"data/chunk_index": 0, "data/file_index": 0, f"videos/{TOP}/chunk_index": 0}
        at |= {f"videos/{TOP}/file_index": episode, f"videos/{TOP}/from_timestamp": 0.0}
        at |= {f"videos/{TOP}/to_timestamp": length / FPS, "dataset_from_index": start}
        at |= {"dataset_to_index": start + length, "episode_index": episode, "length": length}
        table.append({**at, **({"tasks": [("pick", "place")[episode % 2]]} if with_tasks else {})})
        start += length
    pq.write_table(pa.Table.from_pylist(table), root / "meta/episodes/chunk-000/file-000.parquet")
    columns = pa.Table.from_pylist(rows)
    vectors = {name: pa.list_(pa.float32()) for name in ("observation.state", "action")}
    schema = pa.schema([(field.name, vectors.get(field.name, field.type)) for field in columns.schema])
    pq.write_table(columns.cast(schema), root / "data/chunk-000/file-000.parquet")
    return root


@pytest.mark.parametrize(("size", "with_tasks"), [((4, 4), False), ((64, 64), True)])
def test_a_dataset_as_rays(tmp_path, size, with_tasks):
    root = as_rays(tmp_path / "ray", size=size, with_tasks=with_tasks)
    rows = rows_of(root)
    assert rows["frame_index"].tolist() == [*range(5), *range(7), *range(4)]
    assert rows["task"].tolist() == ["pick"] * 5 + ["place"] * 7 + ["pick"] * 4
    assert rows["action"].tolist() == [[f, e] for e, n in enumerate((5, 7, 4)) for f in range(n)]
    for episode, first in enumerate((0, 5, 12)):
        video = cv2.VideoCapture(str(root / f"videos/{TOP}/chunk-000/file-{episode:03d}.mp4"))
        for frame in range((5, 7, 4)[episode]):
            _, pixels = video.read()
            there = np.abs(rows[TOP][first + frame].astype(int) - pixels[..., ::-1].astype(int))
            assert there.max() <= 4  # two conversions of the same YUV
    assert rows_of(root, [1])["episode_index"].tolist() == [1] * 7
    with pytest.raises(ValueError, match="not in the dataset, which has 0..2"):
        rows_of(root, [3])


# ---- as LeRobot's tools leave one -----------------------------------------------------------------------------------


def assert_lerobots(root, name):
    expected, found = LeRobotDataset(name, root=root, video_backend="pyav"), rows_of(root)
    assert len(expected) == len(found["index"])
    for i, row in enumerate(map(expected.__getitem__, range(len(expected)))):
        assert row["task"] == found["task"][i]
        for key in ("action", "observation.state", "timestamp", "frame_index", "episode_index", "index"):
            np.testing.assert_array_equal(np.asarray(row[key]), found[key][i], err_msg=key)
        for key in (key for key in found if key.startswith("observation.images.")):
            pixels = (row[key].numpy().transpose(1, 2, 0) * 255).round().astype(np.uint8)
            np.testing.assert_array_equal(pixels, found[key][i], err_msg=key)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = make_dataset(tmp_path_factory.mktemp("peers") / "whole", episodes=(6, 5, 7, 4), cameras={TOP: (48, 64)})
    return LeRobotDataset("local/whole", root=root, video_backend="pyav")


def test_after_delete_episodes(whole, tmp_path):
    with writing_videos():
        dataset_tools.delete_episodes(whole, [1], output_dir=tmp_path / "less", repo_id="local/less")
    assert_lerobots(tmp_path / "less", "local/less")


def test_after_split_and_merge(whole, tmp_path):
    with writing_videos():
        splits = dataset_tools.split_dataset(whole, {"a": [0, 2], "b": [1, 3]}, output_dir=tmp_path / "split")
    for split in splits.values():
        assert_lerobots(split.root, split.repo_id)
    dataset_tools.merge_datasets(list(splits.values()), output_repo_id="local/merged", output_dir=tmp_path / "merged")
    assert_lerobots(tmp_path / "merged", "local/merged")


def test_after_images_became_videos(tmp_path):
    """LeRobot writes a table of episodes without tasks."""
    root = make_dataset(tmp_path / "images", episodes=(6, 5), cameras={}, image_cameras={TOP: (48, 64)})
    images = LeRobotDataset("local/images", root=root)
    with writing_videos():
        dataset_tools.convert_image_to_video_dataset(images, output_dir=tmp_path / "videos", repo_id="local/videos")
    assert_lerobots(tmp_path / "videos", "local/videos")
    meta = load_metadata(tmp_path / "videos")
    with pytest.raises(ValueError, match="--dataset.tasks: the metadata names no task of any episode; leave it out"):
        choose_episodes(meta, tasks=["*"])


# ---- where this reader differs by design ----------------------------------------------------------------------------


def test_rows_in_another_order_than_the_table_of_episodes_says(tmp_path):
    """LeRobot reads by position: its first row of episode 0 is then episode 2's."""
    root = as_rays(tmp_path / "ray")
    file = root / "data/chunk-000/file-000.parquet"
    rows = pq.read_table(file)
    pq.write_table(pa.concat_tables([rows.slice(12), rows.slice(0, 12)]), file)
    assert LeRobotDataset("local/ray", root=root, video_backend="pyav").hf_dataset[0]["episode_index"] == 2
    with pytest.raises(ValueError, match="file-000.parquet"):
        rows_of(root)


def test_a_video_that_ends_before_its_episode(tmp_path):
    root = as_rays(tmp_path / "ray", lengths=(5, 7, 4))
    shorter = as_rays(tmp_path / "shorter", lengths=(5, 6, 4))
    name = f"videos/{TOP}/chunk-000/file-001.mp4"
    (root / name).write_bytes((shorter / name).read_bytes())
    assert len(rows_of(root, [0, 2])["index"]) == 9
    with pytest.raises(ValueError, match="file-001.mp4"):
        rows_of(root)
