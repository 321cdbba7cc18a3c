"""Rows against `LeRobotDataset`, in this process and through Ray Data."""

import itertools
import json
import math
import os
import pickle
import shutil
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray import cloudpickle
from ray.data import DataContext

import lerobot_datasource
from lerobot_datasource import SHARE, read_lerobot
from tests import clusters
from tests.datasets import add_subtasks, datasource, edit_json, make_dataset
from vla_finetuning.data import decode as lerobot_decode
from vla_finetuning.data import rows as lerobot_rows
from vla_finetuning.data.dataset import FRAME_FEATURES
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.plan import _Source
from vla_finetuning.data.read_tasks import BlockShare, reads_per_task
from vla_finetuning.data.rows import read_rows
from vla_finetuning.plan.mixture import check_same_features

TOP, WRIST, STILL = "observation.images.top", "observation.images.wrist", "observation.images.still"
FPS = 10
WINDOWS = {"action": [i / FPS for i in range(8)], "observation.state": [-1 / FPS, 0.0], TOP: [-2 / FPS, 0.0]}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Datasets of several shapes, by name."""
    base = tmp_path_factory.mktemp("datasets")
    return {
        "rollover": make_dataset(base / "rollover"),
        "images": make_dataset(
            base / "images", cameras={}, image_cameras={STILL: (16, 24)}, episodes=(6, 9, 4), extra_features=True
        ),
        "mixed": make_dataset(
            base / "mixed",
            cameras={TOP: (32, 48)},
            image_cameras={STILL: (16, 24)},
            episodes=(5, 11),
            extra_features=True,
            vcodec="h264",
        ),
        "single_frames": make_dataset(base / "single_frames", episodes=(1,) * 5),
        "second": make_dataset(base / "second", episodes=(4, 8), seed=1),
    }


def lerobot(root, **options):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("test", root=root, video_backend="pyav", return_uint8=True, **options)


def rewrite_data(root, change):
    """Rewrite the table of each data file by `change(number, table)`."""
    for number, path in enumerate(sorted(root.glob("data/*/*.parquet"))):
        pq.write_table(change(number, pq.read_table(path)), path)


def assert_same_row(row, item, meta):
    """Compare our row (numpy) with LeRobot's item (torch)."""
    assert set(row) == set(item) | {"dataset_index"}
    for key, theirs in item.items():
        mine = row[key]
        if isinstance(theirs, str):
            assert mine == theirs
            continue
        theirs = theirs.numpy()
        if key in meta.camera_keys:
            theirs = np.moveaxis(theirs, -3, -1)
            if meta.features[key].dtype == "image":  # LeRobot has no uint8 for these: it gives pixel / 255
                assert mine.dtype == np.uint8
                mine = mine.astype(np.float32) / 255
        assert np.asarray(mine).dtype == theirs.dtype, key
        assert np.shape(mine) == theirs.shape, key
        np.testing.assert_array_equal(mine, theirs, err_msg=key)


def rows_of(dataset):
    """Yield the rows of a Ray dataset; check that tensors are no object arrays."""
    for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
        for key, values in batch.items():
            assert values.dtype != object or key == "task" or isinstance(values[0], str), key
        for i in range(len(batch["index"])):
            yield {key: values[i] for key, values in batch.items()}


def without_ray(monkeypatch, **resources):
    """Plan read tasks as on a cluster with these resources, without one."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))


@pytest.fixture
def rows_here(monkeypatch):
    """Run the read tasks of `read_lerobot` one by one in this process."""
    without_ray(monkeypatch)
    monkeypatch.setattr(lerobot_datasource, "read_source", lambda source, **_: source)

    def rows(root, **options):
        for task in read_lerobot(root, **options).get_read_tasks(1):
            for table in task():
                batch = {key: lerobot_rows.column_to_numpy(table.column(key)) for key in table.column_names}
                yield from ({key: values[i] for key, values in batch.items()} for i in range(len(table)))

    return rows


def assert_every_row(root, windows, rows_of):
    """Check that shuffled rows are LeRobot's, each once."""
    meta = load_metadata(root)
    if windows is not None:
        windows = {k: v for k, v in windows.items() if k in meta.features}
    reference = lerobot(root, delta_timestamps=windows)
    order = []
    for row in rows_of(root, delta_timestamps=windows, shuffle_seed=0, shuffle_window=16):
        order.append(int(row["index"]))
        assert_same_row(row, reference[order[-1]], meta)
    assert sorted(order) == list(range(len(reference)))
    assert len(order) < 6 or order != sorted(order)


