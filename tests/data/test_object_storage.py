"""Datasets on S3 (moto's server), Google's store and the Hub (stand-ins), all on loopback, against the local rows."""

import io
import itertools
import json
import os
import pickle
import re
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vla
from tests.data.test_datasource import TOP, WINDOWS, assert_same_row, lerobot, read_directly
from tests.datasets import datasource, make_dataset
from tests.hub import TOKEN, dataset_hub
from tests.loopback import SECRET, Faults, GoogleStorage, Proxy, s3_server, serving, use_s3
from tests.tiny import make_base
from vla_finetuning.buckets import store
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.rows import column_to_numpy
from vla_finetuning.data.safe_parquet import Budget, open_parquet, read_columns
from vla_finetuning.data.storage import BLOCK_BYTES, StorageError, StoragePolicy, connect
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.plan.resolve import resolve

FRAMES = 54
# Retries of many small faults, on a machine that may be busy.
PATIENT = StoragePolicy(timeout_s=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("object_storage")


@pytest.fixture(scope="module")
def local(folder):
    """The dataset that is uploaded: several files of each kind."""
    return make_dataset(folder / "dataset")


@pytest.fixture(scope="module")
def base(folder, local):
    meta = load_metadata(local)
    return make_base(folder / "base", meta, chunk_size=4, width=32, depth=2, vision_width=32)


def flags(base, output_dir, **changes):
    options = {"policy.path": base, "output_dir": output_dir, "steps": 2, "batch_size": 4, **changes}
    return [f"--{key}={value}" for key, value in options.items()]


@pytest.fixture(scope="module")
def bucket(local):
    """Serve the dataset as `arm/` of a bucket, configured by environment variables; yield an S3 client."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as environment:
        use_s3(environment, endpoint)
        client = boto3.client("s3")
        client.create_bucket(Bucket="robots")
        upload(client, local, "arm")
        yield client


@pytest.fixture
def proxied(bucket, monkeypatch):
    """Proxy the bucket; yield (the proxy's faults, storage options that lead there)."""
    faults = Faults()
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 0.01)
    with serving(Proxy(os.environ["AWS_ENDPOINT_URL"], faults)) as endpoint:
        yield faults, {"endpoint": endpoint}


def upload(client, folder, prefix):
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "robots", f"{prefix}/{path.relative_to(folder).as_posix()}")


@pytest.fixture
def damaged(bucket, local, request):
    """Upload a second copy of the dataset, to be damaged; return (URL, prefix)."""
    prefix = request.node.name
    upload(bucket, local, prefix)
    return f"s3://robots/{prefix}", prefix


def refused(argv, capsys):
    """Return the program's message; check that it refuses before Ray starts, and prints no secret."""
    assert vla.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "Traceback" not in err and SECRET not in err
    return err


@pytest.fixture
def node_dir(tmp_path, monkeypatch):
    """A new cache of the node."""
    monkeypatch.setattr("vla_finetuning.data.disk_cache.NUMBERS_DIR", str(tmp_path / "node"))
    return tmp_path / "node"


def answer_together(faults, count):
    """Answer requests only when `count` are under way; return the barrier."""
    barrier = threading.Barrier(count)

    def wait(request):
        barrier.wait(60)

    faults.choose = wait
    return barrier


def assert_lerobots_rows(rows, local, windows):
    """Check that rows are the dataset's, each once, and equal LeRobot's on the local copy."""
    meta, reference = load_metadata(local), lerobot(local, delta_timestamps=windows)
    order = []
    for row in rows:
        order.append(int(row["index"]))
        assert_same_row(row, reference[order[-1]], meta)
    assert sorted(order) == list(range(len(reference))) == list(range(FRAMES))


def rows_in_process(source):
    """Yield a source's rows without Ray, as read tasks of another process read them."""
    for table in read_directly(pickle.loads(pickle.dumps(source))):
        columns = {name: column_to_numpy(table.column(name)) for name in table.column_names}
        yield from ({name: values[i] for name, values in columns.items()} for i in range(table.num_rows))


def test_rows_on_s3_with_network_faults_equal_lerobots(bucket, proxied, local):
    """The first request of each range fails, in one of three ways."""
    faults, options = proxied
    kinds = itertools.cycle(["503", "reset", "cut", None])
    faults.choose = lambda request: next(kinds) if request.attempt == 1 else None
    meta = load_metadata("s3://robots/arm", storage_options=options, storage_policy=PATIENT)
    source = datasource([meta], shuffle_seed=0, shuffle_window=16, delta_timestamps=WINDOWS)
    assert_lerobots_rows(rows_in_process(source), local, WINDOWS)
    assert len([r for r in faults.requests if r.attempt > 1]) > 10


