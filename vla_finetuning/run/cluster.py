"""Connect a run to its Ray cluster, wait for capacity, and check that each node meets the run's needs.

Every node imports this module for the check, so heavy or optional packages are imported where they are used.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import json
import logging
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray._common.utils import RESOURCE_CONSTRAINT_PREFIX
from ray._private import services
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from vla_finetuning.buckets.mirror import address, as_file, pull, push, remove
from vla_finetuning.environment import Timeouts
from vla_finetuning.options.scaling import ScalingOptions, WorkerOptions
from vla_finetuning.terminal import print_safe

if TYPE_CHECKING:
    from ray.data import ExecutionOptions

logger = logging.getLogger(__name__)
PROJECT = Path(__file__).resolve().parents[2]
# Packages whose versions must agree, for pickles, rows and weights.
PACKAGES = ("ray", "torch", "lerobot", "transformers", "numpy", "pyarrow", "av")
# Oldest NVIDIA driver of each major version of CUDA, from the release notes of its toolkit.
DRIVERS = {12: "525", 13: "580"}
# Codecs of LeRobot's videos, and PyAV's decoders (FFmpeg's names) for each; any of them suffices.
DECODERS = {"AV1": ("libdav1d", "libaom-av1"), "H.264": ("h264",), "HEVC": ("hevc",)}
ANSWER_S = 120.0
HEAD_ANSWER_S = 10.0
LOOK_EVERY_S = 10.0
# Free space in Ray's temporary directory of every node, for logs and spilled objects.
FREE_DISK_BYTES = 5 * 10**9
FREE_CAPACITY = "lower --scaling.num_workers or the CPUs of a process (--scaling.cpus_per_*), or add nodes"
# Share of the object store that Ray Data may fill. Training processes read blocks in the rest.
DATA_SHARE = 0.5

Node = Mapping[str, Any]


def start(scaling: ScalingOptions, needs: Needs, output_dir: Path) -> None:
    """Join or start the cluster of a run, and check its nodes. Raises as `connect` and `check_nodes`."""
    from ray.data import DataContext
    from ray.train.v2._internal.constants import (
        HEALTH_CHECK_INTERVAL_S_ENV_VAR,
        WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
        WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR,
    )
    from ray.util.debug import log_once

    # Ray Train 2.60 reads these from the driver's environment only.
    os.environ[WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR] = str(Timeouts.from_environment().worker)
    # At the default of 2 s, Ray Train notices failures, ends of runs and second checkpoints late.
    os.environ.setdefault(HEALTH_CHECK_INTERVAL_S_ENV_VAR, "0.5")
    if scaling.min_workers:
        # Ray Train also plans an elastic group for nodes that just died. It plans again after this (default 60 s).
        os.environ.setdefault(WORKER_GROUP_START_TIMEOUT_S_ENV_VAR, "15")
    DataContext.get_current().enable_progress_bars = False
    log_once("ray_data_progress_manager_disabled")  # else Ray Data 2.60 warns of it
    connect()
    check_nodes(needs, output_dir)


def wait_for_capacity(scaling: ScalingOptions, needs: Needs, output_dir: Path) -> DataLimits:
    """Wait until the cluster has capacity for a run's fewest workers and a read task, and return its data limits.

    A placement group makes an autoscaler add nodes. It is removed when granted, so that Ray Train can use the nodes.
    Raises ValueError: the cluster is too small and cannot grow, there is no capacity for VLA_NODES_TIMEOUT_S, or a new
    node fails `check_nodes`.
    """
    before = {node["NodeID"] for node in alive_nodes()}
    largest = _largest_cluster()
    demand = _demand_of(scaling)
    if largest is not None and (problem := demand.missing_from(largest)):
        raise ValueError(f"{problem}; {FREE_CAPACITY}")
    reserved = placement_group([*[demand.bundle] * demand.count, demand.extra])
    try:
        _wait_for(reserved.ready().future(), demand)
    finally:
        remove_placement_group(reserved)
    nodes = alive_nodes()
    if before != {node["NodeID"] for node in nodes}:
        check_nodes(needs, output_dir)
    limits = data_limits(nodes, ray.get_runtime_context().get_temp_dir())
    print_safe(*limits.describe(nodes))
    return limits


def wait_for(work: Future[Any], scaling: ScalingOptions) -> Any:
    """Wait for a run's workers, and return their result. Raises ValueError as `wait_for_capacity`."""
    return _wait_for(work, _demand_of(scaling))


