"""A run on a cluster of several nodes: what is sent there, and whether each node has what the run needs.

Every node imports this module to look at itself: what is heavy or may be missing is imported where it is used.
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
# Where two versions would disagree about pickles, rows or weights.
PACKAGES = ("ray", "torch", "lerobot", "transformers", "numpy", "pyarrow", "av")
# The oldest NVIDIA driver for each major version of CUDA, from the release notes of its toolkit.
DRIVERS = {12: "525", 13: "580"}
# What LeRobot writes videos in, and the decoders of PyAV (in FFmpeg's names) that can read it; any of them does.
DECODERS = {"AV1": ("libdav1d", "libaom-av1"), "H.264": ("h264",), "HEVC": ("hevc",)}
# A worker process that is still starting; a node that takes longer would hold up the run itself.
ANSWER_S = 120.0
# A head node's socket, which answers at once or not at all.
HEAD_ANSWER_S = 10.0
# An idle cluster has capacity at once; a wait for a busy or growing one is reported this often.
LOOK_EVERY_S = 10.0
# Under Ray's temporary directory of every node, for logs, and objects that overflow memory.
FREE_DISK_BYTES = 5 * 10**9
FREE_CAPACITY = "lower --scaling.num_workers, --scaling.cpus_per_worker or --scaling.cpus_per_read_task, or add nodes"
# Share of the object store that Ray Data may fill. The rest is for blocks that the training processes still read.
DATA_SHARE = 0.5

Node = Mapping[str, Any]


# ---- connecting ---------------------------------------------------------------------------------------------------


def start(scaling: ScalingOptions, needs: Needs, output_dir: Path) -> None:
    """Join or start the cluster of a run, and check the nodes that are there. Raises as `connect`, `check_nodes`."""
    from ray.data import DataContext
    from ray.train.v2._internal.constants import (
        HEALTH_CHECK_INTERVAL_S_ENV_VAR,
        WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
        WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR,
    )
    from ray.util.debug import log_once

    # Ray Train 2.60 takes these from the driver's environment only.
    os.environ[WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR] = str(Timeouts.from_environment().worker)
    # At its own 2 s, that and no sooner is when it notices a failure, the end of a run, or a second checkpoint.
    os.environ.setdefault(HEALTH_CHECK_INTERVAL_S_ENV_VAR, "0.5")
    if scaling.min_workers:
        # It plans an elastic group for nodes that have just died, too. It plans anew after this (its own: 60 s).
        os.environ.setdefault(WORKER_GROUP_START_TIMEOUT_S_ENV_VAR, "15")
    DataContext.get_current().enable_progress_bars = False
    log_once("ray_data_progress_manager_disabled")  # Ray Data 2.60 would warn of that
    connect()
    check_nodes(needs, output_dir)


def wait_for_capacity(scaling: ScalingOptions, needs: Needs, output_dir: Path) -> DataLimits:
    """Wait until the cluster can hold a run's fewest workers and a read task all at once, and say what it is then.

    A request for that has an autoscaler add nodes. It is given back as soon as it is granted, for Ray Train to take.

    Raises:
        ValueError: too small, and cannot grow; no capacity for VLA_NODES_TIMEOUT_S; or a new node lacks something.
    """
    before = {node["NodeID"] for node in alive_nodes()}
    largest = _largest()
    demand = _wanted(scaling)
    if largest is not None and (problem := demand.beyond(largest)):
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
    print_safe(*limits.lines(nodes))
    return limits


def wait_for(work: Future[Any], scaling: ScalingOptions) -> Any:
    """Wait for a run's workers, and return their result. Raises ValueError: no capacity for VLA_NODES_TIMEOUT_S."""
    return _wait_for(work, _wanted(scaling))


