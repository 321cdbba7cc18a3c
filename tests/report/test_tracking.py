"""Tracked curves of a run that fails and resumes, read back with the trackers' own code."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import get_args

import pytest
from tensorboard.summary.writer import event_file_writer

import vla
from tests import in_process
from tests.buckets import Bucket, forget, runs_bucket
from vla_finetuning import program
from vla_finetuning.buckets import mirror
from vla_finetuning.buckets.mirror import as_path, fetched, push, synced
from vla_finetuning.buckets.store import StorageError
from vla_finetuning.files import append_line, read_lines, write_json, write_whole
from vla_finetuning.options.job import TrackerName
from vla_finetuning.options.programs import Config
from vla_finetuning.report import tracking
from vla_finetuning.report.tracking import PACKAGES, Follower, track

PROJECT = "curves"
EVALUATION = {
    "trained": {
        "frames": 8,
        "mean_action": {"mse": 2.0, "mae": [1.0]},
        "policy": {"mse": 0.5, "mae": [0.5]},
        "other_instruction": None,
    },
    "untrained": {"policy": {"mse": 3.0, "mae": [1.0]}},
}
ERRORS = {"eval_mse/mean_action": 2.0, "eval_mse/before_training": 3.0, "eval_mse/trained": 0.5}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run7"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(Config(lr=2.5e-5, steps=50, track_project="robots").to_json()))
    return folder


@pytest.fixture(autouse=True)
def seconds(monkeypatch):
    """Skip the waiting between TensorBoard's files, which are named by the second."""
    now_s = [time.time()]
    clock = SimpleNamespace(time=lambda: now_s[0], sleep=lambda _: now_s.append(now_s.pop() + 1))
    for module in (tracking, event_file_writer):
        monkeypatch.setattr(module, "time", clock)


def logged(folder, *steps, attempt=0):
    """Add lines as `MetricsLines` does; the loss encodes step and attempt."""
    for step in steps:
        line = {"step": step, "lr": 0.5, "loss": step + attempt / 4, "mfu": None, "data_wait_s": 0.0}
        append_line(folder / "metrics.jsonl", json.dumps(line))


def resumed(folder, step):
    """Drop lines past the checkpoint, as `MetricsLines` does at a restart."""
    path = folder / "metrics.jsonl"
    lines = [line for line in read_lines(path) if json.loads(line)["step"] <= step]
    write_whole(path, "".join(line + "\n" for line in lines))


def a_whole_run(folder, name):
    """Fails at 30, goes on from 20 in the same process, stops at 40; another process goes on from 30 to 50."""
    until_it_stops(folder, name)
    resumed_to_the_end(folder, name)


def a_whole_run_after_one_without_lines(folder, name):
    Follower(folder, name, PROJECT).finish()
    a_whole_run(folder, name)


def until_it_stops(folder, name):
    follower = Follower(folder, name, PROJECT)
    logged(folder, 10, 20, 30)
    follower.log_new()
    resumed(folder, 20)
    follower.log_new()
    logged(folder, 30, 40, attempt=1)
    follower.finish()


def resumed_to_the_end(folder, name):
    follower = Follower(folder, name, PROJECT)
    follower.log_new()
    resumed(folder, 30)
    logged(folder, 40, 50, attempt=2)
    follower.log_new()
    write_json(folder / "evaluation.json", EVALUATION)
    follower.finish()
    # Nothing is new: nothing is sent again.
    Follower(folder, name, PROJECT).finish()


LOSSES = [(10, 10.0), (20, 20.0), (30, 30.25), (40, 40.5), (50, 50.5)]


def logged_losses(folder):
    """Return (step, loss) of metrics.jsonl."""
    lines = map(json.loads, read_lines(folder / "metrics.jsonl"))
    return [(line["step"], line["loss"]) for line in lines]


def events(folder):
    """The folder as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(folder, key="train/loss"):
    return [(event.step, event.value) for event in events(folder).Scalars(key)]


def test_tensorboard_matches_metrics_jsonl(folder):
    a_whole_run(folder, "tensorboard")
    assert scalars(folder) == LOSSES == logged_losses(folder)
    read = events(folder)
    assert set(read.Tags()["scalars"]) == {"train/loss", "train/lr", "train/data_wait_s", *ERRORS}
    assert {key: [(e.step, e.value) for e in read.Scalars(key)] for key in ERRORS} == {
        key: [(50, value)] for key, value in ERRORS.items()
    }
    config = json.loads(read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode().strip("`json\n"))
    assert config == {**json.loads((folder / "config.json").read_text()), "code_revision": tracking.code_revision()}


def test_tensorboard_has_curves_by_robot_not_by_task(folder):
    nested = {"loss_by_robot": {"a": 1.0, "b": None}, "eval_loss_by_task": {"pick it up": 1.0}}
    append_line(folder / "metrics.jsonl", json.dumps({"step": 50, "loss": 2.0, **nested}))
    write_json(folder / "evaluation.json", EVALUATION)
    write_json(folder / "run.json", {"steps": 100})
    Follower(folder, "tensorboard", PROJECT).finish()
    assert scalars(folder, "train/loss_by_robot/a") == [(50, 1.0)]
    assert set(events(folder).Tags()["scalars"]) == {"train/loss", "train/loss_by_robot/a"}


def test_partial_metrics_line_is_logged_once_complete(folder):
    follower = Follower(folder, "tensorboard", PROJECT)
    logged(folder, 10)
    complete = (folder / "metrics.jsonl").read_text()
    for part in ("", complete[:9], complete, "", complete):
        (folder / "metrics.jsonl").write_text(part)
        follower.log_new()
    follower.finish()
    assert scalars(folder) == [(10, 10.0)]


# A process of its own for each: they read the environment when they are imported, and leave threads behind.
READ_BACK = {
    "trackio": """