@pytest.mark.parametrize("name", ["rollover", "images", "mixed", "single_frames", "mixed without windows"])
def test_rows_equal_lerobots(rows_here, roots, name):
    assert_every_row(roots[name.split()[0]], None if "without" in name else WINDOWS, rows_here)


@pytest.mark.ray
def test_rows_through_ray_equal_lerobots(ray_cluster, roots):
    assert_every_row(roots["mixed"], WINDOWS, lambda root, **options: rows_of(read_lerobot(root, **options)))


@pytest.mark.parametrize("parallelism", [5, 200])
def test_each_row_is_read_once_at_any_parallelism(rows_here, roots, parallelism):
    rows = rows_here(roots["rollover"], override_num_blocks=parallelism, camera_keys=[WRIST], shuffle_seed=1)
    assert Counter(int(r["index"]) for r in rows) == Counter(range(54))


def test_episode_subset_equals_lerobots_in_stored_order(rows_here, roots):
    meta = load_metadata(roots["rollover"])
    reference = lerobot(roots["rollover"], episodes=[1, 3, 4], delta_timestamps=WINDOWS)
    rows = rows_here(roots["rollover"], episodes=[1, 4, 3], delta_timestamps=WINDOWS)
    for row, item in zip(rows, reference, strict=True):
        assert_same_row(row, item, meta)


@pytest.mark.parametrize("weights", [None, (1, 2)], ids=["together", "mixture"])
def test_rows_of_two_datasets_equal_lerobots(rows_here, roots, weights):
    root = [roots[name] for name in ("rollover", "second")]  # 54 and 12 rows
    references, meta = [lerobot(path) for path in root], load_metadata(roots["rollover"])
    if weights is not None:
        root = {str(path): weight for path, weight in zip(root, weights, strict=True)}
        with pytest.raises(ValueError, match="a mixture.* no stored order; give a shuffle seed"):
            read_lerobot(root)
        with pytest.raises(ValueError, match=f"of the 66 rows of an epoch, none would come from {roots['second']};"):
            read_lerobot({**root, str(roots["second"]): 0.001}, shuffle_seed=0)
    rows = list(rows_here(root, shuffle_seed=0, shuffle_window=16))
    counts = Counter((int(r["dataset_index"]), int(r["index"])) for r in rows)
    assert len(rows) == 66
    if weights is None:
        assert counts == Counter((d, i) for d, reference in enumerate(references) for i in range(len(reference)))
    else:
        first, second = ([n for (dataset, _), n in counts.items() if dataset == d] for d in (0, 1))
        assert first == [1] * 22 and len(second) == 12
        assert second.count(4) == 44 - 3 * 12  # 3 or 4 times each
    for row in rows:
        assert_same_row(row, references[int(row["dataset_index"])][int(row["index"])], meta)


@pytest.mark.ray
def test_row_order_is_preserved_if_tasks_finish_out_of_order(ray_cluster, roots):
    import ray

    def late(batch):
        # The first task ends last.
        time.sleep(0.5 * (0 in batch["index"]))
        return batch

    dataset = read_lerobot(roots["rollover"], camera_keys=[], shuffle_window=8, override_num_blocks=4)
    assert not ray.data.DataContext.get_current().execution_options.preserve_order
    for rows in (dataset, dataset.map_batches(late, batch_size=None)):
        assert [int(row["index"]) for row in rows.take_all()] == list(range(54))


