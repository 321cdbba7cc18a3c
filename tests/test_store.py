"""Objects in stores, over HTTP, through a network that fails."""

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer

import boto3
import pytest
from obstore.exceptions import AlreadyExistsError

from tests.loopback import Handler, serving
from vla_finetuning.buckets import store as store_module
from vla_finetuning.buckets.store import (
    PATIENCE_S,
    ChangedError,
    StorageError,
    Store,
    may_pass,
    split_address,
    within,
)


@pytest.fixture
def bucket(bucket_url):
    return Store("s3", "runs")


def test_empty_bucket_lists_nothing_and_missing_bucket_is_an_error(faults):
    boto3.client("s3").create_bucket(Bucket="empty")
    assert Store("s3", "empty").names("") == ([], {})
    with pytest.raises(FileNotFoundError):
        Store("s3", "nowhere").names("")


@pytest.mark.parametrize("url", ["http://runs/x", "s3://", "hf://a/b"])
def test_unknown_store_address_is_refused(url):
    with pytest.raises(ValueError, match=f"{url}: expected a path, s3://BUCKET/FOLDER, gs://"):
        split_address(url)


def check_store_operations(store, folder):
    """Check what holds in any store."""
    with pytest.raises(FileNotFoundError):
        store.get(f"{folder}/a.json")
    store.put(f"{folder}/a.json", b"{}")
    store.put(f"{folder}/inner/b.bin", b"12345")
    folders, objects = store.names(folder)
    assert folders == ["inner"] and {name: found.size for name, found in objects.items()} == {"a.json": 2}
    assert {name: found.size for name, found in store.below(folder).items()} == {"a.json": 2, "inner/b.bin": 5}
    c = f"{folder}/c"
    tag = store.put(c, b"1", tag="")
    assert store.get(c) == (b"1", tag)
    for wrong in ("", '"0"' if tag.startswith('"') else "7"):
        with pytest.raises(ChangedError, match="another process wrote it"):
            store.put(c, b"2", tag=wrong)
    assert store.put(c, b"3", tag=tag) != tag and store.get(c)[0] == b"3"
    store.delete([c, f"{folder}/nothing"])
    with pytest.raises(FileNotFoundError):
        store.get(c)
    with pytest.raises(ChangedError):
        store.put(c, b"4", tag=tag)
    store.delete([f"{folder}/a.json", f"{folder}/inner/b.bin"])
    assert store.names(folder) == ([], {})


def test_s3_store_operations(bucket, request):
    check_store_operations(bucket, request.node.name)


def test_google_storage_operations_and_piecewise_transfer(googles_faults, tmp_path, monkeypatch):
    store = Store("gs", "runs")
    check_store_operations(store, "a/run")
    monkeypatch.setattr(store_module, "PIECE_BYTES", 5 * 2**20)
    file, back, key = tmp_path / "file", tmp_path / "back", "a/run/large"
    file.write_bytes(os.urandom(12 * 2**20))
    store.upload(file, key)
    found = store.head(key)
    store.download(key, found, back)
    assert back.read_bytes() == file.read_bytes()
    store.put(key, b"another")
    with pytest.raises(ChangedError):  # another generation
        store.download(key, found, back)


def test_failed_pieces_of_large_files_are_retried_alone(bucket, faults, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "PIECE_BYTES", 5 * 2**20)  # S3 takes no less
    file, back = tmp_path / "file", tmp_path / "back"
    file.write_bytes(os.urandom(12 * 2**20))
    seen = set()

    def each_fails_once(request):
        first = (request.method, request.url, request.range) not in seen
        seen.add((request.method, request.url, request.range))
        return ["503", "reset", "slow"][len(seen) % 3] if first and request.method in ("PUT", "GET") else None

    faults.choose = each_fails_once
    bucket.upload(file, "file")
    bucket.download("file", bucket.head("file"), back)
    assert back.read_bytes() == file.read_bytes()
    pieces = [r for r in faults.requests if "partNumber" in r.url]
    assert len(pieces) == 2 * 3 and {r.attempt for r in pieces} == {1, 2}

    faults.choose = lambda request: "503" if "partNumber=2" in request.url else None
    with pytest.raises(StorageError, match="the store does not answer"), within(0.3):
        bucket.upload(file, "other")
    faults.choose = lambda request: None
    with pytest.raises(FileNotFoundError):
        bucket.head("other")
    bucket.abort_uploads("")
    uploads = boto3.client("s3").list_multipart_uploads(Bucket="runs").get("Uploads", [])
    assert uploads == []