import trackio
from trackio.sqlite_storage import SQLiteStorage

[run] = trackio.Api().runs(PROJECT)
points = [(line["step"], key, value) for line in SQLiteStorage.get_logs(PROJECT, run.name)
          for key, value in line.items() if "/" in key]
found = [points, run.config["lr"], run.config["code_revision"]]
""",
    "mlflow": """
from mlflow.tracking import MlflowClient

client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
[run] = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
points = [(p.step, key, p.value) for key in run.data.metrics for p in client.get_metric_history(run.info.run_id, key)]
found = [points, float(run.data.params["lr"]), run.data.params["code_revision"]]
""",
    # The files of one id that `wandb sync` would send, one after the other. wandb has no public reader for them:
    # records in LevelDB's log format (blocks of 32 KiB; checksum, length, type of each piece) after 7 bytes of its own.
    "wandb": """
import struct
from wandb.proto import wandb_internal_pb2

def records(data):
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""

points, config, ids = [], {}, set()
for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.parent.name):
    for record in records(path.read_bytes()):
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
        if record.run.run_id:
            ids.add(record.run.run_id)
        row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
        points += [(record.history.step.num, key, value) for key, value in row.items() if "/" in key]
assert len(ids) == 1, ids
found = [points, config["lr"], config["code_revision"]]
""",
}
PROGRAM = """
import json, sys
from tests.report import test_tracking
from tests.report.test_tracking import PROJECT
from vla_finetuning.buckets.mirror import as_path, fetched, synced

folder, tracker, read_back, part = as_path(sys.argv[1]), *sys.argv[2:]
with synced(folder):
    getattr(test_tracking, part)(folder, tracker)
with fetched(folder) as folder:
    exec(read_back)
