"""Runs whose home is a bucket, by the program itself, broken on purpose; `check_rows` says what became of every row."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vla
from diagnostics import check_rows
from tests import clusters, planted
from tests.buckets import SECRET, runs_bucket
from tests.datasets import make_dataset
from tests.planted import Fault
from tests.tiny import make_base
from vla_finetuning.bucket import place
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.files import read_json, read_lines
from vla_finetuning.node_disk import fetched
from vla_finetuning.run.attempts import attempts
from vla_finetuning.run.checkpoint import latest_checkpoint
from vla_finetuning.run.lease import LOCK_NAME

STEPS, SAVE_FREQ = 12, 4
pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def faults():
    with runs_bucket() as faults:
        yield faults


@pytest.fixture(scope="module")
def setting(faults, tmp_path_factory):
    """A folder, a dataset and a policy; and a cluster whose processes find the bucket."""
    folder = tmp_path_factory.mktemp("bucket_faults")
    root = make_dataset(folder / "dataset", episodes=(12, 7, 15, 1, 10, 9))
    base = make_base(folder / "base", load_metadata(root), chunk_size=8)
    clusters.start()
    yield folder, root, base
    clusters.stop()


@pytest.fixture(autouse=True)
def undone(faults):
    faults.requests.clear()
    yield
    faults.choose = lambda request: None


def flags(setting, output_dir, **changes):
    _, root, base = setting
    options = {
        "dataset.root": root,
        "policy.path": base,
        "output_dir": output_dir,
        "scaling.num_workers": 2,
        "scaling.cpus_per_worker": 0.5,
        "scaling.max_failures": 1,
        "batch_size": 3,
        "steps": STEPS,
        "log_freq": 1,
        "save_freq": SAVE_FREQ,
        "lr": 1e-3,
        "train.mode": "full",
        "train.deterministic": "true",
        "run.record_rows": "true",
        **changes,
    }
    return [f"--{k}={v}" for k, v in options.items()]


def run_with(argv, *of_run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vla, "make_trainer", partial(planted.make_trainer, faults=of_run))
        return vla.main(argv)


def weights(output_dir):
    with fetched(output_dir / "pretrained_model") as folder:
        return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(setting):
    """The weights of the same run on a disk."""
    folder = setting[0] / "undisturbed"
    assert vla.main(flags(setting, folder)) == 0
    return weights(folder)


def assert_same(output_dir, expected):
    """Every row as often as due, a line for each step, and the weights of the run on a disk."""
    assert check_rows.main([str(output_dir)]) == 0
    steps = [json.loads(line)["step"] for line in read_lines(output_dir / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    found = weights(output_dir)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert "<html" in (output_dir / "report.html").read_text().lower()


def test_a_worker_is_killed_during_a_checkpoint(setting, faults, undisturbed, capfd):
    """Both ranks write parts; those of the killed attempt never become a checkpoint."""
    folder = place("s3://runs/killed")

    def slow(request):
        if request.method == "PUT" and ".parts/step_00000008-00000" in request.url:
            time.sleep(8)

    faults.choose = slow
    argv = flags(setting, folder, **{"scaling.strategy": "fsdp2"})
    assert run_with(argv, Fault("kill", step=8, settled=False)) == 0
    assert [line["resumed_from_step"] for line in attempts(folder)] == [0, 4]
    names = {path.name for path in (folder / "checkpoints").glob("step_*")}
    parts = {name.split("/")[0] for name in (folder / "checkpoints" / ".parts").below()}
    assert names == {"step_00000008", "step_00000012"}
    # What was under way when its process was killed may arrive after the sweep.
    assert {f"{name}-00001" for name in names} == parts - {"step_00000008-00000"}
    assert read_json(latest_checkpoint(folder / "checkpoints") / "state.json")["files"].keys() == {
        f"{kind}-0000{part}-of-00002.safetensors" for kind in ("trainable", "optimizer") for part in (1, 2)
    }
    assert check_rows.main([str(folder)]) == 0
    found = weights(folder)
    assert all(torch.allclose(value, undisturbed[name], atol=1e-4) for name, value in found.items())
    printed = "".join(capfd.readouterr())
    assert SECRET not in printed
    assert not any(SECRET in file.read_text() for file in (folder / "config.json", folder / "run.json"))


DRIVER = """
import sys
from functools import partial
import vla
from tests.planted import Fault, make_trainer
from vla_finetuning.run import lease
lease.LEASE_S, lease.RENEW_S = 12.0, 2.0
vla.make_trainer = partial(make_trainer, faults=[Fault("wait", step=6)])
sys.exit(vla.main(sys.argv[1:]))
"""


@pytest.fixture
def short_folder():
    """Ray puts Unix sockets there, whose paths must be short."""
    path = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


def started(argv, node):
    """The program in a process of its own, on a machine with that disk, and a cluster of its own."""
    node.mkdir(exist_ok=True)
    own = {"RAY_ADDRESS": "local", "PYTHONPATH": str(clusters.ROOT), "TMPDIR": str(node), "RAY_TMPDIR": str(node)}
    environment = {**os.environ, **own}
    command = [sys.executable, "-c", DRIVER, *map(str, argv)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_driver_is_killed_and_the_run_goes_on_elsewhere(setting, faults, undisturbed, short_folder):
    """Meanwhile a second driver is refused, and the store is away for a while."""
    folder = place("s3://runs/moved")
    clusters.stop()
    argv = [*flags(setting, folder), "--resume=auto"]
    first = started(argv, short_folder / "one")
    lines = []
    threading.Thread(target=lambda: lines.extend(first.stdout), daemon=True).start()
    while latest_checkpoint(folder / "checkpoints") is None:
        assert first.poll() is None, "".join(lines)
        time.sleep(0.2)
    second = started([f"--output_dir={folder}", "--resume"], short_folder / "two")
    printed, _ = second.communicate(timeout=200)
    assert second.returncode == 2 and "a run is going on there, driven by process" in printed, printed
    first.kill()
    first.wait()
    assert not read_json(folder / LOCK_NAME).get("released")

    away = []

    def away_for_a_while(request):
        if "attempts.jsonl/00000001" in request.url or away:
            away.append(time.monotonic())
            return "503" if time.monotonic() - away[0] < 5 else None

    faults.choose = away_for_a_while
    third = started(argv, short_folder / "three")
    printed, _ = third.communicate(timeout=300)
    assert third.returncode == 0, printed
    assert len(attempts(folder)) == 2 and away
    assert_same(folder, undisturbed)