def run_remote(function: Callable[..., Any], *arguments: Any, scaling: WorkerOptions, **named: Any) -> Any:
    """Call `function` in a process with one CPU, and a GPU if workers use GPUs. Wait as `wait_for`."""
    share = {"CPU": 1.0, **({"GPU": 1.0} if scaling.use_gpu else {})}
    # The state of a placement group shows a wait for resources; a task's does not.
    reserved = placement_group([share])
    try:
        place = PlacementGroupSchedulingStrategy(reserved)
        task = ray.remote(function).options(num_cpus=1, num_gpus=share.get("GPU", 0), scheduling_strategy=place)
        return _wait_for(task.remote(*arguments, **named).future(), Demand("a process", 1, share))
    finally:
        remove_placement_group(reserved)


def _wait_for(work: Future[Any], demand: Demand) -> Any:
    looks = _poll(demand)
    while not wait([work], LOOK_EVERY_S).done:
        next(looks)
    return work.result()


def _poll(demand: Demand) -> Iterator[None]:
    """Check at each step for missing capacity, and print it the first time. Raises ValueError after the timeout."""
    limit_s = Timeouts.from_environment().nodes
    since = None
    while True:
        missing = demand.missing_from(ray.cluster_resources()) or _describe_pending(demand)
        if missing is None:
            since = None
        elif since is None:
            since = time.monotonic()
            print_safe(f"waiting      for capacity, at most {limit_s:g} s: {missing}", file=sys.stderr)
        elif time.monotonic() - since > limit_s:
            raise ValueError(
                f"{missing}; no more came within {limit_s:g} s (VLA_NODES_TIMEOUT_S); {FREE_CAPACITY}; --resume goes on"
            )
        yield


def _largest_cluster() -> dict[str, float] | None:
    """Return the resources of the cluster at its largest size, or None if unknown."""
    resources = ray.cluster_resources()
    if _started_here():  # it cannot grow
        return resources
    most = ray._private.state.state.get_max_resources_from_cluster_config()
    if most is None:  # most autoscalers do not report it
        return None
    return {name: max(resources.get(name, 0), most.get(name, 0)) for name in {*resources, *most}}


@dataclass(frozen=True)
class Demand:
    """Resources that a run needs at the same time: `count` times `bundle`, and `extra`; `text` describes them."""

    text: str
    count: int
    bundle: Mapping[str, float]
    extra: Mapping[str, float] = field(default_factory=dict)

    def missing_from(self, cluster: Mapping[str, float]) -> str | None:
        """Describe the resources that a cluster lacks in total, or return None if it has enough."""
        totals = {name: self.count * n + self.extra.get(name, 0) for name, n in self.bundle.items()}
        missing = [
            f"{_describe_amount(k, n)}, {cluster.get(k, 0):g} found" for k, n in totals.items() if cluster.get(k, 0) < n
        ]
        return f"the cluster is too small for {self.text}: needs {'; '.join(missing)}" if missing else None


def _demand_of(scaling: ScalingOptions) -> Demand:
    per_worker = {"CPU": scaling.cpus_per_worker}
    if scaling.use_gpu:
        per_worker["GPU"] = 1.0
    if scaling.accelerator_type:
        per_worker[f"{RESOURCE_CONSTRAINT_PREFIX}{scaling.accelerator_type}"] = 0.001  # as Ray Train requests it
    workers = scaling.min_workers or scaling.num_workers
    share = " and ".join(_describe_amount(name, n) for name, n in per_worker.items())
    text = f"{_describe_amount('worker', workers)} with {share} each"
    text += " and one read task" * (scaling.cpus_per_read_task > 0)
    return Demand(text, workers, per_worker, {"CPU": scaling.cpus_per_read_task})