def run_remote(function: Callable[..., Any], *arguments: Any, scaling: WorkerOptions, **named: Any) -> Any:
    """Call a function in a process with one CPU, and a GPU if the run's workers have one; wait as `wait_for`."""
    share = {"CPU": 1.0, **({"GPU": 1.0} if scaling.use_gpu else {})}
    # A task that waits for its resources does so unseen, a placement group does not.
    reserved = placement_group([share])
    try:
        place = PlacementGroupSchedulingStrategy(reserved)
        task = ray.remote(function).options(num_cpus=1, num_gpus=share.get("GPU", 0), scheduling_strategy=place)
        return _wait_for(task.remote(*arguments, **named).future(), Wanted("a process", 1, share))
    finally:
        remove_placement_group(reserved)


def _wait_for(work: Future[Any], demand: Wanted) -> Any:
    looks = _poll(demand)
    while not wait([work], LOOK_EVERY_S).done:
        next(looks)
    return work.result()


def _poll(demand: Wanted) -> Iterator[None]:
    """Each step looks what a run waits for, and says it once. Raises ValueError when it has waited too long."""
    limit_s = Timeouts.from_environment().nodes
    since = None
    while True:
        lacking = demand.beyond(ray.cluster_resources()) or _without_capacity(demand)
        if lacking is None:
            since = None
        elif since is None:
            since = time.monotonic()
            print_safe(f"waiting      for capacity, at most {limit_s:g} s: {lacking}", file=sys.stderr)
        elif time.monotonic() - since > limit_s:
            raise ValueError(
                f"{lacking}; none came for {limit_s:g} s (VLA_NODES_TIMEOUT_S); {FREE_CAPACITY}; --resume goes on"
            )
        yield


def _largest() -> dict[str, float] | None:
    """The resources of the cluster at its largest; None where that is unknown."""
    resources = ray.cluster_resources()
    if _started_here():  # it stays as it is
        return resources
    most = ray._private.state.state.get_max_resources_from_cluster_config()
    if most is None:  # few autoscalers say
        return None
    return {name: max(resources.get(name, 0), most.get(name, 0)) for name in {*resources, *most}}


@dataclass(frozen=True)
class Wanted:
    """What must have capacity at once: `count` times the resources `bundle`, and `extra`; `text`: in words."""

    text: str
    count: int
    bundle: Mapping[str, float]
    extra: Mapping[str, float] = field(default_factory=dict)

    def beyond(self, cluster: Mapping[str, float]) -> str | None:
        """Return what a cluster of such resources lacks in all, in words; None if it has enough."""
        totals = {name: self.count * n + self.extra.get(name, 0) for name, n in self.bundle.items()}
        lacking = [
            f"{_in_words(k, n)}, {cluster.get(k, 0):g} found" for k, n in totals.items() if cluster.get(k, 0) < n
        ]
        return f"the cluster is too small for {self.text}: needs {'; '.join(lacking)}" if lacking else None


def _wanted(scaling: ScalingOptions) -> Wanted:
    """A run's fewest workers, what Ray gives to each, and a read task."""
    per_worker = {"CPU": scaling.cpus_per_worker}
    if scaling.use_gpu:
        per_worker["GPU"] = 1.0
    if scaling.accelerator_type:
        per_worker[f"{RESOURCE_CONSTRAINT_PREFIX}{scaling.accelerator_type}"] = 0.001  # as Ray Train asks for it
    workers = scaling.min_workers or scaling.num_workers
    share = " and ".join(_in_words(name, n) for name, n in per_worker.items())
    text = f"{_in_words('worker', workers)} with {share} each and one read task"
    return Wanted(text, workers, per_worker, {"CPU": scaling.cpus_per_read_task})


def _in_words(unit: str, n: float) -> str:
    if unit.startswith(RESOURCE_CONSTRAINT_PREFIX):
        return unit.removeprefix(RESOURCE_CONSTRAINT_PREFIX)
    return f"{n:g} {unit}{'s' * (n != 1)}"