@pytest.mark.parametrize("refused", [1, 2])
def test_upload_unknown_to_the_store_is_repeated_once(bucket, tmp_path, monkeypatch, refused):
    """As MinIO answers when the answer to its last request was lost, and that is repeated."""
    monkeypatch.setattr(store_module, "PIECE_BYTES", 5 * 2**20)
    file, answers, put = tmp_path / "file", iter(range(3)), store_module._put_pieces
    file.write_bytes(os.urandom(6 * 2**20))

    def answer(client, key, file):
        put(client, key, file)
        if next(answers) < refused:
            raise FileNotFoundError("NoSuchUpload")

    monkeypatch.setattr(store_module, "_put_pieces", answer)
    if refused == 1:
        bucket.upload(file, "file")
        assert bucket.get("file")[0] == file.read_bytes()
    else:
        with pytest.raises(StorageError, match="s3://runs/file: the store does not know the upload"):
            bucket.upload(file, "file")


def test_google_upload_retries_pieces_and_times_out_without_answer(googles_faults, tmp_path, monkeypatch, bucket_url):
    """Piece by piece; a store that does not answer is given up in the time that was said, and nothing is there."""
    monkeypatch.setattr(store_module, "PIECE_BYTES", 5 * 2**20)
    file, store, key = tmp_path / "file", Store("gs", "runs"), "a/run/large file"
    file.write_bytes(os.urandom(12 * 2**20))
    googles_faults.choose = lambda request: "503" if request.method == "PUT" and request.attempt == 1 else None
    store.upload(file, key)
    assert store.get(key)[0] == file.read_bytes()
    store.delete([key])
    googles_faults.choose = lambda request: "stall" if "partNumber=2" in request.url else None
    started = time.monotonic()
    with pytest.raises(StorageError, match="the store does not answer"), within(0.4):
        store.upload(file, key)
    assert time.monotonic() - started < 4 and not store.below("")


def test_folder_placeholders_are_not_listed_as_files(bucket):
    for name, data in {"": b"", "a.json": b"{}", "inner/": b"", "inner/deep/b.json": b"{}", "empty": b""}.items():
        boto3.client("s3").put_object(Bucket="runs", Key=f"console/{name}", Body=data)
    assert set(bucket.below("console")) == {"a.json", "inner/deep/b.json", "empty"}
    folders, objects = bucket.names("console")
    assert folders == ["inner"] and set(objects) == {"a.json", "empty"}


def test_store_without_upload_listing_gives_a_warning(bucket, faults, caplog):
    """Some that speak as Amazon's have no such request; a run goes on without it."""
    faults.choose = lambda request: "403" if "uploads" in request.url else None
    bucket.abort_uploads("run")
    assert "s3://runs/run: uploads that were begun and not completed stay: " in caplog.text


def test_put_with_lost_answer_is_recognised_on_retry(bucket, faults):
    bucket.delete(["a", "b"])
    tag = bucket.put("a", b"1", tag="")
    for data, only in ((b"2", tag), (b"new", "")):
        key = "a" if only else "b"
        faults.choose = lambda request: "lost" if (request.method, request.attempt) == ("PUT", 1) else None
        faults.requests.clear()
        bucket.put(key, data, tag=only)
        assert bucket.get(key)[0] == data
        assert [r.method for r in faults.requests].count("PUT") == 2


def test_unreachable_store_raises_storage_error(bucket, faults):
    faults.choose = lambda request: "503"
    message = r"s3://runs/a: the store does not answer .*check the network"
    with pytest.raises(StorageError, match=message), within(0.2):
        bucket.put("a", b"1")
    faults.choose = lambda request: "stall"
    with pytest.raises(StorageError, match="the store does not answer"), within(0.2):
        bucket.delete(["a", "b"])  # in threads


