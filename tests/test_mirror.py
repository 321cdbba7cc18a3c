"""Local copies of folders in buckets, over HTTP, through a network that fails. Other processes are other copies."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.buckets import Bucket, forget, other_process
from vla_finetuning.buckets import mirror
from vla_finetuning.buckets import store as store_module
from vla_finetuning.buckets.mirror import (
    address,
    as_file,
    as_path,
    contents,
    fetched,
    file_of_process,
    files_of_processes,
    keep_synced,
    pull,
    push,
    remove,
    sizes,
)
from vla_finetuning.buckets.store import ChangedError, StorageError, within
from vla_finetuning.files import append_line, read_json, read_lines, write_json
from vla_finetuning.run.attempts import attempts, start_attempt
from vla_finetuning.run.exported import exported_robots, policy_problem
from vla_finetuning.training.export import _export_folder


@pytest.fixture
def url(bucket_url):
    return bucket_url


def test_mirror_path_and_address_convert_both_ways(url):
    folder = as_path(url)
    assert as_path("~/runs") == Path.home() / "runs" and address(Path("/a/b")) == "/a/b"
    assert address(folder) == url and address(folder / "a" / "b.json") == f"{url}/a/b.json"
    assert as_path(f"{url}/a/b.json") == folder / "a" / "b.json" and as_path(folder) is folder
    assert folder.is_dir() and (folder / "a").parent == folder
    sent = pickle.dumps(folder / "a")
    forget()  # what receives it is another process
    assert pickle.loads(sent) == as_path(url) / "a" != folder / "a"


def test_pushed_files_are_pulled_by_other_processes(url):
    one, other, bucket = as_path(url), other_process(url), Bucket(url)
    write_json(one / "a.json", {"a": 1})
    (one / "inner").mkdir()
    append_line(one / "inner" / "m.jsonl", "1")
    (one / ".lock").touch()
    push(one)
    assert bucket.names() == {"a.json", "inner/m.jsonl"} and read_json(other / "a.json") == {}
    pull(other)
    assert read_json(other / "a.json") == {"a": 1} and read_lines(other / "inner" / "m.jsonl") == ["1"]
    append_line(one / "inner" / "m.jsonl", "2")
    push(one)
    bucket.delete("a.json")
    pull(other)
    assert read_lines(other / "inner" / "m.jsonl") == ["1", "2"] and not (other / "a.json").exists()
    assert sizes(other) == {"inner/m.jsonl": 4} == sizes(one) and contents(other) == ["inner"]


def test_file_without_suffix_is_pushed_pulled_and_removed(url):
    one, other, bucket = as_path(url), other_process(url), Bucket(url)
    (one / "stop").touch()
    push(one / "stop")
    pull(other / "stop")
    assert (other / "stop").exists()
    remove(one / "stop")
    assert bucket.names() == set()
    pull(one)
    assert not (one / "stop").exists()


def test_unchanged_files_are_not_transferred_again(url, faults):
    one, other = as_path(url), other_process(url)
    for name in ("a", "b"):
        (one / name).write_text(name)
    push(one)
    pull(other)
    (one / "b").write_text("more")
    faults.requests.clear()
    push(one)
    push(one)
    pull(other)
    pull(other)
    assert [(r.method, r.path[-1]) for r in faults.requests if r.path[-2:] in ("/a", "/b")] == [
        ("PUT", "b"),
        ("GET", "b"),
    ]
    assert (other / "b").read_text() == "more"


def test_pull_at_the_top_lists_no_subfolders(url, faults):
    other, bucket = as_path(url), Bucket(url)
    for name in ("stop", "evaluations/a.json"):
        bucket.write(name, b"1")
    pull(other)
    bucket.delete("stop", "evaluations/a.json")
    for name in ("metrics.jsonl", "evaluations/b.json"):
        bucket.write(name, b"2")
    faults.requests.clear()
    pull(other, at_the_top=True)
    assert {str(file.relative_to(other)) for file in other.rglob("*.*")} == {"metrics.jsonl", "evaluations/a.json"}
    listing, fetched_file = faults.requests
    assert "delimiter" in listing.url and fetched_file.path.endswith("/metrics.jsonl") and not (other / "stop").exists()
    pull(other)
    assert {str(file.relative_to(other)) for file in other.rglob("*.*")} == {"metrics.jsonl", "evaluations/b.json"}


def test_pull_from_unreachable_store_stops_at_the_first_error(url, faults):
    bucket, folder = Bucket(url), as_path(url)
    for number in range(40):
        bucket.write(f"{number}.json", b"{}")
    faults.choose = lambda request: "503" if request.path.endswith(".json") else None
    faults.requests.clear()
    with pytest.raises(StorageError), within(0.2):
        pull(folder)
    assert len({request.path for request in faults.requests}) < 30


def test_large_files_are_pulled_only_on_request(url, monkeypatch):
    monkeypatch.setattr(mirror, "PIECE_BYTES", 2**20)
    one, other, data = as_path(url), other_process(url), os.urandom(3 * 2**20)
    names = ("model.safetensors", "rows/rank0.jsonl", "film.bin")
    for name in names:
        (one / name).parent.mkdir(exist_ok=True)
        (one / name).write_bytes(data)
    push(one)
    pull(other)
    assert [name for name in names if (other / name).exists()] == ["film.bin"]
    assert (other / "film.bin").read_bytes() == data
    pull(other / "rows")
    assert (other / "rows" / "rank0.jsonl").read_bytes() == data
    (one / "film.bin").write_bytes(data[1:])
    push(one)
    pull(other)
    assert (other / "film.bin").read_bytes() == data[1:]


def test_second_writer_of_a_file_is_refused(url):
    one, other, is_owner = as_path(url), other_process(url), [True]
    (one / "m.jsonl").write_text("1\n")
    push(one)
    pull(other)
    append_line(other / "m.jsonl", "of a process that was thought to be gone")
    push(other)
    append_line(one / "m.jsonl", "2")
    keep_synced(one, lambda: is_owner[0])
    push(one)
    assert Bucket(url).read("m.jsonl") == b"1\n2\n", "the owner's file"
    pull(one)
    assert read_lines(one / "m.jsonl") == ["1", "2"]
    (other / "m.jsonl").write_text("again")
    push(other)
    is_owner[0] = False
    append_line(one / "m.jsonl", "3")
    with pytest.raises(ChangedError, match=f"{url}/m.jsonl: another process wrote it"):
        push(one)
    assert Bucket(url).read("m.jsonl") == b"again"


def test_local_deletion_does_not_delete_from_the_bucket(url):
    """A machine that cleans its temporary files up takes nothing of a run away; `remove` does."""
    one, bucket = as_path(url), Bucket(url)
    for name in ("config.json", "a", "b"):
        (one / "inner").mkdir(exist_ok=True)
        (one / "inner" / name).write_text(name)
    push(one)
    (one / "inner" / "a").unlink()
    push(one)
    assert bucket.names() == {"inner/config.json", "inner/a", "inner/b"}
    pull(one)
    remove(one / "inner")
    assert bucket.names() == set() and not (one / "inner").exists()


def test_deleted_sqlite_journal_is_not_restored(url):
    """Here or elsewhere, to a database that has changed since: MLflow's and Trackio's were damaged."""
    one, bucket = as_path(url), Bucket(url)
    journal = one / "mlflow.db-journal"
    for pages in ("old", "newer"):
        journal.write_text(pages)
        push(one)
        assert bucket.read("mlflow.db-journal") == pages.encode()
        journal.unlink()
        pull(one)
        assert not journal.exists()
        push(one)
        assert bucket.read("mlflow.db-journal") == b""


def test_completion_marker_is_pushed_last_and_deleted_first(url, faults):
    one = as_path(url)
    for name in ("config.json", "model.safetensors", "z.json"):
        (one / name).write_text(name)
    push(one)
    assert [r.path.rpartition("/")[2] for r in faults.requests if r.method == "PUT"][-1] == "config.json"
    faults.requests.clear()
    remove(one)
    assert [r.path.rpartition("/")[2] for r in faults.requests if r.method == "DELETE"][0] == "config.json"


def test_concurrent_attempts_get_distinct_numbers(url):
    copies = [as_path(url), *(other_process(url) for _ in range(3))]
    for copy in copies:
        attempts(copy)
    started, barrier = [], threading.Barrier(4)

    def start(copy):
        barrier.wait()
        try:
            start_attempt(copy, 0, 1)
            started.append(copy)
        except RuntimeError as error:
            assert f"{url}: another process has taken over this run" in str(error)

    threads = [threading.Thread(target=start, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = Bucket(url).read("attempts.jsonl").splitlines()  # one that reads after another's line adds the next
    assert [json.loads(line)["attempt"] for line in lines] == list(range(len(started))) and started


def test_unsynced_files_are_pushed_once_the_store_answers(url, faults, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "SYNC_S", 0.05)
    one, other, bucket = as_path(url), other_process(url), Bucket(url)
    faults.choose = lambda request: "403"
    append_line(one / "m.jsonl", "1")
    with pytest.raises(StorageError), within(0.5):
        push(one)
    keep_synced(one)
    while "not synced; files stay on this node's disk" not in caplog.text:
        time.sleep(0.01)
    faults.choose = lambda request: None
    while "m.jsonl" not in bucket.names():
        time.sleep(0.01)
    (other / "stop").touch()
    push(other)
    while not (one / "stop").exists():
        time.sleep(0.01)
    append_line(one / "m.jsonl", "2")
    mirror.mirror_of(one)[0].stop_syncing()
    assert bucket.read("m.jsonl") == b"1\n2\n" and caplog.text.count("files stay on") == 1


def test_file_of_process_gives_each_process_its_own_file(url, tmp_path):
    one, other = as_path(url), other_process(url)
    log = file_of_process(one / "run.log")
    append_line(log, "1")
    push(log)
    (other / "run-elsewhere-7.log").write_text("2\n")
    push(other)
    pull(one)
    assert {line for path in files_of_processes(one / "run.log") for line in read_lines(path)} == {"1", "2"}
    assert file_of_process(tmp_path / "run.log") == tmp_path / "run.log"
    forget()  # a container that starts again has the same host name and process ids
    assert file_of_process(as_path(url) / "run.log").name != log.name


def test_mirror_of_google_storage_detects_other_writers(googles_faults, tmp_path, monkeypatch):
    """Its puts have another tag than its listings."""
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path))
    forget()
    one, other = as_path("gs://runs/a/run"), other_process("gs://runs/a/run")
    append_line(one / "m.jsonl", "1")
    push(one)
    pull(other)
    append_line(other / "m.jsonl", "2")
    push(other, only_if_unchanged=True)
    append_line(one / "m.jsonl", "3")
    with pytest.raises(ChangedError):
        push(one, only_if_unchanged=True)
    forget()


def test_concurrent_readers_share_one_fetched_folder(url, faults, tmp_path):
    bucket, names = Bucket(url), ("config.json", "model.safetensors", "tokenizer/vocab.json")
    for name in names:
        bucket.write(name, name.encode())
    folder = as_path(url)
    faults.requests.clear()
    with fetched(folder) as first, fetched(folder) as second:
        assert first == second and {(first / name).read_text() for name in names} == set(names)
        assert len(faults.of("model.safetensors")) == 1
    assert not first.exists()
    with fetched(folder, "config.json".__eq__) as some:
        assert [path.name for path in some.iterdir()] == ["config.json"]
    with fetched(tmp_path) as same:
        assert same == tmp_path


KILLED = """
import os, signal, sys
from vla_finetuning.buckets import mirror
mirror.tempfile.tempdir = sys.argv[1]
with mirror.fetched(mirror.as_path(sys.argv[2])) as folder:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_killed_process_are_removed(url, tmp_path):
    """Ray Train kills its workers. The next process of this user on the node removes it, of whatever address."""
    bucket = Bucket(url)
    bucket.write("weights", b"old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), url])
    assert killed.returncode == -signal.SIGKILL and list(tmp_path.glob("*/*/fetched-*/run/weights"))
    (copy,) = tmp_path.glob("*/process-*")
    as_path(f"{url}-of-another-run")
    assert not copy.exists() and not list(tmp_path.glob("*/*/fetched-*/run*/**/*"))
    with fetched(as_path(url)) as folder:
        assert (folder / "weights").read_text() == "old"


def test_fetched_returns_new_content_while_old_is_in_use(url, tmp_path):
    """As an evaluation of an export that serve.py still serves the one before of."""
    bucket, folder = Bucket(url), as_path(url)
    bucket.write("weights", b"old")
    with fetched(folder) as served:
        bucket.write("weights", b"new")
        with fetched(folder) as evaluated:
            assert (served / "weights").read_bytes() == b"old" and (evaluated / "weights").read_bytes() == b"new"
    assert not served.exists() and not evaluated.exists()


def test_failed_fetch_leaves_no_files_on_disk(url, monkeypatch):
    def fill_up(store, key, content, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    Bucket(url).write("weights", b"weights")
    monkeypatch.setattr(store_module.Store, "download", fill_up)
    with pytest.raises(OSError, match="No space left"), fetched(as_path(url)):
        pass
    assert not list(mirror.scratch(as_path(url)).glob("fetched-*/run/**/*"))


def test_object_name_outside_the_folder_is_refused(url, monkeypatch):
    folder, found = as_path(url), {"../../x": store_module.Content(1, "", 0.0)}
    monkeypatch.setattr(mirror.Mirror, "objects", lambda self, name, at_the_top=False: found)
    pull(folder)
    with pytest.raises(ValueError, match="'../../x' leads out of it"), fetched(folder):
        pass


def test_export_replaces_the_previous_one_only_when_complete(url, tmp_path):
    path, bucket = as_path(url) / "pretrained_model", Bucket(url)
    bucket.write("pretrained_model/old.safetensors", b"of the export before")
    on_disk = tmp_path / "run" / "pretrained_model"
    on_disk.mkdir(parents=True)
    on_disk.with_name(".pretrained_model").mkdir()  # of a process that was killed
    (on_disk / "old.safetensors").touch()
    for target in (path, on_disk):
        with pytest.raises(RuntimeError, match="planted"), _export_folder(target) as made:
            made.mkdir(parents=True)
            raise RuntimeError("planted")
    assert bucket.names() == {"pretrained_model/old.safetensors"} and (on_disk / "old.safetensors").exists()
    for target in (path, on_disk):
        with _export_folder(target) as made:
            made.mkdir(parents=True)
            (made / "config.json").write_text("{}")
    assert bucket.names() == {"pretrained_model/config.json"} and not path.exists()
    assert [*on_disk.parent.rglob("*.*")] == [on_disk / "config.json"]


def test_exported_robots_need_listings_only(url, faults, tmp_path):
    """A tokenizer of tens of MB is for the process that loads the policy."""
    bucket, folder, disk = Bucket(url), as_path(url), tmp_path / "disk"
    for name in ("arm/config.json", "arm/tokenizer/tokenizer.json", "gantry/config.json", "films/a.png"):
        bucket.write(name, b"{}")
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text("{}")
    faults.requests.clear()
    assert exported_robots(folder) == exported_robots(disk) == ["arm", "gantry"]
    assert exported_robots(folder / "arm") == exported_robots(disk / "arm") == exported_robots(disk / "none") == []
    assert policy_problem(folder).startswith(f"{url}/arm lacks model.safetensors, policy_preprocessor.json")
    assert not faults.of("tokenizer.json")


def test_run_beside_a_mirrored_file_has_its_own_mirror(url):
    """Else all beside it would be fetched, and its file `stop` not be looked for."""
    labels, run = as_file(f"{url}/labels.parquet"), as_path(f"{url}/run1")
    assert mirror.mirror_of(labels)[0].url == url and mirror.mirror_of(run)[0].url == f"{url}/run1"
    assert as_file(f"{url}/labels.parquet") == labels and as_file(f"{url}/run1/config.json") == run / "config.json"
    base = as_path(url)  # as --policy.path, after the run's own folder
    assert as_path(f"{url}/run1/stop") == run / "stop" and as_path(f"{url}/x") == base / "x"