print("FOUND " + json.dumps(found))
"""


def read_after(part, folder, name, **environment):
    """Return the points that a tracker has after a part of a run, its learning rate, and the revision."""
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WANDB_MODE": "offline"}
    environment |= {"MLFLOW_TRACKING_URI": ""}
    command = [sys.executable, "-c", PROGRAM, str(folder), name, READ_BACK[name], part]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (printed,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(printed.removeprefix("FOUND "))


@pytest.mark.parametrize("in_bucket", [False, pytest.param(True, marks=pytest.mark.gate)])
@pytest.mark.parametrize("name", READ_BACK)
def test_trackers_match_metrics_jsonl(folder, tmp_path, monkeypatch, name, in_bucket):
    """The last point of a step counts, in one offline run across two machines."""
    if name != "trackio":  # which is among the requirements
        pytest.importorskip(name, reason=f"pip install {PACKAGES.get(name, name)}")
    if in_bucket:
        monkeypatch.delenv("TRACKIO_DIR", raising=False)
        with runs_bucket():
            Bucket(bucket_folder := f"s3://runs/{name}/run7").write(
                "config.json", (folder / "config.json").read_bytes()
            )
            for part in ("until_it_stops", "resumed_to_the_end"):
                (machine := tmp_path / part).mkdir()
                points, lr, revision = read_after(part, bucket_folder, name, TMPDIR=str(machine))
                shutil.rmtree(machine)
    else:
        directory = str(tmp_path / "trackio")
        part = "a_whole_run_after_one_without_lines" if name == "trackio" else "a_whole_run"
        points, lr, revision = read_after(part, folder, name, TRACKIO_DIR=directory)
        assert logged_losses(folder) == LOSSES
    losses = {step: value for step, key, value in points if key == "train/loss"}
    assert list(losses.items()) == LOSSES
    errors = [(step, key, value) for step, key, value in points if key.startswith("eval")]
    assert sorted(errors) == [(50, key, value) for key, value in sorted(ERRORS.items())]
    assert (lr, revision) == (2.5e-5, tracking.code_revision())


def test_tracked_run_in_bucket_is_resumed_elsewhere(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    with runs_bucket():
        bucket_folder = "s3://runs/elsewhere/run7"
        Bucket(bucket_folder).write("config.json", (folder / "config.json").read_bytes())
        for machine, part in (("one", until_it_stops), ("two", resumed_to_the_end)):
            forget()
            (tmp_path / machine).mkdir()
            monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path / machine))
            with synced(as_path(bucket_folder)) as copy:
                part(copy, "tensorboard")
            assert os.environ.pop("TRACKIO_DIR") == str(copy / "trackio")  # so that Trackio's runs travel too
            tracking.time.sleep(1)  # machines are not changed within a second
        with fetched(copy) as downloaded:
            assert scalars(downloaded) == LOSSES == logged_losses(copy)


def test_tracker_data_reaches_bucket_before_tracking_json(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path))
    with runs_bucket() as faults:
        forget()
        run_folder = as_path("s3://runs/killed/run7")
        (run_folder / "config.json").write_text((folder / "config.json").read_text())
        follower = Follower(run_folder, "tensorboard", PROJECT)
        logged(run_folder, 10, 20)
        follower.log_new()
        follower._tracker.close()
        faults.choose = lambda request: "403" if "tracking.json" in request.url else None
        with pytest.raises(StorageError):
            push(run_folder)
        faults.choose = lambda request: None
        forget()  # the driver was killed
        with synced(as_path("s3://runs/killed/run7")) as run_folder:
            Follower(run_folder, "tensorboard", PROJECT).finish()
        with fetched(run_folder) as downloaded:
            assert scalars(downloaded) == [(10, 10.0), (20, 20.0)]


class FakeTracker:
    """A tracker that records points, and fails on request."""

    run_id = "one"

    def __init__(self, folder, project, *_):
        self.project, self.points, self.failing, self.closed = project, [], False, False
        self.arrived = threading.Event()
        FakeTracker.last = self

    def log(self, values, step):
        if self.failing:
            raise ConnectionError("no route")
        self.points.append((step, values["train/loss"]))
        self.arrived.set()

    def close(self):
        self.closed = True


@pytest.fixture
def fake_tracker(monkeypatch):
    monkeypatch.setitem(tracking.TRACKERS, "wandb", FakeTracker)
    monkeypatch.setattr(tracking, "require_tracker", lambda name: None)


def test_steps_retrained_without_tracker_are_sent_again(folder, fake_tracker):
    logged(folder, 10, 20)
    Follower(folder, "wandb", PROJECT).finish()
    resumed(folder, 10)
    logged(folder, 20, attempt=1)
    Follower(folder, "wandb", PROJECT).finish()
    assert FakeTracker.last.points == [(10, 10.0), (20, 20.25)]


def test_tracker_failure_is_warning_and_missed_points_are_sent(folder, fake_tracker, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "POLL_S", 0.01)
    with caplog.at_level(logging.WARNING), track(folder, "wandb", PROJECT):
        logged(folder, 10)
        assert FakeTracker.last.arrived.wait(60)  # while the run goes on
        FakeTracker.last.failing = True
        logged(folder, 20)
    assert FakeTracker.last.closed and FakeTracker.last.points == [(10, 10.0)]
    remedy = f"no route; `python -m vla_finetuning.report.tracking {folder} --track wandb` sends what is missing"
    assert caplog.text.count(remedy) == 1
    assert tracking.main([str(folder), "--track=wandb"]) == 0
    assert FakeTracker.last.points == [(20, 20.0)] and FakeTracker.last.project == "robots"


@pytest.mark.parametrize("name", get_args(TrackerName))
def test_missing_tracker_package_is_reported_before_writing(folder, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    before = sorted(folder.rglob("*"))
    with (
        pytest.raises(ValueError, match=f"^--track {name}: .*; pip install {PACKAGES.get(name, name)}"),
        track(folder, name, "p"),
    ):
        pass
    assert sorted(folder.rglob("*")) == before


def test_tracker_that_cannot_open_is_error(folder, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError("no API key")

    monkeypatch.setattr(tracking, "require_tracker", lambda name: None)
    monkeypatch.setitem(tracking.TRACKERS, "wandb", refuse)
    assert tracking.main([str(folder), "--track=wandb"]) == 1
    assert "--track wandb: cannot be opened: PermissionError: no API key" in capsys.readouterr().err
    monkeypatch.setattr(program, "require_tracker", lambda name: None)
    started, _, _ = setting = in_process.make_setting(tmp_path / "new")
    for empty in (program.empty, refuse):  # then the same command may start again
        monkeypatch.setattr(program, "empty", empty)
        assert vla.main(in_process.flags(setting, track="wandb")) == 2
        assert "--track wandb: cannot be opened: PermissionError: no API key" in capsys.readouterr().err
        assert (started / "run").exists() == (empty is refuse)


def test_code_revision_without_git_is_digest(monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert re.fullmatch("sha256:[0-9a-f]{64}", tracking.code_revision())