def test_object_shorter_than_listed_has_changed(bucket):
    """A store may give no tags."""
    bucket.put("a", b"123")
    with pytest.raises(ChangedError), within(0.2):
        bucket.range("a", 1, 4)


def test_refused_request_is_not_retried_and_hides_credentials(bucket, faults):
    faults.choose = lambda request: "403"
    with pytest.raises(StorageError, match="the store refuses .*check credentials, permissions") as error:
        bucket.put("a", b"1")
    assert [request.url for request in faults.requests].count("/runs/a") == 1
    assert "canary-secret" not in str(error.value)


def test_expired_credentials_are_renewed(bucket, faults, monkeypatch):
    bucket.put("a", b"1")
    used = bucket._clients[PATIENCE_S, False]
    faults.choose = lambda request: "expired" if request.attempt == 1 and request.method == "PUT" else None
    faults.requests.clear()
    bucket.put("a", b"2")
    assert bucket.get("a")[0] == b"2" and bucket._clients[PATIENCE_S, False] is not used


def test_pickled_stores_share_credentials_in_a_process(bucket, monkeypatch):
    """Each read task has a pickle of the store; a machine's role is behind a service that limits requests."""
    bucket.put("a", b"1")
    options, calls = store_module._s3_options, []
    monkeypatch.setattr(store_module, "_s3_options", lambda named: calls.append(named) or options(named))
    sent = pickle.dumps(bucket)
    assert [pickle.loads(sent).get("a")[0] for _ in range(3)] == [b"1"] * 3 and len(calls) == 1


def test_unsigned_client_retries_credentials_after_refusal(bucket, faults, monkeypatch):
    """The metadata service of a machine, within a second: unsigned clients would be for the life of the process."""
    bucket.put("a", b"1")
    options, first = store_module._s3_options, iter([{"skip_signature": True}])
    monkeypatch.setattr(store_module, "_s3_options", lambda named: options({**named, **next(first, {})}))
    faults.choose = lambda request: "403" if request.attempt == 1 else None
    faults.requests.clear()
    store = Store("s3", "runs")
    assert store.get("a")[0] == b"1" and len(faults.requests) == 2 and not store._unsigned


class AnotherRegion(Handler):
    """A store that serves requests that are signed for its own region, as Amazon's does."""

    together = threading.Barrier(1)

    def do_GET(self):
        if "/eu-west-1/s3/" not in self.headers["Authorization"]:
            self.together.wait(60)
        if "/eu-west-1/s3/" not in self.headers["Authorization"]:
            return self.answer(301, b"<Error><Code>PermanentRedirect</Code></Error>")
        self.answer(200, b"1", {"ETag": '"1"', "Last-Modified": "Thu, 26 Nov 2026 00:00:00 GMT", "Content-Length": "1"})


def test_bucket_in_another_region_is_read(bucket_url, monkeypatch):
    monkeypatch.setattr(store_module, "bucket_region", {"far": "eu-west-1"}.get)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), AnotherRegion)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert Store("s3", "far").get("a")[0] == b"1"
        with pytest.raises(StorageError, match="the store refuses .*region"):
            Store("s3", "elsewhere").get("a")
        # Several requests at a time, as of a read task's videos.
        monkeypatch.setattr(AnotherRegion, "together", threading.Barrier(3))
        store = Store("s3", "far")
        with ThreadPoolExecutor(3) as pool:
            assert [data for data, _ in pool.map(store.get, "abc")] == [b"1"] * 3


def test_azure_blob_already_exists_is_not_retried():
    """Amazon's 409 says that another conditional request is under way."""
    text = "Generic error: status code: 409 Conflict, body: <Error><Code>{}</Code></Error>"
    codes = {"BlobAlreadyExists": False, "ConditionalRequestConflict": True}
    assert {code: may_pass(AlreadyExistsError(text.format(code))) for code in codes} == codes


def test_s3_options_accept_both_obstore_spellings():
    named = store_module._s3_options({"AWS_ACCESS_KEY_ID": "a", "aws_region": "eu-west-1"})
    assert (named["access_key_id"], named["region"]) == ("a", "eu-west-1")
    assert {"skip_signature", "credential_provider", "aws_region"}.isdisjoint(named)