@pytest.mark.ray
def test_stream_order_is_preserved_over_executions(ray_cluster, roots):
    """Two consumers get whole blocks of the plan in turn, over several executions."""
    import ray

    from lerobot_datasource import read_source

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    source = datasource(
        [load_metadata(roots["rollover"])],
        camera_keys=[TOP],
        shuffle_seed=0,
        shuffle_window=16,
        stream=(8, 8 + 4 * 48),
        rows_multiple=48,
        block_rows=4,
    )
    source._rows_per_execution = 96
    expected = [int(i) for s in source.plan.slices(8, 200) for i in s.rows()[1]]

    @ray.remote(num_cpus=0)
    def consume(split):
        batches = []
        for _ in range(2):
            batches += [
                (b["position"].tolist(), b["index"].tolist())
                for b in split.iter_batches(batch_size=8, batch_format="numpy", prefetch_batches=2)
            ]
        return batches

    splits = read_source(source).streaming_split(2, equal=True)
    results = ray.get([consume.remote(split) for split in splits])
    ray.data.DataContext.get_current().execution_options.preserve_order = False
    for rank, batches in enumerate(results):
        assert len(batches) == 12
        for k, (position, index) in enumerate(batches):
            first = 8 + k * 16 + rank * 4
            assert position == [*range(first, first + 4), *range(first + 8, first + 12)]
            assert index == [expected[p - 8] for p in position]


def read_directly(source, columns=None, limit=None):
    """Read a source without Ray."""
    last = source.plan.rows_per_epoch if limit is None else limit
    options = replace(source._options(16), columns=columns or source.columns())
    return list(read_rows(source._context(), np.array([[0, last]]), options))


@pytest.fixture
def decoded(monkeypatch):
    """Count decoded frames by camera."""
    counts, close = Counter(), lerobot_decode.VideoReader.__exit__

    def count(self, *exception):
        counts[TOP if TOP in self.name else WRIST] += self.frames_decoded
        return close(self, *exception)

    monkeypatch.setattr(lerobot_decode.VideoReader, "__exit__", count)
    return counts


@pytest.mark.parametrize(
    ("options", "read_options", "top", "wrist"),
    [
        ({}, {}, range(54, 200), range(54, 200)),
        ({"camera_keys": [WRIST]}, {}, [0], range(54, 200)),
        ({}, {"columns": ("action", "index")}, [0], [0]),
        ({"episodes": [[1]]}, {}, range(7, 11), range(7, 11)),
        ({}, {"limit": 5}, range(5, 9), range(5, 9)),
    ],
    ids=["all", "camera", "columns", "episode", "limit"],
)
def test_only_selected_rows_and_cameras_are_decoded(roots, decoded, options, read_options, top, wrist):
    read_directly(datasource([load_metadata(roots["rollover"])], **options), **read_options)
    assert decoded[TOP] in top and decoded[WRIST] in wrist


def test_segments_cut_at_key_frames_decode_fewer_frames(roots, decoded, monkeypatch):
    meta = load_metadata(roots["rollover"])

    def plan_and_frames():
        source = datasource([meta], shuffle_seed=0, shuffle_window=16, window_segments=8)
        decoded.clear()
        for first in range(0, source.plan.rows_per_epoch, 16):
            list(source.read_rows(range(first, min(first + 16, source.plan.rows_per_epoch)), 16))
        return source.plan, decoded[TOP]

    plan, frames = plan_and_frames()
    assert (plan.segment_rows, plan.cut_at) == (2, 2)
    monkeypatch.setattr("lerobot_datasource.key_frame_rows", lambda cameras: 1)
    before, more = plan_and_frames()
    assert before.cut_at == 1
    assert plan.rows_per_epoch <= frames < more


@pytest.mark.ray
def test_projection_and_limit_are_pushed_down(ray_cluster, roots):
    broken = roots["rollover"].parent / "no_top"
    if not broken.exists():
        shutil.copytree(roots["rollover"], broken)
        for file in (broken / "videos" / TOP).rglob("*.mp4"):
            file.write_bytes(b"\0\0\0\x08moov")  # whole, and no video
    dataset = read_lerobot(broken)
    assert dataset.select_columns(["index", WRIST]).count() == 54
    rows = dataset.select_columns(["index", "action"]).take_all()  # would fail if the camera were decoded
    assert sorted(int(r["index"]) for r in rows) == list(range(54))
    with pytest.raises(Exception, match="not a readable video"):
        dataset.take(1)
    with pytest.raises(ValueError, match="no column 'actoin'; did you mean action.*the columns are"):
        dataset.select_columns(["index", "actoin"]).take_all()