def _describe_amount(unit: str, n: float) -> str:
    if unit.startswith(RESOURCE_CONSTRAINT_PREFIX):
        return unit.removeprefix(RESOURCE_CONSTRAINT_PREFIX)
    return f"{n:g} {unit}{'s' * (n != 1)}"


def _describe_pending(demand: Demand) -> str | None:
    """Describe the capacity that this process's placement groups wait for in a large enough cluster, or return None."""
    job = ray.get_runtime_context().get_job_id()  # the end of the ids of its placement groups
    states = {group["state"] for id, group in placement_group_table().items() if id.endswith(job)}
    if not states & {"PENDING", "RESCHEDULING"}:
        return None
    return f"the cluster has no capacity for {demand.text}: other jobs use it, or no single node has enough"


def connect() -> None:
    """Join the cluster of RAY_ADDRESS or of a head node here, and send it the code; otherwise start one here.

    Raises ConnectionError: no cluster answers at RAY_ADDRESS.
    """
    if not ray.is_initialized():
        address = running_cluster()
        # Ray 2.60 warns that it protects a local cluster by a token, the default.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        ray.init(
            address=address or "local",
            runtime_env=runtime_env() if address else None,
            logging_level=logging.WARNING,
            log_to_driver=False,
            include_dashboard=False,
        )


def running_cluster() -> str | None:
    """Return host:port of the cluster to join, or None.

    Connects first, because Ray 2.60 keeps the address of a head node that was killed, and waits minutes for it.
    Raises ConnectionError: no cluster answers at RAY_ADDRESS.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named and "://" in named:
        return named  # Ray Client, or a provider's scheme
    address = services.canonicalize_bootstrap_address(cast(Any, None))
    if address is None:
        return None
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_ANSWER_S).close()
        return address
    except OSError as error:
        if named:
            raise ConnectionError(
                f"RAY_ADDRESS={named}: no Ray cluster answers there ({error}); start its head node, or unset it to "
                "start one on this machine"
            ) from error
        logger.warning("the Ray cluster at %s, the last on this machine, does not answer; starting one here", address)
        return None


def is_local() -> bool:
    """Return whether a run uses this machine alone, without a cluster. Raises as `running_cluster`."""
    return _started_here() if ray.is_initialized() else running_cluster() is None


def _started_here() -> bool:
    node = ray._private.worker._global_node
    return node is not None and node.is_head()


def gpus_found(scaling: WorkerOptions, preset: str | None) -> int:
    """Return the number of GPUs that decides the default of --scaling.use_gpu. The demo trains on any machine."""
    import torch

    decided = scaling.use_gpu is not None or scaling.accelerator_type is not None or preset == "demo"
    return torch.cuda.device_count() if decided else find_gpus("--scaling.use_gpu")


def find_gpus(flag: str) -> int:
    """Count the GPUs of this machine, or of the cluster that this process has joined.

    Raises ValueError, naming the `flag` that decides it, if this machine has none and the cluster to join may have
    some. Raises ConnectionError as `running_cluster`.
    """
    import torch

    local_gpus = torch.cuda.device_count()
    if local_gpus or is_local():
        return local_gpus
    if ray.is_initialized() and (cluster_gpus := int(ray.cluster_resources().get("GPU", 0))):
        return cluster_gpus
    raise ValueError(
        "on GPUs or on CPUs? This machine has no GPU, but nodes of the Ray cluster that is joined may have some: give "
        f"{flag} true or false"
    )


def alive_nodes() -> list[Node]:
    """Return Ray's records of live nodes, including the head node."""
    return [node for node in ray.nodes() if node["Alive"]]


