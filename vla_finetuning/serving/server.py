"""Find and check the policies to serve, start the replicas, and listen until a signal stops the process."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.schema import ApplicationStatus, ReplicaState

from vla_finetuning.buckets.mirror import as_path
from vla_finetuning.environment import Timeouts
from vla_finetuning.options.fields import did_you_mean
from vla_finetuning.options.programs import ServeConfig
from vla_finetuning.options.serve import ServeOptions, read_token
from vla_finetuning.plan.base_policy import resolve_policy
from vla_finetuning.rollouts.player import PolicySource, check_acts
from vla_finetuning.rollouts.scheduler import TELL_AFTER_S
from vla_finetuning.run import cluster
from vla_finetuning.run.exported import exported_robots
from vla_finetuning.serving import lerobot, openpi
from vla_finetuning.serving.gateway import Gateway
from vla_finetuning.serving.observations import Interface
from vla_finetuning.serving.replicas import Batches, Replica
from vla_finetuning.terminal import print_safe


@dataclass(frozen=True)
class Service:
    """The policies to serve: interface and source of each robot's policy, by name; "" if there is only one robot."""

    config: ServeConfig
    interfaces: Mapping[str, Interface]
    sources: Mapping[str, PolicySource]


class Addresses(NamedTuple):
    """Where a server listens; `grpc` is the port of LeRobot's protocol, None if it is not served."""

    host: str
    port: int
    grpc: int | None


def resolve_service(config: ServeConfig) -> Service:
    """Find and check the policies of a folder or of the Hub. Raises ValueError or OSError with a remedy."""
    family = socket.AF_INET6 if ":" in config.serve.host else socket.AF_INET
    for flag, port in (("port", config.serve.port), ("grpc_port", config.serve.grpc_port)):
        try:
            socket.create_server((config.serve.host, port or 0), family=family).close()  # before weights are read
        except OSError as error:
            where = f"--serve.host={config.serve.host} --serve.{flag}={port}"
            raise OSError(f"{where}: cannot listen there ({error.strerror}): give another") from error
    path = config.policy_path or ""
    interfaces, sources = {}, {}
    for robot in exported_robots(as_path(path)) or [""]:
        policy, folder, _ = resolve_policy(config, f"{path}/{robot}" if robot else path)
        assert folder is not None  # --policy.path is required
        check_acts(policy)
        if "n_action_steps" not in config.policy_option_names:
            # Send whole chunks: clients choose how many actions they execute.
            vars(policy)["n_action_steps"] = len(policy.action_delta_indices or [0])
        interfaces[robot] = Interface.of_export(robot, folder, policy, config.rename_map)
        sources[robot] = PolicySource.of_export(folder, policy, config, env=None)
    inputs = list(dict.fromkeys(name for own in interfaces.values() for name in (*own.cameras, *own.vectors)))
    for name, target in config.rename_map.items():
        if target not in inputs:
            raise ValueError(
                f"--rename_map: {name!r} is to be {target!r}, which the policy does not see; it sees "
                f"{', '.join(inputs)}{did_you_mean(target, inputs)}"
            )
    return Service(config, interfaces, sources)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Addresses]:
    """Start the replicas on the connected cluster, and listen. Raises OSError if a port is taken.

    Raises RuntimeError if the replicas fail, or find no capacity within `Timeouts.nodes`.
    """
    config, options = service.config, service.config.serve
    # Unique in the cluster, and equal after a restart: a server that was killed is replaced.
    node = ray.get_runtime_context().get_node_id()
    name = f"policy-{node}-{options.host}-{options.port or uuid.uuid4().hex}"
    sources = service.sources
    if not cluster.is_local():
        sources = {robot: source.shared() for robot, source in sources.items()}
    on_gpu = any(source.device == "cuda" for source in sources.values())
    replica: Any = Replica  # a deployment, by its decorator
    deployment = replica.options(
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": int(on_gpu)},
        max_ongoing_requests=1,
    )
    application = deployment.bind(sources, options.cpus_per_replica)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Clients connect to this process, which checks the token; Serve's own ports stay closed.
    await asyncio.to_thread(serve.start, proxy_location=ProxyLocation.Disabled)
    timeouts, target = Timeouts.from_environment(), serve.RunTarget(application, name, route_prefix=None)
    deploying = asyncio.ensure_future(asyncio.to_thread(serve.run_many, [target], wait_for_applications_running=False))
    try:
        (handle,) = await asyncio.shield(deploying)
        each = f"{options.cpus_per_replica} CPU{'s' * (options.cpus_per_replica > 1)}{' and a GPU' * on_gpu}"
        await _wait_until_running(name, f"{options.replicas} replicas with {each} each", timeouts.nodes)
        batches = Batches(handle, options.replicas, options.batch_size, options.wait_ms / 1000, timeouts.worker)
        gateway = Gateway(service.interfaces, batches, config.seed, read_token())
        async with listening(gateway, options, partial(asyncio.to_thread, has_replica, name)) as addresses:
            yield addresses
    finally:
        await asyncio.wait([deploying])
        await asyncio.to_thread(serve.delete, name)


