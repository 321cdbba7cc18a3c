"""Checkpoints of a run in a bucket, by the program's own writer, through a network that fails: no Ray."""

import json
import logging
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.buckets import Bucket, forget, other_process
from tests.in_process import Rank
from vla_finetuning.buckets import mirror
from vla_finetuning.buckets.mirror import address, as_path, keep_synced, pull, push
from vla_finetuning.buckets.store import StorageError, StoreAwayError, within
from vla_finetuning.environment import Timeouts
from vla_finetuning.files import append_line, read_lines
from vla_finetuning.run import checkpoint
from vla_finetuning.run.attempts import is_newest, start_attempt
from vla_finetuning.run.checkpoint import (
    OPTIMIZER,
    SPARE_BYTES,
    TRAINABLE,
    Progress,
    checkpoint_names,
    latest_checkpoint,
    load_checkpoint,
    load_progress,
    prune,
    set_aside_damaged,
)
from vla_finetuning.run.folder import checkpoint_to_resume
from vla_finetuning.run.recovery import recover_local_checkpoints, unsent_folder
from vla_finetuning.training.checkpoint_writer import CheckpointWriter

START = Progress(step=0, rows=0, stream={"seed": 0}, base={"digest": "x"}, mode="full", global_batch_size=8)


@pytest.fixture
def run(bucket_url):
    """Return this process's copy of a run's folder."""
    return as_path(bucket_url)


def on_node(folder, monkeypatch):
    """From now on this is a machine with that disk."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(folder))
    forget()


def elsewhere(run, folder, monkeypatch):
    """Return the copy of a run's folder that a process on another machine has."""
    url = address(run)
    on_node(folder, monkeypatch)
    return as_path(url)


def rows(run, step):
    """Write a line of rows, as a rank does."""
    (run / "rows").mkdir(exist_ok=True)
    append_line(run / "rows" / "rank0.jsonl", f"rows of step {step}")


class Training:
    """What trains, and its writer."""

    def __init__(self, run, attempt, steps=100, timeout_s=600.0, world=1):
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        self.state = {"a.weight": weight.data}, {"exp_avg.a.weight": torch.zeros(3, 4)}
        optimizer = SimpleNamespace(
            params=[weight], named=lambda: self.state[0], state=lambda: self.state[1], named_average=lambda: {}
        )
        self.job = job = SimpleNamespace(
            output_dir=run,
            checkpoints_dir=run / "checkpoints",
            steps=steps,
            timeouts=Timeouts(collective=60.0, store=timeout_s),
            start=START,
        )
        self.worker = Rank(world=world)
        self.writer = CheckpointWriter(job, optimizer, self.worker, attempt)

    def save(self, step):
        """The checkpoint of a step, and wait for it; its error, if any."""
        self.begin(step)
        self.writer.wait()
        self.worker.thread.join()
        return None if self.worker.errors.empty() else self.worker.errors.get()

    def begin(self, step):
        for kind in self.state:
            for tensor in kind.values():
                tensor.fill_(step)
        self.writer.save(replace(START, step=step, rows=8 * step))


def steps_in(run):
    """Return what is in the folders of checkpoints in the bucket."""
    return {"/".join(name.split("/")[:2]) for name in Bucket(address(run / "checkpoints")).names()}


def loaded(folder):
    """The value that all tensors of a checkpoint have."""
    trainable, optimizer = {"a.weight": torch.zeros(3, 4)}, {"exp_avg.a.weight": torch.zeros(3, 4)}
    progress = load_checkpoint(folder, trainable, optimizer)
    (value,) = set(torch.cat([*trainable.values(), *optimizer.values()]).unique().tolist())
    assert value == progress.step
    return progress


def test_bucket_checkpoint_loads_on_another_machine(run, faults, tmp_path, monkeypatch):
    training = Training(run, start_attempt(run, 0, 1))
    rows(run, 4)
    faults.requests.clear()
    assert training.save(4) is None
    puts = [r.path.partition("/run/")[2] for r in faults.requests if r.method == "PUT"]
    assert puts[0] == "rows/rank0.jsonl" and puts[-1] == "checkpoints/step_00000004/state.json"
    assert len(puts) == 4 and not list(tmp_path.rglob("*.safetensors"))
    training.writer.close()
    assert "last_checkpoint.json" in Bucket(address(run)).names()
    run = elsewhere(run, tmp_path / "other", monkeypatch)
    newest = latest_checkpoint(run / "checkpoints")
    assert newest == run / "checkpoints" / "step_00000004" and loaded(newest).rows == 32
    with monkeypatch.context() as without_download:
        without_download.setattr(checkpoint, "fetched", None)
        assert checkpoint_names(newest, OPTIMIZER) == {"exp_avg.a.weight"}
    assert not list((tmp_path / "other").rglob("*.safetensors")), "what was fetched is removed"