def runtime_env() -> dict[str, Any] | None:
    """Return Ray's runtime environment with this project's code as working directory.

    Returns None in a submitted job with a working directory, because Ray allows one. It has no environment variables,
    because Ray's logs and dashboard would show tokens.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    if (job.get("runtime_env") or {}).get("working_dir"):
        return None
    return {"working_dir": str(PROJECT), "excludes": _all_but_code()}


def _all_but_code() -> list[str]:
    """Return patterns as in .gitignore that exclude all but code, such as data, outputs, caches and secrets."""
    package = Path(__file__).resolve().parents[1]
    inner = (path.parent.relative_to(package.parent) for path in package.rglob("__init__.py"))
    wings = sorted(str(folder) for folder in inner if folder.parts[1:])  # a folder before those in it
    inside = [(f"!/{folder}", f"/{folder}/*", f"!/{folder}/*.py") for folder in ("diagnostics", package.name, *wings)]
    return ["/*", "!/.", "!/*.py", *itertools.chain(*inside), f"!/{package.name}/report/templates"]


@dataclass(frozen=True)
class Needs:
    """Requirements of every node."""

    packages: Mapping[str, str]  # versions by name
    paths: Mapping[str, str]  # descriptions of paths that must exist
    cuda: str | None  # version for which torch was built, e.g. "13.0"; None without GPUs
    free_bytes: int  # in Ray's temporary directory, for spilled objects and logs
    gpu_type: str | None = None  # Ray's name of the GPUs that workers need; None for any
    gpu_bytes: int = 0  # planned bytes of a worker's GPU; 0 if unknown

    def gpus(self, node: Node) -> float:
        """Return the number of GPUs of a node that the run may use."""
        has_type = self.gpu_type is None or f"{RESOURCE_CONSTRAINT_PREFIX}{self.gpu_type}" in node["Resources"]
        return node["Resources"].get("GPU", 0) if has_type else 0


def node_needs(scaling: WorkerOptions, roots: Iterable[str], policy_folder: Path | None, gpu_bytes: int = 0) -> Needs:
    """Return the requirements of a node: versions of packages and paths of the driver."""
    import torch

    hub = "; for what comes from the Hub, HF_HOME says where it lies"
    paths = {root: f"the dataset (--dataset.root{hub})" for root in roots if "://" not in root}
    if policy_folder is not None:
        paths[str(policy_folder)] = f"the policy (--policy.path{hub})"
    return Needs(
        packages={name: _without_build_label(importlib.metadata.version(name)) for name in PACKAGES},
        paths=paths,
        cuda=torch.version.cuda if scaling.use_gpu else None,
        free_bytes=FREE_DISK_BYTES,
        gpu_type=scaling.accelerator_type,
        gpu_bytes=gpu_bytes,
    )


def check_nodes(needs: Needs, output_dir: Path, nodes: Sequence[Node] | None = None) -> None:
    """Check on each node (`alive_nodes()` when None) that it meets the run's needs, before any GPU is held.

    `output_dir` must exist, and be the same folder on all nodes. Raises ValueError, naming every node that fails, its
    problems, and remedies.
    """
    nodes = alive_nodes() if nodes is None else nodes
    with _marker(output_dir) as marker:
        seen = replace(needs, paths={**needs.paths, marker: f"{address(output_dir)} (--output_dir)"})
        problems = _probe_nodes(nodes, seen)
    if problems:
        raise ValueError(
            f"{len(problems)} of {len(nodes)} nodes cannot take part:\n"
            + "\n".join(f"  node {node}: {fault}" for node, faults in problems.items() for fault in faults)
        )


def _probe_nodes(nodes: Sequence[Node], needs: Needs) -> dict[str, list[str]]:
    """Run `probe` on each node, and return the problems of nodes that have any, by the node's name."""
    if len(nodes) == 1:
        faults = probe(needs, needs.gpus(nodes[0]))
        return {_node_name(nodes[0]): faults} if faults else {}
    names = {node["NodeID"]: _node_name(node) for node in nodes}
    answers = _call_on_nodes({node["NodeID"]: partial(probe, needs, needs.gpus(node)) for node in nodes})
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=ANSWER_S)
    problems = {}
    for node, answer in answers.items():
        try:
            faults = ray.get(answer, timeout=0)
        except GetTimeoutError:
            faults = [f"gave no answer in {ANSWER_S:g} s; check `ray status` and its logs, or remove the node"]
        except RayError as error:
            faults = [f"cannot run this project's code: {str(error).strip().splitlines()[-1]}"]
        if faults:
            problems[names[node]] = faults
    return problems


