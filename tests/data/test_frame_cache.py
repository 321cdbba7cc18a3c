"""Cached frames equal decoded ones, and are not decoded again, whatever the state of the cache's folder."""

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lerobot_datasource import CACHING, read_source
from tests.datasets import an_epoch, assert_same_rows, datasource, make_dataset
from vla_finetuning.data import decode as lerobot_decode
from vla_finetuning.data import disk_cache
from vla_finetuning.data import videos as lerobot_videos
from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.metadata import load_metadata

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (12, 7, 15, 1, 10)
ROWS = sum(LENGTHS)
COUNTS = ("episode_index", "frame_index")
WINDOWS = {TOP: [-0.2, 0.0], "action": [0.0, 0.1]}
ORIGINAL = {"episodes": LENGTHS}


@pytest.fixture
def folder(tmp_path):
    disk_cache.disk_cache.cache_clear()
    return tmp_path / "frames"


def bytes_in(folder):
    return sum(path.stat().st_blocks * 512 for path in Path(folder).glob("*/*/*/*"))


@pytest.fixture
def decoded(monkeypatch):
    """Counts of frames read from decoders, and of opened files."""
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
    before = dict(counts)
    counts.update(dict.fromkeys(counts, 0))
    return before


def rows(root, folder=None, *, gb=1.0, seed=0, **options):
    """Return the rows of a shuffled epoch, by `index`."""
    cache = None if folder is None else FrameCache(str(folder), gb)
    return an_epoch(root, 8, frame_cache=cache, **{"delta_timestamps": WINDOWS, "shuffle_seed": seed, **options})


@pytest.mark.parametrize("image_size", [None, (20, 30)])
def test_cached_frames_are_not_decoded_again(original, folder, decoded, image_size):
    expected = rows(original, image_size=image_size)
    reset(decoded)
    assert_same_rows(rows(original, folder, image_size=image_size), expected)
    assert reset(decoded)["frames"] == 2 * ROWS  # frames that windows share, too
    for seed in (1, 2):
        assert_same_rows(rows(original, folder, seed=seed, image_size=image_size), expected)
    assert not any(decoded.values())
    # Another size misses; another process hits.
    rows(original, folder, image_size=(10, 10))
    assert reset(decoded)["frames"] == 2 * ROWS
    disk_cache.disk_cache.cache_clear()
    assert_same_rows(rows(original, folder, image_size=image_size), expected)
    assert not any(decoded.values())


def test_globally_shuffled_epochs_use_cache(original, folder, decoded):
    expected = rows(original)
    stream = {"global_shuffle": True, "stream": (0, 3 * ROWS)}
    rows(original, folder, **stream)
    reset(decoded)
    for epoch in (1, 2):
        cached = rows(original, folder, positions=range(epoch * ROWS, (epoch + 1) * ROWS), **stream)
        del cached["position"]
        assert_same_rows(cached, expected)
    assert not any(decoded.values())


def test_missing_frames_of_cached_segment_are_decoded(original, folder, decoded):
    expected = rows(original, shuffle_seed=None, delta_timestamps=None)
    reset(decoded)
    stored = {"shuffle_seed": None, "delta_timestamps": None}
    rows(original, folder, positions=[0, 1, 5, 6, 20], **stored)
    assert reset(decoded)["frames"] == 2 * 5
    assert_same_rows(rows(original, folder, **stored), expected)
    assert reset(decoded)["frames"] == 2 * (ROWS - 5)