@pytest.mark.parametrize("limit", [0, 5])
def test_read_tasks_stop_at_row_limit(roots, monkeypatch, decoded, limit):
    """Ray passes the limit of `map(f).limit(0)` on, too, and cuts the rows itself."""
    without_ray(monkeypatch, CPU=1, object_store_memory=1e9)
    tasks = datasource([load_metadata(roots["rollover"])], num_tasks=2).get_read_tasks(1, per_task_row_limit=limit)
    assert sum(len(table) for task in tasks for table in task()) == 2 * limit
    assert 2 * limit <= decoded[TOP] < 20


def test_projection_sets_column_order(roots):
    source = datasource([load_metadata(roots["rollover"])])
    selected = source.apply_projection({"task": "task", "action": "action"})
    assert read_directly(selected)[0].column_names == ["task", "action"]
    reselected = selected.apply_projection({"action": "action", "task": "task"})  # as `select_columns` after a limit
    assert read_directly(reselected)[0].column_names == ["action", "task"]


def test_read_options_are_passed_to_ray(roots, monkeypatch):
    options = {"label_selector": {"kind": "cpu"}, "memory": 2**20, "concurrency": 1}
    options["ray_remote_args"] = {"max_retries": 1}
    monkeypatch.setattr(lerobot_datasource, "read_source", lambda source, **passed: passed)
    assert read_lerobot(roots["rollover"], **options) == options


@pytest.mark.ray
@pytest.mark.slow
def test_dataset_survives_ray_restart(roots):
    clusters.stop()
    clusters.start()
    dataset = read_lerobot(roots["rollover"]).select_columns(["index"])
    first = dataset.take_all()
    clusters.stop()
    clusters.start()
    assert dataset.take_all() == first


@pytest.mark.parametrize(("name", "size"), [("rollover", (224, 224)), ("mixed", (30, 70)), ("mixed", (57, 31))])
def test_resized_frames_equal_lerobots(roots, name, size):
    import torch
    from lerobot.policies.common.vla_utils import resize_with_pad_torch

    meta = load_metadata(roots[name])
    windows = {TOP: WINDOWS[TOP]}
    source = datasource([meta], image_size=size, delta_timestamps=windows, shuffle_seed=0)
    (rows,) = source.read_rows(range(12), 12)
    assert {k: v.shape[1:] for k, v in rows.items()} == {
        k: v.shape[1:] for k, v in source.example().items() if k != "position"
    }
    assert source.row_bytes() > sum(rows[k][0].nbytes for k in meta.camera_keys)
    reference = lerobot(roots[name], delta_timestamps=windows)
    for i in range(12):
        item = reference[int(rows["index"][i])]
        for key in meta.camera_keys:
            image = item[key] if item[key].ndim == 4 else item[key][None]
            image = image.float() / 255 if image.dtype == torch.uint8 else image
            theirs = resize_with_pad_torch(image, *size).movedim(-3, -1).numpy() * 255
            error = np.abs(rows[key][i].reshape(theirs.shape) - theirs)
            assert error.max() <= 1 and error.mean() < 0.3, (key, error.max(), error.mean())
            np.testing.assert_array_equal(rows[key][i].reshape(theirs.shape)[theirs == 0], 0)  # the black around


def test_padded_cameras_take_no_cache_space(tmp_path):
    metas = [load_metadata(make_dataset(tmp_path / key, cameras={key: (16, 24)})) for key in (TOP, WRIST)]
    assert datasource(metas, padded=True).decoded_bytes() == 2 * datasource(metas[:1]).decoded_bytes() > 0


def test_cameras_of_different_sizes_need_image_size(roots, tmp_path):
    metas = [load_metadata(roots["rollover"])]
    metas.append(load_metadata(make_dataset(tmp_path / "larger", cameras={TOP: (64, 64), WRIST: (96, 80)})))
    with pytest.raises(ValueError, match=f"differ in .*{TOP}"):
        datasource(metas)
    source = datasource(metas, image_size=(32, 32), shuffle_seed=0)
    (rows,) = source.read_rows(range(16), 16)
    assert set(rows["dataset_index"]) == {0, 1} and rows[TOP].shape == (16, 32, 32, 3)