def test_too_small_node_disk_is_reported_before_the_first_step(run, tmp_path, monkeypatch):
    left = unsent_folder(run / "checkpoints" / "step_00000008")
    left.mkdir()  # of an earlier attempt
    free = SPARE_BYTES + 2 * 12 * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, free))
    Training(run, 0)
    assert not left.exists(), "its space is free before it is looked at"
    writers = "vla_finetuning.training.checkpoint_writer.first_replica"
    with monkeypatch.context() as sharded:  # writers of other nodes, which look by themselves
        sharded.setattr(writers, lambda param: [0, 1, 2, 3])
        Training(run, 0)
    free -= 1
    with pytest.raises(
        OSError, match=rf"no space for a checkpoint in {tmp_path}/.*; .* choose another --output_dir, or TMPDIR on"
    ):
        Training(run, 0)


def test_collective_timeout_covers_a_slow_upload(run, monkeypatch):
    groups = []
    gloo = SimpleNamespace(new_group=lambda backend, timeout: groups.append(timeout.total_seconds()))
    monkeypatch.setattr("vla_finetuning.training.checkpoint_writer.dist", gloo)
    monkeypatch.setattr("vla_finetuning.training.checkpoint_writer.SLOWEST_BYTES_PER_S", 4)
    Training(run, 0, timeout_s=600.0, world=2)
    assert groups == [60 + 600 + 2 * 12 * 4 / 4]


def test_checkpoint_without_manifest_is_ignored_and_removed(run, faults):
    training = Training(run, start_attempt(run, 0, 1))
    assert training.save(4) is None
    faults.choose = lambda request: "403" if "step_00000008/state.json" in request.url else None
    assert training.save(8) is None
    assert latest_checkpoint(run / "checkpoints").name == "step_00000004"
    faults.choose = lambda request: None
    assert steps_in(run) == {"step_00000004/attempt-00000", "step_00000004/state.json", "step_00000008/attempt-00000"}
    # The worker is killed here; the next attempt starts.
    assert set_aside_damaged(run / "checkpoints").name == "step_00000004"
    assert steps_in(run) == {"step_00000004/attempt-00000", "step_00000004/state.json"}
    again = Training(run, start_attempt(run, 4, 1))
    assert again.save(8) is None and loaded(latest_checkpoint(run / "checkpoints")).step == 8


def test_superseded_attempt_cannot_commit_to_the_bucket(run, monkeypatch):
    stale = Training(run, start_attempt(run, 0, 1))
    assert stale.save(4) is None
    copy = other_process(address(run))
    newer = Training(copy, start_attempt(copy, 4, 1))
    error = stale.save(8)
    assert isinstance(error, RuntimeError) and "another process has taken over this run" in str(error)
    assert latest_checkpoint(copy / "checkpoints").name == "step_00000004"

    # At once too where a file that both write, as metrics.jsonl, is the newer attempt's by now.
    keep_synced(run, partial(is_newest, run, 0), pulls=None)
    for folder, line in ((copy, "newer"), (run, "stale")):
        append_line(folder / "metrics.jsonl", line)
        if folder is copy:
            push(folder)
    error = stale.save(8)
    assert isinstance(error, RuntimeError) and "another process has taken over this run" in str(error)
    assert Bucket(address(run)).read("metrics.jsonl") == b"newer\n"
    (run / "metrics.jsonl").unlink()

    # It looked before the newer attempt began, and puts its manifest after.
    with monkeypatch.context() as patch:
        patch.setattr("vla_finetuning.training.checkpoint_writer.is_newest", lambda output_dir, attempt: True)
        assert stale.save(8) is None
    with pytest.raises(ValueError, match="not used, as the run was continued later from step 4"):
        load_progress(copy / "checkpoints" / "step_00000008")
    assert latest_checkpoint(copy / "checkpoints").name == "step_00000004"
    assert newer.save(8) is None  # in the place of the void one
    state = json.loads(Bucket(address(run)).read("checkpoints/step_00000008/state.json"))
    assert state["attempt"] == 1 and loaded(latest_checkpoint(copy / "checkpoints")).step == 8
    with monkeypatch.context() as patch:
        patch.setattr("vla_finetuning.training.checkpoint_writer.is_newest", lambda output_dir, attempt: True)
        assert isinstance(stale.save(8), RuntimeError)
    assert loaded(copy / "checkpoints" / "step_00000008").step == 8


