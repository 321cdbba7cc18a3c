"""Decoded frames cached on the node: the same rows without decoding, whatever happens to the folder."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from lerobot_datasource import local_batches, name_frames, read_lerobot, read_source
from tests.datasets import datasource, make_dataset
from vla_finetuning.data import decode as lerobot_decode
from vla_finetuning.data import frame_cache as lerobot_frame_cache
from vla_finetuning.data import node_cache as lerobot_node_cache
from vla_finetuning.data import videos as lerobot_videos
from vla_finetuning.data.frame_cache import FrameCache
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.reader import DatasetFiles
from vla_finetuning.data.rows import column_to_numpy, read_rows

ROOT = Path(__file__).resolve().parents[2]
TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (12, 7, 15, 1, 10)
ROWS = sum(LENGTHS)
WINDOWS = {TOP: [-0.2, 0.0], "action": [0.0, 0.1]}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("frames") / "original", episodes=LENGTHS)


@pytest.fixture
def root(original, tmp_path):
    """A copy to change."""
    return Path(shutil.copytree(original, tmp_path / "dataset"))


@pytest.fixture
def folder(tmp_path):
    lerobot_node_cache.node_cache.cache_clear()
    return tmp_path / "kept"


@pytest.fixture
def decoded(monkeypatch):
    """Frames that were handed over by decoders, and opened files, so far."""
    counts = {"frames": 0, "files": 0}
    read, opened = lerobot_decode.VideoReader.read, lerobot_decode.VideoReader.__init__

    def counting(self, timestamps_s, sink):
        counts["frames"] += len(timestamps_s)
        return read(self, timestamps_s, sink)

    def counting_opened(self, *args, **kwargs):
        counts["files"] += 1
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(lerobot_decode.VideoReader, "read", counting)
    monkeypatch.setattr(lerobot_decode.VideoReader, "__init__", counting_opened)
    return counts


def reset(counts):
    found = dict(counts)
    counts.update(dict.fromkeys(counts, 0))
    return found


def rows(root, folder=None, *, gb=1.0, seed=0, positions=None, **options):
    """Rows of an epoch, shuffled, by `index`."""
    cache = None if folder is None else FrameCache(str(folder), gb)
    options = {"delta_timestamps": WINDOWS, "shuffle_seed": seed, "shuffle_window": 8} | options
    source = datasource([load_metadata(root)], frame_cache=cache, **options)
    batches = list(source.read_rows(range(ROWS) if positions is None else positions, 8))
    order = np.argsort(np.concatenate([b["index"] for b in batches]))
    return {key: np.concatenate([b[key] for b in batches])[order] for key in batches[0]}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key].dtype == values.dtype
        np.testing.assert_array_equal(found[key], values, err_msg=key)


@pytest.mark.parametrize("image_size", [None, (20, 30)])
def test_what_is_decoded_once_is_not_decoded_again(original, folder, decoded, image_size):
    expected = rows(original, image_size=image_size)
    reset(decoded)
    assert_same(rows(original, folder, image_size=image_size), expected)
    assert reset(decoded)["frames"] == 2 * ROWS  # frames that windows share, too
    for seed in (1, 2):
        assert_same(rows(original, folder, seed=seed, image_size=image_size), expected)
    assert not any(decoded.values())
    # Another size is another frame; another process finds what there is.
    rows(original, folder, image_size=(10, 10))
    assert reset(decoded)["frames"] == 2 * ROWS
    lerobot_node_cache.node_cache.cache_clear()
    assert_same(rows(original, folder, image_size=image_size), expected)
    assert not any(decoded.values())


def test_later_epochs_are_shuffled_as_a_whole_without_decoding(original, folder, decoded):
    expected = rows(original)
    stream = {"global_shuffle": True, "stream": (0, 3 * ROWS)}
    rows(original, folder, **stream)
    reset(decoded)
    for epoch in (1, 2):
        found = rows(original, folder, positions=range(epoch * ROWS, (epoch + 1) * ROWS), **stream)
        del found["position"]
        assert_same(found, expected)
    assert not any(decoded.values())


def test_of_a_segment_that_is_partly_there_the_rest_is_decoded(original, folder, decoded):
    expected = rows(original, shuffle_seed=None, delta_timestamps=None)
    reset(decoded)
    stored = {"shuffle_seed": None, "delta_timestamps": None}
    rows(original, folder, positions=[0, 1, 5, 6, 20], **stored)
    assert reset(decoded)["frames"] == 2 * 5
    assert_same(rows(original, folder, **stored), expected)
    assert reset(decoded)["frames"] == 2 * (ROWS - 5)


@pytest.mark.parametrize("change", ["content", "decoder", "rules", "tolerance", "times"])
def test_what_would_be_decoded_otherwise_is_not_served(root, tmp_path, folder, decoded, monkeypatch, change):
    rows(root, folder)
    reset(decoded)
    options = {}
    if change == "content":
        other = make_dataset(tmp_path / "other", episodes=LENGTHS, seed=1)
        for video in root.glob("videos/**/*.mp4"):
            before = video.stat()
            shutil.copyfile(other / video.relative_to(root), video)
            os.utime(video, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "decoder":
        monkeypatch.setattr(lerobot_frame_cache.av, "__version__", "0.0.0")
    elif change == "rules":
        monkeypatch.setattr(lerobot_frame_cache, "RULES", 0)
    elif change == "tolerance":
        options["tolerance_s"] = 1e-3
    else:
        # The file is the same, and so is the frame's number; but it is asked for a little later.
        original_numbers = lerobot_frame_cache.CachedVideo.read
        monkeypatch.setattr(
            lerobot_frame_cache.CachedVideo, "read", lambda self, t, places: original_numbers(self, t + 1e-6, places)
        )
    expected = rows(root, **options)
    reset(decoded)
    found = rows(root, folder, **options)
    assert decoded["frames"] >= 2 * ROWS
    assert_same(found, expected)
    if change == "content":
        # What was cached of the earlier content is gone.
        assert len(list(folder.glob("*/*/*.marks"))) == sum(map(len, load_metadata(root).video_files.values()))


@pytest.mark.parametrize("damage", ["holes", "noise", "cut", "no marks", "marks without frames"])
def test_frames_that_the_disk_lost_are_decoded_again(original, folder, decoded, damage):
    expected = rows(original)
    rows(original, folder)
    reset(decoded)
    for frames in folder.glob("*/*/*.data"):
        marks, size = frames.with_suffix(".marks"), frames.stat().st_size
        if damage in ("holes", "noise"):
            with open(frames, "r+b") as file:
                file.seek(size // 3)
                file.write(bytes(1000) if damage == "holes" else os.urandom(1000))
        elif damage == "cut":
            os.truncate(frames, size - 1)
        elif damage == "no marks":
            marks.unlink()
        else:
            frames.unlink()
    assert_same(rows(original, folder), expected)
    files = len(list(folder.glob("*/*/*.data")))
    assert files <= reset(decoded)["frames"] <= 2 * ROWS
    assert_same(rows(original, folder), expected)
    assert not decoded["frames"]


READ = """
    import os, signal, sys
    from tests.data.test_frame_cache import *
    left, pwrite = [int(sys.argv[3])], os.pwrite
    def dying(descriptor, data, offset):
        left[0] -= 1
        if left[0] == 0:
            pwrite(descriptor, bytes(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(descriptor, data, offset)
    os.pwrite = dying
    import zlib
    found = rows(sys.argv[1], sys.argv[2], seed=int(sys.argv[4]))
    print(zlib.crc32(found[TOP].tobytes()), zlib.crc32(found[WRIST].tobytes()))
"""


def start(root, folder, dies_at=0, seed=0):
    command = [sys.executable, "-c", textwrap.dedent(READ), str(root), str(folder), str(dies_at), str(seed)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_reader_killed_while_it_writes(original, folder, decoded):
    expected = rows(original)
    for dies_at in (2, 33):  # a write each of a ledger, a frame and a mark
        process = start(original, folder, dies_at)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert list(folder.glob("*/*/*.data"))
    reset(decoded)
    assert_same(rows(original, folder), expected)
    assert 0 < reset(decoded)["frames"] < 2 * ROWS
    rows(original, folder)
    assert not decoded["frames"]


def test_two_runs_at_once(original, folder, decoded):
    running = [start(original, folder, seed=seed) for seed in (0, 1)]
    printed = {process.communicate()[0] for process in running}
    assert len(printed) == 1 and printed != {""}
    expected = rows(original)
    reset(decoded)
    assert_same(rows(original, folder), expected)
    assert not decoded["frames"]


@pytest.mark.parametrize("fault", ["full disk", "folder is a file", "limit", "unreadable"])
def test_a_folder_that_fails_costs_a_warning(original, folder, decoded, monkeypatch, caplog, fault):
    expected = rows(original)
    gb = 1.0
    if fault == "full disk":
        pwrite, written = os.pwrite, []

        def full(descriptor, data, offset):
            written.append(len(data) > 5000)  # a frame
            if sum(written) > 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", full)
    elif fault == "folder is a file":
        folder.write_text("")
    elif fault == "limit":
        gb = 300_000 / 1e9
    else:
        rows(original, folder)

        def broken(*_):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        monkeypatch.setattr("vla_finetuning.data.disk_cache.NUMBERS_GB", 0)  # its copies are read so too
    reset(decoded)
    for seed in (0, 1):
        rows(original, seed=seed)
    wanted = reset(decoded)["frames"]
    for seed in (0, 1):
        assert_same(rows(original, folder, gb=gb, seed=seed), expected)
    served = wanted - decoded["frames"]
    assert (served > 0) == (fault in ("full disk", "limit"))
    warnings = [r.message for r in caplog.records if str(folder) in r.message]
    assert len(warnings) == 1 and "--dataset.frame_cache" in warnings[0]
    if fault == "limit":
        assert sum(path.stat().st_blocks * 512 for path in folder.glob("*/*/*.data")) <= 300_000 + 4096 * ROWS


def named_rows(root, folder, **options):
    """An epoch in which the frames that can be are named, and the source."""
    options = {"delta_timestamps": WINDOWS, "shuffle_seed": 0, "shuffle_window": 8} | options
    source = datasource([load_metadata(root)], frame_cache=FrameCache(str(folder), 1.0), **options)
    options = replace(source._options(ROWS), named=source.nameable, carrying_rows=ROWS)
    readers = [DatasetFiles.of(meta) for meta in source.metas]
    (table,) = read_rows(readers, source._read(list(source.plan.slices(0, ROWS))), 0, options)
    return {name: column_to_numpy(table.column(name)) for name in table.column_names}, source


def assert_filled(named, source, expected):
    filled = source.frames()(named)
    order = np.argsort(filled["index"])
    assert_same({key: values[order] for key, values in filled.items()}, expected)


@pytest.mark.parametrize("image_size", [None, (20, 30)])
def test_rows_name_frames_that_are_copied_where_batches_are_made(original, folder, decoded, image_size):
    expected = rows(original, image_size=image_size)
    reset(decoded)
    for epoch in range(2):
        named, source = named_rows(original, folder, image_size=image_size)
        # What is not cached yet is decoded where it is read.
        assert reset(decoded)["frames"] == (0 if epoch else 2 * ROWS)
        for key in (TOP, WRIST):
            assert named[key].dtype == np.uint8 and named[key].nbytes < expected[key].nbytes / 8
        assert_filled(named, source, expected)
        assert not decoded["frames"]
    batch = {key: values[3:7] for key, values in named.items()}
    filled = source.frames()(batch)
    np.testing.assert_array_equal(filled[WRIST], expected[WRIST][batch["index"]])
    # Those that carry their frames are left as they are.
    assert all(filled[key] is source.frames()(filled)[key] for key in filled)


@pytest.mark.parametrize("fault", ["full disk", "disk full while writing", "one camera", "folder is a file"])
def test_rows_carry_frames_that_cannot_be_cached_until_they_can_be_named(
    original, folder, decoded, monkeypatch, caplog, fault
):
    """Nothing is decoded where batches are made; of other cameras frames are named all the same."""
    expected, wrist = rows(original), fault == "one camera"
    monkeypatch.setattr(lerobot_node_cache, "ASK_AGAIN_S", 0)
    if fault == "folder is a file":
        folder.write_text("")
    with monkeypatch.context() as disk:
        full = OSError(errno.ENOSPC, "No space left on device")
        if fault == "full disk":
            disk.setattr(lerobot_node_cache.NodeCache, "_disk_is_full", lambda self, size: True)
        elif fault == "disk full while writing":
            disk.setattr(lerobot_node_cache.Records, "write", fails_after(10, lerobot_node_cache.Records.write, full))
        elif fault == "one camera":
            reserve, frame_bytes = lerobot_node_cache.Records.reserve_capacity, expected[TOP][0, 0].nbytes
            disk.setattr(
                lerobot_node_cache.Records,
                "reserve_capacity",
                lambda self, records: self.record_bytes != frame_bytes and reserve(self, records),
            )
        named, source = named_rows(original, folder)
    assert named[TOP].shape[1:] == expected[TOP].shape[1:]
    assert (named[WRIST].nbytes < expected[WRIST].nbytes / 8) == wrist
    reset(decoded)
    assert_filled(named, source, expected)
    assert not decoded["frames"] and "where batches are made" not in caplog.text
    if fault == "folder is a file":
        folder.unlink()
    named, source = named_rows(original, folder)
    assert all(named[key].nbytes < expected[key].nbytes / 8 for key in (TOP, WRIST))
    reset(decoded)
    assert_filled(named, source, expected)
    assert not decoded["frames"]


def fails_after(count, method, error):
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) > count:
            raise error
        return method(*args)

    return failing


def test_a_batch_of_rows_that_name_and_rows_that_carry(original, folder, decoded):
    """As Ray Data concatenates blocks of tensors of several shapes: an array of objects."""
    expected = rows(original)
    named, source = named_rows(original, folder)
    mixed = {key: values[:9] for key, values in named.items()}
    for key in (TOP, WRIST):
        mixed[key] = np.empty(9, object)
        for row, index in enumerate(named["index"][:9].tolist()):
            mixed[key][row] = expected[key][index] if row % 3 == 1 else named[key][row]
    reset(decoded)
    for chosen in (slice(0, 9), slice(1, 2), slice(2, 4)):
        batch = {key: values[chosen] for key, values in mixed.items()}
        found = source.frames()(batch)
        for key in (TOP, WRIST):
            assert found[key].dtype == np.uint8
            np.testing.assert_array_equal(found[key], expected[key][batch["index"]])
    assert not decoded["frames"]


@pytest.mark.parametrize("fault", ["emptied", "noise", "unreadable"])
def test_a_named_frame_that_is_lost_is_decoded_where_batches_are_made(
    original, folder, decoded, monkeypatch, caplog, fault
):
    expected = rows(original)
    named, source = named_rows(original, folder)
    if fault == "emptied":
        shutil.rmtree(folder)
    elif fault == "noise":
        for frames in folder.glob("*/*/*.data"):
            frames.write_bytes(os.urandom(frames.stat().st_size))
    elif fault == "unreadable":

        def broken(*_):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
    reset(decoded)
    assert_filled(named, source, expected)
    assert 0 < decoded["frames"] <= 2 * ROWS
    (warning,) = [r.message for r in caplog.records if "where batches are made" in r.message]
    assert str(folder) in warning


def test_files_that_frames_were_copied_from_do_not_stay_open_for_ever(original, folder, monkeypatch):
    monkeypatch.setattr(lerobot_videos, "_OPEN_FILES", 2)
    named, source = named_rows(original, folder)
    frames, before = source.frames(), len(os.listdir("/proc/self/fd"))
    for first in range(0, ROWS, 3):
        frames({key: values[first : first + 3] for key, values in named.items()})
        assert len(frames._open) <= 2
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 2 + 2  # and those of the dataset's ledger


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Frames of the same sizes as `original`'s, in data files."""
    sizes = {TOP: (48, 64), WRIST: (96, 80)}
    return make_dataset(tmp_path_factory.mktemp("images") / "d", episodes=LENGTHS, cameras={}, image_cameras=sizes)


@pytest.mark.parametrize("image_size", [None, (20, 30)])
def test_images_of_data_files_are_decoded_once(images, original, folder, monkeypatch, image_size):
    """And named, together with videos; those of several cameras in a file are told apart."""
    decoded = []
    decode = lerobot_videos.decode_image
    monkeypatch.setattr(lerobot_videos, "decode_image", lambda *a, **k: decoded.append(k["name"]) or decode(*a, **k))
    expected = rows(images, image_size=image_size)
    decoded.clear()
    for number in (2 * ROWS, 0):
        assert_same(rows(images, folder, image_size=image_size), expected)
        assert len(decoded) == number
        decoded.clear()
    named, source = named_rows(images, folder, image_size=image_size)
    assert source.nameable == {TOP, WRIST} and named[WRIST].nbytes < expected[WRIST].nbytes / 10
    frames = source.frames()
    assert_filled(named, source, expected)
    assert not decoded
    for marks in folder.glob("*/*/*.marks"):
        marks.unlink()
    filled = frames(named)
    assert len(decoded) == 2 * ROWS and "camera observation.images.wrist), row 3" in " ".join(decoded)
    assert_same({key: v[np.argsort(filled["index"])] for key, v in filled.items()}, expected)
    both = datasource([load_metadata(original), load_metadata(images)], frame_cache=FrameCache(str(folder), 1.0))
    assert both.nameable == {TOP, WRIST}


def test_what_cannot_be_named_is_carried(original, folder):
    """Where rows may be blank, or nothing is cached, or not everything."""
    cache = FrameCache(str(folder), 1.0)
    meta = load_metadata(original)
    assert datasource([meta], frame_cache=cache).nameable == {TOP, WRIST}
    size = datasource([meta]).decoded_bytes()
    assert datasource([meta], frame_cache=cache, camera_keys=[TOP]).nameable == {TOP}
    for metas, options in (
        ([meta], {"frame_cache": cache, "on_error": "skip"}),
        ([meta], {"frame_cache": FrameCache(str(folder), size * 0.99 / 1e9)}),
        ([meta], {}),
    ):
        assert not datasource(metas, **options).nameable
    assert datasource([meta], frame_cache=FrameCache(str(folder), size / 1e9)).nameable


@pytest.mark.ray
def test_a_node_that_cannot_cache_is_named_and_rows_carry_their_frames(ray_cluster, original, tmp_path, caplog):
    """Asked where the frames go, at each start: a folder that anyone may write to, one that another run fills."""
    folder, here = tmp_path / "cache", [ray.get_runtime_context().get_node_id()]
    meta = load_metadata(original)
    size = datasource([meta]).decoded_bytes()
    dataset = read_source(datasource([meta], frame_cache=FrameCache(str(folder), 1.5 * size / 1e9)))
    folder.mkdir()
    folder.chmod(0o777)

    def warnings():
        return [record.getMessage() for record in caplog.records if record.name == "lerobot_datasource"]

    assert not name_frames(dataset, here)
    assert f"{folder}" in warnings()[-1] and "anybody may write there" in warnings()[-1]
    batch = dataset.take_batch(2)
    assert batch[TOP].shape == (2, *meta.features[TOP].shape)

    # Not the same folder, which the reading processes leave alone for a while.
    folder = tmp_path / "shared"
    dataset = read_source(datasource([meta], frame_cache=FrameCache(str(folder), 1.5 * size / 1e9)))
    script = """if True:
        import sys
        from vla_finetuning.data.frame_cache import FrameCache
        cache = FrameCache(sys.argv[1], float(sys.argv[2])).opened()
        assert cache.promise(["another"], int(float(sys.argv[2]) * 1e9) // 2)
        print(flush=True)
        input()
    """
    command = [sys.executable, "-c", script, str(folder), str(1.5 * size / 1e9)]
    other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    assert not name_frames(dataset, here)
    assert "do not fit beside what other runs cache there" in warnings()[-1] and len(warnings()) == 2
    assert dataset.take_batch(2)[TOP].shape == batch[TOP].shape
    other.communicate(b"\n")
    assert name_frames(dataset, here) and len(warnings()) == 2
    assert dataset.take_batch(2)[TOP].nbytes < batch[TOP].nbytes / 8


def test_frames_that_were_emptied_are_stored_and_copied_again(original, folder, decoded):
    """Within one process, that had them open."""
    named, source = named_rows(original, folder)
    frames, expected = source.frames(), rows(original)
    for _ in range(2):
        frames({key: values[:4] for key, values in named.items()})
    shutil.rmtree(folder)
    reset(decoded)
    for _ in range(3):
        for first in range(0, ROWS, 4):
            batch = frames({key: values[first : first + 4] for key, values in named.items()})
            np.testing.assert_array_equal(batch[TOP], expected[TOP][batch["index"]])
    assert 0 < decoded["frames"] <= 2 * ROWS


@pytest.mark.ray
def test_through_ray(ray_cluster, original, folder):
    """Rows of other processes, that carry their frames and that name them, are those of no cache at all."""
    options = {"delta_timestamps": WINDOWS, "shuffle_window": 8}
    expected = rows(original)
    for seed in (0, 1):
        found = list(read_lerobot(original, shuffle_seed=seed, frame_cache=folder, **options).iter_rows())
        assert sorted(row["index"] for row in found) == list(range(ROWS))
        for row in found:
            for key in (TOP, WRIST):
                np.testing.assert_array_equal(row[key], expected[key][row["index"]])
    assert len(list(folder.glob("*/*/*.data"))) == sum(map(len, load_metadata(original).video_files.values()))

    cache = FrameCache(str(folder), 1.0)
    source = datasource([load_metadata(original)], frame_cache=cache, shuffle_seed=0, **options)
    here = [ray.get_runtime_context().get_node_id()]
    dataset = read_source(source)
    assert not name_frames(dataset, ["another node"])
    assert dataset.take_batch(1)[WRIST].shape[1:] == expected[WRIST].shape[1:]
    assert name_frames(dataset, here)
    assert dataset.take_batch(1)[WRIST].nbytes < expected[WRIST][0].nbytes / 8

    found = list(local_batches(source, 4))
    assert {len(batch["index"]) for batch in found[:-1]} == {4}
    order = np.argsort(np.concatenate([batch["index"] for batch in found]))
    assert_same({key: np.concatenate([batch[key] for batch in found])[order] for key in found[0]}, expected)


@pytest.mark.ray
def test_blocks_that_name_and_blocks_that_carry_are_dealt_alike(ray_cluster, original, folder, decoded):
    """Another run fills the folder after it was asked: what does not fit is decoded where it is read, not here."""
    expected, meta = rows(original), load_metadata(original)
    size = datasource([meta]).decoded_bytes()
    options = {"delta_timestamps": WINDOWS, "shuffle_seed": 0, "shuffle_window": 8, "stream": (0, ROWS // 4 * 4)}
    cache = FrameCache(str(folder), 1.5 * size / 1e9)
    source = datasource([meta], frame_cache=cache, block_rows=2, **options)
    dataset = read_source(source)
    dataset.context.execution_options.preserve_order = True
    assert name_frames(dataset, [ray.get_runtime_context().get_node_id()])
    other = cache.opened().place("another")  # in use as long as this process lives
    (other / "full").write_bytes(os.urandom(size))
    reset(decoded)

    def read(shard, batch_size):
        return list(shard.iter_batches(batch_size=batch_size, batch_format="numpy"))

    kinds, frames = set(), source.frames()
    for batch_size in (2, 4):
        with ThreadPoolExecutor(2) as threads:
            shards = dataset.streaming_split(2, equal=True)
            found = list(threads.map(read, shards, [batch_size] * 2))
        for rank, batches in enumerate(found):
            positions = np.concatenate([batch["position"] for batch in batches])
            every = np.arange(ROWS // 4 * 4).reshape(-1, 2, 2)
            assert positions.tolist() == every[:, rank].ravel().tolist()
            for batch in batches:
                kinds.add("both" if batch[TOP].dtype == object else batch[TOP].shape[1:])
                filled = frames(batch)
                for key in (TOP, WRIST):
                    np.testing.assert_array_equal(filled[key], expected[key][batch["index"]])
    assert len(kinds) >= 2 and expected[TOP].shape[1:] in kinds and not decoded["frames"]
