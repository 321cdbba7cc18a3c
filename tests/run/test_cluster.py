"""Capacity, requirements and code of a cluster's nodes, against Ray's own packager and raylets."""

import ctypes
import importlib.metadata
import inspect
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import zipfile
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import av
import pytest
import ray
import ray._private.thirdparty.pynvml  # to be replaced, it must be there
import torch
from ray._private.runtime_env import packaging
from ray.data import DataContext, ExecutionResources
from ray.data._internal.execution.resource_manager import ResourceManager
from ray.util.placement_group import placement_group, remove_placement_group

from tests import clusters
from tests.buckets import Bucket, forget
from vla_finetuning.buckets import mirror
from vla_finetuning.buckets.mirror import as_path
from vla_finetuning.options.scaling import ScalingOptions
from vla_finetuning.run import cluster
from vla_finetuning.run.cluster import (
    Needs,
    check_nodes,
    connect,
    data_limits,
    node_needs,
    probe,
    running_cluster,
    runtime_env,
)

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {name: cluster._without_build_label(importlib.metadata.version(name)) for name in cluster.PACKAGES}
NEEDS = Needs(packages=VERSIONS, paths={}, cuda=None, free_bytes=1)


def shipped(folder, excludes, tmp_path):
    """What Ray's own packager would send of `folder`."""
    archive = tmp_path / "sent.zip"
    packaging.create_package(str(folder), archive, include_gitignore=True, excludes=excludes)
    return sorted(name for name in zipfile.ZipFile(archive).namelist() if not name.endswith("/"))


def test_runtime_env_contains_all_modules_and_templates(tmp_path):
    environment = runtime_env()
    assert Path(environment["working_dir"]) == ROOT
    sent = shipped(ROOT, environment["excludes"], tmp_path)
    package = ROOT / "vla_finetuning"
    code = (*ROOT.glob("*.py"), *ROOT.glob("diagnostics/*.py"), *package.rglob("*.py"), *package.glob("*/templates/*"))
    modules = [p.relative_to(ROOT) for p in code]
    assert sent == sorted(map(str, modules)) and "vla.py" in sent


def test_runtime_env_contains_only_code(tmp_path, monkeypatch):
    project = tmp_path / "project"
    skip = [".env", ".git/config", ".venv/lib/a.py", "outputs/run/config.json", ".cache/demo/x.mp4", "token", "a.pem"]
    skip += ["my_data/meta/info.json", "tests/test_x.py", "diagnostics/trace.json", "diagnostics/old/x.py", "sub/x.py"]
    skip += ["vla_finetuning/notes.json", "vla_finetuning/data/token", "vla_finetuning/data/old/x.py"]
    code = ["vla.py", "diagnostics/__init__.py", "vla_finetuning/options/train.py", "vla_finetuning/data/plan.py"]
    code += ["vla_finetuning/report/templates/report.html"]
    for name in skip + code:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("secret")
    assert shipped(project, runtime_env()["excludes"], tmp_path) == sorted(code)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert set(runtime_env()) == {"working_dir", "excludes"} and "hf_secret" not in json.dumps(runtime_env())