def test_superseded_attempt_writes_nothing_on_a_disk(tmp_path):
    """Neither beside a later attempt of the run, nor in a run that was begun anew in its folder."""
    (tmp_path / "checkpoints").mkdir()
    first, second = (Training(tmp_path, start_attempt(tmp_path, 0, 1)) for _ in range(2))
    message = rf"{tmp_path}: another process has taken over this run; step_00000004 is not written"
    with pytest.raises(RuntimeError, match=message):
        raise first.save(4)
    assert not list(tmp_path.rglob("*.safetensors"))
    (tmp_path / "attempts.jsonl").unlink()
    start_attempt(tmp_path, 0, 1)
    with pytest.raises(RuntimeError, match=message):
        raise second.save(4)
    assert latest_checkpoint(tmp_path / "checkpoints") is None
    assert first.save(4) is None and loaded(latest_checkpoint(tmp_path / "checkpoints")).step == 4


@pytest.mark.parametrize("fault", ["slow", "expired"])
def test_temporary_store_failure_skips_one_checkpoint(run, faults, caplog, fault):
    """The checkpoint is given up with a warning and training goes on; the next one is there."""
    training = Training(run, start_attempt(run, 0, 1))
    assert training.save(4) is None
    # A request is given up after 0.5 s.
    faults.choose, training.job.timeouts = lambda request: fault, Timeouts(store=5)
    assert training.save(8) is None
    assert "the checkpoint of step 8 was not stored; training continues" in caplog.text
    faults.choose, training.job.timeouts = lambda request: None, Timeouts(store=600)
    assert training.save(12) is None
    assert loaded(latest_checkpoint(run / "checkpoints")).step == 12
    training.writer.close()
    assert "step_00000008/state.json" not in steps_in(run)
    assert "canary-secret" not in caplog.text


def test_slow_store_does_not_block_training(run, faults):
    training = Training(run, start_attempt(run, 0, 1))
    answers = threading.Event()
    faults.choose = lambda request: "reset" if not answers.wait(60) else None
    training.begin(4)
    assert training.worker.thread.is_alive(), "training goes on while the store is silent"
    answers.set()
    training.writer.wait()
    assert loaded(latest_checkpoint(run / "checkpoints")).step == 4


def stopped_by_the_store(run, faults):
    """A run of which step 4 is in the bucket, and what came after on the node: the error, and the step."""
    training = Training(run, start_attempt(run, 0, 1))
    assert training.save(4) is None
    faults.choose, training.job.timeouts = lambda request: "503", Timeouts(store=1)
    step, error = 4, None
    while error is None:
        step += 4
        rows(run, step)
        error = training.save(step)
    assert isinstance(error, StoreAwayError) and "VLA_STORE_TIMEOUT_S" in str(error)
    with pytest.raises(StoreAwayError):
        training.writer.close()
    url = address(run)
    forget()  # the driver of the next attempt
    training.job.output_dir = as_path(url)
    training.job.checkpoints_dir = as_path(url) / "checkpoints"
    faults.choose, training.job.timeouts = lambda request: None, Timeouts(store=60)
    return training, error, step


def here(wanted):
    """In place of `cluster.on_nodes`."""
    return {node: function() for node, function in wanted.items()}


