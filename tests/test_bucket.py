"""Paths and lines in buckets, over HTTP, through a network that fails."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest

from tests.buckets import forget, runs_bucket
from tests.loopback import Faults, GoogleStorage, Handler, Proxy, serving
from vla_finetuning import lines, node_disk
from vla_finetuning import store as store_module
from vla_finetuning.bucket import BucketPath, place
from vla_finetuning.files import read_json, read_lines, write_json, write_whole
from vla_finetuning.lines import append_line, claim_line, flush_lines, is_there, recently
from vla_finetuning.node_disk import fetched, upload_folder
from vla_finetuning.policies import spec
from vla_finetuning.store import PATIENCE_S, ChangedError, StorageError, Store, within
from vla_finetuning.training.export import _made_for


@pytest.fixture(scope="module")
def faults():
    with runs_bucket() as faults:
        yield faults


@pytest.fixture
def folder(faults, request):
    faults.choose, faults.delay_s = lambda request: None, 0.0
    faults.requests.clear()
    yield place(f"s3://runs/{request.node.name}/run")
    faults.choose = lambda request: None


@pytest.fixture
def impatient(monkeypatch):
    """Hardly a pause between attempts."""
    monkeypatch.setattr(store_module, "FIRST_PAUSE_S", 0.01)


# ---- paths ---------------------------------------------------------------------------------------------------------


def test_a_path_in_a_bucket_is_a_path():
    path = place("s3://runs/a/run")
    assert isinstance(path, Path) and str(path / "x" / "y.json") == "s3://runs/a/run/x/y.json"
    assert (path / "x").parent == path and hash((path / "x").parent) == hash(path) and path.absolute() == path
    assert str((path / "x").with_name("z")) == "s3://runs/a/run/z" and str((path / "x").relative_to(path)) == "x"
    assert pickle.loads(pickle.dumps(path)) == path and type(pickle.loads(pickle.dumps(path))) is BucketPath
    assert type(place("~/runs")) is not BucketPath and str(place("gs://b/r")) == "gs://b/r"


def test_an_empty_bucket_exists(faults):
    boto3.client("s3").create_bucket(Bucket="empty")
    assert place("s3://empty").exists() and not place("s3://nowhere").exists()
    assert not place("s3://empty/a").exists()


@pytest.mark.parametrize("use", [open, os.stat, Path.rename, os.listdir])
def test_what_is_not_done_in_a_bucket_does_not_happen_on_the_disk(use):
    with pytest.raises(TypeError, match="s3://runs/x is in a bucket, and was used as a path on a disk"):
        use(place("s3://runs/x"), "r") if use in (open, Path.rename) else use(place("s3://runs/x"))


@pytest.mark.parametrize("url", ["http://runs/x", "s3://", "hf://a/b"])
def test_an_address_of_no_store(url):
    with pytest.raises(ValueError, match=f"{url}: expected a path, s3://BUCKET/FOLDER, gs://"):
        place(url)


def everything_whole(folder):
    """What holds in any store."""
    assert read_json(folder / "a.json") == {} and read_lines(folder / "a.jsonl") == [] and not folder.exists()
    write_json(folder / "a.json", {"a": 1})
    (folder / "inner" / "b.bin").write_bytes(b"12345")
    assert read_json(folder / "a.json") == {"a": 1} and (folder / "a.json").is_file() and folder.is_dir()
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "inner"]
    assert [path.name for path in folder.glob("*.json")] == ["a.json"]
    assert {name: found.size for name, found in folder.below().items()} == {"a.json": 13, "inner/b.bin": 5}
    tag = (folder / "c").put(b"1", tag="")
    assert (folder / "c").read_tagged() == (b"1", tag)
    for wrong, path in (("", folder / "c"), ('"0"' if tag.startswith('"') else "7", folder / "c")):
        with pytest.raises(ChangedError, match="another process wrote it"):
            path.put(b"2", tag=wrong)
    assert (folder / "c").put(b"3", tag=tag) != tag and (folder / "c").read_bytes() == b"3"
    for path in (folder / "c", folder / "nothing"):
        path.unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError):
            path.read_bytes()
    with pytest.raises(ChangedError):
        (folder / "c").put(b"4", tag=tag)
    folder.remove_tree()
    assert not folder.exists()


def test_objects_are_whole(folder):
    everything_whole(folder)


def test_objects_are_whole_in_googles_store(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    with serving(GoogleStorage("runs", tmp_path / "runs")) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        forget()
        everything_whole(place("gs://runs/a/run"))
        monkeypatch.setattr(store_module, "PIECE_BYTES", 5 * 2**20)
        file, back, there = tmp_path / "file", tmp_path / "back", place("gs://runs/a/run/large")
        file.write_bytes(os.urandom(12 * 2**20))
        there.upload(file)
        found = there.content()
        there.download(back, found)
        assert back.read_bytes() == file.read_bytes()
        there.write_bytes(b"another")
        with pytest.raises(ChangedError):  # another generation
            there.download(back, found)
        append_line(place("gs://runs/a/run/m.jsonl"), "1", now=True)
        assert read_lines(place("gs://runs/a/run/m.jsonl")) == ["1"]
        forget()


def test_large_files_travel_in_pieces_that_are_repeated_by_themselves(folder, faults, tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(store_module, "PIECE_BYTES", 5 * 2**20)  # S3 takes no less
    file, back = tmp_path / "file", tmp_path / "back"
    file.write_bytes(os.urandom(12 * 2**20))
    seen = set()

    def each_fails_once(request):
        first = (request.method, request.url, request.range) not in seen
        seen.add((request.method, request.url, request.range))
        return ["503", "reset", "slow"][len(seen) % 3] if first and request.method in ("PUT", "GET") else None

    faults.choose = each_fails_once
    (folder / "file").upload(file)
    (folder / "file").download(back, (folder / "file").content())
    assert back.read_bytes() == file.read_bytes()
    pieces = [r for r in faults.requests if "partNumber" in r.url]
    assert len(pieces) == 2 * 3 and {r.attempt for r in pieces} == {1, 2}

    faults.choose = lambda request: "503" if "partNumber=2" in request.url else None
    with pytest.raises(StorageError, match="the store does not answer"), within(0.3):
        (folder / "other").upload(file)
    faults.choose = lambda request: None
    assert not (folder / "other").exists()
    folder.store.abort_uploads(folder.key)
    uploads = boto3.client("s3").list_multipart_uploads(Bucket="runs").get("Uploads", [])
    assert uploads == []


def test_an_upload_to_googles_store_goes_on_while_it_is_answered(tmp_path, monkeypatch, impatient):
    """Piece by piece; a store that does not answer is given up in the time that was said, and nothing is there."""
    (tmp_path / "runs").mkdir()
    faults, store = Faults(), GoogleStorage("runs", tmp_path / "runs")
    with serving(store) as endpoint, serving(Proxy(endpoint, faults)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy)
        forget()
        monkeypatch.setattr(store_module, "PIECE_BYTES", 5 * 2**20)
        file, there = tmp_path / "file", place("gs://runs/a/run/large file")
        file.write_bytes(os.urandom(12 * 2**20))
        faults.choose = lambda request: "503" if request.method == "PUT" and request.attempt == 1 else None
        there.upload(file)
        assert there.read_bytes() == file.read_bytes()
        there.unlink()
        faults.choose = lambda request: "stall" if "partNumber=2" in request.url else None
        started = time.monotonic()
        with pytest.raises(StorageError, match="the store does not answer"), within(1):
            there.upload(file)
        assert time.monotonic() - started < 6 and not there.exists()
        forget()


def test_a_store_that_lists_no_uploads_is_a_warning(folder, faults, caplog):
    """Some that speak as Amazon's have no such request; a run goes on without it."""
    faults.choose = lambda request: "403" if "uploads" in request.url else None
    folder.store.abort_uploads(folder.key)
    assert f"{folder}: uploads that were begun and not completed stay: " in caplog.text