@pytest.mark.parametrize(("fault", "kind"), [("503", "data"), ("stall", "video"), ("403", "video")])
def test_persistent_store_failure_names_file_and_remedy(bucket, proxied, fault, kind, node_dir):
    """The error comes within the timeout."""
    faults, options = proxied
    meta = load_metadata("s3://robots/arm", storage_options=options, storage_policy=PATIENT)
    meta.fs.store.patience_s = 0.5
    source = datasource([meta])
    file = meta.data_files[1] if kind == "data" else meta.video_files[TOP][1]
    faults.choose = lambda request: fault if request in faults.of(file) else None
    remedy = {
        "503": r"the store does not answer .*Service Unavailable.* for \d+ s: check the network",
        "stall": r"the store does not answer .*HTTP error: .* for \d+ s: check the network",
        "403": r"the store refuses \(PermissionDeniedError: .*Forbidden.*\): check credentials, permissions",
    }[fault]
    started = time.monotonic()
    with pytest.raises(StorageError, match=f"^s3://robots/arm: {file}.*: s3://robots/arm/{file}: {remedy}"):
        read_directly(source)
    assert time.monotonic() - started < 20
    # A refused request is not repeated, though FFmpeg reads again after errors.
    assert len(faults.of(file)) == 1 if fault == "403" else len(faults.of(file)) >= 1


def test_images_are_not_cached_twice(bucket, proxied, tmp_path, node_dir):
    """The images are cached, and not the blocks of their files too."""
    root = make_dataset(tmp_path / "images", cameras={}, image_cameras={TOP: (128, 128)}, noise=64, episodes=(FRAMES,))
    upload(bucket, root, "images")
    _, options = proxied
    policy = StoragePolicy(cache_dir=str(tmp_path / "blocks"))
    meta = load_metadata("s3://robots/images", storage_options=options, storage_policy=policy)

    def stored(folder):
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))

    size = sum((root / file).stat().st_size for file in meta.data_files)
    assert size > 10 * BLOCK_BYTES
    source = datasource([meta], shuffle_seed=0, shuffle_window=16)
    assert sum(len(batch["index"]) for batch in source.read_rows(range(FRAMES), 16)) == FRAMES
    assert stored(node_dir) > size / 2 > stored(tmp_path / "blocks")


def test_window_requests_are_concurrent(bucket, proxied, node_dir):
    """And no request asks for an object's size, which the driver listed."""
    faults, options = proxied
    meta = load_metadata("s3://robots/arm", storage_options=options)
    read_directly(datasource([meta], camera_keys=[]))  # the numbers are unpacked
    source = pickle.loads(pickle.dumps(datasource([meta])))
    faults.requests.clear()
    videos = [file for files in meta.video_files.values() for file in files]
    barrier = answer_together(faults, len(videos))
    read_directly(source)
    assert len(faults.requests) == len(videos) > 4 and not barrier.broken
    assert {request.method for request in faults.requests} == {"GET"}
    # The node caches these files, which are no longer than the part that is read on opening.
    read_directly(source)
    assert len(faults.requests) == len(videos)


def test_parquet_column_requests_are_concurrent(bucket, proxied):
    """Also of two row groups; the bytes between the columns are not fetched."""
    rows = np.random.default_rng(0).integers(0, 2**62, (3, 400_000))
    table, file = pa.table(dict(zip("abc", rows, strict=True))), io.BytesIO()
    pq.write_table(table, file, row_group_size=200_000, use_dictionary=False, compression="none")
    bucket.put_object(Bucket="robots", Key="table.parquet", Body=file.getvalue())
    faults, options = proxied
    fs, path = connect("s3://robots/table.parquet", StoragePolicy(), options)
    with open_parquet(fs, path) as parquet:
        faults.requests.clear()
        # The first a; the first c and the second a, which touch; the second c.
        barrier = answer_together(faults, 3)
        columns = read_columns(parquet, ["a", "c"], Budget("rows", 2**30))
    assert columns.equals(table.select(["a", "c"])) and not barrier.broken
    assert len(faults.requests) == 3 and sum(r.sent_bytes for r in faults.requests) < 0.8 * len(file.getvalue())


