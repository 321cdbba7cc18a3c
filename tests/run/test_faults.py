"""Runs that are broken on purpose: the real program on a small dataset, and what `check_rows` says of it afterwards.

`make test-faults` leaves outputs/faults.xml, which says of each test how long a run took until it trained again after
its faults (`recovered_s`), and how many steps it had to train anew (`steps_lost`).
"""

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import boto3
import psutil
import pytest
import torch
from safetensors.torch import load_file

import vla
from diagnostics import check_rows
from tests import broken, planted_data
from tests.broken import SAVE_FREQ, STEPS, assert_same_weights, flags, make_setting, resumed_from, run_with, started
from tests.loopback import Faults, Proxy, s3_server, serving
from tests.planted import KILLED, Fault
from tests.planted_data import DataFault
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.files import read_lines
from vla_finetuning.run.attempts import ATTEMPTS_NAME
from vla_finetuning.run.folder import LOG_NAME, METRICS_NAME, attempts
from vla_finetuning.run.progress import recorded_rows
from vla_finetuning.training import coordinators

short_folder = broken.short_folder
# Three runs and a cluster in one test take their time on a machine that is busy.
# `make test` has one of them, in test_vla.py.
pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_setting(tmp_path_factory.mktemp("faults"))


checked = []


@pytest.fixture(autouse=True)
def measured(record_property):
    """What the runs of a test that were checked have cost."""
    checked.clear()
    yield
    for folder in checked:
        record_property("recovered_s", planted_data.recovered_s(folder))
        record_property("steps_lost", steps_lost(folder, resumed_from(folder)))


def assert_every_row_once(folder):
    checked.append(folder)
    assert check_rows.main([str(folder)]) == 0


@pytest.fixture(scope="module")
def undisturbed(setting, ray_cluster):
    assert run_with(flags(setting, "undisturbed")) == 0
    folder = setting[0] / "undisturbed"
    assert_every_row_once(folder)
    return folder


def test_checkpoint_pause_is_logged(undisturbed):
    """With the log step that comes after each."""
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["checkpoint_pause_s"] > 0] == [5, 9, 13, 17]


def test_run_survives_five_killed_workers(setting, undisturbed):
    """The steps since the last checkpoint are lost, and no more; one that is still being written does not count."""
    rng = random.Random(10)
    # Each kill comes after the first step of its attempt and before the run's last.
    faults, first = [], 0
    for attempt in range(5):
        step = rng.randrange(first + 1, min(first + SAVE_FREQ + 3, STEPS))
        faults.append(Fault("kill", step=step, rank=rng.randrange(2), attempt=attempt, settled=attempt == 0))
        first = step // SAVE_FREQ * SAVE_FREQ
    assert run_with(flags(setting, "five", **{"scaling.max_failures": 5}), *faults) == 0
    folder = setting[0] / "five"
    assert len(attempts(folder)) == 6
    for fault, start in zip(faults, resumed_from(folder)[1:], strict=True):
        newest = fault.step // SAVE_FREQ * SAVE_FREQ
        assert start == newest or not fault.settled and start == newest - SAVE_FREQ
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


def test_killed_data_processes_change_no_row(setting, undisturbed):
    """Ray runs a read task again, and nothing else changes. All ranks start anew if the coordinator is gone."""
    folder = setting[0] / "data"
    with (
        killing("ray::ReadLeRobot", 2, folder) as tasks,
        killing("ray::SplitCoordinator", 1, folder, once=lambda: len(tasks) == 2 and waits(folder)) as coordinators,
    ):
        assert run_with(flags(setting, "data", **{"scaling.max_failures": 1}), WAIT) == 0
    assert len(tasks) == 2 and len(coordinators) == 1
    _, second = resumed_from(folder)
    assert second >= 4
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


# A rank waits before this step, after the first checkpoint, until a coordinator is killed.
WAIT = Fault("await_kill", step=6)


def waits(folder):
    """Return whether WAIT is reached: the step before it is done."""
    return len(planted_data.noted(folder, "step")) >= WAIT.step