def test_a_put_whose_answer_is_lost_is_our_own(folder, faults, impatient):
    tag = (folder / "a").put(b"1", tag="")
    for data, only in ((b"2", tag), (b"new", "")):
        path = folder / ("a" if only else "b")
        faults.choose = lambda request: "lost" if (request.method, request.attempt) == ("PUT", 1) else None
        faults.requests.clear()
        path.put(data, tag=only)
        assert path.read_bytes() == data
        assert [r.method for r in faults.requests].count("PUT") == 2


def test_a_store_that_is_away_for_a_while(folder, faults, impatient):
    (folder / "a").put(b"1")
    back_at = time.monotonic() + 0.5
    faults.choose = lambda request: (
        ("503", "reset", "slow")[request.attempt % 3] if time.monotonic() < back_at else None
    )
    (folder / "a").put(b"2")
    assert (folder / "a").read_bytes() == b"2"


def test_a_store_that_is_away_for_good(folder, faults, impatient):
    faults.choose = lambda request: "503"
    message = r"s3://runs/.*/run/a: the store does not answer .*check the network"
    with pytest.raises(StorageError, match=message), within(0.5):
        (folder / "a").put(b"1")
    faults.choose = lambda request: "stall"
    with pytest.raises(StorageError, match="the store does not answer"), within(0.5):
        (folder / "a").read_bytes()


def test_a_store_that_refuses_is_not_asked_again(folder, faults):
    faults.choose = lambda request: "403"
    with pytest.raises(StorageError, match="the store refuses .*check credentials, permissions") as error:
        (folder / "a").put(b"1")
    assert len(faults.requests) == 1 and "canary-secret" not in str(error.value)