@pytest.mark.parametrize("padded", [False, True])
def test_datasets_of_float64_and_float32_are_mixed(roots, tmp_path, padded):
    """float64 becomes float32 in a row, as in LeRobot's."""
    root = shutil.copytree(roots["second"], tmp_path / "wider")
    wider = {"observation.state": pa.list_(pa.float64()), "action": pa.list_(pa.float64()), "timestamp": pa.float64()}
    edit_json(root / "meta/info.json", lambda info: [info["features"][key].update(dtype="float64") for key in wider])

    def widen(_, table):
        return table.cast(pa.schema([pa.field(f.name, wider.get(f.name, f.type)) for f in table.schema]))

    rewrite_data(root, widen)
    metas, items = [load_metadata(roots["rollover"]), load_metadata(root)], [lerobot(roots["rollover"]), lerobot(root)]
    source = datasource(metas, camera_keys=[], padded=padded)
    (rows,) = source.read_rows([0, 54, 65], 3)
    for i, (dataset_index, index) in enumerate([(0, 0), (1, 0), (1, 11)]):
        for key in wider:
            theirs = items[dataset_index][index][key].numpy()
            assert rows[key].dtype == theirs.dtype == np.float32
            np.testing.assert_array_equal(rows[key][i], theirs)
    features = {key: feature for key, feature in metas[1].features.items() if key != "observation.state"}
    features["state"] = replace(metas[1].features["observation.state"], key="state")
    renamed = replace(metas[1], features=features)
    with pytest.raises(ValueError, match='--rename_map=.{"state": "observation.state"}'):
        check_same_features([metas[0], renamed], ["observation.state"])


def test_read_rows_reads_consecutive_positions_as_one_run(roots, monkeypatch):
    source = datasource([load_metadata(roots["rollover"])], camera_keys=[])
    runs, slices_of = [], source.plan.slices_of
    monkeypatch.setattr(source.plan, "slices_of", lambda batch: runs.append(batch.tolist()) or slices_of(batch))
    rows = list(source.read_rows([0, 1, 2, 5, 7, 8], 5))
    assert runs == [[[0, 3], [5, 6], [7, 8]], [[8, 9]]]
    assert np.concatenate([batch["index"] for batch in rows]).tolist() == [0, 1, 2, 5, 7, 8]


SHARES = {"all": [None], "shares": [BlockShare(0, 1, 3), BlockShare(1, 3, 3)]}


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize(("window", "first"), [(16, 0), (40, 6), (512, 0)])
def test_stream_shares_cover_the_stream(roots, monkeypatch, window, first, shares):
    """Each execution reads the expected_rows blocks of its ranks in turn, with the rows of their positions."""
    without_ray(monkeypatch, CPU=1, object_store_memory=1e9)
    ranks, block = 3, 2
    # The last turn of shares is not a expected_rows one.
    blocks, share_blocks = {"all": (216, 216), "shares": (215, 213)}[shares]
    last = first + blocks * block
    source = datasource(
        [load_metadata(roots["rollover"])],
        shuffle_seed=0,
        shuffle_window=window,
        stream=(first, last),
        camera_keys=[WRIST],
        block_rows=block,
        rows_multiple=ranks * block,
    )
    source._rows_per_execution = 24 * ranks * block
    (expected_rows,) = source.read_rows(range(last), last)
    read_positions, reads = {rank: [] for rank in range(ranks)}, []
    for share in SHARES[shares]:
        context = DataContext()
        context.set_config(SHARE, share)
        for context._execution_idx in range(3):
            turns = itertools.cycle(range(ranks) if share is None else range(share.first, share.last))
            tasks = source.get_read_tasks(1, data_context=context)
            for task in tasks:
                reads.append([np.diff(read).sum() for read in task.read_fn.reads])
                assert max(reads[-1]) <= source.plan.window_rows
                tables = list(task())
                assert sum(map(len, tables)) == task.metadata.num_rows
                for table in tables:
                    position, index, frames = (
                        lerobot_rows.column_to_numpy(table.column(key)) for key in ("position", "index", WRIST)
                    )
                    np.testing.assert_array_equal(index, expected_rows["index"][position])
                    np.testing.assert_array_equal(frames, expected_rows[WRIST][position])
                    read_positions[next(turns)] += position.tolist()
    assert max(map(len, reads)) > 1 or window > 16  # several windows to a task
    # One execution assigns block by block, rank by rank.
    expected = np.arange(first, first + share_blocks * block).reshape(-1, ranks, block)
    assert read_positions == {rank: expected[:, rank].ravel().tolist() for rank in range(ranks)}