def test_submitted_job_uses_its_own_working_dir(monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}}))
    assert runtime_env() is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {}}))
    assert runtime_env()["working_dir"] == str(ROOT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packages": {**VERSIONS, "torch": "9.9"}}, f"torch is {VERSIONS['torch']}, the driver has 9.9"),
        ({"packages": {"no-such-package": "1.0"}}, "no-such-package is not installed, the driver has 1.0"),
        ({"paths": {"/gone/run": "--output_dir"}}, "does not see --output_dir: no /gone/run; put it on storage"),
        ({"free_bytes": 10**18}, "needs 1000000000.0 GB; free some there"),
        ({"cuda": "13.0"}, "no NVIDIA driver (libcuda.so.1)"),
    ],
)
def test_probe_reports_missing_requirements(change, message, tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    (lack,) = probe(replace(NEEDS, **change), gpus=1, temp_dir=str(tmp_path))
    assert message in lack


def wanting(use_gpu=True, **changes):
    options = {"min_workers": 1, "num_workers": 4, "cpus_per_worker": 2.0, "cpus_per_read_task": 1.0, **changes}
    return ScalingOptions(use_gpu=use_gpu, **options)


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(cluster, "_describe_pending", lambda scaling: None)  # asks Ray


def test_wait_for_lost_nodes_times_out(looks_often, monkeypatch, capsys):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setenv("VLA_NODES_TIMEOUT_S", "0.2")
    with pytest.raises(
        ValueError, match=r"needs 3 CPUs, 2 found; 1 GPU, 0 found; no more came within 0.2 s .VLA_NODES"
    ):
        cluster.wait_for(Future(), wanting())
    assert capsys.readouterr().err.count("waiting      for capacity, at most 0.2 s: the cluster is too small for") == 1


def test_returning_nodes_reset_the_timeout(looks_often, monkeypatch, capsys):
    trained = Future()
    looks = iter([{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}] * 4)

    def look():
        resources = next(looks, None)
        if resources is None:
            trained.set_result("done")
        return resources or {"CPU": 3.0, "GPU": 1.0}

    monkeypatch.setattr(ray, "cluster_resources", look)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setenv("VLA_NODES_TIMEOUT_S", "1.5")
    # Each time 1 s, which is less than the limit; all together are more.
    assert cluster.wait_for(trained, wanting()) == "done"
    assert capsys.readouterr().err.count("waiting      for capacity") == 4
    failed = Future()
    failed.set_exception(TimeoutError("of training itself"))
    with pytest.raises(TimeoutError, match="of training itself"):
        cluster.wait_for(failed, wanting())


@pytest.mark.parametrize(
    ("version", "status", "wanted", "problem"),
    [
        (13020, 0, "13.0", None),
        (13000, 0, "13.2", None),  # minor versions are compatible
        (12080, 0, "13.0", "serves CUDA 12.8, torch was built for 13.0; update the driver there to 580 or newer, or"),
        (0, 999, "13.0", "does not answer (CUDA error 999)"),
    ],
)
def test_nvidia_driver_must_support_cuda_of_torch(version, status, wanted, problem, monkeypatch, tmp_path):
    def get_version(pointer):
        pointer._obj.value = version
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=get_version))
    needs = replace(NEEDS, cuda=wanted)
    assert probe(needs, gpus=0, temp_dir=str(tmp_path)) == [], "a node without GPUs needs no driver"
    lacks = probe(needs, gpus=4, temp_dir=str(tmp_path))
    assert (problem is None and lacks == []) or problem in lacks[0]