def on_nodes[T](functions: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Call a function on each node by its id, and return the results. Raises errors of the functions."""
    try:
        return {node: ray.get(answer) for node, answer in _call_on_nodes(functions).items()}
    except RayTaskError as error:
        raise error.cause from error


def _call_on_nodes(functions: Mapping[str, Callable[[], Any]]) -> dict[str, ray.ObjectRef[Any]]:
    task: Any = ray.remote(num_cpus=0, max_retries=0)(lambda function: function())
    return {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(function)
        for node, function in functions.items()
    }


def probe(needs: Needs, gpus: float, temp_dir: str | None = None) -> list[str]:
    """Return the problems of this machine. `gpus`: GPUs that the run may use; `temp_dir`: Ray's when None."""
    temp_dir = temp_dir or ray.get_runtime_context().get_temp_dir()
    problems = []
    for name, required in needs.packages.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed, the driver has {required}; install requirements.lock there")
            continue
        if _without_build_label(installed) != required:
            problems.append(f"{name} is {installed}, the driver has {required}; install requirements.lock on both")
    problems += _decoder_problems()
    if needs.cuda is not None and gpus and (problem := _cuda_problem(needs.cuda)):
        problems.append(problem)
    if needs.gpu_bytes and gpus and (smallest := _gpu_bytes()) is not None and smallest < needs.gpu_bytes:
        problems.append(
            f"a GPU has {smallest / 2**30:.1f} GiB, a worker needs {needs.gpu_bytes / 2**30:.1f} (planned); choose "
            "nodes with larger ones by --scaling.accelerator_type, or ask --dry_run with this type which flags fit"
        )
    for name, whose in needs.paths.items():
        try:
            pull(path := as_file(name))
        except OSError as error:
            problems.append(f"cannot read {whose}: {error}")
            continue
        if not path.exists():
            problems.append(
                f"does not see {whose}: no {name}; put it on storage that all nodes share, at the same path"
            )
    free = shutil.disk_usage(temp_dir).free
    if free < needs.free_bytes:
        problems.append(
            f"{free / 1e9:.1f} GB free in {temp_dir}, needs {needs.free_bytes / 1e9:.1f} GB; free some there"
        )
    return problems


def _decoder_problems() -> list[str]:
    try:
        from av import codecs_available
    except ImportError as error:
        return [f"PyAV does not load ({error}); install av from requirements.lock there"]
    return [
        f"PyAV cannot decode {codec} ({' or '.join(names)}); install av from requirements.lock there"
        for codec, names in DECODERS.items()
        if not any(name in codecs_available for name in names)
    ]


def _cuda_problem(built_for: str) -> str | None:
    """Describe why the NVIDIA driver cannot run a torch built for CUDA `built_for`, or return None."""
    # torch sees no GPUs in a task without any. All drivers of a major version are compatible.
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "Ray counts GPUs here, but there is no NVIDIA driver (libcuda.so.1); start the container with GPU access"
    version = ctypes.c_int()
    if (status := driver.cuDriverGetVersion(ctypes.byref(version))) != 0:
        return f"the NVIDIA driver does not answer (CUDA error {status}); look at nvidia-smi there"
    major, minor = version.value // 1000, version.value % 1000 // 10
    if major < int(built_for.partition(".")[0]):
        needed = DRIVERS.get(int(built_for.partition(".")[0]))
        return (
            f"the NVIDIA driver serves CUDA {major}.{minor}, torch was built for {built_for}; update the driver there"
            + (f" to {needed} or newer" if needed else "")
            + f", or install the same torch built for CUDA {major}, which PyTorch's own package index has, on all nodes"
        )
    return None


def _gpu_bytes() -> int | None:
    """Return the usable memory of the smallest GPU here, or None if NVIDIA's library fails."""
    import ray._private.thirdparty.pynvml as nvml

    try:
        nvml.nvmlInit()
        devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        memory = [nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2) for device in devices]
    except nvml.NVMLError as error:
        logger.warning("the memory of GPUs here is not known: %s", error)
        return None
    return min((info.total - info.reserved for info in memory), default=None)


