"""Byte ranges of the frames of an mp4, predicted from its index, against those that FFmpeg reads."""

import random
import threading
from pathlib import Path

import av
import numpy as np
import pytest

from tests.buckets import MemoryBucket
from tests.data.test_decode import CODECS, FPS, read, write_video
from vla_finetuning.data import disk_cache, storage, video_index
from vla_finetuning.data.storage import RemoteFileSystem, StoragePolicy
from vla_finetuning.data.video_index import RemoteVideo

FRAMES, SIZE = 150, (96, 128)
BLOCK = 1024


@pytest.fixture(scope="module", params=["av1", "av1, few key frames", "h264, open groups", "index first"])
def content(request, tmp_path_factory):
    """A video of noise, which no codec makes small; a store's file that is larger than what FFmpeg reads at a time."""
    codec, options = CODECS[request.param if request.param in CODECS else "h264, B-frames"]
    path, rng = tmp_path_factory.mktemp("video") / "file.mp4", np.random.default_rng(0)
    noise = list(rng.integers(0, 256, (FRAMES, *SIZE, 3), np.uint8))
    flags = {"movflags": "faststart"} if request.param == "index first" else {}
    write_video(path, noise, codec, options, container_options=flags)
    data = path.read_bytes()
    assert len(data) > 300_000 and (data.index(b"moov") < 100) == (request.param == "index first")
    return data


@pytest.fixture
def store(content, tmp_path, monkeypatch):
    """A store with the video; `fetched` lists its requests: [start, end), and whether they were prefetched."""
    for module in (storage, video_index):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(storage, "AHEAD_BYTES", BLOCK)
    monkeypatch.setattr(storage, "GAP_BYTES", BLOCK)
    monkeypatch.setattr(storage, "KEPT_BLOCKS", 4096)
    monkeypatch.setattr(disk_cache, "NUMBERS_DIR", str(tmp_path / "node"))
    disk_cache.disk_cache.cache_clear()
    memory = MemoryBucket()
    memory.put("arm/file.mp4", content)
    fs = RemoteFileSystem(memory, StoragePolicy())
    fs.fetched = []

    def read_range(path, start, end, _):
        fs.fetched.append((start, end, threading.current_thread().name.startswith("object-store")))
        return memory.range("arm/file.mp4", start, end)

    fs.read_range = read_range
    return fs


def opened(fs):
    return RemoteVideo(fs, "memory/arm/file.mp4", "arm")


def settle(video):
    """Wait for the prefetched ranges."""
    for _, request in video.file._coming.values():
        request.result()


def test_index_equals_ffmpegs_packets(store, content, tmp_path):
    index, _ = video_index._read_index(opened(store).file)
    (tmp_path / "file.mp4").write_bytes(content)
    with av.open(str(tmp_path / "file.mp4")) as container:
        stream = container.streams.video[0]
        packets = [p for p in container.demux(stream) if p.size]
    assert index.offset.tolist() == [p.pos for p in packets]
    assert index.size.tolist() == [p.size for p in packets]
    shown_s = [float(p.pts * p.time_base) for p in packets]  # an edit list subtracts the first frame's time
    np.testing.assert_allclose(index.shown_s - index.shown_s.min(), shown_s, atol=1e-9)
    assert set(index.key.tolist()) >= {i for i, p in enumerate(packets) if p.is_keyframe}


def test_prefetched_ranges_are_those_ffmpeg_reads(store, content, tmp_path):
    (tmp_path / "file.mp4").write_bytes(content)
    runs = [(3, 6), (40, 44), (50, 53), (100, 101), (147, 150)]
    times_s = np.concatenate([np.arange(a, b) for a, b in runs]) / FPS
    expected, _ = read(str(tmp_path / "file.mp4"), times_s, size=SIZE)
    moov = content.index(b"moov") - 4
    length = int.from_bytes(content[moov : moov + 4])
    for turn in range(2):
        video = opened(store)
        video.ask(times_s, FPS)
        settle(video)
        before = len(store.fetched)
        np.testing.assert_array_equal(read(video.file, times_s, size=SIZE)[0], expected)
        video.file.close()
        # The reading thread fetches nothing itself, except a longer index the first time.
        waits = [(start, end) for start, end, prefetched in store.fetched if not prefetched]
        assert all(start < moov + length and moov < end for start, end in waits) and not (turn and waits)
        assert not store.fetched[before:]
        assert sum(end - start for start, end, _ in store.fetched) < (turn + 1) * 0.8 * len(content)
        store.fetched.clear()


def test_index_is_cached_on_node(store, content):
    video = opened(store)
    index, ranges = video_index._read_index(video.file)
    video.ask(np.array([1.0]), FPS)
    settle(video)
    store.fetched.clear()
    disk_cache.disk_cache.cache_clear()  # as another process
    video = opened(store)
    assert video_index._read_index(video.file)[0].offset.tolist() == index.offset.tolist()
    assert not store.fetched
    video.file.close()
    # Damaged blocks are read again. Frames are not cached there.
    blocks = [path for path in Path(disk_cache.NUMBERS_DIR).rglob("*") if path.name.isdigit()]
    assert len(blocks) * BLOCK < len(content) / 4
    for path in blocks:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    disk_cache.disk_cache.cache_clear()
    video = opened(store)
    assert video_index._read_index(video.file)[1] == ranges and store.fetched


def test_invalid_index_falls_back_to_ffmpeg(content):
    """Random bytes cause no error, no allocation beyond the file, and no read outside it."""

    class File:
        def __init__(self, data):
            self.data, self.size, self.at = data, len(data), 0

        def seek(self, at):
            self.at = at

        def read(self, size):
            assert size <= self.size
            return self.data[self.at : self.at + size]

    rng = random.Random(0)
    start = content.index(b"moov") - 4
    end = start + int.from_bytes(content[start : start + 4])
    invalid = 0
    for _ in range(300):
        data = bytearray(content)
        for _ in range(rng.choice([1, 4])):
            data[rng.randrange(start, min(end, start + 700))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        index, _ = video_index._read_index(File(bytes(data)[: rng.choice([len(data), end - 5])]))
        invalid += index is None
        if index is not None:
            index.ranges(np.arange(5) / FPS, FPS)
    assert invalid > 50