def test_run_resumes_from_local_state_after_store_outage(run, faults, tmp_path, monkeypatch):
    """The run stops, and resumes from the checkpoint and log lines on the node."""
    training, error, step = stopped_by_the_store(run, faults)
    run = training.job.output_dir
    kept = unsent_folder(run / "checkpoints" / f"step_{step:08d}")
    assert {path.parent.name for path in kept.rglob("*.safetensors")} == {"attempt-00000"}
    copied = shutil.copytree(kept, kept.with_name(f"{kept.name}_good"))  # by a user who wants to be sure of it
    assert f"the state of step {step} is in " in str(error) and str(kept) in str(error)
    assert latest_checkpoint(run / "checkpoints").name == "step_00000004"
    lines = [f"rows of step {step}" for step in range(8, step + 1, 4)]

    faults.choose = lambda request: "503" if "state.json" in request.url and request.method == "PUT" else None
    with pytest.raises(StorageError), within(0.5):  # again away, at the last moment
        recover_local_checkpoints(training.job, ["a"], here)
    faults.choose = lambda request: None
    assert recover_local_checkpoints(training.job, ["a"], here) == step
    pull(run / "rows")
    assert read_lines(run / "rows" / "rank0.jsonl") == lines
    assert {path for path in tmp_path.rglob("*.safetensors")} == {*copied.rglob("*.safetensors")}
    assert recover_local_checkpoints(training.job, ["a"], here) is None
    run = elsewhere(run, tmp_path / "other", monkeypatch)
    assert loaded(latest_checkpoint(run / "checkpoints")).step == step
    assert set_aside_damaged(run / "checkpoints").name == f"step_{step:08d}"


def test_unusable_local_state_is_refused(run, faults, tmp_path):
    training, _, step = stopped_by_the_store(run, faults)
    run = training.job.output_dir
    (file,) = tmp_path.rglob(f"{OPTIMIZER}.safetensors")
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"state of step {step}.* lacks optimizer.safetensors: bring .* from step 4"):
        recover_local_checkpoints(training.job, ["a"], here)
    (tmp_path / "elsewhere").rename(file)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="optimizer.safetensors has changed since it was written"):
        recover_local_checkpoints(training.job, ["a"], here)
    assert latest_checkpoint(run / "checkpoints").name == "step_00000004"
    training.job.steps = 5
    with pytest.raises(ValueError, match=f"the state of step {step} in .* steps are done, and the run has 5: ask for"):
        recover_local_checkpoints(training.job, ["a"], here)
    training.job.start = replace(START, global_batch_size=9)
    with pytest.raises(ValueError, match=f"the state of step {step} in .*: a step has 9 rows"):
        recover_local_checkpoints(training.job, ["a"], here)


def test_failed_move_of_local_state_preserves_the_previous_one(run, faults, monkeypatch):
    """The earlier local state remains, and no `state.json` names files that are absent."""
    training = Training(run, start_attempt(run, 0, 1))
    faults.choose, training.job.timeouts = lambda request: "503", Timeouts(store=10)
    assert training.save(4) is None

    def killed(path, folder):
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("vla_finetuning.training.checkpoint_writer.keep_unsent", killed)
        assert str(training.save(8)) == "planted"
    faults.choose = lambda request: None
    assert recover_local_checkpoints(training.job, ["a"], here) == 4


def test_local_state_is_discarded_if_the_run_continued_without_it(run, faults, tmp_path):
    training, _, _ = stopped_by_the_store(run, faults)
    run = training.job.output_dir
    start_attempt(run, 4, 1)
    assert recover_local_checkpoints(training.job, ["a"], here) is None
    assert latest_checkpoint(run / "checkpoints").name == "step_00000004" and not list(tmp_path.rglob("*.safetensors"))


def test_node_without_rank_0_stores_files_until_a_newer_state_is_safe(run, faults, tmp_path, monkeypatch):
    """Rank 1 alone on its node, where no `state.json` is; what rank 0 says of each checkpoint is planted."""
    outcome, barrier = [], []
    gloo = SimpleNamespace(
        gather_object=lambda *_, group: None,
        broadcast_object_list=lambda said, group: said.__setitem__(slice(None), outcome),
        barrier=lambda group: [fail(group) for fail in barrier],
    )
    training = Training(run, start_attempt(run, 0, 1))
    monkeypatch.setattr("vla_finetuning.training.checkpoint_writer.dist", gloo)
    writer = training.writer
    writer._rank, writer._writers, writer._group = 1, [0, 1], object()
    monkeypatch.setattr("vla_finetuning.training.checkpoint_writer.is_sharded", lambda tensor: True)

    def left(step, *said, failing=()):
        outcome[:], barrier[:] = said, failing
        assert training.save(step) is None
        return sorted({int(path.parent.parent.name[-2:]) for path in tmp_path.rglob("*.safetensors")})

    def gone(group):
        raise RuntimeError("planted: rank 0 is gone")

    kept, appeared, neither = ("kept",), ("stored",), (None,)
    faults.choose, training.job.timeouts = (
        lambda request: "503" if "attempt-" in request.url else None,
        Timeouts(store=1),
    )
    assert left(4, *kept) == [4]
    assert left(8, *neither) == [4] and left(8, *kept, failing=[gone]) == [4, 8]
    assert left(8, *kept) == [8] and left(12, *kept) == [12]
    faults.choose = lambda request: None
    assert left(16, *appeared) == []
    assert left(20, *kept) == [20]
    Training(run, start_attempt(run, 16, 1))
    assert not list(tmp_path.rglob("*.safetensors")), "an attempt that began without it"