def test_credentials_that_expire_are_looked_for_anew(folder, faults, impatient, monkeypatch):
    (folder / "a").put(b"1")
    used = folder.store._clients[PATIENCE_S, False]
    faults.choose = lambda request: "expired" if request.attempt == 1 and request.method == "PUT" else None
    faults.requests.clear()
    (folder / "a").put(b"2")
    assert (folder / "a").read_bytes() == b"2" and folder.store._clients[PATIENCE_S, False] is not used


class AnotherRegion(Handler):
    """A store that serves requests that are signed for its own region, as Amazon's does."""

    def do_GET(self):
        if "/eu-west-1/s3/" not in self.headers["Authorization"]:
            return self.answer(301, b"<Error><Code>PermanentRedirect</Code></Error>")
        self.answer(200, b"1", {"ETag": '"1"', "Last-Modified": "Thu, 26 Nov 2026 00:00:00 GMT", "Content-Length": "1"})


def test_a_bucket_in_another_region_is_found(faults, impatient, monkeypatch):
    monkeypatch.setattr(store_module, "bucket_region", {"far": "eu-west-1"}.get)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), AnotherRegion)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert Store("s3", "far").get("a")[0] == b"1"
        with pytest.raises(StorageError, match="the store refuses .*region"):
            Store("s3", "elsewhere").get("a")


# ---- lines ---------------------------------------------------------------------------------------------------------


def test_lines_are_read_while_they_are_appended(folder, monkeypatch):
    monkeypatch.setattr(lines, "LINES_BYTES", 50)
    path, expected = folder / "m.jsonl", []
    for number in range(30):
        append_line(path, json.dumps({"step": number}))
        expected.append(json.dumps({"step": number}))
        if number % 3 == 0:
            flush_lines()
            lines_there = "".join((path / name).read_text() for name in sorted(path.below()))
            assert lines_there.splitlines() == expected
    assert read_lines(path) == expected
    assert len(path.below()) > 2


def test_a_later_process_appends_after_an_earlier_one(folder):
    path = folder / "m.jsonl"
    for number in range(3):
        append_line(path, str(number), now=True)
        forget()
    assert read_lines(path) == ["0", "1", "2"]


def test_lines_that_a_process_left_are_written_by_another(folder, faults, impatient):
    forget()
    append_line(folder / "old.jsonl", "0", now=True)
    faults.choose = lambda request: "503"
    write_whole(folder / "new.jsonl", "0\n1\n", now=False)
    append_line(folder / "inner" / "first.jsonl", "0")
    append_line(folder / "old.jsonl", "1")
    waiting = json.loads(json.dumps(lines.waiting_lines(folder)))
    assert len(waiting) == 3
    late = {path.name: appender for path, appender in lines._appenders.items()}
    forget()
    faults.choose = lambda request: None
    for _ in range(2):
        lines.write_waiting(folder, waiting)
        assert read_lines(folder / "old.jsonl") == read_lines(folder / "new.jsonl") == ["0", "1"]
        assert read_lines(folder / "inner" / "first.jsonl") == ["0"]
    late["old.jsonl"].append("2")
    late["old.jsonl"].flush()  # it wrote them after all, and more
    lines.write_waiting(folder, waiting)
    assert read_lines(folder / "old.jsonl") == ["0", "1", "2"]


def test_lines_that_two_processes_write_at_once_are_there_once(folder):
    """The one that was thought to be gone, and the one that writes what it had left."""
    path = folder / "m.jsonl"
    append_line(path, "0")
    waiting, late = lines.waiting_lines(folder), lines._appenders[path]
    forget()
    lines.write_waiting(folder, waiting)
    append_line(path, "1", now=True)
    late.flush()  # under an order of its own
    assert len(path.below()) == 3 and read_lines(path) == ["0", "1"]
    late.append("2")
    late.flush()
    assert sorted(read_lines(path)) == ["0", "1", "2"]


def test_lines_that_are_replaced_stay_so_whatever_an_earlier_process_still_writes(folder):
    path = folder / "m.jsonl"
    append_line(path, "1", now=True)
    stale = lines._appenders[path]
    forget()
    write_whole(path, "kept\n")
    append_line(path, "2", now=True)
    stale.append("void")
    stale.flush()
    assert read_lines(path) == ["kept", "2"]
    forget()
    assert read_lines(path) == ["kept", "2"]