@contextlib.contextmanager
def killing(title, count, folder, once=lambda: True):
    """Kill `count` processes of that title, of the tests' own cluster, in the block; yield the list of their pids."""
    killed = []
    over = threading.Event()

    def kill():
        while len(killed) < count and not over.is_set():
            for process in psutil.Process().children(recursive=True) if once() else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    is_due = len(killed) < count and process.pid not in killed
                    if is_due and title in " ".join(process.cmdline()):
                        process.kill()
                        planted_data.note(folder, "fault")
                        killed.append(process.pid)
            time.sleep(0.02)
        if title == "ray::SplitCoordinator":
            (folder / KILLED).touch()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def test_several_coordinators_deal_the_rows_of_one(setting, undisturbed, monkeypatch):
    """One coordinator of a rank each; one is killed, and later a rank."""
    folder = setting[0] / "several"
    monkeypatch.setattr(coordinators, "RANKS_PER_COORDINATOR", 1)
    with killing("ray::SplitCoordinator", 1, folder, once=lambda: waits(folder)) as killed:
        changes = {"scaling.max_failures": 2, "scaling.cpus_per_read_task": 0.5}
        assert run_with(flags(setting, "several", **changes), WAIT, Fault("kill", step=14, attempt=1)) == 0
    assert len(killed) == 1
    assert len(resumed_from(folder)) == 3 and resumed_from(folder)[2] == 12
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


def test_hanging_read_restarts_the_attempt(setting, undisturbed, monkeypatch):
    """Noticed by the training process that waits; the new attempt reads anew."""
    monkeypatch.setenv("VLA_BATCH_TIMEOUT_S", "30")
    assert run_with(flags(setting, "hangs", **{"scaling.max_failures": 1}), DataFault("hang", position=62)) == 0
    folder = setting[0] / "hangs"
    assert resumed_from(folder) == [0, 8]  # position 62 belongs to step 11
    log = (folder / LOG_NAME).read_text()
    # What Ray holds back until a block is followed by the next one is waited for as well.
    assert re.search(r"no data for 30 s \(VLA_BATCH_TIMEOUT_S\): .* Waited for a batch of step (9|10|11) on ra", log)
    assert f"; rows by `index`: {setting[1]}: " in log
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


def test_deterministic_error_ends_the_run(setting, undisturbed, capsys, monkeypatch):
    """One rank finds it while the other waits for it in a collective."""
    folder = setting[0] / "error"
    monkeypatch.setenv("VLA_COLLECTIVE_TIMEOUT_S", "600")
    allowed = {"scaling.max_failures": 3}
    started = time.monotonic()
    assert run_with(flags(setting, "error", **allowed), Fault("bad_input", step=6)) == 1
    assert time.monotonic() - started < 200
    assert "\nerror: planted: this row is bad\n" in capsys.readouterr().err
    assert resumed_from(folder) == [0]

    again = [f"--output_dir={folder}", "--resume"]
    assert run_with(again, *(Fault("bug", step=6, attempt=attempt) for attempt in range(1, 5))) == 1
    assert "\nerror: RuntimeError: planted: process " in capsys.readouterr().err
    assert resumed_from(folder) == [0, 4, 4]  # its second time from the same checkpoint
    assert vla.main(again) == 0
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


def test_frozen_worker_is_restarted(setting, undisturbed, monkeypatch):
    monkeypatch.setenv("VLA_WORKER_TIMEOUT_S", "5")
    assert run_with(flags(setting, "frozen", **{"scaling.max_failures": 1}), Fault("freeze", step=10)) == 0
    folder = setting[0] / "frozen"
    assert resumed_from(folder) == [0, 8]
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


def test_nan_loss_of_one_rank_skips_the_step(setting, undisturbed):
    assert run_with(flags(setting, "nan"), Fault("nan", step=5)) == 0
    folder = setting[0] / "nan"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["nonfinite_steps"] for line in lines] == [int(line["step"] == 6) for line in lines]
    for name, value in load_file(folder / "pretrained_model" / "model.safetensors").items():
        assert torch.isfinite(value).all(), name
    assert_every_row_once(folder)


@pytest.fixture(scope="module")
def interrupted(setting, ray_cluster):
    """A run that a kill has ended, its newest checkpoint of step 8. Each test goes on with a copy, somewhere else."""
    assert run_with(flags(setting, "interrupted"), Fault("kill", step=10)) == 1
    return setting[0] / "interrupted"


@pytest.mark.parametrize("workers", [1, 3])
def test_resume_with_another_number_of_workers(interrupted, workers, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "copy")
    changes = [f"--scaling.num_workers={workers}", f"--batch_size={6 // workers}"]
    assert vla.main([f"--output_dir={folder}", "--resume", *changes]) == 0
    assert [line["world_size"] for line in attempts(folder)] == [2, workers]
    assert resumed_from(folder) == [0, 8]
    assert_every_row_once(folder)


def test_damaged_mp4_is_skipped(setting, undisturbed, capsys):
    root = shutil.copytree(setting[1], setting[0] / "damaged")
    meta = load_metadata(root)
    camera = meta.video_keys[0]
    path = root / meta.video_files[camera][meta.episode_video_file[camera][2]]
    content = path.read_bytes()
    index = content.rindex(b"moov") + 4
    path.write_bytes(content[:index] + bytes(len(content) - index))  # its size is right: found only when it is read
    changes = {"dataset.root": root, "dataset.on_error": "skip"}
    assert vla.main(flags(setting, "too_many", **changes)) == 1
    printed = capsys.readouterr().err
    assert "rows could not be read and were skipped, which is more than --dataset.max_skipped=0.01" in printed
    assert vla.main(flags(setting, "skipped", **changes, **{"dataset.max_skipped": 0.5})) == 0
    assert f"WARNING {root}: episode 2 is skipped: " in capsys.readouterr().err
    folder = setting[0] / "skipped"
    assert_every_row_once(folder)
    assert "skipped because they cannot be read" in capsys.readouterr().out
    recorded = list(recorded_rows(folder))
    skipped = {index for line in recorded for _, index in line["skipped"]}
    first = int(meta.episode_start[2])
    assert set(range(first, first + int(meta.episode_length[2]))) <= skipped
    assert not skipped & {index for line in recorded for _, index in line["rows"]}


def wait_for_step(folder, step, process):
    """Of the newest attempt."""
    try:
        trains_on(process, folder, step - 1)
    except RuntimeError as error:
        raise AssertionError(process.communicate()) from error


def test_sigterm_saves_a_checkpoint_and_ends_the_run(setting, undisturbed):
    folder = setting[0] / "signalled"
    changes = {"steps": 2000, "save_freq": 1000}  # it would not be done by itself
    process = started(flags(setting, "signalled", **changes))
    wait_for_step(folder, 5, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 3, printed
    assert "--resume goes on from there" in printed
    stopped_at = int((folder / "metrics.jsonl").read_text().splitlines()[-1].split(",")[0].split(":")[1])
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == [f"step_{stopped_at:08d}"]
    assert not (folder / "pretrained_model").exists()
    assert_every_row_once(folder)


def test_second_sigterm_ends_the_run_at_once(setting, undisturbed):
    folder = setting[0] / "impatient"
    # No log step comes at which the first one would be heard.
    process = started(flags(setting, "impatient", steps=10**6, log_freq=10**6, save_freq=5))
    while not list((folder / "checkpoints").glob("step_*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    while not (folder / "stop").exists():
        time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, printed


def test_run_survives_broken_checkpoints(setting, undisturbed, capsys):
    """One after the other in one run; each time it goes on from the one before."""
    folder = setting[0] / "checkpoints"
    again = [f"--output_dir={folder}", "--resume"]

    def present():
        return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())

    # The disk is full when the one after step 8 is written.
    assert run_with(flags(setting, "checkpoints"), Fault("full_disk", step=6, rank=0)) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(f"error: checkpoint not written to {folder}/checkpoints/step_00000008 (")
    assert not list((folder / "checkpoints" / "step_00000008").rglob("*.*")) and "step_00000004" in present()

    # Everything dies when the one after step 16 is written, but not yet in its place.
    process = started(again, Fault("die_at_commit", step=13, rank=0, attempt=1))
    process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL
    assert present() == ["step_00000008", "step_00000012", "step_00000016"]

    # A bit of the newest one flips.
    (path,) = (folder / "checkpoints" / "step_00000012").rglob("trainable.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert vla.main(again) == 0
    assert resumed_from(folder) == [0, 4, 8]
    assert (folder / "checkpoints" / "damaged_step_00000012").is_dir()
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


def test_data_task_out_of_memory_is_retried(setting, undisturbed, short_folder):
    """Ray kills it and runs it again; no training process is harmed."""
    memory, margin = psutil.virtual_memory(), planted_data.GREED_BYTES * 0.6
    if memory.available < 1.4 * planted_data.GREED_BYTES:
        pytest.skip(f"needs {1.4 * planted_data.GREED_BYTES / 1e9:.0f} GB of free memory")
    environment = {
        "RAY_TMPDIR": short_folder,
        "RAY_memory_usage_threshold": f"{(memory.total - memory.available + margin) / memory.total:.3f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    process = started(flags(setting, "greed"), DataFault("greed", position=62), address="local", **environment)
    printed, _ = process.communicate(timeout=280)
    assert process.returncode == 0, printed
    folder = setting[0] / "greed"
    assert resumed_from(folder) == [0]
    assert_every_row_once(folder)
    assert_same_weights(folder, undisturbed)


def test_run_reads_from_an_unreliable_object_store(setting, undisturbed, short_folder, monkeypatch):
    """Through a network that answers 503, resets, cuts off and stalls: the run does not even notice."""
    kinds = ["503", None, "reset", None, "cut", None, "stall", None, None]
    faults, done = Faults(), []

    def choose(request):
        kind = kinds[len(faults.requests) % len(kinds)] if request.attempt == 1 and request.method == "GET" else None
        if kind == "stall" and done.count("stall") == 3:  # each takes 4 s
            kind = None
        done.append(kind)
        return kind

    faults.choose = choose
    keys = {"AWS_ACCESS_KEY_ID": "canary", "AWS_SECRET_ACCESS_KEY": "canary", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    with s3_server() as endpoint, serving(Proxy(endpoint, faults)) as proxy:
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="robots")
        for path in setting[1].rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "robots", path.relative_to(setting[1]).as_posix())
        environment = {"RAY_TMPDIR": short_folder, "AWS_ENDPOINT_URL": proxy, "AWS_EC2_METADATA_DISABLED": "true"}
        environment["VLA_READ_TIMEOUT_S"] = "32"
        process = started(flags(setting, "store", **{"dataset.root": "s3://robots"}), address="local", **environment)
        printed, _ = process.communicate(timeout=280)
    assert process.returncode == 0, printed
    assert {"503", "reset", "cut", "stall"} <= set(done)
    folder = setting[0] / "store"
    assert resumed_from(folder) == [0]
    assert_same_weights(folder, undisturbed)
    # The metadata are in the bucket, which is gone: of the same rows as on the local disk.
    config = json.loads((folder / "config.json").read_text())
    config["dataset"]["root"] = str(setting[1])
    (folder / "config.json").write_text(json.dumps(config))
    assert_every_row_once(folder)


def test_second_run_in_the_same_folder_is_refused(setting, undisturbed, capsys):
    script = (
        "import sys; from pathlib import Path\n"
        "from vla_finetuning.run.folder import claim_folder\n"
        "with claim_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(undisturbed)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        before = sorted((p, p.stat().st_size) for p in undisturbed.rglob("*"))
        assert vla.main([f"--output_dir={undisturbed}", "--resume"]) == 2
        assert "a run is going on there; wait until it ends" in capsys.readouterr().err
        assert sorted((p, p.stat().st_size) for p in undisturbed.rglob("*")) == before
    finally:
        holder.communicate()


def steps_lost(output_dir, starts_at):
    """For each restart, how many steps were trained anew."""
    last = Counter()
    for path in (output_dir / "rows").glob("rank0.jsonl"):
        for line in map(json.loads, read_lines(path)):
            last[line["attempt"]] = max(last[line["attempt"]], line["step"])
    return [max(0, last[number] - resumed) for number, resumed in enumerate(starts_at[1:])]


def trains_on(driver, output_dir, step):
    """Wait until the run has logged a step beyond `step` in its newest attempt; returns the last step logged."""
    metrics, starts = output_dir / METRICS_NAME, output_dir / ATTEMPTS_NAME
    while True:
        # Until that attempt has opened the file, the void lines of the one before are there.
        opened = metrics.exists() and metrics.stat().st_mtime_ns > starts.stat().st_mtime_ns
        lines = read_lines(metrics) if opened else []
        last = json.loads(lines[-1])["step"] if lines else 0
        if last > step:
            return last
        assert driver.poll() is None, f"the program ended by itself, exit status {driver.returncode}"
        time.sleep(0.05)