def _without_capacity(demand: Wanted) -> str | None:
    """Return what this process's placement groups wait for in a cluster that is large enough; None for nothing."""
    job = ray.get_runtime_context().get_job_id()  # the last part of the ids of what it makes
    states = {group["state"] for id, group in placement_group_table().items() if id.endswith(job)}
    if not states & {"PENDING", "RESCHEDULING"}:
        return None
    return f"the cluster has no capacity for {demand.text}: others use it, or no node is large enough"


def connect() -> None:
    """Join the cluster that RAY_ADDRESS or a head node here names, and send it the code; or start one here.

    Raises ConnectionError: nothing answers where RAY_ADDRESS says.
    """
    if not ray.is_initialized():
        address = running_cluster()
        # Ray 2.60 warns that it protects its own cluster by a token, its default.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        ray.init(
            address=address or "local",
            runtime_env=runtime_env() if address else None,
            # What workers have to say goes to the run's own log, which `follow_progress` shows.
            logging_level=logging.WARNING,
            log_to_driver=False,
            include_dashboard=False,
        )


def running_cluster() -> str | None:
    """host:port of the cluster to join; None where there is none.

    Ray 2.60 waits minutes for a head node that is gone, and remembers its address when it died without saying so.
    Raises ConnectionError: nothing answers where RAY_ADDRESS says.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named and "://" in named:
        return named  # of Ray Client, or a provider's own
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
    """Return whether a run's workers are on this machine: no cluster is joined. Raises as `running_cluster`."""
    return _started_here() if ray.is_initialized() else running_cluster() is None


def _started_here() -> bool:
    node = ray._private.worker._global_node
    return node is not None and node.is_head()


def gpus_found(scaling: WorkerOptions, preset: str | None) -> int:
    """GPUs by which --scaling.use_gpu is decided where it is absent. The demo trains on any machine."""
    import torch

    decided = scaling.use_gpu is not None or scaling.accelerator_type is not None or preset == "demo"
    return torch.cuda.device_count() if decided else find_gpus("--scaling.use_gpu")


def find_gpus(flag: str) -> int:
    """GPUs of this machine, or of the cluster that this process has joined.

    Args:
        flag: what says it otherwise, for the message.
    Raises:
        ValueError: there are none, and a cluster is joined that may have some.
        ConnectionError: as `running_cluster`.
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
    """Ray's records of the nodes that live, the head among them."""
    return [node for node in ray.nodes() if node["Alive"]]


def runtime_env() -> dict[str, Any] | None:
    """Ray's description of what workers get: this project's code as their working directory.

    None in a submitted job that has a working directory already: Ray allows one. Holds no environment variables, which
    would show in Ray's logs and dashboard: tokens are among them.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    if (job.get("runtime_env") or {}).get("working_dir"):
        return None
    return {"working_dir": str(PROJECT), "excludes": _all_but_code()}


def _all_but_code() -> list[str]:
    """Patterns as in .gitignore, the last that matches counts: data, outputs, caches and secrets stay here."""
    package = Path(__file__).resolve().parents[1]
    inner = (path.parent.relative_to(package.parent) for path in package.rglob("__init__.py"))
    wings = sorted(str(folder) for folder in inner if folder.parts[1:])  # a folder before those in it
    inside = [(f"!/{folder}", f"/{folder}/*", f"!/{folder}/*.py") for folder in ("diagnostics", package.name, *wings)]
    return ["/*", "!/.", "!/*.py", *itertools.chain(*inside), f"!/{package.name}/report/templates"]


# ---- every node has what is needed --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What every node must have.

    Attributes:
        packages: installed packages and their versions.
        paths: what must exist, and whose it is: {path: words for a message}.
        cuda: the CUDA version that torch was built for, e.g. "13.0"; needed on nodes with GPUs. None: no GPUs needed.
        gpu_type: Ray's name of the GPUs that workers need; nodes with others have none of use. None: any.
        gpu_bytes: what a worker needs of its GPU, as planned; 0 where that is not known.
        free_bytes: free disk under Ray's temporary directory, where objects are spilled to and logs are written.
    """

    packages: Mapping[str, str]
    paths: Mapping[str, str]
    cuda: str | None
    free_bytes: int
    gpu_type: str | None = None
    gpu_bytes: int = 0

    def gpus(self, node: Node) -> float:
        """Return how many GPUs of a node the run may use."""
        has_type = self.gpu_type is None or f"{RESOURCE_CONSTRAINT_PREFIX}{self.gpu_type}" in node["Resources"]
        return node["Resources"].get("GPU", 0) if has_type else 0