def test_storage_flags_reach_file_system(bucket, base, tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_CACHE_GB", "2")
    monkeypatch.setenv("VLA_READ_TIMEOUT_S", "30")
    flags_ = {"dataset.root": "s3://robots/arm", "dataset.cache_dir": tmp_path / "c"}
    run = resolve(parse_args(flags(base, tmp_path / "out", **flags_)), gpus_found=0)
    assert run.rows.metas[0].fs.policy == StoragePolicy(30, str(tmp_path / "c"), 2)


@pytest.fixture
def google(local, monkeypatch):
    """Serve the dataset's parent folder as the bucket `robots`, configured by environment variables."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCSFS_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    with serving(GoogleStorage("robots", local.parent)) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        yield


def test_rows_on_google_storage_equal_lerobots(google, local):
    meta = load_metadata(f"gs://robots/{local.name}")
    assert meta.root == f"gs://robots/{local.name}"
    source = datasource([meta], shuffle_seed=0, shuffle_window=16, delta_timestamps=WINDOWS)
    assert_lerobots_rows(rows_in_process(source), local, WINDOWS)


def test_serialized_source_holds_no_credentials(bucket):
    """Workers find them in their own environment."""
    source = datasource([load_metadata("s3://robots/arm")])
    sent = pickle.dumps((source, source._context()))
    assert b"robots/arm" in sent and SECRET.encode() not in sent


def test_wrong_endpoint_is_reported(bucket, monkeypatch, base, tmp_path, capsys):
    """Reported sooner than a store that fails later."""
    monkeypatch.setattr("vla_finetuning.data.metadata.FIRST_ANSWER_TIMEOUT_S", 0.5)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        message = refused(flags(base, tmp_path / "out", **{"dataset.root": "s3://robots/arm"}), capsys)
    expected = rf"dataset s3://robots/arm: .*the store does not answer .*{urlsplit(endpoint).netloc}.*: check the"
    assert re.search(expected, message)


def test_missing_credentials_are_reported(bucket, monkeypatch, base, tmp_path, capsys):
    """A public object needs none."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    bucket.put_object(Bucket="robots", Key="public", Body=b"1", ACL="public-read")
    fs, path = connect("s3://robots/public", StoragePolicy())
    assert fs.open(path).read() == b"1"
    message = refused(flags(base, tmp_path / "out", **{"dataset.root": "s3://robots/arm"}), capsys)
    expected = "dataset s3://robots/arm: .*PermissionDeniedError: .*; no credentials were found.*: check credentials"
    assert re.search(expected, message)


@pytest.mark.parametrize("kind", ["vanish", "change", "change, and the store ignores conditions"])
def test_objects_changed_after_listing_are_reported(damaged, proxied, bucket, local, node_dir, monkeypatch, kind):
    (url, prefix), (faults, options) = damaged, proxied
    faults.ignored = ("if-match",) if "ignores" in kind else ()
    source = datasource([load_metadata(url, storage_options=options)])
    for file in (source.metas[0].data_files[1], source.metas[0].video_files[TOP][1]):
        monkeypatch.setattr("vla_finetuning.data.disk_cache.NUMBERS_DIR", str(node_dir / file))
        upload(bucket, local, prefix)
        key = {"Bucket": "robots", "Key": f"{prefix}/{file}"}
        if kind == "vanish":
            bucket.delete_object(**key)
            expected, message = FileNotFoundError, "is missing; copy it again"
        else:
            bucket.put_object(**key, Body=bytes((local / file).stat().st_size))
            expected, message = StorageError, "the file changed after this run had listed the dataset"
        with pytest.raises(expected, match=f"{re.escape(url)}: {file}.*{message}"):
            read_directly(source)


@pytest.fixture
def hub(local, tmp_path, monkeypatch):
    with dataset_hub(monkeypatch, local, tmp_path / "hub") as server:
        yield server


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=[pytest.mark.ray, pytest.mark.slow])])
def test_gated_hub_dataset_needs_token_and_is_pinned(hub, base, no_ray_cluster, tmp_path, monkeypatch, capfd, train):
    """Downloaded once, pinned to a commit, with a token that goes to the Hub and nowhere else."""
    out, sent = tmp_path / "out", []

    def stop_here(run):
        sent.append(pickle.dumps(run))  # what training workers would be sent
        raise OSError("not trained")

    if not train:
        monkeypatch.setattr(vla, "on_cluster", stop_here)
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def run(*more, status=2):
        argv = flags(base, out, **{"dataset.repo_id": hub.repo_id, "scaling.cpus_per_worker": 0.5})
        assert vla.main([*argv, *more]) == status
        return capfd.readouterr()

    unknown = run("--dataset.repo_id=somebody/else", "--dry_run").err
    assert "dataset somebody/else: not on the Hub, or private" in unknown
    assert "dataset somebody/arm: no revision 'v9' on the Hub" in run("--dataset.revision=v9", "--dry_run").err
    monkeypatch.delenv("HF_TOKEN")
    refused = run("--dry_run").err
    assert "dataset somebody/arm: gated (403)" in refused and "set HF_TOKEN" in refused
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    plan, errors = run(status=0 if train else 1)

    commit = hub.commits["v3.0"]  # as LeRobot: the tag of the format's version, where there is one
    assert f"Dataset      {hub.repo_id} @ {commit[:12]}\n" in plan
    assert json.loads((out / "config.json").read_text())["dataset"]["revision"] == commit
    assert (out / "pretrained_model/model.safetensors").is_file() == train
    assert train or sent and errors.endswith("error: not trained\n")
    files = [path.relative_to(hub.folder).as_posix() for path in hub.folder.rglob("*") if path.is_file()]
    assert sorted(hub.downloads()) == sorted(files)
    assert all(f"/resolve/{commit}/" in request for request in hub.asked if "/resolve/" in request)

    assert TOKEN not in plan + errors and not any(TOKEN.encode() in data for data in sent)
    written = [path for place in (out, Path(os.environ["RAY_TMPDIR"])) for path in place.rglob("*") if path.is_file()]
    assert len(written) > (20 if train else 0)
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []
