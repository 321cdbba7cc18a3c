"""The program on runs in a bucket with planted faults, against a run on a disk; `check_rows` counts every row."""

import json
import re
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import value
import vla
from diagnostics import check_rows
from tests import broken, clusters
from tests.broken import assert_same_weights, make_setting, resumed_from, run_with, weights
from tests.buckets import Bucket, forget
from tests.loopback import SECRET
from tests.planted import Fault
from tests.tiny import make_base
from vla_finetuning.buckets.mirror import as_path, pull
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.files import read_json, read_lines
from vla_finetuning.run.attempts import attempts
from vla_finetuning.run.checkpoint import latest_checkpoint
from vla_finetuning.run.lease import LOCK_NAME

STEPS = 12
short_folder = broken.short_folder
flags = partial(broken.flags, **{"steps": STEPS, "scaling.max_failures": 1})
pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def setting(faults, tmp_path_factory):
    return make_setting(tmp_path_factory.mktemp("bucket_faults"))


@pytest.fixture
def cluster(faults):
    """One whose processes find the bucket."""
    clusters.start()
    yield
    clusters.stop()


@pytest.fixture(autouse=True)
def undone(faults):
    faults.requests.clear()
    yield
    faults.choose = lambda request: None


@pytest.fixture(scope="module")
def undisturbed(setting, faults):
    """The same run on a disk."""
    clusters.start()
    assert vla.main(flags(setting, "undisturbed")) == 0
    clusters.stop()
    return setting[0] / "undisturbed"


def assert_every_row_once(url):
    """And a line for each step."""
    assert check_rows.main([url]) == 0
    output_dir = copy_of(url)
    steps = [json.loads(line)["step"] for line in read_lines(output_dir / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))


def copy_of(url):
    """Return what a new process finds in the bucket."""
    forget()
    pull(as_path(url))
    return as_path(url)


def assert_nearly_same_weights(output_dir, other):
    """Of parameters in parts, whose sums have another order."""
    expected = weights(other)
    assert all(torch.allclose(value, expected[name], atol=1e-4) for name, value in weights(output_dir).items())


def test_fsdp2_run_in_bucket_survives_kill_during_checkpoint(undisturbed, cluster, setting, faults, capfd):
    """Both ranks write parts; those of the killed attempt never become a checkpoint."""
    url = "s3://runs/killed"

    def slow(request):
        if request.method == "PUT" and "step_00000008/attempt-00000" in request.url:
            time.sleep(8)

    faults.choose = slow
    argv = flags(setting, url, **{"scaling.strategy": "fsdp2"})
    assert run_with(argv, Fault("kill", step=8, settled=False)) == 0
    folder = copy_of(url)
    assert resumed_from(folder) == [0, 4]
    names = {"/".join(name.split("/")[:2]) for name in Bucket(f"{url}/checkpoints").names() if name.startswith("step")}
    # What was under way when its process was killed may arrive after the sweep.
    assert names - {"step_00000008/attempt-00000"} == {
        f"step_{step:08d}/{inside}" for step in (8, 12) for inside in ("attempt-00001", "state.json")
    }
    assert files_of(folder, 12) == {
        f"{kind}-0000{part}-of-00002.safetensors" for kind in ("trainable", "optimizer") for part in (1, 2)
    }
    assert_every_row_once(url)
    folder = copy_of(url)
    assert_nearly_same_weights(folder, undisturbed)
    assert "<html" in (folder / "report.html").read_text().lower()
    printed = "".join(capfd.readouterr())
    assert SECRET not in printed
    assert not any(SECRET in file.read_text() for file in (folder / "config.json", folder / "run.json"))


def files_of(folder, step):
    return set(read_json(folder / "checkpoints" / f"step_{step:08d}" / "state.json")["files"])


def started(argv, node, *of_run):
    """The program on a machine with that disk, and a cluster of its own."""
    node.mkdir(exist_ok=True)
    own = {"TMPDIR": str(node), "RAY_TMPDIR": str(node), "TEST_LEASE": "[12.0, 2.0]"}
    return broken.started(argv, *of_run, address="local", **own)