@pytest.mark.parametrize("size", [(720, 1280), (2160, 3840)])
def test_block_and_window_bytes_are_bounded(roots, size):
    """Cameras of 720p must not fill the object store."""
    meta = load_metadata(roots["rollover"])
    features = {k: replace(f, shape=(*size, 3)) if k in meta.camera_keys else f for k, f in meta.features.items()}
    source = datasource([replace(meta, features=features)], shuffle_seed=0)
    assert source.row_bytes() > 2 * size[0] * size[1] * 3
    assert source.row_bytes() <= source.block_rows * source.row_bytes() <= max(32 * 2**20, source.row_bytes())
    # Windows are larger only to have enough rows to mix.
    assert source.plan.window_rows * source.row_bytes() <= max(192 * 2**20, 32 * source.row_bytes())
    assert source.plan.window_rows % source.block_rows == 0
    assert source.plan.window_rows / source.plan.segment_rows >= 32
    in_order = datasource(source.metas)
    assert in_order.plan.window_rows * source.row_bytes() <= max(192 * 2**20, source.row_bytes())
    assert source.block_rows > 1 or size == (2160, 3840)


def test_reads_per_task_depend_on_cluster_resources():
    store = {"object_store_memory": 64e9}
    assert reads_per_task(1000, 200e6, {"CPU": 16, **store}) == 4
    assert reads_per_task(60, 200e6, {"CPU": 16, **store}) == 1  # every CPU has several tasks
    assert reads_per_task(1000, 200e6, {"CPU": 50, **store}) == 2  # the object store holds what waits for its turn
    assert reads_per_task(1000, 200e6, {}) == 1


def grown(meta, episodes, rows=300):
    """Return the metadata of a dataset of many more episodes, with the same files."""
    columns = {"episode_data_file", "episode_data_row", "episode_video_file", "episode_video_start_s"}
    values = {name: getattr(meta, name) for name in columns}
    return replace(
        meta,
        episode_index=np.arange(episodes),
        episode_length=np.full(episodes, rows),
        episode_start=np.arange(episodes) * rows,
        **{
            k: {key: np.resize(a, episodes) for key, a in v.items()} if isinstance(v, dict) else np.resize(v, episodes)
            for k, v in values.items()
        },
    )


@pytest.mark.parametrize("count", [1, 7, 60])
def test_number_of_tasks_is_close_to_num_tasks(roots, monkeypatch, count):
    """Reads end at whole blocks, and often before the rows of a task."""
    without_ray(monkeypatch)
    meta = grown(load_metadata(roots["rollover"]), 300)
    for window in (64, 1024, 8192):
        source = datasource([meta], camera_keys=[], shuffle_seed=0, shuffle_window=window, num_tasks=count)
        rows = [task.metadata.num_rows for task in source.get_read_tasks(1)]
        assert 0.8 * count <= len(rows) <= count and sum(rows) == 90_000, window