def test_a_line_is_claimed_once(folder):
    claimed, barrier = [], threading.Barrier(4)

    def claim(who):
        barrier.wait()
        try:
            claim_line(folder / "a.jsonl", 0, f"mine, {who}")
            claimed.append(f"mine, {who}")
        except ChangedError:
            pass

    threads = [threading.Thread(target=claim, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == 1 and read_lines(folder / "a.jsonl") == claimed


def test_lines_wait_for_a_store_that_is_away(folder, faults, impatient, caplog):
    path = folder / "m.jsonl"
    append_line(path, "0", now=True)
    faults.choose = lambda request: "503"
    append_line(path, "1")
    with pytest.raises(StorageError), within(0.5):
        flush_lines()
    append_line(path, "2")
    faults.choose = lambda request: None
    flush_lines()
    assert read_lines(path) == ["0", "1", "2"]


def test_a_loop_that_looks_now_and_then_never_waits(folder, faults, monkeypatch):
    monkeypatch.setattr(lines, "RECENT_S", 0.05)
    (folder / "stop").touch()
    answers = threading.Event()
    faults.choose = lambda request: "reset" if not answers.wait(60) else None
    for _ in range(3):
        assert recently(is_there, folder / "stop", False) is False  # while the store is silent
    answers.set()
    while not recently(is_there, folder / "stop", False):
        time.sleep(0.01)


# ---- this node's disk ----------------------------------------------------------------------------------------------


def test_a_folder_is_fetched_once_for_those_who_read_it_together(folder, faults, tmp_path, monkeypatch):
    monkeypatch.setattr(node_disk.tempfile, "tempdir", str(tmp_path))
    source = tmp_path / "policy"
    (source / "tokenizer").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer/vocab.json"):
        (source / name).write_text(name)
    (folder / "old.safetensors").write_text("of the export before")
    upload_folder(source, folder, last="config.json")
    puts = [r.path.rpartition("/run/")[2] for r in faults.requests if r.method == "PUT"]
    assert puts[-1] == "config.json" and set(folder.below()) == {
        "config.json",
        "model.safetensors",
        "tokenizer/vocab.json",
    }
    faults.requests.clear()
    with fetched(folder) as first, fetched(folder) as second:
        assert first == second and (first / "tokenizer/vocab.json").read_text() == "tokenizer/vocab.json"
        assert len(faults.of("model.safetensors")) == 1
    assert not first.exists()
    with fetched(source) as same:
        assert same == source


KILLED = """
import os, signal, sys
from pathlib import Path
from vla_finetuning.bucket import BucketPath
from vla_finetuning import node_disk
node_disk.tempfile.tempdir = sys.argv[1]
with node_disk.on_disk(BucketPath("s3://bucket/policy"), lambda folder: (folder / "weights").write_text("old")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_fetched_is_fetched_again(tmp_path, monkeypatch):
    """The bucket may hold something else by now."""
    monkeypatch.setattr(node_disk.tempfile, "tempdir", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL and list(tmp_path.glob("*/*/fetched/weights"))
    with node_disk.on_disk(BucketPath("s3://bucket/policy"), lambda f: (f / "weights").write_text("new")) as folder:
        assert (folder / "weights").read_text() == "new"
        with node_disk.on_disk(BucketPath("s3://bucket/policy"), None) as again:  # not while it is in use
            assert again == folder


def test_a_rank_waits_for_a_policy_that_another_one_fetches(tmp_path, monkeypatch):
    """On a node that is not the driver's: the folder is there as soon as the first one begins."""
    monkeypatch.setattr(node_disk.tempfile, "tempdir", str(tmp_path))
    place, begun, found = BucketPath("s3://bucket/policy"), threading.Event(), []

    def fetch(folder):
        begun.set()
        time.sleep(0.5)
        (folder / "config.json").write_text("whole")

    def fetched_here(path, revision):
        with node_disk.on_disk(place, fetch) as folder:
            found.append((folder / "config.json").read_text())
        return folder, None

    monkeypatch.setattr(spec, "fetch_pretrained", fetched_here)
    own = SimpleNamespace(folder=node_disk.scratch(place) / "fetched", base={"path": str(place), "revision": None})
    first = threading.Thread(target=spec.PolicySpec.folder_here, args=(own,))
    first.start()
    begun.wait()
    assert own.folder.is_dir()
    spec.PolicySpec.folder_here(own)
    first.join()
    assert found == ["whole", "whole"]


def test_an_export_that_fails_leaves_nothing_on_the_node(folder, tmp_path, monkeypatch):
    """And what one left that was killed is no part of the next."""
    monkeypatch.setattr(node_disk.tempfile, "tempdir", str(tmp_path))
    path = folder / "pretrained_model"
    with pytest.raises(RuntimeError, match="planted"), _made_for(path) as made:
        made.mkdir()
        (made / "model.safetensors").touch()
        raise RuntimeError("planted")
    assert not made.exists() and not path.exists()
    made.mkdir()
    (made / "old.safetensors").touch()
    with _made_for(path) as made:
        made.mkdir()
        (made / "config.json").write_text("{}")
    assert set(path.below()) == {"config.json"} and not made.exists()