def test_bucket_run_resumes_on_another_machine_after_driver_kill(setting, faults, undisturbed, short_folder):
    """Meanwhile a second driver is refused; later the store is away for half a minute, and credentials expire."""
    url, disks = "s3://runs/moved", Path(short_folder)
    folder = as_path(url)
    argv, waits = [*flags(setting, url), "--resume=auto"], Fault("wait", step=6)
    first = started(argv, disks / "one", waits)
    lines = []
    threading.Thread(target=lambda: lines.extend(first.stdout), daemon=True).start()
    while latest_checkpoint(folder / "checkpoints") is None:
        assert first.poll() is None, "".join(lines)
        time.sleep(0.2)
    second = started([f"--output_dir={url}", "--resume"], disks / "two")
    printed, _ = second.communicate(timeout=300)
    assert second.returncode == 2 and "a run is going on there, driven by process" in printed, printed
    first.kill()
    first.wait()
    assert not json.loads(Bucket(url).read(LOCK_NAME)).get("released")

    away = list[float]()

    def away_for_a_while(request):
        if "attempts.jsonl" in request.url and request.method == "PUT" or away:
            away.append(time.monotonic())
            since_s = away[-1] - away[0]
            return "503" if since_s < 30 else "expired" if since_s < 35 else None

    faults.choose = away_for_a_while
    third = started(argv, disks / "three")
    printed, _ = third.communicate(timeout=500)
    assert third.returncode == 0, printed
    assert len(attempts(copy_of(url))) == 2 and away[-1] - away[0] > 35
    assert_every_row_once(url)
    assert_same_weights(copy_of(url), undisturbed)


def test_two_nodes_resume_from_local_parts_after_store_outage(
    undisturbed, setting, faults, short_folder, monkeypatch, capfd
):
    """Two nodes with disks of their own write parts of a checkpoint; the run resumes from them."""
    url, disks = "s3://runs/two_nodes", [Path(short_folder, name) for name in ("a", "b")]
    monkeypatch.setenv("PYTHONPATH", str(clusters.ROOT))
    with clusters.of_several_nodes(num_cpus=0, include_dashboard=False, object_store_memory=3 * 10**8) as nodes:
        for disk in disks:  # each with room for one worker, and a read task
            disk.mkdir()
            nodes.add_node(num_cpus=3, object_store_memory=3 * 10**8, env_vars={"TMPDIR": str(disk)})
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        dead = []

        def dies(request):
            if dead:
                return "503"
            if "step_00000004/state.json" in request.url and request.method == "PUT":
                dead.append(request)  # after this one
            return None

        faults.choose = dies
        changes = {"scaling.strategy": "fsdp2", "scaling.cpus_per_worker": 2}
        monkeypatch.setenv("VLA_STORE_TIMEOUT_S", "40")
        assert vla.main(flags(setting, url, **changes)) == 1
        printed = capfd.readouterr().err
        assert "error: no checkpoint has reached s3://runs/two_nodes for" in printed
        kept = [sorted(file.name for file in disk.rglob("*.safetensors")) for disk in disks]
        assert sorted(kept) == [[f"{kind}-0000{n}-of-00002.safetensors" for kind in ("optimizer", "trainable")]
                                for n in (1, 2)]  # fmt: skip
        assert set(re.search(r"is in (.*): --resume", printed)[1].split(", ")) == {
            f"{printed.split('is in ')[1].split(':')[0]}:{file.parents[3]}"
            for disk in disks
            for file in disk.rglob("trainable*.safetensors")
        }
        faults.choose = lambda request: None
        assert latest_checkpoint(copy_of(url) / "checkpoints").name == "step_00000004"
        assert vla.main([f"--output_dir={url}", "--resume"]) == 0
        folder = copy_of(url)
        assert resumed_from(folder) == [0, STEPS]
        assert files_of(folder, STEPS) == {*kept[0], *kept[1]}
        assert not [file for disk in disks for file in disk.rglob("*.safetensors")], "nodes keep nothing"
        assert_every_row_once(url)
        assert_nearly_same_weights(copy_of(url), undisturbed)


def test_value_function_and_recap_run_in_a_bucket(setting, cluster):
    folder, root, _ = setting
    (folder / "outcomes.json").write_text(json.dumps(dict(enumerate([1, 0, 1, 0, 1, 0]))))
    labels_run = "s3://runs/value"
    argv = flags(setting, labels_run, steps=2, save_freq=1, **{"outcome.success": f"@{folder / 'outcomes.json'}"})
    argv = [flag for flag in argv if not flag.startswith(("--train.mode", "--lr", "--run.record"))]
    assert value.main([*argv, "--value.horizon=3", "--dataset.eval_split=0"]) == 0
    assert {"labels.parquet", "report.html", "finished.json"} <= Bucket(labels_run).names()
    learned, meta = "s3://runs/learned_from_labels", load_metadata(root)
    words = [*meta.tasks.values(), "Advantage: positive", "Advantage: negative"]
    base = make_base(folder / "recap_base", meta, chunk_size=8, tasks=words)
    changes = {"steps": 2, "policy.path": base, "recap.labels": f"{labels_run}/labels.parquet"}
    assert vla.main(flags(setting, learned, **changes)) == 0
    assert "pretrained_model/model.safetensors" in Bucket(learned).names()