@pytest.mark.parametrize(("episodes", "seed", "stream"), [(20_000, None, True), (5000, 0, False), (20_000, 0, True)])
def test_serialized_read_tasks_are_small(roots, monkeypatch, episodes, seed, stream):
    """Up to 6 million rows of 2.8 MB (as 3 cameras of 480x640), as a run or `read_lerobot` reads them."""
    meta, rows = grown(load_metadata(roots["rollover"]), episodes), 300 * episodes
    features = {k: replace(f, shape=(480, 960, 3)) if k in meta.camera_keys else f for k, f in meta.features.items()}
    without_ray(monkeypatch, CPU=64, object_store_memory=64e9)
    source = datasource([replace(meta, features=features)], shuffle_seed=seed, stream=(0, rows) if stream else None)
    tasks = source.get_read_tasks(1)
    assert len(source.get_read_tasks(1)) == len(tasks) <= 4096 + 1
    assert sum(task.metadata.num_rows for task in tasks) == np.diff(source.execution(0))
    (context,) = {id(task.read_fn.context): task.read_fn.context for task in tasks}.values()
    # A node holds the places of the episodes once.
    arrays = []
    shipped = pickle.dumps(context, protocol=5, buffer_callback=arrays.append)
    assert len(shipped) + sum(array.raw().nbytes for array in arrays) < 200 * episodes
    for task in tasks:
        task.read_fn.context = None
    assert sum(len(cloudpickle.dumps(task.read_fn)) for task in tasks) < 20e6
    # The 17th task finds its own rows.
    plan = pickle.loads(shipped, buffers=arrays).plan
    runs = np.concatenate(tasks[16].read_fn.reads[:3])
    rows_read = [index for window in plan.slices_of(runs) for index in window.rows()[1]]
    first, last = int(runs[0, 0]), int(runs[-1, 1])
    assert first == sum(task.metadata.num_rows for task in tasks[:16])
    assert rows_read == [index for s in source.plan.slices(first, last) for index in s.rows()[1]]


@pytest.mark.ray
def test_epoch_part_is_cut_once_per_process(ray_cluster, roots, monkeypatch):
    monkeypatch.setattr("vla_finetuning.data.plan.PART_SEGMENTS", 12)
    source = datasource([load_metadata(roots["rollover"])], shuffle_seed=0, shuffle_window=2, num_tasks=27)
    (parts,) = source.plan.identity()["parts_of_epoch"]
    cuts, cut = [], _Source._cut_and_permute
    monkeypatch.setattr(_Source, "_cut_and_permute", lambda self, *which: cuts.append(which) or cut(self, *which))
    tasks = [pickle.loads(cloudpickle.dumps(task)).read_fn for task in source.get_read_tasks(1)]
    assert sum(len(table) for task in tasks for table in task()) == 54
    assert 1 < parts == len(cuts) == len(set(cuts))


def test_language_columns_are_read_as_json(roots, tmp_path):
    """LeRobot's annotations, written as its own writer does: Arrow infers each file's types from its content."""
    from lerobot.datasets.language import language_feature_info
    from lerobot.datasets.language_render import active_at

    root = shutil.copytree(roots["rollover"], tmp_path / "annotated")
    edit_json(root / "meta/info.json", lambda info: info["features"].update(language_feature_info()))
    say = {"type": "function", "function": {"name": "say", "arguments": {"text": "here"}}}
    event = {"role": "user", "content": "what is it?", "style": "vqa", "camera": TOP, "tool_calls": None}
    lasting = {**event, "style": "plan", "camera": None, "timestamp": 0.5}
    subtasks = [{**lasting, "style": "subtask", "content": f"move {t}", "timestamp": t} for t in (0.5, 0.25)]
    lasting = [lasting, *subtasks]
    events = [[], [event], [{**event, "content": None, "tool_calls": [say]}, event]]
    numbers = []  # files of different types

    def annotated(number, table):
        numbers.append(number)
        column = [events[i % 3] if number else [] for i in table["index"].to_pylist()]
        table = table.append_column("language_events", pa.array(column))
        return table.append_column("language_persistent", pa.array([lasting] * len(table)))

    rewrite_data(root, annotated)
    assert len(numbers) > 1
    source = datasource([load_metadata(root)], camera_keys=[], shuffle_seed=0)
    tables = read_directly(source)
    assert len({table.schema for table in tables}) == 1
    reference = lerobot(root)
    for row in pa.concat_tables(tables).to_pylist():
        for key in ("language_events", "language_persistent"):
            assert json.loads(row[key]) == reference[row["index"]][key], key
        seconds = reference[row["index"]]["timestamp"].item()
        subtask = active_at(seconds, persistent=reference[row["index"]]["language_persistent"], style="subtask")
        assert row["subtask"] == ("" if subtask is None else subtask["content"])
    assert source.example()["language_events"].dtype == object
    with pytest.raises(ValueError, match="cannot window 'language_events', a language column"):
        datasource([load_metadata(root)], delta_timestamps={"language_events": [0.0]})