class Nvml:
    """NVIDIA's library of a machine with such GPUs, in MiB, of which its driver keeps 400."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = "as of version 2"  # noqa: N815

    def __init__(self, *mib):
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: len(mib)
        self.nvmlDeviceGetHandleByIndex = lambda index: mib[index]

    def nvmlDeviceGetMemoryInfo(self, device, version):  # noqa: N802
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(total=device << 20, reserved=400 << 20)


def test_gpu_memory_must_suffice_for_a_worker(monkeypatch, tmp_path, caplog):
    def lacks(needed_gib, gpus=2):
        return probe(replace(NEEDS, gpu_bytes=int(needed_gib * 2**30)), gpus=gpus, temp_dir=str(tmp_path))

    monkeypatch.setattr("ray._private.thirdparty.pynvml", Nvml(81559, 23034))
    assert lacks(22) == []
    (lack,) = lacks(22.2)
    assert "a GPU has 22.1 GiB, a worker needs 22.2 (planned); choose nodes with larger ones" in lack
    assert lacks(22.2, gpus=0) == [], "no worker goes there"
    assert lacks(0) == [], "not planned"
    broken = Nvml()
    broken.nvmlInit = Mock(side_effect=Nvml.NVMLError("Driver Not Loaded"))
    monkeypatch.setattr("ray._private.thirdparty.pynvml", broken)
    assert lacks(2**10) == [] and "the memory of GPUs here is not known: Driver Not Loaded" in caplog.text


def test_only_gpus_of_the_accelerator_type_are_probed():
    h100 = {"Resources": {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}}
    t4 = {"Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:T4": 1.0}}
    scaling = ScalingOptions(use_gpu=True, accelerator_type="H100")
    needs = node_needs(scaling, ["/data/a", "s3://bucket/b"], Path("/weights"), gpu_bytes=30)
    assert set(needs.paths) == {"/data/a", "/weights"}, "what has a URI is everywhere"
    assert needs.gpu_bytes == 30 and [needs.gpus(node) for node in (h100, t4)] == [4, 0]
    assert [replace(needs, gpu_type=None).gpus(node) for node in (h100, t4)] == [4, 1]


def test_use_gpu_is_required_on_a_gpuless_cluster_client(monkeypatch):
    """The head node of configs/ has no GPU, and its workers have 8."""
    plain, typed = ScalingOptions(), ScalingOptions(accelerator_type="H100")
    assert [plain.on_gpus(gpus) for gpus in (0, 2)] == [False, True]
    assert typed.on_gpus(0) and replace(plain, use_gpu=False).on_gpus(2) is False
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "running_cluster", lambda: None)
    assert cluster.is_local() and cluster.gpus_found(plain, None) == 0
    monkeypatch.setattr(cluster, "running_cluster", lambda: "10.0.0.1:6379")
    assert not cluster.is_local()
    with pytest.raises(ValueError, match="This machine has no GPU, but nodes .*: give --scaling.use_gpu true or"):
        cluster.gpus_found(plain, None)
    for scaling, preset in ((typed, None), (replace(plain, use_gpu=True), None), (plain, "demo")):
        assert cluster.gpus_found(scaling, preset) == 0
    # A notebook that has joined it.
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster, "_started_here", lambda: False)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    assert not cluster.is_local() and cluster.gpus_found(plain, None) == 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cluster.gpus_found(plain, None) == 1


@pytest.mark.gpu
def test_probe_of_the_real_nvidia_driver():
    assert cluster._cuda_problem(torch.version.cuda) is None
    assert "torch was built for 99.0" in cluster._cuda_problem("99.0")
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    assert cluster._gpu_bytes() == pytest.approx(smallest, rel=0.02)


def test_nodes_must_see_a_marker_in_the_output_folder(tmp_path, monkeypatch):
    paths = []

    def ask(nodes, needs):
        paths.append(needs.paths)
        assert all(Path(path).is_file() for path in needs.paths)
        return {"n1": ["a", "b"], "n2": ["c"]}

    monkeypatch.setattr(cluster, "_probe_nodes", ask)
    for _ in range(2):
        message = "2 of 3 nodes cannot take part:\n  node n1: a\n  node n1: b\n  node n2: c"
        with pytest.raises(ValueError, match=message):
            check_nodes(NEEDS, tmp_path, [{}, {}, {}])
    (first,), (second,) = paths
    assert first != second and Path(first).parent == tmp_path, "no other run's marker will do"
    assert list(tmp_path.iterdir()) == [], "the marker is taken away, whatever the nodes say"


def test_nodes_must_see_a_marker_in_the_bucket(bucket_url, faults, tmp_path, monkeypatch):
    """One of them has another endpoint, where a bucket of that name is too; another no access."""
    lacks, bucket = [], Bucket(bucket_url)

    def ask(nodes, needs):
        drivers = list(mirror._mirrors)
        for begin in (lambda: None, bucket.delete, lambda: setattr(faults, "choose", lambda request: "403")):
            begin()
            forget()  # a process of its own
            lacks.append(probe(needs, 0, str(tmp_path)))
        faults.choose = lambda request: None
        mirror._mirrors[:] = drivers
        return {}

    monkeypatch.setattr(cluster, "_probe_nodes", ask)
    check_nodes(NEEDS, as_path(bucket_url), [{}])
    none, (elsewhere,), (refused,) = lacks
    assert none == [] and bucket.names() == set()
    assert elsewhere.startswith(f"does not see {bucket_url} (--output_dir): no {bucket_url}/seen-from-all-nodes-")
    assert refused.startswith(f"cannot read {bucket_url} (--output_dir): ") and "check credentials" in refused


def node(cpus, gpus, store_gb):
    resources = {"CPU": cpus, "GPU": gpus, "object_store_memory": store_gb * 1e9, "memory": 2 * store_gb * 1e9}
    return {"Resources": {kind: n for kind, n in resources.items() if n}}


def test_head_without_cpus_adds_no_object_store_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(DataContext.get_current(), "override_object_store_memory_limit_fraction", None)
    nodes = [node(0, 0, 10), node(48, 4, 50), node(32, 0, 30)]
    limits = data_limits(nodes, tmp_path)
    assert (limits.store_bytes, limits.idle_bytes, limits.data_bytes) == (80 * 10**9, 10 * 10**9, 40 * 10**9)
    options = limits.execution_options()
    assert options.preserve_order
    # What Ray Data makes of it, by its own arithmetic: all that Ray counts, less the head's.
    total = ExecutionResources(cpu=80, gpu=4, object_store_memory=90e9, memory=1e12)
    manager = ResourceManager.__new__(ResourceManager)
    manager._options, manager._get_total_resources = options, lambda: total
    manager._global_limits_last_update_time = 0
    manager._object_store_memory_limit_fraction = DataContext.get_current().override_object_store_memory_limit_fraction
    assert manager.get_global_limits().object_store_memory == limits.data_bytes
    text = "\n".join(limits.describe(nodes))
    assert "3 nodes, 80 CPUs, 4 GPUs, 180.0 GB" in text and "80.0 GB; data in flight may fill 40.0 GB" in text


# ---- which cluster ------------------------------------------------------------------------------------------------


def test_unreachable_cluster_is_reported_or_ignored(monkeypatch, caplog):
    """An error if the user names it; a warning if it is Ray's record of a dead one on this machine."""
    with socket.socket() as head:
        head.bind(("", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr("vla_finetuning.run.cluster.services.find_gcs_addresses", set)
        monkeypatch.setattr("vla_finetuning.run.cluster.services.find_bootstrap_address", lambda temp_dir: address)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        assert running_cluster() is None
        assert "does not answer; starting one here" in caplog.text
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConnectionError, match=f"RAY_ADDRESS={address}: no Ray cluster answers there"):
            running_cluster()
        head.listen()
        port = address.split(":")[1]
        assert running_cluster().endswith(f":{port}")
        monkeypatch.delenv("RAY_ADDRESS")
        assert running_cluster().endswith(f":{port}")
        monkeypatch.setattr("vla_finetuning.run.cluster.services.find_bootstrap_address", lambda temp_dir: None)
        assert running_cluster() is None


def add(one, *, other):
    return one + other


@pytest.mark.ray
def test_remote_process_after_training_times_out_without_capacity(ray_cluster, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.1)
    run_remote = partial(cluster.run_remote, add, 1, other=2)
    monkeypatch.setenv("VLA_NODES_TIMEOUT_S", "60")
    assert run_remote(scaling=ScalingOptions()) == 3
    monkeypatch.setenv("VLA_NODES_TIMEOUT_S", "0.3")
    with pytest.raises(
        ValueError, match="the cluster is too small for a process: needs 1 GPU, 0 found; no more came within"
    ):
        run_remote(scaling=ScalingOptions(use_gpu=True))
    others = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    try:
        ray.get(others.ready())
        with pytest.raises(
            ValueError, match="the cluster has no capacity for a process: other jobs use it, or no single"
        ):
            run_remote(scaling=ScalingOptions())
    finally:
        remove_placement_group(others)
    assert capsys.readouterr().err.count("waiting      for capacity, at most 0.3 s") == 2
    monkeypatch.setenv("VLA_NODES_TIMEOUT_S", "60")
    assert run_remote(scaling=ScalingOptions()) == 3


# ---- two raylets --------------------------------------------------------------------------------------------------


@ray.remote
def where_code_is():
    from vla_finetuning import environment

    return inspect.getfile(environment), sorted(os.listdir(os.path.dirname(inspect.getfile(environment))))


@pytest.mark.ray
def test_new_node_is_awaited_checked_and_gets_the_code(no_ray_cluster, tmp_path, monkeypatch, capsys):
    """The cluster has no node for workers at first; the new one has another PyAV."""
    (tmp_path / "site" / "av-1.2.3.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "av-1.2.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: av\nVersion: 1.2.3\n"
    )
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.3)
    checked = []
    monkeypatch.setattr(cluster, "check_nodes", lambda needs, folder: checked.append(len(cluster.alive_nodes())))

    def wait(nodes_timeout_s=60, **changes):
        monkeypatch.setenv("VLA_NODES_TIMEOUT_S", str(nodes_timeout_s))
        scaling = wanting(use_gpu=False, accelerator_type="L4", **changes)
        return cluster.wait_for_capacity(scaling, NEEDS, tmp_path)

    with clusters.of_several_nodes(num_cpus=1, include_dashboard=False) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        connect()
        with pytest.raises(
            ValueError, match=r"too small .* 3 CPUs, 1 found; L4, 0 found; no more came within 1 s \(VLA_"
        ):
            wait(1)
        text = capsys.readouterr().err
        assert text.count("waiting      for capacity, at most 1 s: the cluster is too small for 1 worker with 2") == 1

        waited = []
        waiting = threading.Thread(target=lambda: waited.append(wait()))
        waiting.start()
        while waiting.is_alive() and "waiting      for capacity, at most 60 s: the cluster" not in text:
            time.sleep(0.05)
            text = capsys.readouterr().err
        assert not checked
        environment = {"PYTHONPATH": str(tmp_path / "site")}
        nodes.add_node(num_cpus=2, resources={"accelerator_type:L4": 1}, env_vars=environment)
        waiting.join()
        assert waited[0].store_bytes > 0 and checked == [2], "nodes that came are looked at"
        file, beside = ray.get(where_code_is.options(num_cpus=2).remote())
        assert not file.startswith(str(ROOT)) and "data" in beside
        assert not {"tests", "requirements.txt", "Makefile", ".git"} & set(beside)

        alive = cluster.alive_nodes()
        (worker,) = [node for node in alive if node["Resources"]["CPU"] == 2]
        with pytest.raises(ValueError) as error:
            check_nodes(NEEDS, tmp_path, alive)
        lines = str(error.value).splitlines()
        assert lines[0] == "1 of 2 nodes cannot take part:" and len(lines) == 2
        assert worker["NodeID"][:8] in lines[1] and f"av is 1.2.3, the driver has {VERSIONS['av']}" in lines[1]
        check_nodes(replace(NEEDS, packages={"ray": ray.__version__}), tmp_path, alive)
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".seen")] == [], "the marker is taken away"

        wait()
        wait()  # what was asked for is given back
        assert checked == [2]
        with pytest.raises(ValueError, match="no capacity for 1 worker with 2.5 CPUs and L4 each and one .* no single"):
            wait(1, cpus_per_worker=2.5, cpus_per_read_task=0.5)  # enough in all, but not in one place
        with pytest.raises(ValueError, match="^the cluster is too small for 1 worker with .* needs 5 CPUs, 4 found"):
            at_most = {"CPU": 4, "accelerator_type:L4": 1}  # as Anyscale's autoscaler says
            monkeypatch.setattr(ray._private.state.state, "get_max_resources_from_cluster_config", lambda: at_most)
            wait(3600, cpus_per_worker=4.0)


@pytest.mark.ray
def test_ctrl_c_ends_waiting_for_capacity(ray_cluster, tmp_path, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(cluster, "print_safe", lambda *_, **__: waits.set())
    monkeypatch.setattr(cluster, "_started_here", lambda: False)  # joined: it may grow

    def interrupt():
        if waits.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # What is started in the background of a shell ignores it otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            cluster.wait_for_capacity(wanting(cpus_per_worker=100.0), NEEDS, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()


def test_missing_video_decoder_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(av, "codecs_available", {"h264", "hevc", "av1"})  # FFmpeg's own av1 needs a GPU
    (lack,) = probe(NEEDS, gpus=0, temp_dir=str(tmp_path))
    assert "cannot decode AV1 (libdav1d or libaom-av1)" in lack
    monkeypatch.setitem(sys.modules, "av", None)  # as where it is not installed, or its libraries are not found
    assert "PyAV does not load" in probe(NEEDS, gpus=0, temp_dir=str(tmp_path))[0]