@pytest.mark.parametrize("change", ["content", "decoder", "rules", "tolerance", "times"])
def test_changed_input_or_decoder_invalidates_cache(root, tmp_path, folder, decoded, monkeypatch, change):
    rows(root, folder)
    size, options = bytes_in(folder), {}
    if change == "content":
        other = make_dataset(tmp_path / "other", episodes=LENGTHS, seed=1)
        for video in root.glob("videos/**/*.mp4"):
            before = video.stat()
            shutil.copyfile(other / video.relative_to(root), video)
            os.utime(video, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "decoder":
        monkeypatch.setattr(lerobot_videos.av, "__version__", "0.0.0")
    elif change == "rules":
        monkeypatch.setattr(lerobot_videos, "DECODING_VERSION", 0)
    elif change == "tolerance":
        options["tolerance_s"] = 1e-3
    else:
        # The file is the same, and the frame's time is a little later.
        records = lerobot_videos.FrameRequest.records

        def later(request, folder):
            path, keys, frames = records(request, folder)
            return path, [(frame, at_s + 1e-6) for frame, at_s in keys], frames

        monkeypatch.setattr(lerobot_videos.FrameRequest, "records", later)
    expected = rows(root, **options)
    reset(decoded)
    rows_read = rows(root, folder, **options)
    assert decoded["frames"] >= 2 * ROWS
    assert_same_rows(rows_read, expected)
    if change == "content":
        # Frames of the earlier content are removed.
        assert bytes_in(folder) == size


def test_cache_smaller_than_dataset_is_warned_about(original, folder, decoded, caplog):
    """Other faults: tests/data/test_disk_cache.py."""
    expected = rows(original, seed=1)
    wanted = decoded["frames"]
    for seed in (0, 1):
        reset(decoded)
        assert_same_rows(rows(original, folder, gb=300_000 / 1e9, seed=seed), expected)
    assert decoded["frames"] < wanted and bytes_in(folder) <= 300_000
    (warning,) = [r.message for r in caplog.records if str(folder) in r.message]
    assert "--dataset.frame_cache" in warning


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Frames of the same sizes as `original`'s, in data files."""
    sizes = {TOP: (48, 64), WRIST: (96, 80)}
    return make_dataset(tmp_path_factory.mktemp("images") / "d", episodes=LENGTHS, cameras={}, image_cameras=sizes)


@pytest.mark.parametrize("image_size", [None, (20, 30)])
def test_images_in_data_files_are_decoded_once(images, original, folder, monkeypatch, image_size):
    """Also where a file holds several cameras."""
    decoded = []
    decode = lerobot_videos.decode_image
    monkeypatch.setattr(lerobot_videos, "decode_image", lambda *a, **k: decoded.append(k["name"]) or decode(*a, **k))
    expected = rows(images, image_size=image_size)
    decoded.clear()
    for number in (2 * ROWS, 0):
        assert_same_rows(rows(images, folder, image_size=image_size), expected)
        assert len(decoded) == number
        decoded.clear()


def test_images_by_path_are_not_cached(images, folder, tmp_path):
    """The identity of the data file does not cover them."""
    root = Path(shutil.copytree(images, tmp_path / "named"))

    def name(table):
        (root / "images").mkdir(exist_ok=True)
        names = [f"images/{e}-{n}.png" for e, n in zip(*(table[c].to_pylist() for c in COUNTS), strict=True)]
        for path, stored in zip(names, table[TOP].to_pylist(), strict=True):
            (root / path).write_bytes(stored["bytes"])
        paths = pa.array([{"bytes": None, "path": path} for path in names], table[TOP].type)
        return table.set_column(table.column_names.index(TOP), TOP, paths)

    for path in root.glob("data/*/*.parquet"):
        pq.write_table(name(pq.read_table(path)), path)
    before = rows(root, folder)
    for path in root.glob("images/*.png"):
        Image.new("RGB", (64, 48), "white").save(path)
    after = rows(root, folder)
    assert (after[TOP] == 255).all()
    np.testing.assert_array_equal(before[WRIST], after[WRIST])


@pytest.mark.ray
def test_caching_of_all_frames_depends_on_cache_size(ray_cluster, original, folder):
    source = datasource([load_metadata(original)])
    gb = source.decoded_bytes() / 1e9
    assert not read_source(source).context.get_config(CACHING)
    for part, fits in ((1.0, True), (0.99, False)):
        cached = datasource([load_metadata(original)], frame_cache=FrameCache(str(folder), part * gb))
        assert read_source(cached).context.get_config(CACHING) == fits