def node_needs(scaling: WorkerOptions, roots: Iterable[str], policy_folder: Path | None, gpu_bytes: int = 0) -> Needs:
    """Return what a run needs on every node: the driver's versions, and the paths that the driver uses."""
    import torch

    hub = "; for what comes from the Hub, HF_HOME says where it lies"
    paths = {root: f"the dataset (--dataset.root{hub})" for root in roots if "://" not in root}
    if policy_folder is not None:
        paths[str(policy_folder)] = f"the policy (--policy.path{hub})"
    return Needs(
        packages={name: _public(importlib.metadata.version(name)) for name in PACKAGES},
        paths=paths,
        cuda=torch.version.cuda if scaling.use_gpu else None,
        free_bytes=FREE_DISK_BYTES,
        gpu_type=scaling.accelerator_type,
        gpu_bytes=gpu_bytes,
    )


def check_nodes(needs: Needs, output_dir: Path, nodes: Sequence[Node] | None = None) -> None:
    """Have each node that is there look whether it has what the run needs, before any GPU is held.

    Args:
        output_dir: where the run writes. Must exist here, and be the same folder on all nodes.
        nodes: as `alive_nodes()`, the default.
    Raises:
        ValueError: naming every node that lacks something, what it lacks, and what to do.
    """
    nodes = alive_nodes() if nodes is None else nodes
    with _marker(output_dir) as marker:
        seen = replace(needs, paths={**needs.paths, marker: f"{address(output_dir)} (--output_dir)"})
        lacks = _ask(nodes, seen)
    if lacks:
        raise ValueError(
            f"{len(lacks)} of {len(nodes)} nodes cannot take part:\n"
            + "\n".join(f"  node {node}: {fault}" for node, faults in lacks.items() for fault in faults)
        )


def _ask(nodes: Sequence[Node], needs: Needs) -> dict[str, list[str]]:
    """{node: what it lacks}, of those that lack something."""
    if len(nodes) == 1:
        # The driver's own machine: no process need be started to look at it.
        faults = probe(needs, needs.gpus(nodes[0]))
        return {_name(nodes[0]): faults} if faults else {}
    names = {node["NodeID"]: _name(node) for node in nodes}
    answers = _call_on_nodes({node["NodeID"]: partial(probe, needs, needs.gpus(node)) for node in nodes})
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=ANSWER_S)
    lacks = {}
    for node, answer in answers.items():
        try:
            faults = ray.get(answer, timeout=0)
        except GetTimeoutError:
            faults = [f"gave no answer in {ANSWER_S:g} s; look at it with `ray status` and in its logs, or take it out"]
        except RayError as error:
            faults = [f"cannot run this project's code: {str(error).strip().splitlines()[-1]}"]
        if faults:
            lacks[names[node]] = faults
    return lacks