async def _wait_until_running(name: str, replicas: str, limit_s: float) -> None:
    """Wait until an application runs. Raises RuntimeError if it fails or takes longer than `limit_s`."""
    began, is_told = time.monotonic(), False
    while (app := (await asyncio.to_thread(serve.status)).applications[name]).status != ApplicationStatus.RUNNING:
        if app.status == ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError(f"the replicas do not start: {app.message}")
        free, total, waited_s = ray.available_resources(), ray.cluster_resources(), time.monotonic() - began
        idle = " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        if waited_s > limit_s:
            raise RuntimeError(
                f"{replicas} have not started for {limit_s:g} s (VLA_NODES_TIMEOUT_S); of the cluster {idle} are free: "
                "add nodes, or lower --serve.replicas"
            )
        if waited_s > TELL_AFTER_S and not is_told:
            print_safe(f"waiting      for {replicas}, at most {limit_s:g} s; {idle} are free", file=sys.stderr)
            is_told = True
        await asyncio.sleep(0.2)


@asynccontextmanager
async def listening(
    gateway: Gateway, options: ServeOptions, is_healthy: Callable[[], Awaitable[bool]]
) -> AsyncIterator[Addresses]:
    """Listen for both protocols. Raises OSError if a port is taken."""
    max_bytes = int(options.max_message_mb * 1e6)
    host = f"[{options.host}]" if ":" in options.host else options.host
    async with openpi.listening(gateway, options.host, options.port, max_bytes, is_healthy) as port:
        if options.grpc_port is None:
            yield Addresses(host, port, None)
            return
        async with lerobot.listening(gateway, host, options.grpc_port, max_bytes) as grpc_port:
            yield Addresses(host, port, grpc_port)


def has_replica(name: str) -> bool:
    """Return whether a replica of an application runs."""
    application = serve.status().applications.get(name)
    deployments = application.deployments.values() if application else []
    return any(deployment.replica_states.get(ReplicaState.RUNNING) for deployment in deployments)


async def serve_until_stopped(service: Service) -> None:
    """Serve until SIGINT or SIGTERM, which also end the start of replicas. Raises as `running`."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        async with running(service) as addresses:
            print_safe(
                *(f"openpi       ws://{addresses.host}:{addresses.port}/{robot}" for robot in service.interfaces),
                *([f"LeRobot      {addresses.host}:{addresses.grpc} (gRPC)"] if addresses.grpc else []),
                f"Health       http://{addresses.host}:{addresses.port}/healthz, and /metrics",
            )
            await asyncio.Event().wait()


def describe_service(service: Service) -> list[str]:
    """Return the plan's lines: inputs and outputs of each robot's policy, and the replicas."""
    lines = []
    for robot, interface in service.interfaces.items():
        inputs = [*interface.cameras, *(f"{name} ({width})" for name, width in interface.vectors.items())]
        lines.append(
            f"{f'Robot {robot}' if robot else 'Policy':12} {interface.policy_type}: {', '.join(inputs)} to "
            f"{interface.chunk_size} actions of {interface.action_width}"
        )
    options = service.config.serve
    device = "a GPU" if any(source.device == "cuda" for source in service.sources.values()) else "CPUs"
    lines.append(f"Replicas     {options.replicas} on {device}; batches of at most {options.batch_size}")
    return lines
