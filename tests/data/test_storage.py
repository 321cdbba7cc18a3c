"""Object stores behind a faulty proxy on loopback: retries, block reads and the block cache."""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest

from tests.buckets import MemoryBucket
from tests.loopback import Faults, GoogleStorage, Proxy, s3_server, serving, use_s3
from vla_finetuning.buckets import store as store_module
from vla_finetuning.data import storage
from vla_finetuning.data.disk_cache import disk_cache
from vla_finetuning.data.statistics import _listing
from vla_finetuning.data.storage import RemoteFileSystem, StorageError, StoragePolicy, connect

ROOT = Path(__file__).resolve().parents[2]
SIZE = 3_500_000
DATA = random.Random(0).randbytes(SIZE)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{protocol: endpoint} of two stores that hold `robots/hand/file`."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "hand").mkdir()
    (folder / "hand/file").write_bytes(DATA)
    with s3_server() as s3, serving(GoogleStorage("robots", folder)) as google, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCSFS_", "CLOUDSDK_"))]:
            patch.delenv(name)
        use_s3(patch, s3)
        client = boto3.client("s3", endpoint_url=s3)
        client.create_bucket(Bucket="robots")
        client.put_object(Bucket="robots", Key="hand/file", Body=DATA)
        yield {"s3": s3, "gs": google}


@pytest.fixture(params=["s3", "gs"])
def store(request, stores, monkeypatch):
    """A store behind a proxy: `connect(**policy)` leads there; `faults` are the proxy's."""
    # Pauses as short as the faults.
    monkeypatch.setattr(store_module, "FIRST_PAUSE_S", 0.05)
    faults = Faults()
    with serving(Proxy(stores[request.param], faults)) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        options = {"s3": {"endpoint": endpoint}, "gs": {}}[request.param]

        def connected(**policy):
            fs, path = connect(f"{request.param}://robots/hand/file", StoragePolicy(**policy), options)
            return fs, path

        yield SimpleNamespace(connect=connected, faults=faults)


def contents(request):
    """Return whether a request is for bytes of the file."""
    return bool(request.range)


def assert_random_reads_are_right(file):
    rng = random.Random(1)
    for _ in range(40):
        start, length = rng.randrange(SIZE), rng.choice([1, 1000, 32768, 2_500_000])
        file.seek(start)
        assert file.read(length) == DATA[start : start + length]


def test_transient_faults_are_retried(store):
    """Every range is refused in one way and then in another, and comes out right, with a weak tag."""
    faults = [["503", "cut", "weak"], ["reset", "short"], ["cut", "reset"], ["short", "503", "weak"]]
    faults_of_range = {}

    def choose(request):
        if not contents(request):
            return None if request.attempt > 1 else "reset"
        mine = faults_of_range.setdefault(request.range, faults[len(faults_of_range) % len(faults)])
        return mine[request.attempt - 1] if request.attempt <= len(mine) else None

    store.faults.choose, store.faults.delay_s = choose, 0.01
    fs, path = store.connect(timeout_s=60)
    with fs.open(path) as file:
        assert_random_reads_are_right(file)
    assert len(faults_of_range) >= 3 and max(r.attempt for r in store.faults.requests) >= 3


@pytest.mark.parametrize("depth", [{}, {"maxdepth": 1}])
def test_failed_listing_is_retried(store, depth):
    fs, path = store.connect(timeout_s=60)
    store.faults.choose = lambda request: {1: "503", 2: "reset", 3: "cut"}.get(request.attempt)
    assert list(fs.find(path.rpartition("/")[0], **depth)) == [path]


def test_stalled_connection_is_replaced(store):
    store.faults.choose = lambda request: "stall" if contents(request) and request.attempt == 1 else None
    fs, path = store.connect(timeout_s=2)  # a quarter of it for a silent connection
    with fs.open(path) as file:
        assert file.read(100) == DATA[:100]
    assert [r.attempt for r in store.faults.requests if contents(r)] == [1, 2]