@contextmanager
def _marker(folder: Path) -> Iterator[str]:
    """Yield the address of a file in `folder` that tells it from a folder of the same name on another disk."""
    marker = folder / f"seen-from-all-nodes-{uuid.uuid4().hex}.txt"
    marker.touch()
    push(marker)
    try:
        yield address(marker)
    finally:
        remove(marker)


def _node_name(node: Node) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"


def _without_build_label(version: str) -> str:
    """Remove the build label: 2.11.0+cu130 and 2.11.0 are compatible."""
    return version.partition("+")[0]


@dataclass(frozen=True)
class DataLimits:
    """Limits of the data in the cluster's object stores."""

    store_bytes: int  # of nodes that run tasks
    # Of nodes without CPUs for tasks, such as a head with the driver alone. If Ray Data counted them, the other stores
    # would spill.
    idle_bytes: int
    spill_dir: Path  # of spilled objects on this node

    @property
    def data_bytes(self) -> int:
        """Return the bytes that Ray Data may hold; above it, read tasks wait (backpressure)."""
        return round(DATA_SHARE * self.store_bytes)

    def execution_options(self) -> ExecutionOptions:
        """Return options for `ray.train.DataConfig`: a share of the stores, so that later nodes add theirs."""
        from ray.data import DataContext, ExecutionOptions, ExecutionResources

        DataContext.get_current().override_object_store_memory_limit_fraction = DATA_SHARE
        options = ExecutionOptions(preserve_order=True)
        if self.idle_bytes:
            options.exclude_resources = ExecutionResources(object_store_memory=DATA_SHARE * self.idle_bytes)
        return options

    def describe(self, nodes: Sequence[Node]) -> list[str]:
        """Return lines of the plan on the cluster."""
        total = {name: sum(node["Resources"].get(name, 0) for node in nodes) for name in ("CPU", "GPU", "memory")}
        free = shutil.disk_usage(self.spill_dir).free
        return [
            f"Cluster      {len(nodes)} node{'s' * (len(nodes) != 1)}, {total['CPU']:g} CPUs, {total['GPU']:g} GPUs, "
            f"{total['memory'] / 1e9:.1f} GB for processes",
            f"Object store {self.store_bytes / 1e9:.1f} GB; data in flight may fill {self.data_bytes / 1e9:.1f} GB, "
            "then reading waits",
            f"             should it overflow, it spills to {self.spill_dir} ({free / 1e9:.0f} GB free)",
        ]


def data_limits(nodes: Sequence[Node], spill_dir: str | Path) -> DataLimits:
    """Return the limits of a cluster of `nodes` (as `alive_nodes()`)."""
    stores: dict[bool, float] = {True: 0, False: 0}
    for node in nodes:
        resources = node["Resources"]
        stores[resources.get("CPU", 0) > 0] += resources.get("object_store_memory", 0)
    return DataLimits(round(stores[True]), round(stores[False]), Path(spill_dir))