def test_subtasks_are_read_as_texts(roots, tmp_path):
    """The table that LeRobot wrote until 0.5: texts as pandas' index."""
    root = shutil.copytree(roots["rollover"], tmp_path / "d")
    add_subtasks(root, lambda index: index % 4 - 1, ["reach", "lift it"])
    note = {"dtype": "string", "shape": [1], "names": None}
    edit_json(root / "meta/info.json", lambda info: info["features"].update(note=note))
    rewrite_data(
        root, lambda number, table: table.append_column("note", pa.array(["so it is"] * len(table), pa.large_string()))
    )
    columns = ["subtask", "note"]
    tables = read_directly(datasource([load_metadata(root)], camera_keys=[], columns=columns, shuffle_seed=0))
    texts = {-1: "", 0: "reach", 1: "lift it", 2: ""}  # numbers without a text have none
    for row in pa.concat_tables(tables).to_pylist():
        assert row["subtask"] == texts[row["index"] % 4 - 1] and row["note"] == "so it is"
    (root / "meta/subtasks.parquet").unlink()
    meta = load_metadata(root)
    assert "subtask" not in meta.features and "meta/subtasks.parquet is missing" in meta.not_read[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"camera_keys": ["observation.images.nope"]}, "no cameras.*observation.images.nope"),
        ({"delta_timestamps": {"nope": [0.0]}}, "names 'nope'; the columns are"),
        ({"delta_timestamps": {"action": [0.0, 0.05]}}, "multiples of 1/10 s"),
        ({"delta_timestamps": {"action": [0.0, math.nan]}}, "multiples of 1/10 s"),
        *(({"image_size": size}, r"expected \(height, width\)") for size in ((224,), (0, 224), (22.5, 224))),
        ({"episodes": {"elsewhere": [0]}}, "episodes names .* not among the datasets"),
        ({"camera_keys": TOP}, "camera_keys.*: expected a list"),
        ({"on_error": "Skip"}, "on_error='Skip'"),
        ({"override_num_blocks": 0}, "override_num_blocks=0"),
        ({"window_segments": 0}, "window_segments=0: expected a whole number, at least 1"),
        ({"shuffle_window": -5}, "shuffle_window=-5: expected a whole number, at least 1"),
        ({"shuffle_seed": -1}, "shuffle_seed=-1: expected a whole number, at least 0"),
        *(({"tolerance_s": t}, "tolerance_s=.*: expected a positive number") for t in (0, math.nan, "x", True)),
        *(({"frame_cache_gb": gb}, "frame_cache_gb=.*: expected a positive number") for gb in (-1, math.inf, None)),
    ],
)
def test_invalid_arguments_are_refused(rows_here, roots, options, message):
    with pytest.raises(ValueError, match=message):
        read_lerobot(roots["rollover"], **options)


@pytest.mark.parametrize("root", [[], (), {}])
def test_empty_root_is_refused(root):
    with pytest.raises(ValueError, match="read_lerobot: root is empty"):
        read_lerobot(root)


def test_datasets_of_different_features_share_columns(roots):
    metas = [load_metadata(roots[name]) for name in ("rollover", "images")]
    with pytest.raises(ValueError, match="differ in"):
        datasource(metas)
    shared = ["action", "observation.state"]
    columns = datasource(metas, camera_keys=[], columns=shared).columns()
    assert set(columns) <= {*shared, *FRAME_FEATURES, "task", "dataset_index"}


def test_frame_cache_folder_is_expanded(roots, rows_here):
    source = read_lerobot(roots["rollover"], frame_cache="~/frames")
    assert source._reading.frame_cache.folder == os.path.expanduser("~/frames")


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, 1), (3, 3)])
def test_decoder_threads_equal_task_cpus(roots, monkeypatch, cpus, threads):
    counts, close = set(), lerobot_decode.VideoReader.__exit__

    def note(self, *exception):
        counts.add(self._stream.codec_context.thread_count)
        return close(self, *exception)

    monkeypatch.setattr(lerobot_decode.VideoReader, "__exit__", note)
    next(datasource([load_metadata(roots["rollover"])], num_cpus=cpus).read_rows([0], 1))
    assert counts == {threads}