def test_missing_object_is_not_requested_again(store):
    fs, path = store.connect(timeout_s=60)
    with pytest.raises(FileNotFoundError):
        fs.open(path + "s")
    assert [r for r in store.faults.requests if r.attempt > 2] == []


def test_neighbouring_blocks_are_fetched_in_one_request(store):
    fs, path = store.connect()
    with fs.open(path) as file:
        file.seek(10)
        assert file.read(3 * 2**20) == DATA[10 : 10 + 3 * 2**20]
        file.seek(0)
        assert file.read() == DATA  # cached blocks are not fetched again
    assert [r.range for r in store.faults.requests if contents(r)] == [f"bytes=0-{SIZE - 1}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bucket: bucket.put("file", DATA[:-1]), "the file changed after this run had listed"),
        (lambda bucket: bucket.delete(["file"]), "was deleted while it was being read"),
    ],
)
def test_file_changed_while_read_is_reported(change, message):
    bucket = MemoryBucket()
    bucket.put("file", DATA)
    with RemoteFileSystem(bucket, StoragePolicy()).open("memory/file") as file:
        file.read(1)
        change(bucket)
        file.seek(-1, os.SEEK_END)
        with pytest.raises(StorageError, match=message):
            file.read()


@pytest.mark.parametrize("block_count", [1, 3])
def test_random_seeks_and_reads_equal_file(monkeypatch, tmp_path, block_count):
    """Small blocks exercise all boundaries, with and without a cache."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", 7)
    monkeypatch.setattr(storage, "KEPT_BLOCKS", block_count)
    monkeypatch.setattr(storage, "MAX_REQUEST_BYTES", 21)
    monkeypatch.setattr(storage, "AHEAD_BYTES", 14)
    monkeypatch.setattr(storage, "GAP_BYTES", 7)
    bucket, rng = MemoryBucket(), random.Random(block_count)
    for size in (0, 1, 6, 7, 8, 50, 70):
        bucket.put("small", DATA[:size])
        for cache_dir in (None, str(tmp_path)):
            with RemoteFileSystem(bucket, StoragePolicy(cache_dir=cache_dir)).open("memory/small") as file:
                for _ in range(100):
                    start, length = rng.randrange(80), rng.randrange(80)
                    if rng.random() < 0.3:
                        file.ask([(a, a + rng.randrange(30)) for a in rng.choices(range(-5, 90), k=3)])
                    assert file.seek(start) == start == file.tell()
                    expected = DATA[:size][start : start + length]
                    assert file.read(length) == expected
                    assert file.tell() == start + len(expected)


@pytest.fixture(autouse=True)
def another_process():
    """A process has one `DiskCache` of a folder, with what it knows of it."""
    disk_cache.cache_clear()
    yield
    disk_cache.cache_clear()


def test_cached_blocks_are_fetched_again_after_change(tmp_path):
    bucket = MemoryBucket()
    remote = RemoteFileSystem(bucket, StoragePolicy(cache_dir=str(tmp_path / "cache")))
    fetched, read_range = [], remote.read_range
    remote.read_range = lambda path, start, *rest: fetched.append(start) or read_range(path, start, *rest)

    def read():
        fetched.clear()
        with remote.open("memory/changing") as file:
            return file.read()

    bucket.put("changing", DATA)
    assert read() == DATA and fetched
    assert read() == DATA and not fetched
    bucket.put("changing", DATA[::-1])  # as long as before
    assert read() == DATA[::-1] and fetched
    # Blocks of the earlier content are gone with it.
    assert len(list((tmp_path / "cache").glob("*/*/*"))) == 1


def test_bucket_listing_identifies_content():
    bucket, listings = MemoryBucket(), []
    for data in (DATA, DATA[::-1]):  # as long as before
        bucket.put("data/file-000.parquet", data)
        fs = RemoteFileSystem(bucket, StoragePolicy())
        listings.append(_listing(SimpleNamespace(fs=fs, base="memory", data_files=["data/file-000.parquet"])))
    (before,), (after,) = listings
    assert before[:2] == after[:2] == ["memory/data/file-000.parquet", str(len(DATA))] and before != after