def on_nodes[T](functions: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Call a function in a process of each of these nodes, by their ids; what they return. Raises what they raise."""
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
    """Return what this machine lacks, a sentence each. `gpus`: that the run may use; `temp_dir`: Ray's when None."""
    temp_dir = temp_dir or ray.get_runtime_context().get_temp_dir()
    lacks = []
    for name, required in needs.packages.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacks.append(f"{name} is not installed, the driver has {required}; install requirements.lock there")
            continue
        if _public(installed) != required:
            lacks.append(f"{name} is {installed}, the driver has {required}; install requirements.lock on both")
    lacks += _decoder_problems()
    if needs.cuda is not None and gpus and (problem := _cuda_problem(needs.cuda)):
        lacks.append(problem)
    if needs.gpu_bytes and gpus and (smallest := _gpu_bytes()) is not None and smallest < needs.gpu_bytes:
        lacks.append(
            f"a GPU has {smallest / 2**30:.1f} GiB, a worker needs {needs.gpu_bytes / 2**30:.1f} (planned); choose "
            "nodes with larger ones by --scaling.accelerator_type, or ask --dry_run with this type which flags fit"
        )
    for name, whose in needs.paths.items():
        try:
            pull(path := as_file(name))
        except OSError as error:
            lacks.append(f"cannot read {whose}: {error}")
            continue
        if not path.exists():
            lacks.append(f"does not see {whose}: no {name}; put it on storage that all nodes share, at the same path")
    free = shutil.disk_usage(temp_dir).free
    if free < needs.free_bytes:
        lacks.append(f"{free / 1e9:.1f} GB free in {temp_dir}, needs {needs.free_bytes / 1e9:.1f} GB; free some there")
    return lacks


def _decoder_problems() -> list[str]:
    """Return what PyAV here cannot decode."""
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
    """Why the NVIDIA driver here cannot serve a torch that was built for CUDA `built_for`; None when it can."""
    # Not by torch: Ray hides the GPUs from a task that holds none. Within a major version every driver will do.
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
    """Return what programs may use of the smallest GPU here; None where NVIDIA's library does not say."""
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
    """A file in `folder` while nodes look for it: a folder of the same name elsewhere does not have it."""
    marker = folder / f"seen-from-all-nodes-{uuid.uuid4().hex}.txt"
    marker.touch()
    push(marker)
    try:
        yield address(marker)
    finally:
        remove(marker)


def _name(node: Node) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"


def _public(version: str) -> str:
    """Without the build's own label: 2.11.0+cu130 and 2.11.0 agree about everything that is sent."""
    return version.partition("+")[0]


# ---- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataLimits:
    """How much of the cluster's shared memory the data may fill.

    Attributes:
        store_bytes: object stores of the nodes that run tasks. Ray sizes each by its node's memory and /dev/shm.
        idle_bytes: object stores of nodes without CPUs for tasks, such as a head that only runs the driver. Ray Data
            must not count them: it would have the others spill.
        spill_dir: where objects go that do not fit; on the node that this process runs on.
    """

    store_bytes: int
    idle_bytes: int
    spill_dir: Path

    @property
    def data_bytes(self) -> int:
        """Return what Ray Data may hold; above it, read tasks wait (backpressure)."""
        return round(DATA_SHARE * self.store_bytes)

    def execution_options(self) -> ExecutionOptions:
        """For `ray.train.DataConfig`. A share and not a number, so that nodes which join later add theirs."""
        from ray.data import DataContext, ExecutionOptions, ExecutionResources

        DataContext.get_current().override_object_store_memory_limit_fraction = DATA_SHARE
        options = ExecutionOptions(preserve_order=True)
        if self.idle_bytes:
            options.exclude_resources = ExecutionResources(object_store_memory=DATA_SHARE * self.idle_bytes)
        return options

    def lines(self, nodes: Sequence[Node]) -> list[str]:
        """The cluster, as lines of the plan."""
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
    """Limits for a cluster of `nodes` (as `alive_nodes()`)."""
    stores: dict[bool, float] = {True: 0, False: 0}
    for node in nodes:
        resources = node["Resources"]
        stores[resources.get("CPU", 0) > 0] += resources.get("object_store_memory", 0)
    return DataLimits(round(stores[True]), round(stores[False]), Path(spill_dir))