def test_last_checkpoint_may_use_the_whole_store_timeout(run, faults, caplog):
    """VLA_STORE_TIMEOUT_S, not a tenth of it."""
    training = Training(run, start_attempt(run, 0, 1), steps=4, timeout_s=10)
    back_at = time.monotonic() + 1.3
    faults.choose = lambda request: "503" if time.monotonic() < back_at else None
    assert training.save(4) is None and loaded(latest_checkpoint(run / "checkpoints")).step == 4
    assert time.monotonic() > back_at


def test_changed_checkpoint_files_in_the_bucket_are_detected(run, caplog):
    training, bucket = Training(run, start_attempt(run, 0, 1)), Bucket(address(run))
    for step in (4, 8):
        assert training.save(step) is None
    push(run)
    file, state = (
        f"checkpoints/step_00000008/attempt-00000/{TRAINABLE}.safetensors",
        "checkpoints/step_00000004/state.json",
    )
    whole = bucket.read(file)
    bucket.write(file, whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(ValueError, match="trainable.safetensors has changed since it was written"):
        loaded(run / "checkpoints" / "step_00000008")
    bucket.write(file, whole[:-1])
    with caplog.at_level(logging.WARNING):
        assert set_aside_damaged(run / "checkpoints").name == "step_00000004"
    assert "trainable.safetensors is missing or truncated" in caplog.text
    bucket.write(state, bucket.read(state).replace(b'"step": 4', b'"step": 5'))
    pull(run := other_process(address(run)))
    assert latest_checkpoint(run / "checkpoints") is None
    assert {file, state} <= bucket.names(), "what is damaged is left for a person to look at"
    with pytest.raises(ValueError, match="no checkpoint that can be used, but that of step 8 was written"):
        checkpoint_to_resume(run)


def test_prune_ignores_incomplete_bucket_checkpoint(run):
    """At a start it is not renamed, as on a disk."""
    training = Training(run, start_attempt(run, 0, 1))
    for step in (4, 8):
        assert training.save(step) is None
    Bucket(address(run)).delete(f"checkpoints/step_00000008/attempt-00000/{TRAINABLE}.safetensors")
    resumed = Training(run, start_attempt(run, 4, 1))
    assert resumed.save(5) is None
    prune(run / "checkpoints", keep=1, keep_best=0)
    assert latest_checkpoint(run / "checkpoints").name == "step_00000005"
    assert not any(name.startswith("step_00000004") for name in steps_in(run)), "deleted whole"


def test_checkpoint_is_committed_if_pruning_fails(run, caplog):
    training = Training(run, start_attempt(run, 0, 1))
    training.writer._prune = lambda: int("planted")
    assert training.save(4) is None
    assert "old checkpoints are not deleted: invalid literal for int" in caplog.text
    assert loaded(latest_checkpoint(run / "checkpoints")).step == 4


def test_checkpoints_can_be_copied_between_disk_and_bucket(run, tmp_path):
    from tests.run.test_checkpoint import make_checkpoint

    folder, bucket = make_checkpoint(tmp_path / "checkpoints", step=7), Bucket(address(run / "checkpoints"))
    for file in folder.rglob("*.*"):
        bucket.write(str(file.relative_to(folder.parent)), file.read_bytes())
    target = run / "checkpoints" / folder.name
    assert latest_checkpoint(run / "checkpoints") == target and load_progress(target) == load_progress(folder)
    training = Training(run, start_attempt(run, 7, 1))
    assert training.save(8) is None
    training.writer.close()
    copy = tmp_path / "copy"
    for name in Bucket(address(run)).names():  # as `aws s3 sync` does
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(Bucket(address(run)).read(name))
    assert loaded(latest_checkpoint(copy / "checkpoints")).step == 8
    assert (
        checkpoint_to_resume(copy) == set_aside_damaged(copy / "checkpoints") == copy / "checkpoints" / "step_00000008"
    )
